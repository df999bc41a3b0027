package disk

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Inspect finds every damaged page of a real file, and nothing in a whole one, and writes nothing.
func TestInspect(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pages")
	tier, err := Open(killConfig(path))
	if err != nil {
		t.Fatal(err)
	}
	own(t, tier)
	if got, err := load(tier, 0, 0, 300); len(got) != 300 {
		t.Fatalf("%d of 300 pages, %v", len(got), err)
	}
	if got, err := load(tier, 1, 0, 30); len(got) != 30 {
		t.Fatalf("%d of 30 pages, %v", len(got), err)
	}
	if _, err := Inspect(t.Context(), []string{path}); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("of an open store: %v", err)
	}
	if err := tier.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	look := func() *Report {
		t.Helper()
		r, err := Inspect(t.Context(), []string{path})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := look()
	if r.Damaged != 0 || r.Torn != 0 || r.Pages != 330 || len(r.Findings) != 0 || r.Used < 2 ||
		r.Unfinished != 1 {
		t.Fatalf("%+v", r)
	}
	now, err := os.ReadFile(path)
	if err != nil || string(now) != string(whole) {
		t.Fatalf("it wrote: %v", err)
	}

	// A flipped bit in each page, one after another: found, and found alone.
	flip := func(off int64) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		b := []byte{whole[off] ^ 4}
		if _, err := f.WriteAt(b, off); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	torn := 0
	for _, p := range []int{0, 1, 150, 299} {
		page := content(simKey(0, p), simPages[0])[:simPages[0]]
		at := int64(strings.Index(string(whole), string(page)))
		if at < 0 {
			t.Fatalf("page %d is not in the file", p)
		}
		flip(at + int64(simPages[0]) - 1)
		r := look()
		torn += int(r.Torn)
		if r.Damaged+r.Torn != 1 || len(r.Findings) != 1 || r.Findings[0].Offset != at ||
			r.Pages != 329 || r.Findings[0].Namespace != simSpace(0).String() {
			t.Errorf("page %d at %d: %+v", p, at, r)
		}
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if torn == 4 {
		t.Error("no page of a finished segment was damaged")
	}
	flip(segmentsAt + 20) // the header of the first segment
	if r := look(); r.Damaged != 1 || r.Findings[0].Offset != segmentsAt || r.Pages == 330 {
		t.Errorf("a damaged header: %+v", r)
	}

	for want, bad := range map[string]func() error{
		"no such file":     func() error { return os.Remove(path) },
		"are no store":     func() error { return os.WriteFile(path, []byte("notes"), 0o600) },
		"no kvspray store": func() error { return os.WriteFile(path, make([]byte, 2<<20), 0o600) },
		"the device has":   func() error { return os.WriteFile(path, whole[:2<<20], 0o600) },
		"name 1 to":        nil,
		"its first block is": func() error {
			b := append([]byte(nil), whole...)
			b[40] ^= 1
			return os.WriteFile(path, b, 0o600)
		},
	} {
		paths := []string{path}
		if bad == nil {
			paths = nil
		} else if err := bad(); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if _, err := Inspect(t.Context(), paths); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
