package simbench

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/lab/timeline"
)

var four = []timeline.Rate{2e9, 1e9, 500e6, 500e6}

func faults(t *testing.T, list ...string) (out []timeline.Fault) {
	t.Helper()
	for _, s := range list {
		f, err := timeline.ParseFault(s)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, f)
	}
	return out
}

func must(t *testing.T, s Setup) *timeline.Result {
	t.Helper()
	r, err := Run(context.Background(), s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestRailsAddUp: unequal rails add up.
func TestRailsAddUp(t *testing.T) {
	r := must(t, Setup{Options: &timeline.Options{Rates: four, Block: 16 << 10, Total: 256 << 20},
		Nodes: 2, Seed: 1})
	if r.Failed > 0 || len(r.Transfers) != 2 {
		t.Errorf("%d transfers, %d failed", len(r.Transfers), r.Failed)
	}
	for _, share := range []float64{r.Cold, r.Warm} {
		if share < 0.97 || share > 1.001 {
			t.Errorf("cold %.3f, warm %.3f of %s, want 0.97 to 1.001", r.Cold, r.Warm, r.Together)
		}
	}
}

// TestFaults: each kind of fault costs no transfer, leaves its mark, and is over within what the
// issue allows.
func TestFaults(t *testing.T) {
	for _, x := range []struct {
		kind   string
		within time.Duration
	}{
		{"down", 20 * time.Millisecond}, {"drop", 150 * time.Millisecond},
		{"ackdrop", 150 * time.Millisecond}, {"rate=1/20", 150 * time.Millisecond},
		{"flap=300ms", 150 * time.Millisecond}, {"blackhole", 150 * time.Millisecond},
	} {
		t.Run(x.kind, func(t *testing.T) {
			r := must(t, Setup{Options: &timeline.Options{Rates: four, Block: 16 << 10, Total: 256 << 20,
				Duration: 5 * time.Second,
				Faults:   faults(t, "1500ms:rail0:"+x.kind, "3s:rail0:heal")}, Nodes: 2, Seed: 1})
			if r.Failed > 0 || len(r.Dips) != 2 {
				t.Fatalf("%d failed, dips %+v", r.Failed, r.Dips)
			}
			t.Logf("%.3f of what is left, at %.2f after %s; healed: %s", r.Dips[0].Share, timeline.Enough,
				r.Dips[0].Recovered, r.Dips[1].Recovered)
			if d := r.Dips[0].Recovered; d < 0 || d.D() > x.within {
				t.Errorf("the fault lasted %s, want %s", d, x.within)
			}
			if d := r.Dips[1].Recovered; d < 0 || d.D() > 2*time.Second {
				t.Errorf("healed, it took %s", d)
			}
			before, during := r.Samples.Between(time.Second, 1500*time.Millisecond),
				r.Samples.Between(2500*time.Millisecond, 3*time.Second)
			if float64(during) > 0.9*float64(before) {
				t.Errorf("%d bytes in half a second before, %d during: no fault", before, during)
			}
		})
	}
}

// The simulation predicts what was measured on real rails to within Tolerance, faults and healing
// included.
func TestPredictsMeasuredRails(t *testing.T) {
	if testutil.Race {
		testutil.Skip(t, "norace", "ten times slower with -race; make test-go runs it without")
	}
	files, err := filepath.Glob("testdata/rails-*.json")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d measured results: %v", len(files), err)
	}
	for _, f := range files {
		t.Run(filepath.Base(f), func(t *testing.T) {
			real, err := readResult(f)
			if err != nil {
				t.Fatal(err)
			}
			var report strings.Builder
			if err := Compare(real, must(t, Predict(real, 1)), &report); err != nil {
				t.Errorf("%v\n%s", err, report.String())
			}
		})
	}
}

// TestSame: the same flags give the same result, on however many processors; another seed gives
// another.
func TestSame(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	s := Setup{Options: &timeline.Options{Rates: four, Block: 16 << 10, Total: 32 << 20,
		Duration: time.Second,
		Faults:   faults(t, "300ms:rail1:drop", "600ms:rail1:heal")}, Nodes: 8, Seed: 3}
	var first *timeline.Result
	for _, n := range []int{1, 2, 8} {
		runtime.GOMAXPROCS(n)
		r := must(t, s)
		if first == nil {
			first = r
		} else if d := cmp.Diff(first, r); d != "" {
			t.Errorf("%d processors: %s", n, d)
		}
	}
	s.Seed++
	if r := must(t, s); r.Trace == first.Trace {
		t.Error("two seeds have one trace")
	}
}

// TestManyNodes: what two nodes reach, hundreds do too.
func TestManyNodes(t *testing.T) {
	if testutil.Race {
		testutil.Skip(t, "norace", "ten times slower with -race; make test-go runs it without")
	}
	r := must(t, Setup{Options: &timeline.Options{Rates: []timeline.Rate{25e9, 25e9, 25e9, 25e9},
		Block: 64 << 10, Total: 64 << 20,
		Faults: faults(t, "2ms:rail2:flap=40ms")}, Nodes: 200, Seed: 1})
	if len(r.Transfers) != 200 || r.Failed > 0 {
		t.Errorf("%d transfers, %d failed", len(r.Transfers), r.Failed)
	}
	if share := float64(r.Goodput / r.Together); share < 0.5 {
		t.Errorf("%.3f of %s", share, r.Together)
	}
}

func TestRefused(t *testing.T) {
	ok := timeline.Options{Rates: four, Block: 16 << 10, Total: 1 << 20}
	for _, x := range []struct {
		change func(*Setup)
		want   string
	}{
		{func(s *Setup) { s.Nodes = 3 }, "--nodes 3: must be even"},
		{func(s *Setup) { s.Nodes = 1 << 20 }, "--nodes 1048576"},
		{func(s *Setup) { s.Options.Total = 8192 }, "--total 8KiB: must be a multiple of 16KiB"},
		{func(s *Setup) { s.Options.Total = 8 << 30 }, "--total 8GiB: at most 4GiB"},
	} {
		o := ok
		s := Setup{Options: &o, Nodes: 2}
		x.change(&s)
		if _, err := Run(context.Background(), s); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%v, want %q", err, x.want)
		}
	}
	o := ok
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	o.Total = 1 << 30
	if _, err := Run(ctx, Setup{Options: &o, Nodes: 64}); err == nil {
		t.Error("a run that was cancelled ended well")
	}
}

