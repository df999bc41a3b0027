package sidecar

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/route"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transport/gdr"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// fabric runs a fake RDMA network, in an order of its own each time, until the test is over, after
// everything else.
func fabric(t *testing.T) *fake.Fabric {
	f := fake.New()
	seed := rand.Uint64()
	f.Shuffle(seed)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the fabric's seed was %d", seed)
		}
	})
	t.Cleanup(f.Serve())
	return f
}

// startFakeGDR starts a node whose first transport is gdr over one device of a fabric. Others carry
// on behind it.
func startFakeGDR(t *testing.T, f *fake.Fabric, device string, key string,
	others ...string) *running {
	return startFakeRails(t, f, []string{device}, nil, key, others...)
}

// startFakeRails is startFakeGDR over several devices. logs, unless nil, gets the lines of gdr.
func startFakeRails(t *testing.T, f *fake.Fabric, devices []string, logs *testutil.Log, key string,
	others ...string) *running {
	cfg := testConfig(t, func(c *config.Config) {
		c.Peer.ClusterKeyFile = key
		c.Transports.Order = append([]string{config.TransGDR}, others...)
	})
	return startConfig(t, cfg, func(n *Node) {
		var rails []gdr.Rail
		for _, device := range devices {
			rails = append(rails, gdr.Rail{Name: device, Open: func() (verbs.Device,
				error) {
				return f.Open(device)
			}, NUMA: -1})
		}
		to := n.log
		if logs != nil {
			to = slog.New(slog.NewTextHandler(logs, nil))
		}
		n.backends[0] = gdr.New(gdr.Config{Rails: func() ([]gdr.Rail, error) { return rails, nil },
			Patience: 5 * time.Second,
			Changed:  n.rails.gdrChanged, Log: to})
	})
}

// endKeys ends the keys of a node's rail once there are some.
func endKeys(t testing.TB, n *running, rail string) {
	t.Helper()
	until(t, func() bool {
		ended := 0
		for _, b := range n.backends {
			if g, is := b.(*gdr.Backend); is {
				k, err := g.EndKeys(rail)
				ok(t, err)
				ended += k
			}
		}
		return ended > 0
	})
}

// Registrations of the receiver that end again and again under transfers cost lanes, and no
// transfer.
func TestGDRKeysEnd(t *testing.T) {
	f := fabric(t)
	f.SetGID("a", netip.MustParseAddr("127.0.0.2"))
	f.SetGID("b", netip.MustParseAddr("127.0.0.3"))
	key := clusterKey(t)
	p, d := startFakeGDR(t, f, "a", key, config.TransTCP), startFakeGDR(t, f, "b", key,
		config.TransTCP)
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	seed := uint64(0)
	moves := func(under func()) string {
		t.Helper()
		seed++
		pe.random()
		x := begin(t, p, pe, de, seed, tokens)
		if under != nil {
			under()
		}
		c := de.ok(x.dst)
		pe.ok(x.src)
		same(t, pe, de, x.pt, x.dt, tokens, 0)
		return c.Received.Transport
	}
	until(t, func() bool { return moves(nil) == config.TransGDR })
	first := lanesOn(p, "a")
	lost := func() bool { // something was under way when the keys ended
		now := lanesOn(p, "a")
		return slices.ContainsFunc(first, func(id uint64) bool { return !slices.Contains(now, id) })
	}
	for n := 0; n < 20 || !lost(); n++ {
		if n == 1000 {
			t.Fatal("nothing was under way when the keys ended, in 1000 transfers")
		}
		moves(func() { endKeys(t, d, "b") })
	}
	until(t, func() bool { return moves(nil) == config.TransGDR })
}

