package rdmacheck

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/internal/ui/doctor"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// simulated is a host with one rail of a fabric.
func simulated(f *fake.Fabric, rail string) Env {
	return Env{Version: "test", Rails: []Rail{{Name: rail}}, still: f.Still,
		Open: func(rail string, _ verbs.MTU) (verbs.Device, error) { return f.Open(rail) }}
}

var short = Options{Rounds: 2, Span: 20 * time.Millisecond}

// test runs the test of two simulated hosts, with the peer behind a connection.
func test(t *testing.T, f *fake.Fabric, near, far Env, opt Options) *Report {
	t.Helper()
	f.Timers()
	t.Cleanup(f.Serve())
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- Serve(ctx, ln, far, opt.Key) }()
	opt.Peer = ln.Addr().String()
	r, err := Run(t.Context(), near, opt)
	cancel()
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	return r
}

// lineOf is the line of a test.
func lineOf(t *testing.T, r *Report, name string) Line {
	t.Helper()
	for _, p := range r.Pairs {
		for _, l := range p.Lines {
			if l.Name == name {
				return l
			}
		}
	}
	var b bytes.Buffer
	_ = r.WriteText(&b)
	t.Fatalf("no line for %q:\n%s", name, &b)
	return Line{}
}

// mustFail checks a line that names a fault with its remedy.
func mustFail(t *testing.T, r *Report, name, fault, remedy string) {
	t.Helper()
	l := lineOf(t, r, name)
	if l.State != doctor.Fail || !strings.Contains(l.Detail, fault) || !strings.Contains(l.Remedy,
		remedy) || r.Works() {
		t.Errorf("%+v: want a failure with %q and the remedy %q", l, fault, remedy)
	}
}

// A sound fabric passes all tests, in loopback and to a peer, in any order of steps that hardware
// may choose.
func TestSound(t *testing.T) {
	for name, run := range map[string]func(*testing.T) *Report{
		"loopback": func(t *testing.T) *Report {
			f := fake.New()
			f.Timers()
			t.Cleanup(f.Serve())
			r, err := Run(t.Context(), simulated(f, "a"), short)
			if err != nil {
				t.Fatal(err)
			}
			return r
		},
		"peer": func(t *testing.T) *Report {
			f := fake.New()
			f.Shuffle(5)
			return test(t, f, simulated(f, "a"), simulated(f, "b"), short)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := run(t)
			var text, js bytes.Buffer
			if err := errors.Join(r.WriteText(&text), r.WriteJSON(&js)); err != nil {
				t.Fatal(err)
			}
			if !r.Works() || !strings.Contains(text.String(), "RDMA works on 1 of 1 rails") {
				t.Errorf("%s", &text)
			}
			var back Report
			if err := json.Unmarshal(js.Bytes(), &back); err != nil || len(back.Pairs) != 1 ||
				len(back.Pairs[0].Figures.Rates) != 3 {
				t.Errorf("%v: %s", err, &js)
			}
			for _, name := range []string{"host memory", "path", "one queue pair", "two queue pairs",
				"eight queue pairs", "killed queue pair", "revoke", "end of keys", "rate", "losses"} {
				if l := lineOf(t, r, name); l.State != doctor.OK {
					t.Errorf("%+v", l)
				}
			}
		})
	}
}

// Devices that do not work, or are not safe, are named with the remedy.
func TestUnsound(t *testing.T) {
	opt := short
	opt.only = []string{"one queue pair", "revoke"}
	t.Run("no order", func(t *testing.T) {
		f := fake.New()
		f.Unordered("b")
		near := simulated(f, "a")
		near.connected = func(_ string, q verbs.QueuePair) { f.Lag(q.Num()) }
		r := test(t, f, near, simulated(f, "b"), opt)
		mustFail(t, r, "path", "an immediate arrived before the bytes", "transports.order")
	})
	t.Run("a late write", func(t *testing.T) {
		f := fake.New()
		far := simulated(f, "b")
		open := far.Open
		far.Open = func(rail string, mtu verbs.MTU) (verbs.Device, error) {
			d, err := open(rail, mtu)
			return lateDevice{d}, err
		}
		mustFail(t, test(t, f, simulated(f, "a"), far, opt), "revoke", "a write came after",
			"transports.order")
	})
	t.Run("a queue pair that does not flush", func(t *testing.T) {
		f := fake.New()
		far := simulated(f, "b")
		open := far.Open
		far.Open = func(rail string, mtu verbs.MTU) (verbs.Device, error) {
			d, err := open(rail, mtu)
			return stuckDevice{d}, err
		}
		mustFail(t, test(t, f, simulated(f, "a"), far, opt), "revoke", "has not flushed", "firmware")
	})
	t.Run("a dead queue pair", func(t *testing.T) {
		f := fake.New()
		far := simulated(f, "b")
		far.connected = func(_ string, q verbs.QueuePair) { _ = q.ToError() }
		mustFail(t, test(t, f, simulated(f, "a"), far, opt), "path",
			"the queue pair of the peer's b is in the error state", "firmware")
	})
	t.Run("locked memory", func(t *testing.T) {
		f := fake.New()
		f.Lock("a", 1<<20)
		mustFail(t, test(t, f, simulated(f, "a"), simulated(f, "b"), opt), "host memory",
			"the limit of locked memory is 1048576", "ulimit -l unlimited")
	})
	t.Run("no GID", func(t *testing.T) {
		f := fake.New()
		f.SetGID("b", netip.Addr{})
		mustFail(t, test(t, f, simulated(f, "a"), simulated(f, "b"), opt), "device", "has no GID",
			"IP address")
	})
	t.Run("two types of GIDs", func(t *testing.T) {
		f := fake.New()
		f.SetGID("b", netip.MustParseAddr("2001:db8::1"))
		mustFail(t, test(t, f, simulated(f, "a"), simulated(f, "b"), opt), "path", "one is IPv4",
			"pin a GID")
	})
}

