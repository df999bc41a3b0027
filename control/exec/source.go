package exec

import (
	"fmt"
	"maps"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// source is a source lease with what the executor adds to it.
type source struct {
	lease.Source
	ws      *worker
	in      connector.Intent
	blocks  [][]uint32
	version uint32 // of blocks
	layers  []layerState
	sends   []*Sending // open ones
	t       *timer

	decided bool
	status  uint16
	reason  string

	began     Instant
	span      time.Duration // from the last word of the engine to the deadline
	firstBind Instant
	flagged   Instant // the last progress
	finished  bool    // every layer is final
	bytes     uint64  // committed
	last      Trace
}

type layerState struct {
	tokens uint32
	final  bool
}

// sendingState is what only the executor knows of a Sending.
type sendingState struct {
	src       *source
	peer      *peer
	grant     lease.GrantID
	state     sendState
	version   uint32 // of the source's blocks that the origin has
	live      bool   // bound: an origin exists
	closed    bool
	committed bool
	answer    bool // the receiver revoked: it is told when the origin is closed

	flow    *spray.Flow
	readyTo []uint32 // per layer: one past the last chunk released
	stopped bool     // the receiver refuses, or the source is disowned: wait for the word that says why
	opened  Instant
	early   uint64 // bytes landed before the last flag
	moved   [maxRanks]uint64
}

type sendState uint8

const (
	sendOpen sendState = iota
	sendEnded
)

// Intent opens a source lease.
func (e *Exec) Intent(now Instant, w *connector.Worker, in connector.Intent) {
	ws := e.workers[w]
	if ws == nil || ws.gone || ws.sources[in.Lease.ID] != nil || ws.dests[in.Lease.ID] != nil {
		return
	}
	refuse := func(reason string) {
		a := e.emit(Complete)
		a.Worker = w
		a.Completion = connector.Completion{Lease: in.Lease, Status: StatusRefused, Reason: reason}
	}
	switch {
	case e.draining:
		refuse("the sidecar is draining")
		return
	case e.nsource >= e.cfg.MaxSource:
		refuse(fmt.Sprintf("%d source leases are open: at most %d", e.nsource, e.cfg.MaxSource))
		return
	}
	s := &source{ws: ws, in: in, blocks: in.Blocks, layers: make([]layerState, w.Layout.NumLayers()), began: now}
	s.ID, s.Key, s.Attempt = in.Lease, in.Key, in.Attempt
	s.Fanout = min(max(in.Fanout, 1), lease.MaxFanout)
	s.span = e.span(in.Deadline)
	s.Deadline, s.Partner = now+s.span, lease.Never
	s.t = newTimer(func(now Instant) { e.sourceDue(now, s) })
	ws.sources[in.Lease.ID] = s
	e.nsource++
	e.byKey[s.Key] = append(e.byKey[s.Key], s)
	n := e.byXfer[s.Key.Xfer]
	n.open++
	if in.Held {
		n.held++
	}
	e.byXfer[s.Key.Xfer] = n
	e.tombs.Raise(s.Key)
	if in.Held {
		s.Held, s.Partner = true, now+e.cfg.Partner
	}
	e.agenda.arm(s.t, min(s.Deadline, s.Partner))
	e.wake(now, s.Key)
	e.assign(now)
}

// Hold says that the engine keeps the blocks only for us: from now on partners have limited time to come.
func (e *Exec) Hold(now Instant, w *connector.Worker, id uint64) {
	s := e.source(w, id)
	if s == nil || s.Held || s.decided {
		return
	}
	s.Held, s.Partner = true, now+e.cfg.Partner
	s.extend(now)
	e.agenda.arm(s.t, min(s.Deadline, s.Partner))
	n := e.byXfer[s.Key.Xfer]
	n.held++
	e.byXfer[s.Key.Xfer] = n
	if n.open != n.held {
		return
	}
	for _, k := range keysInOrder(maps.Keys(e.pending), s.Key.Xfer) {
		for _, q := range slices.Clone(e.pending[k]) {
			if !q.gone && e.hopeless(q) {
				e.refusePending(q, peerv1.GrantReply_MISMATCH, mismatch)
			}
		}
	}
}

// extend starts the deadline again: a prefill may compute for minutes, and what must not last is the silence after it.
func (s *source) extend(now Instant) {
	s.Deadline = max(s.Deadline, min(now+s.span, s.began+MaxDeadline))
}

func (e *Exec) source(w *connector.Worker, id uint64) *source {
	if ws := e.workers[w]; ws != nil {
		return ws.sources[id]
	}
	return nil
}

func (e *Exec) sourceDue(now Instant, s *source) {
	switch {
	case now >= s.Deadline:
		e.closeSource(now, s, StatusExpired, "the deadline passed", true)
	case now >= s.Partner:
		// Nobody new may come; those who are here finish.
		s.Partner = lease.Never
		if s.Narrow() {
			if s.Served > 0 {
				e.closeSource(now, s, StatusOK, fmt.Sprintf("%d of %d partners came", s.Served, s.in.Fanout), true)
			} else {
				e.closeSource(now, s, StatusExpired, fmt.Sprintf("no partner came within %v", e.cfg.Partner), true)
			}
			return
		}
		e.agenda.arm(s.t, s.Deadline)
	default:
		e.agenda.arm(s.t, min(s.Deadline, s.Partner))
	}
}

// Progress takes what layers hold now.
func (e *Exec) Progress(now Instant, w *connector.Worker, all []connector.Progress) {
	for i := range all {
		p := &all[i]
		s := e.source(w, p.Lease.ID)
		if s == nil || s.State != lease.SourceOpen || p.Layer < 0 || p.Layer >= len(s.layers) {
			continue
		}
		s.ID.Epoch = p.Lease.Epoch
		s.flagged = now
		s.extend(now)
		if p.Blocks != nil && !sameTables(p.Blocks, s.blocks) {
			s.blocks = p.Blocks
			s.version++
		}
		l := &s.layers[p.Layer]
		l.tokens, l.final = max(l.tokens, p.Tokens), l.final || p.Final
		if p.Final && !s.finished {
			s.finished = !slices.ContainsFunc(s.layers, func(l layerState) bool { return !l.final })
		}
		for _, snd := range s.sends {
			e.release(snd, p.Layer)
		}
	}
	e.assign(now)
}

// sameTables reports whether two tables are one and the same slice in memory, which is how progress of many layers in one
// step shares them.
func sameTables(a, b [][]uint32) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// release makes what layer l holds sendable.
func (e *Exec) release(snd *Sending, l int) {
	s := snd.src
	if s.layers[l] == (layerState{}) {
		return
	}
	if !snd.live {
		// Only now is the epoch known under which the bytes are read.
		snd.live = true
		snd.Lease, snd.Blocks = s.ID, s.blocks
		s.OriginOpened()
		e.emit(Bind).Sending = snd
	} else if snd.version != s.version {
		a := e.emit(Update)
		a.Sending, a.Blocks = snd, s.blocks
	}
	snd.version = s.version
	r := snd.Plan.Ready(l, s.layers[l].tokens, s.layers[l].final)
	if from := max(snd.readyTo[l], r.First); from < r.End() {
		snd.flow.Ready(transfer.Range{First: from, Count: r.End() - from})
		snd.readyTo[l] = r.End()
		e.touch(snd.peer)
	}
}

// Preempt says that the blocks of a source lease are lost; the lease stays for a later attempt.
func (e *Exec) Preempt(now Instant, w *connector.Worker, id uint64) {
	s := e.source(w, id)
	if s == nil || s.State != lease.SourceOpen {
		return
	}
	for _, snd := range slices.Clone(s.sends) {
		e.lose(now, snd, false, "preempted")
	}
	s.Attempt++
	s.blocks, s.finished = nil, false
	clear(s.layers)
	e.assign(now)
}

// lose ends a sending because its bytes will not come, and tells the receiver.
func (e *Exec) lose(now Instant, snd *Sending, final bool, reason string) {
	if snd.state != sendOpen {
		return
	}
	e.send(snd.grant.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SourceLost{SourceLost: &peerv1.SourceLost{
		Destination: leaseMsg(snd.Dest), Source: leaseMsg(snd.src.ID), Final: final, Reason: reason}}})
	snd.src.Lost(snd.grant)
	e.endSending(now, snd)
}

