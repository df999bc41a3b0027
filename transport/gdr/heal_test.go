package gdr

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// eventLog counts the events of devices that were looked at. One is logged before it is acted upon,
// so that the next one's line shows that this was done.
type eventLog struct {
	slog.Handler
	seen *atomic.Int64
}

func (h eventLog) Enabled(context.Context, slog.Level) bool { return true }

func (h eventLog) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "device event" {
		h.seen.Add(1)
	}
	return nil
}

// healPair is a pair whose lanes are opened at the addresses of its devices' GIDs. notified counts
// the events of the first end's host, seen the events that it looked at.
func healPair(t *testing.T) (f *fake.Fabric, p *transporttest.Pair, notified, seen *atomic.Int64) {
	t.Helper()
	f, _ = rig(t)
	f.SetGID("here", netip.MustParseAddr("127.0.0.2"))
	f.SetGID("there", netip.MustParseAddr("127.0.0.3"))
	notified, seen = new(atomic.Int64), new(atomic.Int64)
	names := []string{"here", "there"}
	return f, transporttest.NewPair(t, func(testing.TB) transport.Backend {
		name := names[0]
		names = names[1:]
		rails := []Rail{{Name: name, Open: func() (verbs.Device, error) { return f.Open(name) },
			NUMA: -1}}
		c := Config{Rails: func() ([]Rail, error) { return rails, nil }, Drain: 50 * time.Millisecond}
		if name == "here" {
			c.Changed = func() { notified.Add(1) }
			c.Log = slog.New(eventLog{slog.DiscardHandler, seen})
		}
		return New(c)
	}), notified, seen
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
	b.Dest.Seed.Store(uint64(gen))
	l := open(t, p, 0)
	if r := p.A.MoveWait(l, b.Origin, src.All(), 1); r.Outcome != transfer.Landed || !b.Dest.Full() {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	b.End(t)
	_ = l.Close()
}

func railOf(e *transporttest.End) RailState { return e.Backend.(*Backend).Rails()[0] }

// TestGIDChange: the address of a port changes under a lane with a slice on it. The lane ends, the
// choice is made again, the rail is at the new address, the host is notified, and lanes work, all
// without a restart.
func TestGIDChange(t *testing.T) {
	f, p, notified, seen := healPair(t)
	moves(t, p, 1)
	old := railOf(p.A)
	if !strings.HasPrefix(old.Address, "127.0.0.2:") || old.Down {
		t.Fatalf("%+v", old)
	}
	// A GID that we do not use comes and goes: nothing happens.
	a := open(t, p, 0)
	f.Emit("here", verbs.Event{Kind: verbs.GIDChange})
	f.Emit("here", verbs.Event{Kind: verbs.PortUp})
	until(t, "both events are looked at", func() bool { return seen.Load() == 2 })
	moves(t, p, 2)
	if a.failure() != nil || notified.Load() != 0 {
		t.Fatalf("lane: %v, notified %d times", a.failure(), notified.Load())
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
	until(t, "events: it is down, and where it is now",
		func() bool { return notified.Load() >= 2 })
	moves(t, p, 3)
	b.End(t)

	// The only address is taken away, and another one comes much later.
	f.SetGID("here", netip.Addr{})
	until(t, "the rail is down", func() bool { return railOf(p.A).Down })
	peer, _ := p.A.PeerKey(p.B.Boot)
	if _, err := p.A.Backend.Dial(t.Context(), peer, p.A.Rails[0], p.B.Rails[0]); err == nil ||
		!strings.Contains(err.Error(), "not open again") {
		t.Errorf("dialed from a port without an address: %v", err)
	}
	f.SetGID("here", netip.MustParseAddr("127.0.0.5"))
	until(t, "the rail is there", func() bool { return !railOf(p.A).Down })
	moves(t, p, 4)
}

// TestRemoval: a device is pulled out in mid transfer, with queue pairs that will never flush. Its
// slices end in doubt at once, the fence holds, and when it is put back, lanes work.
func TestRemoval(t *testing.T) {
	f, p, notified, _ := healPair(t)
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
	until(t, "events: it is gone, and it is there",
		func() bool { return notified.Load() >= 2 })
}

// TestPortState: a rail reports that its port is down, and that it is up.
func TestPortState(t *testing.T) {
	f, p, notified, _ := healPair(t)
	f.Emit("here", verbs.Event{Kind: verbs.PortDown})
	until(t, "down", func() bool { return railOf(p.A).Down && notified.Load() == 1 })
	f.Emit("here", verbs.Event{Kind: verbs.PortDown}) // reports nothing new
	f.Emit("here", verbs.Event{Kind: verbs.PortUp})
	until(t, "up", func() bool { return !railOf(p.A).Down && notified.Load() == 2 })
	moves(t, p, 1)
}

// TestDeadAfterWaitsForNoTimerOfOurs: when the NIC's timers have given a path up, gdr reports its
// slices without a wait of its own. All waits of gdr are longer here than the test.
func TestDeadAfterWaitsForNoTimerOfOurs(t *testing.T) {
	f, p, _, _ := oddPair(t, func(c *Config) {
		c.Patience, c.Silence, c.Drain = time.Hour, time.Hour,
			time.Hour
	})
	l, _, b, _, res := underWay(t, f, p)
	f.TimeOut(l.q.Num())
	select {
	case r := <-res:
		if r.Outcome != transfer.InDoubt || !strings.Contains(r.Err.Error(), "retry exceeded") {
			t.Errorf("%s %s: %v", r.Outcome, r.Reason, r.Err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the slice waits for a timer of gdr's")
	}
	f.Release(l.q.Num())
	b.End(t)
}

// TestDeviceDeadAfter measures how long it takes until a dead path is noticed, and its slice
// reported, under the timers of each dead_after, in a guest that does nothing else. It judges no
// time: an emulated processor has no fixed speed.
func TestDeviceDeadAfter(t *testing.T) {
	ends(t) // or skip
	drop := func(how string) {
		if out, err := exec.Command("iptables", how, "INPUT", "-i", "r0b", "-p", "udp", "--dport", "4791",
			"-j", "DROP").CombinedOutput(); err != nil {
			t.Fatalf("iptables %s: %v: %s", how, err, out)
		}
	}
	const runs = 10
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	gen := transfer.Gen(0)
	var table strings.Builder
	for _, path := range []time.Duration{50 * time.Millisecond, 500 * time.Millisecond} {
		made := 0
		p := transporttest.NewPair(t, func(testing.TB) transport.Backend {
			name := fmt.Sprintf("r0%c", "ab"[made%2])
			made++
			open := func() (verbs.Device, error) {
				return verbs.Open(verbs.Config{Device: name, GIDIndex: verbs.AutoGID, Timer: timer(path),
					Retries: retries})
			}
			rails := []Rail{{Name: name, Open: open, Listen: "127.0.0.1:0", NUMA: -1}}
			return New(Config{Rails: func() ([]Rail, error) { return rails, nil }, Patience: 2 * path})
		})
		var noticed, notified []time.Duration
		for range runs {
			gen++
			b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, gen)
			l := open(t, p, 0)
			drop("-A")
			res := p.A.Move(l, b.Origin, src.All(), 1)
			until(t, "writes are posted", func() bool { return writing(l)() || l.failure() != nil })
			began := time.Now()
			until(t, "the lane is given up", func() bool { return l.failure() != nil })
			noticed = append(noticed, time.Since(began))
			r := <-res
			notified = append(notified, time.Since(began))
			if r.Outcome == transfer.Landed || !strings.Contains(r.Err.Error(), "retry exceeded") {
				t.Errorf("%s %s: %v", r.Outcome, r.Reason, r.Err)
			}
			drop("-D")
			b.End(t)
		}
		slices.Sort(noticed)
		slices.Sort(notified)
		unit := (retries + 1) * (4096 * time.Nanosecond << timer(path))
		ms := func(d time.Duration) string { return fmt.Sprintf("%.1f", float64(d.Microseconds())/1000) }
		fmt.Fprintf(&table, "| %s | %s to %s | %s (%s to %s) | %s (%s to %s) |\n", path, ms(unit),
			ms(2*unit), ms(noticed[runs/2]), ms(noticed[0]), ms(noticed[runs-1]),
			ms(notified[runs/2]), ms(notified[0]), ms(notified[runs-1]))
	}
	fmt.Printf("| dead_after | the timers take, ms | noticed after, median (range) | slices "+
		"reported after |\n|---|---|---|---|\n%s", table.String())
}

// TestDeviceLinkRemoved measures how long it takes until the lane of a link that was taken out in
// mid slice is down and the slice reported, from the start of the call that takes it out, and until
// there is a lane again once it was put back. It judges no time.
func TestDeviceLinkRemoved(t *testing.T) {
	ends(t) // or skip
	shell := func(command string) {
		if out, err := exec.Command("sh", "-ec", command).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
	}
	const (
		runs   = 10
		path   = 50 * time.Millisecond
		insert = `ip link add r1a type veth peer name r1b
			ip addr add 10.9.1.1/24 dev r1a; ip addr add 10.9.1.2/24 dev r1b
			ip link set r1a mtu 4500 up; ip link set r1b mtu 4500 up
			ip route replace 10.9.1.2 dev r1a src 10.9.1.1 table 101; ip route replace 10.9.1.1 dev r1b src 10.9.1.2 table 101
			rdma link add r1a type rxe netdev r1a; rdma link add r1b type rxe netdev r1b`
	)
	made := 0
	p := transporttest.NewPair(t, func(testing.TB) transport.Backend {
		name := fmt.Sprintf("r1%c", "ab"[made%2])
		made++
		open := func() (verbs.Device, error) {
			return verbs.Open(verbs.Config{Device: name, GIDIndex: verbs.AutoGID, Timer: timer(path),
				Retries: retries})
		}
		// the sockets do not go with the link
		rails := []Rail{{Name: name, Open: open, Listen: "127.0.0.1:0", NUMA: -1}}
		return New(Config{Rails: func() ([]Rail, error) { return rails, nil }, Patience: 2 * path})
	})
	large := transporttest.Shape{Chunks: 64, BlockBytes: 64 << 10}
	src, dst := transporttest.NewMemory(t, large), transporttest.NewMemory(t, large)
	var took [4][]time.Duration
	gen := transfer.Gen(0)
	for range runs {
		l := open(t, p, 0)
		link, err := netlink.LinkByName("r1a")
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		down, command := make(chan time.Duration, 1), make(chan time.Duration, 1)
		go func() {
			if err := netlink.LinkDel(link); err != nil {
				t.Error(err)
			}
			command <- time.Since(began)
		}()
		go func() {
			until(t, "the lane is down", func() bool { return l.failure() != nil })
			down <- time.Since(began)
		}()
		for over := false; !over; { // slice after slice, until one does not land
			gen++
			b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, gen)
			over = p.A.MoveWait(l, b.Origin, src.All(), 1).Outcome != transfer.Landed
			b.End(t)
		}
		notified := time.Since(began)
		for i, d := range []time.Duration{<-down, notified, <-command} {
			took[i] = append(took[i], d)
		}
		shell(insert)
		began = time.Now()
		open(t, p, 0)
		took[3] = append(took[3], time.Since(began))
	}
	var cells [4]string
	for i, all := range took {
		slices.Sort(all)
		cells[i] = fmt.Sprintf("%d (%d to %d)", all[runs/2].Milliseconds(), all[0].Milliseconds(),
			all[runs-1].Milliseconds())
	}
	fmt.Printf("| the link is removed: lane down after, ms | slice reported after | the call took | "+
		"lane again after it is back |\n|---|---|---|---|\n| %s |\n", strings.Join(cells[:], " | "))
}
