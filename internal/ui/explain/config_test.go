package explain

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/parseblock"
)

// TestPublishedConfigs: what is read from a model's config.json is what its cache takes, computed
// by hand from what the fields mean, and equals the preset of that name.
func TestPublishedConfigs(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range published {
		seen[c.model] = true
		layers := 43 - 2
		if c.model == "deepseek-v4-pro" {
			layers = 61 - 2
		}
		ratios := strings.TrimSuffix(strings.Repeat("4, 128, ", (layers+1)/2), ", 128, ")
		m, err := ParseConfig("config.json", []byte(strings.Replace(c.json, "INTERLEAVED", ratios, 1)))
		if err != nil {
			t.Errorf("%s: %v", c.json, err)
			continue
		}
		models := []*Model{m}
		if c.model != "" {
			preset, err := Preset(c.model)
			if err != nil {
				t.Fatal(err)
			}
			models = append(models, preset)
		}
		for _, m := range models {
			s := side(128, 1, parseblock.PackedNHD, m.DType())
			r, err := Explain(m, s, s, 4096)
			if err != nil {
				t.Errorf("%s: %v", c.json, err)
				continue
			}
			if r.BytesPerToken != c.perToken || r.FixedBytes != c.fixed {
				t.Errorf("%s of %s: %v bytes a token and %d besides, want %v and %d", m.Name, c.json,
					r.BytesPerToken, r.FixedBytes, c.perToken, c.fixed)
			}
		}
	}
	for _, name := range Presets() {
		if !seen[name] {
			t.Errorf("preset %s: no config.json to compare it with", name)
		}
	}
}

