package connector

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// Reasons for the end of a worker.
var (
	ErrExited     = errors.New("connector: the engine worker's exit is proved")
	ErrSuperseded = errors.New("connector: a new session of the same engine worker took over")
	ErrBoard      = errors.New("connector: the engine worker broke its board")
)

// Errors of Complete.
var (
	ErrGone         = errors.New("connector: the worker is gone")
	ErrUnknownLease = errors.New("connector: no such open lease")
)

// worker is the state behind a Worker.
//
// Lock order: deliver, then mu. Events are called with deliver held and mu free; they may call
// Complete and SourceValid.
type worker struct {
	// Set once.
	s      *Server
	pub    *Worker
	log    *slog.Logger
	proc   *peer
	flags  *board.Flags
	index  []int          // flat layer -> flag
	tables []layout.Table // of the layout
	pools  []int          // block table -> one table on the same pages
	done   chan struct{}  // closed when every lease is fenced and the memory is released

	drained atomic.Uint64 // source epoch of the last record taken from the ring
	// lease id -> *lease, open source leases; SourceValid reads it without a lock
	sources  sync.Map
	watched  atomic.Bool  // on the watcher's list
	waiting  atomic.Int32 // len(follow) + len(held), for the watcher
	holding  atomic.Bool  // len(held) > 0
	partners atomic.Bool  // last argument of Follow
	rung     atomic.Bool  // by this process
	fresh    atomic.Int64 // in the time of now: paceFresh after the last source lease was opened
	// highest flags that the watcher saw; only the watcher uses it and the next field
	seen     []uint64
	seenMark uint64
	extents  []extent    // of its board and regions
	work     *Engine     // nil: the engine does no work
	detach   func()      // of work; set before WorkerUp
	draining atomic.Bool // BYE was sent: no new leases

	deliver sync.Mutex
	gone    bool // WorkerGone was called: no more events; guarded by deliver

	mu        sync.Mutex // protects all below
	session   *session   // nil when the socket is closed
	sub       *board.Consumer
	comp      *board.Producer
	door      *os.File // wakes the ring's goroutine
	bell      int      // wakes the shim; -1 once closed
	rings     *mem.Region
	leases    map[uint64]*lease
	writing   map[uint64]uint64 // blocks that open destination leases write: bit set, see claimOf
	copies    int               // open
	blockIDs  int               // in the tables of open leases and of their pending steps
	follow    map[uint64]*lease // those with pending steps
	held      map[uint64]*lease // those that wait for a stream mark
	lastStep  uint64
	lastEpoch uint64
	pending   []func(Events) // decoded and accepted, not delivered
	queue     []completion   // wait for room in the completion ring
	retry     *time.Timer    // runs while queue is not empty
	retryIn   time.Duration
	closed    bool  // rings are not touched any more
	broken    error // the ring is invalid
	complaint map[string]int
	detached  *time.Timer
	later     *time.Timer // pending check of flags that nothing awaits
}

type completion struct {
	typ, status uint16
	lease       uint64
	body        []byte
}

// lease is one open lease. Fields but epoch are guarded by worker.mu.
type lease struct {
	id       uint64
	source   bool
	isCopy   bool          // a COPY; not a source
	epoch    atomic.Uint32 // 0: closed to readers
	tokens   uint32
	attempt  uint32
	preempt  bool // blocks are lost; the next STEP of a later attempt revives the lease
	canceled bool
	steps    []pendingStep // oldest first
	reported []uint32      // per flat layer: tokens reported to the control layer
	ids      int           // block ids of the table that the control layer holds
	writes   [][]uint32    // destination: per block table, the blocks that will be written
	held     *held         // destination: it waits for a stream mark
}

type pendingStep struct {
	step   uint64
	end    uint32
	blocks [][]uint32 // nil once reported
	ids    int        // block ids that blocks holds, for the bound
}

func (w *worker) leaseID(l *lease) transfer.LeaseID {
	return transfer.LeaseID{Boot: w.pub.Boot, ID: l.id, Epoch: l.epoch.Load()}
}

