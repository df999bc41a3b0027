package gpu

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

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

	lanes chan Queue // of the direct path, for copies below the threshold

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

// What is learned of links.
const (
	rateWeight = 0.25                   // of the newest chunk
	rateSpan   = 5 * time.Second        // after which a rate is too old to judge a link by: it gets a chunk again,
	rateRetry  = 100 * time.Millisecond // so soon at first, and twice as long after each that was in vain: [measured, 2 H200] a driver that pinned
	// memory meanwhile made the first chunks of a link look 300 times too slow, and it was left out of all that came
	silentAfter = 60 * time.Millisecond // a link that brings none of its chunks for so long is expected to bring none
	leaveSlack  = 1.125                 // a chunk is left to another link that is so much sooner done
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
	// Shift has for each link, the target's first, what it adds to Dev to reach the same byte in its own context: memory of another process
	// has an address of its own in each. nil: nothing.
	Shift []cuda.Ptr
}

type job struct {
	dir   Direction
	parts []Part
	at    []uint64 // the first byte of each part in the job
	n     uint64
	chunk uint64
	next  uint64   // first byte not yet taken
	again []extent // chunks that a dying link gave back
	open  int      // chunks taken, not done
	err   error
	done  chan struct{}
}

type extent struct{ off, n uint64 }

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
		j  *job
		s  extent
		at time.Time // of its issue
	}

	// Under m.mu.
	busy  bool // its GPU has work of its own, so it takes nothing
	gone  bool // it has failed
	moved uint64
	back  uint64        // chunks given back
	held  uint64        // bytes taken and not moved yet
	bytes float64       // of late, the newest weighing most
	took  float64       // nanoseconds for them
	span  time.Duration // for which that is believed of a link that holds nothing; 0: rateRetry
	tried bool          // it has a chunk though its rate is too old: what that takes is believed alone
	last  time.Time     // that a chunk came or, if it held none, was taken

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

// Devices lists the devices of the links, the target's first.
func (m *Multipath) Devices() []Device {
	out := make([]Device, len(m.links))
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
		return fmt.Errorf("stage: relay %d of %d: no such relay", relay, len(m.links)-1)
	}
	m.links[relay+1].busy = busy
	m.work.Broadcast()
	return nil
}

// Copy moves n bytes between host and dev and returns when they are in place. Host memory is pinned and mapped by every
// link's context. Safe for concurrent use.
func (m *Multipath) Copy(dir Direction, host, dev cuda.Ptr, n uint64) error {
	_, err := m.CopyParts(dir, []Part{{Host: host, Dev: dev, Len: n}})
	return err
}

