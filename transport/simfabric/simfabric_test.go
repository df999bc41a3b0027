package simfabric

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// station is a host that keeps its lanes full, and checks what lands.
type station struct {
	t       testing.TB
	f       *Fabric
	h       *Host
	b       *Backend
	boot    transfer.Boot
	rails   []transport.Rail
	grants  map[transfer.Boot]*transport.Grant
	lanes   []transport.Lane
	downs   int
	err     error // of the last lane that died
	refused map[transfer.Reason]int

	onDone func(transport.Lane, transport.Result)
}

func newStation(t testing.TB, f *Fabric, id byte, rails ...RailSpec) *station {
	t.Helper()
	s := &station{t: t, f: f, h: f.NewHost(fmt.Sprintf("h%d", id), rails...), boot: transfer.Boot{id},
		grants:  map[transfer.Boot]*transport.Grant{},
		refused: map[transfer.Reason]int{}}
	s.b = s.h.Backend()
	var err error
	if s.rails, err = s.b.Open(context.Background(), s); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *station) PeerKey(boot transfer.Boot) (transport.Peer, bool) {
	return transport.Peer{Boot: boot, Self: s.boot}, true
}

func (s *station) Grant(peer transfer.Boot, _ transfer.Slot, _ transfer.Gen) (*transport.Grant,
	transfer.Reason) {
	if g := s.grants[peer]; g != nil {
		return g, transfer.ReasonNone
	}
	return nil, transfer.ReasonUnknownSlot
}

func (s *station) Origin(transfer.Boot, transfer.Slot, transfer.Gen) (*transport.Origin,
	transfer.Reason) {
	return nil, transfer.ReasonUnknownSlot
}
func (s *station) LaneUp(l transport.Lane)                     { s.lanes = append(s.lanes, l) }
func (s *station) LaneDown(_ transport.Lane, err error)        { s.downs++; s.err = err }
func (s *station) Refused(_ transport.Lane, r transfer.Reason) { s.refused[r]++ }
func (s *station) Done(l transport.Lane, res []transport.Result) {
	for _, r := range res {
		if s.onDone != nil {
			s.onDone(l, r)
		}
	}
}

const spaceChunks = 1 << 16

// words is a space that is its own content.
type words struct {
	t      testing.TB
	landed uint64
	writes uint64
	seen   map[uint32]uint64
}

func (w *words) Resolve(dst []mem.Block, _ transfer.Range) ([]mem.Block, error) {
	return dst, errors.New("no memory")
}

func (w *words) Bytes(r transfer.Range) (uint64, error) {
	if r.Count == 0 || r.End() > spaceChunks {
		return 0, errors.New("outside")
	}
	return uint64(r.Count) * transfer.ChunkBytes, nil
}
func (w *words) Device() mem.Device       { return nil }
func (w *words) ReadWord(c uint32) uint64 { return uint64(c) * 3 }
func (w *words) WriteWord(c uint32, v uint64) {
	w.writes++
	w.seen[c] = v
}

func (w *words) Landed(_ transport.Lane, r transfer.Range, _ uint32) {
	w.landed += uint64(r.Count) * transfer.ChunkBytes
	for c := r.First; c < r.End(); c++ {
		if w.seen[c] != uint64(c)*3 {
			w.t.Errorf("chunk %d landed with %d", c, w.seen[c])
		}
	}
}

// stream lets a send to b over one lane between their rails numbered i, with a window of slices,
// for good.
type stream struct {
	a     *station
	lane  transport.Lane
	sink  *words
	next  uint32
	ended map[transfer.Outcome]int
	stop  bool
	o     *transport.Origin
}

const streamSlice = 4 // chunks

func newStream(a, b *station, i, window int) *stream {
	a.t.Helper()
	s := &stream{a: a, sink: &words{t: a.t, seen: map[uint32]uint64{}},
		ended: map[transfer.Outcome]int{}}
	b.grants[a.boot] = &transport.Grant{Peer: a.boot, Gen: 1, Memory: s.sink,
		Landed: s.sink.Landed}
	b.grants[a.boot].Receipt.Reset(spaceChunks)
	s.o = &transport.Origin{Peer: b.boot, Gen: 1, Memory: s.sink,
		Valid: func(transfer.LeaseID) bool { return true }}
	l, err := a.b.Dial(context.Background(), transport.Peer{Boot: b.boot, Self: a.boot},
		a.rails[i], b.rails[i])
	if err != nil {
		a.t.Fatal(err)
	}
	s.lane = l
	old := a.onDone
	a.onDone = func(l transport.Lane, r transport.Result) {
		if l != s.lane {
			old(l, r)
			return
		}
		s.ended[r.Outcome]++
		s.push()
	}
	for range window {
		s.push()
	}
	return s
}

