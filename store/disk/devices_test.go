// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"sync"
	"testing"

	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/disk/disktest"
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

// A namespace is removed while a write waits for the device: none of the write's pages is durable,
// those that were here before among them.
func TestWriteMeetsRemoval(t *testing.T) {
	tier := start(t, sims(1, simBytes, 1))
	defer tier.Close()
	_, _ = load(tier, 0, 0, 3)
	l, id := tier.logs[0], number(tier, 0)
	l.mu.Lock()
	done := make(chan []error)
	go func() { done <- tier.Write(id, []Record{record(0, 1, nil), record(0, 9, nil)}) }()
	for waits := false; !waits; {
		tier.mu.Lock()
		waits = l.waiting > 0
		tier.mu.Unlock()
	}
	tier.mu.Lock()
	tier.owners[id].removals++
	tier.pages.RemoveOwner(id)
	tier.mu.Unlock()
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
