package sidecar

import (
	"fmt"
	"log/slog"
	mrand "math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/topo"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transport"
)

// seated is a GPU that has a place in the PCI tree, and does nothing.
type seated struct {
	mem.Device
	at string
}

func (s seated) PCI() string { return s.at }

// onGPU is a worker whose cache lies on a GPU.
func onGPU(t *testing.T, pci string) *engines.Worker {
	t.Helper()
	r, err := mem.NewDevice(mem.NewID(), mem.DeviceMemory{Device: seated{at: pci}, Addr: 1 << 20,
		Size: 4096, Handle: []byte{1}, FD: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	return &engines.Worker{Regions: []*mem.Region{r}}
}

// TestMemoryOf: the cache of a GPU engine lies where its GPU sits; which rails are near to it is
// decided by that.
func TestMemoryOf(t *testing.T) {
	m, known := memoryOf(onGPU(t, "0000:1c:00.0"))
	if want := (topo.Memory{GPU: "0000:1c:00.0", Node: topo.Unknown}); !known || m != want {
		t.Errorf("memory at %+v (known: %v), want %+v", m, known, want)
	}
}

// hgx is the 8-GPU machine of package topo's tests, as topo finds it in sysfs: its GPUs and NICs,
// NIC k+1 on the switch of GPU k.
func hgx(t *testing.T) *topo.Host {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "internal", "sys", "topo", "testdata",
		"hgx-h100.txt"))
	ok(t, err)
	sys := filepath.Join(t.TempDir(), "sys")
	put := func(content string, p ...string) {
		t.Helper()
		file := filepath.Join(append([]string{sys}, p...)...)
		ok(t, os.MkdirAll(filepath.Dir(file), 0o700))
		ok(t, os.WriteFile(file, []byte(content+"\n"), 0o600))
	}
	link := func(to string, p ...string) {
		t.Helper()
		file := filepath.Join(append([]string{sys}, p...)...)
		ok(t, os.MkdirAll(filepath.Dir(file), 0o700))
		ok(t, os.Symlink(filepath.Join(sys, to), file))
	}
	device := func(path, node, vendor, class string) (dev string) {
		dev = filepath.Join("devices", path)
		put(node, dev, "numa_node")
		put(vendor, dev, "vendor")
		put(class, dev, "class")
		link(dev, "bus/pci/devices", filepath.Base(path))
		return dev
	}
	var links []topo.Link
	for line := range strings.Lines(string(text)) {
		switch f := strings.Fields(line); {
		case len(f) == 2 && f[0] == "nodes":
			put(f[1], "devices/system/node/online")
		case len(f) == 3 && f[0] == "gpu":
			device(f[1], f[2], "0x10de", "0x030200")
		case len(f) > 4 && f[0] == "nic":
			link(device(f[2], f[3], "0x15b3", "0x020000"), "class/net", f[1], "device")
		case len(f) > 6 && f[0] == "link" && f[3] == "device" && !strings.Contains(line, "master="):
			links = append(links, topo.Link{Name: f[1], Index: len(links) + 1, Kind: topo.Physical,
				MTU: 9000, Admin: true, Link: true,
				Addrs: []netip.Prefix{netip.MustParsePrefix(f[6])}})
		}
	}
	h, err := topo.Discover(topo.Options{Root: filepath.Dir(sys), Links: func() ([]topo.Link,
		error) {
		return links, nil
	},
		GPUs: func() ([]topo.GPU, error) { return nil, nil }})
	ok(t, err)
	if len(h.GPUs) != 8 || len(h.NICs) != 9 || len(h.Nodes) != 2 {
		t.Fatalf("%d GPUs, %d interfaces, nodes %v", len(h.GPUs), len(h.NICs), h.Nodes)
	}
	return h
}

// TestNear: how near our rails are to the cache of a worker, as it was found in the PCI tree: two
// workers of one sidecar have other near NICs. Rails find their NICs by their addresses, as those
// of a configuration do.
func TestNear(t *testing.T) {
	h := hgx(t)
	n := newRailSet(&config.Config{}, nil, &openBackends{}, nil, slog.New(slog.DiscardHandler))
	configured := map[string]int{"ens4np0": 1}
	var opened []transport.Rail
	for i := range 8 {
		name := fmt.Sprintf("ens%dnp0", i+1)
		opened = append(opened, transport.Rail{Name: name, Address: fmt.Sprintf("192.168.%d.11:7000",
			i+1), Tier: configured[name]})
	}
	n.put(config.TransTCP, append(opened, transport.Rail{Name: "proxy", Address: "203.0.113.1:7000"}))
	n.host = h
	n.byB[config.TransTCP], _ = n.follow(h, n.of(config.TransTCP))
	for i, g := range h.GPUs {
		w := onGPU(t, g.PCI)
		for k := range 8 {
			rail, want := fmt.Sprintf("ens%dnp0", k+1), topo.Far
			switch {
			case configured[fmt.Sprintf("ens%dnp0", k+1)] != 0:
				want = topo.Near // the configuration's word
			case i == k:
				want = topo.Near
			case i/4 == k/4:
				want = topo.Middle
			}
			if got := n.near(w, config.TransTCP, rail); got != want {
				t.Errorf("GPU %d, %s: tier %d, want %d", i, rail, got, want)
			}
		}
		for _, rail := range []string{"proxy", "no such rail"} {
			if got := n.near(w, config.TransTCP, rail); got != 0 {
				t.Errorf("GPU %d, %s: tier %d of what is not known", i, rail, got)
			}
		}
	}
	if got := n.near(&engines.Worker{}, config.TransTCP, "ens1np0"); got != 0 {
		t.Errorf("a worker of which nothing is known: tier %d", got)
	}
}

