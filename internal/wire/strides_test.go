package wire

import (
	"encoding/hex"
	"errors"
	"math"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
)

// Golden vectors: how a lane encodes the places of pieces, byte for byte.
var stridesGolden = []struct {
	s   mem.Strides
	hex string
}{
	{mem.Strides{Stride: 4096, Count: 100, Rows: 1}, "0010000000000000" + "64000000" + "00000000"},
	{mem.Strides{Stride: math.MaxUint64 - 127, Count: 3, Rows: 1}, "80ffffffffffffff" + "03000000" +
		"00000000"},
	{mem.Strides{Stride: 8192, Outer: 512, Count: 8, Rows: 16}, "0020000000000000" + "08000000" +
		"10000000" + "0002000000000000" + "0000000000000000"},
	{mem.Strides{Stride: 1, Outer: math.MaxUint64 - 1, Count: math.MaxUint32, Rows: math.MaxUint32},
		"0100000000000000" + "ffffffff" + "ffffffff" + "feffffffffffffff" + "0000000000000000"},
}

func TestStridesGolden(t *testing.T) {
	for _, g := range stridesGolden {
		b := AppendStrides(nil, &g.s)
		if got := hex.EncodeToString(b); got != g.hex {
			t.Errorf("%+v: %s, want %s", g.s, got, g.hex)
		}
		var s mem.Strides
		rest, err := ReadStrides(append(b, 7), &s)
		if err != nil || s != g.s || len(rest) != 1 || rest[0] != 7 {
			t.Errorf("%+v was read as %+v with %d bytes behind: %v", g.s, s, len(rest), err)
		}
		for n := range b {
			if _, err := ReadStrides(b[:n:n], &s); !errors.Is(err, ErrMalformed) {
				t.Errorf("%+v cut at %d: %v", g.s, n, err)
			}
		}
	}
}

func TestMalformedStrides(t *testing.T) {
	two := mem.Strides{Stride: 8192, Outer: 512, Count: 8, Rows: 16}
	for name, change := range map[string]func([]byte){
		"no piece in a row":  func(b []byte) { b[8] = 0 },
		"one piece in a row": func(b []byte) { b[8] = 1 },
		"one row":            func(b []byte) { b[12] = 1 },
		"first padding":      func(b []byte) { b[24] = 1 },
		"last padding":       func(b []byte) { b[31] = 128 },
	} {
		b := AppendStrides(nil, &two)
		change(b)
		if _, err := ReadStrides(b, new(mem.Strides)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ReadStrides(AppendStrides(nil, &two)[:StridesCell], new(mem.Strides)); !errors.Is(err,
		ErrMalformed) {
		t.Errorf("rows without their cell: %v", err)
	}
}

// FuzzStrides: what is read has pieces, and is written as it was read.
func FuzzStrides(f *testing.F) {
	for _, g := range stridesGolden {
		f.Add(AppendStrides(nil, &g.s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var s mem.Strides
		rest, err := ReadStrides(b, &s)
		if err != nil {
			return
		}
		if s.Count < 2 || s.Rows < 1 || s.Rows == 1 && s.Outer != 0 {
			t.Fatalf("read as %+v", s)
		}
		if again := AppendStrides(nil, &s); string(again) != string(b[:len(b)-len(rest)]) {
			t.Fatalf("%x became %x", b, again)
		}
	})
}
