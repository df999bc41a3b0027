package connector_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
)

func refused(t *testing.T, err error, code, field, text string) {
	t.Helper()
	var se *connectortest.ServerError
	if !errors.As(err, &se) || se.Code != code || se.Field != field || !strings.Contains(se.Message,
		text) || se.Remedy == "" || se.Fatal {
		t.Fatalf("got %v, want %s for %s with %q", err, code, field, text)
	}
}

// processView is a region of this process's own memory at b.
func processView(t *testing.T, b []byte) *mem.Region {
	t.Helper()
	self, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	// owns the descriptor
	r, err := mem.OpenProcess(mem.NewID(), self, addressOf(b), uint64(len(b)))
	must(t, err)
	t.Cleanup(r.Release)
	return r
}

// again is the same memory under another id.
func again(t *testing.T, r *mem.Region) func(*msg.Register, []int) []int {
	t.Helper()
	return func(m *msg.Register, fds []int) []int { m.Regions[0].Region = mem.NewID(); return fds }
}

// Memory that one engine worker has registered is refused to another, whatever it calls it and
// however it shows it, and both serve on.
func TestMemoryOfAnotherSession(t *testing.T) {
	r := start(t, nil)
	kv := region(t, shape)
	b, _ := kv.Bytes()
	first := r.worker(t, func(c *connectortest.Config) { c.Regions = []*mem.Region{kv} })
	for name, c := range map[string]struct {
		region *mem.Region
		field  string
	}{"memfd": {kv, "regions[0].fd"}, "view": {processView(t, b), "regions[0]"}} {
		t.Run(name, func(t *testing.T) {
			w, err := connectortest.NewWorker(r.config(t, func(cfg *connectortest.Config) {
				cfg.Regions, cfg.Tamper = []*mem.Region{c.region}, again(t, c.region)
			}))
			must(t, err)
			defer w.Close()
			_, err = w.Connect(testContext(t))
			refused(t, err, msg.CodeRegion, c.field, "the same memory as regions[0].fd of engine worker")
		})
	}
	_, err := first.Intent(intent(16, 1))
	must(t, err)
	r.rec.until(t, "the first one's intent", func() bool { return len(r.rec.intents) == 1 })
	r.worker(t, nil) // memory of its own
}

type fakeGPU struct{ mem.Device }

// Import takes the first bytes of a handle for an address, like a driver that has opened the handle
// before.
func (g *fakeGPU) Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error) {
	return mem.NewDevice(id, mem.DeviceMemory{Device: g, Addr: binary.LittleEndian.Uint64(handle),
		Size: size, Handle: handle, FD: fd})
}

func (g *fakeGPU) Forget([]*mem.Region) {}

// Memory of a GPU is one worker's, too.
func TestDeviceMemoryOfAnotherSession(t *testing.T) {
	r := start(t, func(o *connector.Options) { o.Devices = &fakeGPU{} })
	connect := func(addr uint64) error {
		w, err := connectortest.NewWorker(r.config(t, func(c *connectortest.Config) {
			c.Tamper = func(m *msg.Register, fds []int) []int {
				d := &m.Regions[0]
				d.Kind, d.FD, d.Handle = msg.KindDevice, msg.NoFD, binary.LittleEndian.AppendUint64(nil, addr)
				return fds
			}
		}))
		must(t, err)
		t.Cleanup(func() { _ = w.Close() })
		_, err = w.Connect(testContext(t))
		return err
	}
	must(t, connect(1<<20))
	refused(t, connect(1<<20+4096), msg.CodeRegion, "regions[0]", "the same memory as regions[0] of "+
		"engine worker")
	must(t, connect(1<<30))
}

// A view and the memfd behind it are one memory also within one registration, in either order.
func TestViewOfOwnMemory(t *testing.T) {
	r := start(t, nil)
	kv := region(t, shape)
	b, _ := kv.Bytes()
	view := processView(t, b)
	for name, c := range map[string]struct {
		regions []*mem.Region
		field   string
	}{"memfd first": {[]*mem.Region{kv, view}, "regions[1]"}, "view first": {[]*mem.Region{view, kv},
		"regions[1].fd"}} {
		t.Run(name, func(t *testing.T) {
			w, err := connectortest.NewWorker(r.config(t,
				func(cfg *connectortest.Config) { cfg.Regions = c.regions }))
			must(t, err)
			defer w.Close()
			_, err = w.Connect(testContext(t))
			refused(t, err, msg.CodeRegion, c.field, "regions[0]")
		})
	}
}

// An engine that closes its client and makes another has its memory again, but not before what was
// open on it is fenced.
func TestMemoryComesBackAfterTheFence(t *testing.T) {
	r := start(t, nil)
	r.rec.fenceAtOnce(false)
	kv := region(t, shape)
	mine := func(c *connectortest.Config) { c.Regions, c.Tamper = []*mem.Region{kv}, again(t, kv) }
	w := r.worker(t, mine)
	_, err := w.Intent(intent(16, 1))
	must(t, err)
	r.rec.until(t, "intent", func() bool { return len(r.rec.intents) == 1 })
	next, err := connectortest.NewWorker(r.config(t, mine))
	must(t, err)
	t.Cleanup(func() { _ = next.Close() })
	_, err = next.Connect(testContext(t))
	refused(t, err, msg.CodeRegion, "regions[0].fd", "which is registered") // its session lives
	must(t, w.Bye("the engine closes its client"))
	must(t, w.Close())
	// The end of the old socket is noticed a little later.
	var se *connectortest.ServerError
	for ctx := testContext(t); ; {
		if _, err = next.Connect(ctx); !errors.As(err, &se) {
			t.Fatalf("registered before the fence, or no answer: %v", err)
		}
		if se.Code == msg.CodeFencing {
			break
		}
	}
	if gone := r.rec.retired(); !errors.Is(gone[0], connector.ErrSuperseded) {
		t.Fatalf("gone: %v", gone)
	}
	_, err = next.Connect(testContext(t))
	refused(t, err, msg.CodeFencing, "regions[0].fd", "is being fenced")
	r.rec.seen().fenced[0]()
	_, err = next.Connect(testContext(t))
	must(t, err)
}

