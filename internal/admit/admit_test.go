package admit

import (
	"bytes"
	"cmp"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
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
	g := New(Limits{Unproved: 8, PerSource: 2}, nil)
	old, young, other := &conn{from: "10.0.0.1"}, &conn{from: "10.0.0.1"}, &conn{from: "10.0.0.2"}
	g.Enter(other)
	g.Enter(old).Spoke()
	g.Enter(young)
	last := &conn{from: "10.0.0.1"}
	g.Enter(last)
	if old.closed || !young.closed || other.closed || last.closed {
		t.Errorf("closed: speaking %t, silent %t, another address %t, the new one %t", old.closed,
			young.closed, other.closed, last.closed)
	}
	if g.Held() != 3 || g.Evicted() != 1 {
		t.Errorf("%d held, %d evicted", g.Held(), g.Evicted())
	}
}

// However many strangers come, an opening from the address of a member is closed only for its like.
func TestMembersLast(t *testing.T) {
	g := New(Limits{Unproved: 4, PerSource: 4}, nil)
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
		t.Errorf("closed: a member's %t, the oldest of strangers that speak %t", member.closed,
			fresh.closed)
	}
	if g.Held() != 4 {
		t.Errorf("%d held, want 4", g.Held())
	}
	if len(g.sources) > 4 {
		t.Errorf("%d sources remembered, of 4 connections", len(g.sources))
	}
}

func TestMembersBounded(t *testing.T) {
	g := New(Limits{Unproved: 4, PerSource: 4}, nil)
	for i := range maxMembers + 10 {
		g.Enter(&conn{from: net.IPv4(10, byte(i>>16), byte(i>>8), byte(i)).String()}).Proved()
	}
	if n := len(g.members.all); n != maxMembers || g.Held() != 0 {
		t.Errorf("%d members remembered, at most %d; %d held", n, maxMembers, g.Held())
	}
}

// However many addresses of an IPv6 /64 strangers use, they are one source: a newcomer from
// elsewhere stays, and so do a member and a newcomer that live in the same /64.
func TestOnePrefixIsOneSource(t *testing.T) {
	g := New(Limits{Unproved: 16, PerSource: 8}, nil)
	g.Enter(&conn{from: "2001:db8::1"}).Proved()
	member, elsewhere := &conn{from: "2001:db8::1"}, &conn{from: "2001:db8:0:1::1"}
	for _, c := range []*conn{member, elsewhere} {
		g.Enter(c).Spoke()
	}
	inside := &conn{from: "2001:db8::9"}
	g.Enter(inside).Spoke()
	for i := range 1000 {
		// Of two addresses in turn, so that each has more connections than the newcomer.
		g.Enter(&conn{from: []string{"2001:db8::a", "2001:db8::b"}[i%2]}).Spoke()
	}
	if member.closed || elsewhere.closed || inside.closed {
		t.Errorf("closed: a member's %t, a newcomer's from elsewhere %t, from the same /64 %t",
			member.closed, elsewhere.closed, inside.closed)
	}
	for i := range 1000 {
		g.Enter(&conn{from: fmt.Sprintf("2001:db8::1:%x", i)}).Spoke()
	}
	if member.closed || elsewhere.closed {
		t.Errorf("closed: a member's %t, a newcomer's from elsewhere %t", member.closed, elsewhere.closed)
	}
	if n := g.sources[netip.MustParsePrefix("2001:db8::/64")].held; n != 8 {
		t.Errorf("%d connections of strangers from one /64, at most 8", n)
	}
}

// Members of one /64 take no places from each other, however many there are.
func TestMembersOfOnePrefix(t *testing.T) {
	g := New(Limits{Unproved: 64, PerSource: 8}, nil)
	var all []*conn
	for i := range 32 {
		from := fmt.Sprintf("2001:db8::%x", i)
		g.Enter(&conn{from: from}).Proved()
		all = append(all, &conn{from: from})
	}
	for _, c := range all {
		g.Enter(c)
	}
	for i, c := range all {
		if c.closed {
			t.Errorf("the connection of member %d was closed for that of another", i)
		}
	}
}