// lateDevice reports a flush, and then its memory changes: what a NIC without order between its
// flush and its writes does.
type lateDevice struct{ verbs.Device }

type lateDomain struct {
	verbs.Domain
	last *[]byte // the newest registration
}

type lateQueue struct {
	verbs.QueuePair
	last *[]byte
}

func (d lateDevice) NewDomain() (verbs.Domain, error) {
	p, err := d.Device.NewDomain()
	return lateDomain{p, new([]byte)}, err
}

func (p lateDomain) Register(b []byte, remote bool) (verbs.Memory, error) {
	*p.last = b
	return p.Domain.Register(b, remote)
}

func (p lateDomain) NewQueuePair(cq verbs.CompletionQueue, s, r int) (verbs.QueuePair, error) {
	q, err := p.Domain.NewQueuePair(cq, s, r)
	return lateQueue{q, p.last}, err
}

// Close comes after the canaries were written, and before they are looked at.
func (q lateQueue) Close() error {
	if q.State() == verbs.Error {
		(*q.last)[4711] = 0
	}
	return q.QueuePair.Close()
}

// stuckDevice does not flush.
type stuckDevice struct{ verbs.Device }

type stuckDomain struct{ verbs.Domain }

type stuckQueue struct{ verbs.QueuePair }

func (d stuckDevice) NewDomain() (verbs.Domain, error) {
	p, err := d.Device.NewDomain()
	return stuckDomain{p}, err
}

func (p stuckDomain) NewQueuePair(cq verbs.CompletionQueue, s, r int) (verbs.QueuePair, error) {
	q, err := p.Domain.NewQueuePair(cq, s, r)
	return stuckQueue{q}, err
}

func (stuckQueue) ToError() error { return nil }

// card is a GPU whose memory a NIC reaches, or does not.
type card struct {
	*gputest.Card
	fabric *fake.Fabric // has the dma-bufs; nil: the kernel refuses them
	mapped bool         // memory is at its address in this process, as with peermem
}

type cardPacker struct {
	device.Packer
	c *card
}

func newCard(f *fake.Fabric, mapped bool) *card {
	c, _ := gputest.NewPlatform(1).Open(0)
	return &card{c.(*gputest.Card), f, mapped}
}

func (c *card) open(string) (device.Card, error) { return c, nil }

func (c *card) NewPacker() (device.Packer, error) {
	p, err := c.Card.NewPacker()
	return cardPacker{p, c}, err
}

func (p cardPacker) Alloc(n uint64) (cuda.Ptr, error) {
	if !p.c.mapped {
		return p.Packer.Alloc(n)
	}
	at, err := unix.MmapPtr(-1, 0, nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return 0, err
	}
	m := p.c.Platform.Machine
	m.Mu.Lock()
	defer m.Mu.Unlock()
	m.Mem[cuda.Ptr(uintptr(at))] = unsafe.Slice((*byte)(at), n)
	return cuda.Ptr(uintptr(at)), nil
}

func (c *card) ExportDMABuf(p cuda.Ptr, n uint64) (int, error) {
	fd, err := unix.MemfdCreate("not-a-dma-buf", unix.MFD_CLOEXEC)
	if err == nil && c.fabric != nil {
		c.fabric.DMABuf(fd, c.Platform.Machine.At(p, n))
	}
	return fd, err
}

func (c *card) Attribute(cuda.Attribute) (int, error) { return cuda.FlushByHost, nil }

func (c *card) FlushRDMAWrites() error { return nil }

// Memory of a GPU is written by the NIC and read back by the GPU; a refusal has a remedy, and the
// rail works without it.
func TestGPUMemory(t *testing.T) {
	f := fake.New()
	far := simulated(f, "b")
	far.Card = newCard(f, false).open
	opt := short
	opt.only = []string{"GPU memory"}
	l := lineOf(t, test(t, f, simulated(f, "a"), far, opt), "GPU memory")
	if l.State != doctor.OK || !strings.Contains(l.Detail, "registered by dma-buf") {
		t.Errorf("%+v", l)
	}
	f = fake.New()
	far = simulated(f, "b")
	far.Card = newCard(nil, false).open
	r := test(t, f, simulated(f, "a"), far, opt)
	if l = lineOf(t, r, "GPU memory"); l.State != doctor.Warn || !strings.Contains(l.Remedy,
		"nvidia-peermem") || !r.Works() {
		t.Errorf("%+v", l)
	}
}

