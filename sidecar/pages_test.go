// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/sidecar/internal/web"
)

// TestStoreOpens: the configuration reaches the tiers, and they are shown.
func TestStoreOpens(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pages")
	r := start(t, func(c *config.Config) {
		c.Store = config.Store{Memory: 8 << 20, Disk: []config.StoreDisk{{Path: file, Size: 64 << 20}}}
	})
	code, text := get(t, r, "/v1/store")
	var st web.Store
	if err := json.Unmarshal([]byte(text), &st); code != http.StatusOK || err != nil {
		t.Fatalf("%d, %v: %s", code, err, text)
	}
	if len(st.Tiers) != 2 || st.Tiers[0].Capacity != 8<<20 || st.Tiers[1].Name != "disk" ||
		st.Tiers[1].Capacity < 32<<20 {
		t.Errorf("%+v", st)
	}
	_, text = get(t, r, "/metrics")
	for _, line := range []string{`kvspray_store_tier_capacity_bytes{tier="memory"} 8.388608e+06`,
		`kvspray_store_hits_total{tier="disk"} 0`} {
		if !strings.Contains(text, line) {
			t.Errorf("no metric %s", line)
		}
	}
}

func TestNoStore(t *testing.T) {
	r := start(t, nil)
	if code, text := get(t, r, "/v1/store"); code != http.StatusNotFound ||
		!strings.Contains(text, "set store.memory") {
		t.Errorf("%d %s", code, text)
	}
	if _, text := get(t, r, "/metrics"); strings.Contains(text, "kvspray_store") {
		t.Error("metrics of a store that is off")
	}
}

// TestStoreRefusesADisk: what is no store is not touched, and the start names it.
func TestStoreRefusesADisk(t *testing.T) {
	file := filepath.Join(t.TempDir(), "notes")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	n, err := New(Options{Config: testConfig(t, func(c *config.Config) {
		c.Store = config.Store{Memory: 8 << 20, Disk: []config.StoreDisk{{Path: file, Size: 64 << 20}}}
	})})
	if err != nil {
		t.Fatal(err)
	}
	err = n.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), file) ||
		!strings.Contains(err.Error(), "no kvspray store") {
		t.Errorf("%v", err)
	}
	if b, _ := os.ReadFile(file); string(b) != "precious" {
		t.Error("the file was touched")
	}
}
