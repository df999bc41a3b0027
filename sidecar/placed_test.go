package sidecar

import (
	"testing"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/internal/topo"
)

// seated is a GPU that knows where it sits, and does nothing.
type seated struct{ mem.Device }

func (seated) PCI() string { return "0000:1c:00.0" }

// TestMemoryOf: the cache of a GPU engine lies where its GPU sits; which rails are near to it is decided by that.
func TestMemoryOf(t *testing.T) {
	r, err := mem.NewDevice(mem.NewID(), mem.DeviceMemory{Device: seated{}, Addr: 1 << 20, Size: 4096, Handle: []byte{1}, FD: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	m, known := memoryOf(&connector.Worker{Regions: []*mem.Region{r}})
	if want := (topo.Memory{GPU: "0000:1c:00.0", Node: topo.Unknown}); !known || m != want {
		t.Errorf("memory at %+v (known: %v), want %+v", m, known, want)
	}
}
