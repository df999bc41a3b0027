package exec

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/credit"
	"github.com/kvspray/kvspray/control/exec/internal/endpoint"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/transfer"
)

// drained is what an executor wants done, slices left out.
func drained(e *Exec) (out []Action) {
	var b Batch
	for e.Drain(&b) {
		out = append(out, b.Actions...)
	}
	return out
}

func only(t *testing.T, all []Action, k Kind) []Action {
	t.Helper()
	var out []Action
	for _, a := range all {
		if a.Kind == k {
			out = append(out, a)
		}
	}
	return out
}

// lanes joins an executor to a peer by rails r0, r1 ...
func laned(t *testing.T, e *Exec, boot transfer.Boot, n int) {
	t.Helper()
	e.PeerUp(0, "peer:1", boot)
	for i := range n {
		name := fmt.Sprint("r", i)
		if err := e.LaneUp(0, LaneInfo{ID: uint64(100*int(boot[0]) + i), Peer: boot, Backend: "tcp",
			Local: name, Remote: name, SliceBytes: 1 << 20, MaxInFlight: 16, ReportsAcked: true}); err !=
			nil {
			t.Fatal(err)
		}
	}
}

func states(e *Exec, now Instant) string {
	var out []string
	for _, p := range e.View(now).Rails.Pairs {
		out = append(out, p.Path.Local+" "+p.State)
	}
	return strings.Join(out, ", ")
}

// What is said of links holds for the pairs over them, ours and the peer's; a rail that is gone is
// on trial when it is there again.
func TestLinksOfRails(t *testing.T) {
	e := New(Config{Boot: transfer.Boot{9}, Transports: []string{"tcp"}})
	peer := transfer.Boot{1}
	laned(t, e, peer, 2)
	set := func(now Instant, mine, theirs string) {
		list := func(s string) (out []Rail) {
			for _, f := range strings.Fields(s) {
				name, down := strings.CutSuffix(f, "!")
				out = append(out, Rail{Transport: "tcp", Name: name, Down: down})
			}
			return out
		}
		e.SetRails(now, list(mine))
		e.PeerRails(now, peer, list(theirs))
	}
	for i, x := range []struct{ mine, theirs, want string }{
		{"r0 r1", "r0 r1", "r0 healthy, r1 healthy"},
		{"r0! r1", "r0 r1", "r0 excluded, r1 healthy"},
		{"r0! r1", "r0! r1!", "r0 excluded, r1 excluded"},
		{"r0 r1", "r0! r1", "r0 excluded, r1 probing"},
		{"r0 r1", "r0 r1", "r0 probing, r1 probing"},
		{"r1", "r0 r1", "r0 probing, r1 probing"}, // it was excluded, and is on trial if it comes back
	} {
		now := Instant(i+1) * sec
		set(now, x.mine, x.theirs)
		e.Tick(now)
		if got := states(e, now); got != x.want {
			t.Errorf("ours %q, the peer's %q: %s, want %s", x.mine, x.theirs, got, x.want)
		}
	}
	var many []Rail
	for i := range 10000 {
		many = append(many, Rail{Transport: "tcp", Name: fmt.Sprint("x", i), Down: true})
	}
	// What is beyond the bound is left out by name, said once, and no rail that follows is the worse
	// for it.
	drained(e)
	e.PeerRails(20*sec, peer, many)
	said := only(t, drained(e), LogViolation)
	if n := e.peers.Find(peer).Known(); n != lanes.MaxRails {
		t.Errorf("%d rails of a peer are known, want %d", n, lanes.MaxRails)
	}
	if want := fmt.Sprintf(`10000 rails: at most %d are kept, not "x%d" and what follows`, lanes.MaxRails,
		lanes.MaxRails); len(said) != 1 || said[0].Peer != peer || said[0].Text != want {
		t.Errorf("complaints: %+v, want %q", said, want)
	}
	e.PeerRails(21*sec, peer, many)
	if said := only(t, drained(e), LogViolation); len(said) != 0 {
		t.Errorf("said again: %+v", said)
	}
	for i, x := range []struct{ theirs, want string }{
		{"r0! r1", "r0 excluded, r1 probing"},
		{"r0 r1!", "r0 probing, r1 excluded"},
	} {
		now := Instant(22+i) * sec
		set(now, "r0 r1", x.theirs)
		e.Tick(now)
		if got := states(e, now); got != x.want {
			t.Errorf("after 10,000 rails, the peer's %q: %s, want %s", x.theirs, got, x.want)
		}
	}
	if n := e.peers.Find(peer).Known(); n != 2 {
		t.Errorf("%d rails of a peer are known that names 2", n)
	}
	e.SetRails(30*sec, many)
	if n := e.rails.Known(); n != lanes.MaxRails {
		t.Errorf("%d rails of our own are known, want %d", n, lanes.MaxRails)
	}
}

