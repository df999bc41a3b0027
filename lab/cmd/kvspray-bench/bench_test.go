package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/testutil"
	product "github.com/kvspray/kvspray/internal/ui/cli"
	bench "github.com/kvspray/kvspray/lab/cli"
	"github.com/kvspray/kvspray/lab/railsbench"
	"github.com/kvspray/kvspray/lab/railsbench/netrig"
	"github.com/kvspray/kvspray/lab/timeline"
)

// commandEnv makes this test's binary act as the command, and as the sidecars that `rails` starts.
const commandEnv = "KVSPRAY_TEST_COMMAND"

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(commandEnv) == "":
	case len(os.Args) > 1 && os.Args[1] == "serve":
		os.Exit(product.Main(os.Args[1:], os.Stdout, os.Stderr))
	default:
		main()
	}
	os.Exit(m.Run())
}

// faultKinds are faults of rail 1, one of each kind.
var faultKinds = []string{"20ms:rail1:down", "40ms:rail1:up", "60ms:rail1:drop", "80ms:rail1:heal",
	"100ms:rail1:ackdrop", "110ms:rail1:heal", "120ms:rail1:rate=1/20",
	"130ms:rail1:heal", "140ms:all:rate=1/2", "150ms:rail1:flap=40ms", "180ms:rail1:up",
	"190ms:rail1:blackhole", "200ms:all:heal"}

func flags(faults []string) (args []string) {
	for _, f := range faults {
		args = append(args, "--fault", f)
	}
	return args
}

// usage is the exit code of usage errors, failure that of run-time failures.
const usage, failure = 2, 1

// Each usage error is reported before anything is built, with its flag, its value and the remedy.
func TestBenchFlags(t *testing.T) {
	const two = "--rates 200mbit,100mbit "
	for _, name := range []string{"rails", "sim"} {
		for _, x := range []struct {
			args string
			want []string
		}{
			{"--total 16MiB --duration 1s", []string{"--total 16MiB and --duration 1s: give one of them"}},
			{"--duration 1s --total 16MiB", []string{"--total 16MiB and --duration 1s: give one of them"}},
			{"--duration -1s", []string{"--duration -1s", "must be positive"}},
			{"--total 17KiB", []string{"--total 17KiB", "must be a multiple of --block 16KiB"}},
			{"--rates 2gbit,fast", []string{`--rates: "fast"`, "want a rate"}},
			{two + "--fault 2s:rail0:explode", []string{`--fault: "2s:rail0:explode"`, "want one of down, " +
				"up, drop, ackdrop, rate, flap, blackhole, heal"}},
			{two + "--fault 2s:rail0:rate=20", []string{"--fault", `rate "20"`, "above 0 and at most 1, " +
				"such as rate=1/20"}},
			{two + "--fault 2s:rail0:flap=1ms", []string{"--fault", `flap "1ms"`,
				"a period of 20ms or more"}},
			{two + "--fault 2s:rail0:down=1", []string{"--fault", "kind down takes no value"}},
			{two + "--fault rail0:down", []string{"--fault",
				"want T:railN:kind, for instance 2s:rail0:down"}},
			{two + "--duration 1s --fault 2s:rail0:down", []string{"--fault 2s:rail0:down",
				"never happens within --duration 1s"}},
			// Every kind is parsed: the only error is in the last one.
			{two + strings.Join(flags(append(faultKinds, "1s:rail2:heal")), " "),
				[]string{"--fault 1s:rail2:heal", "there are 2 rails, rail0 to rail1"}},
			{"--json x --html x", []string{"--json x and --html x", "only one can go there"}},
			{"--json /nowhere/x", []string{"--json", "/nowhere/x", "no such file or directory"}},
			{"somewhere", []string{"somewhere"}},
		} {
			var out, errs bytes.Buffer
			code := bench.Main(append([]string{name}, strings.Fields(x.args)...), &out, &errs)
			if code != usage || out.Len() > 0 {
				t.Errorf("%s %s: exit code %d, and it printed %q", name, x.args, code, &out)
			}
			for _, w := range x.want {
				if !strings.Contains(errs.String(), w) {
					t.Errorf("%s %s: %q: want %q in it", name, x.args, &errs, w)
				}
			}
		}
	}
	var out, errs bytes.Buffer
	if code := bench.Main([]string{"rails", "--plain", "1ms"}, &out, &errs); code != usage ||
		!strings.Contains(errs.String(), "--plain 1ms: must be from 100ms") {
		t.Errorf("exit code %d: %q", code, &errs)
	}
	if code := bench.Main([]string{"sim", "--nodes", "3"}, &out, &errs); code != usage ||
		!strings.Contains(errs.String(), "--nodes 3: must be even, 2 to") {
		t.Errorf("exit code %d: %q", code, &errs)
	}
}

