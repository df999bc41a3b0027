package sidecar

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// copyEngine is an engine with a host cache: region 0 is its cache, on a device where there is one,
// region 1 is host memory.
type copyEngine struct {
	*engine
	cache, host []byte
}

const hostBytes = 3 << 20

func newCopyEngine(t *testing.T, r *running, gpu *heldGPU) *copyEngine {
	t.Helper()
	regs := make([]*mem.Region, 2)
	var err error
	if regs[0], err = testShape.Region(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(regs[0].Release)
	if regs[1], err = mem.NewAnonymous("host", hostBytes); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(regs[1].Release)
	e := &copyEngine{}
	e.cache, _ = regs[0].Bytes()
	e.host, _ = regs[1].Bytes()
	for _, b := range [][]byte{e.cache, e.host} {
		_, _ = rand.Read(b)
	}
	cfg := connectortest.Config{Socket: r.cfg.Engine.Socket, Layout: testShape.Layout(), Regions: regs,
		Engine: msg.Engine{Name: "test", Version: "1", ID: "copies"}}
	if gpu != nil {
		lent, err := gpu.Region(e.cache)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(lent.Release)
		cfg.Tamper = func(m *msg.Register, fds []int) []int {
			m.Regions[0].Kind, m.Regions[0].Handle, m.Regions[0].FD = msg.KindDevice, lent.Handle(), msg.NoFD
			m.Regions[1].FD--
			return append(fds[:len(fds)-2], fds[len(fds)-1])
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	w, err := connectortest.DialWorker(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() })
	e.engine = &engine{Worker: w, t: t, shape: testShape, region: regs[0],
		done: map[uint64]connectortest.Completion{}}
	return e
}

func (e *copyEngine) copy(m msg.Copy) uint64 {
	e.t.Helper()
	id, err := e.Copy(m)
	if err != nil {
		e.t.Fatal(err)
	}
	return id
}

// heldGPU is a GPU whose copies wait until the test lets them go.
type heldGPU struct {
	*transporttest.Device
	entered chan struct{} // one token for each copy that has begun
	gate    chan struct{} // closed: copies run
}

func holdGPU(t *testing.T, r *running) *heldGPU {
	g := &heldGPU{Device: transporttest.NewDevice(t), entered: make(chan struct{}, 16),
		gate: make(chan struct{})}
	r.gpus.mu.Lock()
	r.gpus.opened = g
	r.gpus.mu.Unlock()
	return g
}

func (g *heldGPU) Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error) {
	r, err := g.Device.Import(id, handle, fd, size)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	return mem.NewDevice(id, mem.DeviceMemory{Device: g, Addr: r.Base(), Size: size,
		Handle: handle, FD: -1})
}

func (g *heldGPU) Move(dst, src []mem.Block) error {
	g.entered <- struct{}{}
	<-g.gate
	return g.Device.Move(dst, src)
}

// enter waits until n copies have begun.
func (g *heldGPU) enter(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		select {
		case <-g.entered:
		case <-time.After(patience):
			t.Fatalf("%d of %d copies have begun", i, n)
		}
	}
}

func (*heldGPU) Close() error { return nil }

// oneByOne is a list that takes two pieces: byte i to byte 2*i.
func oneByOne() (all []msg.CopyBlock) {
	for i := range uint64(pieceBlocks + 1) {
		all = append(all, msg.CopyBlock{SrcOff: i, DstOff: 2 * i, Len: 1})
	}
	return all
}