func (s *stream) push() {
	if s.stop || s.next+streamSlice > spaceChunks {
		return
	}
	if s.lane.Move([]transport.Slice{{Origin: s.o, Range: transfer.Range{First: s.next,
		Count: streamSlice}, Attempt: 1}}) == nil {
		s.next += streamSlice
	}
}

// rate is what has landed in a time, as a share of a link.
func rate(bytes uint64, d time.Duration, bps float64) float64 {
	return float64(bytes) * 8 / d.Seconds() / bps
}

func TestOneLaneFillsItsLink(t *testing.T) {
	for _, c := range []struct {
		name    string
		link    LinkSpec
		at      float64 // at least
		max     float64
		seconds float64
	}{
		{"2 Gbit/s", LinkSpec{BitsPerSecond: 2e9, Latency: 50 * time.Microsecond}, 0.97, 1, 1},
		{"5 Mbit/s", LinkSpec{BitsPerSecond: 5e6, Latency: 50 * time.Microsecond}, 0.95, 1, 20},
		{"100 Gbit/s", LinkSpec{BitsPerSecond: 100e9, Latency: 5 * time.Microsecond}, 0.9, 1, 0.1},
		{"far", LinkSpec{BitsPerSecond: 1e9, Latency: 5 * time.Millisecond}, 0.9, 1, 3},
		{"1% of packets lost", LinkSpec{BitsPerSecond: 1e9, Latency: time.Millisecond, Loss: 0.01},
			0.02, 0.7, 3},
		{"reordered", LinkSpec{BitsPerSecond: 1e9, Latency: time.Millisecond, Jitter: time.Millisecond},
			0.3, 1, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := New(Config{Seed: 1})
			a, b := newStation(t, f, 1, RailSpec{"r", c.link, nil, nil}), newStation(t, f, 2,
				RailSpec{"r", c.link, nil, nil})
			s := newStream(a, b, 0, 32)
			d := time.Duration(c.seconds * 1e9)
			f.Run(d, nil)
			got := rate(s.sink.landed, d, c.link.BitsPerSecond)
			t.Logf("%.3f of the link, %+v", got, f.Stats())
			if got < c.at || got > c.max {
				t.Errorf("%.3f of the link, want %.2f to %.2f", got, c.at, c.max)
			}
		})
	}
}

// TestRateAndDelay: what collapses is slow at once, and a slice alone takes its bytes and its way.
func TestRateAndDelay(t *testing.T) {
	f := New(Config{Seed: 1})
	link := LinkSpec{BitsPerSecond: 1e9, Latency: 100 * time.Microsecond}
	a, b := newStation(t, f, 1, RailSpec{"r", link, nil, nil}), newStation(t, f, 2,
		RailSpec{"r", link, nil, nil})
	var took time.Duration
	s := newStream(a, b, 0, 0)
	done := a.onDone
	a.onDone = func(l transport.Lane, r transport.Result) { took = r.Took; done(l, r) }
	s.push()
	s.stop = true
	f.Run(time.Second, nil)
	// Four chunks cut through two links behind each other; the first window lets two of them go
	// before an answer.
	want := time.Duration(4*transfer.ChunkBytes*8) + 4*link.Latency
	if took < want || took > want+4*link.Latency+time.Millisecond {
		t.Errorf("a slice took %s, want %s and little more", took, want)
	}
	s.stop = false
	for range 8 {
		s.push()
	}
	f.Run(2*time.Second, nil)
	a.h.Rails()[0].Tx().SetRate(0.05)
	f.Run(2100*time.Millisecond, nil) // what was queued before
	before := s.sink.landed
	f.Run(3100*time.Millisecond, nil)
	if got := rate(s.sink.landed-before, time.Second, 1e9); got > 0.06 || got < 0.04 {
		t.Errorf("a rail at a twentieth carries %.3f", got)
	}
}

