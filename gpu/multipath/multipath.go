package multipath

import (
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// Multipath copies between host memory and one GPU over the PCIe links of several: every link pulls chunks from one queue, so a
// link that is slow or busy takes fewer. The target's own link copies directly; the others relay, and each relay works on
// several chunks at once, so that PCIe of one overlaps NVLink of the one before (the MMA paper, arXiv 2512.16056). Small copies
// take the direct path alone, as long as it has not much to do.
//
// What a link moves in which time is learned. The last chunks of a queue are left to whoever is done with them first, or all would wait
// for a slow link's. A link that fails gives its chunks back, and is out of use from then on; one that hangs keeps them, as it may
// still write, and gets no others.
//
// Goroutines: one per link, idle on a condition variable; joined by Close.
type Multipath struct {
	links     []*link
	threshold uint64 // copies of fewer bytes take the direct path
	min, max  uint64 // bytes of a chunk; MinChunk and MaxChunk but in tests

	lanes chan device.Queue // of the direct path, for copies below the threshold

	mu     sync.Mutex
	work   sync.Cond
	jobs   []*job // those with bytes not yet taken, oldest first
	under  uint64 // bytes of all copies under way
	closed bool
	alive  int
	direct bool // the target's own link is alive
	wg     sync.WaitGroup
	small  sync.WaitGroup // copies on lanes; Add under mu and before closed
}

// The shape of the pipeline. [measured, 4 H200] chunks of 8 to 16 MiB with three in flight reach 0.98 of all links together;
// smaller chunks cost a CPU core and a fifth of the rate, and a tail of larger ones idles links at the end.
const (
	MaxChunk         = 16 << 20
	MinChunk         = 2 << 20
	LinkDepth        = 3
	MaxJobs          = 1024      // copies that may wait at once
	DefaultThreshold = 128 << 20 // until Calibrate has measured
	MaxScratchBytes  = LinkDepth * MaxChunk
)

// directLanes is how many copies below the threshold run at once; further ones wait for a lane.
const directLanes = 4

// ErrBusy means that MaxJobs copies wait already.
var ErrBusy = errors.New("gpu: too many copies are waiting")

var errNoLink = errors.New("gpu: every link has failed; restart the sidecar once the GPUs are healthy")

type job struct {
	dir    device.Direction
	pieces []device.Piece
	starts []uint64 // the first byte of each part in the job
	n      uint64
	chunk  uint64
	next   uint64   // first byte not yet taken
	again  []extent // chunks that a dying link gave back
	open   int      // chunks taken, not done
	err    error
	done   chan struct{}
}

// NewMultipath makes the path set to target. Relays are the other GPUs, each with peer access to target both ways; they may
// be empty. It takes MaxScratchBytes of memory on each relay.
func New(target device.Device, relays ...device.Device) (*Multipath, error) {
	return NewSized(MinChunk, MaxChunk, target, relays...)
}

func NewSized(minChunk, maxChunk uint64, target device.Device, relays ...device.Device) (_ *Multipath, err error) {
	m := &Multipath{threshold: DefaultThreshold, min: minChunk, max: maxChunk}
	m.work.L = &m.mu
	defer func() {
		if err != nil {
			err = errors.Join(err, m.free())
		}
	}()
	for i, dev := range append([]device.Device{target}, relays...) {
		l := &link{m: m, name: fmt.Sprintf("link%d", i), dev: dev, direct: i == 0, index: i}
		m.links = append(m.links, l)
		if l.pcie, err = dev.NewQueue(); err != nil {
			return nil, fmt.Errorf("gpu: %s: %w", l.name, err)
		}
		if !l.direct {
			if l.nvlink, err = dev.NewQueue(); err != nil {
				return nil, fmt.Errorf("gpu: %s: %w", l.name, err)
			}
		}
		for b := range LinkDepth {
			if l.done[b], err = dev.NewEvent(); err != nil {
				return nil, fmt.Errorf("gpu: %s: %w", l.name, err)
			}
			if l.direct {
				continue
			}
			if l.firstHop[b], err = dev.NewEvent(); err != nil {
				return nil, fmt.Errorf("gpu: %s: %w", l.name, err)
			}
			if l.scratch[b], err = dev.Alloc(maxChunk); err != nil {
				return nil, fmt.Errorf("gpu: %s: %d bytes of relay buffer: %w", l.name, maxChunk, err)
			}
		}
	}
	m.lanes = make(chan device.Queue, directLanes)
	for range directLanes {
		q, err := target.NewQueue()
		if err != nil {
			return nil, fmt.Errorf("gpu: direct path: %w", err)
		}
		m.lanes <- q
	}
	m.alive, m.direct = len(m.links), true
	for _, l := range m.links {
		m.wg.Go(l.run)
	}
	return m, nil
}

// SetThreshold sets from how many bytes on a copy uses every link.
func (m *Multipath) SetThreshold(n uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.threshold = n
}

// Threshold returns what SetThreshold or NewMultipath set.
func (m *Multipath) Threshold() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.threshold
}

