package explain

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
)

// MaxConfigBytes bounds a model's config.json.
const MaxConfigBytes = 1 << 20

// config holds the relevant fields of a model's config.json, as the transformers library names
// them.
type config struct {
	ModelType string  `json:"model_type"`
	Text      *config `json:"text_config"`

	Layers    int      `json:"num_hidden_layers"`
	Heads     int      `json:"num_attention_heads"`
	KVHeads   *int     `json:"num_key_value_heads"`
	HeadDim   int      `json:"head_dim"`
	ValueDim  int      `json:"v_head_dim"`
	Hidden    int      `json:"hidden_size"`
	Window    *int     `json:"sliding_window"`
	UseSWA    *bool    `json:"use_sliding_window"`
	Windowed  every    `json:"sliding_window_pattern"`
	MaxWindow *int     `json:"max_window_layers"`
	Types     []string `json:"layer_types"`
	Interval  *int     `json:"full_attention_interval"`
	LoraRank  int      `json:"kv_lora_rank"`
	MLA       *bool    `json:"use_mla"`
	RopeDim   *int     `json:"qk_rope_head_dim"`
	IndexDim  int      `json:"index_head_dim"`
	Indexers  []string `json:"indexer_types"`
	IndexFreq int      `json:"index_topk_freq"`
	IndexSkip *int     `json:"index_skip_topk_offset"`
	IndexPat  string   `json:"index_topk_pattern"`
	Ratios    []int    `json:"compress_ratios"`
	Rates     rates    `json:"compress_rates"`

	LinKHeads int    `json:"linear_num_key_heads"`
	LinKDim   int    `json:"linear_key_head_dim"`
	LinVHeads int    `json:"linear_num_value_heads"`
	LinVDim   int    `json:"linear_value_head_dim"`
	LinConv   int    `json:"linear_conv_kernel_dim"`
	SSMDtype  string `json:"mamba_ssm_dtype"`
	Kimi      *kimi  `json:"linear_attn_config"`
	Hybrid    string `json:"hybrid_override_pattern"`
	MHeads    int    `json:"mamba_num_heads"`
	MHeadDim  int    `json:"mamba_head_dim"`
	MGroups   int    `json:"n_groups"`
	MState    int    `json:"ssm_state_size"`
	MConv     int    `json:"conv_kernel"`

	unread
}

type kimi struct {
	KDA  []int `json:"kda_layers"`
	Full []int `json:"full_attn_layers"`
	N    int   `json:"num_heads"`
	Dim  int   `json:"head_dim"`
	Conv int   `json:"short_conv_kernel_size"`
}

// rates are the compress_ratios of newer configs, by layer type.
type rates struct {
	Sparse int `json:"compressed_sparse_attention"`
	Heavy  int `json:"heavily_compressed_attention"`
}

// unread are fields that change the caches of layers beyond the rest of the config. A model with
// such a field is refused by the field's name: without it, most would be explained as dense layers
// that do not exist.
type unread struct {
	Chunk        json.RawMessage `json:"attention_chunk_size"` // Llama 4
	SharedKV     json.RawMessage `json:"num_kv_shared_layers"` // Gemma 3n, 4
	GlobalDim    json.RawMessage `json:"global_head_dim"`
	GlobalHeads  json.RawMessage `json:"num_global_key_value_heads"`
	KEqV         json.RawMessage `json:"attention_k_eq_v"`
	SWAHeads     json.RawMessage `json:"swa_num_key_value_heads"` // MiMo-V2
	SWADim       json.RawMessage `json:"swa_head_dim"`
	HybridLayers json.RawMessage `json:"hybrid_layer_pattern"`
	AttnPeriod   json.RawMessage `json:"attn_layer_period"`  // Jamba
	AttnIndices  json.RawMessage `json:"attn_layer_indices"` // Bamba
	AttnIdxs     json.RawMessage `json:"full_attn_idxs"`     // LFM2
	AttnTypes    json.RawMessage `json:"attn_type_list"`     // MiniMax-01
	BlockTypes   json.RawMessage `json:"layers_block_type"`  // Zamba2, newer Nemotron-H
	Blocks       json.RawMessage `json:"block_types"`        // RecurrentGemma
	BlockConfigs json.RawMessage `json:"block_configs"`      // Nemotron-NAS
	LayerGroups  json.RawMessage `json:"layer_group_size"`   // Ling 2.5
	CrossLayers  json.RawMessage `json:"cross_attention_layers"`
	DState       json.RawMessage `json:"mamba_d_state"` // Falcon-H1
	Encoder      json.RawMessage `json:"is_encoder_decoder"`
	MultiQuery   json.RawMessage `json:"multi_query"` // Falcon
	AttnConfig   json.RawMessage `json:"attn_config"` // DBRX
}

