package gdr

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// TestGate: a burst begins at once, the rest at the rate, never more at a time than there are
// places, and who gives up leaves his.
func TestGate(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		g := newGate()
		begin := time.Now()
		const all = 200
		for i := range all {
			if err := g.enter(t.Context()); err != nil {
				t.Fatal(err)
			}
			if want := max(0, i-setUpBurst+1); time.Since(begin) != time.Duration(want)*setUpInterval {
				t.Fatalf("set-up %d began after %s", i, time.Since(begin))
			}
			g.leave()
		}
		<-time.After(time.Second) // of the bubble: it takes none
		began := make(chan time.Time, all)
		for range all { // and none ends
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if g.enter(ctx) == nil {
					began <- time.Now()
				}
			}()
		}
		synctest.Wait()
		if n := len(began); n != maxSetUps {
			t.Errorf("%d at a time, want %d", n, maxSetUps)
		}
		<-time.After(time.Hour)
		for range maxSetUps {
			g.leave()
		}
		if err := g.enter(t.Context()); err != nil || len(g.places) != 1 {
			t.Errorf("%v, %d places taken: those who gave up have kept some", err, len(g.places))
		}
	})
}

// meshNode is one of many sidecars, with one rail. It counts queue pairs whose lanes are not up
// yet.
type meshNode struct {
	b    *Backend
	boot transfer.Boot
	rail transport.Rail
	ups  sync.WaitGroup // lanes that are still to come up

	verbs.Device

	mu     sync.Mutex
	making int         // queue pairs on their way to a lane
	max    int         // of making
	began  []time.Time // of each
}

func (n *meshNode) NewDomain() (verbs.Domain, error) {
	p, err := n.Device.NewDomain()
	return meshDomain{p, n}, err
}

type meshDomain struct {
	verbs.Domain
	n *meshNode
}

func (p meshDomain) NewQueuePair(cq verbs.CompletionQueue, sends, receives int) (verbs.QueuePair,
	error) {
	p.n.mu.Lock()
	p.n.making++
	p.n.max = max(p.n.max, p.n.making)
	p.n.began = append(p.n.began, time.Now())
	p.n.mu.Unlock()
	return p.Domain.NewQueuePair(cq, sends, receives)
}

// The transport.Host of a node: all nodes have all others.

func (n *meshNode) PeerKey(boot transfer.Boot) (transport.Peer, bool) {
	return transport.Peer{Boot: boot, Self: n.boot}, true
}

func (n *meshNode) LaneUp(transport.Lane) {
	n.mu.Lock()
	n.making--
	n.mu.Unlock()
	n.ups.Done()
}

func (n *meshNode) LaneDown(transport.Lane, error)          {}
func (n *meshNode) Done(transport.Lane, []transport.Result) {}
func (n *meshNode) Refused(transport.Lane, transfer.Reason) {}
func (n *meshNode) Grant(transfer.Boot, transfer.Slot, transfer.Gen) (*transport.Grant,
	transfer.Reason) {
	return nil, transfer.ReasonUnknownSlot
}
func (n *meshNode) Origin(transfer.Boot, transfer.Slot, transfer.Gen) (*transport.Origin,
	transfer.Reason) {
	return nil, transfer.ReasonUnknownSlot
}

