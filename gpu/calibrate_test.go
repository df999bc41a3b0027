package gpu

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func (p *contexts) Model(i int) string {
	if p.models == nil {
		return ""
	}
	return p.models[i]
}

// sizedDevice is a fakeDevice whose kernels have a width.
type sizedDevice struct {
	*fakeDevice
	blocks int
	asked  *[]int
}

func (d *sizedDevice) PackBlocks() int { return d.blocks }

func (d *sizedDevice) SetPackBlocks(n int) {
	d.blocks = n
	*d.asked = append(*d.asked, n)
}

func (c *contextCard) NewPacker() (Packer, error) {
	d, err := c.fakeCard.NewPacker()
	if err != nil || c.p.models == nil {
		return d, err
	}
	return &sizedDevice{d.(*fakeDevice), 8, &c.p.asked}, nil
}

// testCalibration measures for the sake of it: a fake has no rates.
func testCalibration() calibration {
	return calibration{copier: copierShape{rigMin, rigMax, 4 * rigMin, 2 * rigMin, 1 << 20, 64 << 10, patience}, piece: 512, pieces: 16, direct: []uint64{1 << 10, 4 << 10},
		bytes: 64 << 10, runs: 3, loadRuns: 2}
}

// TestCalibrate: one entry for each model, within bounds, for as many links as there are, and nothing is left behind.
func TestCalibrate(t *testing.T) {
	p := &contexts{fakePlatform: newFakePlatform(3), models: []string{"A, driver 1", "B, driver 1", "A, driver 1"}}
	g := must(newGPUs(p, small()))(t)
	got, err := calibrate(t.Context(), g, testCalibration())
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"A, driver 1", "B, driver 1"}; !slices.Equal(got.Models(), want) {
		t.Fatalf("models %q, want %q", got.Models(), want)
	}
	for model, l := range got.GPUs {
		if l.PackBlocks < 1 || l.PackBlocks > 8 || !slices.Contains([]uint64{1 << 10, 4 << 10, 8 << 10}, l.DirectBytes) || len(l.EveryLink) != 1 ||
			l.EveryLink[3] < 2*rigMin || l.EveryLink[3] > 8*rigMin || l.Measured.IsZero() {
			t.Errorf("%s: %+v", model, l)
		}
	}
	if want := []int{8, 4, 2, 1, 8, 4, 2, 1}; !slices.Equal(p.asked, want) {
		t.Errorf("tried %d thread blocks, want %d", p.asked, want)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	for i := range p.devices {
		for _, d := range p.devices[i] {
			if d.allocated != 0 || d.queues != nil {
				t.Errorf("GPU %d: %d allocations and %d queues leaked", i, d.allocated, len(d.queues))
			}
		}
	}
}

