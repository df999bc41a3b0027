// Package removals removes the pages of a namespace from all nodes of a cluster.
//
// A removal has a stamp (package store/removal). The node that makes one sends it to all peers and
// waits for their answers. A node that learns a removal passes it on to its own peers, removes its
// pages, and answers. A peer that comes up gets all removals of this node. So a node that was away
// learns what it missed from the first peer that it meets, unless that was longer than removals are
// remembered.
//
// Invariants: a removal is known before pages are removed for it, so that whatever comes to the
// store afterwards comes from nodes that have applied it, or goes with the rest. It is applied, and
// this node reports it as applied, only once the store has removed the pages durably and the note
// of the store has it. A node never reports a removal as applied that it did not apply, although it
// has a later one.
//
// Ownership: one mutex guards the list and the peers; it is not held over I/O or a send. Messages
// of peers are foreign: their lengths are checked, and the peers, waiting answers and unsent
// messages have bounds. Goroutines, from Run until its context ends: one that sends, and one that
// has at most removers others remove.
package removals

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/store/removal"
	"github.com/kvspray/kvspray/transfer"
)

// Feature announces in Hello that a sidecar takes the messages about removals.
const Feature = "removals"

// Bounds and times.
const (
	maxPeers   = 4096
	perMessage = 512  // removals
	maxAnswers = 1024 // that peers wait for
	maxProblem = 256  // bytes of a peer's text
	maxRounds  = 4    // stamps that one Remove tries
	maxAsks    = 1024 // removals that this node makes at the same time
	removers   = 16   // removals that the store works at at the same time

	// pushesPerHour is how many namespaces one peer may push out of a full list in an hour.
	pushesPerHour = 256

	retryTime    = 5 * time.Second // after a removal that failed here
	settleTime   = 5 * time.Second // from the start, until pages of an earlier start count
	forgetTime   = time.Hour
	forwardPause = 20 * time.Millisecond
	// removePause is between two rounds of removals. A round writes and syncs the disk of all.
	removePause = 100 * time.Millisecond
)

// Store is what holds the pages. *store.Store has these methods.
type Store interface {
	RemoveSpace(id page.ID) error
	RemoveObjects(id page.ID) error
	Note() ([]byte, error)
	SetNote(note []byte) error
	Keeps() bool
}

// Member is a node with a store.
type Member struct {
	Boot transfer.Boot
	Node string
}

// Options are the parts that Removals uses. All are required but Send and Members, which a node
// without peers lacks.
type Options struct {
	Self  Member
	Store Store
	Send  func(transfer.Boot, *peerv1.ControlFrame) error
	// Members are the nodes with a store that the cluster has, this one or not.
	Members func() []Member
	Log     *slog.Logger
}

// Removals is one node's part.
type Removals struct {
	o      Options
	talk   chan struct{} // has room for one: there is something to send
	remove chan struct{} // likewise: there is something to remove
	done   chan struct{} // closed at the end of Run

	refused admit.Log // of peers' frames

	mu      sync.Mutex // guards what follows
	list    *removal.List
	peers   map[transfer.Boot]*peer
	news    map[page.ID]transfer.Boot // to pass on, and whom it is from
	answers []answer                  // that are due once a removal is applied
	changed chan struct{}             // closed when something was applied, or an answer has come
	failed  map[page.ID]error         // the last try to remove
	asks    map[page.ID]*ask          // under way
	last    uint64                    // id of an ask
	fresh   bool                      // the store has no pages of an earlier start
	settled bool                      // a settled peer has sent its removals
	until   time.Time                 // how long peers are waited for
	pushed  map[transfer.Boot]*pushes

	removed map[page.ID]removed // of removals that are not applied yet; the remover's only
}

// peer is a node whose control lanes are up.
type peer struct {
	node    string
	sendAll bool // it is to get all removals
	owed    bool // it has got them, and not that these are all
}

// pushes are namespaces that a peer has pushed out of the list.
type pushes struct {
	since time.Time
	n     int
}

// removed is how far a removal has come whose object tier, or note, has failed.
type removed struct {
	stamp uint64
	all   bool // the object tier has it, too
}

// answer is what a peer waits for.
type answer struct {
	to      transfer.Boot
	id      uint64
	r       removal.Removal
	applied uint64 // when the list knew it last
	problem string // why the list has not taken it
}

