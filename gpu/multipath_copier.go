package gpu

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// The ways that a Copier takes.
const (
	PathStaged    = "staged"    // through a pinned buffer, as lanes move
	PathPeer      = "peer"      // between GPUs, or within one
	PathPacked    = "packed"    // by kernels of the GPU that reach pinned memory of the host
	PathDirect    = "direct"    // the copy engine of the GPU, between its memory and pinned memory of the host
	PathMultipath = "multipath" // every GPU's PCIe link
)

// The shape of copies with the host. Pins are made where a copy first reads or writes: all of a host cache would take a minute
// ([measured] 90 ms a GiB).
const (
	pinWindow  = 1 << 30
	maxWindows = 2048                 // of all regions
	yieldEvery = 2 * time.Millisecond // between two looks whether a relay has work of its own
)

// Copier copies between memory of a GPU and of its host, or of another GPU, in large. Which of the other GPUs in use lend their links
// is looked up anew when one is added, and from how many bytes on that pays is measured then.
//
// Goroutines: those of each Multipath, one for as long as a copy over several links lasts, and one while something is wanted for lanes
// (multipath_lanes.go). Close joins them.
type Copier struct {
	gpus  *GPUs
	shape copierShape
	wg    sync.WaitGroup // what makes the wanted
	under sync.WaitGroup // small pieces under way; Add under mu and before closed

	mu       sync.Mutex // protects all below; taken after those of paths
	settled  sync.Cond  // a window is pinned or refused, or something wanted is made
	paths    map[*GPU]*paths
	limits   map[*GPU]Limits // of the table
	knocks   map[*GPU]*knocker
	pins     map[*mem.Region]map[uint64]*window // by number of the window
	windows  int                                // in pins
	past     map[linkOf]LinkState               // of path sets that are no more
	wants    wants
	unpinned bool // that a window was refused has been said
	closed   bool
}

// window is a pinned part of a region.
type window struct {
	at     cuda.Ptr
	bytes  []byte
	by     card
	pinned bool // false: the driver is at it
}

var errTooMany = fmt.Errorf("%d windows of %d bytes are pinned, which is all", maxWindows, pinWindow)

// paths is the ways to one GPU.
type paths struct {
	active atomic.Int32 // copies with the host under way

	making sync.Mutex // held by whoever makes a path set; taken before mu

	mu     sync.RWMutex // read by copies while they last; protects the three below, of which relays are written with importing held, too
	m      *Multipath
	relays []*GPU
	tried  int // GPUs in use when relays were looked up

	importing sync.Mutex // protects imported, and is held while something is imported; taken after mu
	imported  map[*mem.Region]view
}

// view is an engine's memory as the relays' contexts have it, and what that adds to an address, by link: Part.Shift.
type view struct {
	foreign []foreign
	shift   []cuda.Ptr
}

// foreign is an engine's memory as a relay's context has it.
type foreign struct {
	at cuda.Ptr
	n  uint64
}

// copierShape is what tests make smaller, in bytes.
type copierShape struct {
	minChunk, maxChunk, calibrateFrom, calibrateTo, window uint64

	across uint64        // lists of fewer bytes are not for kernels
	idle   time.Duration // a knock that takes longer has met an engine
}

func fullShape() copierShape {
	return copierShape{MinChunk, MaxChunk, MaxCalibrate, minCalibrate, pinWindow, probeBytes, knockIdle}
}

// NewCopier makes a Copier of g, which outlives it.
func NewCopier(g *GPUs) *Copier {
	return newCopier(g, fullShape())
}

func newCopier(g *GPUs, shape copierShape) *Copier {
	c := &Copier{gpus: g, shape: shape, paths: map[*GPU]*paths{}, limits: map[*GPU]Limits{}, knocks: map[*GPU]*knocker{}, pins: map[*mem.Region]map[uint64]*window{},
		past: map[linkOf]LinkState{}}
	c.settled.L = &c.mu
	return c
}

