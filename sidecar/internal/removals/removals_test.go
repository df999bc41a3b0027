package removals

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/store/removal"
	"github.com/kvspray/kvspray/transfer"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var space = page.ID{7}

const answerTime = 5 * time.Second

// net joins nodes.
type net struct {
	t     *testing.T
	mu    sync.Mutex // guards what follows
	nodes map[transfer.Boot]*node
	cut   map[[2]transfer.Boot]bool
	lose  func(from, to transfer.Boot, f *peerv1.ControlFrame) bool
}

// node is one with a store that counts.
type node struct {
	*Removals
	boot transfer.Boot
	stop func()

	mu    sync.Mutex // guards what follows
	pages map[page.ID]int
	note  []byte
	fails error // of a removal
	noted error
	keeps bool
	times int // removals
	rest  int // removals from the object store alone
	hold  chan struct{}
}

func (n *node) RemoveSpace(id page.ID) error {
	n.mu.Lock()
	hold := n.hold
	n.mu.Unlock()
	if hold != nil && id == space {
		<-hold
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fails != nil && !errors.Is(n.fails, removal.ErrObjects) {
		return n.fails
	}
	n.times++
	delete(n.pages, id)
	return n.fails
}

func (n *node) RemoveObjects(page.ID) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fails == nil {
		n.rest++
	}
	return n.fails
}

func (n *node) Note() ([]byte, error) { return n.note, nil }
func (n *node) Keeps() bool           { return n.keeps }
func (n *node) SetNote(b []byte) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.noted != nil {
		return n.noted
	}
	n.note = b
	return nil
}

func (n *node) put(pages int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pages[space] += pages
}

func (n *node) has() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.pages[space]
}

func newNet(t *testing.T, nodes int) (*net, []*node) {
	c := &net{t: t, nodes: map[transfer.Boot]*node{}, cut: map[[2]transfer.Boot]bool{}}
	var all []*node
	for i := range nodes {
		all = append(all, c.start(transfer.Boot{byte(i + 1)}, nil))
	}
	for i, a := range all {
		for _, b := range all[:i] {
			c.join(a, b)
		}
	}
	return c, all
}

// start starts a node with what an earlier one of the same disk has left.
func (c *net) start(boot transfer.Boot, disk *node) *node {
	n := &node{boot: boot, pages: map[page.ID]int{}}
	if disk != nil {
		n.note, n.pages, n.keeps = disk.note, disk.pages, true
	}
	n.Removals = New(Options{Self: Member{boot, name(boot)}, Store: n,
		Log: slog.New(slog.DiscardHandler), Members: c.members,
		Send: func(to transfer.Boot, f *peerv1.ControlFrame) error { return c.send(boot, to, f) }})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { n.Run(ctx); close(done) }()
	n.stop = sync.OnceFunc(func() { stop(); <-done })
	c.t.Cleanup(n.stop)
	c.mu.Lock()
	c.nodes[boot] = n
	c.mu.Unlock()
	return n
}

func name(b transfer.Boot) string { return "node" + string('a'+b[0]-1) }

func (c *net) members() (out []Member) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for b := range c.nodes {
		out = append(out, Member{b, name(b)})
	}
	return out
}

func (c *net) join(a, b *node) {
	c.mu.Lock()
	delete(c.cut, [2]transfer.Boot{a.boot, b.boot})
	delete(c.cut, [2]transfer.Boot{b.boot, a.boot})
	c.mu.Unlock()
	a.PeerUp(b.boot, name(b.boot))
	b.PeerUp(a.boot, name(a.boot))
}

func (c *net) part(a, b *node) {
	c.mu.Lock()
	c.cut[[2]transfer.Boot{a.boot, b.boot}], c.cut[[2]transfer.Boot{b.boot, a.boot}] = true, true
	c.mu.Unlock()
	a.PeerDown(b.boot)
	b.PeerDown(a.boot)
}

func (c *net) send(from, to transfer.Boot, f *peerv1.ControlFrame) error {
	c.mu.Lock()
	n, cut, lose := c.nodes[to], c.cut[[2]transfer.Boot{from, to}], c.lose
	c.mu.Unlock()
	if n == nil || cut {
		return errors.New("no node is there")
	}
	if lose != nil && lose(from, to, f) {
		return nil
	}
	b, err := proto.Marshal(f)
	if err != nil {
		return err
	}
	back := &peerv1.ControlFrame{}
	if err := proto.Unmarshal(b, back); err != nil {
		return err
	}
	return n.Handle(from, back)
}

