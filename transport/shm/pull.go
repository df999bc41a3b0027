package shm

import (
	"fmt"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

const (
	// guardBytes are copied under one hold of the grant's guard: 10 to 40 us, the time for which a
	// fence may have to wait.
	guardBytes = 128 << 10
	// inlineBytes are copied by the reader itself: a hand-over costs more than the copy.
	inlineBytes = 128 << 10
	// batchAnswers bounds the answers that a copier holds back while it has more to copy.
	batchAnswers = 4
)

// destination is the receiving half of a lane.
type destination struct {
	l   *lane
	fds []int // of the current packet; the reader's

	mu sync.Mutex
	// guarded by mu
	ended   bool
	regions map[uint32]*mapping
	jobs    map[uint64]*job // by tag, from the pull to the verdict
	free    []*job

	landing sync.WaitGroup // landings of movers; end waits for them: nothing lands after LaneDown
}

// job is one pull or push at its destination.
type job struct {
	l      *lane
	tag    uint64
	slot   transfer.Slot
	gen    transfer.Gen
	r      transfer.Range
	cells  []byte // of the pull, checked: every piece lies in its mapping
	maps   []held // referenced until the copy is over
	total  uint64 // bytes
	pieces uint64
	copied bool // guarded by destination.mu
	grant  *transport.Grant
	claim  transport.Claim // the right to write the chunks; from the copy to the verdict
	blocks []mem.Block

	attempt uint32
	pushed  bool    // by a push: its bytes are in sent, and no verdict follows
	sent    mapping // used by this job only
	kept    []byte  // of sent, if the packet's memory does not last
}

// held is a mapping that a pull names, by the peer's index.
type held struct {
	index uint32
	*mapping
}

// sourcePiece is a piece of the peer's memory, or a part of one.
type sourcePiece struct {
	m        *mapping
	off, len uint64
}

func (d *destination) init(l *lane) {
	d.l, d.regions, d.jobs = l, map[uint32]*mapping{}, map[uint64]*job{}
}

func (d *destination) closeFDs() {
	for _, fd := range d.fds {
		closeFD(fd)
	}
	d.fds = nil
}

// region maps a region that the peer passed. A refused region is remembered: pulls of it are
// refused, and the lane stays up.
func (d *destination) region(f regionFrame) error {
	if len(d.fds) == 0 {
		return fmt.Errorf("%w: region %s without its descriptor", errFrame, f.id)
	}
	fd := d.fds[0]
	d.fds = d.fds[1:]
	m, err := d.l.b.maps.open(mapKey{d.l.peer, f.id}, fd, f.size)
	if err != nil {
		d.l.b.cfg.Log.Warn("shm region refused", "peer", d.l.peer, "err", err)
	}
	return d.learn(f.index, m)
}

// device imports GPU memory that the peer passed; a refusal is remembered as in region.
func (d *destination) device(f deviceFrame) error {
	fd := -1
	if f.hasFD {
		if len(d.fds) == 0 {
			return fmt.Errorf("%w: region %s without its descriptor", errFrame, f.id)
		}
		fd, d.fds = d.fds[0], d.fds[1:]
	}
	m, err := d.l.b.maps.openDevice(mapKey{d.l.peer, f.id}, d.l.b.cfg.Devices, f.handle, fd, f.size)
	if err != nil {
		d.l.b.cfg.Log.Warn("shm region refused", "peer", d.l.peer, "err", err)
	}
	return d.learn(f.index, m)
}

// maxWarm bounds the GPUs that wait to be warmed.
const maxWarm = 8

// warm makes a mover prepare the GPUs of the peer's memory for short copies, because the reader
// must not wait for a driver.
func (d *destination) warm() {
	var devices [maxWarm]mem.Device
	n := 0
	d.mu.Lock()
	for _, m := range d.regions {
		if m != nil && m.far() && n < maxWarm && !slices.Contains(devices[:n], m.region.Device()) {
			devices[n] = m.region.Device()
			n++
		}
	}
	d.mu.Unlock()
	for _, dev := range devices[:n] {
		if w, ok := dev.(mem.Warmer); ok {
			select {
			case d.l.b.cold <- w:
				d.l.handed = true
			default:
			}
		}
	}
}

// learn records a region, or its refusal, under the peer's index.
func (d *destination) learn(index uint32, m *mapping) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, dup := d.regions[index]; dup || len(d.regions) >= maxRegions {
		if m != nil {
			d.l.b.maps.release(m)
		}
		return fmt.Errorf("%w: region index %d is in use, or exceeds %d", errFrame, index, maxRegions)
	}
	d.regions[index] = m
	return nil
}