func TestParseConfig(t *testing.T) {
	const dense = `"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64`
	const v4 = `"model_type": "deepseek_v4", "num_hidden_layers": 2`
	for name, c := range map[string]struct {
		json string
		want string // of the caches, or of the error
	}{
		"llama": {
			`{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}`, "[{32 8 128 0"},
		"head dim": {
			`{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "head_dim": 64}`, "[{36 8 64 0"},
		"mha": {`{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}`,
			"[{2 4 16 0"},
		"text": {
			`{"model_type": "gemma3", "text_config": {"num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}}`, "[{1 2 8 0"},
		"mla": {`{"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}`,
			"[{61 0 0 0 576 false"},
		"dsa": {
			`{"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}`,
			"[{61 0 0 0 576 true"},
		"nemotron": {`{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "hybrid_override_pattern": "M-M*", "mamba_num_heads": 64,
			"mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}`, "{2 0 0 0 0 false 0 mamba2_state 8 128 64 64 3 2}"},
		"indexed": {
			`{"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "layer_types": ["indexed_attention", "indexed_attention"]}`, "[{2 0 0 0 576 true"},
		"shared": {
			`{"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "indexer_types": ["full", "shared", "shared"]}`, "[{1 0 0 0 576 true 0  0 0 0 0 0 0} {2 0 0 0 576 false"},
		"letters of it": {
			`{"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk_pattern": "FSS"}`, "[{1 0 0 0 576 true 0  0 0 0 0 0 0} {2 0 0 0 576 false"},
		"shared, which": {
			`{"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk_pattern": "FSX"}`, `indexer_types[2] = "X"`},
		"shared, few": {
			`{"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk_pattern": "FS"}`, "2 entries for 3 layers"},
		"window off": {`{` + dense + `, "sliding_window": 4096, "use_sliding_window": false}`,
			"[{4 4 16 0"},
		"mistral": {
			`{"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096, "sliding_window": 4096}`, "[{2 8 128 4096"},
		"gemma 2": {`{"model_type": "gemma2", ` + dense + `, "sliding_window": 7}`,
			"[{2 4 256 0 0 false 0  0 0 0 0 0 0} {2 4 256 7"},
		"cohere": {`{"model_type": "cohere2", ` + dense + `, "sliding_window": 7}`,
			"[{1 4 16 0 0 false 0  0 0 0 0 0 0} {3 4 16 7"},
		"exaone": {`{"model_type": "exaone4", ` + dense +
			`, "sliding_window": 7, "sliding_window_pattern": "LG"}`, "[{2 4 16 0 0 false 0  0 0 0 0 0 0} " +
			"{2 4 16 7"},
		"olmo": {`{"model_type": "olmo3", ` + dense + `, "sliding_window": 7}`,
			"[{1 4 16 0 0 false 0  0 0 0 0 0 0} {3 4 16 7"},
		"qwen": {`{"model_type": "qwen2", ` + dense + `, "sliding_window": 7}`, "[{4 4 16 0"},
		"qwen on": {`{"model_type": "qwen2", ` + dense +
			`, "sliding_window": 7, "use_sliding_window": true, "max_window_layers": 3}`,
			"[{3 4 16 0 0 false 0  0 0 0 0 0 0} {1 4 16 7"},
		"qwen moe on": {`{"model_type": "qwen3_moe", ` + dense +
			`, "sliding_window": 7, "use_sliding_window": true}`,
			`model_type = "qwen3_moe": has a sliding_window of 7`},
		"window, whose": {`{` + dense + `, "sliding_window": 4096}`,
			`model_type = "": has a sliding_window of 4096 and no layer_types`},
		"letters": {`{"model_type": "exaone4", ` + dense +
			`, "sliding_window": 7, "sliding_window_pattern": "LGLG"}`, `sliding_window_pattern = "LGLG"`},
		"pattern": {`{"model_type": "gemma3_text", ` + dense +
			`, "sliding_window": 7, "sliding_window_pattern": -6}`, `sliding_window_pattern = -6`},
		"interval": {`{"model_type": "qwen3_next", ` + dense + `, "full_attention_interval": 0}`,
			`full_attention_interval = 0`},
		"ratio": {`{` + v4 + `, "compress_ratios": [4, 16]}`,
			`compress_ratios[1] = 16: ratios of 0, 1, 4 and 128`},
		"ratios": {`{` + v4 + `, "compress_ratios": [4]}`,
			`compress_ratios: 1 entries for 2 layers`},
		"draft ratios": {`{` + v4 + `, "compress_ratios": [4, 128, 4, 16]}`, "[{1 0 0 0 0 true 4  0 0 " +
			"0 0 0 0} {1 0 0 0 0 false 128"},
		"no ratios": {`{` + v4 + `}`, `layer_types: 0 entries for 2 layers`},
		"rate": {`{` + v4 +
			`, "layer_types": ["sliding_attention", "heavily_compressed_attention"], "compress_rates": {"heavily_compressed_attention": 64}}`, `layer_types[1] = 64`},
		"v4 type": {`{` + v4 + `, "layer_types": ["full_attention", "sliding_attention"]}`,
			`layer_types[0] = "full_attention": unknown in DeepSeek-V4`},
		"v4 dim": {`{` + v4 + `, "head_dim": 576, "compress_ratios": [4, 4]}`,
			`head_dim = 576: DeepSeek-V4's entries`},
		"v4 window": {`{` + v4 + `, "sliding_window": 0, "compress_ratios": [4, 4]}`,
			`sliding_window = 0`},
		"v4.1": {
			`{"model_type": "deepseek_v41", "num_hidden_layers": 2, "compress_ratios": [1, 2]}`,
			`model_type = "deepseek_v41": compressed caches`},
		"ratios of": {`{` + dense + `, "compress_ratios": [4, 4, 4, 4]}`,
			`model_type = "": compressed caches`},
		"chunks": {`{` + dense + `, "attention_chunk_size": 8192}`, "attention_chunk_size = " +
			"8192: gives layers caches"},
		"no chunks": {`{` + dense +
			`, "attention_chunk_size": null, "num_kv_shared_layers": 0, "is_encoder_decoder": false}`,
			"[{4 4 16 0"},
		"v heads": {`{` + dense + `, "v_head_dim": 8}`, "v_head_dim = 8"},
		"uneven heads": {`{"num_hidden_layers": 2, "num_attention_heads": 5, "hidden_size": 64}`,
			"hidden_size = 64: not divisible by 5 heads"},
		"no json":     {`model`, "invalid character"},
		"no layers":   {`{}`, "num_hidden_layers = 0"},
		"many layers": {`{"num_hidden_layers": 100000}`, "num_hidden_layers = 100000"},
		"no heads":    {`{"num_hidden_layers": 2}`, "do not follow from it"},
		"huge": {`{"num_hidden_layers": 2, "num_attention_heads": 99999999, "head_dim": 2}`,
			"num_key_value_heads (or num_attention_heads) = 99999999, or is missing: want 1 to 1048576"},
		"negative": {`{"num_hidden_layers": 2, "num_attention_heads": -4, "head_dim": 2}`,
			"num_attention_heads = -4: want 0 or more"},
		"negative in": {
			`{"text_config": {"num_hidden_layers": 2, "linear_attn_config": {"num_heads": -4}}}`,
			"linear_attn_config.num_heads = -4: want 0 or more"},
		"window below": {`{"model_type": "mistral", ` + dense + `, "sliding_window": -5}`,
			"sliding_window = -5: want 0 or more"},
		"latent below": {`{` + dense + `, "kv_lora_rank": -512}`, "kv_lora_rank = -512: want 0 or more"},
		"no KV heads": {`{` + dense + `, "num_key_value_heads": 0}`, "num_key_value_heads (or " +
			"num_attention_heads) = 0, or is missing"},
		"null KV heads": {`{` + dense + `, "num_key_value_heads": null}`, "[{4 4 16 0"},
		"no head size": {`{"num_hidden_layers": 2, "num_attention_heads": 4}`,
			"head_dim (or hidden_size by num_attention_heads) = 0, or is missing"},
		"no rope": {`{"num_hidden_layers": 2, "kv_lora_rank": 512}`, "qk_rope_head_dim is missing"},
		"rope of 0": {`{"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 0}`,
			"[{2 0 0 0 512 false"},
		"MLA off": {`{"model_type": "deepseek_v2", ` + dense +
			`, "kv_lora_rank": null, "use_mla": false}`, "[{4 4 16 0 0 false"},
		"MLA of no dim": {`{"model_type": "deepseek_v2", ` + dense +
			`, "kv_lora_rank": null, "qk_rope_head_dim": 0}`, "[{4 4 16 0 0 false"},
		"MLA left out": {`{"model_type": "deepseek_v3", ` + dense + `}`, "[{4 0 0 0 576 false"},
		"narrow kernel": {`{` + dense + `, "layer_types": ["linear_attention", "linear_attention", "linear_attention", "linear_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 2,
			"linear_num_value_heads": 2, "linear_value_head_dim": 2, "linear_conv_kernel_dim": 1}`, "linear_conv_kernel_dim = 1, or is missing: want 2 to"},
		"text for a number": {`{"num_hidden_layers": "4"}`, "num_hidden_layers = a JSON string: " +
			"want a whole number"},
		"fraction": {`{"num_hidden_layers": 4.5}`, "num_hidden_layers = a JSON number 4.5: " +
			"want a whole number"},
		"past 64 bits": {`{"num_hidden_layers": 100000000000000000000}`, "num_hidden_layers = " +
			"a JSON number 100000000000000000000: want a whole number"},
		"list for a number": {`{"text_config": {"head_dim": [1]}}`, "text_config.head_dim = a JSON " +
			"array: want a whole number"},
		"number for a list":    {`{"layer_types": 4}`, "layer_types = a JSON number: want a list"},
		"number for an object": {`{"text_config": 4}`, "text_config = a JSON number: want an object"},
		"a list": {`[1]`, "the file = a JSON array: want an object, as in a model's " +
			"config.json"},
		"half": {`{"num_hidden_layers": 4`, "no JSON: unexpected end of JSON input; " +
			"pass a model's config.json"},
		"other types": {
			`{"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64, "layer_types": ["convolution"]}`, `"convolution" is unknown`},
		"short types": {
			`{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "layer_types": ["full_attention"]}`, "1 entries for 2 layers"},
		"linear, which": {
			`{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "linear_num_value_heads": 4}`, "to name them"},
		"kimi, which": {
			`{"model_type": "kimi_linear", "num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64}`, `model_type = "kimi_linear": has linear layers`},
		"mamba, which": {`{` + dense + `, "hybrid_override_pattern": "M-*"}`,
			`hybrid_override_pattern = "M-*"`},
		"kda twice": {
			`{"num_hidden_layers": 2, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1]}}`, "layer 1 is named twice"},
		"kda few": {
			`{"num_hidden_layers": 3, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}}`, "are not 3 layers"},
		"long": {strings.Repeat(" ", MaxConfigBytes+1), "at most"},
	} {
		m, err := ParseConfig(name, []byte(c.json))
		got := fmt.Sprint(err)
		if err == nil {
			got = fmt.Sprint(m.Caches)
		}
		if !strings.Contains(got, c.want) {
			t.Errorf("%s: got %s, want %s", name, got, c.want)
		}
	}
}

