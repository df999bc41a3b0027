package disk

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/catalog"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

const simBytes = segmentsAt + 10*simSegment

func TestWriteAndRead(t *testing.T) {
	files := sims(2, simBytes, 1)
	tier := start(t, files)
	for owner := range uint16(2) {
		if got, err := load(tier, owner, 0, 20); len(got) != 20 {
			t.Fatalf("owner %d: %d of 20 pages are durable: %v", owner, len(got), err)
		}
	}
	if _, err := load(tier, 0, 3, 4); !errors.Is(err, catalog.ErrExists) {
		t.Errorf("a second write: %v", err)
	}
	for round := range 2 {
		for owner := range uint16(2) {
			for i := range 20 {
				if !has(t, tier, owner, i) {
					t.Errorf("round %d: page %d of owner %d is gone", round, i, owner)
				}
			}
		}
		if err := tier.Close(); err != nil {
			t.Fatal(err)
		}
		tier = start(t, files)
	}
	if has(t, tier, 0, 21) {
		t.Error("a page that was never written")
	}
	_ = tier.Close()
}

// A page that has changed since its checksum was computed is not written.
func TestRefusesWhatChangedInMemory(t *testing.T) {
	tier := start(t, sims(1, simBytes, 1))
	defer tier.Close()
	r := record(0, 1, nil)
	r.Data[100] ^= 1
	if errs := tier.Write(number(tier, 0), []Record{r}, nil); !errors.Is(errs[0], ErrDamaged) {
		t.Errorf("%v", errs)
	}
	if has(t, tier, 0, 1) {
		t.Error("it was written")
	}
}

// Far more pages than the store holds, with some that are asked for again and again.
func TestCleaning(t *testing.T) {
	files := sims(1, simBytes, 1)
	tier := start(t, files)
	for i := range 200 {
		owner := uint16(i % 2)
		if got, err := load(tier, owner, i*10, i*10+10); len(got) != 10 {
			t.Fatalf("round %d: %d of 10 pages: %v, %+v", i, len(got), err, tier.Stats())
		}
		for p := range 4 {
			if !has(t, tier, 0, p) {
				t.Fatalf("round %d: page %d was given up, though it is the one that is used", i, p)
			}
		}
	}
	s := tier.Stats()
	t.Logf("%+v", s)
	if s.Cleaned == 0 || s.Moved > s.Evicted/10 || s.Evicted == 0 || s.Bytes > s.Capacity {
		t.Errorf("%+v", s)
	}
	before := listed(tier, 0, 2000)
	_ = tier.Close()
	tier = start(t, files)
	for i := range 2000 {
		if before.Get(i) && !has(t, tier, 0, i) {
			t.Errorf("page %d is gone after a restart", i)
		}
	}
	_ = tier.Close()
}

// A removed namespace does not come back, at whatever moment the power goes after the removal
// returned.
func TestRemovalIsDurable(t *testing.T) {
	for seed := range uint64(20) {
		files := sims(2, simBytes, seed)
		tier := start(t, files)
		_, _ = load(tier, 0, 0, 30)
		_, _ = load(tier, 1, 0, 30)
		if err := tier.Remove(simSpace(0)); err != nil {
			t.Fatal(err)
		}
		again, _ := load(tier, 0, 100, 110)
		for _, f := range files {
			f.Crash()
		}
		tier = start(t, files)
		for i := range 30 {
			if has(t, tier, 0, i) {
				t.Fatalf("seed %d: page %d came back", seed, i)
			}
			if !has(t, tier, 1, i) {
				t.Fatalf("seed %d: page %d of another namespace is gone", seed, i)
			}
		}
		for _, i := range again {
			if !has(t, tier, 0, i) {
				t.Fatalf("seed %d: page %d was stored after the removal, and is gone", seed, i)
			}
		}
		_ = tier.Close()
	}
}

// script is a workload that seals, cleans, removes, moves and overwrites.
func script(t *Tier) (removed bool) {
	for i := range 12 {
		_, _ = load(t, 0, i*9, i*9+9)
		_, _ = load(t, 1, i*7, i*7+7)
		for p := range 3 {
			k := simKey(0, p)
			buf := make([]byte, PaddedBytes(simPages[0]))
			_, _ = t.Read(number(t, 0), &k, buf, Sum)
		}
	}
	removed = t.Remove(simSpace(1)) == nil
	_, _ = load(t, 0, 500, 520)
	for left, err := t.Wipe(); left > 0 && err == nil; {
		left, err = t.Wipe()
	}
	_, _ = load(t, 0, 520, 540)
	return removed
}

