package connector

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/connector/internal/memory"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// regions are those of a worker that were added after REGISTER, and what is taken. They may be
// dropped; those of Worker.Regions, which a layout names, stay as long as the worker.
type regions struct {
	intakeMu sync.Mutex // taken before deliver
	intake   *memory.Intake

	// of the board and all regions: memory that no other worker may register; guarded by Server.mu
	claims []memory.Extent

	// Guarded by worker.mu.
	next  uint32 // numbers below have been used
	added map[uint32]*addedRegion
	drops int // without an answer
}

// addedRegion is a region that may be dropped.
type addedRegion struct {
	*mem.Region
	number uint32
	leases int         // open ones that access it, and segments in it
	drop   *dropRegion // nil: the engine has not asked for it
}

// dropRegion is a DROP_REGIONS until nothing accesses its regions.
type dropRegion struct {
	session *session
	id      uint64
	regions []*addedRegion
	pools   []*openPool // that lie in one of them
	busy    int         // regions with open leases
}

// region returns a region by its number. added is nil for one that cannot be dropped.
func (w *worker) regionLocked(number uint64) (r *mem.Region, added *addedRegion, err error) {
	if number < uint64(len(w.pub.Regions)) {
		return w.pub.Regions[number], nil, nil
	}
	if number < msg.MaxRegionNumber {
		added = w.regions.added[uint32(number)]
	}
	switch {
	case added == nil:
		return nil, nil, fmt.Errorf("region %d is not registered: %d are from REGISTER, and %d were "+
			"added", number, len(w.pub.Regions), len(w.regions.added))
	case added.drop != nil:
		return nil, nil, fmt.Errorf("region %d is being dropped", number)
	}
	return added.Region, added, nil
}

// useLocked counts the regions that a lease accesses, each once.
func (l *lease) useLocked(all []*addedRegion) {
	l.regions = all
	for _, a := range all {
		a.leases++
	}
}

// unuseLocked ends the accesses of a lease that is complete. What only waited for it is dropped.
// A worker that is gone completes nothing: its memory stays until WorkerGone's fenced.
func (w *worker) unuseLocked(l *lease) {
	for _, a := range l.regions {
		w.unuseRegionLocked(a)
	}
	l.regions = nil
}

func (w *worker) unuseRegionLocked(a *addedRegion) {
	if a.leases--; a.leases > 0 || a.drop == nil || w.closed {
		return
	}
	d := a.drop
	if d.busy--; d.busy == 0 {
		w.s.wg.Go(func() { w.dropped(d) })
	}
}

// onAddRegions adds regions to a worker, or to a session for the REGISTER that follows.
func (c *session) onAddRegions(m *msg.AddRegions, fds descriptorSet) {
	err := c.addRegions(m, fds)
	if err != nil {
		c.s.hookMalformed("regions")
		c.refused.Note(slog.LevelWarn, "regions refused", "err", err)
		c.sendError(errorMessage(m.ID, msg.CodeRegion, err, false))
		return
	}
	c.send(&msg.Done{ID: m.ID})
}

func (c *session) addRegions(m *msg.AddRegions, fds descriptorSet) error {
	if c.hello.Role != msg.RoleWorker {
		return refuse(msg.CodeState, "role", errors.New("a scheduler has no memory"),
			"add regions on the worker's session")
	}
	if c.worker != nil {
		return c.worker.addRegions(m, fds)
	}
	in := c.staged()
	if m.First != uint32(len(in.Regions)) {
		return refuse(msg.CodeProtocol, "first", fmt.Errorf("%d, and %d regions were added", m.First,
			len(in.Regions)), "number regions before REGISTER from 0, without gaps")
	}
	if err := c.s.checkRegionCount(len(in.Regions), len(m.Regions)); err != nil {
		return err
	}
	in.Begin(fds)
	if err := in.Open(m.Regions, m.First); err != nil {
		in.Undo()
		return err
	}
	in.Accept()
	return nil
}

// staged is the memory of a session before its REGISTER.
func (c *session) staged() *memory.Intake {
	if c.intake == nil {
		c.intake = memory.NewIntake(c.peer.PID, c.s.opt.Devices)
	}
	return c.intake
}

// unstage releases the regions of a session that ends without a REGISTER.
func (c *session) unstage() {
	if c.intake == nil {
		return
	}
	for _, r := range c.intake.Regions {
		r.Release()
	}
	c.intake = nil
}

func (s *Server) checkRegionCount(have, more int) error {
	if limit := s.opt.Limits.Regions; have+more > limit {
		return refuse(msg.CodeLimit, "regions", fmt.Errorf("%d, at most %d", have+more, limit),
			"register fewer, larger regions")
	}
	return nil
}

func (w *worker) addRegions(m *msg.AddRegions, fds descriptorSet) error {
	r := &w.regions
	r.intakeMu.Lock()
	defer r.intakeMu.Unlock()
	w.mu.Lock()
	next := r.next
	w.mu.Unlock()
	if m.First < next || m.First > msg.MaxRegionNumber-msg.MaxRegions {
		return refuse(msg.CodeProtocol, "first", fmt.Errorf("%d, and numbers below %d have been used",
			m.First, next), fmt.Sprintf("give each region a number of its own, at most %d",
			msg.MaxRegionNumber-msg.MaxRegions))
	}
	if err := w.s.checkRegionCount(len(r.intake.Regions), len(m.Regions)); err != nil {
		return err
	}
	r.intake.Begin(fds)
	err := r.intake.Open(m.Regions, m.First)
	if err == nil {
		err = w.keepRegions(m.First)
	}
	if err != nil {
		r.intake.Undo()
	}
	return err
}

