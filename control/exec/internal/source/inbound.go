package source

import (
	"errors"
	"fmt"
	"slices"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/index"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/layouts"
	"github.com/kvspray/kvspray/control/exec/internal/timer"
	"github.com/kvspray/kvspray/control/exec/internal/workers"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
)

// Matcher brings grants and queries of peers together with source leases.
type Matcher struct {
	*core.Core
	out     Actions
	sources *Table
	layouts *layouts.Table
	rails   *lanes.Rails
	peers   *lanes.Peers
	workers *workers.Table

	grants     map[lease.GrantID]*inboundGrant // of peers, the newest of each destination lease
	grantsOf   index.Sets[transfer.Boot, *inboundGrant]
	absents    map[engineLease]*inboundGrant            // those whose sidecar is out of reach or gone
	pending    *waitlist                                // what waits for an intent
	describing index.Sets[layouts.Name, *partBinding]   // wait for a layout
	comparing  map[Comparison]map[*partBinding]struct{} // refusals that wait for their reason
	refused    agreement.Refusals                       // grants refused so far
}

// Parts are the other parts of an executor that a Matcher uses.
type Parts struct {
	Layouts *layouts.Table
	Rails   *lanes.Rails
	Peers   *lanes.Peers
	Workers *workers.Table
}

// NewMatcher returns a matcher for the leases of a table.
func NewMatcher(c *core.Core, out Actions, ss *Table, p Parts) *Matcher {
	mt := &Matcher{Core: c, out: out, sources: ss, layouts: p.Layouts, rails: p.Rails, peers: p.Peers,
		workers: p.Workers, grants: map[lease.GrantID]*inboundGrant{},
		grantsOf: index.Sets[transfer.Boot, *inboundGrant]{},
		absents:  map[engineLease]*inboundGrant{}, pending: newWaitlist(c),
		describing: index.Sets[layouts.Name, *partBinding]{},
		comparing:  map[Comparison]map[*partBinding]struct{}{}}
	ss.observer = mt
	return mt
}

// inboundGrant is a grant of a peer: what one destination lease requests of an engine of ours,
// with a binding for each of its ranks.
type inboundGrant struct {
	id       lease.GrantID
	peer     *lanes.Peer
	key      transfer.Key
	msg      *peerv1.Grant
	team     lease.TeamID
	engine   string         // whose ranks the parts are; set with bindings
	bindings []*partBinding // nil while no intent of the key has come
	wait     *pending       // for it
	came     Instant

	differs bool         // its fingerprint differs: the refusal waits for the difference
	absent  *timer.Timer // ends the absence of its sidecar
	over    bool         // its sidecar is gone: nothing is sent to it
}

// partBinding binds a part of a grant to a source lease. A rank that sends nothing is bound, too:
// its engine keeps the blocks of a request on every rank until all of it is served.
type partBinding struct {
	in    *inboundGrant
	part  *peerv1.Part
	src   *Lease   // nil: its intent has not come, or it is over
	snd   *Part    // nil: the rank sends nothing, or its blocks are lost
	wait  *pending // for its intent
	asked bool     // waits for a layout or a comparison
	ended bool     // the destination lease has committed
}

func (c *partBinding) gives() bool { return len(c.part.Geometry) > 0 }

// ask and answered bracket the wait for an answer about the peer. The binding counts as pending in
// between.
func (c *partBinding) ask() {
	if !c.asked {
		c.asked = true
		c.in.peer.Pending++
	}
}

func (c *partBinding) answered() {
	if c.asked {
		c.asked = false
		c.in.peer.Pending--
	}
}

func (mt *Matcher) OnGrant(now Instant, p *lanes.Peer, m *peerv1.Grant) error {
	k, err := frame.Key(m.Xfer, m.Hash)
	if err != nil {
		return fmt.Errorf("grant: %w", err)
	}
	id, err := frame.LeaseID(m.Destination)
	if err != nil {
		return fmt.Errorf("grant: %w", err)
	}
	if err := frame.CheckGrant(m); err != nil {
		return fmt.Errorf("grant %s: %w", id, err)
	}
	g := lease.GrantID{Peer: p.Boot, Dest: id}
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
	in := &inboundGrant{id: g, peer: p, key: k, msg: m, team: lease.TeamID(m.Team), came: now}
	mt.grants[g] = in
	mt.grantsOf.Add(p.Boot, in)
	if !mt.settle(now, in) {
		mt.wait(now, &pending{peer: p, key: k, in: in}, m.MatchTimeoutMs)
	}
	return nil
}