func confirmed(states []State) (names string) {
	for _, s := range states {
		if s.Confirmed {
			names += s.Node[4:]
		}
	}
	return names
}

func remove(t *testing.T, n *node) []State {
	t.Helper()
	states, err := n.Remove(t.Context(), space, answerTime)
	if err != nil {
		t.Fatal(err)
	}
	return states
}

func TestAllMembersRemove(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		_, all := newNet(t, 3)
		for _, n := range all {
			n.put(5)
		}
		if got := confirmed(remove(t, all[0])); got != "abc" {
			t.Fatal(got)
		}
		for _, n := range all {
			if n.has() != 0 || n.times != 1 || !n.Ready(space) {
				t.Fatalf("%s has %d pages", name(n.boot), n.has())
			}
			n.put(3) // later than the removal
		}
		synctest.Wait()
		time.Sleep(time.Minute)
		for _, n := range all {
			if n.has() != 3 || n.times != 1 {
				t.Fatalf("%s has %d pages after %d removals", name(n.boot), n.has(), n.times)
			}
		}
		if got := confirmed(remove(t, all[2])); got != "cab" || all[1].has() != 0 {
			t.Fatal(got)
		}
	})
}

// A member that is away is named, and removes its pages when it meets any of the others.
func TestAMemberThatWasAway(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, all := newNet(t, 3)
		a, b, away := all[0], all[1], all[2]
		c.part(a, away)
		c.part(b, away)
		away.put(5)
		states := remove(t, a)
		if confirmed(states) != "ab" || len(states) != 3 ||
			!strings.Contains(states[2].Problem, "cannot be reached") {
			t.Fatalf("%+v", states)
		}
		b.put(2)
		c.join(b, away) // not the one that removed it
		time.Sleep(time.Second)
		if away.has() != 0 || b.has() != 2 || away.Applied(space) != a.Applied(space) {
			t.Fatalf("%d pages, %d pages", away.has(), b.has())
		}
		away.put(4)
		c.join(a, away)
		time.Sleep(time.Minute)
		if away.has() != 4 || away.times != 1 {
			t.Fatalf("%d pages after %d removals", away.has(), away.times)
		}
	})
}

// A member that restarts with its disk serves nothing before it has the removals of a peer.
func TestAMemberThatRestarts(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, all := newNet(t, 2)
		a, b := all[0], all[1]
		time.Sleep(settleTime)
		remove(t, a)
		b.put(5) // later
		b.stop()
		a.PeerDown(b.boot)
		again := c.start(transfer.Boot{9}, b)
		if again.Ready(space) {
			t.Fatal("it is ready before it has met a peer")
		}
		c.join(a, again)
		time.Sleep(time.Second)
		if !again.Ready(space) || again.has() != 5 || again.times != 0 {
			t.Fatalf("%d pages after %d removals: the removal was applied before", again.has(), again.times)
		}
		again.stop()
		a.PeerDown(again.boot)
		remove(t, a) // while it is gone
		last := c.start(transfer.Boot{10}, again)
		last.hold = make(chan struct{})
		c.join(a, last)
		time.Sleep(time.Second)
		if last.Ready(space) {
			t.Fatal("it is ready before the removal is applied")
		}
		close(last.hold)
		time.Sleep(time.Second)
		if !last.Ready(space) || last.has() != 0 {
			t.Fatalf("%d pages are back", last.has())
		}
		last.stop()
		alone := c.start(transfer.Boot{11}, last)
		if time.Sleep(settleTime - 1); alone.Ready(space) {
			t.Fatal("ready too soon")
		}
		if time.Sleep(2 * time.Nanosecond); !alone.Ready(space) {
			t.Fatal("it waits for ever")
		}
	})
}