// ask is a removal that this node makes, with what the peers have answered.
type ask struct {
	ended   chan struct{} // closed then
	id      uint64
	r       removal.Removal
	applied bool                                  // here
	answers map[transfer.Boot]*peerv1.PageRemoved // nil: none yet
	nodes   map[transfer.Boot]string              // their names
}

// answerLocked takes the first answer of a peer that was asked.
func (k *ask) answerLocked(r *Removals, from transfer.Boot, answer *peerv1.PageRemoved) {
	if a, asked := k.answers[from]; asked && a == nil {
		k.answers[from] = answer
		r.changedLocked()
	}
}

// New makes the node's part from the note of its store.
func New(o Options) *Removals {
	r := &Removals{o: o, refused: admit.Log{Logger: o.Log},
		talk: make(chan struct{}, 1), remove: make(chan struct{}, 1),
		done: make(chan struct{}), asks: map[page.ID]*ask{}, peers: map[transfer.Boot]*peer{},
		news: map[page.ID]transfer.Boot{}, changed: make(chan struct{}),
		failed: map[page.ID]error{}, until: time.Now().Add(settleTime),
		pushed: map[transfer.Boot]*pushes{}, removed: map[page.ID]removed{}}
	note, err := o.Store.Note()
	if err == nil {
		r.list, err = removal.Parse(note)
	}
	if err != nil {
		// Peers have the removals, too. Those that this node has applied are applied again then.
		o.Log.Warn("store: removals of earlier starts are not known; peers report theirs", "err", err)
		r.list = removal.NewList()
	}
	r.settled, r.fresh = o.Send == nil, !o.Store.Keeps()
	if len(r.list.Pending()) > 0 {
		poke(r.remove)
	}
	return r
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Known is this node's latest removal of a namespace; 0: none.
func (r *Removals) Known(id page.ID) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.list.Known(id)
}

// Applied is the latest removal of a namespace that this node has applied; 0: none.
func (r *Removals) Applied(id page.ID) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.list.Applied(id)
}

// Settled reports whether a peer has sent its removals, or settleTime is over. Until then this node
// may lack removals that it had in an earlier life, and takes no pages of others.
func (r *Removals) Settled() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.settledLocked()
}

func (r *Removals) settledLocked() bool {
	r.settled = r.settled || !time.Now().Before(r.until)
	return r.settled
}

// Ready reports whether pages of a namespace may be served to engines: no removal is known that is
// not applied, and pages of an earlier start wait for what peers report.
func (r *Removals) Ready(id page.ID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return (r.fresh || r.settledLocked()) && r.list.Known(id) == r.list.Applied(id)
}

// Stats are how many removals are remembered, and how many of them are not applied.
func (r *Removals) Stats() (known, pending int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.list.Len(), len(r.list.Pending())
}

// PeerUp introduces a peer, or changes it. It gets all removals.
func (r *Removals) PeerUp(boot transfer.Boot, node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.peers[boot]
	if p == nil {
		if len(r.peers) == maxPeers || boot == r.o.Self.Boot {
			return
		}
		p = &peer{sendAll: true}
		r.peers[boot] = p
		poke(r.talk)
	}
	p.node = node
}

// PeerDown forgets a peer that cannot be reached.
func (r *Removals) PeerDown(boot transfer.Boot) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.peers, boot)
	for _, k := range r.asks {
		k.answerLocked(r, boot, &peerv1.PageRemoved{Problem: "the connection ended"})
	}
}

func (r *Removals) changedLocked() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// Learn takes a removal that a peer has named otherwise.
func (r *Removals) Learn(from transfer.Boot, id page.ID, stamp uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = r.learnLocked(from, removal.Removal{Space: id, Stamp: stamp})
}

func (r *Removals) learnLocked(from transfer.Boot, m removal.Removal) error {
	now := time.Now()
	if from != r.o.Self.Boot && r.list.Known(m.Space) == 0 && r.list.Full(now) &&
		!r.mayPushLocked(from, now) {
		return errPushes
	}
	isNew, err := r.list.Learn(m, now)
	if isNew {
		if r.news[m.Space] = from; len(r.news) > removal.Max {
			clear(r.news) // all that the list has is less
			for _, p := range r.peers {
				p.sendAll = true
			}
		}
		delete(r.failed, m.Space) // that was another one
		poke(r.remove)
		poke(r.talk)
	}
	return err //nolint:wrapcheck // it names what is wrong
}

