package explain

import (
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
)

// Side describes how one engine serves the model.
type Side struct {
	Block int    `json:"block"` // tokens of a block
	TP    int    `json:"tp"`
	Order string `json:"order"` // strategy of its attention layers
	DType string `json:"dtype"` // bf16, or fp8
}

// Orders are the strategies of attention layers that can be explained.
var Orders = []string{parseblock.PackedNHD, parseblock.PackedHND}

// The dtypes of a cache that can be explained.
const (
	bf16 = "bf16"
	fp8  = "fp8"
)

// Bounds of requests.
const (
	MaxTokens = 1 << 24
	MaxTP     = 256
)

// check refuses impossible values. flag is the prefix of the flags: "--" or "--to-".
func (s *Side) check(m *Model, flag string) error {
	if s.Block < 1 || s.Block > layout.MaxTokensPerBlock {
		return fmt.Errorf("%sblock %d: a block has 1 to %d tokens, 16 in most engines", flag, s.Block,
			layout.MaxTokensPerBlock)
	}
	if s.TP < 1 || s.TP > MaxTP {
		return fmt.Errorf("%stp %d: an engine has 1 to %d ranks", flag, s.TP, MaxTP)
	}
	if s.DType != bf16 && s.DType != fp8 {
		return fmt.Errorf("%sdtype %q: bf16 or fp8", flag, s.DType)
	}
	if s.DType != fp8 && m.DType() == fp8 {
		return fmt.Errorf("%sdtype %s: the pages of DeepSeek-V4 are known in fp8 only, 584 bytes an "+
			"entry; give %sdtype fp8", flag, s.DType, flag)
	}
	for _, o := range Orders {
		if s.Order == o {
			return nil
		}
	}
	return fmt.Errorf("%sorder %q: one of %q", flag, s.Order, Orders)
}

// remarks name the numbers of ranks over which vLLM and SGLang do not divide these heads: in both,
// all ranks have equally many heads, or equally many ranks share a head. A plan exists for any
// number: heads are divided as evenly as possible.
func (s *Side) remarks(m *Model, name string) (out []string) {
	add := func(heads string) {
		if remark := fmt.Sprintf("%s: no engine known to us spreads %s heads over %d ranks", name, heads,
			s.TP); !slices.Contains(out, remark) {
			out = append(out, remark)
		}
	}
	for i := range m.Caches {
		switch c := &m.Caches[i]; {
		case c.KVHeads > 0 && c.KVHeads%s.TP != 0 && s.TP%c.KVHeads != 0:
			add(fmt.Sprintf("%d KV", c.KVHeads))
		case c.VHeads > 0 && (c.VHeads%s.TP != 0 || c.KHeads > 1 && c.KHeads%s.TP != 0):
			add(fmt.Sprintf("%d key and %d value", c.KHeads, c.VHeads))
		}
	}
	return out
}

