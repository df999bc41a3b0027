package exec

import (
	"fmt"
	"slices"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
)

// sources are the source leases and what is sent from them.
type sources struct {
	*core
	dispatch *dispatcher
	workers  *workers
	observer sourceObserver

	count  int
	byKey  map[transfer.Key][]*source       // open ones
	byXfer map[transfer.XferID]requestCount // of open ones
	tombs  *lease.Tombstones
}

// sourceObserver is the part that brings grants and source leases together.
type sourceObserver interface {
	// sourceOpened follows a new lease of k.
	sourceOpened(now Instant, k transfer.Key)
	// allHeld follows when every request of a transfer is finished.
	allHeld(now Instant, x transfer.XferID)
	// released follows when a lease that is over serves c no more.
	released(c *partBinding)
	// keyGone follows when the last lease of k has failed.
	keyGone(now Instant, k transfer.Key, reason string)
}

// requestCount counts the open source leases of one transfer, and those of finished requests.
type requestCount struct{ open, held int }

func newSources(c *core, dp *dispatcher, wk *workers) *sources {
	return &sources{core: c, dispatch: dp, workers: wk, byKey: map[transfer.Key][]*source{},
		byXfer: map[transfer.XferID]requestCount{},
		tombs:  lease.NewTombstones(lease.MaxTombstones, c.cfg.TombstoneAge)}
}

// source is a source lease with the executor's own state of it.
type source struct {
	lease.Source
	ws      *worker
	in      engines.Intent
	blocks  [][]uint32
	version uint32 // of blocks
	layers  []layerState
	sends   []*SendPart    // open ones
	claims  []*partBinding // of grants that it serves
	t       *timer

	decided bool
	status  uint16
	reason  string
	trouble string // of the last refused grant

	began     Instant
	span      time.Duration // from the last record of the engine to the deadline
	firstBind Instant
	flagged   Instant // the last progress
	prefill   prefillState
	bytes     uint64 // committed
	last      Trace
}

// prefillState is how far the prefill of a source lease is. A preemption returns it to idle.
type prefillState uint8

const (
	prefillIdle      prefillState = iota
	prefillAnnounced              // a step was announced, and layers follow
	prefillComplete               // every layer is final
)

type layerState struct {
	tokens uint32
	final  bool
}

// open is Exec.Intent.
func (ss *sources) open(now Instant, w *engines.Worker, in engines.Intent) {
	ws := ss.workers.all[w]
	if ws == nil || ws.gone || ws.sources[in.Lease.ID] != nil || ws.dests[in.Lease.ID] != nil {
		return
	}
	refuse := func(reason string) {
		a := ss.emit(Complete)
		a.Worker = w
		a.Completion = engines.Completion{Lease: in.Lease, Status: engines.StatusRefused, Reason: reason}
	}
	switch {
	case ss.draining:
		refuse("the sidecar is draining")
		return
	case ss.count >= ss.cfg.MaxSource:
		refuse(fmt.Sprintf("%d source leases are open: at most %d", ss.count, ss.cfg.MaxSource))
		return
	}
	s := &source{ws: ws, in: in, blocks: in.Blocks, layers: make([]layerState, w.Layout.NumLayers()),
		began: now}
	s.ID, s.Key, s.Attempt = in.Lease, in.Key, in.Attempt
	s.Fanout = min(max(in.Fanout, 1), lease.MaxFanout)
	s.span = ss.span(in.Deadline)
	s.Deadline, s.MatchBy = now+s.span, lease.Never
	s.t = newTimer(func(now Instant) { ss.due(now, s) })
	ws.sources[in.Lease.ID] = s
	ss.count++
	ss.byKey[s.Key] = append(ss.byKey[s.Key], s)
	n := ss.byXfer[s.Key.Xfer]
	n.open++
	if in.Held {
		n.held++
	}
	ss.byXfer[s.Key.Xfer] = n
	ss.tombs.Remove(s.Key)
	if in.Held {
		s.Held, s.MatchBy = true, now+ss.cfg.MatchTimeout
	}
	ss.agenda.arm(s.t, min(s.Deadline, s.MatchBy))
	ss.observer.sourceOpened(now, s.Key)

}

// hold is Exec.Hold.
func (ss *sources) hold(now Instant, w *engines.Worker, id uint64) {
	s := ss.get(w, id)
	if s == nil || s.Held || s.decided {
		return
	}
	s.Held, s.MatchBy = true, now+ss.cfg.MatchTimeout
	s.extend(now)
	ss.agenda.arm(s.t, min(s.Deadline, s.MatchBy))
	n := ss.byXfer[s.Key.Xfer]
	n.held++
	ss.byXfer[s.Key.Xfer] = n
	if n.open == n.held {
		ss.observer.allHeld(now, s.Key.Xfer)
	}
}

