package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestTextsAreThere finds the text of every mutant, once, in the production code: a text that was
// changed there makes its mutant worthless.
func TestTextsAreThere(t *testing.T) {
	for _, m := range mutants {
		b, err := os.ReadFile(filepath.Join("../../..", m.file))
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
			continue
		}
		if n := strings.Count(string(b), m.old); n != 1 {
			t.Errorf("%s: its text is %d times in %s, want once:\n%s", m.name, n, m.file, m.old)
		}
	}
}
