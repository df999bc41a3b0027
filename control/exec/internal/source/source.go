// Package source has the source side of an executor: source leases, the grants of peers that they
// serve, and what is sent from them.
//
// A Matcher brings grants and admission queries of peers together with source leases. It binds each
// part of a grant to the lease of its rank, with the same transfer space on both sides. A Table has
// the leases, and gives the slice scheduler what their layers hold.
//
// The tests of control/exec test this package with executors on both sides.
package source

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/index"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/control/exec/internal/workers"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// Instant is a point in time: the duration since the owner's start.
type Instant = timer.Instant

// Actions are what this package asks of the driver.
type Actions interface {
	Send(to transfer.Boot, f *peerv1.ControlFrame)
	// SendLate sends a frame behind the slices that this event moves.
	SendLate(to transfer.Boot, f *peerv1.ControlFrame)
	Bind(p *Part)
	Update(p *Part, blocks [][]uint32)
	CloseOrigin(p *Part, committed bool)
	Follow(w *engines.Worker, on bool)
	HeldOn(w *engines.Worker, lease uint64)
	Compare(c Comparison)
	Sent(w *engines.Worker, c engines.Completion, trace *core.Trace)
}

// Table has the source leases and what is sent from them.
type Table struct {
	*core.Core
	out      Actions
	dispatch *lanes.Dispatcher
	workers  *workers.Table
	peers    *lanes.Peers
	observer sourceObserver

	count  int
	byKey  map[transfer.Key][]*Lease        // open ones
	byXfer map[transfer.XferID]requestCount // of open ones
	ended  *lease.Tombstones
	waits  waits
}

// sourceObserver is the part that brings grants and source leases together.
type sourceObserver interface {
	// sourceOpened follows a new lease of k.
	sourceOpened(now Instant, k transfer.Key)
	// allHeld follows when every request of a transfer is finished.
	allHeld(now Instant, x transfer.XferID)
	// forget deletes a grant that is bound to nothing and waits for nothing. It follows when a lease
	// that is over no longer serves a part of the grant.
	forget(in *inboundGrant)
	// keyGone follows when the last lease of k has failed.
	keyGone(now Instant, k transfer.Key, reason string)
}

// requestCount counts the open source leases of one transfer, and those of finished requests.
type requestCount struct{ open, held int }

// New returns a table without leases.
func New(c *core.Core, out Actions, dp *lanes.Dispatcher, wk *workers.Table,
	ps *lanes.Peers) *Table {
	return &Table{Core: c, out: out, dispatch: dp, workers: wk, peers: ps, waits: newWaits(),
		byKey:  map[transfer.Key][]*Lease{},
		byXfer: map[transfer.XferID]requestCount{},
		ended:  lease.NewTombstones(lease.MaxTombstones, c.Cfg.TombstoneAge)}
}

// Len counts the open leases.
func (ss *Table) Len() int { return ss.count }

// Has reports whether an open lease has a key.
func (ss *Table) Has(k transfer.Key) bool { return len(ss.byKey[k]) > 0 }

// Of returns the source leases of a worker, in order.
func Of(ws *workers.Worker) []*Lease {
	var all []*Lease
	for _, l := range ws.Leases {
		if s, ok := l.(*Lease); ok {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b *Lease) int { return index.CompareLeases(a.ID, b.ID) })
	return all
}

// Lease is a source lease with the executor's own state of it.
type Lease struct {
	lease.Source
	ws       *workers.Worker
	in       engines.Intent
	blocks   [][]uint32
	version  uint32 // of blocks
	layers   []layerState
	sends    []*Part        // open ones
	bindings []*partBinding // of grants that it serves
	t        *timer.Timer

	decided bool
	status  uint16
	reason  string
	trouble string // of the last refused grant

	holdEnd Instant // the latest end of MatchBy
	yielded string  // why no further receiver is waited for; empty: it may be

	began     Instant
	span      time.Duration // from the last record of the engine to the deadline
	firstBind Instant
	flagged   Instant // the last progress
	seen      Instant // the last sign of the engine for this prompt
	prefill   prefillState
	bytes     uint64 // committed
	last      core.Trace
}

// prefillState is how far the prefill of a source lease is. A preemption returns it to idle.
type prefillState uint8

const (
	prefillIdle      prefillState = iota
	prefillAnnounced              // a step was announced, and layers follow
	prefillComplete               // every layer is final
)

// LeaseID implements workers.Lease.
func (s *Lease) LeaseID() transfer.LeaseID { return s.ID }

type layerState struct {
	tokens uint32
	final  bool
}

