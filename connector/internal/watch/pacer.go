package watch

import "time"

// Pacing of the watcher. One sleep of a thread costs 8 to 20 us of CPU in a virtual machine,
// whatever the check costs.
const (
	paceMin  = 20 * time.Microsecond
	shortest = 5 * time.Microsecond   // shortest requested sleep: the kernel adds more than that
	paceOver = 200 * time.Microsecond // largest assumed overrun of a sleep
	paceIdle = 2 * time.Millisecond   // between checks while an open step does not move
	// Alone is the time between checks while no layer is awaited; the deadline of a long prefill
	// counts from the last change seen.
	Alone = 100 * time.Millisecond
	// Fresh is the time after the opening of a source lease in which its receiver is expected.
	Fresh = 100 * time.Millisecond

	paceLate = 16 // a late layer is checked every gap/paceLate
	// after t without a change, checks are at least t/paceFade apart.
	paceFade = 32
	// this many gaps are a pause between two steps, unless two follow each other.
	paceOdd    = 2
	paceWindow = 64 // checks between two measurements of their cost
	// of the host's CPU for checking while layers are awaited; work after a layer is not included.
	paceShare  = 0.02
	paceBudget = 0.3 // limit of the same in cores
)

// pacer decides the sleep between two checks: until just before the next layer is due, then a
// fraction of the time between layers, and never so short that checking exceeds its budget. Pure:
// times are arguments.
type pacer struct {
	last   time.Duration // when a flag moved last
	gap    time.Duration // learned time between layers
	odd    bool          // the last time between two changes was a pause
	budget float64       // of a core: the budget
	floor  time.Duration // raised by the budget
	over   time.Duration // learned overrun of a sleep
	looks  int
	wall   time.Duration // at the last measurement
	cpu    time.Duration
}

func newPacer(cores int, now, cpu time.Duration) *pacer {
	return &pacer{last: now, gap: 8 * paceMin, budget: min(paceBudget, paceShare*float64(cores)),
		floor: paceMin, wall: now, cpu: cpu}
}

// resume starts a new period after a sleep without anything to follow; learned values stay.
func (p *pacer) resume(now, cpu time.Duration) {
	p.last, p.wall, p.cpu, p.looks = now, now, cpu, 0
}

// next returns the time to sleep; moved is the number of flags that the check at a time found
// changed.
func (p *pacer) next(at, now time.Duration, moved int) time.Duration {
	return max(p.until(at, now, moved)-p.over, shortest)
}

// slept records the length of a sleep.
func (p *pacer) slept(asked, lasted time.Duration) {
	p.over += (min(max(lasted-asked, 0), paceOver) - p.over) / 8
}

// until returns the time to the next check. The next layer is due relative to the check that saw
// this one: time spent since then is no time between layers, and would make every check later than
// the previous one.
func (p *pacer) until(at, now time.Duration, moved int) time.Duration {
	p.looks++
	since := at - p.last
	if moved == 0 {
		if since < p.gap*9/8 && p.floor == paceMin {
			return p.gap / paceLate // it is due now: a few short sleeps, if the budget permits
		}
		return max(p.gap/paceLate, p.floor, min(since/paceFade, paceIdle))
	}
	// A pause between two steps is no gap between layers; counting it would make the checks of the
	// next step's first layers late.
	sample := since / time.Duration(moved)
	late := sample > p.gap*3/2
	if p.odd = sample > paceOdd*p.gap && !p.odd; !p.odd {
		p.gap += (min(sample, 4*p.gap) - p.gap) / 8
		p.gap = max(p.gap, paceMin)
	}
	p.last = at
	// the next one need not be late: a GPU without room for a layer's flag sets it just before the
	// next layer's flag
	if late {
		return max(p.gap/paceLate, p.floor)
	}
	return max(p.gap*7/8-(now-at), p.floor)
}

// spare excludes other work from the budget; a slower pace would not reduce that work.
func (p *pacer) spare(cpu time.Duration) { p.cpu += cpu }

func (p *pacer) due() bool { return p.looks >= paceWindow }

// charge compares the cost of checking with the budget. The ceiling keeps a single bad measurement
// from stopping the watcher.
func (p *pacer) charge(now, cpu time.Duration) {
	share := float64(cpu-p.cpu) / float64(max(now-p.wall, 1))
	switch {
	case share > p.budget:
		p.floor = min(p.floor*5/4, paceIdle)
	case share < p.budget*3/4:
		p.floor = max(p.floor*9/10, paceMin)
	}
	p.wall, p.cpu, p.looks = now, cpu, 0
}