// Usage errors have one exit code in every bench.
func TestBenchMistakes(t *testing.T) {
	for _, args := range []string{"copy --transport rdma", "copy --blocks 5001", "copy --total 0",
		"copy --conns 65", "copy --rounds -1", "copy --integrity md5", "copy --slice 1",
		"copy --window 0",
		"gpu --repeat 0", "gpu --json /nowhere/x", "gpu hops", "rails --integrity md5",
		"rails --claims 1gbit", "rails --claims fast", "rails --html /", "sim --nodes 1",
		"sim --nodes -2", "sim --against /nowhere/x", "sim --against x --total 1MiB", "sim --total 1KiB",
		"sim --total 8GiB", "sim --rates 1gbps", "sim --seed x", "sim --duration 1", "rails --plain 1",
		"rails --receivers 0", "rails --receivers 65", "rails --receivers 2 --fault 1s:rail0:down",
		"rails --receivers 2 --html x", "rails --receivers 2 --duration 1ms",
		"rails --receivers 2 --block 8MiB", "rails --block 1000", "peers --blocks 1000"} {
		var out, errs bytes.Buffer
		code := bench.Main(strings.Fields(args), &out, &errs)
		if code != usage || out.Len() > 0 || !strings.HasSuffix(errs.String(), " --help'.\n") {
			t.Errorf("%s: exit code %d, and it printed %q and %q", args, code, &out, &errs)
		}
	}
}

// A run of two simulated nodes, with every kind of fault.
func TestBenchSim(t *testing.T) {
	dir := t.TempDir()
	json, html := filepath.Join(dir, "r.json"), filepath.Join(dir, "r.html")
	var out, errs bytes.Buffer
	args := append([]string{"sim", "--rates", "200mbit,100mbit", "--total", "8MiB", "--seed", "3",
		"--json", json, "--html", html}, flags(faultKinds)...)
	if code := bench.Main(args, &out, &errs); code != 0 {
		t.Fatalf("exit code %d: %s", code, &errs)
	}
	r := judge(t, json, html, 8<<20, faultKinds)
	if r.Bench != "sim" || r.Nodes != 2 || r.Seed != 3 || r.Trace == "" {
		t.Errorf("bench %q, %d nodes, seed %d, trace %q", r.Bench, r.Nodes, r.Seed, r.Trace)
	}
	if !strings.Contains(out.String(), "2 transfers of 8MiB, 0 failed") {
		t.Errorf("it printed %q", &out)
	}
	if want := "measuring 2 simulated rails with plain streams, alone and together\nmoving two " +
		"transfers of 8MiB from each of 1 nodes, in simulated time\n"; errs.String() != want {
		t.Errorf("progress %q, want %q", &errs, want)
	}
	// Piped output is the result alone.
	out.Reset()
	if code := bench.Main(append(args[:len(args):len(args)], "--json", "-"), &out, &errs); code != 0 {
		t.Fatalf("exit code %d: %s", code, &errs)
	}
	if again, err := timeline.Read(&out); err != nil || again.Trace != r.Trace || out.Len() > 0 {
		t.Errorf("%v: standard output is not the result alone, of trace %s", err, r.Trace)
	}
}

// railsCommand is `kvspray-bench rails` with sidecars of this test's binary.
func railsCommand(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, append([]string{"rails", "--sidecar", self},
		args...)...)
	cmd.Env = append(os.Environ(), commandEnv+"=1")
	return cmd
}

// rails runs it, and skips the test where this machine permits no rails or is too busy.
func rails(t *testing.T, args ...string) (out, errs *bytes.Buffer) {
	t.Helper()
	cmd := railsCommand(t, args...)
	out, errs = new(bytes.Buffer), new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr = out, errs
	err := cmd.Run()
	if err == nil {
		return out, errs
	}
	// The progress names each void try, too: the error decides.
	_, why, _ := strings.Cut("\n"+errs.String(), "\nkvspray-bench: ")
	why, _, _ = strings.Cut(why, "\n")
	if strings.Contains(why, netrig.ErrNotPermitted.Error()) {
		testutil.Skip(t, "netns", why)
	}
	if strings.Contains(why, railsbench.ErrVoid.Error()) {
		testutil.Skip(t, "quiet", why)
	}
	t.Fatalf("rails %q: %v: %s", args, err, errs)
	return nil, nil
}

