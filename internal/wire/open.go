package wire

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"

	"github.com/kvspray/kvspray/transfer"
)

// The purposes of lanes.
const (
	PurposeTCPData = "tcp-data"
	PurposeControl = "control"
	PurposeSHM     = "shm"
)

// Sizes of the opening, in bytes.
const (
	MaxPurpose = 16  // of a purpose's name
	MaxAttach  = 512 // of an end's attachment

	nonceBytes  = 32
	proofBytes  = sha256.Size
	helloFixed  = 4 + 2 + 2 + 4 + 4 + MaxPurpose + 16 + 16 + nonceBytes
	answerFixed = 4 + 2 + 2 + 4 + 4 + 4 + nonceBytes + proofBytes
	finishBytes = 4 + 2 + 2 + proofBytes
	verdictSize = 4 + 2 + 2
)

// Magic numbers of the four messages, readable in a dump.
const (
	magicHello   = 0x4f4c4c48 // "HLLO"
	magicAnswer  = 0x52574e41 // "ANWR"
	magicFinish  = 0x48534e46 // "FNSH"
	magicVerdict = 0x54434456 // "VDCT"
)

// Verdict is an end's answer to the opening of a lane. Stable on the wire.
type Verdict uint16

// The verdicts.
const (
	OpenOK Verdict = iota
	OpenVersion
	OpenPurpose  // this listener does not serve that purpose
	OpenUnknown  // no such peer, or this process is not the requested boot
	OpenProof    // the proof does not verify
	OpenRejected // by the owner of the lane: full, draining, bad attachment
	verdictCount
)

var verdictNames = [verdictCount]string{"ok", "no common version", "purpose not served here",
	"unknown peer or boot",
	"proof does not verify", "rejected"}

func (v Verdict) String() string {
	if v < verdictCount {
		return verdictNames[v]
	}
	return fmt.Sprintf("verdict(%d)", uint16(v))
}

// Opened is an open lane, as both ends agreed on it.
type Opened struct {
	Peer    transfer.Boot // the other end's
	Self    transfer.Boot
	Version Version
	Attach  []byte // what the other end attached
	// Secret is known to these two ends only, and fresh for this opening: it includes both ends'
	// nonces. Keys of the lane are derived from it.
	Secret [32]byte
}

// Hello is a dialler's first message.
type Hello struct {
	Versions Versions
	Purpose  string
	From     transfer.Boot // the dialer
	To       transfer.Boot // the requested boot
	Nonce    [nonceBytes]byte
	Attach   []byte
}

// AppendHello appends h. It fails if a purpose or an attachment is too long.
func AppendHello(dst []byte, h *Hello) ([]byte, error) {
	if len(h.Purpose) == 0 || len(h.Purpose) > MaxPurpose || len(h.Attach) > MaxAttach {
		return dst, fmt.Errorf("wire: hello: purpose %q of 1 to %d bytes, attachment of %d bytes, at "+
			"most %d: %w",
			h.Purpose, MaxPurpose, len(h.Attach), MaxAttach, ErrMalformed)
	}
	var purpose [MaxPurpose]byte
	copy(purpose[:], h.Purpose)
	dst = binary.LittleEndian.AppendUint32(dst, magicHello)
	dst = binary.LittleEndian.AppendUint16(dst, uint16(len(h.Attach)))
	dst = binary.LittleEndian.AppendUint16(dst, 0)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(h.Versions.Min))
	dst = binary.LittleEndian.AppendUint32(dst, uint32(h.Versions.Max))
	dst = append(dst, purpose[:]...)
	dst = append(dst, h.From[:]...)
	dst = append(dst, h.To[:]...)
	dst = append(dst, h.Nonce[:]...)
	return append(dst, h.Attach...), nil
}

