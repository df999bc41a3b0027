package place

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/placement"
)

const state = `{"token_bytes":131072,"overlap":1,"engines":[
 {"name":"warm","prefill_tokens_per_second":8000,"wait_seconds":2,"ready_seconds":0.1,
  "hit_tokens":7000},
 {"name":"idle","prefill_tokens_per_second":8000}],
 "paths":[{"from":"warm","to":"idle","bytes_per_second":2e9}]}`

func TestExplain(t *testing.T) {
	c, err := placement.ParseFile([]byte(state), 8000, nil)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := Explain(&b, c, 0, true); err != nil {
		t.Fatal(err)
	}
	var got struct{ Choices []row }
	if err := json.Unmarshal([]byte(b.String()), &got); err != nil || len(got.Choices) != 4 {
		t.Fatalf("%v: %s", err, b.String())
	}
	first := got.Choices[0]
	if first.Kind != "fetch" || first.Engine != "idle" || first.Source != "warm" ||
		first.Moved == 0 || first.TTFT <= 0 {
		t.Errorf("%+v", first)
	}
	b.Reset()
	if err := Explain(&b, c, 1, false); err != nil || strings.Count(b.String(), "\n") != 2 ||
		!strings.Contains(b.String(), "TTFT ms") || !strings.Contains(b.String(), "warm") {
		t.Errorf("%v: %s", err, b.String())
	}
	c.State.Engines[0].Role, c.State.Engines[1].Role = 0, 0
	b.Reset()
	if err := Explain(&b, c, 1, false); err != nil || !strings.Contains(b.String(), "no engine") {
		t.Errorf("%v: %s", err, b.String())
	}
}

func TestRows(t *testing.T) {
	var b strings.Builder
	if err := Rows(&b, placement.MLA27(), placement.PublishedFabrics(), 256, 2048); err != nil {
		t.Fatal(err)
	}
	for _, w := range []string{"1080 rows", "2.36 MB", "0.19 GB/s", "h100-ibgda-ndr200", "a40-pcie4"} {
		if !strings.Contains(b.String(), w) {
			t.Errorf("%q is not in\n%s", w, b.String())
		}
	}
}
