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
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// inbound is a grant of a peer: what one destination lease wants of an engine of ours, a claim on each of its ranks.
type inbound struct {
	id     lease.GrantID
	peer   *peer
	key    transfer.Key
	msg    *peerv1.Grant
	team   lease.TeamID
	engine string   // whose ranks the parts are; set with claims
	claims []*claim // nil while no intent of the key has come
	wait   *pending // for it

	differs bool   // in fingerprint: it is refused when it is known what differs
	absent  *timer // while its sidecar is out of reach or gone: how long its places are kept
	over    bool   // that sidecar is gone: nothing is sent to it any more
}

// claim is a part of a grant: what is wanted of one rank. A rank that gives nothing is claimed, too: its engine keeps the request's
// blocks on every rank until all of it is served.
type claim struct {
	in    *inbound
	part  *peerv1.Part
	src   *source  // nil: its intent has not come, or it is over
	snd   *Sending // nil: the rank gives nothing, or lost what it had
	wait  *pending // for its intent
	asked bool     // for a layout that its plan needs, or for what keeps the two engines apart
	ended bool     // the destination lease has committed meanwhile
}

func (c *claim) gives() bool { return len(c.part.Geometry) > 0 }

// ask and answered bracket the time in which a claim waits for a word about its peer; it counts as pending for that long.
func (c *claim) ask() {
	if !c.asked {
		c.asked = true
		c.in.peer.pending++
	}
}

func (c *claim) answered() {
	if c.asked {
		c.asked = false
		c.in.peer.pending--
	}
}

func (e *Exec) onGrant(now Instant, p *peer, m *peerv1.Grant) error {
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
	if old := e.inbound[g]; old != nil {
		if int32(m.Gen-old.msg.Gen) <= 0 { // they wrap
			return nil // a replay
		}
		e.replace(now, old, g)
	}
	for _, s := range e.byKey[k] {
		if s.Over(g) {
			return nil // a replay
		}
	}
	in := &inbound{id: g, peer: p, key: k, msg: m, team: lease.TeamID(m.Team)}
	e.inbound[g] = in
	e.with(p.boot).inbound[in] = struct{}{}
	if !e.settle(now, in) {
		e.wait(now, &pending{peer: p, key: k, in: in}, m.PartnerMs)
	}
	return nil
}

func checkGrant(m *peerv1.Grant) error {
	switch n := len(m.Parts); {
	case m.Gen == 0:
		return wrong(BadGeneration, "generation 0: they count from 1")
	case len(m.Fingerprint) != 32:
		return wrong(BadFingerprint, "fingerprint of %d bytes: want 32", len(m.Fingerprint))
	case n < 1 || n > MaxParts:
		return wrong(BadParts, "%d parts: want 1 to %d", n, MaxParts)
	}
	if err := checkTeam(m.Team, m.TeamSize); err != nil {
		return err
	}
	ranks, slots := make(map[string]bool, len(m.Parts)), make(map[uint32]bool, len(m.Parts))
	for i, p := range m.Parts {
		bad := func(what Nonsense, v string) error { return wrong(what, "parts[%d].%s = %s", i, what, v) }
		switch {
		case p.GetRank() == "" || len(p.Rank) > maxRankBytes || ranks[p.Rank]:
			return bad(BadRank, fmt.Sprintf("%.80q: want each rank once, in 1 to %d bytes", p.GetRank(), maxRankBytes))
		case len(p.Geometry) == 0 && (p.Slot != 0 || p.Gen != 0 || p.Chunks != 0 || p.Bytes != 0 || len(p.Share) != 0):
			return bad(BadGeometry, "empty: a rank that gives nothing has no slot, chunks or share")
		case len(p.Geometry) != 0 && len(p.Geometry) != 32:
			return bad(BadGeometry, fmt.Sprintf("%d bytes: want 32", len(p.Geometry)))
		case len(p.Geometry) != 0 && (p.Slot > 1<<16-1 || p.Gen == 0 || slots[p.Slot]):
			return bad(BadSlot, fmt.Sprintf("%d, generation %d: want 16 bits, each slot once, and generations from 1", p.Slot, p.Gen))
		case len(p.Share) > 2*layout.MaxLayers:
			return bad(BadShare, fmt.Sprintf("%d numbers: want at most %d", len(p.Share), 2*layout.MaxLayers))
		}
		ranks[p.Rank] = true
		if len(p.Geometry) > 0 {
			slots[p.Slot] = true
		}
	}
	return nil
}