var errPushes = fmt.Errorf("this node keeps removals of %d namespaces, its limit, and has "+
	"given up %d of them for one peer in this hour; try again later", removal.Max, pushesPerHour)

// mayPushLocked counts a namespace that a peer pushes out of the list.
func (r *Removals) mayPushLocked(from transfer.Boot, now time.Time) bool {
	maps.DeleteFunc(r.pushed, func(_ transfer.Boot, p *pushes) bool {
		return now.Sub(p.since) >= time.Hour
	})
	p := r.pushed[from]
	if p == nil {
		if len(r.pushed) == maxPeers {
			return false
		}
		p = &pushes{since: now}
		r.pushed[from] = p
	}
	p.n++
	return p.n <= pushesPerHour
}

// Handle takes a frame of a peer, and does not block. It returns an error for one that the protocol
// does not allow.
func (r *Removals) Handle(from transfer.Boot, f *peerv1.ControlFrame) error {
	switch b := f.Body.(type) {
	case *peerv1.ControlFrame_PageRemovals:
		if err := check(b.PageRemovals); err != nil {
			return err
		}
		r.removals(from, b.PageRemovals)
	case *peerv1.ControlFrame_PageRemoved:
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, k := range r.asks {
			if k.id == b.PageRemoved.GetId() { // others are late
				k.answerLocked(r, from, b.PageRemoved)
			}
		}
	}
	return nil
}

func check(m *peerv1.PageRemovals) error {
	n := len(m.GetRemovals())
	if n > perMessage || m.GetId() != 0 && n != 1 {
		return fmt.Errorf("page removals: %d with the id %d: want at most %d, or one with an id", n,
			m.GetId(), perMessage)
	}
	for _, x := range m.GetRemovals() {
		if len(x.GetSpace()) != len(page.ID{}) || x.GetStamp() == 0 {
			return fmt.Errorf("page removals: namespace of %d bytes, stamp %d: want %d bytes, and a stamp",
				len(x.GetSpace()), x.GetStamp(), len(page.ID{}))
		}
	}
	return nil
}

// removals takes a message that was checked.
func (r *Removals) removals(from transfer.Boot, m *peerv1.PageRemovals) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var refused int
	var why error
	for _, x := range m.GetRemovals() {
		a := answer{to: from, id: m.GetId(),
			r: removal.Removal{Space: page.ID(x.GetSpace()), Stamp: x.GetStamp()}}
		if err := r.learnLocked(from, a.r); err != nil {
			refused, why, a.problem = refused+1, err, cut(err.Error())
		}
		if m.GetId() != 0 && len(r.answers) < maxAnswers {
			r.answers = append(r.answers, a)
			poke(r.talk)
		}
	}
	if refused > 0 {
		r.refused.Note(slog.LevelWarn, "store: removals are refused", "peer", from.String(), "removals",
			refused, "err", why)
	}
	if m.GetLast() {
		r.settled = true
		poke(r.talk) // others wait for it
	}
}

// Run sends and removes until the context ends.
func (r *Removals) Run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { r.sender(ctx) })
	wg.Go(func() { r.remover(ctx) })
	wg.Wait()
	close(r.done)
}

// result is what the store has returned for one removal.
type result struct {
	removal.Removal
	err error
}

// remover applies removals. The store works at several at the same time: one that waits for the
// object store does not hold up those that need not.
func (r *Removals) remover(ctx context.Context) {
	var retry, paused <-chan time.Time
	var workers sync.WaitGroup
	defer workers.Wait()
	working, ended := map[page.ID]bool{}, make(chan result, removers)
	old := time.NewTicker(forgetTime)
	defer old.Stop()
	for wanted := false; ; {
		select {
		case <-ctx.Done():
			return
		case <-r.remove:
			wanted = true
		case <-retry:
			retry, wanted = nil, true
		case <-paused:
			paused = nil
		case <-old.C:
			r.mu.Lock()
			r.list.Forget(time.Now())
			r.mu.Unlock()
		case first := <-ended:
			results := []result{first}
			for len(ended) > 0 {
				results = append(results, <-ended)
			}
			for _, x := range results {
				delete(working, x.Space)
			}
			if !r.finish(results) {
				retry = time.After(retryTime)
			}
			wanted = wanted || r.unfinished(working)
		}
		if !wanted || paused != nil { // removals in a loop leave the disk to others
			continue
		}
		wanted, paused = false, time.After(removePause)
		some, err := r.note(working)
		if err != nil {
			retry = time.After(retryTime)
		}
		for _, m := range some {
			was := r.removed[m.Space]
			working[m.Space] = true
			workers.Go(func() { ended <- result{m, r.removeSpace(m, was)} })
		}
	}
}

