package segments

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/sidecar/internal/plans"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds of all claims of a node.
const (
	maxSpans   = 4 << 20 // 64 MiB
	maxWaiting = 256     // claims that wait for others
	// Of the batches of one peer, so that it leaves some for others.
	maxPeerSpans   = 1 << 20
	maxPeerWaiting = 128
)

// span is bytes [from, to) of a region or file.
type span struct{ from, to uint64 }

// claim is what one side of a batch reads or writes, from before its lease until after its fence.
type claim struct {
	spans map[any][]span // in order, apart; of a *mem.Region or a fileID
	count int            // spans of all regions
	write bool
	// peer sent the batch; zero: an engine of this node did.
	peer transfer.Boot

	blockers map[*claim]struct{} // earlier claims that exclude this one; guarded by ranges.mu
	open     chan struct{}       // closed when there are none left
}

// newClaim refuses runs of which two write the same byte: the result would depend on their order.
// The runs lie in their regions, or in a file.
func newClaim(runs []plans.Run, f *file, write bool, peer transfer.Boot) (*claim, error) {
	c := &claim{spans: map[any][]span{}, write: write, peer: peer, open: make(chan struct{})}
	for i := range runs {
		r := &runs[i]
		place := any(r.Region)
		if f != nil {
			place = f.id
		}
		all := c.spans[place]
		if r.Stride == r.Len || r.Count == 1 {
			all = append(all, span{r.Off, r.Off + r.Len*uint64(r.Count)})
		} else {
			for k := range uint64(r.Count) {
				all = append(all, span{r.Off + k*r.Stride, r.Off + k*r.Stride + r.Len})
			}
		}
		c.spans[place] = all
	}
	for place, all := range c.spans {
		byFrom := func(a, b span) int { return cmp.Compare(a.from, b.from) }
		if !slices.IsSortedFunc(all, byFrom) { // most lists are in order
			slices.SortFunc(all, byFrom)
		}
		joined := all[:1]
		for _, s := range all[1:] {
			last := &joined[len(joined)-1]
			if s.from < last.to && write {
				return nil, refused("entries", fmt.Sprintf("bytes [%d, %d) are written twice", s.from,
					min(s.to, last.to)), "write each byte once in a batch")
			}
			if s.from <= last.to {
				last.to = max(last.to, s.to)
				continue
			}
			joined = append(joined, s)
		}
		c.spans[place] = joined
		c.count += len(joined)
	}
	return c, nil
}

// overlaps finds a byte that both claims have.
func (c *claim) overlaps(o *claim) (at span, ok bool) {
	for place, a := range c.spans {
		b := o.spans[place]
		if len(b) == 0 || a[len(a)-1].to <= b[0].from || b[len(b)-1].to <= a[0].from {
			continue
		}
		for i, j := 0, 0; i < len(a) && j < len(b); {
			switch {
			case a[i].to <= b[j].from:
				i++
			case b[j].to <= a[i].from:
				j++
			default:
				return span{max(a[i].from, b[j].from), min(a[i].to, b[j].to)}, true
			}
		}
	}
	return span{}, false
}

// ranges are the claims of all batches of a node. Two that have a byte in common are open at the
// same time only if both read. Claims open in the order in which they came.
type ranges struct {
	mu      sync.Mutex // guards what follows
	all     []*claim   // in order
	spans   int
	waiting int
}

// take opens a claim. If earlier claims exclude it, take waits for them with wait, and refuses it
// without. A write waits for a read of the same peer in any case: either the peer has completed
// that read, and its end is on the way to this node, or the peer itself has opened both.
func (r *ranges) take(ctx context.Context, c *claim, wait bool) error {
	if err := r.enter(c, wait); err != nil {
		return err
	}
	select {
	case <-c.open:
		return nil
	case <-ctx.Done():
		r.release(c)
		return context.Cause(ctx)
	}
}

func (r *ranges) enter(c *claim, wait bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.spans+c.count > maxSpans {
		return refused("entries", fmt.Sprintf("%d ranges, and open batches have %d of at most %d",
			c.count, r.spans, maxSpans), "send fewer batches at a time")
	}
	spans, waiting := 0, 0 // of the same peer
	for _, o := range r.all {
		if o.peer == c.peer && c.peer != (transfer.Boot{}) {
			spans += o.count
			if len(o.blockers) > 0 {
				waiting++
			}
		}
		if !c.write && !o.write {
			continue
		}
		at, ok := c.overlaps(o)
		if !ok {
			continue
		}
		ends := !o.write && o.peer == c.peer && c.peer != (transfer.Boot{})
		if !wait && !ends {
			does := map[bool]string{true: "writes", false: "reads"}
			return refused("entries", fmt.Sprintf("this batch %s bytes [%d, %d), which an open one %s",
				does[c.write], at.from, at.to, does[o.write]), "wait for it, or set wait")
		}
		if c.blockers == nil {
			c.blockers = map[*claim]struct{}{}
		}
		c.blockers[o] = struct{}{}
	}
	waits := len(c.blockers) > 0
	switch {
	case spans+c.count > maxPeerSpans:
		return refused("entries", fmt.Sprintf("%d ranges, and open batches of this node have %d of at "+
			"most %d", c.count, spans, maxPeerSpans), "send fewer batches at a time")
	case waits && (r.waiting >= maxWaiting || waiting >= maxPeerWaiting):
		return refused("wait", fmt.Sprintf("%d batches wait already, %d of them of one node; at most %d "+
			"and %d", r.waiting, waiting, maxWaiting, maxPeerWaiting), "send fewer batches at a time")
	case waits:
		r.waiting++
	default:
		close(c.open)
	}
	r.all, r.spans = append(r.all, c), r.spans+c.count
	return nil
}

// release ends a claim that was taken.
func (r *ranges) release(c *claim) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := slices.Index(r.all, c)
	if i < 0 {
		return
	}
	r.all, r.spans = slices.Delete(r.all, i, i+1), r.spans-c.count
	if len(c.blockers) > 0 {
		r.waiting--
	}
	for _, o := range r.all {
		if _, ok := o.blockers[c]; !ok {
			continue
		}
		if delete(o.blockers, c); len(o.blockers) == 0 {
			r.waiting--
			close(o.open)
		}
	}
}
