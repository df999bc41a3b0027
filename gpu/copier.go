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

// The ways that a Copier takes.
const (
	PathStaged    = "staged"    // through a pinned buffer, as lanes move
	PathPeer      = "peer"      // between GPUs, or within one
	PathPacked    = "packed"    // by kernels of the GPU that reach pinned memory of the host
	PathDirect    = "direct"    // the copy engine of the GPU, between its memory and pinned memory of the host
	PathMultipath = "multipath" // every GPU's PCIe link
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

	mu           sync.Mutex // protects all below; taken after those of paths
	settled      sync.Cond  // a window is pinned or refused, or something wanted is made
	paths        map[*GPU]*paths
	limits       map[*GPU]policy.Limits             // of the table
	pins         map[*mem.Region]map[uint64]*window // by number of the window
	windows      int                                // in pins
	past         map[linkOf]multipath.LinkState     // of path sets that are no more
	preparations preparations
	unpinned     bool // that a window was refused has been said
	closed       bool
}

// copierShape is what tests make smaller, in bytes.
type copierShape struct {
	minChunk, maxChunk, calibrateFrom, calibrateTo, window uint64

	mappedFrom uint64 // lists of fewer bytes are not for kernels
}

// relayBytes is what a relay takes of its GPU for one path set.
func (s *copierShape) relayBytes() uint64 { return multipath.LinkDepth * s.maxChunk }

func fullShape() copierShape {
	return copierShape{multipath.MinChunk, multipath.MaxChunk, multipath.MaxCalibrate, multipath.MinCalibrate, pinWindow, policy.TrialBytes}
}

// NewCopier makes a Copier of g, which outlives it.
func NewCopier(g *GPUs) *Copier {
	return newCopier(g, fullShape())
}

func newCopier(g *GPUs, shape copierShape) *Copier {
	c := &Copier{gpus: g, shape: shape, paths: map[*GPU]*paths{}, limits: map[*GPU]policy.Limits{}, pins: map[*mem.Region]map[uint64]*window{},
		past: map[linkOf]multipath.LinkState{}}
	c.settled.L = &c.mu
	return c
}

// Copy moves the bytes of src, block by block, to dst, and says which way they took. All of a list lies in one region, and one of the two is a
// GPU's. When it returns nothing of it is in flight.
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
	return "", errors.New("gpu: copy: no block of it is a GPU's")
}

// withHost copies between u and the host.
func (c *Copier) withHost(u *GPU, dst, src []mem.Block) (string, error) {
	buf := hostPieceLists.Get().(*[]hostPiece)
	defer hostPieceLists.Put(buf)
	list, ok := hostPiecesOf((*buf)[:0], dst, src)
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
	parts := pieceLists.Get().(*[]device.Piece)
	defer pieceLists.Put(parts)
	var err error
	if *parts, err = c.devicePieces((*parts)[:0], u, list, true); errors.Is(err, net.ErrClosed) {
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
	every, err := p.m.CopyPieces(dir, *parts)
	if every {
		return PathMultipath, err
	}
	return PathDirect, err
}

// isSmall reports whether the pieces are, on average, too small for copy engines to take them as they are.
func (c *Copier) isSmall(u *GPU, list []hostPiece) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytesOf(list)/uint64(len(list)) < c.largeLocked(u)
}

// largeLocked is the average piece from which on copy engines take a list as it is.
func (c *Copier) largeLocked(u *GPU) uint64 { return max(largePiece, c.limitsLocked(u).DirectBytes) }

func (c *Copier) limitsLocked(u *GPU) policy.Limits {
	l, ok := c.limits[u]
	if !ok {
		l = c.gpus.cfg.Table.Limits(c.gpus.model(u.index))
		c.limits[u] = l
	}
	return l
}

// Forget gives back what the driver has of regions that go. No copy of them may be under way, or come.
func (c *Copier) Forget(regions []*mem.Region) error {
	c.mu.Lock()
	var errs []error
	for _, r := range regions {
		c.cancelLocked(r)
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
