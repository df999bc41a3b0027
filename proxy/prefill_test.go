package proxy

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"reflect"
	"testing"
)

var update = flag.Bool("update", false, "write testdata/prefill.json")

// prefillCase is a client's body and P's; vLLM's classes check both in test_prefill_bodies.py.
type prefillCase struct {
	Path    string          `json:"path"`
	Body    json.RawMessage `json:"body"`
	Prefill json.RawMessage `json:"prefill"` // null: D computes alone
}

func TestPrefillBodies(t *testing.T) {
	const file = "testdata/prefill.json"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var cases []prefillCase
	if err := json.Unmarshal(text, &cases); err != nil {
		t.Fatal(err)
	}
	for i := range cases {
		c := &cases[i]
		k := kindCompletion
		if c.Path == kindChat.path() {
			k = kindChat
		}
		r, err := parseRequest(k, c.Body)
		if err != nil {
			t.Fatalf("%s: %v", c.Body, err)
		}
		got := []byte("null")
		if r.alone == "" {
			got = r.forPrefill("0123456789abcdef0123456789abcdef", "")
		}
		var have, want any
		if err := json.Unmarshal(got, &have); err != nil {
			t.Fatal(err)
		}
		if len(c.Prefill) > 0 {
			if err := json.Unmarshal(c.Prefill, &want); err != nil {
				t.Fatal(err)
			}
		}
		if *update {
			c.Prefill = got
		} else if !reflect.DeepEqual(have, want) {
			t.Errorf("%s %s: P gets %s, want %s (go test -update)", c.Path, c.Body, got, c.Prefill)
		}
	}
	if !*update {
		return
	}
	out := bytes.NewBufferString("[\n")
	for i, c := range cases {
		line, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		out.Write(line)
		if i < len(cases)-1 {
			out.WriteByte(',')
		}
		out.WriteByte('\n')
	}
	out.WriteString("]\n")
	if err := os.WriteFile(file, out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}