// A removal that was known, and not applied, when the node ended goes on after the start.
func TestPendingSurvivesTheEnd(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, all := newNet(t, 2)
		a, b := all[0], all[1]
		b.put(5)
		b.fails = errors.New("the disk is gone")
		states := remove(t, a)
		if confirmed(states) != "a" || !strings.Contains(states[1].Problem, "disk is gone") {
			t.Fatalf("%+v", states)
		}
		if b.Ready(space) {
			t.Fatal("pages of a removed namespace")
		}
		b.stop()
		c.part(a, b)
		again := c.start(transfer.Boot{9}, b)
		time.Sleep(time.Second)
		if again.has() != 0 || again.Applied(space) != a.Applied(space) {
			t.Fatalf("%d pages", again.has())
		}
	})
}

// Removals that fail are tried again.
func TestAFailureIsTriedAgain(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		_, all := newNet(t, 2)
		a, b := all[0], all[1]
		a.put(1)
		a.fails = errors.New("no space")
		if _, err := a.Remove(t.Context(), space, answerTime); err == nil ||
			!strings.Contains(err.Error(), "no space") {
			t.Fatal(err)
		}
		a.mu.Lock()
		a.fails, a.noted = nil, errors.New("no note")
		a.mu.Unlock()
		time.Sleep(retryTime + time.Second)
		if a.Applied(space) != 0 || a.Ready(space) {
			t.Fatal("applied without a note")
		}
		a.mu.Lock()
		a.noted = nil
		a.mu.Unlock()
		time.Sleep(retryTime + time.Second)
		if a.has() != 0 || a.Applied(space) == 0 || a.Applied(space) != b.Applied(space) {
			t.Fatal("not tried again")
		}
	})
}

// Two removals of one namespace at the same time: each is confirmed only by members that have
// removed their pages after it was asked for.
func TestRemovalsAtTheSameTime(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		_, all := newNet(t, 4)
		var wg sync.WaitGroup
		for range 5 {
			for _, n := range all[:3] {
				wg.Go(func() {
					before := make([]int, len(all))
					for i, n := range all {
						n.mu.Lock()
						before[i] = n.times
						n.mu.Unlock()
					}
					states, err := n.Remove(t.Context(), space, answerTime)
					if err != nil {
						t.Error(err)
					}
					for _, s := range states {
						i := int(s.Boot[0]) - 1
						all[i].mu.Lock()
						times := all[i].times
						all[i].mu.Unlock()
						if s.Confirmed && times == before[i] {
							t.Errorf("%s confirms and has removed nothing", s.Node)
						}
					}
				})
			}
		}
		wg.Wait()
		time.Sleep(time.Minute)
		for _, n := range all {
			if n.Applied(space) != all[0].Applied(space) {
				t.Error("members do not agree on the last removal")
			}
		}
	})
}

// A removal with a lower stamp than one that a member has applied is not confirmed as it is: the
// remover raises its stamp. So a clock that is behind does no harm.
func TestAStampThatIsBehind(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		_, all := newNet(t, 2)
		a, b := all[0], all[1]
		ahead := uint64(time.Now().Add(removal.MaxAhead).UnixNano())
		b.mu.Lock()
		b.hold = make(chan struct{})
		b.mu.Unlock()
		b.Learn(b.boot, space, ahead)
		b.Removals.mu.Lock()
		clear(b.news) // the other one does not get it
		b.Removals.mu.Unlock()
		close(b.hold)
		synctest.Wait()
		b.put(3)
		if got := confirmed(remove(t, a)); got != "ab" || b.has() != 0 || a.Applied(space) <= ahead {
			t.Fatalf("%s, %d pages", got, b.has())
		}
	})
}

func TestAnswersThatDoNotCome(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, all := newNet(t, 3)
		c.mu.Lock()
		c.lose = func(_, _ transfer.Boot, f *peerv1.ControlFrame) bool {
			return f.GetPageRemoved() != nil
		}
		c.mu.Unlock()
		go func() {
			time.Sleep(time.Second)
			c.part(all[0], all[2])
		}()
		began := time.Now()
		states := remove(t, all[0])
		if took := time.Since(began); took != answerTime || confirmed(states) != "a" {
			t.Errorf("%v: %+v", took, states)
		}
		want := map[string]string{"nodea": "", "nodeb": "not answered", "nodec": "ended"}
		for _, s := range states {
			if !strings.Contains(s.Problem, want[s.Node]) || s.Problem == "" != s.Confirmed {
				t.Errorf("%+v", s)
			}
			delete(want, s.Node)
		}
		if len(want) > 0 {
			t.Errorf("not named: %v", want)
		}
	})
}