// Layout is the registration of a rank for prompts of the given tokens: dense layers, one after
// another in one region.
func (m *Model) Layout(s Side, rank, tokens int) (*layout.Layout, uint64, error) {
	l := &layout.Layout{Model: m.Name, DType: s.DType}
	elem := int64(2)
	if s.DType == fp8 {
		elem = 1
	}
	var at uint64
	first, pad := 0, int64(1)
	add := func(prefix, strategy string, layers, block int, page int64, params map[string]int64) {
		params["tp_size"], params["tp_rank"] = int64(s.TP), int64(rank)
		stride := (page + pad - 1) / pad * pad
		blocks := uint64((tokens-1)/block + 1)
		g := layout.Group{TokensPerBlock: uint32(block), NumBlocks: uint32(blocks), Strategy: strategy,
			Params: params}
		for i := range layers {
			g.Layers = append(g.Layers, layout.Layer{Name: fmt.Sprintf("%s.%d", prefix, first+i),
				Index: first + i, Base: at, BlockStride: uint64(stride), PageBytes: uint64(page)})
			at += blocks * uint64(stride)
		}
		l.Groups = append(l.Groups, g)
	}
	for ci := range m.Caches {
		c := &m.Caches[ci]
		n := int64(s.Block)
		window := func(p map[string]int64) map[string]int64 {
			if c.Window > 0 {
				p["window"] = int64(c.Window)
			}
			return p
		}
		switch {
		case c.KVHeads > 0:
			_, own := parseblock.HeadShare(uint64(c.KVHeads), uint64(rank), uint64(s.TP))
			p := window(map[string]int64{"kv_heads": int64(c.KVHeads), "heads": int64(own)})
			add("layers", s.Order, c.Layers, s.Block, 2*n*int64(own)*int64(c.HeadDim)*elem, p)
		case c.Compress > 0:
			if n%int64(c.Compress) != 0 {
				n = int64(c.Compress) * ((n-1)/int64(c.Compress) + 1) // an entry is never cut
			}
			entries := n / int64(c.Compress)
			pad = slabPage
			add("layers", parseblock.DeepSeekV4, c.Layers, int(n), entries*584,
				window(map[string]int64{"compress_ratio": int64(c.Compress)}))
			if c.Indexer {
				add("indexer", parseblock.DSAIndexer, c.Layers, int(n), entries*132,
					map[string]int64{"compress_ratio": int64(c.Compress), "kernel_tokens": n})
			}
			for _, st := range compressors(c) {
				add(st.name, parseblock.DeepSeekV4Compressor, c.Layers, st.block, int64(st.block*st.row),
					map[string]int64{"window": int64(st.window)})
			}
			pad = 1
		case c.Latent > 0:
			strategy, row := parseblock.MLA, int64(c.Latent)*2
			if s.DType == fp8 {
				strategy, row = parseblock.FP8DSMLA, 656
				if c.Latent != 576 {
					return nil, 0, fmt.Errorf("fp8 pages of a latent of %d numbers are unknown", c.Latent)
				}
			}
			add("layers", strategy, c.Layers, s.Block, n*row, window(map[string]int64{}))
			if c.Indexer {
				add("indexer", parseblock.DSAIndexer, c.Layers, s.Block, n*132,
					map[string]int64{"kernel_tokens": min(n, 64)})
				// in vLLM both use the blocks of one group
				l.Groups[len(l.Groups)-1].SameTable = true
			}
		default:
			_, kn := parseblock.HeadShare(uint64(c.KHeads), uint64(rank), uint64(s.TP))
			_, vn := parseblock.HeadShare(uint64(c.VHeads), uint64(rank), uint64(s.TP))
			conv := (2*int64(kn)*int64(c.KDim) + int64(vn)*int64(c.VDim)) * int64(c.ConvLen) * 2
			page := conv + int64(vn)*int64(c.VDim)*int64(c.KDim)*int64(c.StateBytes)
			add("layers", c.Linear, c.Layers, tokens, page, map[string]int64{"k_heads": int64(c.KHeads),
				"k_dim": int64(c.KDim), "v_heads": int64(c.VHeads),
				"v_dim": int64(c.VDim), "conv_len": int64(c.ConvLen), "state_bytes": int64(c.StateBytes)})
		}
		first += c.Layers
	}
	return l, at, nil
}

// slabPage is the padding of DeepSeek-V4's pages in vLLM.
const slabPage = 576

// compressor is the fp32 state for making entries: key and score of each of the last tokens. block
// is its tokens per block, so that its pages have the size of the entries' pages, as in vLLM.
type compressor struct {
	name               string
	block, window, row int
}

// compressors returns those of a layer of DeepSeek-V4. With ratio 4 entries overlap: each is made
// of eight tokens, with two keys and two scores per token.
func compressors(c *Cache) []compressor {
	const latent, index, fp32 = 512, 128, 4
	switch c.Compress {
	case 4:
		all := []compressor{{"compressor", 4, 8, 2 * 2 * latent * fp32}, {"indexer.compressor", 4, 8,
			2 * 2 * index * fp32}}
		if !c.Indexer {
			all = all[:1]
		}
		return all
	case 128:
		return []compressor{{"compressor", 8, 128, 2 * latent * fp32}}
	}
	return nil
}
