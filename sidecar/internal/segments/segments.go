// Package segments moves batches: engines read and write ranges of a segment, which is memory that
// an engine of another node has registered by a name, with grants.
//
// A batch is a lease on each side. The initiator is the sidecar of the engine that sends it, the
// owner that of the engine with the segment. Both leases are of a worker of the sidecar itself, and
// ordinary ones: guards, fences and the release rule are those of transfers.
//
//	initiator                          owner
//	claim of the local ranges
//	SegmentBatch                   ->  grant of the registration, claim of the segment's ranges
//	write: source lease                destination lease
//	                               <-  Grant, then as for a transfer
//	read: destination lease            source lease
//	Grant                          ->  then as for a transfer
//	                               <-  SegmentDone, once its lease is fenced
//
// A segment of a file has its lease on staging memory. The owner reads the file before the lease
// begins, and writes it once the lease is fenced and before SegmentDone, so that no lane and no
// peer reaches the file.
//
// Invariants: a range that a lease writes is in no other open lease. A claim is released after the
// lease's fence. A read that succeeds completes once the initiator's lease has ended; a write, or a
// read that fails, once the owner's lease has ended, too, the owner has not answered within
// answerTime, or it is gone. Revoke is done once no lease is left that used the revoked segment or
// grant. The engine's memory stays until the last lease, because each of them is one of package
// local. Everything that a peer can make this node do has a bound.
//
// Calls of a file system may hang. None is made under a lock of this package, and Stop does not
// wait for one longer than its context.
//
// Goroutines: one for each batch of this node's engines, one for each lease of a peer, both until
// the lease has ended or Stop; one that closes the files of segments that were removed, until the
// file system has closed them; one of Stop, until the leases of peers have ended.
package segments

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
	"github.com/kvspray/kvspray/transfer"
)

// Feature announces in Hello that a sidecar takes the messages about segments.
const Feature = "segments"

// Bounds and times.
const (
	maxAsks    = 4096 // of this node: batches, and questions for segments
	maxLocates = 256  // questions of engines for segments
	maxRemotes = 1024 // leases of peers
	maxPerPeer = 256  // of one peer
	// Entries in all of these; each takes some 100 bytes.
	maxEntries     = 4 << 20
	maxPeerEntries = 1 << 20
	maxPeers       = 4096
	// For one engine: notifications that it has not fetched, and places for open batches.
	maxNotes     = 1024
	maxFetches   = 16               // NOTES of one engine that wait
	maxDeadline  = time.Hour        // of a peer's lease
	lostTime     = 5 * time.Second  // without lanes to a peer, until it is gone
	meetTime     = 10 * time.Second // until both leases have met
	reachTime    = 3 * time.Second  // in which a connect is tried again
	reachPause   = 100 * time.Millisecond
	answerTime   = 10 * time.Second // from the end of the own lease to that of the owner's
	maxReasonLen = 1024             // bytes of a peer's reason
)

// Options are the parts that Segments uses. All are required.
type Options struct {
	Self     transfer.Boot
	Node     string
	Endpoint func() string
	Root     string // of files; empty: none
	Registry *parseblock.Registry
	Leases   *local.Leases
	Events   func([]engines.Event) // takes those of the worker to the executor
	Send     func(transfer.Boot, *peerv1.ControlFrame) error
	Connect  func(endpoint string)
	// Member returns the endpoint of a node by its name; empty: it is no member.
	Member   func(node string) string
	Complete func(*engines.Worker, engines.Completion) error
	Log      *slog.Logger
}

