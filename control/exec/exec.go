package exec

import (
	"errors"
	"fmt"
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
	dests   map[transfer.LeaseID]*dest
	nsource int
	byKey   map[transfer.Key][]*source // open ones
	byXfer  map[transfer.XferID]count  // open source leases
	inbound map[lease.GrantID]*inbound // grants of peers, the newest of each destination lease

	endpoints map[string]*endpoint
	peers     map[transfer.Boot]*peer
	lanes     map[uint64]*lane
	pending   map[transfer.Key][]*pending // grants and questions that wait for an intent
	asked     map[uint64]*await           // our own questions

	describing map[described]*description
	comparing  map[Comparison]map[*claim]struct{} // refusals that wait for their reason
	rails      map[railID]bool                    // ours: whether their links are down
	railsNo    int                                // how often they were told
	credit     *timer                             // of the next look at what comes in
	inflows    map[inflowID]*inflow
	inrails    map[railID]*inrail
	limited    int // peers and rails that have a credit

	spray      *spray.Scheduler
	scan       *timer  // of what is in flight
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
	gone    bool
}

// endpoint is a sidecar as engines name it.
type endpoint struct {
	addr    string
	peer    *peer // nil while it is not known
	trying  bool
	refused int                 // tries in a row at which nobody listened there
	refs    int                 // leases and questions that name it
	waiting map[*dest]struct{}  // want a grant there
	awaits  map[*await]struct{} // want an answer from there
	retry   *timer
	breaker
}

// peer is one boot of another sidecar, or of ourselves.
type peer struct {
	boot    transfer.Boot
	up      bool
	lanes   []*lane
	rails   *spray.Peer
	pending int
	known   map[railID]bool    // its rails: whether their links are down; nil: it has not said
	credits map[railID]Instant // when what it wants in flight at most is forgotten
	expiry  Instant            // of the first of them

	places places

	complained bool // about its rails, tiers and credits

	dirty bool
	ranks []Rank            // of the engine there that we heard of last; nil: suppose that it is as ours
	load  map[string]uint64 // bytes of the parts that its ranks owe us, by rank
}

// await is a question of one of our engines.
type await struct {
	id   uint64
	a    connector.Await
	ep   *endpoint
	sent transfer.Boot // whom we asked
	end  Instant
	t    *timer
}

// pending waits for an intent: a question, a grant, or a part of one.
type pending struct {
	peer  *peer
	key   transfer.Key
	in    *inbound // nil: a question
	claim *claim   // nil: the grant waits for any intent of its key
	token uint64
	gone  bool // the key has a tombstone: this is what to say when the time is over
	t     *timer
}

// count is how many source leases are open under one transfer id, and how many of them belong to finished requests.
type count struct{ open, held int }

