// Package pages serves the node's store to engines: pools of memory that pages lie in, leases that
// get and put pages, and questions about what is there.
//
// The release rule holds as for transfers: a lease is completed only when the store no longer
// touches the engine's blocks, whatever its disks still do.
//
// Ownership: a worker's pools belong to its session. Each holds its namespace open, until Gone. One
// mutex guards pools and namespaces; it is never held while the store works. A get from memory goes
// from the goroutine that reads the engine's ring to one of the store's, which completes it.
package pages

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/sidecar/internal/removals"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/page"
)

// MaxPools bounds the pools of one worker, and the namespaces of one question.
const MaxPools = 64

// refused is the status of a lease that was not begun.
const refused = engines.StatusRefused

// Options are the parts that a service uses. All fields but Find are required.
type Options struct {
	Store     *store.Store
	Shares    func(page.ID) store.Shares // nil: namespaces have none
	Leases    *local.Leases
	Complete  func(*engines.Worker, engines.Completion) error
	Metrics   *metrics.Store
	Transfers *trace.Lines
	Log       *slog.Logger
	// Find sets the bits of pages that other nodes probably have; nil: there are none.
	Find     func([]page.Key, page.Bitmap)
	Removals *removals.Removals
}

// Service serves one store. It implements connector.Store.
type Service struct {
	o Options

	mu         sync.Mutex // guards what follows
	namespaces map[page.ID]*namespace
	pools      map[*engines.Worker]map[uint64]*pool
	pinned     pinned            // by all
	tenants    map[string]pinned // by their secrets
	drained    bool              // no put begins
	puts       int               // open
	putEnded   sync.Cond

	failures  admit.Log // requests
	verifying sync.Mutex
	waits     [store.Peer + 1]tierWaits
}

// namespace is one that engines have pools of.
type namespace struct {
	id    page.ID
	of    page.Namespace
	space *store.Space
	users int // pools
}

// pool is a worker's pool.
type pool struct {
	ns     *namespace
	memory *store.Pool
}

// New makes a service.
func New(o Options) *Service {
	s := &Service{o: o, failures: admit.Log{Logger: o.Log}, namespaces: map[page.ID]*namespace{},
		pools: map[*engines.Worker]map[uint64]*pool{}, tenants: map[string]pinned{}}
	s.putEnded.L = &s.mu
	return s
}

// Open adds a pool of a worker, and returns its namespace's id. The worker has not gone.
func (s *Service) Open(w *engines.Worker, p connector.Pool) (id page.ID, err error) {
	pieces := make([]store.Piece, len(p.Pieces))
	for i, c := range p.Pieces {
		pieces[i] = store.Piece{Region: c.Region, Base: c.Base, Stride: c.Stride, Len: c.Len}
	}
	memory, err := store.NewPool(pieces, int(p.Blocks))
	if err != nil {
		return id, err
	}
	if err := p.Namespace.Check(); err != nil {
		return id, err
	}
	if memory.PageBytes() != p.Namespace.PageBytes {
		return id, &store.RequestError{Field: "pieces", Problem: fmt.Sprintf("a block has %d bytes, and "+
			"the namespace's page_bytes is %d", memory.PageBytes(), p.Namespace.PageBytes),
			Remedy: "describe all pieces of a page"}
	}
	id = p.Namespace.ID()
	var shares store.Shares
	if s.o.Shares != nil {
		shares = s.o.Shares(id)
	}
	space, err := s.o.Store.Space(p.Namespace, shares)
	if err != nil {
		return id, err
	}
	defer space.Close() // this use of it: the namespace has another one
	s.mu.Lock()
	defer s.mu.Unlock()
	mine := s.pools[w]
	switch {
	case mine[p.ID] != nil:
		return id, &store.RequestError{Field: "pool", Problem: fmt.Sprintf("%d is open already", p.ID),
			Remedy: "give each pool of a session its own number"}
	case len(mine) > MaxPools: // one more: the connector opens a pool before it closes another
		return id, &store.RequestError{Field: "pool", Problem: fmt.Sprintf("%d are open", len(mine)),
			Remedy: fmt.Sprintf("use at most %d", MaxPools)}
	}
	ns := s.namespaces[id]
	if ns == nil {
		space.Use()
		ns = &namespace{id: id, of: p.Namespace, space: space}
		s.namespaces[id] = ns
	}
	ns.users++
	if mine == nil {
		mine = map[uint64]*pool{}
		s.pools[w] = mine
	}
	mine[p.ID] = &pool{ns, memory}
	return id, nil
}

