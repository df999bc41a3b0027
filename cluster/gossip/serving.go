package gossip

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/transfer"
)

// A member's Serving does not fit into memberlist's metadata, which has only its revision. If a
// router lacks a revision, it asks the member over memberlist's encrypted streams. The member then
// also sends that router each later Serving directly, because a revision takes a few rounds of
// gossip to arrive. Only routers keep the Serving of others.
const (
	askEvery    = 500 * time.Millisecond // between two requests to one member
	askLook     = 100 * time.Millisecond // between two searches for members to ask
	maxRouters  = 64                     // that get each change directly; others ask for each revision
	maxPost     = 1024                   // messages that wait
	postAtOnce  = 16                     // messages being sent
	maxServed   = 1024                   // members whose Serving a router keeps
	loadEvery   = time.Second            // between two messages about a changed load
	loadAgain   = 10                     // loadEvery until an unchanged load is sent again
	keepLost    = 10 * time.Minute       // a Serving after its member is lost
	maxRevision = 1<<63 - 1
)

// serving is a part of self. In a member it has the member's Serving, and the routers that get it.
// In a router it has the Serving of each member.
type serving struct {
	observe   bool
	revision  uint64 // 0: no Serving yet
	own       cluster.Serving
	asked     []string // names of routers in memberlist, the last one that asked at the end
	post      *post
	lastLoad  []uint32 // that was sent
	sinceLoad int      // loadEvery since then; 0: send it

	routers map[string]string // addresses of nodes without a boot, by memberlist's name
	wanted  map[string]wanted // by memberlist's name
	have    map[string]have   // likewise
	early   map[string]early  // likewise
}

type wanted struct {
	revision uint64
	asked    time.Time
}

type have struct {
	revision uint64
	member   cluster.Member
	serving  cluster.Serving
	lost     time.Time // when it was lost; zero: it is a member
}

// early is the load of a revision that has not come yet: datagrams overtake streams.
type early struct {
	revision uint64
	leases   []uint32 // at most cluster.MaxAPIs
}

func newServing(observe bool) serving {
	return serving{observe: observe, post: newPost(), routers: map[string]string{},
		wanted: map[string]wanted{}, have: map[string]have{}, early: map[string]early{}}
}

// wantLocked notes the newest revision of a member's Serving.
func (s *serving) wantLocked(name string, revision uint64) {
	switch _, known := s.wanted[name]; {
	case !s.observe || revision == 0 || revision > maxRevision:
	case !known && len(s.wanted) >= maxServed && !s.dropLostLocked(): // until a member leaves
	default:
		w := s.wanted[name]
		s.wanted[name] = wanted{max(w.revision, revision), w.asked}
	}
	if h, ok := s.have[name]; ok {
		h.lost = time.Time{}
		s.have[name] = h
	}
}

// loseLocked handles the loss of a member. Its engines may still run, for example during a restart
// of the sidecar, which the router's health checks detect.
func (s *serving) loseLocked(name string, now time.Time) {
	h, ok := s.have[name]
	s.forgetLocked(name)
	if ok && len(h.serving.APIs) > 0 {
		h.lost = now
		s.have[name] = h
		s.wanted[name] = wanted{revision: h.revision}
	}
}

// dropLostLocked forgets the member that was lost first; false: all are there.
func (s *serving) dropLostLocked() bool {
	first := ""
	for name, h := range s.have {
		if !h.lost.IsZero() && (first == "" || h.lost.Before(s.have[first].lost)) {
			first = name
		}
	}
	if first == "" {
		return false
	}
	s.forgetLocked(first)
	return true
}

func (s *serving) forgetLocked(name string) {
	delete(s.wanted, name)
	delete(s.have, name)
	delete(s.early, name)
	delete(s.routers, name)
	s.asked = slices.DeleteFunc(s.asked, func(x string) bool { return x == name })
}

