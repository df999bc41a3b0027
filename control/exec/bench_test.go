package exec

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"golang.org/x/sys/unix"
)

const (
	benchPeers       = 4
	benchTraceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
)

// loadedExec is the executor of a busy prefill node: many transfers are open to four peers with
// four rails each, and every lane is full. The benchmark plays the lanes, so it measures only the
// executor and the slice scheduler.
type loadedExec struct {
	tb     testing.TB
	e      *Exec
	w      *engines.Worker
	peers  [benchPeers]transfer.Boot
	tokens uint32
	now    Instant
	next   uint64
	b      Batch
	flying []transport.Result
	head   int
	left   [benchPeers][]left // by slot: in a map each slice would look for one of ten thousand, twice
	slots  [benchPeers]uint32
	free   [benchPeers][]uint32
	slotOf map[transfer.LeaseID]uint32
	done   [1]transport.Result
}

// left has the chunks of a slot that have not landed. Copies of landed chunks may also end after
// the transfer.
type left struct {
	gen    uint32
	chunks int32
}

func newLoaded(tb testing.TB, open int, tokens uint32) *loadedExec {
	x := &loadedExec{tb: tb, tokens: tokens, now: sec, slotOf: map[transfer.LeaseID]uint32{}}
	x.e = New(Config{Boot: transfer.Boot{200}, Planner: simPlanner{}, Transports: []string{"tcp"},
		Deadline: frame.MaxDeadline})
	x.w = &engines.Worker{Name: "w",
		Layout: &layout.Layout{Groups: []layout.Group{{TokensPerBlock: simBlock,
			Layers: make([]layout.Layer, simLayers)}}}}
	x.e.WorkerUp(x.w)
	lane := uint64(0)
	for i := range x.peers {
		x.peers[i] = transfer.Boot{byte(i + 1)}
		x.e.PeerUp(x.now, fmt.Sprint("peer", i), x.peers[i])
		for r := range 4 {
			for range 2 {
				lane++
				rail := fmt.Sprint("r", r)
				if err := x.e.LaneUp(x.now, x.peers[i], spray.LaneInfo{ID: lane, Gbps: 100,
					Path:       spray.Path{Transport: "tcp", Local: rail, Remote: rail},
					SliceBytes: 1 << 20, MaxSlices: 16, ReportsAcked: true}, false); err != nil {
					tb.Fatal(err)
				}
			}
		}
	}
	for range open {
		x.begin()
	}
	x.collect()
	return x
}

// begin opens a transfer whose layers are all complete.
func (x *loadedExec) begin() {
	x.next++
	i := int(x.next % benchPeers)
	var k transfer.Key
	binary.BigEndian.PutUint64(k.Xfer[:], x.next)
	src := transfer.LeaseID{Boot: x.w.Boot, ID: x.next}
	dst := transfer.LeaseID{Boot: transfer.Boot{100}, ID: x.next}
	x.e.Intent(x.now, x.w, engines.Intent{Lease: src, Key: k, Tokens: x.tokens, Fanout: 1,
		Deadline: frame.MaxDeadline})
	plan, err := newSimPlan(x.tokens, []uint32{0})
	if err != nil {
		x.tb.Fatal(err)
	}
	var slot uint32
	if f := x.free[i]; len(f) > 0 {
		slot = f[len(f)-1]
		x.free[i] = f[:len(f)-1]
	} else {
		slot = x.slots[i]
		x.slots[i]++
		x.left[i] = append(x.left[i], left{})
	}
	x.slotOf[dst] = slot
	gen, digest := uint32(x.next), plan.Digest()
	if err := x.e.Message(x.now, x.peers[i], &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Grant{
		Grant: &peerv1.Grant{
			Xfer: k.Xfer[:], Hash: k.Hash[:], Destination: frame.Lease(dst), Gen: gen, Tokens: x.tokens,
			Skip: []uint32{0}, Fingerprint: x.w.Fingerprint[:],
			Geometry: x.w.Geometry[:], DeadlineMs: frame.Millis(frame.MaxDeadline), MatchTimeoutMs: 10000,
			Priority: 1,
			Team:     make([]byte, 16), TeamSize: 1, Traceparent: []byte(benchTraceparent),
			PlanVersion: simPlanner{}.Version(),
			Parts: []*peerv1.Part{{Rank: x.w.Place.Rank(), Geometry: x.w.Geometry[:], Slot: slot, Gen: gen,
				Chunks: plan.space.NumChunks(),
				Bytes:  plan.space.TotalBytes(), Digest: digest[:]}}}}}); err != nil {
		x.tb.Fatal(err)
	}
	for l := range simLayers {
		x.e.Progress(x.now, x.w, []engines.Progress{{Lease: src, Layer: l, Tokens: x.tokens,
			Final: true}})
	}
	x.left[i][slot] = left{gen, int32(plan.space.NumChunks())}
}

// collect performs the actions of the executor.
func (x *loadedExec) collect() {
	for x.e.Drain(&x.b) {
		for i := range x.b.Actions {
			switch a := &x.b.Actions[i]; a.Kind {
			case Move:
				for _, s := range a.Slices {
					x.flying = append(x.flying, transport.Result{Slice: s, Outcome: transfer.Landed})
				}
			case CloseOrigin:
				x.e.OriginClosed(x.now, a.SendPart, nil)
			}
		}
	}
}

