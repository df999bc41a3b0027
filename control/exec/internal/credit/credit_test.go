package credit

import (
	"testing"

	"github.com/kvspray/kvspray/transfer"
)

// A single sender has no limit. Two share the rail, and the limit of one is lifted when the other
// one stops.
func TestLedger(t *testing.T) {
	sent := map[transfer.Boot]uint64{}
	l := NewLedger(func(c Credit) { sent[c.Peer] = c.Bytes })
	a, b := transfer.Boot{1}, transfer.Boot{2}
	now := Instant(0)
	step := func(peers ...transfer.Boot) {
		var grew []Inflow
		for _, p := range peers { // 1 GB/s each
			grew = append(grew, Inflow{Peer: p, Transport: "tcp", Rail: "r0",
				Bytes: uint64(Every)})
		}
		now += Every
		l.Measured(now, grew)
	}
	for range 20 {
		step(a)
	}
	if len(sent) != 0 {
		t.Errorf("credits of one sender: %v", sent)
	}
	for range 20 {
		step(a, b)
	}
	if sent[a] == 0 || sent[a] != sent[b] || sent[a]%transfer.ChunkBytes != 0 {
		t.Errorf("credits of two senders: %v", sent)
	}
	for range 10 {
		step(a)
	}
	if sent[a] != 0 {
		t.Errorf("credits after one of two stopped: %v", sent)
	}
	l.Forget(a)
	for range 10 {
		step()
	}
	if inflows, rails := l.Len(); inflows != 0 || rails != 0 || l.Measures(true) {
		t.Errorf("%d inflows and %d rails are left", inflows, rails)
	}
}

// A credit ends if it is not sent again.
func TestLimits(t *testing.T) {
	var l Limits
	r := Rail{"tcp", "r0"}
	var lifted []Rail
	lift := func(r Rail) { lifted = append(lifted, r) }
	l.Set(0, r, 1<<20)
	l.Set(Age/2, r, 1<<20)
	if l.Expire(Age, lift); len(lifted) != 0 {
		t.Error("a credit that was sent again has ended")
	}
	if l.Expire(Age/2+Age, lift); len(lifted) != 1 || lifted[0] != r {
		t.Errorf("lifted %v", lifted)
	}
	l.Set(0, r, 1<<20)
	l.Set(0, r, 0)
	if l.Expire(10*Age, lift); len(lifted) != 1 {
		t.Error("a credit of 0 bytes is lifted once more")
	}
}
