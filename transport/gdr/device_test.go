package gdr

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/verbs"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// ends makes backends on both ends of rail 0 of the guest that test/rdma makes, in turn.
func ends(t testing.TB) transporttest.Factory {
	t.Helper()
	names := []string{"r0a", "r0b"}
	d, err := verbs.Open(verbs.Config{Device: names[0], GIDIndex: verbs.AutoGID, Timer: 1, Retries: 1})
	if errors.Is(err, verbs.ErrNotSupported) || err != nil && strings.Contains(err.Error(), "has no port") {
		testutil.Skip(t, "rdma", err.Error())
	}
	if err == nil {
		err = d.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	made := 0
	return func(testing.TB) transport.Backend {
		i := made % 2
		made++
		// An emulated processor is slow and shared: timers of 67 ms, so that no healthy rail counts as dead.
		return New(guestConfig(14, 5*time.Second, names[i], fmt.Sprintf("10.9.0.%d:0", i+1)))
	}
}

func guestConfig(timer uint8, patience time.Duration, device, listen string) Config {
	rails := []Rail{guestRail(device, listen, timer)}
	return Config{Rails: func() ([]Rail, error) { return rails, nil }, Patience: patience, Silence: 15 * time.Second}
}

func guestRail(device, listen string, timer uint8) Rail {
	open := func() (verbs.Device, error) {
		return verbs.Open(verbs.Config{Device: device, GIDIndex: verbs.AutoGID, Timer: timer, Retries: 5})
	}
	return Rail{Name: device, Open: open, Listen: listen, NUMA: -1}
}

func TestDeviceConformance(t *testing.T) { transporttest.Conformance(t, ends(t)) }
