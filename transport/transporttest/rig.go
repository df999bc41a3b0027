// Package transporttest is the contract suite that every transport passes, and the benchmarks that
// compare them. A backend adopts it in a few lines:
//
//	func TestConformance(t *testing.T) {
//		transporttest.Conformance(t, func(tb testing.TB) transport.Backend { return newBackend(tb) })
//	}
//
// It plays two sidecars in one process, each with its own Host, or one of them on another host:
// ConformanceBetween. It owns every goroutine that it starts and joins them before a test ends.
package transporttest

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Factory makes one backend, not opened yet. The suite closes it.
type Factory func(tb testing.TB) transport.Backend

// patience bounds every wait. A correct backend needs a fraction of it even on a loaded machine.
const patience = time.Minute

// AttackRunsEnv is the variable that sets the number of runs of the attacks; a few without it.
const AttackRunsEnv = "KVSPRAY_ATTACK_RUNS"

func attackRuns(tb testing.TB) int {
	s := os.Getenv(AttackRunsEnv)
	if s == "" {
		return 10
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		tb.Fatalf("%s=%q: must be a positive number of runs", AttackRunsEnv, s)
	}
	return n
}

// End is one sidecar of the rig: a backend and its Host.
type End struct {
	tb      testing.TB
	Backend transport.Backend
	Boot    transfer.Boot
	Rails   []transport.Rail

	ups   chan transport.Lane
	downs chan transport.Lane

	far *far // the end plays on another host, and this is its shadow; nil: here

	// receives results instead of the bookkeeping below; set before the first lane
	direct func([]transport.Result)

	mu      sync.Mutex
	peers   map[transfer.Boot]transport.Peer
	grants  map[transfer.Slot]*transport.Grant
	origins map[transfer.Slot]*transport.Origin
	pending map[uint64]chan transport.Result // by cookie; a result without one is an error
	lanes   map[uint64]bool                  // by id: up and not down
	lost    map[uint64]error                 // why lanes are down, by id
	refused map[transfer.Reason]int
	cookie  uint64
}

// Pair is two ends that are introduced to each other.
type Pair struct {
	tb   testing.TB
	A, B *End // A sends, B receives, unless a test does otherwise
	Key  [32]byte
}

func randomBoot() (b transfer.Boot) {
	binary.LittleEndian.PutUint64(b[:], rand.Uint64())
	binary.LittleEndian.PutUint64(b[8:], rand.Uint64())
	return b
}

// NewPair opens two backends that are introduced to each other.
func NewPair(tb testing.TB, f Factory) *Pair {
	tb.Helper()
	p := &Pair{tb: tb}
	for i := range p.Key {
		p.Key[i] = byte(rand.Uint32())
	}
	p.A = newEnd(tb, f)
	if far := otherHost.Load(); far != nil {
		p.B = far.newEnd(tb)
	} else {
		p.B = newEnd(tb, f)
	}
	p.A.Introduce(p.B.Boot, p.Key)
	p.B.Introduce(p.A.Boot, p.Key)
	return p
}

func bareEnd(tb testing.TB) *End {
	return &End{tb: tb, ups: make(chan transport.Lane, 256), downs: make(chan transport.Lane, 256),
		peers: map[transfer.Boot]transport.Peer{}, grants: map[transfer.Slot]*transport.Grant{},
		origins: map[transfer.Slot]*transport.Origin{}, pending: map[uint64]chan transport.Result{},
		lanes: map[uint64]bool{},
		lost:  map[uint64]error{}, refused: map[transfer.Reason]int{}}
}

func newEnd(tb testing.TB, f Factory) *End {
	tb.Helper()
	e := bareEnd(tb)
	e.Backend, e.Boot = f(tb), randomBoot()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	rails, err := e.Backend.Open(ctx, e)
	if errors.Is(err, transport.ErrNotSupported) {
		testutil.Skip(tb, e.Backend.Name(), err.Error())
	}
	if err != nil {
		tb.Fatalf("open: %v", err)
	}
	if len(rails) == 0 {
		tb.Fatal("open: no rails")
	}
	e.Rails = rails
	tb.Cleanup(func() { _ = e.Backend.Close() })
	return e
}

