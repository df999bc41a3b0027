package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Flags override the file, and engines of flags come after those of the file.
func TestLoadRouter(t *testing.T) {
	file := filepath.Join(t.TempDir(), "router.yaml")
	if err := os.WriteFile(file, []byte(`engines:
  - {url: http://p:8000, role: prefill, sidecar: http://p:7651, peer: p:7650}
  - url: http://b:8000
    role: both
    events: tcp://b:5557
    replay: tcp://b:5558
mode: prefill-first
policy: auto
trace_share: 0.25
log: {level: debug}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := LoadRouter(file, []string{"policy=cache", "slow_after=1s", "log.format=json"},
		[]string{"url=http://d:8000/?a=b,role=decode"})
	if err != nil {
		t.Fatal(err)
	}
	want := DefaultRouter()
	want.Engines = []RouterEngine{
		{URL: "http://p:8000", Role: RolePrefill, Sidecar: "http://p:7651", Peer: "p:7650"},
		{URL: "http://b:8000", Role: RoleBoth, Events: "tcp://b:5557", Replay: "tcp://b:5558"},
		{URL: "http://d:8000/?a=b", Role: RoleDecode}}
	want.Mode, want.Policy, want.TraceShare = "prefill-first", "cache", 0.25
	want.SlowAfter, want.Log = Duration(time.Second), Log{Level: "debug", Format: FormJSON}
	if d := cmp.Diff(want, got, cmpopts.IgnoreUnexported(Router{})); d != "" {
		t.Error(d)
	}
}

// An error names the field, the value and the remedy.
func TestLoadRouterRefuses(t *testing.T) {
	const decode = "url=http://d:1,role=decode"
	file := filepath.Join(t.TempDir(), "router.yaml")
	for _, c := range []struct {
		name, text    string
		sets, engines []string
		want          string
	}{
		{"nothing", "", nil, nil, "engines: no engine decodes; add one with role decode"},
		{"empty list", "engines: []", nil, nil, "engines: no engine decodes"},
		{"prefill only", "", nil, []string{"url=http://p:1,role=prefill"}, "no engine decodes"},
		{"no list", "engines: http://d:1", nil, nil, ":1: engines: \"http://d:1\": not a list"},
		{"unknown key", "engine: []", nil, nil,
			`:1: engine: "[...]": unknown key; did you mean "engines"?`},
		{"unknown key of an engine", "engines:\n- {url: http://d:1, roll: x}", nil, nil,
			`:2: engines[0].roll: "x": unknown key; did you mean "role"?`},
		{"unknown key of a flag", "", nil, []string{decode + ",sidcar=x"},
			`engines[0].sidcar: "x": unknown key; did you mean "sidecar"?`},
		{"role", "", nil, []string{"url=http://d:1,role=decoder"},
			`engines[0].role: "decoder": not one of prefill, decode, both`},
		{"no role", "", nil, []string{"url=http://d:1"}, "engines[0].role: not one of"},
		{"no url", "", nil, []string{"role=decode"}, "engines[0].url: missing; name the engine's API"},
		{"no pair", "", nil, []string{"http://u:secret@d:1"}, "write for instance url=http://"},
		{"twice in a flag", "", nil, []string{decode + ",role=both"}, `"both": written twice; keep one`},
		{"url twice", "engines:\n- {url: http://d:1/, role: prefill}", nil, []string{decode},
			`engines[1].url: "http://d:1": also the url of engines[0]; name each engine once`},
		{"url twice, spelled otherwise", "engines:\n- {url: 'HTTP://u:p@D:1/', role: prefill}", nil,
			[]string{decode}, `engines[1].url: "http://d:1": also the url of engines[0]`},
		{"url twice, with the port of http", "engines:\n- {url: 'http://[::1]:80', role: prefill}", nil,
			[]string{"url=http://[::1],role=decode"}, `engines[1].url: "http://[::1]": also the url of`},
		{"url twice, with the port of https", "engines:\n- {url: 'https://d', role: prefill}", nil,
			[]string{"url=https://d:443/,role=decode"}, `engines[1].url: "https://d:443/": also the`},
		{"url without its key", "", nil, []string{"http://u:secret@d:1?a=b,role=decode"},
			`engines[0].http://...@d:1?a: `},
		{"peer of decode", "", nil, []string{decode + ",peer=d:1"}, "set role to prefill or both"},
		{"replay alone", "", nil, []string{decode + ",replay=tcp://d:1"}, "set events, too"},
		{"listen", "", []string{"listen=here"}, nil, `listen: "here": not an address; write host:port`},
		{"copies", "", []string{"replicate_after=-1"}, nil, `replicate_after: "-1": outside 0 to`},
		{"pin", "", []string{"max_pin=2h"}, nil, `max_pin: "2h0m0s": outside 1ms to 1h`},
		{"body", "", []string{"max_body=0B"}, nil, `max_body: "0B": out of range`},
		{"bodies", "", []string{"max_body_total=96MiB"}, nil,
			`max_body_total: "96MiB": not more than 3 times max_body, 32MiB`},
		{"time", "", []string{"drain_timeout=0s"}, nil, `drain_timeout: "0s": outside`},
		{"silent", "", []string{"silent_after=1s"}, nil, "shorter than slow_after (2s)"},
		{"share", "", []string{"trace_share=NaN"}, nil, `trace_share: "NaN": not above 0`},
		{"no number", "", []string{"trace_share=x"}, nil, `trace_share: "x": not a number`},
		{"level", "", []string{"log.level=loud"}, nil, `log.level: "loud": not one of debug`},
		{"format", "", []string{"log.format=xml"}, nil, `log.format: "xml": not one of text, json`},
	} {
		if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := LoadRouter(file, c.sets, c.engines)
		if err == nil || !strings.Contains(err.Error(), c.want) ||
			strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: got %v, want %s", c.name, err, c.want)
		}
	}
}
