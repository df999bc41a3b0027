package exec

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/transfer"
)

// interleaved are all orders of two sequences.
func interleaved(a, b string) []string {
	if a == "" || b == "" {
		return []string{a + b}
	}
	var all []string
	for _, rest := range interleaved(a[1:], b) {
		all = append(all, a[:1]+rest)
	}
	for _, rest := range interleaved(a, b[1:]) {
		all = append(all, b[:1]+rest)
	}
	return all
}

// In whatever order a receiver's sidecar dies and the source's notices it, the source keeps its
// blocks for the match timeout at most, provided that the receiver's engine does not ask again.
func TestDeadReceiverInAnyOrder(t *testing.T) {
	// The receiver asks (a) and expects (e), its sidecar dies (d), the source's sidecar loses the
	// lane (f) and learns that the process is over (o). The source's engine has an intent (i) and
	// holds it (h), or presents one that it held under an earlier sidecar (p).
	seed := uint64(0) // frames on their way arrive or do not
	for _, receiver := range []string{"aedfo", "aedo", "adfo", "ado", "edfo", "edo"} {
		for _, source := range []string{"ih", "p"} {
			for _, order := range interleaved(receiver, source) {
				for _, gap := range []time.Duration{0, 300 * time.Microsecond, 100 * time.Millisecond} {
					for fanout := 1; fanout <= 2; fanout++ {
						seed++
						deadReceiver(t, seed, order, gap, fanout)
					}
				}
			}
		}
	}
}

func deadReceiver(t *testing.T, seed uint64, order string, gap time.Duration, fanout int) {
	s, p, d, pw, dw := pair(t, seed, 0)
	k := testKey(1, 1)
	// The two have met: the source's sidecar learns of the death of a peer that it has.
	d.ask(9, decodeSession, testKey(9, 1), "p:1")
	s.rest(100 * time.Millisecond)
	var src *simLease
	for _, what := range strings.Split(order, "") {
		switch what {
		case "a":
			d.ask(1, decodeSession, k, "p:1")
		case "e":
			d.expect(dw, 1, k, "p:1", 64, 0, 30*sec)
		case "d":
			d.dead = true
			s.rest(2 * time.Millisecond) // no frame follows the loss of its lane
		case "f", "o":
			p.peerDown(d.boot, what == "o")
		case "i":
			src = p.intent(pw, 1, k, 64, fanout, 30*sec)
			p.steps(src)
		case "h":
			p.hold(pw, 1)
		case "p":
			src = &simLease{id: transfer.LeaseID{Boot: pw.Boot, ID: 1}, w: pw, key: k.String(), tokens: 64,
				table: [][]uint32{{0}}, tables: map[int][][]uint32{}}
			p.leases[src.id] = src
			p.event(func() {
				p.ex.Intent(s.now, pw, engines.Intent{Lease: src.id, Key: k, Tokens: 64, Fanout: fanout,
					Deadline: 30 * sec, Blocks: src.table, Held: true})
			})
			p.steps(src)
		}
		s.rest(gap)
	}
	name := fmt.Sprintf("seed %d, order %s, gap %v, fanout %d", seed, order, gap, fanout)
	s.until(name, core.DefaultMatchTimeout+sec, func() bool { return src.done != nil })
	if n := p.ex.sources.Waits(); n != 0 {
		t.Errorf("%s: %d waits are left", name, n)
	}
}
