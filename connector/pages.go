package connector

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/connector/internal/blocks"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

// Store serves the pages of this node's store. Its methods may be called from any goroutine.
type Store interface {
	// Open adds a pool of a worker, until Close or until the worker's leases are fenced.
	Open(*engines.Worker, Pool) (page.ID, error)
	// Close closes a pool that no lease uses.
	Close(w *engines.Worker, pool uint64)
	// Start opens a lease, in the order of the worker's ring. It does not block.
	Start(*engines.Worker, Pages)
	// Exists reports which pages are in all of the namespaces.
	Exists(namespaces []page.ID, h page.Hashes) (page.Bitmap, error)
	// Pin is Exists, and keeps what is there for a time, or until unpin.
	Pin(namespaces []page.ID, h page.Hashes, d time.Duration) (found page.Bitmap, unpin func(),
		err error)
	// Remove forgets all pages of a namespace that a pool of the worker belongs to, on all nodes.
	Remove(*engines.Worker, page.ID) (Removed, error)
}

// Removed is how far a removal has come, once this node has removed its pages.
type Removed struct {
	Members, Confirmed uint32   // nodes with a store
	Missing            []string // that have not confirmed, and why
}

// Pool is memory of a worker in which the pages of one namespace of the store lie: block i has its
// pieces at Base + i*Stride of their regions.
type Pool struct {
	ID        uint64 // random, of the OPEN that made it
	Namespace page.Namespace
	Pieces    []PoolPiece
	Blocks    uint32
}

// PoolPiece is a part of every block of a Pool.
type PoolPiece struct {
	Region            *mem.Region
	Base, Stride, Len uint64
}

// Pages is a lease to get pages of the store into blocks of a pool, or to put them into the store.
// It ends like a destination lease.
type Pages struct {
	Lease    transfer.LeaseID
	Put      bool
	Pool     uint64
	Hashes   page.Hashes // of the pages, in the order of their prompt
	Before   []byte      // hash of the page before the first one; nil: none
	Blocks   []uint32    // one for each page
	Deadline time.Duration
	Req      string // for traces
}

// Bits of a page's result in Completion.Pages: the outcome, the tier that a get found it in, and
// whether a put is durable.
const (
	pageTierShift = 4
	pageDurable   = 1 << 7
)

// PageResult is the byte of one page.
func PageResult(outcome, tier uint8, durable bool) byte {
	b := outcome | tier<<pageTierShift
	if durable {
		b |= pageDurable
	}
	return b
}

// SplitPageResult is the reverse.
func SplitPageResult(b byte) (outcome, tier uint8) {
	return b & (1<<pageTierShift - 1), b &^ pageDurable >> pageTierShift
}

// maxPages bounds the open GETs and PUTs of a worker.
const maxPages = 256

// pools are the pools of a worker. Guarded by worker.mu.
type pools struct {
	known   map[uint64]*openPool // that requests can name, by their ids
	closing int                  // others, which leases or the store may still use
	open    int                  // GETs and PUTs
}

// openPool is one pool.
type openPool struct {
	id      uint64
	regions []*addedRegion // that may be dropped
	guarded blocks.Pool
	leases  int    // open GETs and PUTs
	used    uint64 // when a request named it last: a number of Server.uses
	closed  bool   // it ends with its last lease
}

