package connector

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"

	"github.com/kvspray/kvspray/connector/internal/blocks"
	"github.com/kvspray/kvspray/connector/internal/memory"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
)

// maxRanks bounds the ranks of an engine that share a request.
const maxRanks = 256

// onRegister maps and checks a worker's registration. A refusal leaves the session open, so that
// the shim can correct it and register again.
func (c *session) onRegister(m *msg.Register, fds descriptorSet) {
	w, err := c.register(m, fds)
	if err != nil {
		c.s.hookMalformed("register")
		c.refused.Note(slog.LevelWarn, "registration refused", "err", err)
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
	owner, mine, theirs := (*worker)(nil), (*memory.Extent)(nil), (*memory.Extent)(nil)
	if current {
		owner, mine, theirs = s.sharedLocked(w, w.regions.claims)
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
		c.sendError(&msg.ErrorMessage{ID: m.ID, Code: msg.CodeState, Field: "session",
			Message: "another session of this engine worker exists, or holds a region with this id",
			Remedy:  "open a new session, with fresh region ids for new memory"})
		return
	}
	s.opt.Events([]engines.Event{{Kind: engines.WorkerUp, Worker: w.pub}})
	w.deliver.Unlock()
	c.send(&msg.Registered{ID: m.ID, Fingerprint: w.pub.Fingerprint, Geometry: w.pub.Geometry})
	var bytes uint64
	for _, r := range w.pub.Regions {
		bytes += r.Size()
	}
	log := w.log.With("regions", len(w.pub.Regions), "bytes", bytes)
	if l := w.pub.Layout; l != nil {
		log = log.With("layers", l.NumLayers(), "groups", len(l.Groups), "fingerprint",
			fmt.Sprintf("%x", w.pub.Fingerprint[:6]))
	}
	log.Info("worker registered")
	go w.run()
	go func() {
		defer s.wg.Done()
		err := w.proc.Wait()
		if err == nil {
			s.retire(w, ErrExited)
			return
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.closed { // closing the pidfd is how shut ends this
			w.log.Error("the exit of the engine worker cannot be watched; its leases stay until a new "+
				"session takes over", "err", err)
		}
	}()
}

// sharedLocked finds another worker, of any session, that has memory of w's extents. A worker owns
// its memory until its leases are fenced.
func (s *Server) sharedLocked(w *worker, extents []memory.Extent) (owner *worker, mine,
	theirs *memory.Extent) {
	byFile := map[[2]uint64][]memory.Extent{}
	for _, e := range extents {
		byFile[e.File] = append(byFile[e.File], e)
	}
	for _, o := range s.workers {
		if o == w {
			continue
		}
		for i := range o.regions.claims {
			x := &o.regions.claims[i]
			if e := memory.Overlapping(byFile[x.File], x); e != nil {
				return o, e, x
			}
		}
		for i := range extents {
			e := &extents[i]
			if e.Region == nil {
				continue
			}
			if x := memory.SameDevice(o.regions.claims, e.Region); x != nil {
				return o, e, x
			}
		}
	}
	return nil, nil, nil
}

// sharedMemory refuses memory that another worker has registered. An engine may make a new client
// for the memory of a closed one: the old one is fenced first, and the shim tries again.
func (c *session) sharedMemory(id uint64, owner *worker, mine, theirs *memory.Extent) {
	owner.mu.Lock()
	left := owner.session == nil && owner.draining.Load() && owner.proc.PID == c.peer.PID
	owner.mu.Unlock()
	if left {
		c.s.retire(owner, ErrSuperseded)
	}
	owner.deliver.Lock()
	gone := owner.gone
	owner.deliver.Unlock()
	e := &msg.ErrorMessage{ID: id, Code: msg.CodeRegion, Field: mine.Field,
		Message: fmt.Sprintf("the same memory as %s of engine worker %s, which is registered",
			theirs.Field, owner.pub.Name),
		Remedy: "give each engine worker memory of its own, or stop the other one"}
	if gone {
		e.Code, e.Message, e.Remedy = msg.CodeFencing, fmt.Sprintf("the same memory as %s of engine "+
			"worker %s, which is being fenced", theirs.Field,
			owner.pub.Name), "try again in a moment"
	}
	c.s.hookMalformed("register")
	c.refused.Note(slog.LevelWarn, "registration refused", "field", e.Field, "err", e.Message)
	c.sendError(e)
}

// register opens and checks what the engine passes.
func (c *session) register(m *msg.Register, fds descriptorSet) (w *worker, err error) {
	if err := c.checkRegister(m); err != nil {
		return nil, err
	}
	in := c.staged()
	if m.First != uint32(len(in.Regions)) {
		return nil, refuse(msg.CodeProtocol, "first", fmt.Errorf("%d, and ADD_REGIONS has passed %d "+
			"regions", m.First, len(in.Regions)), "open a new session, and pass the regions again")
	}
	if err := c.s.checkRegionCount(len(in.Regions), len(m.Regions)); err != nil {
		return nil, err
	}
	in.Begin(fds)
	defer func() {
		if err != nil {
			in.Undo()
		}
	}()
	b, err := c.openBoard(in, m)
	if err != nil {
		return nil, err
	}
	pub := &engines.Worker{Boot: c.hello.Boot, Name: workerName(c.hello), Place: placeOf(c.hello),
		Engine: engines.About{Version: c.hello.Engine.Version, API: c.hello.Engine.Api,
			Role: c.hello.Engine.Role, Events: c.hello.Engine.Events,
			Replay: c.hello.Engine.Replay}}
	if err = in.Open(m.Regions, m.First); err != nil {
		return nil, err
	}
	pub.Regions = slices.Clone(in.Regions)
	index, err := c.s.openLayout(pub, m.Layout, b.flags)
	if err != nil {
		return nil, err
	}
	w = c.newWorker(pub, b, index) // it owns the descriptors: nothing may fail from here on
	in.Accept()
	c.intake = nil
	w.regions.intake, w.regions.claims = in, in.Extents
	// A caller may keep the Worker and call SourceValid long after the worker has gone: the flags
	// stay mapped as long as the Worker is reachable.
	runtime.AddCleanup(w, func(r *mem.Region) { r.Release() }, b.flagsMemory)
	return w, nil
}

func refuse(code, field string, err error, remedy string) error {
	return &msg.Refusal{Code: code, Field: field, Err: err, Remedy: remedy}
}

// checkRegister refuses a REGISTER that this session or sidecar cannot accept.
func (c *session) checkRegister(m *msg.Register) error {
	if c.hello.Role != msg.RoleWorker {
		return refuse(msg.CodeState, "role", errors.New("a scheduler has nothing to register"),
			"register on the worker's session")
	}
	if c.worker != nil {
		return refuse(msg.CodeState, "session", errors.New("registered already"), "open a new session "+
			"to register afresh")
	}
	if r := c.hello.Ranks; r.PP.Size > maxRanks || r.TP.Size > maxRanks ||
		r.PP.Size*r.TP.Size > maxRanks {
		return refuse(msg.CodeLimit, "ranks", fmt.Errorf("%d stages of %d ranks, at most %d in all",
			r.PP.Size, r.TP.Size, maxRanks), "serve the model with fewer")
	}
	if r := c.hello.Ranks; r.PCP.Size > 1 || r.DCP.Size > 1 {
		return refuse(msg.CodeLayout, "ranks", fmt.Errorf("context parallel over %d and %d ranks: the "+
			"division of tokens is unknown", r.PCP.Size, r.DCP.Size),
			"set prefill and decode context parallel sizes to 1")
	}
	// Without a layout the worker copies, and uses the store.
	if len(m.Layout) > 0 && len(m.Regions) == 0 && m.First == 0 {
		return refuse(msg.CodeRegion, "regions", errors.New("none"),
			"register the memory of the KV cache")
	}
	return nil
}

// boardOf is the opened board of a worker.
type boardOf struct {
	flags            *board.Flags
	flagsMemory      *mem.Region
	rings            *board.Rings
	ringsMemory      *mem.Region
	sqEvent, cqEvent int
}

// openBoard maps the board and takes its eventfds.
func (c *session) openBoard(in *memory.Intake, m *msg.Register) (*boardOf, error) {
	b := &boardOf{}
	var err error
	if b.flagsMemory, err = in.Board("fds.flags", m.FDs.Flags); err != nil {
		return nil, err
	}
	p, _ := b.flagsMemory.Bytes()
	if b.flags, err = board.ParseFlags(p); err != nil {
		return nil, refuse(msg.CodeBoard, "fds.flags", err, "write the header of board.h before REGISTER")
	}
	if b.flags.Boot() != c.hello.Boot {
		return nil, refuse(msg.CodeBoard, "fds.flags", fmt.Errorf("boot %x, HELLO has %x", b.flags.Boot(),
			c.hello.Boot), "use one boot id per engine worker")
	}
	if b.ringsMemory, err = in.Board("fds.rings", m.FDs.Rings); err != nil {
		return nil, err
	}
	p, _ = b.ringsMemory.Bytes()
	if b.rings, err = board.ParseRings(p); err != nil {
		return nil, refuse(msg.CodeBoard, "fds.rings", err, "write the header of board.h before REGISTER")
	}
	if b.rings.Session() != m.Session {
		return nil, refuse(msg.CodeBoard, "fds.rings", fmt.Errorf("session %x, REGISTER has %x",
			b.rings.Session(), m.Session), "make fresh rings for every connection")
	}
	if b.sqEvent, err = in.Eventfd("fds.sq_eventfd", m.FDs.SQEventfd); err != nil {
		return nil, err
	}
	b.cqEvent, err = in.Eventfd("fds.cq_eventfd", m.FDs.CQEventfd)
	return b, err
}

// openLayout checks a layout against the regions and flags of pub. index maps its layers to flags.
// A worker without a layout, which copies or uses the store, has none.
func (s *Server) openLayout(pub *engines.Worker, encoded []byte, flags *board.Flags) (index []int,
	err error) {
	if len(encoded) == 0 {
		return nil, nil
	}
	const remedy = "register what the engine allocated"
	sizes := make([]uint64, len(pub.Regions))
	for i, r := range pub.Regions {
		sizes[i] = r.Size()
	}
	lay, err := layout.Unmarshal(encoded)
	if err == nil {
		err = s.opt.Layouts.Validate(lay, sizes)
	}
	if err != nil {
		return nil, refuse(msg.CodeLayout, "layout", err, remedy)
	}
	index = make([]int, 0, lay.NumLayers())
	for gi := range lay.Groups {
		for li := range lay.Groups[gi].Layers {
			i := lay.Groups[gi].Layers[li].Index
			if i < 0 || i >= flags.Layers() {
				return nil, refuse(msg.CodeLayout, fmt.Sprintf("layout.groups[%d].layers[%d].index", gi, li),
					fmt.Errorf("%d, the board has %d layer flags", i, flags.Layers()), "make the flags with as "+
						"many layers as the model has")
			}
			index = append(index, i)
		}
	}
	pub.Layout, pub.Geometry = lay, lay.Geometry()
	if pub.Own, err = parseblock.NewMatch(s.opt.Layouts, lay, lay, nil); err != nil {
		return nil, refuse(msg.CodeLayout, "layout", err, remedy)
	}
	if pub.Fingerprint, err = s.opt.Layouts.Fingerprint(lay); err != nil {
		return nil, refuse(msg.CodeLayout, "layout", err, remedy)
	}
	return index, nil
}

// newWorker makes the state behind pub.
func (c *session) newWorker(pub *engines.Worker, b *boardOf, index []int) *worker {
	w := &worker{s: c.s, pub: pub, log: c.log.With("worker", pub.Name), proc: c.peer, flags: b.flags,
		done:    make(chan struct{}),
		session: c, rings: b.ringsMemory, leases: map[uint64]*lease{}, held: map[uint64]*lease{},
		regions: regions{next: uint32(len(pub.Regions)), added: map[uint32]*addedRegion{}}}
	w.submissions = submissions{w: w, ring: b.rings.SubmissionConsumer(),
		event: os.NewFile(uintptr(b.sqEvent), "sq_event"), complaints: map[string]int{}}
	w.completions = completions{w: w, ring: b.rings.CompletionProducer(), event: b.cqEvent}
	w.steps = steps{w: w, index: index, leases: map[uint64]*lease{}}
	if pub.Layout != nil {
		w.tables = pub.Layout.TablesOf()
	}
	w.guard = blocks.New(pub.Layout, w.tables)
	w.signals = signals{w: w, seen: make([]uint64, b.flags.Layers()+1)}
	w.watched.Worker = &w.signals
	pub.SourceValid = w.submissions.sourceValid
	pub.Session = w
	return w
}

// abandon frees a worker that did not come up. The session keeps its process.
func (w *worker) abandon() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	_ = w.submissions.event.Close()
	w.completions.closeEventLocked()
	w.rings.Release()
	for _, r := range w.pub.Regions {
		r.Release()
	}
}
