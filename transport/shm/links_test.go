package shm

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// tracks are links to a device that take any list between it and mapped memory of the host. They
// may be held, and may fail.
type tracks struct {
	*transporttest.Device
	tb      testing.TB
	entered chan struct{} // one token for each list that is being carried
	gate    chan struct{} // nil: open
	fail    atomic.Bool
	no      atomic.Bool // nothing is reached
	lists   atomic.Int64

	mu sync.Mutex
	// guarded by mu
	hook      func(dst []mem.Block) // nil, or called before an answer
	forgotten map[*mem.Region]bool
}

func newTracks(tb testing.TB) *tracks {
	return &tracks{Device: transporttest.NewDevice(tb), tb: tb, entered: make(chan struct{}, 1024),
		forgotten: map[*mem.Region]bool{}}
}

// across reports whether every byte crosses between the host and the device, in the same direction.
func across(dst, src []mem.Block) bool {
	far := func(all []mem.Block) (n int) {
		for i := range all {
			if all[i].Region.Device() != nil {
				n++
			} else if _, ok := all[i].Region.Bytes(); !ok {
				return -1
			}
		}
		return n
	}
	d, s := far(dst), far(src)
	return len(dst) > 0 && (d == len(dst) && s == 0 || d == 0 && s == len(src))
}

func (l *tracks) Reaches(dst, src []mem.Block) bool {
	l.mu.Lock()
	hook := l.hook
	l.mu.Unlock()
	if hook != nil {
		hook(dst)
	}
	return !l.no.Load() && across(dst, src)
}

func (l *tracks) Carry(dst, src []mem.Block) error {
	if mem.DeviceOf(dst) == nil && mem.DeviceOf(src) == nil {
		l.tb.Error("links carry what no device is part of")
	}
	l.mu.Lock()
	for _, all := range [][]mem.Block{dst, src} {
		for i := range all {
			if l.forgotten[all[i].Region] {
				l.tb.Error("links carry memory that is gone")
			}
		}
	}
	l.mu.Unlock()
	l.lists.Add(1)
	select {
	case l.entered <- struct{}{}:
	default:
	}
	if l.gate != nil {
		<-l.gate
	}
	if l.fail.Load() {
		return errors.New("every link has failed")
	}
	return l.Move(dst, src)
}

func (l *tracks) Forget(all []*mem.Region) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range all {
		l.forgotten[r] = true
	}
}

// onDevice is m as memory of a device, whose bytes lie where those of m do.
func onDevice(tb testing.TB, d *transporttest.Device, m *memory) *deviceMemory {
	tb.Helper()
	b, _ := m.blocks[0].Region.Bytes()
	r, err := d.Region(b)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(r.Release)
	far := *m
	far.blocks = append([]mem.Block(nil), m.blocks...)
	for i := range far.blocks {
		far.blocks[i].Region = r
	}
	return &deviceMemory{&far, r}
}

// The contract suite, with links that take all they may.
func TestDeviceByLinks(t *testing.T) {
	var carried atomic.Int64
	transporttest.ConformanceOnDevice(t, func(_ testing.TB,
		d *transporttest.Device) transporttest.Factory {
		return func(tb testing.TB) transport.Backend {
			l := newTracks(tb)
			l.Device = d
			tb.Cleanup(func() { carried.Add(l.lists.Load()) })
			return New(Config{Dir: testutil.ShortDir(tb), Workers: 8, Devices: d, Links: l})
		}
	})
	if n := carried.Load(); n != 0 {
		t.Errorf("%d lists between two devices went over links", n)
	}
}