// run is the ring's goroutine: it drains records, delivers events, and sleeps on the doorbell.
func (w *worker) run() {
	defer w.s.wg.Done()
	for {
		w.pump()
		w.mu.Lock()
		if w.closed || w.broken != nil {
			err, closed := w.broken, w.closed
			w.mu.Unlock()
			if !closed {
				w.s.retire(w, fmt.Errorf("%w: %w", ErrBoard, err))
			}
			return
		}
		sleep := w.sub.Sleep() && len(w.pending) == 0
		w.mu.Unlock()
		if !sleep {
			continue
		}
		if err := w.awaitDoorbell(); err != nil {
			if errors.Is(err, os.ErrClosed) {
				return
			}
			w.mu.Lock()
			w.broken = fmt.Errorf("doorbell: %w", err)
			w.mu.Unlock()
		}
	}
}

// pump drains the ring, follows the flags and delivers, until no work is left.
func (w *worker) pump() {
	w.deliver.Lock()
	defer w.deliver.Unlock()
	if w.gone {
		return
	}
	for {
		w.mu.Lock()
		more := w.drainLocked(drainBatch)
		w.followLocked()
		w.followHeldLocked()
		batch := w.pending
		w.pending = nil
		follow := w.waiting.Load() > 0 && !w.closed
		w.mu.Unlock()
		if follow {
			w.s.watch.add(w)
		}
		for _, call := range batch {
			call(w.s.opt.Events)
		}
		if len(batch) == 0 && !more {
			return
		}
	}
}

// drainLocked drains up to n records and reports whether there may be more.
func (w *worker) drainLocked(n int) bool {
	for range n {
		if w.closed || w.broken != nil {
			return false
		}
		rec, ok, err := w.sub.Next()
		if err != nil {
			w.breakLocked(err)
			return false
		}
		if !ok {
			return false
		}
		if rec.Epoch < w.lastEpoch || rec.Epoch > w.flags.SourceEpoch() {
			w.breakLocked(fmt.Errorf("record %d has source epoch %d after %d, the board's is %d",
				rec.Seq, rec.Epoch, w.lastEpoch, w.flags.SourceEpoch()))
			return false
		}
		w.recordLocked(rec)
		w.lastEpoch = rec.Epoch
		// After the lease's own epoch has moved: a reader that sees this epoch as drained also sees
		// the record's effect.
		w.drained.Store(rec.Epoch)
	}
	return true
}

func (w *worker) breakLocked(err error) {
	if w.broken == nil {
		w.broken = err
		for _, l := range w.leases {
			l.epoch.Store(0)
		}
	}
}

var recordNames = map[uint16]string{board.RecStep: "step", board.RecIntent: "intent", board.RecExpect: "expect", board.RecCancel: "cancel",
	board.RecPreempt: "preempt", board.RecHold: "hold", board.RecCopy: "copy"}

func (w *worker) recordLocked(rec board.Record) {
	kind := recordNames[rec.Type]
	var err error
	switch rec.Type {
	case board.RecStep:
		err = w.stepLocked(rec)
	case board.RecIntent:
		err = w.intentLocked(rec)
	case board.RecExpect:
		err = w.expectLocked(rec)
	case board.RecCopy:
		err = w.copyLocked(rec)
	case board.RecCancel, board.RecPreempt, board.RecHold:
		err = w.changeLocked(rec)
	default:
		kind = "unknown"
		err = &msg.Error{Message: "record", Field: "type", Problem: fmt.Sprintf("type %d is unknown", rec.Type),
			Remedy: "this sidecar is older than the shim: upgrade it"}
	}
	if err != nil {
		w.complainLocked(kind, err)
		return
	}
	w.s.hookRecord(kind)
}

// complainLocked counts a bad record, logs its kind once, and sends an ERROR to the shim.
func (w *worker) complainLocked(kind string, err error) {
	w.s.hookMalformed(kind)
	w.complaint[kind]++
	if w.complaint[kind] == 1 {
		w.log.Warn("malformed record; the session goes on without it", "kind", kind, "err", err)
	}
	total := 0
	for _, n := range w.complaint {
		total += n
	}
	if w.session != nil && total <= maxComplaints {
		w.session.sendError(errorMessage(0, msg.CodeProtocol, err, false))
	}
}

// checkTables refuses tables that do not match the layout: every id must be inside its groups.
func (w *worker) checkTables(what string, tables [][]uint32) (ids int, err error) {
	if len(tables) != len(w.tables) {
		return 0, &msg.Error{Message: what, Field: "blocks", Problem: fmt.Sprintf("%d tables, the layout has %d", len(tables), len(w.tables)),
			Remedy: "send each block table once, in the layout's order; groups with same_table use the table of the previous group"}
	}
	for ti, table := range tables {
		n := w.pub.Layout.Groups[w.tables[ti].First].NumBlocks
		for i, id := range table {
			if id >= n {
				return 0, &msg.Error{Message: what, Field: "blocks", Problem: fmt.Sprintf("table %d: block %d at index %d, its groups have %d blocks", ti, id, i, n),
					Remedy: "send ids of the registered cache"}
			}
		}
		ids += len(table)
	}
	return ids, nil
}

