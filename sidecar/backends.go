package sidecar

import (
	"fmt"
	"log/slog"
	"runtime"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/shm"
	"github.com/kvspray/kvspray/transport/tcp"
)

// bitsPerGbit converts configured rail speeds.
const bitsPerGbit = 1e9

// newBackends makes the configured transports, preferred first. They do nothing until Open.
// gdrChanged is called when gdr's rails change.
func newBackends(c *config.Config, devices *gpus, gdrChanged func(),
	log *slog.Logger) (transport.Registry, error) {
	var reg transport.Registry
	for _, name := range c.Transports.Order {
		switch name {
		case config.TransSHM:
			s := shm.Config{Dir: c.SHMDir(), Workers: c.CopyThreads(min(runtime.NumCPU(),
				runtime.GOMAXPROCS(0))), Log: log}
			if devices != nil {
				s.Devices, s.Links = devices, devices
			}
			reg = append(reg, shm.New(s))
		case config.TransTCP:
			t := tcp.Config{CRC32C: c.Transports.TCP.Integrity == config.CRC32C,
				AEAD: c.Transports.TCP.Integrity == config.AEAD, SliceBytes: int(c.Transports.TCP.Slice),
				Log: log}
			for _, r := range c.RailsOrDefault() {
				t.Rails = append(t.Rails, tcp.Rail{Name: r.Name, Listen: r.Listen, Advertise: r.Advertise,
					Gbps: float64(r.Speed) / bitsPerGbit, Tier: r.Tier})
			}
			t.Empty = len(t.Rails) == 0
			b, err := tcp.New(t)
			if err != nil {
				return nil, fmt.Errorf("sidecar: %w", err)
			}
			reg = append(reg, b)
		case config.TransGDR:
			reg = append(reg, newGDR(c, gdrChanged, log))
		default:
			return nil, fmt.Errorf("sidecar: transports.order: %q is unknown: use shm, gdr and tcp", name)
		}
	}
	return reg, nil
}
