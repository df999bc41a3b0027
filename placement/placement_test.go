package placement

import (
	"math"
	"strings"
	"testing"
)

func near(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if math.Abs(got-want) > tolerance*want {
		t.Errorf("%s: %.4g, want %.4g", what, got, want)
	}
}

// The model of rows has these points with its built-in parameters.
func TestRowsHaveThePublishedPoints(t *testing.T) {
	r := MLA27()
	fabrics := PublishedFabrics()
	ibgda := fabrics[0]
	near(t, "rows at which 2,048 tokens are as many bytes", r.EvenRows(2048), 1080, 0.001)
	near(t, "the same of 512 tokens", r.EvenRows(512), 270, 0.001)
	near(t, "bytes of a layer", r.LayerBytes(2048), 2.36e6, 0.001)
	near(t, "bytes of all layers", 27*r.LayerBytes(2048), 64e6, 0.01)
	near(t, "rate below which the splice alone is faster", r.SpliceRate(256), 0.19e9, 0.02)
	near(t, "fetch without the splice", r.Fetch(ibgda, 2048)-r.Splice, 2.5e-3, 0.02)
	near(t, "1,024 rows, which took 116 us", r.Wire(ibgda, 1024), 116e-6, 0.10)
	for _, f := range fabrics {
		// 31 to 48 us were measured, with the errors of the two constants.
		if w := r.Wire(f, 256); w < 31e-6*(1-f.Error) || w > 48e-6*(1+f.Error) {
			t.Errorf("%s: 256 rows take %v s", f.Name, w)
		}
	}
	r.Local = 1.5e-6
	r.Splice = 2.77e-3
	near(t, "a fetch wins from, with slow prefills", r.FetchFrom(ibgda), 75, 0.1)
	r.Local = 0.5e-6
	near(t, "the same with fast ones", r.FetchFrom(ibgda), 220, 0.1)
	// Layers are serial and steps repeat: a fetch pays after a few tokens.
	r = MLA27()
	if s := r.Step(ibgda, 256); s < 1.2e-3 || s > 3e-3 {
		t.Errorf("a decode step takes %v s, want 1.2 to 3 ms", s)
	}
	if n := r.RepaidAfter(ibgda, 256, 2048); n < 2 || n > 5 {
		t.Errorf("a fetch is repaid after %v steps, want 2 to 5", n)
	}
	r.Local = 1e-8
	if n := r.FetchFrom(ibgda); n != 0 {
		t.Errorf("a fetch that is slower per token than the prefill wins from %v tokens on", n)
	}
}