// grantsFrom are the grants of a peer, in order.
func (mt *Matcher) grantsFrom(p *lanes.Peer) (all []*inboundGrant) {
	for in := range mt.grantsOf[p.Boot] {
		if in.peer == p {
			all = append(all, in)
		}
	}
	slices.SortFunc(all, func(a, b *inboundGrant) int {
		return index.CompareLeases(a.id.Dest, b.id.Dest)
	})
	return all
}

// settle finds the engine that a grant is for, and binds its ranks. It returns false if no
// suitable intent of the key has come.
func (mt *Matcher) settle(now Instant, in *inboundGrant) bool {
	mt.succeed(now, in)
	var first *Lease
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
	place := first.ws.Place
	if string(in.msg.Fingerprint) != string(first.ws.Fingerprint[:]) {
		// This comes before the reply with ranks: from those the receiver learns only that it cannot
		// plan, and not what differs.
		in.engine = place.Engine
		in.bindings = []*partBinding{{in: in, part: in.msg.Parts[0]}}
		mt.unlike(now, in.bindings[0], first.ws.Worker)
		return true
	}
	ranks := mt.sources.workersOf(in.key, place.Engine)
	if why := misfit(in.msg, ranks, place.World()); why != "" {
		if len(ranks) < place.World() {
			return false // the reply needs all ranks
		}
		r := &peerv1.GrantReply{Destination: frame.Lease(in.id.Dest), Code: peerv1.GrantReply_RANKS,
			Message: why, Gen: in.msg.Gen}
		for _, name := range place.Ranks() {
			if ws := ranks[name]; ws != nil {
				r.Ranks = append(r.Ranks, &peerv1.Rank{Rank: name, Geometry: ws.Geometry[:]})
			}
		}
		mt.drop(in)
		mt.out.Send(in.peer.Boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{
			GrantReply: r}})
		return true
	}
	in.engine = place.Engine
	for _, p := range in.msg.Parts {
		in.bindings = append(in.bindings, &partBinding{in: in, part: p})
	}
	for _, c := range in.bindings {
		if mt.grants[in.id] != in {
			break // refused by an earlier one
		}
		if !mt.bindPart(now, c) {
			mt.wait(now, &pending{peer: in.peer, key: in.key, in: in, binding: c}, in.msg.MatchTimeoutMs)
		}
	}
	return true
}

// misfit describes how the parts differ from the engine's ranks; empty: what is known so far fits.
func misfit(m *peerv1.Grant, ranks map[string]*workers.Worker, world int) string {
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
		if len(p.Geometry) > 0 && string(p.Geometry) != string(ws.Geometry[:]) {
			return fmt.Sprintf("the cache of rank %s has another shape", p.Rank)
		}
	}
	if found != len(ranks) {
		return "the engine's ranks have other names"
	}
	return ""
}

