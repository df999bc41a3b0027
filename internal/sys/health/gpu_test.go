package health

import (
	"testing"
	"time"
)

// script judges a GPU through a sequence of readings and errors.
type script struct {
	t   *testing.T
	g   GPU
	now time.Time
}

func newScript(t *testing.T) *script { return &script{t: t, now: time.Unix(1e9, 0)} }

// look gives the same reading for some time, every LookEvery.
func (s *script) look(r Reading, during time.Duration) (strikes bool) {
	for end := s.now.Add(during); ; {
		strikes = s.g.Look(s.now, r) || strikes
		if !s.now.Before(end) {
			return strikes
		}
		s.now = s.now.Add(LookEvery)
	}
}

func (s *script) want(what string, level Level, kind Kind, blocked bool) {
	s.t.Helper()
	if f := s.g.Fault(); f.Level != level || f.Kind != kind || s.g.Blocked() != blocked {
		s.t.Errorf("%s: %+v, blocked %v; want %s, kind %q, blocked %v", what, f, s.g.Blocked(), level,
			kind, blocked)
	}
}

// TestCatalog compares the lists of this package with the immediate actions of NVIDIA's catalog for
// GPUs since Ampere, as of November 2026, for the codes that apply to one of them.
func TestCatalog(t *testing.T) {
	actions := map[string][][2]uint64{
		"IGNORE": {{14, 14}, {37, 38}, {43, 44}, {63, 63}, {66, 67}, {92, 93}, {106, 108}, {121, 121},
			{137, 137}, {141, 141}, {152, 153}, {157, 157}, {160, 161}},
		"RESTART_APP": {{8, 8}, {11, 11}, {13, 13}, {25, 25}, {31, 32}, {39, 41}, {60, 60}, {68, 72},
			{75, 77}, {80, 80}, {82, 86}, {88, 89}, {94, 94}, {96, 105}, {126, 135}, {139, 139}},
		"RESET_GPU": {{46, 46}, {62, 62}, {64, 64}, {95, 95}, {109, 110}, {119, 120}, {136, 136},
			{140, 140}, {143, 143}, {155, 156}, {158, 158}},
		"RESTART_BM": {{79, 79}},
		"RESTART_VM": {{151, 151}},
	}
	special := map[uint64]string{ // a workflow or another kind of action, as xid.go treats it
		45: "application", 154: "application", 48: "reset", 54: "engine"}
	of := map[uint64]string{}
	for action, ranges := range actions {
		for _, r := range ranges {
			for code := r[0]; code <= r[1]; code++ {
				of[code] = action
			}
		}
	}
	for code := range uint64(200) {
		want := map[string]string{"": "unlisted", "IGNORE": "application", "RESTART_APP": "application",
			"RESET_GPU": "reset", "RESTART_BM": "host", "RESTART_VM": "host"}[of[code]]
		if code == 94 { // its memory is wrong until the engine restarts
			want = "engine"
		}
		if s := special[code]; s != "" {
			want = s
		}
		var g GPU
		g.Event(time.Unix(1e9, 0), Event{Xid: code})
		restricts := want != "application" && want != "unlisted"
		if got := Class(code); got != want || (g.Fault().Level > Fit) != restricts {
			t.Errorf("Xid %d: class %s, fault %+v; want %s", code, got, g.Fault(), want)
		}
	}
}

// TestXids: errors of an application change nothing, and others restrict the GPU as NVIDIA's
// catalog demands.
func TestXids(t *testing.T) {
	for _, x := range []struct {
		code    uint64
		level   Level
		strikes bool
		blocked bool
		class   string
	}{
		{13, Fit, false, false, "application"}, {31, Fit, false, false, "application"},
		{43, Fit, false, false, "application"}, {45, Fit, false, false, "application"},
		{63, Fit, false, false, "application"}, {74, Fit, false, false, "unlisted"},
		{9999, Fit, false, false, "unlisted"}, {0, Fit, false, false, "unlisted"},
		{54, Degraded, false, false, "engine"}, {64, Degraded, false, false, "reset"},
		{94, Failed, true, false, "engine"},
		{48, Failed, true, true, "reset"}, {95, Failed, true, true, "reset"},
		{119, Failed, true, true, "reset"}, {79, Failed, true, true, "host"},
	} {
		var g GPU
		strikes := g.Event(time.Unix(1e9, 0), Event{Xid: x.code})
		if g.Fault().Level != x.level || strikes != x.strikes || g.Blocked() != x.blocked ||
			Class(x.code) != x.class {
			t.Errorf("Xid %d: %+v, strikes %v, blocked %v, class %s; want %+v", x.code, g.Fault(), strikes,
				g.Blocked(), Class(x.code), x)
		}
	}
}