// settle finds the engine that a grant is for, and claims its ranks. False: no intent of its key has come that it could be for.
func (e *Exec) settle(now Instant, in *inbound) bool {
	e.succeed(now, in)
	var first *source
	for _, s := range e.byKey[in.key] {
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
		in.claims = []*claim{{in: in, part: in.msg.Parts[0]}}
		e.unlike(now, in.claims[0], first.ws.w)
		return true
	}
	ranks := e.workersOf(in.key, engine.Engine)
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
		e.drop(in)
		e.send(in.peer.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{GrantReply: r}})
		return true
	}
	in.engine = engine.Engine
	for _, p := range in.msg.Parts {
		in.claims = append(in.claims, &claim{in: in, part: p})
	}
	for _, c := range in.claims {
		if e.inbound[in.id] != in {
			break // refused by an earlier one
		}
		if !e.bindClaim(now, c) {
			e.wait(now, &pending{peer: in.peer, key: in.key, in: in, claim: c}, in.msg.PartnerMs)
		}
	}
	return true
}

// workersOf are the workers of an engine by rank. Where two engines call themselves the same, those count that have an intent of the key.
func (e *Exec) workersOf(k transfer.Key, engine string) map[string]*worker {
	ranks := map[string]*worker{}
	for _, s := range e.byKey[k] {
		if at := s.ws.w.Place; at.Engine == engine && ranks[at.Rank()] == nil {
			ranks[at.Rank()] = s.ws
		}
	}
	meant := maps.Clone(ranks)
	for _, ws := range e.workers {
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
func (e *Exec) bindClaim(now Instant, c *claim) bool {
	in := c.in
	if in.differs {
		return true
	}
	var s *source
	for _, o := range e.byKey[in.key] {
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
		e.unlike(now, c, w)
		return true
	}
	var plan Plan
	if c.gives() && !c.ended {
		var err error
		plan, err = e.planPart(c, s)
		if unknown := (*UnknownLayout)(nil); errors.As(err, &unknown) {
			if e.full(c) || !e.describe(now, in.peer, unknown, nil, c) {
				e.refuse(now, in, peerv1.GrantReply_LIMIT, "too many grants wait for layouts already")
			}
			return true
		}
		if err != nil {
			e.refuseFor(now, in, peerv1.GrantReply_PLAN, refusalOf(err), err.Error())
			return true
		}
	}
	if err := s.Bind(in.id, in.team, int(m.TeamSize)); err != nil {
		e.refuse(now, in, peerv1.GrantReply_PLAN, err.Error())
		return true
	}
	if s.firstBind == 0 {
		s.firstBind = now
	}
	c.src = s
	s.claims = append(s.claims, c)
	switch {
	case c.ended:
		e.endClaim(now, c, true, "")
	case plan != nil:
		e.open(now, c, plan)
	}
	return true
}

// full reports whether a claim that does not wait yet would be one too many.
func (e *Exec) full(c *claim) bool {
	return !c.asked && c.wait == nil && c.in.peer.pending >= e.cfg.MaxPending
}

// unlike refuses the grant of c, for a cache that is not as that of w, as soon as it is known what differs.
func (e *Exec) unlike(now Instant, c *claim, w *connector.Worker) {
	if e.full(c) {
		e.refuse(now, c.in, peerv1.GrantReply_FINGERPRINT, differ)
		return
	}
	e.compare(now, c, w)
}

// open starts to send a part.
func (e *Exec) open(now Instant, c *claim, plan Plan) {
	in, s, m := c.in, c.src, c.in.msg
	snd := &Sending{Worker: s.ws.w, Dest: in.id.Dest, Key: in.key, Prompt: m.Tokens, Skip: m.Skip, Tokens: c.part.TokensByTransport, Plan: plan}
	snd.Origin.Peer, snd.Origin.Slot, snd.Origin.Gen = in.peer.boot, transfer.Slot(c.part.Slot), transfer.Gen(c.part.Gen)
	snd.src, snd.peer, snd.claim, snd.opened = s, in.peer, c, now
	var deadline Instant
	if m.DeadlineMs > 0 {
		deadline = now + min(time.Duration(m.DeadlineMs)*time.Millisecond, MaxDeadline)
	}
	snd.flow = e.spray.Open(in.peer.rails, spray.Priority(min(m.Priority, uint32(spray.Background))), deadline, plan.Space(), snd)
	snd.at = e.place(in.peer, s.ws.w, m.Tiers)
	snd.flow.SetPlace(snd.at)
	in.peer.places.moves(snd.at, 1)
	snd.readyTo = make([]uint32, plan.Space().NumSegments())
	c.snd = snd
	s.sends = append(s.sends, snd)
	e.follow(s.ws, 1)
	// The bytes leave first: this word is needed only once they are there.
	e.late = append(e.late, Action{Kind: Send, Peer: in.peer.boot, Frame: &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{
		GrantReply: &peerv1.GrantReply{Destination: leaseMsg(in.id.Dest), Source: leaseMsg(s.ID), Code: peerv1.GrantReply_BOUND, Rank: c.part.Rank,
			Gen: m.Gen}}}})
	e.prepare(snd)
	for l := range s.layers {
		e.release(snd, l)
	}
}

// refuse answers a grant for good; the receiver gives up, and so its places are free.
func (e *Exec) refuse(now Instant, in *inbound, code peerv1.GrantReply_Code, message string) {
	e.refuseFor(now, in, code, refusals[code], message)
}

func (e *Exec) refuseFor(now Instant, in *inbound, code peerv1.GrantReply_Code, why Refusal,
	message string) {
	e.refused[why]++
	e.send(in.peer.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{GrantReply: &peerv1.GrantReply{
		Destination: leaseMsg(in.id.Dest), Code: code, Message: message, Gen: in.msg.Gen}}})
	if e.inbound[in.id] == in {
		e.endInbound(now, in, false, message)
	}
	// An earlier grant of the lease may have left places behind.
	for _, s := range slices.Clone(e.byKey[in.key]) {
		s.trouble = codeName(code) + ": " + message
		if s.Has(in.id) {
			e.served(now, s, s.End(in.id, false), message)
		}
	}
}

