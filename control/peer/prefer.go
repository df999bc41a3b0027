// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"net"
	"net/netip"

	"github.com/kvspray/kvspray/transfer"
)

// Prefer sets the local address over which frames to boot are sent from now on, while a lane there
// is healthy; the zero address: any. The data scheduler knows which rail has the shortest queue.
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