// The power goes at each operation of a workload in turn. All that was acknowledged and not given
// up is there afterwards.
func TestPowerGoesAtEveryOperation(t *testing.T) {
	const n = 540
	whole := sims(1, simBytes, 0)
	tier := start(t, whole)
	script(tier)
	_ = tier.Close()
	ops := whole[0].Ops()
	step := 3
	switch {
	case os.Getenv("KVSPRAY_STORE") == "long":
		step = 1
	case testutil.Race:
		step = 11
	}
	for at := 1; at <= ops; at += step {
		files := sims(1, simBytes, uint64(at))
		tier := start(t, files)
		files[0].LosePower(at)
		removed := script(tier)
		had := listed(tier, 0, n)
		other := listed(tier, 1, 84)
		_ = tier.Close()
		files[0].Crash()
		tier = start(t, files)
		missing := 0
		for i := range n {
			if had.Get(i) && !has(t, tier, 0, i) {
				missing++
			}
		}
		for i := range 84 {
			switch there := has(t, tier, 1, i); {
			case removed && there:
				t.Errorf("power goes at %d: page %d of the removed namespace came back", at, i)
			case other.Get(i) && !there:
				missing++
			}
		}
		if missing > 0 {
			t.Errorf("power goes at %d of %d: %d pages are gone", at, ops, missing)
		}
		// Nor is a page listed that was written in part: a put of it would find it and end as
		// durable.
		for i, list := 0, listed(tier, 0, n); i < n; i++ {
			if list.Get(i) && !has(t, tier, 0, i) {
				t.Errorf("power goes at %d: page %d is listed and cannot be read", at, i)
			}
		}
		if got, err := load(tier, 0, 1000, 1005); len(got) != 5 {
			t.Errorf("power goes at %d: the store takes no pages afterwards: %v", at, err)
		}
		_ = tier.Close()
	}
	t.Logf("%d operations", ops)
}

// A write that ends a segment and needs room for its other pages does not take that segment, though
// nothing else in it counts any more.
func TestWriteKeepsItsOwnSegment(t *testing.T) {
	files := sims(1, simBytes, 1)
	tier := start(t, files)
	_, _ = load(tier, 0, 0, 28) // the first segment
	_, _ = load(tier, 0, 28, 33)
	_, _ = load(tier, 1, 0, 7)
	_, _ = load(tier, 1, 7, 10) // the third
	if err := tier.Remove(simSpace(1)); err != nil {
		t.Fatal(err)
	}
	l, left := tier.logs[0], 0
	for i := range l.segments {
		if l.segments[i].state != free {
			continue
		}
		if left++; left > keepFree {
			l.segments[i].state = wiped // for now
		}
	}
	if l.at != 2 || l.segments[l.at].live > 0 {
		t.Fatalf("segment %d has %d bytes of pages", l.at, l.segments[l.at].live)
	}
	group := tier.GroupPages(simPages[0])
	stored, err := load(tier, 0, 100, 100+group)
	if len(stored) != group {
		t.Fatal(err)
	}
	_ = tier.Close()
	tier = start(t, files)
	defer func() { _ = tier.Close() }()
	for _, i := range stored {
		if !has(t, tier, 0, i) {
			t.Errorf("page %d is gone", i)
		}
	}
}

// Errors of the disk: a write that fails costs that write at most, a read that fails that page.
func TestDiskErrors(t *testing.T) {
	for _, c := range []struct {
		name string
		errs int // how many operations fail
		op   string
		err  error
		want int // pages of 10
	}{
		{"one write", 1, "write", unix.EIO, 10},
		{"one sync", 1, "sync", unix.EIO, 10},
		{"disk full", 1, "write", unix.ENOSPC, 10},
		{"all writes", 1 << 30, "write", unix.EIO, 0},
		{"all syncs", 1 << 30, "sync", unix.EIO, 0},
	} {
		files := sims(1, simBytes, 1)
		tier := start(t, files)
		_, _ = load(tier, 0, 0, 10)
		left := c.errs
		files[0].Fail(func(op string, _ int64) error {
			if op == c.op && left > 0 {
				left--
				return c.err
			}
			return nil
		})
		got, err := load(tier, 0, 10, 20)
		if len(got) != c.want || c.want == 0 && (!errors.Is(err, c.err) ||
			!strings.Contains(err.Error(), "sim")) {
			t.Errorf("%s: %d pages are durable, want %d: %v", c.name, len(got), c.want, err)
		}
		files[0].Fail(nil)
		for i := range 10 {
			if !has(t, tier, 0, i) {
				t.Errorf("%s: page %d is gone", c.name, i)
			}
		}
		if got, err := load(tier, 0, 20, 30); len(got) != 10 {
			t.Errorf("%s: the disk is well, and %d of 10 pages are durable: %v", c.name, len(got), err)
		}
		had := listed(tier, 0, 30)
		_ = tier.Close()
		files[0].Crash()
		tier = start(t, files)
		for i := range 30 {
			if had.Get(i) && !has(t, tier, 0, i) {
				t.Errorf("%s: page %d is gone after a crash", c.name, i)
			}
		}
		_ = tier.Close()
	}
	files := sims(1, simBytes, 1)
	tier := start(t, files)
	_, _ = load(tier, 0, 0, 3)
	files[0].Fail(func(string, int64) error { return unix.EIO })
	if has(t, tier, 0, 1) {
		t.Error("read from a disk that cannot read")
	}
	files[0].Fail(nil)
	if has(t, tier, 0, 1) || !has(t, tier, 0, 2) {
		t.Error("just the page that could not be read is dropped")
	}
	_ = tier.Close()
}