// A run of one sidecar that sends to three, and takes from them.
func TestMeasureReceivers(t *testing.T) {
	testutil.Measures(t)
	if !testutil.InNamespace(t) {
		return
	}
	file := filepath.Join(t.TempDir(), "r.json")
	out, _ := rails(t, "--receivers", "3", "--block", "9KiB", "--rates", "60mbit,40mbit", "--duration",
		"1s", "--plain", "400ms",
		"--json", file)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var r railsbench.FanResult
	if err := json.Unmarshal(b, &r); err != nil {
		t.Fatal(err)
	}
	if r.Bench != "receivers" || r.Receivers != 3 || len(r.Rails) != 2 || r.Failed > 0 ||
		r.Transfers == 0 || r.Total != timeline.Whole(8<<20, 9<<10) {
		t.Errorf("%+v", r)
	}
	if w := r.Alone; w.Count < 2 || w.P50 <= 0 || w.Max < w.P99 || w.P99 < w.P50 {
		t.Errorf("alone: %+v", w)
	}
	if len(r.Beside) != 2 || r.Beside[0].Priority != "background" ||
		r.Beside[1].Priority != "layer streams" {
		t.Fatalf("beside: %+v", r.Beside)
	}
	for _, x := range r.Beside {
		if x.Count < 2 || x.MaxTimes < x.P50Times || x.P50Times <= 0 || x.Share <= 0 {
			t.Errorf("beside: %+v", x)
		}
	}
	for _, x := range []railsbench.Shares{r.Fair, r.Incast} {
		if len(x.Each) != 3 || x.Lowest <= 0 || x.Lowest > 1 || x.Share <= 0 {
			t.Errorf("shares: %+v", x)
		}
	}
	for _, w := range []string{"beside background to 2 others: p50", "beside layer streams to 2 " +
		"others: p50", "layer streams to all receivers: the least gets",
		"from all of them to the sender"} {
		if !strings.Contains(out.String(), w) {
			t.Errorf("it printed %q: want %q in it", out, w)
		}
	}
}

// A run of two sidecars over rails, of which one goes down, comes back, and is slow.
func TestBenchRails(t *testing.T) {
	if !testutil.InNamespace(t) {
		return
	}
	dir := t.TempDir()
	data, html := filepath.Join(dir, "r.json"), filepath.Join(dir, "r.html")
	faults := []string{"50ms:rail0:down", "200ms:rail0:up", "250ms:rail1:rate=1/2", "300ms:all:heal"}
	out, errs := rails(t, append([]string{"--rates", "100mbit,50mbit", "--total", "4MiB", "--plain",
		"400ms", "--json", data,
		"--html", html}, flags(faults)...)...)
	// Blocks of a real page's size.
	odd, _ := rails(t, "--rates", "200mbit", "--total", "1259520", "--block", "656", "--plain",
		"400ms", "--json", "-")
	if r, err := timeline.Read(odd); err != nil || r.Block != 656 || r.Total != 1259520 ||
		len(r.Transfers) != 2 ||
		r.Transfers[1].Bytes != 1259520 {
		t.Errorf("blocks of 656 bytes: %+v, %v", r, err)
	}
	// An error of the sidecars about --set is a usage error of the bench.
	wrong := railsCommand(t, "--rates", "100mbit", "--total", "1MiB", "--set", "nope=1")
	if output, err := wrong.CombinedOutput(); wrong.ProcessState.ExitCode() != usage ||
		!strings.Contains(string(output), `nope: "1": unknown key`) {
		t.Errorf("%v: %s", err, output)
	}
	r := judge(t, data, html, 4<<20, faults)
	if r.Bench != "rails" || r.Host == "" || r.Version == "" {
		t.Errorf("bench %q, host %q, version %q", r.Bench, r.Host, r.Version)
	}
	for _, x := range r.Rails {
		if x.Buffer == 0 {
			t.Errorf("%s: no figure of its shaper's buffer", x.Name)
		}
	}
	for _, w := range []string{"2 transfers of 4MiB, 0 failed", "rail0:down"} {
		if !strings.Contains(out.String(), w) {
			t.Errorf("it printed %q: want %q in it", out, w)
		}
	}
	for _, w := range []string{"making 2 rails and a sidecar at each end", "measuring rail1 of " +
		"50mbit with a plain stream", "moving two transfers of 4MiB", "rail0 of 100mbit: a plain " +
		"stream alone carries", "rail1 of 50mbit", "plain streams over all of them at once carry"} {
		if !strings.Contains(errs.String(), w) {
			t.Errorf("progress %q: want %q in it", errs, w)
		}
	}
}

