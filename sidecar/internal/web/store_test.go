package web

import (
	"testing"

	"github.com/kvspray/kvspray/internal/nodeapi"
)

// A drained store is durable by its own disks and object store, not by other nodes.
func TestDurable(t *testing.T) {
	for lower, want := range map[string]bool{"peer": false, "disk": true, "object": true} {
		if got := durable([]nodeapi.StoreTier{{Name: "memory"}, {Name: lower}}); got != want {
			t.Errorf("memory and %s: %v", lower, got)
		}
	}
}
