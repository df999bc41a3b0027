package sidecar

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/topo"
)

// If the configuration names GPUs that a sidecar cannot take, its start fails, with the key, its
// value and the remedy: an engine that measured free memory without them would run out of it later.
func TestGPUsThatCannotBeTakenEndTheStart(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"transports.gpu.open", "transports.gpu.relays"} {
		t.Run(key, func(t *testing.T) { gpuThatCannotBeTaken(t, key) })
	}
}

func gpuThatCannotBeTaken(t *testing.T, key string) {
	t.Parallel()
	cfg := config.Default()
	cfg.Engine.Socket = t.TempDir() + "/s.sock"
	names := &cfg.Transports.GPU.Open
	if key == "transports.gpu.relays" {
		names = &cfg.Transports.GPU.Relays
	}
	*names = []string{"99"} // no host has it, and many have no driver
	cfg.Peer.Listen, cfg.Peer.Gossip.Listen, cfg.HTTP.Listen = "127.0.0.1:0", "off", "127.0.0.1:0"
	n, err := New(Options{Config: cfg, Registry: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err = n.Run(ctx)
	if err == nil || ctx.Err() != nil {
		t.Fatalf("it ran: %v", err)
	}
	for _, want := range []string{key, "99", "leave it out"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
}

// A driver that is not there yet is looked for again, by the start as by an import; a sidecar that
// names no GPU does not look.
func TestTheDriverIsLoadedWhenItIsNeeded(t *testing.T) {
	t.Parallel()
	looks := 0
	g := &gpus{cfg: gpu.Config{Log: slog.New(slog.DiscardHandler)},
		load: func(gpu.Config) (*gpu.GPUs, error) {
			looks++
			return nil, cuda.ErrNotSupported
		}}
	if err := g.start(config.GPU{}); err != nil || looks != 0 {
		t.Fatalf("%v after %d looks", err, looks)
	}
	all := config.GPU{Open: []string{"all"}}
	if err := g.start(all); !errors.Is(err, cuda.ErrNotSupported) || looks != 1 {
		t.Fatalf("%v after %d looks", err, looks)
	}
	if _, err := g.Import(mem.NewID(), nil, -1, 1); !errors.Is(err, cuda.ErrNotSupported) ||
		looks != 2 {
		t.Fatalf("%v after %d looks", err, looks)
	}
	if g.inUse() || g.memory() != nil || (*gpus)(nil).memory() != nil {
		t.Error("memory of a driver that is not there")
	}
}

// Relays on the target's own NUMA node come first, those behind its own PCIe switch last.
func TestRelaysAreRanked(t *testing.T) {
	t.Parallel()
	seat := func(node int, path ...string) topo.Seat { return topo.Seat{Path: path, Node: node} }
	h := &topo.Host{GPUs: []topo.GPU{
		{PCI: "target", Seat: seat(0, "pci0", "port", "switch", "down0", "target")},
		{PCI: "switch", Seat: seat(0, "pci0", "port", "switch", "down1", "switch")},
		{PCI: "bridge", Seat: seat(0, "pci0", "port1", "bridge")},
		{PCI: "node", Seat: seat(0, "pci1", "port", "node")},
		{PCI: "far", Seat: seat(1, "pci2", "port", "far")},
	}}
	for relay, want := range map[string]int{"bridge": 0, "node": 0, "no GPU": 0, "far": 1,
		"switch": 3} {
		if got := rankOf(h, "target", relay); got != want {
			t.Errorf("%s: %d, want %d", relay, got, want)
		}
	}
}
