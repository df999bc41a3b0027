package sidecar

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
)

// otherOrder is a strategy as another release may have it: the same planes of the same pages, in
// another order of the transfer space.
type otherOrder struct{ parseblock.Strategy }

func (o otherOrder) Planes(dst []layout.Plane, g *layout.Group, l *layout.Layer) ([]layout.Plane,
	error) {
	at := len(dst)
	dst, err := o.Strategy.Planes(dst, g, l)
	slices.Reverse(dst[at:])
	return dst, err
}

// A source whose release orders the planes of a page otherwise is of the same geometry and counts
// the same chunks and bytes; entries would land where scales belong, with every checksum right. It
// refuses, by name, and not a byte of the receiver's blocks changes.
func TestOtherOrderIsRefused(t *testing.T) {
	shape := testShape
	shape.Strategy, shape.TokenBytes = parseblock.DeepSeekV4, 584
	p, d := pairOf(t, "tcp")
	pe, de := newEngine(t, p, shape), newEngine(t, d, shape)
	ask := func() connectortest.Completion {
		t.Helper()
		pr := newPrompt(64)
		src, err := pe.Intent(msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: 64, Fanout: 1,
			Blocks: [][]uint32{{1, 2, 3, 4}}, Ready: 64, DeadlineMS: deadlineMS})
		dst, err2 := de.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: 64,
			Peer: p.Endpoint(), Skip: []uint32{0}, Blocks: [][]uint32{{5, 6, 7, 8}},
			DeadlineMS: deadlineMS, MatchTimeoutMS: matchMS})
		if err != nil || err2 != nil {
			t.Fatal(err, err2)
		}
		c := de.wait(dst)
		if c.Status != engines.StatusOK {
			if err := pe.Cancel(src, "test", true); err != nil {
				t.Fatal(err)
			}
		}
		pe.wait(src)
		return c
	}
	pe.random()
	if c := ask(); c.Status != engines.StatusOK {
		t.Fatalf("of one release: status %d, %+v", c.Status, c.Received)
	}
	same(t, pe, de, []uint32{1, 2, 3, 4}, []uint32{5, 6, 7, 8}, 64, 0)

	s, _ := parseblock.Default().Get(shape.Strategy)
	other, err := parseblock.NewRegistry(otherOrder{s})
	if err != nil {
		t.Fatal(err)
	}
	w := p.engine.Workers()[0]
	m, err := parseblock.NewMatch(other, w.Layout, w.Layout, nil)
	if err != nil {
		t.Fatal(err)
	}
	p.driver.View(func(*exec.Exec, exec.Instant) { w.Own = m })
	pe.random()
	b, _ := de.region.Bytes()
	before := bytes.Clone(b)
	c := ask()
	if c.Status != engines.StatusRefused || !strings.Contains(c.Received.Reason,
		"plan: parts[pp0/tp0].digest = ") ||
		!strings.Contains(c.Received.Reason,
			" at the source: bytes would come to other places; run one release of kvspray") {
		t.Errorf("status %d, reason %q", c.Status, c.Received.Reason)
	}
	if !bytes.Equal(before, b) {
		t.Error("bytes were written")
	}
	if n := value(t, p, "kvspray_control_grants_refused_total", "reason", "plan_digest"); n != 1 {
		t.Errorf("%g refusals are counted", n)
	}
}

// A question that does not fit into a control frame is answered at once, and not when its time is
// over.
func TestUnsentIsAnswered(t *testing.T) {
	p, d := pairOf(t, "tcp")
	newEngine(t, p, testShape) // without one the source answers a question that fits at once
	d.conv.Connect(p.Endpoint())
	until(t, func() bool { return d.dial.has(p.Boot()) })
	answers := make(chan engines.Admission, 1)
	pr := newPrompt(64)
	d.driver.Handle([]engines.Event{{Kind: engines.Asked, Await: &engines.Await{Token: 1,
		Key: transfer.Key{Xfer: pr.xfer, Hash: pr.hash}, Peer: p.Endpoint(), TTL: time.Hour,
		Reply: func(a engines.Admission) { answers <- a }}}})
	d.conv.Send(p.Boot(),
		&peerv1.ControlFrame{Body: &peerv1.ControlFrame_Await{Await: &peerv1.Await{
			Token: 1, Xfer: make([]byte, peer.MaxMessage+1)}}})
	select {
	case a := <-answers:
		if a.State != "gone" || !strings.Contains(a.Message, peer.ErrTooBig.Error()) {
			t.Errorf("answered %+v", a)
		}
	case <-time.After(patience):
		t.Error("no answer came")
	}
}