// Strangers of a few addresses that all speak take places from each other, and none from a
// newcomer.
func TestCrowdedSourceFirst(t *testing.T) {
	g := New(Limits{Unproved: 12, PerSource: 6}, nil)
	fresh := &conn{from: "10.0.0.9"}
	g.Enter(fresh).Spoke()
	for i := range 1000 {
		g.Enter(&conn{from: fmt.Sprintf("10.1.0.%d", i%5)}).Spoke()
	}
	if fresh.closed {
		t.Error("a newcomer made room for strangers of five addresses")
	}
	if g.Held() != 12 {
		t.Errorf("%d held, want 12", g.Held())
	}
}

// scan finds the victim among all connections of a gate, without its order.
func scan(g *Gate, key netip.Prefix) *Visit {
	fullest := func(rows map[any][]*Visit) (best []*Visit) {
		for _, r := range rows {
			if len(r) > len(best) || len(r) == len(best) && r[0].age < best[0].age {
				best = r
			}
		}
		return best
	}
	by := func(all []*Visit, of func(*Visit) any) map[any][]*Visit {
		rows := map[any][]*Visit{}
		for _, v := range all {
			rows[of(v)] = append(rows[of(v)], v)
		}
		return rows
	}
	var all []*Visit
	own := g.sources[key]
	full := own != nil && own.held >= g.limits.PerSource
	if !full && g.held < g.limits.Unproved {
		return nil
	}
	for class := range classes {
		for k, s := range g.sources {
			for e := s.crowds[class].Front(); e != nil && (!full || k == key); e = e.Next() {
				all = append(all, e.Value.(*Visit))
			}
		}
		if len(all) > 0 {
			break
		}
	}
	slices.SortFunc(all, func(a, b *Visit) int { return cmp.Compare(a.age, b.age) })
	all = fullest(by(all, func(v *Visit) any { return v.key }))
	if all[0].key.IsSingleIP() {
		return all[0]
	}
	return fullest(by(all, func(v *Visit) any { return v.from }))[0]
}

// The order that a gate keeps gives the same victim as a search through all connections.
func TestVictimIsThatOfAScan(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	g := New(Limits{Unproved: 48, PerSource: 8}, nil)
	var in []*Visit
	evicted := 0
	for range 50_000 {
		c := &conn{from: fmt.Sprintf("10.0.0.%d", rng.IntN(30))}
		if rng.IntN(2) == 0 {
			c.from = fmt.Sprintf("2001:db8:0:%x::%x", rng.IntN(6), rng.IntN(6))
		}
		probe := &Visit{from: Source(c)}
		probe.key = SourceOf(probe.from)
		if g.members.has(probe.from) {
			probe.key = netip.PrefixFrom(probe.from, probe.from.BitLen())
		}
		want := scan(g, probe.key)
		in = append(in, g.Enter(c))
		if want != nil {
			evicted++
			if want.class >= 0 || !want.conn.(*conn).closed {
				t.Fatalf("another one was closed than %v, of class %d", want.from, want.class)
			}
		}
		if g.Evicted() != uint64(evicted) {
			t.Fatalf("%d closed, want %d", g.Evicted(), evicted)
		}
		for range rng.IntN(3) {
			i := rng.IntN(len(in))
			switch rng.IntN(8) {
			case 0:
				in[i].Leave()
			case 1:
				if rng.IntN(20) == 0 {
					in[i].Proved()
				}
			default:
				in[i].Spoke()
			}
		}
		in = slices.DeleteFunc(in, func(v *Visit) bool { return v.class < 0 })
	}
	if evicted < 1000 {
		t.Fatalf("%d evicted: not what this test is about", evicted)
	}
	for _, v := range in {
		v.Leave()
	}
	if g.held != 0 || len(g.sources) != 0 {
		t.Errorf("%d held, %d sources after all have left", g.held, len(g.sources))
	}
}

// Unread bytes put a connection behind others, and do not make it one that
// speaks.
func TestUnreadBytesPromoteNone(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	g := New(Limits{Unproved: 4, PerSource: 4}, nil)
	var first *Visit
	for i := range 8 {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if i == 0 {
			if _, err := c.Write([]byte{22, 3, 1, 0}); err != nil {
				t.Fatal(err)
			}
		}
		far, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer far.Close()
		for i == 0 && !unread(far) {
			runtime.Gosched()
		}
		v := g.Enter(far)
		if i == 0 {
			first = v
		}
		if i == 4 && first.class != silent {
			t.Errorf("class %d after its turn, want %d", first.class, silent)
		}
	}
	if g.Evicted() != 4 || first.class > silent {
		t.Errorf("%d evicted, class %d", g.Evicted(), first.class)
	}
}

func TestLogLine(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
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