// judge checks the output of a run of two transfers over two rails.
func judge(t *testing.T, json, html string, total uint64, faults []string) *timeline.Result {
	t.Helper()
	f, err := os.Open(json)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	r, err := timeline.Read(f)
	if err != nil {
		t.Fatal(err)
	}
	if r.Failed != 0 || len(r.Transfers) != 2 || r.Total != int64(total) || r.Block != 16<<10 {
		t.Fatalf("%d of %d transfers of %d failed, blocks of %d", r.Failed, len(r.Transfers),
			r.Total, r.Block)
	}
	var content uint64
	for i, x := range r.Transfers {
		if content += x.Bytes; x.Bytes != total || x.Took <= 0 || i > 0 &&
			x.Began < r.Transfers[i-1].Began {
			t.Errorf("transfer %d: %+v", i, x)
		}
	}
	if len(r.Rails) != 2 || len(r.Samples.Bytes) != 2 {
		t.Fatalf("%d rails, samples of %d", len(r.Rails), len(r.Samples.Bytes))
	}
	// The receiver's count is the content plus overhead and retransmissions.
	var counted uint64
	for i, x := range r.Rails {
		b := r.Samples.Bytes[i]
		if x.Name != fmt.Sprint("rail", i) || x.Rate <= 0 || x.Alone <= 0 || len(b) < 10 ||
			b[len(b)-1] < total/20 {
			t.Errorf("%+v, with %d samples", x, len(b))
			continue
		}
		counted += b[len(b)-1]
	}
	if counted < content || counted > 2*content {
		t.Errorf("rails counted %d bytes, transfers had %d", counted, content)
	}
	if r.Together <= 0 || r.Goodput <= 0 || r.Cold <= 0 || r.Warm <= 0 {
		t.Errorf("together %v, goodput %v, cold %v, warm %v", r.Together, r.Goodput, r.Cold, r.Warm)
	}
	var asked, happened []string
	for _, x := range r.Faults {
		asked = append(asked, x.String())
	}
	for _, d := range r.Dips {
		for _, x := range d.Faults {
			happened = append(happened, x.String())
		}
	}
	if got, want := fmt.Sprint(asked), fmt.Sprint(faults); got != want ||
		fmt.Sprint(happened) != want {
		t.Errorf("faults %s, of which %v happened: want %s", got, happened, want)
	}
	page, err := os.ReadFile(html)
	if err != nil {
		t.Fatal(err)
	}
	labels := drawn(t, page)
	for _, f := range faults {
		_, label, _ := strings.Cut(f, ":")
		if !strings.Contains(labels, label) {
			t.Errorf("the chart does not show %q: its texts are %q", label, labels)
		}
	}
	for _, x := range r.Rails {
		if key := fmt.Sprintf("%s, %s", x.Name, x.Rate); !bytes.Contains(page, []byte(key)) {
			t.Errorf("the page has no key %q", key)
		}
	}
	return r
}

// drawn parses the plot of a page and returns its texts.
func drawn(t *testing.T, page []byte) string {
	t.Helper()
	begin, end := bytes.Index(page, []byte("<svg")), bytes.Index(page, []byte("</svg>"))
	if begin < 0 || end < begin || !bytes.HasPrefix(page, []byte("<!DOCTYPE html>")) ||
		!bytes.Contains(page, []byte("</html>")) {
		t.Fatalf("no page with a plot: %.200q", page)
	}
	d := xml.NewDecoder(bytes.NewReader(page[begin : end+len("</svg>")]))
	var texts []string
	curves := 0
	for {
		k, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("the plot: %v", err)
		}
		switch k := k.(type) {
		case xml.CharData:
			texts = append(texts, strings.TrimSpace(string(k)))
		case xml.StartElement:
			if k.Name.Local == "path" {
				curves++
			}
		}
	}
	if curves < 3 {
		t.Errorf("%d curves: want one for each rail, and their sum", curves)
	}
	return strings.Join(texts, " ")
}

// An interrupted bench reports the interruption, not the operation that it stopped.
func TestBenchInterrupted(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"copy --rounds 1000 --blocks 16KiB --total 16MiB",
		"sim --duration 1h --rates 1gbit"} {
		cmd := exec.Command(exe, strings.Fields(args)...)
		cmd.Env = append(os.Environ(), commandEnv+"=1")
		output, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(output)
		lines.Scan() // it has begun
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		last := lines.Text()
		for lines.Scan() {
			last = lines.Text()
		}
		if err := cmd.Wait(); cmd.ProcessState.ExitCode() != failure || last != "kvspray-bench: "+
			"interrupted" {
			t.Errorf("%s: %v, and its last output was %q", args, err, last)
		}
	}
}