// What a host or a device has no room for costs the rail that needs it and nothing else: transfers
// go over the other rail, or over tcp where there is none, the remedy is in the log, and once there
// is room the rail is used again.
func TestGDRWithoutRoom(t *testing.T) {
	const whole = 1 << 40
	limits := verbs.Limits{MaxRegistration: whole, MaxRegistrations: 1 << 16, MaxQueuePairs: 1 << 16,
		MaxMessage: 1 << 20, MaxWork: 1 << 14, MaxCompletions: 1 << 15}
	change := func(how func(*verbs.Limits)) func(*fake.Fabric) {
		l := limits
		how(&l)
		return func(f *fake.Fabric) { f.Limit(l) }
	}
	for name, c := range map[string]struct {
		devices [2][]string // of the prefill's node and of the decode's
		without func(*fake.Fabric)
		with    func(*fake.Fabric)
		end     int // whose log has the remedy, or either one's /v1/reach
		why     string
		over    string
	}{
		"memlock of the decode": {[2][]string{{"a"}, {"b"}}, func(f *fake.Fabric) { f.Lock("b", 64<<10) },
			func(f *fake.Fabric) { f.Lock("b", whole) }, 1,
			"the limit of locked memory is 65536 bytes, of which 0 are locked: run 'ulimit -l unlimited'",
			config.TransTCP},
		"memlock of the prefill": {[2][]string{{"a"}, {"b"}}, func(f *fake.Fabric) {
			f.Lock("a", 64<<10)
		}, func(f *fake.Fabric) { f.Lock("a", whole) }, 0,
			"run 'ulimit -l unlimited'", config.TransTCP},
		"memlock on one rail of two": {[2][]string{{"a", "a2"}, {"b", "b2"}},
			func(f *fake.Fabric) { f.Lock("b2", 64<<10) }, func(f *fake.Fabric) { f.Lock("b2", whole) }, 1,
			"run 'ulimit -l unlimited'", config.TransGDR},
		"registrations": {[2][]string{{"a"}, {"b"}},
			change(func(l *verbs.Limits) { l.MaxRegistrations = 0 }), change(func(*verbs.Limits) {}), 1,
			"b has room for 0 registrations, and this process holds 0: remove it from transports.gdr.rails",
			config.TransTCP},
		"queue pairs": {[2][]string{{"a"}, {"b"}}, change(func(l *verbs.Limits) { l.MaxQueuePairs = 0 }),
			change(func(*verbs.Limits) {}), 0,
			" has room for 0 queue pairs, and this process holds 0: lower transports.gdr.queue_pairs",
			config.TransTCP},
	} {
		t.Run(name, func(t *testing.T) {
			f := fabric(t)
			for i, device := range []string{"a", "b", "a2", "b2"} {
				f.SetGID(device, netip.AddrFrom4([4]byte{127, 0, 0, byte(i + 2)}))
			}
			c.without(f)
			key := clusterKey(t)
			var logs [2]testutil.Log
			p, d := startFakeRails(t, f, c.devices[0], &logs[0], key, config.TransTCP), startFakeRails(t, f,
				c.devices[1], &logs[1], key, config.TransTCP)
			pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
			seed := uint64(0)
			moves := func() string {
				t.Helper()
				seed++
				pe.random()
				x := begin(t, p, pe, de, seed, tokens)
				c := de.ok(x.dst)
				pe.ok(x.src)
				same(t, pe, de, x.pt, x.dt, tokens, 0)
				return c.Received.Transport
			}
			for range 5 { // also those that come while lanes are tried again
				if by := moves(); by != c.over && by != config.TransTCP {
					t.Errorf("went over %s", by)
				}
			}
			until(t, func() bool { return moves() == c.over })
			reported := func() bool {
				for _, n := range []*running{p, d} {
					for _, peer := range n.web.Reach().Peers {
						if slices.ContainsFunc(peer.Pairs, func(x nodeapi.PairReach) bool {
							return strings.Contains(x.Why, c.why)
						}) {
							return true
						}
					}
				}
				return strings.Contains(logs[c.end].String(), c.why)
			}
			until(t, func() bool { moves(); return reported() })
			c.with(f)
			until(t, func() bool { return moves() == config.TransGDR })
			if c.over == config.TransGDR { // the rail that had no room, too
				until(t, func() bool { moves(); return len(lanesOn(d, "b2")) > 0 })
			}
		})
	}
}

