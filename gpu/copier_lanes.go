package gpu

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// Lanes use a Copier, too, but a lane that waited for the driver would look like one without
// progress. So a lane first calls Reaches, which starts missing preparations in the background.
// Until these have ended, lists go through staging buffers.
const (
	maxPreparations = 1024 // in the queue
	maxRefused      = 4096 // regions and GPUs whose preparation has failed
)

var errNotReady = errors.New("gpu: a path, or memory for it, is not ready any more")

// preparations is what lanes lack. Copier.mu protects it.
type preparations struct {
	queue   []preparation
	queued  map[preparation]bool // the queue and current
	refused map[any]bool         // *mem.Region, *GPU
	current *preparation         // in work; nil: none
	runs    bool                 // prepareAll runs
}

// preparation is a path set to u, or with far a region of u for its relays, or with host a window
// of host memory.
type preparation struct {
	u         *GPU
	far, host *mem.Region
	window    uint64
}

// about is the key under which a failure is kept.
func (w *preparation) about() any {
	switch {
	case w.host != nil:
		return w.host
	case w.far != nil:
		return w.far
	}
	return w.u
}

// Reaches reports whether Carry can move these lists now: all pieces are between mapped host memory
// and one GPU and large or aligned enough, paths exist and memory is pinned. It prepares missing
// paths and pins for later calls, and does not wait for them.
func (c *Copier) Reaches(dst, src []mem.Block) bool {
	buf := hostPieceLists.Get().(*[]hostPiece)
	defer hostPieceLists.Put(buf)
	list, ok := hostPiecesOf((*buf)[:0], dst, src)
	*buf = list[:0]
	if !ok || len(list) == 0 {
		return false
	}
	u, packable := list[0].u, true
	for i := range list {
		x := &list[i]
		if x.u != u || x.dir != list[0].dir {
			return false
		}
		packable = packable && (x.host.Off|x.far.Region.Base()+x.far.Off|x.host.Len)%device.Align == 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	small := bytesOf(list)/uint64(len(list)) < c.largeLocked(u)
	if c.closed || small && len(list) > fewMapped && !(packable && u.mappedMethod() != policy.Copy) {
		return false
	}
	ready := small || c.reachLocked(u, list[0].far.Region)
	for i := range list {
		x := &list[i]
		if !small && x.far.Region != list[0].far.Region {
			ready = c.reachLocked(u, x.far.Region) && ready
		}
		for k := x.host.Off / c.shape.window; k <= (x.host.Off+x.host.Len-1)/c.shape.window; k++ {
			if w, ok := c.pins[x.host.Region][k]; !ok || !w.pinned {
				c.prepareLocked(preparation{u: u, host: x.host.Region, window: k})
				ready = false
			}
		}
	}
	return ready
}

// reachLocked reports whether every link of a path set reaches a region of u.
func (c *Copier) reachLocked(u *GPU, far *mem.Region) bool {
	p := c.paths[u]
	if p == nil {
		c.prepareLocked(preparation{u: u})
		return false
	}
	if !p.mu.TryRLock() {
		return false // it is being replaced
	}
	defer p.mu.RUnlock()
	n, known := c.gpus.inUse()
	if p.m == nil || known && !p.looked.Load().fresh(n, c.gpus.now) {
		c.prepareLocked(preparation{u: u})
	}
	if p.m == nil {
		return false
	}
	if len(p.relays) == 0 {
		return true
	}
	if !p.importing.TryLock() {
		return false
	}
	_, ok := p.imported[far]
	p.importing.Unlock()
	if !ok {
		c.prepareLocked(preparation{u: u, far: far})
	}
	return ok
}

// inUse is the number of GPUs in used. It is unknown while a GPU is being opened, which takes long.
func (g *GPUs) inUse() (n int, known bool) {
	if !g.mu.TryLock() {
		return 0, false
	}
	defer g.mu.Unlock()
	for _, u := range g.gpus {
		if u.mayRelay.Load() {
			n++
		}
	}
	return n, true
}

// prepareLocked queues w, unless it is queued or has failed before.
func (c *Copier) prepareLocked(w preparation) {
	s := &c.preparations
	if s.queued[w] || s.refused[w.about()] || len(s.queue) >= maxPreparations {
		return
	}
	if s.queued == nil {
		s.queued, s.refused = map[preparation]bool{}, map[any]bool{}
	}
	s.queued[w] = true
	s.queue = append(s.queue, w)
	if !s.runs {
		s.runs = true
		c.wg.Go(c.prepareAll)
	}
}

// prepareAll works until the queue is empty.
func (c *Copier) prepareAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &c.preparations
	for len(s.queue) > 0 && !c.closed {
		w := s.queue[0]
		s.queue = s.queue[1:]
		s.current = &w
		err := c.makeLocked(&w)
		s.current = nil
		delete(s.queued, w)
		c.settled.Broadcast()
		if err != nil && !c.closed && len(s.refused) < maxRefused {
			s.refused[w.about()] = true
			c.gpus.cfg.Log.Warn("lanes copy through staging buffers, over one link", "gpu",
				w.u.index, "err", err)
		}
	}
	s.runs = false
}