// set returns the first field of unread that has a value, and the value.
func (u *unread) set() (field, value string) {
	v := reflect.ValueOf(u).Elem()
	for i := range v.NumField() {
		raw := string(v.Field(i).Bytes())
		switch raw {
		case "", "null", "false", "0", "[]", "{}", `""`:
			continue
		}
		return v.Type().Field(i).Tag.Get("json"), raw[:min(len(raw), 40)]
	}
	return "", ""
}

// every is a sliding_window_pattern: each n-th layer has full attention, the others a window. Some
// models use letters, LLLG.
type every int

func (e *every) UnmarshalJSON(b []byte) error {
	var n int
	if json.Unmarshal(b, &n) == nil {
		*e = every(n)
		return nil
	}
	var s string
	if err := json.Unmarshal(b, &s); err != nil || s == "" || strings.Trim(s[:len(s)-1], "L") != "" ||
		s[len(s)-1] != 'G' {
		return fmt.Errorf("sliding_window_pattern = %.40s: a number or LLLG is known; write it out as "+
			"layer_types", b)
	}
	*e = every(len(s))
	return nil
}

// defaults are the values of transformers for omitted fields: published configs omit some (Gemma 3
// of 4 billion parameters omits heads and head_dim). By default KV heads equal heads, and head_dim
// is hidden_size divided by heads.
var defaults = map[string]config{
	"gemma":            {HeadDim: 256},
	"deepseek_v2":      {LoraRank: 512, RopeDim: number(64)},
	"deepseek_v3":      {LoraRank: 512, RopeDim: number(64)},
	"deepseek_v32":     {LoraRank: 512, RopeDim: number(64), IndexDim: 128},
	"gemma2":           {Layers: 26, Heads: 8, KVHeads: number(4), HeadDim: 256, Window: number(4096)},
	"gemma3_text":      {Layers: 26, Heads: 8, KVHeads: number(4), HeadDim: 256, Window: number(4096)},
	"glm4_moe_lite":    {LoraRank: 512, RopeDim: number(64)},
	"glm_moe_dsa":      {LoraRank: 512, RopeDim: number(64), IndexDim: 128},
	"gpt_oss":          {Layers: 36, Heads: 64, KVHeads: number(8), HeadDim: 64, Window: number(128)},
	"mistral":          {KVHeads: number(8)},
	"mixtral":          {KVHeads: number(8)},
	"qwen3":            {HeadDim: 128},
	"qwen3_next":       {HeadDim: 256, Interval: number(4)},
	"qwen3_5_text":     {HeadDim: 256, Interval: number(4)},
	"qwen3_5_moe_text": {HeadDim: 256, Interval: number(4)},
	deepseekV4:         {HeadDim: 512, RopeDim: number(64), IndexDim: 128, Window: number(128)},
}

// hybrids are models with linear layers if their config does not list the layers.
var hybrids = []string{"kimi_linear", "kimi_k3", "minimax", "olmo_hybrid", "recurrent_gemma"}

const deepseekV4 = "deepseek_v4"

func number(n int) *int { return &n }

