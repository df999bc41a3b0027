package simfabric

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
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

// sent is a chunk in the network.
type sent struct {
	fl    *flight
	idx   uint32
	at    Time
	n     int
	skips uint8
	again bool
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
	n, err := fl.s.Origin.Memory.Bytes(transfer.Range{First: fl.s.Range.First + idx, Count: 1})
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
		fl.words[idx] = o.Memory.(WordSource).ReadWord(chunk)
		return
	}
	buf := make([]byte, n)
	blocks, err := o.Memory.Resolve(nil, transfer.Range{First: chunk, Count: 1})
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
	if o := fl.s.Origin; fl.lost == transfer.ReasonNone && (o.Revoked() ||
		!o.Valid(o.Lease)) {
		fl.lost, fl.err = transfer.ReasonInvalidated, errInvalidated
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
