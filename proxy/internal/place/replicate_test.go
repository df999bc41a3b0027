package place

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvspray/kvspray/placement"
)

// both has engines that prefill and decode.
func both(t *testing.T, policy Policy, engines, after int) *fleet {
	t.Helper()
	p := newPlacer(t, Config{Policy: policy, Replicate: after,
		Calibration: &placement.Calibration{Fabrics: []placement.Fabric{
			{Name: PrefillLine, Fixed: 0.01, Rate: 4000}, {Name: LinkLine, Fixed: 0.001, Rate: 1e9}}}},
		engines, 0)
	for i := range p.roles {
		p.roles[i] = placement.Both
	}
	return p
}

// question is a prompt of a document and something of its own.
func question(doc byte, i int) *Request {
	return &Request{Text: append(text(40_000, doc), fmt.Sprintf("%600d", i)...)}
}

// begin takes a request to its first token: it then runs until it is ended.
func begin(p *fleet, d *Decision, at time.Duration) {
	p.Prefilled(d, true, began.Add(at))
	p.Answered(d, true, true, began.Add(at))
}

// When enough requests ask one holder, another engine gets one copy; then a third engine does. The
// bound holds for each policy that may choose a holder.
func TestHotPrefixIsCopiedOnce(t *testing.T) {
	for _, policy := range []Policy{Auto, Cache, Local} {
		const after = 4
		p := both(t, policy, 3, after)
		now := time.Duration(0)
		var copies []int
		var kinds []placement.Kind
		for i := range 3 * after {
			d := decide(t, p, question('a', i), now)
			if d.Replica {
				copies, kinds = append(copies, i), append(kinds, d.Choice.Kind)
				if d.Hot < 9000 || d.Askers < after {
					t.Errorf("%s: %+v", policy, d)
				}
			}
			now += time.Second // no queue is left: a policy sees no reason for another engine
			begin(p, d, now)
		}
		if len(copies) != 2 || copies[0] != after || copies[1] != 2*after {
			t.Errorf("%s: copies with requests %v", policy, copies)
		}
		want := placement.Pair
		if policy == Local {
			want = placement.Run
		}
		for _, k := range kinds {
			if k != want {
				t.Errorf("%s: copies are made by %v", policy, kinds)
			}
		}
		for e, list := range p.flying {
			if len(list) < after {
				t.Errorf("%s: engine %d has %d of %d requests", policy, e, len(list), 3*after)
			}
		}
		// All engines have it: none is left that needs a copy.
		if d := decide(t, p, question('a', 99), now); d.Replica {
			t.Errorf("%s: a copy although each engine has it: %+v", policy, d)
		}
	}
}

// A copy that did not arrive is none: the next asker tries again.
func TestCopyThatFailed(t *testing.T) {
	const after = 4
	p := both(t, Cache, 2, after)
	for i := range after {
		begin(p, decide(t, p, question('a', i), 0), 0)
	}
	for i := range 3 {
		d := decide(t, p, question('a', after+i), 0)
		if !d.Replica {
			t.Errorf("try %d makes no copy", i)
		}
		p.Prefilled(d, true, began)
		p.Answered(d, false, true, began) // another engine answered
		p.Ended(d, began)
	}
	d := decide(t, p, question('a', 9), 0)
	begin(p, d, 0)
	p.Ended(d, began)
	if d := decide(t, p, question('a', 10), 0); d.Replica || d.Choice.Reused < 9000 {
		t.Errorf("after the copy: %+v", d.Choice)
	}
}

// All ask at once: while the copy is on its way, no second one is made.
func TestHotPrefixIsCopiedOnceByAskersAtOnce(t *testing.T) {
	const after = 8
	p := both(t, Cache, 4, after)
	first := decide(t, p, question('a', 0), 0)
	begin(p, first, time.Second)
	copies := 0
	for i := range 2*after - 1 {
		if decide(t, p, question('a', i+1), time.Second).Replica {
			copies++
		}
	}
	if copies != 1 {
		t.Errorf("%d copies for %d askers", copies, 2*after)
	}
}