// openLocked opens a lease unless a bound or a state forbids it. The shim receives a refusal as a
// completion.
func (w *worker) openLocked(rec board.Record, source bool) (*lease, error) {
	what := map[uint16]string{board.RecIntent: "INTENT", board.RecExpect: "EXPECT", board.RecCopy: "COPY"}[rec.Type]
	if rec.Lease == 0 {
		return nil, &msg.Error{Message: what, Field: "lease", Problem: "0 names no lease", Remedy: "count leases from 1"}
	}
	if _, dup := w.leases[rec.Lease]; dup {
		return nil, &msg.Error{Message: what, Field: "lease", Problem: fmt.Sprintf("lease %d is open already", rec.Lease),
			Remedy: "never reuse an id within one boot"}
	}
	return &lease{id: rec.Lease, source: source}, nil
}

// refuseLocked ends a lease that was never opened.
func (w *worker) refuseLocked(rec board.Record, source bool, err error) {
	if rec.Lease == 0 {
		return
	}
	if _, open := w.leases[rec.Lease]; open {
		return
	}
	c := Completion{Lease: transfer.LeaseID{Boot: w.pub.Boot, ID: rec.Lease}, Received: !source, Status: board.Refused, Reason: err.Error()}
	w.postLocked(encodeCompletion(c))
}

func (w *worker) admitLocked(l *lease, ids int) error {
	switch {
	case w.blockIDs+ids > w.s.opt.Limits.BlockIDs:
		return fmt.Errorf("the tables of open leases hold %d block ids, this record %d more; at most %d", w.blockIDs, ids, w.s.opt.Limits.BlockIDs)
	case w.draining.Load() || w.s.draining.Load():
		return errors.New("draining: no new leases")
	case len(w.leases) >= w.s.opt.Limits.Leases:
		return fmt.Errorf("%d leases are open, at most %d", len(w.leases), w.s.opt.Limits.Leases)
	}
	l.epoch.Store(w.s.nextEpoch())
	l.ids = ids
	w.blockIDs += ids
	w.leases[l.id] = l
	if l.source {
		w.sources.Store(l.id, l)
	}
	w.s.hookLeases(l.source, 1)
	return nil
}

func (w *worker) intentLocked(rec board.Record) error {
	l, err := w.openLocked(rec, true)
	if err != nil {
		return err
	}
	ids := 0
	m, err := msg.DecodeIntent(rec.Body)
	if err == nil {
		ids, err = w.checkTables("INTENT", m.Blocks)
	}
	if err == nil && len(m.Steps) > 0 && m.Steps[len(m.Steps)-1].End > m.Tokens {
		err = &msg.Error{Message: "INTENT", Field: "steps", Problem: fmt.Sprintf("reach token %d of %d", m.Steps[len(m.Steps)-1].End, m.Tokens)}
	}
	if err != nil {
		w.refuseLocked(rec, true, err)
		return err
	}
	l.tokens, l.attempt = m.Tokens, m.Attempt
	l.reported = make([]uint32, len(w.index))
	if err := w.admitLocked(l, ids); err != nil {
		w.refuseLocked(rec, true, err)
		return nil
	}
	w.fresh.Store(int64(now() + paceFresh))
	for _, s := range m.Steps {
		l.steps = append(l.steps, pendingStep{step: s.Step, end: s.End})
	}
	w.followingLocked(l)
	in := Intent{Lease: w.leaseID(l), Key: transfer.Key{Xfer: m.Xfer, Hash: m.Hash}, Tokens: m.Tokens, Fanout: int(m.Fanout), Blocks: m.Blocks,
		Held: m.Held, Priority: priority(m.Prio), Deadline: w.s.duration(m.DeadlineMS, w.s.opt.Deadline), Attempt: m.Attempt, Req: m.Req}
	w.eventLocked(func(e Events) { e.Intent(w.pub, in) })
	if len(l.steps) > 0 {
		w.eventLocked(func(e Events) { e.Announced(w.pub, []transfer.LeaseID{in.Lease}) })
	}
	if m.Ready > 0 {
		p := make([]Progress, len(w.index))
		for i := range p {
			p[i] = Progress{Lease: in.Lease, Layer: i, Tokens: m.Ready, Final: m.Ready >= m.Tokens}
			l.reported[i] = m.Ready
		}
		w.eventLocked(func(e Events) { e.Progress(w.pub, p) })
	}
	return nil
}

