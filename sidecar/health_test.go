package sidecar

import (
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/sys/health"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/faulttest"
	"github.com/kvspray/kvspray/transport/transporttest"
)

const (
	gpuA = "0000:1b:00.0"
	gpuB = "0000:43:00.0"
)

// gpuHost is a host with GPUs whose errors and readings the test makes. It is the importer of a
// node, and the driver of its health.
type gpuHost struct {
	*transporttest.Device
	events chan health.Event

	mu       sync.Mutex
	seats    map[string]string // PCI address by handle
	readings map[string]health.Reading
}

func newGPUHost(t *testing.T) *gpuHost {
	g := &gpuHost{Device: transporttest.NewDevice(t), events: make(chan health.Event, 16),
		seats: map[string]string{}, readings: map[string]health.Reading{}}
	for _, pci := range []string{gpuA, gpuB} {
		g.read(health.Reading{PCI: pci, Action: health.ActionNone})
	}
	return g
}

// joins makes the host that of a node, before the node runs.
func (g *gpuHost) joins(n *Node) {
	n.gpus.opened = g
	n.devices.open = func() (gpuDriver, error) { return healthDriver{g}, nil }
}

func (g *gpuHost) read(r health.Reading) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.readings[r.PCI] = r
}

// healthDriver is the management library of a gpuHost.
type healthDriver struct{ *gpuHost }

func (g healthDriver) Look() (out []health.Reading) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range g.readings {
		out = append(out, r)
	}
	return out
}

func (g healthDriver) Wait(time.Duration) (health.Event, bool, error) {
	select {
	case e := <-g.events:
		return e, true, nil
	case <-time.After(time.Millisecond):
		return health.Event{}, false, nil
	}
}

func (g *gpuHost) Close() error { return nil }

// at lends memory of one GPU.
type gpuAt struct {
	*gpuHost
	pci string
}

func (g gpuAt) Region(b []byte) (*mem.Region, error) {
	r, err := g.Device.Region(b)
	if err == nil {
		g.mu.Lock()
		g.seats[string(r.Handle())] = g.pci
		g.mu.Unlock()
	}
	return r, err
}

func (g *gpuHost) Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error) {
	r, err := g.Device.Import(id, handle, fd, size)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	g.mu.Lock()
	defer g.mu.Unlock()
	return mem.NewDevice(id, mem.DeviceMemory{Device: seated{g.Device, g.seats[string(handle)]},
		Addr: r.Base(), Size: size, Handle: handle, FD: -1})
}

func nodeOf(t *testing.T, r *running) (v nodeapi.Node) {
	t.Helper()
	code, body := get(t, r, "/v1/node")
	if err := json.Unmarshal([]byte(body), &v); code != 200 || err != nil {
		t.Fatalf("%d, %v: %s", code, err, body)
	}
	return v
}

// failed checks that a lease ended because of a fault, which its reason names.
func (e *engine) failed(lease uint64, status uint16, want ...string) {
	e.t.Helper()
	c := e.wait(lease)
	reason := ""
	if c.Received != nil {
		reason = c.Received.Reason
	} else if c.Sent != nil {
		reason = c.Sent.Reason
	}
	for _, w := range want {
		if c.Status != status || !strings.Contains(reason, w) {
			e.t.Fatalf("lease %d: status %d, %q; want status %d, %q", lease, c.Status, reason, status, w)
		}
	}
}

