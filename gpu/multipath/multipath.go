// Package multipath copies between host memory and one GPU over the PCIe links of several GPUs.
//
// A Multipath owns one goroutine per link; Close joins them. Its mutex protects the queue of copies
// and what is learned about links. multipath.go has the copies, link.go the pipeline of one link,
// rate.go the learned rates, state.go the report.
package multipath

import (
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// Multipath copies between host memory and one GPU. Every link takes chunks from one queue, so that
// a slow or busy link takes fewer. The target's own link copies directly, the others relay. A relay
// works on several chunks at once, so that PCIe of one chunk overlaps NVLink of the chunk before
// (the MMA paper, arXiv 2512.16056). Small copies use the direct path alone while little is in
// flight.
//
// The rate of each link is learned. A link leaves the last chunks of a queue to links that finish
// earlier. A link that fails returns its chunks and is not used again. A link that hangs keeps its
// chunks, because it may still write, and gets no others.
type Multipath struct {
	links     []*link
	threshold uint64 // copies of fewer bytes take the direct path
	min, max  uint64 // bytes of a chunk

	lanes chan lane // of the direct path, for copies below the threshold

	mu     sync.Mutex
	work   sync.Cond
	jobs   []*job // with bytes that no link has taken, oldest first
	under  uint64 // bytes of all copies in flight
	closed bool
	alive  int
	direct bool // the target's own link is alive
	wg     sync.WaitGroup
	small  sync.WaitGroup // copies on lanes; Add under mu and before closed
}

// The shape of the pipeline. [measured, 4 H200] Chunks of 8 to 16 MiB with three in flight
// reach 0.98 of the sum of all links. Smaller chunks cost a CPU core and a fifth of the rate; a
// tail of larger chunks leaves links idle at the end.
const (
	MaxChunk         = 16 << 20
	MinChunk         = 2 << 20
	LinkDepth        = 3
	MaxJobs          = 1024      // copies that wait at once
	DefaultThreshold = 128 << 20 // until Calibrate has measured
	MaxScratchBytes  = LinkDepth * MaxChunk
)

const (
	// directLanes is the number of copies below the threshold that run at once; others wait.
	directLanes = 4
	// spinBytes is the largest copy that the direct path spins for: the driver's spinning wait takes
	// a core. The pauses between polls are short beside larger copies, which take 150 us and more.
	spinBytes = 8 << 20
)

// lane is a queue of the direct path.
type lane struct {
	device.Queue
	done device.Event
}

// ErrBusy means that MaxJobs copies wait.
var ErrBusy = errors.New("gpu: too many copies are waiting")

var errNoLink = errors.New(
	"gpu: every link has failed; restart the sidecar once the GPUs are healthy")

type job struct {
	dir    device.Direction
	pieces []device.Piece
	starts []uint64 // first byte of each piece in the job
	n      uint64
	chunk  uint64
	next   uint64   // first byte that no link has taken
	again  []extent // chunks that a failed link has returned
	open   int      // chunks taken, not done
	err    error
	done   chan struct{}
}

// New makes the paths to target. relays are other GPUs with peer access to target in both
// directions, or none. Each relay provides MaxScratchBytes of its memory.
func New(target device.Device, relays ...device.Device) (*Multipath, error) {
	return NewSized(MinChunk, MaxChunk, target, relays...)
}

// NewSized is New with other sizes of chunks.
func NewSized(minChunk, maxChunk uint64, target device.Device, relays ...device.Device) (
	_ *Multipath, err error) {
	m := &Multipath{threshold: DefaultThreshold, min: minChunk, max: maxChunk}
	m.work.L = &m.mu
	defer func() {
		if err != nil {
			err = errors.Join(err, m.free())
		}
	}()
	for i, dev := range append([]device.Device{target}, relays...) {
		m.links = append(m.links, &link{m: m, name: fmt.Sprintf("link%d", i), dev: dev,
			direct: i == 0, index: i})
	}
	for _, l := range m.links { // an error closes the devices of all
		dev := l.dev
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
	m.lanes = make(chan lane, directLanes)
	for range directLanes {
		q, err := target.NewQueue()
		if err != nil {
			return nil, fmt.Errorf("gpu: direct path: %w", err)
		}
		e, err := target.NewEvent()
		if err != nil {
			return nil, fmt.Errorf("gpu: direct path: %w", err)
		}
		m.lanes <- lane{q, e}
	}
	m.alive, m.direct = len(m.links), true
	for _, l := range m.links {
		m.wg.Go(l.run)
	}
	return m, nil
}

// SetThreshold sets the bytes in flight from which a copy uses every link.
func (m *Multipath) SetThreshold(n uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.threshold = n
}

// Threshold returns the value of SetThreshold.
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

// Waiting is the number of copies with bytes that no link has taken.
func (m *Multipath) Waiting() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.jobs)
}

// Yield sets whether relay i, in the order of New, has work of its own. Then it takes no more
// chunks, and finishes those in flight.
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

// Copy moves n bytes between host and dev and returns when they are in place. Host memory must be
// pinned and mapped by the context of every link. Safe for concurrent use.
func (m *Multipath) Copy(dir device.Direction, host, dev cuda.Ptr, n uint64) error {
	_, err := m.CopyPieces(dir, []device.Piece{{Host: host, Dev: dev, Len: n}})
	return err
}

// CopyPieces is Copy of many pieces in no order among each other. every: the copy was queued for
// all links. The threshold applies to all bytes in flight, which the direct path would have to move
// first.
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
		// The links detect which of them still work.
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
	j := &job{dir: dir, pieces: parts, starts: make([]uint64, len(parts)), n: n,
		done: make(chan struct{})}
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

// CopyDirect copies over the target's link in the caller's goroutine: a change of goroutines would
// cost more than a small copy.
func (m *Multipath) CopyDirect(dir device.Direction, parts []device.Piece) error {
	q := <-m.lanes
	var err error
	if p := &parts[0]; len(parts) == 1 {
		from, to := p.Host, p.Dev
		if dir == device.DeviceToHost {
			from, to = p.Dev, p.Host
		}
		if p.Len <= spinBytes {
			err = q.CopySync(to, from, p.Len)
		} else {
			err = q.end(q.Copy(to, from, p.Len), p.Len)
		}
	} else {
		host, dev, sizes := make([]cuda.Ptr, len(parts)), make([]cuda.Ptr, len(parts)),
			make([]uint64, len(parts))
		var n uint64
		for i := range parts {
			host[i], dev[i], sizes[i] = parts[i].Host, parts[i].Dev, parts[i].Len
			n += parts[i].Len
		}
		if dir == device.DeviceToHost {
			host, dev = dev, host
		}
		err = q.end(q.CopyBatch(dev, host, sizes), n)
	}
	m.lanes <- q
	if err != nil {
		return fmt.Errorf("gpu: direct path: %w", err)
	}
	return nil
}

// end returns when nothing of n bytes is in flight any more, also after an error.
func (l lane) end(err error, n uint64) error {
	if err == nil && n > spinBytes {
		if err = l.Record(l.done); err == nil {
			if err = l.done.Sync(); err == nil {
				return nil
			}
		}
	}
	return errors.Join(err, l.Sync())
}

// shapeLocked gives each link at least four chunks, so that links finish at about the same time,
// within the efficient sizes.
func (m *Multipath) shapeLocked(j *job) {
	c := j.n / uint64(4*len(m.links)) &^ (1<<12 - 1)
	j.chunk = min(max(c, m.min), m.max)
}

// Close waits for the copies in flight, ends the links and frees their buffers. Later copies return
// net.ErrClosed.
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
