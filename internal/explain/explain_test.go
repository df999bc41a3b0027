// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/parseblock"
)

func side(block, tp int, order, dtype string) Side {
	return Side{Block: block, TP: tp, Order: order, DType: dtype}
}

// TestPresets holds the figures that are published for these models against what their pages add up to.
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
		{"deepseek-v4-pro", "bf16", 30*716/4.0 + 31*584/128.0, 61 * 128 * 584},
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
			t.Errorf("%s %s: %v bytes a token and %d besides, want %v and %d", c.model, c.dtype, r.BytesPerToken, r.FixedBytes, c.perToken, c.fixed)
		}
	}
	if _, err := Preset("gpt-2"); err == nil || !strings.Contains(err.Error(), "llama-3.1-8b") {
		t.Errorf("an unknown preset: %v", err)
	}
}

// TestPlan: what every receiver gets together is what its cache holds of the prompt, whoever gives it, and the size of writes is what
// orders and ranks say.
func TestPlan(t *testing.T) {
	for _, c := range []struct {
		model           string
		prefill, decode Side
		tokens          int
		total           uint64 // bytes
		writes          uint64
		least, most     uint64
		flows           int
	}{
		// The case that peers make two million writes of.
		{"llama-3.1-8b", side(16, 2, parseblock.FlashKVFirst, "bf16"), side(16, 1, parseblock.FlashKVFirst, "bf16"), 32768, 4 << 30, 2 * 32 * 65536, 1024, 1024, 2},
		{"llama-3.1-8b", side(16, 2, parseblock.PackedHND, "bf16"), side(16, 1, parseblock.PackedHND, "bf16"), 32768, 4 << 30, 2 * 32 * 2048, 32768, 32768, 2},
		{"llama-3.1-8b", side(16, 1, parseblock.PackedNHD, "bf16"), side(16, 4, parseblock.PackedNHD, "bf16"), 4096, 512 << 20, 4 * 32 * 4096, 1024, 1024, 4},
		// Replicated heads: each of 8 ranks has one of 4 heads; a decode rank takes it from one of two.
		{"qwen3-30b-a3b", side(16, 8, parseblock.PackedHND, "bf16"), side(16, 1, parseblock.PackedHND, "bf16"), 16, 16 * 98304, 48 * 4, 8192, 8192, 4},
		// MLA: every rank has everything, one gives.
		{"deepseek-v3", side(64, 8, parseblock.PackedNHD, "bf16"), side(64, 2, parseblock.PackedNHD, "bf16"), 64, 2 * 64 * 70272, 2 * 61, 64 * 1152, 64 * 1152, 2},
		// A part of a page of the indexer is two pieces.
		{"deepseek-v3.2", side(64, 1, parseblock.PackedNHD, "fp8"), side(64, 1, parseblock.PackedNHD, "fp8"), 10, 10 * 48068, 61 * 3, 40, 6560, 1},
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
		if r.TotalBytes != c.total || r.TotalWrites != c.writes || len(r.Flows) != c.flows || f.Least != c.least || f.Most != c.most {
			t.Errorf("%s: %d bytes in %d writes of %d to %d, %d flows; want %d in %d of %d to %d, %d", c.model, r.TotalBytes, r.TotalWrites, f.Least, f.Most, len(r.Flows),
				c.total, c.writes, c.least, c.most, c.flows)
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
		r, err := Explain(m, side(256, 1, parseblock.FlashBlockFirst, "bf16"), side(128, 2, parseblock.PackedHND, "bf16"), 700)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var text, js, svg bytes.Buffer
		for _, err := range []error{r.WriteText(&text), r.WriteJSON(&js), r.WriteSVG(&svg)} {
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
		d := xml.NewDecoder(&svg)
		for {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Errorf("%s: not well-formed: %v", name, err)
				break
			}
		}
	}
}

func TestRefusals(t *testing.T) {
	m, err := Preset("llama-3.1-8b")
	if err != nil {
		t.Fatal(err)
	}
	good := side(16, 1, parseblock.PackedNHD, "bf16")
	for want, f := range map[string]func() error{
		"--block 0: ":                          func() error { _, err := Explain(m, side(0, 1, good.Order, "bf16"), good, 10); return err },
		"--to-tp 300: ":                        func() error { _, err := Explain(m, good, side(16, 300, good.Order, "bf16"), 10); return err },
		"--tp 3: no engine spreads 8 KV heads": func() error { _, err := Explain(m, side(16, 3, good.Order, "bf16"), good, 10); return err },
		"--to-tp 12: no engine spreads":        func() error { _, err := Explain(m, good, side(16, 12, good.Order, "bf16"), 10); return err },
		`order "zigzag"`:                       func() error { _, err := Explain(m, side(16, 1, "zigzag", "bf16"), good, 10); return err },
		`dtype "int3"`:                         func() error { _, err := Explain(m, side(16, 1, good.Order, "int3"), good, 10); return err },
		"0 tokens":                             func() error { _, err := Explain(m, good, good, 0); return err },
		`dtype = "bf16" and "f`:                func() error { _, err := Explain(m, good, side(16, 1, good.Order, "fp8"), 10); return err },
	} {
		if err := f(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// What engines do is planned: every rank has as many heads as the others, or one that equally many have.
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
			if _, err := Explain(m, side(16, tp, parseblock.PackedNHD, "bf16"), side(16, 1, parseblock.PackedNHD, "bf16"), 10); err == nil {
				got = append(got, tp)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

func TestParseConfig(t *testing.T) {
	for name, c := range map[string]struct {
		json string
		want string // of the caches, or of the error
	}{
		"llama":    {`{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}`, "[{32 8 128 0"},
		"head dim": {`{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "head_dim": 64}`, "[{36 8 64 0"},
		"mha":      {`{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}`, "[{2 4 16 0"},
		"text":     {`{"model_type": "gemma3", "text_config": {"num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}}`, "[{1 2 8 0"},
		"mla":      {`{"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}`, "[{61 0 0 0 576 false"},
		"dsa":      {`{"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}`, "[{61 0 0 0 576 true"},
		"qwen next": {`{"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "layer_types": ["linear_attention", "full_attention"],
			"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}`, "{1 0 0 0 0 false 0 gdn_state 16 128 32 128 3 2}"},
		"kimi": {`{"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 32,
			"head_dim": 128, "short_conv_kernel_size": 4}}`, "{2 0 0 0 0 false 0 kda_state 32 128 32 128 3 4}"},
		"nemotron": {`{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "hybrid_override_pattern": "M-M*", "mamba_num_heads": 64,
			"mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}`, "{2 0 0 0 0 false 0 mamba2_state 8 128 64 64 3 2}"},
		"window off":    {`{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "sliding_window": 4096, "use_sliding_window": false}`, "[{2 4 16 0"},
		"window on":     {`{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "sliding_window": 4096}`, "[{2 4 16 4096"},
		"no json":       {`model`, "invalid character"},
		"no layers":     {`{}`, "num_hidden_layers = 0"},
		"many layers":   {`{"num_hidden_layers": 100000}`, "num_hidden_layers = 100000"},
		"no heads":      {`{"num_hidden_layers": 2}`, "cannot be told"},
		"huge":          {`{"num_hidden_layers": 2, "num_attention_heads": 99999999, "head_dim": 2}`, "a size of 99999999"},
		"negative":      {`{"num_hidden_layers": 2, "num_attention_heads": -4, "head_dim": 2}`, "a size of -4"},
		"other types":   {`{"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64, "layer_types": ["convolution"]}`, `"convolution" is unknown`},
		"short types":   {`{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "layer_types": ["full_attention"]}`, "1 entries for 2 layers"},
		"linear, which": {`{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "linear_num_value_heads": 4}`, "to say which"},
		"long":          {strings.Repeat(" ", MaxConfigBytes+1), "at most"},
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

// FuzzParseConfig: no file makes a panic, an endless plan or a layout that does not hold together.
func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(`{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "sliding_window": 7}`), uint8(16), uint8(2), uint8(3))
	f.Add([]byte(`{"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}`), uint8(64), uint8(1), uint8(8))
	f.Add([]byte(`{"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 4, "layer_types": ["linear_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 4,`+
		`"linear_num_value_heads": 4, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4}`), uint8(16), uint8(1), uint8(2))
	f.Fuzz(func(t *testing.T, b []byte, block, tp, to uint8) {
		m, err := ParseConfig("fuzz", b)
		if err != nil {
			return
		}
		r, err := Explain(m, side(int(block), int(tp%16), parseblock.PackedNHD, "bf16"), side(int(block), int(to%16), parseblock.PackedHND, "bf16"), 33)
		if err != nil {
			return
		}
		for _, w := range []func(io.Writer) error{r.WriteText, r.WriteJSON, r.WriteSVG} {
			if err := w(io.Discard); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func FuzzParseEngine(f *testing.F) {
	f.Add([]byte(`{"workers": [{"name": "w", "layout": "gaVtb2RlbKFt"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := ParseEngine("fuzz", "", bytes.NewReader(b))
		if err != nil {
			return
		}
		if r, err := ExplainEngines(e, e, 64); err == nil && r.TotalBytes == 0 && r.BytesPerToken >= 1 {
			t.Fatalf("%v bytes a token, and nothing moves: %+v", r.BytesPerToken, r)
		}
		if v, err := Check(e, e); err == nil && len(v.Means)+len(v.Geometry) > 0 && len(e.Layouts) == 1 {
			t.Fatalf("an engine differs from itself: %+v", v)
		}
	})
}

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
			l.Identity = map[string]string{parseblock.IdentityWeights: id}
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
		"equal":        {engine(nhd, "a"), engine(nhd, "a"), true, "ok: pages move as they are"},
		"reshape":      {engine(side(16, 2, parseblock.PackedHND, "bf16"), "a"), engine(side(64, 1, parseblock.PackedNHD, "bf16"), "a"), true, "2 workers give to one"},
		"weights":      {engine(nhd, "a"), engine(nhd, "b"), false, `identity.weights: "a" here, "b" there`},
		"dtype":        {engine(nhd, "a"), engine(side(16, 1, parseblock.PackedNHD, "fp8"), "a"), false, `dtype: "bf16" here, "fp8" there`},
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
	if _, err := Check(&Engine{Name: "x"}, half); err == nil || !strings.Contains(err.Error(), "no engine has registered") {
		t.Errorf("nothing registered: %v", err)
	}
}