// TestLostGPUOfReceiver: a GPU falls off the bus while chunks are on their way to it. Leases of its
// engine fail with the Xid error as the reason, new ones are refused with it, the node leaves, and
// nothing is written into blocks that the engine has back. An engine on another GPU of the node
// goes on.
func TestLostGPUOfReceiver(t *testing.T) {
	plan := faulttest.New(1, faulttest.Rule{Kind: faulttest.Hold, Only: func(transport.Lane,
		transport.Slice) bool {
		return true
	}})
	tcp := func(c *config.Config) { c.Transports.Order = []string{config.TransTCP} }
	p := startConfig(t, testConfig(t, tcp), func(n *Node) {
		for i, b := range n.backends {
			n.backends[i] = faulttest.Wrap(b, plan)
		}
	})
	host := newGPUHost(t)
	d := startConfig(t, testConfig(t, tcp), host.joins)
	pe, de := newEngine(t, p, testShape), engineNamed(t, d, gpuAt{host, gpuA}, "a")
	pe.random()
	x := begin(t, p, pe, de, 1, tokens)
	until(t, func() bool { return plan.Held() > 0 })
	if v := nodeOf(t, d); v.Leaving || v.Health.State != "fit" || len(v.Problems) > 0 {
		t.Fatalf("before the fault: %+v", v)
	}
	host.events <- health.Event{PCI: gpuA, Xid: 31} // an error of an application
	host.read(health.Reading{PCI: gpuA, Lost: true})
	host.events <- health.Event{PCI: gpuA, Xid: 79}
	de.failed(x.dst, engines.StatusFailed, gpuA, "Xid 79 (GPU has fallen off the bus)")
	cache, _ := de.region.Bytes()
	for i := range cache { // the engine uses its blocks for something else
		cache[i] = 0xa5
	}
	plan.Release()
	until(t, plan.Quiet)
	for i := range cache {
		if cache[i] != 0xa5 {
			t.Fatalf("byte %d was written after the end of its lease", i)
		}
	}
	v := nodeOf(t, d)
	if !v.Leaving || v.Health.State != nodeapi.HealthFailed || len(v.Health.Failed) != 1 ||
		len(v.Health.Faults) != 1 || v.Health.Faults[0].Device != "GPU "+gpuA ||
		v.Health.Faults[0].Kind != "xid" || !slices.ContainsFunc(v.Problems, func(s string) bool {
		return strings.Contains(s, gpuA) && strings.Contains(s, "restart the host")
	}) {
		t.Errorf("%+v", v)
	}
	if n := value(t, d, "kvspray_gpu_fault", "pci", gpuA, "kind", "xid"); n != 1 {
		t.Errorf("kvspray_gpu_fault is %v", n)
	}
	if a, h := value(t, d, "kvspray_gpu_xids_total", "class", "application"),
		value(t, d, "kvspray_gpu_xids_total", "class", "host"); a != 1 || h != 1 {
		t.Errorf("%v Xid errors of applications, %v that need a restart of the host", a, h)
	}
	pr := newPrompt(tokens)
	again, err := de.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens,
		Peer: p.Endpoint(), Skip: []uint32{0}, Blocks: [][]uint32{x.dt}, DeadlineMS: deadlineMS,
		MatchTimeoutMS: matchMS})
	ok(t, err)
	de.failed(again, engines.StatusRefused, "Xid 79")

	other := engineNamed(t, d, gpuAt{host, gpuB}, "b")
	until(t, func() bool { return !nodeOf(t, d).Leaving })
	if v := nodeOf(t, d); len(v.Health.Failed) != 1 || v.Health.State != nodeapi.HealthFailed {
		t.Errorf("with an engine on another GPU: %+v", v)
	}
	y := begin(t, p, pe, other, 2, tokens)
	until(t, func() bool { plan.Release(); _, ended := other.ended(y.dst); return ended })
	other.ok(y.dst)
	same(t, pe, other, y.pt, y.dt, tokens, 0)
}

// ended reports whether a lease has ended.
func (e *engine) ended(lease uint64) (c any, ok bool) {
	e.t.Helper()
	for {
		if c, ok := e.done[lease]; ok {
			return c, true
		}
		c, more, err := e.Poll()
		if err != nil {
			e.t.Fatal(err)
		}
		if !more {
			return nil, false
		}
		e.done[c.Lease] = c
	}
}

