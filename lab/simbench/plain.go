package simbench

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/lab/timeline"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// plain is what one lane over each of these rails carries at once, without a scheduler.
func (s *Setup) plain(rails []timeline.Rail) (timeline.Rate, error) {
	f := simfabric.New(s.fabric())
	var specs []simfabric.RailSpec
	for _, r := range rails {
		specs = append(specs, spec(r))
	}
	a, b := newEnd(f, "a", 1, specs), newEnd(f, "b", 2, specs)
	a.other, b.other = b, a
	for _, e := range []*end{a, b} {
		var err error
		if e.rails, err = e.backend.Open(context.Background(), e); err != nil {
			return 0, err
		}
	}
	for i := range rails {
		if _, err := a.backend.Dial(context.Background(), transport.Peer{Boot: b.boot, Self: a.boot},
			a.rails[i], b.rails[i]); err != nil {
			return 0, fmt.Errorf("plain stream: %w", err)
		}
	}
	passed := func() (n uint64) {
		for _, r := range b.host.Rails() {
			n += r.Rx().Passed(f.Now())
		}
		return n
	}
	f.Run(plainWarm, nil)
	from := passed()
	f.Run(plainWarm+plainSpan, nil)
	return timeline.RateOf(passed()-from, plainSpan), nil
}

// end is one host of a plain stream: its sender keeps every lane full, its receiver takes whatever
// comes.
type end struct {
	boot    transfer.Boot
	host    *simfabric.Host
	backend *simfabric.Backend
	rails   []transport.Rail
	other   *end
}

func newEnd(f *simfabric.Fabric, name string, boot byte, specs []simfabric.RailSpec) *end {
	e := &end{boot: transfer.Boot{boot}, host: f.NewHost(name, specs...)}
	e.backend = e.host.Backend()
	return e
}

// PeerKey implements transport.Host.
func (e *end) PeerKey(boot transfer.Boot) (transport.Peer, bool) {
	return transport.Peer{Boot: boot, Self: e.boot}, boot == e.other.boot
}

// Grant implements transport.Host: every slice has a grant of its own, for chunks that have landed
// are not written again.
func (e *end) Grant(transfer.Boot, transfer.Slot, transfer.Gen) (*transport.Grant,
	transfer.Reason) {
	g := &transport.Grant{Peer: e.other.boot, Memory: nothing{},
		Landed: func(transport.Lane, transfer.Range, uint32) {}}
	g.Receipt.Reset(sliceBytes / transfer.ChunkBytes)
	return g, transfer.ReasonNone
}

// Origin implements transport.Host.
func (e *end) Origin(transfer.Boot, transfer.Slot, transfer.Gen) (*transport.Origin,
	transfer.Reason) {
	return nil, transfer.ReasonUnknownSlot
}

// LaneUp implements transport.Host.
func (e *end) LaneUp(l transport.Lane) {
	if e.boot == (transfer.Boot{1}) {
		for range l.MaxInFlight() {
			e.more(l)
		}
	}
}

func (e *end) more(l transport.Lane) {
	// A refusal is a lane that is gone, on which nothing more is carried.
	_ = l.Move([]transport.Slice{{Origin: &transport.Origin{Peer: e.other.boot, Memory: nothing{},
		Valid: func(transfer.LeaseID) bool { return true }},
		Range: transfer.Range{Count: sliceBytes / transfer.ChunkBytes}, Attempt: 1}})
}

// LaneDown implements transport.Host.
func (e *end) LaneDown(transport.Lane, error) {}

// Done implements transport.Host.
func (e *end) Done(l transport.Lane, res []transport.Result) {
	for range res {
		e.more(l)
	}
}

// Refused implements transport.Host.
func (e *end) Refused(transport.Lane, transfer.Reason) {}

// nothing is memory that is not there.
type nothing struct{}

var errNothing = errors.New("simbench: no memory")

func (nothing) Resolve(dst []mem.Block, _ transfer.Range) ([]mem.Block, error) {
	return dst, errNothing
}

func (nothing) Bytes(r transfer.Range) (uint64, error) {
	return uint64(r.Count) * transfer.ChunkBytes, nil
}

func (nothing) Device() mem.Device { return nil }

func (nothing) ReadWord(uint32) uint64 { return 0 }

func (nothing) WriteWord(uint32, uint64) {}