// Introduce registers a peer.
func (e *End) Introduce(boot transfer.Boot, key [32]byte) {
	if e.far != nil {
		e.far.do(e.tb, FarCall{Op: opIntroduce, Peer: transport.Peer{Boot: boot, Key: key}})
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.peers[boot] = transport.Peer{Boot: boot, Self: e.Boot, Key: key}
}

// The transport.Host of an end.

// PeerKey implements transport.Host.
func (e *End) PeerKey(boot transfer.Boot) (transport.Peer, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p, ok := e.peers[boot]
	return p, ok
}

// Grant implements transport.Host.
func (e *End) Grant(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Grant,
	transfer.Reason) {
	e.mu.Lock()
	defer e.mu.Unlock()
	g := e.grants[slot]
	switch {
	case g == nil || g.Peer != peer:
		return nil, transfer.ReasonUnknownSlot
	case g.Gen != gen:
		return nil, transfer.ReasonStaleGen
	}
	return g, transfer.ReasonNone
}

// Origin implements transport.Host.
func (e *End) Origin(peer transfer.Boot, slot transfer.Slot, gen transfer.Gen) (*transport.Origin,
	transfer.Reason) {
	e.mu.Lock()
	defer e.mu.Unlock()
	o := e.origins[slot]
	switch {
	case o == nil || o.Peer != peer:
		return nil, transfer.ReasonUnknownSlot
	case o.Gen != gen:
		return nil, transfer.ReasonStaleGen
	}
	return o, transfer.ReasonNone
}

// LaneUp implements transport.Host.
func (e *End) LaneUp(l transport.Lane) {
	e.mu.Lock()
	if e.lanes[l.ID()] {
		e.tb.Errorf("lane %d is up twice", l.ID())
	}
	e.lanes[l.ID()] = true
	e.mu.Unlock()
	e.ups <- l
}

// LaneDown implements transport.Host.
func (e *End) LaneDown(l transport.Lane, why error) {
	e.mu.Lock()
	if !e.lanes[l.ID()] {
		e.tb.Errorf("lane %d is down and was not up", l.ID())
	}
	delete(e.lanes, l.ID())
	e.lost[l.ID()] = why
	e.mu.Unlock()
	e.downs <- l
}

// Done implements transport.Host.
func (e *End) Done(_ transport.Lane, res []transport.Result) {
	if e.direct != nil {
		e.direct(res)
		return
	}
	for _, r := range res {
		e.mu.Lock()
		c := e.pending[r.Cookie]
		delete(e.pending, r.Cookie)
		e.mu.Unlock()
		if c == nil {
			e.tb.Errorf("slice %d of chunks %d+%d ended twice, or was never moved: %s", r.Cookie,
				r.Range.First, r.Range.Count, r.Outcome)
			continue
		}
		if (r.Outcome == transfer.Landed) != (r.Err == nil) {
			e.tb.Errorf("slice %d: outcome %s with error %v", r.Cookie, r.Outcome, r.Err)
		}
		c <- r
	}
}

// Refused implements transport.Host.
func (e *End) Refused(_ transport.Lane, r transfer.Reason) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refused[r]++
}

// RefusedFor counts the frames that were refused for a reason.
func (e *End) RefusedFor(r transfer.Reason) int {
	if e.far != nil {
		return e.far.do(e.tb, FarCall{Op: opRefusedFor, Reason: r}).N
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.refused[r]
}

// usable fails the test with the reason once none of these lanes is up, unless the test ended them.
func (e *End) usable(lanes ...transport.Lane) {
	e.tb.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	var why []error
	for _, l := range lanes {
		if e.lanes[l.ID()] {
			return
		}
		why = append(why, e.lost[l.ID()])
	}
	e.tb.Fatalf("every lane was lost: %v", errors.Join(why...))
}

// open slices that have not ended.
func (e *End) open() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.pending)
}

// Dial opens a lane from A to B and returns both ends of it.
func (p *Pair) Dial() (a, b transport.Lane) {
	p.tb.Helper()
	return dial(p.tb, p.A, p.B)
}

func dial(tb testing.TB, from, to *End) (here, there transport.Lane) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	peer, _ := from.PeerKey(to.Boot)
	l, err := from.dial(ctx, peer, from.Rails[0], to.Rails[0])
	if err != nil {
		tb.Fatalf("dial: %v", err)
	}
	up := from.up("LaneUp of the dialed end")
	if up.ID() != l.ID() {
		tb.Fatalf("LaneUp of lane %d, dialed lane %d", up.ID(), l.ID())
	}
	there = to.up("LaneUp of the accepted end")
	for _, x := range []struct {
		l           transport.Lane
		self, other *End
	}{{l, from, to}, {there, to, from}} {
		if x.l.Peer() != x.other.Boot || x.l.Backend() != from.name() || x.l.MaxInFlight() < 1 {
			tb.Fatalf("lane %d: peer %s backend %q in flight %d", x.l.ID(), x.l.Peer(), x.l.Backend(),
				x.l.MaxInFlight())
		}
		if x.l.Local() != x.self.Rails[0].Name || x.l.Remote() != x.other.Rails[0].Name {
			tb.Fatalf("lane %d: rails %q and %q, want %q and %q", x.l.ID(), x.l.Local(), x.l.Remote(),
				x.self.Rails[0].Name, x.other.Rails[0].Name)
		}
	}
	return l, there
}