// FuzzParseConfig: no file makes a panic, an endless plan, a layout that does not hold together, or
// more memory than the bounds.
func FuzzParseConfig(f *testing.F) {
	f.Add(
		[]byte(
			`{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}`), uint8(16), uint8(2), uint8(3))
	f.Add(
		[]byte(
			`{"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "sliding_window": 7}`), uint8(16), uint8(2), uint8(1))
	f.Add(
		[]byte(
			`{"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}`),
		uint8(64), uint8(1), uint8(8))
	f.Add(
		[]byte(
			`{"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 4, "layer_types": ["linear_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 4,`+
				`"linear_num_value_heads": 4, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4}`),
		uint8(16), uint8(1), uint8(2))
	// As many layers and ranks as allowed, and as many numbers as fit the bytes.
	f.Add([]byte(`{"num_hidden_layers": 1024, "num_attention_heads": 15, "head_dim": 1048576}`),
		uint8(1), uint8(15), uint8(15))
	f.Add([]byte(`{"num_hidden_layers": 1, "compress_ratios": [`+strings.Repeat("4,", 1<<15)+`4]}`),
		uint8(1), uint8(1), uint8(1))
	f.Add([]byte(`{"num_hidden_layers": 1, "layer_types": [`+strings.Repeat(`"",`, 1<<15)+`""]}`),
		uint8(1), uint8(1), uint8(1))
	for _, c := range published {
		f.Add([]byte(strings.Replace(c.json, "INTERLEAVED", strings.Repeat("4, 128, ", 30)+"4", 1)),
			uint8(128), uint8(1), uint8(2))
	}
	f.Fuzz(func(t *testing.T, b []byte, block, tp, to uint8) {
		var m *Model
		var err error
		testutil.AllocatesAtMost(t, uint64(maxReading+maxPerByte*len(b)),
			fmt.Sprintf("reading %d bytes", len(b)), func() { m, err = ParseConfig("fuzz", b) })
		if err != nil {
			return
		}
		layers := 0
		for _, c := range m.Caches {
			layers += c.Layers
		}
		testutil.AllocatesAtMost(t, uint64(maxExplaining+maxPerLayer*layers*max(1,
			int(tp%16)*int(to%16))), fmt.Sprintf("explaining %d layers", layers), func() {
			r, err := Explain(m, side(int(block), int(tp%16), parseblock.PackedNHD, m.DType()),
				side(int(block), int(to%16), parseblock.PackedHND, m.DType()), 33)
			if err != nil {
				return
			}
			for _, w := range []func(io.Writer) error{r.WriteText, r.WriteJSON} {
				if err := w(io.Discard); err != nil {
					t.Fatal(err)
				}
			}
		})
	})
}

