package watch

import (
	"math/rand/v2"
	"testing"
	"time"
)

// TestPacer plays engines of several paces against the pacer, with a price for each look.
func TestPacer(t *testing.T) {
	const (
		price = 10 * time.Microsecond // of CPU for each look
	)
	for _, c := range []struct {
		name    string
		cores   int
		gap     time.Duration // between layers
		work    time.Duration // that each layer makes
		over    time.Duration // that each sleep lasts too long
		maxLate time.Duration // mean time from a flag to the look that sees it
		share   float64       // of a core for looking
	}{
		{"tiny layers", 32, 60 * time.Microsecond, 5 * time.Microsecond, 30 * time.Microsecond,
			25 * time.Microsecond, 0.33},
		{"tiny layers, short sleeps", 32, 60 * time.Microsecond, 5 * time.Microsecond,
			5 * time.Microsecond, 7 * time.Microsecond, 0.33},
		{"fast GPU", 32, 100 * time.Microsecond, 5 * time.Microsecond, 30 * time.Microsecond,
			25 * time.Microsecond, 0.33},
		{"fast GPU, short sleeps", 32, 100 * time.Microsecond, 5 * time.Microsecond, 5 * time.Microsecond,
			7 * time.Microsecond, 0.33},
		{"fast GPU, small host", 2, 100 * time.Microsecond, 5 * time.Microsecond, 30 * time.Microsecond,
			200 * time.Microsecond, 0.044},
		{"20 ms steps", 32, 625 * time.Microsecond, 20 * time.Microsecond, 30 * time.Microsecond,
			40 * time.Microsecond, 0.33},
		{"20 ms steps, small host", 2, 625 * time.Microsecond, 20 * time.Microsecond,
			30 * time.Microsecond, 100 * time.Microsecond, 0.044},
		{"long prompts", 32, 1150 * time.Microsecond, 150 * time.Microsecond, 30 * time.Microsecond,
			60 * time.Microsecond, 0.33},
		{"large model", 32, 3 * time.Millisecond, 500 * time.Microsecond, 30 * time.Microsecond,
			150 * time.Microsecond, 0.33},
		{"CPU engine", 2, 20 * time.Millisecond, 0, 30 * time.Microsecond, time.Millisecond, 0.044},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, r := newPacer(c.cores, 0, 0), rand.New(rand.NewPCG(1, uint64(c.gap)))
			var now, cpu, looking, late time.Duration
			next := c.gap // when the next flag moves
			looks, seen := 0, 0
			for now < 10*time.Second {
				looks++
				cpu, looking = cpu+price, looking+price
				moved := 0
				for next <= now {
					late += now - next
					// layers are not alike to the microsecond
					next += c.gap*39/40 + time.Duration(r.Int64N(int64(c.gap/20)))
					moved++
				}
				seen += moved
				work := time.Duration(moved) * c.work
				p.spare(work)
				at := now
				now, cpu = now+work, cpu+work
				asked := p.next(at, now, moved)
				now += asked + c.over
				p.slept(asked, asked+c.over)
				if p.due() {
					p.charge(now, cpu)
				}
			}
			mean := late / time.Duration(seen)
			share := float64(looking) / float64(now)
			t.Logf("%d looks a second, %s late on average, %.2f%% of a core for looking",
				int(float64(looks)/now.Seconds()), mean, 100*share)
			if mean > c.maxLate || share > c.share {
				t.Errorf("mean lateness %s (at most %s), %.4f of a core for looking (at most %.4f)", mean,
					c.maxLate, share, c.share)
			}
		})
	}
	// A sleep that was far too long, as on a machine that was stopped, makes the next ones no busy
	// loop.
	p := newPacer(2, 0, 0)
	for range 100 {
		p.slept(paceMin, time.Minute)
	}
	if d := p.next(time.Second, time.Second, 0); d < paceIdle/2 {
		t.Errorf("after long sleeps: %s between looks", d)
	}
	// An open step that does not move fades to the idle pace.
	p = newPacer(2, 0, 0)
	if d := p.next(time.Second, time.Second, 0); d != paceIdle {
		t.Errorf("after a second without a flag: %s between looks, want %s", d, paceIdle)
	}
	// And one layer after a long pause does not make the pace a slow one.
	p.next(time.Second, time.Second, 1)
	if d := p.next(time.Second+100*time.Microsecond, time.Second+100*time.Microsecond,
		0); d > 500*time.Microsecond {
		t.Errorf("after a pause: %s between looks", d)
	}
}

// TestPauses: what lies between two steps does not make the watcher look for the first layers of
// the next one late, and layers that are slower from some step on are learned all the same.
func TestPauses(t *testing.T) {
	const gap, pause = 60 * time.Microsecond, 5 * time.Millisecond
	p, now := newPacer(32, 0, 0), time.Duration(0)
	step := func(gap time.Duration) {
		now += pause
		for range 64 {
			p.next(now, now, 1)
			now += gap
		}
	}
	for range 4 {
		step(gap)
	}
	now += pause
	if d := p.next(now, now, 1); d > gap {
		t.Errorf("after a pause the second layer is looked for in %s, and due in %s", d, gap)
	}
	step(4 * gap)
	if p.gap < 3*gap || p.gap > 5*gap {
		t.Errorf("a time between layers of %s is learned as %s", 4*gap, p.gap)
	}
}

// TestLateFlag: where a flag comes late the next one is looked for at once, as it may be in time.
func TestLateFlag(t *testing.T) {
	const gap, over = 530 * time.Microsecond, 10 * time.Microsecond
	for apart := 20 * time.Microsecond; apart < gap/4; apart += 10 * time.Microsecond {
		p, now, due := newPacer(16, 0, 0), time.Duration(0), time.Duration(0)
		// look checks until it has seen these flags, and returns how late it was for the last one.
		look := func(flags ...time.Duration) (late time.Duration) {
			for len(flags) > 0 {
				moved, at := 0, now
				for len(flags) > 0 && flags[0] <= at {
					late, flags = at-flags[0], flags[1:]
					moved++
				}
				asked := p.next(at, now, moved)
				p.slept(asked, asked+over)
				now += asked + over
			}
			return late
		}
		for range 60 {
			due += gap
			look(due)
		}
		if late := look(due+2*gap-apart, due+2*gap); late > gap/8 {
			t.Errorf("a flag in time, %s behind one that was a layer late, was seen %s after it came",
				apart, late)
		}
	}
}