// name of the backend, the same at both ends.
func (e *End) name() string {
	if e.far != nil {
		return e.far.name
	}
	return e.Backend.Name()
}

func (e *End) dial(ctx context.Context, peer transport.Peer, local, remote transport.Rail) (
	transport.Lane, error) {
	if e.far != nil {
		return e.far.do(e.tb, FarCall{Op: opDial, Peer: peer, Local: local, Remote: remote}).lane(e.far)
	}
	return e.Backend.Dial(ctx, peer, local, remote)
}

// up waits for a lane that came up, and down for one that went down.
func (e *End) up(what string) transport.Lane {
	e.tb.Helper()
	if e.far != nil {
		l, _ := e.far.do(e.tb, FarCall{Op: opUp, What: what}).lane(e.far)
		return l
	}
	return receive(e.tb, e.ups, what)
}

// Redial opens a lane from rail i to rail i, closes it again, and returns the time of opening it.
func (p *Pair) Redial(i int) time.Duration {
	p.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	peer, _ := p.A.PeerKey(p.B.Boot)
	began := time.Now()
	l, err := p.A.dial(ctx, peer, p.A.Rails[i], p.B.Rails[i])
	took := time.Since(began)
	if err != nil {
		p.tb.Fatalf("dial: %v", err)
	}
	p.A.up("LaneUp of the dialed end")
	p.B.up("LaneUp of the accepted end")
	if err := l.Close(); err != nil {
		p.tb.Fatalf("close: %v", err)
	}
	p.A.down("LaneDown of the dialed end")
	p.B.down("LaneDown of the accepted end")
	return took
}

func (e *End) down(what string) transport.Lane {
	e.tb.Helper()
	if e.far != nil {
		l, _ := e.far.do(e.tb, FarCall{Op: opDown, What: what}).lane(e.far)
		return l
	}
	return receive(e.tb, e.downs, what)
}

// anyUp is a lane that has come up, or nil.
func (e *End) anyUp() transport.Lane {
	if e.far != nil {
		if a := e.far.do(e.tb, FarCall{Op: opAnyUp}); a.OK {
			l, _ := a.lane(e.far)
			return l
		}
		return nil
	}
	select {
	case l := <-e.ups:
		return l
	default:
		return nil
	}
}

func receive[T any](tb testing.TB, c <-chan T, what string) (v T) {
	tb.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		tb.Fatalf("no %s within %s", what, patience)
	}
	return v
}

// Move passes one slice to a lane and returns the channel of its result. A lane that is down
// produces a NotLanded.
func (e *End) Move(l transport.Lane, o *transport.Origin, r transfer.Range,
	attempt uint32) <-chan transport.Result {
	c := make(chan transport.Result, 1)
	if e.far != nil {
		go func() { c <- e.far.move(e.tb, l, o, r, attempt) }()
		return c
	}
	e.mu.Lock()
	e.cookie++
	s := transport.Slice{Origin: o, Range: r, Attempt: attempt, Cookie: e.cookie}
	e.pending[s.Cookie] = c
	e.mu.Unlock()
	if err := l.Move([]transport.Slice{s}); err != nil {
		e.mu.Lock()
		delete(e.pending, s.Cookie)
		e.mu.Unlock()
		if !errors.Is(err, net.ErrClosed) {
			e.tb.Errorf("move on a lane that is up, or an error without closed: %v", err)
		}
		c <- transport.Result{Slice: s, Outcome: transfer.NotLanded, Reason: transfer.ReasonLaneLost,
			Err: err}
	}
	return c
}

// MoveWait moves one slice and waits for its end.
func (e *End) MoveWait(l transport.Lane, o *transport.Origin, r transfer.Range,
	attempt uint32) transport.Result {
	e.tb.Helper()
	return receive(e.tb, e.Move(l, o, r, attempt), "result")
}

// End fences and closes both sides.
func (b *Bind) End(tb testing.TB) {
	tb.Helper()
	b.Fence(tb)
	b.CloseOrigin(tb)
	b.to.forgetGrant(tb, b.Grant)
	b.from.forgetOrigin(tb, b.Origin)
}

// forgetGrant removes an ended grant from the lookup, and forgetOrigin an ended origin.
func (e *End) forgetGrant(tb testing.TB, g *transport.Grant) {
	if e.far != nil {
		e.far.forget(tb, g)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.grants[g.Slot] == g {
		delete(e.grants, g.Slot)
	}
}

func (e *End) forgetOrigin(tb testing.TB, o *transport.Origin) {
	if e.far != nil {
		e.far.forget(tb, o)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.origins[o.Slot] == o {
		delete(e.origins, o.Slot)
	}
}
