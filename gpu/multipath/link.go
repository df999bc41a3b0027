package multipath

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

type extent struct{ off, n uint64 }

type link struct {
	m        *Multipath
	name     string
	dev      device.Device
	direct   bool
	pcie     device.Queue
	nvlink   device.Queue
	scratch  [LinkDepth]cuda.Ptr
	firstHop [LinkDepth]device.Event // the first of a relay's two copies
	done     [LinkDepth]device.Event // chunk done
	slot     [LinkDepth]struct {
		j  *job
		s  extent
		at time.Time // of its issue
	}

	// Under m.mu.
	yields   bool // its GPU has work of its own
	failed   bool
	moved    uint64
	returned uint64        // chunks
	inFlight uint64        // bytes
	bytes    float64       // moved lately, with decreasing weight
	took     float64       // nanoseconds for them
	span     time.Duration // for which the rate of an unused link is valid; 0: rateRetry
	tried    bool          // a chunk renews an old rate, which it then replaces
	last     time.Time     // end of a chunk, or start after idleness

	// The pieces of the chunk that is being issued.
	host, far, near []cuda.Ptr
	sizes           []uint64
	index           int // of m.links
}

// take returns the oldest chunk that l may move. With wait it blocks until there is one.
func (l *link) take(wait bool) (*job, extent, bool) {
	m := l.m
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		now, left := time.Now(), false
		for i, j := range m.jobs {
			if l.yields && m.direct {
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
		// while bytes are in flight, a link may fail and return them
		if !wait || m.closed && m.under == 0 {
			return nil, extent{}, false
		}
		var again *time.Timer
		if left { // the other link may hang
			again = time.AfterFunc(silentAfter, m.work.Broadcast)
		}
		m.work.Wait()
		if again != nil {
			again.Stop()
		}
	}
}

// finish ends one chunk. A chunk that failed returns to the queue.
func (l *link) finish(j *job, s extent, issued time.Time, err error) {
	m := l.m
	m.mu.Lock()
	defer m.mu.Unlock()
	j.open--
	l.inFlight -= s.n
	if err != nil {
		l.failed = true // before another link leaves it a chunk
		l.returned++
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

// retire takes l out of use. The last link fails all copies that wait.
func (l *link) retire(err error) {
	m := l.m
	m.mu.Lock()
	defer m.mu.Unlock()
	m.alive--
	l.failed = true
	if l.direct {
		m.direct = false
	}
	m.work.Broadcast()
	if m.alive > 0 {
		return
	}
	for _, j := range m.jobs {
		j.err = fmt.Errorf("gpu: %s, the last link, failed: %w", l.name, err)
		close(j.done)
	}
	m.jobs = nil
}

// run keeps up to LinkDepth chunks in flight. Slots are used in turn, so that the oldest is reused
// next.
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

// fail returns the chunks in flight after the queues are idle. A late write of this link must not
// reach memory after another link has finished the copy.
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
	l.retire(err)
}

// issue enqueues one chunk in slot b, whose previous chunk has ended.
func (l *link) issue(b int, j *job, s extent) error {
	l.cut(j, s, l.scratch[b])
	from, to := l.host, l.far
	first, second := l.pcie, l.nvlink
	if j.dir == device.DeviceToHost {
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
	if err := first.Record(l.firstHop[b]); err != nil {
		return err
	}
	if err := second.Wait(l.firstHop[b]); err != nil {
		return err
	}
	if err := l.copyAll(second, to, l.near); err != nil {
		return err
	}
	return second.Record(l.done[b])
}

// cut lists the pieces of a chunk: their addresses in host memory, in the target's memory, and in
// the relay's buffer.
func (l *link) cut(j *job, s extent, scratch cuda.Ptr) {
	l.host, l.far, l.near, l.sizes = l.host[:0], l.far[:0], l.near[:0], l.sizes[:0]
	i, found := slices.BinarySearch(j.starts, s.off)
	if !found {
		i--
	}
	for end := s.off + s.n; s.off < end; i++ {
		p := &j.pieces[i]
		skip := s.off - j.starts[i]
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

func (l *link) copyAll(q device.Queue, to, from []cuda.Ptr) error {
	if len(to) == 1 {
		return q.Copy(to[0], from[0], l.sizes[0])
	}
	return q.CopyBatch(to, from, l.sizes)
}
