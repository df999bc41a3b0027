package exec

import (
	"errors"
	"maps"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Status is enum kvs_status of the board.
const (
	StatusOK        uint16 = 0
	StatusFailed    uint16 = 1
	StatusCancelled uint16 = 2
	StatusExpired   uint16 = 3
	StatusRefused   uint16 = 4
)

// ErrNobody is wrapped by what ConnectFailed is told where it is plain that nobody listens at the address.
var ErrNobody = errors.New("connection refused")

// ErrNever is wrapped where to try again soon cannot end otherwise: the configuration forbids the
// address, or this process cannot work with the release of the sidecar there.
var ErrNever = errors.New("not possible")

// Exec is one executor. Its methods must not be called concurrently.
type Exec struct {
	cfg       Config
	out       []Action
	late      []Action // follow what the event sends; emptied by assign
	outSlices []transport.Slice

	slots  *lease.Slots
	tombs  *lease.Tombs
	agenda agenda

	workers map[*connector.Worker]*worker
	vacated Instant // when the last of them was gone; the start, where none was here
	dests   map[transfer.LeaseID]*dest
	nsource int
	byKey   map[transfer.Key][]*source // open ones
	byXfer  map[transfer.XferID]count  // open source leases
	inbound map[lease.GrantID]*inbound // grants of peers, the newest of each destination lease
	shared  map[transfer.Boot]*shared  // what of all this has to do with one peer
	absents map[engineLease]*inbound   // those of them whose sidecar is out of reach or gone
	grants  uint32                     // that we made; they wrap

	endpoints map[string]*endpoint
	self      *endpoint // where we are reached ourselves; never forgotten
	peers     map[transfer.Boot]*peer
	lanes     map[uint64]*lane
	pending   map[transfer.Key][]*pending // grants and questions that wait for an intent
	asked     map[uint64]*await           // our own questions

	nonsense   [numNonsense]uint64 // what peers said that no honest one says
	refused    [numRefusals]uint64 // grants that we refused
	describing map[described]*description
	comparing  map[Comparison]map[*claim]struct{} // refusals that wait for their reason
	rails      map[railID]bool                    // ours: whether their links are down
	railsNo    int                                // how often they were told
	credit     *timer                             // of the next look at what comes in
	flowing    bool                               // something has come since nothing did
	inflows    []*inflow                          // that send now, or have a credit, in order
	inflowOf   map[inflowID]*inflow               // the same
	creditAt   int                                // of inflows: where the next look begins
	inrails    map[railID]*inrail

	spray      *spray.Scheduler
	scan       *timer  // of what is in flight
	rest       *timer  // of what assign left to the next tick
	touched    []*peer // peers with new work, until assign
	touchRails func(*spray.Peer)
	askLane    func(lane uint64)
	draining   bool
}

type worker struct {
	w       *connector.Worker
	tiers   []*peerv1.RailTier // of our rails for its memory
	tiersOf int                // the list of rails that they are of
	sources map[uint64]*source
	dests   map[uint64]*dest
	sends   int // open Sendings from its memory
	gone    bool
}

// count is how many source leases are open under one transfer id, and how many of them belong to finished requests.
type count struct{ open, held int }

// New returns an executor.
func New(cfg Config) *Exec {
	cfg = cfg.withDefaults()
	e := &Exec{
		cfg: cfg, slots: lease.NewSlots(cfg.MaxSlots), tombs: lease.NewTombs(lease.MaxTombstones, cfg.TombstoneAge),
		workers: map[*connector.Worker]*worker{}, dests: map[transfer.LeaseID]*dest{}, byKey: map[transfer.Key][]*source{},
		byXfer: map[transfer.XferID]count{}, inbound: map[lease.GrantID]*inbound{}, shared: map[transfer.Boot]*shared{}, absents: map[engineLease]*inbound{},
		endpoints: map[string]*endpoint{}, peers: map[transfer.Boot]*peer{}, lanes: map[uint64]*lane{},
		pending: map[transfer.Key][]*pending{}, asked: map[uint64]*await{}, describing: map[described]*description{},
		comparing: map[Comparison]map[*claim]struct{}{},
	}
	e.spray = spray.New(spray.Config{Policy: cfg.Policy, MaxFlights: cfg.MaxSlices, MaxStrikes: cfg.MaxAttempts})
	e.inflowOf, e.inrails = map[inflowID]*inflow{}, map[railID]*inrail{}
	e.scan, e.credit = newTimer(e.scanFlights), newTimer(e.creditDue)
	e.rest = newTimer(func(Instant) {}) // Tick assigns after every timer
	e.askLane = func(lane uint64) { e.emit(Ask).Lane = lane }
	e.touchRails = func(p *spray.Peer) { e.touch(p.Owner.(*peer)) }
	if cfg.Endpoint != "" {
		e.PeerUp(0, cfg.Endpoint, cfg.Boot)
	}
	return e
}

// emit appends an action and returns it for its fields to be set.
func (e *Exec) emit(k Kind) *Action {
	e.out = append(e.out, Action{Kind: k})
	return &e.out[len(e.out)-1]
}

func (e *Exec) send(to transfer.Boot, f *peerv1.ControlFrame) {
	a := e.emit(Send)
	a.Peer, a.Frame = to, f
}

// Next is when Tick must be called, or lease.Never.
func (e *Exec) Next() Instant { return e.agenda.next() }

// maxDue is how many timers one Tick fires, so that nobody waits long for the driver's lock where
// thousands of leases have one deadline.
const maxDue = 512

// Tick does what is due, or a part of it: Next is then in the past.
func (e *Exec) Tick(now Instant) {
	for range maxDue {
		t := e.agenda.pop(now)
		if t == nil {
			break
		}
		t.Value(now)
	}
	e.assign(now)
}

// Open counts the leases that are not complete.
func (e *Exec) Open() (dests, sources int) { return len(e.dests), e.nsource }

// Lanes counts lanes to a peer.
func (e *Exec) Lanes(boot transfer.Boot) int {
	if p := e.peers[boot]; p != nil {
		return len(p.lanes)
	}
	return 0
}

// Drain refuses new leases from now on; those open run on.
func (e *Exec) DrainLeases() { e.draining = true }

// Abort closes every lease, as if its engine had cancelled it, with a status that makes it recompute.
func (e *Exec) Abort(now Instant, reason string) {
	for _, d := range inOrder(maps.Values(e.dests)) {
		e.closeDestBy(now, d, ByDrain, StatusFailed, reason)
	}
	for _, w := range workersInOrder(maps.Values(e.workers)) {
		for _, s := range sourcesInOrder(maps.Values(w.sources)) {
			e.closeSource(now, s, StatusFailed, reason, true)
		}
	}
	e.assign(now)
}

// WorkerUp introduces an engine worker.
func (e *Exec) WorkerUp(w *connector.Worker) {
	e.workers[w] = &worker{w: w, sources: map[uint64]*source{}, dests: map[uint64]*dest{}}
}

// WorkerGone ends every lease of w; WorkerFenced follows. final says that the engine itself is dead: nobody will present
// its source leases again. What it receives is over in either case: the engine's library ends it by itself (docs/protocol.md, Restart).
func (e *Exec) WorkerGone(now Instant, w *connector.Worker, final bool, reason string) {
	ws := e.workers[w]
	if ws == nil {
		e.emit(WorkerFenced).Worker = w
		return
	}
	if ws.gone {
		return
	}
	ws.gone = true
	if e.vacant() {
		e.vacated = now
	}
	for _, d := range inOrder(maps.Values(ws.dests)) {
		e.closeDestBy(now, d, ByEngineGone, StatusFailed, reason)
	}
	for _, s := range sourcesInOrder(maps.Values(ws.sources)) {
		e.closeSource(now, s, StatusFailed, reason, final)
	}
	e.workerIdle(ws)
	e.assign(now)
}

// workerIdle reports a gone worker whose last lease ended.
func (e *Exec) workerIdle(ws *worker) {
	if ws.gone && len(ws.dests) == 0 && len(ws.sources) == 0 && e.workers[ws.w] == ws {
		delete(e.workers, ws.w)
		e.emit(WorkerFenced).Worker = ws.w
	}
}

// Cancel gives a lease back.
func (e *Exec) Cancel(now Instant, w *connector.Worker, id uint64, reason string) {
	ws := e.workers[w]
	if ws == nil {
		return
	}
	if reason == "" {
		reason = "cancelled by the engine"
	}
	if d := ws.dests[id]; d != nil {
		e.closeDest(now, d, StatusCancelled, reason)
	}
	if s := ws.sources[id]; s != nil {
		e.closeSource(now, s, StatusCancelled, reason, true)
	}
	e.assign(now)
}

func millis(d time.Duration) uint32 {
	return uint32(min(max(d, 0), MaxDeadline) / time.Millisecond)
}

// Message takes the body of one control frame from peer boot. The error is for the log and names what is wrong with one that can be no
// message of an honest peer. Each kind of that is told once of a peer; whatever else of the kind it says is dropped, and counted (Nonsense).
func (e *Exec) Message(now Instant, boot transfer.Boot, f *peerv1.ControlFrame) error {
	p := e.peer(boot)
	var err error
	switch b := f.Body.(type) {
	case *peerv1.ControlFrame_Await:
		err = e.onAwait(now, p, b.Await)
	case *peerv1.ControlFrame_Admitted:
		err = e.onAdmitted(p, b.Admitted)
	case *peerv1.ControlFrame_Grant:
		err = e.onGrant(now, p, b.Grant)
	case *peerv1.ControlFrame_GrantReply:
		err = e.onGrantReply(now, p, b.GrantReply)
	case *peerv1.ControlFrame_SourceLost:
		err = e.onSourceLost(now, p, b.SourceLost)
	case *peerv1.ControlFrame_Revoke:
		err = e.onRevoke(now, p, b.Revoke)
	case *peerv1.ControlFrame_Commit:
		err = e.onCommit(now, p, b.Commit)
	case *peerv1.ControlFrame_Credit:
		e.onCredit(now, p, b.Credit)
	default:
		// Rails, Ping and Pong are the lanes' own; a peer of a later release may send what we do
		// not understand.
	}
	e.assign(now)
	if err == nil || !e.hears(p, kindOf(err)) {
		return nil
	}
	return err
}

func key(xfer, hash []byte) (k transfer.Key, err error) {
	if len(xfer) != len(k.Xfer) || len(hash) != len(k.Hash) {
		return k, wrong(BadKey, "key: xfer has %d bytes and hash %d: want %d and %d", len(xfer), len(hash), len(k.Xfer), len(k.Hash))
	}
	copy(k.Xfer[:], xfer)
	copy(k.Hash[:], hash)
	return k, nil
}

func leaseID(l *peerv1.Lease) (id transfer.LeaseID, err error) {
	if len(l.GetBoot()) != len(id.Boot) {
		return id, wrong(BadLease, "lease: boot has %d bytes: want %d", len(l.GetBoot()), len(id.Boot))
	}
	copy(id.Boot[:], l.Boot)
	id.ID, id.Epoch = l.Id, l.Epoch
	return id, nil
}

func leaseMsg(id transfer.LeaseID) *peerv1.Lease {
	return &peerv1.Lease{Boot: append([]byte(nil), id.Boot[:]...), Id: id.ID, Epoch: id.Epoch}
}
