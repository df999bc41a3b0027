package disk

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/page"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// flipped is a bit that was flipped and can be flipped back.
type flipped struct {
	at  int
	bit uint
}

// damage flips a bit where a segment is described: in its header, in a table between its pages, in
// its footer, or in one copy of the ledger.
func damage(t *rapid.T, f *disktest.Sim, copy int) flipped {
	base := segmentsAt + simSegment*rapid.IntRange(0, (simBytes-segmentsAt)/simSegment-1).Draw(t,
		"segment")
	at := 0
	switch rapid.SampledFrom([]string{"header", "group", "footer", "ledger"}).Draw(t, "what") {
	case "header":
		at = base + rapid.IntRange(0, block-1).Draw(t, "byte")
	case "group":
		at = base + block*rapid.IntRange(1, simSegment/block-1).Draw(t, "block") +
			rapid.IntRange(0, 200).Draw(t, "byte")
	case "footer":
		at = base + simSegment - block*rapid.IntRange(1, 3).Draw(t, "block") +
			rapid.IntRange(0, 200).Draw(t, "byte")
	case "ledger":
		at = int(ledgerPlace(copy)) + rapid.IntRange(0, 200).Draw(t, "byte")
	}
	d := flipped{at, rapid.UintRange(0, 7).Draw(t, "bit")}
	f.Flip(d.at, d.bit)
	return d
}

// Whatever describes the segments is damaged, and some of it is whole again later: a removed page
// never comes back. Between two starts, at most one copy of the ledger is damaged.
func TestRemovalWinsOverDamage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		files := sims(1, simBytes, rapid.Uint64().Draw(t, "seed"))
		tier := start(t, files)
		const maxPages = 400
		var may [2]map[int]bool
		for i := range may {
			may[i] = map[int]bool{}
		}
		var flips []flipped
		copy, next := 0, 0
		owner := rapid.Uint16Range(0, 1)
		again := func(t *rapid.T) {
			_ = tier.Close()
			files[0].Crash()
			tier = start(t, files)
			copy = rapid.IntRange(0, 1).Draw(t, "copy")
			for o := range uint16(2) {
				for i, list := 0, listed(tier, o, maxPages); i < maxPages; i++ {
					if list.Get(i) && !may[o][i] {
						t.Fatalf("owner %d: page %d came back", o, i)
					}
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"write": func(t *rapid.T) {
				o, n := owner.Draw(t, "owner"), rapid.IntRange(1, 12).Draw(t, "pages")
				if next+n > maxPages {
					return
				}
				_, _ = load(tier, o, next, next+n)
				for i := next; i < next+n; i++ {
					may[o][i] = true
				}
				next += n
			},
			"remove": func(t *rapid.T) {
				o := owner.Draw(t, "owner")
				if err := tier.Remove(simSpace(o)); err != nil {
					t.Fatal(err)
				}
				clear(may[o])
			},
			"damage": func(t *rapid.T) { flips = append(flips, damage(t, files[0], copy)) },
			"mend": func(t *rapid.T) {
				for len(flips) > 0 && rapid.Bool().Draw(t, "one more") {
					// A block that was written since is damaged by this.
					if f := flips[0]; f.at >= segmentsAt {
						files[0].Flip(f.at, f.bit)
					}
					flips = flips[1:]
				}
			},
			"crash": again,
		})
		again(t)
		_ = tier.Close()
	})
}

// The header of a segment is damaged, its namespace removed, and the header whole again: the life
// in it is an old one.
func TestRemovalWinsOverAHeaderThatComesBack(t *testing.T) {
	files := sims(1, simBytes, 1)
	tier := start(t, files)
	_, _ = load(tier, 0, 0, 20)
	_ = tier.Close()
	files[0].Flip(segmentsAt+40, 1)
	tier = start(t, files)
	if listed(tier, 0, 20).Count() != 0 {
		t.Fatal("the header was not damaged")
	}
	own(t, tier)
	if err := tier.Remove(simSpace(0)); err != nil {
		t.Fatal(err)
	}
	_ = tier.Close()
	files[0].Flip(segmentsAt+40, 1)
	tier = start(t, files)
	defer tier.Close()
	if n := listed(tier, 0, 20).Count(); n != 0 {
		t.Errorf("%d removed pages came back", n)
	}
}