// CopyParts is Copy of many pieces, between which there is no order, and says whether every link was to be used: the threshold counts what
// is under way already, which the direct path has to move before.
func (m *Multipath) CopyParts(dir Direction, parts []Part) (every bool, err error) {
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
		err := m.copyDirect(dir, parts)
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
	j := &job{dir: dir, parts: parts, at: make([]uint64, len(parts)), n: n, done: make(chan struct{})}
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

func (m *Multipath) ended(n uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.under -= n; m.closed && m.under == 0 {
		m.work.Broadcast()
	}
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
func (l *link) take(wait bool) (*job, extent, bool) {
	m := l.m
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		now, left := time.Now(), false
		for i, j := range m.jobs {
			if l.busy && m.direct {
				continue
			}
			s, k := extent{j.next, min(j.chunk, j.n-j.next)}, len(j.again)
			if k > 0 {
				s = j.again[k-1]
			}
			if l.leavesLocked(s.n, now) {
				left = true
				continue
			}
			if k > 0 {
				j.again = j.again[:k-1]
			} else {
				j.next += s.n
			}
			j.open++
			l.takenLocked(s.n, now)
			if j.next == j.n && len(j.again) == 0 {
				m.jobs = append(m.jobs[:i], m.jobs[i+1:]...)
			}
			return j, s, true
		}
		if !wait || m.closed && m.under == 0 { // as long as anything is under way a link may die, and give it back
			return nil, extent{}, false
		}
		var again *time.Timer
		if left { // whom it was left to may hang
			again = time.AfterFunc(silentAfter, m.work.Broadcast)
		}
		m.work.Wait()
		if again != nil {
			again.Stop()
		}
	}
}

// leavesLocked reports whether another link, alone, would be done with all that waits before l is done with this chunk of it. Whoever is
// first done with the chunk never leaves it, so that somebody takes it.
func (l *link) leavesLocked(n uint64, now time.Time) bool {
	mine, known := l.expectLocked(n, now)
	if !known {
		return false // or nothing would ever be known
	}
	m := l.m
	waiting := uint64(0)
	for _, j := range m.jobs {
		waiting += j.n - j.next
		for _, s := range j.again {
			waiting += s.n
		}
	}
	for _, o := range m.links {
		if o == l || o.gone || o.busy && m.direct || o.silentLocked(now) {
			continue
		}
		if theirs, known := o.expectLocked(waiting, now); known && leaveSlack*theirs < mine {
			return true
		}
	}
	return false
}

// takenLocked counts a chunk that l takes.
func (l *link) takenLocked(n uint64, now time.Time) {
	switch {
	case l.took > 0 && l.oldLocked(now):
		l.span, l.tried = min(2*max(l.span, rateRetry), rateSpan), true
	case !l.tried:
		l.span = 0
	}
	if l.held == 0 {
		l.last = now
	}
	l.held += n
}

// oldLocked reports whether what is known of l is too old to judge it by.
func (l *link) oldLocked(now time.Time) bool {
	span := max(l.span, rateRetry)
	if l.held > 0 {
		span = rateSpan
	}
	return now.Sub(l.last) > span
}

// expectLocked is in how many nanoseconds l would have moved n bytes more.
func (l *link) expectLocked(n uint64, now time.Time) (ns float64, known bool) {
	if l.took == 0 || l.oldLocked(now) {
		return 0, false
	}
	return float64(l.held+n) * l.took / l.bytes, true
}

// silentLocked reports whether l has brought nothing of what it holds for long.
func (l *link) silentLocked(now time.Time) bool { return l.held > 0 && now.Sub(l.last) > silentAfter }

// learnLocked takes the time of a chunk that has been moved. Those of which it is noticed together that they have, are one to what is kept.
func (l *link) learnLocked(n uint64, issued, now time.Time) {
	if issued.Before(l.last) {
		issued = l.last // until then it moved others
	}
	weight := rateWeight
	if l.tried {
		weight, l.tried = 1, false
	}
	l.bytes += weight * (float64(n) - l.bytes)
	l.took += weight * (float64(now.Sub(issued)) - l.took)
	l.last = now
}

// finish ends one chunk; a chunk that failed goes back for another link.
func (l *link) finish(j *job, s extent, issued time.Time, err error) {
	m := l.m
	m.mu.Lock()
	defer m.mu.Unlock()
	j.open--
	l.held -= s.n
	if err != nil {
		l.gone = true // before another one leaves it a chunk
		l.back++
		if j.next == j.n && len(j.again) == 0 {
			m.jobs = append(m.jobs, j)
		}
		j.again = append(j.again, s)
		m.work.Broadcast()
		return
	}
	l.moved += s.n
	l.learnLocked(s.n, issued, time.Now())
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
	l.gone = true
	if l.direct {
		m.direct = false
	}
	m.work.Broadcast()
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
			l.slot[b].j, l.slot[b].s, l.slot[b].at = j, s, time.Now()
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
			l.finish(l.slot[b].j, l.slot[b].s, l.slot[b].at, nil)
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
		l.finish(l.slot[b].j, l.slot[b].s, l.slot[b].at, err)
		l.slot[b].j = nil
	}
	l.dead(err)
}

// issue enqueues one chunk. A relay's slot is free: its last chunk was waited for.
func (l *link) issue(b int, j *job, s extent) error {
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
func (l *link) cut(j *job, s extent, scratch cuda.Ptr) {
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
		var shift cuda.Ptr
		if p.Shift != nil {
			shift = p.Shift[l.index]
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

// LinkState is what is known of one link.
type LinkState struct {
	GPU      int     `json:"gpu"`                      // whose link to the host it is
	State    string  `json:"state"`                    // one of LinkStates
	Bytes    uint64  `json:"bytes"`                    // moved
	InFlight uint64  `json:"in_flight_bytes"`          // or waiting for the link's own pipeline
	Rate     float64 `json:"learned_bytes_per_second"` // 0: unknown
	Returned uint64  `json:"chunks_given_back"`
}

// The states of a link.
const (
	LinkIdle   = "idle"
	LinkMoves  = "moves"
	LinkYields = "yields" // its own GPU has work
	LinkSilent = "silent" // it brings nothing of what it has taken
	LinkDead   = "dead"
)

// LinkStates are all of them.
var LinkStates = []string{LinkIdle, LinkMoves, LinkYields, LinkSilent, LinkDead}

// Links says what is known of each link, the target's first. Whose each is, the caller knows.
func (m *Multipath) Links() []LinkState {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]LinkState, len(m.links))
	for i, l := range m.links {
		s := LinkState{State: LinkIdle, Bytes: l.moved, InFlight: l.held, Returned: l.back}
		if l.took > 0 {
			s.Rate = l.bytes / l.took * float64(time.Second)
		}
		switch {
		case l.gone:
			s.State = LinkDead
		case l.silentLocked(time.Now()):
			s.State = LinkSilent
		case l.busy:
			s.State = LinkYields
		case l.held > 0:
			s.State = LinkMoves
		}
		out[i] = s
	}
	return out
}

// forget begins to count anew.
func (m *Multipath) forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.links {
		l.moved, l.back = 0, 0
	}
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
