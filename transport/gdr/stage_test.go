package gdr

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// The contract with memory at both ends that no NIC reaches.
func TestConformanceStaged(t *testing.T) {
	transporttest.ConformanceOnDevice(t, func(tb testing.TB,
		_ *transporttest.Device) transporttest.Factory {
		_, f := rig(tb)
		return f
	})
}

// The same on real queue pairs, in the guest.
func TestDeviceConformanceStaged(t *testing.T) {
	transporttest.ConformanceOnDevice(t, func(tb testing.TB,
		_ *transporttest.Device) transporttest.Factory {
		return ends(tb)
	})
}

// Memory of a process that cannot be mapped is staged, at either end.
func TestStagedProcessMemory(t *testing.T) {
	for _, far := range []bool{false, true} {
		_, factory := rig(t)
		p := transporttest.NewPair(t, factory)
		a, _ := p.Dial()
		src, dst := transporttest.NewMemory(t, stagedShape), transporttest.NewMemory(t, stagedShape)
		src.Write(seedOld)
		if far {
			dst.ThroughProc(t)
		} else {
			src.ThroughProc(t)
		}
		bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
		bind.Dest.Seed.Store(seedOld)
		if r := p.A.MoveWait(a, bind.Origin, src.All(), 1); r.Outcome != transfer.Landed ||
			!bind.Dest.Full() {
			t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
		}
		bind.End(t)
		dst.GapsIntact(t)
	}
}

// apart is a GPU that no NIC reaches. Its scatters can be stopped at their begin.
type apart struct {
	*transporttest.Device
	gate        atomic.Pointer[gated]
	out, maxOut atomic.Int64 // lent buffers
	poor        atomic.Bool  // it lends none
}

type gated struct{ came, pass chan struct{} }

func (a *apart) Scatter(blocks []mem.Block, src []byte) error {
	if g := a.gate.Load(); g != nil {
		g.came <- struct{}{}
		<-g.pass
	}
	return a.Device.Scatter(blocks, src)
}

func (a *apart) Lend() []byte {
	if a.poor.Load() {
		return nil
	}
	p := a.Device.Lend()
	if p != nil {
		a.maxOut.Store(max(a.maxOut.Load(), a.out.Add(1)))
	}
	return p
}

func (a *apart) Return(p []byte) {
	a.out.Add(-1)
	a.Device.Return(p)
}

// closeBefore closes backends before the devices that were made so far, whose buffers idle lanes
// keep for a while.
func closeBefore(t *testing.T, p *transporttest.Pair) {
	t.Cleanup(func() {
		_ = p.A.Backend.Close()
		_ = p.B.Backend.Close()
	})
}

