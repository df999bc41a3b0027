// Package exchange moves pages between the stores of nodes, and reports to the directory what this
// store holds.
//
// The store's memory is the cache of a worker of the sidecar itself: blocks of 4 KiB, one layer,
// the same on every node. Pages of another node come by an ordinary transfer between the two
// workers. The holder pins them and opens a source lease; the receiver reserves slots of its memory
// and opens a destination lease for them. So leases, fences and the release rule are those of
// engines. An engine's block is never the destination: the store copies a page there after its
// checksum agrees.
//
//	receiver               holder
//	lookup in the directory
//	PageRequest        ->  pin, source lease
//	destination lease  <-  PageOffer
//	Grant              ->
//	                   <-  bytes
//	Commit             ->  unpin
//
// Invariants: a slot is given back to the store when its lease has ended, or never. A page is
// pinned until its source lease has ended. What a peer answers is checked, and counts for the
// request that it was asked only. Everything that a peer can make this node do has a bound. A page
// comes only from a holder that has applied the latest removal of its namespace that the receiver
// knew when it asked; a removal that the receiver learns afterwards finds the page's slot.
//
// Goroutines: those that serve requests and the announcer, from Run until its context ends.
package exchange

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/directory"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

// Feature announces in Hello that a sidecar takes the messages about pages.
const Feature = "pages"

// Bounds and times.
const (
	// For one question to the directory: of an engine's scheduler, which waits for it, and of a get,
	// whose pages would be computed.
	lookupTime      = 50 * time.Millisecond
	fetchLookupTime = time.Second
	askTime         = 3 * time.Second  // until a holder's offer, which may wait for its disk
	fetchTime       = 10 * time.Second // for one transfer
	meetTime        = 3 * time.Second  // until the holder has the grant
	fenceTime       = 30 * time.Second // for the end of a lease that was canceled, once the node stops
	maxRounds       = 3                // holders that are asked for one page, one after the other
	// Holders without room are asked again, after a pause, for a time after the last page has come.
	roomTime  = 2 * time.Second
	roomPause = 2 * time.Millisecond

	maxAsks     = 1024 // requests of this node under way
	maxRequests = 256  // requests of peers that wait
	servers     = 8    // requests of peers that are served at the same time
	// Pages that are offered to all peers take 1/servedShare of the memory at most, those that are
	// offered to one peer 1/peerShare.
	servedShare = 4
	peerShare   = 8
	maxPeers    = 4096

	unit = 4096 // bytes of a block of the worker
)

// Removals are this node's removals of namespaces. *removals.Removals has these methods.
type Removals interface {
	Settled() bool
	Known(id page.ID) uint64
	Applied(id page.ID) uint64
	Learn(from transfer.Boot, id page.ID, stamp uint64)
}

// Options are the parts that an Exchange uses. All are required.
type Options struct {
	Self      transfer.Boot
	Registry  *parseblock.Registry
	Events    func([]engines.Event) // takes those of the store's worker to the executor
	Send      func(transfer.Boot, *peerv1.ControlFrame) error
	Directory directory.Directory
	Removals  Removals
	// Changed is closed when the members have changed: hints may have other places.
	Changed func() <-chan struct{}
	Metrics *metrics.StorePeers
	Log     *slog.Logger
}

// Exchange is one node's part. It implements store.Peers.
type Exchange struct {
	o      Options
	store  *store.Store
	worker *engines.Worker

	requests chan request // of peers

	lookups, announces health    // of the directory
	damaged            admit.Log // pages of peers

	// starting is held for reading while a lease is given to the executor, and for writing when the
	// node stops. It is taken before mu.
	starting sync.RWMutex

	mu     sync.Mutex // guards what follows
	peers  map[transfer.Boot]*peer
	leases map[uint64]func(engines.Completion) // open ones, by id
	asks   map[uint64]*ask
	last   uint64        // lease or request
	served uint64        // bytes that are offered to peers
	renew  chan struct{} // has room for one: all pages are announced again
	stop   chan struct{} // closed when the node stops
	over   bool          // stop is closed
	drains bool          // nothing is offered any more
}

// peer is a node whose control lanes are up.
type peer struct {
	endpoint string
	node     string
	pages    bool          // it takes messages about pages
	asked    uint64        // bytes that it was asked for and that have not come
	load     uint64        // bytes that it has to send, as it answered last
	served   uint64        // bytes that are offered to it
	down     chan struct{} // closed when it cannot be reached any more
}

// ask is a request to a holder.
type ask struct {
	holder transfer.Boot
	pages  int
	offer  chan *peerv1.PageOffer
}

// request is a holder's work.
type request struct {
	from transfer.Boot
	m    *peerv1.PageRequest
	at   time.Time
}

// New makes an exchange. Attach follows.
func New(o Options) *Exchange {
	return &Exchange{o: o, requests: make(chan request, maxRequests),
		lookups: health{call: "lookup"}, announces: health{call: "announce"},
		damaged: admit.Log{Logger: o.Log},
		peers:   map[transfer.Boot]*peer{},
		leases:  map[uint64]func(engines.Completion){}, asks: map[uint64]*ask{},
		renew: make(chan struct{}, 1), stop: make(chan struct{})}
}

// domain keeps the worker's fingerprint apart from those of engines.
const domain = "kvspray-store-worker-v1"