func (w *worker) pagesLocked(rec board.Record) error {
	l, err := w.openLocked(rec, false)
	if err != nil {
		return err
	}
	what := "GET"
	p := &Pages{}
	var after uint64
	var deadline uint64
	if rec.Type == board.RecGet {
		var m *msg.Get
		if m, err = msg.DecodeGet(rec.Body); err == nil {
			p.Pool, p.Blocks, p.Req = m.Space, m.Blocks, m.Req
			p.Hashes = page.Hashes{Bytes: slices.Clone(m.Hashes), Each: int(m.HashBytes)}
			after, deadline = m.StreamMark, m.DeadlineMS
		}
	} else {
		what = "PUT"
		p.Put = true
		var m *msg.Put
		if m, err = msg.DecodePut(rec.Body); err == nil {
			p.Pool, p.Blocks, p.Req = m.Space, m.Blocks, m.Req
			p.Hashes = page.Hashes{Bytes: slices.Clone(m.Hashes), Each: int(m.HashBytes)}
			p.Before = slices.Clone(m.Parent)
			after, deadline = m.StreamMark, m.DeadlineMS
		}
	}
	pool := w.pools.known[p.Pool]
	if err == nil && pool == nil {
		err = &msg.Error{Message: what, Field: "space",
			Problem: fmt.Sprintf("%d has no blocks in this session", p.Pool),
			Remedy:  "send OPEN with pieces and blocks first"}
	}
	if err == nil {
		err = w.guard.Use(what, l.id, pool.guarded, p.Blocks, !p.Put)
	}
	if err != nil {
		w.refuseLocked(rec, false, err)
		return err
	}
	if w.pools.open >= maxPages {
		err = fmt.Errorf("%d GETs and PUTs are open, at most %d: wait for one to complete", w.pools.open,
			maxPages)
	} else {
		err = w.admitLocked(l, len(p.Blocks))
	}
	if err != nil {
		w.guard.Release(l.id)
		w.refuseLocked(rec, false, err)
		return nil
	}
	p.Lease, p.Deadline = w.leaseID(l), w.s.duration(deadline, w.s.opt.Deadline)
	l.pool, pool.used = pool, w.s.uses.Add(1)
	pool.leases++
	w.pools.open++
	l.useLocked(pool.regions)
	w.beginLocked(l, after, p.Deadline, func(left time.Duration) {
		p.Deadline = left
		w.starts = append(w.starts, func() { w.s.opt.Store.Start(w.pub, *p) })
	})
	return nil
}

// unusePoolLocked ends a lease's use of its pool.
func (w *worker) unusePoolLocked(l *lease) {
	p := l.pool
	if p == nil {
		return
	}
	w.pools.open--
	if p.leases--; p.leases == 0 && p.closed && !w.closed {
		w.s.wg.Go(func() { w.endPool(p) })
	}
}

// closePool ends a pool of the session that no request can name any more: now, or with its last
// lease.
func (w *worker) closePool(id uint64) {
	w.mu.Lock()
	p := w.pools.known[id]
	if p == nil || w.closed { // the worker's pools go with it
		w.mu.Unlock()
		return
	}
	delete(w.pools.known, id)
	w.pools.closing++
	p.closed = true
	idle := p.leases == 0
	w.mu.Unlock()
	if idle {
		w.endPool(p)
	}
}

// endPool ends a pool that no lease uses.
func (w *worker) endPool(p *openPool) {
	w.s.opt.Store.Close(w.pub, p.id)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.guard.Close(p.guarded)
	w.pools.closing--
}

// spaces are the namespaces that a session has opened, by their names in it, and its pins. They
// belong to the session's reader. The names are random: a request that was made for another session
// names none of this one's, hence no page of another namespace.
type spaces struct {
	open map[uint64]*openSpace
	pins map[uint64]pins // by the id of their EXISTS
	// a REMOVE runs; it may take seconds, and other requests do not wait for it
	removing atomic.Bool
}

// openSpace is a namespace of a session.
type openSpace struct {
	id   page.ID
	by   uint64 // id of its OPEN
	used uint64 // as openPool.used, for requests on the socket
}

// pins are those of one EXISTS.
type pins struct {
	end   func()
	until time.Time
}

// maxPins bounds the EXISTS of a session whose pins have not ended.
const maxPins = 4096

// lacks answers a request that needs a feature that this sidecar does not have.
func (c *session) lacks(id uint64, t msg.Type) {
	c.sendError(&msg.ErrorMessage{ID: id, Code: msg.CodeState,
		Message: fmt.Sprintf("%s is not a feature of this sidecar", t),
		Remedy:  "send it only if WELCOME has the feature that docs/protocol.md names"})
}

// refusePages answers a request that cannot be served.
func (c *session) refusePages(id uint64, field string, err error) {
	e := errorMessage(id, msg.CodeStore, err, false)
	if e.Field == "" {
		e.Field = field
	}
	c.sendError(e)
}

