package sidecar

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Two sidecars that meet open their lanes at the first try, whichever of them dials: a refusal
// would cost the first transfer a retry, and would log a line without meaning.
func TestFirstLaneIsNotRefused(t *testing.T) {
	for range 8 {
		var logs []*testutil.Log
		begun := func() *running {
			l := &testutil.Log{}
			logs = append(logs, l)
			cfg := testConfig(t, func(c *config.Config) { c.Transports.Order = []string{"tcp", "shm"} })
			return startLog(t, cfg, slog.New(slog.NewTextHandler(l,
				&slog.HandlerOptions{Level: slog.LevelDebug})))
		}
		p, d := begun(), begun()
		pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
		x := begin(t, p, pe, de, 1, tokens)
		de.ok(x.dst)
		pe.ok(x.src)
		for i, l := range logs {
			for line := range strings.Lines(l.String()) {
				if strings.Contains(line, wire.OpenUnknown.String()) {
					t.Errorf("node %d: %s", i, line)
				}
			}
		}
	}
}

// An address that did not answer is warned of again once it has answered since.
func TestWarnedOfOnce(t *testing.T) {
	l := &testutil.Log{}
	cfg := testConfig(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
	n := startLog(t, cfg, slog.New(slog.NewTextHandler(l, nil)))
	other := start(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
	warned := func() int { return strings.Count(l.String(), "peer not reached") }
	for range 3 {
		n.conv.connectFailed(other.Endpoint(), errTest)
	}
	if warned() != 1 {
		t.Errorf("warned %d times, want once", warned())
	}
	n.conv.Connect(other.Endpoint())
	until(t, func() bool { return n.dial.has(other.Boot()) })
	n.conv.connectFailed(other.Endpoint(), errTest)
	if warned() != 2 {
		t.Errorf("warned %d times, want twice", warned())
	}
}

var errTest = errors.New("no answer")

// An error that shows that no sidecar listens ends a wait soon. A peer that is silent may have been
// stopped, and go on.
func TestJudged(t *testing.T) {
	for text, want := range map[string]string{
		"transport: authentication handshake failed: tls: failed to verify certificate: x509: " +
			"certificate has expired or is not yet valid: current time": "the peer's certificate " +
			"has expired",
		"error reading server preface: remote error: tls: expired certificate": "our certificate " +
			"has expired",
	} {
		if got := classifyDialError(errors.New(text)).Error(); !strings.HasPrefix(got, want) {
			t.Errorf("%s: judged as %s", text, got)
		}
	}
	err := classifyDialError(fmt.Errorf("call: %w", peer.ErrOther))
	if !errors.Is(err, exec.ErrNotListening) ||
		errors.Is(err, exec.ErrNotPossible) ||
		!strings.Contains(err.Error(), "listen address (7650)") {
		t.Errorf("a gRPC server of another kind: judged as %v", err)
	}
	for text, ends := range map[string]bool{
		"connection error: desc = \"transport: authentication handshake failed: tls: failed to verify " +
			"certificate: x509: certificate signed by unknown authority\"": true,
		"connection error: desc = \"transport: authentication handshake failed: tls: first record does " +
			"not look like a TLS handshake\"": true,
		"connection error: desc = \"error reading server preface: remote error: tls: certificate " +
			"required\"": true,
		"connection error: desc = \"error reading server preface: EOF\"": true,
		"connection error: desc = \"error reading server preface: http2: failed reading the frame " +
			"payload: an HTTP/1.1 header\"": true,
		"connection error: desc = \"transport: authentication handshake failed: context deadline " +
			"exceeded\"": false,
		"connection error: desc = \"error reading server preface: read tcp 127.0.0.1:1->127.0.0.1:2: " +
			"i/o timeout\"": false,
		"context deadline exceeded": false,
	} {
		if got := errors.Is(classifyDialError(errors.New(text)), exec.ErrNotListening); got != ends {
			t.Errorf("%s: judged as not listening: %v, want %v", text, got, ends)
		}
	}
}

// Lanes are there while a request needs them and for the idle time after, and open again for the
// next one.
func TestLanesOnDemand(t *testing.T) {
	const idle = 200 * time.Millisecond
	leases := map[*Node]*busy{}
	begun := func() *running {
		cfg := testConfig(t, func(c *config.Config) { c.Transports.Idle = config.Duration(idle) })
		return startConfig(t, cfg, func(n *Node) {
			leases[n] = &busy{Driver: n.driver}
			n.dial.lanes = leases[n]
		})
	}
	a, b := begun(), begun()
	lanes := func(n *Node, to transfer.Boot) int { return len(n.lanesTo(to)) }
	both := func() int { return min(lanes(a.Node, b.boot), lanes(b.Node, a.boot)) }
	none := func() bool { return lanes(a.Node, b.boot)+lanes(b.Node, a.boot) == 0 }

	// Two that have met and have nothing to move have no lane.
	a.conv.mesh.Connect(b.Endpoint())
	until(t, func() bool { return a.dial.has(b.boot) && b.dial.has(a.boot) })
	<-time.After(idle)
	if !none() {
		t.Fatal("lanes that no request needs")
	}
	x := a.web.Reach().Peers[0].Pairs[0]
	if !x.Idle || x.Why != "" {
		t.Errorf("an idle pair is %+v", x)
	}
	for range 2 { // whichever end it is that dials
		for _, n := range []*Node{a.Node, b.Node} {
			other := a.boot
			if n == a.Node {
				other = b.boot
			}
			until(t, func() bool { // idle ends lanes that a busy machine opens slowly
				n.conv.Send(other, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Admitted{
					Admitted: &peerv1.Admitted{}}})
				return both() == 3 // one of shm and two of tcp
			})
			until(t, none)
		}
	}

	// A lease keeps the lanes, however long they are idle.
	dials := a.Node
	if bytes.Compare(a.boot[:], b.boot[:]) > 0 {
		dials = b.Node
	}
	other := a.boot
	if dials == a.Node {
		other = b.boot
	}
	leases[dials].with.Store(&other)
	a.dial.need(b.boot)
	b.dial.need(a.boot)
	until(t, func() bool { return both() == 3 })
	before := dials.lanesTo(other)
	<-time.After(3 * idle)
	if after := dials.lanesTo(other); !slices.Equal(before, after) {
		t.Errorf("with a lease open lanes %v became %v", before, after)
	}
	leases[dials].with.Store(nil)
	until(t, none)
}

// busy has a lease open with a peer, if there is one.
type busy struct {
	*driver.Driver
	with atomic.Pointer[transfer.Boot]
}

func (b *busy) Bound() map[transfer.Boot]int {
	if peer := b.with.Load(); peer != nil {
		return map[transfer.Boot]int{*peer: 1}
	}
	return b.Driver.Bound()
}

// lanesTo are the lanes to a peer that are up, by number.
func (n *Node) lanesTo(boot transfer.Boot) (ids []uint64) {
	for _, l := range lanesOf(n, func(l transport.Lane) bool { return l.Peer() == boot }) {
		ids = append(ids, l.ID())
	}
	slices.Sort(ids)
	return ids
}

// dying is a backend whose lanes are up and dead at once.
type dying struct {
	transport.Backend
	dials atomic.Int32
	lived time.Duration
	down  map[uint64]chan struct{}
}

// Down, CloseLane and Bound are those of a driver.
func (d *dying) Down(id uint64) (<-chan struct{}, bool) { c, ok := d.down[id]; return c, ok }
func (d *dying) CloseLane(uint64)                       {}
func (d *dying) Bound() map[transfer.Boot]int           { return nil }

type dyingLane struct {
	transport.Lane
	id   uint64
	peer transfer.Boot
}

func (l *dyingLane) ID() uint64          { return l.id }
func (l *dyingLane) Peer() transfer.Boot { return l.peer }
func (l *dyingLane) Close() error        { return nil }

func (d *dying) Dial(context.Context, transport.Peer, transport.Rail,
	transport.Rail) (transport.Lane, error) {
	d.dials.Add(1)
	l := &dyingLane{id: transport.NextLaneID()}
	down := make(chan struct{})
	d.down[l.id] = down
	time.AfterFunc(d.lived, func() { close(down) })
	return l, nil
}

func (*dying) Name() string { return "tcp" }

// A lane that is dead at once does not end the growing pauses between tries; one that has lived
// does.
func TestDeadAtOnce(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		for lived, want := range map[time.Duration][2]int{0: {1, 40}, 2 * laneLived: {20, 40}} {
			b := &dying{lived: lived, down: map[uint64]chan struct{}{}}
			n := &dialer{log: slog.New(slog.DiscardHandler), lanes: b}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			n.keepLane(ctx, b, transport.Peer{}, transport.Rail{}, transport.Rail{})
			cancel()
			if got := int(b.dials.Load()); got < want[0] || got > want[1] {
				t.Errorf("lanes that live %v: %d dials in a minute, want %d to %d", lived, got,
					want[0], want[1])
			}
		}
	})
}