// TestIncast: many senders into one port. With room for their windows they share it fairly; with
// little they collapse, and the driver of the fabric has to prevent that.
func TestIncast(t *testing.T) {
	const seconds = 4 // the first timeout is one
	run := func(buffer, windowBytes int) (share, jain float64, overflows uint64) {
		f := New(Config{Seed: 1, WindowBytes: windowBytes})
		link := LinkSpec{BitsPerSecond: 10e9, Latency: 5 * time.Microsecond, Jitter: time.Microsecond,
			Buffer: buffer}
		b := newStation(t, f, 100, RailSpec{"r", link, nil, nil})
		var all []*stream
		for i := range 16 {
			all = append(all, newStream(newStation(t, f, byte(i+1), RailSpec{"r", link, nil, nil}), b, 0,
				16))
		}
		f.Run(seconds*time.Second, nil)
		var sum, squares float64
		for _, s := range all {
			x := float64(s.sink.landed)
			sum += x
			squares += x * x
		}
		return rate(uint64(sum), seconds*time.Second, 10e9), sum * sum / (16 * squares),
			b.h.Rails()[0].Rx().Overflows()
	}
	share, jain, overflows := run(8<<20, 256<<10)
	t.Logf("deep buffer, bounded windows: %.3f of the port, Jain %.3f, %d overflows", share,
		jain, overflows)
	if share < 0.95 || jain < 0.95 || overflows > 0 {
		t.Error("no collapse was to be expected here")
	}
	for _, buffer := range []int{512 << 10, 2 * transfer.ChunkBytes} {
		s, j, overflows := run(buffer, 4<<20)
		t.Logf("%d KiB of buffer, wide windows: %.3f of the port, Jain %.3f, %d overflows", buffer>>10, s,
			j, overflows)
		if overflows == 0 || j >= jain {
			t.Errorf("16 windows of 4 MiB in %d KiB cost nothing", buffer>>10)
		}
	}
}

// TestTrunk: two racks whose link to the core carries a quarter of what their hosts send.
func TestTrunk(t *testing.T) {
	f := New(Config{Seed: 1, WindowBytes: 256 << 10})
	trunk := &LinkSpec{BitsPerSecond: 1e9, Latency: 5 * time.Microsecond, Buffer: 4 << 20}
	left, right := f.NewSwitch("left", trunk), f.NewSwitch("right", trunk)
	link := LinkSpec{BitsPerSecond: 1e9, Latency: 5 * time.Microsecond, Buffer: 4 << 20}
	var across, inside []*stream
	for i := range 4 {
		a, b := newStation(t, f, byte(i+1), RailSpec{"r", link, left, nil}), newStation(t, f, byte(i+10),
			RailSpec{"r", link, right, nil})
		across = append(across, newStream(a, b, 0, 8))
		c, d := newStation(t, f, byte(i+20), RailSpec{"r", link, left, nil}), newStation(t, f, byte(i+30),
			RailSpec{"r", link, left, nil})
		inside = append(inside, newStream(c, d, 0, 8))
	}
	f.Run(time.Second, nil)
	var sum uint64
	for _, s := range across {
		sum += s.sink.landed
	}
	if got := rate(sum, time.Second, 1e9); got < 0.95 || got > 1.001 {
		t.Errorf("the trunk carried %.3f", got)
	}
	for i, s := range inside {
		if got := rate(s.sink.landed, time.Second, 1e9); got < 0.95 {
			t.Errorf("stream %d within a rack got %.3f", i, got)
		}
	}
	up, _ := left.Trunk()
	if up.Deepest() == 0 {
		t.Error("nothing ever waited for the trunk")
	}
}

// TestAsymmetric: a rail that loses one direction. What it sends is written and never confirmed, or
// never comes; either way the lane lives until its silence is too long, and what was under way is
// in doubt.
func TestAsymmetric(t *testing.T) {
	for _, acks := range []bool{false, true} {
		f := New(Config{Seed: 1, UserTimeout: 3 * time.Second})
		link := LinkSpec{BitsPerSecond: 1e9, Latency: 50 * time.Microsecond}
		a, b := newStation(t, f, 1, RailSpec{"r", link, nil, nil}), newStation(t, f, 2,
			RailSpec{"r", link, nil, nil})
		s := newStream(a, b, 0, 8)
		f.Run(100*time.Millisecond, nil)
		landed := s.ended[transfer.Landed]
		if acks {
			a.h.Rails()[0].Rx().SetSilent(true)
		} else {
			a.h.Rails()[0].Tx().SetSilent(true)
		}
		f.Run(2*time.Second, nil)
		if a.downs != 0 || s.ended[transfer.Landed] > landed+8 {
			t.Fatalf("acks %v: %d lanes down, %d landed after %d", acks, a.downs, s.ended[transfer.Landed],
				landed)
		}
		if all := s.sink.writes == uint64(s.next); all != acks {
			t.Errorf("acks %v: %d of %d chunks were written", acks, s.sink.writes, s.next)
		}
		f.Run(20*time.Second, nil)
		if a.downs != 1 || b.downs != 1 || s.ended[transfer.InDoubt] == 0 {
			t.Errorf("acks %v: %d and %d lanes down, ended %v", acks, a.downs, b.downs, s.ended)
		}
	}
}

