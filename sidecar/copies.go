package sidecar

import (
	"cmp"
	"context"
	"encoding/hex"
	"log/slog"
	"sync"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
	"github.com/kvspray/kvspray/transfer"
)

// copies executes copies that engines request between their own regions: loading caches from host
// memory, waking weights. No other process takes part, so there is no grant, no plan and no
// executor, only the lease: when the engine receives its end, its writes have happened or never
// will.
type copies struct {
	leases    *local.Leases
	gpus      *gpus
	metrics   *metrics.Set
	transfers *trace.Lines
	complete  func(*engines.Worker, engines.Completion) error
	loaded    func(w *engines.Worker, id transfer.LeaseID, parts int)
	log       *slog.Logger

	slots chan struct{} // one for each running copy
	turns turns         // of loads
}

// Bounds of copies. A copy checks between two pieces whether it was canceled: a piece takes some
// tens of milliseconds.
const (
	// of all workers; others wait. One fills a link, several keep several GPUs busy.
	maxCopiesRunning = 4
	// Pieces of a load at a time. While one ends, the next is on its way; more would delay the first
	// layers. A worker has one load at a time.
	loadLanes   = 2
	loadPiece   = 2 << 20 // its bytes take longer than its begin and end
	hostPiece   = 128 << 20
	devicePiece = 1 << 30
	pieceBlocks = 16 << 10
	bounceBytes = 1 << 20 // between two regions that are not mapped
)

// pathHost is the path of a copy without a GPU. Package gpu names the others.
const pathHost = "host"

// start runs one. The connector bounds how many a worker has.
func (c *copies) start(w *engines.Worker, cp connector.Copy) {
	c.leases.Run(w, cp.Lease.ID, cp.Deadline, func(ctx context.Context) { c.run(ctx, w, &cp) })
}

// run copies, and completes the lease. Nothing of it is in flight when the engine receives the
// result.
func (c *copies) run(ctx context.Context, w *engines.Worker, cp *connector.Copy) {
	began := time.Now()
	r := copyRun{gpus: c.gpus, pieces: pieces{parts: cp.Parts}, bytesByPath: map[string]uint64{}}
	slots, lanes := c.slots, 1
	if cp.Load {
		turn := c.turns.join(w)
		defer c.turns.leave(w, turn)
		slots, lanes = turn.slot, loadLanes
		r.arrived = func(parts int) { c.loaded(w, cp.Lease, parts) }
	}
	var waited time.Duration
	select {
	case slots <- struct{}{}:
		waited = time.Since(began)
		r.run(ctx, lanes)
		<-slots
	case <-ctx.Done():
		r.err = context.Cause(ctx)
	}
	path, moved := r.path()
	done := engines.Completion{Lease: cp.Lease, Received: true, Status: local.Status(r.err),
		Bytes: moved, Took: time.Since(began), Transport: path}
	if r.err != nil {
		done.Reason = r.err.Error()
	}
	if cerr := c.complete(w, done); cerr != nil {
		c.log.Debug("completion not delivered", "lease", cp.Lease.String(), "err", cerr)
	}
	c.trace(w, cp, &done, waited)
}

func (c *copies) trace(w *engines.Worker, cp *connector.Copy, x *engines.Completion,
	waited time.Duration) {
	outcome := metrics.OutcomeOf(x.Status)
	c.metrics.CopyEnded(outcome, x.Transport, x.Bytes, x.Took)
	src, dst, blocks := cp.Parts[0].Src.ID(), cp.Parts[0].Dst.ID(), 0
	for i := range cp.Parts {
		blocks += cp.Parts[i].Len()
	}
	r := trace.Copy{Side: "copy", Outcome: string(outcome), Req: cp.Req, Engine: w.Name,
		Lease:  cp.Lease.String(),
		Source: hex.EncodeToString(src[:4]),
		Dest:   hex.EncodeToString(dst[:4]), Route: x.Transport, Blocks: blocks, Bytes: x.Bytes,
		QueueUS: waited.Microseconds(),
		TookUS:  x.Took.Microseconds(), Reason: x.Reason}
	level := slog.LevelInfo
	if x.Status != engines.StatusOK && x.Status != engines.StatusCancelled {
		level = slog.LevelWarn
	}
	c.log.Log(context.Background(), level, "copy", "outcome", r.Outcome, "worker", w.Name, "req",
		r.Req, "lease", r.Lease, "source", r.Source,
		"dest", r.Dest, "route", r.Route, "blocks", r.Blocks, "bytes", r.Bytes, "queue_us", r.QueueUS,
		"took_us", r.TookUS, "reason", r.Reason)
	c.transfers.Put(r)
}

// turns let a worker's loads run one at a time.
type turns struct {
	mu sync.Mutex // protects what follows
	of map[*engines.Worker]*turn
}

type turn struct {
	slot  chan struct{}
	users int // loads that run or wait
}

func (t *turns) join(w *engines.Worker) *turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	x := t.of[w]
	if x == nil {
		x = &turn{slot: make(chan struct{}, 1)}
		t.of[w] = x
	}
	x.users++
	return x
}

