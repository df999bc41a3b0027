package msg

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxDepth bounds the nesting of unknown values that are skipped.
const maxDepth = 16

// Error is a refusal of a message, with its field and remedy.
type Error struct {
	Message string // "HELLO", "INTENT" ...
	Field   string
	Problem string
	Remedy  string
}

func (e *Error) Error() string {
	s := e.Message
	if e.Field != "" {
		s += "." + e.Field
	}
	s += ": " + e.Problem
	if e.Remedy != "" {
		s += "; " + e.Remedy
	}
	return s
}

// reader is a cursor over one msgpack value. The first error sticks, and every later read returns
// zero. If a key comes twice the last value counts, lists included: a repeated list must not grow
// past its bound.
type reader struct {
	what  string
	field []byte // the key being read
	b     []byte
	off   int
	err   *Error
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = &Error{Message: r.what, Field: string(r.field), Problem: fmt.Sprintf(format, args...),
			Remedy: "see docs/protocol.md, " + r.what}
	}
}

// take returns the next n bytes.
func (r *reader) take(n int) []byte {
	if r.err != nil {
		return nil
	}
	if n < 0 || n > len(r.b)-r.off {
		r.fail("truncated: %d bytes wanted at offset %d of %d", n, r.off, len(r.b))
		return nil
	}
	b := r.b[r.off : r.off+n]
	r.off += n
	return b
}

func (r *reader) code() byte {
	b := r.take(1)
	if b == nil {
		return 0xc1 // never used by msgpack
	}
	return b[0]
}

func (r *reader) be(n int) uint64 {
	b := r.take(n)
	switch {
	case b == nil:
		return 0
	case n == 1:
		return uint64(b[0])
	case n == 2:
		return uint64(binary.BigEndian.Uint16(b))
	case n == 4:
		return uint64(binary.BigEndian.Uint32(b))
	}
	return binary.BigEndian.Uint64(b)
}

// count checks a length against a bound, and against the remaining bytes: an element has at least
// size of them.
func (r *reader) count(n uint64, limit, size int, unit string) int {
	if r.err != nil {
		return 0
	}
	if n > uint64(limit) {
		r.fail("%d %s, at most %d", n, unit, limit)
		return 0
	}
	if n > uint64((len(r.b)-r.off)/size) {
		r.fail("truncated: %d %s announced, %d bytes left", n, unit, len(r.b)-r.off)
		return 0
	}
	return int(n)
}

// mapLen reads the head of a map. Maps may have unknown keys, so the bound is the remaining bytes.
func (r *reader) mapLen() int {
	c := r.code()
	switch {
	case c&0xf0 == 0x80:
		return r.count(uint64(c&0x0f), math.MaxInt32, 1, "keys")
	case c == 0xde:
		return r.count(r.be(2), math.MaxInt32, 1, "keys")
	case c == 0xdf:
		return r.count(r.be(4), math.MaxInt32, 1, "keys")
	}
	r.fail("type byte %#02x, want a map", c)
	return 0
}

// arrayLen reads the head of an array whose elements have at least size bytes.
func (r *reader) arrayLen(limit, size int) int {
	c := r.code()
	switch {
	case c&0xf0 == 0x90:
		return r.count(uint64(c&0x0f), limit, size, "elements")
	case c == 0xdc:
		return r.count(r.be(2), limit, size, "elements")
	case c == 0xdd:
		return r.count(r.be(4), limit, size, "elements")
	}
	r.fail("type byte %#02x, want an array", c)
	return 0
}

func (r *reader) text(limit int) []byte {
	c := r.code()
	var n uint64
	switch {
	case c&0xe0 == 0xa0:
		n = uint64(c & 0x1f)
	case c == 0xd9:
		n = r.be(1)
	case c == 0xda:
		n = r.be(2)
	case c == 0xdb:
		n = r.be(4)
	default:
		r.fail("type byte %#02x, want a str", c)
		return nil
	}
	return r.take(r.count(n, limit, 1, "bytes of str"))
}

func (r *reader) str(limit int) string { return string(r.text(limit)) }

func (r *reader) strs(limit int) []string {
	n := r.arrayLen(limit, 1)
	if n == 0 {
		return nil
	}
	out := make([]string, 0, n)
	for range n {
		out = append(out, r.str(MaxNameBytes))
	}
	return out
}

func (r *reader) bin(limit int) []byte {
	c := r.code()
	var n uint64
	switch c {
	case 0xc4:
		n = r.be(1)
	case 0xc5:
		n = r.be(2)
	case 0xc6:
		n = r.be(4)
	default:
		r.fail("type byte %#02x, want a bin", c)
		return nil
	}
	return r.take(r.count(n, limit, 1, "bytes of bin"))
}