// slice confirms the oldest slice and takes what follows. It returns the destination whose last
// chunk this was.
func (x *loadedExec) slice() (last transfer.LeaseID, full bool) {
	if x.head == len(x.flying) {
		x.tb.Fatal("nothing is in flight")
	}
	x.done[0] = x.flying[x.head]
	if x.head++; x.head > 1<<12 {
		x.flying = append(x.flying[:0], x.flying[x.head:]...)
		x.head = 0
	}
	o := x.done[0].Origin
	x.now += 5 * time.Microsecond
	if x.now >= x.e.Next() {
		x.e.Tick(x.now)
	}
	x.e.Results(x.now, x.done[:])
	x.collect()
	left, count := &x.left[int(o.Gen)%benchPeers][o.Slot], int32(x.done[0].Range.Count)
	if left.gen != uint32(o.Gen) || left.chunks <= 0 {
		return last, false // a copy, and the transfer is over
	}
	left.chunks -= count
	return transfer.LeaseID{Boot: transfer.Boot{100}, ID: uint64(o.Gen)}, left.chunks <= 0
}

// end commits a transfer and begins another one in its place.
func (x *loadedExec) end(dst transfer.LeaseID) {
	i := int(dst.ID % benchPeers)
	if err := x.e.Message(x.now, x.peers[i], &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{
		Commit: &peerv1.Commit{Destination: frame.Lease(dst)}}}); err != nil {
		x.tb.Fatal(err)
	}
	x.free[i] = append(x.free[i], x.slotOf[dst])
	delete(x.slotOf, dst)
	x.begin()
	x.collect()
}

// cpu is the CPU time of this process. On a shared machine, wall time proves little.
func cpu() time.Duration {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

func heapBytes() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkSlice measures executor and slice scheduler per slice, from a confirmation to the next
// slice, for several numbers of open transfers. The goal is 2 us, with 10,000 open transfers as
// with 10.
func BenchmarkSlice(b *testing.B) {
	for _, open := range []int{10, 100, 1000, 10000} {
		b.Run(fmt.Sprint(open, "open"), func(b *testing.B) {
			before := heapBytes()
			x := newLoaded(b, open, 1<<16) // 256 MiB, 4096 chunks
			for range 1 << 14 {
				if dst, full := x.slice(); full {
					x.end(dst)
				}
			}
			perTransfer := float64(heapBytes()-before) / float64(open)
			b.ReportAllocs()
			began := cpu()
			for b.Loop() {
				if dst, full := x.slice(); full {
					x.end(dst) // one in some thousands
				}
			}
			b.ReportMetric(float64(cpu()-began)/float64(b.N), "cpu-ns/op")
			b.ReportMetric(perTransfer/4096, "B/chunk")
			runtime.KeepAlive(x)
		})
	}
}

// BenchmarkTransfer measures a whole transfer of 1 MiB beside many open ones: intent, grant,
// slices, commit, release.
func BenchmarkTransfer(b *testing.B) {
	for _, open := range []int{10, 1000, 10000} {
		b.Run(fmt.Sprint(open, "open"), func(b *testing.B) {
			x := newLoaded(b, open, 256)
			for range 1 << 12 {
				if dst, full := x.slice(); full {
					x.end(dst)
				}
			}
			b.ReportAllocs()
			began := cpu()
			for b.Loop() {
				for {
					if dst, full := x.slice(); full {
						x.end(dst)
						break
					}
				}
			}
			b.ReportMetric(float64(cpu()-began)/float64(b.N), "cpu-ns/op")
		})
	}
}

// The memory of ten thousand open transfers is bounded per transfer, and free after their end.
func TestOpenTransfersCostLittle(t *testing.T) {
	per := func(open int) float64 {
		before := heapBytes()
		x := newLoaded(t, open, 1024) // 4 MiB, 64 chunks
		used := heapBytes() - before
		for range 2000 {
			if dst, full := x.slice(); full {
				x.end(dst)
			}
		}
		if d, s := x.e.Open(); d != 0 || s != open {
			t.Errorf("%d and %d leases open, want %d", d, s, open)
		}
		grown := heapBytes() - before
		if float64(grown) > 1.5*float64(used)+1<<20 {
			t.Errorf("%d open: %d bytes at first, %d after 2000 slices", open, used, grown)
		}
		x.e.Abort(x.now, "the test is over")
		x.collect()
		if l := x.e.Load(); l.Sources+l.Inbound+l.Pending != 0 {
			t.Errorf("left over: %+v", l)
		}
		runtime.KeepAlive(x)
		return float64(used) / float64(open)
	}
	few, many := per(1000), per(10000)
	t.Logf("%.0f bytes per transfer with 1,000 open, %.0f with 10,000", few, many)
	if many > 1.3*few {
		t.Errorf("%.0f bytes per transfer with 10,000 open, %.0f with 1,000", many, few)
	}
}
