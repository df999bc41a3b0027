package peer

import (
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/cluster/gossip"
	"github.com/kvspray/kvspray/internal/testutil"
)

func joiner(o gossip.Options) cluster.Join {
	o.Log = slog.New(slog.DiscardHandler)
	return gossip.Joiner(o)
}

// A node joins one that starts after it, while it still asks for another.
func TestJoinsWhoComesLater(t *testing.T) {
	free := func() string {
		// no other process takes the port
		ln, err := net.Listen("tcp", net.JoinHostPort(testutil.Loopback(), "0"))
		if err != nil {
			t.Fatal(err)
		}
		_ = ln.Close()
		return ln.Addr().String()
	}
	up, late, dead := free(), free(), free()
	with := func(name, at string, join ...string) *node {
		return start(t, func(o *Options) {
			o.Node, o.Join = name, joiner(gossip.Options{Listen: at, Join: join})
		})
	}
	a := with("a", up)
	b := with("b", free(), up, late, dead)
	poll(t, "two members", func() bool { return len(a.Members()) == 2 && len(b.Members()) == 2 })
	c := with("c", late)
	poll(t, "three members", func() bool {
		return len(a.Members()) == 3 && len(b.Members()) == 3 &&
			len(c.Members()) == 3
	})
}

// Members meet by gossip alone, by control lanes; one that has left is forgotten.
func TestMembersMeet(t *testing.T) {
	seed := net.JoinHostPort(testutil.Loopback(), "0")
	with := func(join ...string) *node {
		return start(t, func(o *Options) { o.Join = joiner(gossip.Options{Listen: seed, Join: join}) })
	}
	first := with()
	at := func() string { return first.Cluster().(*gossip.Gossip).Address() }
	all := []*node{first}
	for range 5 {
		all = append(all, with(at()))
	}
	met := func(n, to *node) bool {
		s := n.sessionOf(to)
		return s != nil && s.channel.State().Lanes > 0
	}
	for _, a := range all {
		for _, b := range all {
			if a != b {
				poll(t, "two members meet", func() bool { return met(a, b) })
			}
		}
	}
	gone, rest := all[5], all[:5]
	rest[0].mu.Lock()
	rest[0].busy[gone.opt.Boot] = true // leases with it are open here
	rest[0].mu.Unlock()
	hold := func(on bool) { // it may be forgotten before its Close returns
		rest[1].mu.Lock()
		rest[1].busy[gone.opt.Boot] = on
		rest[1].mu.Unlock()
	}
	hold(true)
	left := time.Now() // its lanes end later
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	// A frame that the member never acknowledges holds its session, but no longer than idleAfter.
	if err := rest[1].Send(gone.opt.Boot, commit(1)); err != nil {
		t.Fatal(err)
	}
	hold(false)
	for _, n := range rest[2:] {
		poll(t, "a member that has left is forgotten",
			func() bool { return n.sessionOf(gone) == nil })
	}
	if rest[0].sessionOf(gone) == nil {
		t.Error("forgotten with leases open")
	}
	if rest[1].sessionOf(gone) == nil && time.Since(left) < idleAfter {
		t.Error("forgotten with a frame to deliver")
	}
	rest[1].preconnector.endLeft(time.Now().Add(idleAfter+time.Second), nil)
	if rest[1].sessionOf(gone) != nil {
		t.Error("a frame holds the session of a member that has left")
	}
}

// A member that was killed before gossip listed it does not acknowledge what it was sent.
func TestMemberThatWasNeverListed(t *testing.T) {
	seed := net.JoinHostPort(testutil.Loopback(), "0")
	n := start(t, func(o *Options) { o.Join = joiner(gossip.Options{Listen: seed}) })
	unlisted := start(t, nil)
	n.Connect(unlisted.Endpoint())
	poll(t, "a lane", func() bool {
		s := n.sessionOf(unlisted)
		return s != nil && s.channel.State().Lanes > 0
	})
	if err := unlisted.Close(); err != nil {
		t.Fatal(err)
	}
	poll(t, "no lane", func() bool { return n.sessionOf(unlisted).channel.State().Lanes == 0 })
	if err := n.Send(unlisted.opt.Boot, commit(1)); err != nil {
		t.Fatal(err)
	}
	n.preconnector.endLeft(time.Now().Add(idleAfter/2), nil)
	if n.sessionOf(unlisted) == nil {
		t.Error("forgotten with a frame to deliver")
	}
	n.preconnector.endLeft(time.Now().Add(idleAfter+time.Second), nil)
	if n.sessionOf(unlisted) != nil {
		t.Error("a frame holds the session of a process that is gone")
	}
}