// Far more namespaces come and are removed than the ledger has room for, while the first segment
// stays in use.
func TestManyRemovals(t *testing.T) {
	files := sims(2, simBytes, 1)
	tier := start(t, files)
	kept, _ := load(tier, 0, 0, 20)
	const n = 9
	for i := range 2*maxSpaces + 100 {
		id := page.ID{99, byte(i), byte(i >> 8)}
		if err := tier.SetOwner(n, id, simPages[0], 0, 0); err != nil {
			t.Fatal(err)
		}
		ops := files[0].Ops() + files[1].Ops()
		if i%50 == 0 {
			if errs := tier.Write(n, []Record{record(0, 1000+i, nil)}, nil); errs[0] != nil {
				t.Fatal(errs)
			}
		}
		if err := tier.Remove(id); err != nil {
			t.Fatalf("removal %d: %v", i, err)
		}
		if wrote := files[0].Ops()+files[1].Ops() > ops; wrote != (i%50 == 0) {
			t.Fatalf("removal %d: I/O: %v", i, wrote)
		}
		if !tier.DropOwner(n) {
			t.Fatal("a removed owner has pages")
		}
	}
	for range 2 {
		for _, i := range kept {
			if !has(t, tier, 0, i) {
				t.Errorf("page %d is gone", i)
			}
		}
		if got := tier.Stats().Pages; got != uint64(len(kept)) {
			t.Errorf("%d pages, want %d", got, len(kept))
		}
		_ = tier.Close()
		for _, f := range files {
			f.Crash()
		}
		tier = start(t, files)
	}
	_ = tier.Close()
}

// One copy of the ledger is enough, and is written again at the start. Without both, it is
// unknown what was removed, and the store is refused.
func TestLedgerCopies(t *testing.T) {
	files := sims(1, simBytes, 1)
	tier := start(t, files)
	_, _ = load(tier, 0, 0, 20)
	_, _ = load(tier, 1, 0, 20)
	if err := tier.Remove(simSpace(0)); err != nil {
		t.Fatal(err)
	}
	for copy := range 2 {
		_ = tier.Close()
		files[0].Flip(int(ledgerPlace(copy))+70, 3)
		tier = start(t, files)
		if n := listed(tier, 0, 20).Count(); n != 0 {
			t.Errorf("copy %d is damaged: %d removed pages came back", copy, n)
		}
		if n := listed(tier, 1, 20).Count(); n != 20 {
			t.Errorf("copy %d is damaged: %d of 20 other pages are there", copy, n)
		}
	}
	_ = tier.Close()
	for copy := range 2 {
		files[0].Flip(int(ledgerPlace(copy))+70, 3)
	}
	ops := files[0].Ops()
	_, err := OpenFiles([]OpenDevice{{"sim", files[0], simBytes}}, Config{SegmentBytes: simSegment})
	if err == nil || !strings.Contains(err.Error(), "path sim") ||
		!strings.Contains(err.Error(), "both copies") {
		t.Errorf("%v", err)
	}
	if files[0].Ops() != ops {
		t.Error("a store that is refused was written to")
	}
}

// A copy could not be written and may be anything; then the power goes in the next write. The copy
// that is whole is not the one that is written first.
func TestLedgerKeepsTheWholeCopy(t *testing.T) {
	for seed := range uint64(20) {
		files := sims(1, simBytes, seed)
		tier := start(t, files)
		_, _ = load(tier, 0, 0, 20)
		_, _ = load(tier, 1, 0, 1)
		for i := range byte(100) { // so that what is written is more than one sector
			tier.ledger.eras[page.ID{9, i}] = era{era: page.NewEra()}
		}
		if err := tier.Remove(simSpace(0)); err != nil {
			t.Fatal(err)
		}
		files[0].Fail(func(op string, off int64) error {
			if op == "write" && off == ledgerPlace(1) {
				return unix.EIO
			}
			return nil
		})
		if err := tier.Remove(simSpace(1)); !errors.Is(err, unix.EIO) {
			t.Fatal(err)
		}
		files[0].Fail(nil)
		files[0].Flip(int(ledgerPlace(1))+70, 3)
		files[0].LosePower(1)
		if err := tier.Remove(simSpace(1)); !errors.Is(err, disktest.ErrPower) {
			t.Fatal(err)
		}
		_ = tier.Close()
		files[0].Crash()
		tier = start(t, files)
		if n := listed(tier, 0, 20).Count(); n != 0 {
			t.Errorf("seed %d: %d removed pages came back", seed, n)
		}
		_ = tier.Close()
	}
}
