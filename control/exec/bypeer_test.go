//go:build !race

package exec

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/credit"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds for a large cluster. Tests that measure time are left out under the race detector.
const (
	manyPeers  = 1000
	manyRails  = 8
	manyLeases = 10000
	lostGoal   = 500 * time.Millisecond // of CPU, for the loss of all peers
	oneGoal    = 2 * time.Millisecond   // for one event
)

func manyBoot(i int) (b transfer.Boot) {
	binary.BigEndian.PutUint32(b[:], uint32(i+1))
	return b
}

func manyExec() (*Exec, *engines.Worker) {
	e := New(Config{Boot: transfer.Boot{200}, Planner: simPlanner{}, Transports: []string{"tcp"}})
	w := &engines.Worker{Boot: transfer.Boot{2}, Layout: &layout.Layout{
		Groups: []layout.Group{{TokensPerBlock: simBlock, Layers: make([]layout.Layer, simLayers)}}}}
	e.WorkerUp(w)
	return e, w
}

// All peers are lost at once, as when a switch fails, and return. Each loss costs what concerns
// that peer, independent of the leases of other peers.
func TestMeasureLossOfAllPeers(t *testing.T) {
	testutil.Measures(t)
	for _, over := range []bool{false, true} {
		e, w := manyExec()
		now := sec
		for i := range manyPeers {
			e.PeerUp(now, fmt.Sprint("p:", i), manyBoot(i))
		}
		for id := range manyLeases {
			e.Expect(now, w, engines.Expect{Lease: transfer.LeaseID{Boot: w.Boot, ID: uint64(id + 1),
				Epoch: 1}, Key: testKey(byte(id), byte(id>>8)),
				Peer: fmt.Sprint("p:", id%manyPeers), Tokens: 64, Skip: []uint32{0}, Deadline: 30 * sec})
		}
		if open, _ := e.Open(); open != manyLeases {
			t.Fatalf("%d leases are open: want %d", open, manyLeases)
		}
		drained(e)
		all := func(event func(i int)) (sum, worst time.Duration) {
			for i := range manyPeers {
				from := cpu()
				event(i)
				d := cpu() - from
				sum, worst = sum+d, max(worst, d)
				drained(e)
			}
			return sum, worst
		}
		down, worst := all(func(i int) { e.PeerDown(now, manyBoot(i), over) })
		up, worstUp := all(func(i int) { e.PeerUp(now, fmt.Sprint("p:", i), manyBoot(i)) })
		t.Logf("over %v: all down %v of CPU, %v for one at most; up again %v and %v", over, down,
			worst, up, worstUp)
		if down > lostGoal || up > lostGoal {
			t.Errorf("over %v: all down %v of CPU, up again %v: want %v at most", over, down, up, lostGoal)
		}
		for i := range manyPeers {
			e.PeerDown(now, manyBoot(i), true)
		}
		drained(e)
		e.WorkerGone(now, w, true, "test")
		for _, f := range only(t, drained(e), Fence) {
			e.FenceDone(now, f.ReceivePart, nil)
		}
		for i := range manyPeers {
			if open, _ := e.Open(); over && open == 0 && e.Shares(manyBoot(i)) {
				t.Errorf("nothing is open, and peer %d has entries", i)
			}
		}
	}
}

