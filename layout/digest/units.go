package digest

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/kvspray/kvspray/layout"
)

// MaxUnitBytes bounds the content of a unit, and so the number of weights. Only a whole opaque page
// can be larger.
const MaxUnitBytes = 4 << 20

// Units are cells of one plane: one unit for each row and head, its columns in order. A row is a
// token, or several in a compressed cache, an opaque block, or a row of a state's matrix.
type Units struct {
	Layer string // of the model, as all engines name it
	Role  layout.Role
	// Memory: a cell has the offset Off + block*Block + tile*Tile + row*Row + head*Head + col*Col,
	// with the row in its kernel block and the head from FirstHead on. The block is the entry
	// row/(TileRows*Tiles) of the block table.
	Off                         uint64
	Block, Tile, Row, Head, Col uint64
	TileRows, Tiles             uint64
	Cell, Cols                  uint64 // bytes of a cell, columns of a unit
	FirstHead, Heads            uint64 // of the model
	FirstRow, Rows              uint64 // of the sequence or of the state
}

// Of returns the units of a plane for one block of the table: all rows and heads. layer names the
// layer of the model. Packed K and V are two units, as in caches that keep them apart, if a cell
// has two halves.
func Of(layer string, l *layout.Layer, p *layout.Plane) []Units {
	u := Units{Layer: layer, Role: p.Role, Off: l.Base + p.Offset, Block: l.BlockStride,
		Tile: p.TileStride, Row: p.RowStride, Head: p.HeadStride, Col: p.ColStride,
		TileRows: uint64(p.Rows), Tiles: 1, Cell: p.CellBytes, Cols: uint64(p.Cols),
		FirstHead: uint64(p.FirstHead), Heads: uint64(p.Heads), Rows: uint64(p.Rows)}
	if n := uint64(p.TileRows); n != 0 && n < u.TileRows {
		u.TileRows, u.Tiles = n, u.TileRows/n
	}
	if p.Transposed {
		u.Row, u.Col = u.Col, u.Row
		u.Rows, u.Cols = u.Cols, u.Rows
		u.TileRows = u.Rows
	}
	key := p.KeyBytes
	if key == 0 && p.CellBytes%2 == 0 {
		key = p.CellBytes / 2
	}
	if p.Role != layout.RoleKV || key == 0 || p.Cols != 1 {
		return []Units{u}
	}
	v := u
	u.Role, u.Cell = layout.RoleK, key
	v.Role, v.Cell, v.Off = layout.RoleV, v.Cell-key, v.Off+key
	return []Units{u, v}
}

// Limit keeps heads [first, end) of the model, and no unit if there are none.
func (u *Units) Limit(first, end uint64) {
	from, to := max(first, u.FirstHead), min(end, u.FirstHead+u.Heads)
	if to <= from {
		u.Heads = 0
		return
	}
	u.Off += (from - u.FirstHead) * u.Head
	u.FirstHead, u.Heads = from, to-from
}

// Sum returns the digest of the units in a region, whose blocks a table names.
func (k *Key) Sum(region []byte, u *Units, table []uint32) (uint64, error) {
	if err := u.check(table); err != nil {
		return 0, err
	}
	size := u.Cols * u.Cell
	words := k.upTo((size + 3) / 4)
	heads := make([]uint64, u.Heads)
	for i := range heads {
		heads[i] = k.weight(axisHead, u.FirstHead+uint64(i))
	}
	pieces, piece := u.Cols, u.Cell // of a unit
	if u.Col == u.Cell || u.Cols == 1 {
		pieces, piece = 1, size
	}
	var all uint64
	for row := u.FirstRow; row < u.FirstRow+u.Rows; row++ {
		at := u.at(row, table)
		var ofRow uint64
		for i, weight := range heads {
			var unit uint64
			for n := range pieces {
				off := at + uint64(i)*u.Head + n*u.Col
				if off > uint64(len(region)) || piece > uint64(len(region))-off {
					return 0, refuse("region", len(region),
						fmt.Sprintf("layer %q, %s: bytes [%d, +%d) are outside", u.Layer, u.Role, off, piece),
						"pass the region of the layer, and the engine's own block ids")
				}
				unit = Add(unit, dot(words, n*piece, region[off:off+piece]))
			}
			ofRow = Add(ofRow, mul(weight, unit))
		}
		all = Add(all, mul(k.weight(axisRow, row), ofRow))
	}
	return mul(k.plane(u.Layer, u.Role), all), nil
}

// check refuses units that no plane has, and a table that ends too early.
func (u *Units) check(table []uint32) error {
	switch {
	case u.TileRows == 0 || u.Tiles == 0 || u.Tiles > layout.MaxTokensPerBlock ||
		u.TileRows > layout.MaxTokensPerBlock:
		return refuse("units", fmt.Sprintf("%d kernel blocks of %d rows", u.Tiles, u.TileRows),
			fmt.Sprintf("a block has 1 to %d rows", layout.MaxTokensPerBlock), "use Of")
	case u.Cell == 0 || u.Cols == 0 || u.Cell > MaxUnitBytes || u.Cols > MaxUnitBytes ||
		u.Cell*u.Cols > MaxUnitBytes:
		return refuse("units", fmt.Sprintf("%d columns of %d bytes", u.Cols, u.Cell),
			fmt.Sprintf("a unit has 1 to %d bytes", MaxUnitBytes),
			"leave the opaque pages of this layer out")
	case u.Heads > layout.MaxTokensPerBlock:
		return refuse("units", fmt.Sprintf("%d heads", u.Heads), fmt.Sprintf("a plane has at most %d",
			layout.MaxTokensPerBlock), "use Of")
	case u.Rows > math.MaxUint32 || u.FirstRow > math.MaxUint32 ||
		(u.FirstRow+u.Rows+u.TileRows*u.Tiles-1)/(u.TileRows*u.Tiles) > uint64(len(table)):
		return refuse("table", fmt.Sprintf("%d blocks", len(table)),
			fmt.Sprintf("rows [%d, +%d) are in blocks of %d", u.FirstRow, u.Rows, u.TileRows*u.Tiles),
			"pass the whole block table")
	}
	return nil
}

func (u *Units) at(row uint64, table []uint32) uint64 {
	tile := row / u.TileRows
	return u.Off + uint64(table[tile/u.Tiles])*u.Block + tile%u.Tiles*u.Tile + row%u.TileRows*u.Row
}

// dot is the sum of the words of a unit, each with its weight, of which b holds the bytes from
// byte at on.
func dot(weights []uint64, at uint64, b []byte) uint64 {
	var s wide
	if part := at % 4; part != 0 {
		n := min(4-part, uint64(len(b)))
		s.add(weights[at/4], partial(b[:n])<<(8*part))
		at, b = at+n, b[n:]
	}
	for weights = weights[at/4:]; len(b) >= 4; weights, b = weights[1:], b[4:] {
		s.add(weights[0], uint64(binary.LittleEndian.Uint32(b)))
	}
	if len(b) > 0 {
		s.add(weights[0], partial(b))
	}
	return s.mod()
}

// partial is a word of which b has the low bytes.
func partial(b []byte) uint64 {
	var w [4]byte
	copy(w[:], b)
	return uint64(binary.LittleEndian.Uint32(w[:]))
}

func refuse(field string, value any, problem, remedy string) error {
	return &layout.Error{Field: field, Value: fmt.Sprint(value), Problem: problem, Remedy: remedy}
}