func (w *worker) expectLocked(rec board.Record) error {
	l, err := w.openLocked(rec, false)
	if err != nil {
		return err
	}
	ids := 0
	m, err := msg.DecodeExpect(rec.Body)
	if err == nil {
		ids, err = w.checkTables("EXPECT", m.Blocks)
	}
	if err == nil && m.Peer == "" {
		err = &msg.Error{Message: "EXPECT", Field: "peer", Problem: "empty", Remedy: "name the endpoint of the prefill's sidecar"}
	}
	if err == nil {
		err = w.checkMark("EXPECT", m.After)
	}
	if err != nil {
		w.refuseLocked(rec, false, err)
		return err
	}
	l.tokens = m.Tokens
	if m.Skip == nil {
		m.Skip = make([]uint32, len(m.Blocks))
	}
	if err := w.claimLocked(l, m); err != nil {
		w.refuseLocked(rec, false, err)
		return err
	}
	if err := w.admitLocked(l, ids); err != nil {
		w.unclaimLocked(l)
		w.refuseLocked(rec, false, err)
		return nil
	}
	ex := Expect{Lease: w.leaseID(l), Key: transfer.Key{Xfer: m.Xfer, Hash: m.Hash}, Peer: m.Peer, Tokens: m.Tokens, Skip: m.Skip, Blocks: m.Blocks,
		Priority: priority(m.Prio), Deadline: w.s.duration(m.DeadlineMS, w.s.opt.Deadline), Partner: w.s.duration(m.PartnerMS, w.s.opt.Partner), Req: m.Req}
	w.beginLocked(l, m.After, ex.Deadline, func(left time.Duration) func(Events) {
		ex.Deadline = left
		return func(e Events) { e.Expect(w.pub, ex) }
	})
	return nil
}

// claimLocked reserves the blocks that a destination lease will write. Skipped blocks and blocks
// that are only read may be shared. Two leases that write one block would each report bytes that
// the other has replaced.
func (w *worker) claimLocked(l *lease, m *msg.Expect) error {
	if m.Tokens == 0 || len(m.Skip) != len(m.Blocks) {
		return nil // the plan refuses it
	}
	for ti, table := range m.Blocks {
		first, end := w.pub.Own.Written(ti, m.Tokens, m.Skip[ti])
		first, end = min(first, len(table)), min(end, len(table))
		l.writes = append(l.writes, table[first:first])
		for i := first; i < end; i++ {
			word, bit := claimOf(w.pools[ti], table[i])
			if w.writing[word]&bit != 0 {
				err := w.claimedLocked(l, ti, table, first, i)
				w.unclaimLocked(l)
				return err
			}
			w.writing[word] |= bit
			l.writes[ti] = table[first : i+1]
		}
	}
	return nil
}

// claimedLocked names the lease that has the block at index i.
func (w *worker) claimedLocked(l *lease, ti int, table []uint32, first, i int) error {
	id := table[i]
	e := &msg.Error{Message: "EXPECT", Field: fmt.Sprintf("blocks[%d][%d]", ti, i), Problem: fmt.Sprintf("block %d is written for another open lease", id),
		Remedy: "wait for its completion: nothing writes the block after that"}
	if j := slices.Index(table[first:i], id); j >= 0 {
		e.Problem = fmt.Sprintf("block %d is also at index %d, and both would be written", id, first+j)
		e.Remedy = "allocate a separate block for each part of the prompt"
		return e
	}
	for _, o := range w.leases {
		for oi, writes := range o.writes {
			if o != l && w.pools[oi] == w.pools[ti] && slices.Contains(writes, id) {
				e.Problem = fmt.Sprintf("block %d is written for lease %d, which is open", id, o.id)
			}
		}
	}
	for oi, writes := range l.writes[:ti] {
		if w.pools[oi] == w.pools[ti] && slices.Contains(writes, id) {
			e.Problem = fmt.Sprintf("block %d is also written for table %d, whose layers lie on the same pages", id, oi)
			e.Remedy = "allocate the blocks of both tables from one pool"
		}
	}
	return e
}

