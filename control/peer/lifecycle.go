// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// laneUp adds a proved lane, and starts its reader, or reads in this goroutine until the lane ends.
func (m *Mesh) laneUp(s *session, c net.Conn, over *overTLS, addr string, attach []byte,
	inline bool) error {
	l, err := newLane(c, over)
	if err != nil {
		return err
	}
	l.addr = addr
	if len(attach) != incarnationBytes {
		return fmt.Errorf("peer: lane of %s attaches %d bytes, want %d: %w", s.boot, len(attach),
			incarnationBytes, wire.ErrMalformed)
	}
	theirs := [incarnationBytes]byte(attach)
	s.life.Lock()
	s.mu.Lock()
	if s.closed || len(s.lanes) >= maxLanes {
		s.mu.Unlock()
		s.life.Unlock()
		return fmt.Errorf("peer: %s: session ended, or %d lanes are open, which is the limit",
			s.boot, maxLanes)
	}
	if s.met && s.theirs != theirs {
		// The peer lost its session and counts frames from one again. This side does the same, in a new
		// session.
		s.mu.Unlock()
		s.life.Unlock()
		m.end(s, errors.New("peer: the peer began a new session"))
		return fmt.Errorf("peer: %s began a new session: %w", s.boot, wire.ErrRefused)
	}
	s.met, s.theirs = true, theirs
	up, info := s.up, s.info
	s.up = true
	if !up {
		s.ups++
		s.saidAs = info.Endpoint
	}
	s.mu.Unlock()
	if !up {
		m.opt.Handler.PeerUp(info)
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.life.Unlock()
		return fmt.Errorf("peer: %s: session ended", s.boot)
	}
	s.lanes = append(s.lanes, l)
	s.resendLocked()
	s.mu.Unlock()
	s.life.Unlock()
	read := func() {
		rerr := l.read(func(f *peerv1.ControlFrame) error { return s.take(l, f) })
		m.laneDown(s, l, rerr)
	}
	if inline {
		read()
		return nil
	}
	m.goUnlessClosed(read, func() { _ = c.Close() })
	return nil
}

// goUnlessClosed starts a goroutine that Close joins.
func (m *Mesh) goUnlessClosed(f, otherwise func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		otherwise()
		return
	}
	m.wg.Go(f)
}

func (m *Mesh) laneDown(s *session, l *lane, err error) {
	s.mu.Lock()
	s.dropLaneLocked(l)
	s.resendLocked()
	left := len(s.lanes)
	over := s.closed
	redial := left == 0 && s.dialed && !s.dialing && !over
	if redial {
		s.dialing = true
	}
	s.mu.Unlock()
	if over {
		return
	}
	if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		m.log.Debug("control lane lost", "peer", s.boot.String(), "lanes_left", left, "err", err)
	}
	if redial {
		m.goUnlessClosed(func() { m.redial(s) }, func() {})
	}
}

// end closes a session, waits for a frame that the handler may be processing, calls PeerDown, and
// removes the session. Only then can there be another session with the boot, so that its PeerUp
// follows this PeerDown.
func (m *Mesh) end(s *session, err error) {
	s.life.Lock()
	defer s.life.Unlock()
	m.endLocked(s, false, err)
}

// endLocked is end with life held. superseded: there will be no other session with the boot.
func (m *Mesh) endLocked(s *session, superseded bool, err error) {
	m.mu.Lock()
	if superseded && !m.gone[s.boot] {
		if len(m.goneOrder) >= maxGone {
			delete(m.gone, m.goneOrder[0])
			m.goneOrder = m.goneOrder[1:]
		}
		m.gone[s.boot] = true
		m.goneOrder = append(m.goneOrder, s.boot)
	}
	m.mu.Unlock()
	s.mu.Lock()
	over, tell := s.closed, s.ups > 0 || superseded
	s.up = false
	s.mu.Unlock()
	s.close(err)
	s.mu.Lock()
	for s.delivering {
		s.quiet.Wait()
	}
	s.mu.Unlock()
	if !over && tell {
		m.opt.Handler.PeerDown(s.boot, true, err)
	}
	m.mu.Lock()
	if m.sessions[s.boot] == s {
		delete(m.sessions, s.boot)
	}
	m.mu.Unlock()
}

