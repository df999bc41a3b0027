package parseblock

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvspray/kvspray/layout"
)

// The pairs of a layout's identity: all that changes what the bytes of a token's KV mean and that no page can show. Those of needed
// an engine has to give. It may give others; each counts.
const (
	IdentityModel    = "model_config"     // hash of the model's configuration
	IdentityWeights  = "weights"          // which weights, and their generation: a reload changes it
	IdentityLayers   = "layers"           // of the whole model, not of a pipeline stage
	IdentityRope     = "rope"             // scaling included
	IdentityGroups   = "groups"           // kinds of cache groups of the whole model: a stage of a pipeline may have no layer of one
	IdentityHeadSize = "head_size"        // what a head holds, also where pages are opaque
	IdentityBackoff  = "backoff"          // tokens at the end of a prompt that prefill leaves to decode
	IdentitySpec     = "speculative"      // draft model, method, tokens: they add layers and history
	IdentityPacking  = "packing"          // of opaque pages: the vector units, and the kernel's block size where it depends on it
	IdentityDType    = "cache_dtype"      // as the engine names it
	IdentityOrder    = "byte_order"       // "little" where it is left out
	IdentityEngine   = "engine"           // opaque pages of two engines differ
	defaultByteOrder = "little"           // of every platform that serves models today
	describeDomain   = "kvspray-cache-v3" // keeps the hash apart from others, and from later versions of itself
)

// needed are the pairs without which there is no fingerprint: two engines that both leave one out would be taken for alike in it. What a model
// has nothing of is said, too, by an empty value or "none". Head size is here beside the cells of each layer, which are compared when a plan is
// made: a stage of a pipeline may have none of the other's layers.
var needed = [...]struct{ key, what string }{
	{IdentityBackoff, "tokens of a prompt that prefill leaves to decode"},
	{IdentityGroups, "kinds of cache groups of the whole model"},
	{IdentityHeadSize, "numbers of a head"},
	{IdentityLayers, "count of the whole model"},
	{IdentityModel, "hash of the configuration"},
	{IdentityRope, "parameters, scaling included"},
	{IdentitySpec, "method, draft model and tokens"},
	{IdentityWeights, "name and generation"},
}

// lacking refuses a layout whose identity leaves out what its fingerprint has to tell apart, all of it by name. Pages whose inside is not
// described differ in how they are packed, and nothing else says so.
func (r *Registry) lacking(l *layout.Layout) error {
	var keys, remedies []string
	need := func(key, what string) {
		if _, ok := l.Identity[key]; !ok {
			keys, remedies = append(keys, key), append(remedies, fmt.Sprintf("%s (%s)", key, what))
		}
	}
	for _, n := range needed {
		need(n.key, n.what)
	}
	opaque, err := r.opaque(l)
	if err != nil {
		return err
	}
	if opaque {
		need(IdentityPacking, "vector units of opaque pages, and the kernel's block size where it depends on it")
	}
	if len(keys) == 0 {
		return nil
	}
	return &layout.Error{Field: "identity", Value: "without " + strings.Join(keys, ", "), Problem: "two engines that differ in what both leave out would be taken for alike",
		Remedy: `register, as strings, "" where the model has none: ` + strings.Join(remedies, ", ")}
}

// opaque reports whether the inside of some page is unknown.
func (r *Registry) opaque(l *layout.Layout) (bool, error) {
	var planes []layout.Plane
	for gi := range l.Groups {
		g := &l.Groups[gi]
		for li := range g.Layers {
			var err error
			if planes, err = r.Planes(planes[:0], g, &g.Layers[li]); err != nil {
				return false, err
			}
			if slices.ContainsFunc(planes, func(p layout.Plane) bool { return p.Role == layout.RolePage }) {
				return true, nil
			}
		}
	}
	return false, nil
}

// Field is one line of a description.
type Field struct {
	Name, Value string
	Layer       string // of the model, whose cache it describes; empty: it is said of the whole model
}

// Description says what a cache means. Tensor and pipeline parallelism, block size, orders and strides are not in it: a plan bridges them,
// or refuses them by name.
//
// What is said of the whole model every stage of a pipeline says alike, and its hash is the fingerprint. What kind of cache a layer has only
// the stages can tell that have it, and some have no layer of a kind: it is compared layer by layer, where two sides have the same, by
// Diff and again when a plan is made, which refuses any difference.
type Description []Field

