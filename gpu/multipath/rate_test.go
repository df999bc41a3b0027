package multipath

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestLeaves: the last chunks of a queue are left to the link that finishes first, and one link
// always takes them.
func TestLeaves(t *testing.T) {
	now := time.Now()
	type of struct {
		rate       float64 // GB/s; 0: unknown
		held       uint64
		silent     time.Duration
		gone, busy bool
	}
	for name, c := range map[string]struct {
		links   []of // the first is asked
		waiting uint64
		want    bool
	}{
		"alone":                    {[]of{{rate: 1}}, 1 << 20, false},
		"equal":                    {[]of{{rate: 50}, {rate: 50}}, 8 << 20, false},
		"slow, and little is left": {[]of{{rate: 1}, {rate: 50}}, 8 << 20, true},
		"slow, and much is left":   {[]of{{rate: 1}, {rate: 50}}, 1 << 30, false},
		"slow, the other unknown":  {[]of{{rate: 1}, {}}, 8 << 20, false},
		"unknown":                  {[]of{{}, {rate: 50}}, 8 << 20, false},
		"long ago": {[]of{{rate: 1, silent: rateRetry / 2}, {rate: 50}},
			8 << 20, true},
		"too long ago": {[]of{{rate: 1, silent: 2 * rateRetry}, {rate: 50}},
			8 << 20, false},
		"has some, and long ago": {[]of{{rate: 1, held: 1, silent: 2 * rateRetry}, {rate: 50}},
			8 << 20, true},
		"slow, the other dead": {[]of{{rate: 1}, {rate: 50, gone: true}}, 8 << 20, false},
		"slow, the other busy": {[]of{{rate: 1}, {rate: 50, busy: true}}, 8 << 20, false},
		"slow, the other silent": {[]of{{rate: 1}, {rate: 50, held: 1 << 20,
			silent: 2 * silentAfter}}, 8 << 20, false},
		"slow, the other has its share":   {[]of{{rate: 10}, {rate: 50, held: 48 << 20}}, 8 << 20, false},
		"equal, and has more than enough": {[]of{{rate: 50, held: 32 << 20}, {rate: 50}}, 8 << 20, true},
	} {
		m := &Multipath{direct: true, jobs: []*job{{n: c.waiting}}}
		for _, o := range c.links {
			l := &link{m: m, inFlight: o.held, failed: o.gone, yields: o.busy, last: now.Add(-o.silent)}
			if o.rate > 0 {
				l.bytes, l.took = o.rate*1e6, 1e6
			}
			m.links = append(m.links, l)
		}
		if got := m.links[0].leavesLocked(min(c.waiting, 8<<20), now); got != c.want {
			t.Errorf("%s: leaves it: %v", name, got)
		}
	}
	rng := rand.New(rand.NewPCG(9, 9))
	for range 2000 {
		m := &Multipath{direct: true, jobs: []*job{{n: 1 + rng.Uint64N(64<<20)}}}
		for range 1 + rng.IntN(5) {
			m.links = append(m.links, &link{m: m, inFlight: rng.Uint64N(48 << 20), last: now, bytes: 1 +
				rng.Float64()*1e6, took: 1e4, yields: rng.IntN(4) == 0})
		}
		m.links[0].yields = false
		n := min(m.jobs[0].n, 8<<20)
		if !slices.ContainsFunc(m.links, func(l *link) bool {
			return !l.yields &&
				!l.leavesLocked(n, now)
		}) {
			t.Fatal("no link takes the chunk")
		}
	}
}

// TestLearns: the learned rate is that of the moved bytes, whether ends of chunks are seen one by
// one or together.
func TestLearns(t *testing.T) {
	l := &link{last: time.Unix(100, 0)}
	now := l.last
	for i := range 60 {
		issued := now.Add(-time.Millisecond) // behind others
		if i%2 > 0 {
			now = now.Add(4 * time.Millisecond) // two are noticed at once
		}
		l.learnLocked(10e6, issued, now)
	}
	if rate := l.bytes / l.took; rate < 4 || rate > 6 {
		t.Errorf("%.2f GB/s, want 5", rate)
	}
}

// TestLinkIsTriedAgain: a link that was slow once soon gets another chunk, which replaces its rate.
// A link that stays slow gets chunks more and more rarely.
func TestLinkIsTriedAgain(t *testing.T) {
	const chunk = 8 << 20
	start := time.Unix(100, 0)
	// run has a slow-looking link asked every millisecond beside a good one, and returns when it took
	// chunks.
	run := func(rate float64, until time.Duration) (taken []time.Duration, l *link) {
		m := &Multipath{direct: true, jobs: []*job{{n: chunk}}}
		l = &link{m: m, last: start, bytes: chunk, took: 30e6}
		good := &link{m: m, bytes: 50, took: 1}
		m.links = []*link{l, good}
		for at := time.Duration(0); at < until; at += time.Millisecond {
			now := start.Add(at)
			if good.last = now; l.leavesLocked(chunk, now) {
				continue
			}
			taken = append(taken, at)
			l.takenLocked(chunk, now)
			done := now.Add(time.Duration(chunk / rate))
			l.inFlight = 0
			l.learnLocked(chunk, now, done)
			if at = done.Sub(start); len(taken) > 100 {
				break
			}
		}
		return taken, l
	}
	if taken, _ := run(50, 10*time.Second); len(taken) != 101 || taken[0] > 110*time.Millisecond ||
		taken[100] > 300*time.Millisecond {
		t.Errorf("a good link that looked slow once: %d chunks, at %v", len(taken),
			taken[:min(3, len(taken))])
	}
	taken, l := run(0.3, time.Minute)
	if len(taken) < 10 || len(taken) > 20 || l.span != rateSpan {
		t.Errorf("a slow link has %d chunks in a minute, at %v", len(taken), taken)
	}
}
