package wire

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
)

// Encrypted lanes. Each direction of a lane is a stream of records: a head of 16 bytes (magic u32,
// length u32, number u64, little-endian), that many bytes of AES-128-GCM, and the tag, which also
// covers the head.
//
// The directions have separate keys, derived from the secret of the lane's opening, which includes
// nonces of both ends: no two lanes share a key. The nonce of a record is its number, which counts
// from 0 and never repeats. A receiver accepts only the next number. A forged, changed, repeated,
// missing or moved record therefore ends the lane, and a lane that ends lands nothing.
//
// A key encrypts rekeyRecords records, at most 8 GiB or 2^29 blocks: an attacker's advantage by the
// collision of blocks stays below 2^-70 (NIST SP 800-38D and RFC 8446, 5.5, allow more). The next
// key is derived from the previous one, which is forgotten.
const (
	// of plain bytes, at most: a record stays in a near cache until it is sent.
	RecordBytes    = 32 << 10
	RecordOverhead = recordHead + recordTag

	recordHead   = 16
	recordTag    = 16
	magicRecord  = 0x5253564b // "KVSR"
	rekeyRecords = 1 << 18
	maxRecords   = 1 << 60 // of one lane and direction; no lane lives that long
	gcmKeyBytes  = 16
)

// Reasons for refusing a record. The lane is unusable afterwards.
var (
	ErrReplayed  = errors.New("an encrypted record was replayed")
	ErrReordered = errors.New("an encrypted record is out of order, or one is missing")
	ErrForged    = errors.New("an encrypted record fails authentication")
	ErrSealed    = errors.New("not an encrypted record")
)

// End is one of the two ends of a lane; each encrypts with its own key.
type End string

// The ends.
const (
	DialerEnd   End = "dialer"
	AcceptorEnd End = "acceptor"
)

// sealing is one direction. Not safe for concurrent use.
type sealing struct {
	aead  cipher.AEAD
	chain [sha256.Size]byte // input of the next key
	every uint64            // records of one key
	seq   uint64
	nonce [12]byte
}

func newSealing(secret [32]byte, of End) (s sealing, err error) {
	s.every = rekeyRecords
	s.chain = expand(secret[:], "kvspray lane seal 1 "+string(of))
	err = s.key()
	return s, err
}

// expand is one step of HKDF-Expand (RFC 5869) with an already uniform secret.
func expand(secret []byte, purpose string) (out [sha256.Size]byte) {
	m := hmac.New(sha256.New, secret)
	m.Write([]byte(purpose))
	m.Write([]byte{1})
	m.Sum(out[:0])
	return out
}

// key takes the next key of the chain, and forgets its input.
func (s *sealing) key() error {
	k := expand(s.chain[:], "key")
	s.chain = expand(s.chain[:], "next")
	block, err := aes.NewCipher(k[:gcmKeyBytes])
	if err != nil {
		return fmt.Errorf("wire: seal: %w", err)
	}
	if s.aead, err = cipher.NewGCM(block); err != nil {
		return fmt.Errorf("wire: seal: %w", err)
	}
	return nil
}

// next counts a record. The nonce is the number: none occurs twice under one key.
func (s *sealing) next() error {
	s.seq++
	if s.seq >= maxRecords {
		return fmt.Errorf("wire: %d records on one lane: %w", s.seq, ErrSealed)
	}
	if s.seq%s.every == 0 {
		return s.key()
	}
	return nil
}

// Sealer encrypts the data of one end.
type Sealer struct{ s sealing }

// NewSealer makes the sealer of an end from the secret of a lane's opening.
func NewSealer(secret [32]byte, of End) (*Sealer, error) {
	s, err := newSealing(secret, of)
	return &Sealer{s}, err
}

// Seal appends plain, of at most RecordBytes, as one record to dst, which must have room and not
// overlap plain.
func (s *Sealer) Seal(dst, plain []byte) ([]byte, error) {
	if len(plain) == 0 || len(plain) > RecordBytes {
		return dst, fmt.Errorf("wire: seal %d bytes, want 1 to %d: %w", len(plain),
			RecordBytes, ErrSealed)
	}
	at := len(dst)
	dst = binary.LittleEndian.AppendUint32(dst, magicRecord)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(plain)))
	dst = binary.LittleEndian.AppendUint64(dst, s.s.seq)
	binary.BigEndian.PutUint64(s.s.nonce[4:], s.s.seq)
	dst = s.s.aead.Seal(dst, s.s.nonce[:], plain, dst[at:at+recordHead])
	return dst, s.s.next()
}

// Opener decrypts the data of the other end.
type Opener struct{ s sealing }

// NewOpener makes the opener for an end's records.
func NewOpener(secret [32]byte, of End) (*Opener, error) {
	s, err := newSealing(secret, of)
	return &Opener{s}, err
}

// Length returns the number of plain bytes of the record at the start of b; 0: b is too short. A
// record that is not the next one is an error before its bytes have arrived.
func (o *Opener) Length(b []byte) (int, error) {
	if len(b) < recordHead {
		return 0, nil
	}
	if m := binary.LittleEndian.Uint32(b); m != magicRecord {
		return 0, fmt.Errorf("wire: record of magic %#x: %w", m, ErrSealed)
	}
	n := binary.LittleEndian.Uint32(b[4:])
	if n == 0 || n > RecordBytes {
		return 0, fmt.Errorf("wire: record of %d bytes, want 1 to %d: %w", n, RecordBytes, ErrSealed)
	}
	switch seq := binary.LittleEndian.Uint64(b[8:]); {
	case seq < o.s.seq:
		return 0, fmt.Errorf("wire: record %d where %d is next: %w", seq, o.s.seq, ErrReplayed)
	case seq > o.s.seq:
		return 0, fmt.Errorf("wire: record %d where %d is next: %w", seq, o.s.seq, ErrReordered)
	}
	return int(n), nil
}

// Open decrypts the whole record at the start of b, of n plain bytes as returned by Length, into
// dst. dst must have room and either not overlap b or be b[:0] after the head (see InPlace). After
// an error the content of dst is lost.
func (o *Opener) Open(dst, b []byte, n int) error {
	binary.BigEndian.PutUint64(o.s.nonce[4:], o.s.seq)
	if _, err := o.s.aead.Open(dst[:0], o.s.nonce[:], b[recordHead:recordHead+n+recordTag],
		b[:recordHead]); err != nil {
		return fmt.Errorf("wire: record %d of %d bytes: %w", o.s.seq, n, ErrForged)
	}
	return o.s.next()
}

// InPlace returns the part of b in which its record can be decrypted without another buffer.
func InPlace(b []byte, n int) []byte { return b[recordHead : recordHead+n] }