// A block is written by one open lease at one place. Leases may share blocks that they skip, that
// their window has left behind, or that they only read.
func TestBlocksHaveOneWriter(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, nil)
	expect := func(tokens, skip uint32, blocks ...uint32) uint64 {
		t.Helper()
		x, h := key()
		id, err := w.Expect(msg.Expect{Xfer: x, Hash: h, Peer: "p:1", Tokens: tokens,
			Skip: []uint32{skip}, Blocks: [][]uint32{blocks}})
		must(t, err)
		return id
	}
	var accepted []engines.Expect
	accept := func(id uint64) {
		t.Helper()
		n := len(accepted) + 1
		r.rec.until(t, "an expectation", func() bool {
			accepted = append(accepted[:0:0], r.rec.expects...)
			return len(accepted) == n
		})
		if got := accepted[n-1].Lease.ID; got != id {
			t.Fatalf("lease %d is open, want %d", got, id)
		}
	}
	refuse := func(id uint64, texts ...string) {
		t.Helper()
		refusedLease(t, w, id, texts...)
	}
	refuse(expect(48, 0, 7, 8, 7), "EXPECT.blocks[0][2]", "block 7 is also at index 0",
		"allocate a separate block")
	a := expect(48, 16, 1, 2, 3) // reads 1, writes 2 and 3
	accept(a)
	refuse(expect(32, 0, 5, 3), "EXPECT.blocks[0][1]", "block 3 is written for lease",
		"wait for its completion")
	// the shared prefix is skipped by both, and the refused lease has left nothing behind
	accept(expect(32, 16, 1, 5))
	accept(expect(64, 48, 1, 1, 1, 9)) // a place holder at what is skipped
	accept(expect(32, 32, 2, 3))       // all of it is there: nothing is written
	accept(expect(16, 0, 10, 10, 10))  // what is allocated beyond the prompt is not written
	_, err := w.Intent(intent(48, 2, 2, 3))
	must(t, err) // sources share
	r.rec.until(t, "the intent", func() bool { return len(r.rec.intents) == 1 })
	must(t, r.Complete(r.lastUp(t), engines.Completion{Lease: accepted[0].Lease, Received: true}))
	if c, err := w.Wait(testContext(t)); err != nil || c.Lease != a {
		t.Fatalf("%+v %v", c, err)
	}
	accept(expect(32, 0, 2, 3)) // they are the engine's again
}

// The groups of a hybrid model lie on the same pages: a block is written for one of them at a time,
// whichever table names it.
func TestGroupsOnTheSamePagesHaveOneWriter(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, func(c *connectortest.Config) {
		lay := shape.Layout()
		lay.Groups = []layout.Group{lay.Groups[0], shape.Layout().Groups[0], lay.Groups[0]}
		// the first two over one another, the third beside them
		for gi, from := range []int{0, 0, 2} {
			g := &lay.Groups[gi]
			g.Layers = slices.Clone(g.Layers[from : from+2])
			for i := range g.Layers {
				g.Layers[i].Index = i
				g.Layers[i].Name = fmt.Sprintf("layers.%d", 3*i+gi)
			}
		}
		c.Layout = lay
	})
	expect := func(a, b, c uint32) uint64 {
		t.Helper()
		x, h := key()
		id, err := w.Expect(msg.Expect{Xfer: x, Hash: h, Peer: "p:1", Tokens: 16, Skip: []uint32{0, 0, 0},
			Blocks: [][]uint32{{a}, {b}, {c}}})
		must(t, err)
		return id
	}
	refuse := func(id uint64, texts ...string) {
		t.Helper()
		refusedLease(t, w, id, texts...)
	}
	refuse(expect(4, 4, 9), "EXPECT.blocks[1][0]", "block 4 is also written for table 0",
		"from one pool")
	a := expect(1, 2, 1) // block 1 of the third group is other memory than block 1 of the first
	r.rec.until(t, "the expectation", func() bool {
		return len(r.rec.expects) == 1 &&
			r.rec.expects[0].Lease.ID == a
	})
	refuse(expect(2, 3, 3), "EXPECT.blocks[0][0]", "block 2 is written for lease")
	refuse(expect(3, 1, 3), "EXPECT.blocks[1][0]", "block 1 is written for lease")
	refuse(expect(3, 4, 1), "EXPECT.blocks[2][0]", "block 1 is written for lease")
	b := expect(3, 4, 2)
	r.rec.until(t, "the next", func() bool {
		return len(r.rec.expects) == 2 &&
			r.rec.expects[1].Lease.ID == b
	})
}

// refusedLease waits for the refusal of a lease, whose reason has all of texts.
func refusedLease(t *testing.T, w *connectortest.Worker, id uint64, texts ...string) {
	t.Helper()
	c, err := w.Wait(testContext(t))
	must(t, err)
	if c.Lease != id || c.Status != board.Refused {
		t.Fatalf("%+v", c)
	}
	for _, s := range texts {
		if !strings.Contains(c.Received.Reason, s) {
			t.Errorf("reason %q, want %q in it", c.Received.Reason, s)
		}
	}
}