// TestLinksCarry: random blocks between host and device arrive whole, over links where they reach
// and through buffers where not, or where all links fail; what is host to host, or device to
// device, never goes over one.
func TestLinksCarry(t *testing.T) {
	for _, c := range []struct {
		name     string
		src, dst bool // on the device
		no, fail bool
		want     bool // links carry it
	}{
		{"host to device", false, true, false, false, true},
		{"device to host", true, false, false, false, true},
		{"host to host", false, false, false, false, false},
		{"device to device", true, true, false, false, false},
		{"host to device, not reached", false, true, true, false, false},
		{"device to host, not reached", true, false, true, false, false},
		{"host to device, all links fail", false, true, false, true, true},
		{"device to host, all links fail", true, false, false, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newTracks(t)
			l.no.Store(c.no)
			l.fail.Store(c.fail)
			p := newPair(t, Config{Devices: l.Device, Links: l, Workers: 8})
			for i, each := range []uint64{1 << 20, 24 << 10, 4 << 20} {
				from, to := newMemory(t, 16*each+8*transfer.ChunkBytes*uint64(i&1)*3, each, uint64(i)),
					newMemory(t, 16*each+8*transfer.ChunkBytes*uint64(i&1)*3, each, uint64(i)+10)
				from.fill(byte(i + 1))
				to.fill(byte(i + 100))
				o, g := p.bind(t, transfer.Slot(i+1), from, to)
				if c.src {
					o.Memory = onDevice(t, l.Device, from)
				}
				if c.dst {
					p.dst.mu.Lock()
					g.Memory = onDevice(t, l.Device, to)
					p.dst.mu.Unlock()
				}
				p.move(t, o, from.space, 24, p.lane)
				if !equal(from, to) || !to.bitmap.Full() {
					t.Fatalf("blocks of %d bytes: content differs", each)
				}
			}
			n := l.lists.Load()
			if n > 0 != c.want {
				t.Errorf("links carried %d lists", n)
			}
			if c.want && !c.fail && l.Calls.Load() != 2*n {
				t.Errorf("links carried %d lists, and the device read or wrote %d times: what links carry "+
					"goes no other way, too", n, l.Calls.Load())
			}
		})
	}
}

// TestLinksFence: as long as a link may write, the fence does not end, and what it brings after the
// grant was revoked does not land.
func TestLinksFence(t *testing.T) {
	l := newTracks(t)
	l.gate = make(chan struct{})
	p := newPair(t, Config{Devices: l.Device, Links: l, Workers: 8})
	from, to := newMemory(t, 8<<20, 1<<20, 1), newMemory(t, 8<<20, 1<<20, 2)
	from.fill(1)
	o, g := p.bind(t, 1, from, to)
	p.dst.mu.Lock()
	g.Memory = onDevice(t, l.Device, to)
	p.dst.mu.Unlock()
	if err := p.lane.Move([]transport.Slice{{Origin: o, Range: from.space.All(), Attempt: 1}}); err !=
		nil {
		t.Fatal(err)
	}
	<-l.entered
	g.Revoke()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.dst.b.Fence(ctx, g); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a fence while a link may write: %v", err)
	}
	close(l.gate)
	if err := p.dst.b.Fence(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	r := p.src.result(t)
	if r.Outcome == transfer.Landed || to.bitmap.Count() != 0 {
		t.Errorf("it ended %s (%s), %d chunks landed", r.Outcome, r.Reason, to.bitmap.Count())
	}
	// No later list may touch the memory.
	before := l.lists.Load()
	if err := p.lane.Move([]transport.Slice{{Origin: o, Range: from.space.All(), Attempt: 2}}); err !=
		nil {
		t.Fatal(err)
	}
	if r := p.src.result(t); r.Outcome == transfer.Landed || l.lists.Load() != before {
		t.Errorf("after the fence it ended %s, %d lists more were carried", r.Outcome,
			l.lists.Load()-before)
	}
}

