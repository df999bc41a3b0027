package peer

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/delivery"
	"github.com/kvspray/kvspray/control/peer/frame"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// sessions is the table of sessions: one per boot, and the boots that never get another.
type sessions struct {
	*core
	budget     *delivery.Budget // of received frames that wait, in all sessions
	shedding   atomic.Bool      // shed runs
	stuckAfter time.Duration
	idleAfter  time.Duration

	mu              sync.Mutex // protects all below
	closed          bool
	all             map[transfer.Boot]*session
	superseded      map[transfer.Boot]bool
	supersededOrder []transfer.Boot
	inherited       map[transfer.Boot]renewal // see renew
}

func newSessions(c *core) *sessions {
	t := &sessions{core: c, stuckAfter: stuckAfter, idleAfter: idleAfter,
		all: map[transfer.Boot]*session{}, superseded: map[transfer.Boot]bool{},
		inherited: map[transfer.Boot]renewal{}}
	t.budget = delivery.NewBudget(delivery.MaxWaiting, t.shedSoon)
	return t
}

func (t *sessions) get(boot transfer.Boot) *session {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.all[boot]
}

func (t *sessions) list() []*session {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Values(t.all))
}

func (t *sessions) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.all)
}

func (t *sessions) isSuperseded(boot transfer.Boot) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.superseded[boot]
}

// unacked reports whether any peer has frames to acknowledge.
func (t *sessions) unacked() bool {
	return slices.ContainsFunc(t.list(),
		func(s *session) bool { return s.channel.State().Unacked > 0 })
}

// close ends all sessions without an event. None follows.
func (t *sessions) close(err error) {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	for _, s := range t.list() {
		s.channel.Close(err)
	}
}

// caller identifies the other end of a Hello, as far as the server has learned.
type caller struct {
	id     hello.Identity
	source netip.Prefix // for limits
	// gossip lists the peer, and no request needs it
	preconnect bool
}

// register makes or renews the session with a peer.
func (t *sessions) register(c caller, d hello.Description) (*session, error) {
	if err := d.Check(); err != nil {
		return nil, err //nolint:wrapcheck // it names the peer
	}
	rails, refused := hello.CheckRails(d.Rails)
	info := Peer{Boot: d.Boot, Node: d.Node, Endpoint: d.Dialed, Claimed: d.Endpoint,
		HostBoot: d.HostBoot, SameHost: d.HostBoot != "" && d.HostBoot == t.opt.HostBoot,
		Rails: rails, Version: d.Version, Features: d.Features, Release: hello.Release(d.Release),
		Key: t.secret.Key(d.Boot, c.id, [hello.ShareBytes]byte(d.Share))}
	if err := t.evict(d.Boot, c); err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s, err := t.getOrAddLocked(d.Boot, c)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.channel.State().Closed {
		return nil, fmt.Errorf("peer: hello of %s: its previous session is ending, send Hello again: %w",
			d.Boot, wire.ErrRefused)
	}
	// Both halves of the key and the certificate belong to two processes and live as long as they do.
	// Once a lane has proved the key, another key under the same boot belongs to another process.
	if s.proved && (s.info.Key != info.Key || s.id != c.id) {
		return nil, fmt.Errorf("peer: hello of %s: its key differs from the one that was proved "+
			"under this boot id: %w", d.Boot, wire.ErrRefused)
	}
	if d.Dialed == "" {
		info.Endpoint, s.claimed = s.info.Endpoint, d.Endpoint
	}
	s.info, s.addrs, s.id = info, d.Addresses, c.id
	if len(refused) > 0 && !s.railsLogged {
		s.railsLogged = true
		t.opt.Log.Warn("a peer announced invalid rails; logged once", "peer", d.Boot.String(),
			"refused", refused)
	}
	return s, nil
}

func (t *sessions) getOrAddLocked(boot transfer.Boot, c caller) (*session, error) {
	s := t.all[boot]
	switch {
	case t.closed:
		return nil, net.ErrClosed
	case t.superseded[boot]:
		return nil, fmt.Errorf("peer: boot %s was superseded at its endpoint: %w", boot, wire.ErrRefused)
	case s != nil:
		return s, nil
	case len(t.all) >= maxPeers: // others were added since evict
		return nil, errFull
	}
	s, err := newSession(boot, c, delivery.New(boot, t.budget, func(f *peerv1.ControlFrame) {
		t.opt.Handler.Control(boot, f)
	}))
	if err != nil {
		return nil, err
	}
	if r, ok := t.inherited[boot]; ok {
		s.incarnation, s.renewedFor = r.mine, &r.theirs
		delete(t.inherited, boot)
	}
	t.all[boot] = s
	return s, nil
}

// renewal is what a session inherits from one that the peer has renewed.
type renewal struct{ mine, theirs incarnation }

// renew ends a session because the peer has begun a new one. The peer may have accepted the
// incarnation of the old session already: the next session keeps it, or the peer would end its new
// session for the same reason, and so on. The peer's new session has no frame of the old one,
// because no lane to it was added. If the lane with the other incarnation was a late one of an
// earlier session of the peer, the next session's first lane shows it (addLane).
func (t *sessions) renew(s *session, theirs incarnation) {
	s.life.Lock()
	defer s.life.Unlock()
	t.mu.Lock()
	if t.all[s.boot] == s {
		for boot := range t.inherited {
			if len(t.inherited) < maxPeers {
				break
			}
			delete(t.inherited, boot) // any: without it a renewal may take several tries
		}
		t.inherited[s.boot] = renewal{s.incarnation, theirs}
	}
	t.mu.Unlock()
	t.endLocked(s, errRenewed)
}

