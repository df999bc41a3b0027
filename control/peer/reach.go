// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/kvspray/kvspray/internal/sys/usertimeout"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// LinkDown reports that the link of a local address is down. Control lanes over it end at once,
// rather than after a ping without an answer, and their frames are sent again on other lanes.
func (m *Mesh) LinkDown(addr net.IP) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.sessions {
		s.mu.Lock()
		for _, l := range s.lanes {
			if a, ok := l.conn.LocalAddr().(*net.TCPAddr); ok && a.IP.Equal(addr) {
				l.fail(errLinkDown) // its reader drops it and sends its frames again
			}
		}
		s.mu.Unlock()
	}
}

var errLinkDown = errors.New("peer: the link of this address is down")

// Connect connects to endpoint in the background. PeerUp or ConnectFailed follows; several calls
// for one endpoint may share one answer.
func (m *Mesh) Connect(endpoint string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed || !m.started {
		return
	}
	if _, busy := m.connecting[endpoint]; busy {
		m.connecting[endpoint] = true
		return
	}
	if len(m.connecting) >= maxConnects {
		m.wg.Go(func() {
			m.opt.Handler.ConnectFailed(endpoint,
				fmt.Errorf("peer: connect to %s: %d connection attempts are in progress", endpoint,
					maxConnects))
		})
		return
	}
	m.connecting[endpoint] = false
	m.wg.Go(func() { m.connect(endpoint) })
}

// connect sends Hello, opens lanes, and answers a Connect once.
func (m *Mesh) connect(endpoint string) {
	s, err := m.hello(m.ctx, endpoint, false)
	if err == nil && s == nil { // ourselves
		m.connected(endpoint)
		key, _ := m.PeerKey(m.opt.Boot)
		m.opt.Handler.PeerUp(Peer{Boot: m.opt.Boot, Node: m.opt.Node, Endpoint: endpoint,
			HostBoot: m.opt.HostBoot, SameHost: true,
			Rails: m.opt.Rails(), Version: m.opt.Versions.Max, Features: m.opt.Features,
			Release: m.opt.Version, Key: key})
		return
	}
	before := 0
	if err == nil {
		s.mu.Lock()
		s.dialed = true
		before = s.ups
		open := s.up && len(s.lanes) > 0
		s.mu.Unlock()
		if !open {
			err = m.dialLanes(m.ctx, s)
		}
	}
	again := m.connected(endpoint) // from here on another call gets an answer of its own
	if m.ctx.Err() != nil {
		return
	}
	if err != nil {
		m.opt.Handler.ConnectFailed(endpoint, err)
		return
	}
	// The session may have been up before, or have come up meanwhile under another name of the peer,
	// or be over again.
	s.life.Lock()
	defer s.life.Unlock()
	s.mu.Lock()
	info, up, said := s.info, s.up && !s.closed, s.ups != before && s.saidAs == endpoint && !again
	s.mu.Unlock()
	info.Endpoint = endpoint
	switch {
	case said:
	case up:
		m.opt.Handler.PeerUp(info)
	default:
		m.opt.Handler.ConnectFailed(endpoint, fmt.Errorf("peer: connect to %s: its lanes were "+
			"lost: %w", endpoint, net.ErrClosed))
	}
}

// connected ends a connection attempt. It reports whether Connect was called again meanwhile: the
// answer may have been sent before that call.
func (m *Mesh) connected(endpoint string) (again bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	again = m.connecting[endpoint]
	delete(m.connecting, endpoint)
	return again
}

// dialLanes opens the missing lanes, all at once, because the path to one address may be dead. It
// fails only if no lane is open afterwards.
func (m *Mesh) dialLanes(ctx context.Context, s *session) error {
	s.mu.Lock()
	missing := s.missingLocked()
	s.mu.Unlock()
	errs := make([]error, len(missing))
	var wg sync.WaitGroup
	for i, to := range missing {
		wg.Go(func() {
			if errs[i] = m.dialLane(ctx, s, to); errs[i] != nil {
				m.log.Debug("control lane not opened", "peer", s.boot.String(), "address", to.addr,
					"err", errs[i])
			}
		})
	}
	wg.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.lanes) > 0 {
		return nil
	}
	return errors.Join(errs...)
}

// target is a control address of a peer; index is its place among them.
type target struct {
	addr  string
	index int
}

// missingLocked is the control addresses without a lane.
func (s *session) missingLocked() (out []target) {
	for i, a := range s.addrs {
		if !slices.ContainsFunc(s.lanes, func(l *lane) bool { return l.addr == a }) {
			out = append(out, target{a, i})
		}
	}
	return out
}

