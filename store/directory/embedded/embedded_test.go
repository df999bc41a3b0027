package embedded

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/directory"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// net joins directories of one process.
type net struct {
	mu    sync.Mutex
	all   map[transfer.Boot]*Directory
	boots []transfer.Boot
	lost  func(to transfer.Boot, f *peerv1.ControlFrame) bool
}

func newNet(t testing.TB, members, capacity int) *net {
	t.Helper()
	n := &net{all: map[transfer.Boot]*Directory{}}
	for i := range members {
		n.boots = append(n.boots, transfer.Boot{byte(i + 1), 7})
	}
	for _, b := range n.boots {
		n.join(t, b, capacity)
	}
	return n
}

func (n *net) join(t testing.TB, b transfer.Boot, capacity int) *Directory {
	t.Helper()
	d, err := New(Options{Self: b, Capacity: capacity,
		Members: func() []transfer.Boot {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.boots
		},
		Send: func(to transfer.Boot, f *peerv1.ControlFrame) error {
			n.mu.Lock()
			d, lost := n.all[to], n.lost
			n.mu.Unlock()
			if d == nil {
				return errors.New("no member is there")
			}
			if lost != nil && lost(to, f) {
				return nil
			}
			return d.Handle(b, f)
		}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all[b] = d
	return d
}

func randomKeys(n int) []page.Key {
	keys := make([]page.Key, n)
	for i := range keys {
		_, _ = rand.Read(keys[i][:])
	}
	return keys
}

// announce reports keys and waits until the members have taken them.
func (n *net) announce(t testing.TB, from transfer.Boot, keys []page.Key) {
	t.Helper()
	for len(keys) > 0 { // less than the queues hold at a time
		some := keys[:min(len(keys), 100*hintKeys)]
		keys = keys[len(some):]
		if err := n.all[from].Announce(t.Context(), some); err != nil {
			t.Fatal(err)
		}
		n.settle(t)
	}
}

// settle waits until the queues of hints are empty.
func (n *net) settle(t testing.TB) {
	t.Helper()
	end := time.Now().Add(20 * time.Second)
	for _, d := range n.all {
		for tick := time.NewTicker(time.Millisecond); len(d.queue) > 0; <-tick.C {
			if time.Now().After(end) {
				t.Fatal("hints stay in a queue")
			}
		}
		d.Stats() // after the last one that was taken from the queue
	}
}

// holders looks keys up and counts those that have exactly this holder.
func (n *net) holders(t testing.TB, at transfer.Boot, keys []page.Key,
	want ...transfer.Boot) int {
	t.Helper()
	found := directory.NewFound(len(keys))
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	if err := n.all[at].Lookup(ctx, keys, found); err != nil {
		t.Fatal(err)
	}
	count := 0
	for i := range keys {
		got := map[transfer.Boot]bool{}
		for h := range found.Of(i) {
			got[h] = true
		}
		same := len(got) == len(want)
		for _, h := range want {
			same = same && got[h]
		}
		if same {
			count++
		}
	}
	return count
}

func TestLookup(t *testing.T) {
	n := newNet(t, 3, 1<<16)
	a, b, c := n.boots[0], n.boots[1], n.boots[2]
	keys := randomKeys(page.MaxBatch)
	n.announce(t, a, keys)
	n.announce(t, b, keys[:100])
	// The hints taken last may still be on their way.
	waitFor(t, func() bool {
		return n.holders(t, c, keys[:100], a, b) == 100 &&
			n.holders(t, c, keys[100:], a) == len(keys)-100
	})
	for _, d := range n.all {
		if s := d.Stats(); s.Hints < 2000 || s.Hints > 5000 {
			t.Errorf("one of three owners has %d hints", s.Hints)
		}
	}
	if n.holders(t, c, randomKeys(1000)) != 1000 {
		t.Error("holders of pages that no node announced")
	}
	if err := n.all[a].Withdraw(t.Context(), keys[:50]); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return n.holders(t, c, keys[:50], b) == 50 })
}