var errRenewed = errors.New("peer: the peer began a new session")

// end closes a session, waits for a frame that the handler may be processing, calls PeerDown, and
// removes the session. Only then can there be another session with the boot, so that its PeerUp
// follows this PeerDown.
func (t *sessions) end(s *session, err error) {
	s.life.Lock()
	defer s.life.Unlock()
	t.endLocked(s, err)
}

// endLocked is end with life held.
func (t *sessions) endLocked(s *session, err error) {
	superseded := t.isSuperseded(s.boot) // then there will be no other session with the boot
	closed := s.channel.State().Closed
	s.mu.Lock()
	report := s.ups > 0 || superseded
	s.up = false
	s.mu.Unlock()
	s.channel.Close(err)
	s.channel.Wait()
	if !closed && report {
		t.opt.Handler.PeerDown(s.boot, true, err)
	}
	t.mu.Lock()
	if t.all[s.boot] == s {
		delete(t.all, s.boot)
	}
	t.mu.Unlock()
}

// endIf ends a session if cond still holds. No lane is added meanwhile.
func (t *sessions) endIf(s *session, cond func() bool, err error) {
	s.life.Lock()
	defer s.life.Unlock()
	if cond() {
		t.endLocked(s, err)
	}
}

// endUnused ends a session, unless a lane has been added meanwhile, or a frame waits for delivery.
func (t *sessions) endUnused(s *session, err error) { t.endIf(s, s.unused, err) }

// supersede ends the sessions of other boots at an endpoint that now answers as boot. A session
// with a live lane stays: then several processes share the address. That may also be so if its
// lanes are lost for a moment. Therefore only a boot that itself announced the endpoint, which
// proves that its process has ended, is excluded for good; any other gets a new session when it is
// reached or calls.
func (t *sessions) supersede(endpoint string, boot transfer.Boot) {
	old := t.laneless(boot, func(s *session) bool {
		return s.info.Endpoint == endpoint || s.claimed == endpoint
	})
	for _, s := range old {
		t.endIf(s, func() bool {
			if s.channel.State().Lanes > 0 {
				return false
			}
			s.mu.Lock()
			own := slices.Contains(s.addrs, endpoint)
			s.mu.Unlock()
			if own {
				t.exclude(s.boot)
			}
			return true
		}, fmt.Errorf("peer: %s answers as boot %s now", endpoint, boot))
	}
}

// exclude refuses a boot for good.
func (t *sessions) exclude(boot transfer.Boot) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.superseded[boot] {
		return
	}
	if len(t.supersededOrder) >= maxSuperseded {
		delete(t.superseded, t.supersededOrder[0])
		t.supersededOrder = t.supersededOrder[1:]
	}
	t.superseded[boot] = true
	t.supersededOrder = append(t.supersededOrder, boot)
}

// laneless is the sessions of other boots without a lane for which pick returns true. pick is
// called with the session locked.
func (t *sessions) laneless(boot transfer.Boot, pick func(*session) bool) (out []*session) {
	for _, s := range t.list() {
		if s.boot == boot || s.channel.State().Lanes > 0 {
			continue
		}
		s.mu.Lock()
		if pick(s) {
			out = append(out, s)
		}
		s.mu.Unlock()
	}
	return out
}

// shedSoon runs shed, once at a time.
func (t *sessions) shedSoon() {
	if !t.shedding.Swap(true) && !t.tasks.run(t.shed) {
		t.shedding.Store(false)
	}
}

// holder is the process that sessions belong to. Certificates identify it; without them each
// session counts alone.
type holder struct {
	id     hello.Identity
	source netip.Prefix
	boot   transfer.Boot // without a certificate
}

func (s *session) holder() holder {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.id == (hello.Identity{}) {
		return holder{boot: s.boot}
	}
	return holder{id: s.id, source: s.source}
}

// shed ends, of the process that holds the most waiting bytes, the session that has held more than
// its share for the longest time, if that is too long. A process that holds less loses none,
// however long its frames have waited: they may wait for the room that the other one holds.
func (t *sessions) shed() {
	defer t.shedding.Store(false)
	type candidate struct {
		s     *session
		since time.Time
	}
	limit := time.Now().Add(-t.stuckAfter)
	bytes, longest := map[holder]int{}, map[holder]candidate{}
	var fullest holder
	for _, s := range t.list() {
		n, since := s.channel.Waiting()
		h := s.holder()
		if bytes[h] += n; bytes[h] > bytes[fullest] {
			fullest = h
		}
		old, known := longest[h]
		if !since.IsZero() && (!known || since.Before(old.since)) {
			longest[h] = candidate{s, since}
		}
	}
	if c := longest[fullest]; c.s != nil && c.since.Before(limit) {
		t.end(c.s, fmt.Errorf("peer: incomplete frames have taken up memory since %s: %w",
			c.since.Format(time.TimeOnly), frame.ErrFragment))
	}
}
