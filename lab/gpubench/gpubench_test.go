package gpubench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/lab/progress"
)

// TestHTML draws reports of real runs: every row is there, and each bench has a plot.
func TestHTML(t *testing.T) {
	var all Report
	for _, name := range []string{"nvlink", "multipath"} {
		raw, err := os.ReadFile(filepath.Join("testdata", name+"-4xh200.json"))
		if err != nil {
			t.Fatal(err)
		}
		var r Report
		if err := json.Unmarshal(raw, &r); err != nil {
			t.Fatal(err)
		}
		for i := range r.Rows {
			r.Rows[i].Bench = name
		}
		all.Devices, all.Driver = r.Devices, r.Driver
		all.Rows = append(all.Rows, r.Rows...)
	}
	if len(all.Rows) < 10 {
		t.Fatalf("%d rows", len(all.Rows))
	}
	var page bytes.Buffer
	if err := all.HTML(&page); err != nil {
		t.Fatal(err)
	}
	html := page.String()
	for i := range all.Rows {
		if what := all.Rows[i].What; !strings.Contains(html, strings.ReplaceAll(what, "'", "&#39;")) {
			t.Errorf("no row %q", what)
		}
	}
	if n := strings.Count(html, "<svg"); n != 2 {
		t.Errorf("%d plots of two benches", n)
	}
}

// TestPairProgress: progress shows what is measured, and the table has rows only.
func TestPairProgress(t *testing.T) {
	var table, shown bytes.Buffer
	b := &bench{out: &table, line: progress.Start(&shown), repeat: 2, name: "staged",
		interrupted: t.Context().Err}
	nothing := func() error { return nil }
	if err := b.pair(Row{What: "slices", Bytes: 1}, nothing, 1, nothing); err != nil {
		t.Fatal(err)
	}
	b.line.Close()
	if shown.String() != "staged: slices\n" || strings.Count(table.String(), "\n") != 1 ||
		!strings.HasPrefix(table.String(), "slices ") {
		t.Errorf("progress %q, table %q", &shown, &table)
	}
}

func TestMistakes(t *testing.T) {
	for _, args := range [][]string{{"--repeat", "0"}, {"--repeat", "1001"},
		{"--json", filepath.Join(t.TempDir(), "none", "x")}, {"--html", t.TempDir()}, {"--json", "-"},
		{"--html", "-"}} {
		c := NewCommand()
		c.SetOut(new(bytes.Buffer))
		c.SetErr(new(bytes.Buffer))
		c.SetArgs(args)
		if err := c.Execute(); !usage.Is(err) || !strings.HasPrefix(err.Error(), args[0]) {
			t.Errorf("%v: %v", args, err)
		}
	}
}

func TestChoose(t *testing.T) {
	for _, c := range []struct {
		asked []string
		gpus  int
		want  []string
		err   string
	}{
		{nil, 4, benches, ""},
		{nil, 1, []string{"staged", "within"}, ""},
		{[]string{"multipath", "staged"}, 2, []string{"staged", "multipath"}, ""},
		{[]string{"staged", "nvlink"}, 1, nil, "gpu nvlink: 1 GPUs here, it takes 2 or more"},
		{nil, 0, nil, "no GPU"},
	} {
		got, err := choose(c.asked, c.gpus)
		if !slices.Equal(got, c.want) || (err == nil) != (c.err == "") || err != nil &&
			!strings.Contains(err.Error(), c.err) {
			t.Errorf("%v of %d GPUs: %v, %v", c.asked, c.gpus, got, err)
		}
	}
}

// TestPairInterrupted: a signal ends it before the next repetition, as what the command line calls
// interrupted, and half a row is none.
func TestPairInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var table bytes.Buffer
	b := &bench{out: &table, repeat: 1000, name: "staged", interrupted: ctx.Err}
	runs := 0
	err := b.pair(Row{What: "slices", Bytes: 1}, func() error {
		if runs++; runs == 3 {
			cancel()
		}
		return nil
	}, 0, nil)
	if !errors.Is(err, context.Canceled) || runs != 3 || len(b.report.Rows) != 0 || table.Len() != 0 {
		t.Errorf("%v after %d runs, %d rows", err, runs, len(b.report.Rows))
	}
}
