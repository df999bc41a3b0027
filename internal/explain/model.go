// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Cache is the cache of a number of equal layers. Which fields count depends on which is set: KVHeads for attention, Latent for
// MLA, VHeads for linear attention.
type Cache struct {
	Layers int `json:"layers"`

	KVHeads int `json:"kv_heads,omitempty"` // attention
	HeadDim int `json:"head_dim,omitempty"`
	Window  int `json:"window,omitempty"` // tokens of a sliding window, 0 for none

	Latent   int  `json:"latent,omitempty"`   // MLA: numbers of a token, rope included
	Indexer  bool `json:"indexer,omitempty"`  // an indexer's keys (132 bytes, fp8) beside it
	Compress int  `json:"compress,omitempty"` // DeepSeek-V4: tokens of an entry, 584 bytes of latent (and with Indexer 132 of its keys)

	Linear     string `json:"linear,omitempty"` // strategy of a linear attention's state
	KHeads     int    `json:"k_heads,omitempty"`
	KDim       int    `json:"k_dim,omitempty"`
	VHeads     int    `json:"v_heads,omitempty"`
	VDim       int    `json:"v_dim,omitempty"`
	ConvLen    int    `json:"conv_len,omitempty"`
	StateBytes int    `json:"state_bytes,omitempty"` // of a number of the recurrent state
}

// Model is what the caches of a model look like, all ranks together.
type Model struct {
	Name   string  `json:"name"`
	Caches []Cache `json:"caches"`
	Note   string  `json:"note,omitempty"`
}

func dense(layers, heads, dim int) []Cache {
	return []Cache{{Layers: layers, KVHeads: heads, HeadDim: dim}}
}

var presets = map[string]Model{
	"llama-3.1-8b":    {Caches: dense(32, 8, 128)},
	"llama-3.1-70b":   {Caches: dense(80, 8, 128)},
	"qwen3-8b":        {Caches: dense(36, 8, 128)},
	"qwen3-32b":       {Caches: dense(64, 8, 128)},
	"qwen3-30b-a3b":   {Caches: dense(48, 4, 128)},
	"qwen3-235b-a22b": {Caches: dense(94, 4, 128)},
	"deepseek-v3":     {Caches: []Cache{{Layers: 61, Latent: 576}}},
	"deepseek-v3.2":   {Caches: []Cache{{Layers: 61, Latent: 576, Indexer: true}}},
	"deepseek-v4-pro": {Caches: []Cache{{Layers: 30, Compress: 4, Indexer: true}, {Layers: 31, Compress: 128}, {Layers: 61, Compress: 1, Window: 128}},
		Note: "the split of layers is inferred from published sizes; without the compressor's state and draft layers"},
	"qwen3-next-80b": {Caches: []Cache{{Layers: 12, KVHeads: 2, HeadDim: 256},
		{Layers: 36, Linear: "gdn_state", KHeads: 16, KDim: 128, VHeads: 32, VDim: 128, ConvLen: 3, StateBytes: 2}}},
	"kimi-linear-48b": {Caches: []Cache{{Layers: 7, Latent: 576},
		{Layers: 20, Linear: "kda_state", KHeads: 32, KDim: 128, VHeads: 32, VDim: 128, ConvLen: 3, StateBytes: 4}}},
	"gpt-oss-120b": {Caches: []Cache{{Layers: 18, KVHeads: 8, HeadDim: 64}, {Layers: 18, KVHeads: 8, HeadDim: 64, Window: 128}}},
	"gpt-oss-20b":  {Caches: []Cache{{Layers: 12, KVHeads: 8, HeadDim: 64}, {Layers: 12, KVHeads: 8, HeadDim: 64, Window: 128}}},
	"gemma-3-27b":  {Caches: []Cache{{Layers: 10, KVHeads: 16, HeadDim: 128}, {Layers: 52, KVHeads: 16, HeadDim: 128, Window: 1024}}},
}

// Presets lists the models that are known by name.
func Presets() []string { return slices.Sorted(maps.Keys(presets)) }