// Peers that send nothing cost nothing: no timer runs without traffic, and a measurement costs as
// much as there is traffic.
func TestMeasureIdlePeers(t *testing.T) {
	testutil.Measures(t)
	e, w := manyExec()
	now := sec
	for i := range manyPeers {
		e.PeerUp(now, fmt.Sprint("p:", i), manyBoot(i))
		for r := range manyRails {
			name := fmt.Sprint("eth", r)
			if err := e.LaneUp(now, manyBoot(i), spray.LaneInfo{ID: uint64(i*manyRails + r + 1),
				Path:       spray.Path{Transport: "tcp", Local: name, Remote: name},
				SliceBytes: 1 << 20, MaxSlices: 16}, false); err != nil {
				t.Fatal(err)
			}
		}
	}
	for id := range manyPeers { // each has a grant from us
		e.Expect(now, w, engines.Expect{Lease: transfer.LeaseID{Boot: w.Boot, ID: uint64(id + 1),
			Epoch: 1}, Key: testKey(byte(id), byte(id>>8)),
			Peer: fmt.Sprint("p:", id), Tokens: 64, Skip: []uint32{0}, Deadline: 30 * sec})
	}
	measures := func(until Instant) (n int) {
		for e.Next() <= until {
			now = e.Next()
			e.Tick(now)
			n += len(only(t, drained(e), Measure))
		}
		now = until
		return n
	}
	drained(e)
	if n := measures(now + sec); n != 0 {
		t.Errorf("%d measurements in a second in which nothing flows", n)
	}
	grew := []Inflow{{Peer: manyBoot(0), Transport: "tcp", Rail: "eth0", Gbps: 100},
		{Peer: manyBoot(1), Transport: "tcp", Rail: "eth0", Gbps: 100}}
	e.Incoming(now)
	const rounds = 200
	var spent time.Duration
	for range rounds {
		if n := measures(now + credit.Every); n != 1 {
			t.Fatalf("%d measurements in %v in which two peers send", n, credit.Every)
		}
		for i := range grew {
			grew[i].Bytes = 1 << 20
		}
		from := cpu()
		e.Measured(now, grew)
		spent += cpu() - from
		drained(e)
	}
	t.Logf("%d peers with %d rails, two of them send: %v of CPU for a measurement", manyPeers,
		manyRails, spent/rounds)
	if each := spent / rounds; each > credit.Every/100 {
		t.Errorf("a measurement costs %v of CPU: want less than 1%% of %v", each, credit.Every)
	}
	for range 2 * credit.Hold / credit.Every {
		if measures(now+credit.Every) > 0 {
			e.Measured(now, nil)
			drained(e)
		}
	}
	inflows, rails := e.credits.Len()
	if n := measures(now + sec); n != 0 || inflows != 0 || rails != 0 {
		t.Errorf("%d measurements in the second after that, %d inflows, %d rails", n, inflows, rails)
	}
	all := make([]Inflow, 0, credit.MaxInflows)
	for i := range cap(all) {
		all = append(all, Inflow{Peer: manyBoot(i / manyRails), Transport: "tcp", Rail: fmt.Sprint("eth",
			i%manyRails), Gbps: 100, Bytes: 1 << 20})
	}
	e.Incoming(now)
	// Measurements in which all inflows are new, and measurements with all of them. The fastest one
	// counts, because other processes share the machine; a busy machine gets more tries.
	const minTries, maxTries = 3, 20
	first, fastest := make([]time.Duration, credit.MaxInflows/credit.MaxNew), time.Hour
	credited := map[credit.Credit]bool{}
	measured := func() time.Duration {
		measures(now + credit.Every)
		from := cpu()
		e.Measured(now, all)
		d := cpu() - from
		for _, a := range drained(e) {
			if c := a.Frame.GetCredit(); a.Kind == Send && c != nil && c.Bytes > 0 {
				credited[credit.Credit{Rail: credit.Rail{Transport: c.Transport, Name: c.Rail},
					Peer: a.Peer}] = true
			}
		}
		return d
	}
	worst := time.Hour
	for try := 0; try < minTries || worst > oneGoal && try < maxTries; try++ {
		for i := 0; try > 0 && i < credit.MaxInflows/manyRails; i++ {
			e.credits.Forget(manyBoot(i))
		}
		for i := range first {
			if d := measured(); try == 0 || d < first[i] {
				first[i] = d
			}
		}
		if inflows, _ := e.credits.Len(); inflows != credit.MaxInflows {
			t.Errorf("%d inflows after %d answers, want %d", inflows, len(first), credit.MaxInflows)
		}
		for range 20 {
			fastest = min(fastest, measured())
		}
		worst = max(fastest, slices.Max(first))
	}
	t.Logf("%d inflows that all send: %v of CPU for a measurement, %v at most while they are new",
		len(all), fastest, worst)
	if worst > oneGoal {
		t.Errorf("%d inflows that all send cost %v of CPU in one event, %v while they are new: "+
			"want %v at most", len(all), fastest, worst, oneGoal)
	}
	if len(credited) != credit.MaxInflows {
		t.Errorf("%d of %d have a credit", len(credited), credit.MaxInflows)
	}
}

// Thousands of leases with one deadline end in several ticks, and no tick takes long.
func TestMeasureOneDeadline(t *testing.T) {
	testutil.Measures(t)
	e, w := manyExec()
	now := sec
	for id := range manyLeases {
		e.Expect(now, w, engines.Expect{Lease: transfer.LeaseID{Boot: w.Boot, ID: uint64(id + 1),
			Epoch: 1}, Key: testKey(byte(id), byte(id>>8)),
			Peer: fmt.Sprint("p:", id%manyPeers), Tokens: 64, Skip: []uint32{0}, Deadline: 30 * sec})
	}
	drained(e)
	ticks, worst := 0, time.Duration(0)
	for now = 60 * sec; e.Next() <= now; ticks++ {
		from := cpu()
		e.Tick(now)
		worst = max(worst, cpu()-from)
		drained(e)
	}
	t.Logf("%d leases end in %d ticks of %v of CPU at most", manyLeases, ticks, worst)
	if open, _ := e.Open(); open != 0 || ticks < manyLeases/maxDue {
		t.Errorf("%d are open after %d ticks", open, ticks)
	}
}