// dueLocked lists the members to ask.
func (s *serving) dueLocked(now time.Time) (names []string) {
	for name, h := range s.have {
		if !h.lost.IsZero() && now.Sub(h.lost) > keepLost {
			s.forgetLocked(name)
		}
	}
	for name, w := range s.wanted {
		if s.have[name].revision < w.revision && now.Sub(w.asked) >= askEvery {
			names = append(names, name)
			s.wanted[name] = wanted{w.revision, now}
		}
	}
	return names
}

// askedLocked adds a router to those that get each change.
func (s *serving) askedLocked(name string) {
	s.asked = slices.DeleteFunc(s.asked, func(x string) bool { return x == name })
	if len(s.asked) >= maxRouters {
		s.asked = s.asked[1:]
	}
	s.asked = append(s.asked, name)
	s.sinceLoad = 0
}

// tookLocked stores the Serving of a member, and reports whether it is newer than the stored one.
func (d *self) tookLocked(m *peerv1.Serving) bool {
	for name, x := range d.members {
		if string(x.Boot[:]) != string(m.Boot) {
			continue
		}
		s := &d.serving
		if _, known := s.wanted[name]; !known || m.Revision <= s.have[name].revision ||
			m.Revision > maxRevision {
			return false
		}
		s.have[name] = have{revision: m.Revision, member: x, serving: servingOf(m)}
		if load := s.early[name]; load.revision <= m.Revision {
			delete(s.early, name)
			s.loadedLocked(name, load)
		}
		return true
	}
	return false
}

// loadLocked takes the load of a member's engines. It wakes no waiting reader: routers poll it.
func (d *self) loadLocked(m *peerv1.Load) {
	s := &d.serving
	for name, x := range d.members {
		if _, known := s.wanted[name]; !known || string(x.Boot[:]) != string(m.Boot) ||
			m.Revision > maxRevision || len(m.Leases) > cluster.MaxAPIs {
			continue
		}
		if load := (early{m.Revision, m.Leases}); load.revision > s.have[name].revision {
			s.early[name] = load
		} else {
			s.loadedLocked(name, load)
		}
	}
}

// loadedLocked adds a load to the Serving that it belongs to.
func (s *serving) loadedLocked(name string, load early) {
	h := s.have[name]
	if load.revision != h.revision || len(load.leases) != len(h.serving.APIs) {
		return
	}
	h.serving.APIs = slices.Clone(h.serving.APIs) // readers have the old one
	for i, n := range load.leases {
		h.serving.APIs[i].Leases = int(n)
	}
	s.have[name] = h
}

// dueLoadLocked is the load to send now; nil: none. It is called every loadEvery.
func (s *serving) dueLoadLocked() []uint32 {
	now := make([]uint32, 0, len(s.own.APIs))
	for _, a := range s.own.APIs {
		now = append(now, uint32(max(a.Leases, 0)))
	}
	if s.sinceLoad++; len(now) == 0 || len(s.asked) == 0 ||
		s.sinceLoad > 1 && s.sinceLoad <= loadAgain && slices.Equal(now, s.lastLoad) {
		return nil
	}
	s.lastLoad, s.sinceLoad = now, 1
	return now
}

// servingOf reads a Serving of another process, and leaves out what exceeds the bounds.
func servingOf(m *peerv1.Serving) cluster.Serving {
	out := cluster.Serving{Leaving: m.Leaving, Started: time.UnixMilli(m.Started)}
	if len(m.Http) <= cluster.MaxURLBytes {
		out.HTTP = m.Http
	}
	for _, a := range m.Apis {
		if len(out.APIs) == cluster.MaxAPIs {
			break
		}
		if a.Url == "" || len(a.Url) > cluster.MaxURLBytes || long(a.Role) || long(a.Engine) {
			continue
		}
		x := cluster.API{URL: a.Url, Role: a.Role, Engine: a.Engine, World: int(a.World), Leases: -1}
		if !long(a.Version) {
			x.Version = a.Version
		}
		if len(a.Fingerprint) == fingerprintBytes {
			x.Fingerprint = hex.EncodeToString(a.Fingerprint)
		}
		if len(a.Events) <= cluster.MaxURLBytes && len(a.Replay) <= cluster.MaxURLBytes {
			x.Events, x.Replay = a.Events, a.Replay
		}
		ranks := slices.DeleteFunc(a.Ranks, long)
		x.Ranks = ranks[:min(len(ranks), cluster.MaxRanks)]
		out.APIs = append(out.APIs, x)
	}
	return out
}