// A copy that its engine lost is made again, while there are askers. None is made of a prefix that
// is short, or that few ask for at one time, or where it takes longer than to compute.
func TestWhatIsNotCopied(t *testing.T) {
	const after = 4
	ask := func(p *fleet, make func(i int) *Request, n int, end bool) (copies int) {
		now := time.Duration(0)
		for i := range n {
			d := decide(t, p, make(i), now)
			if d.Replica {
				copies++
			}
			now += time.Second
			begin(p, d, now)
			if end {
				p.Ended(d, began.Add(now))
			}
		}
		return copies
	}
	doc := func(i int) *Request { return question('a', i) }
	p := both(t, Cache, 2, after)
	if n := ask(p, doc, 30, true); n != 0 {
		t.Errorf("%d copies for one asker at a time", n)
	}
	if n := ask(p, doc, after+1, false); n != 1 {
		t.Errorf("%d copies, want 1", n)
	}
	copied := 0
	for e, list := range p.flying {
		if len(list) == 1 {
			copied = e
		}
	}
	p.Lost(copied)
	p.flying[copied] = nil
	if n := ask(p, doc, 1, false); n != 1 {
		t.Errorf("%d copies after the loss of one", n)
	}

	short := func(i int) *Request {
		return &Request{Text: append(text(1800, 'a'), text(4000, byte(i))...)}
	}
	if n := ask(both(t, Cache, 2, after), short, 20, false); n != 0 {
		t.Errorf("%d copies of 450 tokens", n)
	}
	if n := ask(both(t, Cache, 2, -1), doc, 40, false); n != 0 {
		t.Errorf("%d copies although there should be none", n)
	}
	// The other engine is busy.
	p = both(t, Cache, 2, after)
	ask(p, doc, after, false)
	for e := range p.flying {
		if len(p.flying[e]) == 0 {
			p.accounts[e].work, p.accounts[e].queue = 1000, []*Decision{{work: 1000}}
			p.accounts[e].progress = began
		}
	}
	if n := ask(p, doc, 20, false); n != 0 {
		t.Errorf("%d copies on a busy engine", n)
	}
}

// An own part that only one asks for is not copied with what all share.
func TestOnlyWhatIsSharedIsHot(t *testing.T) {
	const after = 4
	p := both(t, Cache, 2, after)
	now := time.Duration(0)
	for i := range after {
		begin(p, decide(t, p, question('a', i), now), now)
		now += time.Second
	}
	d := decide(t, p, &Request{Text: append(text(40_000, 'a'), text(20_000, 'b')...)}, now)
	if !d.Replica || d.Hot < 9000 || d.Hot > 10_000 {
		t.Errorf("replica %v of %d tokens, want the 10,000 that all ask for", d.Replica, d.Hot)
	}
}

// An engine that prefills and decodes is one engine: it has one queue and one cache, and never
// sends to itself.
func TestEngineInBothListsIsOne(t *testing.T) {
	p := both(t, Auto, 2, 0)
	first := decide(t, p, question('a', 0), 0)
	if first.Choice.Kind != placement.Run || len(p.accounts) != 2 {
		t.Errorf("%+v", first)
	}
	begin(p, first, 3*time.Second)
	p.Ended(first, began.Add(3*time.Second))
	if d := decide(t, p, question('a', 1), 3*time.Second); d.Choice.Reused < 9000 {
		t.Errorf("%+v", d.Choice)
	}
	q := both(t, Fetch, 2, 0)
	for i := range 20 {
		d := decide(t, q, question(byte(i), 0), 0)
		if d.Prefill < 0 || d.Prefill == d.Decode {
			t.Errorf("%+v", d.Choice)
		}
	}
	p.Lost(first.Decode)
	if d := decide(t, p, question('a', 2), 9*time.Second); d.Choice.Reused != 0 {
		t.Errorf("a hit after its loss: %+v", d.Choice)
	}
}

// With a token for each byte, two chunks are a hot prefix. An engine without any of it lacks it.
func TestShortPrefixOfDenseText(t *testing.T) {
	const after = 4
	p := both(t, Cache, 2, after)
	for i := range after + 1 {
		r := &Request{Text: append(text(2*chunkBytes, 'a'), fmt.Sprintf("%500d", i)...)}
		r.Tokens = make([]uint32, len(r.Text))
		d := decide(t, p, r, 0)
		if d.Replica != (i == after) {
			t.Errorf("request %d: a copy: %v, %+v", i, d.Replica, d.Choice)
		}
		begin(p, d, 0)
	}
}
