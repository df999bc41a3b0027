package wire

import (
	"bytes"
	"testing"

	"github.com/kvspray/kvspray/transfer"
)

func FuzzHeader(f *testing.F) {
	f.Add(goldenBytes(f, "header"))
	f.Add(goldenBytes(f, "confirms"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= HeaderBytes { // let the fuzzer past the sum
			sum := Sum(b[:44])
			b[44], b[45], b[46], b[47] = byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24)
		}
		var h Header
		if ParseHeader(b, &h) != nil {
			return
		}
		if h.Range.End() > transfer.MaxSlotChunks || h.Range.Count == 0 ||
			h.Length > uint64(h.Range.Count)*transfer.ChunkBytes && h.Kind == KindData {
			t.Fatalf("accepted %+v", h)
		}
		var again [HeaderBytes]byte
		var h2 Header
		PutHeader(again[:], &h)
		if err := ParseHeader(again[:], &h2); err != nil || h2 != h {
			t.Fatalf("%+v became %+v: %v", h, h2, err)
		}
	})
}

func FuzzTrailer(f *testing.F) {
	f.Add(goldenBytes(f, "trailer"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= TrailerBytes {
			sum := Sum(b[:12])
			b[12], b[13], b[14], b[15] = byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24)
		}
		var tr, tr2 Trailer
		if ParseTrailer(b, &tr) != nil {
			return
		}
		var again [TrailerBytes]byte
		PutTrailer(again[:], &tr)
		if err := ParseTrailer(again[:], &tr2); err != nil || tr2 != tr {
			t.Fatalf("%+v became %+v: %v", tr, tr2, err)
		}
	})
}

func FuzzEntry(f *testing.F) {
	f.Add(goldenBytes(f, "confirms")[HeaderBytes:])
	f.Fuzz(func(t *testing.T, b []byte) {
		var e Entry
		if ParseEntry(b, &e) == nil && e.Outcome != transfer.Landed && e.Outcome != transfer.Rejected {
			t.Fatalf("accepted %+v", e)
		}
	})
}

// A stranger that writes anything at a listener gets no lane, and no more than a bounded answer.
func FuzzAccept(f *testing.F) {
	f.Add(goldenBytes(f, "open-dialer"))
	f.Add(goldenBytes(f, "open-dialer")[:helloFixed])
	f.Fuzz(func(t *testing.T, b []byte) {
		_, a := params()
		a.Rand = nil
		s := &script{in: bytes.NewReader(b)}
		if _, err := Accept(s, a); err == nil {
			t.Fatal("opened without the key")
		}
		if s.out.Len() > answerFixed+MaxAttach+verdictSize {
			t.Fatalf("%d bytes of answer", s.out.Len())
		}
	})
}

// A peer that answers anything gets nothing out of a dialer but its hello and a proof that is worth
// nothing elsewhere.
func FuzzDial(f *testing.F) {
	f.Add(goldenBytes(f, "open-acceptor"))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, _ := params()
		d.Rand = nil
		if _, err := Dial(&script{in: bytes.NewReader(b)}, d); err == nil {
			t.Fatal("opened without the key")
		}
	})
}