func (m *Mesh) dialLane(ctx context.Context, s *session, to target) error {
	if m.opt.Credentials == nil && !loopback(to.addr) {
		return fmt.Errorf("peer: control lane to %s: %w: set peer.cluster_key_file or peer.tls",
			to.addr, ErrUnsafe)
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	c, err := m.dialFrom(ctx, m.localFor(to), to.addr)
	if err != nil {
		return fmt.Errorf("peer: control lane: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	o, over, err := m.proveTo(ctx, s, c, to.addr)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = m.laneUp(s, c, over, to.addr, o.Attach, false)
	}
	if err != nil {
		_ = c.Close()
		return fmt.Errorf("peer: control lane to %s at %s: %w", s.boot, to.addr, err)
	}
	return nil
}

// proveTo makes a control lane of a dialed connection.
func (m *Mesh) proveTo(ctx context.Context, s *session, c net.Conn, addr string) (*wire.Opened,
	*overTLS, error) {
	over, err := m.secure(ctx, c, addr)
	if err != nil {
		return nil, nil, err
	}
	binding, id, err := over.binding()
	if err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	key, mine, same := s.info.Key, s.mine, s.id == id
	s.mu.Unlock()
	if !same {
		return nil, nil, fmt.Errorf("its certificate differs from that of its hello: %w", wire.ErrRefused)
	}
	rw := c
	if over != nil {
		rw = over.Conn
	}
	o, err := wire.Dial(rw, wire.DialParams{Purpose: wire.PurposeControl, Self: m.opt.Boot,
		Peer: s.boot, Key: key, Attach: mine[:], Binding: binding})
	return o, over, err //nolint:wrapcheck // the caller names the lane
}

// localFor is the local rail for a lane to one of the peer's rails: the first for the first and so
// on, if the route leaves the choice open. nil: the route chooses.
func (m *Mesh) localFor(to target) net.IP {
	m.mu.Lock()
	defer m.mu.Unlock()
	if to.index == 0 || len(m.control) == 0 {
		return nil
	}
	host, _, err := net.SplitHostPort(m.control[(to.index-1)%len(m.control)].ln.Addr().String())
	if err != nil {
		return nil
	}
	return net.ParseIP(host)
}

// dialFrom dials from a local address, and from any address if that one has no route to the peer.
func (m *Mesh) dialFrom(ctx context.Context, local net.IP, addr string) (net.Conn, error) {
	if local != nil {
		bound, cancel := context.WithTimeout(ctx, boundTimeout)
		defer cancel()
		d := usertimeout.Dialer(m.pings.HostSilence)
		d.LocalAddr = &net.TCPAddr{IP: local}
		if c, err := d.DialContext(bound, "tcp", addr); err == nil {
			return c, nil
		}
	}
	//nolint:wrapcheck // the caller adds what it dialed for
	return usertimeout.Dialer(m.pings.HostSilence).DialContext(ctx, "tcp", addr)
}

// needed reports whether the session has frames to send, leases or a request.
func (m *Mesh) needed(s *session) bool {
	s.mu.Lock()
	waits := len(s.unacked) > 0
	s.mu.Unlock()
	return waits || m.opt.Handler.Busy(s.boot)
}

// redial opens lanes again, with growing pauses, until one is open or the session has ended.
func (m *Mesh) redial(s *session) {
	defer func() {
		s.mu.Lock()
		s.dialing = false
		s.mu.Unlock()
	}()
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = redialFirst, redialMax
	wait.Reset()
	for {
		s.mu.Lock()
		endpoint, done := s.whereLocked(), s.closed || len(s.lanes) > 0
		s.mu.Unlock()
		if done || m.ctx.Err() != nil {
			return
		}
		// The same process may answer at its other addresses: perhaps only the path to its endpoint was
		// lost.
		var others sync.WaitGroup
		others.Go(func() { _ = m.dialLanes(m.ctx, s) }) // what failed was logged
		got, err := m.hello(m.ctx, endpoint, !m.needed(s))
		others.Wait()
		if errors.Is(err, ErrAcquainted) && !m.needed(s) {
			m.endIdle(s, fmt.Errorf("peer: no request needs it: %w", err))
			return
		}
		if err == nil && got != nil {
			err = m.dialLanes(m.ctx, got)
			if err == nil && got != s {
				got.mu.Lock()
				got.dialed = true
				got.mu.Unlock()
			}
		}
		if err != nil {
			m.log.Debug("peer not reached again", "peer", s.boot.String(), "endpoint", endpoint, "err", err)
		}
		t := time.NewTimer(wait.NextBackOff())
		select {
		case <-t.C:
		case <-m.ctx.Done():
			t.Stop()
			return
		}
	}
}

// suspect dials an endpoint at once if a caller claims the endpoint of another boot without lanes:
// the boot that answers there is the proof.
func (m *Mesh) suspect(endpoint string, boot transfer.Boot) {
	old := m.laneless(boot, func(s *session) bool {
		// An unproved session is not worth a dial: any holder of a key can invent one.
		mine := s.whereLocked() == endpoint && !s.dialing && !s.closed && s.met
		s.dialing = s.dialing || mine
		return mine
	})
	for _, s := range old {
		m.goUnlessClosed(func() { m.redial(s) }, func() {})
	}
}