// extend starts the deadline again: a prefill may take minutes, and only the silence after it is
// bounded.
func (s *source) extend(now Instant) {
	s.Deadline = max(s.Deadline, min(now+s.span, s.began+MaxDeadline))
}

func (ss *sources) get(w *engines.Worker, id uint64) *source {
	if ws := ss.workers.all[w]; ws != nil {
		return ws.sources[id]
	}
	return nil
}

func (ss *sources) due(now Instant, s *source) {
	switch {
	case now >= s.Deadline:
		ss.close(now, s, engines.StatusExpired, withTrouble("the deadline passed", s.trouble), true)
	case now >= s.MatchBy:
		// No new receiver may bind; bound ones finish.
		s.MatchBy = lease.Never
		if s.Narrow() {
			if s.Served > 0 {
				ss.close(now, s, engines.StatusOK, fmt.Sprintf("%d of %d partners came", s.Served, s.in.Fanout), true)
			} else {
				ss.close(now, s, engines.StatusExpired, withTrouble(fmt.Sprintf("no partner came within %v",
					ss.cfg.MatchTimeout), s.trouble), true)
			}
			return
		}
		ss.agenda.arm(s.t, s.Deadline)
	default:
		ss.agenda.arm(s.t, min(s.Deadline, s.MatchBy))
	}
}

// progress is Exec.Progress.
func (ss *sources) progress(now Instant, w *engines.Worker, all []engines.Progress) {
	for i := range all {
		p := &all[i]
		s := ss.get(w, p.Lease.ID)
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
		if p.Final && s.prefill != prefillComplete && !slices.ContainsFunc(s.layers,
			func(l layerState) bool { return !l.final }) {
			s.prefill = prefillComplete
		}
		for _, snd := range s.sends {
			ss.release(snd, p.Layer)
		}
	}

}

// announced is Exec.Announced.
func (ss *sources) announced(now Instant, w *engines.Worker, all []transfer.LeaseID) {
	for _, id := range all {
		s := ss.get(w, id.ID)
		if s == nil || s.State != lease.SourceOpen {
			continue
		}
		s.ID.Epoch = id.Epoch
		if s.prefill == prefillIdle {
			s.prefill = prefillAnnounced
		}
		for _, snd := range s.sends {
			ss.prepare(snd)
		}
	}

}

// preempt is Exec.Preempt.
func (ss *sources) preempt(now Instant, w *engines.Worker, id uint64) {
	s := ss.get(w, id)
	if s == nil || s.State != lease.SourceOpen {
		return
	}
	for _, snd := range slices.Clone(s.sends) {
		ss.lose(now, snd, false, "preempted")
	}
	s.Attempt++
	s.blocks, s.prefill = nil, prefillIdle
	clear(s.layers)

}

// close ends a source lease; the first status stands. It tells the receivers, closes the origins,
// and then completes the lease.
func (ss *sources) close(now Instant, s *source, status uint16, reason string, final bool) {
	if s.decided {
		return
	}
	s.decided, s.status, s.reason = true, status, reason
	if s.Close() != nil {
		return
	}
	ss.agenda.disarm(s.t)
	if l := remove(ss.byKey[s.Key], s); len(l) > 0 {
		ss.byKey[s.Key] = l
	} else {
		delete(ss.byKey, s.Key)
		if final {
			ss.tombs.Add(now, s.Key, status == engines.StatusOK)
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
	for _, c := range s.claims {
		c.src = nil
		ss.observer.released(c)
	}
	s.claims = nil
	if final && status != engines.StatusOK && len(ss.byKey[s.Key]) == 0 {
		ss.observer.keyGone(now, s.Key, reason)
	}
	ss.complete(now, s)
}

func (ss *sources) complete(now Instant, s *source) {
	if s.State != lease.SourceClosing || s.Complete() != nil {
		return
	}
	delete(s.ws.sources, s.ID.ID)
	ss.count--
	a := ss.emit(Complete)
	a.Worker = s.ws.w
	a.Completion = engines.Completion{Lease: s.in.Lease, Status: s.status, Bytes: s.bytes,
		Took: now - s.began, Reason: s.reason,
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
	ss.workers.idle(s.ws)
}
