package segments

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
	"github.com/kvspray/kvspray/transfer"
)

// remoteID names a lease of a peer.
type remoteID struct {
	from transfer.Boot
	id   uint64
}

// remote is a lease of a peer on a segment, until it has ended.
type remote struct {
	id       remoteID
	node     string
	endpoint string
	m        *peerv1.SegmentBatch
	entries  int
	seg      *segment
	grant    grant
	deadline time.Duration
	ctx      context.Context // of its lease of package local
	cancel   context.CancelCauseFunc
	end      func()        // of its lease of package local; idempotent
	ended    chan struct{} // closed after the fence
}

// use counts leases of peers, and their entries.
type use struct{ leases, entries int }

func (u use) full(entries, maxLeases, maxEntries int) bool {
	return u.leases >= maxLeases || u.entries+entries > maxEntries
}

func (u use) more(entries int) use { return use{u.leases + 1, u.entries + entries} }

func (u use) less(entries int) use { return use{u.leases - 1, u.entries - entries} }

// Handle takes a frame of a peer, and does not block. It returns an error for one that the protocol
// does not allow.
func (s *Segments) Handle(from transfer.Boot, f *peerv1.ControlFrame) error {
	switch b := f.Body.(type) {
	case *peerv1.ControlFrame_SegmentLocate:
		return s.onLocate(from, b.SegmentLocate)
	case *peerv1.ControlFrame_SegmentLocated:
		if a := s.answered(from, b.SegmentLocated.GetId()); a != nil && a.located != nil {
			a.located <- b.SegmentLocated
		}
	case *peerv1.ControlFrame_SegmentBatch:
		return s.onBatch(from, b.SegmentBatch)
	case *peerv1.ControlFrame_SegmentCancel:
		m := b.SegmentCancel
		s.mu.Lock()
		r := s.remotes[remoteID{from, m.GetId()}]
		s.mu.Unlock()
		if r != nil {
			r.cancel(fmt.Errorf("%w: %s", errInitiator, cut(m.GetReason())))
		}
	case *peerv1.ControlFrame_SegmentDone:
		m := b.SegmentDone
		if len(m.GetArrived()) > msg.MaxBatchEntries/8 || m.GetStatus() > math.MaxUint16 {
			return fmt.Errorf("segment done: status %d, %d bytes of entries: want at most %d", m.GetStatus(),
				len(m.GetArrived()), msg.MaxBatchEntries/8)
		}
		m.Reason = cut(m.GetReason())
		if a := s.answered(from, m.GetId()); a != nil && a.done != nil {
			a.done <- m
		}
	}
	return nil
}

// errInitiator ends a lease that the initiator has canceled.
var errInitiator = fmt.Errorf("%w by the sidecar that sent the batch", local.ErrCanceled)

// answered removes and returns the ask that a peer answers; nil: it has ended, or another peer was
// asked.
func (s *Segments) answered(from transfer.Boot, id uint64) *ask {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.asks[id]
	if a == nil || a.peer != from {
		return nil
	}
	delete(s.asks, id)
	return a
}

// unknown refuses a name. The refusal is the same for a segment that does not exist and for one
// that the peer may not use.
func unknown(name, node, right string) error {
	return refused("segment", fmt.Sprintf("%q is no segment that node %q may %s", name, node, right),
		"register it, with a grant that has not ended")
}

func (s *Segments) onLocate(from transfer.Boot, m *peerv1.SegmentLocate) error {
	if len(m.GetName()) == 0 || len(m.GetName()) > msg.MaxNameBytes {
		return fmt.Errorf("segment locate: a name of %d bytes: want 1 to %d", len(m.GetName()),
			msg.MaxNameBytes)
	}
	out := &peerv1.SegmentLocated{Id: m.Id}
	now := time.Now()
	s.mu.Lock()
	x, p := s.names[m.Name], s.peers[from]
	if p == nil {
		s.mu.Unlock()
		return nil
	}
	node := p.node
	var ends, reads, writes bool
	if x != nil {
		ends = true
		for _, g := range x.grants {
			if g.To != connector.Everyone && g.To != node || !g.until.IsZero() && !now.Before(g.until) {
				continue
			}
			reads, writes = reads || g.Read, writes || g.Write
			if g.until.IsZero() {
				ends = false
			} else {
				out.EndMs = max(out.EndMs, uint64(g.until.Sub(now).Milliseconds())+1)
			}
		}
	}
	if !ends {
		out.EndMs = 0
	}
	if out.Read, out.Write = reads, writes; reads || writes {
		out.Bytes = x.Len
	} else {
		out.Refusal = fmt.Sprintf("%q is no segment that node %q may use", m.Name, node)
	}
	s.mu.Unlock()
	return s.answer(from, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SegmentLocated{
		SegmentLocated: out}})
}