// unclaimLocked releases the blocks of claimLocked.
func (w *worker) unclaimLocked(l *lease) {
	for ti, table := range l.writes {
		for _, id := range table {
			word, bit := claimOf(w.pools[ti], id)
			if w.writing[word] &^= bit; w.writing[word] == 0 {
				delete(w.writing, word)
			}
		}
	}
	l.writes = nil
}

// claimOf is the position of a block in worker.writing.
func claimOf(pool int, id uint32) (word, bit uint64) {
	return uint64(pool)<<32 | uint64(id>>6), 1 << (id & 63)
}

// poolsOf maps each block table to one table whose blocks are the same memory: hybrid models place
// the layers of all groups over one another, and a block id belongs to one table at a time.
func poolsOf(l *layout.Layout, tables []layout.Table) []int {
	pools := make([]int, len(tables))
	for t := range tables {
		pools[t] = t
		for o := range t {
			from, to := pools[t], pools[o]
			if from == to || !sharePages(l.Groups[tables[o].First:tables[o].End], l.Groups[tables[t].First:tables[t].End]) {
				continue
			}
			for i := range pools[:t+1] {
				if pools[i] == from {
					pools[i] = to
				}
			}
		}
	}
	return pools
}

// sharePages reports whether groups of two block tables share pages.
func sharePages(a, b []layout.Group) bool {
	for i := range a {
		for k := range b {
			if onePool(&a[i], &b[k]) {
				return true
			}
		}
	}
	return false
}

// onePool reports whether a layer of a and one of b share pages. With equal strides they share
// whole blocks or nothing, which the layout's own check has verified; with unequal strides any
// common range counts.
func onePool(a, b *layout.Group) bool {
	for i := range a.Layers {
		for k := range b.Layers {
			x, y := &a.Layers[i], &b.Layers[k]
			if x.Base > y.Base {
				x, y = y, x
			}
			n := a.NumBlocks
			if x == &b.Layers[k] {
				n = b.NumBlocks
			}
			if x.Region != y.Region || y.Base-x.Base >= uint64(n)*x.BlockStride {
				continue
			}
			if x.BlockStride != y.BlockStride {
				return true
			}
			if d := (y.Base - x.Base) % x.BlockStride; d < x.PageBytes || x.BlockStride-d < y.PageBytes {
				return true
			}
		}
	}
	return false
}

// priority maps a value of a newer version to the least urgent priority.
func priority(v uint32) Priority { return Priority(min(v, uint32(Background))) }

func (w *worker) stepLocked(rec board.Record) error {
	m, err := msg.DecodeStep(rec.Body)
	if err != nil {
		return err
	}
	if m.Step < w.lastStep { // equal: a step whose tables did not fit one record
		return &msg.Error{Message: "STEP", Field: "step", Problem: fmt.Sprintf("%d after %d", m.Step, w.lastStep), Remedy: "send growing step numbers"}
	}
	w.lastStep = m.Step
	var announced []transfer.LeaseID
	for i := range m.Reqs {
		l, e := w.stepReqLocked(m.Step, &m.Reqs[i])
		if e != nil && err == nil {
			err = e
		}
		if l != nil {
			announced = append(announced, w.leaseID(l))
		}
	}
	if announced != nil {
		w.eventLocked(func(e Events) { e.Announced(w.pub, announced) })
	}
	return err
}

