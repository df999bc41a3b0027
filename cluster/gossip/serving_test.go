package gossip

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/transfer"
)

func observer(t *testing.T, key []byte, join ...string) *Gossip {
	t.Helper()
	o := Options{Listen: "127.0.0.1:0", Join: join, Log: slog.New(slog.DiscardHandler)}
	if key != nil {
		o.Keys = [][]byte{key}
	}
	g, err := Observe(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Leave(); err != nil {
			t.Error(err)
		}
	})
	return g
}

func api(url string) cluster.API {
	return cluster.API{URL: url, Role: cluster.RoleDecode, Engine: "vllm/x", Version: "1", World: 2,
		Ranks: []string{"pp0/tp0", "pp0/tp1"}, Fingerprint: strings.Repeat("ab", 32),
		Events: "tcp://127.0.0.1:5557", Replay: "tcp://127.0.0.1:5558"}
}

// What members serve reaches each router, also what they served before it came, and each change.
// Routers are no members.
func TestServing(t *testing.T) {
	a := begun(t, nil)
	b := begun(t, nil, a.Address())
	started := time.Unix(1700000000, 0)
	one := cluster.Serving{HTTP: "http://127.0.0.1:7651", Started: started,
		APIs: []cluster.API{api("http://127.0.0.1:8000")}}
	b.Serve(one)
	routers := []*Gossip{observer(t, nil, a.Address()), observer(t, nil, b.Address())}
	sees := func(want cluster.Serving) func() bool {
		return func() bool {
			for _, r := range routers {
				list := r.Served()
				if len(list) != 1 || fmt.Sprint(list[0].Serving) != fmt.Sprint(want) || list[0].Lost ||
					list[0].Member.Address != b.Address() {
					return false
				}
			}
			return true
		}
	}
	poll(t, "routers have what was served before", sees(one))
	if len(a.Members()) != 2 || len(b.Members()) != 2 {
		t.Errorf("a router counts as a member: %v, %v", a.Members(), b.Members())
	}
	changed := routers[0].Changed()
	one.Leaving = true
	b.Serve(one)
	poll(t, "routers have the change", sees(one))
	<-changed
	b.Serve(cluster.Serving{Started: started})
	poll(t, "nothing is served", func() bool {
		return len(routers[0].Served())+len(routers[1].Served()) == 0
	})
}

// The load of a member's engines reaches routers without another revision, and is repeated.
func TestLoad(t *testing.T) {
	a := begun(t, nil)
	one := cluster.Serving{APIs: []cluster.API{api("http://127.0.0.1:8000"),
		api("http://127.0.0.1:8001")}}
	a.Serve(one)
	r := observer(t, nil, a.Address())
	sees := func(want ...int) func() bool {
		return func() bool {
			list := r.Served()
			return len(list) == 1 && len(list[0].APIs) == 2 && list[0].APIs[0].Leases == want[0] &&
				list[0].APIs[1].Leases == want[1]
		}
	}
	poll(t, "no load", sees(0, 0))
	before := r.Served()
	one.APIs = slices.Clone(one.APIs)
	one.APIs[1].Leases = 7
	a.Serve(one)
	poll(t, "a load", sees(0, 7))
	if before[0].APIs[1].Leases != 0 {
		t.Error("a list that was returned has changed")
	}
	a.self.mu.Lock()
	revision, s := a.self.serving.revision, newServing(false)
	a.self.mu.Unlock()
	if revision != 1 {
		t.Errorf("revision %d", revision)
	}
	s.own = one
	for i, want := range []bool{false, true, false, true, false} {
		switch i {
		case 1:
			s.askedLocked("r")
		case 3:
			s.own.APIs[0].Leases++
		}
		if got := s.dueLoadLocked(); (got != nil) != want {
			t.Errorf("%d: %v", i, got)
		}
	}
	sent := 0
	for range 3 * loadAgain {
		if s.dueLoadLocked() != nil {
			sent++
		}
	}
	if sent != 3 {
		t.Errorf("an unchanged load was repeated %d times in %d s", sent, 3*loadAgain)
	}
}

// A member sends its load while its engines change (for -race).
func TestLoadBesidePublish(t *testing.T) {
	a := begun(t, nil)
	a.Serve(cluster.Serving{APIs: []cluster.API{api("http://127.0.0.1:8000")}})
	r := observer(t, nil, a.Address())
	poll(t, "a router to send it to", func() bool { return len(r.Served()) == 1 })
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 100 {
			a.Publish([]string{fmt.Sprint(i)}, nil)
		}
	}()
	for range 100 {
		a.sendLoad()
	}
	<-done
}