// ParseConfig reads a model's config.json. It refuses unknown kinds of layers, rather than guess.
func ParseConfig(name string, b []byte) (*Model, error) {
	if len(b) > MaxConfigBytes {
		return nil, fmt.Errorf("%s: %d bytes, a config.json has at most %d", name, len(b), MaxConfigBytes)
	}
	var c config
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", name, readable(err))
	}
	if c.Text != nil {
		outer := c.ModelType
		c = *c.Text
		c.ModelType = cmp.Or(c.ModelType, outer)
	}
	if d, ok := defaults[c.ModelType]; ok {
		if c.MLA != nil && !*c.MLA || c.RopeDim != nil && *c.RopeDim == 0 {
			// the language models of DeepSeek-VL2 and -OCR: their kv_lora_rank is null, and their
			// heads are plain
			d.LoraRank = 0
		}
		c.Layers, c.Heads, c.KVHeads, c.HeadDim = cmp.Or(c.Layers, d.Layers), cmp.Or(c.Heads, d.Heads),
			cmp.Or(c.KVHeads, d.KVHeads), cmp.Or(c.HeadDim, d.HeadDim)
		c.LoraRank, c.RopeDim, c.IndexDim = cmp.Or(c.LoraRank, d.LoraRank), cmp.Or(c.RopeDim, d.RopeDim),
			cmp.Or(c.IndexDim, d.IndexDim)
		c.Window, c.Interval = cmp.Or(c.Window, d.Window), cmp.Or(c.Interval, d.Interval)
	}
	if field, n := negative("", reflect.ValueOf(c)); field != "" {
		return nil, fmt.Errorf("%s: %s = %d: want 0 or more; leave it out where the model has none",
			name, field, n)
	}
	caches, err := c.caches()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	m := &Model{Name: name, Caches: caches}
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if m.DType() == fp8 {
		m.Note = slabNote
	}
	return m, nil
}

// readable explains why a file is not a config, without this program's types.
func readable(err error) error {
	var syntax *json.SyntaxError
	var typed *json.UnmarshalTypeError
	switch {
	case errors.As(err, &typed):
		want := map[reflect.Kind]string{reflect.Int: "a whole number", reflect.String: "a text",
			reflect.Bool: "true or false", reflect.Slice: "a list"}[typed.Type.Kind()]
		return fmt.Errorf("%s = a JSON %s: want %s", cmp.Or(typed.Field, "the file"), typed.Value,
			cmp.Or(want, "an object, as in a model's config.json"))
	case errors.As(err, &syntax):
		return fmt.Errorf("no JSON: %w; pass a model's config.json", err)
	}
	return err
}

// negative returns the first negative field of a config, and its value.
func negative(in string, v reflect.Value) (field string, n int64) {
	for i := range v.NumField() {
		f, at := v.Type().Field(i), v.Field(i)
		name := in + f.Tag.Get("json")
		if at.Kind() == reflect.Pointer {
			at = at.Elem() // of nil: no value of any kind
		}
		switch {
		case at.Kind() == reflect.Struct:
			if f.Anonymous {
				continue // unread
			}
			if field, n := negative(name+".", at); field != "" {
				return field, n
			}
		case at.IsValid() && at.CanInt() && at.Int() < 0:
			return name, at.Int()
		}
	}
	return "", 0
}

const (
	full    = "full_attention"
	sliding = "sliding_attention"
	indexed = "indexed_attention" // transformers' name of DeepSeek-V3.2's layers
	linear  = "linear_attention"
	sparse  = "compressed_sparse_attention" // DeepSeek-V4's
	heavy   = "heavily_compressed_attention"
)

