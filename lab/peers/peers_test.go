package peers

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/lab/machine"
	"github.com/kvspray/kvspray/lab/timeline"
)

func parsed(t *testing.T, only, faults string) *options {
	t.Helper()
	o := &options{turns: 2, span: 9 * time.Second, machine: machine.Here(), out: t.TempDir(),
		stdout: io.Discard, stderr: io.Discard}
	if err := o.parse("1gbit,2gbit,500mbit", "16KiB", "32MiB", only, faults); err != nil {
		t.Fatal(err)
	}
	return o
}

// Every way in which a rail can die is there without being asked for, of the fastest rail, and each
// is healed.
func TestScenarios(t *testing.T) {
	o := parsed(t, "", defaultFaults)
	var kinds []timeline.Kind
	for _, s := range o.scenarios[1:] {
		f := s.faults
		rail := 1
		if strings.HasPrefix(s.name, "the slowest") {
			rail = 2
		}
		if len(f) != 2 || f[0].Rail != rail || f[1].Rail != rail || f[0].At != 2*time.Second ||
			f[1].At != 5*time.Second || f[1].Kind != timeline.Heal {
			t.Errorf("%s: %v", s.name, f)
		}
		kinds = append(kinds, f[0].Kind)
	}
	if want := []timeline.Kind{timeline.Down, timeline.Drop, timeline.AckDrop, timeline.Slow,
		timeline.Flap, timeline.Blackhole, timeline.Down}; !slices.Equal(kinds, want) {
		t.Errorf("faults %v, want %v", kinds, want)
	}
	if s := o.scenarios[0]; s.name != "healthy" || len(s.faults) != 0 {
		t.Errorf("the first scenario is %+v", s)
	}
	first := map[string]int{}
	for turn := range 2 * len(engines) {
		order := o.order(turn)
		if len(order) != len(engines) {
			t.Fatalf("turn %d: %v", turn, order)
		}
		first[order[0].name]++
	}
	for _, e := range engines {
		if first[e.name] != 2 {
			t.Errorf("%s begins %d times, want as often as the others: %v", e.name, first[e.name], first)
		}
	}
}

func TestRefused(t *testing.T) {
	for _, x := range []struct {
		faults, only, want string
		span               time.Duration
	}{
		{"explode", "", `--faults: "2s:rail1:explode": kind "explode"`, 0},
		{"rate=2", "", `rate "2"`, 0},
		{"heal", "", `--faults: "heal": nothing fails by that`, 0},
		{"slowest:up", "", "nothing fails by that", 0},
		{"fastest:down", "", "want T:railN:kind", 0},
		{"down", "nixl,nobody", `--engines "nixl,nobody": "nobody" is none of kvspray`, 0},
		{"down", "", "--span 1s: must be from 3s to 1m0s", time.Second},
	} {
		o := &options{turns: 1, span: max(x.span, 0)}
		if x.span == 0 {
			o.span = 9 * time.Second
		}
		if err := o.parse("1gbit,2gbit", "656,9KiB,28KiB", "32MiB", x.only, x.faults); err == nil ||
			!strings.Contains(err.Error(), x.want) {
			t.Errorf("%q, %q: %v, want %q", x.faults, x.only, err, x.want)
		}
	}
}

// An engine that cannot be started does not keep the others from being compared: the table has
// that it was left out, and why. One that could be before has what it did, and the turn that it
// missed.
func TestUnable(t *testing.T) {
	o := parsed(t, "kvspray,nixl,mooncake", "down,drop")
	var all []*outcome
	err := o.turnsOf(t.Context(), func(_ context.Context, e engine, s scenario,
		block int) (*outcome, error) {
		if e.name == "nixl" || e.name == "mooncake" && s.name == o.scenarios[2].name {
			return nil, &unableError{"no backend of " + e.name}
		}
		r := &timeline.Result{Faults: s.faults,
			Transfers: []timeline.Transfer{{Took: timeline.Seconds(time.Second)}}, Cold: 0.5, Warm: 0.6}
		for range min(len(s.faults), 1) {
			r.Dips = []timeline.Dip{{Recovered: timeline.Seconds(30 * time.Millisecond)}}
		}
		return &outcome{Engine: e.name, Scenario: s.name, Block: block, Result: r, During: 0.9}, nil
	}, func(x *outcome) { all = append(all, x) })
	if err != nil {
		t.Fatal(err)
	}
	if n := 2 * 2 * len(o.scenarios); len(all) != n {
		t.Errorf("%d turns, want %d", len(all), n)
	}
	if err := o.write(all); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(o.out, "table.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"NIXL 1.5.1, UCX tcp, all devices is left out: no backend of nixl\n",
		"0 of 0 (not started: no backend of mooncake)", "0.900",
		"0.03 s", "never", o.machine.String(), "kvspray " + o.machine.Version} {
		if !strings.Contains(string(b), want) {
			t.Errorf("%q is not in %s", want, b)
		}
	}
	broken := errors.New("no rails")
	if err := o.turnsOf(t.Context(), func(context.Context, engine, scenario, int) (*outcome,
		error) {
		return nil, broken
	}, nil); !errors.Is(err, broken) {
		t.Errorf("what no engine is to blame for: %v", err)
	}
}

// The last output of an engine is why it could not be started.
func TestUnableHasLastOutput(t *testing.T) {
	d := &driver{log: filepath.Join(t.TempDir(), "log")}
	if err := d.unable(errEnded); err.Error() != errEnded.Error() {
		t.Errorf("without a log: %v", err)
	}
	if err := os.WriteFile(d.log, []byte("Traceback\nModuleNotFoundError: No module named 'nixl'\n\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.unable(errEnded); err.Error() != "ModuleNotFoundError: No module named 'nixl'" {
		t.Error(err)
	}
}
