package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/transfer"
)

func TestChoose(t *testing.T) {
	for _, c := range []struct {
		ours, theirs Versions
		want         Version
	}{
		{Versions{V(1, 0), V(1, 0)}, Versions{V(1, 0), V(1, 0)}, V(1, 0)},
		// an older peer that supports nothing of ours
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
	sent, answered []byte) {
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
	x, y, derr, aerr, sent, answered := ends(t, d, a)
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
	golden(t, "open-dialer", sent)
	golden(t, "open-acceptor", answered)
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
		contains   string
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
			!strings.Contains(derr.Error(), c.contains) {
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

// script is a connection whose other end sends fixed bytes.
type script struct {
	in  *bytes.Reader
	out bytes.Buffer
}

func (s *script) Read(p []byte) (int, error) { return s.in.Read(p) }

func (s *script) Write(p []byte) (int, error) { return s.out.Write(p) }

// The opening of one lane opens no other: a replayed dialer has the old answer's proof, a
// replayed acceptor another dialer's, and a reflected proof another role's.
func TestOpenReplay(t *testing.T) {
	d, a := params()
	_, _, derr, aerr, sent, answered := ends(t, d, a)
	if derr != nil || aerr != nil {
		t.Fatal(derr, aerr)
	}
	d, a = params()
	a.Rand = nil // a fresh nonce
	if _, err := Accept(&script{in: bytes.NewReader(sent)}, a); !errors.Is(err, ErrProof) {
		t.Errorf("replayed dialer: %v", err)
	}
	d.Rand = nil
	if _, err := Dial(&script{in: bytes.NewReader(answered)}, d); !errors.Is(err, ErrProof) {
		t.Errorf("replayed acceptor: %v", err)
	}
	// Same nonces, one bit of the attachment changed on the way.
	_, a = params()
	sent[helloFixed] ^= 1
	if _, err := Accept(&script{in: bytes.NewReader(sent)}, a); !errors.Is(err, ErrProof) {
		t.Errorf("changed attachment: %v", err)
	}
	d, _ = params()
	// The acceptor's own proof sent back as the dialer's.
	sent[helloFixed] ^= 1
	n := helloFixed + len("eth0")
	copy(sent[n+8:], answered[20+nonceBytes:][:proofBytes])
	_, a = params()
	if _, err := Accept(&script{in: bytes.NewReader(sent)}, a); !errors.Is(err, ErrProof) {
		t.Errorf("reflected proof: %v", err)
	}
	_ = d
}

// tape is a recorded peer.
type tape struct {
	*bytes.Reader
	answered bytes.Buffer
}

func (t *tape) Write(p []byte) (int, error) { return t.answered.Write(p) }

// otherBuild is what builds of other versions send, each with the error that a version after ours
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

// Either end reads the committed bytes of an invented older and newer build. A build without a
// common version is refused, with both versions in the error.
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
				// The other build receives the reason and our version.
				got, err := readAnswer(&in.answered)
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
