package sidecar

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/sys/health"
)

const (
	// driverRetry is the time between two attempts to load the GPUs' management library: a driver may
	// be installed after the start of the sidecar.
	driverRetry = time.Minute
	// maxGPUsWatched bounds the GPUs that have a state here: a host has at most 16.
	maxGPUsWatched = 64
)

// gpuDriver is *health.Driver, or a fake of a test.
type gpuDriver interface {
	Look() []health.Reading
	Wait(longest time.Duration) (health.Event, bool, error)
	Close() error
}

// gpuHealth detects faults of the GPUs of this host, and fails leases in memory of failed GPUs.
type gpuHealth struct {
	policy  string // health.gpus
	open    func() (gpuDriver, error)
	now     func() time.Time
	workers func() []*engines.Worker
	// fail sets the reason why all leases of a worker fail; empty: they do not. It returns false if
	// the worker has not registered yet, or has ended.
	fail   func(w *engines.Worker, why string) bool
	log    *slog.Logger
	errors admit.Log // engines can cause many

	news chan struct{} // a worker came or went

	mu     sync.Mutex // protects all below
	gpus   map[string]*health.GPU
	struck map[*engines.Worker]string // workers that used a GPU when it failed, with the reason
	set    map[*engines.Worker]string // the reasons set by fail
	xids   map[string]uint64          // by class
}

func newGPUHealth(cfg *config.Config, workers func() []*engines.Worker,
	fail func(*engines.Worker, string) bool, log *slog.Logger) *gpuHealth {
	policy := cfg.Health.GPUs
	if cfg.Transports.GPU.Enabled == config.Off {
		policy = config.Off
	}
	return &gpuHealth{policy: policy, now: time.Now, workers: workers, fail: fail, log: log,
		errors: admit.Log{Logger: log},
		open:   func() (gpuDriver, error) { return health.Open() }, news: make(chan struct{}, 1),
		gpus: map[string]*health.GPU{}, struck: map[*engines.Worker]string{},
		set: map[*engines.Worker]string{}, xids: map[string]uint64{}}
}

// changed notes that a worker came or went.
func (h *gpuHealth) changed() {
	select {
	case h.news <- struct{}{}:
	default:
	}
}