// supersede ends the sessions of other boots at an endpoint that now answers as boot. A session
// with a live lane stays: then several processes share the address. That may also be so if its
// lanes are lost for a moment. Therefore only a boot that itself announced the endpoint, which
// proves that its process has ended, is excluded for good; any other gets a new session when it is
// reached or calls.
func (m *Mesh) supersede(endpoint string, boot transfer.Boot) {
	old := m.laneless(boot, func(s *session) bool {
		return s.info.Endpoint == endpoint ||
			s.claimed == endpoint
	})
	for _, s := range old {
		m.supersedeOne(s, endpoint, boot)
	}
}

func (m *Mesh) supersedeOne(s *session, endpoint string, boot transfer.Boot) {
	s.life.Lock() // no lane comes up
	defer s.life.Unlock()
	s.mu.Lock()
	lives, own := len(s.lanes) > 0, slices.Contains(s.addrs, endpoint)
	s.mu.Unlock()
	if !lives {
		m.endLocked(s, own, fmt.Errorf("peer: %s answers as boot %s now", endpoint, boot))
	}
}

// laneless is the sessions of other boots without a lane for which pick returns true. pick is
// called with the session locked.
func (m *Mesh) laneless(boot transfer.Boot, pick func(*session) bool) (out []*session) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for b, s := range m.sessions {
		if b == boot {
			continue
		}
		s.mu.Lock()
		if len(s.lanes) == 0 && pick(s) {
			out = append(out, s)
		}
		s.mu.Unlock()
	}
	return out
}

// keep is the slow tick: it sends pings, reports PeerDown, dials missing lanes and ends old
// sessions.
func (m *Mesh) keep() {
	t := time.NewTicker(m.pings.Tick)
	defer t.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-t.C:
		}
		m.mu.Lock()
		all := make([]*session, 0, len(m.sessions))
		for _, s := range m.sessions {
			all = append(all, s)
		}
		m.mu.Unlock()
		for _, s := range all {
			m.look(s, time.Now())
		}
		m.meetMembers(time.Now())
	}
}

func (m *Mesh) look(s *session, now time.Time) {
	s.watch(now, m.pings)
	s.mu.Lock()
	away := time.Duration(0)
	if len(s.lanes) == 0 {
		away = now.Sub(s.since)
	}
	missing := away == 0 && s.dialed && !s.dialing && len(s.missingLocked()) > 0 &&
		now.Sub(s.lastFill) >= redialMax
	// Where the other end dialed, it dials again; where it does not, it may not know that the lanes
	// are gone.
	redial := away > 2*downAfter && !s.dialing && s.met
	if missing || redial {
		s.dialing, s.lastFill = true, now
	}
	unproved := away > openTimeout && !s.met && !s.dialing
	idle := away > idleForget && len(s.unacked) == 0
	s.mu.Unlock()
	switch {
	case idle && !m.opt.Handler.Busy(s.boot):
		m.endIdle(s, errIdle)
	case unproved:
		m.endIdle(s,
			errors.New("peer: no control lane came up within "+openTimeout.String()+" of its hello"))
	case away > forgetAfter:
		m.end(s, errors.New("peer: unreachable for "+forgetAfter.String()))
	case redial:
		m.goUnlessClosed(func() { m.redial(s) }, func() {})
	case missing:
		m.goUnlessClosed(func() {
			_ = m.dialLanes(m.ctx, s) // lanes are open; what failed was logged
			s.mu.Lock()
			s.dialing = false
			s.mu.Unlock()
		}, func() {})
	}
	if away < downAfter {
		return
	}
	s.life.Lock()
	defer s.life.Unlock()
	s.mu.Lock()
	tell := s.up && len(s.lanes) == 0
	if tell {
		s.up = false
	}
	s.mu.Unlock()
	if tell {
		m.opt.Handler.PeerDown(s.boot, false, fmt.Errorf("peer: %s has no control lane for %s", s.boot,
			away.Round(time.Millisecond)))
	}
}
