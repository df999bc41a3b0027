package disk

import (
	"bytes"
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// wipeAll overwrites what removed pages have left, and returns how many segments it took.
func wipeAll(t *testing.T, tier *Tier) (n int) {
	t.Helper()
	for tier.Stats().Removed > 0 {
		if _, err := tier.Wipe(); err != nil {
			t.Fatal(err)
		}
		if n++; n > 100 {
			t.Fatal("Wipe still reports segments that are left")
		}
	}
	return n
}

// The bytes of removed pages are on the device until they are overwritten, and their segments are
// counted, also by the next start. Pages of others stay.
func TestWipe(t *testing.T) {
	for _, restart := range []bool{false, true} {
		files := sims(1, simBytes, 1)
		tier := start(t, files)
		for i := range 6 { // pages of both are in each segment
			_, _ = load(tier, 0, i*8, i*8+8)
			_, _ = load(tier, 1, i*2, i*2+2)
		}
		if st := tier.Stats(); st.Evicted > 0 {
			t.Fatalf("the store is too small: %+v", st)
		}
		on := func() (n int) {
			whole := make([]byte, simBytes)
			if err := files[0].ReadAt(whole, 0); err != nil {
				t.Fatal(err)
			}
			for i := range 48 {
				if bytes.Contains(whole, content(simKey(0, i), simPages[0])[:simPages[0]]) {
					n++
				}
			}
			return n
		}
		if n := on(); n != 48 || tier.Stats().Removed != 0 {
			t.Fatalf("%d pages are on the device: %+v", n, tier.Stats())
		}
		if err := tier.Remove(simSpace(0)); err != nil {
			t.Fatal(err)
		}
		if restart {
			_ = tier.Close()
			tier = start(t, files)
		}
		if n := on(); n != 48 || tier.Stats().Removed == 0 {
			t.Errorf("restart %v: %d pages are on the device: %+v", restart, n, tier.Stats())
		}
		wipeAll(t, tier)
		if n := on(); n != 0 {
			t.Errorf("restart %v: %d removed pages are on the device", restart, n)
		}
		for range 2 {
			for i := range 12 {
				if !has(t, tier, 1, i) {
					t.Errorf("restart %v: page %d of another namespace is gone", restart, i)
				}
			}
			_ = tier.Close()
			files[0].Crash()
			tier = start(t, files)
		}
		if left := tier.Stats().Removed; left != 0 {
			t.Errorf("restart %v: %d bytes are left", restart, left)
		}
		_ = tier.Close()
	}
}

// A segment that is taken again still has bytes of removed pages behind what was written since:
// while it is written, once it has ended early or in full, and after a start.
func TestWipeOfWhatWasNotOverwritten(t *testing.T) {
	for _, then := range []string{"wipe", "fill", "start"} {
		files := sims(1, simBytes, 1)
		tier := start(t, files)
		const pages = 300 // more than fit: all segments are used
		for i := range pages / 5 {
			_, _ = load(tier, 0, i*5, i*5+5)
		}
		if err := tier.Remove(simSpace(0)); err != nil {
			t.Fatal(err)
		}
		put := 0
		again := func() int { // the segment that is written, if it was taken again
			l := tier.logs[0]
			if l.at < 0 || len(l.segments[l.at].eras) <= len(l.spaces) {
				return -1
			}
			return l.at
		}
		for again() < 0 {
			_, _ = load(tier, 1, put, put+1)
			if put++; put > pages {
				t.Fatal("no segment is taken again")
			}
		}
		for at := again(); then == "fill" && tier.logs[0].at == at; put++ {
			_, _ = load(tier, 1, put, put+1)
		}
		if then == "start" {
			_ = tier.Close()
			tier = start(t, files)
		}
		wipeAll(t, tier)
		whole := make([]byte, simBytes)
		if err := files[0].ReadAt(whole, 0); err != nil {
			t.Fatal(err)
		}
		left := 0
		for i := range pages {
			if bytes.Contains(whole, content(simKey(0, i), simPages[0])[:simPages[0]]) {
				left++
			}
		}
		if left > 0 {
			t.Errorf("%s: %d removed pages are on the device", then, left)
		}
		if !has(t, tier, 1, put-1) {
			t.Errorf("%s: a page of another namespace is gone", then)
		}
		_ = tier.Close()
	}
}

// A segment that cannot be overwritten does not keep the others from it.
func TestWipeGoesOnAfterAnError(t *testing.T) {
	files := sims(1, simBytes, 1)
	tier := start(t, files)
	defer tier.Close()
	_, _ = load(tier, 0, 0, 90)
	if err := tier.Remove(simSpace(0)); err != nil {
		t.Fatal(err)
	}
	before := tier.Stats().Removed
	files[0].Fail(func(op string, off int64) error {
		if op == "write" && off >= segmentsAt && off < segmentsAt+simSegment {
			return unix.EIO
		}
		return nil
	})
	failed := 0
	for range before / simSegment {
		if _, err := tier.Wipe(); errors.Is(err, unix.EIO) {
			failed++
		}
	}
	if left := tier.Stats().Removed; before < 2*simSegment || failed != 1 || left != simSegment {
		t.Errorf("%d errors, %d of %d bytes are left", failed, left, before)
	}
	files[0].Fail(nil)
	wipeAll(t, tier)
}
