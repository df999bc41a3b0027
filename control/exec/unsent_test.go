package exec

import (
	"errors"
	"strings"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/lease"
)

var errFull = errors.New("8192 frames wait")

// A grant that cannot be sent ends its lease at once with the reason, and the prefill engine does
// not keep its blocks for it. The blocks are free after the fence, and the next request is served.
func TestGrantThatCannotBeSent(t *testing.T) {
	s, p, d, pw, dw := pair(t, 5, 0)
	full := true
	d.unsent = func(f *peerv1.ControlFrame) error {
		if full && f.GetGrant() != nil {
			return errFull
		}
		return nil
	}
	src := p.intent(pw, 1, testKey(1, 1), 64, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 64, 0, 30*sec)
	s.until("both ends", sec/4, func() bool { return dst.done != nil && src.done != nil })
	for l, status := range map[*simLease]uint16{
		dst: engines.StatusFailed, src: engines.StatusCancelled,
	} {
		if wantStatus(t, l, status); !strings.Contains(l.done.Reason, errFull.Error()) {
			t.Errorf("reason %q", l.done.Reason)
		}
	}
	s.rest(sec)
	if n := len(d.grants) + d.ex.dests.Len() + d.ex.dests.Slots(p.boot) +
		p.ex.match.Counts().WaitingKeys +
		p.ex.match.Counts().Grants; n != 0 {
		t.Errorf("%d things are left of it", n)
	}
	full = false
	src, dst = p.intent(pw, 2, testKey(2, 1), 64, 1, 30*sec), d.expect(dw, 2, testKey(2, 1), "p:1",
		64, 0, 30*sec)
	p.steps(src)
	s.until("the next transfer", sec, func() bool { return dst.done != nil && src.done != nil })
	wantStatus(t, dst, engines.StatusOK)
	wantStatus(t, src, engines.StatusOK)
}

// The same after an earlier grant of the lease was served and lost.
func TestRegrantThatCannotBeSent(t *testing.T) {
	s, p, d, pw, dw := pair(t, 5, 0)
	grants := 0
	d.unsent = func(f *peerv1.ControlFrame) error {
		if f.GetGrant() != nil {
			if grants++; grants > 1 {
				return errFull
			}
		}
		return nil
	}
	src := p.intent(pw, 1, testKey(1, 1), 512, 1, 30*sec)
	dst := d.expect(dw, 1, testKey(1, 1), "p:1", 512, 0, 30*sec)
	s.until("the grant is bound", sec,
		func() bool { return d.ex.dests.Find(dst.id).State == lease.DestLanding })
	p.event(func() { p.ex.Preempt(s.now, pw, src.id.ID) })
	s.until("the end", sec, func() bool { return dst.done != nil })
	if wantStatus(t, dst, engines.StatusFailed); grants != 2 || !strings.Contains(dst.done.Reason,
		errFull.Error()) {
		t.Errorf("after %d grants: reason %q", grants, dst.done.Reason)
	}
	s.rest(sec)
	if n := len(d.grants) + d.ex.dests.Len() + d.ex.dests.Slots(p.boot) +
		p.ex.match.Counts().Grants; n != 0 {
		t.Errorf("%d things are left of it", n)
	}
}

// A query that cannot be sent is answered at once.
func TestQueryThatCannotBeSent(t *testing.T) {
	s, _, d, _, _ := pair(t, 5, 0)
	d.unsent = func(f *peerv1.ControlFrame) error {
		if f.GetAwait() != nil {
			return errFull
		}
		return nil
	}
	d.event(func() {
		d.ex.Await(s.now, 1, engines.Await{Key: testKey(1, 1), Peer: "p:1",
			TTL: 30 * sec})
	})
	s.rest(sec / 4)
	if a := d.answer[1]; a.State != "gone" || !strings.Contains(a.Message, errFull.Error()) ||
		d.ex.queries.Len() != 0 {
		t.Errorf("answered %+v, %d questions are open", a, d.ex.queries.Len())
	}
}