// TestMeshDoesNotHerd: 64 nodes come up at once, and each opens lanes to all of the others. No node
// has more set-ups under way than its gates let in, nor begins them faster, and every lane is up at
// the first try. (Under the race detector they are fewer; make test-long has all.)
func TestMeshDoesNotHerd(t *testing.T) {
	const nodes = meshNodes
	f := fake.New()
	t.Cleanup(f.Serve())
	var mesh [nodes]*meshNode
	for i := range mesh {
		n := &meshNode{Device: f.Device(fmt.Sprintf("n%d", i)), boot: transfer.Boot{byte(i + 1)}}
		n.ups.Add(nodes - 1)
		rails := []Rail{{Name: "rail", Open: func() (verbs.Device, error) { return n, nil },
			Listen: "127.0.0.1:0", NUMA: -1}}
		// however slow the machine is
		n.b = New(Config{Rails: func() ([]Rail, error) { return rails, nil }, Opening: time.Hour})
		open, err := n.b.Open(t.Context(), n)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = n.b.Close() })
		n.rail, mesh[i] = open[0], n
	}
	var all sync.WaitGroup
	began := time.Now()
	for i, from := range mesh {
		for _, to := range mesh[i+1:] {
			all.Go(func() {
				peer, _ := from.PeerKey(to.boot)
				l, err := from.b.Dial(t.Context(), peer, from.rail, to.rail)
				if err != nil {
					t.Error(err)
					from.ups.Done()
					to.ups.Done()
					return
				}
				_ = l.Close() // the lane's own goroutines are not what is measured
			})
		}
	}
	all.Wait()
	for _, n := range mesh {
		n.ups.Wait()
	}
	took := time.Since(began)
	peak, fastest := 0, 0
	for i, n := range mesh {
		n.mu.Lock()
		peak = max(peak, n.max)
		if n.max > 2*maxSetUps {
			t.Errorf("node %d: %d set-ups at a time, at most %d each way", i, n.max, maxSetUps)
		}
		if len(n.began) != nodes-1 {
			t.Errorf("node %d: %d queue pairs for %d peers: lanes were tried more than once", i,
				len(n.began), nodes-1)
		}
		// Each way in any such time: the burst, what the rate adds, and those who had their turn
		// before and were slow to begin.
		const span = 100 * time.Millisecond
		const bound = 2 * (setUpBurst + int(span/setUpInterval) + maxSetUps)
		for first := range n.began {
			last := first
			for last < len(n.began) && n.began[last].Sub(n.began[first]) < span {
				last++
			}
			fastest = max(fastest, last-first)
			if last-first > bound {
				t.Errorf("node %d: %d set-ups began within %s, at most %d", i, last-first, span, bound)
			}
		}
		n.mu.Unlock()
	}
	// the first node dials all of them
	if shortest := (nodes - 1 - setUpBurst) * setUpInterval; took < shortest {
		t.Errorf("all were up after %s: the rate allows it after %s", took, shortest)
	}
	t.Logf("%d lanes between %d nodes in %s: at most %d set-ups at a time at a node, and %d begun "+
		"within 100 ms", nodes*(nodes-1)/2, nodes, took.Round(time.Millisecond), peak, fastest)
}

// Strangers without a key hold thousands of connections to a rail, and open thousands a second:
// lanes over the same rail open, and the log stays short.
func TestMeasureLanesAmongStrangers(t *testing.T) {
	testutil.Measures(t)
	for name, from := range map[string]func(int) [4]byte{"one address": testutil.OneStranger,
		"many addresses": testutil.ManyStrangers} {
		t.Run(name, func(t *testing.T) {
			var log testutil.Buffer
			_, p, _, _ := oddPair(t, func(c *Config) {
				c.Opening, c.Log = time.Hour, slog.New(slog.NewTextHandler(&log, nil))
			})
			hold, perSecond := 5000, 2000
			if testutil.Race {
				hold, perSecond = 1500, 200
			}
			began := time.Now()
			stop := testutil.Strangers(t, p.B.Rails[0].Address, hold, perSecond, from, nil)
			var took []time.Duration
			for range 50 {
				at := time.Now()
				within(t, "a lane beside strangers", func() { p.Dial() })
				took = append(took, time.Since(at))
			}
			unproved := p.B.Backend.(*Backend).rails[0].unproved
			t.Logf("%d connections of strangers, %d closed for others; a lane took up to %v", stop(),
				unproved.Evicted(), slices.Max(took))
			if held := unproved.Held(); held > maxUnproved {
				t.Errorf("%d unproved connections, at most %d", held, maxUnproved)
			}
			if n := strings.Count(log.String(), "\n"); n > int(time.Since(began)/time.Second)+3 {
				t.Errorf("%d lines of log in %v", n, time.Since(began))
			}
		})
	}
}
