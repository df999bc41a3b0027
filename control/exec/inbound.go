package exec

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// matcher brings grants and questions of peers together with source leases.
type matcher struct {
	*core
	sources *sources
	layouts *layouts
	rails   *rails
	peers   *peers
	workers *workers

	grants    map[lease.GrantID]*inboundGrant // of peers, the newest of each destination lease
	grantsOf  byPeer[*inboundGrant]
	absents   map[engineLease]*inboundGrant            // those whose sidecar is out of reach or gone
	pending   *waitlist                                // what waits for an intent
	comparing map[Comparison]map[*partBinding]struct{} // refusals that wait for their reason
	refused   [numRefusals]uint64                      // grants refused so far
}

func newMatcher(c *core, e *Exec) *matcher {
	return &matcher{core: c, sources: e.sources, layouts: e.layouts, rails: e.rails, peers: e.peers,
		workers: e.workers, grants: map[lease.GrantID]*inboundGrant{}, grantsOf: byPeer[*inboundGrant]{},
		absents: map[engineLease]*inboundGrant{}, pending: newWaitlist(c),
		comparing: map[Comparison]map[*partBinding]struct{}{}}
}

// inbound is a grant of a peer: what one destination lease wants of an engine of ours, a claim on each of its ranks.
type inboundGrant struct {
	id     lease.GrantID
	peer   *peer
	key    transfer.Key
	msg    *peerv1.Grant
	team   lease.TeamID
	engine string         // whose ranks the parts are; set with claims
	claims []*partBinding // nil while no intent of the key has come
	wait   *pending       // for it

	differs bool   // in fingerprint: it is refused when it is known what differs
	absent  *timer // while its sidecar is out of reach or gone: how long its places are kept
	over    bool   // that sidecar is gone: nothing is sent to it any more
}

// claim is a part of a grant: what is wanted of one rank. A rank that gives nothing is claimed, too: its engine keeps the request's
// blocks on every rank until all of it is served.
type partBinding struct {
	in    *inboundGrant
	part  *peerv1.Part
	src   *source   // nil: its intent has not come, or it is over
	snd   *SendPart // nil: the rank gives nothing, or lost what it had
	wait  *pending  // for its intent
	asked bool      // for a layout that its plan needs, or for what keeps the two engines apart
	ended bool      // the destination lease has committed meanwhile
}

func (c *partBinding) gives() bool { return len(c.part.Geometry) > 0 }

// ask and answered bracket the time in which a claim waits for a word about its peer; it counts as pending for that long.
func (c *partBinding) ask() {
	if !c.asked {
		c.asked = true
		c.in.peer.pending++
	}
}

func (c *partBinding) answered() {
	if c.asked {
		c.asked = false
		c.in.peer.pending--
	}
}

func (mt *matcher) onGrant(now Instant, p *peer, m *peerv1.Grant) error {
	k, err := key(m.Xfer, m.Hash)
	if err != nil {
		return fmt.Errorf("grant: %w", err)
	}
	id, err := leaseID(m.Destination)
	if err != nil {
		return fmt.Errorf("grant: %w", err)
	}
	if err := checkGrant(m); err != nil {
		return fmt.Errorf("grant %s: %w", id, err)
	}
	g := lease.GrantID{Peer: p.boot, Dest: id}
	if old := mt.grants[g]; old != nil {
		if int32(m.Gen-old.msg.Gen) <= 0 { // they wrap
			return nil // a replay
		}
		mt.replace(now, old, g)
	}
	for _, s := range mt.sources.byKey[k] {
		if s.Over(g) {
			return nil // a replay
		}
	}
	in := &inboundGrant{id: g, peer: p, key: k, msg: m, team: lease.TeamID(m.Team)}
	mt.grants[g] = in
	mt.grantsOf.add(p.boot, in)
	if !mt.settle(now, in) {
		mt.wait(now, &pending{peer: p, key: k, in: in}, m.PartnerMs)
	}
	return nil
}

// grantsFrom are the grants of a peer, in order.
func (mt *matcher) grantsFrom(p *peer) (all []*inboundGrant) {
	for in := range mt.grantsOf[p.boot] {
		if in.peer == p {
			all = append(all, in)
		}
	}
	slices.SortFunc(all, func(a, b *inboundGrant) int { return compareLeases(a.id.Dest, b.id.Dest) })
	return all
}