// endSending gives no slice of snd to a lane any more and closes its origin.
func (e *Exec) endSending(now Instant, snd *Sending) {
	if snd.state != sendOpen {
		return
	}
	snd.state = sendEnded
	snd.src.sends = remove(snd.src.sends, snd)
	snd.flow.Close()
	e.touch(snd.peer)
	if e.sending[snd.grant] == snd {
		delete(e.sending, snd.grant)
	}
	if snd.live {
		e.closeOrigin(snd)
		return
	}
	e.originClosed(now, snd)
}

func (e *Exec) closeOrigin(snd *Sending) {
	a := e.emit(CloseOrigin)
	a.Sending, a.Committed = snd, snd.committed
}

func remove[T comparable](s []T, v T) []T {
	if i := slices.Index(s, v); i >= 0 {
		return slices.Delete(s, i, i+1)
	}
	return s
}

// OriginClosed is the acknowledgement of every backend that nobody reads through snd's origin any more, or the failure of
// one, which is tried again.
func (e *Exec) OriginClosed(now Instant, snd *Sending, err error) {
	if snd.closed || snd.state != sendEnded {
		return
	}
	if err != nil {
		e.agenda.arm(newTimer(func(Instant) { e.closeOrigin(snd) }), now+e.cfg.Grace)
		return
	}
	snd.src.OriginClosed()
	e.originClosed(now, snd)
	e.assign(now)
}

