package connector

import (
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
)

// maxBoardBytes bounds a flags or rings memfd: two rings of the largest size and their headers.
const maxBoardBytes = 2*board.RingMaxBytes + 1<<20

// maxRanks bounds the ranks of an engine that share a request.
const maxRanks = 256

// onRegister maps and checks a worker's registration. A refusal leaves the session open, so that
// the shim can correct it and register again.
func (c *session) onRegister(m *msg.Register, fds descriptorSet) {
	w, err := c.register(m, fds)
	if err != nil {
		c.s.hookMalformed("register")
		c.log.Warn("registration refused", "err", err)
		c.sendError(errorMessage(m.ID, msg.CodeState, err, false))
		return
	}
	c.worker = w
	s := c.s
	// Every lock in order: nothing can retire the worker before WorkerUp was called.
	w.deliver.Lock()
	s.mu.Lock()
	current := !s.closed && s.byBoot[c.hello.Boot] == c && s.workers[c.hello.Boot] == nil
	if current {
		for _, r := range w.pub.Regions {
			if owner := s.regions[r.ID()]; owner != nil {
				current = false
			}
		}
	}
	owner, mine, theirs := (*worker)(nil), (*extent)(nil), (*extent)(nil)
	if current {
		owner, mine, theirs = s.sharedLocked(w)
		current = owner == nil
	}
	if current {
		s.workers[c.hello.Boot] = w
		for _, r := range w.pub.Regions {
			s.regions[r.ID()] = w
		}
		s.wg.Add(2)
	}
	s.mu.Unlock()
	if !current {
		w.gone = true
		w.deliver.Unlock()
		c.worker = nil
		w.abandon()
		if owner != nil {
			c.sharedMemory(m.ID, owner, mine, theirs)
			return
		}
		c.sendError(&msg.ErrorMessage{ID: m.ID, Code: msg.CodeState, Field: "session", Message: "another session of this engine worker exists, or holds a region with this id",
			Remedy: "open a new session, with fresh region ids for new memory"})
		return
	}
	if w.work != nil {
		w.detach = s.opt.Engines.Attach(*w.work)
	}
	s.opt.Events.WorkerUp(w.pub)
	w.deliver.Unlock()
	c.send(&msg.Registered{ID: m.ID, Fingerprint: w.pub.Fingerprint, Geometry: w.pub.Geometry})
	var bytes uint64
	for _, r := range w.pub.Regions {
		bytes += r.Size()
	}
	w.log.Info("worker registered", "regions", len(w.pub.Regions), "bytes", bytes, "layers", w.pub.Layout.NumLayers(),
		"groups", len(w.pub.Layout.Groups), "fingerprint", fmt.Sprintf("%x", w.pub.Fingerprint[:6]))
	go w.run()
	go func() {
		defer s.wg.Done()
		err := w.proc.wait()
		if err == nil {
			s.retire(w, ErrExited)
			return
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.closed { // closing the pidfd is how shut ends this
			w.log.Error("the exit of the engine worker cannot be watched; its leases stay until a new session takes over", "err", err)
		}
	}()
}

// sharedLocked finds a worker, of any session, whose memory w registers too. A worker owns its
// memory until its leases are fenced.
func (s *Server) sharedLocked(w *worker) (owner *worker, mine, theirs *extent) {
	byFile := map[[2]uint64][]extent{}
	for _, e := range w.extents {
		byFile[e.file] = append(byFile[e.file], e)
	}
	for _, o := range s.workers {
		for i := range o.extents {
			if e := overlapping(byFile[o.extents[i].file], &o.extents[i]); e != nil {
				return o, e, &o.extents[i]
			}
		}
		for i, r := range w.pub.Regions {
			if k := sameDeviceMemory(o.pub.Regions, r); k >= 0 {
				return o, &extent{field: fmt.Sprintf("regions[%d]", i)}, &extent{field: fmt.Sprintf("regions[%d]", k)}
			}
		}
	}
	return nil, nil, nil
}

// sharedMemory refuses memory that another worker has registered. An engine may make a new client
// for the memory of a closed one: the old one is fenced first, and the shim tries again.
func (c *session) sharedMemory(id uint64, owner *worker, mine, theirs *extent) {
	owner.mu.Lock()
	left := owner.session == nil && owner.draining.Load() && owner.proc.pid == c.peer.pid
	owner.mu.Unlock()
	if left {
		c.s.retire(owner, ErrSuperseded)
	}
	owner.deliver.Lock()
	gone := owner.gone
	owner.deliver.Unlock()
	e := &msg.ErrorMessage{ID: id, Code: msg.CodeRegion, Field: mine.field,
		Message: fmt.Sprintf("the same memory as %s of engine worker %s, which is registered", theirs.field, owner.pub.Name),
		Remedy:  "give each engine worker memory of its own, or stop the other one"}
	if gone {
		e.Code, e.Message, e.Remedy = msg.CodeFencing, fmt.Sprintf("the same memory as %s of engine worker %s, which is being fenced", theirs.field,
			owner.pub.Name), "try again in a moment"
	}
	c.s.hookMalformed("register")
	c.log.Warn("registration refused", "field", e.Field, "err", e.Message)
	c.sendError(e)
}

func (c *session) register(m *msg.Register, fds descriptorSet) (w *worker, err error) {
	s := c.s
	refuse := func(code, field string, err error, remedy string) error {
		return &fieldError{code: code, field: field, err: err, remedy: remedy}
	}
	if c.hello.Role != msg.RoleWorker {
		return nil, refuse(msg.CodeState, "role", errors.New("a scheduler has nothing to register"), "register on the worker's session")
	}
	if c.worker != nil {
		return nil, refuse(msg.CodeState, "session", errors.New("registered already"), "open a new session to register afresh")
	}
	if r := c.hello.Ranks; r.PP.Size > maxRanks || r.TP.Size > maxRanks || r.PP.Size*r.TP.Size > maxRanks {
		return nil, refuse(msg.CodeLimit, "ranks", fmt.Errorf("%d stages of %d ranks, at most %d in all", r.PP.Size, r.TP.Size, maxRanks), "serve the model with fewer")
	}
	if r := c.hello.Ranks; r.PCP.Size > 1 || r.DCP.Size > 1 {
		return nil, refuse(msg.CodeLayout, "ranks", fmt.Errorf("context parallel over %d and %d ranks: the division of tokens is unknown", r.PCP.Size, r.DCP.Size),
			"set prefill and decode context parallel sizes to 1")
	}
	if len(m.Regions) == 0 {
		return nil, refuse(msg.CodeRegion, "regions", errors.New("none"), "register the memory of the KV cache")
	}
	if len(m.Regions) > s.opt.Limits.Regions {
		return nil, refuse(msg.CodeLimit, "regions", fmt.Errorf("%d, at most %d", len(m.Regions), s.opt.Limits.Regions), "register fewer, larger regions")
	}
	var undo []func()
	defer func() {
		if err != nil {
			for _, f := range undo {
				f()
			}
		}
	}()
	files := map[[2]uint64]string{}
	var extents []extent
	// take removes a descriptor from the packet. Each may be named once, and each file behind a
	// mapping once: two views of one memory would be overlapping regions.
	take := func(field string, index uint32, file bool) (fd int, size uint64, err error) {
		if uint64(index) >= uint64(len(fds)) {
			return -1, 0, refuse(msg.CodeProtocol, field, fmt.Errorf("index %d, %d descriptors came", index, len(fds)), "send the descriptor in the same packet")
		}
		if fds[index] < 0 {
			return -1, 0, refuse(msg.CodeProtocol, field, fmt.Errorf("descriptor %d is named twice", index), "send one descriptor for each use")
		}
		ino, size, err := inode(fds[index])
		if err != nil {
			return -1, 0, refuse(msg.CodeProtocol, field, err, "send an open descriptor")
		}
		if file {
			if other, dup := files[ino]; dup {
				return -1, 0, refuse(msg.CodeRegion, field, fmt.Errorf("the same memory as %s", other), "register each memory once, as one region")
			}
			e := extent{file: ino, to: max(size, 1), field: field}
			if o := overlapping(extents, &e); o != nil {
				return -1, 0, refuse(msg.CodeRegion, field, fmt.Errorf("the same memory as %s, which is a view of it", o.field), "register each memory once, as one region")
			}
			files[ino] = field
			extents = append(extents, e)
		}
		fd, fds[index] = fds[index], -1
		return fd, size, nil
	}
	mapBoard := func(field string, index uint32) (*mem.Region, error) {
		fd, size, err := take(field, index, true)
		if err != nil {
			return nil, err
		}
		if size > maxBoardBytes {
			_ = os.NewFile(uintptr(fd), field).Close()
			return nil, refuse(msg.CodeBoard, field, fmt.Errorf("%d bytes, at most %d", size, maxBoardBytes), "use smaller rings")
		}
		r, err := mem.MapMemfd(mem.NewID(), fd, size, mem.PopulatePresent())
		if err != nil {
			_ = os.NewFile(uintptr(fd), field).Close()
			return nil, refuse(msg.CodeBoard, field, err, "create it with memfd_create(MFD_ALLOW_SEALING), size it, then add F_SEAL_SHRINK|F_SEAL_GROW|F_SEAL_SEAL")
		}
		undo = append(undo, r.Release)
		return r, nil
	}
	event := func(field string, index uint32) (int, error) {
		fd, _, err := take(field, index, false)
		if err != nil {
			return -1, err
		}
		undo = append(undo, func() { _ = os.NewFile(uintptr(fd), field).Close() })
		if err := checkEventfd(fd); err != nil {
			return -1, refuse(msg.CodeBoard, field, err, "create it with eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)")
		}
		return fd, nil
	}

	flagsMem, err := mapBoard("fds.flags", m.FDs.Flags)
	if err != nil {
		return nil, err
	}
	b, _ := flagsMem.Bytes()
	flags, err := board.ParseFlags(b)
	if err != nil {
		return nil, refuse(msg.CodeBoard, "fds.flags", err, "write the header of board.h before REGISTER")
	}
	if flags.Boot() != c.hello.Boot {
		return nil, refuse(msg.CodeBoard, "fds.flags", fmt.Errorf("boot %x, HELLO said %x", flags.Boot(), c.hello.Boot), "use one boot id per engine worker")
	}
	rings, err := mapBoard("fds.rings", m.FDs.Rings)
	if err != nil {
		return nil, err
	}
	b, _ = rings.Bytes()
	view, err := board.ParseRings(b)
	if err != nil {
		return nil, refuse(msg.CodeBoard, "fds.rings", err, "write the header of board.h before REGISTER")
	}
	if view.Session() != m.Session {
		return nil, refuse(msg.CodeBoard, "fds.rings", fmt.Errorf("session %x, REGISTER says %x", view.Session(), m.Session), "make fresh rings for every connection")
	}
	door, err := event("fds.doorbell", m.FDs.Doorbell)
	if err != nil {
		return nil, err
	}
	bell, err := event("fds.bell", m.FDs.Bell)
	if err != nil {
		return nil, err
	}
	var work *mem.Region
	var workView *board.Work
	workBell := -1
	if m.Work != nil && s.opt.Engines != nil {
		if work, err = mapBoard("fds.work", m.Work.Board); err != nil {
			return nil, err
		}
		b, _ = work.Bytes()
		if workView, err = board.ParseWork(b); err != nil {
			return nil, refuse(msg.CodeBoard, "fds.work", err, "write the header of board.h before REGISTER")
		}
		if workBell, err = event("fds.work_bell", m.Work.Bell); err != nil {
			return nil, err
		}
	}

	pub := &Worker{Boot: c.hello.Boot, Name: workerName(c.hello), Place: placeOf(c.hello)}
	sizes := make([]uint64, len(m.Regions))
	ids := map[[16]byte]int{}
	for i, d := range m.Regions {
		field := fmt.Sprintf("regions[%d]", i)
		if d.Region == ([16]byte{}) {
			return nil, refuse(msg.CodeRegion, field+".region", errors.New("id is all zero"), "send 16 random bytes")
		}
		if j, dup := ids[d.Region]; dup {
			return nil, refuse(msg.CodeRegion, field+".region", fmt.Errorf("the id of regions[%d]", j), "draw a fresh random id for each region")
		}
		ids[d.Region] = i
		fd := -1
		if d.FD != msg.NoFD {
			if fd, _, err = take(field+".fd", d.FD, d.Kind == msg.KindMemfd || d.Kind == msg.KindAdopted); err != nil {
				return nil, err
			}
		}
		var r *mem.Region
		switch d.Kind {
		case msg.KindMemfd:
			r, err = mem.MapMemfd(d.Region, fd, d.Bytes, mem.PopulatePresent())
		case msg.KindAdopted:
			r, err = mem.MapMemfd(d.Region, fd, d.Bytes, mem.Adopted(), mem.PopulatePresent())
		case msg.KindProcess:
			var views []extent
			if err = disjoint(m.Regions[:i], d); err == nil {
				r, err = mem.OpenProcess(d.Region, fd, d.Addr, d.Bytes)
			}
			if err == nil {
				views, err = viewed(c.peer.pid, d.Addr, d.Bytes, field)
			}
			for k := range views {
				if o := overlapping(extents, &views[k]); err == nil && o != nil {
					err = fmt.Errorf("[%#x, +%d) is a view of the memory of %s", d.Addr, d.Bytes, o.field)
				}
			}
			if err != nil && r != nil {
				r.Release() // r owns fd
				fd = -1
			}
			extents = append(extents, views...)
		case msg.KindDevice:
			if s.opt.Devices == nil {
				err = errNoDevices
			} else if r, err = s.opt.Devices.Import(d.Region, d.Handle, fd, d.Bytes); err == nil {
				err = apart(pub.Regions, r)
			}
			if err != nil && r != nil {
				r.Release() // r owns fd
				fd = -1
			}
		default:
			err = fmt.Errorf("kind %q is unknown, want memfd, adopted, process or device", d.Kind)
		}
		if err != nil {
			if fd >= 0 {
				_ = os.NewFile(uintptr(fd), field).Close()
			}
			return nil, refuse(msg.CodeRegion, field, err, "see docs/protocol.md, REGISTER")
		}
		undo = append(undo, r.Release)
		pub.Regions = append(pub.Regions, r)
		sizes[i] = r.Size()
	}

	lay, err := layout.Unmarshal(m.Layout)
	if err == nil {
		err = s.opt.Layouts.Validate(lay, sizes)
	}
	if err != nil {
		return nil, refuse(msg.CodeLayout, "layout", err, "register what the engine allocated")
	}
	index := make([]int, 0, lay.NumLayers())
	for gi := range lay.Groups {
		for li := range lay.Groups[gi].Layers {
			i := lay.Groups[gi].Layers[li].Index
			if i < 0 || i >= flags.Layers() {
				return nil, refuse(msg.CodeLayout, fmt.Sprintf("layout.groups[%d].layers[%d].index", gi, li),
					fmt.Errorf("%d, the board has %d layer flags", i, flags.Layers()), "make the flags with as many layers as the model has")
			}
			index = append(index, i)
		}
	}
	pub.Layout, pub.Geometry = lay, lay.Geometry()
	if pub.Own, err = parseblock.NewMatch(s.opt.Layouts, lay, lay, nil); err != nil {
		return nil, refuse(msg.CodeLayout, "layout", err, "register what the engine allocated")
	}
	if pub.Fingerprint, err = s.opt.Layouts.Fingerprint(lay); err != nil {
		return nil, refuse(msg.CodeLayout, "layout", err, "register what the engine allocated")
	}

	w = &worker{s: s, pub: pub, log: c.log.With("worker", pub.Name), proc: c.peer, flags: flags, index: index, done: make(chan struct{}),
		session: c, sub: view.SubmissionConsumer(), comp: view.CompletionProducer(), door: os.NewFile(uintptr(door), "doorbell"), bell: bell,
		rings: rings, extents: extents, leases: map[uint64]*lease{}, writing: map[uint64]uint64{}, follow: map[uint64]*lease{}, held: map[uint64]*lease{},
		complaint: map[string]int{}, seen: make([]uint64, flags.Layers()+1)}
	w.tables = lay.TablesOf()
	w.pools = poolsOf(lay, w.tables)
	pub.SourceValid = w.sourceValid
	pub.state = w
	if work != nil {
		if w.work, err = newEngine(workView, work, pub.Regions, workBell, c.peer); err != nil {
			return nil, err
		}
	}
	// A caller may keep the Worker and call SourceValid long after the worker has gone: the flags
	// stay mapped as long as the Worker is reachable.
	runtime.AddCleanup(w, func(r *mem.Region) { r.Release() }, flagsMem)
	return w, nil
}

// newEngine makes the Engine of a worker. On success its End owns the memory and the eventfd.
func newEngine(view *board.Work, memory *mem.Region, regions []*mem.Region, bell int, p *peer) (*Engine, error) {
	process, err := p.hold()
	if err != nil {
		return nil, err
	}
	door := os.NewFile(uintptr(bell), "work_bell")
	return &Engine{
		Work: view, Regions: regions,
		Ring: func() {
			if rc, err := door.SyscallConn(); err == nil {
				_ = rc.Control(func(fd uintptr) { ring(int(fd)) })
			}
		},
		Exited: process.exited,
		End: func() {
			_ = door.Close()
			process.close()
			memory.Release()
		},
	}, nil
}

var errNoDevices = errors.New("this sidecar uses no GPU: transports.gpu.enabled is off, or it found no driver; its log and 'kvspray doctor' name the reason")

// apart refuses regions that share GPU memory.
func apart(before []*mem.Region, r *mem.Region) error {
	if i := sameDeviceMemory(before, r); i >= 0 {
		return fmt.Errorf("the same memory as regions[%d], or a part of it", i)
	}
	return nil
}

// sameDeviceMemory finds the region in all that shares GPU memory with r, because an already
// imported handle is imported at the same address. -1: none, or r is not GPU memory.
func sameDeviceMemory(all []*mem.Region, r *mem.Region) int {
	return slices.IndexFunc(all, func(o *mem.Region) bool {
		return r.Device() != nil && o.Device() == r.Device() && r.Base() < o.Base()+o.Size() && o.Base() < r.Base()+r.Size()
	})
}

// disjoint refuses process regions that share addresses.
func disjoint(before []msg.Region, d msg.Region) error {
	for i, o := range before {
		if o.Kind != msg.KindProcess || d.Bytes > math.MaxUint64-d.Addr {
			continue
		}
		if d.Addr < o.Addr+o.Bytes && o.Addr < d.Addr+d.Bytes {
			return fmt.Errorf("[%#x, +%d) overlaps regions[%d]", d.Addr, d.Bytes, i)
		}
	}
	return nil
}

// abandon frees a worker that did not come up. The session keeps its process.
func (w *worker) abandon() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	_ = w.door.Close()
	w.closeBellLocked()
	w.rings.Release()
	if w.work != nil {
		w.work.End()
	}
	for _, r := range w.pub.Regions {
		r.Release()
	}
}
