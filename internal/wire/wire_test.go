// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
	tr := Trailer{Status: StatusDisowned, Seq: 0xdeadbeef, CRC32C: 0xcafef00d}
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

func TestChoose(t *testing.T) {
	for _, c := range []struct {
		ours, theirs Versions
		want         Version
	}{
		{Versions{V(1, 0), V(1, 0)}, Versions{V(1, 0), V(1, 0)}, V(1, 0)},
		// an older peer that knows nothing of ours
		{Versions{V(1, 0), V(1, 0)}, Versions{V(0, 9), V(0, 9)}, 0},
		// a newer one that still speaks ours
		{Versions{V(1, 0), V(1, 0)}, Versions{V(0, 9), V(1, 7)}, V(1, 0)},
		{Versions{V(1, 0), V(2, 3)}, Versions{V(1, 0), V(1, 4)}, V(1, 4)}, // we are the newer one
		{Versions{V(1, 0), V(1, 0)}, Versions{V(2, 0), V(3, 0)}, 0},
		{Versions{V(1, 0), V(1, 0)}, Versions{V(1, 5), V(1, 0)}, 0}, // empty
	} {
		got, err := Choose(c.ours, c.theirs)
		if got != c.want || (err != nil) != (c.want == 0) || err != nil && !errors.Is(err, ErrVersion) {
			t.Errorf("we %s, they %s: %s, %v", c.ours, c.theirs, got, err)
		}
	}
}

// ends opens a lane over a pipe, with fixed nonces, and records what either end wrote.
func ends(t *testing.T, d DialParams, a AcceptParams) (dialed, accepted *Opened, derr, aerr error,
	said, heard []byte) {
	t.Helper()
	c1, c2 := net.Pipe()
	deadline := time.Now().Add(time.Minute) // of a test that is about to fail
	_ = c1.SetDeadline(deadline)
	_ = c2.SetDeadline(deadline)
	r1, r2 := &recorder{Conn: c1}, &recorder{Conn: c2}
	done := make(chan struct{})
	go func() {
		defer close(done)
		accepted, aerr = Accept(r2, a)
		if aerr != nil {
			_ = c2.Close()
		}
	}()
	dialed, derr = Dial(r1, d)
	if derr != nil {
		_ = c1.Close()
	}
	<-done
	_ = c1.Close()
	_ = c2.Close()
	return dialed, accepted, derr, aerr, r1.wrote.Bytes(), r2.wrote.Bytes()
}

type recorder struct {
	net.Conn
	wrote bytes.Buffer
}

func (r *recorder) Write(p []byte) (int, error) {
	r.wrote.Write(p)
	return r.Conn.Write(p)
}

func boot(c byte) (b transfer.Boot) {
	for i := range b {
		b[i] = c
	}
	return b
}

func params() (DialParams, AcceptParams) {
	key := [32]byte{1, 2, 3}
	d := DialParams{Purpose: PurposeTCPData, Self: boot(0xaa), Peer: boot(0xbb), Key: key,
		Attach: []byte("eth0"),
		Rand:   bytes.NewReader(bytes.Repeat([]byte{0x11}, 64))}
	a := AcceptParams{Purpose: PurposeTCPData, Lookup: func(b transfer.Boot) ([32]byte,
		transfer.Boot, bool) {
		return key, boot(0xbb), b == boot(0xaa)
	}, Attach: func(*Hello) ([]byte, error) { return []byte("eth1!"), nil },
		Rand: bytes.NewReader(bytes.Repeat([]byte{0x22}, 64))}
	return d, a
}

func TestOpen(t *testing.T) {
	d, a := params()
	x, y, derr, aerr, said, heard := ends(t, d, a)
	if derr != nil || aerr != nil {
		t.Fatal(derr, aerr)
	}
	if x.Peer != boot(0xbb) || x.Self != boot(0xaa) || string(x.Attach) != "eth1!" ||
		x.Version != V(1, 0) {
		t.Errorf("dialed: %+v", x)
	}
	if y.Peer != boot(0xaa) || y.Self != boot(0xbb) || string(y.Attach) != "eth0" ||
		y.Version != V(1, 0) {
		t.Errorf("accepted: %+v", y)
	}
	golden(t, "open-dialer", said)
	golden(t, "open-acceptor", heard)
}

