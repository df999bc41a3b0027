package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvspray/kvspray/transfer"
)

var update = flag.Bool("update", false, "write the golden vectors")

// golden compares b with testdata/name.hex: what travels is fixed, and changes only with a version.
func golden(t *testing.T, name string, b []byte) {
	t.Helper()
	path := filepath.Join("testdata", name+".hex")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		for at := 0; at < len(b); at += 32 {
			out.WriteString(hex.EncodeToString(b[at:min(at+32, len(b))]) + "\n")
		}
		if err := os.WriteFile(path, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := goldenBytes(t, name)
	if !bytes.Equal(b, want) {
		t.Errorf("%s changed on the wire:\n got %x\nwant %x", name, b, want)
	}
}

func goldenBytes(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".hex"))
	if err != nil {
		t.Fatal(err)
	}
	want, err := hex.DecodeString(strings.Join(strings.Fields(string(text)), ""))
	if err != nil {
		t.Fatal(err)
	}
	return want
}

func sampleHeader() Header {
	return Header{Kind: KindData, Flags: FlagCRC32C, Slot: 0x1234, Gen: 0x89abcdef,
		Range:   transfer.Range{First: 0x100, Count: 8},
		Attempt: 3, Seq: 0x77, Length: 8 * transfer.ChunkBytes}
}

func sampleEntries(n int) []Entry {
	var out []Entry
	for i := range uint32(n) {
		out = append(out, Entry{Slot: transfer.Slot(i), Outcome: transfer.Rejected,
			Reason: transfer.ReasonStaleGen, Gen: transfer.Gen(i * 3),
			Range: transfer.Range{First: i, Count: 1 + i}, Attempt: 2, Seq: 1000 + i})
	}
	return out
}

func TestHeader(t *testing.T) {
	h := sampleHeader()
	var b [HeaderBytes]byte
	PutHeader(b[:], &h)
	golden(t, "header", b[:])
	var got Header
	if err := ParseHeader(b[:], &got); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(h, got); d != "" {
		t.Error(d)
	}
	for i := range b {
		for bit := range 8 {
			c := b
			c[i] ^= 1 << bit
			if err := ParseHeader(c[:], &got); !errors.Is(err, ErrMalformed) {
				t.Fatalf("byte %d bit %d flipped: %v", i, bit, err)
			}
		}
	}
	if err := ParseHeader(b[:HeaderBytes-1], &got); !errors.Is(err, ErrMalformed) {
		t.Errorf("short: %v", err)
	}
}

func TestHeaderRefuses(t *testing.T) {
	for name, change := range map[string]func(*Header){
		"kind 0":       func(h *Header) { h.Kind = 0 },
		"kind 3":       func(h *Header) { h.Kind = kindEnd },
		"unknown flag": func(h *Header) { h.Flags |= 2 },
		"no chunks":    func(h *Header) { h.Range.Count = 0 },
		"too many": func(h *Header) {
			h.Range.Count = transfer.MaxSlotChunks +
				1
			h.Range.First = 0
		},
		"past the slot": func(h *Header) { h.Range.First = transfer.MaxSlotChunks - 7 },
		"wraps":         func(h *Header) { h.Range.First = 1<<32 - 4 },
		"too long":      func(h *Header) { h.Length++ },
		"outcome": func(h *Header) {
			h.Kind, h.Length, h.Outcome = KindConfirm, 0,
				transfer.InDoubt
		},
		"confirm length": func(h *Header) {
			h.Kind, h.Length, h.Outcome = KindConfirm, 5,
				transfer.Landed
		},
		"confirm bound": func(h *Header) {
			h.Kind, h.Length, h.Outcome = KindConfirm, MaxConfirms*EntryBytes, transfer.Landed
		},
	} {
		h := sampleHeader()
		change(&h)
		var b [HeaderBytes]byte
		PutHeader(b[:], &h)
		if err := ParseHeader(b[:], &h); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Another major version of the frame, its sum correct.
	h := sampleHeader()
	var b [HeaderBytes]byte
	PutHeader(b[:], &h)
	b[4] = 2
	sum := Sum(b[:44])
	b[44], b[45], b[46], b[47] = byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24)
	if err := ParseHeader(b[:], &h); err == nil || !strings.Contains(err.Error(), "major version") {
		t.Errorf("major 2: %v", err)
	}
}

func TestTrailer(t *testing.T) {
	tr := Trailer{Status: StatusInvalidated, Seq: 0xdeadbeef, CRC32C: 0xcafef00d}
	var b [TrailerBytes]byte
	PutTrailer(b[:], &tr)
	golden(t, "trailer", b[:])
	var got Trailer
	if err := ParseTrailer(b[:], &got); err != nil || got != tr {
		t.Fatalf("%+v %v", got, err)
	}
	for i := range b {
		c := b
		c[i] ^= 0x40
		if err := ParseTrailer(c[:], &got); !errors.Is(err, ErrMalformed) {
			t.Fatalf("byte %d flipped: %v", i, err)
		}
	}
	for _, s := range []Status{0, 3} {
		tr.Status = s
		PutTrailer(b[:], &tr)
		if err := ParseTrailer(b[:], &got); !errors.Is(err, ErrMalformed) {
			t.Errorf("status %d: %v", s, err)
		}
	}
	if err := ParseTrailer(b[:3], &got); !errors.Is(err, ErrMalformed) {
		t.Errorf("short: %v", err)
	}
}

func parseConfirms(b []byte) ([]Entry, error) {
	var h Header
	if err := ParseHeader(b, &h); err != nil {
		return nil, err
	}
	out := []Entry{h.Entry()}
	for b = b[HeaderBytes:]; len(b) > 0; b = b[EntryBytes:] {
		var e Entry
		if err := ParseEntry(b, &e); err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	return out, nil
}

func TestConfirms(t *testing.T) {
	for _, n := range []int{1, 2, MaxConfirms} {
		want := sampleEntries(n)
		b := AppendConfirms(nil, want)
		if n == 2 {
			golden(t, "confirms", b)
		}
		if len(b) != HeaderBytes+(n-1)*EntryBytes {
			t.Errorf("%d entries in %d bytes", n, len(b))
		}
		got, err := parseConfirms(b)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	}
}

func TestFramesDoNotAllocate(t *testing.T) {
	h := sampleHeader()
	b := make([]byte, HeaderBytes)
	tb := make([]byte, TrailerBytes)
	tr := Trailer{Status: StatusValid}
	es := sampleEntries(MaxConfirms)
	out := make([]byte, 0, 4096)
	var e Entry
	if n := testing.AllocsPerRun(100, func() {
		PutHeader(b, &h)
		if ParseHeader(b, &h) != nil {
			t.Error("header")
		}
		PutTrailer(tb, &tr)
		if ParseTrailer(tb, &tr) != nil {
			t.Error("trailer")
		}
		out = AppendConfirms(out[:0], es)
		if ParseEntry(out[HeaderBytes:], &e) != nil {
			t.Error("entry")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