func waitFor(t testing.TB, ok func() bool) {
	t.Helper()
	end := time.Now().Add(20 * time.Second)
	for tick := time.NewTicker(time.Millisecond); !ok(); <-tick.C {
		if time.Now().After(end) {
			t.Fatal("not in time")
		}
	}
}

// TestTimeEndsHints: what is not repeated is forgotten, and its holder's place is used again.
func TestTimeEndsHints(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		n := newNet(t, 1, 1<<10)
		a := n.boots[0]
		keys := randomKeys(100)
		n.announce(t, a, keys)
		time.Sleep(DefaultTTL - time.Minute)
		n.announce(t, a, keys[:50])
		if got := n.holders(t, a, keys, a); got != 100 {
			t.Errorf("%d of 100 before the time", got)
		}
		time.Sleep(2 * time.Minute)
		if got := n.holders(t, a, keys, a); got != 50 {
			t.Errorf("%d of 50 that were repeated", got)
		}
		time.Sleep(2 * DefaultTTL)
		n.all[a].takeHints(transfer.Boot{66}, &peerv1.PageHints{Held: keys[0][:keyBytes]})
		if d := n.all[a]; len(d.hints.holders) != 1 || len(d.hints.current) != 1 {
			t.Errorf("%d numbers of holders", len(d.hints.holders))
		}
		if got := n.holders(t, a, keys[:1], transfer.Boot{66}) + n.holders(t, a, keys[1:]); got != 100 {
			t.Errorf("%d of 100 pages have the holder that they have", got)
		}
	})
}

// TestFloods: the table is bounded, and one that floods it leaves others half of each bucket.
func TestFloods(t *testing.T) {
	n := newNet(t, 1, 1<<12)
	a := n.boots[0]
	d := n.all[a]
	keys := randomKeys(1 << 11)
	n.announce(t, a, keys)
	hostile := transfer.Boot{66}
	flood := randomKeys(1 << 16)
	for i := range flood {
		d.takeHints(hostile, &peerv1.PageHints{Held: flood[i][:keyBytes]})
	}
	if got := n.holders(t, a, keys, a); got < len(keys)*95/100 {
		t.Errorf("%d of %d hints are left", got, len(keys))
	}
	if s := d.Stats(); s.Bytes > 80<<12 || s.Hints > s.Capacity {
		t.Errorf("%+v", s)
	}
}

// TestHostileAnswers: what a member answers is checked, and counts for the question that it was
// asked only.
func TestHostileAnswers(t *testing.T) {
	boot := make([]byte, 16)
	good := func(id uint64, keys int) *peerv1.PageHolders {
		return &peerv1.PageHolders{Id: id, At: make([]byte, keys*directory.MaxHolders)}
	}
	for name, change := range map[string]func(m *peerv1.PageHolders){
		"boot":      func(m *peerv1.PageHolders) { m.Holders = [][]byte{boot[:5]} },
		"nil":       func(m *peerv1.PageHolders) { m.Holders = [][]byte{nil} },
		"short":     func(m *peerv1.PageHolders) { m.At = m.At[1:] },
		"long":      func(m *peerv1.PageHolders) { m.At = append(m.At, 0) },
		"position":  func(m *peerv1.PageHolders) { m.At[3] = 1 },
		"positions": func(m *peerv1.PageHolders) { m.Holders = make([][]byte, 256) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNet(t, 2, 100)
			a, b := n.boots[0], n.boots[1]
			var refused error
			n.lost = func(to transfer.Boot, f *peerv1.ControlFrame) bool {
				q := f.GetPageLookup()
				if q == nil {
					return false
				}
				// Answers of others, and to other questions, count for nothing.
				keys := len(q.Keys) / keyBytes
				stranger := good(q.Id, keys)
				stranger.Holders = [][]byte{boot}
				stranger.At[0] = 1
				frame := func(m *peerv1.PageHolders) *peerv1.ControlFrame {
					return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_PageHolders{PageHolders: m}}
				}
				_ = n.all[a].Handle(transfer.Boot{99}, frame(stranger))
				_ = n.all[a].Handle(b, frame(good(q.Id+1, keys)))
				m := good(q.Id, keys)
				change(m)
				refused = n.all[a].Handle(b, frame(m))
				return true
			}
			keys := randomKeys(50)
			if got := n.holders(t, a, keys); got != len(keys) {
				t.Errorf("%d of %d keys have no holder", got, len(keys))
			}
			if refused == nil {
				t.Error("the answer was accepted")
			}
		})
	}
}

