package shm

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// ErrBusy is returned by Move for more slices than MaxInFlight permits.
var ErrBusy = errors.New("more slices than the lane takes at once")

// source is the sending half of a lane: it makes pulls and pushes of the slices that Move accepted,
// and keeps them until they end.
type source struct {
	l *lane

	// to askers, with room for every slice in flight; nil: move makes the pulls, as it does for
	// small slices
	asks chan *moved
	gone sync.WaitGroup // the askers

	moveMu sync.Mutex // serializes move; taken before mu
	// guarded by moveMu
	self asker

	mu sync.Mutex // taken before Backend.mu
	// guarded by mu
	err     error // why the lane ended
	ended   bool
	slices  int // taken and not ended
	pulls   [maxPulls]pull
	free    []uint16
	stalled []stalled // wait for a free pull, oldest first; at most maxInFlight
	seq     uint64
	regions map[*mem.Region]uint32 // regions announced to the peer, by index
	nextReg uint32
	late    []transport.Result // ended inside move; the writer reports them
	spare   []*moved           // recycled; at most maxInFlight

	results []transport.Result // of the reader's current packet; the reader's
}

// moved is a slice that Move accepted.
type moved struct {
	s       transport.Slice
	at      time.Time
	left    int // pulls that have not ended; guarded by lane.mu
	outcome transfer.Outcome
	reason  transfer.Reason
	err     error
}

// pull is one request of a slice, or one push, from Move to its end.
type pull struct {
	tag     uint64 // 0: free
	m       *moved
	r       transfer.Range
	reading bool // the peer may still read the source's memory
	// the verdict was "valid", or it is a push: from here on the peer may have landed it
	valid bool
}

// stalled is the rest of a slice that was not requested because all pulls were in flight: slices of
// many small pieces need more pulls than the lane has.
type stalled struct {
	m     *moved
	rest  transfer.Range
	limit uint32 // saved asker.limit
}

var errNoPull = fmt.Errorf("shm: %d pulls are in flight", maxPulls)

// ask sends the written pull or push of r, and keeps p for its answer.
func (s *source) ask(a *asker, m *moved, r transfer.Range, p pull) (uint32,
	transfer.Reason, error) {
	o := m.s.Origin
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.err != nil {
		return 0, transfer.ReasonLaneLost, fmt.Errorf("shm: lane %d: %w", s.l.id, net.ErrClosed)
	}
	if len(s.free) == 0 || len(s.stalled) > 0 && !a.resumes {
		return 0, transfer.ReasonNone, errNoPull
	}
	if p.reading && !s.l.b.startRead(o) {
		return 0, transfer.ReasonSourceGone, fmt.Errorf("shm: origin %d.%d is closed", o.Slot, o.Gen)
	}
	i := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	s.seq++
	tag := s.seq<<16 | uint64(i)
	setTag(a.frame, tag)
	p.tag = tag
	s.pulls[i] = p
	m.left++
	s.l.out.put(a.frame, -1)
	return r.Count, transfer.ReasonNone, nil
}

func (s *source) regionIndex(r *mem.Region) (uint32, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.regionLocked(r)
}

// regionLocked returns the peer's index of a region; the first call passes the descriptor. Offsets
// count from the start of its file, of which a region may be a part.
func (s *source) regionLocked(r *mem.Region) (uint32, error) {
	if i, ok := s.regions[r]; ok {
		return i, nil
	}
	if _, mapped := r.Bytes(); !mapped && r.Device() == nil {
		return 0, fmt.Errorf("shm: the peer cannot map region %s of %s memory: %w; use another transport",
			r.ID(), r.Kind(), transport.ErrNotSupported)
	}
	if len(s.regions) >= maxRegions {
		return 0, fmt.Errorf("shm: region %s: the lane has %d regions already: %w", r.ID(),
			maxRegions, ErrBusy)
	}
	i := s.nextReg
	if r.Device() != nil {
		fd := -1
		if r.FD() >= 0 {
			var err error
			if fd, err = unix.FcntlInt(uintptr(r.FD()), unix.F_DUPFD_CLOEXEC, 0); err != nil {
				return 0, fmt.Errorf("shm: region %s: duplicate its descriptor: %w", r.ID(), err)
			}
		}
		s.nextReg++
		s.regions[r] = i
		var buf [frameHeader + deviceFixed + mem.MaxHandleBytes]byte
		s.l.out.put(appendDevice(buf[:0], deviceFrame{regionFrame{index: i, id: r.ID(), size: r.Size()},
			fd >= 0, r.Handle()}), fd)
		return i, nil
	}
	fd, err := reopenReadOnly(r)
	if err != nil {
		return 0, fmt.Errorf("shm: region %s: open its memfd read-only: %w", r.ID(), err)
	}
	s.nextReg++
	s.regions[r] = i
	var buf [frameHeader + regionBytes]byte
	s.l.out.put(appendRegion(buf[:0], regionFrame{index: i, id: r.ID(),
		size: r.Offset() + r.Size()}), fd)
	return i, nil
}

