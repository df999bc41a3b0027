// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/page"
)

// Bounds of pins.
const (
	MaxPinTime = time.Minute
	// pinnedShare: of the store's memory all pins together hold 1/pinnedShare at most.
	pinnedShare = 2
)

// Pin is Exists for pages that a get will soon follow: those that are there stay for the given
// time, or until unpin is called.
func (s *Service) Pin(ids []page.ID, h page.Hashes, d time.Duration) (found page.Bitmap,
	unpin func(), err error) {
	if d <= 0 || d > MaxPinTime {
		return nil, nil, &store.RequestError{Field: "pin_ms", Problem: fmt.Sprint(d.Milliseconds()),
			Remedy: fmt.Sprintf("send 1 to %d", MaxPinTime.Milliseconds())}
	}
	if found, err = s.Exists(ids, h); err != nil {
		return nil, nil, err
	}
	// Pages before the first one that is missing: an engine uses no others.
	h.Bytes = h.Bytes[:found.Leading()*h.Each]
	if len(h.Bytes) == 0 {
		return found, func() {}, nil
	}
	var all []*store.Pins
	var bytes uint64
	release := func() {
		for _, p := range all {
			p.Release()
		}
		s.mu.Lock()
		s.pinned -= bytes
		s.mu.Unlock()
	}
	for _, id := range ids {
		p, n, err := s.pinIn(id, h)
		if err != nil {
			release()
			return nil, nil, err
		}
		if p == nil {
			break
		}
		all, bytes = append(all, p), bytes+n
	}
	once := sync.OnceFunc(release)
	timer := time.AfterFunc(d, once)
	return found, func() { timer.Stop(); once() }, nil
}

func (s *Service) pinIn(id page.ID, h page.Hashes) (*store.Pins, uint64, error) {
	s.mu.Lock()
	ns := s.namespaces[id]
	if ns == nil {
		s.mu.Unlock()
		return nil, 0, nil
	}
	s.mu.Unlock()
	keys, err := ns.of.Keyer().Keys(h)
	if err != nil {
		return nil, 0, err
	}
	pins, err := ns.space.Pin(keys)
	if err != nil {
		return nil, 0, err
	}
	// Pages of other tiers and nodes take no memory yet.
	bytes := uint64(pins.InMemory() * ns.space.PageBytes())
	s.mu.Lock()
	held, most := s.pinned, s.o.Store.Region().Size()/pinnedShare
	if held+bytes <= most {
		s.pinned += bytes
		s.mu.Unlock()
		return pins, bytes, nil
	}
	s.mu.Unlock()
	pins.Release()
	return nil, 0, &store.RequestError{Field: "pin_ms", Problem: fmt.Sprintf("%d bytes are pinned, "+
		"%d more exceed %d, half of store.memory", held, bytes, most),
		Remedy: "unpin what is not needed, or raise store.memory"}
}