// A newer and an older build are spoken to, and understood.
func TestOpenVersions(t *testing.T) {
	for _, c := range []struct {
		name  string
		peer  Versions
		want  Version
		wants string
	}{
		{"newer, speaks ours", Versions{V(1, 0), V(1, 9)}, V(1, 0), ""},
		{"older and ours", Versions{V(0, 3), V(1, 0)}, V(1, 0), ""},
		{"newer only", Versions{V(2, 0), V(2, 5)}, 0, "2.0 to 2.5"},
		{"older only", Versions{V(0, 1), V(0, 3)}, 0, "0.1 to 0.3"},
	} {
		for _, weDial := range []bool{true, false} {
			d, a := params()
			if weDial {
				a.Versions = c.peer
			} else {
				d.Versions = c.peer
			}
			x, y, derr, aerr, _, _ := ends(t, d, a)
			if c.want == 0 {
				ours := derr
				if !weDial {
					ours = aerr
				}
				if !errors.Is(derr, ErrVersion) || !errors.Is(aerr, ErrVersion) ||
					!strings.Contains(ours.Error(), c.wants) ||
					!strings.Contains(ours.Error(), "1.0 to 1.0") {
					t.Errorf("%s, we dial %v: %v; %v", c.name, weDial, derr, aerr)
				}
				continue
			}
			if derr != nil || aerr != nil || x.Version != c.want || y.Version != c.want {
				t.Errorf("%s, we dial %v: %v %v", c.name, weDial, derr, aerr)
			}
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	for _, c := range []struct {
		name       string
		change     func(*DialParams, *AcceptParams)
		derr, aerr error
		says       string
	}{
		{"unknown boot", func(d *DialParams, _ *AcceptParams) { d.Self = boot(1) }, ErrRefused,
			ErrRefused, "unknown peer"},
		{"older boot of the peer", func(d *DialParams, _ *AcceptParams) { d.Peer = boot(1) }, ErrRefused,
			ErrRefused, "unknown peer"},
		{"purpose", func(d *DialParams, _ *AcceptParams) { d.Purpose = PurposeControl }, ErrRefused,
			ErrRefused, "purpose"},
		{"key", func(d *DialParams, _ *AcceptParams) { d.Key[0] ^= 1 }, ErrProof, nil, "key"},
		{"rejected", func(_ *DialParams, a *AcceptParams) {
			a.Attach = func(*Hello) ([]byte, error) { return nil, errors.New("full") }
		}, ErrRefused, nil, "rejected"},
	} {
		d, a := params()
		c.change(&d, &a)
		_, _, derr, aerr, _, _ := ends(t, d, a)
		if !errors.Is(derr, c.derr) || aerr == nil || c.aerr != nil && !errors.Is(aerr, c.aerr) ||
			!strings.Contains(derr.Error(), c.says) {
			t.Errorf("%s: dialer %v; acceptor %v", c.name, derr, aerr)
		}
	}
	if _, err := Dial(nil, DialParams{Purpose: strings.Repeat("x", MaxPurpose+1)}); !errors.Is(err,
		ErrMalformed) {
		t.Errorf("long purpose: %v", err)
	}
	if _, err := Dial(nil, DialParams{Purpose: "x", Attach: make([]byte, MaxAttach+1)}); !errors.Is(
		err, ErrMalformed) {
		t.Errorf("long attachment: %v", err)
	}
}

// script is a connection whose other end says fixed bytes.
type script struct {
	in  *bytes.Reader
	out bytes.Buffer
}

func (s *script) Read(p []byte) (int, error)  { return s.in.Read(p) }
func (s *script) Write(p []byte) (int, error) { return s.out.Write(p) }

// What was said on one lane opens no other: a replayed dialer has the old answer's proof, a
// replayed acceptor another dialer's, and a reflected proof another role's.
func TestOpenReplay(t *testing.T) {
	d, a := params()
	_, _, derr, aerr, said, heard := ends(t, d, a)
	if derr != nil || aerr != nil {
		t.Fatal(derr, aerr)
	}
	d, a = params()
	a.Rand = nil // a fresh nonce
	if _, err := Accept(&script{in: bytes.NewReader(said)}, a); !errors.Is(err, ErrProof) {
		t.Errorf("replayed dialer: %v", err)
	}
	d.Rand = nil
	if _, err := Dial(&script{in: bytes.NewReader(heard)}, d); !errors.Is(err, ErrProof) {
		t.Errorf("replayed acceptor: %v", err)
	}
	// Same nonces, one bit of the attachment changed on the way.
	_, a = params()
	said[helloFixed] ^= 1
	if _, err := Accept(&script{in: bytes.NewReader(said)}, a); !errors.Is(err, ErrProof) {
		t.Errorf("changed attachment: %v", err)
	}
	d, _ = params()
	// The acceptor's own proof sent back as the dialer's.
	said[helloFixed] ^= 1
	n := helloFixed + len("eth0")
	copy(said[n+8:], heard[20+nonceBytes:][:proofBytes])
	_, a = params()
	if _, err := Accept(&script{in: bytes.NewReader(said)}, a); !errors.Is(err, ErrProof) {
		t.Errorf("reflected proof: %v", err)
	}
	_ = d
}

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

// tape is a peer that said what it said.
type tape struct {
	*bytes.Reader
	heard bytes.Buffer
}

func (t *tape) Write(p []byte) (int, error) { return t.heard.Write(p) }

// otherBuild is what builds of other versions say, each with the words that a version after ours
// may give a meaning to.
func otherBuild(t *testing.T, versions Versions) (dialer, acceptor []byte) {
	t.Helper()
	d, a := params()
	ours := answer{versions: Lanes, attach: []byte("eth1!")}
	copy(ours.nonce[:], bytes.Repeat([]byte{0x22}, nonceBytes))
	h := Hello{Versions: versions, Purpose: d.Purpose, From: d.Self, To: d.Peer, Attach: d.Attach}
	copy(h.Nonce[:], bytes.Repeat([]byte{0x11}, nonceBytes))
	dialer, err := AppendHello(nil, &h)
	if err != nil {
		t.Fatal(err)
	}
	binary.LittleEndian.PutUint16(dialer[6:], 0x0101) // reserved today
	key, _, _ := a.Lookup(d.Self)
	var common error
	if ours.version, common = Choose(Lanes, versions); common == nil {
		proof := prove(&key, "dialer", dialer, &ours, nil)
		dialer = binary.LittleEndian.AppendUint32(dialer, magicFinish)
		dialer = append(append(dialer, 1, 1, 1, 1), proof[:]...)
	}

	// The same build as acceptor, of our own hello.
	h.Versions = Lanes
	hello, err := AppendHello(nil, &h)
	if err != nil {
		t.Fatal(err)
	}
	theirs := answer{versions: versions, attach: []byte("eth1!")}
	copy(theirs.nonce[:], bytes.Repeat([]byte{0x22}, nonceBytes))
	if theirs.version, err = Choose(versions, Lanes); err != nil {
		theirs.verdict, theirs.attach, theirs.nonce = OpenVersion, nil, [nonceBytes]byte{}
		return dialer, appendAnswer(nil, &theirs)
	}
	theirs.proof = prove(&key, "acceptor", hello, &theirs, nil)
	acceptor = appendAnswer(nil, &theirs)
	acceptor = binary.LittleEndian.AppendUint32(acceptor, magicVerdict)
	return dialer, append(acceptor, 0, 0, 7, 7) // OpenOK, and what is reserved today
}

// The committed bytes of an invented older and a newer build are understood at either end, and one
// with which we share no version is told so by name.
func TestOtherBuilds(t *testing.T) {
	for name, c := range map[string]struct {
		versions Versions
		named    string // in the refusal
	}{
		"older":      {Versions{V(0, 3), V(1, 0)}, ""},
		"newer":      {Versions{V(1, 0), V(1, 9)}, ""},
		"only-older": {Versions{V(0, 1), V(0, 3)}, "0.1 to 0.3"},
		"only-newer": {Versions{V(2, 0), V(2, 5)}, "2.0 to 2.5"},
	} {
		t.Run(name, func(t *testing.T) {
			dialer, acceptor := otherBuild(t, c.versions)
			golden(t, "open-dialer-"+name, dialer)
			golden(t, "open-acceptor-"+name, acceptor)
			d, a := params()
			in := &tape{Reader: bytes.NewReader(goldenBytes(t, "open-dialer-"+name))}
			y, aerr := Accept(in, a)
			x, derr := Dial(&tape{Reader: bytes.NewReader(goldenBytes(t, "open-acceptor-"+name))}, d)
			if c.named != "" {
				for end, err := range map[string]error{"accept": aerr, "dial": derr} {
					if !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), c.named) {
						t.Errorf("%s: %v, want one that names %q", end, err, c.named)
					}
				}
				// The other build hears why, and what we speak.
				got, err := readAnswer(&in.heard)
				if err != nil || got.verdict != OpenVersion || got.versions != Lanes {
					t.Errorf("answered %+v, %v", got, err)
				}
				return
			}
			if aerr != nil || derr != nil {
				t.Fatal(aerr, derr)
			}
			if y.Version != V(1, 0) || y.Peer != boot(0xaa) || string(y.Attach) != "eth0" {
				t.Errorf("accepted: %+v", y)
			}
			if x.Version != V(1, 0) || string(x.Attach) != "eth1!" {
				t.Errorf("dialed: %+v", x)
			}
		})
	}
}