// forgetFreed announces to the peer the regions that no engine holds any more.
func (s *source) forgetFreed() {
	s.mu.Lock()
	for r, i := range s.regions {
		if r.Acquire() {
			r.Release()
			continue
		}
		delete(s.regions, r)
		var buf [frameHeader + forgetBytes]byte
		s.l.out.put(appendForget(buf[:0], i), -1)
	}
	s.mu.Unlock()
	s.l.out.kick()
}

// reads reports whether the peer may read memory of o for this lane.
func (s *source) reads(o *transport.Origin) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.pulls {
		if p := &s.pulls[i]; p.tag != 0 && p.reading && p.m.s.Origin == o {
			return true
		}
	}
	return false
}

// spoil records that a part of the slice did not land; the worst part decides the slice's outcome.
func (m *moved) spoil(o transfer.Outcome, reason transfer.Reason, err error) {
	if o > m.outcome { // the outcomes are numbered from good to bad
		m.outcome, m.reason = o, reason
		m.err = err
	}
}

// endPullLocked frees pull i. The result is true for the slice's last pull.
func (s *source) endPullLocked(i uint16, o transfer.Outcome, reason transfer.Reason,
	err error) (transport.Result, bool) {
	p := s.pulls[i]
	if p.reading {
		s.l.b.endRead(p.m.s.Origin)
	}
	s.pulls[i] = pull{}
	s.free = append(s.free, i)
	if len(s.stalled) > 0 {
		s.l.out.wakeUp()
	}
	p.m.spoil(o, reason, err)
	if p.m.left--; p.m.left > 0 {
		return transport.Result{}, false
	}
	return s.resultLocked(p.m), true
}

func (s *source) resultLocked(m *moved) transport.Result {
	s.slices--
	res := transport.Result{Slice: m.s, Outcome: m.outcome, Reason: m.reason, Err: m.err,
		Took: time.Since(m.at)}
	*m = moved{}
	s.spare = append(s.spare, m)
	return res
}

func (s *source) newMovedLocked(slice transport.Slice, at time.Time) *moved {
	var m *moved
	if n := len(s.spare); n > 0 {
		m, s.spare = s.spare[n-1], s.spare[:n-1]
	} else {
		m = &moved{}
	}
	// The slice's own share keeps it open while its pulls are made, because the first may be
	// answered already.
	*m = moved{s: slice, at: at, left: 1, outcome: transfer.Landed}
	return m
}

// wakeIfLate passes results of Move to the writer, because Move must not call Host.
func (s *source) wakeIfLate() {
	s.mu.Lock()
	n := len(s.late)
	s.mu.Unlock()
	if n > 0 {
		s.l.out.wakeUp()
	}
}

// findLocked returns the pull of a peer's tag. mu is held.
func (s *source) findLocked(tag uint64, want func(*pull) bool) (uint16, error) {
	i := uint16(tag)
	if i >= maxPulls || tag == 0 || s.pulls[i].tag != tag || !want(&s.pulls[i]) {
		return 0, fmt.Errorf("%w: an answer to pull %#x, which is not open", errFrame, tag)
	}
	return i, nil
}

// pulled: the peer has finished reading the source's memory. The source now decides whether the
// bytes count.
func (s *source) pulled(tag uint64, reason transfer.Reason) error {
	s.mu.Lock()
	i, err := s.findLocked(tag, func(p *pull) bool { return p.reading })
	if err != nil {
		s.mu.Unlock()
		return err
	}
	p := &s.pulls[i]
	p.reading = false
	o := p.m.s.Origin
	s.l.b.endRead(o)
	if reason != transfer.ReasonNone {
		s.endLocked(i, refusal(reason), reason)
		s.mu.Unlock()
		return nil
	}
	s.mu.Unlock()

	// Under the guard: once CloseOrigin has revoked it, no pull can be declared valid.
	valid := o.Enter()
	if valid {
		valid = o.Valid(o.Lease)
		o.Leave()
	}
	s.mu.Lock()
	p.valid = valid
	s.mu.Unlock()
	var buf [frameHeader + verdictBytes]byte
	s.l.out.put(appendVerdict(buf[:0], tag, valid), -1)
	if !valid {
		// After the verdict: the peer holds the pull until then, and the pull that replaces it must
		// not exceed the peer's bound.
		s.mu.Lock()
		s.endLocked(i, transfer.NotLanded, transfer.ReasonInvalidated)
		s.mu.Unlock()
	}
	return nil
}

// refusal is the outcome of a pull that the destination did not copy: another attempt holds the
// chunks, its memory failed, or the destination refuses for good.
func refusal(reason transfer.Reason) transfer.Outcome {
	if reason == transfer.ReasonMemory || reason == transfer.ReasonSuperseded {
		return transfer.NotLanded
	}
	return transfer.Rejected
}