// readHello reads one hello and returns it with its bytes, which the proofs cover.
func readHello(r io.Reader) (*Hello, []byte, error) {
	raw := make([]byte, helloFixed, helloFixed+MaxAttach)
	if _, err := io.ReadFull(r, raw); err != nil {
		return nil, nil, fmt.Errorf("wire: read hello: %w", err)
	}
	if m := binary.LittleEndian.Uint32(raw); m != magicHello {
		return nil, nil, fmt.Errorf("wire: hello: magic %#x: not a kvspray lane: %w", m, ErrMalformed)
	}
	n := int(binary.LittleEndian.Uint16(raw[4:]))
	if n > MaxAttach {
		return nil, nil, fmt.Errorf("wire: hello: attachment of %d bytes, at most %d: %w", n, MaxAttach,
			ErrMalformed)
	}
	h := &Hello{
		Versions: Versions{Version(binary.LittleEndian.Uint32(raw[8:])),
			Version(binary.LittleEndian.Uint32(raw[12:]))},
		Purpose: string(bytes.TrimRight(raw[16:16+MaxPurpose], "\x00")),
	}
	b := raw[16+MaxPurpose:]
	b = b[copy(h.From[:], b):]
	b = b[copy(h.To[:], b):]
	copy(h.Nonce[:], b)
	raw = raw[:helloFixed+n]
	if _, err := io.ReadFull(r, raw[helloFixed:]); err != nil {
		return nil, nil, fmt.Errorf("wire: read hello: %w", noEOF(err))
	}
	h.Attach = bytes.Clone(raw[helloFixed:])
	return h, raw, nil
}

// answer is an acceptor's answer: its verdict, and with OpenOK its own proof.
type answer struct {
	verdict  Verdict
	version  Version
	versions Versions
	nonce    [nonceBytes]byte
	proof    [proofBytes]byte
	attach   []byte
}

func appendAnswer(dst []byte, a *answer) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, magicAnswer)
	dst = binary.LittleEndian.AppendUint16(dst, uint16(len(a.attach)))
	dst = binary.LittleEndian.AppendUint16(dst, uint16(a.verdict))
	dst = binary.LittleEndian.AppendUint32(dst, uint32(a.version))
	dst = binary.LittleEndian.AppendUint32(dst, uint32(a.versions.Min))
	dst = binary.LittleEndian.AppendUint32(dst, uint32(a.versions.Max))
	dst = append(dst, a.nonce[:]...)
	dst = append(dst, a.proof[:]...)
	return append(dst, a.attach...)
}

// signed is the part of an answer that the proofs cover: all but the proof itself.
func (a *answer) signed() []byte {
	c := *a
	c.proof = [proofBytes]byte{}
	return appendAnswer(nil, &c)
}

func readAnswer(r io.Reader) (*answer, error) {
	raw := make([]byte, answerFixed, answerFixed+MaxAttach)
	if _, err := io.ReadFull(r, raw); err != nil {
		return nil, fmt.Errorf("wire: read answer: %w", err)
	}
	if m := binary.LittleEndian.Uint32(raw); m != magicAnswer {
		return nil, fmt.Errorf("wire: answer: magic %#x: not a kvspray lane: %w", m, ErrMalformed)
	}
	n := int(binary.LittleEndian.Uint16(raw[4:]))
	if n > MaxAttach {
		return nil, fmt.Errorf("wire: answer: attachment of %d bytes, at most %d: %w", n, MaxAttach,
			ErrMalformed)
	}
	a := &answer{
		verdict: Verdict(binary.LittleEndian.Uint16(raw[6:])),
		version: Version(binary.LittleEndian.Uint32(raw[8:])),
		versions: Versions{Version(binary.LittleEndian.Uint32(raw[12:])),
			Version(binary.LittleEndian.Uint32(raw[16:]))},
	}
	copy(a.nonce[:], raw[20:])
	copy(a.proof[:], raw[20+nonceBytes:])
	a.attach = make([]byte, n)
	if _, err := io.ReadFull(r, a.attach); err != nil {
		return nil, fmt.Errorf("wire: read answer: %w", noEOF(err))
	}
	return a, nil
}

