// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"bytes"
	"log/slog"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// conn is a connection from an address; it records whether it was closed.
type conn struct {
	net.Conn
	from   string
	closed bool
}

func (c *conn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(c.from), Port: 1} }
func (c *conn) Close() error         { c.closed = true; return nil }

func TestSourceLimit(t *testing.T) {
	g := New(Limits{Unproved: 8, PerSource: 2})
	old, young, other := &conn{from: "10.0.0.1"}, &conn{from: "10.0.0.1"}, &conn{from: "10.0.0.2"}
	g.Enter(other)
	g.Enter(old).Spoke()
	g.Enter(young)
	last := &conn{from: "10.0.0.1"}
	g.Enter(last)
	if old.closed || !young.closed || other.closed || last.closed {
		t.Errorf("closed: speaking %t, silent %t, another address %t, the new one %t", old.closed, young.closed, other.closed, last.closed)
	}
	if g.Held() != 3 || g.Evicted() != 1 {
		t.Errorf("%d held, %d evicted", g.Held(), g.Evicted())
	}
}

// However many strangers come, an opening from the address of a member is closed only for its like.
func TestMembersLast(t *testing.T) {
	g := New(Limits{Unproved: 4, PerSource: 4})
	known := g.Enter(&conn{from: "10.0.0.1"})
	if !known.Proved() || known.Proved() || known.Leave() {
		t.Error("a proof counts once")
	}
	member := &conn{from: "10.0.0.1"}
	g.Enter(member)
	fresh := &conn{from: "10.0.0.9"}
	v := g.Enter(fresh)
	v.Spoke()
	for i := range 1000 {
		g.Enter(&conn{from: net.IPv4(10, 1, byte(i>>8), byte(i)).String()})
	}
	if member.closed || fresh.closed {
		t.Errorf("closed: a member's %t, a newcomer's that spoke %t", member.closed, fresh.closed)
	}
	for i := range 1000 {
		g.Enter(&conn{from: net.IPv4(10, 2, byte(i>>8), byte(i)).String()}).Spoke()
	}
	if member.closed || !fresh.closed || v.Proved() {
		t.Errorf("closed: a member's %t, the oldest of strangers that speak %t", member.closed, fresh.closed)
	}
	if g.Held() != 4 {
		t.Errorf("%d held, want 4", g.Held())
	}
	if len(g.sources) > 4 {
		t.Errorf("%d sources remembered, of 4 connections", len(g.sources))
	}
}

func TestMembersBounded(t *testing.T) {
	g := New(Limits{Unproved: 4, PerSource: 4})
	for i := range maxMembers + 10 {
		g.Enter(&conn{from: net.IPv4(10, byte(i>>16), byte(i>>8), byte(i)).String()}).Proved()
	}
	if len(g.members) != maxMembers || g.Held() != 0 {
		t.Errorf("%d members remembered, at most %d; %d held", len(g.members), maxMembers, g.Held())
	}
}

func TestLogLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		l := Log{Logger: slog.New(slog.NewTextHandler(&out, nil))}
		for range 3000 {
			l.Note(slog.LevelWarn, "refused")
			time.Sleep(time.Millisecond)
		}
		if n := strings.Count(out.String(), "\n"); n != 3 {
			t.Errorf("%d lines in three seconds:\n%s", n, &out)
		}
		if !strings.Contains(out.String(), "left_out=999") {
			t.Errorf("no count of what was left out:\n%s", &out)
		}
	})
}
