package plans

import (
	"cmp"
	"slices"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
)

// TokenRange is tokens [start, end) of a prompt.
type TokenRange = [2]uint32

// Recompute names the tokens that a failed transfer has not delivered, in order. None means all of
// them: without a grant, and if the engine could not continue in the middle of the prompt because
// it would need data of earlier tokens that never moves.
//
// Only the last grant counts, which is fenced: a landed chunk of it was whole and valid when it
// landed, and is not written any more. Other chunks may be torn, or stem from an earlier grant.
func (p *Planner) Recompute(lands []*exec.ReceivePart) (missing []TokenRange) {
	for _, l := range lands {
		plan := Received(l)
		sp, perBlock, resumes := plan.Space(), blockTokens(plan.Receiver()), resumable(p.reg,
			plan.Receiver())
		if !resumes {
			return nil
		}
		for r := range l.Grant.Receipt.Missing() {
			for r.Count > 0 {
				seg := sp.SegmentOf(r.First)
				chunks, bytes := sp.Segment(seg)
				end := min(r.End(), chunks.End())
				lo, _ := plan.Page(seg, uint64(r.First-chunks.First)*transfer.ChunkBytes)
				hi, _ := plan.Page(seg, min(uint64(end-chunks.First)*transfer.ChunkBytes, bytes)-1)
				n := perBlock[seg]
				missing = append(missing, TokenRange{lo * n, min((hi+1)*n, plan.Tokens())})
				r = transfer.Range{First: end, Count: r.End() - end}
			}
		}
	}
	return joined(missing)
}

// blockTokens returns the tokens per block, by flattened layer.
func blockTokens(l *layout.Layout) (out []uint32) {
	for gi := range l.Groups {
		for range l.Groups[gi].Layers {
			out = append(out, l.Groups[gi].TokensPerBlock)
		}
	}
	return out
}

// resumable reports whether an engine with the front of a prompt in its cache can compute the rest.
// It cannot if a layer has a recurrent state, or sees a window, because only the end of the prompt
// moves for those.
func resumable(reg *parseblock.Registry, l *layout.Layout) bool {
	for gi := range l.Groups {
		g := &l.Groups[gi]
		// the layers of another stage are unknown here
		if g.Params["window"] > 0 || len(g.Layers) == 0 {
			return false
		}
		for li := range g.Layers {
			planes, err := reg.Planes(nil, g, &g.Layers[li])
			if err != nil || slices.ContainsFunc(planes,
				func(p layout.Plane) bool { return p.Unit == layout.UnitState }) {
				return false
			}
		}
	}
	return true
}

// joined sorts ranges and merges adjacent ones.
func joined(in []TokenRange) []TokenRange {
	slices.SortFunc(in, func(a, b TokenRange) int { return cmp.Compare(a[0], b[0]) })
	out := in[:0]
	for _, r := range in {
		if k := len(out) - 1; k >= 0 && r[0] <= out[k][1] {
			out[k][1] = max(out[k][1], r[1])
			continue
		}
		out = append(out, r)
	}
	return out
}
