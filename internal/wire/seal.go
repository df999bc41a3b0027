// SPDX-License-Identifier: Apache-2.0

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

// Sealed lanes. Each direction of a lane is a stream of records: a head of 16 bytes (magic u32, length u32, number u64, little-endian),
// that many bytes of AES-128-GCM, and the tag, which covers the head too.
//
// Both directions have keys of their own, derived from the secret of the lane's opening, in which are nonces of both ends: no two
// lanes share a key. The nonce of a record is its number, which counts from 0 and never repeats; a receiver takes the next
// number and no other. So a record cannot be forged, changed, repeated, left out or moved without the lane's end, and what ends a
// lane lands nothing.
//
// A key seals rekeyRecords records, at most 8 GiB or 2^29 blocks: an attacker's advantage by the collision of blocks stays below 2^-70
// (NIST SP 800-38D and RFC 8446, 5.5, allow more). The next key is derived from the one before, which is forgotten.
const (
	RecordBytes    = 32 << 10 // of plain bytes, at most: what is sealed stays in a near cache until it is sent
	RecordOverhead = recordHead + recordTag

	recordHead   = 16
	recordTag    = 16
	magicRecord  = 0x5253564b // "KVSR"
	rekeyRecords = 1 << 18
	maxRecords   = 1 << 60 // of one lane and direction; none lives so long
	gcmKeyBytes  = 16
)

// Why a record was refused. The lane cannot be followed any further.
var (
	ErrReplayed  = errors.New("a sealed record came again")
	ErrReordered = errors.New("a sealed record came before its turn, or one was left out")
	ErrForged    = errors.New("a sealed record is not what the peer sealed")
	ErrSealed    = errors.New("not a sealed record")
)

// End is one of the two of a lane; each seals with a key of its own.
type End string

// The ends.
const (
	DialerEnd   End = "dialer"
	AcceptorEnd End = "acceptor"
)

// sealing is one direction. Not safe for concurrent use.
type sealing struct {
	aead  cipher.AEAD
	chain [sha256.Size]byte // what the next key is derived from
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

// expand is one step of HKDF-Expand (RFC 5869) with a secret that is uniform already.
func expand(secret []byte, purpose string) (out [sha256.Size]byte) {
	m := hmac.New(sha256.New, secret)
	m.Write([]byte(purpose))
	m.Write([]byte{1})
	m.Sum(out[:0])
	return out
}

// key takes the next key of the chain, and forgets what it came from.
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

// next counts a record. The nonce is the number: under one key none comes twice.
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

// Sealer seals what one end sends.
type Sealer struct{ s sealing }

// NewSealer makes the sealer of an end from the secret of a lane's opening.
func NewSealer(secret [32]byte, of End) (*Sealer, error) {
	s, err := newSealing(secret, of)
	return &Sealer{s}, err
}

// Seal appends plain, of at most RecordBytes, as one record to dst, which must have room for it and not overlap it.
func (s *Sealer) Seal(dst, plain []byte) ([]byte, error) {
	if len(plain) == 0 || len(plain) > RecordBytes {
		return dst, fmt.Errorf("wire: seal %d bytes, want 1 to %d: %w", len(plain), RecordBytes, ErrSealed)
	}
	at := len(dst)
	dst = binary.LittleEndian.AppendUint32(dst, magicRecord)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(plain)))
	dst = binary.LittleEndian.AppendUint64(dst, s.s.seq)
	binary.BigEndian.PutUint64(s.s.nonce[4:], s.s.seq)
	dst = s.s.aead.Seal(dst, s.s.nonce[:], plain, dst[at:at+recordHead])
	return dst, s.s.next()
}

// Opener opens what the other end sealed.
type Opener struct{ s sealing }

// NewOpener makes the opener of what an end seals.
func NewOpener(secret [32]byte, of End) (*Opener, error) {
	s, err := newSealing(secret, of)
	return &Opener{s}, err
}

// Length is that of the plain bytes of the record that b begins with; 0: there is too little of it to tell. A record that is not the next one is
// an error before its bytes have come.
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

// Open opens the whole record that b begins with, of n plain bytes as Length said, into dst, which must have room for them and either
// not overlap b or be b[:0] behind the head: see InPlace. After an error what dst held is lost.
func (o *Opener) Open(dst, b []byte, n int) error {
	binary.BigEndian.PutUint64(o.s.nonce[4:], o.s.seq)
	if _, err := o.s.aead.Open(dst[:0], o.s.nonce[:], b[recordHead:recordHead+n+recordTag], b[:recordHead]); err != nil {
		return fmt.Errorf("wire: record %d of %d bytes: %w", o.s.seq, n, ErrForged)
	}
	return o.s.next()
}

// InPlace is where a record in b can be opened without another buffer.
func InPlace(b []byte, n int) []byte { return b[recordHead : recordHead+n] }
