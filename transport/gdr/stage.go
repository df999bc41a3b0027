package gdr

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

const (
	// maxSlabs is the number of slices of one lane, GPU and direction that are between host memory
	// and the GPU, or on the wire, at a time. More slices wait for a slab.
	maxSlabs = 4
	// idleSlabs is the time after which a slab returns to the GPU, for other lanes and transports.
	idleSlabs = time.Second
	// maxSlabBytes bounds the slabs of all lanes of a device: they are locked memory, and peers
	// choose the number of slices.
	maxSlabBytes = 1 << 30
)

// stageName identifies a stage of a lane.
type stageName struct {
	device mem.Device // nil: memory of another process
	remote bool       // for the peer's writes; else for reads by the own NIC
}

// stage has the slabs of one lane for one device and direction. A source's slab needs nothing of
// the peer to become free, and a destination's only a source's: no two lanes wait for each other.
type stage struct {
	l      *lane
	name   stageName
	places chan struct{} // a token for each slab that exists
	free   chan *slab
	none   chan struct{} // wakes one of those that wait for a slab when there is none any more
}

// slab is host memory for one slice: a pinned buffer of the device, or, while it lends none or the
// slice is larger, memory of this process. Its key belongs to this lane's peer, so no other peer
// can write into it, and the buffer returns to the device after the key has ended.
type slab struct {
	s      *stage
	region *mem.Region
	key    *key
	last   time.Time // of its last use
}

func (l *lane) stage(name stageName) *stage {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stages[name]
	if s == nil {
		s = &stage{l: l, name: name, places: make(chan struct{}, maxSlabs),
			free: make(chan *slab, maxSlabs), none: make(chan struct{}, 1)}
		if l.stages == nil {
			l.stages = map[stageName]*stage{}
		}
		l.stages[name] = s
	}
	return s
}

// takeSlab returns a slab of at least n bytes; release ends its use. It waits for one while the
// lane lives and has slabs.
func (l *lane) takeSlab(name stageName, n uint64) (*slab, error) {
	if n > sliceBytes {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", errLong, n, sliceBytes)
	}
	s := l.stage(name)
	for {
		var x *slab
		select {
		case x = <-s.free:
		default:
			select {
			case x = <-s.free:
			case s.places <- struct{}{}:
				made, err := s.newSlab(n)
				if err == nil || len(s.places) == 0 {
					return made, err
				}
				// The device has room for fewer: wait for one of them. None may become free: those
				// that are being made may fail, too.
				select {
				case x = <-s.free:
				case <-s.none:
					continue
				case <-l.settled:
					return nil, err
				}
			case <-l.settled:
				return nil, fmt.Errorf("gdr: lane %d: %w", l.id, net.ErrClosed)
			}
		}
		if x.fits(n) {
			return x, nil
		}
		x.drop()
	}
}

// leave gives a place back. With the last one it wakes a waiter, which wakes the next one if it
// gets no slab either.
func (s *stage) leave() {
	<-s.places
	if len(s.places) > 0 {
		return
	}
	select {
	case s.none <- struct{}{}:
	default:
	}
}

// newSlab makes a slab, and gives its place back if it fails.
func (s *stage) newSlab(n uint64) (_ *slab, err error) {
	var r *mem.Region
	counted := false
	defer func() {
		if err == nil {
			return
		}
		if counted {
			s.l.dev.uncountSlab(r.Size())
		}
		if r != nil {
			r.Release()
		}
		s.leave()
	}()
	if d := s.name.device; d != nil && n <= uint64(d.LendBytes()) {
		r = mem.Lent(d)
	}
	if r == nil {
		if r, err = mem.NewAnonymous("gdr-stage", sliceBytes); err != nil {
			return nil, fmt.Errorf("gdr: lane %d: %w", s.l.id, err)
		}
	}
	if counted = s.l.dev.countSlab(r.Size()); !counted {
		return nil, fmt.Errorf("gdr: lane %d: the slabs of %s have %d bytes: %w", s.l.id, s.l.dev.Name(),
			maxSlabBytes, verbs.ErrFull)
	}
	k, err := s.l.dev.keys.get(keyName{r, s.l.peer, s.name.remote}, true)
	if err != nil {
		return nil, err
	}
	return &slab{s: s, region: r, key: k}, nil
}

