package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const root = "../../.."

// TestUpToDate generates again: the committed files must be what the schema gives.
func TestUpToDate(t *testing.T) {
	files, err := generate(root)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range files {
		have, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(have, want) {
			t.Errorf("%s is out of date: run make generate", path)
		}
	}
}

// TestRecordNumbers: board.h numbers records as the schema does.
func TestRecordNumbers(t *testing.T) {
	s, err := parse(filepath.Join(root, "api/engine/messages.schema"))
	if err != nil {
		t.Fatal(err)
	}
	header, err := os.ReadFile(filepath.Join(root, "pybind/include/kvspray/board.h"))
	if err != nil {
		t.Fatal(err)
	}
	numbers := map[string]string{}
	for _, m := range regexp.MustCompile(`KVS_REC_(\w+) = (\d+),`).FindAllSubmatch(header, -1) {
		numbers[string(m[1])] = string(m[2])
	}
	delete(numbers, "PAD")
	for _, b := range s.of("record") {
		if want := fmt.Sprint(b.number); numbers[b.wire] != want {
			t.Errorf("board.h has %q for %s, want %s", numbers[b.wire], b.wire, want)
		}
		delete(numbers, b.wire)
	}
	if len(numbers) > 0 {
		t.Errorf("the schema has no %v", numbers)
	}
}

// TestMistakes: a mistake in a schema is refused with its line.
func TestMistakes(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"  id u64", `"id" belongs to no declaration`},
		{"message 1 HELLO", `"message" is no declaration`},
		{"packet 1 HELLO Hello", "want packet NUMBER WIRE-NAME NAME from SENDER"},
		{"packet 1 HELLO Hello from shim needs=x", `the feature "x", which is not declared`},
		{"packet 1 HELLO Hello from nobody", `"nobody" is no attribute`},
		{"struct A\nstruct A", "A is declared twice"},
		{"struct A\n  id", "id has no type"},
		{"struct A\n  id u63", `"u63" is no type`},
		{"struct A\n  id u64 optional", `"optional" is no attribute`},
		{"struct A\n  id str(Max)", "undefined"},
		{"struct A\n  id list(u32)", "has no bound"},
		{"struct A\n  id word(Role)", "no list of words"},
		{"struct A\n  id u32 min=Few", "undefined"},
	} {
		path := filepath.Join(t.TempDir(), "schema")
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := parse(path)
		if err == nil || !strings.Contains(err.Error(), c.want) ||
			!strings.Contains(err.Error(), "schema:") {
			t.Errorf("%q: %v, want %s", c.text, err, c.want)
		}
	}
}
