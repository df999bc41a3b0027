package gdr

import (
	"testing"

	"github.com/kvspray/kvspray/transport/transporttest"
)

// The contract with memory at both ends that no NIC reaches.
func TestConformanceStaged(t *testing.T) {
	transporttest.ConformanceOnDevice(t, func(tb testing.TB,
		_ *transporttest.Device) transporttest.Factory {
		_, f := rig(tb)
		return f
	})
}
