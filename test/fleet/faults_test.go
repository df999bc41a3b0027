package fleet

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/testutil"
)

// Variables of a sidecar's process.
const (
	gpusIn   = "KVSPRAY_TEST_GPUS="   // its GPUs' state, for testdata/gpus.c
	ownSysfs = "KVSPRAY_TEST_SYSFS=1" // its /sys has the interfaces of its network namespace
)

// What testdata/gpus.c reports of a GPU.
const (
	fit  = ""
	hot  = "hot"
	lost = "lost" // it fell off the bus
)

const (
	rails    = 2
	anywhere = 1 << 32 // address of GPU memory in the engine
)

// onGPU declares a region, which is a memfd, as memory of a fake GPU.
func onGPU(n int, r *msg.Region) {
	h := device.Handle{Kind: device.HandleFD, GPU: [16]byte(bytes.Repeat([]byte{byte(n)}, 16)),
		Alloc: r.Bytes}
	r.Kind, r.Handle, r.Addr = msg.KindDevice, h.Append(nil), anywhere
}

// drivers is a directory with the libraries of fake GPUs.
func drivers(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		testutil.Skip(t, "gcc", "gcc is not installed: "+err.Error())
	}
	lib := filepath.Join(dir, "libcuda.so.1")
	if out, err := exec.Command(gcc, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", lib,
		"testdata/gpus.c").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	must(t, os.Symlink(lib, filepath.Join(dir, "libnvidia-ml.so.1")))
	return dir
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// equip gives each engine of a fleet a GPU of its own, and each sidecar the same rails, before they
// start.
func (f *fleet) equip() (far []netlink.Link) {
	f.t.Helper()
	key := filepath.Join(f.dir, "key")
	must(f.t, os.WriteFile(key, []byte(strings.Repeat("5a", 32)), 0o600))
	libs := drivers(f.t)
	for i := range rails {
		far = append(far, f.link(i))
	}
	for i, n := range f.nodes {
		n.gpus = filepath.Join(f.dir, fmt.Sprintf("gpus%d", i))
		must(f.t, os.Mkdir(n.gpus, 0o700))
		must(f.t, unix.Mkfifo(filepath.Join(n.gpus, "events"), 0o600))
		n.sidecar.env = append(n.sidecar.env, gpusIn+n.gpus, ownSysfs,
			"LD_LIBRARY_PATH="+libs)
		n.sidecar.argv = append(n.sidecar.argv, "--set", "transports.tcp.rails=auto",
			"--set", "peer.cluster_key_file="+key)
		for j, e := range n.engines {
			e.config.GPU = j + 1
		}
	}
	for _, r := range f.routers {
		r.argv = append(r.argv, "--cluster-key-file", key)
	}
	return far
}

// link makes an interface for rails, and returns its other end.
func (f *fleet) link(i int) netlink.Link {
	f.t.Helper()
	a := netlink.NewLinkAttrs()
	a.Name = fmt.Sprintf("rail%d", i)
	v := &netlink.Veth{LinkAttrs: a, PeerName: a.Name + "far"}
	must(f.t, netlink.LinkAdd(v))
	far, err := netlink.LinkByName(v.PeerName)
	must(f.t, err)
	ip := net.IPv4(10, 90, byte(i), 1)
	must(f.t, netlink.AddrAdd(v, &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: net.CIDRMask(24, 32)}}))
	must(f.t, netlink.LinkSetUp(v))
	must(f.t, netlink.LinkSetUp(far))
	return far
}

// report sets what a driver reports of the GPU of an engine, also to a sidecar that starts later.
func (n *node) report(e *engine, state string) {
	e.t.Helper()
	must(e.t, os.WriteFile(filepath.Join(n.gpus, fmt.Sprint(e.config.GPU-1)), []byte(state), 0o600))
}

// xid is an error of the GPU of an engine.
func (n *node) xid(e *engine, number int) {
	e.t.Helper()
	events, err := os.OpenFile(filepath.Join(n.gpus, "events"), os.O_WRONLY|syscall.O_NONBLOCK, 0)
	must(e.t, err) // no reader: the sidecar does not watch
	_, err = fmt.Fprintf(events, "%d %d\n", e.config.GPU-1, number)
	must(e.t, err)
	must(e.t, events.Close())
}

