package exec

import (
	"errors"
	"strings"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/endpoint"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/source"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// unable is a planner that refuses every EXPECT.
type unable struct{ simPlanner }

func (unable) Receive(*engines.Worker, *engines.Expect) (Plan, error) {
	return nil, errors.New("blocks[0]: 3 blocks: 64 tokens need 4")
}

// A receiver that cannot plan ends both sides with its reason, even if it first has to connect to
// the source's sidecar.
func TestReceiverCannotPlan(t *testing.T) {
	for _, known := range []bool{true, false} {
		s, p, _, pw, _ := pair(t, 5, 0)
		n := s.node("x:1", Config{Transports: []string{"tcp"}})
		n.ex.core.Cfg.Planner = unable{}
		w := n.worker()
		if known {
			n.event(func() { n.ex.PeerUp(s.now, "p:1", p.boot) })
		}
		src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
		dst := n.expect(w, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
		wantStatus(t, dst, engines.StatusRefused)
		s.until("the source's end", sec, func() bool { return src.done != nil })
		if wantStatus(t, src, engines.StatusCancelled); !strings.Contains(src.done.Reason,
			"64 tokens need 4") {
			t.Errorf("known %v: reason %q", known, src.done.Reason)
		}
		// The refusal may also come first.
		n.expect(w, 2, testKey(2, 1), "p:1", 64, 0, 30*sec)
		s.rest(sec)
		late := p.intent(pw, 2, testKey(2, 1), 64, 1, 30*sec)
		s.until("the late source's end", sec, func() bool { return late.done != nil })
		wantStatus(t, late, engines.StatusCancelled)
		if p.ex.match.Counts().WaitingKeys != 0 {
			t.Errorf("%d entries wait for nothing", p.ex.match.Counts().WaitingKeys)
		}
	}
}

// A receiver that takes no further load declines it at the source.
func TestReceiverTakesNoMore(t *testing.T) {
	for _, draining := range []bool{true, false} {
		s, p, _, pw, _ := pair(t, 5, 0)
		n := s.node("x:1", Config{Transports: []string{"tcp"}, MaxDest: 1})
		w := n.worker()
		if draining {
			n.event(func() { n.ex.DrainLeases() })
		} else {
			n.hangs = map[string]bool{"q:1": true}
			n.expect(w, 2, testKey(2, 1), "q:1", 64, 0, 30*sec)
		}
		src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
		dst := n.expect(w, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
		wantStatus(t, dst, engines.StatusRefused)
		s.until("the source's end", sec, func() bool { return src.done != nil })
		if wantStatus(t, src, engines.StatusCancelled); !strings.Contains(src.done.Reason,
			dst.done.Reason) {
			t.Errorf("draining %v: reason %q, want %q", draining, src.done.Reason, dst.done.Reason)
		}
	}
}

// A load that is refused before it reaches the executor is declined, too.
func TestReceiverWasRefused(t *testing.T) {
	s, p, d, pw, dw := pair(t, 5, 0)
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	d.event(func() {
		d.ex.one(s.now, engines.Event{Kind: engines.DestRefused, Worker: dw, Reason: "8 leases are open",
			Expect: &engines.Expect{Lease: transfer.LeaseID{Boot: dw.Boot, ID: 1}, Key: testKey(1, 1),
				Peer: "p:1"}})
	})
	s.until("the source's end", sec, func() bool { return src.done != nil })
	if wantStatus(t, src, engines.StatusCancelled); !strings.Contains(src.done.Reason, "8 leases") {
		t.Errorf("reason %q", src.done.Reason)
	}
}

// The revokes that wait for a wrong address are bounded, and dropped in the end.
func TestQueuedRevokesAreBounded(t *testing.T) {
	s := newSim(t, 1, 0)
	n := s.node("x:1", Config{})
	n.ex.core.Cfg.Planner = unable{}
	w := n.worker()
	n.hangs = map[string]bool{"q:1": true}
	for i := range 2 * endpoint.MaxRevokes {
		n.expect(w, uint64(i+1), testKey(1, byte(i)), "q:1", 64, 0, sec)
	}
	if k := n.ex.endpoints.Find("q:1").Queued(); k != endpoint.MaxRevokes {
		t.Errorf("%d revokes wait, want %d", k, endpoint.MaxRevokes)
	}
	n.event(func() { n.ex.ConnectFailed(s.now, "q:1", errors.New("no answer")) })
	s.rest(60 * sec)
	if n.ex.endpoints.Find("q:1") != nil || n.ex.Load().Timers != 0 {
		t.Errorf("still known: %+v, %d timers", n.ex.endpoints.Find("q:1"), n.ex.Load().Timers)
	}
}

// A lease that is canceled while its next grant waits for a layout frees its place.
func TestCanceledWithoutAGrant(t *testing.T) {
	s, p, d, pw, dw := pair(t, 7, 0)
	src := p.intent(pw, 1, testKey(1, 1), 512, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec)
	s.rest(50 * 1e6)
	// The layout for its next grant is being asked for.
	x := d.ex.dests.Find(dst.id)
	d.event(func() {
		if err := d.ex.Message(s.now, p.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SourceLost{
			SourceLost: &peerv1.SourceLost{Destination: frame.Lease(dst.id), Gen: d.ex.dests.Generation,
				Reason: "test"}}}); err != nil {
			t.Error(err)
		}
	})
	waiting := func() bool { return x.State == lease.DestWaiting }
	d.ex.dests.Engines.SetRanks(d.ex.peers.Find(p.boot), dw.Fingerprint,
		[]Rank{{Name: "pp0/tp0", Geometry: [32]byte{1}}})
	d.ex.core.Cfg.Planner = asking{}
	s.until("the fence", sec, waiting)
	d.event(func() { d.ex.Cancel(s.now, dw, 1, "") })
	wantStatus(t, dst, engines.StatusCancelled)
	s.until("the source's end", sec, func() bool { return src.done != nil })
	wantStatus(t, src, engines.StatusCancelled)
}

// asking is a planner without any layout of a peer.
type asking struct{ simPlanner }

func (asking) Send(*engines.Worker, *peerv1.Grant, *peerv1.Part) (Plan, error) {
	return nil, &UnknownLayout{Geometries: [][32]byte{{1}}}
}

func (asking) Divide(*engines.Worker, *engines.Expect, []Rank, func(string) uint64) ([]Part,
	error) {
	return nil, &UnknownLayout{Geometries: [][32]byte{{1}}}
}

// team is an executor whose engine has two ranks, each with an intent of the same prompt.
func team(t *testing.T) (tg *target, ranks []*engines.Worker, intent func(rank int)) {
	t.Helper()
	tg = &target{ex: New(Config{Boot: transfer.Boot{1}, Endpoint: "p:1", Planner: simPlanner{},
		Transports: []string{"tcp"}}), peer: transfer.Boot{9}}
	tg.ex.PeerUp(1, "", tg.peer)
	for r := range 2 {
		w := &engines.Worker{Name: "w", Boot: transfer.Boot{2, byte(r)},
			Place: engines.Place{Engine: "e", TP: r, TPSize: 2},
			Layout: &layout.Layout{Groups: []layout.Group{{TokensPerBlock: simBlock,
				Layers: make([]layout.Layer, simLayers)}}}}
		tg.ex.WorkerUp(w)
		ranks = append(ranks, w)
	}
	return tg, ranks, func(rank int) {
		w := ranks[rank]
		tg.ex.Intent(2, w, engines.Intent{Lease: transfer.LeaseID{Boot: w.Boot, ID: 1, Epoch: 1},
			Key: testKey(1, 1), Tokens: targetTokens, Fanout: 1,
			Deadline: 30 * sec, Held: true})
	}
}

// completed returns the completions that the executor has emitted.
func (tg *target) completed() (out []engines.Completion) {
	for tg.ex.Drain(&tg.batch) {
		for i := range tg.batch.Actions {
			if a := &tg.batch.Actions[i]; a.Kind == Complete {
				out = append(out, a.Completion)
			}
		}
	}
	return out
}

// One receiver of two declines: its place stays empty at both ranks, before and after their
// intents, and the other receiver is served. When both decline, both ranks end.
func TestTeamsDecline(t *testing.T) {
	decline := func(id uint64) *peerv1.ControlFrame {
		k := testKey(1, 1)
		return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: &peerv1.Revoke{
			Destination: frame.Lease(transfer.LeaseID{Boot: transfer.Boot{7, byte(id)}, ID: id}),
			Xfer:        k.Xfer[:], Hash: k.Hash[:], Team: make([]byte, 16), TeamSize: 2, Reason: "plan"}}}
	}
	tg, ranks, intent := team(t)
	intent(0)
	for range 2 { // retransmitted, counted once
		if err := tg.ex.Message(3, tg.peer, decline(1)); err != nil {
			t.Fatal(err)
		}
	}
	if done := tg.completed(); len(done) != 0 {
		t.Fatalf("ended with one receiver of two to come: %+v", done)
	}
	intent(1)
	for r, w := range ranks {
		s := tg.ex.workers.Find(w).Leases[1].(*source.Lease)
		if s.Done() || !s.Over(lease.GrantID{Peer: tg.peer, Dest: transfer.LeaseID{Boot: transfer.Boot{7,
			1}, ID: 1}}) {
			t.Errorf("rank %d: done %v, or it has no decline", r, s.Done())
		}
	}
	if err := tg.ex.Message(4, tg.peer, decline(2)); err != nil {
		t.Fatal(err)
	}
	if done := tg.completed(); len(done) != 2 || done[0].Status != engines.StatusCancelled ||
		!strings.Contains(done[1].Reason, "plan") || tg.ex.match.Counts().WaitingKeys != 0 {
		t.Errorf("%+v, %d wait", done, tg.ex.match.Counts().WaitingKeys)
	}
}

