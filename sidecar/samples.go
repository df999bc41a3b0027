package sidecar

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/gpu/multipath"
	"github.com/kvspray/kvspray/internal/metrics"
)

// samples reads the metrics that are collected when they are scraped.
type samples struct {
	driver *driver.Driver
	rails  *railSet
	gpus   *gpus

	devices *gpuHealth
}

func (s *samples) register(m *metrics.Set, r *prometheus.Registry) error {
	if err := errors.Join(m.Links(r, multipath.LinkStates, s.linkSamples),
		m.Memory(r, s.memorySamples), m.Rails(r, s.railSamples),
		m.Faults(r, s.faults), m.Violations(r, s.violations), m.Refusals(r, s.refusals)); err != nil {
		return fmt.Errorf("sidecar: metrics: %w", err)
	}
	return nil
}

// violations returns counts of protocol violations by peers, for metrics.
func (s *samples) violations() (out map[string]uint64) {
	s.driver.View(func(ex *exec.Exec, _ exec.Instant) { out = ex.Violations() })
	return out
}

// refusals counts the refused grants of peers, by reason, for metrics.
func (s *samples) refusals() (out map[string]uint64) {
	s.driver.View(func(ex *exec.Exec, _ exec.Instant) { out = ex.Refusals() })
	return out
}

// railSamples returns the scheduler's state of each rail, for metrics.
func (s *samples) railSamples() (out []metrics.RailSample) {
	var rails []spray.RailView
	s.driver.View(func(ex *exec.Exec, now exec.Instant) { rails = ex.Rails(now) })
	for _, r := range rails {
		c := &r.Counters
		pairs := map[string]float64{}
		for state, k := range r.States {
			pairs[state] = float64(k)
		}
		out = append(out, metrics.RailSample{Transport: r.Transport, Rail: r.Local, Pairs: pairs,
			InFlight: float64(r.InFlight),
			Window:   float64(r.Window), Suspicions: float64(c.Suspicions),
			Up: s.rails.up(r.Transport, r.Local),
			Slices: map[string]float64{"confirmed": float64(c.Confirmed),
				"superseded": float64(c.Superseded), "failed": float64(c.Failed),
				"refused": float64(c.Refused), "lost": float64(c.Lost), "dropped": float64(c.Dropped)},
			Rate: r.Rate, Error: r.Error, Hedges: float64(c.Hedges), Exclusions: float64(c.Exclusions),
			Readmissions: float64(c.Readmissions),
			Retries: map[string]float64{"failed": float64(c.Failed), "refused": float64(c.Refused),
				"lost":    float64(c.Lost),
				"silence": float64(c.Doubled), "timeout": float64(c.TimedOut)},
			Probes: map[string]float64{"ok": float64(c.ProbesPassed), "failed": float64(c.ProbesFailed)}})
	}
	return out
}

// faults returns the faults of devices, for metrics.
func (s *samples) faults() (out metrics.FaultSamples) {
	out = s.devices.samples()
	for name, f := range s.rails.links.faults() {
		out.Links = append(out.Links, metrics.FaultSample{Device: name, Kind: string(f.Kind)})
	}
	return out
}

// linkSamples returns the state of each link between host memory and a GPU, for metrics.
func (s *samples) linkSamples() (out []metrics.LinkSample) {
	for _, p := range s.gpus.linkStates() {
		for _, l := range p.Links {
			out = append(out, metrics.LinkSample{GPU: p.GPU, Link: l.GPU, State: l.State,
				Bytes: float64(l.Bytes), InFlight: float64(l.InFlight),
				Rate: l.Rate, Returned: float64(l.Returned)})
		}
	}
	return out
}

// memorySamples is what this sidecar holds of each GPU, for metrics.
func (s *samples) memorySamples() (out []metrics.MemorySample) {
	for _, m := range s.gpus.memory() {
		out = append(out, metrics.MemorySample{GPU: m.GPU, Limit: float64(m.Limit), Free: float64(m.Free),
			Pinned: float64(m.PinnedBytes),
			Held: map[string]float64{"staging": float64(m.Staging), "pipelines": float64(m.Pipelines),
				"relays": float64(m.Relays)}})
	}
	return out
}
