//go:build !cgo

package stage

import "github.com/kvspray/kvspray/internal/cuda"

func openPlatform(*Table) (platform, error) {
	_, err := cuda.Open()
	return nil, err
}
