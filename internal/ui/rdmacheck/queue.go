package rdmacheck

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
)

// queue is a queue pair. The end's completion queue serves all of them.
type queue struct {
	q    verbs.QueuePair
	next uint64 // id of the next request

	state
	inFlight int
	received []uint32 // immediates
	taken    int      // of these, by expect
	flush    bool     // a receive was flushed
}

// state is the progress of a queue pair.
type state struct {
	Done   int           `json:"done"` // messages
	Status string        `json:"status,omitempty"`
	At     time.Duration `json:"at,omitempty"` // from the start to the failure
}

// running is a stream. Its goroutine owns the end's completion queue and queue pairs.
type running struct {
	stop  context.CancelFunc
	ended sync.WaitGroup
	err   error // set before ended

	mu  sync.Mutex
	now []state // guarded by mu
}

// errSilent: no completion came in time.
var errSilent = errors.New("no completion")

func (x *queue) connect(remote verbs.Address) error {
	if err := x.q.ToInit(); err != nil {
		return err
	}
	for range depth {
		if err := x.receive(); err != nil {
			return err
		}
	}
	return errors.Join(x.q.ToReadyToReceive(remote), x.q.ToReadyToSend())
}

func (x *queue) receive() error {
	x.next++
	return x.q.PostReceive([]uint64{receiveBit | x.next})
}

// post posts one message from a range of a buffer, and behind it its immediate.
func (x *queue) post(b *buffer, off, to uint64, q *request, imm uint32) error {
	x.next++
	w := []verbs.Work{{ID: x.next, Op: verbs.Write, LocalAddr: b.m.Addr() + off,
		LocalKey: b.m.LocalKey(), Len: uint32(q.Bytes), RemoteAddr: to, RemoteKey: q.Key,
		Signaled: !q.Immediate}}
	if q.Immediate {
		x.next++
		w = append(w, verbs.Work{ID: x.next, Op: verbs.WriteImm, Imm: imm, Signaled: true})
	}
	if _, err := x.q.PostSend(w); err != nil {
		return err
	}
	x.inFlight++
	return nil
}

func (x *queue) take(c *verbs.Completion, since time.Time) {
	receive := c.ID&receiveBit != 0
	switch {
	case receive && c.Status == verbs.OK:
		x.received = append(x.received, c.Imm)
	case receive:
		x.flush = true
	case c.Status == verbs.OK:
		x.inFlight--
		x.Done++
	case x.Status == "":
		x.Status, x.At = c.Status.String(), time.Since(since)
	}
}

// poll takes what has completed.
func (l *local) poll(since time.Time) (n int, err error) {
	var all [window]verbs.Completion
	if n, err = l.cq.Poll(all[:]); err != nil {
		return n, err
	}
	for i := range all[:n] {
		for _, x := range l.queues {
			if x.q.Num() == all[i].QP {
				x.take(&all[i], since)
			}
		}
	}
	return n, nil
}

// wait polls until something has completed. errSilent: the deadline has passed.
func (l *local) wait(ctx context.Context, since time.Time) error {
	for {
		if n, err := l.poll(since); n > 0 || err != nil {
			return err
		}
		select {
		case <-l.cq.Ready():
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return errSilent
			}
			return context.Cause(ctx)
		}
	}
}

// share is how many messages each of some queue pairs may have in flight.
func share(all []*queue) int { return max(window/len(all), minWindow) }

// named are the queue pairs of a request.
func (l *local) named(q *request) (all []*queue, err error) {
	for _, id := range q.Queues {
		x := l.queues[id]
		if x == nil {
			return nil, fmt.Errorf("%w: %q of queue pair %d", errRequest, q.Op, id)
		}
		all = append(all, x)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%w: %q of no queue pair", errRequest, q.Op)
	}
	return all, nil
}

// slots checks that the messages of a request lie in a buffer: those of a queue pair in a row,
// behind those of the queue pair before.
func (b *buffer) slots(q *request) error {
	if n := uint64(q.Count) * uint64(len(q.Queues)); q.Bytes == 0 || n == 0 ||
		!b.holds(q.Off, n*q.Bytes) {
		return fmt.Errorf("%w: %d messages of %d bytes", errRequest, n, q.Bytes)
	}
	return nil
}

// write sends messages from equal offsets of both buffers over some queue pairs at once, and waits
// for their completions.
func (l *local) write(ctx context.Context, all []*queue, b *buffer, q *request, a *answer) error {
	ctx, cancel := context.WithTimeout(ctx, q.Wait)
	defer cancel()
	for _, x := range all {
		x.state, x.inFlight = state{}, 0
	}
	sent := make([]int, len(all))
	began := time.Now()
	for {
		posted, left := false, false
		for k, x := range all {
			if x.Status != "" || x.Done == q.Count {
				continue
			}
			left = true
			if sent[k] < q.Count && x.inFlight < share(all) {
				at := q.Bytes * uint64(k*q.Count+sent[k])
				if err := x.post(b, q.Off+at, q.To+at, q, uint32(sent[k])); err != nil {
					return err
				}
				sent[k]++
				posted = true
			}
		}
		if !left {
			break
		}
		if posted {
			continue
		}
		if err := l.wait(ctx, began); errors.Is(err, errSilent) {
			for _, x := range all {
				if x.Done < q.Count && x.Status == "" {
					x.Status = fmt.Sprintf("%s within %s", errSilent, q.Wait)
				}
			}
		} else if err != nil {
			return err
		}
	}
	a.Took = time.Since(began)
	a.add(all)
	return nil
}

