package gossip

import (
	"fmt"
	"log/slog"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/internal/admit"
)

// member starts one that asks absent members every fifth of a second.
func member(t *testing.T, node, listen string, join ...string) *Gossip {
	t.Helper()
	m := cluster.Member{Node: node, Endpoint: "127.0.0.1:1", Version: "test"}
	copy(m.Boot[:], node)
	g, err := Start(Options{Listen: listen, Join: join, Log: slog.New(slog.DiscardHandler),
		reunion: 200 * time.Millisecond}, m, admit.NewMembers())
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func (g *Gossip) nodes() (all []string) {
	for _, m := range g.Members() {
		all = append(all, m.Node)
	}
	slices.Sort(all)
	return all
}

// A member that was declared dead, and sends no requests itself, is a member again once others
// reach it.
func TestReunion(t *testing.T) {
	t.Parallel()
	a := member(t, "a", "127.0.0.1:0")
	defer func() { _ = a.Leave() }()
	b := member(t, "b", "127.0.0.1:0", a.Address())
	at := b.Address()
	hasMembers := func(g *Gossip, want ...string) func() bool {
		return func() bool { return slices.Equal(g.nodes(), want) }
	}
	poll(t, "two members", hasMembers(a, "a", "b"))
	b.stop()
	b.wg.Wait()
	if err := b.list.Shutdown(); err != nil { // without a farewell
		t.Fatal(err)
	}
	poll(t, "b is dead", hasMembers(a, "a"))
	b = member(t, "b", at) // with the number of its state that a has declared dead
	poll(t, "b is back at a", hasMembers(a, "a", "b"))
	poll(t, "a is back at b", hasMembers(b, "a", "b"))
	if err := b.Leave(); err != nil {
		t.Fatal(err)
	}
}

// A round asks a bounded number of absent members, and one that is present, but never itself.
func TestRound(t *testing.T) {
	t.Parallel()
	d := &self{members: map[string]cluster.Member{"x": {Address: "10.0.0.2:1"}},
		lost: map[string]lostMember{}}
	gone := func(i int) {
		d.loseLocked(&memberlist.Node{Name: fmt.Sprint(i), Addr: net.IPv4(10, 1,
			byte(i>>8), byte(i)), Port: 1})
	}
	for i := range 3 * maxLost {
		gone(i)
	}
	if len(d.lost) != maxLost {
		t.Errorf("%d lost members are kept", len(d.lost))
	}
	join := []string{"self:1", "there:1", "away:1", "partly:1", "unknown:1"}
	at := map[string][]string{"self:1": {"10.0.0.1:1"}, "there:1": {"10.0.0.2:1"},
		"away:1": {"10.0.0.3:1"}, "partly:1": {"10.0.0.2:1", "10.0.0.4:1"}}
	got := d.round("10.0.0.1:1", join, func(a string) []string { return at[a] })
	if len(got) != reunionAsks+3 {
		t.Fatalf("asked: %v", got)
	}
	slices.Sort(got[reunionAsks:])
	if !slices.Equal(got[reunionAsks:], []string{"10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1"}) {
		t.Errorf("asked: %v", got)
	}
	many := func(string) (all []string) {
		for i := range 50 {
			all = append(all, fmt.Sprintf("10.2.0.%d:1", i))
		}
		return all
	}
	clear(d.lost)
	if got := d.round("10.0.0.1:1", []string{"headless:1"}, many); len(got) != reunionAsks+1 {
		t.Errorf("asked %d addresses of one name", len(got))
	}
	clear(d.lost)
	d.lost["old"] = lostMember{"10.0.0.9:1", time.Now().Add(-2 * lostFor)}
	d.lost["replaced"] = lostMember{"10.0.0.2:1", time.Now()}
	d.members["own"] = cluster.Member{Address: "10.0.0.1:1"}
	if got := d.round("10.0.0.1:1", nil, nil); !slices.Equal(got, []string{"10.0.0.2:1"}) ||
		len(d.lost) != 0 {
		t.Errorf("asked: %v; kept: %v", got, d.lost)
	}
	if got := d.round("10.0.0.2:1", nil, nil); !slices.Equal(got, []string{"10.0.0.1:1"}) {
		t.Errorf("asked: %v", got)
	}
}
