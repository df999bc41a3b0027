package sidecar

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/transport"
)

// Solicited are the peers' tcp rails on the same link, and no more of them than the bound.
func TestNeighbours(t *testing.T) {
	ours := rail{Rail: transport.Rail{Name: "a", Address: "10.1.0.1:4000"},
		prefix: netip.MustParsePrefix("10.1.0.0/16")}
	got := neighbours(nil, ours, []*peerv1.Rail{
		{Transport: "tcp", Address: "10.1.0.2:4000", Down: true}, {Transport: "tcp",
			Address: "10.2.0.2:4000"}, {Transport: "gdr", Address: "10.1.0.3:1"},
		{Transport: "tcp", Address: "10.1.0.1:5000"}, {Transport: "tcp", Address: "host:1"},
		{Transport: "tcp", Address: "[::ffff:10.1.0.4]:1"},
	})
	if s := fmt.Sprint(got); s != "[10.1.0.2:9 10.1.0.4:9]" {
		t.Errorf("solicited %s", s)
	}
	var many []*peerv1.Rail
	for i := range 300 {
		many = append(many, &peerv1.Rail{Transport: "tcp", Address: fmt.Sprintf("10.1.%d.%d:1",
			1+i/200, 1+i%200)})
	}
	if n := len(neighbours(got, ours, many)); n != maxSolicited {
		t.Errorf("%d solicited, the bound is %d", n, maxSolicited)
	}
}

// An address that cannot be reached keeps no other from being solicited.
func TestSolicitAll(t *testing.T) {
	l, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	here := l.LocalAddr().(*net.UDPAddr).AddrPort()
	if err := solicitAll(netip.MustParseAddr("127.0.0.1"),
		[]netip.AddrPort{netip.MustParseAddrPort("[2001:db8::1]:9"), here}); err == nil {
		t.Error("an address of another family was reached")
	}
	if err := l.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if n, from, err := l.ReadFromUDPAddrPort(make([]byte, 16)); err != nil || n != 0 ||
		from.Addr() != here.Addr() {
		t.Errorf("%d bytes from %v, %v", n, from, err)
	}
	if err := solicitAll(netip.MustParseAddr("127.0.0.1"), nil); err != nil {
		t.Error(err)
	}
}