// TestFlap: a short pull of the cable is survived by the lane, a longer one is noticed by its own
// host.
func TestFlap(t *testing.T) {
	f := New(Config{Seed: 1, Carrier: 5 * time.Millisecond})
	link := LinkSpec{BitsPerSecond: 1e9, Latency: 50 * time.Microsecond}
	a, b := newStation(t, f, 1, RailSpec{"r", link, nil, nil}), newStation(t, f, 2,
		RailSpec{"r", link, nil, nil})
	s := newStream(a, b, 0, 8)
	rail := a.h.Rails()[0]
	f.Run(50*time.Millisecond, nil)
	rail.Down()
	f.After(2*time.Millisecond, rail.Up)
	f.Run(time.Second, nil)
	if a.downs != 0 || s.ended[transfer.InDoubt] != 0 {
		t.Fatalf("2 ms without carrier: %d lanes down, %v", a.downs, s.ended)
	}
	before := s.ended[transfer.Landed]
	rail.Down()
	f.Run(f.Now()+4*time.Millisecond, nil)
	if a.downs != 0 {
		t.Error("noticed too early")
	}
	f.Run(f.Now()+2*time.Millisecond, nil)
	if a.downs != 1 || s.ended[transfer.InDoubt] == 0 || !errors.Is(s.lane.Move(nil), net.ErrClosed) {
		t.Errorf("no carrier for 6 ms: %d lanes down, %v", a.downs, s.ended)
	}
	if _, err := a.b.Dial(context.Background(), transport.Peer{Boot: b.boot, Self: a.boot}, a.rails[0],
		b.rails[0]); err == nil {
		t.Error("dialed without a carrier")
	}
	rail.Up()
	if s.ended[transfer.Landed] <= before-1 {
		t.Error("results went backwards")
	}
	f.Run(f.Now()+time.Minute, nil)
	if b.downs != 1 {
		t.Errorf("the other end has %d lanes down", b.downs)
	}
}

// TestLateWrite: a slice stalls in the network, its grant is fenced, and the network heals.
func TestLateWrite(t *testing.T) {
	f := New(Config{Seed: 1})
	link := LinkSpec{BitsPerSecond: 1e9, Latency: 50 * time.Microsecond}
	a, b := newStation(t, f, 1, RailSpec{"r", link, nil, nil}), newStation(t, f, 2,
		RailSpec{"r", link, nil, nil})
	s := newStream(a, b, 0, 8)
	f.Run(20*time.Millisecond, nil)
	b.h.Rails()[0].Rx().SetSilent(true)
	f.Run(100*time.Millisecond, nil)
	g := b.grants[a.boot]
	g.Revoke()
	if err := b.b.Fence(context.Background(), g); err != nil {
		t.Fatal(err)
	}
	s.stop = true
	writes := s.sink.writes
	b.h.Rails()[0].Rx().SetSilent(false)
	f.Run(5*time.Second, nil)
	if s.sink.writes != writes {
		t.Errorf("%d chunks were written after the fence", s.sink.writes-writes)
	}
	if s.ended[transfer.Rejected] == 0 || b.refused[transfer.ReasonRevoked] == 0 {
		t.Errorf("nothing came late: %v, refused %v", s.ended, b.refused)
	}
}

