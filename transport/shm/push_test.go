package shm

import (
	"encoding/binary"
	"fmt"
	"sync"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// requests counts the pulls and pushes that a lane has sent, and the regions that it passed on for
// them.
func requests(l transport.Lane) (n uint64, regions int) {
	s := l.(*lane)
	s.src.mu.Lock()
	defer s.src.mu.Unlock()
	return s.src.seq, len(s.src.regions)
}

// Few bytes are pushed, more are pulled. A region without pulls is not passed on.
func TestFewBytesArePushed(t *testing.T) {
	for _, c := range []struct {
		bytes, block uint64
		pull         bool
	}{
		{4 << 10, 4 << 10, false}, {1, 1, false}, {pushBytes, 512, false},
		{pushBytes + 512, 512, true}, {1 << 20, 4 << 10, true},
	} {
		t.Run(fmt.Sprintf("%d bytes", c.bytes), func(t *testing.T) {
			p := newPair(t, Config{})
			from, to := newMemory(t, c.bytes, c.block, 1), newMemory(t, c.bytes, c.block, 2)
			from.fill(3)
			o, _ := p.bind(t, 1, from, to)
			p.move(t, o, from.space, 16, p.lane)
			if !to.bitmap.Full() || !equal(from, to) {
				t.Fatalf("full %v, equal %v", to.bitmap.Full(), equal(from, to))
			}
			if _, n := requests(p.lane); (n > 0) != c.pull {
				t.Errorf("%d regions were passed on; pulled: want %v", n, c.pull)
			}
		})
	}
}

// A push whose lane ends before its answer is in doubt: the peer may have landed it.
func TestPushInDoubt(t *testing.T) {
	p := newPair(t, Config{})
	const n = 4 << 10
	from, to := newMemory(t, n, n, 1), newMemory(t, n, n, 2)
	held := &holding{memory: to, reached: make(chan struct{}), free: make(chan struct{})}
	o, g := p.bind(t, 1, from, to)
	p.dst.mu.Lock()
	g.Landed = held.Landed
	p.dst.mu.Unlock()
	if err := p.lane.Move([]transport.Slice{{Origin: o, Range: from.space.All(), Attempt: 1}}); err !=
		nil {
		t.Fatal(err)
	}
	<-held.reached
	if err := p.lane.Close(); err != nil {
		t.Fatal(err)
	}
	if r := p.src.result(t); r.Outcome != transfer.InDoubt {
		t.Errorf("ended %s (%s): %v", r.Outcome, r.Reason, r.Err)
	}
	close(held.free)
}

// holding keeps the reader that lands.
type holding struct {
	*memory
	reached, free chan struct{}
}

func (h *holding) Landed(l transport.Lane, r transfer.Range, fresh uint32) {
	close(h.reached)
	<-h.free
	h.memory.Landed(l, r, fresh)
}

// uploads is a device that keeps what is scattered to it.
type uploads struct {
	instant
	mu   sync.Mutex
	held map[uint64]byte // by address
}

func (d *uploads) Scatter(blocks []mem.Block, src []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, b := range blocks {
		for i := range b.Len {
			d.held[b.Region.Base()+b.Off+i] = src[i]
		}
		src = src[b.Len:]
	}
	return nil
}

func (d *uploads) Import(id mem.ID, handle []byte, _ int, size uint64) (*mem.Region, error) {
	return mem.NewDevice(id, mem.DeviceMemory{Device: d, Addr: 1 << 20, Size: size,
		Handle: handle, FD: -1})
}

// A push into memory of a GPU outlives its packet: the reader goes on while a mover uploads.
func TestPushToDevice(t *testing.T) {
	d := &uploads{held: map[uint64]byte{}}
	p := newPair(t, Config{Devices: d})
	const n, many = 4 << 10, 40
	var wants []*memory
	var sinks []*deviceMemory
	var batch []transport.Slice
	for i := range many {
		from, to := newMemory(t, n, 512, uint64(i)), scattered(t, d, n, 256, uint64(i), false)
		from.fill(byte(i))
		o, g := p.bind(t, transfer.Slot(i), from, to.memory)
		p.dst.mu.Lock()
		g.Memory = to
		p.dst.mu.Unlock()
		batch = append(batch, transport.Slice{Origin: o, Range: from.space.All(), Attempt: 1,
			Cookie: uint64(i)})
		wants, sinks = append(wants, from), append(sinks, to)
	}
	// Regions of a fake share their addresses: one at a time, with packets behind it that reuse the
	// reader's buffer.
	for i := range batch {
		d.mu.Lock()
		clear(d.held)
		d.mu.Unlock()
		if err := p.lane.Move(batch[i : i+1]); err != nil {
			t.Fatal(err)
		}
		if r := p.src.result(t); r.Outcome != transfer.Landed {
			t.Fatalf("ended %s (%s): %v", r.Outcome, r.Reason, r.Err)
		}
		at := 0
		want := wants[i].content()
		d.mu.Lock()
		for _, b := range sinks[i].blocks {
			for k := range b.Len {
				if got := d.held[b.Region.Base()+b.Off+k]; got != want[at] {
					t.Fatalf("push %d: byte %d is %#x, want %#x", i, at, got, want[at])
				}
				at++
			}
		}
		d.mu.Unlock()
	}
}

// A peer that pushes two times by one tag, or sends a verdict on a push, ends its lane.
func TestHostilePush(t *testing.T) {
	for name, frames := range map[string]func(tag uint64) []byte{
		"a verdict on a push": func(tag uint64) []byte { return appendVerdict(nil, tag, true) },
		"an open tag": func(tag uint64) []byte {
			return append(pullOf(pullFrame{tag: tag}, run{region: 3, len: 16, Strides: mem.Single}),
				pushOf(pullFrame{tag: tag, cells: []byte{1}})...)
		},
	} {
		d := dest(1 << 10)
		d.l.b.host = newNode(t, 1, 2, Config{Dir: testutil.ShortDir(t)})
		d.jobs[7] = &job{l: d.l, tag: 7}
		var err error
		for p := frames(7); len(p) > 0 && err == nil; {
			k := frameHeader + int(binary.LittleEndian.Uint16(p[2:]))
			err = parse(p[:k], d.l)
			p = p[k:]
		}
		if err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}

// BenchmarkSmall is one small slice from Move to its result: the wake-ups of two sidecars and the
// copy.
func BenchmarkSmall(b *testing.B) {
	for name, n := range map[string]uint64{"push": pushBytes, "pull": pushBytes + 512} {
		b.Run(name, func(b *testing.B) {
			p := newPair(b, Config{})
			from, to := newMemory(b, n, 512, 1), newMemory(b, n, 512, 2)
			o, g := p.bind(b, 1, from, to)
			batch := []transport.Slice{{Origin: o, Range: from.space.All(), Attempt: 1}}
			b.ReportAllocs()
			for b.Loop() {
				// it has not landed
				*g = transport.Grant{Peer: g.Peer, Slot: g.Slot, Gen: g.Gen, Memory: to, Landed: g.Landed}
				g.Receipt.Reset(to.space.NumChunks())
				if err := p.lane.Move(batch); err != nil {
					b.Fatal(err)
				}
				if r := p.src.result(b); r.Outcome != transfer.Landed {
					b.Fatal(r.Reason)
				}
			}
		})
	}
}
