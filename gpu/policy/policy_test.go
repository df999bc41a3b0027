package policy

import (
	"testing"
	"time"
)

// TestPolicyTogether: concurrent calls have one rate together, and ends in a bunch do not count as
// several wins.
func TestPolicyTogether(t *testing.T) {
	const bytes, each = 1 << 20, 800 * time.Microsecond
	start := time.Unix(1000, 0)
	for _, fixed := range []CopyMethod{Auto, Pack} {
		c := New(fixed, 0)
		c.Observe(Copy, bytes, start, start.Add(100*time.Microsecond))
		at := start.Add(time.Second)
		for range 40 {
			for i := range 8 {
				c.Observe(Pack, bytes, at, at.Add(each+time.Duration(i)*time.Microsecond))
			}
			at = at.Add(each + 8*time.Microsecond)
		}
		if per := c.cost[Pack] * bytes; per < float64(each)/16 || per > float64(each)/2 {
			t.Errorf("%s: eight calls that take %s together take %s each", fixed, each, time.Duration(per))
		}
	}
	// The cheaper method wins, whichever is on trial. Kernels need a clear advantage; copies win
	// also at a slightly higher cost.
	for _, x := range []struct {
		best, other CopyMethod
		rate        float64 // of the other one beside the one in favor
		wins        bool
	}{{Copy, Pack, 1.2, false}, {Copy, Pack, 1.3, true}, {Pack, Copy, 0.9, true}, {Pack, Copy, 0.7,
		false}} {
		c := New(Auto, KernelPrice)
		now := start
		call := func(e CopyMethod, rate float64) {
			from := now
			now = now.Add(time.Duration(float64(100*time.Microsecond) / rate))
			c.Observe(e, bytes, from, now)
		}
		for _, e := range []CopyMethod{Pack, Copy} {
			call(e, map[bool]float64{true: 1, false: 0.1}[e == x.best])
		}
		c.Pick(now)
		for i := range trialWins {
			if e, _ := c.Pick(now); c.best != x.best {
				t.Fatalf("%+v: %s is in favour after %d tries, and %s was picked", x, c.best, i, e)
			}
			call(x.other, x.rate)
		}
		if c.Pick(now); (c.best == x.other) != x.wins {
			t.Errorf("%+v: %s is in favour", x, c.best)
		}
	}
}

func TestPolicy(t *testing.T) {
	var c Policy
	now := time.Unix(1000, 0)
	// count is how often pack is taken in calls for which the executors take so long.
	count := func(calls int, pack, copy time.Duration) (packs int) {
		for range calls {
			e, _ := c.Pick(now)
			took := copy
			if e == Pack {
				took = pack
				packs++
			}
			start := now
			now = now.Add(took)
			c.Observe(e, 1<<20, start, now)
		}
		return packs
	}
	const us = time.Microsecond
	if n := count(10000, 30*us, 90*us); n < 9980 {
		t.Errorf("pack is three times as fast and was taken %d of 10000 times", n)
	}
	count(100, 3000*us, 90*us) // the engine is busy now
	if n := count(10000, 3000*us, 90*us); n > 10 {
		t.Errorf(
			"pack waits for the engine, which pays for each, and was taken %d of 10000 times in a second", n)
	}
	count(25000, 30*us, 90*us) // and idle again: noticed at the next look
	if n := count(1000, 30*us, 90*us); n < 990 {
		t.Errorf("pack is fast again and was taken %d of 1000 times", n)
	}
	c.fixed = Pack
	if e, try := c.Pick(now); e != Pack || try {
		t.Error("fixed is not")
	}
	for _, name := range []string{"auto", "pack", "copy"} {
		if e, err := ParseCopyMethod(name); err != nil || e.String() != name {
			t.Errorf("%s: %s, %v", name, e, err)
		}
	}
	if _, err := ParseCopyMethod("fast"); err == nil {
		t.Error("an unknown executor was accepted")
	}
}