// Nothing but its removals takes pages of a node, however long it was away.
func TestANodeThatWasAwayTooLong(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, all := newNet(t, 2)
		a, b := all[0], all[1]
		time.Sleep(time.Minute)
		b.put(5)
		c.part(a, b)
		remove(t, a)
		time.Sleep(removal.Keep + 2*forgetTime)
		if known, _ := a.Stats(); known != 0 {
			t.Errorf("%d are remembered", known)
		}
		c.join(a, c.start(transfer.Boot{9}, nil))
		c.join(a, b)
		time.Sleep(time.Minute)
		if b.has() != 5 || !b.Ready(space) {
			t.Errorf("%d pages", b.has())
		}
		if got := confirmed(remove(t, a)); got != "abi" || b.has() != 0 {
			t.Errorf("%s, %d pages", got, b.has())
		}
	})
}

// A peer that has not got the removals of others cannot report what this node has missed.
func TestAPeerWithoutRemovalsOfOthers(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, all := newNet(t, 1)
		a := all[0]
		time.Sleep(settleTime)
		remove(t, a)
		was := &node{pages: map[page.ID]int{space: 5}}
		b, empty := c.start(transfer.Boot{2}, was), c.start(transfer.Boot{3}, nil)
		c.join(b, empty)
		time.Sleep(time.Second)
		if b.Ready(space) || b.Settled() || empty.Settled() {
			t.Fatal("the list of a node that has just started is taken for all")
		}
		c.join(a, empty)
		time.Sleep(time.Second)
		if !b.Ready(space) || b.has() != 0 || !empty.Settled() {
			t.Errorf("%d pages; it does not get the removal through the other one", b.has())
		}
		{ // no removal wakes the sender
			again := c.start(transfer.Boot{6}, nil)
			last := c.start(transfer.Boot{7}, nil)
			c.join(again, last)
			time.Sleep(time.Second)
			if err := again.Handle(a.boot, removalsFrame(&peerv1.PageRemovals{Last: true})); err != nil {
				t.Fatal(err)
			}
			if time.Sleep(time.Second); !last.Settled() {
				t.Error("it is not settled by a settled peer")
			}
		}
		// Alone with it, the wait of one ends that of the other.
		x := c.start(transfer.Boot{4}, nil)
		time.Sleep(settleTime - time.Second)
		y := c.start(transfer.Boot{5}, was)
		c.join(x, y)
		if time.Sleep(time.Second - 1); y.Settled() {
			t.Error("too soon")
		}
		if time.Sleep(time.Second); !y.Settled() {
			t.Error("it is not settled when its peer is")
		}
	})
}

// What cannot be sent is sent later, with all that came meanwhile.
func TestASendThatFails(t *testing.T) {
	for _, more := range []bool{false, true} {
		sendFails(t, more)
	}
}

func sendFails(t *testing.T, more bool) {
	testutil.Bubble(t, func(t *testing.T) {
		c, all := newNet(t, 2)
		a, b := all[0], all[1]
		time.Sleep(time.Second)
		c.mu.Lock()
		c.cut[[2]transfer.Boot{a.boot, b.boot}] = true // and no end of the connection
		c.mu.Unlock()
		if states := remove(t, a); confirmed(states) != "a" ||
			!strings.Contains(states[1].Problem, "no node is there") {
			t.Fatalf("%+v", states)
		}
		if more {
			a.Learn(transfer.Boot{99}, page.ID{8}, uint64(time.Now().UnixNano()))
		}
		time.Sleep(time.Second)
		c.mu.Lock()
		clear(c.cut)
		c.mu.Unlock()
		time.Sleep(2 * retryTime)
		if b.Applied(space) != a.Applied(space) || b.Applied(page.ID{8}) != a.Applied(page.ID{8}) {
			t.Error("the removals are not sent again")
		}
	})
}

