package source

import (
	"maps"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/transfer"
)

// Comparison names two caches with different fingerprints: one of our workers, and the cache that
// a peer's grant is for. A hash does not show the difference, so the refusal waits until the
// driver has found it.
type Comparison struct {
	Worker      *engines.Worker
	Peer        transfer.Boot
	Geometry    [32]byte // of the peer's
	Fingerprint [32]byte
}

// maxComparing bounds the comparisons in progress. A grant beyond it is refused without the
// difference.
const maxComparing = 256

const differ = "the caches of the two engines differ; too many such refusals to compare them"

// compare refuses the grant of c once the difference is known.
func (mt *Matcher) compare(now Instant, c *partBinding, w *engines.Worker) {
	m := c.in.msg
	name := Comparison{Worker: w, Peer: c.in.peer.Boot, Fingerprint: [32]byte(m.Fingerprint)}
	copy(name.Geometry[:], m.Geometry)
	waiting := mt.comparing[name]
	if waiting == nil {
		if len(mt.comparing) >= maxComparing {
			mt.refuse(now, c.in, peerv1.GrantReply_FINGERPRINT, differ)
			return
		}
		waiting = map[*partBinding]struct{}{}
		mt.comparing[name] = waiting
		mt.out.Compare(name)
	}
	c.in.differs = true
	c.ask()
	waiting[c] = struct{}{}
}

// Compared is Exec.Compared.
func (mt *Matcher) Compared(now Instant, name Comparison, difference string) {
	waiting := mt.comparing[name]
	delete(mt.comparing, name)
	for _, c := range bindingsInOrder(maps.Keys(waiting)) {
		c.answered()
		if mt.grants[c.in.id] == c.in && !c.in.over {
			mt.refuse(now, c.in, peerv1.GrantReply_FINGERPRINT, difference)
		}
	}
}