func (d *destination) forget(index uint32) error {
	d.mu.Lock()
	m, ok := d.regions[index]
	delete(d.regions, index)
	d.mu.Unlock()
	if !ok {
		return fmt.Errorf("%w: region index %d is unknown", errFrame, index)
	}
	if m != nil {
		d.l.b.maps.release(m)
	}
	return nil
}

// jobLocked makes the job of a pull or push.
func (d *destination) jobLocked(f pullFrame) (*job, error) {
	if _, dup := d.jobs[f.tag]; dup || len(d.jobs) >= maxPulls {
		return nil, fmt.Errorf("%w: pull %#x is open already, or exceeds %d pulls", errFrame, f.tag, maxPulls)
	}
	var j *job
	if n := len(d.free); n > 0 {
		j, d.free = d.free[n-1], d.free[:n-1]
	} else {
		j = &job{}
	}
	j.l, j.tag, j.slot, j.gen, j.r, j.attempt = d.l, f.tag, f.slot, f.gen, f.r, f.attempt
	j.cells, j.maps, j.blocks, j.total, j.pieces, j.copied, j.grant, j.pushed = j.cells[:0], j.maps[:0], j.blocks[:0], 0, 0, false, nil, false
	d.jobs[f.tag] = j
	return j, nil
}

func (d *destination) pull(f pullFrame) error {
	d.mu.Lock()
	j, err := d.jobLocked(f)
	if err != nil {
		d.mu.Unlock()
		return err
	}
	reason, err := d.sourceLocked(j, f.cells)
	d.mu.Unlock()
	queue := d.l.b.jobs
	if reason == transfer.ReasonNone && j.onDevice() {
		queue = d.l.b.far
	}
	switch {
	case err != nil:
		j.finish(transfer.ReasonLaneLost)
		return err
	case reason != transfer.ReasonNone:
		j.finish(reason)
	case queue == d.l.b.jobs && j.total <= inlineBytes && len(d.l.b.jobs) == 0:
		j.finish(j.copy())
	default:
		select {
		case queue <- j:
			d.l.handed = true
		case <-d.l.b.stop:
			j.finish(transfer.ReasonLaneLost)
		}
	}
	return nil
}

// push accepts bytes in their frame. They are one piece of a region that only the job uses.
func (d *destination) push(f pullFrame) error {
	d.mu.Lock()
	j, err := d.jobLocked(f)
	d.mu.Unlock()
	if err != nil {
		return err
	}
	j.pushed, j.total, j.pieces = true, uint64(len(f.cells)), 1
	j.cells = appendRun(j.cells, &run{len: uint32(len(f.cells)), Strides: mem.Single})
	j.maps = append(j.maps, held{0, &j.sent})
	if !j.onDevice() {
		j.sent.bytes = f.cells
		j.finish(j.copy())
		return nil
	}
	j.kept = append(j.kept[:0], f.cells...)
	j.sent.bytes = j.kept
	select {
	case d.l.b.far <- j:
		d.l.handed = true
	case <-d.l.b.stop:
		j.finish(transfer.ReasonLaneLost)
	}
	return nil
}

// sourceLocked checks the runs against the mapped regions, and keeps them unchanged: they become
// pieces when they are copied. An error means a malformed frame, and ends the lane.
func (d *destination) sourceLocked(j *job, cells []byte) (transfer.Reason, error) {
	var m *mapping
	var size, total, pieces uint64
	var r run
	for rest := cells; len(rest) > 0; {
		index := r.region
		var err error
		if rest, err = r.next(rest); err != nil {
			return 0, err
		}
		if m == nil || r.region != index {
			if m = d.regions[r.region]; m == nil {
				return transfer.ReasonMemory, nil
			}
			size = m.size()
			j.hold(r.region, m)
		}
		n := uint64(r.len)
		if n == 0 || r.off > size || n > size-r.off || r.Count > 1 && !r.Inside(r.off, n, size) {
			return transfer.ReasonRange, nil
		}
		// The pieces of two axes may be any 64-bit number. If they are few, their bytes are below
		// 2^46, and the sum is checked before the next ones are added.
		k := r.Pieces()
		if k > maxPieces-pieces {
			return transfer.ReasonLength, nil
		}
		pieces += k
		if total += k * n; total > maxLen {
			return transfer.ReasonLength, nil
		}
		// Single pieces, the form of small blocks; the code above handles everything else.
		for len(rest) > 0 && pieces < maxPieces {
			region, length, off := cellAt(rest)
			n := uint64(length)
			if region != r.region || length-1 >= runFlag-1 || off > size || n > size-off || n > maxLen-total {
				break
			}
			total += n
			pieces++
			rest = rest[cellBytes:]
		}
	}
	j.total, j.pieces = total, pieces
	j.cells = append(j.cells, cells...)
	return transfer.ReasonNone, nil
}