func (r *reader) fixed(dst []byte) {
	b := r.bin(MaxPacketBytes)
	if r.err == nil && len(b) != len(dst) {
		r.fail("bin of %d bytes, want %d", len(b), len(dst))
	}
	copy(dst, b)
}

func (r *reader) uint(limit uint64) uint64 {
	c := r.code()
	var v uint64
	neg := false
	signed := func(n int) {
		v = r.be(n)
		neg = v>>(8*n-1) != 0
	}
	switch {
	case c < 0x80:
		v = uint64(c)
	case c >= 0xe0:
		neg = true
	case c == 0xcc:
		v = r.be(1)
	case c == 0xcd:
		v = r.be(2)
	case c == 0xce:
		v = r.be(4)
	case c == 0xcf:
		v = r.be(8)
	case c == 0xd0:
		signed(1)
	case c == 0xd1:
		signed(2)
	case c == 0xd2:
		signed(4)
	case c == 0xd3:
		signed(8)
	default:
		r.fail("type byte %#02x, want an unsigned int", c)
		return 0
	}
	if neg {
		r.fail("negative, want an unsigned int")
		return 0
	}
	if v > limit {
		r.fail("%d, at most %d", v, limit)
		return 0
	}
	return v
}

func (r *reader) u64() uint64 { return r.uint(math.MaxUint64) }
func (r *reader) u32() uint32 { return uint32(r.uint(math.MaxUint32)) }

func (r *reader) bool() bool {
	switch c := r.code(); c {
	case 0xc2:
	case 0xc3:
		return true
	default:
		r.fail("type byte %#02x, want a bool", c)
	}
	return false
}

// key reads a map key and makes it the field of errors. Unknown keys come here too, so any short
// str is accepted.
func (r *reader) key() []byte {
	r.field = nil
	b := r.text(MaxNameBytes)
	r.field = b
	return b
}

func (r *reader) skip() { r.skipDepth(0) }

func (r *reader) skipDepth(depth int) {
	if depth > maxDepth {
		r.fail("nested deeper than %d", maxDepth)
		return
	}
	c := r.code()
	items := func(n int) {
		for ; n > 0 && r.err == nil; n-- {
			r.skipDepth(depth + 1)
		}
	}
	switch {
	case r.err != nil:
	case c < 0x80, c >= 0xe0, c == 0xc0, c == 0xc2, c == 0xc3:
	case c&0xf0 == 0x80:
		items(2 * int(c&0x0f))
	case c&0xf0 == 0x90:
		items(int(c & 0x0f))
	case c&0xe0 == 0xa0:
		r.take(int(c & 0x1f))
	case c == 0xc4, c == 0xd9:
		r.take(int(r.be(1)))
	case c == 0xc5, c == 0xda:
		r.take(int(r.be(2)))
	case c == 0xc6, c == 0xdb:
		r.take(int(r.be(4)))
	case c == 0xc7:
		r.take(int(r.be(1)) + 1)
	case c == 0xc8:
		r.take(int(r.be(2)) + 1)
	case c == 0xc9:
		r.take(int(r.be(4)) + 1)
	case c == 0xcc, c == 0xd0:
		r.take(1)
	case c == 0xcd, c == 0xd1, c == 0xd4:
		r.take(2)
	case c == 0xd5:
		r.take(3)
	case c == 0xce, c == 0xd2, c == 0xca:
		r.take(4)
	case c == 0xd6:
		r.take(5)
	case c == 0xcf, c == 0xd3, c == 0xcb:
		r.take(8)
	case c == 0xd7:
		r.take(9)
	case c == 0xd8:
		r.take(17)
	case c == 0xdc:
		items(int(r.be(2)))
	case c == 0xdd:
		items(r.count(r.be(4), math.MaxInt32, 1, "elements"))
	case c == 0xde:
		items(2 * int(r.be(2)))
	case c == 0xdf:
		items(2 * r.count(r.be(4), math.MaxInt32/2, 1, "keys"))
	default:
		r.fail("type byte %#02x is not msgpack", c)
	}
}

// raw returns the bytes of the next value, which must be a map.
func (r *reader) rawMap() []byte {
	start := r.off
	if c := r.code(); r.err == nil && c&0xf0 != 0x80 && c != 0xde && c != 0xdf {
		r.fail("type byte %#02x, want a map", c)
		return nil
	}
	r.off = start
	r.skip()
	if r.err != nil {
		return nil
	}
	return r.b[start:r.off]
}

