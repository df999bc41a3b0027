package connector

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
)

// Segments serves segments of engines, and batches. Its methods may be called from any goroutine,
// and do not block, except OpenFile.
type Segments interface {
	// OpenFile opens the file of a segment, and sets File, and Len if that is 0. The file system may
	// block it, so it is called without a lock.
	OpenFile(*Segment) error
	// Register makes a range of a worker's memory, or of an open file, a segment, until Revoke or
	// until the worker is gone. After an error the caller closes the file.
	Register(*engines.Worker, Segment) error
	// Revoke takes a segment of a worker back, or only the grants to one node. done is called once
	// every batch that used what was taken back is fenced. An error means that it is never called.
	Revoke(w *engines.Worker, name, to string, done func()) error
	// Locate asks a sidecar for a segment, and calls reply once.
	Locate(peer, name string, deadline time.Duration, reply func(Located, error))
	// Notes calls reply with the notifications for a worker, once there is one or the time is over.
	Notes(w *engines.Worker, wait time.Duration, reply func([]Note))
	// Start opens a batch, in the order of the worker's ring.
	Start(*engines.Worker, Batch)
}

// Segment is a range of memory, or of a file, with a name, for peers.
type Segment struct {
	Name     string
	Region   *mem.Region // nil: a file
	Path     string      // of the file, below the configured root
	File     io.Closer   // what OpenFile has opened
	Off, Len uint64      // Len is 0 for all of the rest of a file
	Grants   []Grant
}

// Everyone in a Grant names every node of the cluster.
const Everyone = "*"

// Grant lets a node use a range of a segment.
type Grant struct {
	To          string // Everyone, or the name of a node
	Read, Write bool
	Off, Len    uint64
	For         time.Duration // 0: until it is revoked
}

// Located is a segment as this node may use it.
type Located struct {
	Bytes       uint64
	Read, Write bool
	For         time.Duration // 0: no end
}

// Note is the notification of a batch.
type Note = msg.Note

// Batch is a lease that reads ranges of a segment into memory of a worker, or writes them.
type Batch struct {
	Lease    transfer.LeaseID
	Peer     string // endpoint, or name of a node; empty: this one
	Segment  string
	Write    bool
	List     mem.Block // the entries: Entries of EntryBytes each
	Entries  int
	Regions  []*mem.Region // that entries name by index
	Priority engines.Priority
	Deadline time.Duration
	Wait     bool
	Note     []byte
	Durable  bool   // of a write to a file
	Req      string // for traces
}

// EntryBytes is the size of an entry in a batch's list.
const EntryBytes = msg.EntryBytes

// maxNotesWait bounds the wait of a NOTES, which an engine repeats.
const maxNotesWait = 10 * time.Minute

func (w *worker) batchLocked(rec board.Record) error {
	l, err := w.openLocked(rec, false)
	if err != nil {
		return err
	}
	b := &Batch{}
	m, err := msg.DecodeBatch(rec.Body)
	var used []*addedRegion
	if err == nil && w.s.opt.Segments == nil {
		err = &msg.Error{Message: "BATCH", Problem: "this sidecar takes no segments"}
	}
	if err == nil {
		used, err = w.batchRegionsLocked(m, b)
	}
	if err != nil {
		w.refuseLocked(rec, false, err)
		return err
	}
	if err := w.admitLocked(l, 0); err != nil {
		w.refuseLocked(rec, false, err)
		return nil
	}
	l.useLocked(used)
	b.Lease, b.Deadline = w.leaseID(l), w.s.duration(m.DeadlineMS, w.s.opt.Deadline)
	b.Peer, b.Segment, b.Write, b.Entries = m.Peer, m.Segment, m.Write, int(m.Entries)
	b.Priority, b.Wait, b.Note, b.Req = priority(m.Priority), m.Wait, slices.Clone(m.Note), m.Req
	b.Durable = m.Durable
	w.beginLocked(l, m.StreamMark, b.Deadline, func(left time.Duration) {
		b.Deadline = left
		w.starts = append(w.starts, func() { w.s.opt.Segments.Start(w.pub, *b) })
	})
	return nil
}

