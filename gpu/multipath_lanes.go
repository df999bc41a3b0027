package gpu

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// Lanes hand over what they move between host memory and a GPU, too. Unlike a copy for an engine, nobody has asked for theirs to be made
// ready, and a lane that waits for the driver looks dead. So they ask first (Reaches), what is missing is made in the background for the
// lists that come later, and until then they go through a buffer.

const (
	maxWanted  = 1024 // of things that wait to be made
	maxRefused = 4096 // regions and GPUs of which it is remembered that it cannot be done
)

var errNotReady = errors.New("stage: a path, or memory for it, is not ready any more")

// wants is what lanes lack. All of it belongs to Copier.mu.
type wants struct {
	queue   []want
	queued  map[want]bool // and what is being made
	refused map[any]bool  // *mem.Region, *GPU
	current *want         // being made; nil: nobody is at it
	runs    bool          // somebody makes what is in the queue
}

// want is a path set to u, or with far a region of u for its relays, or with host a window of host memory.
type want struct {
	u         *GPU
	far, host *mem.Region
	window    uint64
}

// about is what a want that fails is refused for.
func (w *want) about() any {
	switch {
	case w.host != nil:
		return w.host
	case w.far != nil:
		return w.far
	}
	return w.u
}

// crossing is a piece between host memory and a GPU, contiguous on both sides.
type crossing struct {
	u         *GPU
	dir       Direction
	host, far mem.Block
	shift     []cuda.Ptr // Part.Shift
}

var crossings = sync.Pool{New: func() any { s := make([]crossing, 0, 256); return &s }}

// cross walks two lists of as many bytes together, and joins what lies side by side. False: something in them is not between a GPU and
// mapped memory of the host.
func cross(out []crossing, dst, src []mem.Block) ([]crossing, bool) {
	var di, si int
	var doff, soff uint64
	for di < len(dst) && si < len(src) {
		d, s := &dst[di], &src[si]
		n := min(d.Len-doff, s.Len-soff)
		c := crossing{dir: HostToDevice, host: mem.Block{Region: s.Region, Off: s.Off + soff, Len: n}, far: mem.Block{Region: d.Region, Off: d.Off + doff, Len: n}}
		if d.Region.Device() == nil {
			c.dir, c.host, c.far = DeviceToHost, c.far, c.host
		}
		if n > 0 {
			k := len(out) - 1
			if k >= 0 && follows(&out[k].host, &c.host) && follows(&out[k].far, &c.far) {
				out[k].host.Len += n
				out[k].far.Len += n
			} else {
				u, ok := c.far.Region.Device().(*GPU)
				if _, mapped := c.host.Region.Bytes(); !ok || !mapped {
					return out, false
				}
				c.u = u
				out = append(out, c)
			}
		}
		if doff += n; doff == d.Len {
			di, doff = di+1, 0
		}
		if soff += n; soff == s.Len {
			si, soff = si+1, 0
		}
	}
	if di < len(dst) || si < len(src) {
		return out, false
	}
	for i := range out {
		c := &out[i]
		if c.host.Region.Check(c.host.Off, c.host.Len) != nil || c.far.Region.Check(c.far.Off, c.far.Len) != nil {
			return out, false
		}
	}
	return out, true
}

func follows(a, b *mem.Block) bool { return a.Region == b.Region && a.Off+a.Len == b.Off }

// Reaches reports whether Carry moves these lists, of as many bytes: all of them between mapped memory of the host and one GPU, in pieces
// that copy engines or kernels take, to which paths are made and whose memory is pinned. What of that is missing is made, and is there some
// other time. It waits for nobody.
func (c *Copier) Reaches(dst, src []mem.Block) bool {
	buf := crossings.Get().(*[]crossing)
	defer crossings.Put(buf)
	list, ok := cross((*buf)[:0], dst, src)
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
		packable = packable && (x.host.Off|x.far.Region.Base()+x.far.Off|x.host.Len)%packAlign == 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	small := bytesOf(list)/uint64(len(list)) < c.largeLocked(u)
	if c.closed || small && len(list) > fewAcross && !(packable && u.reaching() != Copy) {
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
				c.wantLocked(want{u: u, host: x.host.Region, window: k})
				ready = false
			}
		}
	}
	return ready
}

// reachLocked reports whether a region of u can be reached over each link of a path set.
func (c *Copier) reachLocked(u *GPU, far *mem.Region) bool {
	p := c.paths[u]
	if p == nil {
		c.wantLocked(want{u: u})
		return false
	}
	if !p.mu.TryRLock() {
		return false // it is being replaced
	}
	defer p.mu.RUnlock()
	if n, known := c.gpus.inUse(); p.m == nil || known && p.tried != n {
		c.wantLocked(want{u: u})
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
		c.wantLocked(want{u: u, far: far})
	}
	return ok
}

// inUse is how many GPUs are; unknown while one is being opened, which takes long.
func (g *GPUs) inUse() (n int, known bool) {
	if !g.mu.TryLock() {
		return 0, false
	}
	defer g.mu.Unlock()
	return len(g.gpus), true
}