func (e *Exec) originClosed(now Instant, snd *Sending) {
	snd.closed = true
	if snd.answer {
		e.send(snd.grant.Peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Closed{Closed: &peerv1.Closed{
			Destination: leaseMsg(snd.Dest)}}})
	}
	e.completeSource(now, snd.src)
}

// closeSource ends a source lease; the first verdict stands. Its receivers are told, its origins closed, then the engine.
func (e *Exec) closeSource(now Instant, s *source, status uint16, reason string, final bool) {
	if s.decided {
		return
	}
	s.decided, s.status, s.reason = true, status, reason
	if s.Close() != nil {
		return
	}
	e.agenda.disarm(s.t)
	if l := remove(e.byKey[s.Key], s); len(l) > 0 {
		e.byKey[s.Key] = l
	} else {
		delete(e.byKey, s.Key)
		if final {
			e.tombs.Bury(now, s.Key, status == StatusOK)
		}
	}
	n := e.byXfer[s.Key.Xfer]
	n.open--
	if s.Held {
		n.held--
	}
	if e.byXfer[s.Key.Xfer] = n; n.open == 0 {
		delete(e.byXfer, s.Key.Xfer)
	}
	for _, snd := range slices.Clone(s.sends) {
		e.lose(now, snd, final, reason)
	}
	for g, b := range e.bound {
		if b == s {
			delete(e.bound, g)
		}
	}
	if final && status != StatusOK && len(e.byKey[s.Key]) == 0 {
		for _, q := range slices.Clone(e.pending[s.Key]) {
			e.refusePending(q, peerv1.GrantReply_GONE, reason)
		}
	}
	e.completeSource(now, s)
}

func (e *Exec) completeSource(now Instant, s *source) {
	if s.State != lease.SourceClosing || s.Complete() != nil {
		return
	}
	delete(s.ws.sources, s.ID.ID)
	e.nsource--
	a := e.emit(Complete)
	a.Worker = s.ws.w
	a.Completion = connector.Completion{Lease: s.in.Lease, Status: s.status, Bytes: s.bytes, Took: now - s.began, Reason: s.reason,
		Grants: s.Served}
	t := s.last
	t.Key, t.Req, t.Source, t.Grants = s.Key, s.in.Req, s.ID, s.Served
	if s.firstBind > 0 {
		t.Queue = s.firstBind - s.began
		t.Wire = now - s.firstBind
	} else {
		t.Queue = now - s.began
	}
	a.Trace = &t
	e.workerIdle(s.ws)
}