// note notes all that is pending, and returns removals that the store can begin with. A node that
// ends before a removal is applied goes on with it when it starts again.
func (r *Removals) note(working map[page.ID]bool) ([]removal.Removal, error) {
	r.mu.Lock()
	pending := slices.DeleteFunc(r.list.Pending(), func(m removal.Removal) bool {
		return working[m.Space]
	})
	note := r.list.Encode()
	r.mu.Unlock()
	pending = pending[:min(len(pending), removers-len(working))]
	if len(pending) == 0 {
		return nil, nil
	}
	if err := r.o.Store.SetNote(note); err != nil {
		r.o.Log.Warn("store: removals are not noted, and tried again", "err", err)
		r.fail(pending, err)
		return nil, err //nolint:wrapcheck // it is only counted
	}
	return pending, nil
}

// unfinished reports whether there is a removal that nothing works at, and that has not failed.
func (r *Removals) unfinished(working map[page.ID]bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.list.Pending(), func(m removal.Removal) bool {
		return !working[m.Space] && r.failed[m.Space] == nil
	})
}

// finish takes what the store has done, and reports whether all of it is applied.
func (r *Removals) finish(results []result) bool {
	var done []removal.Removal
	for _, x := range results {
		if x.err == nil || errors.Is(x.err, removal.ErrObjects) {
			r.removed[x.Space] = removed{x.Stamp, x.err == nil}
		}
		if x.err != nil {
			r.o.Log.Warn("store: a removal failed, and is tried again", "namespace", x.Space.String(),
				"err", x.err)
			r.fail([]removal.Removal{x.Removal}, x.err)
			continue
		}
		done = append(done, x.Removal)
	}
	if len(done) == 0 {
		return false
	}
	r.mu.Lock()
	// The note first: a node that reports a removal and then starts again does not remove later pages.
	after := r.list.After(done)
	r.mu.Unlock()
	if err := r.o.Store.SetNote(after); err != nil {
		r.o.Log.Warn("store: removals are not noted, and tried again", "err", err)
		r.fail(done, err)
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range done {
		r.appliedLocked(m)
	}
	r.changedLocked()
	poke(r.talk)
	return len(done) == len(results)
}

func (r *Removals) appliedLocked(m removal.Removal) {
	r.list.Apply(m)
	delete(r.failed, m.Space)
	delete(r.removed, m.Space)
	// The list may forget it at once.
	if k := r.asks[m.Space]; k != nil && k.r.Stamp <= m.Stamp {
		k.applied = true
	}
	for i := range r.answers {
		if a := &r.answers[i]; a.r.Space == m.Space {
			a.applied = m.Stamp
		}
	}
}

// removeSpace removes what an earlier try has not.
func (r *Removals) removeSpace(m removal.Removal, was removed) error {
	switch {
	case was.stamp != m.Stamp:
		return r.o.Store.RemoveSpace(m.Space) //nolint:wrapcheck // it names the namespace
	case !was.all:
		return r.o.Store.RemoveObjects(m.Space) //nolint:wrapcheck // likewise
	}
	return nil
}

func (r *Removals) fail(which []removal.Removal, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range which {
		if r.list.Known(m.Space) == m.Stamp { // otherwise the later one is tried next
			r.failed[m.Space] = err
		}
	}
	r.changedLocked()
	poke(r.talk)
}

// sender sends what is due. News that come together go together.
func (r *Removals) sender(ctx context.Context) {
	settled := time.After(time.Until(r.until))
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.talk:
		case <-settled:
		}
		unsent := map[transfer.Boot]bool{}
		for _, m := range r.due() {
			if unsent[m.to] {
				continue // the last message of a list is not sent without the others
			}
			if err := r.o.Send(m.to, m.frame); err != nil {
				r.o.Log.Debug("store: removals are not sent", "peer", m.to.String(), "err", err)
				unsent[m.to] = true
				r.unsent(m.to)
			}
		}
		select { // so that a peer that makes removals all the time costs little
		case <-ctx.Done():
			return
		case <-time.After(forwardPause):
		}
	}
}

