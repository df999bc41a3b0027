package page

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"maps"
	"slices"
	"strings"
)

// Bounds of what a namespace is described by.
const (
	MaxFieldBytes  = 256       // of each text
	MaxPageTokens  = 1 << 16   // tokens in one page
	MinSecretBytes = 16        // shorter secrets can be guessed
	MaxHashBytes   = 64        // of an engine's page hash
	MinHashBytes   = 8         // shorter ones collide by chance among a few billion pages
	idVersion      = "page/v1" // part of every id: a change of the encoding changes all ids
)

// ID names a namespace. The ID of a namespace with a secret can be computed with that secret only.
type ID [32]byte

func (id ID) String() string { return hex.EncodeToString(id[:]) }

// Namespace is everything that the bytes of all its pages depend on, except the tokens and what the
// engine mixes into a page's hash (hashes of images, cache_salt).
type Namespace struct {
	Weights    string // identity of the weights and the quantization
	DType      string // of the cache, such as "bfloat16"
	Layout     string // fingerprint of one rank's layout
	PageTokens int    // tokens in a page
	PageBytes  int    // bytes of a page on one rank
	Algorithm  string // of the engine's page hashes; Algorithms lists those that are known
	Seed       string // of that algorithm; empty: it has none
	Adapter    string // identity of a LoRA adapter's content; empty: none
	Generation string // the operator's, of this node's store; empty: none
	Secret     Secret // the tenant's; nil: pages are shared with all tenants that have none
}

// Secret is a tenant's. It prints as its length.
type Secret []byte

// Format implements fmt.Formatter.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = fmt.Fprintf(f, "(%d bytes)", len(s)) }

// MarshalText keeps it out of JSON.
func (s Secret) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "(%d bytes)", len(s)), nil }

// seeding is whether the hashes of two processes agree without a common seed.
type seeding uint8

const (
	unseeded  seeding = iota + 1 // equal in every process
	needsSeed                    // random in each process unless a seed is set
	neverSame                    // never equal in two processes, or not in two releases of Python
)

// algorithms are the page hashes of the engines that the store supports.
var algorithms = map[string]seeding{
	"sglang-sha256":    unseeded,
	"vllm-sha256_cbor": needsSeed,
	"vllm-xxhash_cbor": needsSeed,
	"vllm-sha256":      needsSeed,
	"vllm-xxhash":      needsSeed,
	"vllm-builtin":     neverSame,
}

// Algorithms lists the names that a Namespace's Algorithm can have.
func Algorithms() []string { return slices.Sorted(maps.Keys(algorithms)) }

// FieldError is a namespace or a page hash that cannot be used.
type FieldError struct{ Field, Value, Problem, Remedy string }

func (e *FieldError) Error() string {
	return fmt.Sprintf("store: namespace field %s = %q: %s; %s", e.Field, e.Value, e.Problem, e.Remedy)
}

// ErrHashes marks an engine whose hashes cannot agree with those of another process.
var ErrHashes = errors.New("page hashes differ in every process")

// Unwrap lets callers distinguish hashes that can never agree from other mistakes.
func (e *FieldError) Unwrap() error {
	if e.Field == "algorithm" || e.Field == "seed" {
		return ErrHashes
	}
	return nil
}

// Check reports the first field that cannot be right.
func (n *Namespace) Check() error {
	for _, f := range []struct {
		name, value string
		required    bool
		remedy      string
	}{
		{"weights", n.Weights, true, "name the weights' content, for instance by a digest"},
		{"dtype", n.DType, true, "name the type of the cache's elements"},
		{"layout", n.Layout, true, "give the fingerprint of one rank's layout"},
		{"seed", n.Seed, false, "give a shorter seed"},
		{"adapter", n.Adapter, false, "name the adapter's content by a digest"},
		{"generation", n.Generation, false, "set a shorter store.generation"},
	} {
		switch {
		case f.required && f.value == "":
			return &FieldError{f.name, "", "is empty", f.remedy}
		case len(f.value) > MaxFieldBytes:
			return &FieldError{f.name, f.value[:32] + "...",
				fmt.Sprintf("has %d bytes, at most %d", len(f.value), MaxFieldBytes), f.remedy}
		}
	}
	switch {
	case n.PageTokens < 1 || n.PageTokens > MaxPageTokens:
		return &FieldError{"page_tokens", fmt.Sprint(n.PageTokens),
			fmt.Sprintf("is not between 1 and %d", MaxPageTokens), "give the tokens in one page"}
	case n.PageBytes < 1 || n.PageBytes > MaxBytes:
		return &FieldError{"page_bytes", fmt.Sprint(n.PageBytes),
			fmt.Sprintf("is not between 1 and %d", MaxBytes),
			"give the bytes of one page on one rank"}
	case n.Secret != nil && len(n.Secret) < MinSecretBytes:
		return &FieldError{"secret", fmt.Sprintf("(%d bytes)", len(n.Secret)), "is too short",
			fmt.Sprintf("use at least %d random bytes", MinSecretBytes)}
	}
	return n.checkHashes()
}

