package simfabric

import (
	"fmt"
	"net"
	"slices"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
)

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
		e.local.host.After(0, func() {
			e.die(fmt.Errorf("simfabric: lane %d was stopped: %w", e.id, net.ErrClosed))
		})
	}
	return true
}

// arrive receives a chunk; e is the receiver's end.
func (e *end) arrive(fl *flight, idx uint32) {
	if e.dead || e.stopped {
		if d, ok := e.signal(); ok {
			e.remote.host.After(d, func() {
				fl.e.die(fmt.Errorf("simfabric: the peer's end is gone: %w", net.ErrClosed))
			})
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
				e.die(fmt.Errorf("simfabric: lane %d: no confirmation received for %s", e.id,
					e.f.cfg.UserTimeout))
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
	n, err := g.Memory.Bytes(r)
	if err != nil {
		return transfer.ReasonRange
	}
	if n != fl.total {
		return transfer.ReasonLength
	}
	if _, ok := g.Memory.(WordMemory); ok != (fl.words != nil) || e.f.cfg.OneSided && !ok {
		return transfer.ReasonMemory
	} else if !ok {
		if _, err := g.Memory.Resolve(nil, r); err != nil {
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
	if _, fresh := fl.claim.Fresh(transfer.Range{First: chunk, Count: 1}); !fresh ||
		fl.words[idx] == padding {
		return
	}
	fl.grant.Memory.(WordMemory).WriteWord(chunk, fl.words[idx])
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
		fl.grant.Memory.(WordMemory).WriteWord(chunk, fl.words[idx])
	default:
		blocks, err := fl.grant.Memory.Resolve(nil, one)
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
		fl.out, fl.why = transfer.NotLanded, transfer.ReasonInvalidated
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
