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
)

// A sidecar that is told to take GPUs at its start and cannot ends there, with the key, what it
// names and what to do: an engine that measured free memory without them would run out of it later.
func TestGPUsThatCannotBeTakenEndTheStart(t *testing.T) {
	t.Parallel()
	cfg := config.Default()
	dir := t.TempDir()
	// no host has it, nor many a driver
	cfg.Engine.Socket, cfg.Transports.GPU.Open = dir+"/s.sock", []string{"99"}
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
	for _, want := range []string{"transports.gpu.open", "99", "leave it out"} {
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
	if err := g.start(nil); err != nil || looks != 0 {
		t.Fatalf("%v after %d looks", err, looks)
	}
	if err := g.start([]string{"all"}); !errors.Is(err, cuda.ErrNotSupported) || looks != 1 {
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