// Copy moves the bytes of src, block by block, to dst, and says which way they took. All of a list lies in one region, and one of the two is a
// GPU's. When it returns nothing of it is in flight.
func (c *Copier) Copy(dst, src []mem.Block) (path string, err error) {
	if len(src) == 0 || len(dst) != len(src) {
		return "", fmt.Errorf("stage: copy %d blocks to %d: %w", len(src), len(dst), mem.ErrBounds)
	}
	from, to := sideOf(src[0].Region), sideOf(dst[0].Region)
	switch {
	case from.gpu != nil && to.gpu != nil:
		return PathPeer, to.gpu.Move(dst, src)
	case from.gpu != nil:
		return c.withHost(from.gpu, dst, src)
	case to.gpu != nil:
		return c.withHost(to.gpu, dst, src)
	}
	return "", errors.New("stage: copy: no block of it is a GPU's")
}

// withHost copies between u and the host.
func (c *Copier) withHost(u *GPU, dst, src []mem.Block) (string, error) {
	buf := crossings.Get().(*[]crossing)
	defer crossings.Put(buf)
	list, ok := cross((*buf)[:0], dst, src)
	*buf = list[:0]
	if !ok {
		for i := range dst {
			if err := errors.Join(dst[i].Region.Check(dst[i].Off, dst[i].Len), src[i].Region.Check(src[i].Off, src[i].Len)); err != nil {
				return "", err
			}
		}
		return PathStaged, u.Move(dst, src)
	}
	if len(list) == 0 {
		return PathDirect, nil
	}
	parts := partLists.Get().(*[]Part)
	defer partLists.Put(parts)
	var err error
	if *parts, err = c.partsOf((*parts)[:0], u, list, true); errors.Is(err, net.ErrClosed) {
		return "", err
	} else if err != nil { // pins are bounded, and so is what may be locked
		return PathStaged, u.Move(dst, src)
	}
	dir := list[0].dir
	if c.isSmall(u, list) {
		return c.small(u, dir, list, *parts)
	}
	p, err := c.path(u)
	if err != nil {
		return "", err
	}
	defer p.mu.RUnlock()
	shift, err := p.shifts(list[0].far.Region)
	if err != nil {
		return "", err
	}
	for i := range *parts {
		(*parts)[i].Shift = shift
	}
	p.active.Add(1)
	defer p.active.Add(-1)
	stop := c.watch(p, *parts)
	defer stop()
	every, err := p.m.CopyParts(dir, *parts)
	if every {
		return PathMultipath, err
	}
	return PathDirect, err
}

// partsOf adds where the pieces of list are for the copy engines and kernels of u, cut where windows end. A window that is not pinned is, which may
// take a while, or is an error that wraps errNotReady.
func (c *Copier) partsOf(parts []Part, u *GPU, list []crossing, pin bool) ([]Part, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return parts, net.ErrClosed
	}
	var last *mem.Region // and the window of it where the piece before was: a map's look-up for each would be most of the cost
	var from, to uint64
	var at cuda.Ptr
	for i := range list {
		x := &list[i]
		off, dev, left := x.host.Off, cuda.Ptr(x.far.Region.Base()+x.far.Off), x.host.Len
		for left > 0 {
			if x.host.Region != last || off < from || off >= to {
				w, k := c.pins[x.host.Region][off/c.shape.window], off/c.shape.window
				if w == nil || !w.pinned {
					if !pin {
						return parts, errNotReady
					}
					var err error
					if w, err = c.pinLocked(u, x.host.Region, k); err != nil { // it has been said
						return parts, err
					}
				}
				last, from, at = x.host.Region, k*c.shape.window, w.at
				to = from + uint64(len(w.bytes))
			}
			n := min(to-off, left)
			parts = append(parts, Part{Host: at + cuda.Ptr(off-from), Dev: dev, Len: n, Shift: x.shift})
			off, dev, left = off+n, dev+cuda.Ptr(n), left-n
		}
	}
	return parts, nil
}

