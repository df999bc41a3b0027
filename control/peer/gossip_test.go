// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
)

// A member that cannot be joined is asked on beside those that can, and said once, as is that it is
// joined.
func TestMissedMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		start := time.Now()
		var asked []string
		ask := func(_ context.Context, a string) error {
			asked = append(asked, a)
			switch since := time.Since(start); {
			case a == "late:1" && since < joinPatience/2, a == "dead:1" && since < 10*time.Minute:
				return errors.New("nobody there")
			}
			return nil
		}
		joinAll(t.Context(), []string{"up:1", "late:1", "dead:1"}, ask,
			slog.New(slog.NewTextHandler(&log, nil)))
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if len(lines) != 2 || !strings.Contains(lines[0], "level=WARN") || !strings.Contains(lines[0],
			"join=dead:1") || !strings.Contains(lines[0], "peer.gossip.join") ||
			!strings.Contains(lines[1], "level=INFO") || !strings.Contains(lines[1], "join=dead:1") {
			t.Errorf("%s", &log)
		}
		if n := time.Since(start); n < 10*time.Minute || n > 11*time.Minute {
			t.Errorf("it was joined after %v", n)
		}
		ups := len(slices.DeleteFunc(slices.Clone(asked), func(a string) bool { return a != "up:1" }))
		if ups != 1 || len(asked) > 100 {
			t.Errorf("one that answered was asked %d times, and all were asked %d times", ups, len(asked))
		}
	})
}

// Nothing is said, and nothing waited for, once the node ends.
func TestMissedMemberEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		ctx, stop := context.WithTimeout(t.Context(), 2*joinPatience)
		defer stop()
		ask := func(ctx context.Context, _ string) error {
			<-ctx.Done()
			return ctx.Err()
		}
		start := time.Now()
		joinAll(ctx, []string{"a:1", "b:1"}, ask, slog.New(slog.NewTextHandler(&log, nil)))
		if took := time.Since(start); took != 2*joinPatience || log.Len() > 0 {
			t.Errorf("it took %v, logged %s", took, &log)
		}
	})
}

// A node joins one that starts after it, while it still asks for another.
func TestJoinsWhoComesLater(t *testing.T) {
	free := func() string {
		// nobody else takes the port
		ln, err := net.Listen("tcp", net.JoinHostPort(testutil.Loopback(), "0"))
		if err != nil {
			t.Fatal(err)
		}
		_ = ln.Close()
		return ln.Addr().String()
	}
	up, late, dead := free(), free(), free()
	with := func(name, at string, join ...string) *node {
		return start(t, func(o *Options) { o.Node, o.Gossip = name, &Gossip{Listen: at, Join: join} })
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
		return start(t, func(o *Options) { o.Gossip = &Gossip{Listen: seed, Join: join} })
	}
	first := with()
	at := func() string { return first.gossip.list.LocalNode().Address() }
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
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	// A frame that the member never acknowledges holds its session, but not for long.
	if err := rest[1].Send(gone.opt.Boot, commit(1)); err != nil {
		t.Fatal(err)
	}
	for _, n := range rest[2:] {
		poll(t, "a member that has left is forgotten",
			func() bool { return n.sessionOf(gone) == nil })
	}
	if rest[0].sessionOf(gone) == nil {
		t.Error("forgotten with leases open")
	}
	if rest[1].sessionOf(gone) == nil {
		t.Error("forgotten with a frame to deliver")
	}
	rest[1].preconnector.endLeft(time.Now().Add(idleAfter+time.Second), nil)
	if rest[1].sessionOf(gone) != nil {
		t.Error("a frame holds the session of a member that has left")
	}
}
