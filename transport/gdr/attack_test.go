package gdr

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// The late write: writes are posted and on the wire, the receiver alone fences, its engine uses the
// blocks for another prompt, and only then the packets arrive. Nothing of the sender helps: it is
// frozen, with its lane's mutex held, so that none of its goroutines gets past it, while its NIC
// goes on.

const (
	seedOld   = 5
	seedNew   = 99 // what the engine's next prompt leaves in the blocks
	pairLasts = 50 // runs; the rig remembers every lane
)

// wire holds packets of the sender's first rail back, and lets them go.
type holder interface {
	hold(t *testing.T, sender *lane)
	// held waits until something of the sender's is on the wire. That it was posted proves only that
	// its NIC may have it by now.
	held(t *testing.T, sender *lane)
	// release returns when what was held has arrived, and reports whether there was anything.
	release(t *testing.T, sender *lane) bool
}

func runsOf(t *testing.T, standard int) int {
	s := os.Getenv(transporttest.AttackRunsEnv)
	if s == "" {
		return standard
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q", transporttest.AttackRunsEnv, s)
	}
	return n
}

func open(t *testing.T, p *transporttest.Pair, rail int) *lane {
	t.Helper()
	// a guest that gets a twentieth of a processor
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	peer, _ := p.A.PeerKey(p.B.Boot)
	for {
		l, err := p.A.Backend.Dial(ctx, peer, p.A.Rails[rail], p.B.Rails[rail])
		if err == nil {
			return l.(*lane)
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
}

// lateWrite makes one run. fence: whether the receiver fences, which the control run does without.
func lateWrite(t *testing.T, p *transporttest.Pair, w holder, src, dst *transporttest.Memory,
	gen transfer.Gen, success, fence bool) (changed bool) {
	t.Helper()
	src.Write(seedOld)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, gen)
	first := open(t, p, 0)
	w.hold(t, first)
	res := p.A.Move(first, b.Origin, src.All(), 1)
	until(t, "writes are posted and not answered", writing(first))
	w.held(t, first)
	first.mu.Lock()
	thaw := sync.OnceFunc(first.mu.Unlock)
	defer thaw() // whatever fails below: the lane's end waits for it
	if success {
		// Another lane brings everything; it takes the chunks over from the frozen one, which the
		// receiver stops.
		if r := p.A.MoveWait(open(t, p, 1), b.Origin, src.All(), 2); r.Outcome != transfer.Landed ||
			!b.Dest.Full() {
			t.Fatalf("the retry: %s %s: %v", r.Outcome, r.Reason, r.Err)
		}
	}
	if fence {
		b.Fence(t)
	}
	dst.Write(seedNew)
	if !w.release(t, first) {
		t.Fatal("nothing was held: this proves nothing")
	}
	for c := range dst.Chunks() {
		if at, ok := dst.Holds(seedNew, int(c)); !ok {
			changed = true
			if fence {
				t.Errorf("chunk %d: byte %d was written after the fence", c, at)
			}
		}
	}
	thaw()
	if !fence {
		_ = first.Close()
	}
	select {
	case r := <-res:
		if r.Outcome == transfer.Landed && fence {
			t.Errorf("the late slice counts as landed")
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the late slice never ended")
	}
	b.End(t)
	return changed
}

func lateWrites(t *testing.T, runs int, pair func(t *testing.T) (*transporttest.Pair, holder)) {
	for _, success := range []bool{false, true} {
		t.Run(map[bool]string{false: "after cancel", true: "after success"}[success], func(t *testing.T) {
			src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
			for run := 0; run < runs && !t.Failed(); {
				n := min(pairLasts, runs-run)
				t.Run("lanes", func(t *testing.T) { // what a pair remembers goes with it
					p, w := pair(t)
					for range n {
						run++
						lateWrite(t, p, w, src, dst, transfer.Gen(run), success, true)
					}
				})
			}
			t.Logf("%d runs", runs)
		})
	}
	t.Run("without a fence they do arrive", func(t *testing.T) {
		p, w := pair(t)
		if !lateWrite(t, p, w, transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape), 1,
			false, false) {
			t.Error("not a byte came: the attack attacks nothing")
		}
	})
}

// fakeWire is the fabric, driven by hand while packets are held.
type fakeWire struct{ f *fake.Fabric }

func (w fakeWire) hold(_ *testing.T, l *lane) { w.f.Hold(l.q.Num()) }

func (w fakeWire) held(t *testing.T, l *lane) {
	until(t, "messages are on the wire", func() bool { return w.f.Held(l.q.Num()) > 0 })
}

func (w fakeWire) release(t *testing.T, l *lane) bool {
	held := w.f.Held(l.q.Num())
	w.f.Release(l.q.Num())
	until(t, "the held messages arrive", func() bool { return w.f.Held(l.q.Num()) == 0 })
	return held > 0
}

// lagWire is the fabric where the writes have arrived and are acknowledged, and their bytes are not
// in memory.
type lagWire struct{ fakeWire }

func (w lagWire) hold(_ *testing.T, l *lane) {
	w.f.Lag(l.q.Num())
	w.f.Hold(l.q.Num(), fake.Answer) // or it would have its verdict posted
}

// release: a fence forces the bytes into memory. That there were any held has shown.
func (w lagWire) release(t *testing.T, l *lane) bool {
	w.fakeWire.release(t, l)
	return true
}

// TestLateDMA is the attack on the fake, with messages on the wire, ten times as often as the
// others, and with bytes that lag.
func TestLateDMA(t *testing.T) {
	t.Run("on the wire", func(t *testing.T) {
		lateDMA(t, 10*runsOf(t, 20),
			func(f *fake.Fabric) holder { return fakeWire{f} })
	})
	t.Run("lagging", func(t *testing.T) {
		lateDMA(t, runsOf(t, 20), func(f *fake.Fabric) holder { return lagWire{fakeWire{f}} })
	})
}

// lateDMA draws another order for each pair.
func lateDMA(t *testing.T, runs int, wire func(*fake.Fabric) holder) {
	lateWrites(t, runs, func(t *testing.T) (*transporttest.Pair, holder) {
		f, _ := rig(t)
		return transporttest.NewPair(t, func(testing.TB) transport.Backend {
			rails := []Rail{}
			for _, name := range []string{"fake0", "fake1"} {
				rails = append(rails, Rail{Name: name, Open: func() (verbs.Device,
					error) {
					return f.Open(name)
				}, Listen: "127.0.0.1:0", NUMA: -1})
			}
			return New(Config{Rails: func() ([]Rail, error) { return rails, nil },
				Patience: time.Millisecond, Silence: time.Minute})
		}), wire(f)
	})
}

// plugWire holds packets in a queueing discipline of the sender's network interface.
type plugWire struct{ before uint64 }

func tc(t *testing.T, args string) {
	t.Helper()
	if out, err := exec.Command("tc", strings.Fields("qdisc "+args)...).CombinedOutput(); err != nil {
		t.Fatalf("tc qdisc %s: %v: %s", args, err, out)
	}
}

func received(t *testing.T) uint64 {
	t.Helper()
	b, err := os.ReadFile("/sys/class/net/r0b/statistics/rx_packets")
	if err == nil {
		var n uint64
		if n, err = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil {
			return n
		}
	}
	t.Fatal(err)
	return 0
}

func (w *plugWire) hold(t *testing.T, _ *lane) {
	tc(t, "change dev r0a root plug block")
	w.before = received(t)
}

func (w *plugWire) held(t *testing.T, _ *lane) {
	until(t, "packets wait in the plug", func() bool {
		out, err := exec.Command("tc", "-s", "qdisc", "show", "dev", "r0a").CombinedOutput()
		if err != nil {
			t.Fatalf("tc -s qdisc: %v: %s", err, out)
		}
		return strings.Contains(string(out), "backlog ") && !strings.Contains(string(out),
			"backlog 0b 0p")
	})
}

// release waits until the receiver's interface has had nothing new for a while.
func (w *plugWire) release(t *testing.T, _ *lane) bool {
	if n := received(t); n != w.before {
		t.Fatalf("%d packets came while they were held", n-w.before)
	}
	tc(t, "change dev r0a root plug release_indefinite")
	last, since := w.before, time.Now()
	until(t, "the held packets arrive", func() bool {
		if n := received(t); n != last {
			last, since = n, time.Now()
		}
		return last > w.before && time.Since(since) > 30*time.Millisecond
	})
	return last > w.before
}

// TestDeviceLateWrites is the attack on real queue pairs, in the guest.
func TestDeviceLateWrites(t *testing.T) {
	ends(t) // or skip
	tc(t, "add dev r0a root plug limit 1000000000")
	tc(t, "change dev r0a root plug release_indefinite")
	defer tc(t, "del dev r0a root")
	lateWrites(t, runsOf(t, 20), func(t *testing.T) (*transporttest.Pair, holder) {
		made := 0
		return transporttest.NewPair(t, func(testing.TB) transport.Backend {
			side := string("ab"[made%2])
			made++
			var rails []Rail
			for i := range 2 {
				name := fmt.Sprintf("r%d%s", i, side)
				// The sockets go over loopback, so that only the NIC's packets are held. The
				// sender's NIC shall not give up before they are let go.
				rails = append(rails, guestRail(name, "127.0.0.1:0"))
			}
			return New(Config{Rails: func() ([]Rail, error) { return rails, nil }, Opening: time.Minute,
				Patience: 20 * time.Millisecond, Silence: time.Minute, HostSilence: time.Minute})
		}), &plugWire{}
	})
}

// TestKeysEnd: the receiver's registration is invalidated in mid transfer, as where its NIC does
// not drain. The slices under way end in doubt, and the next lane has keys of another generation.
func TestKeysEnd(t *testing.T) {
	f, factory := rig(t)
	p := transporttest.NewPair(t, factory)
	a, b := p.Dial()
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(seedOld)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	bind.Dest.Seed.Store(seedOld)
	f.Hold(a.(*lane).q.Num())
	res := p.A.Move(a, bind.Origin, src.All(), 1)
	until(t, "writes are under way", writing(a))
	if err := b.(*lane).dst.invalidate(bind.Grant); err != nil {
		t.Fatal(err)
	}
	f.Release(a.(*lane).q.Num())
	select {
	case r := <-res:
		if r.Outcome != transfer.InDoubt || r.Reason != transfer.ReasonLaneLost {
			t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the slice never ended")
	}
	if at, ok := dst.Filled(0xa5); !ok {
		t.Fatalf("byte %d was written through keys that had ended", at)
	}
	next := open(t, p, 0)
	if r := p.A.MoveWait(next, bind.Origin, src.All(), 2); r.Outcome != transfer.Landed {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	bind.End(t)
}

// TestDeviceKeysEnd: the receiver's registration ends in mid transfer on real queue pairs, which
// costs the lane. Retries go under keys of another generation, and everything lands.
// That some writes were under way is tried until it is so.
func TestDeviceKeysEnd(t *testing.T) {
	p := transporttest.NewPair(t, ends(t))
	large := transporttest.Shape{Chunks: 4 * maxInFlight, BlockBytes: 16 << 10, Shuffle: true}
	src, dst := transporttest.NewMemory(t, large), transporttest.NewMemory(t, large)
	src.Write(seedOld)
	slice := func(i int) transfer.Range { return transfer.Range{First: uint32(4 * i), Count: 4} }
	const limit = 50
	for gen := transfer.Gen(1); ; gen++ {
		bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, gen)
		bind.Dest.Seed.Store(seedOld)
		l := open(t, p, 0)
		dev, err := p.B.Backend.(*Backend).rails[0].current()
		if err != nil {
			t.Fatal(err)
		}
		var all []<-chan transport.Result
		for i := range maxInFlight {
			all = append(all, p.A.Move(l, bind.Origin, slice(i), 1))
		}
		first := <-all[0] // the registration is there
		k, err := dev.keys.get(keyName{dst.Region, p.A.Boot, true}, true)
		if err != nil {
			t.Fatal(err)
		}
		if err := k.invalidate(); err != nil {
			t.Fatal(err)
		}
		k.put()
		lost := 0
		for i, c := range all {
			r := first
			if i > 0 {
				r = <-c
			}
			for attempt := uint32(2); r.Outcome != transfer.Landed; attempt++ {
				if lost++; attempt > limit {
					t.Fatalf("slice %d: %s %s: %v", i, r.Outcome, r.Reason, r.Err)
				}
				if l.failure() != nil {
					l = open(t, p, 0)
				}
				r = p.A.MoveWait(l, bind.Origin, slice(i), attempt)
			}
		}
		if !bind.Dest.Full() {
			t.Fatal("not full")
		}
		_ = l.Close()
		bind.End(t)
		dst.GapsIntact(t)
		if lost > 0 {
			t.Logf("round %d: %d tries failed", gen, lost)
			return
		}
		if gen == limit {
			t.Fatal("no write was under way at any end of the keys: this proves nothing")
		}
	}
}

// TestDeviceEvents: a port that goes down takes its lanes with it at once, and none is opened until
// it is up; a device that is lost is opened again.
func TestDeviceEvents(t *testing.T) {
	f, _ := rig(t)
	names := []string{"here", "there"}
	p := transporttest.NewPair(t, func(testing.TB) transport.Backend {
		name := names[0]
		names = names[1:]
		rails := []Rail{{Name: name, Open: func() (verbs.Device, error) { return f.Open(name) },
			Listen: "127.0.0.1:0", NUMA: -1}}
		return New(Config{Rails: func() ([]Rail, error) { return rails, nil }})
	})
	a, _ := p.Dial()
	x := a.(*lane)
	down := func() bool { return x.failure() != nil }
	f.Emit("here", verbs.Event{Kind: verbs.QueuePairFatal, QP: x.q.Num() + 1000})
	f.Emit("here", verbs.Event{Kind: verbs.PortDown})
	until(t, "the lane is down", down)
	if err := x.failure(); !strings.Contains(err.Error(), "port down") {
		t.Error(err)
	}
	peer, _ := p.A.PeerKey(p.B.Boot)
	if _, err := p.A.Backend.Dial(t.Context(), peer, p.A.Rails[0], p.B.Rails[0]); err == nil ||
		!strings.Contains(err.Error(), "not active") {
		t.Errorf("dialed over a port that is down: %v", err)
	}
	f.Emit("here", verbs.Event{Kind: verbs.PortUp})
	x = open(t, p, 0)
	f.Emit("here", verbs.Event{Kind: verbs.QueuePairFatal, QP: x.q.Num()})
	until(t, "the lane is down", down)

	x = open(t, p, 0)
	lost := x.dev
	f.Emit("here", verbs.Event{Kind: verbs.DeviceFatal})
	until(t, "the lane is down", down)
	if err := x.failure(); !strings.Contains(err.Error(), "device lost") {
		t.Error(err)
	}
	f.Emit("here", verbs.Event{Kind: verbs.PortUp}) // it is back
	if x = open(t, p, 0); x.dev == lost {
		t.Error("a lane on the device that was lost")
	}
	until(t, "the lost device is closed", func() bool {
		lost.mu.Lock()
		defer lost.mu.Unlock()
		return lost.closed
	})
}

// TestFailedRegistration: what cannot be registered fails the lane with the device's own words.
func TestFailedRegistration(t *testing.T) {
	refuse := errors.New("the limit of locked memory is 65536 bytes: run 'ulimit -l unlimited'")
	f, _ := rig(t)
	p := transporttest.NewPair(t, func(testing.TB) transport.Backend {
		c := config(f)
		rails, _ := c.Rails()
		inner := rails[0].Open
		rails[0].Open = func() (verbs.Device, error) {
			d, err := inner()
			return refusing{d, refuse}, err
		}
		return New(c)
	})
	a, _ := p.Dial()
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	r := p.A.MoveWait(a, bind.Origin, src.All(), 1)
	if r.Outcome != transfer.NotLanded || r.Reason != transfer.ReasonLaneLost {
		t.Errorf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	bind.End(t)
}

type refusing struct {
	verbs.Device
	err error
}

func (r refusing) NewDomain() (verbs.Domain, error) {
	p, err := r.Device.NewDomain()
	return refusingDomain{p, r.err}, err
}

type refusingDomain struct {
	verbs.Domain
	err error
}

func (r refusingDomain) Register([]byte, bool) (verbs.Memory, error) { return nil, r.err }
