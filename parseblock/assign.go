package parseblock

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kvspray/kvspray/layout"
)

// Share is the part of a receiver's cache that one source sends.
type Share struct {
	Source int // index into the sources of Assign
	// a bit per role that the source sends, for each flattened layer of the receiver
	roles []uint32
}

// Layers counts the layers of the receiver to which the share contributes.
func (s *Share) Layers() int {
	n := 0
	for _, r := range s.roles {
		if r != 0 {
			n++
		}
	}
	return n
}

// bitOf is the role's bit. Packed K and V set both bits, so that packed and unpacked sources
// compare as equal.
func bitOf(r layout.Role) uint32 {
	if r == layout.RoleKV {
		return 1<<layout.RoleK | 1<<layout.RoleV
	}
	return 1 << r
}

// Part returns the layer of the model to which a layer of a layout belongs: the name up to '#'. An
// engine that keeps K and V, or values and scales, in separate tensors registers several layers,
// "x#k" and "x#v".
func Part(name string) string {
	model, _, _ := strings.Cut(name, "#")
	return model
}

// link pairs the planes of every flattened layer of dst with those of src, limited to the share if
// there is one. Layers that src does not have get no pairs (pipeline parallelism).
func link(reg *Registry, src, dst *layout.Layout, share *Share) ([][]pair, error) {
	if src.DType != dst.DType {
		return nil, &layout.Error{Field: "dtype", Value: fmt.Sprintf("%q and %q", src.DType, dst.DType),
			Problem: "transfers copy bytes without conversion", Remedy: "run prefill and decode with the " +
				"same cache dtype"}
	}
	out := make([][]pair, dst.NumLayers())
	if share != nil && len(share.roles) != len(out) {
		return nil, &layout.Error{Field: "share", Value: fmt.Sprintf("%d layers", len(share.roles)),
			Problem: fmt.Sprintf("the receiver has %d", len(out)), Remedy: "use the share that Assign " +
				"made for this receiver"}
	}
	have, err := byModelLayer(reg, src)
	if err != nil {
		return nil, err
	}
	want, err := byModelLayer(reg, dst)
	if err != nil {
		return nil, err
	}
	var unlike differences
	for _, name := range want.names {
		from, ok := have.planes[name]
		if !ok {
			continue
		}
		pairs, err := pairUp(from, want.planes[name], &unlike)
		if err != nil {
			return nil, err
		}
		kept := pairs[:0]
		for i := range pairs {
			p := &pairs[i]
			flat := p.to.flat
			if share != nil {
				switch share.roles[flat] & bitOf(p.role) {
				case 0:
					continue
				case bitOf(p.role):
				default:
					return nil, &layout.Error{Field: fmt.Sprintf("layer %q", name), Value: p.role.String(),
						Problem: "K and V come from two sources",
						Remedy:  "use the share that Assign made for these layouts"}
				}
			}
			kept = append(kept, *p)
			// The planes of a layer are adjacent in the list, and so are their pairs.
			k := len(out[flat]) + 1
			out[flat] = kept[len(kept)-k : len(kept) : len(kept)]
			if (out[flat][0].unit == layout.UnitState) != (p.unit == layout.UnitState) {
				return nil, refuseMixed(name, p.unit)
			}
		}
	}
	return out, unlike.err()
}

func refuseMixed(layer string, unit layout.Unit) error {
	return &layout.Error{Field: fmt.Sprintf("layer %q", layer), Value: unit.String(),
		Problem: "holds tokens and state at once", Remedy: "register them as two layers"}
}

// modelLayers holds the planes of a layout by layer of the model.
type modelLayers struct {
	names  []string // in the layout's order
	planes map[string][]sited
}

func byModelLayer(reg *Registry, l *layout.Layout) (*modelLayers, error) {
	n := l.NumLayers()
	m := &modelLayers{names: make([]string, 0, n), planes: make(map[string][]sited, n)}
	var all []sited
	var planes []layout.Plane
	flat, table := 0, -1
	for gi := range l.Groups {
		g := &l.Groups[gi]
		if !g.SameTable {
			table++
		}
		for li := range g.Layers {
			ly := &g.Layers[li]
			// Layers with equal values here have the same planes.
			if li == 0 || ly.PageBytes != g.Layers[li-1].PageBytes ||
				ly.BlockStride != g.Layers[li-1].BlockStride {
				var err error
				if planes, err = reg.Planes(planes[:0], g, ly); err != nil {
					return nil, fmt.Errorf("groups[%d].layers[%d]: %w", gi, li, err)
				}
			}
			name := Part(ly.Name)
			of, seen := m.planes[name]
			if !seen {
				m.names = append(m.names, name)
				if cap(all)-len(all) < len(planes) {
					all = make([]sited, 0, (n-flat)*len(planes))
				}
				of, all = all[len(all):len(all):len(all)+len(planes)], all[:len(all)+len(planes)]
			}
			for i := range planes {
				of = append(of, sited{Plane: planes[i], g: g, l: ly, gi: gi, table: table, flat: flat})
			}
			m.planes[name] = of
			flat++
		}
	}
	return m, nil
}

