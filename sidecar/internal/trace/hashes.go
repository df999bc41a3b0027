package trace

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transport"
)

// Hashes writes the SHA-256 of every page that a transfer moved, each side from its own memory: the
// receiver at the commit, before its engine receives the result; the sender after the commit of a
// grant, while it still holds the source.
type Hashes struct{ *Lines }

// PageHash is a line of trace.block_hashes. Both sides write the same line, except for Side.
type PageHash struct {
	Side  string `json:"side"`
	Xfer  string `json:"xfer"`
	Hash  string `json:"hash"`
	Dest  string `json:"dest"`  // the destination lease: one source may serve several
	Rank  string `json:"rank"`  // of the source's engine: several may send parts of one page
	Group int    `json:"group"` // cache group; like the following fields, of the receiver
	Layer int    `json:"layer"` // of the group
	Block uint32 `json:"block"` // ordinal in the prompt
	Bytes uint64 `json:"bytes"`
	Sum   string `json:"sha256"`
}

// Received writes the pages of a part that was received.
func (h Hashes) Received(l *exec.ReceivePart, plan *parseblock.Plan) {
	if !h.on() {
		return
	}
	h.pages(PageHash{Side: string(metrics.SideDestination), Xfer: l.Expect.Key.Xfer.String(),
		Hash: hex.EncodeToString(l.Expect.Key.Hash[:8]),
		Dest: l.Lease().String(), Rank: l.Part.Rank}, plan, l.Grant.Memory)
}

// Sent writes the pages of a part that was sent.
func (h Hashes) Sent(s *exec.SendPart, plan *parseblock.Plan) {
	if !h.on() {
		return
	}
	h.pages(PageHash{Side: string(metrics.SideSource), Xfer: s.Key.Xfer.String(),
		Hash: hex.EncodeToString(s.Key.Hash[:8]),
		Dest: s.Dest.String(), Rank: s.Worker.Place.Rank()}, plan, s.Origin.Memory)
}

// pages cuts each layer's segment into its pages, which are in token order.
func (h Hashes) pages(line PageHash, plan *parseblock.Plan, m transport.Memory) {
	var out []any
	flat := 0
	sp := plan.Space()
	groups := plan.Receiver().Groups
	for gi := range groups {
		for li := range groups[gi].Layers {
			r, bytes := sp.Segment(flat)
			segment := flat
			flat++
			if bytes == 0 {
				continue
			}
			blocks, err := m.Resolve(nil, r)
			if err != nil {
				return
			}
			rd := &blockReader{blocks: blocks}
			for off := uint64(0); off < bytes; {
				block, n := plan.Page(segment, off)
				sum, err := rd.sum(n)
				if err != nil {
					return
				}
				line.Group, line.Layer, line.Block, line.Bytes, line.Sum = gi, li, block, n,
					hex.EncodeToString(sum)
				out = append(out, line)
				off += n
			}
		}
	}
	h.Put(out...)
}

// blockReader reads memory in order.
type blockReader struct {
	blocks []mem.Block
	buf    [64 << 10]byte
}

func (r *blockReader) sum(n uint64) ([]byte, error) {
	h := sha256.New()
	for n > 0 {
		if len(r.blocks) == 0 {
			return nil, fmt.Errorf("page: %d bytes missing", n)
		}
		b := &r.blocks[0]
		k := min(n, b.Len, uint64(len(r.buf)))
		if err := b.Region.ReadAt(r.buf[:k], b.Off); err != nil {
			return nil, err
		}
		_, _ = h.Write(r.buf[:k]) // a hash never fails
		b.Off, b.Len, n = b.Off+k, b.Len-k, n-k
		if b.Len == 0 {
			r.blocks = r.blocks[1:]
		}
	}
	return h.Sum(nil), nil
}
