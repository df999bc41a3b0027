package tcp

import (
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Bounds of a lane that carries device memory.
const (
	stageSlots = 3  // slices gathered ahead of the writer, each in a buffer of the device's
	landSlots  = 3  // frames received ahead of the device
	maxFollow  = 64 // confirmations that wait behind them
)

// stager gathers slices of device memory into host buffers before their frames begin, so that the
// copy of one slice overlaps the sending of the one before. A slice that gets no buffer goes on
// without, in small pieces through the sender's own.
//
// Its goroutine starts with the first such slice, ends with the lane, and is waited for by the
// writer.
type stager struct {
	l      *lane
	work   chan entry    // as many as a lane takes
	slots  chan struct{} // a token for each buffer that is out
	done   chan struct{}
	active bool // guarded by lane.mu
	blocks []mem.Block
}

func (s *stager) init(l *lane) {
	s.l = l
	s.slots = make(chan struct{}, stageSlots)
}

func (s *stager) putLocked(e entry) {
	if !s.active {
		s.active, s.work, s.done = true, make(chan entry, len(s.l.queue.slot)), make(chan struct{})
		go s.run()
	}
	s.work <- e
}

// wait returns once every slice is in the queue, and none will follow: the lane is dead.
func (s *stager) wait() {
	s.l.mu.Lock()
	active := s.active
	s.l.mu.Unlock()
	if active {
		<-s.done
	}
}

func (s *stager) run() {
	defer close(s.done)
	l := s.l
	for {
		select {
		case e := <-s.work:
			s.fill(&e)
			s.hand(e)
		case <-l.dead:
			// Move takes nothing more. What it took ends in the queue, with the lane.
			for {
				select {
				case e := <-s.work:
					s.hand(e)
				default:
					return
				}
			}
		}
	}
}

// hand passes a slice on to the writer; a small one that no other follows is written here, which
// saves a change of goroutine.
func (s *stager) hand(e entry) {
	l := s.l
	l.mu.Lock()
	l.queue.push(e)
	mine := !l.writing && l.err == nil
	l.writing = l.writing || mine
	l.mu.Unlock()
	switch {
	case !mine:
	case len(s.work) == 0:
		l.pump(true)
	default:
		l.wake <- struct{}{}
	}
}

// fill gathers a slice, under the origin's guard.
func (s *stager) fill(e *entry) {
	n, err := e.Origin.Memory.Bytes(e.Range)
	if err != nil || n == 0 || n > uint64(e.dev.LendBytes()) {
		return
	}
	select {
	case s.slots <- struct{}{}:
	case <-s.l.dead:
		return
	}
	buf := e.dev.Lend()
	if buf == nil {
		<-s.slots
		return
	}
	e.buf = buf[:n]
	switch e.why, e.err = e.Origin.Gather(e.buf, e.Range, &s.blocks); e.why {
	case transfer.ReasonNone:
	case transfer.ReasonSourceGone: // the sender finds it out again
		e.why, e.err = transfer.ReasonNone, nil
		s.releaseBuffer(e)
		return
	default:
		e.err = fmt.Errorf("tcp: %w", e.err)
		s.releaseBuffer(e)
		return
	}
	if s.l.crc {
		e.sum = mem.CRC32C(0, e.buf)
	}
}

// releaseBuffer ends the use of a slice's buffer.
func (s *stager) releaseBuffer(e *entry) {
	if e.buf == nil {
		return
	}
	e.dev.Return(e.buf)
	e.buf = nil
	<-s.slots
}

// landing is a frame of device memory between its last byte and its place.
type landing struct {
	dev    mem.Device
	buf    []byte
	claim  transport.Claim
	h      wire.Header
	blocks []mem.Block
}

// landed is one item of the lander's queue: a frame, or a confirmation that must not overtake one.
type landed struct {
	x *landing
	e wire.Entry
}

// lander puts whole frames where they belong, while the reader receives the next ones. A frame has
// landed after the device has completed it, and its claim is held meanwhile: a fence covers it.
//
// Its goroutine starts with the first such frame, and the reader joins it.
type lander struct {
	l       *lane
	work    chan landed
	free    chan *landing
	done    chan struct{}
	pending atomic.Int32 // items not confirmed yet; only the reader adds
}

func (d *lander) init(l *lane) { d.l = l }

// take gives the reader a buffer for a frame of n bytes; nil where the memory is the host's, or no
// buffer is to be had. It waits for the device where landSlots frames are on their way.
func (d *lander) take(g *transport.Grant, n uint64) *landing {
	dev := g.Memory.Device()
	if dev == nil || n == 0 || n > uint64(dev.LendBytes()) {
		return nil
	}
	if d.work == nil {
		d.work, d.free, d.done = make(chan landed, maxFollow), make(chan *landing, landSlots),
			make(chan struct{})
		for range landSlots {
			d.free <- &landing{}
		}
		go d.run()
	}
	x := <-d.free
	buf := dev.Lend()
	if buf == nil {
		d.free <- x
		return nil
	}
	x.dev, x.buf = dev, buf[:n]
	return x
}

// drop gives a frame up.
func (d *lander) drop(x *landing) {
	if x == nil {
		return
	}
	x.claim.Release()
	x.dev.Return(x.buf)
	x.dev, x.buf = nil, nil
	clear(x.blocks)
	d.free <- x
}

func (d *lander) put(x *landing, h *wire.Header) {
	x.h = *h
	d.pending.Add(1)
	d.work <- landed{x: x}
}

// busy reports whether frames are on their way, which confirmations must not overtake.
func (d *lander) busy() bool { return d.pending.Load() > 0 }

func (d *lander) follow(e wire.Entry) {
	d.pending.Add(1)
	d.work <- landed{e: e}
}

// end joins the goroutine, once the reader adds nothing more.
func (d *lander) end() {
	if d.work != nil {
		close(d.work)
		<-d.done
	}
}

func (d *lander) run() {
	defer close(d.done)
	for it := range d.work {
		if it.x != nil {
			it.e = d.l.verdict(&it.x.h, it.x.place(d.l))
			d.drop(it.x)
		}
		if err := d.l.confirm(it.e); err != nil {
			d.l.fail(err)
		}
		d.pending.Add(-1)
	}
}

// place writes the chunks that have not landed from another attempt, and lands the frame.
func (x *landing) place(l *lane) transfer.Reason {
	why, err := x.claim.LandFrom(x.buf, l, &x.blocks)
	if err != nil {
		l.b.faults.Note(slog.LevelWarn, "device memory not written", "lane", l.id, "slot", x.h.Slot,
			"err", err)
	}
	return why
}
