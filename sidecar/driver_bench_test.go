package sidecar

import (
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// idleLane is a lane that takes nothing.
type idleLane struct {
	transport.Lane
	id   uint64
	peer transfer.Boot
}

func (l idleLane) ID() uint64          { return l.id }
func (l idleLane) Peer() transfer.Boot { return l.peer }
func (l idleLane) Backend() string     { return "tcp" }
func (l idleLane) Local() string       { return "lo" }
func (l idleLane) Remote() string      { return "lo" }
func (l idleLane) MaxInFlight() int    { return 16 }
func (l idleLane) Close() error        { return nil }

type idleMemory struct{ transport.Memory }

func (idleMemory) Bytes(transfer.Range) (uint64, error) { return 1 << 20, nil }

// BenchmarkDriver is what the driver adds to a slice beside the executor, which has a benchmark of
// its own: its end is counted, the executor is entered and left. The executor has no such slice, so
// that it has nothing to do.
func BenchmarkDriver(b *testing.B) {
	r := start(b, nil)
	var l transport.Lane = idleLane{id: transport.NextLaneID(), peer: transfer.Boot{7}}
	h := r.driver
	h.LaneUp(l)
	defer h.LaneDown(l, nil)
	o := &transport.Origin{Peer: l.Peer(), Memory: idleMemory{}}
	res := []transport.Result{{Slice: transport.Slice{Origin: o, Range: transfer.Range{Count: 16},
		Attempt: 1, Cookie: 1 << 60}, Outcome: transfer.Landed,
		Took: time.Millisecond}}
	b.ReportAllocs()
	for b.Loop() {
		h.Done(l, res)
	}
}
