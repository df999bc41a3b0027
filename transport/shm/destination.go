package shm

import (
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
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
		d.l.b.faults.Note(slog.LevelWarn, "shm region refused", "peer", d.l.peer, "err", err)
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
		d.l.b.faults.Note(slog.LevelWarn, "shm region refused", "peer", d.l.peer, "err", err)
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
				d.l.hints.handed = true
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
		return nil, fmt.Errorf("%w: pull %#x is open already, or exceeds %d pulls", errFrame,
			f.tag, maxPulls)
	}
	var j *job
	if n := len(d.free); n > 0 {
		j, d.free = d.free[n-1], d.free[:n-1]
	} else {
		j = &job{}
	}
	j.l, j.tag, j.slot, j.gen, j.r, j.attempt = d.l, f.tag, f.slot, f.gen, f.r, f.attempt
	j.cells, j.maps, j.blocks, j.total, j.pieces, j.copied, j.grant, j.pushed = j.cells[:0],
		j.maps[:0], j.blocks[:0], 0, 0, false, nil, false
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
			d.l.hints.handed = true
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
		d.l.hints.handed = true
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
			if region != r.region || length-1 >= wire.RunFlag-1 || off > size || n > size-off ||
				n > maxLen-total {
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
		d.l.b.host.Refused(d.l, transfer.ReasonInvalidated)
		return nil // the source has ended it
	}
	j.land(transfer.ReasonNone)
	return nil
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