// Segments is one node's part. It implements connector.Segments and plans.Lists.
type Segments struct {
	o       Options
	worker  *engines.Worker
	root    *os.File // of files; nil: none
	ranges  ranges
	staging staging
	wg      sync.WaitGroup // leases of peers

	// starting is held for reading while a lease is passed to the executor, and for writing when the
	// node stops. It is taken before mu.
	starting sync.RWMutex

	mu       sync.Mutex // guards what follows
	names    map[string]*segment
	owners   map[*engines.Worker]*owner
	peers    map[transfer.Boot]*peer
	reaching map[string]map[chan reached]struct{} // by endpoint
	asks     map[uint64]*ask
	remotes  map[remoteID]*remote
	total    use // of remotes
	perPeer  map[transfer.Boot]use
	locates  int // questions of engines
	lists    map[listID]*plans.List
	leases   map[uint64]chan ended // open ones, by id
	last     uint64                // lease or request
	stop     chan struct{}         // closed once Stop waits no more for leases
	over     bool                  // Stop was called: no lease begins
}

// listID names a list of an open lease. One node may have both sides of a batch.
type listID struct {
	key      transfer.Key
	receives bool
}

// segment is a registered one.
type segment struct {
	connector.Segment
	file   *file // nil: memory
	owner  *owner
	grants []grant
	open   map[*remote]struct{}
	gone   bool // it was revoked: no lease begins
}

// grant is one of a segment, with the time of its end; zero: none.
type grant struct {
	connector.Grant
	until time.Time
}

// owner is an engine's worker with segments.
type owner struct {
	w        *engines.Worker
	segments map[string]*segment
	notes    []connector.Note
	reserved int // places for open batches
	fetches  []*fetch
}

// peer is a node whose control lanes are up.
type peer struct {
	node     string
	endpoint string        // to which this node has connected; empty: the peer has connected
	claimed  string        // endpoint that the peer reports; it is not checked
	segments bool          // it takes messages about segments
	down     chan struct{} // closed once the peer is gone
	lost     *time.Timer   // its lanes are lost; nil: they are up
}

// ended is the end of a lease in the executor.
type ended struct {
	engines.Completion
	arrived []byte // bits of entries, of a destination lease that failed
}

// New makes the part. Attach follows.
func New(o Options) *Segments {
	return &Segments{o: o, names: map[string]*segment{}, owners: map[*engines.Worker]*owner{},
		peers: map[transfer.Boot]*peer{}, reaching: map[string]map[chan reached]struct{}{},
		asks: map[uint64]*ask{}, remotes: map[remoteID]*remote{}, perPeer: map[transfer.Boot]use{},
		lists: map[listID]*plans.List{}, leases: map[uint64]chan ended{}, stop: make(chan struct{})}
}

// Domains of the hashes in the worker's fingerprint and in the keys of batches. No prompt has such
// a key.
const (
	workerDomain = "kvspray-segments-worker-v1"
	keyDomain    = "kvspray-segments-key-v1"
)

// Attach makes the worker of all batches, and starts it.
func (s *Segments) Attach() error {
	g := layout.Group{TokensPerBlock: 1, Strategy: parseblock.Page, NumBlocks: 1,
		Layers: []layout.Layer{{Name: "segments", BlockStride: 1, PageBytes: 1}}}
	l := &layout.Layout{Model: "kvspray-segments", DType: "bytes", Groups: []layout.Group{g}}
	if err := s.o.Registry.Validate(l, []uint64{1}); err != nil {
		return fmt.Errorf("sidecar: layout of segments: %w", err)
	}
	w := &engines.Worker{Name: "segments", Place: engines.Place{Engine: "kvspray-segments"}, Layout: l,
		Fingerprint: sha256.Sum256([]byte(workerDomain)), Geometry: l.Geometry(), Session: session{},
		Internal: true, SourceValid: func(transfer.LeaseID) bool { return true }}
	if _, err := rand.Read(w.Boot[:]); err != nil {
		return fmt.Errorf("sidecar: boot id of segments: %w", err)
	}
	var err error
	if s.root, err = openRoot(s.o.Root); err != nil {
		return err
	}
	s.worker = w
	s.event(engines.Event{Kind: engines.WorkerUp})
	return nil
}

// session is the worker's. It does nothing: the only layer is complete from the beginning.
type session struct{}

// Follow implements engines.Session.
func (session) Follow(bool) {}

// HeldOn implements engines.Session.
func (session) HeldOn(uint64) {}