// A sidecar whose GID changes informs its peers, and transfers go on without a restart of either;
// also where the address is gone for a while, and where the device is pulled out.
func TestGDRFollowsItsPort(t *testing.T) {
	f := fabric(t)
	f.SetGID("a", netip.MustParseAddr("127.0.0.2"))
	f.SetGID("b", netip.MustParseAddr("127.0.0.3"))
	key := clusterKey(t)
	p, d := startFakeGDR(t, f, "a", key), startFakeGDR(t, f, "b", key)
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	moves := func(seed uint64) {
		t.Helper()
		x := begin(t, p, pe, de, seed, tokens)
		de.ok(x.dst)
		pe.ok(x.src)
	}
	// announced reports whether d has a rail of p that fulfills a condition.
	announced := func(ok func(*peerv1.Rail) bool) func() bool {
		return func() bool {
			d.dial.mu.Lock()
			defer d.dial.mu.Unlock()
			r := d.dial.peers[p.boot]
			return r != nil && slices.ContainsFunc(r.rails, ok)
		}
	}
	at := func(addr string) func(*peerv1.Rail) bool {
		return func(r *peerv1.Rail) bool {
			return !r.Down &&
				addrOf(r.Address) == netip.MustParseAddr(addr)
		}
	}
	down := func(r *peerv1.Rail) bool { return r.Down }
	moves(1)
	until(t, announced(at("127.0.0.2")))

	f.SetGID("a", netip.MustParseAddr("127.0.0.4"))
	until(t, announced(at("127.0.0.4")))
	moves(2)

	f.SetGID("a", netip.Addr{})
	until(t, announced(down))
	f.SetGID("a", netip.MustParseAddr("127.0.0.5"))
	until(t, announced(at("127.0.0.5")))
	moves(3)

	f.Remove("a")
	until(t, announced(down))
	f.Insert("a")
	until(t, announced(at("127.0.0.5")))
	moves(4)

	f.Emit("a", verbs.Event{Kind: verbs.PortDown})
	until(t, announced(down))
	f.Emit("a", verbs.Event{Kind: verbs.PortUp})
	until(t, announced(at("127.0.0.5")))
	moves(5)
}

// lonelyGPU is a GPU that no NIC reaches: its driver exports no dma-buf, and no module gives NICs
// its addresses.
type lonelyGPU struct {
	*transporttest.Device
	exports atomic.Int64
}

func (g *lonelyGPU) ExportDMABuf(_, _ uint64) (int, uint64, error) {
	g.exports.Add(1)
	return -1, 0, errors.New("no dma-buf of this memory")
}

func (*lonelyGPU) NICWrites() (flush func() error, err error) { return nil, nil }

func (g *lonelyGPU) Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error) {
	r, err := g.Device.Import(id, handle, fd, size)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	return mem.NewDevice(id, mem.DeviceMemory{Device: g, Addr: r.Base(), Size: size,
		Handle: handle, FD: -1})
}

func (*lonelyGPU) Close() error { return nil }

// engineOn is newEngine with its cache on a node's GPU. The test sees the same bytes from the host.
func engineOn(t *testing.T, r *running, g lender) *engine {
	t.Helper()
	return engineNamed(t, r, g, "gpu")
}

// lender makes regions of a GPU's memory.
type lender interface {
	Region(b []byte) (*mem.Region, error)
}

// engineNamed is engineOn with the id of the engine.
func engineNamed(t *testing.T, r *running, g lender, id string) *engine {
	t.Helper()
	reg, err := testShape.Region()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(reg.Release)
	b, _ := reg.Bytes()
	lent, err := g.Region(b)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(lent.Release)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	w, err := connectortest.DialWorker(ctx, connectortest.Config{Socket: r.cfg.Engine.Socket,
		Layout: testShape.Layout(), Regions: []*mem.Region{reg},
		Engine: msg.Engine{Name: "test", Version: "1", ID: id},
		Tamper: func(m *msg.Register, fds []int) []int {
			d := &m.Regions[0]
			d.Kind, d.Handle = msg.KindDevice, lent.Handle()
			d.FD = msg.NoFD
			return fds[:len(fds)-1]
		}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() })
	return &engine{Worker: w, t: t, shape: testShape, region: reg,
		done: map[uint64]connectortest.Completion{}}
}