// Credits that cannot be, of rails that the peer has not named or beyond all bounds, are refused by
// name, once, and change nothing. Each has an executor of its own: a peer is complained of once for
// each kind.
func TestAbsurdCredits(t *testing.T) {
	peer := transfer.Boot{1}
	for name, x := range map[string]struct {
		transport, rail string
		bytes           uint64
		before          int    // other rails that have credits already, where the peer has named none
		want            string // the complaint; empty: none
	}{
		"honest":              {"tcp", "r0", 1 << 19, 0, ""},
		"as much as there is": {"tcp", "r0", credit.Max, 0, ""},
		"of receives":         {"tcp", "", 1 << 60, 0, ""},
		"a byte more": {"tcp", "r0", credit.Max + 1, 0,
			`credit for rail "r0": 1073741825 bytes: at most 1073741824`},
		"absurd": {"tcp", "r0", 1 << 60, 0,
			`credit for rail "r0": 1152921504606846976 bytes: at most 1073741824`},
		"all there can be": {"tcp", "r0", 1<<64 - 1, 0,
			`credit for rail "r0": 18446744073709551615 bytes: at most 1073741824`},
		"of no rail": {"tcp", "bogus", 1 << 20, 0,
			`credit for rail "bogus": the peer has named no such rail of "tcp"`},
		"of no transport": {"udp", "r0", 1 << 20, 0,
			`credit for rail "r0": the peer has named no such rail of "udp"`},
		"of a long name": {"tcp", strings.Repeat("x", 1000), 1, 0, `credit for rail "` +
			strings.Repeat("x", 64) + `": the peer has named no such rail of "tcp"`},
		"too many": {"tcp", "one more", 1 << 20, 511,
			`credit for rail "one more": too many credits`},
	} {
		t.Run(name, func(t *testing.T) {
			e := New(Config{Boot: transfer.Boot{9}, Transports: []string{"tcp"}})
			laned(t, e, peer, 1)
			if x.before == 0 {
				e.PeerRails(0, peer, []Rail{{Transport: "tcp", Name: "r0"}})
			}
			drained(e)
			say := func(transport, rail string, bytes uint64) []Action {
				t.Helper()
				if err := e.Message(sec, peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Credit{
					Credit: &peerv1.Credit{Transport: transport, Rail: rail, Bytes: bytes}}}); err != nil {
					t.Error(err)
				}
				return only(t, drained(e), LogViolation)
			}
			given := func(now Instant) uint64 { return e.View(now).Rails.Pairs[0].Credit }
			said := say("tcp", "r0", 1<<20)
			for i := range x.before {
				said = append(said, say("tcp", fmt.Sprint("other", i), 1)...)
			}
			if len(said) != 0 || given(sec) != 1<<20 {
				t.Fatalf("credit %d, complaints %v", given(sec), said)
			}
			want := uint64(1 << 20)
			if said := say(x.transport, x.rail, x.bytes); x.want == "" {
				if x.rail == "r0" {
					want = x.bytes
				}
				if len(said) != 0 {
					t.Errorf("complaints %+v", said)
				}
			} else if len(said) != 1 || said[0].Text != x.want || said[0].Peer != peer {
				t.Errorf("complaints %+v, want %q", said, x.want)
			}
			if given(sec) != want {
				t.Errorf("a credit of %d is believed, want %d", given(sec), want)
			}
			if said := say(x.transport, x.rail, x.bytes); len(said) != 0 || given(sec) != want {
				t.Errorf("said again: %v, credit %d", said, given(sec))
			}
			if said := say("tcp", "r0", 1<<18); len(said) != 0 || given(sec) != 1<<18 {
				t.Errorf("an honest credit after it: %d, complaints %v", given(sec), said)
			}
			// What is not said again is forgotten.
			e.dispatch.Touch(e.peers.Find(peer))
			e.Tick(sec + credit.Age + 1)
			if c := given(3 * sec); c != 0 {
				t.Errorf("a credit of %d is still believed", c)
			}
		})
	}
}

