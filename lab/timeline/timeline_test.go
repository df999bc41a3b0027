package timeline

import (
	"bytes"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
)

func parse(t *testing.T, args ...string) (*Options, error) {
	t.Helper()
	var x *Flags
	var o *Options
	cmd := &cobra.Command{Use: "x", SilenceErrors: true, SilenceUsage: true, RunE: func(*cobra.Command,
		[]string) (err error) {
		o, err = x.Options()
		return err
	}}
	x = AddFlags(cmd)
	cmd.SetArgs(args)
	cmd.SetOut(io.Discard)
	return o, cmd.Execute()
}

// TestFlags reads the command line that the issue gives.
func TestFlags(t *testing.T) {
	html := filepath.Join(t.TempDir(), "f")
	o, err := parse(t, "--rates", "2gbit,1gbit, 500mbit,2.5gbit", "--block", "64KiB", "--duration", "8s",
		"--fault", "5s:rail0:up", "--fault", "2s:rail0:down", "--fault", "2s:all:rate=1/20", "--fault",
		"500ms:rail3:flap=300ms", "--json", "-", "--html", html)
	if err != nil {
		t.Fatal(err)
	}
	want := &Options{Rates: []Rate{2e9, 1e9, 500e6, 2.5e9}, Block: 64 << 10, Total: 256 << 20,
		Duration: 8 * time.Second, JSON: "-", HTML: html,
		Faults: []Fault{{At: 500 * time.Millisecond, Rail: 3, Kind: Flap, Period: 300 * time.Millisecond},
			{At: 2 * time.Second, Kind: Down},
			{At: 2 * time.Second, Rail: AllRails, Kind: Slow, Share: 0.05}, {At: 5 * time.Second, Kind: Up}}}
	if d := cmp.Diff(want, o); d != "" {
		t.Error(d)
	}
	for _, f := range o.Faults {
		if again, err := ParseFault(f.String()); err != nil || again != f {
			t.Errorf("%s: read again it is %v: %v", f, again, err)
		}
	}
	if o, err = parse(t); err != nil || len(o.Rates) != 4 || o.Duration != 0 || o.Total != 256<<20 {
		t.Errorf("no flags: %+v: %v", o, err)
	}
	// Blocks of real pages: the default is whole blocks in 32 layers.
	for block, total := range map[string]int64{"656": 268424704, "9KiB": 268369920,
		"28KiB": 267911168} {
		if o, err = parse(t, "--block", block); err != nil || o.Total != total ||
			o.Total%int64(32*o.Block) != 0 {
			t.Errorf("--block %s: %+v: %v", block, o, err)
		}
	}
}

// TestFlagsRefused: each usage error names its flag and value.
func TestFlagsRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "old")
	if err := os.WriteFile(file, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct{ args, want string }{
		{"--rates 2gbit,fast", `--rates: "fast": want a rate`},
		{"--rates 900gbit", `--rates: "900gbit": must be`},
		{"--rates -1gbit", `--rates: "-1gbit": must be`},
		{"--rates nangbit", `--rates: "nangbit": want a rate`},
		{"--rates " + strings.Repeat("1gbit,", MaxRails) + "1gbit", "at most 16"},
		{"--block 16KB", `--block: "16KB": want a size`},
		{"--block 3000", "--block 3000: must be a multiple of 16 bytes, from 512 to 16MiB"},
		{"--block 496", "--block 496: must be a multiple"},
		{"--block 1GiB", "--block 1GiB: must be a multiple of 16 bytes"},
		{"--block 656 --total 256MiB", "--total 256MiB: must be a multiple of --block 656, such as " +
			"268424704"},
		{"--total 0", "--total"},
		{"--total 9999999999GiB", "--total"},
		{"--total 17KiB", "--total 17KiB: must be a multiple of --block 16KiB"},
		{"--total 1MiB --duration 1s", "total"},
		{"--duration 0s", "--duration 0s: must be positive"},
		{"--duration 2h", "--duration 2h0m0s: at most"},
		{"--fault down", "want T:railN:kind"},
		{"--fault 1:rail0:down", `time "1"`},
		{"--fault -1s:rail0:down", `time "-1s"`},
		{"--fault 1s:eth0:down", `rail "eth0"`},
		{"--fault 1s:rail4:down", "--fault 1s:rail4:down: there are 4 rails"},
		{"--fault 1s:rail99999:down", `rail "rail99999"`},
		{"--fault 1s:rail0:explode", `kind "explode": want one of down, up`},
		{"--fault 1s:rail0:down=3", "kind down takes no value"},
		{"--fault 1s:rail0:rate", `rate ""`},
		{"--fault 1s:rail0:rate=2", `rate "2"`},
		{"--fault 1s:rail0:rate=1/0", `rate "1/0"`},
		{"--fault 1s:rail0:rate=0/0", `rate "0/0"`},
		{"--fault 1s:rail0:flap=1ms", `flap "1ms"`},
		{"--fault 9s:rail0:down --duration 8s", "never happens within"},
		{"--json - --html -", "only one"},
		{"--json x --html x", "--json x and --html x: only one"},
		{"--json /nowhere/x", "--json: open /nowhere/x: no such file"},
		{"--html " + file + "/x", "--html: open " + file + "/x: not a directory"},
		{"--html .", "--html: open .: is a directory"},
	} {
		if _, err := parse(t, strings.Fields(x.args)...); err == nil ||
			!strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", x.args, err, x.want)
		}
	}
	// Looking whether a file can be written changes nothing.
	fresh := filepath.Join(filepath.Dir(file), "new")
	if _, err := parse(t, "--json", file, "--html", fresh); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "old" {
		t.Errorf("a file that was there holds %q, %v", b, err)
	}
	if _, err := os.Stat(fresh); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that was not there: %v", err)
	}
}