// answer sends a frame. It drops the frame if the peer cannot be reached.
func (s *Segments) answer(to transfer.Boot, f *peerv1.ControlFrame) error {
	if err := s.o.Send(to, f); err != nil {
		s.o.Log.Debug("segments: answer not sent", "peer", to.String(), "err", err)
	}
	return nil
}

func checkBatch(m *peerv1.SegmentBatch) error {
	n := len(m.GetEntries())
	switch {
	case len(m.GetName()) == 0 || len(m.GetName()) > msg.MaxNameBytes:
		return fmt.Errorf("segment batch: a name of %d bytes: want 1 to %d", len(m.GetName()),
			msg.MaxNameBytes)
	case n == 0 || n%wireEntry != 0 || n > wireEntry*msg.MaxBatchEntries:
		return fmt.Errorf("segment batch: entries of %d bytes: want 1 to %d of %d", n,
			msg.MaxBatchEntries, wireEntry)
	case len(m.GetNonce()) != len(transfer.XferID{}):
		return fmt.Errorf("segment batch: a nonce of %d bytes: want %d", len(m.GetNonce()),
			len(transfer.XferID{}))
	case len(m.GetNote()) > msg.MaxNoteBytes:
		return fmt.Errorf("segment batch: a note of %d bytes: want at most %d", len(m.GetNote()),
			msg.MaxNoteBytes)
	}
	return nil
}

// onBatch opens a lease for a peer, or refuses it.
func (s *Segments) onBatch(from transfer.Boot, m *peerv1.SegmentBatch) error {
	if err := checkBatch(m); err != nil {
		return err
	}
	r := &remote{id: remoteID{from, m.Id}, m: m, entries: len(m.Entries) / wireEntry,
		ended: make(chan struct{})}
	known, err := s.admit(r)
	if !known {
		return nil
	}
	if err != nil {
		return s.done(r, engines.StatusRefused, err.Error(), nil)
	}
	return nil
}

// admit opens the lease of a batch that its segment's registration allows. known is false for a
// peer that is gone, and for a batch that is open already.
func (s *Segments) admit(r *remote) (known bool, err error) {
	m, from := r.m, r.id.from
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.peers[from]
	if p == nil || s.remotes[r.id] != nil {
		return false, nil
	}
	if r.node, r.endpoint = p.node, p.endpoint; r.endpoint == "" {
		r.endpoint = p.claimed // a wrong claim costs this batch
	}
	if from == s.o.Self {
		r.endpoint = s.o.Endpoint()
	}
	right := map[bool]string{true: "write", false: "read"}[m.Write]
	x := s.names[m.Name]
	if x == nil || x.gone || s.over {
		return true, unknown(m.Name, r.node, right)
	}
	now := time.Now()
	g, ok := x.allowed(r.node, m.Write, now)
	switch {
	case !ok:
		return true, unknown(m.Name, r.node, right)
	case s.total.full(r.entries, maxRemotes, maxEntries) ||
		s.perPeer[from].full(r.entries, maxPerPeer, maxPeerEntries):
		return true, refused("segment", fmt.Sprintf("%d batches with %d entries of all nodes are open, "+
			"%d with %d of node %q", s.total.leases, s.total.entries, s.perPeer[from].leases,
			s.perPeer[from].entries, r.node), fmt.Sprintf("send fewer at a time: at most %d with %d, and "+
			"%d with %d of one node", maxRemotes, maxEntries, maxPerPeer, maxPeerEntries))
	case len(m.Note) > 0 && len(x.owner.notes)+x.owner.reserved >= maxNotes:
		return true, refused("note", fmt.Sprintf("the segment's engine has %d notifications that it has "+
			"not fetched, or that open batches will send; at most %d",
			len(x.owner.notes)+x.owner.reserved, maxNotes), "fetch them there")
	}
	r.seg, r.grant = x, g
	r.deadline = min(time.Duration(max(m.DeadlineMs, 1))*time.Millisecond, maxDeadline)
	if !g.until.IsZero() {
		r.deadline = min(r.deadline, g.until.Sub(now))
	}
	s.last++
	ctx, end := s.o.Leases.OpenPeer(x.owner.w, s.last, r.deadline)
	r.ctx, r.cancel = context.WithCancelCause(ctx)
	r.end = sync.OnceFunc(end) // serve calls it, and Stop
	s.remotes[r.id] = r
	s.total, s.perPeer[from] = s.total.more(r.entries), s.perPeer[from].more(r.entries)
	x.open[r] = struct{}{}
	if len(m.Note) > 0 {
		x.owner.reserved++
	}
	s.wg.Go(func() { s.serve(r) })
	return true, nil
}

