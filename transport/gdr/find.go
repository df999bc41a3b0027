package gdr

import (
	"errors"
	"fmt"
	"math/bits"
	"net"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
)

// Options select the ports that become rails, and configure their queue pairs.
type Options struct {
	Rails        []string      // device[/port][@gid index]; none: every active port
	Listen       string        // host for lanes if a port has no IP address (InfiniBand)
	DeadAfter    time.Duration // time until a dead path is noticed
	MTU          int           // largest MTU in bytes; 0: the port's
	TrafficClass int
	ServiceLevel int
}

// retries before a path counts as dead: few, so that a time-out is longer than a pause of a busy
// receiver.
const retries = verbs.DefaultRetries

const timerUnit = 4096 * time.Nanosecond

// timer is the largest exponent that gives up a path in time. Devices may wait twice their
// time-out.
func timer(d time.Duration) uint8 {
	n := uint64(d / (2 * (retries + 1) * timerUnit))
	return uint8(max(bits.Len64(n)-1, 1))
}

// Timers returns the time in which a device's own timers give up a path under a dead_after: the
// configured time-outs, and twice that, which the device may take.
func Timers(deadPath time.Duration) (lowest, highest time.Duration) {
	lowest = (retries + 1) * (timerUnit << timer(deadPath))
	return lowest, 2 * lowest
}

// Find returns the rails of this host, and the reasons why other ports are not rails. It opens no
// device.
func Find(o Options) ([]Rail, error) {
	if err := verbs.Library(); err != nil {
		return nil, err
	}
	ports, err := verbs.Ports("/")
	if err != nil {
		return nil, err
	}
	type pick struct {
		p   *verbs.Port
		gid int
	}
	var picks []pick
	var names []string
	for i := range ports {
		names = append(names, ports[i].Name())
		if len(o.Rails) == 0 && ports[i].State == "ACTIVE" {
			picks = append(picks, pick{&ports[i], verbs.AutoGID})
		}
	}
	for _, s := range o.Rails {
		device, num, gid, err := verbs.ParseRail(s)
		if err != nil {
			return nil, err
		}
		found := false
		for i := range ports {
			if p := &ports[i]; p.Device == device && p.Num == num {
				picks = append(picks, pick{p, gid})
				found = true
			}
		}
		if !found {
			return nil, fmt.Errorf("gdr: rail %q: no such port: there are %v", s, names)
		}
	}
	if len(picks) == 0 {
		return nil, fmt.Errorf("%w: no port is active: %v", verbs.ErrNotSupported, names)
	}
	var rails []Rail
	var errs error
	for _, x := range picks {
		g, _, err := verbs.ChooseGID(x.p, x.gid)
		if err != nil {
			errs = errors.Join(errs, err)
			continue
		}
		listen := "" // the address of the GID that is current then
		if g.Type != verbs.GIDRoCEv2 || g.Addr().IsLinkLocalUnicast() {
			listen = net.JoinHostPort(o.Listen, "0")
		}
		cfg := verbs.Config{Device: x.p.Device, Port: x.p.Num, GIDIndex: x.gid,
			TrafficClass: uint8(o.TrafficClass), ServiceLevel: uint8(o.ServiceLevel),
			Timer: timer(o.DeadAfter), Retries: retries, MTU: verbs.MTUOf(o.MTU)}
		rails = append(rails, Rail{Name: x.p.Name(), Open: func() (verbs.Device,
			error) {
			return verbs.Open(cfg)
		}, Listen: listen,
			Gbps: x.p.Gbps, NUMA: x.p.NUMA})
	}
	if len(rails) == 0 {
		return nil, fmt.Errorf("%w: %w", verbs.ErrNotSupported, errs)
	}
	return rails, errs
}