// TestCopies: host to host without a GPU, with a device's memory at either end; what was asked
// arrives, once, and nothing beside it changes; the outcome is counted and leaves its line.
func TestCopies(t *testing.T) {
	for _, where := range []string{pathHost, gpu.PathStaged} {
		t.Run(where, func(t *testing.T) {
			r := start(t, nil)
			var gpu *heldGPU
			if where != pathHost {
				gpu = holdGPU(t, r)
				close(gpu.gate)
			}
			e := newCopyEngine(t, r, gpu)
			want := bytes.Clone(e.host)
			blocks := []msg.CopyBlock{{SrcOff: 4096, DstOff: 100, Len: 1 << 20}, {SrcOff: 7, DstOff: 0,
				Len: 3}, {SrcOff: 1 << 21, DstOff: 2 << 20, Len: 1 << 20}}
			var sum uint64
			for _, b := range blocks {
				copy(want[b.DstOff:], e.cache[b.SrcOff:][:b.Len])
				sum += b.Len
			}
			c := e.ok(e.copy(msg.Copy{Src: 0, Dst: 1, Blocks: blocks, Req: "out"}))
			if c.Received.Bytes != sum || c.Received.Transport != where {
				t.Errorf("completion %+v, want %d bytes by %s", c.Received, sum, where)
			}
			if !bytes.Equal(e.host, want) {
				t.Fatal("content differs, or something beside it does")
			}
			// And back, in as many pieces as it takes.
			clear(e.host)
			for i := range e.host {
				e.host[i] = byte(i * 7)
			}
			want = bytes.Clone(e.cache)
			for _, b := range oneByOne() {
				want[b.DstOff] = e.host[b.SrcOff]
			}
			if c := e.ok(e.copy(msg.Copy{Src: 1, Dst: 0, Blocks: oneByOne()})); c.Received.Bytes !=
				pieceBlocks+1 {
				t.Errorf("completion %+v", c.Received)
			}
			if !bytes.Equal(e.cache, want) {
				t.Fatal("content differs on the way back")
			}
			// The engine waits for nothing of what follows.
			until(t, func() bool { open, _, _ := r.local.Count(); return open == 0 })
			_, text := get(t, r, "/metrics")
			for _, line := range []string{`kvspray_copies_total{method="` + where + `",outcome="ok"} 2`,
				`kvspray_engine_records_total{type="copy"} 2`} {
				if !strings.Contains(text, line) {
					t.Errorf("no metric %s", line)
				}
			}
			raw, err := os.ReadFile(r.cfg.Trace.Transfers)
			if err != nil {
				t.Fatal(err)
			}
			var line trace.Copy
			for _, text := range bytes.Split(raw, []byte("\n")) { // either copy may be traced first
				if line.Req == "out" {
					break
				}
				_ = json.Unmarshal(text, &line)
			}
			if line.Side != "copy" || line.Outcome != "ok" || line.Req != "out" || line.Bytes != sum ||
				line.Blocks != 3 || line.Route != where {
				t.Errorf("trace line %+v", line)
			}
		})
	}
}

// TestCopyCanceled: a canceled copy ends only after its pieces in flight, and the other pieces are
// left out.
func TestCopyCanceled(t *testing.T) {
	r := start(t, nil)
	gpu := holdGPU(t, r)
	e := newCopyEngine(t, r, gpu)
	id := e.copy(msg.Copy{Src: 1, Dst: 0, Blocks: oneByOne()})
	<-gpu.entered
	if err := e.Cancel(id, "the request is gone", false); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { _, canceled, _ := r.local.Count(); return canceled == 1 })
	if c, ok, err := e.Poll(); ok || err != nil {
		t.Fatalf("completed with a piece in flight: %+v, %v", c, err)
	}
	before := e.cache[2*pieceBlocks]
	e.host[pieceBlocks] = before + 1
	close(gpu.gate)
	c := e.wait(id)
	if c.Status != board.Cancelled || c.Received.Bytes != pieceBlocks ||
		!strings.Contains(c.Received.Reason, "the request is gone") {
		t.Errorf("completion %+v %+v", c, c.Received)
	}
	if e.cache[2*pieceBlocks] != before {
		t.Error("the second piece was written")
	}
}

// loadOf is a load from host memory into the cache: parts of n pages each.
func loadOf(parts, n int, bytes uint64) msg.Load {
	m := msg.Load{Req: "in"}
	for i := range parts {
		m.Parts = append(m.Parts, msg.LoadPart{Src: 1, SrcBase: uint64(i) * bytes,
			SrcStride: uint64(parts) * bytes, DstBase: uint64(i*n) * bytes, DstStride: bytes, Len: bytes})
	}
	for i := range n {
		m.Pages = append(m.Pages, msg.LoadPage{Src: uint32(i), Dst: uint32(n - 1 - i)})
	}
	return m
}

func (e *copyEngine) load(m msg.Load) uint64 {
	e.t.Helper()
	id, err := e.Load(m)
	if err != nil {
		e.t.Fatal(err)
	}
	return id
}