// unsent has a peer get all removals later, in place of some that could not be sent.
func (r *Removals) unsent(to transfer.Boot) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.peers[to]; p != nil {
		p.sendAll = true
		time.AfterFunc(retryTime, func() { poke(r.talk) })
	}
}

type message struct {
	to    transfer.Boot
	frame *peerv1.ControlFrame
}

// due takes what is to be sent.
func (r *Removals) due() (out []message) {
	if r.o.Send == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answers = slices.DeleteFunc(r.answers, func(a answer) bool {
		m := r.answerLocked(a)
		if m != nil {
			out = append(out, message{a.to, &peerv1.ControlFrame{
				Body: &peerv1.ControlFrame_PageRemoved{PageRemoved: m}}})
		}
		return m != nil
	})
	var all, news []*peerv1.PageRemoval
	for id := range r.news {
		if stamp := r.list.Known(id); stamp != 0 {
			news = append(news, wire(removal.Removal{Space: id, Stamp: stamp}))
		}
	}
	for _, m := range r.list.All() {
		all = append(all, wire(m))
	}
	settled := r.settledLocked()
	for boot, p := range r.peers {
		if p.sendAll {
			p.sendAll, p.owed = false, !settled
			out = append(out, parts(boot, all, settled)...)
		} else {
			out = append(out, parts(boot, slices.DeleteFunc(slices.Clone(news),
				func(m *peerv1.PageRemoval) bool { return r.news[page.ID(m.Space)] == boot }),
				p.owed && settled)...)
			p.owed = p.owed && !settled
		}
	}
	clear(r.news)
	return out
}

func wire(m removal.Removal) *peerv1.PageRemoval {
	return &peerv1.PageRemoval{Space: m.Space[:], Stamp: m.Stamp}
}

// parts divides removals into messages. A list of all has a last message, even without removals.
func parts(to transfer.Boot, list []*peerv1.PageRemoval, whole bool) (out []message) {
	for whole || len(list) > 0 {
		n := min(len(list), perMessage)
		m := &peerv1.PageRemovals{Removals: list[:n:n], Last: whole && n == len(list)}
		list = list[n:]
		out = append(out, message{to, removalsFrame(m)})
		if len(list) == 0 {
			break
		}
	}
	return out
}

func removalsFrame(m *peerv1.PageRemovals) *peerv1.ControlFrame {
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_PageRemovals{PageRemovals: m}}
}

// answerLocked is the answer to a peer; nil: it is not due yet.
func (r *Removals) answerLocked(a answer) *peerv1.PageRemoved {
	out := &peerv1.PageRemoved{Id: a.id, Stamp: max(a.applied, r.list.Applied(a.r.Space))}
	switch {
	case out.Stamp >= a.r.Stamp:
	case a.problem != "":
		out.Problem = a.problem
	case r.list.Known(a.r.Space) < a.r.Stamp:
		out.Problem = "the removal's time is too long before this node's clock; set the clocks"
	default:
		err := r.failed[a.r.Space]
		if err == nil {
			return nil
		}
		out.Problem = cut(err.Error())
	}
	return out
}

func cut(s string) string { return s[:min(len(s), maxProblem)] }

// State is what a member has answered.
type State struct {
	Member
	Confirmed bool
	Problem   string // why not
}

// Remove removes all pages of a namespace from all members, and returns what each has answered,
// this node first. It waits until this node has applied the removal, and at most patience for
// others. Those that did not answer learn of the removal when they are up again. With an error this
// node has not applied the removal yet, and goes on trying.
func (r *Removals) Remove(ctx context.Context, id page.ID, patience time.Duration) ([]State,
	error) {
	k, err := r.begin(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("store: namespace %s: remove: %w", id, err)
	}
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.asks, id)
		close(k.ended)
	}()
	limit, stop := context.WithTimeout(ctx, patience)
	defer stop()
	for round := 1; ; round++ {
		states, higher, err := r.round(ctx, limit, id, k)
		if err != nil || higher == 0 || round == maxRounds || limit.Err() != nil {
			return states, err
		}
		r.mu.Lock()
		_ = r.learnLocked(r.o.Self.Boot, removal.Removal{Space: id, Stamp: higher})
		r.mu.Unlock()
	}
}