// onOpen opens a namespace. A worker that gives blocks gets a pool, whose id is the space.
func (c *session) onOpen(m *msg.Open) {
	if c.s.opt.Store == nil {
		c.lacks(m.ID, m.Type())
		return
	}
	n := &m.Namespace
	ns := page.Namespace{Weights: n.Weights, DType: n.DType, Layout: n.Layout,
		PageTokens: int(n.PageTokens), PageBytes: int(n.PageBytes), Algorithm: n.Algorithm,
		Seed: n.Seed, Adapter: n.Adapter, Generation: c.s.opt.Generation,
		Secret: slices.Clone(n.Secret)}
	space, err := randomSpace()
	if err != nil {
		c.refusePages(m.ID, "namespace", err)
		return
	}
	var id page.ID
	err = ns.Check()
	switch {
	case err != nil:
	case m.Blocks == 0:
		id = ns.ID()
	case c.worker == nil:
		err = &msg.Error{Message: "OPEN", Field: "blocks", Problem: "this session has no memory",
			Remedy: "send REGISTER first, on a worker's session"}
	default:
		id, err = c.openPool(m, space, ns)
	}
	if err != nil {
		c.refusePages(m.ID, "namespace", err)
		return
	}
	if c.spaces.open == nil {
		c.spaces.open = map[uint64]*openSpace{}
	}
	c.spaces.open[space] = &openSpace{id: id, by: m.ID, used: c.s.uses.Add(1)}
	if c.boundSpaces(); c.spaces.open[space] == nil {
		c.refusePages(m.ID, "namespace", &msg.Error{Message: "OPEN", Field: "namespace",
			Problem: fmt.Sprintf("%d are open in this session, and open GETs and PUTs use all",
				msg.MaxSpaces), Remedy: "wait for one to complete"})
		return
	}
	c.send(&msg.Opened{ID: m.ID, Space: space})
}

// onClose closes a namespace. If it is not open any more, boundSpaces closed it, or one of its
// regions was dropped.
func (c *session) onClose(m *msg.Close) {
	for space, o := range c.spaces.open {
		if o.by == m.Open {
			c.closeSpace(space)
			return
		}
	}
}

func (c *session) closeSpace(space uint64) {
	delete(c.spaces.open, space)
	if c.worker != nil {
		c.worker.closePool(space)
	}
}

// boundSpaces closes the namespace whose last use is the oldest if the session has too many. The
// engine may open it again. Namespaces with open GETs and PUTs stay.
func (c *session) boundSpaces() {
	closing := 0
	used := make(map[uint64]uint64, len(c.spaces.open))
	for space, o := range c.spaces.open {
		used[space] = o.used
	}
	if w := c.worker; w != nil {
		w.mu.Lock()
		closing = w.pools.closing
		for id, p := range w.pools.known {
			if used[id] = max(used[id], p.used); p.leases > 0 {
				delete(used, id)
			}
		}
		w.mu.Unlock()
	}
	if len(c.spaces.open)+closing <= msg.MaxSpaces {
		return
	}
	oldest, minUsed := uint64(0), uint64(math.MaxUint64)
	for space, at := range used {
		if at < minUsed {
			oldest, minUsed = space, at
		}
	}
	c.closeSpace(oldest)
}