// TestGPUReset: a GPU that fell off the bus is usable again once it answers, its driver demands
// nothing, and it has been quiet; not before.
func TestGPUReset(t *testing.T) {
	s := newScript(t)
	s.look(Reading{Action: ActionNone}, 0)
	s.g.Event(s.now, Event{Xid: 79})
	s.want("Xid 79", Failed, Xid, true)
	if !s.look(Reading{Lost: true}, time.Hour) {
		t.Error("a lost GPU restricts nothing")
	}
	s.want("an hour without an answer", Failed, Xid, true)
	s.look(Reading{Action: ActionReset}, time.Minute)
	s.want("it answers, and has to be reset", Failed, Xid, true)
	s.look(Reading{Action: ActionNone}, 0)
	s.want("reset, and not quiet yet", Failed, Xid, true)
	s.look(Reading{Action: ActionNone}, gpuQuiet)
	s.want("quiet", Fit, "", false)
}

// TestOldDriver: a driver that does not report a recovery action leaves a fault that needs a reset
// in place, until the GPU was away in between; a fault that needs a new process ends.
func TestOldDriver(t *testing.T) {
	s := newScript(t)
	s.g.Event(s.now, Event{Xid: 119})
	s.look(Reading{}, time.Hour)
	s.want("no reset was seen", Failed, Xid, true)
	s.look(Reading{Lost: true}, 0)
	s.look(Reading{}, 2*gpuQuiet)
	s.want("it was away", Fit, "", false)

	s = newScript(t)
	s.g.Event(s.now, Event{Xid: 94})
	s.want("contained error", Failed, Xid, false)
	s.look(Reading{}, 2*gpuQuiet)
	s.want("contained error, later", Fit, "", false)
}

// TestMemoryErrors: uncorrected errors that appear restrict the GPU; those before the start of this
// process do not.
func TestMemoryErrors(t *testing.T) {
	s := newScript(t)
	if s.look(Reading{Uncorrected: 7, Action: ActionNone}, time.Minute) {
		t.Error("old errors restrict the GPU")
	}
	if !s.look(Reading{Uncorrected: 8, Action: ActionNone}, 0) {
		t.Error("a new error restricts nothing")
	}
	s.want("a new error", Failed, Memory, false)
	s.look(Reading{Uncorrected: 8, Action: ActionNone}, 2*gpuQuiet)
	s.want("later", Fit, "", false)
	s.look(Reading{RowsFailed: true}, time.Hour)
	s.want("rows that cannot be remapped", Degraded, Memory, false)
}

// TestThrottling: only throttling that lasts counts, and a GPU that is throttled off and on is not
// now fit, now degraded.
func TestThrottling(t *testing.T) {
	s := newScript(t)
	hot := Reading{Slowdown: HardwareThermal | PowerBrake}
	s.look(hot, LookEvery)
	s.want("a peak", Fit, "", false)
	s.look(Reading{}, 0)
	s.look(hot, LookEvery)
	s.want("another peak", Fit, "", false)
	s.look(hot, throttleAfter)
	s.want("it lasts", Degraded, Throttled, false)
	for range 20 {
		s.look(Reading{}, throttleQuiet/2)
		s.want("cool for a while", Degraded, Throttled, false)
		s.look(hot, 0)
	}
	s.look(Reading{}, throttleQuiet+LookEvery)
	s.want("cool", Fit, "", false)
	s.look(hot, throttleAfter+LookEvery)
	s.g.Event(s.now, Event{Xid: 95})
	s.want("a failure counts before throttling", Failed, Xid, true)
}