// isSmall reports whether the pieces are, on average, too small for copy engines to take them as they are.
func (c *Copier) isSmall(u *GPU, list []crossing) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytesOf(list)/uint64(len(list)) < c.largeLocked(u)
}

// largeLocked is the average piece from which on copy engines take a list as it is.
func (c *Copier) largeLocked(u *GPU) uint64 { return max(largePiece, c.limitsLocked(u).DirectBytes) }

func (c *Copier) limitsLocked(u *GPU) Limits {
	l, ok := c.limits[u]
	if !ok {
		l = c.gpus.cfg.Table.Limits(c.gpus.model(u.index))
		c.limits[u] = l
	}
	return l
}

// pinLocked gives window k of a region, pinned for the GPUs. While the driver pins it, others go on: mu is not held.
func (c *Copier) pinLocked(u *GPU, r *mem.Region, k uint64) (*window, error) {
	from := k * c.shape.window
	to := min(from+c.shape.window, r.Size())
	for {
		w, ok := c.pins[r][k]
		if ok && w.pinned {
			return w, nil
		}
		if ok {
			c.settled.Wait()
			continue
		}
		b, _ := r.Bytes()
		if err := c.registerLocked(u, r, k, b[from:to:to]); err != nil {
			if !c.unpinned {
				c.unpinned = true
				c.gpus.cfg.Log.Warn("host memory is not pinned, and copied through buffers; said once", "region", r.ID().String(), "offset", from, "err", err)
			}
			return nil, err
		}
	}
}

// registerLocked pins a window, for all GPUs.
func (c *Copier) registerLocked(u *GPU, r *mem.Region, k uint64, b []byte) error {
	if c.windows >= maxWindows {
		return errTooMany
	}
	w := &window{bytes: b, by: u.card}
	c.windows++
	if c.pins[r] == nil {
		c.pins[r] = map[uint64]*window{}
	}
	c.pins[r][k] = w
	c.mu.Unlock()
	at, err := register(u.card, b, r.ReadOnly())
	c.mu.Lock()
	c.settled.Broadcast()
	if err != nil {
		delete(c.pins[r], k)
		c.windows--
		return err
	}
	w.at, w.pinned = at, true
	return nil
}

// readOnlyCard pins memory that is mapped for reading only.
type readOnlyCard interface {
	RegisterReadOnly(b []byte) (cuda.Ptr, error)
}

func register(by card, b []byte, readOnly bool) (cuda.Ptr, error) {
	if !readOnly {
		return by.Register(b)
	}
	r, ok := by.(readOnlyCard)
	if !ok {
		return 0, errors.New("memory that may be read only cannot be pinned here")
	}
	return r.RegisterReadOnly(b)
}

// path returns the ways to u, held for reading.
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
		if p.m != nil && p.tried == len(used) {
			return p, nil
		}
		p.mu.RUnlock()
		if err := c.make(p, u, used); err != nil {
			return nil, err
		}
	}
}

// used lists the GPUs whose memory somebody has lent us, in order. Others are left alone: a context on them is not ours to make.
func (g *GPUs) used() (all []*GPU) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range g.ids {
		if u := g.gpus[i]; u != nil {
			all = append(all, u)
		}
	}
	return all
}