// watch follows the GPUs until ctx ends.
func (h *gpuHealth) watch(ctx context.Context) {
	logged := "" // a driver may be broken for as long as the host runs
	for h.policy != config.Off && ctx.Err() == nil {
		d, err := h.open()
		if err == nil {
			h.follow(ctx, d)
			err = d.Close()
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && err.Error() != logged {
			logged = err.Error()
			h.log.Warn("faults of GPUs cannot be read, retrying", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(driverRetry):
		}
	}
}

// follow handles events and readings until ctx ends.
func (h *gpuHealth) follow(ctx context.Context, d gpuDriver) {
	var next time.Time // of a reading
	for ctx.Err() == nil {
		if now := h.now(); !now.Before(next) {
			h.look(now, d.Look())
			next = now.Add(health.LookEvery)
		}
		e, came, err := d.Wait(health.WaitEvery)
		switch {
		case err != nil:
			next = time.Time{} // readings show which GPU does not answer
			select {
			case <-ctx.Done():
			case <-time.After(health.WaitEvery):
			}
		case came:
			h.event(e)
			next = minTime(next, h.now().Add(health.WaitEvery)) // the driver's recovery action
		}
		select {
		case <-h.news:
			h.apply()
		default:
		}
	}
}

func minTime(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// event handles an error that the driver reported.
func (h *gpuHealth) event(e health.Event) {
	h.mu.Lock()
	if e.Xid != 0 {
		h.xids[health.Class(e.Xid)]++
	}
	if g := h.gpuLocked(e.PCI); g != nil {
		before := g.Fault()
		h.notedLocked(e.PCI, before, g.Event(h.now(), e))
	}
	h.mu.Unlock()
	if e.Xid != 0 {
		h.errors.Note(slog.LevelWarn, "Xid error", "gpu", e.PCI, "xid", e.Xid, "class",
			health.Class(e.Xid))
	}
	h.apply()
}

// look takes a reading of each GPU.
func (h *gpuHealth) look(now time.Time, all []health.Reading) {
	h.mu.Lock()
	for _, r := range all {
		if g := h.gpuLocked(r.PCI); g != nil {
			before := g.Fault()
			h.notedLocked(r.PCI, before, g.Look(now, r))
		}
	}
	h.mu.Unlock()
	h.apply()
}

func (h *gpuHealth) gpuLocked(pci string) *health.GPU {
	if h.gpus[pci] == nil && pci != "" && len(h.gpus) < maxGPUsWatched {
		h.gpus[pci] = &health.GPU{}
	}
	return h.gpus[pci]
}

// notedLocked logs a change, and marks all workers of the engines that use a failed GPU: an engine
// cannot work without one of its workers.
func (h *gpuHealth) notedLocked(pci string, before health.Fault, strikes bool) {
	now := h.gpus[pci].Fault()
	switch {
	case now.Kind == before.Kind && now.Level == before.Level:
	case now.Kind == "":
		h.log.Info("GPU is fit again", "gpu", pci)
	default:
		h.log.Warn("fault of a GPU", "gpu", pci, "state", now.Level, "fault", now.Text, "remedy",
			now.Remedy)
	}
	if !strikes {
		return
	}
	all := h.workers()
	for _, w := range all {
		if _, done := h.struck[w]; done || !usesGPU(w, pci) {
			continue
		}
		for _, x := range all {
			if x == w || sameEngine(x, w) {
				h.struck[x] = cmp.Or(h.struck[x], "GPU "+pci+": "+now.Text)
			}
		}
	}
}

func sameEngine(a, b *engines.Worker) bool {
	return a.Place.Engine != "" && a.Place.Engine == b.Place.Engine
}

// usesGPU reports whether memory of a worker is on a GPU.
func usesGPU(w *engines.Worker, pci string) bool {
	return slices.ContainsFunc(gpusOf(w), func(p string) bool { return p == pci })
}

func gpusOf(w *engines.Worker) (out []string) {
	for _, r := range w.Regions {
		if d, ok := r.Device().(placed); ok && !slices.Contains(out, d.PCI()) {
			out = append(out, d.PCI())
		}
	}
	return out
}

// failedLocked is the reason why leases of a worker fail; empty: they do not.
func (h *gpuHealth) failedLocked(w *engines.Worker) string {
	if why := h.struck[w]; why != "" {
		return why
	}
	for _, pci := range gpusOf(w) {
		if g := h.gpus[pci]; g != nil && g.Blocked() {
			return "GPU " + pci + ": " + g.Fault().Text
		}
	}
	return ""
}

// apply sets or clears the faults of workers, and forgets workers that have ended.
func (h *gpuHealth) apply() {
	all := h.workers()
	type change struct {
		w   *engines.Worker
		why string
	}
	var changes []change
	h.mu.Lock()
	maps.DeleteFunc(h.struck, func(w *engines.Worker, _ string) bool {
		return !slices.Contains(all, w)
	})
	for w := range h.set {
		if !slices.Contains(all, w) {
			delete(h.set, w)
			changes = append(changes, change{w, ""})
		}
	}
	for _, w := range all {
		if why := h.failedLocked(w); h.policy == config.Leave && why != h.set[w] {
			changes = append(changes, change{w, why})
		}
	}
	h.mu.Unlock()
	for _, c := range changes {
		if !h.fail(c.w, c.why) {
			continue // the event of its registration follows
		}
		h.mu.Lock()
		if delete(h.set, c.w); c.why != "" {
			h.set[c.w] = c.why
		}
		h.mu.Unlock()
		if c.why != "" {
			h.log.Warn("leases of an engine worker fail", "engine", c.w.Name, "why", c.why)
		}
	}
}

// failWorker implements gpuHealth.fail.
func (n *Node) failWorker(w *engines.Worker, why string) (known bool) {
	n.driver.Do(func(ex *exec.Exec, now exec.Instant) { known = ex.SetFault(now, w, why) })
	known = known || w.Layout == nil // without a layout it has no leases there
	var err error
	if why != "" && known { // nothing would end the fault of one that is gone
		err = errors.New(why)
	}
	n.local.SetFault(w, err)
	return known
}

// health describes the faults of all devices, for routers and operators.
func (n *Node) health() nodeapi.Health {
	v := n.devices.view()
	v.FailedURLs = n.served.failed(n.workers(), v.Failed)
	v.AffectedURLs = n.served.affected(n.workers(), v.Affected)
	for name, f := range n.rails.links.faults() {
		v.Faults = append(v.Faults, faultView("interface "+name, f))
	}
	slices.SortFunc(v.Faults, func(a, b nodeapi.Fault) int { return cmp.Compare(a.Device, b.Device) })
	v.Faults = v.Faults[:min(len(v.Faults), nodeapi.MaxFaults)]
	return v
}

func faultView(device string, f health.Fault) nodeapi.Fault {
	v := nodeapi.Fault{Device: device, Kind: string(f.Kind), State: f.Level.String(), Text: f.Text,
		Since: f.Since}
	if f.Remedy != health.NoRemedy {
		v.Remedy = f.Remedy.String()
	}
	return v
}

func (h *gpuHealth) view() (v nodeapi.Health) {
	all := h.workers()
	h.mu.Lock()
	defer h.mu.Unlock()
	for pci, g := range h.gpus {
		if f := g.Fault(); f.Kind != "" {
			v.Faults = append(v.Faults, faultView("GPU "+pci, f))
		}
	}
	if h.policy != config.Leave {
		return v
	}
	level, working := health.Fit, false
	for _, w := range all {
		if w.Internal {
			continue
		}
		own := health.Fit
		for _, pci := range gpusOf(w) {
			if g := h.gpus[pci]; g != nil {
				own = max(own, min(g.Fault().Level, health.Degraded))
			}
		}
		if h.failedLocked(w) == "" {
			working = true
		} else {
			own = health.Failed
			v.Failed = append(v.Failed, idOf(w))
		}
		if own > health.Fit {
			v.Affected = append(v.Affected, idOf(w))
		}
		level = max(level, own)
	}
	for _, ids := range []*[]string{&v.Failed, &v.Affected} {
		slices.Sort(*ids)
		*ids = slices.Compact(*ids)
	}
	v.State, v.Leaving = level.String(), len(v.Failed) > 0 && !working
	return v
}

// idOf names an engine; its ranks have one name.
func idOf(w *engines.Worker) string { return cmp.Or(w.Place.Engine, w.Name) }

// samples are the faults for metrics.
func (h *gpuHealth) samples() metrics.FaultSamples {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := metrics.FaultSamples{Xids: map[string]uint64{}}
	if h.policy != config.Off {
		for _, class := range health.Classes() {
			out.Xids[class] = h.xids[class]
		}
	}
	for pci, g := range h.gpus {
		if f := g.Fault(); f.Kind != "" {
			out.GPUs = append(out.GPUs, metrics.FaultSample{Device: pci, Kind: string(f.Kind)})
		}
	}
	return out
}
