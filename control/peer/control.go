// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/sys/usertimeout"
	"github.com/kvspray/kvspray/transfer"
)

// Rails come and go while a mesh runs. Each one should carry a control lane, so that the last
// remaining rail always does.

// controlAt is a listener for control lanes on a rail.
type controlAt struct {
	asked string // host:port
	ln    net.Listener
}

// Addresses are the control addresses for peers, the endpoint first.
func (m *Mesh) Addresses() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := []string{m.endpoint}
	for _, c := range m.control {
		out = append(out, c.ln.Addr().String())
	}
	return out
}

// Lanes are the control lanes to a peer, each with its local and its remote address.
func (m *Mesh) Lanes(boot transfer.Boot) (out []string) {
	s := m.session(boot)
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.lanes {
		out = append(out, l.conn.LocalAddr().String()+" "+l.conn.RemoteAddr().String())
	}
	slices.Sort(out)
	return out
}

// SetControl replaces Options.Control, before Listen or later. Lanes to removed addresses end with
// their links. The error names the addresses that could not be bound; a further call tries them
// again. The caller informs the peers: see Addresses and PeerAddresses.
func (m *Mesh) SetControl(ctx context.Context, addrs []string) error {
	addrs = addrs[:min(len(addrs), MaxAddrs-1)]
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed:
		return fmt.Errorf("peer: control addresses: %w", net.ErrClosed)
	case m.served == nil:
		m.opt.Control = slices.Clone(addrs)
		return m.opt.safe()
	}
	var failed error
	now := make([]controlAt, 0, len(addrs))
	for _, addr := range addrs {
		if i := slices.IndexFunc(m.control, func(c controlAt) bool { return c.asked == addr }); i >= 0 {
			now = append(now, m.control[i])
			continue
		}
		if m.opt.Credentials == nil && !loopback(addr) {
			failed = fmt.Errorf("peer: control lanes on %s: %w: set peer.cluster_key_file or peer.tls",
				addr, ErrUnsafe)
			continue
		}
		ln, err := usertimeout.ListenConfig(m.pings.HostSilence).Listen(ctx, "tcp", addr)
		if err != nil {
			failed = fmt.Errorf("peer: control lanes of a rail: %w", withRemedy(addr, err))
			continue
		}
		now = append(now, controlAt{addr, ln})
		if m.started {
			m.wg.Go(func() { m.accept(ln, false) })
		}
	}
	for _, c := range m.control {
		if !slices.Contains(now, c) {
			_ = c.ln.Close() // its acceptor notices
		}
	}
	m.control = now
	return failed
}

// PeerAddresses sets the control addresses that a peer announced. If this side dials the peer's
// lanes, the missing ones follow.
func (m *Mesh) PeerAddresses(boot transfer.Boot, addrs []string) error {
	if err := checkAddresses(addrs); err != nil {
		return fmt.Errorf("peer: control addresses of %s: %w", boot, err)
	}
	s := m.session(boot)
	if s == nil {
		return fmt.Errorf("peer: control addresses of %s: %w", boot, ErrUnknown)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.addrs, addrs) {
		s.addrs, s.lastFill = slices.Clone(addrs), time.Time{} // the keeper's next tick
	}
	return nil
}
