//go:build cgo

package doctor

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/cuda"
)

func TestSharingOfGPUMemory(t *testing.T) {
	ask := func(values map[cuda.Attribute]int) func(cuda.Attribute) (int, error) {
		return func(a cuda.Attribute) (int, error) {
			v, ok := values[a]
			if !ok {
				return 0, errors.New("unknown attribute")
			}
			return v, nil
		}
	}
	h200 := map[cuda.Attribute]int{cuda.IPCEvents: 1, cuda.PosixFDHandles: 1, cuda.DMABufSupported: 1,
		cuda.GPUDirectRDMASupported:     1,
		cuda.GPUDirectRDMAWriteOrdering: 100, cuda.GPUDirectRDMAFlushOptions: 1}
	if r := sharing(ask(h200)); r.State != OK || !strings.Contains(r.Detail,
		"ordered for: the GPU itself") {
		t.Errorf("an H200: %+v", r)
	}
	h200[cuda.IPCEvents], h200[cuda.PosixFDHandles] = 0, 0
	if r := sharing(ask(h200)); r.State != Warn || r.Remedy == "" {
		t.Errorf("nothing to share memory by: %+v", r)
	}
	delete(h200, cuda.DMABufSupported)
	if r := sharing(ask(h200)); r.State != Skip {
		t.Errorf("an attribute that the driver does not have: %+v", r)
	}
}