// A peer cannot make an end leave its bounds.
func TestHostileRequests(t *testing.T) {
	f := fake.New()
	t.Cleanup(f.Serve())
	l := newLocal(t.Context(), simulated(f, "a"))
	defer func() {
		if err := l.close(); err != nil {
			t.Error(err)
		}
	}()
	must := func(q request) *answer {
		t.Helper()
		a, err := l.call(t.Context(), &q)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	if _, err := l.call(t.Context(), &request{Op: opQueue}); err == nil {
		t.Error("a queue pair without a device")
	}
	if _, err := newLocal(t.Context(), Env{}).call(t.Context(), &request{Op: opOpen,
		Rail: "a"}); !errors.Is(err, errRequest) {
		t.Errorf("a rail of a host without devices: %v", err)
	}
	must(request{Op: opOpen, Rail: "a"})
	b := must(request{Op: opRegister, Bytes: 4096}).ID
	q := must(request{Op: opQueue}).ID
	for name, bad := range map[string]request{
		"a huge buffer":      {Op: opRegister, Bytes: maxBytes + 1},
		"no bytes":           {Op: opRegister},
		"beyond the buffer":  {Op: opFill, Buffer: b, Off: 4000, Bytes: 97},
		"another buffer":     {Op: opCheck, Buffer: b + 7, Bytes: 1},
		"another queue pair": {Op: opWrite, Queues: []int{q + 7}, Buffer: b, Bytes: 1, Count: 1},
		"no queue pair":      {Op: opExpect, Buffer: b, Bytes: 1, Count: 1},
		"too many messages": {Op: opWrite, Queues: []int{q}, Buffer: b, Bytes: 1,
			Count: maxMessages + 1},
		"messages beyond it": {Op: opWrite, Queues: []int{q}, Buffer: b, Bytes: 1024, Count: 5},
		"no messages":        {Op: opStream, Queues: []int{q}, Buffer: b, Bytes: 1024},
		"fewer than none":    {Op: opExpect, Queues: []int{q}, Buffer: b, Bytes: 1, Count: -1},
		"a long wait": {Op: opExpect, Queues: []int{q}, Buffer: b, Bytes: 1, Count: 1,
			Wait: maxWait + 1},
		"no address":           {Op: opConnect, Queues: []int{q}},
		"an MTU that is none":  {Op: opOpen, Rail: "a", MTU: 99},
		"halt of no stream":    {Op: opHalt},
		"progress of none":     {Op: opProgress},
		"an unknown operation": {Op: "format", Queues: []int{q}, Buffer: b, Bytes: 1, Count: 1},
	} {
		if _, err := l.call(t.Context(), &bad); !errors.Is(err, errRequest) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for range maxQueues - 1 {
		must(request{Op: opQueue})
	}
	if _, err := l.call(t.Context(), &request{Op: opQueue}); !errors.Is(err, errRequest) {
		t.Errorf("one queue pair too many: %v", err)
	}
}

// brokenCard has no room for a packer.
type brokenCard struct{ *card }

func (brokenCard) NewPacker() (device.Packer, error) { return nil, errors.New("no memory") }

// However often a peer asks, an end has one buffer of GPU memory, of the GPU next to the open rail,
// and keeps nothing of it when a rail is opened.
func TestHostileGPURequests(t *testing.T) {
	f := fake.New()
	t.Cleanup(f.Serve())
	var cards []string
	env := simulated(f, "a")
	env.Card = func(rail string) (device.Card, error) {
		if cards = append(cards, rail); len(cards) == 1 {
			return brokenCard{newCard(f, false)}, nil
		}
		return newCard(f, false), nil
	}
	l := newLocal(t.Context(), env)
	defer func() {
		if err := l.close(); err != nil {
			t.Error(err)
		}
	}()
	ask := func(q request) error {
		_, err := l.call(t.Context(), &q)
		return err
	}
	gpu := request{Op: opRegister, Bytes: 4096, GPU: true}
	for i, rail := range []string{"a", "b", "a"} {
		if err := ask(request{Op: opOpen, Rail: rail}); err != nil {
			t.Fatal(err)
		}
		if l.card != nil || l.packer != nil {
			t.Error("the GPU of the rail before is open")
		}
		if err := ask(gpu); (err != nil) != (i == 0) {
			t.Errorf("rail %d: %v", i, err)
		}
		if err := ask(gpu); !errors.Is(err, errRequest) {
			t.Errorf("rail %d, again: %v", i, err)
		}
	}
	if want := []string{"a", "b", "a"}; !slices.Equal(cards, want) {
		t.Errorf("GPUs of rails %v, want %v", cards, want)
	}
}