// stepReqLocked returns the lease if its announced step will be followed.
func (w *worker) stepReqLocked(step uint64, q *msg.StepReq) (*lease, error) {
	l := w.leases[q.Lease]
	if l == nil || !l.source || l.canceled {
		w.s.hookIgnored("step")
		return nil, nil
	}
	// A step that cannot be followed must not be sent in part: the lease ends.
	fail := func(err error) (*lease, error) {
		w.cancelLocked(l, err.Error())
		return nil, err
	}
	ids := 0
	if len(q.Blocks) > 0 {
		var err error
		if ids, err = w.checkTables("STEP", q.Blocks); err != nil {
			return fail(err)
		}
	}
	switch {
	case q.Attempt < l.attempt:
		w.s.hookIgnored("step")
		return nil, nil
	case q.Attempt > l.attempt && !l.preempt:
		// The engine restarted the request without a PREEMPT: earlier tokens no longer count.
		w.preemptLocked(l)
	}
	l.attempt, l.preempt = q.Attempt, false
	if n := len(l.steps); n > 0 && q.End < l.steps[n-1].end {
		return fail(&msg.Error{Message: "STEP", Field: "end", Problem: fmt.Sprintf("lease %d: token %d after %d in the same attempt", l.id, q.End, l.steps[n-1].end),
			Remedy: "write PREEMPT first"})
	}
	if len(l.steps) >= msg.MaxPendingSteps {
		// their flags may be set unnoticed: a sidecar that was stopped finds many steps at once
		w.followLocked()
	}
	if len(l.steps) >= msg.MaxPendingSteps {
		return fail(&msg.Error{Message: "STEP", Field: "step", Problem: fmt.Sprintf("lease %d: %d steps wait for their flags", l.id, len(l.steps)),
			Remedy: "signal the layers of each step, and its end"})
	}
	if w.blockIDs+ids > w.s.opt.Limits.BlockIDs {
		return fail(&msg.Error{Message: "STEP", Field: "blocks", Problem: fmt.Sprintf("the tables of open leases hold %d block ids, at most %d", w.blockIDs, w.s.opt.Limits.BlockIDs),
			Remedy: "send only changed tables"})
	}
	p := pendingStep{step: step, end: min(q.End, l.tokens)}
	if ids > 0 {
		p.blocks, p.ids = q.Blocks, ids
		w.blockIDs += ids
	}
	l.steps = append(l.steps, p)
	w.followingLocked(l)
	return l, nil
}

// changeLocked applies CANCEL, PREEMPT or HOLD. The record takes effect even if its body is
// unreadable.
func (w *worker) changeLocked(rec board.Record) error {
	kind := recordNames[rec.Type]
	l := w.leases[rec.Lease]
	if l == nil || l.canceled {
		w.s.hookIgnored(kind)
		return nil
	}
	var err error
	switch rec.Type {
	case board.RecCancel:
		var m *msg.Cancel
		reason := "cancelled"
		if m, err = msg.DecodeCancel(rec.Body); err == nil {
			reason = m.Reason
		}
		w.cancelLocked(l, reason)
	case board.RecPreempt:
		_, err = msg.DecodeEmpty("PREEMPT", rec.Body)
		if !l.source {
			return &msg.Error{Message: "PREEMPT", Field: "lease", Problem: fmt.Sprintf("lease %d is a destination", l.id), Remedy: "write CANCEL"}
		}
		w.preemptLocked(l)
	case board.RecHold:
		_, err = msg.DecodeEmpty("HOLD", rec.Body)
		if !l.source {
			return &msg.Error{Message: "HOLD", Field: "lease", Problem: fmt.Sprintf("lease %d is a destination", l.id)}
		}
		w.eventLocked(func(e Events) { e.Hold(w.pub, l.id) })
	}
	return err
}

func (w *worker) cancelLocked(l *lease, reason string) {
	if l.held != nil {
		w.endHeldLocked(l, board.Cancelled, reason)
		return
	}
	l.canceled = true
	l.epoch.Store(0)
	w.dropStepsLocked(l)
	w.eventLocked(func(e Events) { e.Cancel(w.pub, l.id, reason) })
}

func (w *worker) preemptLocked(l *lease) {
	l.epoch.Store(w.s.nextEpoch())
	l.preempt = true
	w.dropStepsLocked(l)
	clear(l.reported)
	w.eventLocked(func(e Events) { e.Preempt(w.pub, l.id) })
}

func (w *worker) dropStepsLocked(l *lease) {
	if len(l.steps) == 0 {
		return
	}
	for i := range l.steps {
		w.blockIDs -= l.steps[i].ids
	}
	l.steps = nil
	w.followingLocked(l)
}

// followingLocked maintains the set of leases with pending steps.
func (w *worker) followingLocked(l *lease) {
	if len(l.steps) > 0 {
		w.follow[l.id] = l
	} else {
		delete(w.follow, l.id)
	}
	w.followedLocked()
}

// followedLocked publishes to the watcher how many leases wait for GPU writes.
func (w *worker) followedLocked() {
	w.holding.Store(len(w.held) > 0)
	w.waiting.Store(int32(len(w.follow) + len(w.held)))
}

func (w *worker) eventLocked(call func(Events)) { w.pending = append(w.pending, call) }

