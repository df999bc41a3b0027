package peer

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// The table of sessions is bounded, and any member can fill it: by mistake, as a fleet that
// restarts under new addresses does, or on purpose with invented boots. So a new peer replaces a
// session without lanes and leases. If there is none and a request needs the new peer, it replaces
// a session with lanes that was idle for a while. In a cluster of more than maxPeers the set of
// connected peers thus follows the requests.
//
// No certificate may have more than its share, from one address. Several nodes may show the same
// one, as the pods of one deployment do, and each of them has an address of its own.

var (
	errFull = fmt.Errorf("peer: %d peers have lanes or leases here, at most that many: %w", maxPeers,
		wire.ErrRefused)
	errEvicted = errors.New("peer: another peer needed the place of this session, " +
		"which had no lane and no lease")
	errEvictedQuiet = errors.New("peer: another peer needed the place of this session, " +
		"which had no lease and nothing to do")
)

// candidate is a session that may be evicted.
type candidate struct {
	s      *session
	id     hello.Identity
	proved bool
	since  time.Time // it is unused or quiet
}

// candidates are the sessions of which one must be evicted before another fits.
type candidates struct {
	unused []candidate
	quiet  []candidate // with lanes; only for a peer that a request needs
	quota  int         // > 0: the caller's certificate has this number, its share, in unused
}

// evict ends sessions until a new one with boot fits.
func (t *sessions) evict(boot transfer.Boot, from caller) error {
	for range maxPeers {
		c, over, err := t.candidates(boot, from)
		if err != nil || !over {
			return err
		}
		// Unproved sessions are ended first, and of each kind the oldest.
		order := func(a, b candidate) int {
			if a.proved != b.proved {
				if a.proved {
					return 1
				}
				return -1
			}
			return cmp.Or(a.since.Compare(b.since), slices.Compare(a.s.boot[:], b.s.boot[:]))
		}
		slices.SortFunc(c.unused, order)
		slices.SortFunc(c.quiet, order)
		idle := func(c candidate) bool { return !t.opt.Handler.Busy(c.s.boot) }
		if i := slices.IndexFunc(c.unused, idle); i >= 0 {
			t.endUnused(c.unused[i].s, errEvicted)
			continue
		}
		if i := slices.IndexFunc(c.quiet, idle); i >= 0 {
			t.endQuiet(c.quiet[i].s, errEvictedQuiet)
			continue
		}
		if c.quota > 0 {
			return fmt.Errorf("peer: %d sessions of one certificate come from %s, at most that "+
				"many: give each node a certificate of its own: %w", c.quota, from.source, wire.ErrRefused)
		}
		return errFull
	}
	return errFull
}

// endQuiet ends a session with its lanes, unless something has been sent on them meanwhile.
func (t *sessions) endQuiet(s *session, err error) {
	t.endIf(s, func() bool { return s.quiet(t.idleAfter) }, err)
}

// quotaOf is how many sessions of one certificate may come from a source.
func quotaOf(source netip.Prefix) int {
	if source.IsSingleIP() {
		return maxOwned
	}
	return maxOwnedNet
}

// candidates lists the sessions of which one must be evicted before boot fits: of the same
// certificate and source if these have their share, else of all. over is false if boot fits.
func (t *sessions) candidates(boot transfer.Boot, from caller) (c candidates, over bool,
	err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.all[boot] != nil || t.superseded[boot] || t.closed {
		return c, false, nil // register has the answer
	}
	if from.preconnect && len(t.all) >= maxPreconnected {
		return c, false, fmt.Errorf("peer: %d sessions, the remaining places are reserved for "+
			"requests: %w", len(t.all), hello.ErrPreconnect)
	}
	sessions := 0
	// of the certificate: the unused ones, and of these those that never had a lane
	var mine, fresh []candidate
	for _, s := range t.all {
		x, unused, quiet := t.candidate(s)
		switch {
		case unused:
			c.unused = append(c.unused, x)
		case quiet:
			c.quiet = append(c.quiet, x)
		}
		if x.id != from.id || s.source != from.source {
			continue
		}
		sessions++
		if unused {
			mine = append(mine, x)
		}
		if unused && !x.proved {
			fresh = append(fresh, x)
		}
	}
	if from.id != (hello.Identity{}) { // without certificates members cannot be distinguished
		switch limit := quotaOf(from.source); {
		case len(fresh) >= limit/unprovedPart:
			return candidates{unused: fresh, quota: limit}, true, nil
		case sessions >= limit:
			return candidates{unused: mine, quota: limit}, true, nil
		}
	}
	return c, len(t.all) >= maxPeers, nil
}

// candidate reports whether a session is unused, and whether it is quiet.
func (t *sessions) candidate(s *session) (c candidate, unused, quiet bool) {
	st := s.channel.State()
	unused, quiet = s.unused() && !st.Closed, s.quiet(t.idleAfter)
	s.mu.Lock()
	c = candidate{s, s.id, s.proved, st.Since}
	s.mu.Unlock()
	if !unused && quiet {
		c.since = st.Active
	}
	return c, unused, quiet
}
