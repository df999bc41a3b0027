package place

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/placement"
)

// described is a sidecar's answer: a store with some tiers, of pages of 16 tokens.
func described(shared bool, tiers ...nodeapi.StoreTier) *nodeapi.Store {
	s := &nodeapi.Store{Tiers: tiers, Stored: 1,
		Namespaces: []nodeapi.StoreNamespace{{PageTokens: 16, PageBytes: 16 * defaultKV, Pools: 1}}}
	if shared {
		s.Directory = &nodeapi.StoreDirectory{Kind: "embedded"}
	}
	return s
}

// talk is a chat whose text has a prompt, and perhaps an answer and a question after it.
func talk(prompt, answer, question int) *Request {
	r := &Request{Text: text(prompt, 'p'), End: prompt}
	if answer > 0 {
		r.Text = slices.Concat(r.Text, text(answer, 'a'), text(question, 'q'))
		r.Answers = Answers{Count: 1, From: prompt, To: prompt + answer, Bytes: answer}
		r.End = len(r.Text)
	}
	return r
}

// serve decides for a request, and takes its answer.
func serve(t *testing.T, p *fleet, r *Request, at time.Duration) *Decision {
	t.Helper()
	d := decide(t, p, r, at)
	p.Prefilled(d, true, began.Add(at+time.Second))
	p.Answered(d, true, true, began.Add(at+time.Second))
	p.Ended(d, began.Add(at+2*time.Second))
	return d
}

const memoryStore = "memory"

// P's second turn loads the answer, which D has saved, and computes only the question.
func TestTheAnswerIsBackAtThePrefillEngine(t *testing.T) {
	const prompt, answer, question = 40_960, 20_480, 2048
	for _, stored := range []bool{false, true} {
		p := newPlacer(t, Config{Policy: Fetch}, 1, 1)
		for i := range 2 {
			if stored {
				p.Stored(i, fmt.Sprint("node ", i), described(true, nodeapi.StoreTier{Name: memoryStore},
					nodeapi.StoreTier{Name: "peer"}))
			}
		}
		if d := serve(t, p, talk(prompt, 0, 0), 0); d.Choice.Loaded != 0 || d.Choice.Reused != 0 ||
			d.Load != -1 {
			t.Fatalf("first turn: %+v", d)
		}
		d := serve(t, p, talk(prompt, answer, question), 10*time.Second)
		if d.Prefill != 0 || d.Choice.Kind != placement.Pair {
			t.Fatalf("%+v", d)
		}
		// A token has four bytes of text.
		computed, loaded, tier := (answer+question)/4, 0, ""
		if stored {
			computed, loaded, tier = question/4, answer/4, "peer"
		}
		if c := d.Choice; c.Computed != computed || c.Loaded != loaded || d.Tier != tier || d.Load != -1 {
			t.Errorf("stored %v: %+v", stored, d)
		}
		// D has the answer, too: only the question moves.
		if d.Choice.Moved != question/4 {
			t.Errorf("%d tokens move", d.Choice.Moved)
		}
	}
}

// A store that is slower than the engine is not used, and the engine's connector is bounded.
func TestASlowStoreIsLeftOut(t *testing.T) {
	c := &placement.Calibration{Fabrics: []placement.Fabric{
		{Name: "store-object", Fixed: 60, Rate: 1e3}, {Name: "store-memory", Fixed: 0.001, Rate: 1e10}}}
	p := newPlacer(t, Config{Policy: Auto, Calibration: c}, 0, 2)
	for i := range 2 {
		p.Stored(i, fmt.Sprint("node ", i), described(false,
			nodeapi.StoreTier{Name: memoryStore, EvictionAge: 100}, nodeapi.StoreTier{Name: "object"}))
	}
	first := serve(t, p, talk(40_960, 0, 0), 0)
	p.Lost(first.Decode) // its own cache is gone, the store of its node is not
	d := serve(t, p, talk(40_960, 4096, 4096), 10*time.Second)
	if d.Choice.Kind != placement.Load || d.Tier != memoryStore || d.Decode != first.Decode ||
		d.Load != -1 || d.Choice.Loaded != (40_960+4096)/4 {
		t.Errorf("from memory: %+v", d)
	}
	for i := range 2 {
		p.Lost(i)
	}
	// By now the pages have left the memory.
	r := talk(49_152, 4096, 4096) // the second turn is its prompt
	copy(r.Text[40_960:], text(4096, 'a'))
	copy(r.Text[45_056:], text(4096, 'q'))
	d = decide(t, p, r, 500*time.Second)
	if d.Choice.Kind != placement.Run || d.Load != 0 || d.Tier != "" {
		t.Errorf("from the object store: %+v", d)
	}
}

// What no tier has any more is no hit.
func TestPagesThatHaveLeftTheStore(t *testing.T) {
	p := newPlacer(t, Config{Policy: Auto}, 0, 1)
	p.Stored(0, "node", described(true, nodeapi.StoreTier{Name: memoryStore, EvictionAge: 5},
		nodeapi.StoreTier{Name: "disk", EvictionAge: 50}))
	serve(t, p, talk(40_960, 0, 0), 0)
	p.Lost(0)
	for _, c := range []struct {
		at   time.Duration
		tier string
	}{{6 * time.Second, memoryStore}, {40 * time.Second, "disk"}, {100 * time.Second, ""}} {
		d := decide(t, p, talk(40_960, 4096, 512), c.at)
		if d.Tier != c.tier || (d.Choice.Loaded > 0) != (c.tier != "") {
			t.Errorf("after %v: %+v", c.at, d)
		}
		p.Ended(d, began.Add(c.at))
		p.Lost(0)
	}
}

