package exec

import (
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
)

// TestFaultOfWorker: at whatever time a worker's memory fails, and on whichever side, both leases
// of a transfer end within a moment, with the fault as the reason unless they were complete before,
// and the blocks are fenced first. Later leases are refused until the fault ends. The simulation
// fails if a byte is written after the end of a lease.
func TestFaultOfWorker(t *testing.T) {
	const why = "GPU 0: gone"
	for seed := range uint64(60) {
		s, p, d, pw, dw := pair(t, seed, 0)
		node, w := p, pw
		if seed%2 == 0 {
			node, w = d, dw
		}
		if node.ex.SetFault(s.now, &engines.Worker{}, why) {
			t.Fatal("an unknown worker has a fault")
		}
		fault := func(why string) {
			node.event(func() {
				if !node.ex.SetFault(s.now, w, why) {
					t.Fatal("the worker is not known")
				}
			})
		}
		ended := func(what string, leases ...*simLease) {
			t.Helper()
			s.until(what, time.Second, func() bool {
				for _, l := range leases {
					if l.done == nil {
						return false
					}
				}
				return true
			})
		}
		k := testKey(1, 1)
		src, dst := p.intent(pw, 1, k, 64, 1, 30*sec), d.expect(dw, 1, k, "p:1", 64, 0, 30*sec)
		p.steps(src)
		s.rest(time.Duration(seed) * 100 * time.Microsecond)
		fault(why)
		ended("the fault", dst)
		reason := dst.done.Reason
		if node == p { // a grant that comes after the end of its source gets this
			reason = strings.ReplaceAll(reason, "the source lease of this key is over", why)
		}
		if c := dst.done; c.Status != engines.StatusOK && !strings.Contains(reason, why) {
			t.Errorf("seed %d: status %d, %q", seed, c.Status, c.Reason)
		}
		if node == p {
			ended("the fault at the source", src)
		}
		k = testKey(2, 2)
		src, dst = p.intent(pw, 2, k, 64, 1, 30*sec), d.expect(dw, 2, k, "p:1", 64, 0, 30*sec)
		ended("a new lease", dst)
		if node == p {
			ended("a new lease at the source", src)
		}
		if dst.done.Status == engines.StatusOK {
			t.Errorf("seed %d: a lease in memory that failed is complete", seed)
		}
		s.rest(time.Second)
		fault("")
		k = testKey(3, 3)
		src, dst = p.intent(pw, 3, k, 64, 1, 30*sec), d.expect(dw, 3, k, "p:1", 64, 0, 30*sec)
		p.steps(src)
		ended("the end of the fault", dst)
		if dst.done.Status != engines.StatusOK {
			t.Errorf("seed %d: after the fault: %+v", seed, dst.done)
		}
	}
}