// wantLocked has w made, unless it is being made, or cannot be.
func (c *Copier) wantLocked(w want) {
	s := &c.wants
	if s.queued[w] || s.refused[w.about()] || len(s.queue) >= maxWanted {
		return
	}
	if s.queued == nil {
		s.queued, s.refused = map[want]bool{}, map[any]bool{}
	}
	s.queued[w] = true
	s.queue = append(s.queue, w)
	if !s.runs {
		s.runs = true
		c.wg.Go(c.makeWanted)
	}
}

// makeWanted works until nothing is wanted.
func (c *Copier) makeWanted() {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &c.wants
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
			c.gpus.cfg.Log.Warn("lanes move memory through buffers, and over the link of its GPU alone", "gpu", w.u.index, "err", err)
		}
	}
	s.runs = false
}

// makeLocked lets go of mu while it waits for the driver.
func (c *Copier) makeLocked(w *want) error {
	if w.host != nil {
		// A peer's file with holes is not filled by us: whoever announces a huge empty one would take all the memory.
		if w.host.ReadOnly() && !w.host.Present() {
			return fmt.Errorf("stage: region %s: not all of its memory is allocated, so that it is not pinned", w.host.ID())
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

// unwantLocked returns once nothing is made for a region that goes, nor will be.
func (c *Copier) unwantLocked(r *mem.Region) {
	s := &c.wants
	s.queue = slices.DeleteFunc(s.queue, func(w want) bool {
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

// Carry moves lists for which Reaches said yes, several of them after one another if need be, over as many links as pays. When it returns
// nothing of them is in flight, whatever became of it.
func (c *Copier) Carry(dst, src []mem.Block) error {
	buf := crossings.Get().(*[]crossing)
	defer crossings.Put(buf)
	list, ok := cross((*buf)[:0], dst, src)
	*buf = list[:0]
	if !ok {
		return fmt.Errorf("stage: carry: blocks that are not between a GPU and mapped memory, or of different lengths: %w", mem.ErrBounds)
	}
	var errs []error
	for len(list) > 0 { // those of one GPU and direction at a time; there is seldom another
		u, dir := list[0].u, list[0].dir
		rest := slices.IndexFunc(list, func(x crossing) bool { return x.u != u || x.dir != dir })
		if rest < 0 {
			rest = len(list)
		}
		errs = append(errs, c.carry(u, dir, list[:rest]))
		list = list[rest:]
	}
	return errors.Join(errs...)
}

func (c *Copier) carry(u *GPU, dir Direction, list []crossing) error {
	buf := partLists.Get().(*[]Part)
	defer partLists.Put(buf)
	if c.isSmall(u, list) {
		var err error
		if *buf, err = c.partsOf((*buf)[:0], u, list, false); err == nil {
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
	if !p.mu.TryRLock() { // a set is being made, which may wait for a copy that hangs; a batch with claims entered must not
		return errNotReady
	}
	defer p.mu.RUnlock()
	parts, err := c.laneParts((*buf)[:0], p, u, list)
	*buf = parts
	if err != nil {
		return err
	}
	p.active.Add(1)
	defer p.active.Add(-1)
	c.yield(p) // a batch of a lane is over sooner than one would look again
	_, err = p.m.CopyParts(dir, parts)
	return err
}

// laneParts finds where the pieces are for the copy engines. p is held.
func (c *Copier) laneParts(parts []Part, p *paths, u *GPU, list []crossing) ([]Part, error) {
	if p.m == nil {
		return parts, errNotReady
	}
	for i := range list {
		if i > 0 && list[i].far.Region == list[i-1].far.Region {
			list[i].shift = list[i-1].shift
			continue
		}
		var err error
		if list[i].shift, err = p.shiftOf(list[i].far.Region); err != nil {
			return parts, err
		}
	}
	return c.partsOf(parts, u, list, false)
}

// linkOf is a link of the path set to a GPU, by the number of the GPU whose link it is.
type linkOf struct {
	u   *GPU
	gpu int
}

// PathState is the path set to one GPU.
type PathState struct {
	GPU       int         `json:"gpu"`
	Threshold uint64      `json:"every_link_from_bytes"` // of copies under way
	Links     []LinkState `json:"links"`                 // that of the GPU itself first
}

// State says how host memory and each GPU are joined, and what every link has moved since this process began.
func (c *Copier) State() []PathState {
	c.mu.Lock()
	all := make(map[*GPU]*paths, len(c.paths))
	for u, p := range c.paths {
		all[u] = p
	}
	c.mu.Unlock()
	var out []PathState
	for u, p := range all {
		p.mu.RLock()
		s := PathState{GPU: u.index, Links: p.stateLocked(u)}
		if p.m != nil {
			s.Threshold = p.m.Threshold()
		}
		c.mu.Lock()
		for i := range s.Links {
			l := &s.Links[i]
			was := c.past[linkOf{u, l.GPU}]
			l.Bytes, l.Returned = l.Bytes+was.Bytes, l.Returned+was.Returned
		}
		c.mu.Unlock()
		p.mu.RUnlock()
		if len(s.Links) > 0 {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, func(a, b PathState) int { return a.GPU - b.GPU })
	return out
}

// stateLocked is without what earlier path sets have moved.
func (p *paths) stateLocked(u *GPU) []LinkState {
	if p.m == nil {
		return nil
	}
	links := p.m.Links()
	for i := range links {
		links[i].GPU = u.index
		if i > 0 {
			links[i].GPU = p.relays[i-1].index
		}
	}
	return links
}
