package segments

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
	"github.com/kvspray/kvspray/transfer"
)

// ask is a question to a peer, or a batch, until it is answered.
type ask struct {
	peer    transfer.Boot
	located chan *peerv1.SegmentLocated // of a question
	done    chan *peerv1.SegmentDone    // of a batch
}

// open notes an ask, and returns its id.
func (s *Segments) open(a *ask) (id uint64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return 0, errStops
	}
	if len(s.asks) >= maxAsks {
		return 0, refused("peer", fmt.Sprintf("%d batches and questions of this node are open", maxAsks),
			"send fewer at a time")
	}
	s.last++
	s.asks[s.last] = a
	return s.last, nil
}

func (s *Segments) close(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.asks, id)
}

// reach returns a peer by its endpoint, or by the name of its node, once its control lanes are up.
func (s *Segments) reach(ctx context.Context, name string) (boot transfer.Boot, p *peer,
	err error) {
	own := s.o.Endpoint()
	if name == "" || name == own || name == s.o.Node {
		s.mu.Lock()
		defer s.mu.Unlock()
		if p = s.peers[s.o.Self]; p == nil {
			return boot, nil, errStops
		}
		return s.o.Self, p, nil
	}
	endpoint := name
	if !strings.Contains(name, ":") {
		boot, p, endpoint, err = s.named(name)
		if err != nil || p != nil {
			return boot, p, err
		}
	}
	end := time.Now().Add(reachTime)
	for {
		c := make(chan reached, 1)
		s.mu.Lock()
		for b, x := range s.peers {
			if x.endpoint == endpoint {
				s.mu.Unlock()
				return s.checked(b, x)
			}
		}
		if s.reaching[endpoint] == nil {
			s.reaching[endpoint] = map[chan reached]struct{}{}
		}
		s.reaching[endpoint][c] = struct{}{}
		s.mu.Unlock()
		s.o.Connect(endpoint)
		var r reached
		select {
		case r = <-c:
		case <-ctx.Done():
			r.err = context.Cause(ctx)
		case <-s.stop:
			r.err = errStops
		}
		s.mu.Lock()
		delete(s.reaching[endpoint], c)
		if len(s.reaching[endpoint]) == 0 {
			delete(s.reaching, endpoint)
		}
		p := s.peers[r.boot]
		s.mu.Unlock()
		switch {
		case r.err == nil && p != nil:
			return s.checked(r.boot, p)
		case ctx.Err() != nil || errors.Is(r.err, errStops):
			return boot, nil, r.err
		case time.Now().After(end):
			return boot, nil, refused("peer", fmt.Sprintf("%s is not reached: %v", name, r.err),
				"name the endpoint of a sidecar that runs, as in its WELCOME")
		}
		select {
		case <-time.After(reachPause):
		case <-ctx.Done():
		}
	}
}

// named returns a connected peer by the name of its node, or else the endpoint of a member.
func (s *Segments) named(node string) (boot transfer.Boot, p *peer, endpoint string, err error) {
	s.mu.Lock()
	for b, x := range s.peers {
		if x.node != node {
			continue
		}
		if p != nil {
			s.mu.Unlock()
			return boot, nil, "", refused("peer", fmt.Sprintf("two nodes have the name %q", node),
				"name the endpoint of the sidecar")
		}
		boot, p = b, x
	}
	s.mu.Unlock()
	if p != nil {
		boot, p, err = s.checked(boot, p)
		return boot, p, "", err
	}
	if endpoint = s.o.Member(node); endpoint == "" {
		return boot, nil, "", refused("peer", fmt.Sprintf("no peer and no member has the name %q",
			node), "name the endpoint of the sidecar, host:port")
	}
	return boot, nil, endpoint, nil
}

// checked refuses a peer that takes no segments.
func (s *Segments) checked(boot transfer.Boot, p *peer) (transfer.Boot, *peer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !p.segments {
		return boot, nil, refused("peer", fmt.Sprintf("the sidecar of node %q takes no batches", p.node),
			"upgrade it to this release")
	}
	return boot, p, nil
}

// Start implements connector.Segments.
func (s *Segments) Start(w *engines.Worker, b connector.Batch) {
	s.o.Leases.Run(w, b.Lease.ID, b.Deadline, func(ctx context.Context) { s.run(ctx, w, &b) })
}

// run serves a batch, and completes it. Nothing of it is in flight here when the engine receives
// the result.
func (s *Segments) run(ctx context.Context, w *engines.Worker, b *connector.Batch) {
	began := time.Now()
	c, err := s.batch(ctx, b)
	if errors.Is(err, errAbandoned) {
		return // the engine ends it with the proved exit of this process
	}
	var refusal *msg.Error
	switch {
	case err == nil:
	case errors.As(err, &refusal):
		c.Status, c.Reason = engines.StatusRefused, err.Error()
	default:
		c.Status, c.Reason = local.Status(err), err.Error()
	}
	c.Lease, c.Received, c.Took = b.Lease, true, time.Since(began)
	if cerr := s.o.Complete(w, c); cerr != nil {
		s.o.Log.Debug("completion not delivered", "lease", b.Lease.String(), "err", cerr)
	}
	s.o.Log.Debug("batch", "worker", w.Name, "req", b.Req, "peer", b.Peer, "segment", b.Segment,
		"write", b.Write, "entries", b.Entries, "bytes", c.Bytes, "status", c.Status, "took", c.Took,
		"reason", c.Reason)
}