// event passes an event of the worker to the executor.
func (s *Segments) event(e engines.Event) {
	e.Worker = s.worker
	s.o.Events([]engines.Event{e})
}

// Owns reports whether a worker is that of the batches.
func (s *Segments) Owns(w *engines.Worker) bool { return s != nil && w != nil && w == s.worker }

// List implements plans.Lists.
func (s *Segments) List(w *engines.Worker, k transfer.Key, receives bool) *plans.List {
	if !s.Owns(w) {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lists[listID{k, receives}]
}

// keyOf returns the key of a batch. No prompt and no other peer has a key with this hash.
func keyOf(initiator transfer.Boot, nonce [16]byte) (k transfer.Key) {
	k.Xfer = nonce
	k.Hash = sha256.Sum256(slices.Concat([]byte(keyDomain), initiator[:], nonce[:]))
	return k
}

// lease is an open one of the executor.
type lease struct {
	s   *Segments
	id  transfer.LeaseID
	key listID
	end chan ended
}

// leaseOptions describe a lease.
type leaseOptions struct {
	key      transfer.Key
	list     *plans.List
	receives bool
	peer     string // endpoint of the source
	priority engines.Priority
	deadline time.Duration
	meet     time.Duration // until the other lease is there
	req      string
}

var errStops = errors.New("the sidecar stops")

// begin passes a lease to the executor.
func (s *Segments) begin(o *leaseOptions) (*lease, error) {
	s.starting.RLock()
	defer s.starting.RUnlock()
	s.mu.Lock()
	if s.over {
		s.mu.Unlock()
		return nil, errStops
	}
	name := listID{o.key, o.receives}
	if s.lists[name] != nil {
		s.mu.Unlock()
		return nil, errors.New("a batch with this nonce is open")
	}
	s.last++
	l := &lease{s: s, id: transfer.LeaseID{Boot: s.worker.Boot, ID: s.last}, key: name,
		end: make(chan ended, 1)}
	s.lists[name], s.leases[l.id.ID] = o.list, l.end
	s.mu.Unlock()
	one := [][]uint32{{0}}
	if o.receives {
		s.event(engines.Event{Kind: engines.DestOpened, Expect: &engines.Expect{Lease: l.id, Key: o.key,
			Peer: o.peer, Tokens: 1, Skip: []uint32{0}, Blocks: one, Priority: o.priority,
			Deadline: o.deadline, MatchTimeout: min(o.deadline, o.meet), Req: o.req}})
		return l, nil
	}
	s.event(engines.Event{Kind: engines.SourceOpened, Intent: &engines.Intent{Lease: l.id, Key: o.key,
		Tokens: 1, Fanout: 1, Blocks: one, Priority: o.priority, Deadline: o.deadline,
		Req: o.req}})
	s.event(engines.Event{Kind: engines.LayersComplete,
		Progress: []engines.Progress{{Lease: l.id, Tokens: 1, Final: true}}})
	return l, nil
}

// cancel ends the lease soon: end follows after its fence.
func (l *lease) cancel(reason string) {
	l.s.event(engines.Event{Kind: engines.Canceled, Lease: l.id.ID, Reason: reason})
}

// Completed takes the end of a lease of the worker. arrived has a bit for each entry that has
// arrived.
func (s *Segments) Completed(c engines.Completion, arrived []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if end := s.leases[c.Lease.ID]; end != nil {
		end <- ended{c, arrived}
		delete(s.leases, c.Lease.ID)
	}
}

// forget drops the list of a lease that has ended.
func (l *lease) forget() {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	delete(l.s.lists, l.key)
}

// OpenFile implements connector.Segments.
func (s *Segments) OpenFile(x *connector.Segment) error {
	f, err := s.openFile(x)
	if err != nil {
		return err
	}
	if err := s.staging.open(); err != nil {
		_ = f.Close()
		return err
	}
	x.File = f
	return nil
}

// Register implements connector.Segments.
func (s *Segments) Register(w *engines.Worker, x connector.Segment) error {
	f, _ := x.File.(*file)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return errStops
	}
	if old := s.names[x.Name]; old != nil {
		return &msg.Error{Message: "SEGMENT", Field: "name", Problem: fmt.Sprintf("%q is a segment of %s",
			x.Name, old.owner.w.Name), Remedy: "choose another name; names of a node's segments are unique"}
	}
	now := time.Now()
	n := &segment{Segment: x, file: f, open: map[*remote]struct{}{}}
	for i, g := range x.Grants {
		if g.Off > x.Len || g.Len > x.Len-g.Off {
			return &msg.Error{Message: "SEGMENT", Field: fmt.Sprintf("grants[%d]", i),
				Problem: fmt.Sprintf("%d bytes from %d on are outside of a segment of %d", g.Len, g.Off,
					x.Len), Remedy: "grant ranges of the segment"}
		}
		if g.Len == 0 {
			g.Len = x.Len - g.Off
		}
		k := grant{Grant: g}
		if g.For > 0 {
			k.until = now.Add(g.For)
		}
		n.grants = append(n.grants, k)
	}
	n.owner = s.ownerLocked(w)
	s.names[x.Name], n.owner.segments[x.Name] = n, n
	return nil
}