// The end of a list that could not be sent as a whole is not sent.
func TestAListThatIsSentInPart(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		var sent []*peerv1.PageRemovals
		fails := true
		r := New(Options{Self: Member{Boot: transfer.Boot{1}}, Store: &node{},
			Log: slog.New(slog.DiscardHandler),
			Send: func(_ transfer.Boot, f *peerv1.ControlFrame) error {
				mu.Lock()
				defer mu.Unlock()
				if fails {
					fails = false
					return errors.New("no room")
				}
				sent = append(sent, f.GetPageRemovals())
				return nil
			}})
		now := uint64(time.Now().UnixNano())
		for i := range 2 * perMessage {
			r.Learn(transfer.Boot{99}, page.ID{9, byte(i), byte(i >> 8)}, now)
		}
		r.settled = true
		r.PeerUp(transfer.Boot{2}, "b")
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { r.sender(ctx); close(done) }()
		time.Sleep(time.Second)
		mu.Lock()
		if len(sent) > 0 {
			t.Errorf("%d messages", len(sent))
		}
		mu.Unlock()
		time.Sleep(retryTime)
		stop()
		<-done
		if len(sent) != 2 || sent[0].Last || !sent[1].Last {
			t.Errorf("%d messages", len(sent))
		}
	})
}

// A peer that makes more removals than the list holds makes no more work than the list, and pushes
// out only some of those of others.
func TestAFloodOfRemovals(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		_, all := newNet(t, 2)
		a, b := all[0], all[1]
		time.Sleep(time.Second)
		other := func(i int) page.ID { return page.ID{9, byte(i), byte(i >> 8)} }
		flood := func(from, removals int) {
			now := uint64(time.Now().UnixNano())
			for i := range removals {
				a.Learn(transfer.Boot{99}, other(from+i), now+uint64(i))
			}
			a.Removals.mu.Lock()
			if len(a.news) > removal.Max {
				t.Errorf("%d are to be passed on", len(a.news))
			}
			a.Removals.mu.Unlock()
			time.Sleep(time.Minute)
		}
		flood(0, removal.Max)
		if known, pending := b.Stats(); known != removal.Max || pending != 0 {
			t.Errorf("%d known, %d pending", known, pending)
		}
		left := func(want int) {
			t.Helper()
			kept := 0
			for i := range removal.Max {
				if a.Known(other(i)) != 0 {
					kept++
				}
			}
			if kept != want {
				t.Errorf("%d are left, want %d", kept, want)
			}
		}
		flood(10_000, 3*removal.Max)
		left(removal.Max - pushesPerHour)
		flood(20_000, removal.Max)
		left(removal.Max - pushesPerHour)
		time.Sleep(time.Hour)
		flood(20_000, removal.Max)
		left(removal.Max - 2*pushesPerHour)
		if got := confirmed(remove(t, b)); got != "ba" { // another peer, and the node itself
			t.Error(got)
		}
	})
}

// A peer whose removals are refused causes a line of the log in a second, not one a frame.
func TestALogOfRefusals(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		var logs testutil.Log
		r := New(Options{Store: &node{pages: map[page.ID]int{}},
			Log: slog.New(slog.NewTextHandler(&logs, nil))})
		far := uint64(time.Now().Add(2 * removal.MaxAhead).UnixNano())
		for range 2 {
			for range 1000 {
				if err := r.Handle(transfer.Boot{9}, removalsFrame(&peerv1.PageRemovals{
					Removals: []*peerv1.PageRemoval{{Space: space[:], Stamp: far}}})); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(2 * time.Second)
		}
		if n := strings.Count(logs.String(), "removals are refused"); n != 2 ||
			!strings.Contains(logs.String(), "left_out=999") {
			t.Errorf("%d lines for 2,000 frames:\n%s", n, &logs)
		}
	})
}

// A list without room refuses: the remover gets an error, or a problem of the other node.
func TestAListThatIsFull(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		_, all := newNet(t, 2)
		a, b := all[0], all[1]
		time.Sleep(time.Second)
		b.mu.Lock()
		b.fails = errors.New("the disk is gone")
		b.mu.Unlock()
		now := uint64(time.Now().UnixNano())
		for i := range removal.Max {
			b.Learn(transfer.Boot{99}, page.ID{9, byte(i), byte(i >> 8)}, now+uint64(i))
		}
		states := remove(t, a)
		if confirmed(states) != "a" || !strings.Contains(states[1].Problem, "removals of 1024") {
			t.Errorf("%+v", states)
		}
		if _, err := b.Remove(t.Context(), space, answerTime); !errors.Is(err, removal.ErrFull) {
			t.Error(err)
		}
		if known, pending := b.Stats(); known != removal.Max || pending != removal.Max {
			t.Errorf("%d known, %d pending", known, pending)
		}
	})
}

