package exec

import (
	"strings"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/transfer"
)

// Each kind of disagreement between two sides has a count of its own, which shows an operator who
// upgrades sidecars one by one what differs.
func TestRefusalsAreCounted(t *testing.T) {
	for name, why := range map[string]agreement.Refusal{
		"no plan version": agreement.RefusedPlanVersion,
		"newer plans":     agreement.RefusedPlanVersion, "other digest": agreement.RefusedPlanDigest,
		"more chunks": agreement.RefusedPlanChunks, "more bytes": agreement.RefusedPlanBytes,
		"more tokens": agreement.RefusedPlanTokens} {
		tg := newTarget()
		g := goodGrant()
		hostileGrants[name].change(g)
		if err := tg.ex.Message(2, tg.peer, grantFrame(g)); err != nil {
			t.Fatal(err)
		}
		for label, n := range tg.ex.Refusals() {
			if want := map[bool]uint64{true: 1}[label == why.String()]; n != want {
				t.Errorf("%s: %s is counted %d times, want %d", name, label, n, want)
			}
		}
	}
}

// Tokens of queries count up, so any peer can guess those of others. Only the answer of the asked
// peer counts. Answers of others are refused and counted, and change nothing, before and after the
// query is sent.
func TestOnlyTheAskedPeerAnswers(t *testing.T) {
	s, p, d, pw, _ := pair(t, 5, 0)
	forger := transfer.Boot{66}
	forge := func() error {
		return d.ex.Message(s.now, forger,
			&peerv1.ControlFrame{Body: &peerv1.ControlFrame_Admitted{Admitted: &peerv1.Admitted{
				Token: 1, State: peerv1.Admitted_ADMITTED, Tokens: 1 << 20, Message: "forged"}}})
	}
	d.event(func() { d.ex.PeerUp(s.now, "forger:1", forger) })
	d.event(func() {
		d.ex.Await(s.now, 1, engines.Await{Key: testKey(1, 1), Peer: "p:1",
			TTL: 30 * sec})
	})
	var logged []error
	sent := 0
	for range 3 { // before it is asked, after, and while it waits
		d.event(func() {
			sent++
			if err := forge(); err != nil {
				logged = append(logged, err)
			}
		})
		s.rest(sec)
	}
	if a, ok := d.answer[1]; ok {
		t.Fatalf("the forged answer counted: %+v", a)
	}
	if n := d.ex.Violations()[frame.BadAnswer.String()]; n != uint64(sent) || len(logged) != 1 ||
		!strings.Contains(logged[0].Error(), "put to another peer") {
		t.Errorf("%d forged answers are counted, logged %v: want %d, and once", n, logged, sent)
	}
	p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	s.rest(sec)
	if a := d.answer[1]; a.State != "admitted" || a.Tokens != 64 {
		t.Errorf("the answer of the peer that was asked: %+v", a)
	}
	if err := forge(); err != nil {
		t.Errorf("a late answer: %v", err)
	}
}