// TestNearRailGoesFirst: two sidecars, one of which has two rails that sit on two NUMA nodes of the
// HGX machine, and the cache of its engine on the first of those. What topo measured decides which
// of them gets the first slice, at the sender as at the receiver, whose grant has it; at the
// sender the far one even claims to be twice as fast, which decides where no tier is known.
func TestNearRailGoesFirst(t *testing.T) {
	for _, side := range []string{"sender", "receiver"} {
		for i, near := range []string{"r0", "r1"} {
			t.Run(side+"/"+near, func(t *testing.T) {
				far := []string{"r1", "r0"}[i]
				two := testConfig(t, func(c *config.Config) {
					c.Transports.Order = []string{config.TransTCP}
					c.Transports.TCP.Rails = []config.Rail{{Name: "r0", Listen: "127.0.0.1:0", Speed: 1e9},
						{Name: "r1", Listen: "127.0.0.1:0", Speed: 1e9}}
					c.Transports.TCP.Rails[1-i].Speed = 2e9 // the far one
				})
				placed, other := startConfig(t, two),
					start(t, func(c *config.Config) { c.Transports.Order = []string{config.TransTCP} })
				seat(t, placed, map[string]string{near: "ens1np0", far: "ens5np0"})
				p, d := placed, other
				if side == "receiver" {
					p, d = other, placed
				}
				pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
				pe.random()
				if m, known := memoryOf(placed.engine.Workers()[0]); !known || m.Node != 0 {
					testutil.Skip(t, "numa",
						fmt.Sprintf("the kernel does not say that host memory is on node 0: %+v", m))
				}
				const few = 64 // tokens: each layer is one chunk
				pr := newPrompt(few)
				rng := mrand.New(mrand.NewPCG(1, 3))
				pt, dt := table(rng, 256, blocksFor(few, 16)), table(rng, 256, blocksFor(few, 16))
				src, err := pe.Intent(msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: few, Fanout: 1,
					Blocks: [][]uint32{pt},
					Steps:  []msg.PendingStep{{Step: 1, End: few}}, DeadlineMS: deadlineMS})
				ok(t, err)
				dst, err := de.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: few, Peer: p.Endpoint(),
					Skip: []uint32{0}, Blocks: [][]uint32{dt},
					DeadlineMS: deadlineMS, MatchTimeoutMS: matchMS})
				ok(t, err)
				bound(t, d)
				pair := func(rail string) (v spray.PairView) {
					for _, q := range p.web.State().Leases.Rails.Pairs {
						if q.Peer == d.Boot().String() && (q.Path.Local == rail || q.Path.Remote == rail) {
							return q
						}
					}
					return v
				}
				// nothing is bound to a lane before
				until(t, func() bool { return pair(near).Lanes == 2 && pair(far).Lanes == 2 })
				pe.SignalLayer(0, 1)
				until(t, func() bool { return landedBytes(d) > 0 && p.web.State().Leases.Rails.Flights == 0 })
				// A machine that is busy may have sent it a second time over the other one, as a
				// hedge, or after a silence.
				c := pair(near).Counters
				if first := c.Confirmed + c.Superseded + c.Failed + c.Lost - c.Hedges; first == 0 {
					t.Errorf("the near rail got no slice of its own: %+v, the far one: %+v", c, pair(far).Counters)
				}
				for l := range testShape.Layers {
					pe.SignalLayer(l, 1)
				}
				pe.SignalStep(1)
				de.ok(dst)
				same(t, pe, de, pt, dt, few, 0)
				pe.ok(src)
			})
		}
	}
}

// seat gives rails of a running node the places of interfaces of the HGX machine, for the rest of
// the test.
func seat(t *testing.T, r *running, nics map[string]string) {
	t.Helper()
	h := hgx(t)
	s := r.rails
	s.apply.Lock() // what this machine has is not looked at any more
	t.Cleanup(s.apply.Unlock)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.host = h
	for i := range s.byB[config.TransTCP] {
		x := &s.byB[config.TransTCP][i]
		x.nic = nics[x.Name]
	}
}
