//go:build !cgo

package topo

import (
	"fmt"
	"io/fs"
)

func managed() ([]GPU, error) {
	return nil, fmt.Errorf("topo: this build has no cgo and cannot ask the GPU driver: %w",
		fs.ErrNotExist)
}