// TestFrozenReceiver: a receiver's process stops, and its machine does not. A kernel takes a
// receive buffer more and no byte beyond it, and nothing is written or confirmed; a NIC writes the
// slices that it was allowed to before, and none of those that come. A process that goes on finds
// everything, once.
func TestFrozenReceiver(t *testing.T) {
	const buffer = 1 << 20
	for _, oneSided := range []bool{false, true} {
		t.Run(fmt.Sprint("one-sided ", oneSided), func(t *testing.T) {
			f := New(Config{Seed: 1, RecvBuffer: buffer, OneSided: oneSided})
			link := LinkSpec{BitsPerSecond: 1e9, Latency: 50 * time.Microsecond}
			a, b := newStation(t, f, 1, RailSpec{"r", link, nil, nil}), newStation(t, f, 2,
				RailSpec{"r", link, nil, nil})
			s := newStream(a, b, 0, 16)
			f.Run(20*time.Millisecond, nil)
			b.h.Freeze()
			f.Run(f.Now()+time.Millisecond, nil) // confirmations that were on their way
			writes, landed, ended, acked := s.sink.writes, s.sink.landed, s.ended[transfer.Landed],
				s.lane.(transport.Meter).Acked()
			f.Run(f.Now()+time.Second, nil)
			if s.sink.landed != landed || s.ended[transfer.Landed] != ended {
				t.Errorf("%d bytes landed and %d slices ended in a process that is stopped",
					s.sink.landed-landed, s.ended[transfer.Landed]-ended)
			}
			took := s.lane.(transport.Meter).Acked() - acked
			switch wrote := s.sink.writes - writes; {
			case oneSided && (wrote == 0 || wrote > 16*streamSlice):
				t.Errorf("the NIC wrote %d chunks: want those of the slices that were under way", wrote)
			case !oneSided && (wrote != 0 || took > buffer || took < buffer-2*transfer.ChunkBytes):
				t.Errorf("%d chunks were written, and the kernel took %d bytes: want 0, and about %d", wrote,
					took, buffer)
			}
			if f.Stats().Unattended == 0 {
				t.Error("nothing came: this tests nothing")
			}
			b.h.Thaw()
			f.Run(f.Now()+2*time.Second, nil)
			s.stop = true
			f.Run(f.Now()+time.Second, nil)
			if n := s.ended[transfer.Landed]; b.downs > 0 || uint64(n)*streamSlice*transfer.ChunkBytes !=
				s.sink.landed || n <= ended {
				t.Errorf("%v, %d bytes landed, %d lanes died: %v", s.ended, s.sink.landed, b.downs, b.err)
			}
		})
	}
}

// TestStoppedNIC: what a NIC may still write when its grant is fenced, it does not: its lane ends
// first. So does that of a slice whose chunks a later attempt takes over.
func TestStoppedNIC(t *testing.T) {
	for _, how := range []string{"fence", "later attempt"} {
		t.Run(how, func(t *testing.T) {
			f := New(Config{Seed: 1, OneSided: true})
			link := LinkSpec{BitsPerSecond: 1e9, Latency: 50 * time.Microsecond}
			a, b := newStation(t, f, 1, RailSpec{"r", link, nil, nil}), newStation(t, f, 2,
				RailSpec{"r", link, nil, nil})
			s := newStream(a, b, 0, 8)
			s.stop = true
			f.Run(f.Now()+700*time.Microsecond, nil) // a chunk or two of the first slice
			g := b.grants[a.boot]
			if s.sink.writes == 0 || s.sink.writes >= streamSlice {
				t.Fatalf("%d chunks are written: not what this test is about", s.sink.writes)
			}
			if how == "fence" {
				g.Revoke()
				if err := b.b.Fence(context.Background(), g); err != nil {
					t.Fatal(err)
				}
			} else {
				var c transport.Claim
				if why, _, _ := g.ClaimDevice(&c, transfer.Range{First: 0, Count: 1}, 2, nil,
					true); why != transfer.ReasonNone {
					t.Fatalf("a later attempt is refused: %v", why)
				}
			}
			writes := s.sink.writes
			f.Run(f.Now()+time.Second, nil)
			if s.sink.writes != writes || b.downs != 1 || s.ended[transfer.InDoubt] == 0 {
				t.Errorf("%d chunks were written afterwards, %d lanes died, %v", s.sink.writes-writes,
					b.downs, s.ended)
			}
		})
	}
}

// TestResume: after a silence of seconds one chunk comes through, and the rest when Config.Resume
// has passed.
func TestResume(t *testing.T) {
	const resume = 300 * time.Millisecond
	f := New(Config{Seed: 1, Resume: resume})
	link := LinkSpec{BitsPerSecond: 1e9, Latency: 50 * time.Microsecond}
	a, b := newStation(t, f, 1, RailSpec{"r", link, nil, nil}), newStation(t, f, 2,
		RailSpec{"r", link, nil, nil})
	s := newStream(a, b, 0, 8)
	f.Run(20*time.Millisecond, nil)
	b.h.Rails()[0].Rx().SetSilent(true)
	f.Run(2*time.Second, nil)
	b.h.Rails()[0].Rx().SetSilent(false)
	before := f.Stats().Delivered
	f.Run(5*time.Second, func() bool { return f.Stats().Delivered > before })
	first := f.Now()
	f.Run(first+resume-time.Millisecond, nil)
	if n := f.Stats().Delivered - before; n != 1 {
		t.Errorf("%d chunks came within %v of the first", n, resume)
	}
	f.Run(first+resume+50*time.Millisecond, nil)
	if n := f.Stats().Delivered - before; n < 50 {
		t.Errorf("%d chunks came in %v", n, f.Now()-first)
	}
	s.stop = true
}