// holding is the part of one plane of the receiver that one source could send.
type holding struct {
	source     int
	first, end uint64 // heads of the model
}

// planeKey names a plane of the receiver.
type planeKey struct {
	flat int
	role layout.Role
}

// Division is the part of a receiver's cache that each source could send. It depends on the layouts
// alone, so one Division serves every prompt. It is read-only and safe for concurrent use.
type Division struct {
	sources, layers int
	want            []wanted
	held            map[planeKey][]holding
}

// wanted is a plane of the receiver; packed K and V are two.
type wanted struct {
	planeKey
	plane sited
}

// NewDivision pairs the planes of every source with those of the receiver.
func NewDivision(reg *Registry, sources []*layout.Layout, dst *layout.Layout) (*Division, error) {
	planes, err := byModelLayer(reg, dst)
	if err != nil {
		return nil, err
	}
	d := &Division{sources: len(sources), layers: dst.NumLayers(), held: make(map[planeKey][]holding)}
	for si, src := range sources {
		links, err := link(reg, src, dst, nil)
		if err != nil {
			if len(sources) > 1 {
				err = fmt.Errorf("source %d: %w", si, err)
			}
			return nil, err
		}
		for flat, pairs := range links {
			for i := range pairs {
				p := &pairs[i]
				for _, role := range apart(p.role) {
					k := planeKey{flat, role}
					d.held[k] = append(d.held[k], holding{source: si, first: p.head0, end: p.head0 + p.heads})
				}
			}
		}
	}
	for _, name := range planes.names {
		for i := range planes.planes[name] {
			p := &planes.planes[name][i]
			for _, role := range apart(p.Role) {
				d.want = append(d.want, wanted{planeKey{p.flat, role}, *p})
			}
		}
	}
	return d, nil
}

var (
	kAndV    = []layout.Role{layout.RoleK, layout.RoleV}
	allRoles = func() (all [layout.RolePage + 1]layout.Role) {
		for r := range all {
			all[r] = layout.Role(r)
		}
		return all
	}()
)

// apart returns the role, or K and V for packed K and V.
func apart(r layout.Role) []layout.Role {
	if r == layout.RoleKV {
		return kAndV
	}
	return allRoles[r : r+1]
}

// Assign chooses the sources of every plane of the receiver, so that each head comes from exactly
// one source. Ranks with equal content (MLA, replicated heads if TP exceeds the KV heads) are
// interchangeable: Assign prefers a rank that already contributes, then the rank with the least
// load. A nil load counts as no load. Assign fails if no source has some part.
func Assign(reg *Registry, sources []*layout.Layout, dst *layout.Layout,
	load func(source int) uint64) ([]Share, error) {
	d, err := NewDivision(reg, sources, dst)
	if err != nil {
		return nil, err
	}
	return d.Assign(load)
}

// Assign is like the function Assign, for the sources and the receiver of the division.
func (d *Division) Assign(load func(source int) uint64) ([]Share, error) {
	loads := make([]uint64, d.sources)
	shares := make([]Share, d.sources)
	for i := range shares {
		shares[i] = Share{Source: i, roles: make([]uint32, d.layers)}
		if load != nil {
			loads[i] = load(i)
		}
	}
	gives := make([]bool, d.sources)
	rank := func(source int) int {
		if gives[source] {
			return 0
		}
		return 1
	}
	var hs []holding
	for w := range d.want {
		k, p := d.want[w].planeKey, &d.want[w].plane
		hs = append(hs[:0], d.held[k]...)
		// Of replicas, prefer the source that already contributes to this receiver: each further
		// source is one more to wait for, and a layer's V must come with its K. Then prefer the
		// least loaded.
		slices.SortStableFunc(hs, func(a, b holding) int {
			return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(rank(a.source), rank(b.source)),
				cmp.Compare(loads[a.source], loads[b.source]))
		})
		at, end := uint64(p.FirstHead), uint64(p.FirstHead)+uint64(p.Heads)
		for i, h := range hs {
			switch {
			case i > 0 && h.first == hs[i-1].first && h.end == hs[i-1].end:
				continue // a replica
			case h.first > at:
				return nil, refusePair(nil, p, k.role.String(), fmt.Sprintf("heads [%d, %d)", at, h.first),
					"no source has them", "wait for every rank of the prefill engine")
			case h.first < at:
				return nil, refusePair(nil, p, k.role.String(), fmt.Sprintf("heads [%d, %d)", h.first, h.end),
					"two sources overlap in part",
					"divide the heads of the prefill engine evenly")
			}
			shares[h.source].roles[k.flat] |= bitOf(k.role)
			gives[h.source] = true
			at = h.end
		}
		if at < end {
			return nil, refusePair(nil, p, k.role.String(), fmt.Sprintf("heads [%d, %d)", at, end),
				"no source has them", "wait for every rank and stage of the prefill engine")
		}
	}
	return slices.DeleteFunc(shares, func(s Share) bool { return s.Layers() == 0 }), nil
}
