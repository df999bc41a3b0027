package metrics

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvspray/kvspray/transfer"
)

// exercise touches every series once.
func exercise(s *Set) {
	s.TransferEnded(SideDestination, OK, "tcp", 4096, time.Millisecond)
	s.FlagToCommit(time.Millisecond)
	s.Slice("tcp", "lo", transfer.Landed, transfer.ReasonNone, 65536)
	s.Slice("tcp", "lo", transfer.Rejected, transfer.ReasonChecksum, 65536)
	s.Landed("tcp", "lo", 65536)
	s.LaneUp("tcp", "lo")
	s.LaneDown("tcp", "lo", true)
	s.FrameRefused("tcp", transfer.ReasonRevoked)
	s.LeasesOpen(SideSource, 2)
	s.LeasesOpen(SideSource, -1)
	s.Quarantined(1)
	s.Fenced(CauseCommit, time.Microsecond)
	s.Control(Out, "grant")
	s.Peers(1)
	s.Expires(time.Unix(1, 0))
	s.Sessions("worker", 1)
	s.Record("intent")
	s.EngineRefused("overlap")
	s.Draining(true)
}

// rails has a name for each of the bounded series, and one rail too many.
func rails() (out []RailSample) {
	for i := range maxRails + 10 {
		out = append(out, RailSample{Transport: "tcp", Rail: fmt.Sprint("r", i),
			Pairs: map[string]float64{"healthy": 2}, InFlight: 1, Window: 2, Rate: 3,
			Error: 0.5, Retries: map[string]float64{"silence": 4}, Hedges: 5, Exclusions: 6, Readmissions: 7,
			Probes: map[string]float64{"ok": 8},
			Up:     1, Suspicions: 9, Slices: map[string]float64{"confirmed": 10}})
	}
	return out
}

// What many rails are made of stays bounded, and the series do not collide.
func TestRailsAreBounded(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	if err := New(reg).Rails(reg, rails); err != nil {
		t.Fatal(err)
	}
	if n := testutil.CollectAndCount(railCollector{New(prometheus.NewRegistry()), rails},
		"kvspray_rail_window_bytes"); n != maxRails+1 {
		t.Errorf("%d rails have series, want %d and %q", n, maxRails, otherName)
	}
	if _, err := reg.Gather(); err != nil {
		t.Error(err)
	}
}

func TestNames(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	s := New(reg)
	exercise(s)
	if err := s.Rails(reg, rails); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if len(families) != 35 {
		t.Errorf("%d families, want 35: every collector is registered and exercised", len(families))
	}
	shape := regexp.MustCompile(`^kvspray_(transfers_total|` +
		`(transfer|rail|lane|lease|control|engine|sidecar)_[a-z_]+)$`)
	for _, f := range families {
		name := f.GetName()
		if !shape.MatchString(name) {
			t.Errorf("%s does not follow kvspray_<subsystem>_<noun>_<unit> or kvspray_<subsystems>_total",
				name)
		}
		counter := f.GetType().String() == "COUNTER"
		if counter != strings.HasSuffix(name, "_total") {
			t.Errorf("%s is a %s", name, f.GetType())
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				switch l.GetName() {
				case "request", "req", "lease", "xfer", "boot", "peer":
					t.Errorf("%s has the unbounded label %s", name, l.GetName())
				}
			}
		}
	}
}

func TestValues(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	exercise(New(reg))
	want := `
# HELP kvspray_lease_open Open leases.
# TYPE kvspray_lease_open gauge
kvspray_lease_open{side="source"} 1
# HELP kvspray_rail_bytes_total Payload bytes over a rail.
# TYPE kvspray_rail_bytes_total counter
kvspray_rail_bytes_total{direction="in",rail="lo",transport="tcp"} 65536
kvspray_rail_bytes_total{direction="out",rail="lo",transport="tcp"} 65536
# HELP kvspray_rail_errors_total Lanes lost and slices failed on a rail.
# TYPE kvspray_rail_errors_total counter
kvspray_rail_errors_total{rail="lo",transport="tcp"} 2
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "kvspray_lease_open",
		"kvspray_rail_bytes_total", "kvspray_rail_errors_total"); err != nil {
		t.Error(err)
	}
}

// No value from a peer or an engine makes the number of series grow without bound.
func TestSeriesAreBounded(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	s := New(reg)
	for i := range 2000 {
		name := fmt.Sprintf("x%d", i)
		s.TransferEnded(SideSource, Outcome(name), name, 1, 0)
		s.Slice(name, name, transfer.Outcome(i), transfer.Reason(i), 1)
		s.FrameRefused(name, transfer.Reason(i))
		s.Fenced(name, 0)
		s.Control(In, name)
		s.Sessions(name, 1)
		s.Record(name)
		s.LaneUp(name, name)
	}
	n, err := testutil.GatherAndCount(reg)
	if err != nil {
		t.Fatal(err)
	}
	if limit := 4*(maxRails+1) + 200; n > limit {
		t.Errorf("%d series after 2000 invented names, want at most %d", n, limit)
	}
}

func TestOutcomeOf(t *testing.T) {
	for status, want := range map[uint16]Outcome{0: OK, 1: Failed, 2: Canceled, 3: Expired,
		4: Refused, 5: Lost, 6: otherName} {
		if got := OutcomeOf(status); got != want {
			t.Errorf("OutcomeOf(%d) = %q, want %q", status, got, want)
		}
	}
}

// Protocol violations of peers have a series for each reason from the start, zeros too: an alert on
// growth misses a series' first value.
func TestViolations(t *testing.T) {
	reg := prometheus.NewRegistry()
	s := New(reg)
	if err := s.Violations(reg, func() map[string]uint64 {
		return map[string]uint64{"key": 7,
			"rank": 0}
	}); err != nil {
		t.Fatal(err)
	}
	want := `
# HELP kvspray_control_violations_total Protocol violations of peers on control lanes, by the invalid field. The log has the first of each peer.
# TYPE kvspray_control_violations_total counter
kvspray_control_violations_total{reason="key"} 7
kvspray_control_violations_total{reason="rank"} 0
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want),
		"kvspray_control_violations_total"); err != nil {
		t.Error(err)
	}
}