// batchRegionsLocked resolves the memory of a batch, and returns the regions of it that may be
// dropped.
func (w *worker) batchRegionsLocked(m *msg.Batch, b *Batch) (used []*addedRegion, err error) {
	refused := func(field string, err error) ([]*addedRegion, error) {
		return nil, &msg.Error{Message: "BATCH", Field: field, Problem: err.Error(),
			Remedy: "name regions by their numbers, as in REGISTER and ADD_REGIONS"}
	}
	use := func(number uint32) (*mem.Region, error) {
		r, a, err := w.regionLocked(uint64(number))
		if err == nil && a == nil && w.pub.Layout != nil {
			err = fmt.Errorf("region %d is one of the layout's", number)
		}
		if err == nil && a != nil && !slices.Contains(used, a) {
			used = append(used, a)
		}
		return r, err
	}
	list, err := use(m.List)
	if err == nil {
		err = list.Check(m.Offset, uint64(m.Entries)*EntryBytes)
	}
	if err != nil {
		return refused("list", err)
	}
	b.List = mem.Block{Region: list, Off: m.Offset, Len: uint64(m.Entries) * EntryBytes}
	if _, mapped := b.List.Bytes(); !mapped {
		return refused("list", fmt.Errorf("region %d is not in a memfd", m.List))
	}
	for i, n := range m.Regions {
		r, err := use(n)
		if err != nil {
			return refused(fmt.Sprintf("regions[%d]", i), err)
		}
		b.Regions = append(b.Regions, r)
	}
	return used, nil
}

// segments are those of a worker. Guarded by worker.mu.
type segments map[string]*openSegment

// openSegment is a segment. Its region is in use until the segment is revoked and fenced.
type openSegment struct {
	added *addedRegion // nil: it stays as long as the worker
	ends  bool         // it is being revoked
}

// refuseSegment answers a request that cannot be served.
func (c *session) refuseSegment(id uint64, t msg.Type, err error) {
	c.refused.Note(slog.LevelWarn, "segment refused", "request", t.String(), "err", err)
	c.sendError(errorMessage(id, msg.CodeSegment, err, false))
}

// segmentWorker returns the worker of a request about its segments; nil: it was refused.
func (c *session) segmentWorker(id uint64, t msg.Type) *worker {
	switch {
	case c.s.opt.Segments == nil:
		c.lacks(id, t)
	case c.worker == nil:
		c.refuseSegment(id, t, refuse(msg.CodeState, "session", errors.New("nothing is registered"),
			"send REGISTER first, on a worker's session"))
	default:
		return c.worker
	}
	return nil
}

func (c *session) onSegment(m *msg.Segment) {
	w := c.segmentWorker(m.ID, m.Type())
	if w == nil {
		return
	}
	if err := w.openSegment(m); err != nil {
		c.refuseSegment(m.ID, m.Type(), err)
		return
	}
	c.send(&msg.Done{ID: m.ID})
}

func (w *worker) openSegment(m *msg.Segment) error {
	s := Segment{Name: m.Name, Off: m.Offset, Len: m.Bytes}
	for _, g := range m.Grants {
		s.Grants = append(s.Grants, Grant{To: g.To, Read: g.Read, Write: g.Write, Off: g.Offset,
			Len: g.Bytes, For: time.Duration(min(g.EndMS, maxGrantMS)) * time.Millisecond})
	}
	if s.Path = m.Path; s.Path != "" {
		if err := w.s.opt.Segments.OpenFile(&s); err != nil {
			return err
		}
	}
	err := w.registerSegment(m, s)
	if err != nil && s.File != nil {
		_ = s.File.Close()
	}
	return err
}

func (w *worker) registerSegment(m *msg.Segment, s Segment) error {
	w.deliver.Lock() // WorkerGone comes before or after
	defer w.deliver.Unlock()
	if w.gone {
		return ErrGone
	}
	w.mu.Lock()
	r, added, err := w.segmentRegionLocked(m)
	switch {
	case err != nil:
		err = &msg.Error{Message: "SEGMENT", Field: "region", Problem: err.Error(),
			Remedy: "name a region of ADD_REGIONS, and a range inside it"}
	case w.segments[m.Name] != nil:
		err = &msg.Error{Message: "SEGMENT", Field: "name", Problem: fmt.Sprintf("%q is registered "+
			"already", m.Name), Remedy: "revoke it first"}
	case len(w.segments) >= msg.MaxSegments:
		err = &msg.Error{Message: "SEGMENT", Field: "name", Problem: fmt.Sprintf("%d segments, at most "+
			"%d", len(w.segments)+1, msg.MaxSegments), Remedy: "grant ranges of one segment"}
	}
	if err != nil {
		w.mu.Unlock()
		return err
	}
	if w.segments == nil {
		w.segments = segments{}
	}
	w.segments[m.Name] = &openSegment{added: added}
	if added != nil {
		added.leases++
	}
	w.mu.Unlock()
	s.Region = r
	if err := w.s.opt.Segments.Register(w.pub, s); err != nil {
		w.segmentEnded(m.Name)
		return err
	}
	return nil
}

