package store

import (
	"slices"
	"sync"

	"github.com/kvspray/kvspray/store/page"
)

// maxChanges bounds the pages whose change Changes has not returned yet. Changes beyond it are left
// out: a Walk finds what is held.
const maxChanges = 1 << 16

// feed collects pages that are new in memory or on the disk, or have gone from there. It has no
// order and no states: what is there is looked up when a change is taken, so a page is in it once.
// Its lock is taken under those of the tiers, and held for a map operation.
type feed struct {
	mu      sync.Mutex // guards what follows
	pending map[change]struct{}
	wake    chan struct{} // has room for one
}

type change struct {
	owner uint16
	key   page.Key
}

func newFeed() *feed {
	return &feed{pending: map[change]struct{}{}, wake: make(chan struct{}, 1)}
}

// add records that a page has changed; a nil feed takes nothing.
func (f *feed) add(owner uint16, k *page.Key) {
	if f == nil {
		return
	}
	f.mu.Lock()
	if len(f.pending) < maxChanges {
		f.pending[change{owner, *k}] = struct{}{}
	}
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

func (f *feed) take(limit int) (out []change) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.pending {
		if len(out) == limit {
			break
		}
		out = append(out, c)
		delete(f.pending, c)
	}
	return out
}

// Changed receives a value after changes. There is one reader. nil: the store has no Peers.
func (s *Store) Changed() <-chan struct{} {
	if s.feed == nil {
		return nil
	}
	return s.feed.wake
}

// Changes takes up to limit changes since the last call: pages that memory or the disk holds now,
// and pages that neither does.
func (s *Store) Changes(limit int) (held, gone []page.Key) {
	if s.feed == nil || !s.enter() {
		return nil, nil
	}
	defer s.leave()
	all := s.feed.take(limit)
	slices.SortFunc(all, func(a, b change) int { return int(a.owner) - int(b.owner) })
	for len(all) > 0 {
		owner := all[0].owner
		n := slices.IndexFunc(all, func(c change) bool { return c.owner != owner })
		if n < 0 {
			n = len(all)
		}
		keys := make([]page.Key, n)
		for i := range keys {
			keys[i] = all[i].key
		}
		all = all[n:]
		found := page.NewBitmap(n)
		s.memory.Exists(owner, keys, found)
		s.tiers[Disk].Exists(owner, keys, found)
		for i := range keys {
			if found.Get(i) {
				held = append(held, keys[i])
			} else {
				gone = append(gone, keys[i])
			}
		}
	}
	return held, gone
}

// diskCursor is the part of a Walk's cursor that means the disk.
const diskCursor = 1 << 63

// Walk returns some of the pages that memory and the disk hold, from a cursor on, which is 0 at the
// beginning, and the cursor to go on with; 0: that was all. It looks at limit places at a time, so
// a result may be empty. Pages that come or go meanwhile may be missed.
func (s *Store) Walk(cursor uint64, limit int) (keys []page.Key, next uint64) {
	if !s.enter() {
		return nil, 0
	}
	defer s.leave()
	if cursor < diskCursor {
		at := uint32(cursor)
		if keys, at = s.memory.Walk(at, limit); at != 0 {
			return keys, uint64(at)
		}
		if s.disk == nil {
			return keys, 0
		}
		return keys, diskCursor
	}
	var at uint32
	if keys, at = s.disk.Walk(uint32(cursor&^diskCursor), limit); at == 0 {
		return keys, 0
	}
	return keys, diskCursor | uint64(at)
}