// endGrant says that a destination lease needs nothing more from s.
func (e *Exec) endGrant(now Instant, s *source, g lease.GrantID, committed bool, why string) {
	snd := e.sending[g]
	delete(e.bound, g)
	if committed {
		if s.flagged > 0 {
			s.last.Flag = now - s.flagged
		}
		s.last.Dest, s.last.Peer = g.Dest, g.Peer
	}
	last := s.End(g, committed)
	if snd != nil && snd.src == s {
		s.last.Slot, s.last.Gen = snd.Origin.Slot, snd.Origin.Gen
		s.last.BytesBefore = snd.early
		if committed {
			e.confirmFlights(snd)
		}
		for i, v := range snd.moved {
			s.last.Moved[i] += v
		}
		snd.committed = committed
		if committed {
			s.bytes += snd.Plan.Space().TotalBytes()
		}
		e.endSending(now, snd)
	}
	if !last {
		return
	}
	if s.Served > 0 {
		e.closeSource(now, s, StatusOK, "", true)
	} else {
		e.closeSource(now, s, StatusFailed, why, true)
	}
}

func (e *Exec) onCommit(now Instant, p *peer, m *peerv1.Commit) error {
	id, err := leaseID(m.Destination)
	if err != nil {
		return err
	}
	g := lease.GrantID{Peer: p.boot, Dest: id}
	if s := e.bound[g]; s != nil {
		e.endGrant(now, s, g, true, "")
	}
	return nil
}

func (e *Exec) onRevoke(now Instant, p *peer, m *peerv1.Revoke) error {
	id, err := leaseID(m.Destination)
	if err != nil {
		return err
	}
	g := lease.GrantID{Peer: p.boot, Dest: id}
	if s := e.bound[g]; s != nil {
		if snd := e.sending[g]; snd != nil {
			snd.answer = true
		}
		e.endGrant(now, s, g, false, "the receiver gave up: "+m.Reason)
		return nil
	}
	for _, l := range e.pending {
		for _, q := range l {
			if q.grant != nil && q.dest == g {
				e.dropPending(q)
				return nil
			}
		}
	}
	return nil
}

func (e *Exec) onGrant(now Instant, p *peer, m *peerv1.Grant) error {
	k, err := key(m.Xfer, m.Hash)
	if err != nil {
		return fmt.Errorf("grant: %w", err)
	}
	id, err := leaseID(m.Destination)
	if err != nil {
		return fmt.Errorf("grant: %w", err)
	}
	if m.Slot > 1<<16-1 || m.Gen == 0 {
		return fmt.Errorf("grant %s: slot %d and generation %d: want 16 bits, and from 1", id, m.Slot, m.Gen)
	}
	g := lease.GrantID{Peer: p.boot, Dest: id}
	if old := e.sending[g]; old != nil {
		if uint32(old.Origin.Gen) >= m.Gen {
			return nil // a replay
		}
		old.src.Lost(g)
		e.endSending(now, old)
	}
	for _, q := range slices.Clone(e.pending[k]) {
		if q.grant != nil && q.dest == g {
			e.dropPending(q)
		}
	}
	if e.bindGrant(now, p, k, g, m) {
		return nil
	}
	e.wait(now, p, &pending{peer: p, key: k, grant: m, dest: g}, m.PartnerMs)
	return nil
}

func (e *Exec) onAwait(now Instant, p *peer, m *peerv1.Await) error {
	k, err := key(m.Xfer, m.Hash)
	if err != nil {
		return fmt.Errorf("await: %w", err)
	}
	q := &pending{peer: p, key: k, token: m.Token}
	if l := e.byKey[k]; len(l) > 0 {
		e.admit(q, l[0])
		return nil
	}
	e.wait(now, p, q, m.TtlMs)
	return nil
}

