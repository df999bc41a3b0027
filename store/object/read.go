package object

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/kvspray/kvspray/store/index"
	"github.com/kvspray/kvspray/store/page"
)

// Reading is where a Read leaves its pages, by their position in the list of keys.
type Reading struct {
	Buffers [][]byte // as long as a page each
	// Part is called when bytes [from, to) of a page have come, in order. A page that is read once
	// more begins at 0 again.
	Part func(i, from, to int)
	// Check reports, after the last part of a page, whether they have this checksum. A page that
	// differs is read once more.
	Check func(i int, crc uint32) bool
	// End is called once for each page; err is nil if its last check returned true.
	End func(i int, crc uint32, err error)
}

// Run is how many of the keys, from the first one on, one request reads; at least 1, and no more
// pages than fit into bytes.
func (o *Owner) Run(keys []page.Key, bytes int) int {
	t := o.t
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.pages.Find(&keys[0])
	if !t.pages.Readable(n, o.number) {
		return 1
	}
	loc := t.pages.At(n).Loc
	limit := min(len(keys), min(bytes, MaxRangeBytes)/o.pageBytes)
	i := 1
	for i < limit && t.followsLocked(o, &keys[i], loc+uint32(i)) {
		i++
	}
	return i
}

// followsLocked reports whether an owner's page is at a place, of the object that the place before
// is in.
func (t *Tier) followsLocked(o *Owner, k *page.Key, loc uint32) bool {
	n := t.pages.Find(k)
	return loc&(maxPages-1) != 0 && t.pages.Readable(n, o.number) && t.pages.At(n).Loc == loc
}

// partBytes is how much is read before it is used: what the read has just brought into the
// second-level cache.
const partBytes = 256 << 10

// fill reads a page in parts.
func (r *Reading) fill(i int, body io.Reader) error {
	b := r.Buffers[i]
	for from := 0; from < len(b); from += partBytes {
		to := min(from+partBytes, len(b))
		if _, err := io.ReadFull(body, b[from:to]); err != nil {
			return err
		}
		r.Part(i, from, to)
	}
	return nil
}

// run is pages that lie one after another in an object, and are pinned.
type run struct {
	x     *object
	first uint32 // of the object's pages
	nodes []index.Node
	crcs  []uint32
	bad   []bool // pages that are damaged or gone
	done  int    // pages that have ended
	asked bool   // the object store was asked
}

// Read reads pages, as many with one request as lie one after another. The caller bounds how many
// reads are under way.
func (o *Owner) Read(ctx context.Context, keys []page.Key, r Reading) {
	for at := 0; at < len(keys); {
		n := o.Run(keys[at:], MaxRangeBytes)
		part := Reading{Buffers: r.Buffers[at : at+n],
			Part:  func(i, from, to int) { r.Part(at+i, from, to) },
			Check: func(i int, crc uint32) bool { return r.Check(at+i, crc) },
			End:   func(i int, crc uint32, err error) { r.End(at+i, crc, err) }}
		at += o.readRun(ctx, keys[at:at+n], part)
	}
}

// readRun reads the first pages of keys, as many as still lie one after another, and returns how
// many.
func (o *Owner) readRun(ctx context.Context, keys []page.Key, r Reading) int {
	t := o.t
	p, err := o.holdRun(keys)
	if err != nil {
		r.End(0, 0, fmt.Errorf("store.object: page %s: %w", keys[0], err))
		return 1
	}
	if p.x.b != nil { // the readers keep it
		for i := range p.nodes {
			from := bytes.NewReader(p.x.b.page(p.first + uint32(i)))
			p.bad[i] = r.fill(i, from) != nil || !r.Check(i, p.crcs[i])
			p.end(r, ErrDamaged)
		}
	} else {
		p.asked = true
		err = o.readRange(ctx, p, r)
		if lost(err) {
			err = fmt.Errorf("%w: %w", ErrMissing, err)
		}
	}
	left := p.done
	for err != nil && p.done < len(p.nodes) {
		p.bad[p.done] = errors.Is(err, ErrMissing)
		r.End(p.done, 0, err)
		p.done++
	}
	t.releaseRun(p, left, err)
	return len(p.nodes)
}

// end ends the next page of a run; err is what a bad one is.
func (p *run) end(r Reading, err error) {
	i := p.done
	p.done++
	if p.bad[i] {
		r.End(i, 0, err)
	} else {
		r.End(i, p.crcs[i], nil)
	}
}

// holdRun pins the first pages of keys that lie one after another.
func (o *Owner) holdRun(keys []page.Key) (*run, error) {
	t := o.t
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.pages.Acquire(o.number, &keys[0])
	if n == 0 {
		return nil, ErrMissing
	}
	loc := t.pages.At(n).Loc
	x, first := t.at(loc)
	if x.b == nil && t.isAwayLocked() {
		t.pages.Drop(n)
		return nil, ErrAway
	}
	p := &run{x: x, first: first, nodes: []index.Node{n}, crcs: []uint32{t.pages.At(n).CRC}}
	for i := 1; i < len(keys) && t.followsLocked(o, &keys[i], loc+uint32(i)); i++ {
		n := t.pages.Acquire(o.number, &keys[i])
		if n == 0 {
			break
		}
		p.nodes = append(p.nodes, n)
		p.crcs = append(p.crcs, t.pages.At(n).CRC)
	}
	p.bad = make([]bool, len(p.nodes))
	x.readers++
	return p, nil
}

// releaseRun ends the pins of a run, drops what is bad, and notes whether the object store
// answered. left is how many pages had ended before err.
func (t *Tier) releaseRun(p *run, left int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, n := range p.nodes {
		// A page that was moved meanwhile is whole where it is now.
		if p.bad[i] && t.pages.At(n).Loc == p.x.number<<placeBits|(p.first+uint32(i)) {
			if i < left {
				t.stats.Damaged++
			} else {
				t.stats.Missing++
			}
			t.pages.Doom(n)
		}
		t.pages.Drop(n)
	}
	if p.x.readers--; p.x.readers == 0 {
		if p.x.b != nil && p.x.b.done {
			t.returnLocked(p.x)
		}
		t.touchLocked()
	}
	switch {
	case !p.asked:
	case err == nil || lost(err):
		t.answeredLocked(true)
	case !errors.Is(err, context.Canceled):
		t.answeredLocked(false)
	}
}

// errDiffers has a page read once more. A read that fails afterwards has found no page damaged.
var errDiffers = errors.New("a page differed from its checksum")

// readRange reads a run from the bucket. After an error it goes on with the page that it was at.
func (o *Owner) readRange(ctx context.Context, p *run, r Reading) error {
	t := o.t
	differs := false // the page that is next was read once, and differed from its checksum
	_, err := try(ctx, t, t.c.Timeouts.Read, "read "+p.x.name(t),
		func(ctx context.Context) (int, error) {
			body, err := t.c.Bucket.Get(ctx, p.x.name(t), p.x.offset(p.first+uint32(p.done)),
				int64((len(p.nodes)-p.done)*o.pageBytes))
			if err != nil {
				return 0, err
			}
			defer func() { _ = body.Close() }() // what was read of it counts
			for p.done < len(p.nodes) {
				i := p.done
				if err := r.fill(i, body); err != nil {
					return 0, err
				}
				if !r.Check(i, p.crcs[i]) {
					if !differs {
						differs = true
						return 0, errDiffers
					}
					p.bad[i] = true
				}
				differs = false
				p.end(r, ErrDamaged)
			}
			return 0, nil
		})
	if ctx.Err() != nil && err != nil {
		err = context.Canceled // whatever else went wrong: the caller canceled it
	}
	return err
}