// Preset returns a model by name.
func Preset(name string) (*Model, error) {
	m, ok := presets[name]
	if !ok {
		return nil, fmt.Errorf("model %q is neither a file nor a preset: pass a config.json, a model's folder, or one of %s", name, strings.Join(Presets(), ", "))
	}
	m.Name = name
	return &m, nil
}

// Bounds of a config.json: past them it is no model's.
const (
	MaxConfigBytes = 1 << 20
	maxLayers      = 1024
	maxSize        = 1 << 20
)

// config is what counts of a model's config.json, as the transformers library names it.
type config struct {
	Architectures []string `json:"architectures"`
	ModelType     string   `json:"model_type"`
	Text          *config  `json:"text_config"`

	Layers   int      `json:"num_hidden_layers"`
	Heads    int      `json:"num_attention_heads"`
	KVHeads  int      `json:"num_key_value_heads"`
	HeadDim  int      `json:"head_dim"`
	Hidden   int      `json:"hidden_size"`
	Window   *int     `json:"sliding_window"`
	UseSWA   *bool    `json:"use_sliding_window"`
	Types    []string `json:"layer_types"`
	LoraRank int      `json:"kv_lora_rank"`
	RopeDim  int      `json:"qk_rope_head_dim"`
	IndexDim int      `json:"index_head_dim"`

	LinKHeads int    `json:"linear_num_key_heads"`
	LinKDim   int    `json:"linear_key_head_dim"`
	LinVHeads int    `json:"linear_num_value_heads"`
	LinVDim   int    `json:"linear_value_head_dim"`
	LinConv   int    `json:"linear_conv_kernel_dim"`
	SSMDtype  string `json:"mamba_ssm_dtype"`
	Kimi      *kimi  `json:"linear_attn_config"`
	Pattern   string `json:"hybrid_override_pattern"`
	MHeads    int    `json:"mamba_num_heads"`
	MHeadDim  int    `json:"mamba_head_dim"`
	MGroups   int    `json:"n_groups"`
	MState    int    `json:"ssm_state_size"`
	MConv     int    `json:"conv_kernel"`
}

type kimi struct {
	KDA  []int `json:"kda_layers"`
	Full []int `json:"full_attn_layers"`
	N    int   `json:"num_heads"`
	Dim  int   `json:"head_dim"`
	Conv int   `json:"short_conv_kernel_size"`
}

// ParseConfig reads a model's config.json. What it does not know the layers of it refuses, rather than guess.
func ParseConfig(name string, b []byte) (*Model, error) {
	if len(b) > MaxConfigBytes {
		return nil, fmt.Errorf("%s: %d bytes, a config.json has at most %d", name, len(b), MaxConfigBytes)
	}
	var c config
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if c.Text != nil {
		c = *c.Text
	}
	caches, err := c.caches()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	m := &Model{Name: name, Caches: caches}
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return m, nil
}