func (t *turns) leave(w *engines.Worker, x *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if x.users--; x.users == 0 {
		delete(t.of, w)
	}
}

// copyRun copies the parts of one lease, piece by piece, in one or several lanes.
type copyRun struct {
	gpus    *gpus
	arrived func(parts int) // called with the number of first parts that are there; nil: a COPY

	mu          sync.Mutex // guards what follows
	pieces      pieces
	begun       int         // pieces
	next        int         // all pieces before this one have ended
	ended       map[int]int // of later ones that have ended: piece.parts
	bytesByPath map[string]uint64
	err         error
}

// path returns the path that moved most bytes, and all bytes.
func (r *copyRun) path() (path string, moved uint64) {
	for p, n := range r.bytesByPath {
		if moved += n; path == "" || n > r.bytesByPath[path] || n == r.bytesByPath[path] && p < path {
			path = p
		}
	}
	return path, moved
}

// run copies as many pieces at a time.
func (r *copyRun) run(ctx context.Context, lanes int) {
	var others sync.WaitGroup
	for range lanes - 1 {
		others.Go(func() { r.lane(ctx) })
	}
	r.lane(ctx)
	others.Wait()
}

func (r *copyRun) lane(ctx context.Context) {
	m := copyWorker{gpus: r.gpus}
	for {
		i, more := r.take(ctx, &m.piece)
		if !more {
			return
		}
		path, err := m.copy(ctx)
		r.end(i, &m.piece, path, err)
	}
}

// take cuts the next piece, of number i.
func (r *copyRun) take(ctx context.Context, p *piece) (i int, more bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil || !r.pieces.next(p) {
		return 0, false
	}
	if ctx.Err() != nil {
		r.err = context.Cause(ctx)
		return 0, false
	}
	r.begun++
	return r.begun - 1, true
}

func (r *copyRun) end(i int, p *piece, path string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.err = cmp.Or(r.err, err)
		return
	}
	r.bytesByPath[path] += p.bytes
	if r.arrived == nil {
		return
	}
	if r.ended == nil {
		r.ended = map[int]int{}
	}
	r.ended[i] = p.parts
	parts := 0
	for n, ok := r.ended[r.next]; ok; n, ok = r.ended[r.next] {
		delete(r.ended, r.next)
		r.next++
		parts = n
	}
	if parts > 0 {
		r.arrived(parts)
	}
}

// pieces cuts the parts of a copy, all on the same devices, into what one call copies.
type pieces struct {
	parts       []connector.CopyPart
	part, block int
	off         uint64 // of the block: already cut
}

// piece is what one call copies.
type piece struct {
	from, to []mem.Block
	bytes    uint64
	parts    int // all parts that end with this piece or an earlier one
}

func (p *pieces) next(b *piece) bool {
	b.from, b.to, b.bytes = b.from[:0], b.to[:0], 0
	limit := uint64(hostPiece)
	if first := &p.parts[0]; first.Src.Device() != nil || first.Dst.Device() != nil {
		limit = devicePiece
	}
	for p.part < len(p.parts) && b.bytes < limit && len(b.from) < pieceBlocks {
		part := &p.parts[p.part]
		x := part.Block(p.block)
		k := min(x.Len-p.off, limit-b.bytes)
		b.from = append(b.from, mem.Block{Region: part.Src, Off: x.SrcOff + p.off, Len: k})
		b.to = append(b.to, mem.Block{Region: part.Dst, Off: x.DstOff + p.off, Len: k})
		b.bytes += k
		if p.off += k; p.off < x.Len {
			continue
		}
		p.off, p.block = 0, p.block+1
		if p.block < part.Len() {
			continue
		}
		p.block, p.part = 0, p.part+1
		if b.bytes >= loadPiece {
			break
		}
	}
	b.parts = p.part
	return len(b.from) > 0
}

// copyWorker copies pieces.
type copyWorker struct {
	gpus   *gpus
	piece  piece
	bounce []byte
}

func (m *copyWorker) copy(ctx context.Context) (path string, err error) {
	if m.piece.from[0].Region.Device() != nil || m.piece.to[0].Region.Device() != nil {
		if m.gpus.pin(ctx, m.piece.to, m.piece.from); ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		return m.gpus.copy(m.piece.to, m.piece.from)
	}
	for i := range m.piece.from {
		if err := m.host(m.piece.to[i], m.piece.from[i]); err != nil {
			return "", err
		}
	}
	return pathHost, nil
}

// host copies between two places in host memory; a process region is accessible by system calls
// only.
func (m *copyWorker) host(to, from mem.Block) error {
	if b, ok := from.Bytes(); ok {
		return to.Region.WriteAt(b, to.Off)
	}
	if b, ok := to.Bytes(); ok {
		return from.Region.ReadAt(b, from.Off)
	}
	if m.bounce == nil {
		m.bounce = make([]byte, bounceBytes)
	}
	for off := uint64(0); off < from.Len; off += bounceBytes {
		b := m.bounce[:min(bounceBytes, from.Len-off)]
		if err := from.Region.ReadAt(b, from.Off+off); err != nil {
			return err
		}
		if err := to.Region.WriteAt(b, to.Off+off); err != nil {
			return err
		}
	}
	return nil
}