// Shares follow what comes: one sender is not limited, two are, and are free again when the other
// stops.
func TestSharesOfCredits(t *testing.T) {
	e := New(Config{Boot: transfer.Boot{9}, Transports: []string{"tcp"}})
	a, b := transfer.Boot{1}, transfer.Boot{2}
	now := Instant(0)
	step := func(moves ...bool) (out []string) {
		for range 10 {
			now += credit.Every
			var grew []Inflow
			for i, m := range moves {
				if m {
					// 1 GiB/s
					grew = append(grew, Inflow{Peer: []transfer.Boot{a, b}[i], Transport: "tcp", Rail: "r0",
						Gbps: 400, Bytes: 5 << 20})
				}
			}
			e.Measured(now, grew)
			for _, x := range only(t, drained(e), Send) {
				c := x.Frame.GetCredit()
				out = append(out, fmt.Sprintf("%d:%s:%d", x.Peer[0], c.Rail, c.Bytes/transfer.ChunkBytes))
			}
		}
		return out
	}
	step(false, false)
	if got := step(true, false); len(got) != 0 {
		t.Errorf("one sender is told %v", got)
	}
	// Both bring 1 GiB/s each: 2 MiB a millisecond, 16 chunks each, whatever the link claims to be.
	got := step(true, true)
	if len(got) < 2 || !strings.HasSuffix(got[len(got)-1], ":16") &&
		!strings.HasSuffix(got[len(got)-1], ":8") {
		t.Errorf("two senders are told %v", got)
	}
	if got := step(true, false); len(got) != 2 || got[0] != "1:r0:0" || got[1] != "2:r0:0" {
		t.Errorf("when one of two stops they are told %v", got)
	}
}

// A peer that hangs is tried for ten seconds at the cost of those who wait for it; then requests
// are refused at once, one is let through now and then, and when it answers all is as before.
// Requests to others never notice.
func TestBreaker(t *testing.T) {
	s, p, d, pw, dw := pair(t, 4, 0)
	hang := errors.New("context deadline exceeded")
	fail := func() { d.event(func() { d.ex.ConnectFailed(s.now, "q:1", hang) }) }
	// The fabric of this test refuses unknown addresses; what it says of this one is replaced.
	d.hangs = map[string]bool{"q:1": true}
	n := uint64(0)
	expect := func(addr string) *simLease {
		n++
		return d.expect(dw, n, testKey(3, byte(n)), addr, 64, 0, 20*sec)
	}
	first := expect("q:1")
	for range 4 {
		s.run(s.now+4*sec, func() bool { return false })
		fail()
	}
	if first.done == nil || first.done.Status != engines.StatusExpired {
		t.Fatalf("the first request: %+v", first.done)
	}
	second := expect("q:1")
	if second.done == nil || second.done.Status != engines.StatusRefused ||
		!strings.Contains(second.done.Reason, "q:1 was not reached for") {
		t.Fatalf("a request while the breaker is open: %+v", second.done)
	}
	d.event(func() {
		d.ex.Await(s.now, 77, engines.Await{Key: testKey(9, 9), Peer: "q:1",
			TTL: 8 * sec})
	})
	if d.answer[77].State != "gone" {
		t.Errorf("a question while the breaker is open: %+v", d.answer[77])
	}
	other := p.intent(pw, 50, testKey(7, 7), 64, 1, 20*sec)
	p.steps(other)
	n = 49
	got := d.expect(dw, 51, testKey(7, 7), "p:1", 64, 0, 20*sec)
	s.until("a transfer with another peer", sec, func() bool { return got.done != nil })
	wantStatus(t, got, engines.StatusOK)
	// Half open: one waits, the address answers, and it is closed.
	s.run(s.now+endpoint.BreakMost, func() bool { return false })
	delete(d.hangs, "q:1")
	q := s.node("q:1", Config{Transports: []string{"shm", "tcp"}})
	qw := q.worker()
	n = 59
	third := expect("q:1")
	if third.done != nil {
		t.Fatalf("after its time nobody is let through: %+v", third.done)
	}
	src := q.intent(qw, 1, testKey(3, byte(n)), 64, 1, 20*sec)
	q.steps(src)
	s.until("a transfer with the peer that is back", 5*sec, func() bool { return third.done != nil })
	wantStatus(t, third, engines.StatusOK)
}
