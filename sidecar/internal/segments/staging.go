package segments

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds of the staging memory, and of batches that wait for it.
const (
	stagingBytes  = 256 << 20
	maxPeerStaged = 128 << 20 // of the batches of one peer
	maxStaged     = 64 << 20  // of one batch
	maxStageWaits = 256
	// Of the batches of one peer, so that it leaves some for others.
	maxPeerStageWaits = 128
)

// staging is memory between files and lanes. It is allocated with the first segment of a file, and
// takes memory of the host as far as batches use it.
type staging struct {
	mu     sync.Mutex // guards what follows
	region *mem.Region
	used   []room // in order
	peers  map[transfer.Boot]uint64
	waits  []*stageWait // in order
}

// room is a range of the staging memory.
type room struct {
	span
	peer transfer.Boot
}

// stageWait is a batch that waits for room.
type stageWait struct {
	bytes uint64
	peer  transfer.Boot
	room  chan room
}

// open allocates the memory. Idempotent.
func (g *staging) open() (err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.region == nil {
		g.peers = map[transfer.Boot]uint64{}
		g.region, err = mem.NewAnonymous("staging", stagingBytes)
	}
	return err
}

// close frees the memory, once no lease uses it.
func (g *staging) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.region != nil {
		g.region.Release()
		g.region = nil
	}
}

// take takes room. If there is none, it waits with wait, and refuses the batch without.
func (g *staging) take(ctx context.Context, n uint64, peer transfer.Boot, wait bool) (room, error) {
	w := &stageWait{n, peer, make(chan room, 1)}
	if err := g.enter(w, wait); err != nil {
		return room{}, err
	}
	select {
	case r := <-w.room:
		return r, nil
	case <-ctx.Done():
	}
	g.mu.Lock()
	i := slices.Index(g.waits, w)
	if i >= 0 {
		g.waits = slices.Delete(g.waits, i, i+1)
		g.serveLocked()
	}
	g.mu.Unlock()
	if i < 0 {
		g.give(<-w.room)
	}
	return room{}, context.Cause(ctx)
}

// enter gives room to a batch, or lets it wait.
func (g *staging) enter(w *stageWait, wait bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waits = append(g.waits, w)
	g.serveLocked()
	if len(w.room) > 0 {
		return nil
	}
	last := len(g.waits) - 1 // w itself
	waiting := 0             // of the same peer
	for _, o := range g.waits[:last] {
		if o.peer == w.peer {
			waiting++
		}
	}
	if wait && last < maxStageWaits && waiting < maxPeerStageWaits {
		return nil
	}
	g.waits = slices.Delete(g.waits, last, last+1)
	return refused("wait", fmt.Sprintf("open batches with files leave no memory for %d bytes, and %d "+
		"batches wait for it, %d of them of this node; at most %d and %d", w.bytes, last, waiting,
		maxStageWaits, maxPeerStageWaits), "set wait, or send fewer batches at a time")
}

// findLocked takes the first room that is large enough.
func (g *staging) findLocked(n uint64, peer transfer.Boot) (r room, ok bool) {
	if g.peers[peer]+n > maxPeerStaged {
		return r, false
	}
	i, at := 0, uint64(0)
	for ; i < len(g.used) && at+n > g.used[i].from; i++ {
		at = (g.used[i].to + directAlign - 1) / directAlign * directAlign
	}
	if at+n > stagingBytes {
		return r, false
	}
	r = room{span{at, at + n}, peer}
	g.used = slices.Insert(g.used, i, r)
	g.peers[peer] += n
	return r, true
}

// give returns room.
func (g *staging) give(r room) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.used = slices.DeleteFunc(g.used, func(u room) bool { return u.span == r.span })
	if g.peers[r.peer] -= r.to - r.from; g.peers[r.peer] == 0 {
		delete(g.peers, r.peer)
	}
	g.serveLocked()
}

// serveLocked gives room to batches that wait, in their order. A batch whose peer has its share
// delays only those of the same peer.
func (g *staging) serveLocked() {
	full := false                      // one waits for the memory itself
	behind := map[transfer.Boot]bool{} // peers of which one waits
	g.waits = slices.DeleteFunc(g.waits, func(w *stageWait) bool {
		if full || behind[w.peer] {
			return false
		}
		r, ok := g.findLocked(w.bytes, w.peer)
		if ok {
			w.room <- r
			return true
		}
		behind[w.peer] = true
		full = g.peers[w.peer]+w.bytes <= maxPeerStaged
		return false
	})
}

// place moves runs into the room, and returns its memory.
func (g *staging) place(r room, runs []plans.Run) []byte {
	for i := range runs {
		runs[i].Region = g.region
		runs[i].Off += r.from
	}
	b, _ := g.region.Bytes()
	return b[r.from:r.to]
}
