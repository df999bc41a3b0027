package gdr

import (
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/verbs"
	"github.com/kvspray/kvspray/internal/verbs/fake"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// healPair is a pair whose lanes are opened at the addresses of its devices' GIDs. told counts what the first end's host was told.
func healPair(t *testing.T) (f *fake.Fabric, p *transporttest.Pair, told *atomic.Int64) {
	t.Helper()
	f, _ = rig(t)
	f.SetGID("here", netip.MustParseAddr("127.0.0.2"))
	f.SetGID("there", netip.MustParseAddr("127.0.0.3"))
	told = new(atomic.Int64)
	names := []string{"here", "there"}
	return f, transporttest.NewPair(t, func(testing.TB) transport.Backend {
		name := names[0]
		names = names[1:]
		rails := []Rail{{Name: name, Open: func() (verbs.Device, error) { return f.Open(name) }, NUMA: -1}}
		c := Config{Rails: func() ([]Rail, error) { return rails, nil }, Drain: 50 * time.Millisecond}
		if name == "here" {
			c.Changed = func() { told.Add(1) }
		}
		return New(c)
	}), told
}

// moves moves everything over a new lane, at the rails as both ends have them now.
func moves(t *testing.T, p *transporttest.Pair, gen transfer.Gen) {
	t.Helper()
	for _, e := range []*transporttest.End{p.A, p.B} {
		e.Rails[0] = e.Backend.(*Backend).Rails()[0].Rail
	}
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(uint64(gen))
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, gen)
	b.Sink.Seed.Store(uint64(gen))
	l := open(t, p, 0)
	if r := p.A.MoveWait(l, b.Origin, src.All(), 1); r.Outcome != transfer.Landed || !b.Sink.Full() {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	b.End(t)
	_ = l.Close()
}

func railOf(e *transporttest.End) RailState { return e.Backend.(*Backend).Rails()[0] }

// TestGIDChange: the address of a port changes under a lane with a slice on it. The lane ends, the choice is made again, the rail is at
// the new address, the host is told, and lanes work, all without a restart.
func TestGIDChange(t *testing.T) {
	f, p, told := healPair(t)
	moves(t, p, 1)
	old := railOf(p.A)
	if !strings.HasPrefix(old.Address, "127.0.0.2:") || old.Down {
		t.Fatalf("%+v", old)
	}
	// A GID that we do not use comes and goes: nothing happens.
	a := open(t, p, 0)
	f.Emit("here", verbs.Event{Kind: verbs.GIDChange})
	f.Emit("here", verbs.Event{Kind: verbs.PortUp}) // seen after it
	moves(t, p, 2)
	if a.failure() != nil || told.Load() != 0 {
		t.Fatalf("lane: %v, told %d times", a.failure(), told.Load())
	}

	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 2, 1)
	f.Hold(a.q.Num())
	res := p.A.Move(a, b.Origin, src.All(), 1)
	until(t, "writes are under way", writing(a))
	f.SetGID("here", netip.MustParseAddr("127.0.0.4"))
	if r := <-res; r.Outcome != transfer.InDoubt || !strings.Contains(r.Err.Error(), "has changed") {
		t.Errorf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	b.Fence(t)
	until(t, "the rail is at the new address", func() bool {
		s := railOf(p.A)
		return !s.Down && strings.HasPrefix(s.Address, "127.0.0.4:")
	})
	if told.Load() < 2 {
		t.Errorf("the host was told %d times: that it is down, and where it is now", told.Load())
	}
	moves(t, p, 3)
	b.End(t)

	// The only address is taken away, and another one comes much later.
	f.SetGID("here", netip.Addr{})
	until(t, "the rail is down", func() bool { return railOf(p.A).Down })
	peer, _ := p.A.PeerKey(p.B.Boot)
	if _, err := p.A.Backend.Dial(t.Context(), peer, p.A.Rails[0], p.B.Rails[0]); err == nil || !strings.Contains(err.Error(), "not there again") {
		t.Errorf("dialled from a port without an address: %v", err)
	}
	f.SetGID("here", netip.MustParseAddr("127.0.0.5"))
	until(t, "the rail is there", func() bool { return !railOf(p.A).Down })
	moves(t, p, 4)
}

// TestRemoval: a device is pulled out in mid transfer, with queue pairs that will never flush. Its slices end in doubt at once, the
// fence holds, and when it is put back, lanes work.
func TestRemoval(t *testing.T) {
	f, p, told := healPair(t)
	moves(t, p, 1)
	for gen, name := range []string{"here", "there"} {
		a := open(t, p, 0)
		src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
		b := transporttest.NewBind(t, p.A, p.B, src, dst, 2, transfer.Gen(gen+1))
		f.Hold(a.q.Num())
		res := p.A.Move(a, b.Origin, src.All(), 1)
		until(t, "writes are under way", writing(a))
		f.Remove(name)
		if r := <-res; r.Outcome != transfer.InDoubt {
			t.Errorf("%s: %s %s: %v", name, r.Outcome, r.Reason, r.Err)
		}
		b.Fence(t)
		dst.Write(seedNew)
		f.Release(a.q.Num())
		end := p.A
		if name == "there" {
			end = p.B
		}
		until(t, "the rail is down", func() bool { return railOf(end).Down })
		r := end.Backend.(*Backend).rails[0]
		until(t, "the device that is gone is closed", func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			return len(r.lost) == 0
		})
		f.Insert(name)
		until(t, "the rail is there again", func() bool { return !railOf(end).Down })
		moves(t, p, transfer.Gen(gen+2))
		for c := range dst.Chunks() {
			if at, ok := dst.Holds(seedNew, int(c)); !ok {
				t.Fatalf("%s: chunk %d: byte %d was written after the fence", name, c, at)
			}
		}
		b.End(t)
	}
	if told.Load() < 2 {
		t.Errorf("told %d times", told.Load())
	}
}

// TestPortState: a rail says that its port is down, and that it is up.
func TestPortState(t *testing.T) {
	f, p, told := healPair(t)
	f.Emit("here", verbs.Event{Kind: verbs.PortDown})
	until(t, "down", func() bool { return railOf(p.A).Down && told.Load() == 1 })
	f.Emit("here", verbs.Event{Kind: verbs.PortDown}) // says nothing new
	f.Emit("here", verbs.Event{Kind: verbs.PortUp})
	until(t, "up", func() bool { return !railOf(p.A).Down && told.Load() == 2 })
	moves(t, p, 1)
}