func (j *job) hold(index uint32, m *mapping) {
	if j.find(index) != nil {
		return
	}
	j.l.b.maps.acquire(m)
	j.maps = append(j.maps, held{index, m})
}

func (j *job) find(index uint32) *mapping {
	for i := range j.maps {
		if j.maps[i].index == index {
			return j.maps[i].mapping
		}
	}
	return nil
}

// copier copies the jobs that readers pass to it.
func (b *Backend) copier() {
	waiting, owner := 0, (*lane)(nil) // answers of a lane that are not sent yet
	flush := func() {
		if owner != nil {
			owner.out.kick()
		}
		waiting, owner = 0, nil
	}
	for {
		var j *job
		select {
		case j = <-b.jobs:
		default:
			flush()
			select {
			case j = <-b.jobs:
			case <-b.stop:
				b.dropJobs(b.jobs)
				return
			}
		}
		if owner != j.l || waiting >= batchAnswers {
			flush()
		}
		owner = j.l
		waiting++
		j.finish(j.copy())
	}
}

func (b *Backend) dropJobs(queue chan *job) {
	for {
		select {
		case j := <-queue:
			j.finish(transfer.ReasonLaneLost)
		default:
			return
		}
	}
}

// admit checks the pull against its grant and claims the chunks.
func (j *job) admit() transfer.Reason {
	g, reason := j.l.b.host.Grant(j.l.peer, j.slot, j.gen)
	if g == nil {
		return reason
	}
	j.grant = g
	want, err := g.Sink.Bytes(j.r)
	if err != nil {
		return transfer.ReasonRange
	}
	if want != j.total {
		return transfer.ReasonLength
	}
	return g.Claim(&j.claim, j.r, j.attempt)
}

// resolve finds the grant's memory.
func (j *job) resolve() transfer.Reason {
	var err error
	if j.blocks, err = j.grant.Sink.Resolve(j.blocks[:0], j.r); err != nil {
		return transfer.ReasonRange
	}
	return transfer.ReasonNone
}

// copy moves the bytes into the grant's memory, or returns why it did not.
func (j *job) copy() transfer.Reason {
	if reason := j.admit(); reason != transfer.ReasonNone {
		return reason
	}
	if reason := j.resolve(); reason != transfer.ReasonNone {
		return reason
	}
	// Chunks that landed from another attempt are skipped: they are never written again.
	c := cursor{job: j, cells: j.cells}
	for rest := j.r; rest.Count > 0; {
		n, fresh := j.claim.Fresh(rest)
		bytes, err := j.grant.Sink.Bytes(transfer.Range{First: rest.First, Count: n})
		if err != nil {
			return transfer.ReasonRange
		}
		if reason := c.run(bytes, fresh); reason != transfer.ReasonNone {
			return reason
		}
		rest.First += n
		rest.Count -= n
	}
	return transfer.ReasonNone
}

// run copies the next n bytes, or skips them.
func (c *cursor) run(n uint64, fresh bool) transfer.Reason {
	for n > 0 {
		k := min(n, guardBytes)
		if fresh {
			if reason := c.claim.Enter(); reason != transfer.ReasonNone {
				return reason
			}
		}
		err := c.advance(k, fresh)
		if fresh {
			c.claim.Leave()
		}
		if err != nil {
			c.l.b.cfg.Log.Warn("shm copy", "peer", c.l.peer, "slot", c.slot, "err", err)
			return transfer.ReasonMemory
		}
		n -= k
	}
	return transfer.ReasonNone
}

// cursor walks the pieces of both sides together.
type cursor struct {
	*job
	cells      []byte // of the source, after from
	from       run
	at         mem.Offsets // of the current piece of from
	more       bool        // there is one
	m          *mapping    // of from
	di         int
	soff, doff uint64 // in the current piece of each
}

// advance moves the next n bytes, with the claim entered, or skips them.
func (c *cursor) advance(n uint64, write bool) error {
	return c.each(n, func(d mem.Block, s sourcePiece) error {
		if !write {
			return nil
		}
		from := s.m.bytes[s.off:][:s.len]
		// A mapped region is copied into directly; a region of another process needs a system call.
		if p, ok := d.Bytes(); ok {
			mem.Copy(p, from)
			return nil
		}
		return d.Region.WriteAt(from, d.Off)
	})
}

