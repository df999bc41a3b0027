package disk

import (
	"bytes"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/store/disk/disktest"
)

func TestNoteSurvivesStartsAndDamage(t *testing.T) {
	files := sims(1, simBytes, 1)
	tier := start(t, files)
	if note, err := tier.Note(); note != nil || err != nil {
		t.Fatalf("a new store has a note: %q %v", note, err)
	}
	if err := tier.SetNote(make([]byte, MaxNoteBytes+1)); err == nil {
		t.Error("a note without a bound")
	}
	long := bytes.Repeat([]byte{7}, MaxNoteBytes)
	for _, note := range [][]byte{[]byte("one"), long, []byte("three")} {
		if err := tier.SetNote(note); err != nil {
			t.Fatal(err)
		}
		_ = tier.Close()
		tier = start(t, files)
		if got, err := tier.Note(); err != nil || !bytes.Equal(got, note) {
			t.Fatalf("%d bytes: %d bytes, %v", len(note), len(got), err)
		}
	}
	// "three" is in the first copy. Its damage leaves the note before it.
	files[0].Flip(int(notePlace(0))+headerBytes+1, 1)
	if got, err := tier.Note(); err != nil || !bytes.Equal(got, long) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	files[0].Flip(int(notePlace(1))+40, 7)
	if got, err := tier.Note(); err != nil || got != nil {
		t.Fatalf("both are damaged: %d bytes, %v", len(got), err)
	}
	if err := tier.SetNote([]byte("four")); err != nil {
		t.Fatal(err)
	}
	if got, err := tier.Note(); err != nil || string(got) != "four" {
		t.Fatalf("%q, %v", got, err)
	}
}

// A note that is being written when the power goes leaves the one before it, or is there.
func TestNoteAndPower(t *testing.T) {
	for seed := range uint64(20) {
		files := sims(1, simBytes, seed)
		tier := start(t, files)
		if err := tier.SetNote([]byte("old")); err != nil {
			t.Fatal(err)
		}
		files[0].LosePower(1 + int(seed%2))
		if err := tier.SetNote([]byte("new")); err != nil && !errors.Is(err, disktest.ErrPower) {
			t.Fatal(err)
		}
		files[0].Crash()
		got, err := tier.Note()
		if err != nil || string(got) != "old" && string(got) != "new" {
			t.Fatalf("seed %d: %q, %v", seed, got, err)
		}
		_ = tier.Close()
	}
}

// The kernel reports an error of a write once, to the next sync. The error must go to the pages
// that were not written, which are then written again. If it went to a note or a removal
// that is written meanwhile, the pages would count as durable.
func TestErrorOfASyncGoesToItsWriter(t *testing.T) {
	for what, write := range map[string]func(*Tier) error{
		"note":    func(tier *Tier) error { return tier.SetNote([]byte("note")) },
		"removal": func(tier *Tier) error { return tier.Remove(simSpace(1)) },
	} {
		t.Run(what, func(t *testing.T) {
			files := sims(1, simBytes, 1)
			tier := start(t, files)
			defer func() { _ = tier.Close() }()
			for owner := range uint16(2) {
				if durable, err := load(tier, owner, 0, 1); len(durable) != 1 { // begins a segment
					t.Fatal(err)
				}
			}
			var held, failed atomic.Bool
			written := make(chan error, 1)
			files[0].HoldSyncs(func() {
				if !held.CompareAndSwap(false, true) {
					return
				}
				go func() { written <- write(tier) }()
				select {
				case err := <-written: // it was not to sync now
					written <- err
				case <-time.After(20 * time.Millisecond): // no longer than a fault needs to show
				}
			})
			files[0].Fail(func(op string, _ int64) error {
				if op == "sync" && failed.CompareAndSwap(false, true) {
					return unix.EIO
				}
				return nil
			})
			if durable, err := load(tier, 0, 1, 2); len(durable) != 1 {
				t.Errorf("the page was not written again: %v", err)
			}
			if err := <-written; err != nil {
				t.Errorf("the %s has the error of the pages: %v", what, err)
			}
		})
	}
}

func FuzzNote(f *testing.F) {
	var id storeID
	b := make([]byte, noteBytes)
	encodeNote(b, id, 3, []byte("a note"))
	f.Add(b[:headerBytes+6])
	f.Add(b[:headerBytes])
	f.Fuzz(func(t *testing.T, b []byte) {
		if g, note := parseNote(b, id); g == 0 && note != nil || len(note) > MaxNoteBytes {
			t.Fatalf("generation %d, %d bytes", g, len(note))
		}
	})
}
