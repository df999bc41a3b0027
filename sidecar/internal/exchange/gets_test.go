package exchange

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/transfer"
)

// TestGetsOfOnePage: a get of a page that another get is fetching waits for it.
func TestGetsOfOnePage(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, n := newCable(t, 2)
		a, b := n[0], n[1]
		a.put(1)
		c.hint(a.boot, 1)
		c.stuck = true
		first := b.start(1)
		synctest.Wait()
		second, err := b.space.Get(keysOf(1), b.pool, []uint32{1})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second) // longer than a get waits for room
		synctest.Wait()
		for _, x := range b.expects {
			c.move(b, x)
		}
		for i, batch := range []*store.Batch{first, second} {
			<-batch.Done()
			if r := batch.Results()[0]; r.Outcome != store.Hit ||
				!bytes.Equal(b.blocks[i*pageBytes:][:pageBytes], contentOf(1)) {
				t.Errorf("get %d: %+v", i, r)
			}
		}
	})
}

// TestMissBesideSlowPeers: a page that no node has is a miss at once, however many transfers wait.
func TestMissBesideSlowPeers(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, n := newCable(t, 2)
		a, b := n[0], n[1]
		var slow []*store.Batch
		c.stuck = true
		for i := range 12 {
			a.put(i)
			c.hint(a.boot, i)
			batch, err := b.space.Get(keysOf(i), b.pool, []uint32{uint32(i)})
			if err != nil {
				t.Fatal(err)
			}
			slow = append(slow, batch)
		}
		synctest.Wait()
		began := time.Now()
		miss, err := b.space.Get(keysOf(100), b.pool, []uint32{20})
		if err != nil {
			t.Fatal(err)
		}
		<-miss.Done()
		if took := time.Since(began); took > 0 || miss.Results()[0].Outcome != store.Miss {
			t.Errorf("%+v after %v", miss.Results()[0], took)
		}
		// All first: any of them may wait for the transfers of the others.
		for _, batch := range slow {
			batch.Cancel()
		}
		for _, batch := range slow {
			<-batch.Done()
		}
	})
}

// TestAnnouncedAgain: pages that the directory refuses for a while are announced once it does not.
func TestAnnouncedAgain(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, n := newCable(t, 1)
		synctest.Wait()
		c.mu.Lock()
		c.fails = 5
		c.mu.Unlock()
		n[0].put(1, 2)
		time.Sleep(10 * walkRetry)
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.fails > 0 || c.taken != 2 {
			t.Errorf("%d failures are left, %d of 2 pages were announced", c.fails, c.taken)
		}
	})
}

// TestShareOfLessThanASlot: room that is too small for a page is given back.
func TestShareOfLessThanASlot(t *testing.T) {
	_, n := newCable(t, 2)
	used := n[0].take(n[1].boot, n[0].store.Region().Size()/peerShare-unit)
	id := namespace.ID()
	m := &peerv1.PageRequest{Space: id[:], PageBytes: pageBytes, DeadlineMs: 10_000}
	for _, k := range keysOf(1, 2) {
		m.Keys = append(m.Keys, k[:]...)
	}
	n[0].serve(&request{n[1].boot, m, time.Now()})
	n[0].mu.Lock()
	defer n[0].mu.Unlock()
	if p := n[0].peers[n[1].boot]; p.served != used || n[0].served != used {
		t.Errorf("%d and %d bytes are counted, of %d", p.served, n[0].served, used)
	}
}

// TestStopDuringAnOffer: a lease that would begin after the worker has gone fails at once, at both
// sides.
func TestStopDuringAnOffer(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, n := newCable(t, 2)
		a, b := n[0], n[1]
		a.put(1)
		j := &job{x: b.Exchange, slots: []mem.Block{{Len: 2 * unit}}}
		if err := b.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		m := &peerv1.PageOffer{Xfer: make([]byte, len(transfer.XferID{})),
			Hash: make([]byte, len(transfer.PrefixHash{}))}
		end, ended := j.receive(t.Context(), b.peers[a.boot], m, []int{0})
		if took := time.Since(began); !ended || end.Status == engines.StatusOK || took != 0 {
			t.Errorf("%+v, %v after %v", end, ended, took)
		}
		staged, err := a.store.Stage(namespace.ID(), pageBytes, keysOf(1))
		if err != nil {
			t.Fatal(err)
		}
		taken := a.take(b.boot, 2*unit)
		if err := a.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		m = &peerv1.PageOffer{Found: make([]byte, 1)}
		if id := a.offer(b.boot, m, staged, taken, time.Second); id != 0 || m.Found[0] != 0 ||
			a.served != 0 || len(c.nodes[a.boot].intents) != 0 {
			t.Errorf("lease %d, %d bytes are counted", id, a.served)
		}
	})
}

// TestDamagedHere: a page that was damaged here comes from a peer, and its result has the damage.
func TestDamagedHere(t *testing.T) {
	c, n := newCable(t, 2)
	n[0].put(1)
	n[1].put(1)
	c.hint(n[0].boot, 1)
	arena, _ := n[1].store.Region().Bytes()
	arena[bytes.Index(arena, contentOf(1))+100] ^= 4
	b := n[1].start(1)
	<-b.Done()
	want := store.Result{Outcome: store.Hit, Tier: store.Peer, Replaced: true}
	if got := b.Results()[0]; got != want {
		t.Errorf("%+v", got)
	}
}
