package gdr

import (
	"errors"
	"fmt"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/transfer"
)

// maxDomains bounds the peers that have lanes or registrations on a rail.
const maxDomains = 4096

// domains are the protection domains of one device: one per peer, with the lanes to it and its
// keys. A key that another peer has learned or guessed is therefore invalid on that peer's queue
// pairs.
type domains struct {
	d verbs.Device

	mu sync.Mutex
	// guarded by mu, which is never held during a command to the device
	m    map[transfer.Boot]*domain
	left []*domain // unused, but not yet released by the device
}

// domain is made for its first user and released after its last.
type domain struct {
	verbs.Domain
	peer  transfer.Boot
	ready chan struct{}
	err   error // set before ready is closed, as is Domain
	users int   // guarded by domains.mu
}

func newDomains(d verbs.Device) *domains {
	return &domains{d: d, m: map[transfer.Boot]*domain{}}
}

// enter returns a peer's domain; leave releases it.
func (s *domains) enter(peer transfer.Boot) (*domain, error) {
	s.mu.Lock()
	p := s.m[peer]
	first := p == nil
	if first {
		if len(s.m)+len(s.left) >= maxDomains {
			s.mu.Unlock()
			return nil, fmt.Errorf("gdr: %d protection domains on %s: the rail has too many peers: %w",
				maxDomains, s.d.Name(), verbs.ErrFull)
		}
		p = &domain{peer: peer, ready: make(chan struct{})}
		s.m[peer] = p
	}
	p.users++
	s.mu.Unlock()
	if first {
		p.Domain, p.err = s.d.NewDomain()
		close(p.ready)
	}
	<-p.ready
	if p.err != nil {
		s.leave(p)
		return nil, p.err
	}
	return p, nil
}

// leave releases a use. If the device keeps the domain, sweep tries again.
func (s *domains) leave(p *domain) {
	s.mu.Lock()
	p.users--
	last := p.users == 0
	if last {
		delete(s.m, p.peer)
	}
	s.mu.Unlock()
	if !last || p.err != nil || p.Close() == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = append(s.left, p)
}

// sweep tries again to release the domains that the device kept. Called by one goroutine at a time.
func (s *domains) sweep() (err error) {
	s.mu.Lock()
	left := s.left
	s.left = nil
	s.mu.Unlock()
	var kept []*domain
	for _, p := range left {
		if cerr := p.Close(); cerr != nil {
			kept = append(kept, p)
			err = errors.Join(err, cerr)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = append(s.left, kept...)
	return err
}