// The error of an invalid decline names the field, and no lease ends.
func TestHostileDeclines(t *testing.T) {
	k := testKey(1, 1)
	dest := frame.Lease(transfer.LeaseID{Boot: transfer.Boot{7}, ID: 77})
	for want, m := range map[string]*peerv1.Revoke{
		"boot has 0 bytes": {},
		"hash 3":           {Destination: dest, Xfer: k.Xfer[:], Hash: k.Hash[:3]},
		"team of 0 bytes":  {Destination: dest, Xfer: k.Xfer[:], Hash: k.Hash[:], TeamSize: 1},
		"and 0 receivers":  {Destination: dest, Xfer: k.Xfer[:], Hash: k.Hash[:], Team: make([]byte, 16)},
	} {
		tg := newTarget()
		err := tg.ex.Message(3, tg.peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{
			Revoke: m}})
		if err == nil || !strings.Contains(err.Error(), want) || len(tg.completed()) != 0 ||
			tg.ex.match.Counts().WaitingKeys != 0 {
			t.Errorf("%s: %v", want, err)
		}
	}
	// No other peer can decline for a receiver that has a grant.
	tg := newTarget()
	if err := tg.ex.Message(2, tg.peer, grantFrame(goodGrant())); err != nil {
		t.Fatal(err)
	}
	tg.drain()
	m := &peerv1.Revoke{Destination: frame.Lease(transfer.LeaseID{Boot: transfer.Boot{7}, ID: 5,
		Epoch: 1}), Xfer: k.Xfer[:], Hash: k.Hash[:], Team: make([]byte, 16), TeamSize: 1}
	if err := tg.ex.Message(3, transfer.Boot{13},
		&peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: m}}); err != nil {
		t.Fatal(err)
	}
	if done := tg.completed(); len(done) != 0 || tg.ex.match.Counts().Grants != 1 {
		t.Errorf("another peer declined for this receiver: %+v", done)
	}
}

