package parseblock

import (
	"fmt"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/layout/digest"
)

// Content is what the transfer of a prompt moves, in terms of the model: heads and rows of the
// planes of each layer. It follows from the layouts, the share, the tokens and the skip by other
// rules than a Plan, so that both sides can verify the bytes that a plan has moved. Read-only.
type Content struct {
	parts  map[contentKey]contentPart
	tokens uint32
}

type contentKey struct {
	layer string // of the model
	role  layout.Role
}

// contentPart is heads [firstHead, endHead) of the model, rows [firstRow, endRow) of the sequence.
type contentPart struct{ firstHead, endHead, firstRow, endRow uint64 }

// Held is the part of a content in one layer of an engine.
type Held struct {
	digest.Units
	Region layout.RegionIndex
	Table  int // block table of the engine
	Entry  int // the first entry of the table that counts: that of a state's block
}

// NewContent returns the content of a share, or without one everything that both layouts have.
// tokens and skip are those of NewPlan.
func NewContent(reg *Registry, src, dst *layout.Layout, share *Share, tokens uint32,
	skip []uint32) (*Content, error) {
	if tokens == 0 || len(skip) != dst.Tables() ||
		share != nil && len(share.roles) != dst.NumLayers() {
		return nil, &layout.Error{Field: "content", Value: fmt.Sprintf("%d tokens, %d tables", tokens,
			len(skip)), Problem: fmt.Sprintf("the receiver has %d tables and %d layers", dst.Tables(),
			dst.NumLayers()), Remedy: "use the arguments of the plan"}
	}
	have, err := unitsOf(reg, src)
	if err != nil {
		return nil, err
	}
	want, err := unitsOf(reg, dst)
	if err != nil {
		return nil, err
	}
	c := &Content{parts: make(map[contentKey]contentPart, len(want)), tokens: tokens}
	sources := make(map[contentKey]*contentPlane, len(have))
	for i := range have {
		sources[have[i].key()] = &have[i]
	}
	for i := range want {
		to := &want[i]
		from, ok := sources[to.key()]
		if !ok || share != nil && share.roles[to.flat]&bitOf(to.Role) == 0 {
			continue
		}
		part := contentPart{firstHead: max(from.FirstHead, to.FirstHead),
			endHead: min(from.FirstHead+from.Heads, to.FirstHead+to.Heads)}
		part.firstRow, part.endRow = to.rows(from, tokens, skip[to.table])
		if part.firstHead < part.endHead && part.firstRow < part.endRow {
			c.parts[to.key()] = part
		}
	}
	return c, nil
}

// contentPlane is the units of one plane of a layout.
type contentPlane struct {
	digest.Units
	plane            layout.Plane
	group            *layout.Group
	flat, reg, table int
}

func (p *contentPlane) key() contentKey { return contentKey{p.Layer, p.Role} }

// unitsOf lists the units of all planes of a layout.
func unitsOf(reg *Registry, l *layout.Layout) ([]contentPlane, error) {
	layers, err := byModelLayer(reg, l)
	if err != nil {
		return nil, err
	}
	var out []contentPlane
	for _, name := range layers.names {
		for i := range layers.planes[name] {
			s := &layers.planes[name][i]
			for _, u := range digest.Of(name, s.l, &s.Plane) {
				out = append(out, contentPlane{Units: u, plane: s.Plane, group: s.g, flat: s.flat,
					reg: s.l.Region, table: s.table})
			}
		}
	}
	return out, nil
}

// rows returns the rows that the receiver's plane lacks and the source has.
func (p *contentPlane) rows(from *contentPlane, tokens, skip uint32) (first, end uint64) {
	if skip >= tokens {
		return 0, 0
	}
	if p.plane.Unit == layout.UnitState {
		return 0, p.Rows
	}
	each := uint64(max(p.plane.RowTokens, 1))
	end = uint64(tokens) / each
	if p.plane.Unit == layout.UnitBlock {
		end = (uint64(tokens) + each - 1) / each
	}
	// Both sides still have the whole block in which the window begins.
	seen := WindowStart(p.group, tokens)
	first = uint64(max(skip, seen-seen%p.group.TokensPerBlock, seen-seen%from.group.TokensPerBlock))
	return first / each, end
}

// In lists where a layout has the content.
func (c *Content) In(reg *Registry, l *layout.Layout) ([]Held, error) {
	planes, err := unitsOf(reg, l)
	if err != nil {
		return nil, err
	}
	var out []Held
	for i := range planes {
		p := &planes[i]
		part, ok := c.parts[p.key()]
		if !ok {
			continue
		}
		h := Held{Units: p.Units, Region: p.reg, Table: p.table}
		if h.Limit(part.firstHead, part.endHead); h.Heads == 0 {
			continue
		}
		h.FirstRow, h.Rows = part.firstRow, part.endRow-part.firstRow
		if p.plane.Unit == layout.UnitState {
			h.Entry = int((c.tokens - 1) / p.group.TokensPerBlock)
		}
		out = append(out, h)
	}
	return out, nil
}

// Digest returns the digest of the content in one engine's regions. tables are those of the engine.
func (c *Content) Digest(reg *Registry, key *digest.Key, l *layout.Layout, regions [][]byte,
	tables [][]uint32) (uint64, error) {
	held, err := c.In(reg, l)
	if err != nil {
		return 0, err
	}
	var all uint64
	for i := range held {
		h := &held[i]
		if h.Region >= len(regions) || h.Table >= len(tables) || h.Entry > len(tables[h.Table]) {
			return 0, &layout.Error{Field: "content", Value: fmt.Sprintf("%d regions, %d tables",
				len(regions), len(tables)), Problem: fmt.Sprintf("layer %q is in region %d, its block %d is "+
				"in table %d", h.Layer, h.Region, h.Entry, h.Table),
				Remedy: "pass all regions and block tables of the engine"}
		}
		n, err := key.Sum(regions[h.Region], &h.Units, tables[h.Table][h.Entry:])
		if err != nil {
			return 0, err
		}
		all = digest.Add(all, n)
	}
	return all, nil
}
