package simfabric

import (
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

const (
	packetBytes = 1500
	// firstWindow is the window of a lane before its first confirmation.
	firstWindow = 2 * transfer.ChunkBytes
	// dupAcks is the number of later confirmed chunks after which an unconfirmed one is
	// retransmitted.
	dupAcks    = 3
	maxBackoff = 6
	// probeSlack is the longest time in which a receiver confirms.
	probeSlack = 2 * time.Millisecond
	// padding is the content of a chunk whose source was lost.
	padding = ^uint64(0)
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

// sent is a chunk in the network.
type sent struct {
	fl    *flight
	idx   uint32
	at    Time
	n     int
	skips uint8
	again bool
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

func newEnd(f *Fabric, b *Backend, id uint64, local, remote *Rail, peer transfer.Boot, path []*Link) *end {
	e := &end{f: f, b: b, id: id, local: local, remote: remote, peer: peer, path: path, window: firstWindow, limit: math.Inf(1),
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
func (e *end) Way() time.Duration  { return e.base() }

// Received implements transport.Meter, in chunks that were confirmed.
func (e *end) Received() uint64 { return e.received }

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
		return fmt.Errorf("simfabric: move on lane %d: %d slices with %d in flight: %w", e.id, len(batch), len(e.flights), errBusy)
	}
	if len(e.flights) == 0 {
		e.progress = e.f.now
	}
	for _, s := range batch {
		e.f.flights++
		fl := &flight{id: e.f.flights, e: e, s: s, began: e.f.now, left: s.Range.Count}
		e.flights = append(e.flights, fl)
		n, err := s.Origin.Source.Bytes(s.Range)
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
		if _, ok := s.Origin.Source.(WordSource); ok {
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
	errDisowned     = errors.New("simfabric: the source was no longer valid after it was read")
)

// resolve checks whether a source with memory has memory for the slice.
func (fl *flight) resolve() error {
	if _, ok := fl.s.Origin.Source.(WordSource); ok {
		return nil
	}
	_, err := fl.s.Origin.Source.Resolve(nil, fl.s.Range)
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
			Err: fmt.Errorf("simfabric: lane %d: %w", e.id, errors.Join(err, net.ErrClosed)), Took: max(e.f.now-fl.began, 1)})
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
	e.remote.host.After(later, func() { e.other.die(fmt.Errorf("simfabric: the peer ended the lane: %w", net.ErrClosed)) })
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

// pump sends what the window permits: lost chunks first, then new ones.
func (e *end) pump() {
	for !e.dead && e.f.now >= e.resume {
		if len(e.again) > 0 {
			x := e.again[0]
			if x.fl.ended {
				e.again = e.again[1:]
				continue
			}
			if !e.room(x.n) {
				break
			}
			e.again = e.again[1:]
			x.again, x.skips = true, 0
			e.f.stats.Again++
			e.send(x)
			continue
		}
		if len(e.queue) == 0 {
			break
		}
		fl := e.queue[0]
		if fl.ended {
			e.queue = e.queue[1:]
			continue
		}
		n := fl.size(fl.next)
		if !e.room(n) {
			break
		}
		idx := fl.next
		fl.read(idx, n)
		if fl.next++; fl.next == fl.s.Range.Count {
			fl.trailer()
			e.queue = e.queue[1:]
		}
		e.send(sent{fl: fl, idx: idx, n: n})
	}
	e.arm()
}

func (e *end) room(n int) bool {
	return e.bytes == 0 || float64(e.bytes+n) <= min(e.window, float64(e.f.cfg.WindowBytes))
}

func (fl *flight) size(idx uint32) int {
	if fl.uniform {
		return transfer.ChunkBytes
	}
	n, err := fl.s.Origin.Source.Bytes(transfer.Range{First: fl.s.Range.First + idx, Count: 1})
	if err != nil {
		return 0
	}
	return int(n)
}

// read reads the content of a chunk as it is now.
func (fl *flight) read(idx uint32, n int) {
	o := fl.s.Origin
	if fl.lost == transfer.ReasonNone && !o.Enter() {
		fl.lost, fl.err = transfer.ReasonSourceGone, errSourceClosed
	}
	chunk := fl.s.Range.First + idx
	if fl.lost != transfer.ReasonNone {
		if fl.words != nil {
			fl.words[idx] = padding
		} else {
			fl.data[idx] = make([]byte, n)
		}
		return
	}
	defer o.Leave()
	if fl.words != nil {
		fl.words[idx] = o.Source.(WordSource).ReadWord(chunk)
		return
	}
	buf := make([]byte, n)
	blocks, err := o.Source.Resolve(nil, transfer.Range{First: chunk, Count: 1})
	if err == nil {
		err = eachBlock(blocks, buf, (*mem.Region).ReadAt)
	}
	if err != nil {
		fl.lost, fl.err = transfer.ReasonMemory, err
	}
	fl.data[idx] = buf
}

// eachBlock passes the parts of buf to their blocks.
func eachBlock(blocks []mem.Block, buf []byte, do func(*mem.Region, []byte, uint64) error) error {
	for _, b := range blocks {
		if uint64(len(buf)) < b.Len {
			return fmt.Errorf("simfabric: a chunk of %d bytes resolves to more", len(buf))
		}
		if err := do(b.Region, buf[:b.Len], b.Off); err != nil {
			return err
		}
		buf = buf[b.Len:]
	}
	return nil
}

// trailer records whether everything that was read was valid; it travels with the last chunk.
func (fl *flight) trailer() {
	if o := fl.s.Origin; fl.lost == transfer.ReasonNone && (o.Revoked() || !o.Source.Valid(fl.s.Range)) {
		fl.lost, fl.err = transfer.ReasonDisowned, errDisowned
	}
}

// send puts a chunk on the wire.
func (e *end) send(x sent) {
	x.at = e.f.now
	e.out = append(e.out, x)
	e.bytes += x.n
	e.f.stats.Sent++
	at := e.f.now + e.unlucky(x.n)
	e.f.cross(x.fl, x.idx, 0, at, at)
}

// unlucky is the cost of a chunk's lost packets: a round trip for each detected loss, a timeout for
// an undetected one.
func (e *end) unlucky(n int) (d Time) {
	ok := 1.0
	for _, l := range e.path {
		ok *= 1 - l.loss
	}
	if ok == 1 {
		return 0
	}
	p := 1 - math.Pow(ok, math.Ceil(float64(n)/packetBytes))
	if e.f.rng.Float64() >= p {
		return 0
	}
	e.f.stats.Lost++
	e.halve()
	if e.f.rng.Float64() < 1-ok { // and so is its retransmission
		return e.f.cfg.RTO
	}
	return max(e.rtt, e.base())
}

// base is the round trip of an idle network.
func (e *end) base() (d Time) {
	for _, l := range e.path {
		d += 2 * l.spec.Latency
	}
	return d
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

// unattended models the kernel and the NIC when a chunk arrives for a stopped process.
func (e *end) unattended(fl *flight, idx uint32) {
	n := fl.size(idx)
	switch {
	case e.dead || e.stopped:
		return
	case e.f.cfg.OneSided:
		if !slices.Contains(e.claimed, fl) {
			return // no memory was offered
		}
		e.place(fl, idx)
	case e.kernel+n > e.f.cfg.RecvBuffer:
		return
	default:
		e.kernel += n
	}
	fl.kept = true
	e.f.stats.Unattended++
	if d, ok := e.signal(); ok {
		e.f.at(e.f.now+d, event{kind: evAck, idx: idx, fl: fl})
	}
}

// Stop implements transport.Device: the queue pair of a lane goes to the error state.
func (e *end) Stop() bool {
	if !e.stopped {
		e.stopped = true
		e.local.host.After(0, func() { e.die(fmt.Errorf("simfabric: lane %d was stopped: %w", e.id, net.ErrClosed)) })
	}
	return true
}

// arrive receives a chunk; e is the receiver's end.
func (e *end) arrive(fl *flight, idx uint32) {
	if e.dead || e.stopped {
		if d, ok := e.signal(); ok {
			e.remote.host.After(d, func() { fl.e.die(fmt.Errorf("simfabric: the peer's end is gone: %w", net.ErrClosed)) })
		}
		return
	}
	if !fl.closed {
		e.begin(fl)
		if w, bit := idx/64, uint64(1)<<(idx%64); fl.have[w]&bit == 0 {
			fl.have[w] |= bit
			fl.left--
			e.write(fl, idx)
			if fl.left == 0 {
				e.decide(fl)
			}
		}
	}
	e.confirm(fl, idx, e.f.now)
}

// confirm confirms a chunk to the sender. If the confirmation is lost the sender retransmits the
// chunk, unless its kernel considers it done: then the confirmation itself is repeated until the
// lane dies of it.
func (e *end) confirm(fl *flight, idx uint32, since Time) {
	if d, ok := e.signal(); ok {
		e.f.at(e.f.now+d, event{kind: evAck, idx: idx, fl: fl, final: fl.closed})
	} else if fl.kept && fl.closed {
		e.local.host.After(e.rto(), func() {
			switch {
			case e.dead || fl.ended:
			case e.f.now-since >= e.f.cfg.UserTimeout:
				e.die(fmt.Errorf("simfabric: lane %d: nobody heard a confirmation for %s", e.id, e.f.cfg.UserTimeout))
			default:
				e.confirm(fl, idx, since)
			}
		})
	}
}

// begin claims the chunks of a slice, unless that was done.
func (e *end) begin(fl *flight) {
	if !fl.opened && !e.dead && !e.stopped {
		fl.opened = true
		fl.why = e.open(fl)
	}
}

// open looks up the grant of a slice. The reason is why it may not be written.
func (e *end) open(fl *flight) transfer.Reason {
	o, r := fl.s.Origin, fl.s.Range
	g, why := e.b.host.Grant(e.peer, o.Slot, o.Gen)
	if g == nil {
		return why
	}
	n, err := g.Sink.Bytes(r)
	if err != nil {
		return transfer.ReasonRange
	}
	if n != fl.total {
		return transfer.ReasonLength
	}
	if _, ok := g.Sink.(WordSink); ok != (fl.words != nil) || e.f.cfg.OneSided && !ok {
		return transfer.ReasonMemory
	} else if !ok {
		if _, err := g.Sink.Resolve(nil, r); err != nil {
			return transfer.ReasonRange
		}
	}
	if e.f.cfg.OneSided {
		if why, _, _ := g.ClaimDevice(&fl.claim, r, fl.s.Attempt, e, true); why != transfer.ReasonNone {
			return why
		}
		// Under the guard: a fence checks for claims once the guard is idle.
		if why := fl.claim.Enter(); why != transfer.ReasonNone {
			fl.claim.Release()
			return why
		}
		e.claimed = append(e.claimed, fl)
		fl.claim.Leave()
	} else if why := g.Claim(&fl.claim, r, fl.s.Attempt); why != transfer.ReasonNone {
		return why
	}
	fl.grant = g
	return transfer.ReasonNone
}

// place writes one chunk like a NIC, without checks. Bytes that the source's NIC has not read are
// not sent either.
func (e *end) place(fl *flight, idx uint32) {
	chunk := fl.s.Range.First + idx
	if _, fresh := fl.claim.Fresh(transfer.Range{First: chunk, Count: 1}); !fresh || fl.words[idx] == padding {
		return
	}
	fl.grant.Sink.(WordSink).WriteWord(chunk, fl.words[idx])
}

// write writes one chunk, unless it has landed before or another attempt may write it by now.
func (e *end) write(fl *flight, idx uint32) {
	if fl.why != transfer.ReasonNone {
		return
	}
	if e.f.cfg.OneSided {
		e.place(fl, idx)
		return
	}
	chunk := fl.s.Range.First + idx
	one := transfer.Range{First: chunk, Count: 1}
	_, fresh := fl.claim.Fresh(one)
	if fl.why = fl.claim.Enter(); fl.why != transfer.ReasonNone {
		return
	}
	defer fl.claim.Leave()
	switch {
	case !fresh:
	case fl.words != nil:
		fl.grant.Sink.(WordSink).WriteWord(chunk, fl.words[idx])
	default:
		blocks, err := fl.grant.Sink.Resolve(nil, one)
		if err == nil {
			err = eachBlock(blocks, fl.data[idx], (*mem.Region).WriteAt)
		}
		if err != nil {
			fl.why = transfer.ReasonMemory
		}
	}
}

// decide ends a slice at the receiver.
func (e *end) decide(fl *flight) {
	fl.closed = true
	e.claimed = remove(e.claimed, fl)
	switch {
	case fl.why != transfer.ReasonNone:
	case fl.lost != transfer.ReasonNone:
		fl.out, fl.why = transfer.NotLanded, transfer.ReasonDisowned
		fl.claim.Release()
		return
	default:
		if fl.why = fl.claim.Land(e); fl.why == transfer.ReasonNone {
			fl.out = transfer.Landed
			return
		}
	}
	fl.claim.Release()
	fl.out = transfer.Rejected
	if fl.why == transfer.ReasonSuperseded {
		fl.out = transfer.NotLanded
	}
	e.b.host.Refused(e, fl.why)
}

// acked processes the confirmation of a chunk at the sender.
func (e *end) acked(fl *flight, idx uint32, final bool) {
	if e.dead || fl.ended {
		return
	}
	if e.backoff > 0 && e.f.cfg.Resume > 0 && !e.unsent {
		e.resume = e.f.now + e.f.cfg.Resume
		e.local.host.After(e.f.cfg.Resume, e.pump)
	}
	e.progress, e.backoff, e.probed, e.unsent = e.f.now, 0, false, false
	at := -1
	for i := range e.out {
		if x := &e.out[i]; x.fl == fl && x.idx == idx {
			at = i
			break
		}
	}
	if at >= 0 {
		x := e.out[at]
		if !x.again {
			e.sample(e.f.now - x.at)
		}
		for i := range at {
			e.out[i].skips++
		}
		e.bytes -= x.n
		e.received += uint64(x.n)
		fl.acked += uint64(x.n)
		e.out = slices.Delete(e.out, at, at+1)
		if e.window < e.limit {
			e.window += float64(x.n)
		} else {
			e.window += float64(transfer.ChunkBytes) * float64(x.n) / e.window
		}
		e.window = min(e.window, float64(e.f.cfg.WindowBytes))
		e.overtaken()
	} else {
		e.again = slices.DeleteFunc(e.again, func(x sent) bool { return x.fl == fl && x.idx == idx })
	}
	if final {
		e.finish(fl, fl.out, fl.why, nil)
	}
	e.pump()
}

// overtaken retransmits chunks after which enough later ones were confirmed.
func (e *end) overtaken() {
	kept := e.out[:0]
	for _, x := range e.out {
		if x.skips < dupAcks {
			kept = append(kept, x)
			continue
		}
		e.bytes -= x.n
		e.again = append(e.again, x)
		e.halve()
	}
	clear(e.out[len(kept):])
	e.out = kept
}

func (e *end) sample(d Time) { e.rtt += (d - e.rtt) / 8 }

// halve shrinks the window, at most once per round trip.
func (e *end) halve() {
	if e.cut > 0 && e.f.now-e.cut < e.rtt {
		return
	}
	e.cut = e.f.now
	e.window = max(e.window/2, transfer.ChunkBytes)
	e.limit = e.window
}

// rto is the time after which a chunk is late: not before the network could have carried two
// chunks.
func (e *end) rto() Time {
	return min(max(e.f.cfg.RTO, 2*e.rtt)<<e.backoff, max(e.f.cfg.MaxRTO, 2*e.rtt)) + e.pace
}

// due is when the oldest chunk is late: every confirmation restarts the timer. The first timeout
// only probes.
func (e *end) due() Time {
	wait := e.rto()
	if !e.probed {
		wait = min(wait, 2*e.rtt+e.pace+probeSlack)
	}
	return max(e.out[0].at, e.progress) + wait
}

func (e *end) arm() {
	if !e.armed && !e.dead && len(e.out) > 0 {
		e.armed = true
		e.f.at(e.due(), event{kind: evTimeout, end: e})
	}
}

// timeout retransmits everything if the oldest chunk is overdue.
func (e *end) timeout() {
	e.armed = false
	if e.dead || len(e.out) == 0 {
		return
	}
	if e.f.now < e.due() {
		e.arm()
		return
	}
	if e.f.now-e.progress >= e.f.cfg.UserTimeout {
		e.die(fmt.Errorf("simfabric: lane %d: no confirmation for %s", e.id, e.f.cfg.UserTimeout))
		return
	}
	if !e.probed {
		// The tail of the sent chunks may be lost, which no later confirmation can show.
		e.probed = true
		x := e.out[0]
		e.out = slices.Delete(e.out, 0, 1)
		e.bytes -= x.n
		e.again = append(e.again, x)
		if !e.unsent {
			e.halve()
		}
		e.pump()
		return
	}
	if !e.unsent { // chunks that never left carry no information about the network
		e.limit = max(e.window/2, 2*transfer.ChunkBytes)
		e.window = transfer.ChunkBytes
	}
	e.backoff = min(e.backoff+1, maxBackoff)
	e.again = append(e.again, e.out...)
	e.out, e.bytes = e.out[:0], 0
	e.pump()
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
			err = fmt.Errorf("simfabric: chunks %d+%d, attempt %d: the receiver reports %s", fl.s.Range.First, fl.s.Range.Count, fl.s.Attempt, why)
		}
	}
	e.f.stats.Ended[o]++
	e.results[0] = transport.Result{Slice: fl.s, Outcome: o, Reason: why, Err: err, Took: max(e.f.now-fl.began, 1)}
	e.b.host.Done(e, e.results[:])
	e.results[0] = transport.Result{}
}