// openPool opens the pool of a worker. It is the worker's until its leases are fenced, also if the
// session ends before.
func (c *session) openPool(m *msg.Open, space uint64, ns page.Namespace) (id page.ID, err error) {
	w := c.worker
	w.deliver.Lock() // WorkerGone comes before or after
	defer w.deliver.Unlock()
	if w.gone {
		return id, ErrGone
	}
	p, added, err := w.pool(m)
	if err != nil {
		return id, err
	}
	p.ID, p.Namespace = space, ns
	if id, err = c.s.opt.Store.Open(w.pub, p); err != nil {
		return id, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pools.known == nil {
		w.pools.known = map[uint64]*openPool{}
	}
	// This session's reader alone drops regions, and opens and closes pools.
	w.pools.known[space] = &openPool{id: space, regions: added,
		guarded: w.guard.Open(m.Pieces, m.Blocks), used: w.s.uses.Add(1)}
	return id, nil
}

// pool resolves the pieces of a pool, and returns the regions among them that may be dropped.
func (w *worker) pool(m *msg.Open) (p Pool, added []*addedRegion, err error) {
	p = Pool{Blocks: m.Blocks, Pieces: make([]PoolPiece, 0, len(m.Pieces))}
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, x := range m.Pieces {
		r, a, err := w.regionLocked(x.Region)
		if err != nil {
			return p, nil, &msg.Error{Message: "OPEN", Field: fmt.Sprintf("pieces[%d].region", i),
				Problem: err.Error(), Remedy: "name regions by their numbers, as in REGISTER and ADD_REGIONS"}
		}
		if a != nil && !slices.Contains(added, a) {
			added = append(added, a)
		}
		p.Pieces = append(p.Pieces, PoolPiece{Region: r, Base: x.Base, Stride: x.Stride, Len: x.Len})
	}
	return p, added, nil
}

// namespaces returns the ids of spaces of this session.
func (c *session) namespaces(what string, spaces ...msg.SpaceRef) ([]page.ID, error) {
	var ids []page.ID
	for i, s := range spaces {
		o := c.spaces.open[s.Space]
		if o == nil {
			return nil, &msg.Error{Message: what, Field: fmt.Sprintf("spaces[%d]", i),
				Problem: fmt.Sprintf("%d is not open in this session", s.Space),
				Remedy:  "send OPEN in each session, and name spaces as in OPENED"}
		}
		o.used = c.s.uses.Add(1)
		ids = append(ids, o.id)
	}
	return ids, nil
}

// randomSpace makes the name of a space.
func randomSpace() (uint64, error) {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(b[:]), nil
}

func (c *session) onExists(m *msg.Exists) {
	if c.s.opt.Store == nil {
		c.lacks(m.ID, m.Type())
		return
	}
	ids, err := c.namespaces("EXISTS", m.Spaces...)
	h := page.Hashes{Bytes: m.Hashes, Each: int(m.HashBytes)}
	var found page.Bitmap
	switch {
	case err != nil:
	case m.PinMS == 0:
		found, err = c.s.opt.Store.Exists(ids, h)
	case !c.roomForPins():
		err = fmt.Errorf("%d EXISTS of this session have pins, at most %d: send UNPIN",
			len(c.spaces.pins), maxPins)
	default:
		var unpin func()
		d := time.Duration(min(m.PinMS, math.MaxInt32)) * time.Millisecond
		if found, unpin, err = c.s.opt.Store.Pin(ids, h, d); err == nil {
			c.keepPins(m.ID, pins{unpin, time.Now().Add(d)})
		}
	}
	if err != nil {
		c.refusePages(m.ID, "hashes", err)
		return
	}
	out := make([]byte, (h.Len()+7)/8)
	for i := range out {
		out[i] = byte(found[i/8] >> (i % 8 * 8))
	}
	c.send(&msg.Found{ID: m.ID, Pages: uint32(h.Len()), Found: out})
}

// roomForPins removes expired pins if the table is full, and reports whether it has room.
func (c *session) roomForPins() bool {
	if len(c.spaces.pins) >= maxPins {
		now := time.Now()
		maps.DeleteFunc(c.spaces.pins, func(_ uint64, p pins) bool { return p.until.Before(now) })
	}
	return len(c.spaces.pins) < maxPins
}

func (c *session) keepPins(id uint64, p pins) {
	if c.spaces.pins == nil {
		c.spaces.pins = map[uint64]pins{}
	}
	if old, ok := c.spaces.pins[id]; ok {
		old.end()
	}
	c.spaces.pins[id] = p
}

func (c *session) onUnpin(m *msg.Unpin) {
	if p, ok := c.spaces.pins[m.Pin]; ok {
		p.end()
		delete(c.spaces.pins, m.Pin)
	}
}

// unpinAll ends the pins of a session that ends.
func (c *session) unpinAll() {
	for _, p := range c.spaces.pins {
		p.end()
	}
	c.spaces.pins = nil
}

func (c *session) onRemove(m *msg.Remove) {
	if c.s.opt.Store == nil {
		c.lacks(m.ID, m.Type())
		return
	}
	ids, err := c.namespaces("REMOVE", msg.SpaceRef{Space: m.Space})
	switch {
	case err != nil:
	case c.worker == nil:
		err = &msg.Error{Message: "REMOVE", Field: "space", Problem: "this session has no blocks of it",
			Remedy: "send it on a worker's session"}
	case !c.spaces.removing.CompareAndSwap(false, true):
		err = &msg.Error{Message: "REMOVE", Field: "space", Problem: "another REMOVE is under way",
			Remedy: "wait for its DONE"}
	}
	if err != nil {
		c.refusePages(m.ID, "space", err)
		return
	}
	id, pub := m.ID, c.worker.pub
	c.s.wg.Go(func() {
		defer c.spaces.removing.Store(false)
		out, err := c.s.opt.Store.Remove(pub, ids[0])
		if err != nil {
			c.refusePages(id, "space", err)
			return
		}
		c.send(&msg.Done{ID: id, Members: out.Members, Confirmed: out.Confirmed,
			Missing: strings.Join(out.Missing, "; ")})
	})
}
