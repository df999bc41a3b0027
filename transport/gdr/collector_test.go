package gdr

import (
	"testing"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// Both ends of a lane, with blocks of a megabyte over the fabric without a NIC, and with many small
// ones where nothing is copied at all, so that posting and polling take all the time.
func TestMeasureCollectorDelayOfWrites(t *testing.T) {
	testutil.Measures(t)
	_, factory := rig(t)
	t.Log("large blocks, copied")
	transporttest.NewMover(t, factory, transporttest.Shape{Chunks: 64, BlockBytes: 1 << 20,
		Shuffle: true}).LetsCollectorIn(4)
	t.Log("small blocks, not copied")
	transporttest.NewMover(t, nullFactory(), transporttest.Shape{Chunks: 1024, BlockBytes: 4 << 10,
		Shuffle: true}).LetsCollectorIn(64)
}
