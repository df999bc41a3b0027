package spray

import (
	"container/heap"
	"fmt"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/spray/internal/chunks"
	"github.com/kvspray/kvspray/transfer"
)

// The model connects a scheduler to links in virtual time. A link moves bytes in order at its rate,
// and confirms each slice a delay later. Slices on a dead link stay there until the link works
// again, as in a socket.

const (
	gbit = 0.125 // bytes per nanosecond
	mbit = gbit / 1000
	ms   = time.Millisecond
	sec  = time.Second
)

type event struct {
	at  Instant
	seq int
	fn  func()
}

type events []event

func (q events) Len() int { return len(q) }
func (q events) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q events) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *events) Push(x any)   { *q = append(*q, x.(event)) }
func (q *events) Pop() any {
	old := *q
	x := old[len(old)-1]
	*q = old[:len(old)-1]
	return x
}

type link struct {
	m       *model
	name    string
	rate    float64
	delay   Instant
	dead    bool // moves nothing
	mute    bool // moves, and confirms nothing
	queue   []Slice
	left    float64 // bytes of the head
	since   Instant // left was true then
	version int
	held    []Slice // of a mute link
	bytes   uint64  // that arrived
	arrived func(Slice)
	late    func() Instant // that a confirmation takes beyond the delay; nil: nothing
}

type model struct {
	t      testing.TB
	s      *Scheduler
	p      *Peer
	now    Instant
	seq    int
	q      events
	links  []*link
	byLane map[uint64]*link
	lanes  uint64
	ends   func(Ended, Slice)
	pulled func(Slice)
	pulls  int
}

func newModel(t testing.TB, cfg Config) *model {
	m := &model{t: t, s: New(cfg), now: sec, byLane: map[uint64]*link{}}
	m.p = m.s.Peer(transfer.Boot{1}, nil)
	m.tick()
	return m
}

func (m *model) at(d Instant, fn func()) {
	m.seq++
	heap.Push(&m.q, event{m.now + d, m.seq, fn})
}

// rail adds a link with lanes on it.
func (m *model) rail(rate float64, delay Instant, lanes int, change ...func(*LaneInfo)) *link {
	l := &link{m: m, name: fmt.Sprint("r", len(m.links)), rate: rate, delay: delay}
	m.links = append(m.links, l)
	for range lanes {
		m.lanes++
		in := LaneInfo{ID: m.lanes, Path: Path{"tcp", l.name, l.name}, SliceBytes: 1 << 20, MaxSlices: 16}
		for _, c := range change {
			c(&in)
		}
		m.byLane[m.lanes] = l
		if err := m.s.LaneUp(m.now, m.p, in); err != nil {
			m.t.Fatal(err)
		}
	}
	return l
}

func (l *link) take(sl Slice) {
	l.serve()
	l.queue = append(l.queue, sl)
	if len(l.queue) == 1 {
		l.left = float64(sl.Bytes)
	}
	l.plan()
}

// serve advances the first slice up to now.
func (l *link) serve() {
	if !l.dead && len(l.queue) > 0 {
		l.left -= l.rate * float64(l.m.now-l.since)
	}
	l.since = l.m.now
}

func (l *link) plan() {
	l.version++
	if l.dead || len(l.queue) == 0 {
		return
	}
	v := l.version
	l.m.at(Instant(max(l.left, 0)/l.rate)+1, func() {
		if v != l.version {
			return
		}
		l.serve()
		sl := l.queue[0]
		l.queue = l.queue[1:]
		l.bytes += sl.Bytes
		if l.arrived != nil {
			l.arrived(sl)
		}
		if len(l.queue) > 0 {
			l.left = float64(l.queue[0].Bytes)
		}
		l.plan()
		d := l.delay
		if l.late != nil {
			d += l.late()
		}
		l.m.at(d, func() { l.confirm(sl) })
	})
}

func (l *link) confirm(sl Slice) {
	if l.mute {
		l.held = append(l.held, sl)
		return
	}
	l.m.end(sl, Confirmed)
}

func (l *link) set(fn func()) {
	l.serve()
	fn()
	l.plan()
	if !l.mute {
		held := l.held
		l.held = nil
		for _, sl := range held {
			l.confirm(sl)
		}
	}
}

func (m *model) end(sl Slice, v Verdict) {
	out, ok := m.s.End(m.now, sl.Cookie, v)
	if !ok {
		m.t.Fatalf("%v: a slice in flight is unknown at its end", m.now)
	}
	if m.ends != nil {
		m.ends(out, sl)
	}
	m.pull()
}

func (m *model) pull() {
	if m.p.lanes == 0 {
		return
	}
	for again := true; again; again = m.s.Wake(m.now, func(*Peer) {}) {
		for sl, ok := m.s.Pull(m.now, m.p); ok; sl, ok = m.s.Pull(m.now, m.p) {
			m.pulls++
			if m.pulled != nil {
				m.pulled(sl)
			}
			m.byLane[sl.Lane].take(sl)
		}
	}
}

func (m *model) tick() {
	m.at(TickEvery, func() {
		m.s.Tick(m.now, func(*Peer) {})
		m.pull()
		m.tick()
	})
}

// run advances time until done, at most for d, and returns the time that passed.
func (m *model) run(d Instant, done func() bool) Instant {
	m.t.Helper()
	from := m.now
	m.pull()
	for !done() {
		e := heap.Pop(&m.q).(event)
		if e.at > from+d {
			heap.Push(&m.q, e)
			m.now = from + d
			if !done() {
				return -1
			}
			break
		}
		m.now = e.at
		e.fn()
	}
	return m.now - from
}

func (m *model) wait(d Instant) { m.run(d, func() bool { return false }) }

func space(t testing.TB, bytes ...uint64) *transfer.Space {
	sp, err := transfer.NewSpace(bytes)
	if err != nil {
		t.Fatal(err)
	}
	return sp
}

// open adds a flow of which every chunk is ready.
func (m *model) open(prio Priority, bytes uint64) *Flow {
	f := m.s.Open(m.p, prio, 0, space(m.t, bytes), nil)
	f.Ready(f.space.All())
	return f
}

// state is the record of a chunk.
func (f *Flow) state(c uint32) chunks.Record {
	k, _, _, _ := f.chunks.State(c)
	return k
}

// landed reports whether every chunk is confirmed.
func (f *Flow) landed() bool {
	return f.chunks.Landed() == f.chunks.Len()
}

// move runs one transfer and returns its rate in bytes per nanosecond.
func (m *model) move(bytes uint64) float64 {
	m.t.Helper()
	f := m.open(LayerStream, bytes)
	d := m.run(60*sec, f.landed)
	if d < 0 {
		m.t.Fatalf("a transfer of %d bytes did not end; %d chunks wait, %d slices in flight", bytes,
			f.Waiting(), f.flights)
	}
	f.Close()
	return float64(bytes) / float64(d)
}

func (m *model) sum() (v float64) {
	for _, l := range m.links {
		if !l.dead {
			v += l.rate
		}
	}
	return v
}