// A load that overtakes its Serving counts once that has come. One of an older revision, or of
// another number of engines, does not.
func TestLoadBeforeItsServing(t *testing.T) {
	boot := transfer.Boot{1}
	d := &self{members: map[string]cluster.Member{"n": {Node: "n", Boot: boot}},
		changed: make(chan struct{}), serving: newServing(true)}
	g := &Gossip{self: d}
	d.serving.wantLocked("n", 1)
	serve := func(revision uint64) {
		d.tookLocked(&peerv1.Serving{Boot: boot[:], Revision: revision,
			Apis: []*peerv1.Api{{Url: "http://a:1", Role: "both"}, {Url: "http://a:2", Role: "both"}}})
	}
	load := func(revision uint64, leases ...uint32) {
		d.loadLocked(&peerv1.Load{Boot: boot[:], Revision: revision, Leases: leases})
	}
	sees := func(what string, want ...int) {
		t.Helper()
		got := g.Served()[0].APIs
		if got[0].Leases != want[0] || got[1].Leases != want[1] {
			t.Errorf("%s: %+v, want %v", what, got, want)
		}
	}
	load(1, 3, 4)
	serve(1)
	sees("before the first Serving", 3, 4)
	load(3, 5, 6)
	load(1, 7, 8)
	serve(2)
	sees("before a later one", -1, -1)
	serve(3)
	sees("at that one", 5, 6)
	load(2, 9, 9)
	load(maxRevision+1, 9, 9)
	load(4, 1)
	load(5, make([]uint32, cluster.MaxAPIs+1)...)
	serve(4)
	sees("another number of engines", -1, -1)
	if len(d.serving.early) != 0 {
		t.Errorf("%v is kept", d.serving.early)
	}
	load(9, 1, 1)
	d.serving.loseLocked("n", time.Now())
	if len(d.serving.early) != 0 {
		t.Errorf("%v is kept of a member that is lost", d.serving.early)
	}
}

// A router that misses a message asks again, because the revision of the metadata shows it.
func TestServingIsAskedAgain(t *testing.T) {
	a := begun(t, nil)
	a.Serve(cluster.Serving{APIs: []cluster.API{api("http://127.0.0.1:8000")}})
	r := observer(t, nil, a.Address())
	poll(t, "the first answer", func() bool { return len(r.Served()) == 1 })
	a.self.mu.Lock()
	a.self.serving.asked = nil // as if its table had been full
	a.self.mu.Unlock()
	a.Serve(cluster.Serving{APIs: []cluster.API{api("http://127.0.0.1:8001")}})
	poll(t, "the second answer", func() bool {
		list := r.Served()
		return len(list) == 1 && list[0].APIs[0].URL == "http://127.0.0.1:8001"
	})
}

// What a member served that has ended is marked, until the member is back, or for a while.
func TestServingOfLostMember(t *testing.T) {
	d := &self{members: map[string]cluster.Member{}, lost: map[string]lostMember{},
		changed: make(chan struct{}), serving: newServing(true)}
	g := &Gossip{self: d}
	m := cluster.Member{Node: "n", Boot: transfer.Boot{1}}
	now := time.Now()
	join := func() {
		d.members["n"] = m
		d.serving.wantLocked("n", 7)
	}
	take := func(revision uint64, apis ...*peerv1.Api) bool {
		return d.tookLocked(&peerv1.Serving{Boot: m.Boot[:], Revision: revision, Apis: apis})
	}
	x := &peerv1.Api{Url: "http://a:1", Role: "both"}
	join()
	if !take(7, x) || take(7, x) || take(6, x) {
		t.Error("only a newer revision is news")
	}
	lose := func() {
		delete(d.members, "n")
		d.serving.loseLocked("n", now)
	}
	lose()
	if list := g.Served(); len(list) != 1 || !list[0].Lost {
		t.Errorf("lost: %+v", list)
	}
	join()
	if list := g.Served(); len(list) != 1 || list[0].Lost {
		t.Errorf("back: %+v", list)
	}
	if due := d.serving.dueLocked(now); len(due) > 0 {
		t.Errorf("its revision is known, and it is asked: %v", due)
	}
	lose()
	d.serving.dueLocked(now.Add(keepLost + time.Second))
	if list := g.Served(); len(list) > 0 || len(d.serving.wanted) > 0 {
		t.Errorf("lost for long: %+v", list)
	}
	join()
	take(8)
	lose()
	if len(d.serving.have) > 0 {
		t.Error("a member that served nothing at its end is kept")
	}
}