func (c *config) caches() ([]Cache, error) {
	switch {
	case c.Layers == 0:
		return nil, fmt.Errorf("num_hidden_layers = 0, or is missing: a model has 1 to %d; pass a "+
			"model's config.json, with the language model in it or in its text_config", maxLayers)
	case c.Layers > maxLayers:
		return nil, fmt.Errorf("num_hidden_layers = %d: 1 to %d", c.Layers, maxLayers)
	}
	if field, value := c.set(); field != "" {
		return nil, fmt.Errorf("%s = %s: gives layers caches that are not described here; start the "+
			"engine beside a sidecar and use --engine", field, value)
	}
	if len(c.Ratios) > 0 || strings.HasPrefix(c.ModelType, deepseekV4) {
		return c.slab()
	}
	attention, err := c.attention()
	if err != nil {
		return nil, err
	}
	switch {
	case c.Kimi != nil:
		if err := c.Kimi.check(c.Layers); err != nil {
			return nil, err
		}
		state := Cache{Linear: "kda_state", KHeads: c.Kimi.N, KDim: c.Kimi.Dim, VHeads: c.Kimi.N,
			VDim: c.Kimi.Dim, ConvLen: c.Kimi.Conv - 1, StateBytes: 4}
		return []Cache{of(attention, len(c.Kimi.Full)), of(state, len(c.Kimi.KDA))}, nil
	case c.Hybrid != "":
		if len(c.Hybrid) != c.Layers || strings.Trim(c.Hybrid, "M*-E") != "" {
			return nil,
				fmt.Errorf("hybrid_override_pattern = %.40q: of M, *, - and E one for each of %d layers",
					c.Hybrid, c.Layers)
		}
		mamba := Cache{Linear: "mamba2_state", KHeads: c.MGroups, KDim: c.MState, VHeads: c.MHeads,
			VDim: c.MHeadDim, ConvLen: c.MConv - 1, StateBytes: ssmBytes(c.SSMDtype)}
		return []Cache{of(attention, strings.Count(c.Hybrid, "*")),
			of(mamba, strings.Count(c.Hybrid, "M"))}, nil
	case attention.Indexer && len(c.Types) == 0:
		return c.indexed(attention)
	}
	types, err := c.types()
	if err != nil {
		return nil, err
	}
	n := map[string]int{}
	for _, t := range types {
		n[t]++
	}
	var out []Cache
	for _, t := range slices.Sorted(maps.Keys(n)) {
		switch t {
		case full, indexed:
			if t == indexed && !attention.Indexer {
				return nil, fmt.Errorf("layer_types: %d layers of %s, and no kv_lora_rank and index_head_dim",
					n[t], t)
			}
			these := []Cache{of(attention, n[t])}
			if attention.Indexer {
				if these, err = c.indexed(these[0]); err != nil {
					return nil, err
				}
			}
			out = append(out, these...)
		case sliding:
			if c.Window == nil || *c.Window < 1 {
				return nil, fmt.Errorf("layer_types has %d sliding layers, and no sliding_window", n[t])
			}
			windowed := of(attention, n[t])
			windowed.Window = *c.Window
			out = append(out, windowed)
		case linear:
			out = append(out, Cache{Layers: n[t], Linear: "gdn_state", KHeads: c.LinKHeads, KDim: c.LinKDim,
				VHeads: c.LinVHeads, VDim: c.LinVDim,
				ConvLen: c.LinConv - 1, StateBytes: ssmBytes(c.SSMDtype)})
		default:
			return nil, fmt.Errorf("layer_types: %.40q is unknown", t)
		}
	}
	return out, nil
}

func of(c Cache, layers int) Cache {
	c.Layers = layers
	return c
}

// attention is the cache of a layer that attends to all tokens.
func (c *config) attention() (Cache, error) {
	if c.LoraRank > 0 {
		if c.IndexDim != 0 && c.IndexDim != 128 {
			return Cache{}, fmt.Errorf("index_head_dim = %d: only 128 is known", c.IndexDim)
		}
		if c.RopeDim == nil {
			return Cache{}, fmt.Errorf("qk_rope_head_dim is missing: what stands in a latent beside the "+
				"%d numbers of kv_lora_rank; add it", c.LoraRank)
		}
		return Cache{Latent: c.LoraRank + *c.RopeDim, Indexer: c.IndexDim > 0}, nil
	}
	a := Cache{KVHeads: c.Heads, HeadDim: c.HeadDim}
	if c.KVHeads != nil {
		a.KVHeads = *c.KVHeads
	}
	if a.HeadDim == 0 && c.Heads > 0 {
		if c.Hidden%c.Heads != 0 {
			return Cache{}, fmt.Errorf("hidden_size = %d: not divisible by %d heads, and there is no "+
				"head_dim; add head_dim", c.Hidden, c.Heads)
		}
		a.HeadDim = c.Hidden / c.Heads
	}
	if c.ValueDim != 0 && c.ValueDim != a.HeadDim {
		return Cache{}, fmt.Errorf("v_head_dim = %d: heads of V that are not those of K (%d) are not "+
			"described here; use --engine", c.ValueDim, a.HeadDim)
	}
	return a, nil
}

