package rdmacheck

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/ui/doctor"
)

// guestTimer is longer than testTimer, 0.27 s: an emulated processor stands still for that long
// where its host is busy.
const guestTimer = 16

// guest is an end on one device of the guest that test/rdma makes.
func guest(t *testing.T, rail string) Env {
	t.Helper()
	d, err := verbs.Open(verbs.Config{Device: rail, GIDIndex: verbs.AutoGID, Timer: 1, Retries: 1})
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
	c := config.Default()
	c.Transports.GDR.Rails = []string{rail}
	e, err := here(t.Context(), c, guestTimer)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// testDevices runs the test between two ends of the guest, with a connection between them.
func testDevices(t *testing.T, near, far Env, opt Options) *Report {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- Serve(ctx, ln, far, nil) }()
	opt.Peer = ln.Addr().String()
	r, err := Run(t.Context(), near, opt)
	cancel()
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", &text)
	return r
}

// TestDeviceSelfTest: all tests pass on soft-RoCE, in loopback and across a rail.
func TestDeviceSelfTest(t *testing.T) {
	near, far := guest(t, "r0a"), guest(t, "r0b")
	opt := Options{Rounds: 3, Span: time.Second}
	r := testDevices(t, near, far, opt)
	if !r.Works() {
		t.Error("the rail is sound")
	}
	if x := r.Pairs[0].Figures.Rates; len(x) != 3 || x[0].Baseline <= 0 || x[0].MiBps <= 0 {
		t.Errorf("%+v", x)
	}
	near.Card = newCard(nil, true).open
	loop, err := Run(t.Context(), near, opt)
	if err != nil {
		t.Fatal(err)
	}
	if l := lineOf(t, loop, "GPU memory"); !loop.Works() || l.State != doctor.OK ||
		!strings.Contains(l.Detail, "registered by peermem") {
		t.Errorf("%+v: %+v", loop.Pairs, l)
	}
	for _, name := range []string{"transport gdr", "gdr rail r0a", "memlock", "device r0a", "MTU r0a",
		"congestion r0a", "GPU memory"} {
		found := false
		for _, l := range r.Host {
			found = found || l.Name == name
		}
		if !found {
			t.Errorf("no line for %s: %+v", name, r.Host)
		}
	}
}

// TestDevicePlantedFaults: each fault is named with its remedy.
func TestDevicePlantedFaults(t *testing.T) {
	guest(t, "r0a") // or skip
	opt := Options{Rounds: 1, Span: time.Second, only: []string{"GPU memory"}}
	const dropInto = "iptables -A INPUT -p udp --dport 4791 -i "
	for _, x := range []struct {
		name, plant, heal   string
		far                 func(*Env)
		line, fault, remedy string
		state               doctor.State
	}{
		{name: "no GID", plant: "ip addr flush dev r1a", heal: "ip addr add 10.9.1.1/24 dev r1a",
			line: "device", fault: "r1a", remedy: "IP address"},
		{name: "a smaller MTU at one end", plant: "ip link set r2b mtu 1500",
			heal: "ip link set r2b mtu 4500", line: "path", fault: "the peer's r2b one of 1024",
			remedy: "same MTU", state: doctor.Warn},
		{name: "a smaller MTU on the way", plant: dropInto + "r2b -m length --length 1200:65535 -j DROP",
			heal: "iptables -F", line: "path", fault: "packets of 4096 bytes are lost on the way",
			remedy: "transports.gdr.mtu: 1024"},
		{name: "loss there", plant: dropInto + "r2b -j DROP", heal: "iptables -F", line: "path",
			fault: "no packet from r2a reaches the peer's r2b", remedy: "UDP port 4791"},
		{name: "loss back", plant: dropInto + "r2a -j DROP", heal: "iptables -F", line: "path",
			fault: "no packet from the peer's r2b reaches r2a", remedy: "UDP port 4791"},
		{name: "no path", plant: dropInto + "r2a -j DROP; " + dropInto + "r2b -j DROP",
			heal: "iptables -F", line: "path", fault: "in either direction", remedy: "VLAN"},
		{name: "a dead queue pair", far: func(e *Env) {
			e.connected = func(_ string, q verbs.QueuePair) { _ = q.ToError() }
		}, line: "path", fault: "the queue pair of the peer's r2b is in the error state",
			remedy: "firmware"},
		{name: "a GPU that the NIC refuses", far: func(e *Env) { e.Card = newCard(nil, false).open },
			line: "GPU memory", fault: "neither by dma-buf", remedy: "load nvidia-peermem",
			state: doctor.Warn},
	} {
		t.Run(x.name, func(t *testing.T) {
			rail := "r2"
			if x.line == "device" {
				rail = "r1"
			}
			near, far := guest(t, rail+"a"), guest(t, rail+"b")
			if x.far != nil {
				x.far(&far)
			}
			shell(t, x.plant)
			defer shell(t, x.heal)
			r := testDevices(t, near, far, opt)
			l := lineOf(t, r, x.line)
			if x.state == "" {
				mustFail(t, r, x.line, x.fault, x.remedy)
			} else if l.State != x.state || !strings.Contains(l.Detail, x.fault) ||
				!strings.Contains(l.Remedy, x.remedy) {
				t.Errorf("%+v: want %s with %q and the remedy %q", l, x.state, x.fault, x.remedy)
			}
		})
	}
	t.Run("locked memory", func(t *testing.T) { lockLittle(t, opt) })
}

func shell(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
}

// lockLittle runs the test on a thread that may lock 1 MiB.
func lockLittle(t *testing.T, opt Options) {
	near := guest(t, "r2a")
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
		t.Fatal(err)
	}
	low := unix.Rlimit{Cur: 1 << 20, Max: old.Max}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &low); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old) }()
	done := make(chan error)
	var r *Report
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its capabilities
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		err := unix.Capget(&hdr, &caps[0])
		if caps[0].Effective &^= 1 << unix.CAP_IPC_LOCK; err == nil {
			err = unix.Capset(&hdr, &caps[0])
		}
		if err == nil {
			r, err = Run(t.Context(), near, opt)
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	mustFail(t, r, "host memory", "the limit of locked memory is 1048576", "ulimit -l unlimited")
}

// TestTwoHosts is the test between two guests: the second one serves until the first one has ended.
func TestTwoHosts(t *testing.T) {
	node, share := os.Getenv("KVSPRAY_RDMA_NODE"), os.Getenv("KVSPRAY_RDMA_SHARE")
	if node == "" {
		testutil.Skip(t, "rdma-two", "this is one of two hosts: make test-rdma-two runs both")
	}
	const meets = 5 * time.Minute // until both have booted
	env := guest(t, "r0")
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	if node == "2" {
		ln, err := net.Listen("tcp", "10.9.0.2:7659")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*meets)
		defer cancel()
		go func() {
			for ctx.Err() == nil {
				if _, err := os.Stat(share + "/done"); err == nil {
					cancel()
				}
				select {
				case <-tick.C:
				case <-ctx.Done():
				}
			}
		}()
		if err := Serve(ctx, ln, env, nil); err != nil {
			t.Fatal(err)
		}
		return
	}
	defer func() {
		if err := os.WriteFile(share+"/done", nil, 0o600); err != nil {
			t.Error(err)
		}
	}()
	var r *Report
	var err error
	for end := time.Now().Add(meets); time.Now().Before(end); <-tick.C {
		if r, err = Run(t.Context(), env, Options{Peer: "10.9.0.2:7659", Rounds: 3,
			Span: time.Second}); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", &text)
	if !r.Works() {
		t.Error("the rail is sound")
	}
}