// TestBarred: where the sender's own stack has no route, what had left arrives, nothing else
// leaves, and once there is a route again all goes on at the next try: nothing was lost that Linux
// would look for first.
func TestBarred(t *testing.T) {
	f := New(Config{Seed: 1, Resume: 300 * time.Millisecond})
	link := LinkSpec{BitsPerSecond: 1e9, Latency: 5 * time.Millisecond}
	a, b := newStation(t, f, 1, RailSpec{"r", link, nil, nil}), newStation(t, f, 2,
		RailSpec{"r", link, nil, nil})
	s := newStream(a, b, 0, 8)
	f.Run(100*time.Millisecond, nil)
	tx, before := a.h.Rails()[0].Tx(), f.Stats().Delivered
	tx.SetBarred(true)
	f.Run(150*time.Millisecond, nil)
	left := f.Stats().Delivered
	if left == before {
		t.Error("what was on its way did not arrive")
	}
	f.Run(2*time.Second, nil)
	if n := f.Stats().Delivered - left; n != 0 {
		t.Errorf("%d chunks left without a route", n)
	}
	tx.SetBarred(false)
	f.Run(5*time.Second, func() bool { return f.Stats().Delivered > left })
	first := f.Now()
	f.Run(first+100*time.Millisecond, nil)
	if n := f.Stats().Delivered - left; n < 50 {
		t.Errorf("%d chunks came in the 100 ms after the first", n)
	}
	s.stop = true
}

// TestTrace: a seed is a trace, and only that.
func TestTrace(t *testing.T) {
	run := func(seed uint64) (uint64, uint64) {
		f := New(Config{Seed: seed})
		link := LinkSpec{BitsPerSecond: 1e9, Latency: 50 * time.Microsecond,
			Jitter: 20 * time.Microsecond, Loss: 0.001, Buffer: 256 << 10}
		b := newStation(t, f, 100, RailSpec{"r", link, nil, nil})
		for i := range 8 {
			a := newStation(t, f, byte(i+1), RailSpec{"r", link, nil, nil})
			newStream(a, b, 0, 8)
			f.After(f.Jitter(100*time.Millisecond), func() {
				a.h.Rails()[0].Flap(20*time.Millisecond, 150*time.Millisecond)
			})
		}
		f.Run(200*time.Millisecond, nil)
		return f.Trace(), f.Stats().Events
	}
	x, n := run(1)
	if y, m := run(1); x != y || n != m {
		t.Errorf("one seed, two traces: %016x after %d events, %016x after %d", x, n, y, m)
	}
	if y, _ := run(2); x == y {
		t.Error("two seeds, one trace")
	}
}

func TestQueue(t *testing.T) {
	f := New(Config{Seed: 3})
	var q queue
	for range 1000 {
		for range f.rng.IntN(40) {
			q.push(Time(f.rng.IntN(100)), event{})
		}
		last := entry{at: math.MinInt64}
		for range f.rng.IntN(45) {
			if len(q.heap) == 0 {
				break
			}
			top := q.heap[0]
			if at, _ := q.pop(); at != top.at || top.before(last) {
				t.Fatalf("%v after %v", top, last)
			}
			last = top
		}
	}
}

func BenchmarkEvents(b *testing.B) {
	f := New(Config{Seed: 1, WindowBytes: 512 << 10})
	link := LinkSpec{BitsPerSecond: 10e9, Latency: 5 * time.Microsecond, Jitter: time.Microsecond,
		Buffer: 8 << 20}
	dst := newStation(b, f, 200, RailSpec{"r", link, nil, nil})
	var all []*stream
	for i := range 16 {
		all = append(all, newStream(newStation(b, f, byte(i+1), RailSpec{"r", link, nil, nil}),
			dst, 0, 16))
	}
	b.ReportAllocs()
	for b.Loop() {
		for _, s := range all {
			if s.next+2*streamSlice*64 > spaceChunks {
				s.next = 0
			}
		}
		f.Step()
	}
	b.ReportMetric(float64(f.stats.Events)/b.Elapsed().Seconds(), "events/s")
}