// TestLostGPUOfSource: the receiver of a prompt whose GPU has failed does not wait, and its reason
// names the GPU. A prompt that comes after it is refused at once, too. After a restart of the
// engine on a GPU that works again, prompts are sent.
func TestLostGPUOfSource(t *testing.T) {
	tcp := func(c *config.Config) { c.Transports.Order = []string{config.TransTCP} }
	host := newGPUHost(t)
	p := startConfig(t, testConfig(t, tcp), host.joins)
	d := start(t, tcp)
	pe, de := engineNamed(t, p, gpuAt{host, gpuA}, "a"), newEngine(t, d, testShape)
	x := begin(t, p, pe, de, 1, 0, msg.PendingStep{Step: 1, End: tokens})
	bound(t, d)
	host.read(health.Reading{PCI: gpuA, Action: health.ActionReset})
	host.events <- health.Event{PCI: gpuA, Xid: 119}
	pe.failed(x.src, engines.StatusFailed, gpuA, "Xid 119")
	de.failed(x.dst, engines.StatusFailed, "Xid 119")
	y := begin(t, p, pe, de, 2, tokens)
	pe.failed(y.src, engines.StatusRefused, "Xid 119")
	de.failed(y.dst, engines.StatusFailed)
	if v := nodeOf(t, p); !v.Leaving {
		t.Errorf("%+v", v)
	}

	// The GPU is reset, and another engine uses it.
	host.read(health.Reading{PCI: gpuA, Action: health.ActionNone})
	later := time.Now().Add(time.Hour)
	p.devices.look(later, healthDriver{host}.Look())
	pe = engineNamed(t, p, gpuAt{host, gpuA}, "a2")
	pe.random()
	if v := nodeOf(t, p); v.Leaving || len(v.Health.Failed) != 1 || len(v.Health.Faults) != 0 {
		t.Errorf("after the reset: %+v", v)
	}
	z := begin(t, p, pe, de, 3, tokens)
	de.ok(z.dst)
	same(t, pe, de, z.pt, z.dt, tokens, 0)
	pe.ok(z.src)
}

// TestContainedError: the process whose memory had the error must end, whatever the GPU does later;
// the next one may use the GPU.
func TestContainedError(t *testing.T) {
	host := newGPUHost(t)
	n := startConfig(t, testConfig(t, nil), host.joins)
	engineNamed(t, n, gpuAt{host, gpuA}, "a")
	host.events <- health.Event{PCI: gpuA, Xid: 94}
	until(t, func() bool { return nodeOf(t, n).Leaving })
	n.devices.look(time.Now().Add(time.Hour), healthDriver{host}.Look())
	v := nodeOf(t, n)
	if !v.Leaving || len(v.Health.Faults) != 0 {
		t.Errorf("an hour later: %+v", v)
	}
	engineNamed(t, n, gpuAt{host, gpuA}, "b")
	until(t, func() bool { v = nodeOf(t, n); return !v.Leaving })
	if len(v.Health.Failed) != 1 {
		t.Errorf("with a new engine: %+v", v)
	}
}

// TestFaultOfWorkerThatIsGone: a worker that went away while its GPU failed is not kept.
func TestFaultOfWorkerThatIsGone(t *testing.T) {
	n := start(t, nil)
	gone := &engines.Worker{Layout: &layout.Layout{}}
	if n.failWorker(gone, "its GPU has failed") {
		t.Error("a worker without a session is known")
	}
	ctx, end := n.local.Open(gone, 1, time.Hour)
	defer end()
	if ctx.Err() != nil {
		t.Error("its fault is kept, and nothing will end that")
	}
}

// TestThrottledGPU: an engine on a GPU that is slow for long is the second choice of routers, and
// keeps its leases. With the policy report, faults are shown and change nothing.
func TestThrottledGPU(t *testing.T) {
	for _, policy := range []string{config.Leave, config.Report} {
		host := newGPUHost(t)
		n := startConfig(t, testConfig(t, func(c *config.Config) { c.Health.GPUs = policy }), host.joins)
		e := engineNamed(t, n, gpuAt{host, gpuA}, "a")
		host.read(health.Reading{PCI: gpuA, Action: health.ActionNone, Slowdown: health.HardwareThermal})
		for i := range 10 {
			n.devices.look(time.Now().Add(time.Duration(i)*health.LookEvery), healthDriver{host}.Look())
		}
		want := map[string]string{config.Leave: nodeapi.HealthDegraded}[policy]
		v := nodeOf(t, n)
		if v.Leaving || v.Health.State != want || len(v.Health.Faults) != 1 ||
			!strings.Contains(v.Health.Faults[0].Text, "hardware thermal slowdown") {
			t.Errorf("%s: %+v", policy, v)
		}
		if slices.Equal(v.Health.Affected, []string{"test/a"}) != (policy == config.Leave) {
			t.Errorf("%s: affected %q", policy, v.Health.Affected)
		}
		x := begin(t, n, e, e, 1, tokens)
		e.ok(x.dst)
		e.ok(x.src)
		if policy == config.Report {
			host.events <- health.Event{PCI: gpuA, Xid: 79}
			until(t, func() bool { return nodeOf(t, n).Health.Faults[0].Kind == "xid" })
			if v := nodeOf(t, n); v.Leaving || v.Health.State != "" {
				t.Errorf("%s: %+v", policy, v)
			}
		}
	}
}