// Describe makes the canonical description of a layout: dtype, byte order, the identity, and the kind of cache of each layer.
func (r *Registry) Describe(l *layout.Layout) (Description, error) {
	d := Description{{Name: "dtype", Value: l.DType}}
	if _, ok := l.Identity[IdentityOrder]; !ok {
		d = append(d, Field{Name: IdentityOrder, Value: defaultByteOrder})
	}
	for _, k := range slices.Sorted(maps.Keys(l.Identity)) {
		name := "identity." + k
		if k == IdentityOrder {
			name = k
		}
		d = append(d, Field{Name: name, Value: l.Identity[k]})
	}
	slices.SortStableFunc(d, func(a, b Field) int { return strings.Compare(a.Name, b.Name) })
	m, err := byModelLayer(r, l)
	if err != nil {
		return nil, err
	}
	for _, name := range m.names {
		planes := m.planes[name]
		if has(planes, layout.RoleKV) {
			// What has no halves is never paired with K and V apart.
			if halves, err := halve(planes); err == nil {
				planes = halves
			}
		}
		for i := range planes {
			for _, f := range kindOf(&planes[i]).fields() {
				d = append(d, Field{planes[i].Role.String() + " " + f.Name, f.Value, name})
			}
		}
	}
	return d, nil
}

// kind is what the cells of a plane are, and nothing about where they lie. Planes are copied to one another where it is equal.
type kind struct {
	unit       layout.Unit
	format     string
	heads      uint32
	cell       uint64 // bytes of a head of a token, or of a number of a state; of an opaque page, of all its tokens
	key        uint64 // of a cell of packed K and V, what K takes where it is not the half
	tokens     uint32 // of an opaque page, where its bytes are not a multiple of them
	number     uint64 // bytes of a number, where a cell's numbers lie apart
	rows, cols uint32 // of a state
	rowTokens  uint32
	window     uint64
	packing    string // params of an opaque page
}

func kindOf(s *sited) kind {
	k := kind{unit: s.Unit, format: orPlain(s.Format), heads: s.AllHeads}
	switch s.Unit {
	case layout.UnitState:
		k.cell, k.rows, k.cols = s.CellBytes, s.Rows, s.Cols
		if s.Transposed {
			k.rows, k.cols = k.cols, k.rows
		}
		return k
	case layout.UnitBlock:
		if k.cell = s.CellBytes / uint64(s.g.TokensPerBlock); s.CellBytes%uint64(s.g.TokensPerBlock) != 0 {
			k.cell, k.tokens = s.CellBytes, s.g.TokensPerBlock
		}
		packing := packingParams(s.g)
		for _, name := range slices.Sorted(maps.Keys(packing)) {
			k.packing += fmt.Sprintf(" %s=%d", name, packing[name])
		}
	default:
		k.cell, k.rowTokens = uint64(s.Cols)*s.CellBytes, s.RowTokens
		if key := keyBytes(&s.Plane); 2*key != s.CellBytes {
			k.key = key
		}
		if s.Cols > 1 {
			k.number = s.CellBytes
		}
	}
	k.window = paramWindow.of(s.g)
	return k
}

// fields are the kind by name.
func (k kind) fields() []Field {
	out := []Field{{Name: "unit", Value: k.unit.String()}, {Name: "format", Value: k.format}, {Name: "heads", Value: fmt.Sprint(k.heads)}}
	add := func(name string, value any) { out = append(out, Field{Name: name, Value: fmt.Sprint(value)}) }
	switch k.unit {
	case layout.UnitState:
		add("bytes of a number", k.cell)
		add("rows of state", k.rows)
		add("columns of state", k.cols)
		return out
	case layout.UnitBlock:
		if k.tokens == 0 {
			add("bytes of a head of a token", k.cell)
		} else {
			add("bytes of a head of a page", fmt.Sprintf("%d for %d tokens", k.cell, k.tokens))
		}
		add("params", "["+strings.TrimPrefix(k.packing, " ")+"]")
	default:
		add("bytes of a head of a token", k.cell)
		if k.key != 0 {
			add("bytes of K of that", k.key)
		}
		add("tokens of a row", k.rowTokens)
		if k.number != 0 {
			add("bytes of a number", k.number)
		}
	}
	add("params.window", k.window)
	return out
}

