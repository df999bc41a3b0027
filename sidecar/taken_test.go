package sidecar

import (
	"context"
	"net"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
)

// A sidecar whose socket or port is taken ends before it contacts a member: members that have its
// address would gossip about a sidecar that never served.
func TestFailedStartContactsNoMember(t *testing.T) {
	first := start(t, nil)
	gossip := net.JoinHostPort(testutil.Loopback(), "0")
	for what, taken := range map[string]func(*config.Config){
		"engine.socket": func(c *config.Config) { c.Engine.Socket = first.cfg.Engine.Socket },
		"http.listen":   func(c *config.Config) { c.HTTP.Listen = first.HTTPAddr() },
		"peer.listen":   func(c *config.Config) { c.Peer.Listen = first.Endpoint() },
	} {
		t.Run(what, func(t *testing.T) {
			// The member that it is to join only accepts connections.
			member, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = member.Close() }()
			n, err := New(Options{Version: "test", Config: testConfig(t, func(c *config.Config) {
				c.Peer.Gossip.Listen, c.Peer.Gossip.Join = gossip, []string{member.Addr().String()}
				taken(c)
			})})
			if err != nil {
				t.Fatal(err)
			}
			if err := n.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "another") {
				t.Fatalf("it ran on what is taken: %v", err)
			}
			if at := n.Endpoint(); at != "" {
				t.Errorf("its endpoint is %s, want none", at)
			}
			// Connections are taken in the order in which they came: one of its own would be before
			// ours.
			ours, err := net.Dial("tcp", member.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = ours.Close() }()
			c, err := member.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			if c.RemoteAddr().String() != ours.LocalAddr().String() {
				t.Errorf("it has contacted a member, from %s", c.RemoteAddr())
			}
		})
	}
}
