package mem

import (
	"os"
	"strings"
	"testing"
)

// Where the host has one NUMA node memory is on it; where it has several, on one of them.
func TestNode(t *testing.T) {
	r, err := NewAnonymous("node", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	online, err := os.ReadFile("/sys/devices/system/node/online")
	if err != nil {
		if n := r.Node(); n != -1 && n != 0 {
			t.Errorf("node %d of a kernel without NUMA", n)
		}
		return
	}
	if n := r.Node(); n < 0 || strings.TrimSpace(string(online)) == "0" && n != 0 {
		t.Errorf("node %d, online %s", n, online)
	}
}