// TestCompare: a run agrees with itself, and whatever is further away than the tolerance is named.
func TestCompare(t *testing.T) {
	s := Setup{Options: &timeline.Options{Rates: four, Block: 16 << 10, Total: 64 << 20,
		Duration: 2 * time.Second,
		Faults:   faults(t, "1s:rail0:down")}, Nodes: 2, Seed: 1}
	real := must(t, s)
	again := must(t, Predict(real, 2))
	var out bytes.Buffer
	if err := Compare(real, again, &out); err != nil {
		t.Errorf("%v\n%s", err, &out)
	}
	if n := strings.Count(out.String(), "\n"); n != 2 {
		t.Errorf("%d lines: %s", n, &out)
	}
	less := *again
	less.Goodput *= 0.9
	if err := Compare(real, &less, io.Discard); err == nil || !strings.Contains(err.Error(),
		"goodput") {
		t.Errorf("a tenth less: %v", err)
	}
	less = *again
	less.Dips = append([]timeline.Dip(nil), again.Dips...)
	less.Dips[0].Share -= 0.1
	if err := Compare(real, &less, io.Discard); err == nil || !strings.Contains(err.Error(),
		"rail0:down") {
		t.Errorf("a deeper dip: %v", err)
	}
	less.Dips = nil
	if err := Compare(real, &less, io.Discard); err == nil {
		t.Error("a dip is missing, and Compare accepts it")
	}
}

// TestAgainst reads a file as the command does.
func TestAgainst(t *testing.T) {
	real := must(t, Setup{Options: &timeline.Options{Rates: four, Block: 16 << 10, Total: 64 << 20},
		Nodes: 2, Seed: 1})
	real.Bench = "rails"
	path := filepath.Join(t.TempDir(), "rails.json")
	var b bytes.Buffer
	if err := real.Write(&b); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	command := func(args ...string) (stdout, stderr string, err error) {
		var out, errs bytes.Buffer
		c := NewCommand()
		c.SilenceUsage, c.SilenceErrors = true, true
		c.SetArgs(args)
		c.SetOut(&out)
		c.SetErr(&errs)
		err = c.Execute()
		return out.String(), errs.String(), err
	}
	if _, errs, err := command("--against", path); err != nil || !strings.Contains(errs,
		"later transfers") {
		t.Errorf("%v: %s", err, errs)
	}
	if _, _, err := command("--against", path, "--rates", "1gbit"); err == nil ||
		!strings.Contains(err.Error(), "--rates") {
		t.Errorf("--rates beside --against: %v", err)
	}
	for name, text := range map[string]string{"of nothing": "{}",
		"of no rails": `{"bench": "rails", "total_bytes": 1048576, ` +
			`"block_bytes": 16384}`,
		"of the simulation": strings.Replace(b.String(), `"rails"`, `"sim"`, 1),
		"of no speed": strings.Replace(b.String(), `"rate_bits_per_second": 2000000000`,
			`"rate_bits_per_second": 20`, 1),
		"of nothing together": strings.Replace(b.String(), `"together_bits_per_second": `,
			`"together_bits_per_second": -`, 1), "of no bytes": "",
		"of odd blocks": strings.Replace(b.String(), `"block_bytes": 16384`, `"block_bytes": 5`, 1)} {
		odd := filepath.Join(t.TempDir(), "odd.json")
		if err := os.WriteFile(odd, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := command("--against", odd); !usage.Is(err) || !strings.Contains(err.Error(),
			odd) || !strings.Contains(err.Error(), "kvspray-bench rails --json FILE") {
			t.Errorf("a result %s: %v", name, err)
		}
	}
	if _, _, err := command("--against", path+"x"); !usage.Is(err) || !strings.Contains(err.Error(),
		"kvspray-bench rails --json FILE") {
		t.Errorf("a file that is not there: %v", err)
	}
	html := filepath.Join(t.TempDir(), "x.html")
	out, _, err := command("--total", "16MiB", "--json", "-", "--html", html)
	if err != nil {
		t.Fatal(err)
	}
	if r, err := timeline.Read(strings.NewReader(out)); err != nil || r.Bench != "sim" {
		t.Errorf("%v: %+v", err, r)
	}
	if b, err := os.ReadFile(html); err != nil || !bytes.Contains(b, []byte("<svg")) {
		t.Errorf("%.200q: %v", b, err)
	}
}
