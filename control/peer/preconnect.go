package peer

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds of connecting to the members that gossip lists.
const (
	maxPreconnects = 64               // connection attempts at a time
	retryFailed    = 10 * time.Second // after an attempt that failed
	retryRefused   = 5 * time.Minute  // after one for which the other end had no place
	// Sessions up to which members are connected; the remaining places are for peers that requests
	// name.
	maxPreconnected = maxPeers * 3 / 4
)

var errLeft = errors.New("peer: gossip no longer lists it, and it has no lane and no lease")

// preconnector connects control lanes to the members that gossip lists, so that the first request
// that needs one does not wait for a handshake.
type preconnector struct {
	*dialer

	mu      sync.Mutex                  // protects all below
	running map[transfer.Boot]bool      // members being connected
	retryAt map[transfer.Boot]time.Time // members that failed
}

func newPreconnector(d *dialer) *preconnector {
	return &preconnector{dialer: d, running: map[transfer.Boot]bool{},
		retryAt: map[transfer.Boot]time.Time{}}
}

// update connects to new members, and ends the sessions of members that have left. Of two members
// the one with the lower boot connects.
func (p *preconnector) update(now time.Time, members []cluster.Member) {
	if members == nil {
		return
	}
	listed := make(map[transfer.Boot]bool, len(members))
	for _, x := range members {
		listed[x.Boot] = true
	}
	p.endLeft(now, listed)
	p.mu.Lock()
	defer p.mu.Unlock()
	for boot, at := range p.retryAt {
		if !listed[boot] || !now.Before(at) {
			delete(p.retryAt, boot)
		}
	}
	for _, x := range members {
		if bytes.Compare(p.opt.Boot[:], x.Boot[:]) >= 0 || p.running[x.Boot] ||
			p.sessions.get(x.Boot) != nil || p.sessions.isSuperseded(x.Boot) {
			continue
		}
		if _, failed := p.retryAt[x.Boot]; failed || len(p.running) >= maxPreconnects ||
			p.sessions.count()+len(p.running) >= maxPreconnected {
			continue
		}
		p.running[x.Boot] = p.tasks.run(func() { p.connectMember(p.tasks.ctx, x) })
	}
}

// endLeft ends the sessions of members that have left, and have no lane and no lease. A frame that
// was not acknowledged keeps such a session for idleAfter, which few transfers exceed: a process
// that was killed never acknowledges it. The same holds for a peer that gossip has not listed, such
// as a member that was killed before the news of it came.
func (p *preconnector) endLeft(now time.Time, listed map[transfer.Boot]bool) {
	for _, s := range p.sessions.list() {
		st := s.channel.State()
		away := now.Sub(st.Since)
		s.mu.Lock()
		left := st.Lanes == 0 && !listed[s.boot] && away > downAfter &&
			(s.member || away > p.sessions.idleAfter)
		s.member = s.member || listed[s.boot]
		s.mu.Unlock()
		switch {
		case !left || p.opt.Handler.Busy(s.boot):
		case away > p.sessions.idleAfter:
			p.sessions.endIf(s, func() bool { return s.channel.State().Lanes == 0 }, errLeft)
		default:
			p.sessions.endUnused(s, errLeft)
		}
	}
}

// connectMember connects to one member.
func (p *preconnector) connectMember(ctx context.Context, x cluster.Member) {
	s, err := p.hello(ctx, x.Endpoint, true)
	if err == nil && s != nil {
		s.mu.Lock()
		s.dialed, s.member = true, true
		s.mu.Unlock()
		err = p.dialLanes(ctx, s)
	}
	if err != nil && ctx.Err() == nil {
		p.opt.Log.Debug("member not connected", "peer", x.Boot.String(), "endpoint", x.Endpoint,
			"err", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.running, x.Boot)
	// Another boot may answer at the address, as after a restart, while gossip lists the old one for a
	// while: the member is not connected then either.
	switch {
	case errors.Is(err, hello.ErrPreconnect):
		p.retryAt[x.Boot] = time.Now().Add(retryRefused)
	case err != nil || s == nil || s.boot != x.Boot:
		p.retryAt[x.Boot] = time.Now().Add(retryFailed)
	}
}