// bindPart binds a part to a source lease of its key and rank, or refuses the whole grant. It
// returns false if no lease has room.
func (mt *Matcher) bindPart(now Instant, c *partBinding) bool {
	in := c.in
	if in.differs {
		return true
	}
	var s *Lease
	for _, o := range mt.sources.byKey[in.key] {
		if o.ws.Place.Engine != in.engine || o.ws.Place.Rank() != c.part.Rank {
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
	m, w := in.msg, s.ws.Worker
	if string(m.Fingerprint) != string(w.Fingerprint[:]) {
		mt.unlike(now, c, w)
		return true
	}
	var plan agreement.Plan
	if c.gives() && !c.ended {
		var err error
		plan, err = agreement.Source(mt.Cfg.Planner, s.ws.Worker, s.in.Tokens, in.msg, c.part)
		if unknown := (*agreement.UnknownLayout)(nil); errors.As(err, &unknown) {
			if mt.full(c) || !mt.describe(now, c, unknown) {
				mt.refuse(now, in, peerv1.GrantReply_LIMIT, "too many grants wait for layouts already")
			}
			return true
		}
		if err != nil {
			mt.refuseFor(now, in, peerv1.GrantReply_PLAN, agreement.RefusalOf(err), err.Error())
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
	mt.sources.placed(now, s)
	c.src = s
	s.bindings = append(s.bindings, c)
	switch {
	case c.ended:
		mt.endBinding(now, c, engines.StatusOK, "")
	case plan != nil:
		mt.open(now, c, plan)
	}
	return true
}

// full reports whether the peer of a binding has too many that wait already.
func (mt *Matcher) full(c *partBinding) bool {
	return !c.asked && c.wait == nil && c.in.peer.Pending >= mt.Cfg.MaxPending
}

// unlike refuses the grant of c because its fingerprint differs from that of w, once the
// difference is known.
func (mt *Matcher) unlike(now Instant, c *partBinding, w *engines.Worker) {
	if mt.full(c) {
		mt.refuse(now, c.in, peerv1.GrantReply_FINGERPRINT, differ)
		return
	}
	mt.compare(now, c, w)
}

// open starts to send a part.
func (mt *Matcher) open(now Instant, c *partBinding, plan agreement.Plan) {
	in, s, m := c.in, c.src, c.in.msg
	snd := &Part{Worker: s.ws.Worker, Dest: in.id.Dest, Key: in.key, Prompt: m.Tokens, Skip: m.Skip,
		Tokens: c.part.TokensByTransport, Plan: plan}
	snd.Origin.Peer, snd.Origin.Slot, snd.Origin.Gen = in.peer.Boot, transfer.Slot(c.part.Slot),
		transfer.Gen(c.part.Gen)
	snd.src, snd.peer, snd.binding, snd.opened = s, in.peer, c, now
	snd.record = recordOf(now, in)
	var deadline Instant
	if m.DeadlineMs > 0 {
		deadline = now + min(time.Duration(m.DeadlineMs)*time.Millisecond, frame.MaxDeadline)
	}
	snd.flow = mt.Spray.Open(in.peer.Rails, spray.Priority(min(m.Priority, uint32(spray.Background))),
		deadline, plan.Space(), snd)
	snd.at = mt.rails.Place(in.peer, s.ws.Worker, m.Distances)
	snd.flow.SetPlace(snd.at)
	in.peer.Moves(snd.at, 1)
	snd.readyTo = make([]uint32, plan.Space().NumSegments())
	c.snd = snd
	s.sends = append(s.sends, snd)
	mt.sources.follow(s.ws, 1)
	// The slices leave first: the receiver needs this reply only once they have landed.
	mt.out.SendLate(in.peer.Boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{
		GrantReply: &peerv1.GrantReply{Destination: frame.Lease(in.id.Dest), Source: frame.Lease(s.ID),
			Code: peerv1.GrantReply_BOUND, Rank: c.part.Rank, Gen: m.Gen}}})
	mt.sources.prepare(snd)
	for l := range s.layers {
		mt.sources.release(snd, l)
	}
}

// recordOf begins the record of a send.
func recordOf(now Instant, in *inboundGrant) core.Send {
	r := core.Send{Dest: in.id.Dest, Peer: in.id.Peer, Bound: now}
	if t := in.msg.Traceparent; len(t) <= engines.MaxTraceparent {
		r.Traceparent = string(t)
	}
	return r
}

// refuse refuses a grant for good. The receiver gives up, so its places are free.
func (mt *Matcher) refuse(now Instant, in *inboundGrant, code peerv1.GrantReply_Code,
	message string) {
	mt.refuseFor(now, in, code, agreement.ByCode(code), message)
}

func (mt *Matcher) refuseFor(now Instant, in *inboundGrant, code peerv1.GrantReply_Code,
	why agreement.Refusal,
	message string) {
	mt.refused[why]++
	if code == peerv1.GrantReply_FINGERPRINT || code == peerv1.GrantReply_PLAN {
		mt.sources.refusedAll(now, in.peer.Boot, in.key)
	}
	mt.out.Send(in.peer.Boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{
		GrantReply: &peerv1.GrantReply{
			Destination: frame.Lease(in.id.Dest), Code: code, Message: message, Gen: in.msg.Gen}}})
	if mt.grants[in.id] == in {
		mt.endInbound(now, in, engines.StatusFailed, message)
	}
	// An earlier grant of the lease may still hold places.
	for _, s := range slices.Clone(mt.sources.byKey[in.key]) {
		s.trouble = frame.CodeName(code) + ": " + message
		if s.Has(in.id) {
			mt.sources.served(now, s, s.End(in.id, false), engines.StatusFailed, message)
		}
	}
}

// drop deletes a grant.
func (mt *Matcher) drop(in *inboundGrant) {
	if mt.grants[in.id] == in {
		delete(mt.grants, in.id)
		mt.grantsOf.Remove(in.id.Peer, in)
	}
	mt.present(in)
	if in.wait != nil {
		mt.pending.drop(in.wait)
	}
}

// forget deletes a grant that is bound to nothing and waits for nothing.
func (mt *Matcher) forget(in *inboundGrant) {
	if mt.grants[in.id] != in || in.wait != nil {
		return
	}
	for _, c := range in.bindings {
		if c.src != nil || c.wait != nil || c.asked {
			return
		}
	}
	mt.drop(in)
}

// suspend ends what a grant moves and waits for, and keeps its places.
func (mt *Matcher) suspend(now Instant, in *inboundGrant) {
	for _, c := range in.bindings {
		if c.wait != nil {
			mt.pending.drop(c.wait)
		}
		if c.snd != nil {
			mt.sources.endSending(now, c.snd)
		}
	}
}

// replace ends an older grant of a destination lease, and keeps its places for the newer grant g.
func (mt *Matcher) replace(now Instant, in *inboundGrant, g lease.GrantID) {
	mt.drop(in)
	mt.suspend(now, in)
	for _, c := range in.bindings {
		if c.src == nil {
			continue
		}
		c.src.Rename(in.id, g)
		c.src.bindings = index.Remove(c.src.bindings, c)
		c.src = nil
	}
}

// endInbound ends a grant: its destination lease needs nothing more of our engine.
// It ends with StatusOK (committed), StatusCancelled (the receiver canceled it, which is no
// failure of this side) or StatusFailed.
func (mt *Matcher) endInbound(now Instant, in *inboundGrant, status uint16, why string) {
	mt.drop(in)
	committed := status == engines.StatusOK
	for _, c := range in.bindings {
		switch {
		case c.src != nil:
			mt.endBinding(now, c, status, why)
		case c.wait != nil && committed:
			c.ended = true // the late intent of a rank that sends nothing takes its place and frees it
		case c.wait != nil:
			mt.pending.drop(c.wait)
		}
	}
}

// endBinding ends the binding of one rank.
func (mt *Matcher) endBinding(now Instant, c *partBinding, status uint16, why string) {
	committed := status == engines.StatusOK
	s, snd := c.src, c.snd
	c.src, c.snd = nil, nil
	s.bindings = index.Remove(s.bindings, c)
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
			mt.sources.confirmFlights(now, snd)
			s.bytes += snd.Plan.Space().TotalBytes()
		}
		for i, v := range snd.moved {
			s.last.Moved[i] += v
		}
		snd.committed = committed
		mt.sources.endSending(now, snd)
	}
	mt.sources.served(now, s, last, status, why)
}

func (mt *Matcher) OnCommit(now Instant, p *lanes.Peer, m *peerv1.Commit) error {
	id, err := frame.LeaseID(m.Destination)
	if err != nil {
		return err
	}
	if in := mt.grants[lease.GrantID{Peer: p.Boot, Dest: id}]; in != nil {
		mt.endInbound(now, in, engines.StatusOK, "")
	}
	return nil
}

func (mt *Matcher) OnRevoke(now Instant, p *lanes.Peer, m *peerv1.Revoke) error {
	id, err := frame.LeaseID(m.Destination)
	if err != nil {
		return fmt.Errorf("revoke: %w", err)
	}
	g := lease.GrantID{Peer: p.Boot, Dest: id}
	in := mt.grants[g]
	if in == nil {
		return mt.onDecline(now, p, g, m)
	}
	if int32(m.Gen-in.msg.Gen) < 0 { // they wrap
		return nil // a replay: it names the last grant that was made
	}
	mt.endInbound(now, in, engines.StatusCancelled, gaveUp+m.Reason)
	return nil
}

const gaveUp = "the receiver gave up: "
