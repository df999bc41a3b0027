// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// The table of sessions is bounded, and any member can fill it: by mistake, as a fleet that
// restarts under new addresses does, or on purpose with invented boots. So a newcomer replaces a
// session without lanes and leases. If there is none and a request needs the newcomer, it replaces
// a session with lanes that was idle for a while. In a cluster of more than MaxPeers the set of
// connected peers thus follows the requests.
//
// No certificate may have more than its share, from one address. Several nodes may show the same
// one, as the pods of one deployment do, and each of them has an address of its own.

var (
	errNoRoom = errors.New("peer: another peer needed the place of this session, " +
		"which had no lane and no lease")
	errQuiet = errors.New("peer: another peer needed the place of this session, " +
		"which had no lease and nothing to do")
)

// tenant is a session as makeRoom compares it.
type tenant struct {
	s     *session
	met   bool
	since time.Time
}

// makeRoom ends sessions until a new one with boot fits.
func (m *Mesh) makeRoom(boot transfer.Boot, w who) error {
	for range MaxPeers {
		t, over, err := m.tenants(boot, w)
		if err != nil || !over {
			return err
		}
		// Unproved sessions are ended first, and of each kind the oldest.
		order := func(a, b tenant) int {
			if a.met != b.met {
				if a.met {
					return 1
				}
				return -1
			}
			return cmp.Or(a.since.Compare(b.since), slices.Compare(a.s.boot[:], b.s.boot[:]))
		}
		slices.SortFunc(t.free, order)
		slices.SortFunc(t.quiet, order)
		idle := func(t tenant) bool { return !m.opt.Handler.Busy(t.s.boot) }
		if i := slices.IndexFunc(t.free, idle); i >= 0 {
			m.endIdle(t.free[i].s, errNoRoom)
			continue
		}
		if i := slices.IndexFunc(t.quiet, idle); i >= 0 {
			m.endQuiet(t.quiet[i].s, errQuiet)
			continue
		}
		if t.own > 0 {
			return fmt.Errorf("peer: %d sessions of one certificate come from %s, at most that "+
				"many: give each node a certificate of its own: %w", t.own, w.from, wire.ErrRefused)
		}
		return m.fullError()
	}
	return m.fullError()
}

// endIdle ends a session, unless a lane has come up meanwhile, or a frame waits to be delivered.
func (m *Mesh) endIdle(s *session, err error) { m.endIf(s, (*session).idleLocked, err) }

// endQuiet ends a session with its lanes, unless something has moved on them meanwhile.
func (m *Mesh) endQuiet(s *session, err error) { m.endIf(s, (*session).quietLocked, err) }

func (m *Mesh) endIf(s *session, cond func(*session) bool, err error) {
	s.life.Lock() // no lane comes up
	defer s.life.Unlock()
	s.mu.Lock()
	still := cond(s)
	s.mu.Unlock()
	if still {
		m.endLocked(s, false, err)
	}
}

// idleLocked reports whether s has no lane, and no frame that a peer which has proved itself has
// not acknowledged: a Commit among them would be lost, and the source's blocks kept until a
// deadline.
func (s *session) idleLocked() bool { return len(s.lanes) == 0 && (!s.met || len(s.unacked) == 0) }

// quietLocked reports whether no frame was sent or received for a while.
func (s *session) quietLocked() bool {
	return !s.closed && len(s.unacked)+len(s.held) == 0 && time.Since(s.business) > idleForget
}

func (m *Mesh) fullError() error {
	return fmt.Errorf("peer: %d peers have lanes or leases here, at most that many: %w", MaxPeers,
		wire.ErrRefused)
}

// owned is how many sessions of one certificate may come from a source.
func owned(from netip.Prefix) int {
	if from.IsSingleIP() {
		return maxOwned
	}
	return maxOwnedNet
}

// candidates are the sessions of which one must be given up before another fits.
type candidates struct {
	free  []tenant // without lanes
	quiet []tenant // with lanes on which nothing moves; only for a peer that is needed
	own   int      // > 0: the newcomer's certificate has its share of so many, in free
}

// tenants lists the sessions of which one must be given up before boot fits: of the same
// certificate and source where these have their share, else of all. over is false where boot fits.
func (m *Mesh) tenants(boot transfer.Boot, w who) (c candidates, over bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sessions[boot] != nil || m.gone[boot] || m.closed {
		return c, false, nil // meet has the answer
	}
	if w.acquaint && len(m.sessions) >= meetMost {
		return c, false, fmt.Errorf("peer: %d sessions, the remaining places are reserved for "+
			"requests: %w",
			len(m.sessions), ErrAcquainted)
	}
	sessions := 0
	// of the certificate: those without lanes, and of these those that never had one
	var mine, fresh []tenant
	for _, s := range m.sessions {
		s.mu.Lock()
		t, idle, quiet := tenant{s, s.met, s.since}, s.idleLocked() && !s.closed, s.quietLocked()
		same := s.id == w.id && s.from == w.from
		if !idle && quiet {
			t.since = s.business
		}
		s.mu.Unlock()
		switch {
		case idle:
			c.free = append(c.free, t)
		case quiet:
			c.quiet = append(c.quiet, t)
		}
		if !same {
			continue
		}
		sessions++
		if idle {
			mine = append(mine, t)
		}
		if idle && !t.met {
			fresh = append(fresh, t)
		}
	}
	if w.id != (identity{}) { // without certificates members cannot be distinguished
		switch limit := owned(w.from); {
		case len(fresh) >= limit/unprovedPart:
			return candidates{free: fresh, own: limit}, true, nil
		case sessions >= limit:
			return candidates{free: mine, own: limit}, true, nil
		}
	}
	return c, len(m.sessions) >= MaxPeers, nil
}
