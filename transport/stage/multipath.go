package stage

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/cuda"
)

// Multipath copies between host memory and one GPU over the PCIe links of several: every link pulls chunks from one queue, so a
// link that is slow or busy takes fewer. The target's own link copies directly; the others relay, and each relay works on
// several chunks at once, so that PCIe of one overlaps NVLink of the one before (the MMA paper, arXiv 2512.16056). Small copies
// take the direct path alone.
//
// Goroutines: one per link, idle on a condition variable; joined by Close.
type Multipath struct {
	links     []*link
	threshold uint64 // copies of fewer bytes take the direct path
	min, max  uint64 // bytes of a chunk; MinChunk and MaxChunk but in tests

	lanes chan Queue // of the direct path, for copies below the threshold

	mu     sync.Mutex
	work   sync.Cond
	jobs   []*job // those with bytes not yet taken, oldest first
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

// Direction of a copy.
type Direction uint8

// The directions.
const (
	HostToDevice Direction = iota
	DeviceToHost
)

// directLanes is how many copies below the threshold run at once; further ones wait for a lane.
const directLanes = 4

// ErrBusy means that MaxJobs copies wait already.
var ErrBusy = errors.New("stage: too many copies are waiting")

var errNoLink = errors.New("stage: every link has failed; restart the sidecar once the GPUs are healthy")

// Part is a contiguous piece of what CopyParts moves.
type Part struct {
	Host, Dev cuda.Ptr
	Len       uint64
}

type job struct {
	dir   Direction
	parts []Part
	at    []uint64   // the first byte of each part in the job
	shift []cuda.Ptr // by link: what it adds to Dev; nil: nothing
	n     uint64
	chunk uint64
	next  uint64 // first byte not yet taken
	again []span // chunks that a dying link gave back
	open  int    // chunks taken, not done
	err   error
	done  chan struct{}
}

type span struct{ off, n uint64 }

type link struct {
	m       *Multipath
	name    string
	dev     Device
	direct  bool
	pcie    Queue
	nvlink  Queue
	scratch [LinkDepth]cuda.Ptr
	half    [LinkDepth]Event // first hop done
	done    [LinkDepth]Event // chunk done
	slot    [LinkDepth]struct {
		j *job
		s span
	}
	busy bool // under m.mu: its GPU has work of its own, so it takes nothing

	// The chunk that is being issued, cut into parts.
	host, far, near []cuda.Ptr
	sizes           []uint64
	index           int // of m.links
}

// NewMultipath makes the path set to target. Relays are the other GPUs, each with peer access to target both ways; they may
// be empty. It takes MaxScratchBytes of memory on each relay.
func NewMultipath(target Device, relays ...Device) (*Multipath, error) {
	return newMultipath(MinChunk, MaxChunk, target, relays...)
}

func newMultipath(minChunk, maxChunk uint64, target Device, relays ...Device) (_ *Multipath, err error) {
	m := &Multipath{threshold: DefaultThreshold, min: minChunk, max: maxChunk}
	m.work.L = &m.mu
	defer func() {
		if err != nil {
			err = errors.Join(err, m.free())
		}
	}()
	for i, dev := range append([]Device{target}, relays...) {
		l := &link{m: m, name: fmt.Sprintf("link%d", i), dev: dev, direct: i == 0, index: i}
		m.links = append(m.links, l)
		if l.pcie, err = dev.NewQueue(); err != nil {
			return nil, fmt.Errorf("stage: %s: %w", l.name, err)
		}
		if !l.direct {
			if l.nvlink, err = dev.NewQueue(); err != nil {
				return nil, fmt.Errorf("stage: %s: %w", l.name, err)
			}
		}
		for b := range LinkDepth {
			if l.done[b], err = dev.NewEvent(); err != nil {
				return nil, fmt.Errorf("stage: %s: %w", l.name, err)
			}
			if l.direct {
				continue
			}
			if l.half[b], err = dev.NewEvent(); err != nil {
				return nil, fmt.Errorf("stage: %s: %w", l.name, err)
			}
			if l.scratch[b], err = dev.Alloc(maxChunk); err != nil {
				return nil, fmt.Errorf("stage: %s: %d bytes of relay buffer: %w", l.name, maxChunk, err)
			}
		}
	}
	m.lanes = make(chan Queue, directLanes)
	for range directLanes {
		q, err := target.NewQueue()
		if err != nil {
			return nil, fmt.Errorf("stage: direct path: %w", err)
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

// Calibrate measures both ways with the memory given, at least MaxCalibrate bytes on either side whose content is lost, and sets the
// threshold to where using every link begins to pay in both directions. It takes some tens of milliseconds.
func (m *Multipath) Calibrate(host, dev cuda.Ptr) (uint64, error) {
	return m.calibrate(host, dev, MaxCalibrate, minCalibrate)
}

func (m *Multipath) calibrate(host, dev cuda.Ptr, from, to uint64) (uint64, error) {
	best := 2 * from // beyond what was measured: guess that it pays there
	for n := from; n >= to && len(m.links) > 1; n /= 2 {
		pays := true
		for _, dir := range []Direction{HostToDevice, DeviceToHost} {
			var took [2]time.Duration // direct, every link
			for i, threshold := range []uint64{n + 1, n} {
				m.SetThreshold(threshold)
				for range calibrateRuns {
					start := time.Now()
					if err := m.Copy(dir, host, dev, n); err != nil {
						return 0, fmt.Errorf("stage: calibrate with %d bytes: %w", n, err)
					}
					took[i] = max(took[i], time.Since(start))
				}
			}
			// The worst of several: using every link is meant to pay always, not on average.
			pays = pays && took[1] < took[0]
		}
		if !pays {
			break
		}
		best = n
	}
	m.SetThreshold(best)
	return best, nil
}

// The span that Calibrate looks at.
const (
	MaxCalibrate  = 256 << 20
	minCalibrate  = 4 << 20
	calibrateRuns = 12
)

// Yield says whether relay i (in NewMultipath's order, from 0) has work of its own: then it takes no more chunks. What it has
// taken it finishes.
func (m *Multipath) Yield(relay int, busy bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if relay < 0 || relay+1 >= len(m.links) {
		return fmt.Errorf("stage: relay %d of %d: no such relay", relay, len(m.links)-1)
	}
	m.links[relay+1].busy = busy
	m.work.Broadcast()
	return nil
}

// Copy moves n bytes between host and dev and returns when they are in place. Host memory is pinned and mapped by every
// link's context. Safe for concurrent use.
func (m *Multipath) Copy(dir Direction, host, dev cuda.Ptr, n uint64) error {
	_, err := m.CopyParts(dir, []Part{{host, dev, n}}, nil)
	return err
}

// CopyParts is Copy of many pieces, between which there is no order, and says whether every link was to be used. shift has for
// each link, the target's first, what it adds to a Dev address to reach the same byte in its own context: memory of another process
// has an address of its own in each. nil: nothing.
func (m *Multipath) CopyParts(dir Direction, parts []Part, shift []cuda.Ptr) (every bool, err error) {
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
	if m.direct && (n < m.threshold || len(m.links) == 1) {
		m.small.Add(1)
		m.mu.Unlock()
		err := m.copyDirect(dir, parts)
		m.small.Done()
		if err == nil {
			return false, nil
		}
		// The links find out which of them still work.
		m.mu.Lock()
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
	j := &job{dir: dir, parts: parts, shift: shift, at: make([]uint64, len(parts)), n: n, done: make(chan struct{})}
	for i := 1; i < len(parts); i++ {
		j.at[i] = j.at[i-1] + parts[i-1].Len
	}
	m.shapeLocked(j)
	m.jobs = append(m.jobs, j)
	m.work.Broadcast()
	m.mu.Unlock()
	<-j.done
	return len(m.links) > 1, j.err
}

// copyDirect runs in the caller: handing a small copy to another goroutine would cost more than the copy.
func (m *Multipath) copyDirect(dir Direction, parts []Part) error {
	q := <-m.lanes
	var err error
	if p := &parts[0]; len(parts) == 1 {
		from, to := p.Host, p.Dev
		if dir == DeviceToHost {
			from, to = p.Dev, p.Host
		}
		err = q.CopySync(to, from, p.Len)
	} else {
		host, dev, sizes := make([]cuda.Ptr, len(parts)), make([]cuda.Ptr, len(parts)), make([]uint64, len(parts))
		for i := range parts {
			host[i], dev[i], sizes[i] = parts[i].Host, parts[i].Dev, parts[i].Len
		}
		if dir == DeviceToHost {
			host, dev = dev, host
		}
		// Whatever went wrong, nothing is in flight when we return.
		err = errors.Join(q.CopyBatch(dev, host, sizes), q.Sync())
	}
	m.lanes <- q
	if err != nil {
		return fmt.Errorf("stage: direct path: %w", err)
	}
	return nil
}

// shapeLocked: at least four chunks a link, so that the end is even, within what was measured to be efficient.
func (m *Multipath) shapeLocked(j *job) {
	c := j.n / uint64(4*len(m.links)) &^ (1<<12 - 1)
	j.chunk = min(max(c, m.min), m.max)
}

// take returns the oldest work that l may do, waiting for it if wait is set.
func (l *link) take(wait bool) (*job, span, bool) {
	m := l.m
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		for i, j := range m.jobs {
			if l.busy && m.direct {
				continue
			}
			var s span
			if k := len(j.again); k > 0 {
				s, j.again = j.again[k-1], j.again[:k-1]
			} else {
				s = span{j.next, min(j.chunk, j.n-j.next)}
				j.next += s.n
			}
			j.open++
			if j.next == j.n && len(j.again) == 0 {
				m.jobs = append(m.jobs[:i], m.jobs[i+1:]...)
			}
			return j, s, true
		}
		if !wait || m.closed {
			return nil, span{}, false
		}
		m.work.Wait()
	}
}

// finish ends one chunk; a chunk that failed goes back for another link.
func (l *link) finish(j *job, s span, err error) {
	m := l.m
	m.mu.Lock()
	defer m.mu.Unlock()
	j.open--
	if err != nil {
		if j.next == j.n && len(j.again) == 0 {
			m.jobs = append(m.jobs, j)
		}
		j.again = append(j.again, s)
		m.work.Broadcast()
		return
	}
	if j.open == 0 && j.next == j.n && len(j.again) == 0 {
		close(j.done)
	}
}

// dead takes l out; the last one fails what waits.
func (l *link) dead(err error) {
	m := l.m
	m.mu.Lock()
	defer m.mu.Unlock()
	m.alive--
	if l.direct {
		m.direct = false
		m.work.Broadcast()
	}
	if m.alive > 0 {
		return
	}
	for _, j := range m.jobs {
		j.err = fmt.Errorf("stage: %s, the last link, failed: %w", l.name, err)
		close(j.done)
	}
	m.jobs = nil
}

// run keeps up to LinkDepth chunks in flight. Slots are used in turn, so the oldest is always the next to be reused.
func (l *link) run() {
	for head, tail := 0, 0; ; {
		j, s, ok := l.take(head == tail)
		if ok {
			b := head % LinkDepth
			head++
			l.slot[b].j, l.slot[b].s = j, s
			if err := l.issue(b, j, s); err != nil {
				l.fail(tail, head, err)
				return
			}
		} else if head == tail {
			return // closed
		}
		if head-tail == LinkDepth || !ok {
			b := tail % LinkDepth
			if err := l.done[b].Sync(); err != nil {
				l.fail(tail, head, err)
				return
			}
			l.finish(l.slot[b].j, l.slot[b].s, nil)
			l.slot[b].j = nil
			tail++
		}
	}
}

// fail gives back what the link had in flight, after the queues are idle: a late write of this link must not land over memory
// whose copy another link has finished.
func (l *link) fail(tail, head int, err error) {
	err = errors.Join(err, l.pcie.Sync())
	if l.nvlink != nil {
		err = errors.Join(err, l.nvlink.Sync())
	}
	for ; tail < head; tail++ {
		b := tail % LinkDepth
		l.finish(l.slot[b].j, l.slot[b].s, err)
		l.slot[b].j = nil
	}
	l.dead(err)
}

// issue enqueues one chunk. A relay's slot is free: its last chunk was waited for.
func (l *link) issue(b int, j *job, s span) error {
	l.cut(j, s, l.scratch[b])
	from, to := l.host, l.far
	first, second := l.pcie, l.nvlink
	if j.dir == DeviceToHost {
		from, to = l.far, l.host
		first, second = l.nvlink, l.pcie
	}
	if l.direct {
		if err := l.copyAll(l.pcie, to, from); err != nil {
			return err
		}
		return l.pcie.Record(l.done[b])
	}
	if err := l.copyAll(first, l.near, from); err != nil {
		return err
	}
	if err := first.Record(l.half[b]); err != nil {
		return err
	}
	if err := second.Wait(l.half[b]); err != nil {
		return err
	}
	if err := l.copyAll(second, to, l.near); err != nil {
		return err
	}
	return second.Record(l.done[b])
}

// cut lists the parts of a chunk: where they are in host memory, in the target's, and in the relay's buffer.
func (l *link) cut(j *job, s span, scratch cuda.Ptr) {
	var shift cuda.Ptr
	if j.shift != nil {
		shift = j.shift[l.index]
	}
	l.host, l.far, l.near, l.sizes = l.host[:0], l.far[:0], l.near[:0], l.sizes[:0]
	i, found := slices.BinarySearch(j.at, s.off)
	if !found {
		i--
	}
	for end := s.off + s.n; s.off < end; i++ {
		p := &j.parts[i]
		skip := s.off - j.at[i]
		k := min(p.Len-skip, end-s.off)
		if k == 0 {
			continue
		}
		l.host = append(l.host, p.Host+cuda.Ptr(skip))
		l.far = append(l.far, p.Dev+cuda.Ptr(skip)+shift)
		l.near = append(l.near, scratch)
		l.sizes = append(l.sizes, k)
		s.off, scratch = s.off+k, scratch+cuda.Ptr(k)
	}
}

func (l *link) copyAll(q Queue, to, from []cuda.Ptr) error {
	if len(to) == 1 {
		return q.Copy(to[0], from[0], l.sizes[0])
	}
	return q.CopyBatch(to, from, l.sizes)
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
