package parseblock

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvspray/kvspray/layout"
)

// The pairs of a layout's identity that engines should give: all that changes what the bytes of a token's KV mean and that no
// page can show. An engine may give others; each counts. What is left out is equal to what another engine leaves out.
const (
	IdentityModel    = "model_config"     // hash of the model's configuration
	IdentityWeights  = "weights"          // which weights, and their generation: a reload changes it
	IdentityLayers   = "layers"           // of the whole model, not of a pipeline stage
	IdentityRope     = "rope"             // scaling included
	IdentityHeadSize = "head_size"        // what a head holds, also where pages are opaque
	IdentityBackoff  = "backoff"          // tokens at the end of a prompt that prefill leaves to decode
	IdentitySpec     = "speculative"      // draft model, method, tokens: they add layers and history
	IdentityPacking  = "packing"          // of opaque pages: the vector units, and the kernel's block size where it depends on it
	IdentityDType    = "cache_dtype"      // as the engine names it
	IdentityOrder    = "byte_order"       // "little" where it is left out
	IdentityEngine   = "engine"           // opaque pages of two engines differ
	defaultByteOrder = "little"           // of every platform that serves models today
	describeDomain   = "kvspray-cache-v2" // keeps the hash apart from others, and from later versions of itself
)

// Field is one line of a description.
type Field struct{ Name, Value string }

// Description says what a cache means: equal on two sides exactly where the bytes of equal tokens mean the same. Tensor and
// pipeline parallelism, block size, orders and strides are not in it: a plan bridges them, or refuses them by name.
type Description []Field

// Describe makes the canonical description of a layout: dtype, byte order, the identity, and the kinds of cache that it has.
func (r *Registry) Describe(l *layout.Layout) (Description, error) {
	d := Description{{"dtype", l.DType}}
	if _, ok := l.Identity[IdentityOrder]; !ok {
		d = append(d, Field{IdentityOrder, defaultByteOrder})
	}
	for _, k := range slices.Sorted(maps.Keys(l.Identity)) {
		name := "identity." + k
		if k == IdentityOrder {
			name = k
		}
		d = append(d, Field{name, l.Identity[k]})
	}
	m, err := byModelLayer(r, l)
	if err != nil {
		return nil, err
	}
	// A stage of a pipeline has some of the layers; their kinds are what every stage can tell.
	kinds := map[string]string{}
	for _, name := range m.names {
		planes := m.planes[name]
		if has(planes, layout.RoleKV) {
			// What has no halves is never paired with K and V apart.
			if halves, err := halve(planes); err == nil {
				planes = halves
			}
		}
		var roles, values []string
		for i := range planes {
			roles = append(roles, planes[i].Role.String())
			values = append(values, kindOf(&planes[i]))
		}
		slices.Sort(values)
		slices.Sort(roles)
		value := strings.Join(values, "; ")
		kinds[value] = "cache." + strings.Join(roles, "+")
	}
	for _, v := range slices.Sorted(maps.Keys(kinds)) {
		d = append(d, Field{kinds[v], v})
	}
	slices.SortStableFunc(d, func(a, b Field) int { return strings.Compare(a.Name, b.Name) })
	return d, nil
}

// kindOf says what the cells of a plane are, and nothing about where they lie.
func kindOf(s *sited) string {
	rows, cols := s.Rows, s.Cols
	if s.Transposed {
		rows, cols = cols, rows
	}
	switch s.Unit {
	case layout.UnitState:
		return fmt.Sprintf("%s %s state of %d x %d x %d bytes, %d heads", s.Role, orPlain(s.Format), rows, cols, s.CellBytes, s.AllHeads)
	case layout.UnitBlock:
		var params []string
		packing := packingParams(s.g)
		for _, k := range slices.Sorted(maps.Keys(packing)) {
			params = append(params, fmt.Sprintf("%s=%d", k, packing[k]))
		}
		per := fmt.Sprintf("%d bytes a token", s.CellBytes/uint64(s.g.TokensPerBlock))
		if s.CellBytes%uint64(s.g.TokensPerBlock) != 0 {
			per = fmt.Sprintf("%d bytes for %d tokens", s.CellBytes, s.g.TokensPerBlock)
		}
		return fmt.Sprintf("%s %s, %s, %d heads, [%s]", s.Role, s.Format, per, s.AllHeads, strings.Join(params, " "))
	}
	kind := fmt.Sprintf("%s %s of %d bytes, %d heads", s.Role, orPlain(s.Format), uint64(cols)*s.CellBytes, s.AllHeads)
	if s.RowTokens != 1 {
		kind += fmt.Sprintf(", %d tokens an entry", s.RowTokens)
	}
	if w := s.g.Params["window"]; w > 0 {
		kind += fmt.Sprintf(", window %d", w)
	}
	return kind
}

// Hash is the fingerprint of the description.
func (d Description) Hash() (sum [32]byte) {
	b := append([]byte(describeDomain), 0)
	for _, f := range d {
		for _, s := range [2]string{f.Name, f.Value} {
			b = binary.LittleEndian.AppendUint64(b, uint64(len(s)))
			b = append(b, s...)
		}
	}
	return sha256.Sum256(b)
}

// Fingerprint is the hash of a layout's description: what two sides compare before a byte moves.
func (r *Registry) Fingerprint(l *layout.Layout) ([32]byte, error) {
	d, err := r.Describe(l)
	if err != nil {
		return [32]byte{}, err
	}
	return d.Hash(), nil
}

// Diff names each field in which two descriptions differ, with both values. It is empty exactly where the hashes are equal.
func (d Description) Diff(other Description) []string { return d.DiffAs(other, "here", "there") }

// DiffAs is Diff for readers who are at neither side: it says where each value is.
func (d Description) DiffAs(other Description, here, there string) []string {
	var out []string
	values := func(d Description, name string) []string {
		var v []string
		for _, f := range d {
			if f.Name == name {
				v = append(v, f.Value)
			}
		}
		return v
	}
	names := map[string]bool{}
	for _, f := range slices.Concat(d, other) {
		names[f.Name] = true
	}
	for _, n := range slices.Sorted(maps.Keys(names)) {
		if a, b := values(d, n), values(other, n); !slices.Equal(a, b) {
			out = append(out, fmt.Sprintf("%s: %s %s, %s %s", n, orMissing(a), here, orMissing(b), there))
		}
	}
	return out
}

func orMissing(v []string) string {
	if len(v) == 0 {
		return "missing"
	}
	return fmt.Sprintf("%q", strings.Join(v, " and "))
}