const fingerprintBytes = 32

// messageOf encodes a Serving, with as many of its APIs as fit.
func messageOf(boot transfer.Boot, revision uint64, s *cluster.Serving) ([]byte, error) {
	m := &peerv1.Serving{Boot: boot[:], Revision: revision, Http: s.HTTP, Leaving: s.Leaving,
		Started: s.Started.UnixMilli()}
	for _, a := range s.APIs[:min(len(s.APIs), cluster.MaxAPIs)] {
		print, _ := hex.DecodeString(a.Fingerprint)                           // another form: unknown
		valid := func(s string) string { return strings.ToValidUTF8(s, "?") } // engines name them
		m.Apis = append(m.Apis, &peerv1.Api{Url: valid(a.URL), Role: a.Role, Engine: valid(a.Engine),
			Version: valid(a.Version), Fingerprint: print, World: uint32(a.World), Ranks: a.Ranks,
			Events: valid(a.Events), Replay: valid(a.Replay)})
	}
	for {
		b, err := proto.Marshal(&peerv1.GossipMessage{
			Body: &peerv1.GossipMessage_Serving{Serving: m}})
		if err != nil {
			return nil, fmt.Errorf("gossip: serving: %w", err)
		}
		if len(b) <= cluster.MaxServing || len(m.Apis) == 0 {
			return b, nil
		}
		m.Apis = m.Apis[:len(m.Apis)-1]
	}
}

// post is the queue of routers that get the Serving.
type post struct {
	wake chan struct{}

	mu      sync.Mutex // protects all below
	pending []string   // names of routers
}

func newPost() *post { return &post{wake: make(chan struct{}, 1)} }

// add queues routers, at most maxPost. A router that was left out asks again when it gets the
// revision by gossip.
func (p *post) add(names ...string) {
	p.mu.Lock()
	for _, n := range names {
		if len(p.pending) < maxPost && !slices.Contains(p.pending, n) {
			p.pending = append(p.pending, n)
		}
	}
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

func (p *post) take() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := p.pending
	p.pending = nil
	return out
}

// NotifyMsg handles a message of a node that has the key. memberlist's reader waits for its return.
func (d *self) NotifyMsg(b []byte) {
	var m peerv1.GossipMessage
	if len(b) > cluster.MaxServing || proto.Unmarshal(b, &m) != nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch body := m.Body.(type) {
	case *peerv1.GossipMessage_Ask:
		if _, known := d.serving.routers[body.Ask]; known && d.serving.revision > 0 {
			d.serving.askedLocked(body.Ask)
			d.serving.post.add(body.Ask)
		}
	case *peerv1.GossipMessage_Serving:
		if d.tookLocked(body.Serving) {
			d.notifyLocked()
		}
	case *peerv1.GossipMessage_Load:
		d.loadLocked(body.Load)
	}
}

// deliver sends the Serving to queued routers, and asks members for theirs, until ctx ends.
func (g *Gossip) deliver(ctx context.Context) {
	var sent sync.WaitGroup
	defer sent.Wait()
	slots := make(chan struct{}, postAtOnce)
	send := func(name string, message func() ([]byte, error)) bool {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return false
		}
		sent.Go(func() {
			defer func() { <-slots }()
			g.send(name, message)
		})
		return true
	}
	look, load := time.NewTicker(askLook), time.NewTicker(loadEvery)
	defer look.Stop()
	defer load.Stop()
	if g.self.serving.observe {
		load.Stop()
	} else {
		look.Stop()
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.self.serving.post.wake:
			for _, name := range g.self.serving.post.take() {
				if !send(name, g.self.message) {
					break
				}
			}
		case <-load.C:
			g.sendLoad()
		case now := <-look.C:
			g.self.mu.Lock()
			due := g.self.serving.dueLocked(now)
			g.self.mu.Unlock()
			for _, name := range due {
				if !send(name, g.question) {
					return
				}
			}
		}
	}
}

