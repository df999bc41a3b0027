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

// The pairs of a layout's identity: properties that change the meaning of a token's KV bytes and
// that pages do not show. An engine must register the pairs of needed. It may add others, and each
// counts.
const (
	IdentityModel   = "model_config" // hash of the model's configuration
	IdentityWeights = "weights"      // generation included: a reload changes it
	IdentityLayers  = "layers"       // of the whole model, not of a pipeline stage
	IdentityRope    = "rope"         // scaling included
	// kinds of cache groups of the whole model: a pipeline stage may lack a kind.
	IdentityGroups   = "groups"
	IdentityHeadSize = "head_size" // elements of a head, also for opaque pages
	// tokens at the end of a prompt that prefill leaves to decode.
	IdentityBackoff = "backoff"
	// draft model, method, tokens: they add layers and history.
	IdentitySpec = "speculative"
	// of opaque pages: the vector units, and the kernel's block size if the packing depends on it.
	IdentityPacking  = "packing"
	IdentityDType    = "cache_dtype" // as the engine names it
	IdentityOrder    = "byte_order"  // "little" where it is left out
	IdentityEngine   = "engine"      // opaque pages of two engines differ
	defaultByteOrder = "little"      // of every platform that serves models today
	// separates the hash from other hashes and from later versions.
	describeDomain = "kvspray-cache-v3"
)

// needed lists the pairs that a fingerprint requires: two engines that both omit a pair would
// compare as equal in it. A model without a property has an empty value or "none". Head size is
// required here although planning compares the cells of each layer, because a pipeline stage may
// share no layer with the other side.
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

// lacking refuses a layout whose identity omits required pairs, and names all of them. Opaque pages
// require the packing, because nothing else shows it.
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
		need(IdentityPacking, "vector units of opaque pages, and the kernel's block size where it "+
			"depends on it")
	}
	if len(keys) == 0 {
		return nil
	}
	return &layout.Error{Field: "identity", Value: "without " + strings.Join(keys, ", "),
		Problem: "two engines that both omit these would compare as equal",
		Remedy: `register these strings ("" if the model lacks the property): ` +
			strings.Join(remedies, ", ")}
}

// opaque reports whether the layout has pages of unknown content.
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

// numberField is the field of planes whose cells are numbers that are not adjacent.
const numberField = "bytes of a number"

// Field is one line of a description.
type Field struct {
	Name, Value string
	Layer       string // layer of the model; empty: the whole model
}

// Description is the meaning of a cache's bytes. It excludes tensor and pipeline parallelism, block
// size, orders and strides: a plan bridges them or refuses them by name.
//
// Every pipeline stage describes the whole model equally, and the hash of that part is the
// fingerprint. Only the stages with a layer can describe its kind of cache, and some stages lack a
// kind. Diff therefore compares layer by layer, for layers that both sides have, and so does
// planning, which refuses any difference.
type Description []Field

// Describe returns the canonical description of a layout: dtype, byte order, identity, and the kind
// of cache of each layer.
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
			// A cell without halves is never paired with separate K and V.
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

// kind describes the cells of a plane without their addresses. Planes of equal kind can be copied
// to one another.
type kind struct {
	unit   layout.Unit
	format string
	heads  uint32
	// bytes of a head of a token, or of an element of a state; of an opaque page, for all its
	// tokens
	cell       uint64
	key        uint64 // bytes of K in a cell of packed K and V, if it is not the half
	tokens     uint32 // of an opaque page whose bytes are not a multiple of its tokens
	number     uint64 // bytes of an element, if a cell's elements are not adjacent
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
		if k.cell = s.CellBytes / uint64(s.g.TokensPerBlock); s.CellBytes%uint64(s.g.TokensPerBlock) !=
			0 {
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

// fields lists the kind's fields by name.
func (k kind) fields() []Field {
	out := []Field{{Name: "unit", Value: k.unit.String()}, {Name: "format", Value: k.format},
		{Name: "heads", Value: fmt.Sprint(k.heads)}}
	add := func(name string, value any) {
		out = append(out, Field{Name: name,
			Value: fmt.Sprint(value)})
	}
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
			add("bytes of K in it", k.key)
		}
		add("tokens of a row", k.rowTokens)
		if k.number != 0 {
			add(numberField, k.number)
		}
	}
	add("params.window", k.window)
	return out
}

// Hash is the fingerprint: the hash of the description of the whole model.
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

// Fingerprint is the hash of a layout's description. Two sides compare it before a byte moves. A
// layout without a dtype or a required pair of the identity has no fingerprint, because two engines
// that both omit it would compare as equal.
func (r *Registry) Fingerprint(l *layout.Layout) ([32]byte, error) {
	if l.DType == "" {
		return [32]byte{}, &layout.Error{Field: "dtype", Value: `""`, Problem: "the type of the " +
			"cache's elements is unknown",
			Remedy: "register the dtype as the engine names it, like bfloat16"}
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

// Diff names each differing field with both values, for the whole model and for the layers that
// both sides have.
func (d Description) Diff(other Description) []string { return d.DiffAs(other, "here", "there") }

// DiffAs is Diff with names for the two sides.
func (d Description) DiffAs(other Description, here, there string) []string {
	var all differences
	ours, theirs := d.byLayer(), other.byLayer()
	// The whole model comes first, then the layers in order.
	order := slices.SortedFunc(maps.Keys(ours),
		func(a, b string) int { return cmp.Compare(ours[a].place, ours[b].place) })
	for _, layer := range order {
		a := ours[layer]
		b, both := theirs[layer]
		if !both {
			continue // a layer of another pipeline stage
		}
		for _, name := range slices.Compact(slices.Sorted(slices.Values(slices.Concat(a.names,
			b.names)))) {
			if strings.HasSuffix(name, numberField) && (!a.has(name) || !b.has(name)) {
				continue // a plan takes the numbers of the other side one by one
			}
			all.add(layer, name, a.quoted(name), b.quoted(name))
		}
	}
	return all.text(func(f *difference) string {
		return fmt.Sprintf("%s: %s %s, %s %s%s", f.field, f.a, here, f.b, there, f.where())
	})
}

// layerFields holds the fields of one layer, or of the whole model.
type layerFields struct {
	place  int
	names  []string
	values map[string]string
}

func (l *layerFields) has(name string) bool {
	_, ok := l.values[name]
	return ok
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

// maxDifferences bounds the reported differences of two caches: people read them, and error
// messages carry them.
const maxDifferences = 32

// difference is a field whose values differ between two caches, with the affected layers.
type difference struct {
	field, a, b string
	layer       string // the first layer; empty: the whole model
	more        int    // further layers
}

// differences lists each difference of two caches once.
type differences struct {
	all  []difference
	left int // count of omitted differences
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

// where names the layers of a difference.
func (f *difference) where() string {
	switch {
	case f.layer == "":
		return ""
	case f.more == 0:
		return fmt.Sprintf(", in layer %q", f.layer)
	}
	return fmt.Sprintf(", in layer %q and %d more", f.layer, f.more)
}
