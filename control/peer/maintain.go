package peer

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvspray/kvspray/control/peer/delivery"
)

var (
	errIdle = errors.New("peer: unreachable for " + idleAfter.String() +
		", and nothing is open with it")
	errUnproved = errors.New("peer: no control lane came up within " + openTimeout.String() +
		" of its hello")
	errForgotten = errors.New("peer: unreachable for " + forgetAfter.String())
)

// maintain is the slow tick: it sends pings, reports PeerDown, dials missing lanes, ends old
// sessions and connects to members.
func (m *Mesh) maintain() {
	t := time.NewTicker(m.pings.Tick)
	defer t.Stop()
	for {
		select {
		case <-m.tasks.ctx.Done():
			return
		case <-t.C:
		}
		for _, s := range m.sessions.list() {
			m.dialer.check(s, time.Now())
		}
		m.preconnector.update(time.Now(), m.Members())
	}
}

// check does for one session what is due.
func (d *dialer) check(s *session, now time.Time) {
	s.channel.Watch(now, delivery.Pings{Busy: d.pings.Busy, Idle: d.pings.Idle,
		Timeout: d.pings.Timeout})
	st := s.channel.State()
	away := time.Duration(0)
	if st.Lanes == 0 {
		away = now.Sub(st.Since)
	}
	s.mu.Lock()
	missing := away == 0 && s.dialed && !s.dialing && len(s.missingLocked()) > 0 &&
		now.Sub(s.lastDial) >= redialMax
	// If the other end dialed, it dials again. If it does not, it may not have noticed that the lanes
	// are gone.
	redial := away > 2*downAfter && !s.dialing && s.proved
	if missing || redial {
		s.dialing, s.lastDial = true, now
	}
	unproved := away > openTimeout && !s.proved && !s.dialing
	idle := away > d.sessions.idleAfter && st.Unacked == 0
	s.mu.Unlock()
	switch {
	case idle && !d.opt.Handler.Busy(s.boot):
		d.sessions.endUnused(s, errIdle)
	case unproved:
		d.sessions.endUnused(s, errUnproved)
	case away > forgetAfter:
		d.sessions.end(s, errForgotten)
	case redial:
		d.tasks.run(func() { d.redial(s) })
	case missing:
		d.tasks.run(func() {
			_ = d.dialLanes(d.tasks.ctx, s) // lanes are open; it logs what failed
			s.endDialing()
		})
	}
	if away >= downAfter {
		d.reportDown(s, away)
	}
}

// reportDown calls PeerDown if s has been up and has no lane.
func (d *dialer) reportDown(s *session, away time.Duration) {
	s.life.Lock()
	defer s.life.Unlock()
	s.mu.Lock()
	down := s.up && s.channel.State().Lanes == 0
	if down {
		s.up = false
	}
	s.mu.Unlock()
	if down {
		d.opt.Handler.PeerDown(s.boot, false, fmt.Errorf("peer: %s has no control lane for %s", s.boot,
			away.Round(time.Millisecond)))
	}
}
