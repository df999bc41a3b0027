package frame

import (
	"bytes"
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
)

func commit(i uint64) *peerv1.ControlFrame {
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{Commit: &peerv1.Commit{
		Destination: &peerv1.Lease{Id: i}}}}
}

func FuzzRead(f *testing.F) {
	b, err := Append(nil, commit(7))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		for {
			m, _, err := Read(r, nil)
			if err != nil {
				return
			}
			if out, err := Append(nil, m); err == nil {
				n, _, err := Read(bytes.NewReader(out), nil)
				if len(out) > LengthBytes && (err != nil || !proto.Equal(m, n)) {
					t.Fatalf("%v became %v: %v", m, n, err)
				}
			}
		}
	})
}

// FuzzReassembly: whatever pieces arrive, the kept bytes are bounded, and a complete message is the
// one that was split.
func FuzzReassembly(f *testing.F) {
	f.Add([]byte{1, 2, 3}, uint16(2), true)
	whole, err := proto.Marshal(commit(7))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole, uint16(3), true)
	f.Add(whole, uint16(0), false)
	f.Fuzz(func(t *testing.T, b []byte, size uint16, last bool) {
		var r Reassembly
		var out *peerv1.ControlFrame
		step := max(int(size), 1)
		for at := 0; at < len(b); at += step {
			end := min(at+step, len(b))
			got, err := r.Add(fragment(b[at:end], last && end == len(b)))
			if r.Bytes() > MaxMessage || err != nil && (got != nil || !errors.Is(err, ErrFragment)) {
				t.Fatalf("%d bytes are kept, %v, %v", r.Bytes(), got, err)
			}
			if got != nil {
				out = got
			}
		}
		var direct peerv1.ControlFrame
		if err := proto.Unmarshal(b, &direct); err == nil && last && len(b) > 0 &&
			direct.GetFragment() == nil && !proto.Equal(&direct, out) {
			t.Fatalf("%v became %v", &direct, out)
		}
		if f, err := r.Add(commit(1)); (err == nil) != (f != nil) || r.Bytes() != 0 {
			t.Fatalf("after the pieces: %v, %v, %d bytes", f, err, r.Bytes())
		}
	})
}
