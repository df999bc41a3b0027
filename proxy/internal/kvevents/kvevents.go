// Package kvevents reads the KV events that vLLM publishes about its prefix cache: which blocks it
// stored, removed, or that it removed all.
//
// The bytes are another process's. Every length is checked against a bound and against the bytes
// that are there before anything is allocated for it. The package reads both forms that vLLM has
// used, arrays and maps, and passes over unknown fields and events. It keeps no
// state and starts no goroutine.
package kvevents

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"math"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// Bounds of one batch.
const (
	MaxBytes  = 32 << 20
	MaxEvents = 1 << 16
	MaxBlocks = 1 << 20
	MaxTokens = 1 << 22
	maxSize   = 1 << 16 // tokens of a block
	maxHash   = 64      // bytes of a block's hash
	maxText   = 256     // bytes of a medium, a kind or a key; a longer text counts as unknown
	maxFields = 64      // of one event
	maxDepth  = 16      // of what is passed over
)

// Kind is what an event reports.
type Kind uint8

// The kinds.
const (
	Stored Kind = iota + 1
	Removed
	Cleared
)

// Tier is where a block is, as a bit.
type Tier uint8

// The tiers.
const (
	GPU      Tier = 1 << iota // also of an engine that names none
	Host                      // memory of the host
	Other                     // a disk, an object store
	AllTiers = GPU | Host | Other
)

// Name stands for an engine's hash of a block. The hash is an integer or bytes of any algorithm;
// a name is its hash with a seed of this process.
type Name uint64

// Event is one change of a prefix cache.
type Event struct {
	Kind      Kind
	Blocks    []Name
	Parent    Name // of the first block
	HasParent bool // otherwise the first block is a prompt's first one
	Tokens    []uint32
	BlockSize int // tokens
	// Plain is the number of blocks, from the first one on, whose hash depends on nothing but
	// tokens. Images, salts and embedded prompts are other things.
	Plain   int
	Adapter bool // the blocks are those of a LoRA adapter
	Tier    Tier
	Remote  bool // the blocks are not at this engine
	// Partial: having all of these blocks is not enough for a hit, because the model has other
	// caches, such as those of sliding windows.
	Partial bool
}

// Batch is the events of one step of an engine.
type Batch struct {
	Events  []Event
	Rank    int // data-parallel
	Unknown int // events of other kinds
}

var (
	seed = maphash.MakeSeed()

	errLength = errors.New("a length exceeds the bytes that follow, or its bound")
	errDepth  = errors.New("the nesting is too deep")
	errForm   = errors.New("a value has another form than vLLM's")
)

func nameOf(b []byte) Name { return Name(maphash.Bytes(seed, b)) }

func nameOfInt(n uint64) Name {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], n)
	return nameOf(b[:])
}

// decoder reads one batch.
type decoder struct {
	*msgpack.Decoder
	r    *bytes.Reader
	left *budget
}

// budget is what the rest of a batch may have.
type budget struct{ blocks, tokens int }

// Decode reads a batch.
func Decode(payload []byte) (*Batch, error) {
	if len(payload) > MaxBytes {
		return nil, fmt.Errorf("kv events: %d bytes: a batch has at most %d", len(payload), MaxBytes)
	}
	r := bytes.NewReader(payload)
	m := msgpack.GetDecoder()
	defer msgpack.PutDecoder(m)
	m.Reset(r)
	d := decoder{m, r, &budget{MaxBlocks, MaxTokens}}
	b, err := d.batch()
	if err != nil {
		return nil, fmt.Errorf("kv events: %w at byte %d of %d", err, len(payload)-r.Len(), len(payload))
	}
	return b, nil
}

// length checks a number of items, of at least one byte each.
func (d decoder) length(n int, err error, limit int) (int, error) {
	switch {
	case err != nil:
		return 0, err
	case n < 0: // nil
		return 0, nil
	case n > limit || n > d.r.Len():
		return 0, errLength
	}
	return n, nil
}

func (d decoder) array(limit int) (int, error) {
	n, err := d.DecodeArrayLen()
	return d.length(n, err, limit)
}

// batch reads a batch: a list of time, events and rank, or a map of these.
func (d decoder) batch() (*Batch, error) {
	code, err := d.PeekCode()
	if err != nil {
		return nil, err
	}
	b := &Batch{}
	if isMap(code) {
		n, err := d.DecodeMapLen()
		if n, err = d.length(n, err, maxFields); err != nil {
			return nil, err
		}
		some := false
		for range n {
			key, err := d.text()
			if err != nil {
				return nil, err
			}
			switch key {
			case "events":
				some = true
				err = d.events(b)
			case "data_parallel_rank":
				err = d.rank(b)
			default:
				err = d.skip(0)
			}
			if err != nil {
				return nil, err
			}
		}
		if !some {
			return nil, errForm
		}
		return b, nil
	}
	n, err := d.array(maxFields)
	if err != nil {
		return nil, err
	}
	if n < 2 {
		return nil, errForm
	}
	for i := range n {
		switch i {
		case 1:
			err = d.events(b)
		case 2:
			err = d.rank(b)
		default:
			err = d.skip(0)
		}
		if err != nil {
			return nil, err
		}
	}
	return b, nil
}

