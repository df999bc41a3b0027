package board_test

import (
	"encoding/hex"
	"sync"
	"testing"

	"github.com/kvspray/kvspray/internal/board"
)

func newWork(t testing.TB) (*board.Work, []byte) {
	t.Helper()
	mem := make([]byte, board.WorkBytes)
	w, err := board.InitWork(mem)
	if err != nil {
		t.Fatal(err)
	}
	return w, mem
}

func TestWorkHeaderRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func([]byte)
		want   string
	}{
		"magic":       {func(b []byte) { b[0]++ }, "magic"},
		"major":       {func(b []byte) { b[board.OffWorkHeaderMajor] = 2 }, "ABI version 2"},
		"slots":       {func(b []byte) { put32(b, board.OffWorkHeaderSlots, 9) }, "9 slots"},
		"runs":        {func(b []byte) { put32(b, board.OffWorkHeaderRuns, 1) }, "of 1 runs"},
		"total":       {func(b []byte) { put64(b, board.OffWorkHeaderTotalBytes, 1<<40) }, "bytes"},
		"newer minor": {func(b []byte) { b[board.OffWorkHeaderMinor] = 9 }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, mem := newWork(t)
			c.change(mem)
			_, err := board.ParseWork(mem)
			wantError(t, err, c.want)
		})
	}
	for _, short := range []int{0, board.WorkBytes - 1} {
		if _, err := board.ParseWork(make([]byte, short)); err == nil {
			t.Errorf("%d bytes parse", short)
		}
		if _, err := board.InitWork(make([]byte, short)); err == nil {
			t.Errorf("%d bytes are made a board", short)
		}
	}
	if _, err := board.ParseWork(make([]byte, board.WorkBytes+8)[4:]); err == nil {
		t.Error("unaligned memory parses")
	}
}

// Every slot has words, a done word and a list of its own.
func TestWorkSlots(t *testing.T) {
	w, _ := newWork(t)
	for slot := range board.WorkSlots {
		for _, i := range []int{0, board.WorkRuns - 1} {
			w.SetRun(slot, i, board.WorkRun{Region: 3 + slot, Off: uint64(i) << 30, Stride: ^uint64(15),
				Len: 64, Count: 2, Rows: 1})
		}
		if w.Post(slot, 7, board.WorkRequest{Op: board.WorkPack, Runs: uint32(slot), Dense: 16, Bytes: 32,
			Blocks: 4}) {
			t.Error("nobody sleeps, and is to be woken")
		}
	}
	for slot := range board.WorkSlots {
		if _, ended := w.Ended(slot, 7); ended {
			t.Fatalf("slot %d has ended before it began", slot)
		}
		seq, q, ok := w.Take(slot)
		if want := (board.WorkRequest{Op: board.WorkPack, Runs: uint32(slot), Dense: 16, Bytes: 32,
			Blocks: 4}); !ok || seq != 7 || q != want {
			t.Errorf("slot %d: %v %d %+v", slot, ok, seq, q)
		}
		for _, i := range []int{0, board.WorkRuns - 1} {
			if got, next := w.Run(slot, i); got != (board.WorkRun{Region: 3 + slot, Off: uint64(i) << 30,
				Stride: ^uint64(15), Len: 64, Count: 2, Rows: 1}) || next != i+1 {
				t.Errorf("slot %d, run %d: %+v, then %d", slot, i, got, next)
			}
		}
		if _, _, again := w.Take(slot); again || w.Revoke(slot, 7) {
			t.Errorf("slot %d is taken twice, or revoked behind that", slot)
		}
		w.Finish(slot, 7, uint32(slot%3))
	}
	for slot := range board.WorkSlots {
		if refusal, ended := w.Ended(slot, 7); !ended || refusal != uint32(slot%3) {
			t.Errorf("slot %d: ended %v, %d", slot, ended, refusal)
		}
		if _, ended := w.Ended(slot, 8); ended {
			t.Errorf("slot %d: what was not posted has ended", slot)
		}
	}
	h := [board.WorkHandleBytes]byte{1, 63: 2}
	if w.SetHandle(2, h); w.Handle(2) != h {
		t.Error("the handle is another one")
	}
}

// Of somebody who takes and somebody who revokes one wins, and of a sleeper and a poster that race
// one sees the other, every time.
func TestWorkRaces(t *testing.T) {
	w, _ := newWork(t)
	for seq := uint64(1); seq <= 20_000; seq++ {
		var wg sync.WaitGroup
		var wake, taken, revoked bool
		wg.Go(func() { wake = w.Post(1, seq, board.WorkRequest{Op: board.WorkPack}) })
		w.Sleep()
		_, _, early := w.Take(1)
		wg.Wait()
		if !early && !wake {
			t.Fatal("the shim sleeps and nobody rings")
		}
		if !early {
			wg.Go(func() { revoked = w.Revoke(1, seq) })
			_, _, taken = w.Take(1)
			wg.Wait()
		}
		if n := btoi(early) + btoi(taken) + btoi(revoked); n != 1 {
			t.Fatalf("slot taken or revoked %d times", n)
		}
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// FuzzWork takes any bytes for a work memory: whatever an engine writes, nothing panics, and a slot
// has ended or not.
func FuzzWork(f *testing.F) {
	_, mem := newWork(f)
	f.Add(mem[:2048])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		_, mem := newWork(t)
		copy(mem, b)
		w, err := board.ParseWork(mem)
		if err != nil {
			return
		}
		for slot := range board.WorkSlots {
			w.SetRun(slot, board.WorkRuns-1, board.WorkRun{Len: 16, Count: 1})
			w.Post(slot, 5, board.WorkRequest{Op: board.WorkPack, Runs: 1})
			_, ended := w.Ended(slot, 5)
			if _, _, ok := w.Take(slot); !ok {
				t.Fatalf("slot %d was posted and cannot be taken", slot)
			}
			if w.Finish(slot, 5, board.WorkBad); !ended {
				if why, ok := w.Ended(slot, 5); !ok || why != board.WorkBad {
					t.Fatalf("slot %d: refused, and %d, %v", slot, why, ok)
				}
			}
		}
	})
}

// A run of rows takes two places of a list, byte for byte as board.h says, and is sent to no shim
// that does not know it.
func TestWorkRows(t *testing.T) {
	w, raw := newWork(t)
	rows := board.WorkRun{Region: 5, Off: 1 << 20, Stride: 8192, Outer: ^uint64(511), Len: 512,
		Count: 8, Rows: 16}
	if next := w.SetRun(2, 7, rows); next != 9 {
		t.Errorf("the place behind it is %d", next)
	}
	if got, next := w.Run(2, 7); got != rows || next != 9 {
		t.Errorf("%+v was read as %+v, then %d", rows, got, next)
	}
	got := raw[board.WorkLists+(2*board.WorkRuns+7)*board.SizeWorkRun:][:2*board.SizeWorkRun]
	// where, stride, len, count and the flag
	want := "0000100000000500" + "0020000000000000" + "00020000" + "08000080" +
		"0000000000000000" + "00feffffffffffff" + "00000000" + "10000000"
	if hex.EncodeToString(got) != want {
		t.Errorf("%x, want %s", got, want)
	}
	if !w.Rows() {
		t.Error("a shim of today knows no rows")
	}
	raw[board.OffWorkHeaderMinor] = 0
	older, err := board.ParseWork(raw)
	if err != nil || older.Rows() {
		t.Errorf("an older shim: %v, or it knows rows", err)
	}
}