// begin waits until no other removal of the namespace is under way.
func (r *Removals) begin(ctx context.Context, id page.ID) (*ask, error) {
	for {
		r.mu.Lock()
		other := r.asks[id]
		switch {
		case other != nil:
		case len(r.asks) == maxAsks:
			r.mu.Unlock()
			return nil, fmt.Errorf("%d removals are under way; try again later", maxAsks)
		default:
			k := &ask{ended: make(chan struct{})}
			r.asks[id] = k
			r.mu.Unlock()
			return k, nil
		}
		r.mu.Unlock()
		select {
		case <-other.ended:
		case <-ctx.Done():
			return nil, fmt.Errorf("another removal of it is under way: %w", ctx.Err())
		}
	}
}

// round makes a removal with one stamp. higher: a member has applied a later one, and may have
// stored pages between that and this one.
func (r *Removals) round(ctx, limit context.Context, id page.ID, a *ask) (states []State,
	higher uint64, err error) {
	r.mu.Lock()
	stamp := r.list.Next(id, time.Now())
	m := removal.Removal{Space: id, Stamp: stamp}
	if err := r.learnLocked(r.o.Self.Boot, m); err != nil {
		r.mu.Unlock()
		return nil, 0, fmt.Errorf("store: namespace %s: %w", id, err)
	}
	delete(r.news, id) // all peers are asked
	r.last++
	a.id, a.r, a.applied = r.last, m, false
	a.answers, a.nodes = map[transfer.Boot]*peerv1.PageRemoved{}, map[transfer.Boot]string{}
	for boot, p := range r.peers {
		a.answers[boot], a.nodes[boot] = nil, p.node
	}
	asked := make([]transfer.Boot, 0, len(a.answers))
	for boot := range a.answers {
		asked = append(asked, boot)
	}
	r.mu.Unlock()
	for _, boot := range asked {
		if err := r.o.Send(boot, removalsFrame(&peerv1.PageRemovals{Id: a.id,
			Removals: []*peerv1.PageRemoval{wire(m)}})); err != nil {
			r.mu.Lock()
			a.answers[boot] = &peerv1.PageRemoved{Problem: cut(err.Error())}
			r.mu.Unlock()
			r.unsent(boot)
		}
	}
	if err := r.wait(ctx, limit, a); err != nil {
		return nil, 0, fmt.Errorf("store: namespace %s: remove: %w", id, err)
	}
	states, higher = r.states(a, stamp)
	return states, higher, nil
}

// wait returns once this node has applied a removal and, unless limit ends before, all peers have
// answered.
func (r *Removals) wait(ctx, limit context.Context, a *ask) error {
	others := limit.Done()
	for {
		r.mu.Lock()
		changed, applied, err := r.changed, a.applied, r.failed[a.r.Space]
		left := 0
		for _, x := range a.answers {
			if x == nil {
				left++
			}
		}
		r.mu.Unlock()
		switch {
		case applied && (left == 0 || limit.Err() != nil):
			return nil
		case !applied && err != nil:
			return err
		}
		select {
		case <-changed:
		case <-others:
			others = nil
		case <-ctx.Done():
			return ctx.Err()
		case <-r.done:
			return errStopped
		}
	}
}

var errStopped = errors.New("the node stops; it goes on with the removal when it starts again")

// states are the answers, and of all members that were not asked why not.
func (r *Removals) states(a *ask, stamp uint64) (out []State, higher uint64) {
	var members []Member
	if r.o.Members != nil {
		members = r.o.Members()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := map[transfer.Boot]bool{r.o.Self.Boot: true}
	add := func(s State) {
		if !seen[s.Boot] {
			seen[s.Boot] = true
			out = append(out, s)
		}
	}
	for boot, x := range a.answers {
		s := State{Member: Member{boot, a.nodes[boot]}}
		switch {
		case x == nil:
			s.Problem = "it has not answered in time"
		case x.Problem != "":
			s.Problem = cut(x.Problem)
		case x.Stamp > stamp:
			higher = max(higher, x.Stamp)
			s.Problem = "another removal of the namespace came in between"
		case x.Stamp == stamp:
			s.Confirmed = true
		default:
			s.Problem = "it has applied an earlier removal only"
		}
		add(s)
	}
	for _, m := range members {
		add(State{Member: m, Problem: "it cannot be reached"})
	}
	slices.SortFunc(out, func(x, y State) int {
		return cmp.Or(cmp.Compare(x.Node, y.Node), slices.Compare(x.Boot[:], y.Boot[:]))
	})
	return append([]State{{Member: r.o.Self, Confirmed: true}}, out...), higher
}