// types returns the type of each layer, from layer_types or derived as in transformers from the
// fields of older configs.
func (c *config) types() ([]string, error) {
	if len(c.Types) > 0 {
		if len(c.Types) != c.Layers {
			return nil, fmt.Errorf("layer_types: %d entries for %d layers", len(c.Types), c.Layers)
		}
		return c.Types, nil
	}
	out := slices.Repeat([]string{full}, c.Layers)
	fill := func(kind string, is func(i int) bool) ([]string, error) {
		for i := range out {
			if is(i) {
				out[i] = kind
			}
		}
		return out, nil
	}
	switch {
	case c.Interval != nil && *c.Interval < 1:
		return nil, fmt.Errorf("full_attention_interval = %d: 1 or more", *c.Interval)
	case c.Interval != nil:
		return fill(linear, func(i int) bool { return (i+1)%*c.Interval != 0 })
	case c.LinVHeads > 0 || c.MHeads > 0 || slices.Contains(hybrids, c.ModelType):
		return nil, fmt.Errorf("model_type = %.40q: has linear layers, and neither layer_types, "+
			"full_attention_interval, hybrid_override_pattern nor linear_attn_config to name them; add "+
			"layer_types", c.ModelType)
	case c.Windowed < 0:
		return nil, fmt.Errorf("sliding_window_pattern = %d: 1 or more", c.Windowed)
	case c.Window == nil || *c.Window < 1 || c.UseSWA != nil && !*c.UseSWA:
		return out, nil
	}
	// A window without a list of its layers.
	n := int(c.Windowed)
	switch c.ModelType {
	case "gemma3_text", "gemma3":
		n = cmp.Or(n, 6)
	case "cohere2", "exaone4":
		n = cmp.Or(n, 4)
	case "olmo3":
		n = 4
	case "gemma2", "gpt_oss":
		n = 2
	case "mistral", "mixtral", "phi3", "phimoe", "starcoder2", "ministral":
		return fill(sliding, func(int) bool { return true })
	case "qwen2", "qwen3":
		// Its window is off unless enabled; then the first layers have none.
		first := 28
		if c.MaxWindow != nil {
			first = *c.MaxWindow
		}
		return fill(sliding, func(i int) bool { return c.UseSWA != nil && i >= first })
	case "qwen2_moe", "qwen3_moe":
		if c.UseSWA == nil {
			return out, nil
		}
		fallthrough
	default:
		return nil, fmt.Errorf("model_type = %.40q: has a sliding_window of %d and no layer_types, and "+
			"which of its layers have the window is not known; "+
			"add layer_types, or \"use_sliding_window\": false", c.ModelType, *c.Window)
	}
	return fill(sliding, func(i int) bool { return (i+1)%n != 0 })
}