// Open opens a source lease.
func (ss *Table) Open(now Instant, w *engines.Worker, in engines.Intent) {
	ws := ss.workers.Find(w)
	if ws == nil || ws.Gone || ws.Leases[in.Lease.ID] != nil {
		return
	}
	refuse := func(reason string) {
		ss.out.Sent(w, engines.Completion{Lease: in.Lease, Status: engines.StatusRefused,
			Reason: reason}, nil)
	}
	switch {
	case ss.Draining:
		refuse("the sidecar is draining")
		return
	case ws.Fault != "":
		if !ss.Has(in.Key) { // receivers need not wait for it
			ss.ended.Add(now, in.Key, false)
			ss.observer.keyGone(now, in.Key, ws.Fault)
		}
		refuse(ws.Fault)
		return
	case ss.count >= ss.Cfg.MaxSource:
		refuse(fmt.Sprintf("%d source leases are open: at most %d", ss.count, ss.Cfg.MaxSource))
		return
	}
	s := &Lease{ws: ws, in: in, blocks: in.Blocks, layers: make([]layerState, w.Layout.NumLayers()),
		began: now, seen: now}
	s.ID, s.Key, s.Attempt = in.Lease, in.Key, in.Attempt
	s.Fanout = min(max(in.Fanout, 1), lease.MaxFanout)
	s.span = ss.Span(in.Deadline)
	s.Deadline, s.MatchBy = now+s.span, lease.Never
	s.t = timer.New(func(now Instant) { ss.due(now, s) })
	ws.Leases[in.Lease.ID] = s
	ss.count++
	ss.byKey[s.Key] = append(ss.byKey[s.Key], s)
	n := ss.byXfer[s.Key.Xfer]
	n.open++
	if in.Held {
		n.held++
	}
	ss.byXfer[s.Key.Xfer] = n
	ss.ended.Remove(s.Key)
	if in.Held {
		ss.hold(now, s)
	}
	ss.Agenda.Arm(s.t, min(s.Deadline, s.MatchBy))
	ss.observer.sourceOpened(now, s.Key)
}

// Hold takes engines.Held.
func (ss *Table) Hold(now Instant, w *engines.Worker, id uint64) {
	s := ss.get(w, id)
	if s == nil || s.Held || s.decided {
		return
	}
	ss.hold(now, s)
	s.extend(now)
	ss.Agenda.Arm(s.t, min(s.Deadline, s.MatchBy))
	n := ss.byXfer[s.Key.Xfer]
	n.held++
	ss.byXfer[s.Key.Xfer] = n
	if n.open == n.held {
		ss.observer.allHeld(now, s.Key.Xfer)
	}
}

// extend starts the deadline again: a prefill may take minutes, and only the silence after it is
// bounded.
func (s *Lease) extend(now Instant) {
	s.Deadline = max(s.Deadline, min(now+s.span, s.began+frame.MaxDeadline))
}

func (ss *Table) get(w *engines.Worker, id uint64) *Lease {
	if ws := ss.workers.Find(w); ws != nil {
		s, _ := ws.Leases[id].(*Lease)
		return s
	}
	return nil
}

func (ss *Table) due(now Instant, s *Lease) {
	switch {
	case ss.waited(now, s):
		ss.holdOn(now, s)
	case now >= s.MatchBy:
		// No new receiver may bind; bound ones finish.
		s.MatchBy = lease.Never
		if s.Narrow() {
			if s.Served > 0 {
				ss.Close(now, s, engines.StatusOK, fmt.Sprintf("%d of %d receivers came", s.Served,
					s.in.Fanout), true)
			} else {
				ss.Close(now, s, engines.StatusExpired, core.WithTrouble(ss.unmatched(now, s), s.trouble), true)
			}
			return
		}
		ss.Agenda.Arm(s.t, s.Deadline)
	case now >= s.Deadline:
		ss.Close(now, s, engines.StatusExpired, core.WithTrouble("the deadline passed", s.trouble), true)
	default:
		ss.Agenda.Arm(s.t, min(s.Deadline, s.MatchBy))
	}
}

// Progress takes engines.LayersComplete.
func (ss *Table) Progress(now Instant, w *engines.Worker, all []engines.Progress) {
	for i := range all {
		p := &all[i]
		s := ss.get(w, p.Lease.ID)
		if s == nil || s.State != lease.SourceOpen || p.Layer < 0 || p.Layer >= len(s.layers) {
			continue
		}
		s.ID.Epoch = p.Lease.Epoch
		s.flagged, s.seen = now, now
		s.extend(now)
		if p.Blocks != nil && !sameTables(p.Blocks, s.blocks) {
			s.blocks = p.Blocks
			s.version++
		}
		l := &s.layers[p.Layer]
		l.tokens, l.final = max(l.tokens, p.Tokens), l.final || p.Final
		if p.Final && s.prefill != prefillComplete && !slices.ContainsFunc(s.layers,
			func(l layerState) bool { return !l.final }) {
			s.prefill = prefillComplete
		}
		for _, snd := range s.sends {
			ss.release(snd, p.Layer)
		}
	}
}