func (n *Namespace) checkHashes() error {
	switch algorithms[n.Algorithm] {
	case unseeded:
	case needsSeed:
		if n.Seed == "" {
			return &FieldError{"seed", "",
				"is empty, so " + n.Algorithm + " begins with random bytes in each process",
				"start every engine with the same PYTHONHASHSEED and give it as the seed"}
		}
	case neverSame:
		return &FieldError{"algorithm", n.Algorithm, "gives other hashes in another process",
			"start the engine with --prefix-caching-hash-algo sha256_cbor"}
	default:
		return &FieldError{"algorithm", n.Algorithm, "is unknown",
			"use one of " + strings.Join(Algorithms(), ", ")}
	}
	return nil
}

// ID hashes all fields, each with its length before it, so that no two namespaces have one
// encoding.
func (n *Namespace) ID() (id ID) {
	h := keyed(n.Secret)
	for _, f := range []string{idVersion, n.Weights, n.DType, n.Layout, n.Algorithm, n.Seed,
		n.Adapter} {
		writeField(h, []byte(f))
	}
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], uint64(n.PageTokens))
	binary.LittleEndian.PutUint64(b[8:], uint64(n.PageBytes))
	writeField(h, b[:])
	if n.Generation != "" {
		writeField(h, []byte(n.Generation))
	}
	h.Sum(id[:0])
	return id
}

func keyed(secret []byte) hash.Hash {
	if secret == nil {
		return sha256.New()
	}
	return hmac.New(sha256.New, secret)
}

func writeField(h hash.Hash, b []byte) {
	var n [4]byte
	binary.LittleEndian.PutUint32(n[:], uint32(len(b)))
	_, _ = h.Write(n[:]) // a hash never fails
	_, _ = h.Write(b)
}

// Keyer computes keys of one namespace. It belongs to one goroutine.
type Keyer struct {
	id  ID
	mac hash.Hash
}

// Keyer returns a Keyer. The namespace has passed Check.
func (n *Namespace) Keyer() *Keyer { return &Keyer{id: n.ID(), mac: keyed(n.Secret)} }

// Key is the key of the page with this hash.
func (k *Keyer) Key(pageHash []byte) (key Key, err error) {
	if len(pageHash) < MinHashBytes || len(pageHash) > MaxHashBytes {
		return key, &FieldError{"page_hash", hex.EncodeToString(pageHash[:min(len(pageHash),
			MinHashBytes)]),
			fmt.Sprintf("has %d bytes, not %d to %d", len(pageHash), MinHashBytes, MaxHashBytes),
			"give the engine's whole hash of the page"}
	}
	k.mac.Reset()
	_, _ = k.mac.Write(k.id[:])
	_, _ = k.mac.Write(pageHash)
	k.mac.Sum(key[:0])
	return key, nil
}

// Hashes are an engine's hashes of some pages, one behind the other, all of one length.
type Hashes struct {
	Bytes []byte
	Each  int // bytes of one hash
}

// Check refuses lists that are no whole number of hashes, or not 1 to MaxBatch of them.
func (h Hashes) Check() error {
	problem := ""
	switch n := len(h.Bytes); {
	case h.Each < MinHashBytes || h.Each > MaxHashBytes:
		problem = fmt.Sprintf("hashes of %d bytes, not %d to %d", h.Each, MinHashBytes, MaxHashBytes)
	case n%h.Each != 0:
		problem = fmt.Sprintf("%d bytes are no whole number of hashes of %d", n, h.Each)
	case n == 0 || n/h.Each > MaxBatch:
		problem = fmt.Sprintf("%d hashes, not 1 to %d", n/h.Each, MaxBatch)
	default:
		return nil
	}
	return &FieldError{"hashes", fmt.Sprintf("(%d bytes)", len(h.Bytes)), problem,
		"send the engine's whole hashes one behind the other"}
}

// Len is the number of hashes. The list has passed Check.
func (h Hashes) Len() int { return len(h.Bytes) / h.Each }

// At is hash i.
func (h Hashes) At(i int) []byte { return h.Bytes[i*h.Each : (i+1)*h.Each] }

// Keys are the keys of pages.
func (k *Keyer) Keys(h Hashes) ([]Key, error) {
	if err := h.Check(); err != nil {
		return nil, err
	}
	keys := make([]Key, h.Len())
	for i := range keys {
		var err error
		if keys[i], err = k.Key(h.At(i)); err != nil {
			return nil, err
		}
	}
	return keys, nil
}