// settle finds the engine that a grant is for, and claims its ranks. False: no intent of its key has come that it could be for.
func (mt *matcher) settle(now Instant, in *inboundGrant) bool {
	mt.succeed(now, in)
	var first *source
	for _, s := range mt.sources.byKey[in.key] {
		if s.Has(in.id) {
			first = s
			break
		}
		if first == nil && s.Room(in.team) {
			first = s
		}
	}
	if first == nil {
		return false
	}
	engine := first.ws.w.Place
	if string(in.msg.Fingerprint) != string(first.ws.w.Fingerprint[:]) {
		// Before the receiver is told of ranks: it would only find out that it cannot plan from them, and not all that differs.
		in.engine = engine.Engine
		in.claims = []*partBinding{{in: in, part: in.msg.Parts[0]}}
		mt.unlike(now, in.claims[0], first.ws.w)
		return true
	}
	ranks := mt.workersOf(in.key, engine.Engine)
	if why := misfit(in.msg, ranks, engine.World()); why != "" {
		if len(ranks) < engine.World() {
			return false // what it has cannot be told before all of it is here
		}
		r := &peerv1.GrantReply{Destination: leaseMsg(in.id.Dest), Code: peerv1.GrantReply_RANKS, Message: why, Gen: in.msg.Gen}
		for _, name := range engine.Ranks() {
			if ws := ranks[name]; ws != nil {
				r.Ranks = append(r.Ranks, &peerv1.Rank{Rank: name, Geometry: ws.w.Geometry[:]})
			}
		}
		mt.drop(in)
		mt.send(in.peer.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{GrantReply: r}})
		return true
	}
	in.engine = engine.Engine
	for _, p := range in.msg.Parts {
		in.claims = append(in.claims, &partBinding{in: in, part: p})
	}
	for _, c := range in.claims {
		if mt.grants[in.id] != in {
			break // refused by an earlier one
		}
		if !mt.bindClaim(now, c) {
			mt.wait(now, &pending{peer: in.peer, key: in.key, in: in, claim: c}, in.msg.PartnerMs)
		}
	}
	return true
}

// workersOf are the workers of an engine by rank. Where two engines call themselves the same, those count that have an intent of the key.
func (mt *matcher) workersOf(k transfer.Key, engine string) map[string]*worker {
	ranks := map[string]*worker{}
	for _, s := range mt.sources.byKey[k] {
		if at := s.ws.w.Place; at.Engine == engine && ranks[at.Rank()] == nil {
			ranks[at.Rank()] = s.ws
		}
	}
	meant := maps.Clone(ranks)
	for _, ws := range mt.workers.all {
		if ws.w.Place.Engine != engine || ws.gone {
			continue
		}
		name := ws.w.Place.Rank()
		if o := ranks[name]; meant[name] == nil && (o == nil || bytes.Compare(ws.w.Boot[:], o.w.Boot[:]) < 0) {
			ranks[name] = ws
		}
	}
	return ranks
}

// misfit says what of the parts is not as the engine's ranks are; empty: all that can be told yet fits.
func misfit(m *peerv1.Grant, ranks map[string]*worker, world int) string {
	if len(m.Parts) != world {
		return fmt.Sprintf("the engine has %d ranks, the grant is for %d", world, len(m.Parts))
	}
	found := 0
	for _, p := range m.Parts {
		ws := ranks[p.Rank]
		if ws == nil {
			continue
		}
		found++
		if len(p.Geometry) > 0 && string(p.Geometry) != string(ws.w.Geometry[:]) {
			return fmt.Sprintf("the cache of rank %s has another shape", p.Rank)
		}
	}
	if found != len(ranks) {
		return "the engine's ranks have other names"
	}
	return ""
}