func TestCalibrateFails(t *testing.T) {
	for name, change := range map[string]func(*contexts){
		"no GPU works":  func(p *contexts) { p.fail[0], p.fail[1] = true, true },
		"no name":       func(p *contexts) { p.models = nil },
		"nothing locks": func(p *contexts) { p.noRegister = true },
	} {
		p := &contexts{fakePlatform: newFakePlatform(2), models: []string{"A", "B"}}
		change(p)
		g := must(newGPUs(p, small()))(t)
		if table, err := calibrate(t.Context(), g, testCalibration()); err == nil {
			t.Errorf("%s: %+v", name, table)
		}
		if err := g.Close(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	p := &contexts{fakePlatform: newFakePlatform(1), models: []string{"A"}}
	g := must(newGPUs(p, small()))(t)
	defer g.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := calibrate(ctx, g, testCalibration()); !errors.Is(err, context.Canceled) {
		t.Errorf("of a context that has ended: %v", err)
	}
}

// TestCopierTakesTheTable: what was measured is not measured again, and holds.
func TestCopierTakesTheTable(t *testing.T) {
	p := &contexts{fakePlatform: newFakePlatform(2), models: []string{"A", "A"}}
	cfg := small()
	cfg.Table = &Table{Version: 1, GPUs: map[string]Limits{"A": {DirectBytes: 64 << 10, EveryLink: map[int]uint64{2: 3 << 20}}}}
	r := rigOf(t, p, cfg)
	q := must(r.c.path(r.gpu[0].Device().(*GPU)))(t)
	q.mu.RUnlock()
	if n := q.m.Threshold(); n != 3<<20 {
		t.Errorf("threshold %d, the table has 3 MiB", n)
	}
	for _, d := range p.devices[0] {
		if d.copies != 0 {
			t.Errorf("%d copies were measured", d.copies)
		}
	}
	for _, c := range []struct {
		bytes  uint64
		pieces int
		want   string
	}{{48 << 10, fewAcross + 1, PathPacked}, {64 << 10, autoPieces - 1, PathDirect}, {3 << 20, 1, PathMultipath}} {
		to, from := apart(r.gpu[0], r.host, c.bytes, c.pieces)
		if path, err := r.c.Copy(to, from); path != c.want || err != nil {
			t.Errorf("%d bytes went the way %q, want %q: %v", c.bytes, path, c.want, err)
		}
	}
}

func TestFewestAndCrossover(t *testing.T) {
	counts := []int{64, 32, 16, 8}
	for _, c := range []struct {
		took []time.Duration
		want int
	}{
		{[]time.Duration{100, 100, 104, 150}, 16},
		{[]time.Duration{100, 106, 150, 300}, 64},
		{[]time.Duration{130, 100, 90, 200}, 16}, // fewer may be better
		{[]time.Duration{100, 100, 100, 100}, 8},
	} {
		if got := fewest(counts, c.took); got != c.want {
			t.Errorf("fewest of %v is %d, want %d", c.took, got, c.want)
		}
	}
	if got := fewest(nil, nil); got != 0 {
		t.Errorf("fewest of none is %d", got)
	}
	sizes := []uint64{1, 2, 4, 8}
	for _, c := range []struct {
		a, b []time.Duration
		want uint64
	}{
		{[]time.Duration{9, 5, 5, 5}, []time.Duration{6, 6, 6, 6}, 2},
		{[]time.Duration{1, 9, 5, 5}, []time.Duration{6, 6, 6, 6}, 4}, // a stray one below does not count
		{[]time.Duration{9, 9, 9, 9}, []time.Duration{6, 6, 6, 6}, 16},
		{[]time.Duration{6, 6, 6, 6}, []time.Duration{6, 6, 6, 6}, 1},
	} {
		if got := crossover(sizes, c.a, c.b); got != c.want {
			t.Errorf("crossover of %v and %v is %d, want %d", c.a, c.b, got, c.want)
		}
	}
}

func TestTable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "gpu.json")
	if _, err := LoadTable(path); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	want := &Table{Version: 1, GPUs: map[string]Limits{"NVIDIA H200, driver 580.65.06": {Measured: time.Unix(1_700_000_000, 0).UTC(), PackBlocks: 33, DirectBytes: 4096,
		EveryLink: map[int]uint64{2: 32 << 20, 4: 64 << 20}}}}
	for range 2 { // the second takes the place of the first
		if err := want.Save(path); err != nil {
			t.Fatal(err)
		}
		got, err := LoadTable(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatal(diff)
		}
	}
	if all, _ := os.ReadDir(filepath.Dir(path)); len(all) != 1 {
		t.Errorf("beside the table there are %v", all)
	}
	for text, told := range map[string]string{
		`{"version": 2, "gpus": {}}`:                                       "version: 2, want 1",
		`{"version": 1, "gpus": {"A": {"pack_blocks": -1}}}`:               `gpus["A"].pack_blocks`,
		`{"version": 1, "gpus": {"A": {"direct_bytes": 4398046511104}}}`:   `gpus["A"].direct_bytes: 4398046511104, want 0 or 1 to`,
		`{"version": 1, "gpus": {"A": {"every_link_bytes": {"1": 5}}}}`:    "every_link_bytes: 1, want 0 or 2 to 64",
		`{"version": 1, "gpus": {"A": {"every_link_bytes": {"2": 1e30}}}}`: "json",
		`{"version": 1, "gpus": {"A": {"blocks": 1}}}`:                     `unknown field "blocks"`,
		"not JSON": "invalid character",
		"":         "EOF",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadTable(path); err == nil || !strings.Contains(err.Error(), told) || !strings.Contains(err.Error(), "kvspray calibrate") {
			t.Errorf("%s: %v, want %q and a remedy", text, err, told)
		}
	}
	var none *Table
	if l := none.Limits("A"); l.PackBlocks != 0 {
		t.Errorf("limits of no table: %+v", l)
	}
}
