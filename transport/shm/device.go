package shm

import (
	"log/slog"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// The GPU's copy engines move GPU memory, and are efficient only with large batches: a mover takes
// every waiting pull, up to moveBytes, claims the chunks of all of them, and passes them to the
// device in one call. A batch is a fraction of a lane's bytes in flight; otherwise the link would
// be idle while the next batch is requested and made.
const (
	moveBytes  = maxInFlight * deviceSlice / 4
	moveJobs   = maxPulls
	movePieces = 8 * maxPieces
)

// onDevice reports whether GPU memory is on either side. A missing grant is detected at admission.
func (j *job) onDevice() bool {
	for _, m := range j.maps {
		if m.far() {
			return true
		}
	}
	g, _ := j.l.b.host.Grant(j.l.peer, j.slot, j.gen)
	return g != nil && g.Memory.Device() != nil
}

// batch is the current work of a mover.
type batch struct {
	jobs  []*job
	parts []part // of the jobs, one each

	// Blocks of all jobs: between two regions, and from the peer's host memory, which is mapped
	// here and is not a region of this process. dst and src have equally many bytes per job, and
	// may be divided differently.
	dst, src []mem.Block
	up       []upload

	links    Links
	to, from []mem.Block // blocks that links carry, like dst and src
}

// part is the part of a job in a batch.
type part struct {
	reason   transfer.Reason // none: it is moved, and its claim is entered
	dst, src span
	up       span
	to, from span
}

// span is a part of a list.
type span struct{ at, end int }

type upload struct {
	to   mem.Block
	from []byte
}

// mover moves pulls of device memory until the backend closes.
func (b *Backend) mover() {
	m := batch{links: b.cfg.Links}
	for {
		select {
		case j := <-b.far:
			m.jobs = append(m.jobs[:0], j)
		case d := <-b.cold:
			d.Warm()
			continue
		case <-b.stop:
			b.dropJobs(b.far)
			return
		}
		m.fill(b.far)
		m.run()
	}
}

// fill adds waiting pulls.
func (m *batch) fill(queue <-chan *job) {
	total, pieces := m.jobs[0].total, m.jobs[0].pieces
	for total < moveBytes && pieces < movePieces && len(m.jobs) < moveJobs {
		select {
		case j := <-queue:
			m.jobs = append(m.jobs, j)
			total += j.total
			pieces += j.pieces
		default:
			return
		}
	}
}

// run moves the batch and answers every pull of it.
//
// It first claims every pull and lists the chunks that are still to be written, then enters all
// claims. An attempt that takes over a claim waits for its writer with the grant's claims locked,
// so a writer must not use the grant's claims, not even for another pull of its batch.
func (m *batch) run() {
	m.parts, m.dst, m.src, m.up, m.to, m.from = m.parts[:0], m.dst[:0], m.src[:0], m.up[:0],
		m.to[:0], m.from[:0]
	for _, j := range m.jobs {
		p := part{reason: j.admit()}
		p.dst.at, p.src.at, p.up.at, p.to.at, p.from.at = len(m.dst), len(m.src), len(m.up),
			len(m.to), len(m.from)
		if p.reason == transfer.ReasonNone {
			p.reason = m.list(j)
		}
		if p.reason != transfer.ReasonNone { // a partial list is not moved
			m.dst, m.src, m.up = m.dst[:p.dst.at], m.src[:p.src.at], m.up[:p.up.at]
		}
		p.dst.end, p.src.end, p.up.end, p.to.end, p.from.end = len(m.dst), len(m.src), len(m.up),
			len(m.to), len(m.from)
		m.parts = append(m.parts, p)
	}
	kept, carried := 0, 0
	for i, j := range m.jobs {
		p := &m.parts[i]
		if p.reason == transfer.ReasonNone {
			p.reason = j.claim.Enter()
		}
		if p.reason == transfer.ReasonNone {
			kept += p.dst.end - p.dst.at
			carried += p.to.end - p.to.at
		}
	}
	// All at once, unless pieces of some job must be left out.
	together := kept == len(m.dst) && kept > 0 && deviceOf(m.dst, m.src).Move(m.dst, m.src) == nil
	linked := carried == len(m.to) && carried > 0 && m.links.Carry(m.to, m.from) == nil
	for i, j := range m.jobs {
		p := &m.parts[i]
		if p.reason == transfer.ReasonNone {
			if err := m.one(p, together, linked); err != nil {
				j.l.b.faults.Note(slog.LevelWarn, "shm device copy", "peer", j.l.peer, "slot", j.slot,
					"err", err)
				p.reason = transfer.ReasonMemory
			}
			j.claim.Leave()
		}
	}
	for i, j := range m.jobs {
		l := j.l
		j.finish(m.parts[i].reason)
		if i+1 == len(m.jobs) || m.jobs[i+1].l != l {
			l.out.kick()
		}
	}
	// releases the memory that jobs refer to; lists of pieces only refer to regions, which are
	// small
	clear(m.jobs)
}

// one moves a job's part of the batch, unless it was moved with the others: a device refuses the
// whole call if it refuses one block, and the other jobs must not suffer. Blocks that links do not
// carry go through buffers.
func (m *batch) one(p *part, moved, carried bool) error {
	if to, from := m.to[p.to.at:p.to.end], m.from[p.from.at:p.from.end]; !carried && len(to) > 0 &&
		m.links.Carry(to, from) != nil {
		if err := deviceOf(to, from).Move(to, from); err != nil {
			return err
		}
	}
	dst, src := m.dst[p.dst.at:p.dst.end], m.src[p.src.at:p.src.end]
	if !moved && len(dst) > 0 {
		if err := deviceOf(dst, src).Move(dst, src); err != nil {
			return err
		}
	}
	return uploadAll(m.up[p.up.at:p.up.end])
}

// deviceOf finds the device of blocks of which some are GPU memory.
func deviceOf(dst, src []mem.Block) mem.Device {
	if d := mem.DeviceOf(src); d != nil {
		return d
	}
	return mem.DeviceOf(dst)
}

// list adds the chunks of a pull that have not landed yet.
func (m *batch) list(j *job) transfer.Reason {
	if n, fresh := j.claim.Fresh(j.r); fresh && n == j.r.Count {
		imported := j.imported()
		if imported || m.links != nil && !j.pushed {
			dst, src := len(m.dst), len(m.src)
			if reason := m.whole(j); reason != transfer.ReasonNone {
				return reason
			}
			// Once nothing holds the guard, links forget the grant's memory and must not be used for
			// it any more.
			if !j.grant.Enter() {
				return transfer.ReasonRevoked
			}
			carried := m.carries(dst, src)
			j.grant.Leave()
			if carried || imported {
				return transfer.ReasonNone
			}
			m.dst, m.src = m.dst[:dst], m.src[:src] // through a buffer
		}
	}
	if reason := j.resolve(); reason != transfer.ReasonNone {
		return reason
	}
	c := cursor{job: j, cells: j.cells}
	return j.walk(func(bytes uint64, fresh bool) transfer.Reason {
		err := c.each(bytes, func(d mem.Block, s sourcePiece) error {
			switch {
			case !fresh:
			case !s.m.far():
				m.up = append(m.up, upload{d, s.m.bytes[s.off:][:s.len]})
			default:
				m.dst = append(m.dst, d)
				m.src = append(m.src, mem.Block{Region: s.m.region, Off: s.off, Len: s.len})
			}
			return nil
		})
		if err != nil {
			return transfer.ReasonRange
		}
		return transfer.ReasonNone
	})
}

// carries reports whether links carry the rest of dst and src, between host memory and a GPU, and
// moves those blocks to the links' lists.
func (m *batch) carries(dst, src int) bool {
	to, from := m.dst[dst:], m.src[src:]
	if m.links == nil || len(to) == 0 || (to[0].Region.Device() == nil) == (from[0].Region.Device() ==
		nil) || !m.links.Reaches(to, from) {
		return false
	}
	m.to, m.from = append(m.to, to...), append(m.from, from...)
	m.dst, m.src = m.dst[:dst], m.src[:src]
	return true
}

// imported reports whether all of the peer's memory is GPU memory.
func (j *job) imported() bool {
	for _, m := range j.maps {
		if !m.far() {
			return false
		}
	}
	return true
}

// whole adds all of a pull, which is the common case: each side's blocks unchanged, since a device
// walks two lists together.
func (m *batch) whole(j *job) transfer.Reason {
	dst, err := j.grant.Memory.Resolve(m.dst, j.r)
	if err != nil {
		return transfer.ReasonRange
	}
	bytes := uint64(0)
	for i := range dst[len(m.dst):] {
		bytes += dst[len(m.dst)+i].Len
	}
	if bytes != j.total { // or the blocks of later jobs would be misaligned
		return transfer.ReasonRange
	}
	m.dst = dst
	at := len(m.src)
	m.src = slices.Grow(m.src, int(j.pieces))[:at+int(j.pieces)]
	var r run
	var region *mem.Region
	for cells := j.cells; len(cells) > 0; {
		index := r.region
		if cells, err = r.next(cells); err != nil {
			return transfer.ReasonRange
		}
		if region == nil || r.region != index {
			region = j.find(r.region).region
		}
		for range r.Rows {
			off := r.off
			for range r.Count {
				b := &m.src[at]
				b.Region, b.Off, b.Len = region, off, uint64(r.len)
				off += r.Stride
				at++
			}
			r.off += r.Outer
		}
		for len(cells) > 0 { // like sourceLocked
			of, length, off := cellAt(cells)
			if of != r.region || length >= wire.RunFlag {
				break
			}
			b := &m.src[at]
			b.Region, b.Off, b.Len = region, off, uint64(length)
			at++
			cells = cells[cellBytes:]
		}
	}
	return transfer.ReasonNone
}

// plain has buffers for devices without their own.
var plain = sync.Pool{New: func() any { b := make([]byte, maxPullBytes); return &b }}

// uploadAll gathers host memory in a buffer before it goes to the device: a call per block would
// wait for the device each time.
func uploadAll(ups []upload) error {
	if len(ups) == 0 {
		return nil
	}
	var buf []byte
	if dev := ups[0].to.Region.Device(); dev != nil {
		if buf = dev.Lend(); buf != nil {
			defer dev.Return(buf)
		}
	}
	if buf == nil {
		p := plain.Get().(*[]byte)
		defer plain.Put(p)
		buf = *p
	}
	var blocks []mem.Block
	n := 0
	for _, u := range ups {
		if n+len(u.from) > len(buf) {
			if err := mem.Scatter(blocks, buf[:n]); err != nil {
				return err
			}
			blocks, n = blocks[:0], 0
		}
		if len(u.from) > len(buf) {
			if err := u.to.Region.WriteAt(u.from, u.to.Off); err != nil {
				return err
			}
			continue
		}
		n += mem.Copy(buf[n:], u.from)
		blocks = append(blocks, u.to)
	}
	return mem.Scatter(blocks, buf[:n])
}