// Close closes a pool that no lease uses, and none will.
func (s *Service) Close(w *engines.Worker, id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.pools[w][id]; p != nil {
		delete(s.pools[w], id)
		s.leaveLocked(p.ns)
	}
}

// Gone closes a worker's pools. Its leases have ended, and none starts later.
func (s *Service) Gone(w *engines.Worker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.pools[w] {
		s.leaveLocked(p.ns)
	}
	delete(s.pools, w)
}

func (s *Service) leaveLocked(ns *namespace) {
	if ns.users--; ns.users == 0 {
		ns.space.Close()
		delete(s.namespaces, ns.of.ID())
	}
}

// Start serves a lease. The connector bounds how many a worker has. A goroutine completes the lease
// once it has ended: the engine's rings and the trace file may be slow, and the store's workers
// serve all engines.
func (s *Service) Start(w *engines.Worker, r connector.Pages) {
	began := time.Now()
	ctx, end := s.o.Leases.Open(w, r.Lease.ID, r.Deadline)
	complete := func(c engines.Completion) {
		c.Lease, c.Received, c.Took = r.Lease, true, time.Since(began)
		go func() {
			if err := s.o.Complete(w, c); err != nil {
				s.o.Log.Debug("completion not delivered", "lease", c.Lease.String(), "err", err)
			}
			s.ended(w, &r, &c)
			end()
		}()
	}
	batch, err := s.begin(w, &r)
	if err != nil {
		complete(engines.Completion{Status: refused, Reason: err.Error()})
		return
	}
	var first atomic.Bool // the batch's end, or the lease's
	stop := context.AfterFunc(ctx, func() {
		if first.CompareAndSwap(false, true) {
			fence(batch, s.o.Log)
			s.endPut(&r)
			cause := context.Cause(ctx)
			complete(engines.Completion{Status: local.Status(cause), Reason: cause.Error()})
		}
	})
	batch.Then(func() {
		if stop(); first.CompareAndSwap(false, true) {
			s.endPut(&r)
			complete(completion(batch))
		}
	})
}

// begin hands the request to the store.
func (s *Service) begin(w *engines.Worker, r *connector.Pages) (_ *store.Batch, err error) {
	s.mu.Lock()
	p := s.pools[w][r.Pool]
	drained := s.drained && r.Put
	if r.Put && !drained {
		s.puts++
	}
	s.mu.Unlock()
	if drained {
		return nil, errDrained
	}
	defer func() {
		if err != nil {
			s.endPut(r)
		}
	}()
	if p == nil {
		return nil, &store.RequestError{Field: "pool", Problem: fmt.Sprintf("%d is not open", r.Pool),
			Remedy: "open it with OPEN first"}
	}
	keyer := p.ns.of.Keyer()
	keys, err := keyer.Keys(r.Hashes)
	if err != nil {
		return nil, err
	}
	if !r.Put {
		if !s.o.Removals.Ready(p.ns.id) {
			return nil, errUnsure
		}
		return p.ns.space.Get(keys, p.memory, r.Blocks)
	}
	var before *page.Key
	if r.Before != nil {
		k, err := keyer.Key(r.Before)
		if err != nil {
			return nil, err
		}
		before = &k
	}
	return p.ns.space.Put(keys, before, p.memory, r.Blocks)
}

// fence cancels a batch, and returns once the store does not touch its blocks any more. It has no
// bound: a block that the store may still write is not the engine's. The shim gives up a sidecar
// that does not answer.
func fence(b *store.Batch, log *slog.Logger) {
	b.Cancel()
	if err := b.Fence(context.Background()); err != nil {
		log.Error("store: fence", "err", err)
	}
}

// completion is that of a batch that is done.
func completion(b *store.Batch) (c engines.Completion) {
	c.Pages = make([]byte, len(b.Results()))
	for i, r := range b.Results() {
		c.Pages[i] = connector.PageResult(uint8(r.Outcome), uint8(r.Tier), r.Durable)
		if r.Err != nil && c.Reason == "" {
			c.Reason = r.Err.Error()
		}
		if r.Outcome == store.Hit || r.Outcome == store.Stored {
			c.Bytes += uint64(b.PageBytes())
		}
	}
	return c
}

