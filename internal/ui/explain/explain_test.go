package explain

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/parseblock"
)

func side(block, tp int, order, dtype string) Side {
	return Side{Block: block, TP: tp, Order: order, DType: dtype}
}

// TestPresets holds the figures that are published for these models against what their pages add up
// to.
func TestPresets(t *testing.T) {
	for _, c := range []struct {
		model, dtype string
		perToken     float64
		fixed        uint64
	}{
		{"llama-3.1-8b", "bf16", 131072, 0},
		{"llama-3.1-70b", "bf16", 327680, 0},
		{"qwen3-8b", "bf16", 147456, 0},
		{"qwen3-32b", "bf16", 262144, 0},
		{"qwen3-30b-a3b", "bf16", 98304, 0},
		{"qwen3-235b-a22b", "bf16", 192512, 0},
		{"deepseek-v3", "bf16", 70272, 0},
		{"deepseek-v3", "fp8", 40016, 0},
		{"deepseek-v3.2", "fp8", 48068, 0},
		{"deepseek-v3.2", "bf16", 78324, 0},
		{"qwen3-next-80b", "bf16", 24576, 36 * (49152 + 1<<20)},
		{"kimi-linear-48b", "bf16", 8064, 20 * (73728 + 2<<20)},
		{"gpt-oss-120b", "bf16", 36864, 18 * 128 * 2048},
		{"gpt-oss-20b", "bf16", 24576, 3 << 20},
		{"gemma-3-27b", "bf16", 81920, 416 << 20},
		// Entries and keys of 584 and 132 bytes; windows; of each compressor key and score of the
		// last 8 or 128 tokens, twice where entries overlap.
		{"deepseek-v4-pro", "fp8", 30*716/4.0 + 31*584/128.0, 61*128*584 + 30*8*(8192+2048) +
			31*128*4096},
		{"deepseek-v4-flash", "fp8", 21*716/4.0 + 20*584/128.0, 43*128*584 + 21*8*(8192+2048) +
			20*128*4096},
	} {
		m, err := Preset(c.model)
		if err != nil {
			t.Fatal(err)
		}
		s := side(128, 1, parseblock.PackedNHD, c.dtype)
		r, err := Explain(m, s, s, 4096)
		if err != nil {
			t.Errorf("%s: %v", c.model, err)
			continue
		}
		if r.BytesPerToken != c.perToken || r.FixedBytes != c.fixed {
			t.Errorf("%s %s: %v bytes a token and %d besides, want %v and %d", c.model, c.dtype,
				r.BytesPerToken, r.FixedBytes, c.perToken, c.fixed)
		}
	}
	if _, err := Preset("gpt-2"); err == nil || !strings.Contains(err.Error(), "llama-3.1-8b") {
		t.Errorf("an unknown preset: %v", err)
	}
}