func (e *Exec) admit(q *pending, s *source) {
	e.send(q.peer.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Admitted{Admitted: &peerv1.Admitted{
		Token: q.token, State: peerv1.Admitted_ADMITTED, Tokens: s.in.Tokens}}})
}

// wait keeps a grant or a question until its intent comes.
func (e *Exec) wait(now Instant, p *peer, q *pending, ms uint32) {
	tomb, dead := e.tombs.Find(now, q.key)
	hush := tomb.At + e.cfg.TombstoneHush
	switch {
	case dead && (!tomb.Served || now >= hush):
		e.refusePending(q, peerv1.GrantReply_GONE, "the source lease of this key is over")
		return
	case e.draining:
		e.refusePending(q, peerv1.GrantReply_DRAINING, "the sidecar is draining")
		return
	case !dead && e.hopeless(q):
		e.refusePending(q, peerv1.GrantReply_MISMATCH, mismatch)
		return
	case p.pending >= e.cfg.MaxPending:
		e.refusePending(q, peerv1.GrantReply_LIMIT, fmt.Sprintf("%d grants and questions wait already", p.pending))
		return
	}
	end := now + e.cfg.Partner
	if ms > 0 {
		end = now + min(Instant(ms)*1e6, MaxDeadline)
	}
	if dead && hush < end {
		// A prompt list with equal prompts: another intent may be about to come.
		end, q.gone = hush, true
	}
	p.pending++
	e.pending[q.key] = append(e.pending[q.key], q)
	q.t = newTimer(func(Instant) { e.pendingDue(q) })
	e.agenda.arm(q.t, end)
}

const mismatch = "the prefill has this transfer id with another prefix hash: prompt, LoRA, salt or multimodal items differ"

// hopeless reports that no intent for q will come: every request of its transfer id is finished, and none has its hash. Only a grant
// says so: it follows an admission, or a prefill that is done. A question may be early, for a prompt list is admitted one by one.
func (e *Exec) hopeless(q *pending) bool {
	n := e.byXfer[q.key.Xfer]
	return q.grant != nil && n.open > 0 && n.open == n.held && len(e.byKey[q.key]) == 0
}

func (e *Exec) pendingDue(q *pending) {
	switch {
	case q.gone:
		e.refusePending(q, peerv1.GrantReply_GONE, "the source lease of this key is over")
	case e.byXfer[q.key.Xfer].open > 0 && len(e.byKey[q.key]) == 0:
		e.refusePending(q, peerv1.GrantReply_MISMATCH, mismatch)
	case len(e.byKey[q.key]) > 0:
		e.refusePending(q, peerv1.GrantReply_LIMIT, "the source leases of this key serve all the grants that they were made for")
	default:
		e.refusePending(q, peerv1.GrantReply_NO_PARTNER, "the prefill never had this transfer")
	}
}

func (e *Exec) refusePending(q *pending, code peerv1.GrantReply_Code, message string) {
	e.dropPending(q)
	if q.grant != nil {
		e.reply(q.peer, q.dest.Dest, code, message, nil, nil)
		return
	}
	state := peerv1.Admitted_GONE
	if code == peerv1.GrantReply_MISMATCH || code == peerv1.GrantReply_DRAINING || code == peerv1.GrantReply_LIMIT {
		state = peerv1.Admitted_REFUSED
	}
	e.send(q.peer.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Admitted{Admitted: &peerv1.Admitted{
		Token: q.token, State: state, Message: message}}})
}

func (e *Exec) reply(p *peer, dst transfer.LeaseID, code peerv1.GrantReply_Code, message string, src *transfer.LeaseID,
	identity map[string]string) {
	e.send(p.boot, replyFrame(dst, code, message, src, identity))
}

func replyFrame(dst transfer.LeaseID, code peerv1.GrantReply_Code, message string, src *transfer.LeaseID,
	identity map[string]string) *peerv1.ControlFrame {
	r := &peerv1.GrantReply{Destination: leaseMsg(dst), Code: code, Message: message, Identity: identity}
	if src != nil {
		r.Source = leaseMsg(*src)
	}
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{GrantReply: r}}
}