// make makes, or replaces, the path set to u. Copies over an older one go on meanwhile.
func (c *Copier) make(p *paths, u *GPU, used []*GPU) error {
	p.making.Lock()
	defer p.making.Unlock()
	if p.m != nil && p.tried == len(used) { // both are written under making
		return nil // somebody else was faster
	}
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	if closed {
		return net.ErrClosed
	}
	var relays []*GPU
	for _, r := range used {
		if r != u && c.gpus.reachable(u, r) {
			relays = append(relays, r)
		}
	}
	m, err := c.multipath(u, relays)
	if err != nil && len(relays) > 0 {
		c.gpus.cfg.Log.Warn("links of other GPUs are not used", "gpu", u.index, "relays", len(relays), "err", err)
		relays = nil
		m, err = c.multipath(u, nil)
	}
	if err != nil {
		return fmt.Errorf("stage: paths to GPU %d: %w", u.index, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := c.closePathsLocked(p, u); err != nil {
		c.gpus.cfg.Log.Warn("paths not closed", "gpu", u.index, "err", err)
	}
	p.importing.Lock()
	defer p.importing.Unlock()
	p.m, p.relays, p.tried = m, relays, len(used)
	return nil
}

// reachable reports whether the two reach each other's memory, and lets them.
func (g *GPUs) reachable(a, b *GPU) bool {
	if g.cfg.PeerDisable {
		return false
	}
	for _, k := range [][2]*GPU{{a, b}, {b, a}} {
		if ok, err := g.plat.CanAccess(k[0].index, k[1].index); !ok || err != nil || k[0].card.Reach(k[1].card) != nil {
			return false
		}
	}
	return true
}

func (c *Copier) multipath(u *GPU, relays []*GPU) (_ *Multipath, err error) {
	devs := make([]Device, 0, 1+len(relays))
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
	m, err := newMultipath(c.shape.minChunk, c.shape.maxChunk, devs[0], devs[1:]...)
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
			m.SetThreshold(DefaultThreshold)
			c.gpus.cfg.Log.Warn("paths not measured; the threshold is a guess", "gpu", u.index, "err", err)
		}
		c.gpus.cfg.Log.Info("gpu paths", "gpu", u.index, "links", len(devs), "every_link_from_bytes", m.Threshold(), "took", time.Since(start))
		m.forget()
	}
	return m, nil
}

// measure sets the threshold, with memory of its own.
func (c *Copier) measure(m *Multipath, u *GPU) (err error) {
	d, err := u.card.NewPacker()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	n := c.shape.calibrateFrom
	_, host, err := d.AllocHost(int(n))
	if err != nil {
		return err
	}
	dev, err := d.Alloc(n)
	if err != nil {
		return err
	}
	_, err = m.calibrate(host, dev, n, c.shape.calibrateTo)
	return errors.Join(err, d.Free(dev))
}

// shifts imports r into the contexts of the relays, once: [measured, H200] a relay that reaches an engine's memory by the target's
// address only is copied through the host.
func (p *paths) shifts(r *mem.Region) ([]cuda.Ptr, error) {
	if len(p.relays) == 0 {
		return nil, nil
	}
	h, err := ParseHandle(r.Handle())
	if err != nil {
		return nil, err
	}
	p.importing.Lock()
	defer p.importing.Unlock()
	if _, ok := p.imported[r]; !ok {
		var all []foreign
		for _, relay := range p.relays {
			at, n, err := relay.card.Import(&h, r.FD())
			if err != nil {
				err = fmt.Errorf("stage: region %s: import into the context of GPU %d, which relays: %w", r.ID(), relay.index, err)
				return nil, errors.Join(err, unimport(p.relays, r, all))
			}
			all = append(all, foreign{at, n})
		}
		shift := make([]cuda.Ptr, 1+len(all))
		for i, f := range all {
			shift[1+i] = f.at + cuda.Ptr(h.Off) - cuda.Ptr(r.Base()) // may wrap, and is added
		}
		p.imported[r] = view{all, shift}
	}
	return p.imported[r].shift, nil
}

// shiftOf is shifts of a region that has been imported.
func (p *paths) shiftOf(r *mem.Region) ([]cuda.Ptr, error) {
	if len(p.relays) == 0 {
		return nil, nil
	}
	if !p.importing.TryLock() { // a relay's driver is at another region; a batch with claims entered must not wait for it
		return nil, errNotReady
	}
	defer p.importing.Unlock()
	all, ok := p.imported[r]
	if !ok {
		return nil, errNotReady
	}
	return all.shift, nil
}

