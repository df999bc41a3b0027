package gpu

import (
	"sync"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// packablePieces reports whether kernels can move the pieces: in units of 16 bytes.
func packablePieces(parts []device.Piece) bool {
	for i := range parts {
		if p := &parts[i]; (uint64(p.Host)|uint64(p.Dev)|p.Len)%device.Align != 0 {
			return false
		}
	}
	return true
}

func pieceBytes(parts []device.Piece) (n uint64) {
	for i := range parts {
		n += parts[i].Len
	}
	return n
}

var pieceLists = sync.Pool{New: func() any {
	s := make([]device.Piece, 0, mappedPieces)
	return &s
}}

func bytesOf(list []hostPiece) (n uint64) {
	for i := range list {
		n += list[i].host.Len
	}
	return n
}

// buffered moves a list through staging slots.
func buffered(u *GPU, dir device.Direction, list []hostPiece) error {
	dst, src := make([]mem.Block, len(list)), make([]mem.Block, len(list))
	for i := range list {
		dst[i], src[i] = list[i].far, list[i].host
	}
	if dir == device.DeviceToHost {
		dst, src = src, dst
	}
	return u.Move(dst, src)
}

// hostPiece is a piece between host memory and a GPU, contiguous on both sides.
type hostPiece struct {
	u         *GPU
	dir       device.Direction
	host, far mem.Block
	shift     []cuda.Ptr // device.Piece.Shift
}

// shiftList sets the shifts of a list by the regions of its pieces.
func shiftList(list []hostPiece, of func(*mem.Region) ([]cuda.Ptr, error)) (err error) {
	for i := range list {
		if i > 0 && list[i].far.Region == list[i-1].far.Region {
			list[i].shift = list[i-1].shift
		} else if list[i].shift, err = of(list[i].far.Region); err != nil {
			return err
		}
	}
	return nil
}

// shiftParts sets the shifts of parts, which were cut from list in its order.
func shiftParts(parts []device.Piece, list []hostPiece) {
	i, left := 0, list[0].host.Len
	for k := range parts {
		if left == 0 {
			i++
			left = list[i].host.Len
		}
		parts[k].Shift = list[i].shift
		left -= parts[k].Len
	}
}

var hostPieceLists = sync.Pool{New: func() any { s := make([]hostPiece, 0, 256); return &s }}

// hostPiecesOf walks two lists of equal length together, and joins adjacent pieces. ok: all pieces
// are between a GPU and mapped host memory.
func hostPiecesOf(out []hostPiece, dst, src []mem.Block) ([]hostPiece, bool) {
	var di, si int
	var doff, soff uint64
	for di < len(dst) && si < len(src) {
		d, s := &dst[di], &src[si]
		n := min(d.Len-doff, s.Len-soff)
		c := hostPiece{dir: device.HostToDevice, host: mem.Block{Region: s.Region, Off: s.Off + soff,
			Len: n}, far: mem.Block{Region: d.Region, Off: d.Off + doff, Len: n}}
		if d.Region.Device() == nil {
			c.dir, c.host, c.far = device.DeviceToHost, c.far, c.host
		}
		if n > 0 {
			k := len(out) - 1
			if k >= 0 && follows(&out[k].host, &c.host) && follows(&out[k].far, &c.far) {
				out[k].host.Len += n
				out[k].far.Len += n
			} else {
				u, ok := c.far.Region.Device().(*GPU)
				if _, mapped := c.host.Region.Bytes(); !ok || !mapped {
					return out, false
				}
				c.u = u
				out = append(out, c)
			}
		}
		if doff += n; doff == d.Len {
			di, doff = di+1, 0
		}
		if soff += n; soff == s.Len {
			si, soff = si+1, 0
		}
	}
	if di < len(dst) || si < len(src) {
		return out, false
	}
	for i := range out {
		c := &out[i]
		if c.host.Region.Check(c.host.Off, c.host.Len) != nil || c.far.Region.Check(c.far.Off,
			c.far.Len) != nil {
			return out, false
		}
	}
	return out, true
}

func follows(a, b *mem.Block) bool { return a.Region == b.Region && a.Off+a.Len == b.Off }
