package disk

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/page"
	"golang.org/x/sys/unix"
)

// Devices of unequal sizes hold pages in proportion, from one writer and from several, before
// pages are given up and afterwards.
func TestDevicesFillEvenly(t *testing.T) {
	for _, writers := range []int{1, 4} {
		files := []*disktest.Sim{disktest.New(segmentsAt+12*simSegment, 1),
			disktest.New(segmentsAt+48*simSegment, 2)}
		tier := start(t, files)
		for round := range 12 {
			var wg sync.WaitGroup
			for w := range writers {
				wg.Go(func() {
					for i := range 32 / writers {
						from := (round*32 + w*(32/writers) + i) * 6
						if got, err := load(tier, 0, from, from+6); len(got) != 6 {
							t.Errorf("%d of 6 pages: %v", len(got), err)
						}
					}
				})
			}
			wg.Wait()
			small, large := tier.logs[0].filled(), tier.logs[1].filled()
			if small > large+0.1 || large > small+0.1 {
				t.Errorf("%d writers, round %d: the devices are filled by %.2f and %.2f", writers,
					round, small, large)
			}
		}
		if tier.Stats().Evicted == 0 {
			t.Error("the store was never full")
		}
		_ = tier.Close()
	}
}

// All reserves together leave half of the disk.
func TestReservesAddUp(t *testing.T) {
	tier := start(t, sims(1, simBytes, 1))
	defer tier.Close()
	half := tier.capacity / 2
	if err := tier.SetOwner(7, page.ID{7}, 4096, 0, half); err != nil {
		t.Fatal(err)
	}
	if err := tier.SetOwner(8, page.ID{8}, 4096, 0, 1); err == nil ||
		!strings.Contains(err.Error(), "store.disk: reserve of 1 bytes") {
		t.Errorf("%v", err)
	}
	if _, ok := tier.Known()[page.ID{8}]; ok {
		t.Error("the namespace that was refused is known")
	}
	if err := tier.SetOwner(8, page.ID{8}, 4096, 100, 0); err == nil ||
		!strings.Contains(err.Error(), "quota of 100 bytes") {
		t.Errorf("%v", err)
	}
}

// A device that has less than the size that is configured, or than the store in it needs, is
// refused by name, and nothing is written.
func TestRefusesSmallDevices(t *testing.T) {
	f := disktest.New(simBytes, 1)
	try := func(size, have int64, fresh bool) error {
		t.Helper()
		tier, err := openAll([]opened{{path: "nvme", file: f, size: size, have: have,
			fresh: fresh}}, Config{SegmentBytes: simSegment, MaxPages: 64})
		if err == nil {
			_ = tier.Close()
		}
		return err
	}
	err := try(2*simBytes, simBytes, true)
	if err == nil || !strings.Contains(err.Error(), "path nvme: size 4718592") ||
		!strings.Contains(err.Error(), "has 2359296 bytes; lower size") {
		t.Errorf("%v", err)
	}
	if f.Ops() != 0 {
		t.Error("a device that is refused was written to")
	}
	if err := try(simBytes, simBytes, true); err != nil {
		t.Fatal(err)
	}
	ops := f.Ops()
	err = try(simBytes, simBytes-block, false)
	if err == nil || !strings.Contains(err.Error(), "needs 2359296 bytes, the device has") {
		t.Errorf("%v", err)
	}
	if f.Ops() != ops {
		t.Error("a store that is refused was written to")
	}
}

// One of two devices cannot be written. It stays empty, and does not draw all writes; once it can
// be written again it fills like the other.
func TestBrokenDevice(t *testing.T) {
	for broken := range 2 {
		breaks(t, broken)
	}
}

func breaks(t *testing.T, broken int) {
	files := sims(2, simBytes, 1)
	tier := start(t, files)
	defer tier.Close()
	_, _ = load(tier, 0, 999, 1000) // the ledger is on the first device, and has the namespace
	files[broken].Fail(func(op string, _ int64) error {
		if op == "write" {
			return unix.EIO
		}
		return nil
	})
	failed := 0
	for i := range 100 {
		if got, _ := load(tier, 0, i, i+1); len(got) != 1 {
			failed++
		}
	}
	if failed == 0 || failed > 10 {
		t.Errorf("%d of 100 writes failed", failed)
	}
	files[broken].Fail(nil)
	for i := range 100 {
		_, _ = load(tier, 0, 100+i, 101+i)
	}
	if a, b := tier.logs[0].filled(), tier.logs[1].filled(); a < b-0.1 {
		t.Errorf("the devices are filled by %.2f and %.2f", a, b)
	}
}

// A namespace is removed while a write waits for the device: none of the write's pages is durable,
// those that were here before among them.
func TestWriteMeetsRemoval(t *testing.T) {
	tier := start(t, sims(1, simBytes, 1))
	defer tier.Close()
	_, _ = load(tier, 0, 0, 3)
	l, id := tier.logs[0], number(tier, 0)
	l.mu.Lock()
	done := make(chan []error)
	go func() { done <- tier.Write(id, []Record{record(0, 1, nil), record(0, 9, nil)}, nil) }()
	for waits := false; !waits; {
		tier.mu.Lock()
		waits = l.pending > 0
		tier.mu.Unlock()
	}
	if err := tier.Remove(simSpace(0)); err != nil { // it does not wait for the device's log
		t.Fatal(err)
	}
	l.mu.Unlock()
	for i, err := range <-done {
		if !errors.Is(err, ErrRemoved) || errors.Is(err, catalog.ErrExists) {
			t.Errorf("record %d: %v", i, err)
		}
	}
	if has(t, tier, 0, 1) || has(t, tier, 0, 9) {
		t.Error("a page is here after the removal")
	}
}
