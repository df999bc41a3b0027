package sidecar

import (
	"context"
	"encoding/hex"
	"log/slog"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
)

// copies executes copies that engines request between their own regions: loading caches from host
// memory, waking weights. No other process takes part, so there is no grant, no plan and no
// executor, only the lease: when the engine receives its end, its writes have happened or never
// will.
type copies struct {
	leases    *local.Leases
	gpus      *gpus
	metrics   *metrics.Set
	transfers *trace.Lines      // set before the first copy
	server    *connector.Server // likewise
	log       *slog.Logger

	slots chan struct{} // one for each running copy
}

// Bounds of copies. A copy checks between two pieces whether it was canceled: a piece takes some
// tens of milliseconds.
const (
	// of all workers; others wait. One fills a link, several keep several GPUs busy.
	maxCopiesRunning = 4
	hostPiece        = 128 << 20
	devicePiece      = 1 << 30
	pieceBlocks      = 16 << 10
	bounceBytes      = 1 << 20 // between two regions that are not mapped
)

// pathHost is the path of a copy without a GPU. Package gpu names the others.
const pathHost = "host"

func newCopies(l *local.Leases, g *gpus, m *metrics.Set, log *slog.Logger) *copies {
	return &copies{leases: l, gpus: g, metrics: m, log: log,
		slots: make(chan struct{}, maxCopiesRunning)}
}

// start runs one. The connector bounds how many a worker has.
func (c *copies) start(w *engines.Worker, cp connector.Copy) {
	c.leases.Run(w, cp.Lease.ID, cp.Deadline, func(ctx context.Context) { c.run(ctx, w, &cp) })
}

// run copies, and completes the lease. Nothing of it is in flight when the engine receives the
// result.
func (c *copies) run(ctx context.Context, w *engines.Worker, cp *connector.Copy) {
	began := time.Now()
	m := copyWorker{gpus: c.gpus, src: cp.Src, dst: cp.Dst,
		ways: map[string]uint64{}}
	var err error
	var waited time.Duration
	select {
	case c.slots <- struct{}{}:
		waited = time.Since(began)
		err = m.run(ctx, cp.Blocks)
		<-c.slots
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	path, moved := m.path()
	done := engines.Completion{Lease: cp.Lease, Received: true, Status: local.Status(err),
		Bytes: moved, Took: time.Since(began), Transport: path}
	if err != nil {
		done.Reason = err.Error()
	}
	if cerr := c.server.Complete(w, done); cerr != nil {
		c.log.Debug("completion not delivered", "lease", cp.Lease.String(), "err", cerr)
	}
	c.trace(w, cp, &done, waited)
}

func (c *copies) trace(w *engines.Worker, cp *connector.Copy, x *engines.Completion,
	waited time.Duration) {
	outcome := metrics.OutcomeOf(x.Status)
	c.metrics.CopyEnded(outcome, x.Transport, x.Bytes, x.Took)
	src, dst := cp.Src.ID(), cp.Dst.ID()
	r := trace.Copy{Side: "copy", Outcome: string(outcome), Req: cp.Req, Lease: cp.Lease.String(),
		Source: hex.EncodeToString(src[:4]),
		Dest:   hex.EncodeToString(dst[:4]), Route: x.Transport, Blocks: len(cp.Blocks), Bytes: x.Bytes,
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

// copyWorker copies the blocks of one list, piece by piece.
type copyWorker struct {
	gpus     *gpus
	src, dst *mem.Region
	ways     map[string]uint64 // bytes by path
	from, to []mem.Block
	bounce   []byte
}

// path returns the path that moved most bytes, and all bytes.
func (m *copyWorker) path() (path string, moved uint64) {
	for p, n := range m.ways {
		if moved += n; path == "" || n > m.ways[path] || n == m.ways[path] && p < path {
			path = p
		}
	}
	return path, moved
}

func (m *copyWorker) run(ctx context.Context, blocks []connector.CopyBlock) error {
	most := uint64(hostPiece)
	if m.src.Device() != nil || m.dst.Device() != nil {
		most = devicePiece
	}
	m.from, m.to = make([]mem.Block, 0, min(len(blocks), pieceBlocks)), make([]mem.Block, 0,
		min(len(blocks), pieceBlocks))
	var off uint64 // of blocks[0]: already copied
	for len(blocks) > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		m.from, m.to = m.from[:0], m.to[:0]
		var bytes uint64
		for len(blocks) > 0 && bytes < most && len(m.from) < pieceBlocks {
			b := &blocks[0]
			k := min(b.Len-off, most-bytes)
			m.from = append(m.from, mem.Block{Region: m.src, Off: b.SrcOff + off, Len: k})
			m.to = append(m.to, mem.Block{Region: m.dst, Off: b.DstOff + off, Len: k})
			bytes += k
			if off += k; off == b.Len {
				blocks, off = blocks[1:], 0
			}
		}
		path, err := m.piece()
		if err != nil {
			return err
		}
		m.ways[path] += bytes
	}
	return nil
}

func (m *copyWorker) piece() (path string, err error) {
	if m.src.Device() != nil || m.dst.Device() != nil {
		return m.gpus.copy(m.to, m.from)
	}
	for i := range m.from {
		if err := m.host(m.to[i], m.from[i]); err != nil {
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
