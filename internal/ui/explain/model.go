package explain

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Cache is the cache of a number of equal layers. The kind follows from the fields: KVHeads for
// attention, Latent for MLA, VHeads for linear attention.
type Cache struct {
	Layers int `json:"layers"`

	KVHeads int `json:"kv_heads,omitempty"` // attention
	HeadDim int `json:"head_dim,omitempty"`
	Window  int `json:"window,omitempty"` // tokens of a sliding window, 0 for none

	Latent  int  `json:"latent,omitempty"`  // MLA: numbers of a token, rope included
	Indexer bool `json:"indexer,omitempty"` // an indexer's keys (132 bytes, fp8) beside it
	// DeepSeek-V4: tokens of an entry, 584 bytes of latent (and with Indexer 132 of its keys); 1 for
	// its windows
	Compress int `json:"compress,omitempty"`

	Linear     string `json:"linear,omitempty"` // strategy of a linear attention's state
	KHeads     int    `json:"k_heads,omitempty"`
	KDim       int    `json:"k_dim,omitempty"`
	VHeads     int    `json:"v_heads,omitempty"`
	VDim       int    `json:"v_dim,omitempty"`
	ConvLen    int    `json:"conv_len,omitempty"`
	StateBytes int    `json:"state_bytes,omitempty"` // of an element of the recurrent state
}

// Model describes the caches of a model, all ranks together.
type Model struct {
	Name   string  `json:"name"`
	Caches []Cache `json:"caches"`
	Note   string  `json:"note,omitempty"`
}

func dense(layers, heads, dim int) []Cache {
	return []Cache{{Layers: layers, KVHeads: heads, HeadDim: dim}}
}

// slab is the cache of DeepSeek-V4: layers with latents compressed 4 to one, with an indexer,
// layers with 128 to one, and a window in every layer. The compressors' state follows from the
// ratios (Layout).
func slab(of4, of128, layers, window int) []Cache {
	return []Cache{{Layers: of4, Compress: 4, Indexer: true}, {Layers: of128, Compress: 128},
		{Layers: layers, Compress: 1, Window: window}}
}

const slabNote = "without draft layers; the indexer's keys in fp8"

// DType is the default dtype of the model's cache. DeepSeek-V4's is fp8: engines refuse others or
// use other pages, which no strategy describes.
func (m *Model) DType() string {
	for i := range m.Caches {
		if m.Caches[i].Compress > 0 {
			return fp8
		}
	}
	return bf16
}

var presets = map[string]Model{
	"llama-3.1-8b":      {Caches: dense(32, 8, 128)},
	"llama-3.1-70b":     {Caches: dense(80, 8, 128)},
	"qwen3-8b":          {Caches: dense(36, 8, 128)},
	"qwen3-32b":         {Caches: dense(64, 8, 128)},
	"qwen3-30b-a3b":     {Caches: dense(48, 4, 128)},
	"qwen3-235b-a22b":   {Caches: dense(94, 4, 128)},
	"deepseek-v3":       {Caches: []Cache{{Layers: 61, Latent: 576}}},
	"deepseek-v3.2":     {Caches: []Cache{{Layers: 61, Latent: 576, Indexer: true}}},
	"deepseek-v4-flash": {Caches: slab(21, 20, 43, 128), Note: slabNote},
	"deepseek-v4-pro":   {Caches: slab(30, 31, 61, 128), Note: slabNote},
	"qwen3-next-80b": {Caches: []Cache{{Layers: 12, KVHeads: 2, HeadDim: 256},
		{Layers: 36, Linear: "gdn_state", KHeads: 16, KDim: 128, VHeads: 32, VDim: 128, ConvLen: 3,
			StateBytes: 2}}},
	"kimi-linear-48b": {Caches: []Cache{{Layers: 7, Latent: 576},
		{Layers: 20, Linear: "kda_state", KHeads: 32, KDim: 128, VHeads: 32, VDim: 128, ConvLen: 3,
			StateBytes: 4}}},
	"gpt-oss-120b": {Caches: []Cache{{Layers: 18, KVHeads: 8, HeadDim: 64}, {Layers: 18, KVHeads: 8,
		HeadDim: 64, Window: 128}}},
	"gpt-oss-20b": {Caches: []Cache{{Layers: 12, KVHeads: 8, HeadDim: 64}, {Layers: 12, KVHeads: 8,
		HeadDim: 64, Window: 128}}},
	"gemma-3-27b": {Caches: []Cache{{Layers: 10, KVHeads: 16, HeadDim: 128}, {Layers: 52, KVHeads: 16,
		HeadDim: 128, Window: 1024}}},
}

// Presets lists the models known by name.
func Presets() []string { return slices.Sorted(maps.Keys(presets)) }

// Preset returns a model by name.
func Preset(name string) (*Model, error) {
	m, ok := presets[name]
	if !ok {
		return nil, fmt.Errorf("model %q is neither a file nor a preset: pass a config.json, a model's "+
			"directory, or one of %s", name, strings.Join(Presets(), ", "))
	}
	m.Name = name
	return &m, nil
}

// Bounds of a model.
const (
	maxLayers = 1024
	maxSize   = 1 << 20
)

// A config's names for the sizes of a Cache, in their order.
var (
	attentionFields = []string{"num_key_value_heads (or num_attention_heads)",
		"head_dim (or hidden_size by num_attention_heads)"}
	linearFields = map[string][]string{
		"gdn_state": {"linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads",
			"linear_value_head_dim", "linear_conv_kernel_dim"},
		"kda_state": {"linear_attn_config.num_heads", "linear_attn_config.head_dim",
			"linear_attn_config.num_heads", "linear_attn_config.head_dim",
			"linear_attn_config.short_conv_kernel_size"},
		"mamba2_state": {"n_groups", "ssm_state_size", "mamba_num_heads", "mamba_head_dim",
			"conv_kernel"},
	}
)

const convField = 4 // of linearFields

// check refuses impossible numbers.
func (m *Model) check() error {
	caches := m.Caches[:0]
	total := 0
	for _, c := range m.Caches {
		if c.Layers == 0 {
			continue
		}
		kinds := 0
		for _, f := range []struct {
			set    bool
			fields []string // in a config
			sizes  []int
		}{
			{c.KVHeads > 0 || c.HeadDim > 0, attentionFields, []int{c.KVHeads, c.HeadDim}},
			{c.Latent > 0, []string{"kv_lora_rank and qk_rope_head_dim"}, []int{c.Latent}},
			{c.Compress > 0, []string{"compress_ratios"}, []int{c.Compress}},
			{c.Linear != "", linearFields[c.Linear], []int{c.KHeads, c.KDim, c.VHeads, c.VDim, c.ConvLen}},
		} {
			if !f.set {
				continue
			}
			kinds++
			for i, v := range f.sizes {
				lowest := 1
				if i == convField {
					v, lowest = v+1, 2 // the kept history is one less than the kernel's width
				}
				if v < lowest || v > maxSize {
					return fmt.Errorf("%s = %d, or is missing: want %d to %d", f.fields[i], v, lowest, maxSize)
				}
			}
		}
		if kinds != 1 || c.Layers < 0 || c.Window < 0 || c.Window > 1<<30 {
			return fmt.Errorf("the caches of %d layers do not follow from it: add num_attention_heads "+
				"and head_dim, or kv_lora_rank and qk_rope_head_dim", c.Layers)
		}
		total += c.Layers
		caches = append(caches, c)
	}
	if total < 1 || total > maxLayers {
		return fmt.Errorf("%d layers with a cache: 1 to %d", total, maxLayers)
	}
	m.Caches = caches
	return nil
}
