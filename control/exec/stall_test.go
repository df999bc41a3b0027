package exec

import (
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/dest"
)

const worth = 400 * time.Millisecond // what an engine waits for a byte

// stalling is an expect of an engine that waits so long for a byte.
func (n *simNode) stalling(w *engines.Worker, id uint64) *simLease {
	return n.expectFor(w, id, testKey(1, 1), "p:1", 512, 0, 60*sec, worth)
}

// A silent process of the source's side delays a request by as much as the receiver's own prefill
// takes, and the reason names it. Nothing that comes later is written.
func TestSilenceIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		stop   func(s *sim, p *simNode, src *simLease)
		within time.Duration
		reason string
	}{
		"its sidecar, in mid transfer": {func(s *sim, p *simNode, src *simLease) {
			p.step(src, 0, 512)
			s.rest(20 * time.Millisecond)
			p.stopped = true
		}, worth * 3 / 2, "does not answer"}, // the last byte is noticed after half of the time
		"its sidecar, before the grant": {func(_ *sim, p *simNode, _ *simLease) { p.stopped = true },
			worth, "does not answer"},
		"all lanes": {func(s *sim, p *simNode, src *simLease) {
			s.rest(20 * time.Millisecond)
			for _, l := range p.lanes {
				l.hung = true
			}
			p.steps(src)
		}, worth, "its bytes do not arrive"},
		"its engine": {func(*sim, *simNode, *simLease) {}, dest.EngineQuiet + worth,
			"prefill engine hangs"},
	} {
		t.Run(name, func(t *testing.T) {
			s, p, d, pw, dw := pair(t, 31, 0)
			src := p.intent(pw, 1, testKey(1, 1), 512, 1, 60*sec)
			s.rest(20 * time.Millisecond)
			var dst *simLease
			if strings.Contains(name, "before") {
				d.event(func() { d.ex.PeerUp(s.now, "p:1", p.boot) })
				c.stop(s, p, src)
				dst = d.stalling(dw, 1)
			} else {
				dst = d.stalling(dw, 1)
				s.rest(20 * time.Millisecond)
				c.stop(s, p, src)
			}
			s.until("the end", c.within+100*time.Millisecond, func() bool { return dst.done != nil })
			if wantStatus(t, dst, engines.StatusExpired); !strings.Contains(dst.done.Reason, c.reason) {
				t.Errorf("reason %q, want %q in it", dst.done.Reason, c.reason)
			}
			landed := dst.chunksIn()
			s.rest(3*sec - c.within)
			p.resume()
			p.steps(src)
			s.until("the source's end", 2*sec, func() bool { return src.done != nil })
			if n := dst.chunksIn(); n != landed {
				t.Errorf("%d chunks landed after the fence", n-landed)
			}
		})
	}
}

// A source that is computed slowly, in the queue of its engine or layer by layer, is no silence;
// nor is a pause of the receiver's own sidecar.
func TestComputingIsNoSilence(t *testing.T) {
	s, p, d, pw, dw := pair(t, 32, 0)
	src := p.intent(pw, 1, testKey(1, 1), 512, 1, 60*sec)
	dst := d.stalling(dw, 1)
	for i := range 20 {
		s.rest(dest.EngineQuiet - 300*time.Millisecond)
		if i%2 == 0 {
			p.announce(src)
		} else {
			p.step(src, 0, uint32(16*i))
		}
		if dst.done != nil {
			t.Fatalf("ended in mid prefill: %s", dst.done.Reason)
		}
	}
	d.stopped = true
	p.steps(src)
	s.rest(5 * sec)
	d.resume()
	s.until("the end", sec, func() bool { return dst.done != nil && src.done != nil })
	wantStatus(t, dst, engines.StatusOK)
	wantStatus(t, src, engines.StatusOK)
}