// prove is HMAC-SHA256 over the role, all messages so far, and the binding of the lane to its
// channel. The two roles differ, so that neither proof can be replayed as the other, even if a
// sidecar is its own peer.
func prove(key *[32]byte, role string, hello []byte, a *answer,
	binding []byte) (p [proofBytes]byte) {
	m := hmac.New(sha256.New, key[:])
	m.Write([]byte("kvspray-lane-1 " + role))
	m.Write([]byte{0})
	m.Write(hello)
	m.Write(a.signed())
	m.Write(binding) // earlier parts have explicit lengths
	m.Sum(p[:0])
	return p
}

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// DialParams are the dialler's inputs.
type DialParams struct {
	Purpose    string
	Self, Peer transfer.Boot
	Key        [32]byte
	Versions   Versions // zero: Lanes
	Attach     []byte   // at most MaxAttach bytes; authenticated
	Binding    []byte   // of the channel under the lane, equal at both ends; the proofs cover it
	Rand       io.Reader
}

// Dial opens a lane from this end: it writes and reads rw a few times and leaves it at the first
// byte of the lane proper. The caller sets deadlines on rw. After an error the connection is
// unusable.
func Dial(rw io.ReadWriter, p DialParams) (*Opened, error) {
	if p.Versions == (Versions{}) {
		p.Versions = Lanes
	}
	h := Hello{Versions: p.Versions, Purpose: p.Purpose, From: p.Self, To: p.Peer, Attach: p.Attach}
	if err := fillNonce(p.Rand, h.Nonce[:]); err != nil {
		return nil, err
	}
	hello, err := AppendHello(nil, &h)
	if err != nil {
		return nil, err
	}
	if _, err := rw.Write(hello); err != nil {
		return nil, fmt.Errorf("wire: write hello: %w", err)
	}
	a, err := readAnswer(rw)
	if err != nil {
		return nil, err
	}
	if a.verdict == OpenVersion {
		return nil, fmt.Errorf("wire: open %s lane: this side supports %s, the peer %s: %w; %s",
			p.Purpose, p.Versions, a.versions, ErrVersion, upgrade(p.Versions, a.versions))
	}
	if a.verdict != OpenOK {
		return nil, fmt.Errorf("wire: open %s lane to boot %s: %w: %s", p.Purpose, p.Peer,
			ErrRefused, a.verdict)
	}
	if want := prove(&p.Key, "acceptor", hello, a, p.Binding); !hmac.Equal(want[:], a.proof[:]) {
		return nil, fmt.Errorf("wire: open %s lane to boot %s: %w", p.Purpose, p.Peer, ErrProof)
	}
	if a.version < p.Versions.Min || a.version > p.Versions.Max {
		return nil, fmt.Errorf("wire: open %s lane: the peer chose %s, this side supports %s: %w",
			p.Purpose, a.version, p.Versions, ErrVersion)
	}
	proof := prove(&p.Key, "dialer", hello, a, p.Binding)
	fin := binary.LittleEndian.AppendUint32(make([]byte, 0, finishBytes), magicFinish)
	fin = append(fin, 0, 0, 0, 0)
	if _, err := rw.Write(append(fin, proof[:]...)); err != nil {
		return nil, fmt.Errorf("wire: write proof: %w", err)
	}
	var v [verdictSize]byte
	if _, err := io.ReadFull(rw, v[:]); err != nil {
		return nil, fmt.Errorf("wire: read verdict: %w", err)
	}
	if m := binary.LittleEndian.Uint32(v[:]); m != magicVerdict {
		return nil, fmt.Errorf("wire: verdict: magic %#x: %w", m, ErrMalformed)
	}
	if got := Verdict(binary.LittleEndian.Uint16(v[4:])); got != OpenOK {
		return nil, fmt.Errorf("wire: open %s lane to boot %s: %w: %s", p.Purpose, p.Peer,
			ErrRefused, got)
	}
	return &Opened{Peer: p.Peer, Self: p.Self, Version: a.version, Attach: a.attach,
		Secret: prove(&p.Key, "secret", hello, a, p.Binding)}, nil
}

// AcceptParams are the acceptor's inputs.
type AcceptParams struct {
	Purpose string
	// Lookup returns the key shared with a peer's boot and the boot of this process; false refuses
	// the lane.
	Lookup   func(peer transfer.Boot) (key [32]byte, self transfer.Boot, ok bool)
	Versions Versions // zero: Lanes
	// Attach sees the dialler's unproved Hello and returns this end's attachment; an error refuses
	// the lane. It must not act on the Hello. May be nil.
	Attach func(h *Hello) ([]byte, error)
	// Admit is called once the dialler has proved the key, before the answer; an error refuses the
	// lane. May be nil.
	Admit   func() error
	Binding []byte // equal to the dialler's
	Rand    io.Reader
}