func (d decoder) events(b *Batch) error {
	n, err := d.array(MaxEvents)
	if err != nil {
		return err
	}
	for range n {
		e, err := d.event()
		if err != nil {
			return err
		}
		if e.Kind == 0 {
			b.Unknown++
			continue
		}
		b.Events = append(b.Events, e)
	}
	return nil
}

func (d decoder) rank(b *Batch) error {
	n, _, err := d.number()
	b.Rank = int(min(max(n, 0), math.MaxInt32))
	return err
}

// field is one field of an event.
type field uint8

const (
	skipped field = iota
	hashes
	parent
	tokens
	size
	adapterID
	medium
	adapterName
	extra
	group
	specKind
	window
	locality
	tag
)

// The fields of events as arrays, after their tag. Later versions of vLLM append fields.
var order = map[Kind][]field{
	Stored: {hashes, parent, tokens, size, adapterID, medium, adapterName, extra, group, specKind,
		window, locality},
	Removed: {hashes, medium, group, locality},
}

// The fields of events as maps.
var names = map[string]field{"type": tag, "block_hashes": hashes, "parent_block_hash": parent,
	"token_ids": tokens, "block_size": size, "lora_id": adapterID, "medium": medium,
	"lora_name": adapterName, "extra_keys": extra, "group_idx": group,
	"kv_cache_spec_kind": specKind, "kv_cache_spec_sliding_window": window, "locality": locality}

var tags = map[string]Kind{"BlockStored": Stored, "BlockRemoved": Removed,
	"AllBlocksCleared": Cleared}

// raw is an event before its check.
type raw struct {
	Event
	extraAt int // the first block with other keys; -1: none
}

// event reads one event. Its kind is 0 if it is unknown.
func (d decoder) event() (Event, error) {
	e := raw{Event: Event{Tier: GPU}, extraAt: -1}
	code, err := d.PeekCode()
	if err != nil {
		return e.Event, err
	}
	if isMap(code) {
		n, err := d.DecodeMapLen()
		if n, err = d.length(n, err, maxFields); err != nil {
			return e.Event, err
		}
		for range n {
			key, err := d.text()
			if err != nil {
				return e.Event, err
			}
			if err := d.read(&e, names[key]); err != nil {
				return e.Event, err
			}
		}
		return e.checked()
	}
	n, err := d.array(maxFields)
	if err != nil {
		return e.Event, err
	}
	for i := range n {
		f := tag
		if i > 0 {
			f = skipped
			if list := order[e.Kind]; i <= len(list) {
				f = list[i-1]
			}
		}
		if err := d.read(&e, f); err != nil {
			return e.Event, err
		}
	}
	return e.checked()
}

// checked completes an event. An event whose tokens are not those of its blocks is unknown: vLLM
// publishes such events for caches that keep a part of the blocks.
func (e *raw) checked() (Event, error) {
	if e.Kind != Stored {
		return e.Event, nil
	}
	if e.BlockSize <= 0 || len(e.Tokens) != len(e.Blocks)*e.BlockSize {
		e.Kind = 0
		return e.Event, nil
	}
	e.Plain = len(e.Blocks)
	if e.extraAt >= 0 {
		e.Plain = min(e.Plain, e.extraAt)
	}
	return e.Event, nil
}

// read reads the value of a field.
func (d decoder) read(e *raw, f field) (err error) {
	switch f {
	case tag:
		var s string
		s, err = d.text()
		e.Kind = tags[s]
	case hashes:
		var n int
		if n, err = d.array(d.left.blocks); err != nil {
			return err
		}
		d.left.blocks -= n
		e.Blocks = make([]Name, n)
		for i := range e.Blocks {
			if e.Blocks[i], _, err = d.name(); err != nil {
				return err
			}
		}
	case parent:
		e.Parent, e.HasParent, err = d.name()
	case tokens:
		return d.tokens(e)
	case size:
		var n int64
		n, _, err = d.number()
		if n < 0 || n > maxSize {
			return errLength
		}
		e.BlockSize = int(n)
	case adapterID, adapterName:
		var set bool
		if set, err = d.isSet(); set {
			e.Adapter = true
		}
	case window:
		var set bool
		if set, err = d.isSet(); set {
			e.Partial = true
		}
	case medium:
		var s string
		s, err = d.text()
		e.Tier = tierOf(s)
	case extra:
		return d.extra(e)
	case group:
		var n int64
		n, _, err = d.number()
		e.Partial = e.Partial || n != 0
	case specKind:
		var s string
		s, err = d.text()
		e.Partial = e.Partial || s != "" && s != "full_attention" && s != "mla_attention"
	case locality:
		var s string
		s, err = d.text()
		e.Remote = s == "REMOTE"
	default:
		return d.skip(0)
	}
	return err
}

func tierOf(medium string) Tier {
	switch medium {
	case "", "GPU":
		return GPU
	case "CPU", "CPU_PINNED":
		return Host
	}
	return Other
}