// unimport takes all back from the first of the relays.
func unimport(relays []*GPU, r *mem.Region, all []foreign) error {
	if len(all) == 0 {
		return nil
	}
	h, err := ParseHandle(r.Handle())
	errs := []error{err}
	for i, f := range all {
		errs = append(errs, relays[i].card.Unimport(&h, f.at, f.n))
	}
	return errors.Join(errs...)
}

// watch has relays take nothing while their own GPU moves something, until stop.
func (c *Copier) watch(p *paths, parts []Part) (stop func()) {
	if len(p.relays) == 0 || partBytes(parts) < p.m.Threshold() {
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

// yield says which relays have work of their own: what lanes gather and scatter, and copies that are theirs. A kernel of its engine is none: it does not
// use the link.
func (c *Copier) yield(p *paths) {
	for i, r := range p.relays {
		c.mu.Lock()
		own := c.paths[r]
		c.mu.Unlock()
		busy := len(r.hops) < cap(r.hops) || own != nil && own.active.Load() > 0
		if err := p.m.Yield(i, busy); err != nil {
			c.gpus.cfg.Log.Error("relay", "err", err) // there is none of that number
		}
	}
}

// Forget gives back what the driver has of regions that go. No copy of them may be under way, or come.
func (c *Copier) Forget(regions []*mem.Region) error {
	c.mu.Lock()
	var errs []error
	for _, r := range regions {
		c.unwantLocked(r)
		errs = append(errs, c.unpinLocked(r))
	}
	all := slices.Collect(maps.Values(c.paths))
	c.mu.Unlock()
	// Without mu: whoever holds importing waits for the driver, and so do we.
	for _, p := range all {
		for _, r := range regions {
			errs = append(errs, p.forget(r))
		}
	}
	return errors.Join(errs...)
}

// forget ends what relays have of r. Lanes that look for the view of another region do not wait for the driver meanwhile.
func (p *paths) forget(r *mem.Region) error {
	p.importing.Lock()
	v, relays := p.imported[r], p.relays
	delete(p.imported, r)
	p.importing.Unlock()
	return unimport(relays, r, v.foreign)
}

// unpinLocked lets go of mu while the driver is at it.
func (c *Copier) unpinLocked(r *mem.Region) error {
	gone := c.pins[r]
	delete(c.pins, r)
	c.windows -= len(gone)
	c.mu.Unlock()
	defer c.mu.Lock()
	var errs []error
	for _, w := range gone {
		errs = append(errs, w.by.Unregister(w.bytes))
	}
	return errors.Join(errs...)
}

// closePathsLocked takes the path set to u apart. Nobody reads it.
func (c *Copier) closePathsLocked(p *paths, u *GPU) error {
	if p.m == nil {
		return nil
	}
	errs := []error{p.m.Close()}
	c.mu.Lock()
	for _, s := range p.stateLocked(u) {
		was := c.past[linkOf{u, s.GPU}]
		c.past[linkOf{u, s.GPU}] = LinkState{Bytes: was.Bytes + s.Bytes, Returned: was.Returned + s.Returned}
	}
	c.mu.Unlock()
	p.importing.Lock()
	defer p.importing.Unlock()
	for r, all := range p.imported {
		errs = append(errs, unimport(p.relays, r, all.foreign))
	}
	clear(p.imported)
	p.m, p.relays = nil, nil
	return errors.Join(errs...)
}

// Close waits for the copies under way, and gives everything back. Later ones get net.ErrClosed.
func (c *Copier) Close() error {
	c.mu.Lock()
	c.closed = true
	all := maps.Clone(c.paths)
	c.mu.Unlock()
	c.wg.Wait()
	c.under.Wait()
	var errs []error
	for u, p := range all {
		p.making.Lock()
		p.mu.Lock()
		errs = append(errs, c.closePathsLocked(p, u))
		p.mu.Unlock()
		p.making.Unlock()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range slices.Collect(maps.Keys(c.pins)) {
		errs = append(errs, c.unpinLocked(r))
	}
	return errors.Join(errs...)
}