// TestPlan: the sources together give every receiver what its cache holds of the prompt, and the
// size of writes follows from orders and ranks.
func TestPlan(t *testing.T) {
	for _, c := range []struct {
		model           string
		prefill, decode Side
		tokens          int
		total           uint64 // bytes
		writes          uint64
		shortest        uint64
		longest         uint64
		flows           int
	}{
		// The case that peers make two million writes of.
		{"llama-3.1-8b", side(16, 2, parseblock.PackedNHD, "bf16"), side(16, 1, parseblock.PackedNHD,
			"bf16"), 32768, 4 << 30, 2 * 32 * 32768, 2048, 2048, 2},
		{"llama-3.1-8b", side(16, 2, parseblock.PackedHND, "bf16"), side(16, 1, parseblock.PackedHND,
			"bf16"), 32768, 4 << 30, 2 * 32 * 2048, 32768, 32768, 2},
		{"llama-3.1-8b", side(16, 1, parseblock.PackedNHD, "bf16"), side(16, 4, parseblock.PackedNHD,
			"bf16"), 4096, 512 << 20, 4 * 32 * 4096, 1024, 1024, 4},
		// Replicated heads: each of 8 ranks has one of 4 heads; a decode rank takes it from one of
		// two.
		{"qwen3-30b-a3b", side(16, 8, parseblock.PackedHND, "bf16"), side(16, 1, parseblock.PackedHND,
			"bf16"), 16, 16 * 98304, 48 * 4, 8192, 8192, 4},
		// MLA: every rank has everything, one gives.
		{"deepseek-v3", side(64, 8, parseblock.PackedNHD, "bf16"), side(64, 2, parseblock.PackedNHD,
			"bf16"), 64, 2 * 64 * 70272, 2 * 61, 64 * 1152, 64 * 1152, 2},
		// A part of a page of the indexer is two pieces.
		{"deepseek-v3.2", side(64, 1, parseblock.PackedNHD, "fp8"), side(64, 1, parseblock.PackedNHD,
			"fp8"), 10, 10 * 48068, 61 * 3, 40, 6560, 1},
	} {
		m, err := Preset(c.model)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Explain(m, c.prefill, c.decode, c.tokens)
		if err != nil {
			t.Errorf("%s: %v", c.model, err)
			continue
		}
		f := r.Flows[0]
		if r.TotalBytes != c.total || r.TotalWrites != c.writes || len(r.Flows) != c.flows ||
			f.Shortest != c.shortest || f.Longest != c.longest {
			t.Errorf("%s: %d bytes in %d writes of %d to %d, %d flows; want %d in %d of %d to %d, %d",
				c.model, r.TotalBytes, r.TotalWrites, f.Shortest, f.Longest, len(r.Flows),
				c.total, c.writes, c.shortest, c.longest, c.flows)
		}
	}
}

// perToken are the bytes of a token in all attention layers of bf16.
func perToken(m *Model) (sum uint64) {
	for _, c := range m.Caches {
		sum += uint64(c.Layers * c.KVHeads * c.HeadDim * 2 * 2)
	}
	return sum
}

// TestAnyRanks: any number of ranks is planned, so it is explained, with a note where no engine
// has that number. Every rank gets each head that it has, whatever the other side is.
func TestAnyRanks(t *testing.T) {
	const tokens = 33
	for _, c := range []struct {
		model   string
		kvHeads uint64 // of all layers; 0: not only those, and the bytes are not counted here
		unusual string // in the note about three ranks
	}{
		{"llama-3.1-8b", 8, "8 KV heads over 3 ranks"},
		{"deepseek-v3.2", 0, ""},
		{"qwen3-next-80b", 0, "2 KV heads over 3 ranks; prefill: no engine known to us spreads 16 key " +
			"and 32 value heads over 3 ranks"},
		{"gpt-oss-20b", 8, "8 KV heads over 3 ranks"},
	} {
		m, err := Preset(c.model)
		if err != nil {
			t.Fatal(err)
		}
		for _, to := range []int{1, 3, 12} {
			decode := side(32, to, parseblock.PackedNHD, m.DType())
			alone, err := Explain(m, decode, decode, tokens)
			if err != nil {
				t.Fatal(err)
			}
			for _, from := range []int{2, 3, 5} {
				r, err := Explain(m, side(16, from, parseblock.PackedHND, m.DType()), decode, tokens)
				if err != nil || r.TotalBytes != alone.TotalBytes {
					t.Errorf("%s, %d to %d: %+v, and %d bytes from an engine like it (%v)", c.model, from, to, r,
						alone.TotalBytes, err)
					continue
				}
				got := map[int]bool{}
				for _, f := range r.Flows {
					got[f.To] = true
				}
				if len(got) != to {
					t.Errorf("%s, %d to %d: only %d ranks get anything", c.model, from, to, len(got))
				}
				// Where there are more ranks than heads, each has one.
				if all := perToken(m); c.kvHeads > 0 && r.TotalBytes != all*tokens/c.kvHeads*max(c.kvHeads,
					uint64(to)) {
					t.Errorf("%s, %d to %d: %d bytes, want %d", c.model, from, to, r.TotalBytes,
						all*tokens/c.kvHeads*max(c.kvHeads, uint64(to)))
				}
				if noted := strings.Contains(r.Note, "prefill: no engine known to us spreads "+c.unusual) &&
					c.unusual != ""; noted != (from == 3 && c.unusual != "") {
					t.Errorf("%s, %d to %d: the note is %q, want %q: %v", c.model, from, to, r.Note,
						c.unusual, from == 3)
				}
			}
		}
	}
}

