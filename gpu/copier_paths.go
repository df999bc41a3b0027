package gpu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/multipath"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// maxRelays bounds the relays of one GPU. Each takes buffers on its own GPU, and host memory does
// not feed more links.
const maxRelays = 7

// retryRelay is the time until a relay is tried again that had no memory, or whose buffers could
// not be made.
const retryRelay = retryPair

// paths is the path set to one GPU.
type paths struct {
	active atomic.Int32           // copies with the host in flight
	looked atomic.Pointer[lookUp] // the last one for relays; changed under making

	making sync.Mutex // held while a path set is made; taken before mu

	// held for reading by copies; protects m and relays, which are written with making held, too, and
	// relays with importing
	mu     sync.RWMutex
	m      *multipath.Multipath
	relays []*GPU

	importing sync.Mutex // protects imported, held during an import; taken after mu
	imported  map[*mem.Region]view
}

// lookUp is a look-up of the relays of a path set.
type lookUp struct {
	used  int       // GPUs in use then
	retry time.Time // for relays that were refused; zero: none was
}

// fresh reports whether another look-up would find the same relays.
func (l *lookUp) fresh(used int, now func() time.Time) bool {
	return l != nil && l.used == used && (l.retry.IsZero() || now().Before(l.retry))
}

// view is an engine's memory in the contexts of the relays, and what that adds to an address, by
// link (device.Piece.Shift).
type view struct {
	foreign []foreign
	shift   []cuda.Ptr
}

// foreign is an engine's memory in a relay's context.
type foreign struct {
	at cuda.Ptr
	n  uint64
}

// path returns the paths to u, with mu held for reading.
func (c *Copier) path(u *GPU) (*paths, error) {
	c.mu.Lock()
	p := c.paths[u]
	if p == nil {
		p = &paths{imported: map[*mem.Region]view{}}
		c.paths[u] = p
	}
	c.mu.Unlock()
	for {
		p.mu.RLock()
		used := c.gpus.used()
		if p.m != nil && p.looked.Load().fresh(len(used), c.gpus.now) {
			return p, nil
		}
		p.mu.RUnlock()
		if err := c.make(p, u); err != nil {
			return nil, err
		}
	}
}

// used lists the GPUs that may relay, in order.
func (g *GPUs) used() (all []*GPU) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range g.ids {
		if u := g.gpus[i]; u != nil && u.mayRelay.Load() {
			all = append(all, u)
		}
	}
	return all
}

// make makes the path set to u, or replaces it where there are other relays than before. The old
// one is closed first: a relay need not have room for both. What it has reserved on a relay of the
// new one stays reserved.
func (c *Copier) make(p *paths, u *GPU) error {
	p.making.Lock()
	defer p.making.Unlock()
	used, last := c.gpus.used(), p.looked.Load()
	if p.m != nil && last.fresh(len(used), c.gpus.now) {
		return nil // another goroutine has made it
	}
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	if closed {
		return net.ErrClosed
	}
	level := slog.LevelWarn
	if last != nil && last.used == len(used) { // the reason is in the log already
		level = slog.LevelDebug
	}
	relays, refused := c.takeRelays(p, u, used, level)
	if p.m == nil || !slices.Equal(relays, p.relays) {
		made, err := c.replace(p, u, relays, level)
		if err != nil {
			return err
		}
		refused = refused || made < len(relays)
	}
	now := &lookUp{used: len(used)}
	if refused {
		now.retry = c.gpus.now().Add(retryRelay)
	}
	p.looked.Store(now)
	return nil
}

// takeRelays lists the relays for u, with memory reserved on each. refused: others lack it. The
// caller holds p.making.
func (c *Copier) takeRelays(p *paths, u *GPU, used []*GPU, level slog.Level) (relays []*GPU,
	refused bool) {
	for _, r := range c.ranked(u, used) {
		if len(relays) == maxRelays {
			break
		}
		if r == u || !c.gpus.reachable(u, r) {
			continue
		}
		if !slices.Contains(p.relays, r) { // else the path set that is there has reserved it
			if err := r.budget.take(forRelays, c.shape.relayBytes()); err != nil {
				c.gpus.cfg.Log.Log(context.Background(), level, "the link of a GPU is not used",
					"gpu", u.index, "relay", r.index, "err", err)
				refused = true
				continue
			}
		}
		relays = append(relays, r)
	}
	return relays, refused
}

// ranked lists the GPUs in the order in which they become relays for u.
func (c *Copier) ranked(u *GPU, all []*GPU) []*GPU {
	rank := c.gpus.cfg.RelayRank
	if rank == nil {
		return all
	}
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b *GPU) int { return rank(u.pci, a.pci) - rank(u.pci, b.pci) })
	return all
}