// Engines of one sidecar share a store, and read no other node's without a directory.
func TestStoresOfNodes(t *testing.T) {
	for _, shared := range []bool{false, true} {
		p := newPlacer(t, Config{Policy: Auto}, 0, 3)
		for i, node := range []string{"a", "a", "b"} {
			p.Stored(i, node, described(shared, nodeapi.StoreTier{Name: memoryStore},
				nodeapi.StoreTier{Name: "peer"}))
		}
		if len(p.homes) != 2 {
			t.Fatalf("%d stores", len(p.homes))
		}
		for i, want := range []string{memoryStore, memoryStore, "peer"} {
			if !shared && i == 2 {
				want = ""
			}
			p.Placer.add(p.keys(talk(40_960, 0, 0)), 0)
			p.Lost(0)
			p.roles = make([]placement.Role, 3)
			p.roles[i] = placement.Both
			d := decide(t, p, talk(40_960, 0, 0), 0)
			if d.Tier != want {
				t.Errorf("shared %v, engine %d: %+v", shared, i, d)
			}
			p.Ended(d, began)
			for j := range 3 {
				p.Lost(j)
				p.young.RemoveAll(storeOf(j))
			}
		}
	}
}

// Loads that have moved little count with later ones.
func TestLoadsAreMeasured(t *testing.T) {
	p := newPlacer(t, Config{Policy: Auto}, 0, 1)
	report := func(gets, bytes uint64, seconds float64) float64 {
		p.Stored(0, "a", described(false, nodeapi.StoreTier{Name: memoryStore, Gets: gets,
			GetBytes: bytes, GetSeconds: seconds}))
		return network{p.Placer}.Path(1, 0).Rate
	}
	if rate := report(0, 0, 0); rate != defaultLoads[memory].Rate {
		t.Errorf("without a measurement: %v", rate)
	}
	if rate := report(1, 1000, 0.1); rate != defaultLoads[memory].Rate {
		t.Errorf("after a few bytes: %v", rate)
	}
	// 2 GB in a second, besides the fixed times of ten loads.
	if rate := report(10, 2e9, 1+10*defaultLoads[memory].Fixed); rate < 1.99e9 || rate > 2.01e9 {
		t.Errorf("%v", rate)
	}
	before := p.stores[0].loads[memory].rate
	if rate := report(20, 2e9+1e9, 2); rate >= before {
		t.Errorf("slower loads: %v after %v", rate, before)
	}
	if rate := report(1, 4e9, 1); !(rate > 1e9) { // another process
		t.Errorf("%v", rate)
	}
	s := described(false, nodeapi.StoreTier{Name: memoryStore})
	s.Namespaces[0].PageBytes /= 4 // of one of four ranks
	p.Stored(0, "a", s)
	if got := p.stores[0].parts; got != 4 {
		t.Errorf("%v", got)
	}
	for _, none := range []*nodeapi.Store{nil, {}, {Namespaces: []nodeapi.StoreNamespace{{}}}} {
		if p.Stored(0, "a", none); len(p.homes) != 0 {
			t.Errorf("%+v is used", none)
		}
	}
}

// The mean of a conversation's answers, its length, and hints give what a next turn needs.
func TestExpectedAnswers(t *testing.T) {
	p := newPlacer(t, Config{Policy: Auto}, 0, 1)
	for _, c := range []struct {
		r    Request
		want float64
	}{
		{Request{}, 0},
		{Request{End: 100}, firstAnswer * continues[0]},
		{Request{End: 100, MaxAnswer: 10}, 10 * continues[0]},
		{Request{End: 100, Continues: true}, firstAnswer},
		{Request{End: 9000, Answers: Answers{Count: 2, From: 10, To: 10 + 4*firstAnswer, Bytes: 8000}},
			1000 * continues[2]},
		{Request{End: 9000, Answers: Answers{Count: 99, From: 10, To: 10 + 4*firstAnswer,
			Bytes: 99 * 400}}, 100 * continues[len(continues)-1]},
	} {
		if got := p.next(&c.r); got < c.want*0.999 || got > c.want*1.001 {
			t.Errorf("%+v: %v, want %v", c.r, got, c.want)
		}
	}
}

func TestTurnsAreBounded(t *testing.T) {
	var x turns
	for i := range 5 * maxTurns / 2 {
		x.put(uint64(i), turn{engine: i})
	}
	if n := len(x.young) + len(x.old); n > 2*maxTurns {
		t.Errorf("%d turns", n)
	}
	if got, ok := x.get(5*maxTurns/2 - 1); !ok || got.engine != 5*maxTurns/2-1 {
		t.Error("the last turn is forgotten")
	}
	if _, ok := x.get(0); ok {
		t.Error("the first turn is still there")
	}
}