// keepRegions makes the regions of the intake's packet the worker's, unless another worker has
// their memory.
func (w *worker) keepRegions(first uint32) error {
	w.deliver.Lock() // WorkerGone comes before or after
	defer w.deliver.Unlock()
	if w.gone {
		return ErrGone
	}
	s, r := w.s, &w.regions
	fresh, extents := r.intake.Packet()
	w.mu.Lock()
	defer w.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range fresh {
		if s.regions[x.ID()] != nil {
			return refuse(msg.CodeRegion, "regions", fmt.Errorf("another worker has a region with the id %s",
				x.ID()), "draw a fresh random id for each region")
		}
	}
	if owner, mine, theirs := s.sharedLocked(w, extents); owner != nil {
		return refuse(msg.CodeRegion, mine.Field, fmt.Errorf("the same memory as %s of engine worker "+
			"%s, which is registered", theirs.Field, owner.pub.Name),
			"give each engine worker memory of its own, or stop the other one")
	}
	r.intake.Accept()
	r.claims = r.intake.Extents
	for i, x := range fresh {
		n := first + uint32(i)
		s.regions[x.ID()] = w
		r.added[n] = &addedRegion{Region: x, number: n}
	}
	r.next = first + uint32(len(fresh))
	return nil
}

// onDropRegions takes regions back. No lease that is opened from now on accesses them, and pools
// that lie in them are closed. DONE follows once the open leases have ended, each by its fence.
func (c *session) onDropRegions(m *msg.DropRegions) {
	w := c.worker
	if w == nil {
		c.sendError(errorMessage(m.ID, msg.CodeState, refuse(msg.CodeState, "session",
			errors.New("nothing is registered"), "send REGISTER first, on a worker's session"), false))
		return
	}
	d, err := w.drop(c, m)
	if err != nil {
		c.sendError(errorMessage(m.ID, msg.CodeRegion, err, false))
		return
	}
	for _, p := range d.pools {
		delete(c.spaces.open, p.id)
	}
	w.mu.Lock()
	names := w.segmentsInLocked(d)
	w.mu.Unlock()
	for _, name := range names {
		_ = w.revoke(name, "", func() {}) // it fails only if another call has revoked it
	}
}

func (w *worker) drop(c *session, m *msg.DropRegions) (*dropRegion, error) {
	d := &dropRegion{session: c, id: m.ID}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, ErrGone
	}
	if w.regions.drops >= msg.MaxDrops {
		return nil, refuse(msg.CodeLimit, "regions", fmt.Errorf("%d requests wait for leases",
			w.regions.drops), "wait for their DONE, or cancel the leases")
	}
	for i, n := range m.Regions {
		_, a, err := w.regionLocked(uint64(n))
		if err == nil && a == nil {
			err = fmt.Errorf("region %d is one of REGISTER, which stay as long as the session", n)
		}
		if err == nil && slices.Contains(m.Regions[:i], n) {
			err = fmt.Errorf("region %d comes twice", n)
		}
		if err != nil {
			return nil, refuse(msg.CodeRegion, fmt.Sprintf("regions[%d]", i), err,
				"name regions of ADD_REGIONS after REGISTER, each once")
		}
		d.regions = append(d.regions, a)
	}
	for _, a := range d.regions {
		a.drop = d
		if a.leases > 0 {
			d.busy++
		}
	}
	for id, p := range w.pools.known {
		if slices.ContainsFunc(p.regions, func(a *addedRegion) bool { return a.drop == d }) {
			d.pools = append(d.pools, p)
			delete(w.pools.known, id)
			w.pools.closing++
		}
	}
	w.regions.drops++
	if d.busy == 0 {
		w.s.wg.Go(func() { w.dropped(d) })
	}
	return d, nil
}

// dropped ends the use of regions that no lease accesses. The driver of GPUs and the kernel are
// slow at it. If the worker has gone meanwhile, its release has the regions.
func (w *worker) dropped(d *dropRegion) {
	for _, p := range d.pools {
		w.endPool(p)
	}
	r := &w.regions
	var all []*mem.Region
	w.mu.Lock()
	r.drops--
	for _, a := range d.regions {
		if r.added[a.number] == a {
			delete(r.added, a.number)
			all = append(all, a.Region)
		}
	}
	w.mu.Unlock()
	w.s.freeRegions(all)
	r.intakeMu.Lock()
	r.intake.Forget(all)
	w.s.mu.Lock()
	for _, x := range all {
		delete(w.s.regions, x.ID())
	}
	r.claims = r.intake.Extents
	w.s.mu.Unlock()
	r.intakeMu.Unlock()
	d.session.send(&msg.Done{ID: d.id})
}

// freeRegions releases memory that nothing accesses.
func (s *Server) freeRegions(all []*mem.Region) {
	if s.opt.Devices != nil {
		s.opt.Devices.Forget(all)
	}
	for _, r := range all {
		r.Release()
	}
}