// Attach makes the worker of a store, and starts it.
func (x *Exchange) Attach(s *store.Store) error {
	region := s.Region()
	g := layout.Group{TokensPerBlock: 1, Strategy: parseblock.Page,
		NumBlocks: uint32(region.Size() / unit),
		Layers:    []layout.Layer{{Name: "store", BlockStride: unit, PageBytes: unit}}}
	l := &layout.Layout{Model: "kvspray-store", DType: "bytes", Groups: []layout.Group{g}}
	if err := x.o.Registry.Validate(l, []uint64{region.Size()}); err != nil {
		return fmt.Errorf("sidecar: memory of the store: %w", err)
	}
	own, err := parseblock.NewMatch(x.o.Registry, l, l, nil)
	if err != nil {
		return fmt.Errorf("sidecar: memory of the store: %w", err)
	}
	w := &engines.Worker{Name: "store", Place: engines.Place{Engine: "kvspray-store"}, Layout: l,
		Fingerprint: sha256.Sum256([]byte(domain)), Geometry: l.Geometry(), Own: own,
		Regions: []*mem.Region{region}, Session: session{}, Internal: true,
		// Pages stay pinned until their lease has ended.
		SourceValid: func(transfer.LeaseID) bool { return true }}
	if _, err := rand.Read(w.Boot[:]); err != nil {
		return fmt.Errorf("sidecar: boot id of the store: %w", err)
	}
	if !region.Acquire() { // until Stop has fenced its leases
		return fmt.Errorf("sidecar: memory of the store: %w", mem.ErrFreed)
	}
	x.store, x.worker = s, w
	x.event(engines.Event{Kind: engines.WorkerUp})
	return nil
}

var errStops = errors.New("the sidecar stops")

// event passes an event of the worker to the executor.
func (x *Exchange) event(e engines.Event) {
	e.Worker = x.worker
	x.o.Events([]engines.Event{e})
}

func (x *Exchange) cancel(id uint64, reason string) {
	x.event(engines.Event{Kind: engines.Canceled, Lease: id, Reason: reason})
}

// session is the worker's: nothing follows layers that are complete from the beginning.
type session struct{}

func (session) Follow(bool) {}

// HeldOn implements engines.Session.
func (session) HeldOn(uint64) {}

// Owns reports whether a worker is the store's.
func (x *Exchange) Owns(w *engines.Worker) bool { return x != nil && w == x.worker }

// Completed takes the end of a lease of the worker.
func (x *Exchange) Completed(c engines.Completion) {
	x.mu.Lock()
	f := x.leases[c.Lease.ID]
	delete(x.leases, c.Lease.ID)
	x.mu.Unlock()
	if f != nil {
		f(c)
	}
}

// open makes a lease, whose end calls f, and gives it to the executor in start. It returns false
// once the node stops: the executor ignores leases of a worker that is gone, so f is not called.
func (x *Exchange) open(f func(engines.Completion), start func(transfer.LeaseID)) bool {
	x.starting.RLock()
	defer x.starting.RUnlock()
	x.mu.Lock()
	if x.over {
		x.mu.Unlock()
		return false
	}
	x.last++
	id := transfer.LeaseID{Boot: x.worker.Boot, ID: x.last}
	x.leases[id.ID] = f
	x.mu.Unlock()
	start(id)
	return true
}

// PeerUp introduces a peer, or changes its endpoint.
func (x *Exchange) PeerUp(boot transfer.Boot, node, endpoint string, features []string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.peers[boot]
	if p == nil {
		if len(x.peers) == maxPeers || boot == x.o.Self {
			return
		}
		p = &peer{down: make(chan struct{})}
		x.peers[boot] = p
	}
	p.node = node
	if endpoint != "" {
		p.endpoint = endpoint
	}
	p.pages = slices.Contains(features, Feature)
}

// PeerDown forgets a peer that cannot be reached. Requests to it end.
func (x *Exchange) PeerDown(boot transfer.Boot) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if p := x.peers[boot]; p != nil {
		close(p.down)
		delete(x.peers, boot)
	}
	for id, a := range x.asks {
		if a.holder == boot {
			delete(x.asks, id)
			close(a.offer)
		}
	}
}

func (x *Exchange) announceAll() {
	select {
	case x.renew <- struct{}{}:
	default:
	}
}

// Drain ends offers to peers. Those that were made continue.
func (x *Exchange) Drain() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.drains = true
}

// Stop ends requests under way and refuses new ones, and returns once no transport touches the
// store's memory, or with ctx. In that case the memory stays mapped.
func (x *Exchange) Stop(ctx context.Context) error {
	x.starting.Lock()
	x.mu.Lock()
	over := x.over
	x.over, x.drains = true, true
	if !over {
		close(x.stop)
	}
	x.mu.Unlock()
	x.starting.Unlock()
	if over || x.worker == nil {
		return nil
	}
	fenced := make(chan struct{})
	region := x.worker.Regions[0]
	x.event(engines.Event{Kind: engines.WorkerGone, Err: errStops, Fenced: func() {
		region.Release()
		close(fenced)
	}})
	select {
	case <-fenced:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("store: transfers of pages have not ended: %w", ctx.Err())
	}
}

// PeerState is a peer as /v1/store shows it.
type PeerState struct {
	Boot        transfer.Boot
	Node        string
	Asked, Load uint64 // bytes
	Served      uint64
}

// Peers returns the peers that take messages about pages.
func (x *Exchange) Peers() (out []PeerState) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for b, p := range x.peers {
		if p.pages {
			out = append(out, PeerState{Boot: b, Node: p.node, Asked: p.asked, Load: p.load,
				Served: p.served})
		}
	}
	return out
}
