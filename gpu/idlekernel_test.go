package gpu

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// TestProbesNeedNoSlot: a probe needs no staging slot, so that callers of Enter may hold them all.
func TestProbesNeedNoSlot(t *testing.T) {
	r := newCopyRig(t, 1)
	u := r.gpu[0].Device().(*GPU)
	k := u.idleProbe
	ended := make(chan error, 2*cap(u.slots))
	for range cap(ended) {
		parts, _, _ := long(r.p.Machine, 2*mappedPieces)
		go func() { ended <- u.copyMapped(k, device.HostToDevice, parts) }()
	}
	for range cap(ended) {
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Fatal("they wait for each other")
		}
	}
}

// TestProbeBesideEngine: beside an engine the empty kernel ends when the engine pauses. Neither
// lists nor another probe wait for it.
func TestProbeBesideEngine(t *testing.T) {
	r := newCopyRig(t, 1)
	r.g.idleLimit = time.Millisecond
	u := r.gpu[0].Device().(*GPU)
	q := u.idleKernel.queue.(*gputest.Queue)
	leave := make(chan struct{})
	q.Work <- func() { <-leave } // the engine
	var probes atomic.Int32
	q.Device.Recorded = func(e device.Event) {
		if e == u.idleKernel.done {
			probes.Add(1)
		}
	}
	to, from := little(rand.New(rand.NewPCG(1, 1)), r.gpu[0], r.host, 64, true)
	if path, err := r.c.Copy(to, from); path != PathStaged || err != nil {
		t.Errorf("beside an engine: %s, %v", path, err)
	}
	if u.isIdle(patience) || probes.Load() != 1 {
		t.Errorf("%d probes, and the first one waits", probes.Load())
	}
	close(leave)
	for end := time.Now().Add(patience); !u.isIdle(patience); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("the engine has left")
		}
	}
	if probes.Load() != 2 {
		t.Errorf("%d probes, of which one waited", probes.Load())
	}
}

// TestLateProbe: a thread that is delayed sees the end of a kernel that has waited. This does not
// count as an idle GPU.
func TestLateProbe(t *testing.T) {
	r := newCopyRig(t, 1)
	u := r.gpu[0].Device().(*GPU)
	back := u.idleKernel.done.(*gputest.Event)
	if back.Late = time.Millisecond; u.isIdle(back.Late) {
		t.Error("back, but not in time")
	}
	if back.Late = 0; !u.isIdle(patience) {
		t.Error("back in time")
	}
}

// TestCloseWaitsForProbe: close waits for a pending empty kernel, for a bounded time, and launches
// no other.
func TestCloseWaitsForProbe(t *testing.T) {
	p := gputest.NewPlatform(1)
	g := gputest.Must(newGPUs(p, small()))(t)
	g.closeTimeout = 50 * time.Millisecond
	h, _ := p.Lend(0, 8192, 4096)
	region := gputest.Must(g.Import(mem.NewID(), h.Append(nil), -1, 4096))(t)
	u := region.Device().(*GPU)
	leave := make(chan struct{})
	u.idleKernel.queue.(*gputest.Queue).Work <- func() { <-leave }
	if u.isIdle(time.Millisecond) {
		t.Error("beside an engine")
	}
	region.Release()
	if err := g.Close(); err == nil || !strings.Contains(err.Error(), "empty kernel") {
		t.Errorf("closed over a kernel that has not run: %v", err)
	}
	close(leave)
	if !u.idleKernel.drain(nil) || u.isIdle(patience) {
		t.Error("a probe after the end")
	}
	for _, d := range p.Devices[0] {
		gputest.Must(0, d.Close())(t)
	}
}

