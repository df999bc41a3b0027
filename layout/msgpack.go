package layout

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// MaxEncodedBytes bounds an encoded layout, which travels in one packet of the engine socket.
const MaxEncodedBytes = 1 << 20

// maxSkipDepth bounds the nesting of unknown values that are skipped.
const maxSkipDepth = 16

var (
	_ msgpack.CustomEncoder = (*Layout)(nil)
	_ msgpack.CustomDecoder = (*Layout)(nil)
)

// Marshal encodes l as described in docs/protocol.md, section 3, with keys in a fixed order: equal
// layouts have equal encodings.
func (l *Layout) Marshal() ([]byte, error) {
	var buf bytes.Buffer
	if err := l.EncodeMsgpack(msgpack.NewEncoder(&buf)); err != nil {
		return nil, fmt.Errorf("layout: encode: %w", err)
	}
	if buf.Len() > MaxEncodedBytes {
		return nil, refuse("layout", fmt.Sprintf("%d bytes", buf.Len()), fmt.Sprintf("at most %d encoded",
			MaxEncodedBytes), "shorten layer names")
	}
	return buf.Bytes(), nil
}

// Unmarshal decodes a layout of Marshal or of a shim. It checks every length before it allocates
// memory. The result may still be invalid: call Validate.
func Unmarshal(b []byte) (*Layout, error) {
	if len(b) > MaxEncodedBytes {
		return nil, refuse("layout", fmt.Sprintf("%d bytes", len(b)), fmt.Sprintf("at most %d encoded",
			MaxEncodedBytes), "shorten layer names")
	}
	r := bytes.NewReader(b)
	l := &Layout{}
	if err := l.DecodeMsgpack(msgpack.NewDecoder(r)); err != nil {
		return nil, err
	}
	if r.Len() != 0 {
		return nil, refuse("layout", fmt.Sprintf("%d bytes", r.Len()), "follow the encoded layout",
			"send one msgpack map")
	}
	return l, nil
}

// EncodeMsgpack implements msgpack.CustomEncoder.
func (l *Layout) EncodeMsgpack(e *msgpack.Encoder) error {
	w := writer{e: e}
	w.mapLen(4)
	w.str("model")
	w.str(l.Model)
	w.str("dtype")
	w.str(l.DType)
	w.str("groups")
	w.arrayLen(len(l.Groups))
	for gi := range l.Groups {
		g := &l.Groups[gi]
		if g.SameTable {
			w.mapLen(6)
			w.str("same_table")
			w.do(w.e.EncodeBool(true))
		} else {
			w.mapLen(5)
		}
		w.str("tokens_per_block")
		w.uint(uint64(g.TokensPerBlock))
		w.str("strategy")
		w.str(g.Strategy)
		w.str("params")
		w.mapLen(len(g.Params))
		for _, k := range slices.Sorted(maps.Keys(g.Params)) {
			w.str(k)
			w.int(g.Params[k])
		}
		w.str("num_blocks")
		w.uint(uint64(g.NumBlocks))
		w.str("layers")
		w.arrayLen(len(g.Layers))
		for li := range g.Layers {
			ly := &g.Layers[li]
			w.mapLen(6)
			w.str("name")
			w.str(ly.Name)
			w.str("index")
			w.int(int64(ly.Index))
			w.str("region")
			w.int(int64(ly.Region))
			w.str("base")
			w.uint(ly.Base)
			w.str("block_stride")
			w.uint(ly.BlockStride)
			w.str("page_bytes")
			w.uint(ly.PageBytes)
		}
	}
	w.str("identity")
	w.mapLen(len(l.Identity))
	for _, k := range slices.Sorted(maps.Keys(l.Identity)) {
		w.str(k)
		w.str(l.Identity[k])
	}
	return w.err
}

// writer keeps the first error, so that encoding reads like the format.
type writer struct {
	e   *msgpack.Encoder
	err error
}

func (w *writer) do(err error) {
	if w.err == nil {
		w.err = err
	}
}

func (w *writer) mapLen(n int)   { w.do(w.e.EncodeMapLen(n)) }
func (w *writer) arrayLen(n int) { w.do(w.e.EncodeArrayLen(n)) }
func (w *writer) str(s string)   { w.do(w.e.EncodeString(s)) }
func (w *writer) uint(v uint64)  { w.do(w.e.EncodeUint(v)) }
func (w *writer) int(v int64)    { w.do(w.e.EncodeInt(v)) }