// indexed returns layers of MLA of which some need no indexer: in GLM-5 they share the choice of an
// earlier layer, and have no keys.
func (c *config) indexed(all Cache) ([]Cache, error) {
	all.Layers = cmp.Or(all.Layers, c.Layers)
	own, shared := 0, 0
	kinds := c.Indexers
	if len(kinds) == 0 && c.IndexPat != "" {
		kinds = strings.Split(c.IndexPat, "")
	}
	for i := range c.Layers {
		switch skip := 2; {
		case len(kinds) > 0:
			if len(kinds) != c.Layers {
				return nil, fmt.Errorf("indexer_types or index_topk_pattern: %d entries for %d layers",
					len(kinds), c.Layers)
			}
			switch kinds[i] {
			case "full", "F":
				own++
			case "shared", "S":
				shared++
			default:
				return nil, fmt.Errorf("indexer_types[%d] = %.40q: full and shared are known", i, kinds[i])
			}
		case c.IndexFreq < 0:
			return nil, fmt.Errorf("index_topk_freq = %d: 1 or more", c.IndexFreq)
		default:
			if c.IndexSkip != nil {
				skip = *c.IndexSkip
			}
			if max(i-skip+1, 0)%max(c.IndexFreq, 1) == 0 {
				own++
			} else {
				shared++
			}
		}
	}
	if shared > 0 && all.Layers != c.Layers {
		return nil, fmt.Errorf("layer_types: %d of %d layers are %s, and some share an indexer: which "+
			"is not known", all.Layers, c.Layers, indexed)
	}
	with, without := of(all, all.Layers-shared), of(all, shared)
	without.Indexer = false
	return []Cache{with, without}, nil
}

// slab returns the caches of DeepSeek-V4. The ratios are a list, whose entries beyond the layers
// belong to draft layers, or follow from the layers' types.
func (c *config) slab() ([]Cache, error) {
	for _, f := range []struct {
		field   string
		v, want int
	}{{"head_dim", c.HeadDim, 512}, {"qk_rope_head_dim", *cmp.Or(c.RopeDim, number(0)), 64},
		{"index_head_dim", c.IndexDim, 128}} {
		if c.ModelType == deepseekV4 && f.v != f.want {
			return nil, fmt.Errorf("%s = %d: DeepSeek-V4's entries are known with %d only; use --engine",
				f.field, f.v, f.want)
		}
	}
	ratios, field := c.Ratios, "compress_ratios"
	if len(ratios) == 0 {
		field = "layer_types"
		for i, t := range c.Types {
			r, ok := map[string]int{sliding: 0, sparse: cmp.Or(c.Rates.Sparse, 4),
				heavy: cmp.Or(c.Rates.Heavy, 128)}[t]
			if !ok {
				return nil, fmt.Errorf("layer_types[%d] = %.40q: unknown in DeepSeek-V4", i, t)
			}
			ratios = append(ratios, r)
		}
	}
	switch {
	case c.ModelType != deepseekV4:
		return nil,
			fmt.Errorf("model_type = %.40q: compressed caches are described of %q only; use --engine",
				c.ModelType, deepseekV4)
	case len(ratios) < c.Layers:
		return nil, fmt.Errorf("%s: %d entries for %d layers; write one for each", field,
			len(ratios), c.Layers)
	case *c.Window < 1:
		return nil, fmt.Errorf("sliding_window = %d: DeepSeek-V4 has one in every layer; 1 or more",
			*c.Window)
	}
	of4, of128 := 0, 0
	for i, r := range ratios[:c.Layers] {
		switch r {
		case 0, 1: // only the window
		case 4:
			of4++
		case 128:
			of128++
		default:
			return nil, fmt.Errorf("%s[%d] = %d: ratios of 0, 1, 4 and 128 are described; use --engine",
				field, i, r)
		}
	}
	return slab(of4, of128, c.Layers, *c.Window), nil
}

// check refuses lists that do not contain each layer once, from 1.
func (k *kimi) check(layers int) error {
	if len(k.KDA)+len(k.Full) != layers {
		return fmt.Errorf("linear_attn_config: %d kda_layers and %d full_attn_layers are not %d layers",
			len(k.KDA), len(k.Full), layers)
	}
	seen := make([]bool, layers+1)
	for _, i := range slices.Concat(k.KDA, k.Full) {
		if i < 1 || i > layers || seen[i] {
			return fmt.Errorf("linear_attn_config: layer %d is named twice, or is none of 1 to %d", i,
				layers)
		}
		seen[i] = true
	}
	return nil
}

func ssmBytes(dtype string) int {
	if dtype == "float32" {
		return 4
	}
	return 2
}