func (d decoder) tokens(e *raw) error {
	n, err := d.array(d.left.tokens)
	if err != nil {
		return err
	}
	d.left.tokens -= n
	e.Tokens = make([]uint32, n)
	for i := range e.Tokens {
		t, ok, err := d.number()
		if err != nil {
			return err
		}
		if !ok || t < 0 || t > math.MaxUint32 {
			return errForm
		}
		e.Tokens[i] = uint32(t)
	}
	return nil
}

// extra finds the first block with keys of its own.
func (d decoder) extra(e *raw) error {
	n, err := d.array(MaxBlocks)
	if err != nil {
		return err
	}
	for i := range n {
		set, err := d.isSet()
		if err != nil {
			return err
		}
		if set && e.extraAt < 0 {
			e.extraAt = i
		}
	}
	return nil
}

// isSet passes over a value, and reports whether it is more than nil or an empty list.
func (d decoder) isSet() (bool, error) {
	code, err := d.PeekCode()
	if err != nil {
		return false, err
	}
	return code != msgpcode.Nil && code != msgpcode.FixedArrayLow && code != msgpcode.FixedStrLow,
		d.skip(0)
}

// number reads an integer; false: it is nil.
func (d decoder) number() (int64, bool, error) {
	code, err := d.PeekCode()
	if err != nil {
		return 0, false, err
	}
	if code == msgpcode.Nil {
		return 0, false, d.DecodeNil()
	}
	if !isInt(code) {
		return 0, false, errForm
	}
	n, err := d.DecodeInt64()
	return n, true, err
}

func isInt(code byte) bool {
	return msgpcode.IsFixedNum(code) || code >= msgpcode.Uint8 && code <= msgpcode.Int64
}

// name reads a block's hash; false: it is nil.
func (d decoder) name() (Name, bool, error) {
	code, err := d.PeekCode()
	switch {
	case err != nil:
		return 0, false, err
	case code == msgpcode.Nil:
		return 0, false, d.DecodeNil()
	case isInt(code):
		n, err := d.DecodeUint64()
		return nameOfInt(n), true, err
	case !isBytes(code):
		return 0, false, errForm
	}
	n, err := d.DecodeBytesLen()
	if n, err = d.length(n, err, maxHash); err != nil {
		return 0, false, err
	}
	var b [maxHash]byte
	err = d.ReadFull(b[:n])
	return nameOf(b[:n]), true, err
}

func isMap(code byte) bool {
	return msgpcode.IsFixedMap(code) || code == msgpcode.Map16 || code == msgpcode.Map32
}

func isBytes(code byte) bool {
	return msgpcode.IsBin(code) || msgpcode.IsString(code)
}

const longText = "\x00" // in place of a text that is too long to be known

// text reads a text; nil is an empty one.
func (d decoder) text() (string, error) {
	code, err := d.PeekCode()
	switch {
	case err != nil:
		return "", err
	case code == msgpcode.Nil:
		return "", d.DecodeNil()
	case !isBytes(code):
		return longText, d.skip(0)
	}
	n, err := d.DecodeBytesLen()
	if n, err = d.length(n, err, MaxBytes); err != nil {
		return "", err
	}
	if n > maxText {
		return longText, d.pass(n)
	}
	var b [maxText]byte
	if err := d.ReadFull(b[:n]); err != nil {
		return "", err
	}
	return string(b[:n]), nil
}

// pass passes over bytes.
func (d decoder) pass(n int) error {
	if n > d.r.Len() {
		return errLength
	}
	_, err := d.r.Seek(int64(n), 1)
	return err
}

// skip passes over a value of any form. The library's own Skip has no bound on its depth.
func (d decoder) skip(depth int) error {
	if depth > maxDepth {
		return errDepth
	}
	code, err := d.PeekCode()
	if err != nil {
		return err
	}
	items, n := 0, 0
	switch {
	case msgpcode.IsFixedArray(code), code == msgpcode.Array16, code == msgpcode.Array32:
		items, err = d.array(MaxBytes)
	case isMap(code):
		items, err = d.DecodeMapLen()
		items, err = d.length(items, err, MaxBytes)
		items *= 2
	case isBytes(code):
		if n, err = d.DecodeBytesLen(); err == nil {
			return d.pass(n)
		}
	default:
		return d.skipPlain(code)
	}
	if err != nil {
		return err
	}
	for range items {
		if err := d.skip(depth + 1); err != nil {
			return err
		}
	}
	return nil
}

// skipPlain passes over a value without a length before it. vLLM sends no extensions.
func (d decoder) skipPlain(code byte) error {
	n := 1 // with the code
	switch code {
	case msgpcode.Nil, msgpcode.False, msgpcode.True:
	case msgpcode.Uint8, msgpcode.Int8:
		n += 1
	case msgpcode.Uint16, msgpcode.Int16:
		n += 2
	case msgpcode.Uint32, msgpcode.Int32, msgpcode.Float:
		n += 4
	case msgpcode.Uint64, msgpcode.Int64, msgpcode.Double:
		n += 8
	default:
		if !msgpcode.IsFixedNum(code) {
			return errForm
		}
	}
	return d.pass(n)
}