func FuzzParseEngine(f *testing.F) {
	f.Add([]byte(`{"workers": [{"name": "w", "layout": "gaVtb2RlbKFt"}]}`))
	for _, name := range []string{"llama-3.1-8b", "deepseek-v4-flash", "qwen3-next-80b"} {
		m, err := Preset(name)
		if err != nil {
			f.Fatal(err)
		}
		l, _, err := m.Layout(side(128, 1, parseblock.PackedNHD, m.DType()), 0, 128)
		if err != nil {
			f.Fatal(err)
		}
		b, err := l.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(fmt.Appendf(nil, `{"workers": [{"name": "w", "layout": %q}]}`,
			base64.StdEncoding.EncodeToString(b)))
	}
	f.Add([]byte(`{"workers": [` + strings.Repeat("{},", 1<<13) + `{}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var e *Engine
		var err error
		testutil.AllocatesAtMost(t, uint64(maxReading+maxPerByte*len(b)),
			fmt.Sprintf("reading %d bytes", len(b)), func() {
				e, err = ParseEngine("fuzz", "", bytes.NewReader(b))
			})
		if err != nil {
			return
		}
		layers := 0
		for _, l := range e.Layouts {
			layers += l.NumLayers()
		}
		testutil.AllocatesAtMost(t, uint64(maxExplaining+maxPerLayer*layers*len(e.Layouts)),
			fmt.Sprintf("explaining %d layers of %d workers", layers, len(e.Layouts)), func() {
				if r, err := ExplainEngines(e, e, 64); err == nil && r.TotalBytes == 0 && r.BytesPerToken >= 1 {
					t.Fatalf("%v bytes a token, and nothing moves: %+v", r.BytesPerToken, r)
				}
				if v, err := Check(e, e); err == nil && len(v.Means)+len(v.Geometry) > 0 &&
					len(e.Layouts) == 1 {
					t.Fatalf("an engine differs from itself: %+v", v)
				}
			})
	})
}