// Exists reports which pages are in all of the namespaces: those of one rank each. A namespace that
// no engine of this node has open has no pages.
func (s *Service) Exists(ids []page.ID, h page.Hashes) (page.Bitmap, error) {
	if err := h.Check(); err != nil {
		return nil, err
	}
	if len(ids) < 1 || len(ids) > MaxPools {
		return nil, &store.RequestError{Field: "namespaces", Problem: fmt.Sprint(len(ids)),
			Remedy: fmt.Sprintf("send 1 to %d", MaxPools)}
	}
	// All at once, because each may ask other nodes.
	found := make([]page.Bitmap, len(ids))
	errs := make([]error, len(ids))
	var wg sync.WaitGroup
	for i, id := range ids[1:] {
		wg.Go(func() { found[i+1], errs[i+1] = s.existsIn(id, h) })
	}
	found[0], errs[0] = s.existsIn(ids[0], h)
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	all := found[0]
	for _, other := range found[1:] {
		for i := range all {
			all[i] &= other[i]
		}
	}
	return all, nil
}

func (s *Service) existsIn(id page.ID, h page.Hashes) (page.Bitmap, error) {
	s.mu.Lock()
	ns := s.namespaces[id]
	s.mu.Unlock()
	if ns == nil || !s.o.Removals.Ready(id) {
		return page.NewBitmap(h.Len()), nil
	}
	keys, err := ns.of.Keyer().Keys(h)
	if err != nil {
		return nil, err
	}
	found, err := ns.space.Exists(keys)
	if errors.Is(err, store.ErrClosed) { // its last pool went meanwhile
		return page.NewBitmap(h.Len()), nil
	}
	if err == nil && s.o.Find != nil {
		s.o.Find(keys, found)
	}
	return found, err
}

// errUnsure: a get waits for no removal. The engine computes the pages.
var errUnsure = &store.RequestError{Field: "pool", Problem: "a removal of the namespace is under " +
	"way, or this node has not received its peers' removals since it started", Remedy: "compute the " +
	"pages, and put them"}

// Times of a removal.
const (
	removeTime = 30 * time.Second // for all of it: other nodes have less, so it is for the own disks
	// Other nodes have this time to answer: less than engines wait.
	engineAnswers   = 2 * time.Second
	operatorAnswers = 10 * time.Second
)

// Remove forgets all pages of a namespace that a pool of the worker belongs to, on all nodes.
func (s *Service) Remove(w *engines.Worker, id page.ID) (out connector.Removed, err error) {
	s.mu.Lock()
	found := false
	for _, p := range s.pools[w] {
		found = found || p.ns.id == id
	}
	s.mu.Unlock()
	if !found {
		return out, &store.RequestError{Field: "namespace",
			Problem: id.String() + " has no pool of this worker", Remedy: "open a pool of it first"}
	}
	ctx, stop := context.WithTimeout(context.Background(), removeTime)
	defer stop()
	states, err := s.o.Removals.Remove(ctx, id, engineAnswers)
	for _, m := range states {
		out.Members++
		if m.Confirmed {
			out.Confirmed++
			continue
		}
		out.Missing = append(out.Missing, cmp.Or(m.Node, m.Boot.String())+": "+m.Problem)
	}
	return out, err
}

// Namespaces returns the namespaces that engines have open, by id, and the bytes that are pinned.
func (s *Service) Namespaces() (out []nodeapi.StoreNamespace, bytes uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, ns := range s.namespaces {
		out = append(out, nodeapi.StoreNamespace{ID: id.String(), Weights: ns.of.Weights,
			DType: ns.of.DType, Layout: ns.of.Layout, Adapter: ns.of.Adapter, PageTokens: ns.of.PageTokens,
			PageBytes: ns.of.PageBytes, Pools: ns.users, Private: ns.of.Secret != nil})
	}
	slices.SortFunc(out, func(a, b nodeapi.StoreNamespace) int { return cmp.Compare(a.ID, b.ID) })
	for _, n := range s.pinned.bytes {
		bytes += n
	}
	return out, bytes
}
