package policy

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestTable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "gpu.json")
	if _, err := LoadTable(path); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	want := &Table{Version: 1, GPUs: map[string]Limits{"NVIDIA H200, driver 580.65.06": {
		Measured: time.Unix(1_700_000_000, 0).UTC(), PackBlocks: 33, DirectBytes: 4096,
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
		`{"version": 2, "gpus": {}}`:                         "version: 2, want 1",
		`{"version": 1, "gpus": {"A": {"pack_blocks": -1}}}`: `gpus["A"].pack_blocks`,
		`{"version": 1, "gpus": {"A": {"direct_bytes": 4398046511104}}}`: `gpus["A"].direct_bytes: ` +
			`4398046511104, want 0 or 1 to`,
		`{"version": 1, "gpus": {"A": {"every_link_bytes": {"1": 5}}}}`: "every_link_bytes: 1, want " +
			"0 or 2 to 64",
		`{"version": 1, "gpus": {"A": {"every_link_bytes": {"2": 1e30}}}}`: "json",
		`{"version": 1, "gpus": {"A": {"blocks": 1}}}`:                     `unknown field "blocks"`,
		"not JSON": "invalid character",
		"":         "EOF",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadTable(path); err == nil || !strings.Contains(err.Error(), told) ||
			!strings.Contains(err.Error(), "kvspray calibrate") {
			t.Errorf("%s: %v, want %q and a remedy", text, err, told)
		}
	}
	var none *Table
	if l := none.Limits("A"); l.PackBlocks != 0 {
		t.Errorf("limits of no table: %+v", l)
	}
}
