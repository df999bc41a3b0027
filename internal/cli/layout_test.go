// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/explain"
	"github.com/kvspray/kvspray/parseblock"
)

func TestLayoutExplain(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(config, []byte(`{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		code int
		text string
	}{
		"preset":    {[]string{"--model", "llama-3.1-8b", "--tp", "2", "--to-tp", "1"}, exitOK, "1,048,576  2,048"},
		"file":      {[]string{"--model", config, "--block", "16", "--to-block", "64", "--tokens", "100"}, exitOK, "256 bytes a token"},
		"json":      {[]string{"--model", config, "--format", "json"}, exitOK, `"bytes_per_token": 256`},
		"svg":       {[]string{"--model", config, "--format", "svg"}, exitOK, "<svg "},
		"no model":  {nil, exitUsage, "--model is missing"},
		"no preset": {[]string{"--model", "gpt-2"}, exitUsage, "neither a file nor a preset"},
		"no file":   {[]string{"--model", "./nowhere/config.json"}, exitUsage, "no such file"},
		"no format": {[]string{"--model", config, "--format", "png"}, exitUsage, "text, json or svg"},
		"other":     {[]string{"--model", config, "--to-dtype", "fp8"}, exitUsage, "never converted"},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, errs := run(append([]string{"layout", "explain"}, c.args...)...)
			if code != c.code || !strings.Contains(out+errs, c.text) {
				t.Errorf("code %d, want %d with %q:\n%s%s", code, c.code, c.text, out, errs)
			}
		})
	}
}

// TestLayoutCheck asks two servers that answer as a sidecar does.
func TestLayoutCheck(t *testing.T) {
	serve := func(weights string, tp int) string {
		m, err := explain.Preset("llama-3.1-8b")
		if err != nil {
			t.Fatal(err)
		}
		type worker struct {
			Name   string `json:"name"`
			Layout []byte `json:"layout"`
		}
		var reply struct {
			Workers []worker `json:"workers"`
		}
		for rank := range tp {
			l, _, err := m.Layout(explain.Side{Block: 16, TP: tp, Order: parseblock.PackedNHD, DType: "bf16"}, rank, 64)
			if err != nil {
				t.Fatal(err)
			}
			l.Identity = map[string]string{parseblock.IdentityWeights: weights}
			b, err := l.Marshal()
			if err != nil {
				t.Fatal(err)
			}
			reply.Workers = append(reply.Workers, worker{"w", b})
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
	a, b, two, none := serve("1", 1), serve("2", 1), serve("1", 2), serve("1", 0)
	for name, c := range map[string]struct {
		args []string
		code int
		text string
	}{
		"equal":   {[]string{a, a}, exitOK, "ok: pages move as they are"},
		"ranks":   {[]string{two, a}, exitOK, "2 workers give to one"},
		"differ":  {[]string{a, b}, exitFailure, `identity.weights: "1" here, "2" there`},
		"json":    {[]string{"--json", a, b}, exitFailure, `"differs": [`},
		"empty":   {[]string{none, a}, exitFailure, "no engine has registered"},
		"one":     {[]string{a}, exitUsage, "--help"},
		"path":    {[]string{a + "/other", a}, exitFailure, "404"},
		"nothing": {[]string{"127.0.0.1:1", a}, exitFailure, "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, errs := run(append([]string{"layout", "check"}, c.args...)...)
			if code != c.code || !strings.Contains(out+errs, c.text) {
				t.Errorf("code %d, want %d with %q:\n%s%s", code, c.code, c.text, out, errs)
			}
		})
	}
}