// gpuOf is the GPU of an engine, as its sidecar names it.
func gpuOf(e *engine) string {
	return "GPU " + []string{"0000:1b:00.0", "0000:43:00.0"}[e.config.GPU-1]
}

// faults waits for the faults that a node describes: each has a device and a kind.
func (f *fleet) faults(n *node, what string, want ...string) {
	f.t.Helper()
	var got []string
	defer func() {
		if f.t.Failed() {
			f.t.Logf("%s: faults %q, want %q", what, got, want)
		}
	}()
	until(f.t, what, func() bool {
		var v nodeapi.Node
		if getJSON("http://"+n.http+"/v1/node", &v) != nil {
			return false
		}
		got = nil
		for _, x := range v.Health.Faults {
			got = append(got, x.Device+": "+x.Kind)
		}
		return slices.Equal(got, want)
	})
}

// out is that an engine is no choice of any router, while all others are.
func (f *fleet) out(what string, e *engine) {
	f.t.Helper()
	e.up = false
	f.agree(what)
	e.up = true
}

// TestFleetFaults: GPUs and links of sidecars have faults, and roles change, under load. No client
// sees an error, the sidecar names the device, and routers avoid the engines that use it until the
// fault is over.
func TestFleetFaults(t *testing.T) {
	if !testutil.InNamespace(t) {
		return
	}
	f := newFleet(t)
	far := f.equip()
	soak := soakFor(t)
	f.begin(nodes * perNode)
	defer f.serve()()
	again := func(e *engine) { // the engine's process restarts
		t.Helper()
		e.end(syscall.SIGKILL)
		e.begin()
	}
	contained := func(n *node, e *engine) {
		begun := time.Now()
		n.xid(e, 94)
		f.out("a contained error", e)
		f.within("a contained error", time.Since(begun), 3*time.Second)
		f.faults(n, "a contained error", gpuOf(e)+": xid")
		f.progress("a contained error")
		again(e)
		f.agree("the engine has restarted")
	}
	fell := func(n *node, e *engine) {
		begun := time.Now()
		n.report(e, lost)
		n.xid(e, 79)
		f.out("a GPU off the bus", e)
		f.within("a GPU off the bus", time.Since(begun), 3*time.Second)
		f.faults(n, "a GPU off the bus", gpuOf(e)+": xid")
		again(e) // it gets nothing as long as its GPU is away
		f.progress("a GPU off the bus")
		f.out("its engine has restarted", e)
		n.report(e, fit)
		f.agree("the GPU is back")
		f.faults(n, "the GPU is back")
	}
	throttled := func(n *node, e *engine) {
		begun := time.Now()
		n.report(e, hot)
		f.faults(n, "a hot GPU", gpuOf(e)+": throttled")
		f.out("a hot GPU", e)
		f.within("a hot GPU", time.Since(begun), 25*time.Second) // 15 s, and readings of 5 s
		f.progress("a hot GPU")
		n.report(e, fit)
		f.agree("the GPU is cool")
	}
	role := func(n *node, _ *engine) {
		e := n.engines[slices.IndexFunc(n.engines, func(e *engine) bool {
			return e.config.Role == "both"
		})]
		for _, role := range []string{"decode", "prefill", "both"} {
			f.set(n, e, role)
			e.role = role
			f.agree(role)
		}
	}
	flaps := func(_ *node, _ *engine) {
		rail := rand.N(rails)
		for range 3 {
			must(t, netlink.LinkSetDown(far[rail]))
			must(t, netlink.LinkSetUp(far[rail]))
			f.progress("a link that flaps")
		}
		for _, n := range f.nodes {
			f.faults(n, "a link that flaps", fmt.Sprintf("interface rail%d: flaps", rail))
		}
		f.agree("a link that flaps")
		if soak > 0 {
			for _, n := range f.nodes {
				f.faults(n, "the link is quiet")
			}
		}
	}
	turns := []func(*node, *engine){contained, role, flaps}
	if soak > 0 { // these wait for times of ten seconds and more
		turns = append(turns, fell, throttled)
	}
	f.turn(soak, len(turns), func(n int) {
		at := f.nodes[rand.N(nodes)]
		turns[n%len(turns)](at, at.engines[rand.N(perNode)])
	})
}