// A removal that was applied, and forgotten at once, is confirmed.
func TestForgottenBeforeItIsConfirmed(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		_, all := newNet(t, 2)
		for _, n := range all {
			m := removal.Removal{Space: space, Stamp: 5}
			n.Removals.mu.Lock()
			n.answers = []answer{{to: transfer.Boot{99}, id: 1, r: m}}
			k := &ask{r: m}
			n.asks[space] = k
			n.appliedLocked(m) // the list does not have it
			if got := n.answerLocked(n.answers[0]); !k.applied || got.Stamp != 5 {
				t.Errorf("%v %v", k.applied, got)
			}
			n.answers = nil
			clear(n.asks)
			n.Removals.mu.Unlock()
		}
	})
}

// Where only the object store, or the note, has failed, later pages stay.
func TestTheRestIsTriedAgain(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		_, all := newNet(t, 2)
		a, b := all[0], all[1]
		b.put(5)
		b.fails = fmt.Errorf("away: %w", removal.ErrObjects)
		if got := confirmed(remove(t, a)); got != "a" || b.has() != 0 || b.Ready(space) {
			t.Errorf("%s, %d pages", got, b.has())
		}
		b.put(3)
		time.Sleep(3 * retryTime)
		b.mu.Lock()
		b.fails, b.noted = nil, errors.New("no note")
		b.mu.Unlock()
		time.Sleep(3 * retryTime)
		b.mu.Lock()
		b.noted = nil
		b.mu.Unlock()
		time.Sleep(3 * retryTime)
		if b.has() != 3 || b.times != 1 || b.rest != 1 || !b.Ready(space) {
			t.Errorf("%d pages after %d removals, and %d", b.has(), b.times, b.rest)
		}
		if got := confirmed(remove(t, a)); got != "ab" || b.has() != 0 {
			t.Errorf("the next one: %s, %d pages", got, b.has())
		}
		b.Removals.mu.Lock()
		if len(b.failed)+len(b.Removals.removed) != 0 {
			t.Error("something is left")
		}
		b.Removals.mu.Unlock()
	})
}

func TestAClockThatIsWrong(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		_, all := newNet(t, 2)
		a, b := all[0], all[1]
		far := uint64(time.Now().Add(2 * removal.MaxAhead).UnixNano())
		var got *peerv1.PageRemoved
		a.Removals.mu.Lock()
		x := &ask{id: 5, answers: map[transfer.Boot]*peerv1.PageRemoved{b.boot: nil}}
		a.asks[space] = x
		a.Removals.mu.Unlock()
		if err := b.Handle(a.boot, removalsFrame(&peerv1.PageRemovals{Id: 5,
			Removals: []*peerv1.PageRemoval{{Space: space[:], Stamp: far}}})); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		a.Removals.mu.Lock()
		got = x.answers[b.boot]
		a.Removals.mu.Unlock()
		if got == nil || got.Stamp != 0 || !strings.Contains(got.Problem, "clock") ||
			b.Known(space) != 0 {
			t.Errorf("%+v", got)
		}
	})
}

func TestMessagesAreBounded(t *testing.T) {
	long := make([]*peerv1.PageRemoval, perMessage+1)
	for i := range long {
		long[i] = &peerv1.PageRemoval{Space: space[:], Stamp: 1}
	}
	for name, m := range map[string]*peerv1.PageRemovals{
		"long":        {Removals: long},
		"two answers": {Removals: long[:2], Id: 1},
		"no removal":  {Id: 1},
		"short space": {Removals: []*peerv1.PageRemoval{{Space: space[:31], Stamp: 1}}},
		"no stamp":    {Removals: []*peerv1.PageRemoval{{Space: space[:]}}},
		"nothing":     {Removals: []*peerv1.PageRemoval{{}}},
	} {
		if check(m) == nil {
			t.Errorf("%s: taken", name)
		}
	}
	if err := check(&peerv1.PageRemovals{Removals: long[:perMessage], Last: true}); err != nil {
		t.Error(err)
	}
	list := make([]*peerv1.PageRemoval, 2*perMessage)
	for i := range list {
		list[i] = long[0]
	}
	got := parts(transfer.Boot{}, list, true)
	if len(got) != 2 || got[0].frame.GetPageRemovals().Last || !got[1].frame.GetPageRemovals().Last {
		t.Errorf("%d parts", len(got))
	}
	if got := parts(transfer.Boot{}, nil, true); len(got) != 1 ||
		len(parts(transfer.Boot{}, nil, false)) != 0 {
		t.Errorf("%d parts", len(got))
	}
}

