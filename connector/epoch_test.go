package connector

import (
	"math"
	"testing"
)

// A lease whose epoch is 0 counts as closed; the counter that comes round must not make one.
func TestEpochIsNeverZero(t *testing.T) {
	var s Server
	s.epochs.Store(math.MaxUint32 - 1)
	for _, want := range []uint32{math.MaxUint32, 1, 2} {
		if got := s.nextEpoch(); got != want {
			t.Errorf("epoch %d, want %d", got, want)
		}
	}
}
