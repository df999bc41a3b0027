package peer

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/control/peer/opening"
	"github.com/kvspray/kvspray/internal/testutil"
)

// The load of connections without a key while members connect.
const (
	unprovedHeld  = 10_000
	unprovedRate  = 2000 // a second
	timedOpenings = 200
	unprovedTries = 3
	openingP99    = 50 * time.Millisecond
	busyPart      = 4 // a try counts if threads waited for a CPU for at most 1/busyPart of it
)

// unproved runs f for each kind of unproved connections: they come from one address or from many,
// and send nothing, or the first message of TLS that a member sends. Those that send nothing from
// one address have that of a member.
func unproved(t *testing.T, f func(t *testing.T, from func(int) [4]byte, send []byte)) {
	for _, x := range []struct {
		name string
		from func(int) [4]byte
		send []byte
	}{
		{"one address", testutil.OneStranger, nil},
		{"many addresses", testutil.ManyStrangers, nil},
		{"one address, with a message", func(int) [4]byte { return [4]byte{127, 9, 0, 1} },
			firstMessage(t)},
		{"many addresses, with a message", testutil.ManyStrangers, firstMessage(t)},
	} {
		t.Run(x.name, func(t *testing.T) { f(t, x.from, x.send) })
	}
}

// firstMessage is the first message of a lane, which needs no key.
func firstMessage(t *testing.T) []byte {
	a, b := net.Pipe()
	go func() {
		_ = tls.Client(a, &tls.Config{NextProtos: []string{"kvspray-lane"},
			InsecureSkipVerify: true}).Handshake()
	}()
	defer a.Close()
	buf := make([]byte, 64<<10)
	n, err := b.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return buf[:n]
}

// p99 of durations.
func p99(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)*99/100]
}

// Processes without a key hold ten thousand connections and open two thousand a second. Members
// connect and open lanes as if they were alone.
func TestMeasureMembersAmongUnproved(t *testing.T) {
	testutil.Measures(t)
	c, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	unproved(t, func(t *testing.T, from func(int) [4]byte, send []byte) {
		var log testutil.Buffer
		sec := secured(t, c)
		victim := start(t, func(o *Options) {
			sec(o)
			slow(o)
			o.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		})
		honest := start(t, func(o *Options) { sec(o); slow(o) })
		join(t, honest, victim)
		var took time.Duration
		good, quiet := false, false
		for range unprovedTries { // a busy machine is slow even without the load
			aloneHello, aloneLane := openings(t, honest, victim)
			stop := testutil.Strangers(t, victim.Endpoint(), unprovedHeld, unprovedRate, from, send)
			began, waited := time.Now(), testutil.WaitedForCPU(t)
			hello, lane := openings(t, honest, victim)
			each := time.Since(began)
			quiet = quiet || testutil.WaitedForCPU(t)-waited < each/busyPart
			took += each
			t.Logf("%d unproved connections in %v, %d closed for others; p99 of a hello %v "+
				"(alone %v), of a new lane %v (alone %v); %d lines of log", stop(), each,
				victim.opening.Gate.Evicted(), hello, aloneHello, lane, aloneLane,
				strings.Count(log.String(), "connection refused"))
			if good = hello <= max(openingP99, 3*aloneHello) && lane <= max(openingP99,
				3*aloneLane); good {
				break
			}
		}
		switch {
		case good:
		case quiet:
			t.Errorf("p99 of an opening was over %v in %d tries", openingP99, unprovedTries)
		default:
			testutil.Skip(t, "quiet", "threads waited for a CPU for most of each try: "+
				"the machine is too busy to measure how long an opening takes")
		}
		if held := victim.opening.Gate.Held(); held > opening.MaxUnproved {
			t.Errorf("%d unproved connections held, at most %d", held, opening.MaxUnproved)
		}
		if n := strings.Count(log.String(),
			"connection refused"); n > int(took/time.Second)+unprovedTries {
			t.Errorf("%d lines about refused connections in %v", n, took)
		}
	})
}

// Unproved connections from a few addresses that send a member's first message do not keep out a
// new member.
func TestNewMemberAmongUnproved(t *testing.T) {
	c, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	sec := secured(t, c)
	victim, fresh := start(t, func(o *Options) { sec(o); slow(o) }), start(t,
		func(o *Options) { sec(o); slow(o) })
	three := func(n int) [4]byte { return [4]byte{127, 9, 0, byte(1 + n%3)} }
	rate := unprovedRate
	if testutil.Race {
		rate /= 8
	}
	stop := testutil.Strangers(t, victim.Endpoint(), 2000, rate, three, firstMessage(t))
	poll(t, "the gate is full", func() bool { return victim.opening.Gate.Evicted() > 0 })
	began := time.Now()
	// As the executor does, it tries again if the machine is too busy for one try.
	if err := fresh.reach(victim.Endpoint(), victim.opt.Boot); err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	t.Logf("%d unproved connections; a new member was accepted after %v", stop(), took)
	if n := victim.opening.Gate.Held(); n > opening.MaxUnproved {
		t.Errorf("%d unproved connections held, at most %d", n, opening.MaxUnproved)
	}
}

// openings times hellos and new control lanes, and returns the p99 of each.
func openings(t *testing.T, n, to *node) (hello, opened time.Duration) {
	s := n.sessionOf(to)
	var hellos, lanes []time.Duration
	for range timedOpenings {
		at := time.Now()
		err := n.caller.Call(t.Context(), to.Endpoint(), func(ctx context.Context,
			c peerv1.PeerClient) error {
			_, err := c.Hello(ctx, helloAs(n.Mesh, n.opt.Boot, n.Endpoint(), 0))
			return err
		})
		hellos = append(hellos, time.Since(at))
		if err != nil { // the others may take as long
			t.Log(err)
			return openTimeout, openTimeout
		}
		at = time.Now()
		err = n.dialer.dialLane(t.Context(), s, target{to.Endpoint(), 0})
		if lanes = append(lanes, time.Since(at)); err != nil {
			t.Log(err)
			return openTimeout, openTimeout
		}
		for _, l := range s.channel.Lanes()[1:] {
			l.Fail(errLinkDown)
		}
		<-time.After(5 * time.Millisecond)
	}
	return p99(hellos), p99(lanes)
}