// A rank of the source's engine may refuse after every sending part is bound. The refusal counts at
// once, not at the deadline.
func TestRefusedAfterBinding(t *testing.T) {
	s, p, d, pw, dw := pair(t, 7, 0)
	p.intent(pw, 1, testKey(1, 1), 512, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec)
	s.rest(50 * 1e6)
	x := d.ex.dests.Find(dst.id)
	if x.State != lease.DestLanding {
		t.Fatalf("state %v", x.State)
	}
	send := func(gen uint32) {
		d.event(func() {
			if err := d.ex.Message(s.now, p.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{
				GrantReply: &peerv1.GrantReply{
					Destination: frame.Lease(dst.id), Code: peerv1.GrantReply_NO_SOURCE,
					Message: "rank pp0/tp1 " +
						"has not come", Gen: gen}}}); err != nil {
				t.Error(err)
			}
		})
	}
	send(d.ex.dests.Generation - 1)
	s.rest(50 * 1e6)
	if dst.done != nil {
		t.Fatal("ended by a reply to another grant")
	}
	send(d.ex.dests.Generation)
	s.until("the end", sec, func() bool { return dst.done != nil })
	wantStatus(t, dst, engines.StatusExpired)
}

// The generation of grants has 32 bits and wraps.
func TestGenerationsWrap(t *testing.T) {
	s, p, d, pw, dw := pair(t, 6, 0)
	d.ex.dests.Generation = 1<<32 - 2
	src := p.intent(pw, 1, testKey(1, 1), 512, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec)
	s.rest(50 * 1e6)
	for range 3 {
		p.preempt(src)
		s.rest(50 * 1e6)
		p.steps(src)
		s.rest(300 * 1e3)
	}
	s.until("transfer", sec, func() bool { return dst.done != nil && src.done != nil })
	wantStatus(t, dst, engines.StatusOK)
	if g := d.ex.dests.Generation; g == 0 || g > 3 {
		t.Errorf("%d is the last grant's number: they did not wrap", g)
	}
}