// packed reads a bin of low to high elements of size bytes.
func (r *reader) packed(low, high, size int) []byte {
	b := r.bin(high * size)
	if r.err == nil && (len(b)%size != 0 || len(b) < low*size) {
		r.fail("bin of %d bytes, want %d to %d elements of %d", len(b), low, high, size)
	}
	return b
}

func (r *reader) packedU32(low, high int) []uint32 {
	b := r.packed(low, high, 4)
	if r.err != nil {
		return nil
	}
	out := make([]uint32, len(b)/4)
	for i := range out {
		out[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return out
}

func (r *reader) pair() [2]uint32 {
	if n := r.arrayLen(2, 1); r.err == nil && n != 2 {
		r.fail("%d elements, want 2", n)
	}
	return [2]uint32{r.u32(), r.u32()}
}

func (r *reader) atLeast(v, low uint64) {
	if r.err == nil && v < low {
		r.fail("%d, want at least %d", v, low)
	}
}

func (r *reader) within(v, low, high uint64) {
	if r.err == nil && (v < low || v > high) {
		r.fail("%d, want %d to %d", v, low, high)
	}
}

// oneOf refuses a word that is not in a closed list.
func (r *reader) oneOf(v string, words ...string) {
	if r.err == nil && !slices.Contains(words, v) {
		r.fail("%q, want %s", v, quoted(words))
	}
}

func quoted(words []string) string {
	s := ""
	for i, w := range words {
		if i > 0 {
			s += " or "
		}
		s += strconv.Quote(w)
	}
	return s
}

// require names the first required key that did not come. Bit i of got stands for names[i].
func (r *reader) require(got uint64, names []string) {
	for i, name := range names {
		if r.err == nil && got&(1<<i) == 0 {
			r.field = []byte(name)
			r.fail("missing")
		}
	}
}

// refuse fails for a problem of check; no field: the key that was read last.
func (r *reader) refuse(field, problem string) {
	if problem == "" {
		return
	}
	if field != "" {
		r.field = []byte(field)
	}
	r.fail("%s", problem)
}

// end checks that nothing follows the value.
func (r *reader) end() *Error {
	if r.err == nil && r.off != len(r.b) {
		r.field = nil
		r.fail("%d bytes follow the map", len(r.b)-r.off)
	}
	return r.err
}

// Encoding: the smallest form of each value.

func appendMap(b []byte, n int) []byte {
	if n < 16 {
		return append(b, 0x80|byte(n))
	}
	if n <= math.MaxUint16 {
		return binary.BigEndian.AppendUint16(append(b, 0xde), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, 0xdf), uint32(n))
}

func appendArray(b []byte, n int) []byte {
	if n < 16 {
		return append(b, 0x90|byte(n))
	}
	if n <= math.MaxUint16 {
		return binary.BigEndian.AppendUint16(append(b, 0xdc), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, 0xdd), uint32(n))
}

func appendUint(b []byte, v uint64) []byte {
	switch {
	case v < 0x80:
		return append(b, byte(v))
	case v <= math.MaxUint8:
		return append(b, 0xcc, byte(v))
	case v <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
}

// appendStr encodes s as valid UTF-8: readers in other languages refuse anything else.
func appendStr(b []byte, s string) []byte {
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "?")
	}
	switch n := len(s); {
	case n < 32:
		b = append(b, 0xa0|byte(n))
	case n <= math.MaxUint8:
		b = append(b, 0xd9, byte(n))
	case n <= math.MaxUint16:
		b = binary.BigEndian.AppendUint16(append(b, 0xda), uint16(n))
	default:
		b = binary.BigEndian.AppendUint32(append(b, 0xdb), uint32(n))
	}
	return append(b, s...)
}

func appendBinHead(b []byte, n int) []byte {
	switch {
	case n <= math.MaxUint8:
		return append(b, 0xc4, byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, 0xc5), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, 0xc6), uint32(n))
}

func appendBin(b, v []byte) []byte { return append(appendBinHead(b, len(v)), v...) }

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 0xc3)
	}
	return append(b, 0xc2)
}

func appendStrs(b []byte, v []string) []byte {
	b = appendArray(b, len(v))
	for _, s := range v {
		b = appendStr(b, s)
	}
	return b
}

func appendPackedU32(b []byte, v []uint32) []byte {
	b = appendBinHead(b, 4*len(v))
	for _, n := range v {
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	return b
}

// clip shortens a text to the bound that readers accept.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "")
}