func TestUnits(t *testing.T) {
	for s, want := range map[string]Rate{"1gbit": 1e9, "500mbit": 500e6, "2.5gbit": 2.5e9,
		"1mbit": 1e6, "1500kbit": 1.5e6} {
		r, err := ParseRate(s)
		if err != nil || r != want {
			t.Errorf("%s: %g: %v", s, r, err)
		}
		if again, err := ParseRate(r.String()); err != nil || again != r {
			t.Errorf("%s is written as %s: %v", s, r, err)
		}
	}
	for s, want := range map[string]int64{"16KiB": 16 << 10, "3MiB": 3 << 20, "1GiB": 1 << 30,
		"513": 513} {
		if n, err := ParseSize(s); err != nil || n != want || FormatSize(n) != s {
			t.Errorf("%s: %d, %s: %v", s, n, FormatSize(n), err)
		}
	}
}

// A limit is named only to who goes beyond it: the callers' own are lower.
func TestSizesRefused(t *testing.T) {
	for text, limit := range map[string]bool{"64MB": false, "": false, "-1": false, "0": false,
		"16385GiB": true, "17592186044417": true} {
		if _, err := ParseSize(text); err == nil || strings.Contains(err.Error(), "16384GiB") != limit {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestConditions(t *testing.T) {
	var faults []Fault
	for _, s := range []string{"1s:rail0:down", "2s:rail0:rate=1/4", "3s:rail0:up", "4s:all:drop",
		"5s:rail0:flap=300ms", "6s:rail0:up", "7s:rail0:heal"} {
		f, err := ParseFault(s)
		if err != nil {
			t.Fatal(err)
		}
		faults = append(faults, f)
	}
	for at, want := range []float64{1, 0, 0, 0.25, 0, 0, 0, 1} {
		if got := ConditionAt(faults, 0, time.Duration(at)*time.Second).Usable(); got != want {
			t.Errorf("rail 0 at %d s: %g is usable, want %g", at, got, want)
		}
	}
	if got := ConditionAt(faults, 1, 10*time.Second).Usable(); got != 0 {
		t.Errorf("rail 1 was never healed, and %g is usable", got)
	}
}

// TestJudge reads a run whose numbers are known: two equal rails; one dies at 1 s, for 80 ms
// nothing comes, then the other's rate.
func TestJudge(t *testing.T) {
	const each = Rate(800e6) // 100 bytes a microsecond
	r := &Result{Bench: "sim", Host: "none", Total: 1 << 20, Block: 16 << 10,
		Together: 2 * each, Faults: []Fault{{At: time.Second, Rail: 1, Kind: Down}, {At: time.Minute,
			Rail: 0, Kind: Down}},
		Rails: []Rail{{Name: "rail0", Rate: each, Alone: each}, {Name: "rail1", Rate: each,
			Alone: each}},
		Transfers: []Transfer{{Took: Seconds(time.Second), Bytes: 180e6}, {Began: Seconds(time.Second),
			Took: Seconds(time.Second), Bytes: 92e6}, {Error: "gone"}},
		Samples: Samples{Every: Seconds(SampleEvery), Bytes: make([][]uint64, 2)}}
	for i := range 401 {
		at := time.Duration(i) * SampleEvery
		r.Samples.Bytes[1] = append(r.Samples.Bytes[1], uint64(each.Over(min(at, time.Second))))
		r.Samples.Bytes[0] = append(r.Samples.Bytes[0],
			uint64(each.Over(min(at, time.Second)+max(0, at-1080*time.Millisecond))))
	}
	r.Judge()
	near := func(what string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > 1e-6*max(1, want) {
			t.Errorf("%s: %g, want %g", what, got, want)
		}
	}
	near("goodput", float64(r.Goodput), 272e6*8/2)
	near("share", r.Share, 272e6*8/2/float64(2*each))
	near("cold", r.Cold, 0.9)
	near("warm", r.Warm, 0.46)
	if r.Failed != 1 || len(r.Dips) != 1 {
		t.Fatalf("%d failed, dips %+v", r.Failed, r.Dips)
	}
	d := r.Dips[0]
	near("expected", float64(d.Expected), float64(each))
	near("share", d.Share, 0.84) // of 500 ms, 80 are missing
	if d.Recovered.D() != 80*time.Millisecond {
		t.Errorf("recovered after %s", d.Recovered)
	}

	var b bytes.Buffer
	if err := r.Write(&b); err != nil {
		t.Fatal(err)
	}
	again, err := Read(bytes.NewReader(b.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(r, again); d != "" {
		t.Error(d)
	}
	b.Reset()
	if err := r.Print(&b); err != nil || !strings.Contains(b.String(), "0.840 of 800mbit in the "+
		"500ms after; the rails that are whole at 0.95 of their 800mbit after 80ms") ||
		!strings.Contains(b.String(), "[1m0s:rail0:down]: too late") {
		t.Errorf("%v: %s", err, b.String())
	}

	// A rail that never comes near is listed, and one that claims more together than alone is not
	// expected to.
	r.Rails[0].Alone *= 2
	r.Judge()
	near("expected of claims", float64(r.Dips[0].Expected), float64(2*each)*2/3)
	if r.Dips[0].Recovered != Never {
		t.Errorf("recovered after %s", r.Dips[0].Recovered)
	}
}

// TestJudgeSurvivors: after a fault the window is judged by the rails that nothing happened to, and
// by them alone. The receiver's device of the other one goes on counting here: what a filter
// swallows, what no end learns of, or what a flapping link brings while it is up. Everything counts
// from the moment at which the fault had taken effect.
func TestJudgeSurvivors(t *testing.T) {
	const each = Rate(800e6)
	// of the command; of the other rail's bytes
	const began, done, back = 1005 * time.Millisecond, 1020 * time.Millisecond, 1080 * time.Millisecond
	for kind, want := range map[string]struct {
		expected Rate
		share    float64
	}{
		"down": {each, 0.88}, "drop": {each, 0.88}, "ackdrop": {each, 0.88}, "blackhole": {each, 0.88},
		"rate=1/4":   {each * 5 / 4, (0.88 + 1) / 1.25}, // all that is slow is used
		"flap=300ms": {each, 1.88},
	} {
		t.Run(kind, func(t *testing.T) {
			var faults []Fault
			for _, s := range []string{"1s:rail1:" + kind, "2s:rail1:heal", "3s:all:drop"} {
				f, err := ParseFault(s)
				if err != nil {
					t.Fatal(err)
				}
				faults = append(faults, f)
			}
			r := &Result{Bench: "rails", Total: 1 << 20, Block: 16 << 10, Together: 2 * each, Faults: faults,
				Applied: []Span{{Seconds(began), Seconds(done)}},
				Rails: []Rail{{Name: "rail0", Rate: each, Alone: each}, {Name: "rail1", Rate: each,
					Alone: each}},
				Transfers: []Transfer{{Took: Seconds(4 * time.Second), Bytes: 700e6}},
				Samples:   Samples{Every: Seconds(SampleEvery), Bytes: make([][]uint64, 2)}}
			for i := range 801 {
				at := time.Duration(i) * SampleEvery
				r.Samples.Bytes[0] = append(r.Samples.Bytes[0],
					uint64(each.Over(min(at, done)+max(0, at-back))))
				r.Samples.Bytes[1] = append(r.Samples.Bytes[1], uint64(each.Over(at)))
			}
			r.Judge()
			if len(r.Dips) != 3 {
				t.Fatalf("dips %+v", r.Dips)
			}
			d := r.Dips[0]
			if d.At.D() != done || d.Took.D() != done-began {
				t.Errorf("at %s, after a command of %s", d.At, d.Took)
			}
			if d.Recovered.D() != back-done {
				t.Errorf("the window began after %s, want %s: a rail that failed was counted",
					d.Recovered, back-done)
			}
			if d.Surviving != each || math.Abs(float64(d.Expected-want.expected)) > 1 ||
				math.Abs(d.Share-want.share) > 1e-6 {
				t.Errorf("%s survive, %s expected, of which %.3f came, want %s and %.3f", d.Surviving,
					d.Expected, d.Share, want.expected, want.share)
			}
			if s := r.Surviving(time.Second, done, done+200*time.Millisecond); math.Abs(s-0.7) > 1e-6 {
				t.Errorf("%.3f of the survivor's 200 ms came, 60 of them nothing", s)
			}
			if s := r.Surviving(3*time.Second, 3*time.Second, 4*time.Second); s != 0 {
				t.Errorf("%.3f came where no rail is whole", s)
			}
			if d := r.Dips[1]; d.At.D() != 2*time.Second || d.Surviving != 2*each || d.Recovered != 0 {
				t.Errorf("healed: %+v", d)
			}
			if d := r.Dips[2]; d.Surviving != 0 || d.Recovered != Never || d.Share != 0 {
				t.Errorf("nothing is left: %+v", d)
			}
			var b bytes.Buffer
			if err := r.Print(&b); err != nil || !strings.Contains(b.String(), "; no rail is whole") {
				t.Errorf("%v: %s", err, b.String())
			}
		})
	}
}

// TestReadRefused: a file that is no result is refused.
func TestReadRefused(t *testing.T) {
	for s, want := range map[string]string{
		`{`:                                "read a result",
		`{"speed": 3}`:                     "speed",
		`{"faults": ["1s:rail0:explode"]}`: "explode",
		`{"samples": {"every_seconds": 0.005, "rail_bytes": [[3, 2]]}}`:                         "go down",
		`{"duration_seconds": 1e300}`:                                                           "out of range",
		`{"faults_applied": [{"from_seconds": 1, "to_seconds": 2}]}`:                            "1 entries for 0 faults",
		`{"faults": ["1s:all:drop"], "faults_applied": [{"from_seconds": 2, "to_seconds": 1}]}`: "faults_applied[0] is from 2s to 1s",
		`{"faults": ["1s:all:drop", "1s:all:heal"], "faults_applied": [{"from_seconds": 1, "to_seconds": 3}, {"from_seconds": 2, "to_seconds": 4}]}`: "faults_applied[1]",
	} {
		if _, err := Read(strings.NewReader(s)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", s, err, want)
		}
	}
}

func FuzzParseFault(f *testing.F) {
	for _, s := range []string{"2s:rail0:down", "1s:all:rate=1/20", "500ms:rail1:flap=300ms",
		"1s:rail0:rate=0.3"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		x, err := ParseFault(s)
		if err != nil {
			return
		}
		again, err := ParseFault(x.String())
		if err != nil || again != x {
			t.Errorf("%q is %+v, written as %s it is %+v: %v", s, x, x, again, err)
		}
	})
}

// TestJudgeSenders: a transfer is judged by what its own sender's links carry, all of them together
// by all links.
func TestJudgeSenders(t *testing.T) {
	const links = Rate(800e6) // of one sender: 100 bytes a microsecond
	r := &Result{Bench: "sim", Nodes: 6, Total: 90e6, Block: 16 << 10, Together: 3 * links,
		Rails: []Rail{{Name: "rail0", Rate: links, Alone: 3 * links}}}
	for sender := range 3 {
		r.Transfers = append(r.Transfers, Transfer{Sender: sender, Took: Seconds(time.Second),
			Bytes: 90e6},
			Transfer{Sender: sender, Began: Seconds(time.Second), Took: Seconds(time.Second), Bytes: 95e6})
	}
	r.Judge()
	if d := math.Abs(r.Cold-0.9) + math.Abs(r.Warm-0.95) + math.Abs(r.Share-0.925); d > 1e-9 {
		t.Errorf("first %g, later %g, all %g: want 0.9, 0.95, 0.925", r.Cold, r.Warm, r.Share)
	}
	var b bytes.Buffer
	if err := r.Print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"rail0       800mbit, alone 800mbit\n", "together 800mbit for " +
		"each of 3 senders, 2.4gbit in all; 6 transfers", "moved 2.22gbit: 0.925 of what the links " +
		"carry together\n",
		"the first 0.900, later ones 0.950\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in %s", want, b.String())
		}
	}
}