func (e *Exec) dropPending(q *pending) {
	if q.t == nil {
		return
	}
	e.agenda.disarm(q.t)
	q.t = nil
	q.peer.pending--
	if l := remove(e.pending[q.key], q); len(l) > 0 {
		e.pending[q.key] = l
	} else {
		delete(e.pending, q.key)
	}
}

// wake looks again at what waits for a key.
func (e *Exec) wake(now Instant, k transfer.Key) {
	for _, q := range slices.Clone(e.pending[k]) {
		if q.grant == nil {
			if l := e.byKey[k]; len(l) > 0 {
				e.dropPending(q)
				e.admit(q, l[0])
			}
			continue
		}
		if e.bindGrant(now, q.peer, k, q.dest, q.grant) {
			e.dropPending(q)
		}
	}
}

// bindGrant gives a grant to a source lease of its key, or refuses it for good; false: there is none with room.
func (e *Exec) bindGrant(now Instant, p *peer, k transfer.Key, g lease.GrantID, m *peerv1.Grant) bool {
	var s *source
	for _, c := range e.byKey[k] {
		if c.Has(g) {
			s = c
			break
		}
		if s == nil && c.Capacity() > 0 {
			s = c
		}
	}
	if s == nil {
		return false
	}
	w := s.ws.w
	if string(m.Fingerprint) != string(w.Fingerprint[:]) {
		e.reply(p, g.Dest, peerv1.GrantReply_FINGERPRINT, "the identities of the two engines differ", &s.ID, w.Layout.Identity)
		return true
	}
	plan, err := e.cfg.Planner.Send(w, m)
	if err == nil && (m.Tokens != s.in.Tokens || plan.Space().NumChunks() != m.Chunks || plan.Space().TotalBytes() != m.Bytes) {
		err = fmt.Errorf("transfer space: the receiver has %d tokens, %d chunks, %d bytes, the source %d, %d, %d", m.Tokens, m.Chunks, m.Bytes,
			s.in.Tokens, plan.Space().NumChunks(), plan.Space().TotalBytes())
	}
	if err == nil {
		err = s.Bind(g)
	}
	if err != nil {
		e.reply(p, g.Dest, peerv1.GrantReply_PLAN, err.Error(), &s.ID, nil)
		return true
	}
	if s.firstBind == 0 {
		s.firstBind = now
	}
	snd := &Sending{Worker: w, Dest: g.Dest, Key: k, Prompt: m.Tokens, Skip: m.Skip, Tokens: m.TokensByTransport, Plan: plan}
	snd.Origin.Peer, snd.Origin.Slot, snd.Origin.Gen = p.boot, transfer.Slot(m.Slot), transfer.Gen(m.Gen)
	snd.src, snd.peer, snd.grant, snd.opened = s, p, g, now
	var deadline Instant
	if m.DeadlineMs > 0 {
		deadline = now + min(time.Duration(m.DeadlineMs)*time.Millisecond, MaxDeadline)
	}
	snd.flow = e.spray.Open(p.rails, spray.Priority(min(m.Priority, uint32(spray.Background))), deadline, plan.Space(), snd)
	snd.readyTo = make([]uint32, len(s.layers))
	e.bound[g], e.sending[g] = s, snd
	s.sends = append(s.sends, snd)
	// The bytes leave first: this word is needed only once they are there.
	e.late = append(e.late, Action{Kind: Send, Peer: p.boot, Frame: replyFrame(g.Dest, peerv1.GrantReply_BOUND, "", &s.ID, nil)})
	for l := range s.layers {
		e.release(snd, l)
	}
	return true
}

// SourceBroken says that a sending cannot be read at all: its tables or its memory are unusable.
func (e *Exec) SourceBroken(now Instant, snd *Sending, reason string) {
	e.lose(now, snd, true, reason)
	e.assign(now)
}