// TestLoads: every page is where it belongs, and the flag counts the parts.
func TestLoads(t *testing.T) {
	for _, where := range []string{pathHost, gpu.PathStaged} {
		t.Run(where, func(t *testing.T) {
			r := start(t, nil)
			var gpu *heldGPU
			if where != pathHost {
				gpu = holdGPU(t, r)
				close(gpu.gate)
			}
			e := newCopyEngine(t, r, gpu)
			value := uint64(0)
			for _, x := range []struct {
				parts, pages int
				bytes        uint64
			}{{1, 1, 1}, {3, 5, 4096}, {2, 2, loadPiece / 4}, {64, 2, 1000}, {1, 3, loadPiece / 2},
				{2, pieceBlocks + 1, 1}} {
				_, _ = rand.Read(e.host)
				want := bytes.Clone(e.cache)
				m := loadOf(x.parts, x.pages, x.bytes)
				for _, p := range m.Parts {
					for _, page := range m.Pages {
						copy(want[p.DstBase+uint64(page.Dst)*p.DstStride:][:p.Len],
							e.host[p.SrcBase+uint64(page.Src)*p.SrcStride:])
					}
				}
				m.Value = value
				c := e.ok(e.load(m))
				value += uint64(x.parts)
				if got := e.Flags().Load(0); got != value {
					t.Errorf("%+v: the flag is %d, want %d", x, got, value)
				}
				if !bytes.Equal(e.cache, want) || c.Received.Bytes != uint64(x.parts*x.pages)*x.bytes ||
					c.Received.Transport != where {
					t.Fatalf("%+v: content differs, or something beside it does: %+v", x, c.Received)
				}
			}
			until(t, func() bool {
				r.copies.turns.mu.Lock()
				defer r.copies.turns.mu.Unlock()
				return len(r.copies.turns.of) == 0
			})
		})
	}
}

// TestLoadCanceled: the flag counts what has arrived, and nothing arrives after the end.
func TestLoadCanceled(t *testing.T) {
	r := start(t, nil)
	gpu := holdGPU(t, r)
	e := newCopyEngine(t, r, gpu)
	const piece = 2 // parts
	m := loadOf(8, 1, loadPiece/piece)
	for i := range m.Parts {
		m.Parts[i].SrcBase = 0
	}
	want := bytes.Clone(e.cache)
	for i := range loadLanes {
		copy(want[i*loadPiece:], e.host[:loadPiece/piece])
		copy(want[i*loadPiece+loadPiece/piece:], e.host[:loadPiece/piece])
	}
	id := e.load(m)
	gpu.enter(t, loadLanes)
	if err := e.Cancel(id, "stalled", false); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { _, canceled, _ := r.local.Count(); return canceled == 1 })
	if c, ok, err := e.Poll(); ok || err != nil {
		t.Fatalf("completed with pieces in flight: %+v, %v", c, err)
	}
	if got := e.Flags().Load(0); got != 0 {
		t.Errorf("the flag is %d with nothing there", got)
	}
	close(gpu.gate)
	c := e.wait(id)
	if got := e.Flags().Load(0); c.Status != board.Cancelled || got != piece*loadLanes ||
		c.Received.Bytes != loadLanes*loadPiece {
		t.Errorf("completion %+v %+v, flag %d", c, c.Received, got)
	}
	if !bytes.Equal(e.cache, want) {
		t.Error("another piece was written")
	}
}

// TestLoadOfHalfAPart: a part of two pieces does not count with its first one.
func TestLoadOfHalfAPart(t *testing.T) {
	r := start(t, nil)
	gpu := holdGPU(t, r)
	e := newCopyEngine(t, r, gpu)
	id := e.load(loadOf(2, pieceBlocks+1, 1))
	gpu.enter(t, loadLanes)
	gpu.gate <- struct{}{}
	gpu.enter(t, 1) // the piece after the one that has ended
	if got := e.Flags().Load(0); got != 0 {
		t.Errorf("the flag is %d with half a part", got)
	}
	close(gpu.gate)
	e.ok(id)
	if got := e.Flags().Load(0); got != 2 {
		t.Errorf("the flag is %d, want 2", got)
	}
}

// TestLoadsTakeTurns: a worker's loads run one at a time, and others' meanwhile.
func TestLoadsTakeTurns(t *testing.T) {
	r := start(t, nil)
	gpu := holdGPU(t, r)
	e := newCopyEngine(t, r, gpu)
	first, second := loadOf(1, 1, 4096), loadOf(1, 1, 4096)
	second.Value = 1
	ids := []uint64{e.load(first)}
	gpu.enter(t, 1)
	ids = append(ids, e.load(second))
	until(t, func() bool {
		r.copies.turns.mu.Lock()
		defer r.copies.turns.mu.Unlock()
		for _, turn := range r.copies.turns.of {
			return turn.users == 2
		}
		return false
	})
	other := newCopyEngine(t, r, gpu)
	id := other.load(loadOf(1, 1, 4096))
	gpu.enter(t, 1)
	if n := len(gpu.entered); n != 0 {
		t.Errorf("%d more copies run", n)
	}
	close(gpu.gate)
	other.ok(id)
	for _, id := range ids {
		e.ok(id)
	}
	if got := e.Flags().Load(0); got != 2 {
		t.Errorf("the flag is %d, want 2", got)
	}
}