// TestForms: every preset in every form, with unequal sides.
func TestForms(t *testing.T) {
	for _, name := range Presets() {
		m, err := Preset(name)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Explain(m, side(256, 1, parseblock.PackedNHD, m.DType()),
			side(128, 2, parseblock.PackedHND, m.DType()), 700)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var text, js bytes.Buffer
		for _, err := range []error{r.WriteText(&text), r.WriteJSON(&js)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		if !strings.Contains(text.String(), "bytes a token") || !strings.Contains(text.String(), "|aaa") {
			t.Errorf("%s: %s", name, text.String())
		}
		var back Report
		if err := json.Unmarshal(js.Bytes(), &back); err != nil || back.TotalBytes != r.TotalBytes {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRefusals(t *testing.T) {
	m, err := Preset("llama-3.1-8b")
	if err != nil {
		t.Fatal(err)
	}
	v4, err := Preset("deepseek-v4-pro")
	if err != nil {
		t.Fatal(err)
	}
	good := side(16, 1, parseblock.PackedNHD, "bf16")
	for want, f := range map[string]func() error{
		"--block 0: ": func() error {
			_, err := Explain(m, side(0, 1, good.Order, "bf16"), good, 10)
			return err
		},
		"--to-tp 300: ": func() error {
			_, err := Explain(m, good, side(16, 300, good.Order, "bf16"), 10)
			return err
		},
		`order "zigzag"`: func() error {
			_, err := Explain(m, side(16, 1, "zigzag", "bf16"), good, 10)
			return err
		},
		`dtype "int3"`: func() error {
			_, err := Explain(m, side(16, 1, good.Order, "int3"), good, 10)
			return err
		},
		"--dtype bf16: the pages of DeepSeek-V4": func() error {
			_, err := Explain(v4, good, good, 10)
			return err
		},
		"0 tokens": func() error {
			_, err := Explain(m, good, good, 0)
			return err
		},
		`dtype = "bf16" and "f`: func() error {
			_, err := Explain(m, good, side(16, 1, good.Order, "fp8"), 10)
			return err
		},
	} {
		if err := f(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// What engines do is explained without a remark: every rank has as many heads as the others, or one
// that equally many have.
func TestRanksOfEngines(t *testing.T) {
	for name, want := range map[string][]int{
		"llama-3.1-8b":   {1, 2, 4, 8, 16},
		"qwen3-30b-a3b":  {1, 2, 4, 8, 12, 16},
		"qwen3-next-80b": {1, 2, 4, 8, 16}, // 2 KV heads, 16 and 32 of linear attention
		"deepseek-v3":    {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
	} {
		m, err := Preset(name)
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for tp := 1; tp <= 16; tp++ {
			r, err := Explain(m, side(16, tp, parseblock.PackedNHD, "bf16"),
				side(16, 1, parseblock.PackedNHD, "bf16"), 10)
			if err != nil {
				t.Errorf("%s over %d ranks: %v", name, tp, err)
			} else if r.Note == "" {
				got = append(got, tp)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

// published has the fields of these models' config.json that matter here; DeepSeek-V4's list is
// written out by the test.
var published = []struct {
	model, json string
	perToken    float64
	fixed       uint64
}{
	{"llama-3.1-8b",
		`{"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}`, 32 * 2 * 8 * 128 * 2, 0},
	{"llama-3.1-70b",
		`{"model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}`, 80 * 2 * 8 * 128 * 2, 0},
	{"qwen3-8b", `{"model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096,
		"sliding_window": null, "use_sliding_window": false, "max_window_layers": 36}`, 36 * 2 * 8 * 128 * 2, 0},
	{"qwen3-32b", `{"model_type": "qwen3", "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 5120,
		"sliding_window": null, "use_sliding_window": false, "max_window_layers": 64}`, 64 * 2 * 8 * 128 * 2, 0},
	{"qwen3-30b-a3b", `{"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "hidden_size": 2048,
		"sliding_window": null, "use_sliding_window": false}`, 48 * 2 * 4 * 128 * 2, 0},
	{"qwen3-235b-a22b", `{"model_type": "qwen3_moe", "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "hidden_size": 4096,
		"sliding_window": null, "use_sliding_window": false}`, 94 * 2 * 4 * 128 * 2, 0},
	{"deepseek-v3", `{"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
		"qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1}`, 61 * 576 * 2, 0},
	{"deepseek-v3.2", `{"model_type": "deepseek_v32", "num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
		"v_head_dim": 128, "index_head_dim": 128, "index_n_heads": 64}`, 61 * (576*2 + 132), 0},
	{"deepseek-v4-flash", `{"model_type": "deepseek_v4", "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
		"qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128, "compress_ratios": [0, 0, INTERLEAVED, 0]}`,
		21*(584+132)/4.0 + 20*584/128.0, 43*128*584 + 21*8*4*(2048+512) + 20*128*4*1024},
	{"deepseek-v4-pro", `{"model_type": "deepseek_v4", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 1, "head_dim": 512,
		"qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128, "compress_ratios": [128, 128, INTERLEAVED, 0]}`,
		30*(584+132)/4.0 + 31*584/128.0, 61*128*584 + 30*8*4*(2048+512) + 31*128*4*1024},
	{"qwen3-next-80b", `{"model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
		"full_attention_interval": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
		"linear_conv_kernel_dim": 4}`, 12 * 2 * 2 * 256 * 2, 36 * (3*(2*16*128+32*128)*2 + 32*128*128*2)},
	{"kimi-linear-48b", `{"model_type": "kimi_linear", "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "hidden_size": 2304,
		"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
		"kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26], "num_heads": 32, "short_conv_kernel_size": 4}}`,
		7 * 576 * 2, 20 * (3*3*32*128*2 + 32*128*128*4)},
	{"gpt-oss-120b", `{"model_type": "gpt_oss", "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880,
		"sliding_window": 128}`, 18 * 2 * 8 * 64 * 2, 18 * 128 * 2 * 8 * 64 * 2},
	{"gpt-oss-20b", `{"model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880,
		"sliding_window": 128}`, 12 * 2 * 8 * 64 * 2, 12 * 128 * 2 * 8 * 64 * 2},
	{"gemma-3-27b", `{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
		"head_dim": 128, "hidden_size": 5376, "sliding_window": 1024}}`, 10 * 2 * 16 * 128 * 2, 52 * 1024 * 2 * 16 * 128 * 2},
	// Models without a preset. Gemma's of 4 billion parameters names no heads, GLM-5 has indexers in
	// some layers only.
	{"", `{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}}`,
		5 * 2 * 4 * 256 * 2, 29 * 1024 * 2 * 4 * 256 * 2},
	{"", `{"model_type": "gemma3_text", "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "hidden_size": 1152,
		"sliding_window": 512, "sliding_window_pattern": 6}`, 4 * 2 * 256 * 2, 22 * 512 * 2 * 256 * 2},
	{"", `{"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
		"head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
		"linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32"}}`, 10 * 2 * 2 * 256 * 2, 30 * (3*(2*16*128+32*128)*2 + 32*128*128*4)},
	{"", `{"model_type": "glm_moe_dsa", "num_hidden_layers": 10, "num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 256,
		"index_head_dim": 128, "index_topk_freq": 4, "index_skip_topk_offset": 3}`, 10*576*2 + 4*132, 0},
	{"", `{"model_type": "deepseek_v4", "num_hidden_layers": 4, "sliding_window": 128,
		"layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"]}`,
		2*(584+132)/4.0 + 584/128.0, 4*128*584 + 2*8*4*(2048+512) + 128*4*1024},
}

// TestSlabPages: the pages of DeepSeek-V4 are as large as vLLM's with blocks of 256 tokens, which
// come out alike for entries and states.
func TestSlabPages(t *testing.T) {
	m, err := Preset("deepseek-v4-pro")
	if err != nil {
		t.Fatal(err)
	}
	l, _, err := m.Layout(side(256, 1, parseblock.PackedNHD, "fp8"), 0, 4096)
	if err != nil {
		t.Fatal(err)
	}
	type page struct {
		strategy      string
		tokens        uint32
		bytes, stride uint64
	}
	var got []page
	for _, g := range l.Groups {
		got = append(got, page{g.Strategy, g.TokensPerBlock, g.Layers[0].PageBytes,
			g.Layers[0].BlockStride})
	}
	want := []page{
		{"deepseek_v4", 256, 64 * 584, 37440},
		{"dsa_indexer", 256, 64 * 132, 8640},
		{"deepseek_v4_compressor", 4, 4 * 2048 * 4, 32832},
		{"deepseek_v4_compressor", 4, 4 * 512 * 4, 8640},
		{"deepseek_v4", 256, 2 * 584, 1728},
		{"deepseek_v4_compressor", 8, 8 * 1024 * 4, 32832},
		{"deepseek_v4", 256, 256 * 584, 149760},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

// Bounds of what a foreign description may make this process allocate, in all. Reading takes some
// times the bytes that are read (a number of a list of two characters is an int, a group of a
// layout is a struct), explaining what the layers of that many ranks take.
const (
	maxReading    = 192 << 10 // what encoding/json keeps of a type is made when it is first read
	maxPerByte    = 128
	maxExplaining = 32 << 20
	maxPerLayer   = 8 << 10 // of each pair of ranks
)

func TestCheck(t *testing.T) {
	m, err := Preset("llama-3.1-8b")
	if err != nil {
		t.Fatal(err)
	}
	engine := func(s Side, id string) *Engine {
		e := &Engine{Name: "e"}
		for rank := range s.TP {
			l, _, err := m.Layout(s, rank, 64)
			if err != nil {
				t.Fatal(err)
			}
			l.Identity = connectortest.Identity(parseblock.IdentityWeights, id)
			e.Layouts = append(e.Layouts, l)
		}
		return e
	}
	nhd := side(16, 1, parseblock.PackedNHD, "bf16")
	half := engine(side(16, 2, parseblock.PackedNHD, "bf16"), "a")
	half.Layouts = half.Layouts[:1]
	for name, c := range map[string]struct {
		from, to *Engine
		ok       bool
		want     string
	}{
		"equal": {engine(nhd, "a"), engine(nhd, "a"), true, "ok: pages move as they are"},
		"reshape": {engine(side(16, 2, parseblock.PackedHND, "bf16"), "a"),
			engine(side(64, 1, parseblock.PackedNHD, "bf16"), "a"), true, "2 workers give to one"},
		"weights": {engine(nhd, "a"), engine(nhd, "b"), false,
			`identity.weights: "a" here, "b" there`},
		"dtype": {engine(nhd, "a"), engine(side(16, 1, parseblock.PackedNHD, "fp8"), "a"), false,
			`dtype: "bf16" here, "fp8" there`},
		"rank missing": {half, engine(nhd, "a"), false, "heads [4, 8): no source has them"},
	} {
		v, err := Check(c.from, c.to)
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := v.WriteText(&b); err != nil {
			t.Fatal(err)
		}
		if v.OK() != c.ok || !strings.Contains(b.String(), c.want) {
			t.Errorf("%s: ok %v\n%swant %q", name, v.OK(), b.String(), c.want)
		}
	}
	b, err := half.Layouts[0].Marshal()
	if err != nil {
		t.Fatal(err)
	}
	worker := fmt.Sprintf(`{"layout": %q}`, base64.StdEncoding.EncodeToString(b))
	for n, want := range map[int]string{maxWorkers: "<nil>", maxWorkers + 1: "x: more than 1024 " +
		"workers of one engine"} {
		_, err := ParseEngine("x", "", strings.NewReader(`{"workers": [`+strings.Repeat(worker+",",
			n-1)+worker+`]}`))
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%d workers: got %v, want %s", n, err, want)
		}
	}
	if _, err := Check(&Engine{Name: "x"}, half); err == nil || !strings.Contains(err.Error(),
		"no engine has registered") {
		t.Errorf("nothing registered: %v", err)
	}
}
