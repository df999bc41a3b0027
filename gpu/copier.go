package gpu

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/multipath"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// The paths of a Copier's copies.
const (
	PathStaged    = "staged"    // through staging slots
	PathPeer      = "peer"      // between GPUs, or within one GPU
	PathPacked    = "packed"    // kernels that access pinned host memory
	PathDirect    = "direct"    // the GPU's copy engine and pinned host memory
	PathMultipath = "multipath" // the PCIe links of all GPUs
)

// Copier copies between GPUs and pinned host memory, and between GPUs. It uses the PCIe links of
// all GPUs of which engines have lent memory. When there is a new one, it measures again from how
// many bytes on this is faster.
//
// Goroutines: those of each Multipath; one for each copy over several links; and one while lanes
// wait for something (copier_lanes.go). Close joins them.
type Copier struct {
	gpus  *GPUs
	shape copierShape
	wg    sync.WaitGroup // prepareAll
	under sync.WaitGroup // copies of small pieces; Add under mu and before closed

	mu           sync.Mutex // protects all below; taken after those of paths
	settled      sync.Cond  // a window is pinned or refused, or a preparation has ended
	paths        map[*GPU]*paths
	limits       map[*GPU]policy.Limits             // of the table
	pins         map[*mem.Region]map[uint64]*window // by region and number of the window
	windows      int                                // in pins
	past         map[linkOf]multipath.LinkState     // counters of path sets that were replaced
	preparations preparations
	unpinned     bool // the refusal of a window is in the log
	closed       bool
}

// copierShape is sizes in bytes. Tests have smaller ones.
type copierShape struct {
	minChunk, maxChunk, calibrateFrom, calibrateTo, window uint64

	mappedFrom uint64 // lists of fewer bytes use no kernels
}

// relayBytes is what one path set allocates on each relay.
func (s *copierShape) relayBytes() uint64 { return multipath.LinkDepth * s.maxChunk }

func fullShape() copierShape {
	return copierShape{multipath.MinChunk, multipath.MaxChunk, multipath.MaxCalibrate,
		multipath.MinCalibrate, pinWindow, policy.TrialBytes}
}

// NewCopier makes a Copier of g, which must outlive it.
func NewCopier(g *GPUs) *Copier {
	return newCopier(g, fullShape())
}

func newCopier(g *GPUs, shape copierShape) *Copier {
	c := &Copier{gpus: g, shape: shape, paths: map[*GPU]*paths{}, limits: map[*GPU]policy.Limits{},
		pins: map[*mem.Region]map[uint64]*window{},
		past: map[linkOf]multipath.LinkState{}}
	c.settled.L = &c.mu
	return c
}

// Copy copies src, block by block, to dst, and reports the path. The blocks of a list are all on
// one GPU or all in host memory, and those of at least one list are on a GPU. When Copy returns,
// nothing is in flight.
func (c *Copier) Copy(dst, src []mem.Block) (path string, err error) {
	if len(src) == 0 || len(dst) != len(src) {
		return "", fmt.Errorf("gpu: copy %d blocks to %d: %w", len(src), len(dst), mem.ErrBounds)
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
	return "", errors.New("gpu: copy: no block is on a GPU")
}

// withHost copies between u and the host.
func (c *Copier) withHost(u *GPU, dst, src []mem.Block) (string, error) {
	buf := hostPieceLists.Get().(*[]hostPiece)
	defer hostPieceLists.Put(buf)
	list, ok := hostPiecesOf((*buf)[:0], dst, src)
	*buf = list[:0]
	if !ok {
		for i := range dst {
			if err := errors.Join(dst[i].Region.Check(dst[i].Off, dst[i].Len),
				src[i].Region.Check(src[i].Off, src[i].Len)); err != nil {
				return "", err
			}
		}
		return PathStaged, u.Move(dst, src)
	}
	if len(list) == 0 {
		return PathDirect, nil
	}
	parts := pieceLists.Get().(*[]device.Piece)
	defer pieceLists.Put(parts)
	var err error
	if *parts, err = c.devicePieces((*parts)[:0], u, list, true); errors.Is(err, net.ErrClosed) {
		return "", err
	} else if err != nil { // pins and locked memory are bounded
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
	if err := shiftList(list, p.shifts); err != nil {
		return "", err
	}
	shiftParts(*parts, list)
	p.active.Add(1)
	defer p.active.Add(-1)
	stop := c.watch(p, *parts)
	defer stop()
	every, err := p.m.CopyPieces(dir, *parts)
	if every {
		return PathMultipath, err
	}
	return PathDirect, err
}

// isSmall reports whether the average piece is too small for copy engines alone.
func (c *Copier) isSmall(u *GPU, list []hostPiece) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytesOf(list)/uint64(len(list)) < c.largeLocked(u)
}

// largeLocked is the average piece from which copy engines move a list alone.
func (c *Copier) largeLocked(u *GPU) uint64 {
	return max(largePiece, c.limitsLocked(u).DirectBytes)
}

func (c *Copier) limitsLocked(u *GPU) policy.Limits {
	l, ok := c.limits[u]
	if !ok {
		l = c.gpus.cfg.Table.Limits(c.gpus.model(u.index))
		c.limits[u] = l
	}
	return l
}

// Forget releases what the driver has of regions that end. No copy of them may be in flight or
// follow.
func (c *Copier) Forget(regions []*mem.Region) error {
	c.mu.Lock()
	var errs []error
	for _, r := range regions {
		c.cancelLocked(r)
		errs = append(errs, c.unpinLocked(r))
	}
	all := slices.Collect(maps.Values(c.paths))
	c.mu.Unlock()
	// Without mu, because the driver may take long.
	for _, p := range all {
		for _, r := range regions {
			errs = append(errs, p.forget(r))
		}
	}
	return errors.Join(errs...)
}

// Close waits for the copies in flight and releases everything. Later copies return net.ErrClosed.
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
		errs = append(errs, c.closePathsLocked(p, u, nil))
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