// TestLoadOfTwoDevices: one call copies from one device to one.
func TestLoadOfTwoDevices(t *testing.T) {
	r := start(t, nil)
	e := newCopyEngine(t, r, holdGPU(t, r))
	m := loadOf(2, 1, 8)
	m.Parts[1].Src, m.Parts[1].Dst = 0, 1
	c := e.wait(e.load(m))
	if c.Status != board.Refused || !strings.HasPrefix(c.Received.Reason,
		"LOAD.parts[1]: is on another device") {
		t.Errorf("completion %+v %+v", c, c.Received)
	}
}

// TestLoadInOrder: a part does not count before those in front of it.
func TestLoadInOrder(t *testing.T) {
	var got []int
	r := copyRun{bytesByPath: map[string]uint64{},
		arrived: func(parts int) { got = append(got, parts) }}
	for _, i := range []int{1, 2, 0, 4, 3} {
		r.end(i, &piece{parts: 10 * (i + 1)}, pathHost, nil)
	}
	r.end(6, &piece{parts: 70}, pathHost, nil)
	r.end(5, &piece{parts: 60}, pathHost, errStops)
	if want := []int{30, 50}; !slices.Equal(got, want) || !errors.Is(r.err, errStops) {
		t.Errorf("arrived %v, want %v; %v", got, want, r.err)
	}
}

// TestCopyExpires: a copy that waits for its turn past its deadline moves nothing.
func TestCopyExpires(t *testing.T) {
	r := start(t, nil)
	e := newCopyEngine(t, r, nil)
	for range maxCopiesRunning {
		r.copies.slots <- struct{}{}
	}
	want := bytes.Clone(e.host)
	c := e.wait(e.copy(msg.Copy{Src: 0, Dst: 1, Blocks: oneByOne(), DeadlineMS: 20}))
	if c.Status != board.Expired || c.Received.Bytes != 0 || c.Received.Reason == "" ||
		!bytes.Equal(e.host, want) {
		t.Errorf("completion %+v %+v", c, c.Received)
	}
	for range maxCopiesRunning {
		<-r.copies.slots
	}
	e.ok(e.copy(msg.Copy{Src: 0, Dst: 1, Blocks: oneByOne()}))
}

// TestCopyOfAWorkerThatGoes: while a piece is in flight, the worker's memory is not released, and
// its successor gets the answer "fencing". Pieces that were not begun never are.
func TestCopyOfAWorkerThatGoes(t *testing.T) {
	r := start(t, nil)
	gpu := holdGPU(t, r)
	e := newCopyEngine(t, r, gpu)
	e.copy(msg.Copy{Src: 1, Dst: 0, Blocks: oneByOne()})
	<-gpu.entered
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	again := make(chan error, 1)
	go func() {
		for {
			_, err := e.Connect(ctx)
			var se *connectortest.ServerError
			if errors.As(err, &se) && se.Code == msg.CodeFencing {
				continue // a shim sends HELLO again
			}
			again <- err
			return
		}
	}()
	// The executor has fenced its leases; the copy alone is waited for.
	until(t, func() bool { _, _, waiting := r.local.Count(); return waiting == 1 })
	select {
	case err := <-again:
		t.Fatalf("a new session while the old one's copy writes: %v", err)
	default:
	}
	before := e.cache[2*pieceBlocks]
	e.host[pieceBlocks] = before + 1
	close(gpu.gate)
	if err := <-again; err != nil {
		t.Fatal(err)
	}
	if e.cache[2*pieceBlocks] != before {
		t.Error("the second piece was written for a worker that is gone")
	}
	e.ok(e.copy(msg.Copy{Src: 1, Dst: 0, Blocks: oneByOne()}))
}

// TestCopyMeetsTheEnd: a sidecar that stops waits for copies as long as for transfers, and ends
// those that are left.
func TestCopyMeetsTheEnd(t *testing.T) {
	r := start(t, func(c *config.Config) { c.Drain.Timeout = config.Duration(50 * time.Millisecond) })
	e := newCopyEngine(t, r, nil)
	for range maxCopiesRunning {
		r.copies.slots <- struct{}{}
	}
	id := e.copy(msg.Copy{Src: 0, Dst: 1, Blocks: oneByOne()})
	until(t, func() bool { return r.engine.Leases() == 1 })
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	c := e.wait(id)
	if c.Status != board.Failed || c.Received.Bytes != 0 || c.Received.Reason != errStops.Error() {
		t.Errorf("completion %+v %+v", c, c.Received)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}