// New returns an executor.
func New(cfg Config) *Exec {
	cfg = cfg.withDefaults()
	e := &Exec{
		cfg: cfg, slots: lease.NewSlots(cfg.MaxSlots), tombs: lease.NewTombs(lease.MaxTombstones, cfg.TombstoneAge),
		workers: map[*connector.Worker]*worker{}, dests: map[transfer.LeaseID]*dest{}, byKey: map[transfer.Key][]*source{},
		byXfer: map[transfer.XferID]count{}, inbound: map[lease.GrantID]*inbound{},
		endpoints: map[string]*endpoint{}, peers: map[transfer.Boot]*peer{}, lanes: map[uint64]*lane{},
		pending: map[transfer.Key][]*pending{}, asked: map[uint64]*await{}, describing: map[described]*description{},
		comparing: map[Comparison]map[*claim]struct{}{},
	}
	e.spray = spray.New(spray.Config{Policy: cfg.Policy, MaxFlights: cfg.MaxSlices, MaxStrikes: cfg.MaxAttempts})
	e.inflows, e.inrails = map[inflowID]*inflow{}, map[railID]*inrail{}
	e.scan, e.credit = newTimer(e.scanFlights), newTimer(e.creditDue)
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

// Tick does what is due.
func (e *Exec) Tick(now Instant) {
	for t := e.agenda.pop(now); t != nil; t = e.agenda.pop(now) {
		t.fire(now)
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
// these leases again.
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

// Await asks the sidecar at a.Peer; Answer with that id follows.
func (e *Exec) Await(now Instant, id uint64, a connector.Await) {
	if e.draining || len(e.asked) >= e.cfg.MaxPending {
		x := e.emit(Answer)
		x.Await, x.Admission = id, connector.Admission{State: "refused", Message: "sidecar is draining, or has too many questions open"}
		return
	}
	if why := e.unreachable(now, a.Peer); why != "" {
		x := e.emit(Answer)
		x.Await, x.Admission = id, connector.Admission{State: "gone", Message: why}
		return
	}
	ttl := a.TTL
	if ttl <= 0 {
		ttl = e.cfg.Partner
	}
	w := &await{id: id, a: a, end: now + min(ttl, MaxDeadline)}
	w.t = newTimer(func(Instant) {
		e.answer(w, connector.Admission{State: "gone", Message: "no answer from " + a.Peer + " in time"})
	})
	// Ours is the second clock: the peer answers at the ttl itself.
	e.agenda.arm(w.t, w.end+e.cfg.Grace/4)
	e.asked[id] = w
	w.ep = e.endpoint(a.Peer)
	w.ep.refs++
	w.ep.awaits[w] = struct{}{}
	e.ask(now, w)
}

func (e *Exec) ask(now Instant, w *await) {
	if w.ep.peer == nil {
		e.reach(w.ep)
		return
	}
	if w.sent == w.ep.peer.boot {
		return
	}
	w.sent = w.ep.peer.boot
	e.send(w.sent, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Await{Await: &peerv1.Await{
		Xfer: w.a.Key.Xfer[:], Hash: w.a.Key.Hash[:], Token: w.id, TtlMs: millis(w.end - now)}}})
}

func (e *Exec) answer(w *await, ad connector.Admission) {
	if e.asked[w.id] != w {
		return
	}
	delete(e.asked, w.id)
	delete(w.ep.awaits, w)
	e.agenda.disarm(w.t)
	x := e.emit(Answer)
	x.Await, x.Admission = w.id, ad
	w.ep.refs--
	e.dropEndpoint(w.ep)
}

func millis(d time.Duration) uint32 {
	return uint32(min(max(d, 0), MaxDeadline) / time.Millisecond)
}

// endpoint returns the entry of an address.
func (e *Exec) endpoint(addr string) *endpoint {
	ep := e.endpoints[addr]
	if ep == nil {
		ep = &endpoint{addr: addr, waiting: map[*dest]struct{}{}, awaits: map[*await]struct{}{}}
		ep.retry = newTimer(func(Instant) { e.reach(ep) })
		e.endpoints[addr] = ep
	}
	return ep
}

// dropEndpoint forgets an address that nobody waits for and nobody answers at; later, where its breaker is to be remembered.
func (e *Exec) dropEndpoint(ep *endpoint) {
	if ep.peer == nil && !ep.trying && ep.refs == 0 {
		if at := ep.until(); at > 0 && len(e.endpoints) <= maxEndpoints {
			e.agenda.arm(ep.retry, at)
			return
		}
		e.agenda.disarm(ep.retry)
		delete(e.endpoints, ep.addr)
	}
}

func (e *Exec) reach(ep *endpoint) {
	if ep.trying || ep.peer != nil {
		return
	}
	if len(ep.waiting) == 0 && len(ep.awaits) == 0 {
		ep.breaker = breaker{}
		e.dropEndpoint(ep)
		return
	}
	ep.trying = true
	e.emit(Connect).Endpoint = ep.addr
}

// PeerUp says that the sidecar at addr answers and is boot. addr may be empty where it called us.
func (e *Exec) PeerUp(now Instant, addr string, boot transfer.Boot) {
	p := e.peer(boot)
	if !p.up {
		p.up = true
		for _, d := range e.dests {
			if d.Peer == boot && d.State == lease.DestLanding {
				d.Partner = lease.Never
			}
		}
	}
	if addr == "" {
		return
	}
	ep := e.endpoint(addr)
	ep.trying, ep.refused, ep.breaker = false, 0, breaker{}
	e.agenda.disarm(ep.retry)
	if old := ep.peer; old != nil && old != p {
		ep.peer = p
		if old.boot != e.cfg.Boot {
			e.PeerDown(now, old.boot, true)
		}
	}
	ep.peer = p
	for _, w := range awaitsInOrder(maps.Keys(ep.awaits)) {
		e.ask(now, w)
	}
	for _, d := range inOrder(maps.Keys(ep.waiting)) {
		delete(ep.waiting, d)
		e.grant(now, d)
	}
	e.assign(now)
}

func (e *Exec) peer(boot transfer.Boot) *peer {
	p := e.peers[boot]
	if p == nil {
		p = &peer{boot: boot}
		p.rails = e.spray.Peer(boot, p)
		p.rails.Tier = func(path spray.Path, at spray.Place) int { return e.tierAt(p, path, at) }
		e.peers[boot] = p
	}
	return p
}

// ConnectFailed ends a Connect without a peer. Those who wait for it try again until their own time is over, or until it is plain that
// nobody listens at that address (ErrNobody): a wrong address must not cost each request all its patience.
func (e *Exec) ConnectFailed(now Instant, addr string, err error) {
	ep := e.endpoints[addr]
	if ep == nil {
		return
	}
	ep.trying = false
	ep.failed(now, err)
	for d := range ep.waiting {
		d.trouble = err.Error()
	}
	if ep.refused++; !errors.Is(err, ErrNobody) {
		ep.refused = 0
	}
	if ep.refused >= maxRefused {
		e.nobody(now, ep, err)
	}
	if len(ep.waiting)+len(ep.awaits) == 0 {
		e.dropEndpoint(ep)
		return
	}
	e.agenda.arm(ep.retry, now+connectRetry)
}

// nobody ends what waits for an address at which nobody listens.
func (e *Exec) nobody(now Instant, ep *endpoint, err error) {
	ep.refused, ep.breaker = 0, breaker{} // a refusal is quick: nobody needs protection from the next one
	ep.refs++                             // it stays until the caller has seen that nobody is left
	for _, d := range inOrder(maps.Keys(ep.waiting)) {
		e.closeDest(now, d, StatusExpired, err.Error())
	}
	for _, w := range awaitsInOrder(maps.Keys(ep.awaits)) {
		e.answer(w, connector.Admission{State: "gone", Message: err.Error()})
	}
	ep.refs--
}

// PeerDown says that the control lanes to boot are down. proved: that process is dead or superseded, no word of it will ever
// come again. Otherwise its leases wait for it as long as for any missing partner.
func (e *Exec) PeerDown(now Instant, boot transfer.Boot, proved bool) {
	p := e.peers[boot]
	if p == nil {
		return
	}
	p.up = false
	if !proved {
		for _, d := range e.dests {
			if d.Peer == boot && d.State == lease.DestLanding {
				d.trouble = "the source's sidecar cannot be reached"
				d.Partner = now + d.partner
				e.agenda.arm(d.t, min(d.Deadline, d.Partner))
			}
		}
		return
	}
	delete(e.peers, boot)
	e.spray.Forget(p.rails)
	e.forgetCredits(p)
	for _, ep := range endpointsInOrder(maps.Values(e.endpoints)) {
		if ep.peer == p {
			ep.peer = nil
			for w := range ep.awaits {
				w.sent = transfer.Boot{}
			}
			e.reach(ep)
			e.dropEndpoint(ep)
		}
	}
	for _, d := range inOrder(maps.Values(e.dests)) {
		if d.Peer == boot && (d.State == lease.DestGranted || d.State == lease.DestLanding) {
			e.regrant(now, d, ByPeerLost, "the source's sidecar is gone")
		}
	}
	for _, g := range grantsInOrder(maps.Keys(e.inbound)) {
		if in := e.inbound[g]; in != nil && g.Peer == boot {
			e.endInbound(now, in, false, "the destination's sidecar is gone")
		}
	}
	for _, l := range e.pending {
		for _, q := range append([]*pending(nil), l...) {
			if q.peer == p {
				e.dropPending(q)
			}
		}
	}
	e.assign(now)
}

// Message takes the body of one control frame from peer boot.
func (e *Exec) Message(now Instant, boot transfer.Boot, f *peerv1.ControlFrame) error {
	p := e.peer(boot)
	var err error
	switch b := f.Body.(type) {
	case *peerv1.ControlFrame_Await:
		err = e.onAwait(now, p, b.Await)
	case *peerv1.ControlFrame_Admitted:
		e.onAdmitted(b.Admitted)
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
		// Closed is for receivers whose fence needs the sender; Rails, Ping and Pong are the lanes' own.
	}
	e.assign(now)
	return err
}

func key(xfer, hash []byte) (k transfer.Key, err error) {
	if len(xfer) != len(k.Xfer) || len(hash) != len(k.Hash) {
		return k, fmt.Errorf("key: xfer has %d bytes and hash %d: want %d and %d", len(xfer), len(hash), len(k.Xfer), len(k.Hash))
	}
	copy(k.Xfer[:], xfer)
	copy(k.Hash[:], hash)
	return k, nil
}

func leaseID(l *peerv1.Lease) (id transfer.LeaseID, err error) {
	if len(l.GetBoot()) != len(id.Boot) {
		return id, fmt.Errorf("lease: boot has %d bytes: want %d", len(l.GetBoot()), len(id.Boot))
	}
	copy(id.Boot[:], l.Boot)
	id.ID, id.Epoch = l.Id, l.Epoch
	return id, nil
}

func leaseMsg(id transfer.LeaseID) *peerv1.Lease {
	return &peerv1.Lease{Boot: append([]byte(nil), id.Boot[:]...), Id: id.ID, Epoch: id.Epoch}
}

func (e *Exec) onAdmitted(m *peerv1.Admitted) {
	w := e.asked[m.Token]
	if w == nil {
		return
	}
	ad := connector.Admission{Tokens: m.Tokens, Message: m.Message, State: "gone"}
	switch m.State {
	case peerv1.Admitted_ADMITTED:
		ad.State = "admitted"
	case peerv1.Admitted_REFUSED:
		ad.State = "refused"
	}
	e.answer(w, ad)
}