// followLocked turns flags into Progress for every lease that has pending steps.
func (w *worker) followLocked() {
	if len(w.follow) == 0 || w.closed || w.broken != nil {
		return
	}
	end := w.flags.Layer(w.flags.Layers())
	var out []Progress
	for _, l := range w.follow {
		id := w.leaseID(l)
		first := l.steps[0].step // lowest step that some layer still lacks
		slowest := ^uint64(0)
		for i, flag := range w.index {
			at := max(w.flags.Layer(flag), end)
			slowest = min(slowest, at)
			if at < first {
				continue
			}
			k := len(l.steps) - 1
			for l.steps[k].step > at {
				k--
			}
			s := &l.steps[k]
			if s.end <= l.reported[i] {
				continue
			}
			l.reported[i] = s.end
			// A step without a table has the previous step's table, which may not have been
			// reported yet.
			var blocks [][]uint32
			for j := k; j >= 0 && blocks == nil; j-- {
				if blocks = l.steps[j].blocks; blocks != nil {
					w.blockIDs += l.steps[j].ids - l.ids // it replaces the lease's table
					l.ids = l.steps[j].ids
				}
			}
			out = append(out, Progress{Lease: id, Layer: i, Tokens: s.end, Final: s.end >= l.tokens, Blocks: blocks})
			for j := 0; j <= k; j++ { // reported now, or outdated by this report
				w.blockIDs -= l.steps[j].ids
				l.steps[j].blocks, l.steps[j].ids = nil, 0
			}
		}
		n := 0
		for n < len(l.steps) && l.steps[n].step <= slowest {
			w.blockIDs -= l.steps[n].ids
			n++
		}
		if n > 0 {
			l.steps = slices.Delete(l.steps, 0, n)
			w.followingLocked(l)
		}
	}
	if out != nil {
		w.eventLocked(func(e Events) { e.Progress(w.pub, out) })
	}
}

// sourceValid is Worker.SourceValid.
func (w *worker) sourceValid(id transfer.LeaseID) bool {
	// This load comes first: the records drained up to this epoch cover every reuse that can have
	// changed the bytes read before.
	now := w.flags.SourceEpoch()
	if w.drained.Load() < now && !w.catchUp(now) {
		return false
	}
	v, ok := w.sources.Load(id.ID)
	return ok && id.Epoch != 0 && v.(*lease).epoch.Load() == id.Epoch && id.Boot == w.pub.Boot
}

// catchUp drains the ring up to the record of that source epoch. False: the record has not been
// written yet, or too many events wait for delivery, or the ring is broken.
func (w *worker) catchUp(epoch uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.drained.Load() < epoch {
		if len(w.pending) >= maxUndelivered || !w.drainLocked(drainBatch) {
			break
		}
	}
	if !w.closed && (len(w.pending) > 0 || w.waiting.Load() > 0 || w.broken != nil) {
		w.wakeLocked() // the ring's goroutine delivers
	}
	return w.drained.Load() >= epoch
}

func (w *worker) doorFD() int {
	fd := -1
	if rc, err := w.door.SyscallConn(); err == nil {
		_ = rc.Control(func(n uintptr) { fd = int(n) })
	}
	return fd
}

// awaitDoorbell waits in the netpoller until the doorbell is rung. It does not reset the counter:
// each write is an edge of its own, and a read would be a system call that the shim could make
// block, because the shim shares the eventfd's flags. The netpoller forgets an edge before the
// wait, so the ring is checked once more.
func (w *worker) awaitDoorbell() error {
	rc, err := w.door.SyscallConn()
	if err != nil {
		return err
	}
	looked := false
	return rc.Read(func(uintptr) bool {
		if looked {
			return true
		}
		looked = true
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.closed || w.broken != nil || len(w.pending) > 0 || w.rung.Swap(false) || !w.sub.Sleep()
	})
}

// wakeLocked rings this process's own doorbell. After closing, its descriptor may be another
// file's.
func (w *worker) wakeLocked() {
	if w.closed {
		return
	}
	w.rung.Store(true)
	ring(w.doorFD())
}

// ring adds one to an eventfd. A full counter wakes its reader as well and is left unchanged: the
// shim can make an addition to it block, and the caller holds the sidecar's locks.
func ring(fd int) {
	if fd < 0 || !ready(uintptr(fd), unix.POLLOUT) {
		return
	}
	_, _ = unix.Write(fd, binary.NativeEndian.AppendUint64(nil, 1))
}

// complete ends an open lease towards the shim.
func (w *worker) complete(c Completion) error {
	enc := encodeCompletion(c)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return fmt.Errorf("complete %s: %w", c.Lease, ErrGone)
	}
	l := w.leases[c.Lease.ID]
	if l == nil || c.Lease.Boot != w.pub.Boot {
		return fmt.Errorf("complete %s: %w", c.Lease, ErrUnknownLease)
	}
	if l.source == c.Received {
		return fmt.Errorf("complete %s: received = %v, but source = %v: %w", c.Lease, c.Received, l.source, ErrUnknownLease)
	}
	// before the lease counts as complete: a drain that waits for the last one closes the ring
	w.postLocked(enc)
	w.closeLeaseLocked(l)
	return nil
}