func onApart(t *testing.T, m *transporttest.Memory) *apart {
	t.Helper()
	p, _ := m.Region.Bytes()
	a := &apart{Device: transporttest.NewDevice(t)}
	a.Put(gpuAddr, p)
	r, err := mem.NewDevice(mem.NewID(), mem.DeviceMemory{Device: a, Addr: gpuAddr,
		Size: uint64(len(p)), FD: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	m.Replace(r)
	return a
}

// stagedShape has slices that fit into a lent buffer.
var stagedShape = transporttest.Shape{Chunks: 8, BlockBytes: 16 << 10, Shuffle: true,
	TailBytes: 4096}

// stagedPair has a lane and a grant of memory that must be staged at both ends.
type stagedPair struct {
	f           *fake.Fabric
	p           *transporttest.Pair
	there       *oddDevice
	a, b        *lane
	src, dst    *transporttest.Memory
	read, write *apart
	bind        *transporttest.Bind
}

func newStagedPair(t *testing.T, change func(*Config)) *stagedPair {
	t.Helper()
	s := &stagedPair{}
	s.f, s.p, _, s.there = oddPair(t, change)
	x, y := s.p.Dial()
	s.a, s.b = x.(*lane), y.(*lane)
	s.src, s.dst = transporttest.NewMemory(t, stagedShape), transporttest.NewMemory(t, stagedShape)
	s.src.Write(seedOld)
	s.read, s.write = onApart(t, s.src), onApart(t, s.dst)
	closeBefore(t, s.p)
	s.bind = transporttest.NewBind(t, s.p.A, s.p.B, s.src, s.dst, 1, 1)
	return s
}

// sent starts a slice whose bytes stay on the wire.
func (s *stagedPair) sent(t *testing.T) <-chan transport.Result {
	t.Helper()
	s.f.Hold(s.a.q.Num())
	res := s.p.A.Move(s.a, s.bind.Origin, s.src.All(), 1)
	until(t, "messages are on the wire", func() bool { return s.f.Held(s.a.q.Num()) > 0 })
	return res
}

// reused writes the engine's next content and returns a check that it stays.
func (s *stagedPair) reused(t *testing.T) (check func()) {
	t.Helper()
	s.dst.Write(seedNew)
	return func() {
		t.Helper()
		for c := range s.dst.Chunks() {
			if at, ok := s.dst.Holds(seedNew, int(c)); !ok {
				t.Fatalf("chunk %d: byte %d was written after the fence", c, at)
			}
		}
		s.dst.GapsIntact(t)
	}
}

func (s *stagedPair) alive(t *testing.T) {
	t.Helper()
	for _, l := range []*lane{s.a, s.b} {
		if err := l.failure(); err != nil {
			t.Errorf("a lane ended: %v", err)
		}
	}
}

// Bytes are on the wire when the fence returns. They arrive in the slab, and not in the blocks: the
// fence costs no lane. Without a fence they do arrive.
func TestStagedFenceBeforeCopy(t *testing.T) {
	for _, fence := range []bool{false, true} {
		s := newStagedPair(t, nil)
		res := s.sent(t)
		check := func() {}
		if fence {
			s.bind.Fence(t)
			check = s.reused(t)
		}
		s.f.Release(s.a.q.Num())
		r := <-res
		if fence && (r.Outcome != transfer.Rejected || r.Reason != transfer.ReasonRevoked) ||
			!fence && r.Outcome != transfer.Landed {
			t.Fatalf("fence %v: %s %s: %v", fence, r.Outcome, r.Reason, r.Err)
		}
		check()
		s.alive(t)
		s.bind.End(t)
	}
}

// A fence waits for the copy to the GPU that has begun.
func TestStagedFenceDuringCopy(t *testing.T) {
	s := newStagedPair(t, nil)
	g := &gated{came: make(chan struct{}), pass: make(chan struct{})}
	s.write.gate.Store(g)
	res := s.p.A.Move(s.a, s.bind.Origin, s.src.All(), 1)
	<-g.came
	s.write.gate.Store(nil)
	s.bind.Grant.Revoke()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if s.p.B.Backend.Fence(ended, s.bind.Grant) == nil {
		t.Error("the fence did not wait for a copy")
	}
	close(g.pass)
	s.bind.Fence(t)
	check := s.reused(t)
	if r := <-res; r.Outcome != transfer.Rejected || r.Reason != transfer.ReasonRevoked {
		t.Errorf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	check()
	s.alive(t)
	s.bind.End(t)
}

// A later attempt takes chunks over from a staged one, whose bytes arrive when the blocks have
// another owner. That costs no lane.
func TestStagedTakeOver(t *testing.T) {
	s := newStagedPair(t, nil)
	s.bind.Dest.Seed.Store(seedOld)
	res := s.sent(t)
	next := open(t, s.p, 0)
	if r := s.p.A.MoveWait(next, s.bind.Origin, s.src.All(), 2); r.Outcome != transfer.Landed ||
		!s.bind.Dest.Full() {
		t.Fatalf("the retry: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	s.bind.Fence(t)
	check := s.reused(t)
	s.f.Release(s.a.q.Num())
	if r := <-res; r.Outcome != transfer.NotLanded || r.Reason != transfer.ReasonSuperseded {
		t.Errorf("the late one: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	check()
	s.alive(t)
	s.bind.End(t)
}

// The NIC neither flushes, nor gives up queue pair and keys. What it may still write is not lent to
// others, and returns when it obeys.
func TestStagedSlabOfStuckNIC(t *testing.T) {
	s := newStagedPair(t, nil)
	res := s.sent(t)
	s.there.set(func(d *oddDevice) { d.noFlush, d.keepsQPs, d.keepsKeys = true, true, true })
	s.b.fail(errOdd)
	<-s.b.settled
	if r := <-res; r.Outcome != transfer.InDoubt {
		t.Errorf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	s.bind.Fence(t) // nothing but the slab may be written
	check := s.reused(t)
	var lent [][]byte
	for p := s.write.Lend(); p != nil; p = s.write.Lend() {
		mem.Fill(p, 0x33)
		lent = append(lent, p)
	}
	s.f.Release(s.a.q.Num())
	until(t, "the held messages arrive", func() bool { return s.f.Held(s.a.q.Num()) == 0 })
	for _, p := range lent {
		for i := range p {
			if p[i] != 0x33 {
				t.Fatalf("byte %d of a lent buffer was written", i)
			}
		}
		s.write.Return(p)
	}
	check()
	if s.write.out.Load() == 0 {
		t.Fatal("no slab was held: this proves nothing")
	}
	s.there.set(func(d *oddDevice) { d.noFlush, d.keepsQPs, d.keepsKeys = false, false, false })
	until(t, "the slab returns", func() bool { return s.write.out.Load() == 0 })
	s.bind.End(t)
}

// One of the two processes is killed: its kernel closes sockets and destroys queue pairs in mid
// write. The receiver's blocks have not a byte of it, and the transfer of the next process lands.
func TestStagedKilled(t *testing.T) {
	for _, end := range []string{"here", "there"} {
		s := newStagedPair(t, nil)
		res := s.sent(t)
		s.f.Remove(end)
		_ = map[string]*lane{"here": s.a, "there": s.b}[end].c.Close()
		<-s.a.settled
		<-s.b.settled
		if r := <-res; r.Outcome != transfer.InDoubt {
			t.Errorf("%s: %s %s: %v", end, r.Outcome, r.Reason, r.Err)
		}
		if at, ok := s.dst.Filled(0xa5); !ok {
			t.Errorf("%s: byte %d was written", end, at)
		}
		until(t, "both ends' slabs return", func() bool {
			return s.read.out.Load() == 0 && s.write.out.Load() == 0
		})
		_, q, _, _ := oddPair(t, nil)
		closeBefore(t, q)
		a, _ := q.Dial()
		again := transporttest.NewBind(t, q.A, q.B, s.src, s.dst, 1, 1)
		again.Dest.Seed.Store(seedOld)
		if r := q.A.MoveWait(a, again.Origin, s.src.All(), 1); r.Outcome != transfer.Landed {
			t.Errorf("%s: the next process: %s %s: %v", end, r.Outcome, r.Reason, r.Err)
		}
		again.End(t)
		s.bind.End(t)
		_ = q.A.Backend.Close()
		_ = q.B.Backend.Close()
	}
}

// Slices wait for a few slabs of a lane. They also move while the device lends nothing, and idle
// slabs return.
func TestStagedSlabs(t *testing.T) {
	for _, poor := range []bool{false, true} {
		s := newStagedPair(t, nil)
		s.read.poor.Store(poor)
		s.write.poor.Store(poor)
		var res []<-chan transport.Result
		for i := range s.src.Chunks() {
			res = append(res, s.p.A.Move(s.a, s.bind.Origin, transfer.Range{First: i, Count: 1}, 1))
		}
		for _, c := range res {
			if r := <-c; r.Outcome != transfer.Landed {
				t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
			}
		}
		for _, d := range []*apart{s.read, s.write} {
			if n := d.maxOut.Load(); n > maxSlabs || (n == 0) != poor {
				t.Errorf("%d slabs at a time", n)
			}
		}
		s.bind.End(t)
		for _, l := range []*lane{s.a, s.b} {
			l.trimStages(time.Now(), false)
			if l.trimStages(time.Now().Add(2*idleSlabs), false); len(l.stages) != 1 {
				t.Errorf("%d stages", len(l.stages))
			}
		}
		if n := s.read.out.Load() + s.write.out.Load(); n != 0 {
			t.Errorf("%d idle slabs stay", n)
		}
		s.alive(t)
	}
}

// Two slices make a lane's first slabs at a time, and the device refuses both: neither waits for
// the other one's slab.
func TestStagedSlabsRefusedTogether(t *testing.T) {
	s := newStagedPair(t, nil)
	errs := make(chan error, 2)
	var gates []chan struct{}
	for i := range 2 {
		gate := make(chan struct{})
		gates = append(gates, gate)
		s.there.set(func(d *oddDevice) { d.slow = gate })
		go func() {
			_, err := s.b.takeSlab(stageName{s.write, true}, sliceBytes/16)
			errs <- err
		}()
		until(t, "the device is asked for a registration", func() bool {
			return s.there.is(func(d *oddDevice) bool { return d.waiting == i+1 })
		})
	}
	s.there.set(func(d *oddDevice) { d.slow, d.refuses = nil, errOdd })
	close(gates[0])
	places := s.b.stage(stageName{s.write, true}).places
	until(t, "the first one is refused", func() bool { return len(places) == 1 })
	close(gates[1])
	for range 2 {
		select {
		case err := <-errs:
			if !errors.Is(err, errOdd) {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("a slice waits for a slab, and there is none")
		}
	}
	s.there.set(func(d *oddDevice) { d.refuses = nil })
	if n := s.b.dev.slabs; n != 0 {
		t.Errorf("%d bytes count as slabs", n)
	}
	s.alive(t)
	s.bind.End(t)
}

// Slices that are longer than an honest peer's are refused where they would be staged, at either
// end.
func TestStagedTooLong(t *testing.T) {
	for _, far := range []bool{false, true} {
		_, p, here, there := oddPair(t, nil)
		a, b := p.Dial()
		long := transporttest.Shape{Chunks: sliceBytes/transfer.ChunkBytes + 1, BlockBytes: 64 << 10}
		src, dst := transporttest.NewMemory(t, long), transporttest.NewMemory(t, long)
		src.Write(seedOld)
		at := src
		if far {
			at = dst
		}
		onApart(t, at)
		closeBefore(t, p)
		bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
		bind.Dest.Seed.Store(seedOld)
		if r := p.A.MoveWait(a, bind.Origin, src.All(), 1); r.Outcome == transfer.Landed ||
			r.Reason != transfer.ReasonLength {
			t.Errorf("far %v: %s %s: %v", far, r.Outcome, r.Reason, r.Err)
		}
		staging := here
		if far {
			staging = there
		}
		if n := staging.is(func(d *oddDevice) bool { return d.registered > 0 }); n {
			t.Errorf("far %v: memory was registered", far)
		}
		longest := transfer.Range{Count: sliceBytes / transfer.ChunkBytes}
		if r := p.A.MoveWait(a, bind.Origin, longest, 2); r.Outcome != transfer.Landed {
			t.Errorf("far %v: the longest one: %s %s: %v", far, r.Outcome, r.Reason, r.Err)
		}
		for _, l := range []*lane{a.(*lane), b.(*lane)} {
			if err := l.failure(); err != nil {
				t.Errorf("far %v: a lane ended: %v", far, err)
			}
		}
		bind.End(t)
	}
}

// A device's slabs have a bound. A lane with a slab carries on with it; without one its slices are
// refused, and it stays.
func TestStagedSlabBound(t *testing.T) {
	s := newStagedPair(t, nil)
	s.write.poor.Store(true)
	s.bind.Dest.Seed.Store(seedOld)
	dev := s.b.dev
	others := func(n int64) {
		dev.mu.Lock()
		defer dev.mu.Unlock()
		dev.slabs += uint64(n)
	}
	others(maxSlabBytes - sliceBytes)
	s.f.Hold(s.a.q.Num())
	first := s.p.A.Move(s.a, s.bind.Origin, transfer.Range{Count: 1}, 1)
	until(t, "messages are on the wire", func() bool { return s.f.Held(s.a.q.Num()) > 0 })
	second := s.p.A.Move(s.a, s.bind.Origin, transfer.Range{First: 1, Count: 1}, 1)
	x, y := s.p.Dial()
	if r := s.p.A.MoveWait(x, s.bind.Origin, transfer.Range{First: 2, Count: 1}, 1); r.Outcome !=
		transfer.Rejected || r.Reason != transfer.ReasonMemory {
		t.Errorf("a lane without a slab: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	s.f.Release(s.a.q.Num())
	for i, c := range []<-chan transport.Result{first, second} {
		if r := <-c; r.Outcome != transfer.Landed {
			t.Errorf("slice %d of a lane with a slab: %s %s: %v", i, r.Outcome, r.Reason, r.Err)
		}
	}
	s.b.trimStages(time.Time{}, true)
	if r := s.p.A.MoveWait(x, s.bind.Origin, s.src.All(), 2); r.Outcome != transfer.Landed ||
		!s.bind.Dest.Full() {
		t.Errorf("after a slab was given back: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	if err := y.(*lane).failure(); err != nil {
		t.Errorf("a lane ended: %v", err)
	}
	y.(*lane).trimStages(time.Time{}, true)
	others(sliceBytes - maxSlabBytes)
	if n := dev.slabs; n != 0 {
		t.Errorf("%d bytes count as slabs", n)
	}
	s.alive(t)
	s.bind.End(t)
}

// In mid transfer the NIC refuses a GPU's memory that it took before, at either end. The rest goes
// through host memory, on the same lane.
func TestRegistrationEndsInMidTransfer(t *testing.T) {
	f, p, _, _ := oddPair(t, nil)
	a, b := p.Dial()
	src, dst := transporttest.NewMemory(t, stagedShape), transporttest.NewMemory(t, stagedShape)
	src.Write(seedOld)
	from, to := onGPU(t, f, src), onGPU(t, f, dst)
	closeBefore(t, p)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	bind.Dest.Seed.Store(seedOld)
	half := transfer.Range{Count: src.Chunks() / 2}
	if r := p.A.MoveWait(a, bind.Origin, half, 1); r.Outcome != transfer.Landed ||
		from.Calls.Load()+to.Calls.Load() != 0 {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	from.noExport, to.noExport = true, true
	for _, l := range []*lane{a.(*lane), b.(*lane)} {
		if err := l.dev.keys.sweep(time.Now().Add(2 * idleKeys)); err != nil {
			t.Fatal(err)
		}
	}
	if r := p.A.MoveWait(a, bind.Origin, src.All(), 1); r.Outcome != transfer.Landed ||
		!bind.Dest.Full() || from.Calls.Load() == 0 || to.Calls.Load() == 0 {
		t.Fatalf("%d gathers, %d scatters: %s %s: %v", from.Calls.Load(), to.Calls.Load(), r.Outcome,
			r.Reason, r.Err)
	}
	bind.End(t)
	dst.GapsIntact(t)
}

// Both ends measure both ways of a GPU that the NIC reaches.
func TestBothWaysAreMeasured(t *testing.T) {
	f, p, _, _ := oddPair(t, nil)
	a, b := p.Dial()
	whole := transporttest.Shape{Chunks: 16, BlockBytes: 64 << 10}
	src, dst := transporttest.NewMemory(t, whole), transporttest.NewMemory(t, whole)
	src.Write(seedOld)
	from, to := onGPU(t, f, src), onGPU(t, f, dst)
	closeBefore(t, p)
	for gen := range transfer.Gen((trialFirst + 2*trialBytes) >> 20) {
		bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, gen+1)
		if r := p.A.MoveWait(a, bind.Origin, src.All(), 1); r.Outcome != transfer.Landed {
			t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
		}
		bind.End(t)
	}
	for _, x := range []struct {
		l   *lane
		g   *gpu
		key wayKey
	}{{a.(*lane), from, wayKey{from, false}}, {b.(*lane), to, wayKey{to, true}}} {
		w := x.l.dev.ways[x.key]
		if w == nil || w.cost[direct] == 0 || w.cost[staged] == 0 || x.g.Calls.Load() < 15 {
			t.Errorf("%d copies, ways %+v", x.g.Calls.Load(), w)
		}
	}
}

// bestWay is the best way of an end's traffic with a GPU.
func bestWay(l *lane, g mem.Device, remote bool) way {
	l.dev.mu.Lock()
	w := l.dev.ways[wayKey{g, remote}]
	l.dev.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.best
}

// A peer that ends its lane with a slice on it, as for a fence or a restart, shows nothing about
// the way between NIC and GPU of this end.
func TestEndOfPeerBlamesNoWay(t *testing.T) {
	for _, end := range []string{"source", "destination"} {
		f, p, _, _ := oddPair(t, nil)
		x, y := p.Dial()
		a, b := x.(*lane), y.(*lane)
		src, dst := transporttest.NewMemory(t, stagedShape), transporttest.NewMemory(t, stagedShape)
		src.Write(seedOld)
		from, to := onGPU(t, f, src), onGPU(t, f, dst)
		closeBefore(t, p)
		bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
		f.Hold(a.q.Num())
		res := p.A.Move(a, bind.Origin, src.All(), 1)
		until(t, "messages are on the wire", func() bool { return f.Held(a.q.Num()) > 0 })
		left := a
		if end == "source" {
			left = b
			_ = a.Close()
		} else {
			_ = b.Close()
		}
		<-res
		until(t, "both ends are over", func() bool {
			return len(p.A.Backend.(*Backend).allLanes())+len(p.B.Backend.(*Backend).allLanes()) == 0
		})
		if err := left.failure(); errors.Is(err, net.ErrClosed) {
			t.Errorf("the %s ends: the other end has closed its lane itself: %v", end, err)
		}
		if x, y := bestWay(a, from, false), bestWay(b, to, true); x != direct || y != direct {
			t.Errorf("the %s ends: then the source reads %s, the destination writes %s", end, x, y)
		}
		f.Release(a.q.Num())
		bind.End(t)
	}
}

// A NIC that fails to read memory of a GPU reports that with the work request.
func TestPathFromGPUBreaks(t *testing.T) {
	for status, want := range map[verbs.Status]way{verbs.LocalAccess: staged, verbs.Broken: staged,
		verbs.RetryExceeded: direct} {
		f, p, here, there := oddPair(t, nil)
		here.set(func(d *oddDevice) { d.blames = status })
		x, _ := p.Dial()
		a := x.(*lane)
		src, dst := transporttest.NewMemory(t, stagedShape), transporttest.NewMemory(t, stagedShape)
		from := onGPU(t, f, src)
		closeBefore(t, p)
		bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
		f.Hold(a.q.Num())
		res := p.A.Move(a, bind.Origin, src.All(), 1)
		until(t, "messages are on the wire", func() bool { return f.Held(a.q.Num()) > 0 })
		if n, err := p.B.Backend.(*Backend).EndKeys(there.Name()); err != nil || n == 0 {
			t.Fatal(n, err)
		}
		wake := make(chan struct{})
		awake := sync.OnceFunc(func() { close(wake) })
		t.Cleanup(awake)
		// its socket does not end before the completion
		there.set(func(d *oddDevice) { d.asleep = wake })
		f.Release(a.q.Num())
		until(t, "the source's lane has failed", func() bool { return a.failure() != nil })
		there.set(func(d *oddDevice) { d.asleep = nil })
		awake()
		<-res
		until(t, "the lane has ended", func() bool { return len(p.A.Backend.(*Backend).allLanes()) == 0 })
		if got := bestWay(a, from, false); got != want {
			t.Errorf("%s: then the NIC's way is %s", status, got)
		}
		bind.End(t)
	}
}

// The path between NIC and GPU breaks under traffic: the lane dies, and the next one does not take
// that path.
func TestPathToGPUBreaks(t *testing.T) {
	f, p, here, there := oddPair(t, nil)
	a, b := p.Dial()
	src, dst := transporttest.NewMemory(t, stagedShape), transporttest.NewMemory(t, stagedShape)
	src.Write(seedOld)
	from := onGPU(t, f, src)
	to := onGPU(t, f, dst)
	closeBefore(t, p)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	bind.Dest.Seed.Store(seedOld)
	f.Hold(a.(*lane).q.Num())
	res := p.A.Move(a, bind.Origin, src.All(), 1)
	until(t, "messages are on the wire", func() bool { return f.Held(a.(*lane).q.Num()) > 0 })
	if n, err := p.B.Backend.(*Backend).EndKeys(there.Name()); err != nil || n == 0 {
		t.Fatal(n, err)
	}
	wake := make(chan struct{})
	awake := sync.OnceFunc(func() { close(wake) })
	defer awake()
	here.set(func(d *oddDevice) { d.asleep = wake }) // its socket does not end before the flush
	f.Release(a.(*lane).q.Num())
	until(t, "the receiver's lane has failed",
		func() bool { return b.(*lane).failure() != nil })
	awake()
	if r := <-res; r.Outcome != transfer.InDoubt {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	until(t, "the lane has ended", func() bool { return len(p.B.Backend.(*Backend).allLanes()) == 0 })
	if r := p.A.MoveWait(open(t, p, 0), bind.Origin, src.All(), 2); r.Outcome != transfer.Landed ||
		!bind.Dest.Full() || to.Calls.Load() == 0 {
		t.Fatalf("%d scatters: %s %s: %v", to.Calls.Load(), r.Outcome, r.Reason, r.Err)
	}
	if from.Calls.Load() != 0 {
		t.Error("the source's path to its GPU was left as well")
	}
	bind.End(t)
	dst.GapsIntact(t)
}
