package main

import (
	"bytes"
	"os"
	"os/exec"
	"testing"

	"github.com/kvspray/kvspray/internal/testutil"
)

// TestUpToDate compiles the header again: the committed mirror equals the compiler's layout.
func TestUpToDate(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		testutil.Skip(t, "gcc", "gcc is not installed: "+err.Error())
	}
	want, err := generate("../../../pybind/include/kvspray/board.h", "gcc")
	if err != nil {
		t.Fatal(err)
	}
	have, err := os.ReadFile("../zz_generated_board.go")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, want) {
		t.Fatalf("zz_generated_board.go is out of date: run go generate ./internal/board\nwant:\n%s",
			want)
	}
}

func TestCamel(t *testing.T) {
	for in, want := range map[string]string{"FLAGS_MAGIC": "FlagsMagic", "flags_header": "FlagsHeader",
		"OK": "OK", "REC_STEP": "RecStep"} {
		if got := camel(in); got != want {
			t.Errorf("camel(%q) = %q, want %q", in, got, want)
		}
	}
}
