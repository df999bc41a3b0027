package gdr

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// ends makes backends on both ends of rail 0 of the guest that test/rdma makes, in turn.
func ends(t testing.TB) transporttest.Factory {
	t.Helper()
	names := []string{"r0a", "r0b"}
	d, err := verbs.Open(verbs.Config{Device: names[0], GIDIndex: verbs.AutoGID, Timer: 1, Retries: 1})
	if errors.Is(err, verbs.ErrNotSupported) || err != nil && strings.Contains(err.Error(),
		"has no port") {
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
		return New(guestConfig(names[i], fmt.Sprintf("10.9.0.%d:0", i+1)))
	}
}

// guestTimer is of guests: an emulated processor is slow and shared, and stands still for seconds
// where its host is busy. Seven times 0.54 s, so that no healthy rail counts as dead.
const guestTimer = 17

// guestConfig is of lanes that never end: a test that loses one fails.
func guestConfig(device, listen string) Config {
	rails := []Rail{guestRail(device, listen)}
	return Config{Rails: func() ([]Rail, error) { return rails, nil }, Opening: time.Minute,
		Patience: time.Minute, Silence: time.Minute, HostSilence: time.Minute}
}

func guestRail(device, listen string) Rail {
	open := func() (verbs.Device, error) {
		return verbs.Open(verbs.Config{Device: device, GIDIndex: verbs.AutoGID, Timer: guestTimer,
			Retries: 6})
	}
	return Rail{Name: device, Open: open, Listen: listen, NUMA: -1}
}

func TestDeviceConformance(t *testing.T) { transporttest.Conformance(t, ends(t)) }

// TestDeviceConformanceTwo is the suite between two hosts, each of which runs this test: what end B
// does on its queue pairs, and what lands there, is done and looked at on host 2.
func TestDeviceConformanceTwo(t *testing.T) {
	node := os.Getenv("KVSPRAY_RDMA_NODE")
	if node == "" {
		testutil.Skip(t, "rdma-two", "this is one of two hosts: make test-rdma-two runs both")
	}
	const control = "10.9.0.1:7651"
	factory := func(testing.TB) transport.Backend {
		return New(guestConfig("r0", "10.9.0."+node+":0"))
	}
	if node == "1" {
		l, err := net.Listen("tcp", control)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		if err := l.(*net.TCPListener).SetDeadline(time.Now().Add(meets)); err != nil {
			t.Fatal(err)
		}
		c, err := l.Accept()
		if err != nil {
			t.Fatalf("host 2 does not come: %v", err)
		}
		transporttest.ConformanceBetween(t, factory, c)
		return
	}
	var c net.Conn
	ctx, cancel := context.WithTimeout(t.Context(), meets)
	defer cancel()
	for tick := time.NewTicker(100 * time.Millisecond); c == nil; <-tick.C {
		var err error
		if c, err = (&net.Dialer{}).DialContext(ctx, "tcp", control); ctx.Err() != nil {
			t.Fatalf("host 1 does not listen: %v", err)
		}
	}
	transporttest.ServeFar(t, factory, c)
}

// meets is how long one host waits for the other to boot.
const meets = 5 * time.Minute
