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
	claims  []*claim   // of grants that it serves
	t       *timer

	decided bool
	status  uint16
	reason  string
	trouble string // why a grant for it was refused last

	began     Instant
	span      time.Duration // from the last word of the engine to the deadline
	firstBind Instant
	flagged   Instant // the last progress
	announced bool    // layers are about to come, or come
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
	claim     *claim
	state     sendState
	version   uint32 // of the source's blocks that the origin has
	live      bool   // bound: an origin exists
	closed    bool
	committed bool

	flow    *spray.Flow
	at      spray.Place
	readyTo []uint32 // per segment: one past the last chunk released
	stopped bool     // the receiver refuses, or the source is disowned: wait for the word that says why
	lapse   *timer   // for that word, where the source is disowned
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
	e.wake(now, transfer.Key{Xfer: s.Key.Xfer}) // declines of every prompt
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
			if q.t != nil && !q.gone && e.hopeless(q) {
				e.refusePending(now, q, peerv1.GrantReply_MISMATCH, mismatch)
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
		e.closeSource(now, s, StatusExpired, withTrouble("the deadline passed", s.trouble), true)
	case now >= s.Partner:
		// Nobody new may come; those who are here finish.
		s.Partner = lease.Never
		if s.Narrow() {
			if s.Served > 0 {
				e.closeSource(now, s, StatusOK, fmt.Sprintf("%d of %d partners came", s.Served, s.in.Fanout), true)
			} else {
				e.closeSource(now, s, StatusExpired, withTrouble(fmt.Sprintf("no partner came within %v", e.cfg.Partner), s.trouble), true)
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

// Announced says that a step of these leases is about to run: their layers follow.
func (e *Exec) Announced(now Instant, w *connector.Worker, all []transfer.LeaseID) {
	for _, id := range all {
		s := e.source(w, id.ID)
		if s == nil || s.State != lease.SourceOpen {
			continue
		}
		s.ID.Epoch, s.announced = id.Epoch, true
		for _, snd := range s.sends {
			e.prepare(snd)
		}
	}
	e.assign(now)
}

// prepare does what would keep the first layer waiting.
func (e *Exec) prepare(snd *Sending) {
	s := snd.src
	if !s.announced || s.finished {
		return
	}
	if s.blocks != nil { // after a preemption they come with the first layer
		e.bind(snd)
	}
	snd.peer.rouse = true
	e.touch(snd.peer)
}

// bind makes an origin of snd, whose epoch is known: that under which the bytes are read.
func (e *Exec) bind(snd *Sending) {
	if s := snd.src; !snd.live {
		snd.live = true
		snd.Lease, snd.Blocks, snd.version = s.ID, s.blocks, s.version
		s.OriginOpened()
		e.emit(Bind).Sending = snd
	}
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
	e.bind(snd)
	if snd.version != s.version {
		a := e.emit(Update)
		a.Sending, a.Blocks = snd, s.blocks
		snd.version = s.version
	}
	for _, seg := range snd.Plan.Feeds(l) {
		// A segment may be made from several layers of the source (K and V in layers of their own): all of them count.
		tokens, final := s.layers[l].tokens, s.layers[l].final
		for _, o := range snd.Plan.From(seg) {
			tokens, final = min(tokens, s.layers[o].tokens), final && s.layers[o].final
		}
		r := snd.Plan.Ready(seg, tokens, final)
		if from := max(snd.readyTo[seg], r.First); from < r.End() {
			snd.flow.Ready(transfer.Range{First: from, Count: r.End() - from})
			snd.readyTo[seg] = r.End()
			e.touch(snd.peer)
		}
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
	s.blocks, s.announced, s.finished = nil, false, false
	clear(s.layers)
	e.assign(now)
}

// lose ends a sending because its bytes will not come, and tells the receiver.
func (e *Exec) lose(now Instant, snd *Sending, final bool, reason string) {
	if snd.state != sendOpen {
		return
	}
	e.send(snd.peer.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SourceLost{SourceLost: &peerv1.SourceLost{
		Destination: leaseMsg(snd.Dest), Source: leaseMsg(snd.src.ID), Final: final, Reason: reason, Gen: snd.claim.in.msg.Gen}}})
	e.endSending(now, snd)
}

// endSending gives no slice of snd to a lane any more and closes its origin.
func (e *Exec) endSending(now Instant, snd *Sending) {
	if snd.state != sendOpen {
		return
	}
	snd.state = sendEnded
	snd.src.sends = remove(snd.src.sends, snd)
	e.follow(snd.src.ws, -1)
	snd.flow.Close()
	snd.peer.places.moves(snd.at, -1)
	e.touch(snd.peer)
	if snd.lapse != nil {
		e.agenda.disarm(snd.lapse)
	}
	if snd.claim.snd == snd {
		snd.claim.snd = nil
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
	e.completeSource(now, snd.src)
}

// follow counts what is sent from a worker's memory, and tells the connector of the first and after the last.
func (e *Exec) follow(ws *worker, by int) {
	before := ws.sends > 0
	ws.sends += by
	if now := ws.sends > 0; now != before {
		a := e.emit(Follow)
		a.Worker, a.On = ws.w, now
	}
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
	for _, c := range s.claims {
		c.src = nil
		e.forget(c.in)
	}
	s.claims = nil
	if final && status != StatusOK && len(e.byKey[s.Key]) == 0 {
		for _, q := range slices.Clone(e.pending[s.Key]) {
			if q.t != nil {
				e.refusePending(now, q, peerv1.GrantReply_GONE, reason)
			}
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

// SourceBroken says that a sending cannot be read at all: its tables or its memory are unusable.
func (e *Exec) SourceBroken(now Instant, snd *Sending, reason string) {
	e.lose(now, snd, true, reason)
	e.assign(now)
}