func FuzzHandle(f *testing.F) {
	b, _ := proto.Marshal(removalsFrame(&peerv1.PageRemovals{Id: 5,
		Removals: []*peerv1.PageRemoval{{Space: space[:], Stamp: 3}}}))
	f.Add(b)
	b, _ = proto.Marshal(&peerv1.ControlFrame{Body: &peerv1.ControlFrame_PageRemoved{
		PageRemoved: &peerv1.PageRemoved{Id: 1, Stamp: 1, Problem: "x"}}})
	f.Add(b)
	n := &node{pages: map[page.ID]int{}}
	r := New(Options{Store: n, Log: slog.New(slog.DiscardHandler),
		Send: func(transfer.Boot, *peerv1.ControlFrame) error { return nil }})
	f.Fuzz(func(t *testing.T, b []byte) {
		m := &peerv1.ControlFrame{}
		if proto.Unmarshal(b, m) != nil {
			return
		}
		_ = r.Handle(transfer.Boot{1}, m)
		r.due()
		if len(r.answers) > maxAnswers || r.list.Len() > removal.Max {
			t.Fatal("without a bound")
		}
	})
}

// Removals in a loop do not sync the node's disk all the time. A single one does not wait.
func TestRemovalsInALoopArePaced(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		_, all := newNet(t, 1)
		time.Sleep(settleTime)
		began := time.Now()
		remove(t, all[0])
		if took := time.Since(began); took > 0 {
			t.Errorf("one removal took %v", took)
		}
		for range 100 {
			remove(t, all[0])
		}
		if took := time.Since(began); took < 100*removePause {
			t.Errorf("100 removals took %v", took)
		}
	})
}

// A removal of another namespace waits for none whose store, or whose peer, does not answer.
func TestARemovalWaitsForNoOther(t *testing.T) {
	for _, what := range []string{"store", "peer"} {
		testutil.Bubble(t, func(t *testing.T) {
			c, all := newNet(t, 2)
			a := all[0]
			time.Sleep(settleTime)
			if what == "store" {
				a.mu.Lock()
				a.hold = make(chan struct{})
				a.mu.Unlock()
			} else {
				c.mu.Lock()
				c.lose = func(_, _ transfer.Boot, f *peerv1.ControlFrame) bool {
					return f.GetPageRemoved().GetId() == 1 // of the first one
				}
				c.mu.Unlock()
			}
			first := make(chan struct{})
			go func() { defer close(first); remove(t, a) }()
			synctest.Wait()
			began := time.Now()
			ctx, stop := context.WithTimeout(t.Context(), time.Minute)
			defer stop()
			states, err := a.Remove(ctx, page.ID{8}, answerTime)
			if took := time.Since(began); err != nil || took > time.Second ||
				confirmed(states) != "ab" {
				t.Errorf("%s: after %v: %v, %+v", what, took, err, states)
			}
			select {
			case <-first:
				t.Errorf("%s: the first one has ended", what)
			default:
			}
			if what == "store" {
				close(a.hold)
			}
			<-first
		})
	}
}

// A second removal of the same namespace waits for the first, or until its caller gives it up.
func TestRemovalsOfOneNamespaceTakeTurns(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		_, all := newNet(t, 1)
		a := all[0]
		time.Sleep(settleTime)
		a.hold = make(chan struct{})
		first := make(chan struct{})
		go func() { defer close(first); remove(t, a) }()
		synctest.Wait()
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		if _, err := a.Remove(ctx, space, answerTime); err == nil ||
			!strings.Contains(err.Error(), "another removal of it is under way") {
			t.Error(err)
		}
		close(a.hold)
		<-first
		remove(t, a)
	})
}