// TestLinksLeaveOut: of a batch, what may not be written any more when its turn comes is left out,
// and the others' is carried.
func TestLinksLeaveOut(t *testing.T) {
	l := newTracks(t)
	l.gate = make(chan struct{})
	cfg := Config{Devices: l.Device, Links: l, Workers: minMovers}
	p := newPair(t, cfg)
	var ends [2 + minMovers]struct {
		o        *transport.Origin
		g        *transport.Grant
		from, to *memory
	}
	send := func(i int) {
		if err := p.lane.Move([]transport.Slice{{Origin: ends[i].o, Range: ends[i].from.space.All(),
			Attempt: 1, Cookie: uint64(i)}}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range ends {
		e := &ends[i]
		e.from, e.to = newMemory(t, 1<<20, 1<<20, uint64(2*i)), newMemory(t, 1<<20, 1<<20, uint64(2*i+1))
		e.from.fill(byte(i + 1))
		e.o, e.g = p.bind(t, transfer.Slot(i+1), e.from, e.to)
		p.dst.mu.Lock()
		e.g.Memory = onDevice(t, l.Device, e.to)
		p.dst.mu.Unlock()
	}
	for i := range minMovers { // every mover is held
		send(i)
		<-l.entered
	}
	last := &ends[minMovers+1]
	l.mu.Lock()
	l.hook = func(dst []mem.Block) {
		if at, _ := last.g.Memory.Resolve(nil, transfer.Range{Count: 1}); at[0].Region == dst[0].Region {
			last.g.Revoke() // it has been claimed, and not entered
		}
	}
	l.mu.Unlock()
	send(minMovers)
	send(minMovers + 1)
	for limit := time.Now().Add(waitFor); len(p.dst.b.far) < 2; runtime.Gosched() {
		if time.Now().After(limit) {
			t.Fatal("the two pulls do not wait")
		}
	}
	close(l.gate)
	for range ends {
		r := p.src.result(t)
		if landed := r.Outcome == transfer.Landed; landed != (r.Cookie != minMovers+1) {
			t.Errorf("%d ended %s (%s): %v", r.Cookie, r.Outcome, r.Reason, r.Err)
		}
	}
	for i := range ends {
		if equal(ends[i].from, ends[i].to) != (i != minMovers+1) {
			t.Errorf("memory of grant %d", i)
		}
	}
}

// TestLinksAskedInTime: a fence does not end while links are asked for the grant's memory, which
// they would begin to pin: they forget it after the fence, once.
func TestLinksAskedInTime(t *testing.T) {
	l := newTracks(t)
	p := newPair(t, Config{Devices: l.Device, Links: l, Workers: 8})
	from, to := newMemory(t, 1<<20, 1<<20, 1), newMemory(t, 1<<20, 1<<20, 2)
	o, g := p.bind(t, 1, from, to)
	p.dst.mu.Lock()
	g.Memory = onDevice(t, l.Device, to)
	p.dst.mu.Unlock()
	fenced := make(chan error, 1)
	l.mu.Lock()
	l.hook = func([]mem.Block) {
		g.Revoke()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		fenced <- p.dst.b.Fence(ctx, g)
	}
	l.mu.Unlock()
	if err := p.lane.Move([]transport.Slice{{Origin: o, Range: from.space.All(), Attempt: 1}}); err !=
		nil {
		t.Fatal(err)
	}
	if err := <-fenced; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a fence while links are asked: %v", err)
	}
	if r := p.src.result(t); r.Outcome == transfer.Landed || l.lists.Load() != 0 {
		t.Errorf("it ended %s, %d lists were carried", r.Outcome, l.lists.Load())
	}
	if err := p.dst.b.Fence(t.Context(), g); err != nil {
		t.Error(err)
	}
}

// TestLinksInvalidated: what was read from blocks that the source has taken back does not land,
// whichever way it came.
func TestLinksInvalidated(t *testing.T) {
	l := newTracks(t)
	p := newPair(t, Config{Devices: l.Device, Links: l, Workers: 8})
	from, to := newMemory(t, 4<<20, 1<<20, 1), newMemory(t, 4<<20, 1<<20, 2)
	o, g := p.bind(t, 1, from, to)
	o.Valid = invalid
	p.dst.mu.Lock()
	g.Memory = onDevice(t, l.Device, to)
	p.dst.mu.Unlock()
	if err := p.lane.Move([]transport.Slice{{Origin: o, Range: from.space.All(), Attempt: 1}}); err !=
		nil {
		t.Fatal(err)
	}
	if r := p.src.result(t); r.Reason != transfer.ReasonInvalidated || to.bitmap.Count() != 0 ||
		l.lists.Load() == 0 {
		t.Errorf("it ended %s (%s), %d chunks landed, %d lists", r.Outcome, r.Reason, to.bitmap.Count(),
			l.lists.Load())
	}
}

// TestLinksForget: links forget a peer's memory before it is unmapped, and memory
// that landed already is not written again.
func TestLinksForget(t *testing.T) {
	l := newTracks(t)
	p := newPair(t, Config{Devices: l.Device, Links: l, Workers: 8})
	from, to := newMemory(t, 4<<20, 1<<20, 1), newMemory(t, 4<<20, 1<<20, 2)
	from.fill(1)
	o, g := p.bind(t, 1, from, to)
	p.dst.mu.Lock()
	g.Memory = onDevice(t, l.Device, to)
	p.dst.mu.Unlock()
	p.move(t, o, from.space, 16, p.lane)
	from.fill(2)
	if err := p.lane.Move([]transport.Slice{{Origin: o, Range: from.space.All(), Attempt: 2}}); err !=
		nil {
		t.Fatal(err)
	}
	p.src.result(t)
	from.fill(1)
	if !equal(from, to) {
		t.Error("chunks that had landed were written again")
	}
	if err := p.lane.Close(); err != nil {
		t.Fatal(err)
	}
	<-p.dst.down
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.forgotten) != 1 {
		t.Errorf("%d regions were forgotten, want the one of the peer", len(l.forgotten))
	}
}
