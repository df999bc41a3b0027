package sidecar

import (
	"net"
	"net/netip"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/config"
)

const (
	solicitPort  = 9   // discard, RFC 863
	maxSolicited = 256 // addresses that one rail solicits
)

// solicit sends an empty datagram to the peers on the link of a rail that is up again (neighbor
// solicitation).
//
// Linux asks for a neighbour's hardware address once a second, starting with the first packet that
// it cannot send. A segment of a connection that the fault broke is such a packet, and data sent
// when the link is back waits for the next request. A peer that receives a request learns this
// host's address from it, and sends its queued data. If the fault was on this side no request was
// sent yet, so this datagram causes one now. (If both sides have queued data, the earlier request
// counts.)
func (c *conversation) solicit(r rail) {
	addr := addrOf(r.Address)
	if !addr.IsValid() || !r.prefix.IsValid() {
		return
	}
	var to []netip.AddrPort
	for _, boot := range c.dial.boots() {
		if boot != c.boot {
			to = neighbours(to, r, c.dial.railsOf(boot))
		}
	}
	if err := solicitAll(addr, to); err != nil {
		c.log.Debug("neighbours on a link not solicited", "rail", r.Name, "err", err)
	}
}

// neighbors adds the addresses of a peer's rails that are on the link of this rail, up to
// maxSolicited in all.
func neighbours(to []netip.AddrPort, ours rail, theirs []*peerv1.Rail) []netip.AddrPort {
	for _, x := range theirs {
		if a := addrOf(x.Address); x.Transport == config.TransTCP && ours.prefix.Contains(a) &&
			a != addrOf(ours.Address) && len(to) < maxSolicited {
			to = append(to, netip.AddrPortFrom(a, solicitPort))
		}
	}
	return to
}

func solicitAll(from netip.Addr, to []netip.AddrPort) error {
	if len(to) == 0 {
		return nil
	}
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)))
	if err != nil {
		return err
	}
	for _, a := range to {
		if _, e := c.WriteToUDPAddrPort(nil, a); e != nil && err == nil {
			err = e
		}
	}
	if e := c.Close(); err == nil {
		err = e
	}
	return err
}
