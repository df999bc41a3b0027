package simfabric

import (
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"time"

	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// end is one side of a lane: it sends the slices of its own Move and receives those of the other
// side.
type end struct {
	f             *Fabric
	b             *Backend
	id            uint64
	local, remote *Rail
	peer          transfer.Boot
	other         *end
	path          []*Link
	up            bool // announced and not dead
	closing       bool
	dead          bool

	flights []*flight // accepted and not ended
	queue   []*flight // with chunks that never left
	again   []sent    // to be retransmitted
	out     []sent    // in the network, in the order of sending
	bytes   int       // of out

	window   float64
	limit    float64 // slow start ends here
	rtt      Time
	pace     Time // time of two chunks on the slowest link
	backoff  uint
	progress Time
	resume   Time // nothing is sent before
	cut      Time // time of the last halving of the window
	armed    bool
	probed   bool // since the last confirmation
	unsent   bool // the stack has refused to send since the last confirmation
	received uint64

	kernel  int       // bytes that it holds for the stopped process
	claimed []*flight // slices of the other side that the NIC may write
	stopped bool      // the NIC writes nothing more

	results [1]transport.Result
}

// flight is a slice that Move accepted. Its first half belongs to the sender, its second to the
// receiver. Neither reads the other's, except for the content of chunks: the slice's header, the
// bytes, and the trailer with the last one.
type flight struct {
	id      uint64
	e       *end
	s       transport.Slice
	began   Time
	total   uint64
	uniform bool // all chunks are whole
	words   []uint64
	data    [][]byte
	next    uint32          // chunks that have left
	lost    transfer.Reason // why the source was lost; the trailer invalidates the slice
	err     error
	ended   bool
	acked   uint64 // bytes

	opened bool
	closed bool // decided
	kept   bool // a chunk came while the process was stopped, and the kernel confirmed it
	left   uint32
	have   []uint64
	grant  *transport.Grant
	claim  transport.Claim
	why    transfer.Reason
	out    transfer.Outcome
}

func newEnd(f *Fabric, b *Backend, id uint64, local, remote *Rail, peer transfer.Boot,
	path []*Link) *end {
	e := &end{f: f, b: b, id: id, local: local, remote: remote, peer: peer, path: path,
		window: firstWindow, limit: math.Inf(1),
		progress: f.now}
	e.rtt = e.base() // the handshake's
	for _, l := range path {
		e.pace = max(e.pace, Time(2*8*transfer.ChunkBytes*1e9/l.spec.BitsPerSecond))
	}
	local.ends = append(local.ends, e)
	b.ends = append(b.ends, e)
	return e
}

func (e *end) ID() uint64          { return e.id }
func (e *end) Peer() transfer.Boot { return e.peer }
func (e *end) Backend() string     { return Name }
func (e *end) Local() string       { return e.local.Name }
func (e *end) Remote() string      { return e.remote.Name }
func (e *end) MaxInFlight() int    { return e.f.cfg.MaxInFlight }
func (e *end) RTT() time.Duration  { return e.base() }

// Acked implements transport.Meter, in confirmed chunks.
func (e *end) Acked() uint64 { return e.received }

func (e *end) announce() {
	if e.dead {
		return
	}
	e.up = true
	e.b.host.LaneUp(e)
}

var errBusy = errors.New("more slices than the lane takes at once")

// Move implements transport.Lane.
func (e *end) Move(batch []transport.Slice) error {
	if e.dead || e.closing {
		return fmt.Errorf("simfabric: move on lane %d: %w", e.id, net.ErrClosed)
	}
	if len(e.flights)+len(batch) > e.f.cfg.MaxInFlight {
		return fmt.Errorf("simfabric: move on lane %d: %d slices with %d in flight: %w", e.id, len(batch),
			len(e.flights), errBusy)
	}
	if len(e.flights) == 0 {
		e.progress = e.f.now
	}
	for _, s := range batch {
		e.f.flights++
		fl := &flight{id: e.f.flights, e: e, s: s, began: e.f.now, left: s.Range.Count}
		e.flights = append(e.flights, fl)
		n, err := s.Origin.Memory.Bytes(s.Range)
		why := transfer.ReasonRange
		if err == nil && s.Origin.Revoked() {
			err, why = errSourceClosed, transfer.ReasonSourceGone
		}
		if err == nil {
			err = fl.resolve()
		}
		if err != nil {
			e.local.host.After(0, func() { e.finish(fl, transfer.NotLanded, why, err) })
			continue
		}
		fl.total, fl.uniform = n, n == uint64(s.Range.Count)*transfer.ChunkBytes
		fl.have = make([]uint64, (s.Range.Count+63)/64)
		if _, ok := s.Origin.Memory.(WordSource); ok {
			fl.words = make([]uint64, s.Range.Count)
		} else {
			fl.data = make([][]byte, s.Range.Count)
		}
		e.queue = append(e.queue, fl)
		if _, ok := e.signal(); ok && e.f.cfg.OneSided {
			// the question where to, ahead of the data
			e.remote.host.After(e.base()/2, func() { e.other.begin(fl) })
		}
	}
	e.pump()
	return nil
}

var (
	errSourceClosed = errors.New("simfabric: the source lease was closed")
	errInvalidated  = errors.New("simfabric: the source was no longer valid after it was read")
)

// resolve checks whether a source with memory has memory for the slice.
func (fl *flight) resolve() error {
	if _, ok := fl.s.Origin.Memory.(WordSource); ok {
		return nil
	}
	_, err := fl.s.Origin.Memory.Resolve(nil, fl.s.Range)
	return err
}

// Close implements transport.Lane.
func (e *end) Close() error {
	if e.dead || e.closing {
		return nil
	}
	e.closing = true
	e.local.host.After(0, func() { e.die(net.ErrClosed) })
	return nil
}

// die ends this side. The other side is notified, or finds out.
func (e *end) die(err error) {
	if e.dead {
		return
	}
	e.dead = true
	e.local.ends = remove(e.local.ends, e)
	e.b.ends = remove(e.b.ends, e)
	e.out, e.again, e.queue = nil, nil, nil
	for _, fl := range e.claimed {
		fl.claim.Release()
	}
	e.claimed = nil
	var res []transport.Result
	for _, fl := range e.flights {
		o := transfer.InDoubt
		if fl.next == 0 {
			o = transfer.NotLanded
		}
		fl.ended = true
		e.f.stats.Ended[o]++
		res = append(res, transport.Result{Slice: fl.s, Outcome: o, Reason: transfer.ReasonLaneLost,
			Err:  fmt.Errorf("simfabric: lane %d: %w", e.id, errors.Join(err, net.ErrClosed)),
			Took: max(e.f.now-fl.began, 1)})
	}
	e.flights = nil
	if len(res) > 0 {
		e.b.host.Done(e, res)
	}
	if e.up {
		e.up = false
		e.b.host.LaneDown(e, err)
	}
	if e.other.dead {
		return
	}
	later := e.f.cfg.UserTimeout
	if d, ok := e.signal(); ok {
		later = d
	}
	e.remote.host.After(later,
		func() { e.other.die(fmt.Errorf("simfabric: the peer ended the lane: %w", net.ErrClosed)) })
}

func remove[T comparable](s []T, v T) []T {
	if i := slices.Index(s, v); i >= 0 {
		return slices.Delete(s, i, i+1)
	}
	return s
}

// signal is the time of a small packet to the other side.
func (e *end) signal() (d Time, ok bool) {
	for _, l := range e.path {
		x, ok := l.delay(e.f)
		if !ok {
			return 0, false
		}
		d += x
	}
	return d, true
}

// cross sends a chunk, whose first byte arrives at `first` and whose last at `tail`, over link
// number hop.
func (f *Fabric) cross(fl *flight, idx uint32, hop uint8, first, tail Time) {
	p := fl.e.path
	first, tail, ok := p[hop].carry(f, first, tail, fl.size(idx))
	switch {
	case !ok:
		fl.e.unsent = fl.e.unsent || p[hop].barred
	case int(hop)+1 < len(p):
		f.at(first, event{kind: evHop, hop: hop + 1, idx: idx, fl: fl, tail: tail})
	default:
		f.at(tail, event{kind: evArrive, idx: idx, fl: fl})
	}
}

// finish ends a slice at the sender.
func (e *end) finish(fl *flight, o transfer.Outcome, why transfer.Reason, err error) {
	if e.dead || fl.ended {
		return
	}
	fl.ended = true
	e.flights = remove(e.flights, fl)
	kept := e.out[:0]
	for _, x := range e.out {
		if x.fl == fl {
			e.bytes -= x.n
			continue
		}
		kept = append(kept, x)
	}
	clear(e.out[len(kept):])
	e.out = kept
	if o == transfer.Landed {
		e.received += fl.total - fl.acked // includes chunks whose own confirmations were lost
	} else {
		if fl.lost != transfer.ReasonNone {
			o, why, err = transfer.NotLanded, fl.lost, fl.err
		}
		if err == nil {
			err = fmt.Errorf("simfabric: chunks %d+%d, attempt %d: the receiver reports %s",
				fl.s.Range.First, fl.s.Range.Count, fl.s.Attempt, why)
		}
	}
	e.f.stats.Ended[o]++
	e.results[0] = transport.Result{Slice: fl.s, Outcome: o, Reason: why, Err: err,
		Took: max(e.f.now-fl.began, 1)}
	e.b.host.Done(e, e.results[:])
	e.results[0] = transport.Result{}
}
