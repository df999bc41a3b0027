package cuda_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/testutil"
)

// Without a driver Open returns a reason with a remedy; with one it lists devices that answer.
func TestOpen(t *testing.T) {
	d, err := cuda.Open()
	if err != nil {
		if !errors.Is(err, cuda.ErrNotSupported) {
			t.Fatalf("Open: %v, want ErrNotSupported", err)
		}
		if len(err.Error()) < len(cuda.ErrNotSupported.Error())+20 ||
			!strings.Contains(err.Error(), ":") {
			t.Fatalf("Open gives no reason: %v", err)
		}
		testutil.Skip(t, "cuda", err.Error())
		return
	}
	for _, dev := range d.Devices {
		name, err := dev.Name()
		if err != nil || name == "" {
			t.Errorf("device %d: name %q, %v", dev, name, err)
		}
	}
}