// drop forgets a grant.
func (e *Exec) drop(in *inbound) {
	if e.inbound[in.id] == in {
		delete(e.inbound, in.id)
		delete(e.with(in.id.Peer).inbound, in)
		e.without(in.id.Peer)
	}
	e.present(in)
	if in.wait != nil {
		e.dropPending(in.wait)
	}
}

// forget drops a grant that nothing is bound to and nothing waits for.
func (e *Exec) forget(in *inbound) {
	if e.inbound[in.id] != in || in.wait != nil {
		return
	}
	for _, c := range in.claims {
		if c.src != nil || c.wait != nil || c.asked {
			return
		}
	}
	e.drop(in)
}

// suspend ends what a grant moves and waits for. Its places stay.
func (e *Exec) suspend(now Instant, in *inbound) {
	for _, c := range in.claims {
		if c.wait != nil {
			e.dropPending(c.wait)
		}
		if c.snd != nil {
			e.endSending(now, c.snd)
		}
	}
}

// replace ends an older grant of a destination lease; its places are kept for the newer one, whose name is g.
func (e *Exec) replace(now Instant, in *inbound, g lease.GrantID) {
	e.drop(in)
	e.suspend(now, in)
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
func (e *Exec) endInbound(now Instant, in *inbound, committed bool, why string) {
	e.drop(in)
	for _, c := range in.claims {
		switch {
		case c.src != nil:
			e.endClaim(now, c, committed, why)
		case c.wait != nil && committed:
			c.ended = true // a rank that gave nothing, and whose intent is late: its place is taken and given back when it comes
		case c.wait != nil:
			e.dropPending(c.wait)
		}
	}
}

// endClaim says the same of one rank.
func (e *Exec) endClaim(now Instant, c *claim, committed bool, why string) {
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
			e.confirmFlights(snd)
			s.bytes += snd.Plan.Space().TotalBytes()
		}
		for i, v := range snd.moved {
			s.last.Moved[i] += v
		}
		snd.committed = committed
		e.endSending(now, snd)
	}
	e.served(now, s, last, why)
}

// served ends a source lease whose last receiver has ended.
func (e *Exec) served(now Instant, s *source, last bool, why string) {
	switch {
	case !last:
	case s.Served > 0:
		e.closeSource(now, s, StatusOK, "", true)
	default:
		e.closeSource(now, s, StatusFailed, why, true)
	}
}

func (e *Exec) onCommit(now Instant, p *peer, m *peerv1.Commit) error {
	id, err := leaseID(m.Destination)
	if err != nil {
		return err
	}
	if in := e.inbound[lease.GrantID{Peer: p.boot, Dest: id}]; in != nil {
		e.endInbound(now, in, true, "")
	}
	return nil
}

func (e *Exec) onRevoke(now Instant, p *peer, m *peerv1.Revoke) error {
	id, err := leaseID(m.Destination)
	if err != nil {
		return fmt.Errorf("revoke: %w", err)
	}
	g := lease.GrantID{Peer: p.boot, Dest: id}
	in := e.inbound[g]
	if in == nil {
		return e.onDecline(now, p, g, m)
	}
	if int32(m.Gen-in.msg.Gen) < 0 { // they wrap
		return nil // a replay: it names the last grant that was made
	}
	e.endInbound(now, in, false, gaveUp+m.Reason)
	return nil
}

const gaveUp = "the receiver gave up: "
