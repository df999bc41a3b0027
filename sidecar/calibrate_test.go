package sidecar

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/config"
)

// TestGPUTable: a table that lies in its place is used; one that was named must be usable, one that
// just lies there need not be.
func TestGPUTable(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", dir)
	own := filepath.Join(dir, "kvspray", "gpu.json")
	var out bytes.Buffer
	load := func(table string) (*gpus, error) {
		c := config.Default()
		c.Transports.GPU.Table = table
		out.Reset()
		return newGPUs(c, slog.New(slog.NewTextHandler(&out, nil)))
	}
	want := func(what, table, model, log string) {
		t.Helper()
		g, err := load(table)
		if err != nil || (g.cfg.Table == nil) != (model == "") || g.cfg.Table.Limits(model).PackBlocks ==
			0 != (model == "") ||
			!strings.Contains(out.String(), log) || log == "" && out.Len() > 0 {
			t.Errorf("%s: %+v, %v, log %q", what, g, err, out.String())
		}
	}
	want("none there", config.Auto, "", "")
	if err := (&policy.Table{Version: 1, GPUs: map[string]policy.Limits{"A": {PackBlocks: 7}}}).Save(
		own); err != nil {
		t.Fatal(err)
	}
	want("its own", config.Auto, "A", "models=A")
	want("named", own, "A", "models=A")
	want("off", config.Off, "", "")
	if err := os.WriteFile(own, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	want("broken", config.Auto, "", "make a new one with kvspray calibrate")
	for _, path := range []string{own, filepath.Join(dir, "nothing")} {
		if _, err := load(path); err == nil ||
			!strings.Contains(err.Error(), "transports.gpu.calibration") ||
			!strings.Contains(err.Error(), "set it to off") {
			t.Errorf("%s, named: %v", path, err)
		}
	}
}

// TestCalibrateNeedsAFile: what is measured is not thrown away for want of a place.
func TestCalibrateNeedsAFile(t *testing.T) {
	c := config.Default()
	c.Transports.GPU.Table = config.Off
	if _, _, err := CalibrateGPUs(t.Context(), c, "", slog.New(slog.DiscardHandler)); err == nil ||
		!strings.Contains(err.Error(), "--out") {
		t.Errorf("calibrated for no file: %v", err)
	}
}
