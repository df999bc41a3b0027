package testutil

import (
	"net"
	"testing"
)

// Connections to the address leave from another one: else it could hold a port that a test wants
// again.
func TestLoopback(t *testing.T) {
	l, err := net.Listen("tcp", net.JoinHostPort(Loopback(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if from := c.LocalAddr().(*net.TCPAddr).IP.String(); from == Loopback() {
		t.Errorf("a connection to %s leaves from there", from)
	}
}