func (w *worker) closeLeaseLocked(l *lease) {
	l.epoch.Store(0)
	w.dropStepsLocked(l)
	if l.held != nil {
		w.unholdLocked(l)
	}
	w.blockIDs -= l.ids
	delete(w.leases, l.id)
	w.unclaimLocked(l)
	if l.isCopy {
		w.copies--
	}
	if l.source {
		w.sources.Delete(l.id)
	}
	w.s.hookLeases(l.source, -1)
}

func encodeCompletion(c Completion) completion {
	if c.Received {
		m := msg.Received{Bytes: c.Bytes, US: uint64(max(c.Took, 0).Microseconds()), Transport: c.Transport, Reason: c.Reason, Recompute: c.Recompute}
		return completion{board.RecReceived, c.Status, c.Lease.ID, m.Append(nil)}
	}
	m := msg.Sent{Grants: uint32(max(c.Grants, 0)), Bytes: c.Bytes, Reason: c.Reason}
	return completion{board.RecSent, c.Status, c.Lease.ID, m.Append(nil)}
}

// postLocked writes a completion, or queues it behind those that wait for room in the ring.
func (w *worker) postLocked(c completion) {
	if len(w.queue) >= 2*w.s.opt.Limits.Leases {
		w.breakLocked(fmt.Errorf("the shim does not read its completion ring: %d completions wait", len(w.queue)))
		w.wakeLocked()
		return
	}
	w.queue = append(w.queue, c)
	if len(w.queue) == 1 {
		w.flushLocked()
	}
}

// flushLocked moves completions from the queue to the ring, and retries later if the ring is full:
// the protocol has no wake-up for room, and retries are enough for a shim that does not read.
func (w *worker) flushLocked() {
	if w.closed || w.broken != nil {
		return
	}
	wake := false
	sent := 0
	var full bool
	for _, c := range w.queue {
		wk, err := w.comp.Push(c.typ, c.status, c.lease, 0, c.body)
		if errors.Is(err, board.ErrTooBig) { // a long list of ranges; no list means everything
			c.body = encodeCompletion(Completion{Received: c.typ == board.RecReceived, Reason: "too many ranges"}).body
			wk, err = w.comp.Push(c.typ, c.status, c.lease, 0, c.body)
		}
		if errors.Is(err, board.ErrFull) {
			full = true
			break
		}
		if err != nil {
			w.breakLocked(fmt.Errorf("completion ring: %w", err))
			w.wakeLocked()
			return
		}
		wake = wake || wk
		sent++
	}
	w.queue = slices.Delete(w.queue, 0, sent)
	if wake {
		ring(w.bell)
	}
	if !full {
		w.retryIn = 0
		return
	}
	w.retryIn = min(max(2*w.retryIn, retryFirst), retryLast)
	if sent > 0 {
		w.retryIn = retryFirst
	}
	if w.retry == nil {
		w.retry = time.AfterFunc(w.retryIn, func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.flushLocked()
		})
	} else {
		w.retry.Reset(w.retryIn)
	}
}

// shut stops using the rings and forgets the leases; the memory stays until release.
func (w *worker) shut() {
	if w.shutOnce() {
		// ends run; without a lock, since Close waits for run's current check, which takes the lock
		_ = w.door.Close()
	}
}

func (w *worker) shutOnce() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return false
	}
	w.closed = true
	w.pending = nil
	if w.retry != nil {
		w.retry.Stop()
	}
	if w.detached != nil {
		w.detached.Stop()
	}
	if w.later != nil {
		w.later.Stop()
	}
	w.queue = nil
	for _, l := range w.leases {
		w.closeLeaseLocked(l)
	}
	w.closeBellLocked()
	w.rings.Release()
	w.proc.close() // ends the exit watch
	return true
}

// release frees the engine's memory once everything is fenced.
func (w *worker) release() {
	if w.detach != nil {
		w.detach()
	}
	for _, r := range w.pub.Regions {
		r.Release()
	}
	close(w.done)
}

func (w *worker) closeBellLocked() {
	_ = unix.Close(w.bell)
	w.bell = -1
}