// bindClaim gives a part to a source lease of its key and rank, or refuses the grant for good; false: there is none with room.
func (mt *matcher) bindClaim(now Instant, c *partBinding) bool {
	in := c.in
	if in.differs {
		return true
	}
	var s *source
	for _, o := range mt.sources.byKey[in.key] {
		if o.ws.w.Place.Engine != in.engine || o.ws.w.Place.Rank() != c.part.Rank {
			continue
		}
		if o.Has(in.id) {
			s = o
			break
		}
		if s == nil && o.Room(in.team) {
			s = o
		}
	}
	if s == nil {
		return false
	}
	m, w := in.msg, s.ws.w
	if string(m.Fingerprint) != string(w.Fingerprint[:]) {
		mt.unlike(now, c, w)
		return true
	}
	var plan Plan
	if c.gives() && !c.ended {
		var err error
		plan, err = planPart(mt.cfg.Planner, c, s)
		if unknown := (*UnknownLayout)(nil); errors.As(err, &unknown) {
			if mt.full(c) || !mt.layouts.describe(now, in.peer, unknown, nil, c) {
				mt.refuse(now, in, peerv1.GrantReply_LIMIT, "too many grants wait for layouts already")
			}
			return true
		}
		if err != nil {
			mt.refuseFor(now, in, peerv1.GrantReply_PLAN, refusalOf(err), err.Error())
			return true
		}
	}
	if err := s.Bind(in.id, in.team, int(m.TeamSize)); err != nil {
		mt.refuse(now, in, peerv1.GrantReply_PLAN, err.Error())
		return true
	}
	if s.firstBind == 0 {
		s.firstBind = now
	}
	c.src = s
	s.claims = append(s.claims, c)
	switch {
	case c.ended:
		mt.endClaim(now, c, true, "")
	case plan != nil:
		mt.open(now, c, plan)
	}
	return true
}

// full reports whether a claim that does not wait yet would be one too many.
func (mt *matcher) full(c *partBinding) bool {
	return !c.asked && c.wait == nil && c.in.peer.pending >= mt.cfg.MaxPending
}

// unlike refuses the grant of c, for a cache that is not as that of w, as soon as it is known what differs.
func (mt *matcher) unlike(now Instant, c *partBinding, w *connector.Worker) {
	if mt.full(c) {
		mt.refuse(now, c.in, peerv1.GrantReply_FINGERPRINT, differ)
		return
	}
	mt.compare(now, c, w)
}

// open starts to send a part.
func (mt *matcher) open(now Instant, c *partBinding, plan Plan) {
	in, s, m := c.in, c.src, c.in.msg
	snd := &SendPart{Worker: s.ws.w, Dest: in.id.Dest, Key: in.key, Prompt: m.Tokens, Skip: m.Skip, Tokens: c.part.TokensByTransport, Plan: plan}
	snd.Origin.Peer, snd.Origin.Slot, snd.Origin.Gen = in.peer.boot, transfer.Slot(c.part.Slot), transfer.Gen(c.part.Gen)
	snd.src, snd.peer, snd.binding, snd.opened = s, in.peer, c, now
	var deadline Instant
	if m.DeadlineMs > 0 {
		deadline = now + min(time.Duration(m.DeadlineMs)*time.Millisecond, MaxDeadline)
	}
	snd.flow = mt.spray.Open(in.peer.rails, spray.Priority(min(m.Priority, uint32(spray.Background))), deadline, plan.Space(), snd)
	snd.at = mt.rails.place(in.peer, s.ws.w, m.Tiers)
	snd.flow.SetPlace(snd.at)
	in.peer.places.moves(snd.at, 1)
	snd.readyTo = make([]uint32, plan.Space().NumSegments())
	c.snd = snd
	s.sends = append(s.sends, snd)
	mt.sources.follow(s.ws, 1)
	// The bytes leave first: this word is needed only once they are there.
	mt.late = append(mt.late, Action{Kind: Send, Peer: in.peer.boot, Frame: &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{
		GrantReply: &peerv1.GrantReply{Destination: leaseMsg(in.id.Dest), Source: leaseMsg(s.ID), Code: peerv1.GrantReply_BOUND, Rank: c.part.Rank,
			Gen: m.Gen}}}})
	mt.sources.prepare(snd)
	for l := range s.layers {
		mt.sources.release(snd, l)
	}
}

// refuse answers a grant for good; the receiver gives up, and so its places are free.
func (mt *matcher) refuse(now Instant, in *inboundGrant, code peerv1.GrantReply_Code, message string) {
	mt.refuseFor(now, in, code, refusals[code], message)
}

func (mt *matcher) refuseFor(now Instant, in *inboundGrant, code peerv1.GrantReply_Code, why Refusal,
	message string) {
	mt.refused[why]++
	mt.send(in.peer.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{GrantReply: &peerv1.GrantReply{
		Destination: leaseMsg(in.id.Dest), Code: code, Message: message, Gen: in.msg.Gen}}})
	if mt.grants[in.id] == in {
		mt.endInbound(now, in, false, message)
	}
	// An earlier grant of the lease may have left places behind.
	for _, s := range slices.Clone(mt.sources.byKey[in.key]) {
		s.trouble = codeName(code) + ": " + message
		if s.Has(in.id) {
			mt.sources.served(now, s, s.End(in.id, false), message)
		}
	}
}