// TestOwnerIsSilent: a lookup ends with what the others answered.
func TestOwnerIsSilent(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		n := newNet(t, 3, 1<<12)
		a, b := n.boots[0], n.boots[1]
		keys := randomKeys(300)
		n.announce(t, a, keys)
		n.lost = func(to transfer.Boot, f *peerv1.ControlFrame) bool {
			return to == n.boots[2] && f.GetPageLookup() != nil
		}
		found := directory.NewFound(len(keys))
		ctx, stop := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer stop()
		if err := n.all[b].Lookup(ctx, keys, found); !errors.Is(err, ErrNoAnswer) {
			t.Error(err)
		}
		count := 0
		for i := range keys {
			for range found.Of(i) {
				count++
			}
		}
		if count < 100 || count > 280 {
			t.Errorf("%d of 300 keys were found", count)
		}
		if len(n.all[b].lookups) != 0 {
			t.Error("a lookup is kept")
		}
	})
}

// FuzzHandle: no message of a member does more than add hints or be refused.
func FuzzHandle(f *testing.F) {
	key := make([]byte, keyBytes)
	for _, m := range []*peerv1.ControlFrame{
		{Body: &peerv1.ControlFrame_PageHints{PageHints: &peerv1.PageHints{Held: key,
			Gone: key}}},
		{Body: &peerv1.ControlFrame_PageLookup{PageLookup: &peerv1.PageLookup{Id: 1, Keys: key}}},
		{Body: &peerv1.ControlFrame_PageHolders{PageHolders: &peerv1.PageHolders{Id: 1,
			Holders: [][]byte{key}, At: []byte{1, 0, 0, 0}}}},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m peerv1.ControlFrame
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		a, member := transfer.Boot{1}, transfer.Boot{2}
		d, err := New(Options{Self: a, Capacity: 64,
			Members: func() []transfer.Boot { return []transfer.Boot{a, member} },
			Send:    func(transfer.Boot, *peerv1.ControlFrame) error { return nil }})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		id, l := d.open(member, 1)
		if h := m.GetPageHolders(); h != nil {
			h.Id = id
		}
		err = d.Handle(member, &m)
		if h := m.GetPageHolders(); h != nil {
			got := <-l.answer
			if len(got.At) != directory.MaxHolders || err != nil && len(got.Holders) != 0 {
				t.Fatalf("%v, %v", got, err)
			}
			found := directory.NewFound(1)
			d.add(found, &owner{index: []int32{0}}, got)
		}
		if h := m.GetPageHints(); h != nil && err == nil {
			d.takeHints(member, h)
		}
		if q := m.GetPageLookup(); q != nil && err == nil {
			d.find(q.Keys)
		}
	})
}

// BenchmarkLookup is a lookup of 10,000 keys by a member that keeps none of them itself.
func BenchmarkLookup(b *testing.B) {
	for _, members := range []int{2, 16, 200} {
		b.Run(fmt.Sprintf("owners=%d", members), func(b *testing.B) {
			n := newNet(b, members, 1<<20/members)
			asker := n.join(b, transfer.Boot{250}, 64)
			keys := randomKeys(page.MaxBatch)
			if err := n.all[n.boots[0]].Announce(b.Context(), keys); err != nil {
				b.Fatal(err)
			}
			n.settle(b)
			for b.Loop() {
				found := directory.NewFound(len(keys))
				if err := asker.Lookup(b.Context(), keys, found); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
