package rdmacheck

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/health"
	"github.com/kvspray/kvspray/internal/sys/topo"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/ui/doctor"
	"github.com/kvspray/kvspray/internal/version"
)

// The timers of the tests are longer than the transport's: a pause of the network is no fault here.
// A dead path is found after 0.5 s with soft-RoCE, and after up to 4 s with NICs that wait longer.
const (
	testTimer   = 14 // 67 ms
	testRetries = 6
)

// Here is this host, with its configured rails, or with all active ports.
func Here(ctx context.Context, c *config.Config) (Env, error) { return here(ctx, c, testTimer) }

func here(ctx context.Context, c *config.Config, timer uint8) (Env, error) {
	e := Env{Version: version.String(), Timer: int(timer),
		Host: doctor.RDMA(ctx, &doctor.Host{Config: c}),
		Resent: func(rail string) uint64 {
			return health.Counters("/", true, []health.Port{{RDMA: deviceOf(rail)}}).Resent
		}}
	ports, err := verbs.Ports("/")
	if errors.Is(err, verbs.ErrNoDevices) {
		return e, nil // a line of Host
	}
	if err != nil {
		return e, err
	}
	opened := map[string]verbs.Config{}
	add := func(p *verbs.Port, gid int) {
		opened[p.Name()] = verbs.Config{Device: p.Device, Port: p.Num, GIDIndex: gid,
			TrafficClass: uint8(c.Transports.GDR.TrafficClass),
			ServiceLevel: uint8(c.Transports.GDR.ServiceLevel), Timer: timer, Retries: testRetries,
			MTU: verbs.MTUOf(c.Transports.GDR.MTU)}
		r := Rail{p.Name(), p.Gbps}
		if _, err := os.Stat("/sys/class/infiniband/" + p.Device + "/parent"); err == nil {
			r.Gbps = 0 // soft-RoCE names a rate that it does not have
		}
		e.Rails = append(e.Rails, r)
	}
	for i := range ports {
		if len(c.Transports.GDR.Rails) == 0 && ports[i].State == "ACTIVE" {
			add(&ports[i], verbs.AutoGID)
		}
	}
	for _, s := range c.Transports.GDR.Rails {
		name, num, gid, err := verbs.ParseRail(s)
		if err != nil {
			return e, err
		}
		found := false
		for i := range ports {
			if ports[i].Device == name && ports[i].Num == num {
				add(&ports[i], gid)
				found = true
			}
		}
		if !found {
			return e, fmt.Errorf("transports.gdr.rails: %q: this host has no such port", s)
		}
	}
	e.Open = func(rail string, mtu verbs.MTU) (verbs.Device, error) {
		cfg, ok := opened[rail]
		if !ok {
			return nil, fmt.Errorf("%w: rail %q", errRequest, rail)
		}
		if mtu != 0 {
			cfg.MTU = mtu
		}
		return verbs.Open(cfg)
	}
	e.Card = nearestGPU
	return e, nil
}

func deviceOf(rail string) string {
	name, _, _ := strings.Cut(rail, "/")
	return name
}

// nearestGPU opens the GPU that is next to a rail.
func nearestGPU(rail string) (device.Card, error) {
	platform, err := device.OpenHost(func(string) int { return 0 })
	if err != nil {
		return nil, err
	}
	ids, err := platform.UUIDs()
	if err != nil || len(ids) == 0 {
		return nil, errors.Join(errNoGPU, err)
	}
	nearest := 0
	if host, err := topo.Discover(topo.Options{}); err == nil {
		nic := topo.SeatOf("", "class/infiniband", deviceOf(rail), "device")
		best := topo.NotKnown
		for i, id := range ids {
			g := host.GPU(fmt.Sprintf("GPU-%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:]))
			if g == nil {
				continue
			}
			if d := topo.Between(nic, g.Seat); d != topo.NotKnown && (best == topo.NotKnown || d < best) {
				best, nearest = d, i
			}
		}
	}
	return platform.Open(nearest)
}
