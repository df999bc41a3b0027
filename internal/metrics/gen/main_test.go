package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestGenerated(t *testing.T) {
	all, err := definitions()
	if err != nil {
		t.Fatal(err)
	}
	for name, write := range map[string]func([]metric) ([]byte, error){"alerts.yaml": alertRules,
		"dashboard.json": dashboard} {
		got, err := write(all)
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile("../../../deploy/monitoring/" + name)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("deploy/monitoring/%s is not what the metrics' definitions give (%v): run "+
				"'make generate'", name, err)
		}
	}
	kinds := map[string]kind{"kvspray_transfers_total": counter, "kvspray_lease_open": gauge,
		"kvspray_lease_fence_duration_seconds": histogram, "kvspray_lease_quarantined": gauge,
		"kvspray_rail_bytes_total": counter, "kvspray_rail_window_bytes": gauge,
		"kvspray_proxy_first_byte_seconds": histogram, "kvspray_control_hellos_refused_total": counter}
	for _, m := range all {
		if want, ok := kinds[m.name]; ok && m.kind != want {
			t.Errorf("%s is of kind %d, want %d", m.name, m.kind, want)
		}
		delete(kinds, m.name)
	}
	if len(kinds) != 0 {
		t.Errorf("not defined: %v", kinds)
	}
}

// An expression cannot name a metric that does not exist, or a bucket of a counter.
func TestUnknownMetric(t *testing.T) {
	all, err := definitions()
	if err != nil {
		t.Fatal(err)
	}
	for expr, known := range map[string]bool{"rate(kvspray_rail_bytes_total[5m])": true,
		"kvspray_transfer_duration_seconds_bucket": true, "kvspray_rail_bytes_total_bucket": false,
		"up and kvspray_rails_bytes_total": false} {
		if err := check(all, expr); (err == nil) != known ||
			err != nil && !strings.Contains(err.Error(), "is no metric") {
			t.Errorf("%s: %v", expr, err)
		}
	}
	if _, err := dashboard(append(all, metric{name: "kvspray_new_things"})); err == nil ||
		!strings.Contains(err.Error(), "without a row") {
		t.Errorf("a metric without a place: %v", err)
	}
}
