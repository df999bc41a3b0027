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
			l.Groups, err = r.groups()
		case "identity":
			l.Identity, err = r.identity()
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

func (r *reader) groups() ([]Group, error) {
	n, err := r.arrayLen("groups", MaxGroups)
	if err != nil {
		return nil, err
	}
	out := make([]Group, n)
	for i := range out {
		g, field := &out[i], fmt.Sprintf("groups[%d]", i)
		err := r.fields(field, func(key string) (bool, error) {
			var err error
			switch key {
			case "tokens_per_block":
				g.TokensPerBlock, err = r.uint32(field + "." + key)
			case "same_table":
				g.SameTable, err = r.bool(field + "." + key)
			case "strategy":
				g.Strategy, err = r.str(field + "." + key)
			case "params":
				g.Params, err = r.params(field + "." + key)
			case "num_blocks":
				g.NumBlocks, err = r.uint32(field + "." + key)
			case "layers":
				g.Layers, err = r.layerList(field + "." + key)
			default:
				return false, nil
			}
			return true, err
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (r *reader) layerList(field string) ([]Layer, error) {
	n, err := r.arrayLen(field, MaxLayers-r.layers)
	if err != nil {
		return nil, err
	}
	r.layers += n
	out := make([]Layer, n)
	for i := range out {
		ly, lf := &out[i], fmt.Sprintf("%s[%d]", field, i)
		err := r.fields(lf, func(key string) (bool, error) {
			var err error
			switch key {
			case "name":
				ly.Name, err = r.str(lf + "." + key)
			case "index":
				ly.Index, err = r.index(lf + "." + key)
			case "region":
				ly.Region, err = r.index(lf + "." + key)
			case "base":
				ly.Base, err = r.uint(lf + "." + key)
			case "block_stride":
				ly.BlockStride, err = r.uint(lf + "." + key)
			case "page_bytes":
				ly.PageBytes, err = r.uint(lf + "." + key)
			default:
				return false, nil
			}
			return true, err
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (r *reader) params(field string) (map[string]int64, error) {
	n, err := r.mapLen(field, MaxParams)
	if err != nil {
		return nil, err
	}
	out := make(map[string]int64, n)
	for range n {
		k, err := r.str(field + ", a key")
		if err != nil {
			return nil, err
		}
		if _, dup := out[k]; dup {
			return nil, refuse(field+"."+k, "twice", "a key comes once", "send each key once")
		}
		if out[k], err = r.int(field + "." + k); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (r *reader) identity() (map[string]string, error) {
	n, err := r.mapLen("identity", MaxIdentity)
	if err != nil {
		return nil, err
	}
	out := make(map[string]string, n)
	for range n {
		k, err := r.str("identity, a key")
		if err != nil {
			return nil, err
		}
		if _, dup := out[k]; dup {
			return nil, refuse("identity."+k, "twice", "a key comes once", "send each key once")
		}
		if out[k], err = r.str("identity." + k); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (r *reader) code(field string) (byte, error) {
	c, err := r.d.PeekCode()
	if err != nil {
		return 0, fmt.Errorf("layout: %s: decode: %w", field, err)
	}
	return c, nil
}

func (r *reader) mapLen(field string, limit int) (int, error) {
	c, err := r.code(field)
	if err != nil {
		return 0, err
	}
	if !msgpcode.IsFixedMap(c) && c != msgpcode.Map16 && c != msgpcode.Map32 {
		return 0, refuse(field, fmt.Sprintf("msgpack code 0x%02x", c), "is not a map",
			"see docs/protocol.md, section 3")
	}
	n, err := r.d.DecodeMapLen()
	return r.bounded(field, n, limit, err)
}

func (r *reader) arrayLen(field string, limit int) (int, error) {
	c, err := r.code(field)
	if err != nil {
		return 0, err
	}
	if !msgpcode.IsFixedArray(c) && c != msgpcode.Array16 && c != msgpcode.Array32 {
		return 0, refuse(field, fmt.Sprintf("msgpack code 0x%02x", c), "is not an array",
			"see docs/protocol.md, section 3")
	}
	n, err := r.d.DecodeArrayLen()
	return r.bounded(field, n, limit, err)
}

func (r *reader) bounded(field string, n, limit int, err error) (int, error) {
	if err != nil {
		return 0, fmt.Errorf("layout: %s: decode: %w", field, err)
	}
	if n < 0 || n > limit {
		return 0, refuse(field, fmt.Sprintf("%d entries", n), fmt.Sprintf("at most %d", limit),
			"register fewer entries")
	}
	return n, nil
}

func (r *reader) str(field string) (string, error) {
	c, err := r.code(field)
	if err != nil {
		return "", err
	}
	if !msgpcode.IsString(c) {
		return "", refuse(field, fmt.Sprintf("msgpack code 0x%02x", c), "is not a string",
			"see docs/protocol.md, section 3")
	}
	n, err := r.d.DecodeBytesLen()
	if n, err = r.bounded(field, n, MaxStringBytes, err); err != nil {
		return "", err
	}
	b := make([]byte, n)
	if err := r.d.ReadFull(b); err != nil {
		return "", fmt.Errorf("layout: %s: decode: %w", field, err)
	}
	return string(b), nil
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
		if err != nil {
			return 0, fmt.Errorf("layout: %s: decode: %w", field, err)
		}
		return v, nil
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
		if err != nil {
			return 0, fmt.Errorf("layout: %s: decode: %w", field, err)
		}
		return v, nil
	case c == msgpcode.Uint64:
		v, err := r.d.DecodeUint64()
		if err != nil {
			return 0, fmt.Errorf("layout: %s: decode: %w", field, err)
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
	c, err := r.code(field)
	if err != nil {
		return false, err
	}
	if c != msgpcode.True && c != msgpcode.False {
		return false, refuse(field, fmt.Sprintf("msgpack code 0x%02x", c), "is not a boolean",
			"see docs/protocol.md, section 3")
	}
	v, err := r.d.DecodeBool()
	if err != nil {
		return false, fmt.Errorf("layout: %s: decode: %w", field, err)
	}
	return v, nil
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
	case msgpcode.IsFixedMap(c), c == msgpcode.Map16, c == msgpcode.Map32:
		n, err = r.d.DecodeMapLen()
		n *= 2
	case msgpcode.IsFixedArray(c), c == msgpcode.Array16, c == msgpcode.Array32:
		n, err = r.d.DecodeArrayLen()
	default:
		if err := r.d.Skip(); err != nil {
			return fmt.Errorf("layout: %s: decode: %w", field, err)
		}
		return nil
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
			return fmt.Errorf("layout: %s: decode: %w", field, err)
		}
		n -= k
	}
	return nil
}
