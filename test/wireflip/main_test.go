package main

import (
	"bytes"
	"encoding/json"
	"io"
	"testing"
	"testing/iotest"

	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

func stream(frames int, payload int) []byte {
	out := []byte("an opening with KVS and KVSF in it, KVSF")
	for i := range frames {
		h := make([]byte, wire.HeaderBytes)
		wire.PutHeader(h, &wire.Header{Kind: wire.KindData, Range: transfer.Range{First: uint32(i),
			Count: 1}, Length: uint64(payload)})
		out = append(out, h...)
		out = append(out, make([]byte, payload+wire.TrailerBytes)...)
		out = wire.AppendConfirms(out, []wire.Entry{{Outcome: transfer.Landed,
			Range: transfer.Range{First: 1, Count: 1}},
			{Outcome: transfer.Landed, Range: transfer.Range{First: 2, Count: 1}}})
	}
	return out
}

func TestFlipsOneBitOfTheNamedFrame(t *testing.T) {
	in := stream(5, 1000)
	for name, src := range map[string]func(io.Reader) io.Reader{"whole": func(r io.Reader) io.Reader {
		return r
	}, "bytewise": iotest.OneByteReader} {
		for _, frame := range []int64{0, 1, 3, 5, 6} {
			var out, printed bytes.Buffer
			f := &flipper{frame: frame, out: json.NewEncoder(&printed)}
			if err := f.copy(&out, src(bytes.NewReader(in))); err != io.EOF {
				t.Fatalf("%s: copy: %v", name, err)
			}
			if out.Len() != len(in) {
				t.Fatalf("%s frame %d: %d bytes of %d", name, frame, out.Len(), len(in))
			}
			changed := 0
			for i, b := range out.Bytes() {
				if b != in[i] {
					changed++
				}
			}
			want := 0
			if frame >= 1 && frame <= 5 {
				want = 1
			}
			if changed != want || (printed.Len() > 0) != (want > 0) {
				t.Errorf("%s frame %d: %d bytes changed, printed %q", name, frame, changed, printed.String())
			}
		}
	}
}
