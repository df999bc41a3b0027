package sidecar

import (
	"net"
	"net/netip"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/config"
)

const (
	greetPort = 9   // discard, RFC 863
	greetMost = 256 // addresses that one rail greets
)

// greet sends an empty datagram to whatever peers have on the link of a rail that came up.
//
// Linux asks for a neighbour's hardware address once a second, from the first packet on that it cannot send; a segment of a connection
// that the fault broke is such a packet, and what is sent when the link is back waits for the next question. A peer that is asked
// itself learns our address from that, and sends what it has kept. We were asked nothing yet if the fault was on our side, so our
// question goes out now. (Both may have kept something: then the earlier question counts.)
func (n *Node) greet(r rail) {
	addr := addrOf(r.Address)
	if !addr.IsValid() || !r.prefix.IsValid() {
		return
	}
	var to []netip.AddrPort
	for _, boot := range n.dial.boots() {
		if boot != n.boot {
			to = neighbours(to, r, n.dial.railsOf(boot))
		}
	}
	if err := greetAll(addr, to); err != nil {
		n.log.Debug("peers on a link not greeted", "rail", r.Name, "err", err)
	}
}

// neighbours adds the addresses of a peer's rails that are on the link of ours, up to greetMost in all.
func neighbours(to []netip.AddrPort, ours rail, theirs []*peerv1.Rail) []netip.AddrPort {
	for _, x := range theirs {
		if a := addrOf(x.Address); x.Transport == config.TransTCP && ours.prefix.Contains(a) && a != addrOf(ours.Address) && len(to) < greetMost {
			to = append(to, netip.AddrPortFrom(a, greetPort))
		}
	}
	return to
}

func greetAll(from netip.Addr, to []netip.AddrPort) error {
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