// Fit finds the constants of each built-in fabric again, from samples without noise.
func TestFit(t *testing.T) {
	r := MLA27()
	for _, f := range PublishedFabrics() {
		var samples []Sample
		for rows := 1; rows <= 4096; rows *= 2 {
			b := float64(rows) * (r.Query + r.Partial)
			samples = append(samples, Sample{f.Name, b, f.Time(b)})
		}
		got, err := Fit(f.Name, samples)
		if err != nil {
			t.Fatal(err)
		}
		near(t, f.Name+": fixed", got.Fixed, f.Fixed, 1e-6)
		near(t, f.Name+": rate", got.Rate, f.Rate, 1e-6)
		if got.Error > 1e-9 || got.Samples != len(samples) {
			t.Errorf("%+v", got)
		}
	}
	// A line through the origin, if the best one begins below it.
	got, err := Fit("x", []Sample{{"x", 1, 0.5}, {"x", 2, 2}})
	if err != nil || got.Fixed != 0 || got.Rate <= 0 {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range [][]Sample{nil, {{"x", 1, 1}}, {{"x", 1, 1}, {"x", 1, 2}},
		{{"x", 1, 2}, {"x", 100, 1}}} {
		if got, err := Fit("x", bad); err == nil {
			t.Errorf("%v: %+v", bad, got)
		}
	}
}

// A prefill engine loads from a store what the last turn's decode engine has saved.
func TestPairWithAStore(t *testing.T) {
	m := NewMatrix(3)
	m.Set(0, 1, Path{Rate: 1e9})
	m.Set(2, 0, Path{Fixed: 0.01, Rate: 1e9})
	s := State{Network: m, Stores: []Store{{0.02}}, Engines: []Engine{
		{Role: Prefill, Wait: 0.1, PrefillRate: 1000}, {Role: Decode, Step: 0.02, Saves: 2}}}
	a := Ask{Tokens: 4000, TokenBytes: 1000, Hits: []int{1000, 0, 3000}, Kinds: AllKinds}
	best, ok := Decide(&s, &a)
	// The 2,000 tokens take 0.032 s, within the queue. 1,000 are computed, 4,000 move.
	if !ok || best.Kind != Pair || best.Store != 2 || best.Loaded != 2000 || best.Reused != 3000 ||
		best.Computed != 1000 || best.Moved != 4000 {
		t.Fatalf("%+v", best)
	}
	near(t, "with the store", best.Price, 0.1+1+0.004+0.02, 1e-9)
	a.Kinds = Run | Fetch | Pair
	best, _ = Decide(&s, &a)
	near(t, "without", best.Price, 0.1+3+0.004+0.02, 1e-9)
	if best.Store != -1 || best.Loaded != 0 {
		t.Errorf("%+v", best)
	}
	// A slow store is not worth its time, unless the queue is as long.
	m.Set(2, 0, Path{Rate: 1e5})
	s.Engines[0].Wait = 0
	a.Kinds = AllKinds
	if best, _ = Decide(&s, &a); best.Store != -1 || best.Reused != 1000 {
		t.Errorf("%+v", best)
	}
}

// A long answer makes the engine that gives it the better one for the prompt: the next turn needs
// the answer's tokens there. A store that has them makes that matter less.
func TestExpectedAnswer(t *testing.T) {
	m := NewMatrix(3)
	m.Set(0, 1, Path{Rate: 1e9})
	m.Set(2, 0, Path{Rate: 1e8})
	s := State{Network: m, Stores: []Store{{}}, Engines: []Engine{
		{Role: Prefill, PrefillRate: 1000}, {Role: Both, PrefillRate: 1000, Wait: 0.5, Step: 0.02,
			Saves: 2}}}
	a := Ask{Tokens: 1000, TokenBytes: 1000, Hits: []int{0, 0, 0}, Kinds: Run | Pair}
	for _, c := range []struct {
		next float64
		kind Kind
		want Kind
	}{{0, Run | Pair, Pair}, {1000, Run | Pair, Run}, {1000, AllKinds, Pair}} {
		a.Next, a.Kinds = c.next, c.kind
		if best, ok := Decide(&s, &a); !ok || best.Kind != c.want {
			t.Errorf("%v tokens, kinds %b: %+v", c.next, c.kind, best)
		}
	}
	near(t, "computed", s.next(&Ask{Next: 500, Kinds: Pair}, 0, 1), 0.5, 1e-9)
	near(t, "loaded", s.next(&Ask{Next: 500, TokenBytes: 1000, Kinds: AllKinds}, 0, 1), 0.005, 1e-9)
}

// An engine computes once all that it loads from a store has come, also if transfers between
// engines run beside the prefill. So a load takes all tokens, or none.
func TestLoadsHideBehindNoPrefill(t *testing.T) {
	for _, c := range []struct {
		rate   float64 // tokens per second
		loaded int
		ttft   float64
	}{{1000, 0, 1}, {4000, 2000, 0.5 + 0.5}, {20_000, 2000, 0.1 + 0.5}} {
		m := NewMatrix(2)
		m.Set(1, 0, Path{Rate: 1000 * c.rate})
		s := State{Overlap: 0.9, Network: m, Stores: []Store{{}},
			Engines: []Engine{{Role: Both, PrefillRate: 4000}}}
		a := Ask{Tokens: 4000, TokenBytes: 1000, Hits: []int{0, 2000}, Kinds: Run | Load}
		best, ok := Decide(&s, &a)
		if !ok || c.rate != 4000 && best.Loaded != c.loaded { // at this rate all numbers are equal
			t.Errorf("%v tokens/s: %+v, want %d loaded", c.rate, best, c.loaded)
		}
		near(t, "TTFT", best.TTFT(), c.ttft, 1e-9)
		load, _ := fetch(&s, &a, 1, 0, m.Path(1, 0))
		near(t, "hidden", load.Hidden, 0, 1e-9)
	}
}

// The prices of a small cluster, computed by hand.
func TestChoices(t *testing.T) {
	m := NewMatrix(3)
	m.Set(0, 1, Path{Fixed: 0.01, Rate: 1e9, Before: 1e8})
	m.Set(2, 1, Path{Rate: 4e9})
	s := State{Overlap: 0.5, Network: m, Stores: []Store{{0.02}}, Engines: []Engine{
		{Role: Prefill, Wait: 0.5, PrefillRate: 10_000, PrefillFixed: 0.1, Ready: 0.5},
		{Role: Both, Wait: 0.2, PrefillRate: 5000, Step: 0.02, StepEach: 0.001, Running: 10, Ready: 0.2}}}
	a := Ask{Tokens: 4000, TokenBytes: 100_000, Hits: []int{3000, 1000, 2000}, Kinds: AllKinds}
	// Run: 0.2 + 3000/5000 + 0.03. Ten running answers wait 3000/5000 each.
	c := run(&s, &a, 1)
	near(t, "run", c.TTFT(), 0.83, 1e-9)
	near(t, "price of a run", c.Price, 0.83+0.1*10*0.6, 1e-9)
	// Pair: 0.5 + 0.1 + 0.1; 300 MB after 100 MB take 0.41; half of 0.2 is hidden; 0.03.
	c = pair(&s, &a, run(&s, &a, 0), 1, m.Path(0, 1))
	near(t, "pair", c.Price, 0.5+0.2+0.41-0.1+0.03, 1e-9)
	// The decode engine computes the last token. Its prefill of one takes longer than a step.
	s.Engines[1].PrefillFixed = 0.04
	near(t, "last token", pair(&s, &a, run(&s, &a, 0), 1, m.Path(0, 1)).Decode, 0.04+1.0/5000, 1e-9)
	s.Engines[1].PrefillFixed = 0
	// Fetch of the store's 1000 tokens ends at 0.045, within the queue.
	c, _ = fetch(&s, &a, 2, 1, m.Path(2, 1))
	near(t, "fetch", c.TTFT(), 0.2+0.4+0.03, 1e-9)
	if c.Moved != 1000 || c.Reused != 2000 || c.Transfer != 0 {
		t.Errorf("%+v", c)
	}
	// The fetch has the first token soonest, and the pair delays no running answer.
	s.Engines[1].Running = 20
	if best, ok := Decide(&s, &a); !ok || best.Kind != Pair {
		t.Errorf("%+v", best)
	}
	s.Engines[1].Running = 0
	best, ok := Decide(&s, &a)
	if !ok || best.Kind != Load || best.Source != 2 {
		t.Errorf("%+v", best)
	}
	// A decode engine that is full delays the pair.
	s.Engines[1].Wait, s.Engines[1].Running = 3, 10
	near(t, "pair for a full engine", pair(&s, &a, run(&s, &a, 0), 1, m.Path(0, 1)).Price, 3.03, 1e-9)
	// Work that others wait for makes a choice that computes the fewest tokens the cheapest.
	s.Engines[1].Wait, s.Engines[1].Running, s.Engines[1].Arrivals = 0.2, 0, 40
	if best, _ = Decide(&s, &a); best.Reused != 3000 {
		t.Errorf("%+v", best)
	}
}

// Equal engines take turns.
func TestFirst(t *testing.T) {
	s := State{Engines: []Engine{{Role: Both, PrefillRate: 1}, {Role: Both, PrefillRate: 1},
		{Role: Both, PrefillRate: 1}}}
	for i := range 6 {
		c, ok := Decide(&s, &Ask{Tokens: 1, Hits: make([]int, 3), Kinds: AllKinds, First: i})
		if !ok || c.Engine != i%3 {
			t.Errorf("First %d: engine %d", i, c.Engine)
		}
	}
	if _, ok := Decide(&State{}, &Ask{Tokens: 1, Kinds: AllKinds}); ok {
		t.Error("a choice without an engine")
	}
}

// A correction approaches what it observes, within its bounds.
func TestCorrection(t *testing.T) {
	var c Correction
	near(t, "factor without outcomes", c.Factor(), 1, 0)
	for range 100 {
		c.Observe(1, 1.5)
	}
	near(t, "factor", c.Factor(), 1.5, 0.001)
	for range 1000 {
		c.Observe(1, 1e9)
	}
	near(t, "largest factor", c.Factor(), MaxCorrection, 0.001)
	was := c
	for _, bad := range [][2]float64{{0, 1}, {1, 0}, {math.NaN(), 1}, {1, math.NaN()}, {1, -1},
		{math.Inf(1), 1}, {1, math.Inf(1)}} {
		c.Observe(bad[0], bad[1])
	}
	if c != was {
		t.Errorf("%+v changed to %+v", was, c)
	}
	c.Observe(1, 1e-9) // one outcome moves it by at most a tenth of the bounds
	near(t, "factor after one odd outcome", c.Factor(), math.Pow(MaxCorrection, 0.8), 0.01)
}

// A rate approaches that of its events, and decays without them.
func TestRate(t *testing.T) {
	var r Rate
	for i := range 1000 {
		r.Add(float64(i) / 4)
	}
	near(t, "rate", r.At(250), 4, 0.02)
	near(t, "rate at an earlier time", r.At(-1e300), 4, 0.02)
	near(t, "rate after its span", r.At(250+rateSpan), 4/math.E, 0.02)
}

const links = `{"node":"a","peers":[{"endpoint":"10.0.0.2:7","claimed":"b:7","future":1,
 "waiting_bytes":{"decode_waits":100,"layer_stream":10,"background":5000},"links":[
 {"state":"healthy","bytes_per_second":1e9,"in_flight_bytes":7,"fixed_seconds":0.004},
 {"state":"readmitted","bytes_per_second":2e9,"in_flight_bytes":1,"fixed_seconds":0.002},
 {"state":"excluded","bytes_per_second":9e9,"in_flight_bytes":2,"fixed_seconds":0.001}]}]}`

func TestLinks(t *testing.T) {
	l, err := ParseLinks([]byte(links))
	if err != nil {
		t.Fatal(err)
	}
	want := Path{Fixed: 0.002, Rate: 3e9, Before: 120}
	if l.Path("b:7") != want || l.Path("10.0.0.2:7") != want || l.Path("c:7") != (Path{}) ||
		l.Path("") != (Path{}) {
		t.Errorf("%+v", l.Path("b:7"))
	}
}

const state = `{"token_bytes":131072,"overlap":0.8,"engines":[
 {"name":"a","prefill":"gpu","wait_seconds":1,"hit_tokens":900,"links":` + links + `},
 {"name":"b","endpoint":"b:7","prefill_tokens_per_second":5000,"step_seconds":0.02}],
 "stores":[{"name":"disk","ready_seconds":0.1,"hit_tokens":500}],
 "paths":[{"from":"disk","to":"b","fabric":"nic","before_bytes":5},
  {"from":"b","to":"a","bytes_per_second":1e9}]}`

var cal = &Calibration{Fabrics: []Fabric{{Name: "gpu", Fixed: 0.01, Rate: 8000},
	{Name: "nic", Fixed: 0.001, Rate: 1e10}}}

func TestParseFile(t *testing.T) {
	c, err := ParseFile([]byte(state), 1000, cal)
	if err != nil {
		t.Fatal(err)
	}
	a := c.State.Engines[0]
	if a.PrefillRate != 8000 || a.Ready != 1 || a.Role != Both || c.Ask.Hits[2] != 500 ||
		c.State.Network.Path(0, 1).Rate != 3e9 ||
		c.State.Network.Path(2, 1) != (Path{0.001, 1e10, 5}) || len(c.Names) != 3 {
		t.Errorf("%+v", c)
	}
	if best, ok := Decide(&c.State, &c.Ask); !ok || best.Engine != 1 {
		t.Errorf("%+v", best)
	}
	for _, bad := range []struct{ old, becomes, names string }{
		{`"overlap":0.8`, `"overlap":1.1`, "overlap"},
		{`"token_bytes":131072`, `"token_bytes":0`, "token_bytes"},
		{`"token_bytes"`, `"token_byte"`, "token_byte"},
		{`"prefill":"gpu"`, `"prefill":"gpus"`, "engines[0].prefill"},
		{`"prefill_tokens_per_second":5000`, `"prefill_tokens_per_second":-1`,
			"engines[1].prefill_tokens_per_second"},
		{`"name":"b"`, `"name":"a"`, "twice"},
		{`"to":"b"`, `"to":"disk"`, "paths[0]"},
		{`"hit_tokens":500`, `"hit_tokens":-5`, "stores[0].hit_tokens"},
		{`"step_seconds":0.02`, `"role":"idle"`, "engines[1].role"},
		{`"bytes_per_second":1e9}]`, `"bytes_per_second":1e9}]}{`, "JSON"},
	} {
		text := strings.Replace(state, bad.old, bad.becomes, 1)
		if _, err := ParseFile([]byte(text), 1000, cal); err == nil ||
			!strings.Contains(err.Error(), bad.names) {
			t.Errorf("%s: %v, want an error that names %s", bad.becomes, err, bad.names)
		}
	}
	if _, err := ParseFile([]byte(state), 0, cal); err == nil {
		t.Error("a prompt of no token")
	}
}

func TestCalibrate(t *testing.T) {
	samples, err := ParseSamples([]byte("# name amount seconds\n\nnic,0,0.001\nnic 1e9 0.101\n" +
		"gpu\t1000\t0.2\ngpu 2000 0.3\n"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := Calibrate(samples)
	if err != nil || len(c.Fabrics) != 2 || c.Fabrics[0].Name != "gpu" {
		t.Fatalf("%+v, %v", c, err)
	}
	near(t, "fixed", c.Fabrics[0].Fixed, 0.1, 1e-6)
	near(t, "rate", c.Fabrics[1].Rate, 1e10, 1e-6)
	for _, bad := range []string{"x 1", "x 1 0", "x -1 1", "x NaN 1", "x 1 Inf",
		strings.Repeat("x", 200) + " 1 1"} {
		if _, err := ParseSamples([]byte(bad)); err == nil || !strings.Contains(err.Error(), "line 1") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := Calibrate(nil); err == nil {
		t.Error("a calibration of nothing")
	}
	for _, bad := range []string{`{"fabrics":[{"name":"","per_second":1}]}`,
		`{"fabrics":[{"name":"x","per_second":0}]}`, `{"fabrics":[{"name":"x","per_second":1},
		{"name":"x","per_second":2}]}`, `[]`} {
		if c, err := ParseCalibration([]byte(bad)); err == nil {
			t.Errorf("%s: %+v", bad, c)
		}
	}
}

// What ParseFile accepts can be ranked, and gives finite prices.
func FuzzParseFile(f *testing.F) {
	f.Add([]byte(state), 1000)
	f.Add([]byte(`{"token_bytes":1,"engines":[{"name":"a","role":"decode"}]}`), 1)
	f.Fuzz(func(t *testing.T, b []byte, tokens int) {
		c, err := ParseFile(b, tokens, cal)
		if err != nil {
			return
		}
		for _, x := range Rank(&c.State, &c.Ask, nil) {
			if x.Price < 0 || math.IsNaN(x.Price) {
				t.Errorf("%+v", x)
			}
		}
	})
}

func FuzzParseLinks(f *testing.F) {
	f.Add([]byte(links))
	f.Fuzz(func(t *testing.T, b []byte) {
		if l, err := ParseLinks(b); err == nil {
			if p := l.Path("b:7"); p.Rate < 0 || p.Rate > 0 && !(p.Time(1e6) >= 0) {
				t.Errorf("%+v", p)
			}
		}
	})
}

// large is a cluster of engines that all hold a part of a prompt of 32k tokens.
func large(n int) (*State, *Ask) {
	m := NewMatrix(n)
	s := &State{Network: m, Overlap: 0.9}
	a := &Ask{Tokens: 32 << 10, TokenBytes: 131072, Kinds: AllKinds}
	for i := range n {
		s.Engines = append(s.Engines, Engine{Role: Both, Wait: float64(i*7%n) * 0.01, Ready: 0.1,
			PrefillFixed: 0.01, PrefillRate: 8000, Step: 0.02, StepEach: 1e-4, Running: i * 5 % n})
		a.Hits = append(a.Hits, i*13%n*512)
		for j := range n {
			m.Set(i, j, Path{Fixed: 0.004, Rate: 1e9 + float64((i+j)%n)*1e7, Before: float64(i * 1e6)})
		}
	}
	return s, a
}

func TestDecideAllocatesNothing(t *testing.T) {
	s, a := large(64)
	if n := testing.AllocsPerRun(10, func() { Decide(s, a) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkDecide64(b *testing.B) {
	s, a := large(64)
	for b.Loop() {
		Decide(s, a)
	}
}
