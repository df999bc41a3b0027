package sim

import (
	"bytes"
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// inflow is one rail and who sends over it.
type inflow struct {
	peer            transfer.Boot
	transport, rail string
}

// came counts what a lane has brought, as the sidecar's driver does.
func (s *sidecar) came(l transport.Lane, n uint64) {
	if s.inflows == nil {
		s.inflows, s.grew = map[inflow]uint64{}, map[inflow]uint64{}
	}
	k := inflow{l.Peer(), l.Backend(), l.Local()}
	s.inflows[k] += n
	s.grew[k] += n
	if !s.toldOf {
		s.toldOf = true
		s.event(func(now exec.Instant) { s.ex.Incoming(now) })
	}
}

// measure answers exec.Measure.
func (s *sidecar) measure() {
	var all []exec.Inflow
	for _, k := range slices.SortedFunc(maps.Keys(s.grew), func(a, b inflow) int {
		return cmp.Or(bytes.Compare(a.peer[:], b.peer[:]), cmp.Compare(a.rail, b.rail))
	}) {
		all = append(all, exec.Inflow{Peer: k.peer, Transport: k.transport, Rail: k.rail, Gbps: s.gbps(k.rail), Bytes: s.grew[k]})
	}
	clear(s.grew)
	s.toldOf = len(all) > 0
	s.event(func(now exec.Instant) { s.ex.Measured(now, all) })
}

// way is the round trip of a lane, where it tells.
func way(l transport.Lane) time.Duration {
	if t, ok := l.(transport.Timed); ok {
		return t.Way()
	}
	return 0
}