// message encodes this member's present Serving.
func (d *self) message() ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return messageOf(d.member.Boot, d.serving.revision, &d.serving.own)
}

func (g *Gossip) question() ([]byte, error) {
	return proto.Marshal(&peerv1.GossipMessage{ //nolint:wrapcheck // of two fields
		Body: &peerv1.GossipMessage_Ask{Ask: g.list.LocalNode().Name}})
}

// send sends one message to a node of the membership. If it is lost, the router asks again.
func (g *Gossip) send(name string, message func() ([]byte, error)) {
	g.self.mu.Lock()
	to := g.self.nodeLocked(name)
	g.self.mu.Unlock()
	if b, err := message(); err == nil && to != nil {
		_ = g.list.SendReliable(to, b) // the revision makes the router ask again
	}
}

// nodeLocked is a node as memberlist wants it; nil: it has left.
func (d *self) nodeLocked(name string) *memberlist.Node {
	at, router := d.serving.routers[name]
	if !router {
		at = d.members[name].Address
	}
	addr, err := netip.ParseAddrPort(at)
	if err != nil {
		return nil
	}
	return &memberlist.Node{Name: name, Addr: addr.Addr().AsSlice(), Port: addr.Port()}
}

// sendLoad sends the load of this member's engines to the routers that get its Serving.
func (g *Gossip) sendLoad() {
	d := g.self
	d.mu.Lock()
	m := &peerv1.Load{Boot: d.member.Boot[:], Revision: d.serving.revision,
		Leases: d.serving.dueLoadLocked()}
	var to []*memberlist.Node
	for _, name := range d.serving.asked {
		if n := d.nodeLocked(name); n != nil && m.Leases != nil {
			to = append(to, n)
		}
	}
	b, err := proto.Marshal(&peerv1.GossipMessage{Body: &peerv1.GossipMessage_Load{Load: m}})
	d.mu.Unlock() // the message has the member's own boot
	if err != nil {
		return // impossible: the message has numbers and bytes alone
	}
	for _, n := range to {
		_ = g.list.SendBestEffort(n, b) // the next one replaces it
	}
}

// Serve implements cluster.Cluster.
func (g *Gossip) Serve(s cluster.Serving) {
	d := g.self
	d.mu.Lock()
	before, err := messageOf(d.member.Boot, 0, &d.serving.own)
	after, err2 := messageOf(d.member.Boot, 0, &s)
	if err != nil || err2 != nil || string(before) == string(after) ||
		d.serving.revision == 0 && len(s.APIs) == 0 {
		if err == nil && err2 == nil {
			d.serving.own.APIs = s.APIs // their load
		}
		d.mu.Unlock()
		return
	}
	d.serving.own, d.serving.sinceLoad = s, 0
	d.serving.revision++
	if b, err := encode(d.member, d.serving.revision); err == nil {
		d.meta = b
	}
	d.serving.post.add(d.serving.asked...)
	d.mu.Unlock()
	g.announce()
}

// Served implements cluster.Fleet.
func (g *Gossip) Served() (out []cluster.Served) {
	d := g.self
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, h := range d.serving.have {
		if len(h.serving.APIs) > 0 {
			out = append(out, cluster.Served{Member: h.member, Serving: h.serving,
				Lost: !h.lost.IsZero()})
		}
	}
	return out
}

// Observe follows the members and what they serve, without being one: sidecars count a node without
// a boot as none.
func Observe(o Options) (*Gossip, error) {
	o.observe = true
	return Start(o, cluster.Member{Node: "router-" + rand.Text()}, admit.NewMembers())
}