// Hash is the fingerprint: of what is said of the whole model.
func (d Description) Hash() (sum [32]byte) {
	b := append([]byte(describeDomain), 0)
	for _, f := range d {
		if f.Layer != "" {
			continue
		}
		for _, s := range [2]string{f.Name, f.Value} {
			b = binary.LittleEndian.AppendUint64(b, uint64(len(s)))
			b = append(b, s...)
		}
	}
	return sha256.Sum256(b)
}

// Fingerprint is the hash of a layout's description: what two sides compare before a byte moves. Without a dtype there is none: two engines that both
// leave out what their numbers are would be taken for alike. So it is with what the identity has to say.
func (r *Registry) Fingerprint(l *layout.Layout) ([32]byte, error) {
	if l.DType == "" {
		return [32]byte{}, &layout.Error{Field: "dtype", Value: `""`, Problem: "it says nothing of what the cache's numbers are", Remedy: "register the dtype as the engine names it, like bfloat16"}
	}
	if err := r.lacking(l); err != nil {
		return [32]byte{}, err
	}
	d, err := r.Describe(l)
	if err != nil {
		return [32]byte{}, err
	}
	return d.Hash(), nil
}

// Diff names each field in which two descriptions differ, with both values: of the whole model, and of the layers that both have.
func (d Description) Diff(other Description) []string { return d.DiffAs(other, "here", "there") }

// DiffAs is Diff for readers who are at neither side: it says where each value is.
func (d Description) DiffAs(other Description, here, there string) []string {
	var all differences
	ours, theirs := d.byLayer(), other.byLayer()
	// The whole model comes first, then the layers as they come.
	order := slices.SortedFunc(maps.Keys(ours), func(a, b string) int { return cmp.Compare(ours[a].place, ours[b].place) })
	for _, layer := range order {
		a := ours[layer]
		b, both := theirs[layer]
		if !both {
			continue // another stage's
		}
		for _, name := range slices.Compact(slices.Sorted(slices.Values(slices.Concat(a.names, b.names)))) {
			all.add(layer, name, a.quoted(name), b.quoted(name))
		}
	}
	return all.text(func(f *difference) string {
		return fmt.Sprintf("%s: %s %s, %s %s%s", f.field, f.a, here, f.b, there, f.where())
	})
}

// layerFields are the fields of one layer, or of the whole model.
type layerFields struct {
	place  int
	names  []string
	values map[string]string
}

func (l *layerFields) quoted(name string) string {
	v, ok := l.values[name]
	if !ok {
		return "missing"
	}
	return fmt.Sprintf("%q", v)
}

func (d Description) byLayer() map[string]*layerFields {
	out := map[string]*layerFields{"": {values: map[string]string{}}}
	for _, f := range d {
		l := out[f.Layer]
		if l == nil {
			l = &layerFields{place: len(out), values: map[string]string{}}
			out[f.Layer] = l
		}
		l.names, l.values[f.Name] = append(l.names, f.Name), f.Value
	}
	return out
}

// maxDifferences bounds the differences of two caches: they are read by people and travel in error messages.
const maxDifferences = 32

// difference is a field that two caches have with other values, and the layers of which that is so.
type difference struct {
	field, a, b string
	layer       string // the first one; empty: the whole model
	more        int    // layers
}

// differences are those of two caches, each once.
type differences struct {
	all  []difference
	left int // that there was no room for
}

func (d *differences) add(layer, field, a, b string) {
	if a == b {
		return
	}
	for i := range d.all {
		if f := &d.all[i]; f.field == field && f.a == a && f.b == b {
			f.more++
			return
		}
	}
	if len(d.all) == maxDifferences {
		d.left++
		return
	}
	d.all = append(d.all, difference{field: field, a: a, b: b, layer: layer})
}

func (d *differences) text(each func(f *difference) string) []string {
	var out []string
	for i := range d.all {
		out = append(out, each(&d.all[i]))
	}
	if d.left > 0 {
		out = append(out, fmt.Sprintf("and %d more", d.left))
	}
	return out
}

// where says in which layers a difference is.
func (f *difference) where() string {
	switch {
	case f.layer == "":
		return ""
	case f.more == 0:
		return fmt.Sprintf(", in layer %q", f.layer)
	}
	return fmt.Sprintf(", in layer %q and %d more", f.layer, f.more)
}