// Announced takes engines.StepAnnounced.
func (ss *Table) Announced(now Instant, w *engines.Worker, all []transfer.LeaseID) {
	for _, id := range all {
		s := ss.get(w, id.ID)
		if s == nil || s.State != lease.SourceOpen {
			continue
		}
		s.ID.Epoch, s.seen = id.Epoch, now
		if s.prefill == prefillIdle {
			s.prefill = prefillAnnounced
		}
		for _, snd := range s.sends {
			ss.prepare(snd)
		}
	}
}

// Preempt takes engines.Preempted.
func (ss *Table) Preempt(now Instant, w *engines.Worker, id uint64) {
	s := ss.get(w, id)
	if s == nil || s.State != lease.SourceOpen {
		return
	}
	for _, snd := range slices.Clone(s.sends) {
		ss.lose(now, snd, false, "preempted")
	}
	s.Attempt++
	s.blocks, s.prefill, s.seen = nil, prefillIdle, now
	clear(s.layers)
}

// Close ends a source lease; the first status stands. It informs the receivers, closes the origins,
// and then completes the lease.
func (ss *Table) Close(now Instant, s *Lease, status uint16, reason string, final bool) {
	if s.decided {
		return
	}
	s.decided, s.status, s.reason = true, status, reason
	if s.Close() != nil {
		return
	}
	ss.Agenda.Disarm(s.t)
	if l := index.Remove(ss.byKey[s.Key], s); len(l) > 0 {
		ss.byKey[s.Key] = l
	} else {
		delete(ss.byKey, s.Key)
		ss.waits.dropKey(s.Key)
		if final {
			ss.ended.Add(now, s.Key, status == engines.StatusOK)
		}
	}
	n := ss.byXfer[s.Key.Xfer]
	n.open--
	if s.Held {
		n.held--
	}
	if ss.byXfer[s.Key.Xfer] = n; n.open == 0 {
		delete(ss.byXfer, s.Key.Xfer)
	}
	for _, snd := range slices.Clone(s.sends) {
		ss.lose(now, snd, final, reason)
	}
	for _, c := range s.bindings {
		c.src = nil
		ss.observer.forget(c.in)
	}
	s.bindings = nil
	if final && status != engines.StatusOK && len(ss.byKey[s.Key]) == 0 {
		ss.observer.keyGone(now, s.Key, reason)
	}
	ss.complete(now, s)
}

func (ss *Table) complete(now Instant, s *Lease) {
	if s.State != lease.SourceClosing || s.Complete() != nil {
		return
	}
	delete(s.ws.Leases, s.ID.ID)
	ss.count--
	t := s.last
	t.Key, t.Req, t.Source, t.Grants = s.Key, s.in.Req, s.ID, s.Served
	t.Span, t.Began, t.Bound, t.Ended = s.in.Trace, s.began, s.firstBind, now
	if s.firstBind > 0 {
		t.Queue = s.firstBind - s.began
		t.Wire = now - s.firstBind
	} else {
		t.Queue = now - s.began
	}
	ss.out.Sent(s.ws.Worker, engines.Completion{Lease: s.in.Lease, Status: s.status, Bytes: s.bytes,
		Took: now - s.began, Reason: s.reason, Grants: s.Served}, &t)
	ss.workers.Idle(s.ws)
}

// served ends a source lease whose last receiver has ended.
func (ss *Table) served(now Instant, s *Lease, last bool, status uint16, why string) {
	switch {
	case !last:
	case s.Served > 0:
		ss.Close(now, s, engines.StatusOK, "", true)
	default:
		ss.Close(now, s, status, why, true)
	}
}

// hopeless reports that no intent of a key will come: every request of its transfer is finished,
// and none has its hash. This holds for grants only, which follow an admission or a finished
// prefill. A query may be early: a list of prompts is admitted one by one.
func (ss *Table) hopeless(k transfer.Key) bool {
	n := ss.byXfer[k.Xfer]
	return n.open > 0 && n.open == n.held && len(ss.byKey[k]) == 0
}

// workersOf are the workers of an engine by rank. Of two engines with one name, workers with an
// intent of the key count.
func (ss *Table) workersOf(k transfer.Key, engine string) map[string]*workers.Worker {
	ranks := map[string]*workers.Worker{}
	for _, s := range ss.byKey[k] {
		if at := s.ws.Place; at.Engine == engine && ranks[at.Rank()] == nil {
			ranks[at.Rank()] = s.ws
		}
	}
	meant := maps.Clone(ranks)
	for ws := range ss.workers.All() {
		if ws.Place.Engine != engine || ws.Gone {
			continue
		}
		name := ws.Place.Rank()
		if o := ranks[name]; meant[name] == nil && (o == nil || bytes.Compare(ws.Boot[:],
			o.Boot[:]) < 0) {
			ranks[name] = ws
		}
	}
	return ranks
}
