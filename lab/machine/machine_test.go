package machine

import (
	"encoding/json"
	"runtime"
	"strings"
	"testing"
)

// Nothing that a result needs is missing.
func TestHere(t *testing.T) {
	m := Here()
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(b, &fields); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"version", "processor", "cores", "kernel", "go", "load_average"} {
		if v, there := fields[key]; !there || v == "" {
			t.Errorf("%s is %v", key, v)
		}
	}
	if m.Cores != runtime.NumCPU() || m.Load < 0 || !strings.Contains(m.String(),
		m.Processor+", Linux "+m.Kernel) {
		t.Errorf("%+v, %q", m, m.String())
	}
}