// drop forgets a grant.
func (mt *matcher) drop(in *inboundGrant) {
	if mt.grants[in.id] == in {
		delete(mt.grants, in.id)
		mt.grantsOf.remove(in.id.Peer, in)
	}
	mt.present(in)
	if in.wait != nil {
		mt.pending.drop(in.wait)
	}
}

// forget drops a grant that nothing is bound to and nothing waits for.
func (mt *matcher) forget(in *inboundGrant) {
	if mt.grants[in.id] != in || in.wait != nil {
		return
	}
	for _, c := range in.claims {
		if c.src != nil || c.wait != nil || c.asked {
			return
		}
	}
	mt.drop(in)
}

// suspend ends what a grant moves and waits for. Its places stay.
func (mt *matcher) suspend(now Instant, in *inboundGrant) {
	for _, c := range in.claims {
		if c.wait != nil {
			mt.pending.drop(c.wait)
		}
		if c.snd != nil {
			mt.sources.endSending(now, c.snd)
		}
	}
}

// replace ends an older grant of a destination lease; its places are kept for the newer one, whose name is g.
func (mt *matcher) replace(now Instant, in *inboundGrant, g lease.GrantID) {
	mt.drop(in)
	mt.suspend(now, in)
	for _, c := range in.claims {
		if c.src == nil {
			continue
		}
		c.src.Rename(in.id, g)
		c.src.claims = remove(c.src.claims, c)
		c.src = nil
	}
}

// endInbound says that a destination lease needs nothing more of our engine.
func (mt *matcher) endInbound(now Instant, in *inboundGrant, committed bool, why string) {
	mt.drop(in)
	for _, c := range in.claims {
		switch {
		case c.src != nil:
			mt.endClaim(now, c, committed, why)
		case c.wait != nil && committed:
			c.ended = true // a rank that gave nothing, and whose intent is late: its place is taken and given back when it comes
		case c.wait != nil:
			mt.pending.drop(c.wait)
		}
	}
}

// endClaim says the same of one rank.
func (mt *matcher) endClaim(now Instant, c *partBinding, committed bool, why string) {
	s, snd := c.src, c.snd
	c.src, c.snd = nil, nil
	s.claims = remove(s.claims, c)
	if committed {
		if s.flagged > 0 {
			s.last.Flag = now - s.flagged
		}
		s.last.Dest, s.last.Peer = c.in.id.Dest, c.in.id.Peer
	}
	last := s.End(c.in.id, committed)
	if snd != nil {
		s.last.Slot, s.last.Gen = snd.Origin.Slot, snd.Origin.Gen
		s.last.BytesBefore = snd.early
		if committed {
			mt.sources.confirmFlights(snd)
			s.bytes += snd.Plan.Space().TotalBytes()
		}
		for i, v := range snd.moved {
			s.last.Moved[i] += v
		}
		snd.committed = committed
		mt.sources.endSending(now, snd)
	}
	mt.sources.served(now, s, last, why)
}

// served ends a source lease whose last receiver has ended.
func (ss *sources) served(now Instant, s *source, last bool, why string) {
	switch {
	case !last:
	case s.Served > 0:
		ss.close(now, s, StatusOK, "", true)
	default:
		ss.close(now, s, StatusFailed, why, true)
	}
}

func (mt *matcher) onCommit(now Instant, p *peer, m *peerv1.Commit) error {
	id, err := leaseID(m.Destination)
	if err != nil {
		return err
	}
	if in := mt.grants[lease.GrantID{Peer: p.boot, Dest: id}]; in != nil {
		mt.endInbound(now, in, true, "")
	}
	return nil
}

func (mt *matcher) onRevoke(now Instant, p *peer, m *peerv1.Revoke) error {
	id, err := leaseID(m.Destination)
	if err != nil {
		return fmt.Errorf("revoke: %w", err)
	}
	g := lease.GrantID{Peer: p.boot, Dest: id}
	in := mt.grants[g]
	if in == nil {
		return mt.onDecline(now, p, g, m)
	}
	if int32(m.Gen-in.msg.Gen) < 0 { // they wrap
		return nil // a replay: it names the last grant that was made
	}
	mt.endInbound(now, in, false, gaveUp+m.Reason)
	return nil
}

const gaveUp = "the receiver gave up: "
