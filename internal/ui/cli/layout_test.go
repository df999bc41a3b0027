package cli

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/ui/command"
	"github.com/kvspray/kvspray/internal/ui/explain"
	"github.com/kvspray/kvspray/parseblock"
)

func TestLayoutExplain(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(config, []byte(
		`{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, `+
			`"hidden_size": 64}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		text string
	}{
		"preset": {[]string{"--model", "llama-3.1-8b", "--tp", "2", "--to-tp", "1"}, command.ExitOK,
			"1,048,576  2,048"},
		"file": {[]string{"--model", config, "--block", "16", "--to-block", "64", "--tokens", "100"},
			command.ExitOK, "256 bytes a token"},
		"json": {[]string{"--model", config, "--json"}, command.ExitOK,
			`"bytes_per_token": 256`},
		"no model":  {nil, command.ExitUsage, "--model is missing"},
		"no preset": {[]string{"--model", "gpt-2"}, command.ExitUsage, "neither a file nor a preset"},
		"no file":   {[]string{"--model", "./nowhere/config.json"}, command.ExitUsage, "no such file"},
		"other": {[]string{"--model", config, "--to-dtype", "fp8"}, command.ExitUsage,
			"without conversion"},
		"slab": {[]string{"--model", "deepseek-v4-pro", "--block", "256"}, command.ExitOK,
			"deepseek_v4_compressor"},
		"no slab": {[]string{"--model", "deepseek-v4-pro", "--dtype", "bf16"}, command.ExitUsage,
			"give --dtype fp8"},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, errs := run(append([]string{"layout", "explain"}, c.args...)...)
			if code != c.code || !strings.Contains(out+errs, c.text) {
				t.Errorf("code %d, want %d with %q:\n%s%s", code, c.code, c.text, out, errs)
			}
		})
	}
}

// sidecarOf is a server that answers as a sidecar does, with engines of llama-3.1-8b.
func sidecarOf(t *testing.T, weights string, engines map[string]explain.Side) string {
	m, err := explain.Preset("llama-3.1-8b")
	if err != nil {
		t.Fatal(err)
	}
	var reply nodeapi.Layouts
	for id, side := range engines {
		for rank := range side.TP {
			l, _, err := m.Layout(side, rank, 4096)
			if err != nil {
				t.Fatal(err)
			}
			l.Identity = connectortest.Identity(parseblock.IdentityWeights, weights)
			b, err := l.Marshal()
			if err != nil {
				t.Fatal(err)
			}
			reply.Workers = append(reply.Workers, nodeapi.Layout{Name: "w", Engine: id, Layout: b})
		}
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/v1/layouts" {
			http.NotFound(w, q)
			return
		}
		if err := json.NewEncoder(w).Encode(reply); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func nhd(tp, block int) explain.Side {
	return explain.Side{Block: block, TP: tp, Order: parseblock.PackedNHD, DType: "bf16"}
}

// TestLayoutExplainEngine explains what running engines registered.
func TestLayoutExplainEngine(t *testing.T) {
	two := sidecarOf(t, "1", map[string]explain.Side{"vllm/p": nhd(2, 16)})
	one := sidecarOf(t, "1", map[string]explain.Side{"vllm/d": nhd(1, 64)})
	many := sidecarOf(t, "1", map[string]explain.Side{"vllm/p": nhd(2, 16), "vllm/d": nhd(1, 64)})
	for name, c := range map[string]struct {
		args []string
		code int
		text string
	}{
		"two sidecars": {[]string{"--engine", two, "--to-engine", one}, command.ExitOK,
			"prefill TP 2 with 16 tokens a block to decode TP 1 with 64"},
		"to itself": {[]string{"--engine", two}, command.ExitOK, "131,072 bytes a token"},
		"one of several": {[]string{"--engine", many + "#vllm/p", "--to-engine", many + "#vllm/d"},
			command.ExitOK, "prefill TP 2 with 16"},
		"json": {[]string{"--engine", two, "--json"}, command.ExitOK,
			`"bytes_per_token": 131072`},
		"which of them": {[]string{"--engine", many}, command.ExitFailure,
			"2 engines are registered there"},
		"not there": {[]string{"--engine", many + "#vllm/x"}, command.ExitFailure,
			`engine "vllm/x" is not registered there`},
		"none there": {[]string{"--engine", sidecarOf(t, "1", nil)}, command.ExitFailure,
			"no engine has registered"},
		"too many": {[]string{"--engine", two, "--tokens", "9000"}, command.ExitFailure,
			"ask for 4096 tokens at most"},
		"model as well": {[]string{"--engine", two, "--model", "llama-3.1-8b"}, command.ExitUsage,
			"one of them"},
		"only decode": {[]string{"--to-engine", two}, command.ExitUsage,
			"name the prefill engine's sidecar"},
		"nobody": {[]string{"--engine", "127.0.0.1:1"}, command.ExitFailure, "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"layout", "explain"}, c.args...)
			if !slices.Contains(args, "--tokens") {
				args = append(args, "--tokens", "4096")
			}
			code, out, errs := run(args...)
			if code != c.code || !strings.Contains(out+errs, c.text) {
				t.Errorf("code %d, want %d with %q:\n%s%s", code, c.code, c.text, out, errs)
			}
		})
	}
}

// TestLayoutCheck asks two servers that answer as a sidecar does.
func TestLayoutCheck(t *testing.T) {
	serve := func(weights string, tp int) string {
		if tp == 0 {
			return sidecarOf(t, weights, nil)
		}
		return sidecarOf(t, weights, map[string]explain.Side{"vllm/e": nhd(tp, 16)})
	}
	a, b, two, none := serve("1", 1), serve("2", 1), serve("1", 2), serve("1", 0)
	for name, c := range map[string]struct {
		args []string
		code int
		text string
	}{
		"equal":   {[]string{a, a}, command.ExitOK, "ok: pages move as they are"},
		"ranks":   {[]string{two, a}, command.ExitOK, "2 workers give to one"},
		"differ":  {[]string{a, b}, command.ExitFailure, `identity.weights: "1" here, "2" there`},
		"json":    {[]string{"--json", a, b}, command.ExitFailure, `"differs": [`},
		"empty":   {[]string{none, a}, command.ExitFailure, "no engine has registered"},
		"one":     {[]string{a}, command.ExitUsage, "--help"},
		"path":    {[]string{a + "/other", a}, command.ExitFailure, "404"},
		"nothing": {[]string{"127.0.0.1:1", a}, command.ExitFailure, "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, errs := run(append([]string{"layout", "check"}, c.args...)...)
			if code != c.code || !strings.Contains(out+errs, c.text) {
				t.Errorf("code %d, want %d with %q:\n%s%s", code, c.code, c.text, out, errs)
			}
		})
	}
}