func (c *config) caches() ([]Cache, error) {
	if c.Layers < 1 || c.Layers > maxLayers {
		return nil, fmt.Errorf("num_hidden_layers = %d: 1 to %d", c.Layers, maxLayers)
	}
	attention := Cache{KVHeads: c.KVHeads, HeadDim: c.HeadDim}
	if attention.KVHeads == 0 {
		attention.KVHeads = c.Heads
	}
	if attention.HeadDim == 0 && c.Heads > 0 {
		attention.HeadDim = c.Hidden / c.Heads
	}
	if c.LoraRank > 0 {
		attention = Cache{Latent: c.LoraRank + c.RopeDim, Indexer: c.IndexDim > 0}
		if c.IndexDim != 0 && c.IndexDim != 128 {
			return nil, fmt.Errorf("index_head_dim = %d: only 128 is known", c.IndexDim)
		}
	}
	with := func(c Cache, layers int) Cache { c.Layers = layers; return c }
	switch {
	case c.Kimi != nil:
		linear := Cache{Linear: "kda_state", KHeads: c.Kimi.N, KDim: c.Kimi.Dim, VHeads: c.Kimi.N, VDim: c.Kimi.Dim, ConvLen: c.Kimi.Conv - 1, StateBytes: 4}
		if len(c.Kimi.KDA)+len(c.Kimi.Full) != c.Layers {
			return nil, fmt.Errorf("linear_attn_config: %d kda_layers and %d full_attn_layers are not %d layers", len(c.Kimi.KDA), len(c.Kimi.Full), c.Layers)
		}
		return []Cache{with(attention, len(c.Kimi.Full)), with(linear, len(c.Kimi.KDA))}, nil
	case c.Pattern != "":
		mamba := Cache{Linear: "mamba2_state", KHeads: c.MGroups, KDim: c.MState, VHeads: c.MHeads, VDim: c.MHeadDim, ConvLen: c.MConv - 1, StateBytes: ssmBytes(c.SSMDtype)}
		return []Cache{with(attention, strings.Count(c.Pattern, "*")), with(mamba, strings.Count(c.Pattern, "M"))}, nil
	case len(c.Types) > 0:
		if len(c.Types) != c.Layers {
			return nil, fmt.Errorf("layer_types: %d entries for %d layers", len(c.Types), c.Layers)
		}
		n := map[string]int{}
		for _, t := range c.Types {
			n[t]++
		}
		var out []Cache
		for _, t := range slices.Sorted(maps.Keys(n)) {
			switch t {
			case "full_attention":
				out = append(out, with(attention, n[t]))
			case "sliding_attention":
				if c.Window == nil || *c.Window < 1 {
					return nil, fmt.Errorf("layer_types has %d sliding layers, and no sliding_window", n[t])
				}
				sliding := with(attention, n[t])
				sliding.Window = *c.Window
				out = append(out, sliding)
			case "linear_attention":
				out = append(out, Cache{Layers: n[t], Linear: "gdn_state", KHeads: c.LinKHeads, KDim: c.LinKDim, VHeads: c.LinVHeads, VDim: c.LinVDim,
					ConvLen: c.LinConv - 1, StateBytes: ssmBytes(c.SSMDtype)})
			default:
				return nil, fmt.Errorf("layer_types: %q is unknown", t)
			}
		}
		return out, nil
	case c.LinVHeads > 0 || c.MHeads > 0:
		return nil, fmt.Errorf("has linear layers, and neither layer_types, hybrid_override_pattern nor linear_attn_config to say which")
	}
	if c.Window != nil && *c.Window > 0 && (c.UseSWA == nil || *c.UseSWA) {
		attention.Window = *c.Window
	}
	return []Cache{with(attention, c.Layers)}, nil
}

func ssmBytes(dtype string) int {
	if dtype == "float32" {
		return 4
	}
	return 2
}

// check refuses numbers that no model has.
func (m *Model) check() error {
	caches := m.Caches[:0]
	total := 0
	for _, c := range m.Caches {
		if c.Layers == 0 {
			continue
		}
		kinds := 0
		for _, f := range []struct {
			name string
			set  bool
			all  []int
		}{{"attention", c.KVHeads > 0 || c.HeadDim > 0, []int{c.KVHeads, c.HeadDim}}, {"latent", c.Latent > 0, []int{c.Latent}}, {"compressed", c.Compress > 0, []int{c.Compress}},
			{"linear", c.Linear != "", []int{c.KHeads, c.KDim, c.VHeads, c.VDim, c.ConvLen, c.StateBytes}}} {
			if !f.set {
				continue
			}
			kinds++
			for _, v := range f.all {
				if v < 1 || v > maxSize {
					return fmt.Errorf("%s layers: a size of %d (heads, dimensions and kernel widths are 1 to %d)", f.name, v, maxSize)
				}
			}
		}
		if kinds != 1 || c.Layers < 0 || c.Window < 0 || c.Window > 1<<30 {
			return fmt.Errorf("the caches of %d layers cannot be told from it", c.Layers)
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
