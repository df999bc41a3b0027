// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bytes"
	"errors"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

// Bounds of connecting to the members that gossip lists.
const (
	meetAtOnce = 64               // connection attempts at a time
	meetAgain  = 10 * time.Second // after one that failed
	meetLater  = 5 * time.Minute  // after one for which the other end had no place
	// Sessions up to which members are connected; the remaining places are for peers that requests
	// name.
	meetMost   = MaxPeers * 3 / 4
	idleForget = 30 * time.Second // without a lane, a lease, or a frame to deliver
)

var (
	errLeft = errors.New(
		"peer: gossip no longer lists it, and it has no lane and no lease")
	errIdle = errors.New("peer: unreachable for " + idleForget.String() +
		", and nothing is open with it")
)

// meetMembers connects control lanes to the members that gossip lists, so that the first request
// that needs one does not wait for a handshake. Of two members the one with the lower boot
// connects. It ends the sessions of members that have left.
func (m *Mesh) meetMembers(now time.Time) {
	members := m.Members()
	if members == nil {
		return
	}
	there := make(map[transfer.Boot]bool, len(members))
	for _, x := range members {
		there[x.Boot] = true
	}
	m.mu.Lock()
	var left []*session
	for boot, s := range m.sessions {
		s.mu.Lock()
		if len(s.lanes) == 0 && s.member && !there[boot] && now.Sub(s.since) > downAfter {
			left = append(left, s)
		}
		s.member = s.member || there[boot]
		s.mu.Unlock()
	}
	for boot, at := range m.missed {
		if !there[boot] || !now.Before(at) {
			delete(m.missed, boot)
		}
	}
	for _, x := range members {
		if bytes.Compare(m.opt.Boot[:], x.Boot[:]) >= 0 || m.sessions[x.Boot] != nil || m.gone[x.Boot] ||
			m.meeting[x.Boot] {
			continue
		}
		if _, missed := m.missed[x.Boot]; missed || m.closed || len(m.meeting) >= meetAtOnce ||
			len(m.sessions)+len(m.meeting) >= meetMost {
			continue
		}
		m.meeting[x.Boot] = true
		m.wg.Go(func() { m.meetMember(x) })
	}
	m.mu.Unlock()
	for _, s := range left {
		if !m.opt.Handler.Busy(s.boot) {
			m.endIdle(s, errLeft)
		}
	}
}

func (m *Mesh) meetMember(x Member) {
	s, err := m.hello(m.ctx, x.Endpoint, true)
	if err == nil && s != nil {
		s.mu.Lock()
		s.dialed, s.member = true, true
		s.mu.Unlock()
		err = m.dialLanes(m.ctx, s)
	}
	if err != nil && m.ctx.Err() == nil {
		m.log.Debug("member not met", "peer", x.Boot.String(), "endpoint", x.Endpoint, "err", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.meeting, x.Boot)
	// Another boot at the address, as after a restart, is no meeting either, and gossip lists the old
	// one for a while.
	switch {
	case errors.Is(err, ErrAcquainted):
		m.missed[x.Boot] = time.Now().Add(meetLater)
	case err != nil || s == nil || s.boot != x.Boot:
		m.missed[x.Boot] = time.Now().Add(meetAgain)
	}
}