// errAbandoned is the end of a batch whose lease is perhaps not fenced: the node has stopped.
var errAbandoned = errors.New("the sidecar has stopped")

// batch moves a batch. A *msg.Error means that nothing was read or written.
func (s *Segments) batch(ctx context.Context, b *connector.Batch) (c engines.Completion,
	err error) {
	runs, wire, err := readEntries(b)
	if err != nil {
		return c, err
	}
	list, err := plans.NewList(runs)
	if err != nil {
		return c, refused("entries", err.Error(), "split the batch")
	}
	claim, err := newClaim(runs, nil, !b.Write, transfer.Boot{})
	if err != nil {
		return c, err
	}
	if err := s.ranges.take(ctx, claim, b.Wait); err != nil {
		return c, err
	}
	keep := false // the claim of a lease that is perhaps not fenced
	defer func() {
		if !keep {
			s.ranges.release(claim)
		}
	}()
	boot, p, err := s.reach(ctx, b.Peer)
	if err != nil {
		return c, err
	}
	m := &move{s: s, b: b, boot: boot, peer: p, list: list, wire: wire}
	if c, err = m.run(ctx); errors.Is(err, errAbandoned) {
		keep = true
	}
	return c, err
}

// move is a batch whose owner is connected.
type move struct {
	s     *Segments
	b     *connector.Batch
	boot  transfer.Boot
	peer  *peer
	list  *plans.List
	wire  []byte
	id    uint64
	asked bool // SegmentCancel was sent

	first string // why the own lease has failed, if it failed before the owner's

	lease *lease
	own   *ended // its end
	owner *peerv1.SegmentDone
}

func (m *move) run(ctx context.Context) (c engines.Completion, err error) {
	s, b := m.s, m.b
	a := &ask{peer: m.boot, done: make(chan *peerv1.SegmentDone, 1)}
	if m.id, err = s.open(a); err != nil {
		return c, err
	}
	defer s.close(m.id)
	var nonce [16]byte
	_, _ = rand.Read(nonce[:]) // it does not fail
	deadline := b.Deadline
	if at, ok := ctx.Deadline(); ok {
		deadline = time.Until(at)
	}
	o := &leaseOptions{key: keyOf(s.o.Self, nonce), list: m.list, receives: !b.Write,
		peer: m.endpoint(), priority: b.Priority, deadline: deadline, meet: meetTime, req: b.Req}
	if b.Wait {
		o.meet = deadline
	}
	q := &peerv1.SegmentBatch{Id: m.id, Name: b.Segment, Write: b.Write, Nonce: nonce[:],
		Entries: m.wire, Priority: uint32(b.Priority),
		DeadlineMs: uint32(min(deadline, maxDeadline).Milliseconds()), Wait: b.Wait, Note: b.Note,
		Durable: b.Durable}
	f := &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SegmentBatch{SegmentBatch: q}}
	m.wire = nil
	// The frame comes before the Grant of a read; the source lease of a write is there before the
	// owner's Grant.
	if b.Write {
		if m.lease, err = s.begin(o); err != nil {
			return c, err
		}
	}
	if err = s.o.Send(m.boot, f); err != nil {
		m.owner = &peerv1.SegmentDone{Status: uint32(engines.StatusFailed), Reason: err.Error()}
	} else if !b.Write {
		if m.lease, err = s.begin(o); err != nil {
			m.end("the sidecar stops")
			return c, err
		}
	}
	if m.lease == nil {
		return c, errors.New(m.owner.Reason)
	}
	defer m.lease.forget()
	return m.wait(ctx, a)
}

// endpoint names the owner's sidecar to the executor.
func (m *move) endpoint() string {
	if m.boot == m.s.o.Self {
		return m.s.o.Endpoint()
	}
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	if m.peer.endpoint != "" {
		return m.peer.endpoint
	}
	return m.peer.claimed // a wrong claim costs this batch
}

// end asks the owner to end its lease.
func (m *move) end(reason string) {
	if m.asked {
		return
	}
	m.asked = true
	_ = m.s.o.Send(m.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SegmentCancel{
		SegmentCancel: &peerv1.SegmentCancel{Id: m.id, Reason: reason}}}) // else by its deadline
}