// replace closes the path set to u, if there is one, and makes one with these relays, on which
// memory is reserved. If that fails, it makes one without relays. It returns the number of relays.
// The caller holds p.making.
func (c *Copier) replace(p *paths, u *GPU, relays []*GPU, level slog.Level) (int, error) {
	p.mu.Lock()
	if err := c.closePathsLocked(p, u, relays); err != nil {
		c.gpus.cfg.Log.Warn("paths not closed", "gpu", u.index, "err", err)
	}
	p.mu.Unlock()
	m, err := c.multipath(u, relays)
	if err != nil {
		c.releaseRelays(relays)
		if len(relays) > 0 {
			c.gpus.cfg.Log.Log(context.Background(), level, "links of other GPUs are not used",
				"gpu", u.index, "relays", len(relays), "err", err)
			relays = nil
			m, err = c.multipath(u, nil)
		}
	}
	if err != nil {
		return 0, fmt.Errorf("gpu: paths to GPU %d: %w", u.index, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.importing.Lock()
	defer p.importing.Unlock()
	p.m, p.relays = m, relays
	return len(relays), nil
}

// releaseRelays releases the memory that relays have reserved for one path set.
func (c *Copier) releaseRelays(relays []*GPU) {
	for _, r := range relays {
		r.budget.release(forRelays, c.shape.relayBytes())
	}
}

// reachable reports whether two GPUs reach each other's memory, and enables it.
func (g *GPUs) reachable(a, b *GPU) bool {
	if g.cfg.PeerDisable {
		return false
	}
	for _, k := range [][2]*GPU{{a, b}, {b, a}} {
		if ok, err := g.plat.CanAccess(k[0].index, k[1].index); !ok || err != nil ||
			k[0].card.Reach(k[1].card) != nil {
			return false
		}
	}
	return true
}

func (c *Copier) multipath(u *GPU, relays []*GPU) (_ *multipath.Multipath, err error) {
	devs := make([]device.Device, 0, 1+len(relays))
	for _, g := range append([]*GPU{u}, relays...) {
		d, err := g.card.NewPacker()
		if err != nil {
			for _, d := range devs {
				err = errors.Join(err, d.Close())
			}
			return nil, err
		}
		devs = append(devs, d)
	}
	m, err := multipath.NewSized(c.shape.minChunk, c.shape.maxChunk, devs[0], devs[1:]...)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	known := c.limitsLocked(u).EveryLink[len(devs)]
	c.mu.Unlock()
	if known > 0 {
		m.SetThreshold(known)
	} else if len(relays) > 0 {
		start := time.Now()
		if err := c.measure(m, u); err != nil {
			m.SetThreshold(multipath.DefaultThreshold)
			c.gpus.cfg.Log.Warn("paths not measured; the threshold is a guess", "gpu", u.index, "err", err)
		}
		c.gpus.cfg.Log.Info("gpu paths", "gpu", u.index, "links", len(devs), "every_link_from_bytes",
			m.Threshold(), "took", time.Since(start))
		m.ResetCounts()
	}
	return m, nil
}

// measure sets the threshold, with memory of its own. Where the limit leaves less than is wanted,
// larger copies are not measured.
func (c *Copier) measure(m *multipath.Multipath, u *GPU) (err error) {
	d, err := u.card.NewPacker()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	n, err := c.takeMeasurement(u)
	if err != nil {
		return err
	}
	defer u.budget.release(forMeasurement, n)
	_, host, err := d.AllocHost(int(n))
	if err != nil {
		return err
	}
	dev, err := d.Alloc(n)
	if err != nil {
		return err
	}
	_, err = m.CalibrateSpan(host, dev, n, c.shape.calibrateTo)
	return errors.Join(err, d.Free(dev))
}

// takeMeasurement reserves memory for a measurement: an eighth of what is wanted shows the
// difference, too.
func (c *Copier) takeMeasurement(u *GPU) (n uint64, err error) {
	enough := max(c.shape.calibrateFrom/8, c.shape.calibrateTo)
	for n = c.shape.calibrateFrom; n >= enough; n /= 2 {
		if err = u.budget.take(forMeasurement, n); err == nil {
			return n, nil
		}
	}
	return 0, err
}

// shifts imports r into the contexts of the relays, once. [measured, H200] With the target's
// address alone, the driver copies through the host.
func (p *paths) shifts(r *mem.Region) ([]cuda.Ptr, error) {
	if len(p.relays) == 0 {
		return nil, nil
	}
	h, err := device.ParseHandle(r.Handle())
	if err != nil {
		return nil, err
	}
	p.importing.Lock()
	defer p.importing.Unlock()
	if _, ok := p.imported[r]; !ok {
		all, errs := make([]foreign, len(p.relays)), make([]error, len(p.relays))
		var wait sync.WaitGroup
		// At once: each takes about a millisecond, in which the links wait.
		for i, relay := range p.relays {
			wait.Go(func() {
				at, n, err := relay.card.Import(&h, r.FD())
				if all[i] = (foreign{at, n}); err != nil {
					all[i] = foreign{}
					errs[i] = fmt.Errorf("gpu: region %s: import into the context of GPU %d, which relays: %w",
						r.ID(), relay.index, err)
				}
			})
		}
		wait.Wait()
		if err := errors.Join(errs...); err != nil {
			return nil, errors.Join(err, unimport(p.relays, r, all))
		}
		shift := make([]cuda.Ptr, 1+len(all))
		for i, f := range all {
			shift[1+i] = f.at + cuda.Ptr(h.Off) - cuda.Ptr(r.Base()) // may wrap; it is only added
		}
		p.imported[r] = view{all, shift}
	}
	return p.imported[r].shift, nil
}

// shiftOf is shifts for a region that is imported already.
func (p *paths) shiftOf(r *mem.Region) ([]cuda.Ptr, error) {
	if len(p.relays) == 0 {
		return nil, nil
	}
	// another region is being imported; a batch with entered claims must not wait
	if !p.importing.TryLock() {
		return nil, errNotReady
	}
	defer p.importing.Unlock()
	all, ok := p.imported[r]
	if !ok {
		return nil, errNotReady
	}
	return all.shift, nil
}

// unimport ends the imports of r, by relay, at once.
func unimport(relays []*GPU, r *mem.Region, all []foreign) error {
	if len(all) == 0 {
		return nil
	}
	h, err := device.ParseHandle(r.Handle())
	errs := make([]error, len(all))
	var wait sync.WaitGroup
	for i, f := range all {
		if f != (foreign{}) {
			wait.Go(func() { errs[i] = relays[i].card.Unimport(&h, f.at, f.n) })
		}
	}
	wait.Wait()
	return errors.Join(err, errors.Join(errs...))
}

// watch makes relays yield while their own GPU copies, until stop is called.
func (c *Copier) watch(p *paths, parts []device.Piece) (stop func()) {
	if len(p.relays) == 0 || pieceBytes(parts) < p.m.Threshold() {
		return func() {}
	}
	c.yield(p)
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		t := time.NewTicker(yieldEvery)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				c.yield(p)
			case <-done:
				return
			}
		}
	}()
	return func() {
		close(done)
		<-ended
	}
}