// serve moves the batch of a peer, and reports its end.
func (s *Segments) serve(r *remote) {
	end, err := s.move(r)
	if errors.Is(err, errAbandoned) { // the process ends
		r.end()
		return
	}
	var note *connector.Note
	if end.Status == engines.StatusOK && len(r.m.Note) > 0 {
		note = &connector.Note{Segment: r.m.Name, From: r.node, Write: r.m.Write, Bytes: end.Bytes,
			Note: r.m.Note}
	}
	s.mu.Lock()
	delete(s.remotes, r.id)
	delete(r.seg.open, r)
	s.total = s.total.less(r.entries)
	if left := s.perPeer[r.id.from].less(r.entries); left.leases == 0 {
		delete(s.perPeer, r.id.from)
	} else {
		s.perPeer[r.id.from] = left
	}
	s.mu.Unlock()
	if len(r.m.Note) > 0 {
		s.note(r.seg.owner, note)
	}
	r.cancel(nil)
	r.end()
	close(r.ended)
	_ = s.done(r, end.Status, end.Reason, end.arrived)
}

// refusal is the end of a lease that moved nothing.
func refusal(err error) (end ended) {
	var refused *msg.Error
	end.Status, end.Reason = local.Status(err), err.Error()
	if errors.As(err, &refused) {
		end.Status = engines.StatusRefused
	}
	return end
}

// move returns the end of a peer's lease, after its fence.
func (s *Segments) move(r *remote) (end ended, err error) {
	if r.m.Durable && r.seg.file == nil {
		return refusal(refused("durable", "set, and the segment is memory", "use it for files")), nil
	}
	g := &r.grant
	runs, err := readWire(r.m.Entries, r.seg.Region, r.seg.Off, g.Off, g.Off+g.Len)
	r.m.Entries = nil
	if err != nil {
		return refusal(err), nil
	}
	c, err := newClaim(runs, r.seg.file, r.m.Write, r.id.from)
	if err != nil {
		return refusal(err), nil
	}
	if err := s.ranges.take(r.ctx, c, r.m.Wait); err != nil {
		return refusal(err), nil
	}
	if r.seg.file != nil {
		end, err = s.lendFile(r, runs)
	} else {
		end, err = s.lend(r, runs)
	}
	if err == nil {
		s.ranges.release(c)
	}
	return end, err
}

// lend opens a peer's lease on memory, and returns its end, after its fence.
func (s *Segments) lend(r *remote, runs []plans.Run) (end ended, err error) {
	list, err := plans.NewList(runs)
	if err != nil {
		return refusal(refused("entries", err.Error(), "split the batch")), nil
	}
	deadline := r.deadline
	l, err := s.begin(&leaseOptions{key: keyOf(r.id.from, [16]byte(r.m.Nonce)), list: list,
		receives: r.m.Write, peer: r.endpoint, deadline: deadline, meet: meetTime, req: "segment",
		priority: engines.Priority(min(r.m.Priority, uint32(engines.Background)))})
	if err != nil {
		return refusal(err), nil
	}
	select {
	case end = <-l.end:
	case <-r.ctx.Done():
		l.cancel(context.Cause(r.ctx).Error())
		select {
		case end = <-l.end:
		case <-s.stop:
			return end, errAbandoned
		}
		if end.Status != engines.StatusOK {
			end.Status, end.Reason = local.Status(context.Cause(r.ctx)), context.Cause(r.ctx).Error()
		}
	case <-s.stop:
		return end, errAbandoned
	}
	if end.Status == engines.StatusOK {
		end.Bytes = list.Space().TotalBytes()
	}
	l.forget()
	return end, nil
}

// done reports the end of a peer's batch.
func (s *Segments) done(r *remote, status uint16, reason string, arrived []byte) error {
	return s.answer(r.id.from, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SegmentDone{
		SegmentDone: &peerv1.SegmentDone{Id: r.id.id, Status: uint32(status), Reason: cut(reason),
			Arrived: arrived}}})
}
