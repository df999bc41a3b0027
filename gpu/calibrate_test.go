package gpu

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/policy"
)

// sizedDevice is a gputest.Device whose number of thread blocks can be set.
type sizedDevice struct {
	*gputest.Device
	blocks int
	asked  *[]int
}

func (d *sizedDevice) PackBlocks() int { return d.blocks }

func (d *sizedDevice) SetPackBlocks(n int) {
	d.blocks = n
	*d.asked = append(*d.asked, n)
}

// testCalibration is as short as possible: a fake has no rates.
func testCalibration() calibration {
	return calibration{copier: copierShape{rigMin, rigMax, 4 * rigMin, 2 * rigMin, 1 << 20, 64 << 10},
		piece: 512, pieces: 16, direct: []uint64{1 << 10, 4 << 10},
		bytes: 64 << 10, runs: 3, loadRuns: 2}
}

// TestCalibrate: there is one entry for each model, within bounds, for all links, and no memory is
// leaked.
func TestCalibrate(t *testing.T) {
	p := &separateContexts{Platform: gputest.NewPlatform(3), models: []string{"A, driver 1",
		"B, driver 1", "A, driver 1"}}
	g := gputest.Must(newGPUs(p, small()))(t)
	got, err := calibrate(t.Context(), g, testCalibration())
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"A, driver 1", "B, driver 1"}; !slices.Equal(got.Models(), want) {
		t.Fatalf("models %q, want %q", got.Models(), want)
	}
	for model, l := range got.GPUs {
		if l.PackBlocks < 1 || l.PackBlocks > 8 || !slices.Contains([]uint64{1 << 10, 4 << 10, 8 << 10},
			l.DirectBytes) || len(l.EveryLink) != 1 ||
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
	for i := range p.Devices {
		for _, d := range p.Devices[i] {
			if d.Allocated != 0 || d.Queues != nil {
				t.Errorf("GPU %d: %d allocations and %d queues leaked", i, d.Allocated, len(d.Queues))
			}
		}
	}
}

func TestCalibrateFails(t *testing.T) {
	for name, change := range map[string]func(*separateContexts){
		"no GPU works":  func(p *separateContexts) { p.Broken[0], p.Broken[1] = true, true },
		"no name":       func(p *separateContexts) { p.models = nil },
		"nothing locks": func(p *separateContexts) { p.noRegister = true },
	} {
		p := &separateContexts{Platform: gputest.NewPlatform(2), models: []string{"A", "B"}}
		change(p)
		g := gputest.Must(newGPUs(p, small()))(t)
		if table, err := calibrate(t.Context(), g, testCalibration()); err == nil {
			t.Errorf("%s: %+v", name, table)
		}
		if err := g.Close(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	p := &separateContexts{Platform: gputest.NewPlatform(1), models: []string{"A"}}
	g := gputest.Must(newGPUs(p, small()))(t)
	defer g.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := calibrate(ctx, g, testCalibration()); !errors.Is(err, context.Canceled) {
		t.Errorf("of a context that has ended: %v", err)
	}
}

// TestCopierTakesTheTable: measured values are used and not measured again.
func TestCopierTakesTheTable(t *testing.T) {
	p := &separateContexts{Platform: gputest.NewPlatform(2), models: []string{"A", "A"}}
	cfg := small()
	cfg.Table = &policy.Table{Version: 1, GPUs: map[string]policy.Limits{"A": {DirectBytes: 64 << 10,
		EveryLink: map[int]uint64{2: 3 << 20}}}}
	r := rigOf(t, p, cfg)
	q := gputest.Must(r.c.path(r.gpu[0].Device().(*GPU)))(t)
	q.mu.RUnlock()
	if n := q.m.Threshold(); n != 3<<20 {
		t.Errorf("threshold %d, the table has 3 MiB", n)
	}
	for _, d := range p.Devices[0] {
		if d.Copies != 0 {
			t.Errorf("%d copies were measured", d.Copies)
		}
	}
	for _, c := range []struct {
		bytes  uint64
		pieces int
		want   string
	}{{48 << 10, fewMapped + 1, PathPacked}, {64 << 10, autoPieces - 1, PathDirect},
		{3 << 20, 1, PathMultipath}} {
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