// yield finds the relays with work of their own: gathers and scatters of lanes, and copies of their
// own GPU. A kernel of an engine does not count, because it does not use the link.
func (c *Copier) yield(p *paths) {
	for i, r := range p.relays {
		c.mu.Lock()
		own := c.paths[r]
		c.mu.Unlock()
		busy := len(r.slots) < cap(r.slots) || own != nil && own.active.Load() > 0
		if err := p.m.Yield(i, busy); err != nil {
			c.gpus.cfg.Log.Error("relay does not yield", "err", err)
		}
	}
}

// forget ends the imports of r. Lanes that look up another region do not wait for the driver
// meanwhile.
func (p *paths) forget(r *mem.Region) error {
	p.importing.Lock()
	v, relays := p.imported[r], p.relays
	delete(p.imported, r)
	p.importing.Unlock()
	return unimport(relays, r, v.foreign)
}

// closePathsLocked closes the path set to u, which no copy uses. What it has reserved on the relays
// in keep stays reserved.
func (c *Copier) closePathsLocked(p *paths, u *GPU, keep []*GPU) error {
	if p.m == nil {
		return nil
	}
	errs := []error{p.m.Close()}
	c.mu.Lock()
	for _, s := range p.stateLocked(u) {
		was := c.past[linkOf{u, s.GPU}]
		c.past[linkOf{u, s.GPU}] = multipath.LinkState{Bytes: was.Bytes + s.Bytes,
			Returned: was.Returned + s.Returned}
	}
	c.mu.Unlock()
	p.importing.Lock()
	defer p.importing.Unlock()
	for r, all := range p.imported {
		errs = append(errs, unimport(p.relays, r, all.foreign))
	}
	clear(p.imported)
	for _, r := range p.relays {
		if !slices.Contains(keep, r) {
			c.releaseRelays([]*GPU{r})
		}
	}
	p.m, p.relays = nil, nil
	return errors.Join(errs...)
}