// A scheduler declines a request before any rank of its engine has a lease. Every rank of the
// source's engine ends at once, whether the message or the intents come first.
func TestSchedulerDeclines(t *testing.T) {
	for _, world := range []int{1, 3} {
		for _, first := range []bool{true, false} {
			s, p, d, pw, _ := pair(t, 5, 0)
			give := func() {
				d.event(func() {
					d.ex.Decline(s.now, engines.Decline{Boot: transfer.Boot{99}, ID: 7, Engine: "e",
						World: world, Key: testKey(1, 1), Peer: "p:1", Reason: "aborted"})
				})
			}
			if first {
				give()
				s.rest(sec / 10)
			}
			src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
			if !first {
				s.rest(sec / 10)
				if src.done != nil {
					t.Fatalf("ended without a decline: %+v", src.done)
				}
				give()
			}
			s.until("the source's end", sec/10, func() bool { return src.done != nil })
			if wantStatus(t, src, engines.StatusCancelled); !strings.Contains(src.done.Reason, "aborted") {
				t.Errorf("world %d, first %v: reason %q", world, first, src.done.Reason)
			}
			if p.ex.match.Counts().WaitingKeys != 0 {
				t.Errorf("world %d, first %v: %d entries wait for nothing", world, first,
					p.ex.match.Counts().WaitingKeys)
			}
		}
	}
}