// each calls f for the next n bytes, cut where the pieces of either side end.
func (c *cursor) each(n uint64, f func(d mem.Block, s sourcePiece) error) error {
	for n > 0 {
		if !c.source() || c.di >= len(c.blocks) {
			return fmt.Errorf("shm: the blocks of chunks [%d, +%d) hold fewer bytes than their length", c.r.First, c.r.Count)
		}
		d, size := &c.blocks[c.di], uint64(c.from.len)
		k := min(n, size-c.soff, d.Len-c.doff)
		if err := f(mem.Block{Region: d.Region, Off: d.Off + c.doff, Len: k}, sourcePiece{c.m, c.at.Off + c.soff, k}); err != nil {
			return err
		}
		n -= k
		if c.soff += k; c.soff == size {
			c.soff = 0
			c.more = c.at.Next(&c.from.Strides)
		}
		if c.doff += k; c.doff == d.Len {
			c.di, c.doff = c.di+1, 0
		}
	}
	return nil
}

// source ensures that from has a piece left.
func (c *cursor) source() bool {
	if c.more {
		return true
	}
	if len(c.cells) == 0 {
		return false
	}
	index := c.from.region
	var err error
	if c.cells, err = c.from.next(c.cells); err != nil { // already checked
		return false
	}
	if c.m == nil || c.from.region != index {
		c.m = c.find(c.from.region)
	}
	c.at.Start(c.from.off, &c.from.Strides)
	c.more = true
	return true
}

// finish answers the pull; after a copy the job stays until the verdict.
func (j *job) finish(reason transfer.Reason) {
	l, d := j.l, &j.l.dst
	if j.pushed {
		j.land(reason)
		return
	}
	for _, m := range j.maps {
		l.b.maps.release(m.mapping)
	}
	clear(j.maps)
	j.maps = j.maps[:0]
	tag := j.tag
	d.mu.Lock()
	gone := d.ended
	if reason == transfer.ReasonNone && !gone {
		j.copied = true
	} else {
		d.dropLocked(j)
	}
	d.mu.Unlock()
	if gone {
		return
	}
	if reason != transfer.ReasonNone {
		l.b.host.Refused(l, reason)
	}
	var buf [frameHeader + pulledBytes]byte
	l.out.put(appendPulled(buf[:0], tag, reason), -1)
}

// dropLocked ends a job and recycles it.
func (d *destination) dropLocked(j *job) {
	delete(d.jobs, j.tag)
	j.claim.Release()
	j.grant, j.sent.bytes = nil, nil
	clear(j.blocks)
	if len(d.free) < maxInFlight {
		d.free = append(d.free, j)
	}
}

func (d *destination) verdict(tag uint64, valid bool) error {
	d.mu.Lock()
	j := d.jobs[tag]
	if j == nil || !j.copied {
		d.mu.Unlock()
		return fmt.Errorf("%w: a verdict on pull %#x, which was not copied", errFrame, tag)
	}
	d.mu.Unlock()
	if !valid {
		d.mu.Lock()
		d.dropLocked(j)
		d.mu.Unlock()
		d.l.b.host.Refused(d.l, transfer.ReasonDisowned)
		return nil // the source has ended it
	}
	j.land(transfer.ReasonNone)
	return nil
}

// land ends a job whose bytes are in place and valid, or, with a reason, a push whose bytes are
// not.
func (j *job) land(reason transfer.Reason) {
	l, d, tag := j.l, &j.l.dst, j.tag
	o := transfer.Landed
	d.mu.Lock()
	gone := d.ended
	if !gone {
		d.landing.Add(1)
		defer d.landing.Done()
	}
	d.mu.Unlock()
	if reason == transfer.ReasonNone && !gone {
		reason = j.claim.Land(l)
	}
	d.mu.Lock()
	d.dropLocked(j)
	d.mu.Unlock()
	if gone {
		return
	}
	if reason != transfer.ReasonNone {
		l.b.host.Refused(l, reason)
		o = transfer.Rejected
	}
	var buf [frameHeader + confirmBytes]byte
	l.out.put(appendConfirm(buf[:0], tag, o, reason), -1)
}

// end releases everything; copies in progress finish and are not answered.
func (d *destination) end() {
	d.closeFDs()
	d.mu.Lock()
	d.ended = true
	regions := d.regions
	d.regions = map[uint32]*mapping{}
	for _, j := range d.jobs {
		if j.copied {
			j.claim.Release()
		}
	}
	clear(d.jobs)
	d.mu.Unlock()
	d.landing.Wait()
	for _, m := range regions {
		if m != nil {
			d.l.b.maps.release(m)
		}
	}
}