// segmentRegionLocked returns the region of a segment; nil: it is a file.
func (w *worker) segmentRegionLocked(m *msg.Segment) (r *mem.Region, added *addedRegion,
	err error) {
	if m.Path != "" {
		return nil, nil, nil
	}
	r, added, err = w.regionLocked(uint64(m.Region))
	if err == nil && added == nil && w.pub.Layout != nil {
		err = fmt.Errorf("region %d is one of the layout's", m.Region)
	}
	if err == nil {
		err = r.Check(m.Offset, m.Bytes)
	}
	return r, added, err
}

// maxGrantMS bounds the time of a grant: ten years.
const maxGrantMS = 10 * 365 * 24 * 3600 * 1000

// segmentEnded ends the use of a segment's region.
func (w *worker) segmentEnded(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.segments[name]
	delete(w.segments, name)
	if s != nil && s.added != nil {
		w.unuseRegionLocked(s.added)
	}
}

func (c *session) onRevoke(m *msg.Revoke) {
	w := c.segmentWorker(m.ID, m.Type())
	if w == nil {
		return
	}
	err := w.revoke(m.Name, m.To, func() { c.send(&msg.Done{ID: m.ID}) })
	if err != nil {
		c.refuseSegment(m.ID, m.Type(), err)
	}
}

// revoke takes a segment back, or the grants to one node, and calls done after its fences.
func (w *worker) revoke(name, to string, done func()) error {
	w.deliver.Lock()
	defer w.deliver.Unlock()
	if w.gone {
		return ErrGone
	}
	w.mu.Lock()
	s := w.segments[name]
	known := s != nil && !s.ends
	if known && to == "" {
		s.ends = true
	}
	w.mu.Unlock()
	if !known {
		return &msg.Error{Message: "REVOKE", Field: "name", Problem: fmt.Sprintf("%q is no segment of "+
			"this worker", name), Remedy: "name one that SEGMENT has registered"}
	}
	return w.s.opt.Segments.Revoke(w.pub, name, to, func() {
		if to == "" {
			w.segmentEnded(name)
		}
		done()
	})
}

// segmentsInLocked are the names of the segments in regions that are being dropped.
func (w *worker) segmentsInLocked(d *dropRegion) (names []string) {
	for name, s := range w.segments {
		if s.added != nil && s.added.drop == d && !s.ends {
			names = append(names, name)
		}
	}
	return names
}

func (c *session) onLocate(m *msg.Locate) {
	if c.s.opt.Segments == nil {
		c.lacks(m.ID, m.Type())
		return
	}
	c.s.opt.Segments.Locate(m.Peer, m.Name, c.s.duration(m.DeadlineMS, c.s.opt.Deadline),
		func(l Located, err error) {
			if err != nil {
				c.sendError(errorMessage(m.ID, msg.CodeSegment, err, false))
				return
			}
			c.send(&msg.Located{ID: m.ID, Bytes: l.Bytes, Read: l.Read, Write: l.Write,
				EndMS: uint64(max(l.For, 0).Milliseconds())})
		})
}

func (c *session) onNotes(m *msg.Notes) {
	w := c.segmentWorker(m.ID, m.Type())
	if w == nil {
		return
	}
	w.deliver.Lock() // WorkerGone comes before or after
	defer w.deliver.Unlock()
	if w.gone {
		c.refuseSegment(m.ID, m.Type(), ErrGone)
		return
	}
	wait := time.Duration(min(m.WaitMS, uint64(maxNotesWait.Milliseconds()))) * time.Millisecond
	w.s.opt.Segments.Notes(w.pub, wait, func(notes []Note) {
		c.send(&msg.Noted{ID: m.ID, Notes: notes})
	})
}
