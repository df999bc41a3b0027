package wire

import (
	"bytes"
	"testing"

	"github.com/kvspray/kvspray/transfer"
)

func TestChunks(t *testing.T) {
	c := Chunks{Gen: 0x04030201, Range: transfer.Range{First: 0x08070605, Count: 0x0c0b0a09},
		Attempt: 0x100f0e0d}
	b := AppendChunks([]byte{0}, c)
	if want := []byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
		16}; !bytes.Equal(b, want) {
		t.Fatalf("encoded as %v, not %v", b, want)
	}
	if got := ReadChunks(b[1:]); got != c {
		t.Errorf("read %v, not %v", got, c)
	}
}
