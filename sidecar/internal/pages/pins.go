package pages

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/page"
)

// Bounds of pins. Pages that are pinned in a tier leave less room for those that others put, and
// one tenant's pins leave some for other tenants.
const (
	MaxPinTime = time.Hour
	// Of each tier all pins together keep 1/pinnedShare at most, those of one tenant
	// 1/tenantPinnedShare.
	pinnedShare       = 2
	tenantPinnedShare = 4
	// A page counts as often as it is pinned. A pin takes about 100 bytes here.
	maxPinnedPages       = 1 << 20
	maxTenantPinnedPages = maxPinnedPages / 2
)

// pinned is what pins keep.
type pinned struct {
	pages int
	bytes [store.Object + 1]uint64 // by tier
}

// plus returns the sum of p and n times more.
func (p pinned) plus(n int, more pinned) pinned {
	p.pages += n * more.pages
	for i, b := range more.bytes {
		p.bytes[i] += uint64(n) * b // modulo 2^64 for a negative n
	}
	return p
}

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
	var ends []func()
	release := func() {
		for _, end := range ends {
			end()
		}
	}
	for _, id := range ids {
		end, err := s.pinIn(id, h)
		if err != nil {
			release()
			return nil, nil, err
		}
		if end == nil {
			break
		}
		ends = append(ends, end)
	}
	once := sync.OnceFunc(release)
	timer := time.AfterFunc(d, once)
	return found, func() { timer.Stop(); once() }, nil
}

// pinIn pins pages of one namespace, and returns how to end that; nil: it is not open.
func (s *Service) pinIn(id page.ID, h page.Hashes) (end func(), err error) {
	s.mu.Lock()
	ns := s.namespaces[id]
	s.mu.Unlock()
	if ns == nil {
		return nil, nil
	}
	keys, err := ns.of.Keyer().Keys(h)
	if err != nil {
		return nil, err
	}
	pins, err := ns.space.Pin(keys)
	if err != nil {
		return nil, err
	}
	more := pinned{pins.Found().Count(), pins.Bytes()}
	tenant := string(ns.of.Secret)
	if err := s.countPins(tenant, more); err != nil {
		pins.Release()
		return nil, err
	}
	return func() {
		pins.Release()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.pinned = s.pinned.plus(-1, more)
		if left := s.tenants[tenant].plus(-1, more); left == (pinned{}) {
			delete(s.tenants, tenant)
		} else {
			s.tenants[tenant] = left
		}
	}, nil
}

// countPins counts what a tenant pins, unless that is too much. Namespaces with one secret are one
// tenant, and so are all without a secret.
func (s *Service) countPins(tenant string, more pinned) error {
	tiers := s.o.Store.Capacities()
	s.mu.Lock()
	defer s.mu.Unlock()
	all, own := s.pinned.plus(1, more), s.tenants[tenant].plus(1, more)
	for _, of := range []struct {
		whose           string
		sum             pinned
		pages, oneShare int
	}{{"of this tenant", own, maxTenantPinnedPages, tenantPinnedShare},
		{"of all tenants", all, maxPinnedPages, pinnedShare}} {
		problem := ""
		if of.sum.pages > of.pages {
			problem = fmt.Sprintf("%d pages %s would be pinned, at most %d", of.sum.pages, of.whose,
				of.pages)
		}
		for tier, bytes := range of.sum.bytes {
			if limit := tiers[tier] / uint64(of.oneShare); more.bytes[tier] > 0 && bytes > limit {
				problem = fmt.Sprintf("%d bytes %s would be pinned in the tier %s: at most 1/%d of it, %d",
					bytes, of.whose, store.Tier(tier), of.oneShare, limit)
			}
		}
		if problem != "" {
			return &store.RequestError{Field: "pin_ms", Problem: problem,
				Remedy: "unpin what is not needed, ask without pins, or make the tier larger"}
		}
	}
	s.pinned, s.tenants[tenant] = all, own
	return nil
}