// Devices lists the devices of the links, the target's first.
func (m *Multipath) Devices() []device.Device {
	out := make([]device.Device, len(m.links))
	for i, l := range m.links {
		out[i] = l.dev
	}
	return out
}

// Waiting is the number of copies with bytes that no link has taken yet.
func (m *Multipath) Waiting() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.jobs)
}

// Yield says whether relay i (in NewMultipath's order, from 0) has work of its own: then it takes no more chunks. What it has
// taken it finishes.
func (m *Multipath) Yield(relay int, busy bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if relay < 0 || relay+1 >= len(m.links) {
		return fmt.Errorf("gpu: relay %d of %d: no such relay", relay, len(m.links)-1)
	}
	m.links[relay+1].yields = busy
	m.work.Broadcast()
	return nil
}

// Copy moves n bytes between host and dev and returns when they are in place. Host memory is pinned and mapped by every
// link's context. Safe for concurrent use.
func (m *Multipath) Copy(dir device.Direction, host, dev cuda.Ptr, n uint64) error {
	_, err := m.CopyPieces(dir, []device.Piece{{Host: host, Dev: dev, Len: n}})
	return err
}

// CopyParts is Copy of many pieces, between which there is no order, and says whether every link was to be used: the threshold counts what
// is under way already, which the direct path has to move before.
func (m *Multipath) CopyPieces(dir device.Direction, parts []device.Piece) (every bool, err error) {
	var n uint64
	for i := range parts {
		n += parts[i].Len
	}
	if n == 0 {
		return false, nil
	}
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return false, net.ErrClosed
	}
	m.under += n
	defer m.ended(n)
	if m.direct && (m.under < m.threshold || len(m.links) == 1) {
		m.small.Add(1)
		m.mu.Unlock()
		err := m.CopyDirect(dir, parts)
		m.small.Done()
		m.mu.Lock()
		if err == nil {
			m.links[0].moved += n
			m.mu.Unlock()
			return false, nil
		}
		// The links find out which of them still work.
		if m.closed {
			m.mu.Unlock()
			return false, errors.Join(net.ErrClosed, err)
		}
	}
	if len(m.jobs) >= MaxJobs {
		m.mu.Unlock()
		return false, ErrBusy
	}
	if m.alive == 0 {
		m.mu.Unlock()
		return false, errNoLink
	}
	j := &job{dir: dir, pieces: parts, starts: make([]uint64, len(parts)), n: n, done: make(chan struct{})}
	for i := 1; i < len(parts); i++ {
		j.starts[i] = j.starts[i-1] + parts[i-1].Len
	}
	m.shapeLocked(j)
	m.jobs = append(m.jobs, j)
	m.work.Broadcast()
	m.mu.Unlock()
	<-j.done
	return len(m.links) > 1, j.err
}

func (m *Multipath) ended(n uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.under -= n; m.closed && m.under == 0 {
		m.work.Broadcast()
	}
}

// copyDirect runs in the caller: handing a small copy to another goroutine would cost more than the copy.
func (m *Multipath) CopyDirect(dir device.Direction, parts []device.Piece) error {
	q := <-m.lanes
	var err error
	if p := &parts[0]; len(parts) == 1 {
		from, to := p.Host, p.Dev
		if dir == device.DeviceToHost {
			from, to = p.Dev, p.Host
		}
		err = q.CopySync(to, from, p.Len)
	} else {
		host, dev, sizes := make([]cuda.Ptr, len(parts)), make([]cuda.Ptr, len(parts)), make([]uint64, len(parts))
		for i := range parts {
			host[i], dev[i], sizes[i] = parts[i].Host, parts[i].Dev, parts[i].Len
		}
		if dir == device.DeviceToHost {
			host, dev = dev, host
		}
		// Whatever went wrong, nothing is in flight when we return.
		err = errors.Join(q.CopyBatch(dev, host, sizes), q.Sync())
	}
	m.lanes <- q
	if err != nil {
		return fmt.Errorf("gpu: direct path: %w", err)
	}
	return nil
}

// shapeLocked: at least four chunks a link, so that the end is even, within what was measured to be efficient.
func (m *Multipath) shapeLocked(j *job) {
	c := j.n / uint64(4*len(m.links)) &^ (1<<12 - 1)
	j.chunk = min(max(c, m.min), m.max)
}

// Close waits for the copies under way, ends the links and frees their buffers. Later copies get net.ErrClosed.
func (m *Multipath) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	m.work.Broadcast()
	m.mu.Unlock()
	m.wg.Wait()
	m.small.Wait()
	return m.free()
}

func (m *Multipath) free() error {
	var errs []error
	for _, l := range m.links {
		errs = append(errs, l.dev.Close())
		for _, p := range l.scratch {
			if p != 0 {
				errs = append(errs, l.dev.Free(p))
			}
		}
	}
	return errors.Join(errs...)
}
