// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"net"
	"net/netip"

	"github.com/kvspray/kvspray/transfer"
)

// Prefer says over which of our addresses frames to boot should go from now on, as long as nothing
// speaks against a lane there; the zero address: over any. Whoever moves bytes knows in front of
// which rail the queue is short.
func (m *Mesh) Prefer(boot transfer.Boot, addr netip.Addr) {
	s := m.session(boot)
	if s == nil {
		return
	}
	s.mu.Lock()
	s.prefer = addr
	s.mu.Unlock()
}

// localAddr of a connection; the zero address: it has none.
func localAddr(c net.Conn) netip.Addr {
	if a, ok := c.LocalAddr().(*net.TCPAddr); ok {
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
