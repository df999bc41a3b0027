package health

import (
	"fmt"
	"strings"
	"time"
)

// Times of faults of GPUs.
const (
	// LookEvery is the time between two readings of a GPU. Errors come as events, at once.
	LookEvery = 5 * time.Second
	// WaitEvery bounds a Driver's wait for an event. Nothing can interrupt this wait, so it also
	// delays the end of a sidecar.
	WaitEvery = 500 * time.Millisecond
	// gpuQuiet is the time without errors after which a GPU's fault ends.
	gpuQuiet = 10 * time.Second
	// throttleAfter is the time after which throttling is a fault: short peaks are normal.
	throttleAfter = 15 * time.Second
	// throttleQuiet is the time without throttling after which the GPU is fit again.
	throttleQuiet = time.Minute
)

// Action is a recovery action of NVIDIA's driver (nvmlDeviceGpuRecoveryAction_t).
type Action uint8

// The actions.
const (
	ActionUnknown Action = iota // the driver does not report it: before R565
	ActionNone
	ActionReset
	ActionReboot
	ActionDrainP2P
	ActionDrainReset
)

func (a Action) String() string {
	return [...]string{"not reported", "none", "reset", "restart of the host", "drain of NVLink",
		"drain and reset"}[a]
}

// actions are the faults that the recovery actions stand for.
var actions = map[Action]Fault{
	ActionReset: {Kind: Recovery, Level: Failed, Remedy: ResetGPU,
		Text: "the driver demands a reset"},
	ActionReboot: {Kind: Recovery, Level: Failed, Remedy: RestartHost,
		Text: "the driver demands a restart of the host"},
	ActionDrainP2P: {Kind: Recovery, Level: Degraded, Remedy: RestartEngine,
		Text: "the driver demands that processes that use NVLink restart"},
	ActionDrainReset: {Kind: Recovery, Level: Degraded, Remedy: ResetGPU,
		Text: "the driver demands a reset after open work has ended"},
}

// Slowdown is a set of reasons for lower clocks that are faults. A power limit or a clock that the
// operator has set is not a fault.
type Slowdown uint8

// The reasons.
const (
	HardwareSlowdown Slowdown = 1 << iota
	HardwareThermal
	SoftwareThermal
	PowerBrake
)

func (s Slowdown) String() string {
	var out []string
	for i, name := range [...]string{"hardware slowdown", "hardware thermal slowdown",
		"software thermal slowdown", "power brake"} {
		if s&(1<<i) != 0 {
			out = append(out, name)
		}
	}
	return strings.Join(out, ", ")
}

// Reading is what the driver reports about a GPU.
type Reading struct {
	PCI         string // as in /sys/bus/pci/devices
	Lost        bool   // the GPU does not answer; the rest is unknown
	Action      Action
	Slowdown    Slowdown
	Uncorrected uint64 // memory errors since the driver was loaded
	RowsFailed  bool   // rows of memory that cannot be remapped
}

// Event is an error that the driver reported.
type Event struct {
	PCI  string // empty: of no single GPU
	Xid  uint64
	Memo bool // an uncorrected memory error without a number
}

// GPU is the verdict of one GPU.
type GPU struct {
	fault     Fault // the worst one of an error or a reading
	last      time.Time
	lost      bool // it did not answer at some time during this fault
	read      bool // uncorrected is known
	errors    uint64
	slow      Slowdown
	slowSince time.Time // zero: not throttled
	slowLast  time.Time
	throttled bool
}

// Event handles an error. It reports whether the processes that use the GPU now must stop using its
// memory: its content may be wrong, or it cannot be accessed.
func (g *GPU) Event(now time.Time, e Event) (strikes bool) {
	if e.Memo {
		return g.strike(now, Fault{Kind: Memory, Level: Failed, Remedy: RestartEngine,
			Text: "an uncorrected memory error"})
	}
	x, listed := xids[e.Xid]
	if !listed {
		return false
	}
	return g.strike(now, Fault{Kind: Xid, Level: x.level, Remedy: x.remedy, Text: xidText(e.Xid)})
}

// strike adds a fault. Of two faults with equal effects it keeps the first one, which probably
// caused the other.
func (g *GPU) strike(now time.Time, f Fault) bool {
	g.last = now
	f.Since = now
	if g.fault.Kind == "" || f.Level > g.fault.Level || f.Level == g.fault.Level &&
		f.Remedy > g.fault.Remedy {
		g.fault = f
	}
	return f.Level == Failed
}

// Look handles a reading, and ends faults that are over. strikes is the result of Event.
func (g *GPU) Look(now time.Time, r Reading) (strikes bool) {
	standing := Fault{}
	switch {
	case r.Lost:
		standing = Fault{Kind: Lost, Level: Failed, Remedy: RestartHost,
			Text: "the GPU does not answer its driver"}
		g.lost = true
	case r.Action > ActionNone:
		standing = actions[r.Action]
	case r.RowsFailed:
		standing = Fault{Kind: Memory, Level: Degraded, Remedy: ResetGPU,
			Text: "rows of its memory cannot be remapped"}
	}
	if standing.Kind != "" {
		strikes = g.strike(now, standing)
	}
	if r.Lost {
		return strikes
	}
	if g.read && r.Uncorrected > g.errors && g.fault.Level < Failed {
		strikes = g.strike(now, Fault{Kind: Memory, Level: Failed, Remedy: RestartEngine,
			Text: fmt.Sprintf("%d uncorrected memory errors", r.Uncorrected-g.errors)})
	}
	g.read, g.errors = true, r.Uncorrected
	g.throttle(now, r.Slowdown)
	if g.fault.Kind != "" && standing.Kind == "" && now.Sub(g.last) >= gpuQuiet && g.over(r) {
		g.fault, g.lost = Fault{}, false
	}
	return strikes
}

// over reports whether a fault can have ended. If the driver reports no recovery action, a reset
// can be detected only if the GPU did not answer in between. Otherwise the fault lasts as long as
// this process, which has to stop for a reset anyway.
func (g *GPU) over(r Reading) bool {
	return r.Action == ActionNone || g.fault.Remedy <= RestartEngine || g.lost
}

func (g *GPU) throttle(now time.Time, s Slowdown) {
	if s != 0 {
		if g.slowSince.IsZero() {
			g.slowSince = now
		}
		g.slow, g.slowLast = s, now
		g.throttled = g.throttled || now.Sub(g.slowSince) >= throttleAfter
		return
	}
	if !g.throttled || now.Sub(g.slowLast) >= throttleQuiet {
		g.throttled, g.slowSince = false, time.Time{}
	}
}

// Fault is the worst present fault of the GPU.
func (g *GPU) Fault() Fault {
	if g.throttled && g.fault.Level <= Degraded {
		return Fault{Kind: Throttled, Level: Degraded, Text: "throttled: " + g.slow.String(),
			Since: g.slowSince}
	}
	return g.fault
}

// Blocked reports whether new processes must not use the GPU either.
func (g *GPU) Blocked() bool { return g.fault.Level == Failed && g.fault.Remedy > RestartEngine }
