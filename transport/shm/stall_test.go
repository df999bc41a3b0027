package shm

import (
	"sync"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// gated is a destination that is busy until its gate opens.
type gated struct {
	*memory
	gate chan struct{}
}

func (g *gated) Resolve(dst []mem.Block, r transfer.Range) ([]mem.Block, error) {
	<-g.gate
	return g.memory.Resolve(dst, r)
}

// A lane takes as many slices as its MaxInFlight, in however many pieces they are: what has no pull
// waits for one, and ends as any other slice does.
func TestSlicesWaitForPulls(t *testing.T) {
	const (
		each   = 32 // bytes of a piece: a slice takes eight pulls
		count  = sliceBytes / 2 / transfer.ChunkBytes
		slices = 40
		bytes  = slices * count * transfer.ChunkBytes
	)
	from, to := newMemory(t, bytes, each, 1), newMemory(t, bytes, each, 2)
	from.fill(7)
	for _, c := range []struct {
		name   string
		valid  bool
		end    func(*pair) error
		landed bool
	}{
		{name: "all land", valid: true, landed: true},
		{name: "invalidated"},
		{name: "the lane is lost", valid: true, end: func(p *pair) error { return p.lane.Close() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPair(t, Config{Workers: 2})
			o, g := p.bind(t, 1, from, to)
			o.Valid = func(transfer.LeaseID) bool { return c.valid }
			busy := &gated{to, make(chan struct{})}
			p.dst.mu.Lock()
			g.Memory = busy
			p.dst.mu.Unlock()
			for i := range uint32(slices) {
				s := transport.Slice{Origin: o, Range: transfer.Range{First: i * count, Count: count},
					Attempt: 1}
				if err := p.lane.Move([]transport.Slice{s}); err != nil {
					t.Fatal(err)
				}
			}
			l := p.lane.(*lane)
			l.src.mu.Lock()
			free, waiting := len(l.src.free), len(l.src.stalled)
			l.src.mu.Unlock()
			if free > 0 || waiting == 0 {
				t.Fatalf("%d pulls are free and %d slices wait: too few pieces", free, waiting)
			}
			open := sync.OnceFunc(func() { close(busy.gate) })
			t.Cleanup(open) // before the fence of bind
			if c.end == nil {
				open()
			} else if err := c.end(p); err != nil {
				t.Fatal(err)
			}
			for range slices {
				r := p.src.result(t)
				switch {
				case c.landed && r.Outcome != transfer.Landed,
					!c.valid && r.Reason != transfer.ReasonInvalidated,
					c.end != nil && r.Reason != transfer.ReasonLaneLost:
					t.Fatalf("%v ended %s (%s): %v", r.Range, r.Outcome, r.Reason, r.Err)
				}
			}
			open()
			l.src.mu.Lock()
			free, waiting = len(l.src.free), len(l.src.stalled)
			l.src.mu.Unlock()
			if free != maxPulls || waiting > 0 {
				t.Errorf("%d pulls of %d are free at the end, and %d slices wait", free, maxPulls, waiting)
			}
			g.Revoke()
			if err := p.dst.b.Fence(t.Context(), g); err != nil {
				t.Fatal(err)
			}
			if c.landed && !equal(from, to) {
				t.Error("the bytes differ")
			}
			if c.end == nil {
				select {
				case err := <-p.src.down:
					t.Errorf("the lane ended: %v", err)
				default:
				}
			}
		})
	}
}