func (s *source) confirm(tag uint64, o transfer.Outcome, reason transfer.Reason) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, err := s.findLocked(tag, func(p *pull) bool { return p.valid })
	if err != nil {
		return err
	}
	switch o {
	case transfer.Landed:
		reason = transfer.ReasonNone
	case transfer.Rejected:
		o = refusal(reason)
	default:
		return fmt.Errorf("%w: outcome %d confirmed", errFrame, o)
	}
	s.endLocked(i, o, reason)
	return nil
}

// endLocked ends a pull on the reader's goroutine.
func (s *source) endLocked(i uint16, o transfer.Outcome, reason transfer.Reason) {
	var err error
	if o != transfer.Landed {
		origin := s.pulls[i].m.s.Origin
		err = fmt.Errorf("shm: slot %d.%d at boot %s: %s: %s", origin.Slot, origin.Gen,
			s.l.peer, o, reason)
	}
	if res, last := s.endPullLocked(i, o, reason, err); last {
		s.results = append(s.results, res)
	}
}

func (s *source) init(l *lane) {
	s.l, s.regions, s.free = l, map[*mem.Region]uint32{}, make([]uint16, 0, maxPulls)
	for i := maxPulls - 1; i >= 0; i-- {
		s.free = append(s.free, uint16(i))
	}
}

// start starts n askers.
func (s *source) start(n int) {
	if n == 0 {
		return
	}
	s.asks = make(chan *moved, maxInFlight)
	for range n {
		s.gone.Go(s.askFor)
	}
}

// move accepts the slices of Move, or none of them.
func (s *source) move(batch []transport.Slice) error {
	s.moveMu.Lock()
	defer s.moveMu.Unlock()
	s.mu.Lock()
	if s.ended || s.err != nil {
		err := s.err
		s.mu.Unlock()
		return fmt.Errorf("shm: move on lane %d: %w", s.l.id, errors.Join(net.ErrClosed, err))
	}
	if s.slices+len(batch) > maxInFlight {
		n := s.slices
		s.mu.Unlock()
		return fmt.Errorf("shm: move on lane %d: %d slices with %d in flight of %d: %w", s.l.id,
			len(batch), n, maxInFlight, ErrBusy)
	}
	s.slices += len(batch)
	s.mu.Unlock()
	now := time.Now()
	for i := range batch {
		s.mu.Lock()
		m := s.newMovedLocked(batch[i], now)
		s.mu.Unlock()
		if s.asks != nil && (m.s.Range.Count > askHere || len(s.asks) > 0) &&
			m.s.Origin.Memory.Device() != nil {
			s.asks <- m
			continue
		}
		s.moveOne(&s.self, m)
	}
	s.l.out.kick()
	s.wakeIfLate()
	return nil
}

// takeLate returns the results of move in the memory of into. The writer calls it.
func (s *source) takeLate(into []transport.Result) []transport.Result {
	s.mu.Lock()
	defer s.mu.Unlock()
	into = append(into[:0], s.late...)
	s.late = s.late[:0]
	return into
}

// report passes the results of a packet to the host. The reader calls it.
func (s *source) report() {
	if len(s.results) == 0 {
		return
	}
	s.l.b.host.Done(s.l, s.results)
	clear(s.results)
	s.results = s.results[:0]
}

// fail makes the source refuse further slices. The first reason stays.
func (s *source) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
}

// stop is fail, and marks the lane as ended. It returns the reason.
func (s *source) stop(err error) error {
	s.fail(err)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	return s.err
}

// end ends every pull and slice of a lane that has stopped. It returns the results that have not
// been reported; the goroutine of the reader calls it after the writer has ended.
func (s *source) end(lost error) []transport.Result {
	// a concurrent move, and an asker, find the lane ended and leave their results in late
	s.moveMu.Lock()
	defer s.moveMu.Unlock()
	if s.asks != nil {
		close(s.asks)
		s.gone.Wait()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	results := append(s.results, s.late...)
	s.late = nil
	for i := range s.pulls {
		p := &s.pulls[i]
		if p.tag == 0 {
			continue
		}
		o := transfer.NotLanded // without the verdict of this end the peer counts nothing
		if p.valid {
			o = transfer.InDoubt
		}
		if res, last := s.endPullLocked(uint16(i), o, transfer.ReasonLaneLost, lost); last {
			results = append(results, res)
		}
	}
	for _, w := range s.stalled {
		w.m.spoil(transfer.NotLanded, transfer.ReasonLaneLost, lost)
		if w.m.left--; w.m.left == 0 {
			results = append(results, s.resultLocked(w.m))
		}
	}
	s.stalled = nil
	clear(s.regions)
	return results
}
