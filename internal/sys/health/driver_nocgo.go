//go:build !cgo

package health

import (
	"fmt"
	"io/fs"
	"time"
)

// Driver reads GPUs through the driver's management library. This build has no cgo.
type Driver struct{}

// Open returns fs.ErrNotExist.
func Open() (*Driver, error) {
	return nil, fmt.Errorf("health: this build has no cgo and cannot ask the GPU driver: %w",
		fs.ErrNotExist)
}

// Look returns nothing.
func (*Driver) Look() []Reading { return nil }

// Wait returns nothing.
func (*Driver) Wait(time.Duration) (Event, bool, error) { return Event{}, false, nil }

// Describe returns nothing.
func (*Driver) Describe() []string { return nil }

// Close does nothing.
func (*Driver) Close() error { return nil }