func (s *Segments) ownerLocked(w *engines.Worker) *owner {
	o := s.owners[w]
	if o == nil {
		o = &owner{w: w, segments: map[string]*segment{}}
		s.owners[w] = o
	}
	return o
}

// errRevoked ends the leases of a revoked segment or grant.
var errRevoked = errors.New("the segment was revoked")

// Revoke implements connector.Segments.
func (s *Segments) Revoke(w *engines.Worker, name, to string, done func()) error {
	var files []*file
	defer func() { closeSoon(files) }()
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.names[name]
	if x == nil || x.owner.w != w {
		return &msg.Error{Message: "REVOKE", Field: "name", Problem: fmt.Sprintf("%q is no segment of "+
			"this worker", name), Remedy: "name one that SEGMENT has registered"}
	}
	if to == "" {
		files = s.dropLocked(x, files)
	} else {
		x.grants = slices.DeleteFunc(x.grants, func(g grant) bool { return g.To == to })
	}
	if s.over {
		return errStops
	}
	var left []*remote
	for r := range x.open {
		if to == "" || r.grant.To == to {
			r.cancel(errRevoked)
			left = append(left, r)
		}
	}
	s.wg.Go(func() {
		for _, r := range left {
			select {
			case <-r.ended:
			case <-s.stop:
				return
			}
		}
		done()
	})
	return nil
}

// dropLocked removes a segment, and appends its file, to be closed after the unlock. Its leases go
// on.
func (s *Segments) dropLocked(x *segment, files []*file) []*file {
	x.gone = true
	delete(s.names, x.Name)
	delete(x.owner.segments, x.Name)
	if x.file != nil {
		files = append(files, x.file)
	}
	return files
}

// closeSoon closes files once the calls that are under way have ended. It does not wait: a network
// file system writes in close, and callers hold the locks of package connector.
func closeSoon(files []*file) {
	if len(files) == 0 {
		return
	}
	go func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
}

// Gone removes the segments of a worker. Its leases are canceled by package local.
func (s *Segments) Gone(w *engines.Worker) {
	s.mu.Lock()
	o := s.owners[w]
	delete(s.owners, w)
	if o == nil {
		s.mu.Unlock()
		return
	}
	var files []*file
	for _, x := range o.segments {
		files = s.dropLocked(x, files)
	}
	waits := o.fetches
	o.fetches = nil
	s.mu.Unlock()
	closeSoon(files)
	for _, f := range waits {
		f.timer.Stop()
		f.reply(nil)
	}
}

// allowed returns the grant by which a node may read or write the segment; of several, the one with
// the widest range.
func (x *segment) allowed(node string, write bool, now time.Time) (best grant, ok bool) {
	for _, g := range x.grants {
		if g.To != connector.Everyone && g.To != node || write && !g.Write || !write && !g.Read ||
			!g.until.IsZero() && !now.Before(g.until) {
			continue
		}
		if !ok || g.Len > best.Len {
			best, ok = g, true
		}
	}
	return best, ok
}