// fits: the slab has room, and its key has not ended.
func (x *slab) fits(n uint64) bool { return n <= x.region.Size() && x.key.current() }

// bytes are the first n of the slab.
func (x *slab) bytes(n uint64) []byte {
	p, _ := x.region.Bytes()
	return p[:n]
}

// release ends the use of a slab. The NIC reads and writes nothing of it any more, except what a
// hostile peer writes.
func (x *slab) release() {
	x.last = time.Now()
	x.s.free <- x
}

// drop ends a slab's key and then returns its memory. If the device keeps the key, it keeps the
// memory, too.
func (x *slab) drop() {
	x.key.put()
	_ = x.key.invalidate() // a failure is tried again
	x.region.Release()
	x.s.l.dev.uncountSlab(x.region.Size())
	x.s.leave()
}

// countSlab adds n bytes to the device's slabs, unless they would be too large.
func (d *openDevice) countSlab(n uint64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n > maxSlabBytes-min(d.slabs, maxSlabBytes) {
		return false
	}
	d.slabs += n
	return true
}

func (d *openDevice) uncountSlab(n uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.slabs -= n
}

// trimStages drops the slabs that are idle, or of no further use; all: every one.
func (l *lane) trimStages(now time.Time, all bool) {
	l.trimming.Lock()
	defer l.trimming.Unlock()
	l.mu.Lock()
	stages := make([]*stage, 0, len(l.stages))
	for _, s := range l.stages {
		stages = append(stages, s)
	}
	l.mu.Unlock()
	for _, s := range stages {
		for range len(s.free) {
			select {
			case x := <-s.free:
				if all || now.Sub(x.last) > idleSlabs || !x.fits(0) {
					x.drop()
				} else {
					s.free <- x
				}
			default:
			}
		}
	}
}

// fill copies a slice of memory that the NIC does not read into a slab, for the NIC to read.
func (s *sending) fill(l *lane) (why transfer.Reason, err error) {
	o := s.s.Origin
	s.slab, err = l.takeSlab(stageName{o.Memory.Device(), false}, s.bytes)
	switch {
	case errors.Is(err, errLong):
		return transfer.ReasonLength, err
	case err != nil:
		return transfer.ReasonMemory, err
	}
	s.trip.start(time.Now())
	if why, err = o.Gather(s.slab.bytes(s.bytes), s.s.Range, &s.blocks); err != nil {
		if why == transfer.ReasonMemory {
			s.trip.fault(err)
		}
		return why, fmt.Errorf("gdr: %w", err)
	}
	s.src = s.slab.key.spans(s.src[:0], 0, s.bytes, false)
	return transfer.ReasonNone, nil
}

// stageOffer offers the peer a slab in place of memory that the NIC does not write: its bytes lie
// there as in the slice, with gaps for chunks that have landed.
func (dst *destination) stageOffer(g *transport.Grant, h *head, r *receiving) (err error) {
	r.slab, err = dst.l.takeSlab(stageName{g.Memory.Device(), true}, h.bytes)
	switch {
	case errors.Is(err, errLong):
		return err
	case err != nil:
		return fmt.Errorf("%w: %w", errNoSlab, err)
	}
	r.runs = r.runs[:0]
	at := uint64(0)
	for rest := h.r; rest.Count > 0; {
		n, fresh := r.claim.Fresh(rest)
		bytes, err := g.Memory.Bytes(transfer.Range{First: rest.First, Count: n})
		if err != nil || bytes > h.bytes-at {
			return errRange
		}
		if fresh {
			r.runs = r.slab.key.spans(r.runs, at, bytes, true)
		} else {
			r.runs = append(r.runs, single(span{len: uint32(bytes)}))
		}
		at += bytes
		rest = transfer.Range{First: rest.First + n, Count: rest.Count - n}
	}
	if at != h.bytes {
		return errRange
	}
	return nil
}

// errNoSlab: the slice cannot be staged now. It is refused, and the lane stays.
var errNoSlab = errors.New("gdr: no host memory for a slice")

// errLong: the slice is larger than a slab. A source decides how long its slices are, so its peer
// could otherwise make this end lock any amount of memory.
var errLong = errors.New("gdr: a slice is too long to go through host memory")

// errUnreachable: the NIC does not read or write this memory itself.
var errUnreachable = errors.New("gdr: the NIC does not reach this memory")