// makeLocked releases mu while it waits for the driver.
func (c *Copier) makeLocked(w *preparation) error {
	if w.host != nil {
		// Pinning would allocate the holes of a peer's file: a huge empty file would take all memory.
		if w.host.ReadOnly() && !w.host.Present() {
			return fmt.Errorf("gpu: region %s is not pinned: not all of its memory is allocated",
				w.host.ID())
		}
		_, err := c.pinLocked(w.u, w.host, w.window)
		return err
	}
	c.mu.Unlock()
	defer c.mu.Lock()
	p, err := c.path(w.u)
	if err != nil {
		return err
	}
	defer p.mu.RUnlock()
	if w.far != nil {
		_, err = p.shifts(w.far)
	}
	return err
}

// cancelLocked ends all preparations for a region, and returns when none is in work.
func (c *Copier) cancelLocked(r *mem.Region) {
	s := &c.preparations
	s.queue = slices.DeleteFunc(s.queue, func(w preparation) bool {
		drop := w.host == r || w.far == r
		if drop {
			delete(s.queued, w)
		}
		return drop
	})
	for s.current != nil && (s.current.host == r || s.current.far == r) {
		c.settled.Wait()
	}
	delete(s.refused, r)
}

// Carry moves lists for which Reaches returned true, over as many links as is fastest. When it
// returns, nothing is in flight, also after an error.
func (c *Copier) Carry(dst, src []mem.Block) error {
	buf := hostPieceLists.Get().(*[]hostPiece)
	defer hostPieceLists.Put(buf)
	list, ok := hostPiecesOf((*buf)[:0], dst, src)
	*buf = list[:0]
	if !ok {
		return fmt.Errorf("gpu: carry: blocks that are not between a GPU and mapped memory, or of "+
			"different lengths: %w", mem.ErrBounds)
	}
	var errs []error
	for len(list) > 0 { // one GPU and direction at a time; there is rarely another one
		u, dir := list[0].u, list[0].dir
		rest := slices.IndexFunc(list, func(x hostPiece) bool { return x.u != u || x.dir != dir })
		if rest < 0 {
			rest = len(list)
		}
		errs = append(errs, c.carry(u, dir, list[:rest]))
		list = list[rest:]
	}
	return errors.Join(errs...)
}

func (c *Copier) carry(u *GPU, dir device.Direction, list []hostPiece) error {
	buf := pieceLists.Get().(*[]device.Piece)
	defer pieceLists.Put(buf)
	if c.isSmall(u, list) {
		var err error
		if *buf, err = c.devicePieces((*buf)[:0], u, list, false); err == nil {
			_, err = c.small(u, dir, list, *buf)
		}
		return err
	}
	c.mu.Lock()
	p := c.paths[u]
	c.mu.Unlock()
	if p == nil {
		return errNotReady
	}
	// the new path set may wait for a copy that hangs; a batch with entered claims must not wait
	if !p.mu.TryRLock() {
		return errNotReady
	}
	defer p.mu.RUnlock()
	parts, err := c.lanePieces((*buf)[:0], p, u, list)
	*buf = parts
	if err != nil {
		return err
	}
	p.active.Add(1)
	defer p.active.Add(-1)
	c.yield(p) // once: a batch is shorter than yieldEvery
	_, err = p.m.CopyPieces(dir, parts)
	return err
}

// lanePieces finds the addresses of the pieces for copy engines. The caller holds p.mu for reading.
func (c *Copier) lanePieces(parts []device.Piece, p *paths, u *GPU,
	list []hostPiece) ([]device.Piece, error) {
	if p.m == nil {
		return parts, errNotReady
	}
	if err := shiftList(list, p.shiftOf); err != nil {
		return parts, err
	}
	return c.devicePieces(parts, u, list, false)
}