// A member that publishes 10,000 engines costs a bound, in the message and in what a router keeps.
func TestServingIsBounded(t *testing.T) {
	var many cluster.Serving
	m := &peerv1.Serving{Boot: make([]byte, 16), Revision: 1,
		Http: strings.Repeat("h", cluster.MaxURLBytes+1)}
	for i := range 10000 {
		url := fmt.Sprintf("http://127.0.0.1:%d/%s", i, strings.Repeat("x", 200))
		many.APIs = append(many.APIs, api(url))
		m.Apis = append(m.Apis, &peerv1.Api{Url: url, Role: "both", Engine: "e",
			Version:     strings.Repeat("v", cluster.MaxNameBytes+1),
			Fingerprint: []byte("short"), Ranks: slices.Repeat([]string{"r"}, 100)})
	}
	m.Apis[0].Url, m.Apis[1].Role = strings.Repeat("u", cluster.MaxURLBytes+1),
		strings.Repeat("r", cluster.MaxNameBytes+1)
	for i := range many.APIs {
		many.APIs[i].Ranks = slices.Repeat([]string{strings.Repeat("r", 100)}, cluster.MaxRanks)
	}
	b, err := messageOf(transfer.Boot{1}, 1, &many)
	if err != nil || len(b) > cluster.MaxServing || len(b) < cluster.MaxServing/2 {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	s := servingOf(m)
	if len(s.APIs) != cluster.MaxAPIs || s.HTTP != "" || s.APIs[0].URL != m.Apis[2].Url ||
		s.APIs[0].Version != "" || s.APIs[0].Fingerprint != "" ||
		len(s.APIs[0].Ranks) != cluster.MaxRanks {
		t.Errorf("%d: %+v", len(s.APIs), s.APIs[0])
	}
	w := newServing(true)
	for i := range 2 * maxServed {
		w.wantLocked(fmt.Sprint(i), 1)
	}
	if len(w.wanted) != maxServed {
		t.Errorf("%d members", len(w.wanted))
	}
	broken := cluster.Serving{APIs: []cluster.API{{URL: "http://a", Engine: "\xff", Version: "\xff"}}}
	if b, err := messageOf(transfer.Boot{1}, 1, &broken); err != nil || len(b) == 0 {
		t.Errorf("an engine with a broken name hides those of its node: %v", err)
	}
	// In a full table new members get the places of those that were lost, the oldest first.
	for i, name := range []string{"7", "5"} {
		w.have[name] = have{revision: 1, serving: cluster.Serving{APIs: make([]cluster.API, 1)}}
		w.loseLocked(name, time.Unix(int64(i+1), 0))
	}
	for i, name := range []string{"new", "newer", "newest"} {
		w.wantLocked(name, 1)
		_, there := w.wanted[name]
		_, first := w.have["7"]
		_, second := w.have["5"]
		if there != (i < 2) || first || second != (i < 1) || len(w.wanted) != maxServed {
			t.Errorf("%s in a full table: %v; those that were lost: %v, %v", name, there, first, second)
		}
	}
	p := newPost()
	for i := range 2 * maxPost {
		p.add(fmt.Sprint(i))
	}
	if n := len(p.take()); n != maxPost {
		t.Errorf("%d messages wait", n)
	}
	for i := range 2 * maxRouters {
		w.askedLocked(fmt.Sprint(i))
	}
	if len(w.asked) != maxRouters || w.asked[maxRouters-1] != fmt.Sprint(2*maxRouters-1) {
		t.Errorf("%d routers", len(w.asked))
	}
}

// A router with another key gets nothing, and no member counts it.
func TestServingOfAnotherCluster(t *testing.T) {
	key := func(b byte) []byte { return slices.Repeat([]byte{b}, 32) }
	a := begun(t, key(1))
	a.Serve(cluster.Serving{APIs: []cluster.API{api("http://127.0.0.1:8000")}})
	foreign := observer(t, key(2), a.Address())
	poll(t, "it was asked", func() bool {
		return foreign.ask(t.Context(), a.Address()) != nil
	})
	good := observer(t, key(1), a.Address())
	poll(t, "a router with the key has it", func() bool { return len(good.Served()) == 1 })
	if len(foreign.Served())+len(foreign.Members()) > 0 {
		t.Errorf("%v", foreign.Served())
	}
	a.self.mu.Lock()
	defer a.self.mu.Unlock()
	if n := len(a.self.serving.routers); n != 1 {
		t.Errorf("%d routers", n)
	}
}

func FuzzMessage(f *testing.F) {
	s := cluster.Serving{HTTP: "http://a:1", APIs: []cluster.API{api("http://a:2")}}
	for _, leaving := range []bool{false, true} {
		s.Leaving = leaving
		b, err := messageOf(transfer.Boot{1}, 1, &s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	ask, err := proto.Marshal(&peerv1.GossipMessage{Body: &peerv1.GossipMessage_Ask{Ask: "r"}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(ask)
	load, err := proto.Marshal(&peerv1.GossipMessage{Body: &peerv1.GossipMessage_Load{
		Load: &peerv1.Load{Boot: []byte{1, 15: 0}, Revision: 1, Leases: []uint32{7}}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(load)
	f.Fuzz(func(t *testing.T, b []byte) {
		d := &self{members: map[string]cluster.Member{"n": {Boot: transfer.Boot{1}}},
			changed: make(chan struct{}), serving: newServing(true)}
		d.serving.wantLocked("n", 1)
		d.serving.routers["r"] = "127.0.0.1:1"
		d.NotifyMsg(b)
		for _, m := range (&Gossip{self: d}).Served() {
			if len(m.APIs) > cluster.MaxAPIs || len(m.HTTP) > cluster.MaxURLBytes {
				t.Errorf("%d APIs", len(m.APIs))
			}
			for _, a := range m.APIs {
				if a.URL == "" || len(a.URL) > cluster.MaxURLBytes || long(a.Role) || long(a.Engine) ||
					len(a.Ranks) > cluster.MaxRanks || len(a.Events) > cluster.MaxURLBytes ||
					len(a.Replay) > cluster.MaxURLBytes {
					t.Errorf("%+v", a)
				}
			}
		}
	})
}