// DecodeMsgpack implements msgpack.CustomDecoder, so that a layout nested in a message keeps the
// same bounds.
func (l *Layout) DecodeMsgpack(d *msgpack.Decoder) error {
	*l = Layout{}
	r := reader{d: d}
	return r.fields("layout", func(key string) (bool, error) {
		var err error
		switch key {
		case "model":
			l.Model, err = r.str("model")
		case "dtype":
			l.DType, err = r.str("dtype")
		case "groups":
			l.Groups, err = list(&r, "groups", MaxGroups, r.group)
		case "identity":
			l.Identity, err = values(&r, "identity", MaxIdentity, r.str)
		default:
			return false, nil
		}
		return true, err
	})
}

type reader struct {
	d      *msgpack.Decoder
	layers int // of all groups so far
}

// maxMapKeys bounds the keys of one map, unknown ones included.
const maxMapKeys = 64

// fields walks a map with string keys; fn reports whether it recognized the key and consumed its
// value.
func (r *reader) fields(field string, fn func(key string) (bool, error)) error {
	n, err := r.mapLen(field, maxMapKeys)
	if err != nil {
		return err
	}
	seen := make(map[string]bool, n)
	for range n {
		key, err := r.str(field + ", a key")
		if err != nil {
			return err
		}
		if seen[key] {
			return refuse(field+"."+key, "twice", "a key comes once", "send each key once")
		}
		seen[key] = true
		known, err := fn(key)
		if err != nil {
			return err
		}
		if !known {
			if err := r.skip(field+"."+key, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// list reads an array of maps; fn returns the keys of one element.
func list[T any](r *reader, field string, limit int,
	fn func(e *T, field, key string) (bool, error)) ([]T, error) {
	n, err := r.arrayLen(field, limit)
	if err != nil {
		return nil, err
	}
	out := make([]T, n)
	for i := range out {
		e := fmt.Sprintf("%s[%d]", field, i)
		err := r.fields(e, func(key string) (bool, error) { return fn(&out[i], e+"."+key, key) })
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (r *reader) group(g *Group, field, key string) (known bool, err error) {
	switch key {
	case "tokens_per_block":
		g.TokensPerBlock, err = r.uint32(field)
	case "same_table":
		g.SameTable, err = r.bool(field)
	case "strategy":
		g.Strategy, err = r.str(field)
	case "params":
		g.Params, err = values(r, field, MaxParams, r.int)
	case "num_blocks":
		g.NumBlocks, err = r.uint32(field)
	case "layers":
		g.Layers, err = list(r, field, MaxLayers-r.layers, r.layer)
		r.layers += len(g.Layers)
	default:
		return false, nil
	}
	return true, err
}

func (r *reader) layer(l *Layer, field, key string) (known bool, err error) {
	switch key {
	case "name":
		l.Name, err = r.str(field)
	case "index":
		l.Index, err = r.index(field)
	case "region":
		l.Region, err = r.index(field)
	case "base":
		l.Base, err = r.uint(field)
	case "block_stride":
		l.BlockStride, err = r.uint(field)
	case "page_bytes":
		l.PageBytes, err = r.uint(field)
	default:
		return false, nil
	}
	return true, err
}

// values reads a map whose keys are data: params, identity.
func values[V any](r *reader, field string, limit int,
	value func(field string) (V, error)) (map[string]V, error) {
	n, err := r.mapLen(field, limit)
	if err != nil {
		return nil, err
	}
	out := make(map[string]V, n)
	for range n {
		k, err := r.str(field + ", a key")
		if err != nil {
			return nil, err
		}
		if _, dup := out[k]; dup {
			return nil, refuse(field+"."+k, "twice", "a key comes once", "send each key once")
		}
		if out[k], err = value(field + "." + k); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (r *reader) code(field string) (byte, error) {
	c, err := r.d.PeekCode()
	return c, decodeError(field, err)
}

func decodeError(field string, err error) error {
	if err != nil {
		return fmt.Errorf("layout: %s: decode: %w", field, err)
	}
	return nil
}

// expect refuses a value of another type than kind.
func (r *reader) expect(field, kind string, is func(code byte) bool) error {
	c, err := r.code(field)
	if err == nil && !is(c) {
		err = refuse(field, fmt.Sprintf("msgpack code 0x%02x", c), "is not "+kind,
			"see docs/protocol.md, section 3")
	}
	return err
}

func isMap(c byte) bool {
	return msgpcode.IsFixedMap(c) || c == msgpcode.Map16 || c == msgpcode.Map32
}

func isArray(c byte) bool {
	return msgpcode.IsFixedArray(c) || c == msgpcode.Array16 || c == msgpcode.Array32
}

func (r *reader) mapLen(field string, limit int) (int, error) {
	if err := r.expect(field, "a map", isMap); err != nil {
		return 0, err
	}
	n, err := r.d.DecodeMapLen()
	return r.bounded(field, n, limit, err)
}

func (r *reader) arrayLen(field string, limit int) (int, error) {
	if err := r.expect(field, "an array", isArray); err != nil {
		return 0, err
	}
	n, err := r.d.DecodeArrayLen()
	return r.bounded(field, n, limit, err)
}

func (r *reader) bounded(field string, n, limit int, err error) (int, error) {
	if err != nil {
		return 0, decodeError(field, err)
	}
	if n < 0 || n > limit {
		return 0, refuse(field, fmt.Sprintf("%d entries", n), fmt.Sprintf("at most %d", limit),
			"register fewer entries")
	}
	return n, nil
}

func (r *reader) str(field string) (string, error) {
	if err := r.expect(field, "a string", msgpcode.IsString); err != nil {
		return "", err
	}
	n, err := r.d.DecodeBytesLen()
	if n, err = r.bounded(field, n, MaxStringBytes, err); err != nil {
		return "", err
	}
	b := make([]byte, n)
	err = r.d.ReadFull(b)
	return string(b), decodeError(field, err)
}

// uint reads any integer encoding of a non-negative value. The decoder's DecodeUint64 would wrap a
// negative value.
func (r *reader) uint(field string) (uint64, error) {
	c, err := r.code(field)
	if err != nil {
		return 0, err
	}
	switch {
	case c <= msgpcode.PosFixedNumHigh, c == msgpcode.Uint8, c == msgpcode.Uint16,
		c == msgpcode.Uint32, c == msgpcode.Uint64:
		v, err := r.d.DecodeUint64()
		return v, decodeError(field, err)
	}
	v, err := r.int(field)
	if err != nil {
		return 0, err
	}
	if v < 0 {
		return 0, refuse(field, v, "is negative", "send a count or an offset")
	}
	return uint64(v), nil
}

func (r *reader) int(field string) (int64, error) {
	c, err := r.code(field)
	if err != nil {
		return 0, err
	}
	switch {
	case msgpcode.IsFixedNum(c), c >= msgpcode.Uint8 && c <= msgpcode.Uint32, c >= msgpcode.Int8 &&
		c <= msgpcode.Int64:
		v, err := r.d.DecodeInt64()
		return v, decodeError(field, err)
	case c == msgpcode.Uint64:
		v, err := r.d.DecodeUint64()
		if err != nil {
			return 0, decodeError(field, err)
		}
		if v > math.MaxInt64 {
			return 0, refuse(field, v, "does not fit 63 bits", "send a smaller number")
		}
		return int64(v), nil
	}
	return 0, refuse(field, fmt.Sprintf("msgpack code 0x%02x", c), "is not an integer",
		"see docs/protocol.md, section 3")
}

func (r *reader) bool(field string) (bool, error) {
	isBool := func(c byte) bool { return c == msgpcode.True || c == msgpcode.False }
	if err := r.expect(field, "a boolean", isBool); err != nil {
		return false, err
	}
	v, err := r.d.DecodeBool()
	return v, decodeError(field, err)
}

func (r *reader) uint32(field string) (uint32, error) {
	v, err := r.uint(field)
	if err == nil && v > math.MaxUint32 {
		err = refuse(field, v, "does not fit 32 bits", "send a smaller number")
	}
	return uint32(v), err
}

func (r *reader) index(field string) (int, error) {
	v, err := r.uint(field)
	if err == nil && v > math.MaxInt32 {
		err = refuse(field, v, "is not an index", "send a smaller number")
	}
	return int(v), err
}

// skip discards a value that this version does not recognize. It does not use the decoder's Skip,
// which has no bound on depth and allocates a mebibyte for a string with a large announced length.
func (r *reader) skip(field string, depth int) error {
	if depth > maxSkipDepth {
		return refuse(field, "a nested value", fmt.Sprintf("deeper than %d", maxSkipDepth), "nest less")
	}
	c, err := r.code(field)
	if err != nil {
		return err
	}
	n := 0
	switch {
	case msgpcode.IsString(c), msgpcode.IsBin(c):
		n, err = r.d.DecodeBytesLen()
		return r.pass(field, n, err)
	case msgpcode.IsExt(c):
		_, n, err = r.d.DecodeExtHeader()
		return r.pass(field, n, err)
	case isMap(c):
		n, err = r.d.DecodeMapLen()
		n *= 2
	case isArray(c):
		n, err = r.d.DecodeArrayLen()
	default:
		return decodeError(field, r.d.Skip())
	}
	if n, err = r.bounded(field, n, MaxEncodedBytes, err); err != nil {
		return err
	}
	for range n {
		if err := r.skip(field, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// pass discards n bytes.
func (r *reader) pass(field string, n int, err error) error {
	if n, err = r.bounded(field, n, MaxEncodedBytes, err); err != nil {
		return err
	}
	var buf [512]byte
	for n > 0 {
		k := min(n, len(buf))
		if err := r.d.ReadFull(buf[:k]); err != nil {
			return decodeError(field, err)
		}
		n -= k
	}
	return nil
}
