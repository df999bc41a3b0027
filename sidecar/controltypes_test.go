package sidecar

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/metrics"
)

// Metrics count each kind of control frame by its name. A fragment is counted as the frame that it
// is a part of.
func TestMetricsNameAllControlFrames(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := metrics.New(reg)
	bodies := (&peerv1.ControlFrame{}).ProtoReflect().Descriptor().Oneofs().ByName("body").Fields()
	want := map[string]bool{}
	for i := range bodies.Len() {
		if name := string(bodies.Get(i).Name()); name != "fragment" {
			want[name] = true
			m.Control(metrics.In, name)
		}
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "kvspray_control_messages_total" {
			continue
		}
		for _, s := range f.GetMetric() {
			for _, l := range s.GetLabel() {
				if l.GetName() == "type" {
					delete(want, l.GetValue())
				}
			}
		}
	}
	if len(want) > 0 {
		t.Errorf("counted as another type: %v", want)
	}
}
