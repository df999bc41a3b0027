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
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// drained returns the actions of an executor, without slices.
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
		if err := e.LaneUp(0, boot, spray.LaneInfo{ID: uint64(100*int(boot[0]) + i),
			Path:       spray.Path{Transport: "tcp", Local: name, Remote: name},
			SliceBytes: 1 << 20, MaxSlices: 16, ReportsAcked: true}, false); err != nil {
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

// Link states apply to the pairs over these rails, ours and the peer's. A rail that was absent is
// on trial when it returns.
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
	// Rails beyond the bound are ignored and logged once, with the first name. They do not affect
	// later reports.
	drained(e)
	e.PeerRails(20*sec, peer, many)
	logged := only(t, drained(e), LogViolation)
	if n := e.peers.Find(peer).Known(); n != lanes.MaxRails {
		t.Errorf("%d rails of a peer are known, want %d", n, lanes.MaxRails)
	}
	if want := fmt.Sprintf(`10000 rails: at most %d are kept, not "x%d" and what follows`,
		lanes.MaxRails,
		lanes.MaxRails); len(logged) != 1 || logged[0].Peer != peer || logged[0].Text != want {
		t.Errorf("logged: %+v, want %q", logged, want)
	}
	e.PeerRails(21*sec, peer, many)
	if logged := only(t, drained(e), LogViolation); len(logged) != 0 {
		t.Errorf("logged again: %+v", logged)
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

// Invalid credits, for unknown rails or beyond the bounds, are logged once by name and change
// nothing. Each case has an executor of its own, because each kind is logged once per peer.
func TestInvalidCredits(t *testing.T) {
	peer := transfer.Boot{1}
	for name, x := range map[string]struct {
		transport, rail string
		bytes           uint64
		before          int    // other rails that have credits already, where the peer has named none
		want            string // the logged text; empty: none
	}{
		"valid":               {"tcp", "r0", 1 << 19, 0, ""},
		"as much as there is": {"tcp", "r0", credit.Max, 0, ""},
		"of receives":         {"tcp", "", 1 << 60, 0, ""},
		"a byte more": {"tcp", "r0", credit.Max + 1, 0,
			`credit for rail "r0": 1073741825 bytes: at most 1073741824`},
		"too large": {"tcp", "r0", 1 << 60, 0,
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
			send := func(transport, rail string, bytes uint64) []Action {
				t.Helper()
				if err := e.Message(sec, peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Credit{
					Credit: &peerv1.Credit{Transport: transport, Rail: rail, Bytes: bytes}}}); err != nil {
					t.Error(err)
				}
				return only(t, drained(e), LogViolation)
			}
			given := func(now Instant) uint64 { return e.View(now).Rails.Pairs[0].Credit }
			logged := send("tcp", "r0", 1<<20)
			for i := range x.before {
				logged = append(logged, send("tcp", fmt.Sprint("other", i), 1)...)
			}
			if len(logged) != 0 || given(sec) != 1<<20 {
				t.Fatalf("credit %d, logged: %v", given(sec), logged)
			}
			want := uint64(1 << 20)
			if logged := send(x.transport, x.rail, x.bytes); x.want == "" {
				if x.rail == "r0" {
					want = x.bytes
				}
				if len(logged) != 0 {
					t.Errorf("logged: %+v", logged)
				}
			} else if len(logged) != 1 || logged[0].Text != x.want || logged[0].Peer != peer {
				t.Errorf("logged: %+v, want %q", logged, x.want)
			}
			if given(sec) != want {
				t.Errorf("a credit of %d is in use, want %d", given(sec), want)
			}
			if logged := send(x.transport, x.rail, x.bytes); len(logged) != 0 || given(sec) != want {
				t.Errorf("logged again: %v, credit %d", logged, given(sec))
			}
			if logged := send("tcp", "r0", 1<<18); len(logged) != 0 || given(sec) != 1<<18 {
				t.Errorf("a valid credit after it: %d, logged: %v", given(sec), logged)
			}
			// A credit that is not repeated expires.
			e.dispatch.Touch(e.peers.Find(peer))
			e.Tick(sec + credit.Age + 1)
			if c := given(3 * sec); c != 0 {
				t.Errorf("a credit of %d is still in use", c)
			}
		})
	}
}

// Credits follow the traffic: one sender has no limit, two have limits, and the limit is lifted
// when the other one stops.
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
		t.Errorf("credits of one sender: %v", got)
	}
	// Each sends 1 GiB/s: together 2 MiB per millisecond, so 16 chunks each, whatever the nominal
	// speed of the link.
	got := step(true, true)
	if len(got) < 2 || !strings.HasSuffix(got[len(got)-1], ":16") &&
		!strings.HasSuffix(got[len(got)-1], ":8") {
		t.Errorf("credits of two senders: %v", got)
	}
	if got := step(true, false); len(got) != 2 || got[0] != "1:r0:0" || got[1] != "2:r0:0" {
		t.Errorf("credits after one of two stopped: %v", got)
	}
}

// Connects to a hanging peer continue for ten seconds at the cost of the waiting requests. Then
// requests are refused at once, one is let through now and then, and a successful connect closes
// the breaker. Requests for other peers are not affected.
func TestBreaker(t *testing.T) {
	s, p, d, pw, dw := pair(t, 4, 0)
	hang := errors.New("context deadline exceeded")
	fail := func() { d.event(func() { d.ex.ConnectFailed(s.now, "q:1", hang) }) }
	// The fabric of this test refuses unknown addresses. For this address the test replaces the
	// result.
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
	// Half open: one request waits, the connect succeeds, and the breaker closes.
	s.run(s.now+endpoint.BreakMax, func() bool { return false })
	delete(d.hangs, "q:1")
	q := s.node("q:1", Config{Transports: []string{"shm", "tcp"}})
	qw := q.worker()
	n = 59
	third := expect("q:1")
	if third.done != nil {
		t.Fatalf("after its time no request is let through: %+v", third.done)
	}
	src := q.intent(qw, 1, testKey(3, byte(n)), 64, 1, 20*sec)
	q.steps(src)
	s.until("a transfer with the peer that is back", 5*sec, func() bool { return third.done != nil })
	wantStatus(t, third, engines.StatusOK)
}