// A bit flips anywhere in the segments: each page is what it was, or is missed.
func TestBitFlips(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		files := sims(1, segmentsAt+6*simSegment, 1)
		tier := start(rt, files)
		_, _ = load(tier, 0, 0, 60)
		restart := rapid.Bool().Draw(rt, "restart")
		if restart {
			_ = tier.Close()
		}
		flips := rapid.IntRange(1, 5).Draw(rt, "flips")
		for range flips {
			files[0].Flip(rapid.IntRange(segmentsAt, files[0].Size()-1).Draw(rt, "byte"),
				rapid.UintRange(0, 7).Draw(rt, "bit"))
		}
		if restart {
			tier = start(rt, files)
		}
		lost := 0
		for i := range 60 {
			if !has(rt, tier, 0, i) {
				lost++
			}
		}
		_, _ = load(tier, 1, 0, 60) // cleaning reads what is damaged, too
		for i := range 60 {
			has(rt, tier, 0, i)
		}
		if lost > flips*groupPages {
			rt.Fatalf("%d pages lost by %d flips", lost, flips)
		}
		_ = tier.Close()
	})
}

func TestRefusesPathsByName(t *testing.T) {
	config := func(paths ...string) Config {
		c := Config{SegmentBytes: simSegment}
		for _, p := range paths {
			c.Devices = append(c.Devices, Device{p, simBytes})
		}
		return c
	}
	refuse := func(c Config, want ...string) {
		t.Helper()
		tier, err := Open(c)
		if err == nil {
			_ = tier.Close()
			t.Errorf("%v: opened", c.Devices)
			return
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q does not contain %q", err, w)
			}
		}
	}
	must := func(c Config) {
		t.Helper()
		tier, err := Open(c)
		if err != nil {
			t.Fatal(err)
		}
		if err := tier.Close(); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	for _, p := range []string{a, b} {
		if err := os.Mkdir(p, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	must(config(a, b))
	must(config(a, b))
	refuse(config(b, a), b, "device 2 of the 2", "in their order")
	refuse(config(a), a, "device 1 of the 2")
	c := filepath.Join(dir, "c")
	refuse(config(a, b, c), c, "is empty")
	must(config(c))
	refuse(config(filepath.Join(dir, "no", "folder")), "no such file")
	open, err := Open(config(c))
	if err != nil {
		t.Fatal(err)
	}
	refuse(config(c), c, "another process")
	_ = open.Close()

	foreign := filepath.Join(dir, "foreign")
	if err := os.WriteFile(foreign, []byte(strings.Repeat("precious", 1000)), 0o600); err != nil {
		t.Fatal(err)
	}
	refuse(config(foreign), foreign, "no kvspray store")
	short := filepath.Join(dir, "short")
	if err := os.WriteFile(short, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	refuse(config(short), short, "no kvspray store")
	for path, want := range map[string]string{foreign: strings.Repeat("precious", 1000),
		short: "precious"} {
		if got, _ := os.ReadFile(path); string(got) != want {
			t.Errorf("%s was touched", path)
		}
	}
	cut := filepath.Join(dir, "cut")
	must(config(cut))
	if err := os.Truncate(cut, simBytes-4096); err != nil {
		t.Fatal(err)
	}
	refuse(config(cut), cut, "was cut")
	f, err := os.OpenFile(c, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = f.WriteAt([]byte{3, 0}, 12)
	_ = f.Close()
	before, err := os.ReadFile(c)
	if err != nil {
		t.Fatal(err)
	}
	refuse(config(c), c, "format 3", "reads format 1", "newer release")
	if after, err := os.ReadFile(c); err != nil || !bytes.Equal(after, before) {
		t.Errorf("%s was touched: %v", c, err)
	}
	refuse(Config{Devices: []Device{{filepath.Join(dir, "small"), 1 << 20}}}, "size 1048576",
		"raise it")
	refuse(Config{Devices: []Device{{filepath.Join(dir, "huge"), 1 << 50}}}, "lower size")
	refuse(config(filepath.Join(dir, "none", "store")), "no such file", "make the directory")
	locked := filepath.Join(dir, "locked")
	if err := os.Mkdir(locked, 0o555); err != nil {
		t.Fatal(err)
	}
	testutil.AsNobody(t, func() {
		refuse(config(filepath.Join(locked, "store")), "permission denied", "can write to")
	})
}