// Memory of a GPU that no NIC reaches goes by RDMA through host memory, whichever end it lies at:
// no slice is refused, the lanes stay, and the NIC is tried once.
func TestGDRStagesMemoryThatNoNICReaches(t *testing.T) {
	var gpu [2]*lonelyGPU
	for i := range gpu { // the sidecars end before them, and return their buffers
		gpu[i] = &lonelyGPU{Device: transporttest.NewDevice(t)}
	}
	f := fabric(t)
	f.SetGID("a", netip.MustParseAddr("127.0.0.2"))
	f.SetGID("b", netip.MustParseAddr("127.0.0.3"))
	key := clusterKey(t)
	// Without tcp: a retry there would stop a lane that is late on a busy machine.
	p, d := startFakeGDR(t, f, "a", key), startFakeGDR(t, f, "b", key)
	moves := func(pe, de *engine, seed uint64) string {
		t.Helper()
		pe.random()
		x := begin(t, p, pe, de, seed, tokens)
		c := de.ok(x.dst)
		pe.ok(x.src)
		same(t, pe, de, x.pt, x.dt, tokens, 0)
		return c.Received.Transport
	}
	host := [2]*engine{newEngine(t, p, testShape), newEngine(t, d, testShape)}
	seed := uint64(0)
	// its lanes are up
	until(t, func() bool { seed++; return moves(host[0], host[1], seed) == config.TransGDR })
	lanes := lanesOn(p, "a")

	var onGPU [2]*engine
	for i, n := range []*running{p, d} {
		n.gpus.mu.Lock()
		n.gpus.opened = gpu[i]
		n.gpus.mu.Unlock()
		onGPU[i] = engineOn(t, n, gpu[i])
	}
	refused := func() (n uint64) {
		for _, q := range viewOf(p).Rails.Pairs {
			if q.Path.Transport == config.TransGDR {
				n += q.Counters.Refused
			}
		}
		return n
	}
	for name, ends := range map[string][2]*engine{"source": {onGPU[0], host[1]},
		"destination": {host[0], onGPU[1]}, "both": {onGPU[0], onGPU[1]}} {
		for range 3 {
			seed++
			if by := moves(ends[0], ends[1], seed); by != config.TransGDR {
				t.Errorf("on a GPU: %s: went over %s", name, by)
			}
		}
	}
	if n := refused(); n != 0 {
		t.Errorf("%d slices were refused", n)
	}
	for i := range gpu {
		if n := gpu[i].exports.Load(); n != 1 {
			t.Errorf("end %d was registered %d times", i, n)
		}
		if gpu[i].Calls.Load() == 0 {
			t.Errorf("nothing of end %d went through host memory", i)
		}
	}
	now := lanesOn(p, "a") // and there may be more by now
	if len(lanes) == 0 || slices.ContainsFunc(lanes,
		func(id uint64) bool { return !slices.Contains(now, id) }) {
		t.Errorf("of lanes %v there are %v", lanes, now)
	}
	until(t, func() bool { seed++; return moves(host[0], host[1], seed) == config.TransGDR })
}

// Sidecars whose engines' caches lie on GPUs from the start open lanes of transports that cannot
// touch such memory, and stage it.
func TestGPUMemoryOverTCP(t *testing.T) {
	p, d := pairOf(t, config.TransTCP)
	var ends [2]*engine
	for i, n := range []*running{p, d} {
		g := &lonelyGPU{Device: transporttest.NewDevice(t)}
		n.gpus.mu.Lock()
		n.gpus.opened = g
		n.gpus.mu.Unlock()
		ends[i] = engineOn(t, n, g)
	}
	ends[0].random()
	x := begin(t, p, ends[0], ends[1], 1, tokens)
	if by := ends[1].ok(x.dst).Received.Transport; by != config.TransTCP {
		t.Errorf("went over %q", by)
	}
	ends[0].ok(x.src)
	same(t, ends[0], ends[1], x.pt, x.dt, tokens, 0)
	for _, peer := range p.web.Reach().Peers {
		for _, x := range peer.Pairs {
			if x.Kind != string(route.Staged) {
				t.Errorf("%s over %s is %s", x.Transport, x.Local, x.Kind)
			}
		}
	}
}
