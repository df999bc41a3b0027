package layout

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"maps"
	"slices"
)

// geometryDomain separates the hash from other hashes and from later versions.
const geometryDomain = "kvspray-geometry-v1"

// placementParams locate pages without changing their content; geometry omits them.
var placementParams = map[string]bool{"row_stride": true, "head_stride": true}

// Geometry is equal on two sides if the transfer space and the inside of pages are equal. It covers
// groups, strategies, layers and page bytes, but not the addresses or the number of pages, which
// differ between any two engines.
func (l *Layout) Geometry() [32]byte {
	h := hasher{sha256.New()}
	h.str(geometryDomain)
	h.num(uint64(len(l.Groups)))
	for gi := range l.Groups {
		g := &l.Groups[gi]
		h.num(uint64(g.TokensPerBlock))
		same := uint64(0)
		if g.SameTable {
			same = 1
		}
		h.num(same)
		h.str(g.Strategy)
		keys := shapeParams(g)
		h.num(uint64(len(keys)))
		for _, k := range keys {
			h.str(k)
			h.num(uint64(g.Params[k]))
		}
		h.num(uint64(len(g.Layers)))
		for li := range g.Layers {
			h.str(g.Layers[li].Name)
			h.num(g.Layers[li].PageBytes)
		}
	}
	return h.sum()
}

func shapeParams(g *Group) []string {
	keys := make([]string, 0, len(g.Params))
	for k := range g.Params {
		if !placementParams[k] {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	return keys
}

// maxDiffs bounds the result of Diff: people read it, and error messages carry it.
const maxDiffs = 32

// Diff names each field in which the dtype, the identity or the geometry of a and b differ, with
// both values.
func Diff(a, b *Layout) []string {
	d := differ{}
	d.check("dtype", a.DType, b.DType)
	keys := map[string]bool{}
	for k := range a.Identity {
		keys[k] = true
	}
	for k := range b.Identity {
		keys[k] = true
	}
	for _, k := range slices.Sorted(maps.Keys(keys)) {
		va, oka := a.Identity[k]
		vb, okb := b.Identity[k]
		d.check("identity."+k, orMissing(va, oka), orMissing(vb, okb))
	}
	d.check("groups", len(a.Groups), len(b.Groups))
	for gi := range min(len(a.Groups), len(b.Groups)) {
		d.group(fmt.Sprintf("groups[%d]", gi), &a.Groups[gi], &b.Groups[gi])
	}
	if d.more > 0 {
		d.out = append(d.out, fmt.Sprintf("and %d more", d.more))
	}
	return d.out
}

// DiffGeometry names each field in which the geometry of a and b differ, with both values.
func DiffGeometry(a, b *Layout) []string {
	x, y := *a, *b
	x.DType, y.DType, x.Identity, y.Identity = "", "", nil, nil
	return Diff(&x, &y)
}

type differ struct {
	out  []string
	more int
}

func (d *differ) check(field string, a, b any) {
	if a == b {
		return
	}
	if len(d.out) >= maxDiffs {
		d.more++
		return
	}
	d.out = append(d.out, fmt.Sprintf("%s: %v here, %v there", field, a, b))
}

func (d *differ) group(field string, a, b *Group) {
	d.check(field+".tokens_per_block", a.TokensPerBlock, b.TokensPerBlock)
	d.check(field+".same_table", a.SameTable, b.SameTable)
	d.check(field+".strategy", a.Strategy, b.Strategy)
	keys := append(shapeParams(a), shapeParams(b)...)
	slices.Sort(keys)
	for _, k := range slices.Compact(keys) {
		va, oka := a.Params[k]
		vb, okb := b.Params[k]
		d.check(field+".params."+k, orMissing(fmt.Sprint(va), oka), orMissing(fmt.Sprint(vb), okb))
	}
	d.check(field+".layers", len(a.Layers), len(b.Layers))
	for li := range min(len(a.Layers), len(b.Layers)) {
		lf := fmt.Sprintf("%s.layers[%d]", field, li)
		d.check(lf+".name", a.Layers[li].Name, b.Layers[li].Name)
		d.check(lf+".page_bytes", a.Layers[li].PageBytes, b.Layers[li].PageBytes)
	}
}

func orMissing(v string, ok bool) string {
	if !ok {
		return "missing"
	}
	return fmt.Sprintf("%q", v)
}

type hasher struct{ h hash.Hash }

func (h hasher) num(v uint64) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], v)
	h.h.Write(b[:])
}

func (h hasher) str(s string) {
	h.num(uint64(len(s)))
	h.h.Write([]byte(s))
}

func (h hasher) sum() (out [32]byte) {
	h.h.Sum(out[:0])
	return out
}
