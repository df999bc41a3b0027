// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// The table of sessions is bounded, and whoever has a key can fill it: by mistake, as a fleet that
// restarts under new addresses does, or on purpose with boots that are invented. So a newcomer takes the
// place of a session without lanes and leases, and no certificate may have more than its share.

var errNoRoom = errors.New("peer: another peer needed the place of this session, which had no lane and no lease")

// tenant is what counts when a place is needed.
type tenant struct {
	s     *session
	met   bool
	since time.Time
}

// makeRoom gives up sessions until a new one with boot fits.
func (m *Mesh) makeRoom(boot transfer.Boot, id identity) error {
	for range MaxPeers {
		free, over, own, err := m.tenants(boot, id)
		if err != nil || !over {
			return err
		}
		// Those that never proved themselves go first, and of each kind the oldest.
		slices.SortFunc(free, func(a, b tenant) int {
			if a.met != b.met {
				if a.met {
					return 1
				}
				return -1
			}
			return cmp.Or(a.since.Compare(b.since), slices.Compare(a.s.boot[:], b.s.boot[:]))
		})
		i := slices.IndexFunc(free, func(t tenant) bool { return !m.opt.Handler.Busy(t.s.boot) })
		switch {
		case i >= 0:
			m.endIdle(free[i].s, errNoRoom)
		case own:
			return fmt.Errorf("peer: one certificate has %d sessions, at most that many: give each node a certificate of its own: %w", maxOwned, wire.ErrRefused)
		default:
			return m.fullError()
		}
	}
	return m.fullError()
}

// endIdle ends a session, unless a lane has come up meanwhile, or a frame waits to be delivered.
func (m *Mesh) endIdle(s *session, err error) {
	s.life.Lock() // no lane comes up
	defer s.life.Unlock()
	s.mu.Lock()
	idle := s.idleLocked()
	s.mu.Unlock()
	if idle {
		m.endLocked(s, false, err)
	}
}

// idleLocked reports whether s has no lane, and no frame that a peer which has proved itself has not
// acknowledged: a Commit among them would be lost, and the source's blocks kept until a deadline.
func (s *session) idleLocked() bool { return len(s.lanes) == 0 && (!s.met || len(s.unacked) == 0) }

func (m *Mesh) fullError() error {
	return fmt.Errorf("peer: %d peers have lanes or leases here, at most that many: %w", MaxPeers, wire.ErrRefused)
}

// tenants lists the sessions of which one must be given up before boot fits: of the same certificate
// where that has its share already (own), else of all. over is false where boot fits.
func (m *Mesh) tenants(boot transfer.Boot, id identity) (free []tenant, over, own bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sessions[boot] != nil || m.gone[boot] || m.closed {
		return nil, false, false, nil // meet has the answer
	}
	sessions, unproved := 0, 0
	var mine, fresh []tenant // of the certificate: those without lanes, and of these those that never had one
	for _, s := range m.sessions {
		s.mu.Lock()
		t, idle, same := tenant{s, s.met, s.since}, s.idleLocked() && !s.closed, s.id == id
		s.mu.Unlock()
		if idle {
			free = append(free, t)
		}
		if same {
			sessions++
			if idle {
				mine = append(mine, t)
			}
			if idle && !t.met {
				unproved++
				fresh = append(fresh, t)
			}
		}
	}
	if id != (identity{}) { // without certificates nobody can tell members apart
		switch {
		case unproved >= maxUnproved:
			return fresh, true, true, nil
		case sessions >= maxOwned:
			return mine, true, true, nil
		}
	}
	return free, len(m.sessions) >= MaxPeers, false, nil
}