// One of two receivers declines before it has a lease; the other one is served.
func TestSchedulerDeclinesOneOfTwo(t *testing.T) {
	s, p, d, pw, dw := pair(t, 5, 0)
	src := p.intent(pw, 1, testKey(1, 1), 512, 2, 30*sec)
	d.event(func() {
		d.ex.Decline(s.now, engines.Decline{Boot: transfer.Boot{99}, ID: 7, Engine: "e", World: 2,
			Key: testKey(1, 1), Peer: "p:1"})
	})
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec)
	s.rest(50 * 1e6)
	p.steps(src)
	s.until("the transfer", sec, func() bool { return dst.done != nil && src.done != nil })
	wantStatus(t, dst, engines.StatusOK)
	wantStatus(t, src, engines.StatusOK)
}

// A request that is refused before its prompt is known is declined by its transfer id: this ends
// each prompt of the transfer, later ones included, and no other transfer.
func TestSchedulerDeclinesEveryPrompt(t *testing.T) {
	s, p, d, pw, _ := pair(t, 5, 0)
	one := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	other := p.intent(pw, 2, testKey(2, 1), 64, 1, 30*sec)
	d.event(func() {
		d.ex.Decline(s.now, engines.Decline{Boot: transfer.Boot{99}, ID: 7, Engine: "e", World: 2,
			Key: transfer.Key{Xfer: testKey(1, 1).Xfer}, Peer: "p:1"})
	})
	s.until("the first", sec/10, func() bool { return one.done != nil })
	two := p.intent(pw, 3, testKey(1, 2), 64, 1, 30*sec)
	s.until("the second", sec/10, func() bool { return two.done != nil })
	if other.done != nil {
		t.Errorf("another transfer ended: %+v", other.done)
	}
	s.rest(11 * sec)
	if p.ex.match.Counts().WaitingKeys != 0 {
		t.Errorf("%d declines wait for ever", p.ex.match.Counts().WaitingKeys)
	}
}

// A router releases a transfer at the engine that holds it: its own sidecar is the peer.
func TestSchedulerDeclinesAtItsOwnSidecar(t *testing.T) {
	s, p, _, pw, _ := pair(t, 5, 0)
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	s.rest(sec / 10)
	p.event(func() {
		p.ex.Decline(s.now, engines.Decline{Boot: transfer.Boot{99}, ID: 7, Engine: "e", World: 1,
			Key: transfer.Key{Xfer: testKey(1, 1).Xfer}, Peer: "p:1", Reason: "the router ended it"})
	})
	s.until("the source's end", sec/10, func() bool { return src.done != nil })
	if wantStatus(t, src, engines.StatusCancelled); !strings.Contains(src.done.Reason, "router") {
		t.Errorf("reason %q", src.done.Reason)
	}
}

// Declines for an address without an answer are bounded, and dropped in the end.
func TestSchedulerDeclinesAreBounded(t *testing.T) {
	s := newSim(t, 1, 0)
	n := s.node("x:1", Config{})
	n.hangs = map[string]bool{"q:1": true}
	for i := range 2 * endpoint.MaxRevokes {
		n.event(func() {
			n.ex.Decline(s.now, engines.Decline{Boot: transfer.Boot{99}, ID: uint64(i), World: 2,
				Key: testKey(1, byte(i)), Peer: "q:1"})
		})
	}
	n.event(func() { n.ex.Decline(s.now, engines.Decline{World: lease.MaxTeam + 1, Peer: "r:1"}) })
	if k := n.ex.endpoints.Find("q:1").Queued(); k != endpoint.MaxRevokes ||
		n.ex.endpoints.Find("r:1") != nil {
		t.Errorf("%d revokes wait, want %d", k, endpoint.MaxRevokes)
	}
	n.event(func() { n.ex.ConnectFailed(s.now, "q:1", errors.New("no answer")) })
	s.rest(60 * sec)
	if n.ex.endpoints.Find("q:1") != nil || n.ex.Load().Timers != 0 {
		t.Errorf("still known: %+v, %d timers", n.ex.endpoints.Find("q:1"), n.ex.Load().Timers)
	}
}