// wait waits until both leases have ended.
func (m *move) wait(ctx context.Context, a *ask) (c engines.Completion, err error) {
	canceled, down := ctx.Done(), m.peer.down
	var late <-chan time.Time
	if m.owner != nil {
		m.lease.cancel(m.owner.Reason)
	}
	for m.own == nil || m.owner == nil {
		if m.own != nil && m.own.Status == engines.StatusOK && !m.b.Write {
			break // the bytes are here, and the owner only reads
		}
		// The owner of a file may take until the deadline to write it.
		if late == nil && m.own != nil && (m.own.Status != engines.StatusOK || canceled == nil) {
			t := time.NewTimer(answerTime)
			defer t.Stop()
			late = t.C
		}
		select {
		case end := <-m.lease.end:
			m.own = &end
			if end.Status != engines.StatusOK && m.owner == nil {
				m.first = end.Reason
				m.end(end.Reason)
			}
		case d := <-a.done:
			m.owner = d
			if m.own == nil && uint16(d.Status) != engines.StatusOK {
				m.lease.cancel(d.Reason)
			}
		case <-canceled:
			canceled = nil
			m.lease.cancel(context.Cause(ctx).Error())
			m.end(context.Cause(ctx).Error())
		case <-down:
			down = nil
			if m.owner == nil {
				m.owner = &peerv1.SegmentDone{Status: uint32(engines.StatusFailed),
					Reason: "the owner's sidecar is gone"}
			}
			m.lease.cancel(m.owner.Reason)
		case <-late:
			m.owner = &peerv1.SegmentDone{Status: uint32(engines.StatusFailed),
				Reason: fmt.Sprintf("the owner's sidecar has not answered within %v", answerTime)}
		case <-m.s.stop:
			if m.own == nil {
				return c, errAbandoned
			}
			m.owner = &peerv1.SegmentDone{Status: uint32(engines.StatusFailed), Reason: errStops.Error()}
		}
	}
	return m.result(ctx)
}

// result is the completion for the engine. The side that receives the bytes determines its status:
// only the owner's report shows whether a file is written.
func (m *move) result(ctx context.Context) (c engines.Completion, err error) {
	c = engines.Completion{Status: m.own.Status, Transport: m.own.Transport, Reason: m.own.Reason,
		Entries: m.own.arrived}
	if m.b.Write {
		if c.Entries = nil; len(m.owner.Arrived) == (m.b.Entries+7)/8 {
			c.Entries = m.owner.Arrived
		}
		// If it is committed, it is, whatever has ended this side meanwhile.
		c.Status = uint16(m.owner.Status)
	}
	if c.Status == engines.StatusOK {
		c.Bytes, c.Reason, c.Entries = m.list.Space().TotalBytes(), "", nil
		return c, nil
	}
	if m.owner != nil && uint16(m.owner.Status) == engines.StatusRefused {
		c.Status, c.Reason, c.Entries = engines.StatusRefused, m.owner.Reason, nil
		return c, nil
	}
	cause := context.Cause(ctx)
	switch {
	case cause != nil:
		c.Status, c.Reason = local.Status(cause), cause.Error()
	case m.first == "" || m.b.Write && uint16(m.owner.Status) == engines.StatusExpired:
		c.Status, c.Reason = uint16(m.owner.Status), m.owner.Reason
	default:
		c.Status, c.Reason = m.own.Status, m.first
	}
	if c.Status != engines.StatusExpired && cause == nil {
		c.Status = engines.StatusFailed // this engine has not canceled it
	}
	return c, nil
}

// Locate implements connector.Segments.
func (s *Segments) Locate(name, segment string, deadline time.Duration,
	reply func(connector.Located, error)) {
	s.mu.Lock()
	if s.over || s.locates >= maxLocates {
		n := s.locates
		s.mu.Unlock()
		reply(connector.Located{}, &msg.Error{Message: "LOCATE", Field: "peer",
			Problem: fmt.Sprintf("%d questions are open, at most %d, or the sidecar stops", n, maxLocates),
			Remedy:  "wait for answers"})
		return
	}
	defer s.mu.Unlock()
	s.locates++
	s.wg.Go(func() {
		defer func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.locates--
		}()
		ctx, stop := context.WithTimeoutCause(context.Background(), deadline, local.ErrLate)
		defer stop()
		reply(s.locate(ctx, name, segment))
	})
}

func (s *Segments) locate(ctx context.Context, name, segment string) (l connector.Located,
	err error) {
	boot, p, err := s.reach(ctx, name)
	if err != nil {
		return l, err
	}
	a := &ask{peer: boot, located: make(chan *peerv1.SegmentLocated, 1)}
	id, err := s.open(a)
	if err != nil {
		return l, err
	}
	defer s.close(id)
	if err := s.o.Send(boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SegmentLocate{
		SegmentLocate: &peerv1.SegmentLocate{Id: id, Name: segment}}}); err != nil {
		return l, err
	}
	select {
	case m := <-a.located:
		if m.Refusal != "" {
			return l, &msg.Error{Message: "LOCATE", Field: "name", Problem: cut(m.Refusal),
				Remedy: "name a segment that its engine has registered, with a grant to this node"}
		}
		return connector.Located{Bytes: m.Bytes, Read: m.Read, Write: m.Write,
			For: time.Duration(min(m.EndMs, 1<<40)) * time.Millisecond}, nil
	case <-p.down:
		return l, errPeerGone
	case <-ctx.Done():
		return l, context.Cause(ctx)
	case <-s.stop:
		return l, errStops
	}
}

// cut bounds a text of a peer. Half a character would be no text for a frame or for an engine.
func cut(text string) string {
	if len(text) <= maxReasonLen {
		return text
	}
	return strings.ToValidUTF8(text[:maxReasonLen], "")
}
