package multipath

import (
	"fmt"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// Calibrate measures both directions with the given memory, at least MaxCalibrate bytes on either
// side, and overwrites it. It sets the threshold to the size from which using every link is faster
// in both directions. It takes some tens of milliseconds.
func (m *Multipath) Calibrate(host, dev cuda.Ptr) (uint64, error) {
	return m.CalibrateSpan(host, dev, MaxCalibrate, MinCalibrate)
}

// CalibrateSpan is Calibrate for sizes from from down to to.
func (m *Multipath) CalibrateSpan(host, dev cuda.Ptr, from, to uint64) (uint64, error) {
	best := 2 * from // a guess for sizes that were not measured
	for n := from; n >= to && len(m.links) > 1; n /= 2 {
		pays := true
		for _, dir := range []device.Direction{device.HostToDevice, device.DeviceToHost} {
			var took [2]time.Duration // direct, every link
			for i, threshold := range []uint64{n + 1, n} {
				m.SetThreshold(threshold)
				for range calibrateRuns {
					start := time.Now()
					if err := m.Copy(dir, host, dev, n); err != nil {
						return 0, fmt.Errorf("gpu: calibrate with %d bytes: %w", n, err)
					}
					took[i] = max(took[i], time.Since(start))
				}
			}
			// The slowest of several runs counts: every link must be faster always, not on average.
			pays = pays && took[1] < took[0]
		}
		if !pays {
			break
		}
		best = n
	}
	m.SetThreshold(best)
	return best, nil
}

// The span of sizes.
const (
	MaxCalibrate  = 256 << 20
	MinCalibrate  = 4 << 20
	calibrateRuns = 12
)