// TestKernelsOnIdleGPUs: on idle GPUs kernels move blocks, whatever was learned beside engines, and
// nothing is learned. Beside an engine, blocks within one GPU go through host memory by copy
// engines alone. Between two GPUs the policy decides.
func TestKernelsOnIdleGPUs(t *testing.T) {
	for _, c := range []struct {
		name    string
		to      int // the other GPU
		busy    int
		learned map[policy.CopyMethod]float64
		beside  policy.CopyMethod
	}{
		{"within one", 0, 0, map[policy.CopyMethod]float64{policy.Pack: 1, policy.Copy: 2}, policy.Copy},
		{"source busy", 1, 0, map[policy.CopyMethod]float64{policy.Pack: 2, policy.Copy: 1}, policy.Copy},
		{"destination busy", 1, 1, map[policy.CopyMethod]float64{policy.Pack: 2, policy.Copy: 1},
			policy.Copy},
		{"kernels are learned", 1, 0, map[policy.CopyMethod]float64{policy.Pack: 1, policy.Copy: 2},
			policy.Pack},
	} {
		t.Run(c.name, func(t *testing.T) {
			plat := gputest.NewPlatform(2)
			g := gputest.Must(newGPUs(plat, Config{Slots: 3, Buffers: 8, PeerStage: 1 << 20}))(t)
			const block, n = 16 << 10, 64
			h0, src := plat.Lend(0, n*block, 0)
			h1, dst := plat.Lend(c.to, n*block, 0)
			from := gputest.Must(g.Import(mem.NewID(), h0.Append(nil), -1, n*block))(t)
			to := gputest.Must(g.Import(mem.NewID(), h1.Append(nil), -1, n*block))(t)
			rand.NewChaCha8([32]byte{2}).Read(src)
			var a, b []mem.Block
			for _, i := range rand.New(rand.NewPCG(2, 2)).Perm(n) {
				a = append(a, mem.Block{Region: from, Off: uint64(i) * block, Len: block})
				b = append(b, mem.Block{Region: to, Off: uint64(i) * block, Len: block})
			}
			both := []*GPU{from.Device().(*GPU), to.Device().(*GPU)}
			busy := gputest.Must(g.find(gputest.UUID(c.busy)))(t)
			p := gputest.Must(g.pair(both[0], both[1]))(t)
			leave := make(chan struct{})
			busy.idleKernel.queue.(*gputest.Queue).Work <- func() { <-leave } // the engine
			for _, step := range []struct {
				what string
				wait time.Duration
				how  policy.CopyMethod
			}{{"beside an engine", time.Millisecond, c.beside}, {"idle", patience, policy.Pack}} {
				g.idleLimit = step.wait
				both[0].idleProbe, both[1].idleProbe = both[0].newIdleProbe(), both[1].newIdleProbe()
				p.policy = policy.Decided(c.learned) // beside an engine
				if step.wait == patience {
					close(leave)
					for end := time.Now().Add(patience); !busy.isIdle(patience); runtime.Gosched() {
						if time.Now().After(end) {
							t.Fatal("the engine has left")
						}
					}
				}
				clear(dst)
				if err := both[1].Move(b, a); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(src, dst) {
					t.Errorf("%s: content differs", step.what)
				}
				for _, e := range []policy.CopyMethod{policy.Pack, policy.Copy} {
					if moved := callsOf(p.policy, e) > 0; moved != (e == step.how) {
						t.Errorf("%s: %s moved blocks: %v", step.what, e, moved)
					}
				}
				if u := both[0]; c.to == 0 && callsOf(u.in, policy.Pack)+callsOf(u.out, policy.Pack) > 0 {
					t.Errorf("%s: a slot through host memory used a kernel", step.what)
				}
				if step.wait == patience {
					if w := p.policy.State(nil, "", "")[0].Methods[0]; w.Rate != 1e9/c.learned[step.how] {
						t.Errorf("%s: learned %v from it, before %v", step.what, w, c.learned)
					}
				}
			}
			from.Release()
			to.Release()
			if err := g.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestProbesOfPairs: a pair is probed only where the driver reports that MPS is off.
func TestProbesOfPairs(t *testing.T) {
	for _, c := range []struct {
		how    policy.CopyMethod
		mps    device.MPS
		probes bool
	}{{policy.Auto, device.MPSOff, true}, {policy.Auto, device.MPSOn, false},
		{policy.Auto, device.MPSUnknown, false}, {policy.Pack, device.MPSOff, false},
		{policy.Copy, device.MPSOff, false}} {
		plat := gputest.NewPlatform(2)
		plat.Mps = c.mps
		g := gputest.Must(newGPUs(plat, Config{Method: c.how, Slots: 3, Buffers: 8, PeerStage: 1 << 20}))(
			t)
		one, other := gputest.Must(g.find(gputest.UUID(0)))(t), gputest.Must(g.find(gputest.UUID(1)))(t)
		for _, p := range []*pair{gputest.Must(g.pair(one, one))(t),
			gputest.Must(g.pair(one, other))(t)} {
			if p.probed != c.probes {
				t.Errorf("%s, MPS %s, within one GPU %v: probed: %v", c.how, c.mps, p.from == p.to, p.probed)
			}
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
}