func (a *answer) add(all []*queue) {
	for _, x := range all {
		a.Queues = append(a.Queues, x.state)
	}
}

// expect waits for the immediates of a peer's write, and checks at each that the bytes of its
// message are there. Meanwhile it looks whether the end of a message is seen before its start.
func (l *local) expect(ctx context.Context, all []*queue, b *buffer, q *request, a *answer) error {
	wait, cancel := context.WithTimeout(ctx, q.Wait)
	defer cancel()
	for _, x := range all {
		if !q.Again {
			x.received, x.taken = x.received[:0], 0
		}
	}
	watched := -1
	for {
		left := false
		for k, x := range all {
			for ; x.taken < min(len(x.received), q.Count); x.taken++ {
				if err := l.arrived(x, k, b, q, a); err != nil {
					return err
				}
			}
			left = left || x.taken < q.Count && !x.flush
		}
		if !left {
			break
		}
		n, err := l.poll(time.Now())
		if err != nil {
			return err
		}
		if n == 0 && wait.Err() != nil {
			break
		}
		switch {
		case n > 0:
		case len(all) == 1 && b.bytes != nil && l.env.still == nil:
			watched = b.watch(q, all[0].taken, watched, a)
		default:
			select {
			case <-l.cq.Ready():
			case <-wait.Done():
			}
		}
	}
	for _, x := range all {
		s := state{Done: x.taken}
		if x.flush {
			s.Status = verbs.Flushed.String()
		}
		a.Queues = append(a.Queues, s)
	}
	return ctx.Err()
}

// arrived checks the message of one immediate.
func (l *local) arrived(x *queue, k int, b *buffer, q *request, a *answer) error {
	imm := x.received[x.taken]
	if imm != uint32(x.taken) {
		a.Misplaced++
	}
	if int64(imm) >= int64(q.Count) {
		a.Wrong++
		return nil
	}
	var differ int64
	err := l.look(func() (err error) {
		differ, err = b.check(q.Off+q.Bytes*uint64(k*q.Count+int(imm)), q.Bytes, q.Seed)
		return err
	})
	if differ > 0 {
		a.Wrong++
	}
	if err != nil || x.flush {
		return err
	}
	return x.receive()
}

// watch looks at the message that is expected next: is its last byte there before its first?
func (b *buffer) watch(q *request, next, watched int, a *answer) int {
	first := q.Off + uint64(next)*q.Bytes
	last := first + q.Bytes - 1
	if watched != next && b.bytes[last] == patternByte(q.Seed, last) &&
		patternByte(q.Seed, last) != canary && b.bytes[first] != patternByte(q.Seed, first) {
		a.Early++
		return next
	}
	return watched
}

// stream writes one message on each queue pair again and again, until halt or until all have
// failed.
func (l *local) stream(all []*queue, b *buffer, q *request) error {
	ctx, cancel := context.WithCancel(l.life)
	r := &running{stop: cancel, now: make([]state, len(all))}
	l.running = r
	for _, x := range all {
		x.state, x.inFlight = state{}, 0
	}
	began := time.Now()
	r.ended.Go(func() {
		for r.err == nil {
			left, posted := false, false
			for k, x := range all {
				if x.Status != "" || ctx.Err() != nil && x.inFlight == 0 {
					continue
				}
				left = true
				if ctx.Err() == nil && x.inFlight < share(all) {
					at := q.Bytes * uint64(k)
					r.err = errors.Join(r.err, x.post(b, q.Off+at, q.To+at, q, 0))
					posted = true
				}
			}
			if !left {
				return
			}
			if !posted {
				silence, stop := context.WithTimeout(l.life, maxWait)
				r.err = l.wait(silence, began)
				stop()
			}
			r.mu.Lock()
			for k, x := range all {
				r.now[k] = x.state
			}
			r.mu.Unlock()
		}
	})
	return nil
}

// progress is the state of the stream now.
func (l *local) progress(a *answer) error {
	if l.running == nil {
		return fmt.Errorf("%w: no stream", errRequest)
	}
	l.running.mu.Lock()
	defer l.running.mu.Unlock()
	a.Queues = append(a.Queues, l.running.now...)
	return nil
}

// halt ends the stream: what is in flight completes first.
func (l *local) halt(a *answer) error {
	r := l.running
	if r == nil {
		return fmt.Errorf("%w: no stream", errRequest)
	}
	r.stop()
	r.ended.Wait()
	l.running = nil
	a.Queues = r.now
	return r.err
}

// flushed waits until the device has flushed a receive of each queue pair: it writes nothing
// through them any more.
func (l *local) flushed(ctx context.Context, all []*queue, wait time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for _, x := range all {
		for !x.flush {
			if err := l.wait(ctx, time.Now()); errors.Is(err, errSilent) {
				return fmt.Errorf("%w within %s", errNoFlush, wait)
			} else if err != nil {
				return err
			}
		}
	}
	return nil
}

var errNoFlush = errors.New("the device has not flushed a stopped queue pair")