// PeerUp adds a peer whose control lanes are up, or updates it.
func (s *Segments) PeerUp(boot transfer.Boot, node, endpoint, claimed string, features []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.peers[boot]
	if p == nil {
		if len(s.peers) == maxPeers {
			return
		}
		p = &peer{down: make(chan struct{})}
		s.peers[boot] = p
	}
	if p.lost != nil {
		p.lost.Stop()
		p.lost = nil
	}
	p.node, p.claimed, p.segments = node, claimed, slices.Contains(features, Feature)
	if endpoint != "" {
		p.endpoint = endpoint
		s.reachedLocked(endpoint, reached{boot: boot})
	}
}

// PeerDown notes that the control lanes to a peer are lost. Its batches end if the conversation is
// over, if no process listens at its address, or after lostTime.
func (s *Segments) PeerDown(boot transfer.Boot, over bool) {
	s.mu.Lock()
	p := s.peers[boot]
	if p == nil || over {
		s.goneLocked(boot, p)
		s.mu.Unlock()
		return
	}
	if p.lost == nil {
		p.lost = time.AfterFunc(lostTime, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if p.lost != nil {
				s.goneLocked(boot, p)
			}
		})
	}
	endpoint := p.endpoint
	s.mu.Unlock()
	if endpoint != "" {
		s.o.Connect(endpoint)
	}
}

// goneLocked removes a peer, and ends the batches with it.
func (s *Segments) goneLocked(boot transfer.Boot, p *peer) {
	if p == nil || s.peers[boot] != p {
		return
	}
	if p.lost != nil {
		p.lost.Stop()
	}
	close(p.down)
	delete(s.peers, boot)
	for _, r := range s.remotes {
		if r.id.from == boot {
			r.cancel(errPeerGone)
		}
	}
}

var errPeerGone = errors.New("the peer is gone")

// ConnectFailed takes the failure of a connect.
func (s *Segments) ConnectFailed(endpoint string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reachedLocked(endpoint, reached{err: err})
	if !errors.Is(err, exec.ErrNotListening) {
		return
	}
	for boot, p := range s.peers {
		if p.lost != nil && p.endpoint == endpoint {
			s.goneLocked(boot, p)
		}
	}
}

// reached is the end of a connect.
type reached struct {
	boot transfer.Boot
	err  error
}

func (s *Segments) reachedLocked(endpoint string, r reached) {
	for c := range s.reaching[endpoint] {
		c <- r
	}
	delete(s.reaching, endpoint)
}

// Stop ends all leases. It returns once they are fenced and no file of theirs is read or written,
// or when ctx ends. Idempotent.
func (s *Segments) Stop(ctx context.Context) error {
	s.starting.Lock()
	s.mu.Lock()
	over := s.over
	s.over = true
	var left []*remote
	for _, r := range s.remotes {
		r.cancel(errStops) // also those that have no lease of the executor: they wait, or read a file
		left = append(left, r)
	}
	s.mu.Unlock()
	s.starting.Unlock()
	if over || s.worker == nil {
		return nil
	}
	fenced := make(chan struct{})
	s.event(engines.Event{Kind: engines.WorkerGone, Err: errStops, Fenced: func() { close(fenced) }})
	var err error
	select {
	case <-fenced:
	case <-ctx.Done():
		err = fmt.Errorf("segments: leases have not ended: %w", ctx.Err())
	}
	close(s.stop)
	ended := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		err = cmp.Or(err, fmt.Errorf("segments: files are being read or written: %w", ctx.Err()))
		for _, r := range left {
			r.end() // else package local waits for the file system
		}
	}
	if err == nil {
		s.staging.close()
	}
	if s.root != nil {
		_ = s.root.Close()
	}
	return err
}

// Open counts the leases of peers on this node's segments.
func (s *Segments) Open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.remotes)
}