// Accept opens a lane from the listening end. Bounded: it reads at most a hello, an attachment and
// a proof. The caller sets deadlines on rw and closes it after an error; if the protocol has a
// verdict for the error, Accept has sent it.
func Accept(rw io.ReadWriter, p AcceptParams) (*Opened, error) {
	if p.Versions == (Versions{}) {
		p.Versions = Lanes
	}
	h, hello, err := readHello(rw)
	if err != nil {
		return nil, err
	}
	a := answer{versions: p.Versions}
	refuse := func(v Verdict, err error) (*Opened, error) {
		a.verdict = v
		_, _ = rw.Write(appendAnswer(nil, &a)) // best effort; the returned error matters
		return nil, err
	}
	if h.Purpose != p.Purpose {
		return refuse(OpenPurpose, fmt.Errorf("wire: accept: purpose %q, this listener serves %q: %w",
			h.Purpose, p.Purpose, ErrRefused))
	}
	if a.version, err = Choose(p.Versions, h.Versions); err != nil {
		return refuse(OpenVersion, err)
	}
	key, self, ok := p.Lookup(h.From)
	if !ok || self != h.To {
		return refuse(OpenUnknown, fmt.Errorf("wire: accept %s lane: boot %s wants boot %s: %w: %s",
			p.Purpose, h.From, h.To, ErrRefused, OpenUnknown))
	}
	if p.Attach != nil {
		if a.attach, err = p.Attach(h); err != nil {
			return refuse(OpenRejected, fmt.Errorf("wire: accept %s lane: %w", p.Purpose, err))
		}
		if len(a.attach) > MaxAttach {
			return refuse(OpenRejected, fmt.Errorf("wire: accept: attachment of %d bytes, at most %d: %w",
				len(a.attach), MaxAttach, ErrMalformed))
		}
	}
	if err := fillNonce(p.Rand, a.nonce[:]); err != nil {
		return nil, err
	}
	a.proof = prove(&key, "acceptor", hello, &a, p.Binding)
	if _, err := rw.Write(appendAnswer(nil, &a)); err != nil {
		return nil, fmt.Errorf("wire: write answer: %w", err)
	}
	var fin [finishBytes]byte
	if _, err := io.ReadFull(rw, fin[:]); err != nil {
		return nil, fmt.Errorf("wire: read proof: %w", err)
	}
	if m := binary.LittleEndian.Uint32(fin[:]); m != magicFinish {
		return nil, fmt.Errorf("wire: proof: magic %#x: %w", m, ErrMalformed)
	}
	want := prove(&key, "dialer", hello, &a, p.Binding)
	verdict, err := OpenOK, error(nil)
	if !hmac.Equal(want[:], fin[8:]) {
		verdict, err = OpenProof, fmt.Errorf("wire: accept %s lane from boot %s: %w", p.Purpose,
			h.From, ErrProof)
	} else if p.Admit != nil {
		if err = p.Admit(); err != nil {
			verdict = OpenRejected
		}
	}
	v := binary.LittleEndian.AppendUint32(make([]byte, 0, verdictSize), magicVerdict)
	v = binary.LittleEndian.AppendUint16(v, uint16(verdict))
	if _, werr := rw.Write(append(v, 0, 0)); err == nil && werr != nil {
		err = fmt.Errorf("wire: write verdict: %w", werr)
	}
	if err != nil {
		return nil, err
	}
	return &Opened{Peer: h.From, Self: self, Version: a.version, Attach: h.Attach,
		Secret: prove(&key, "secret", hello, &a, p.Binding)}, nil
}

func fillNonce(r io.Reader, dst []byte) error {
	if r == nil {
		r = rand.Reader
	}
	if _, err := io.ReadFull(r, dst); err != nil {
		return fmt.Errorf("wire: nonce: %w", err)
	}
	return nil
}
