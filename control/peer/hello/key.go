package hello

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"fmt"

	"github.com/kvspray/kvspray/transfer"
)

// ShareBytes is the length of a key share.
const ShareBytes = 32

// Identity identifies a process by its TLS certificate (keys.Identity), for the life of the
// process. Zero without credentials.
type Identity = [sha256.Size]byte

// Secret makes the key shares of this process.
type Secret struct {
	boot   transfer.Boot
	secret [32]byte
}

// NewSecret makes the secret of this process.
func NewSecret(boot transfer.Boot) (Secret, error) {
	s := Secret{boot: boot}
	if _, err := rand.Read(s.secret[:]); err != nil {
		return s, fmt.Errorf("peer: secret: %w", err)
	}
	return s, nil
}

// Share is this side's half of the key with a boot. It is bound to that boot and to its
// certificate. So a third process that calls both sides, under its own name or that of one of them,
// learns nothing.
func (s *Secret) Share(boot transfer.Boot, id Identity) (out [ShareBytes]byte) {
	h := hmac.New(sha256.New, s.secret[:])
	h.Write([]byte("kvspray share 1"))
	h.Write(boot[:])
	h.Write(id[:])
	h.Sum(out[:0])
	return out
}

// Key is the key with a boot, of which lanes prove that both ends have it. It is the same on both
// sides, whichever called: the lower boot is first.
func (s *Secret) Key(boot transfer.Boot, id Identity, theirs [ShareBytes]byte) (out [32]byte) {
	a, b, ours := s.boot, boot, s.Share(boot, id)
	if bytes.Compare(a[:], b[:]) > 0 {
		a, b, ours, theirs = b, a, theirs, ours
	}
	h := hmac.New(sha256.New, append(ours[:], theirs[:]...))
	h.Write(a[:])
	h.Write(b[:])
	h.Sum(out[:0])
	return out
}
