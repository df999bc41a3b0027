package gdr

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// receiving is a slice that the peer sends. It is the device of its claim.
type receiving struct {
	l       *lane
	state   state
	seq     uint16
	at      time.Time        // time of the ASK
	g       *transport.Grant // while the NIC may write its memory: armed, and not staged
	r       transfer.Range   // of it
	claim   transport.Claim
	claimed bool
	keys    []*key
	runs    []run // spans that the peer may write
	blocks  []mem.Block
	slab    *slab // of a staged slice
	trip    trip
}

// destination is the receiving half of a lane: the slices that the peer sends. Its fields are
// guarded by lane.mu.
type destination struct {
	l         *lane
	in        [maxInFlight]receiving
	recvs     uint64        // receives posted
	recvsDone uint64        // and ended
	sawFlush  bool          // of a receive
	change    chan struct{} // closed when a claim ends; made by the waiter
	verdicts  chan uint32   // from the follower to the lander; has room for every receive
	oneID     [1]uint64
}

func (dst *destination) init(l *lane) {
	dst.l, dst.verdicts = l, make(chan uint32, receives)
	for i := range dst.in {
		dst.in[i].l = l
	}
}

// Stop implements transport.Device. An unarmed slice is not written: arm finds the claim lost.
// Neither is a staged one, except into its slab.
func (r *receiving) Stop() bool {
	r.l.mu.Lock()
	harmless := r.state != armed || r.slab != nil
	r.l.mu.Unlock()
	return harmless || r.l.halt()
}

// moving is the time that a later attempt should wait for this slice. It includes an unarmed slice,
// because that may be armed when it is stopped, which would end its lane.
func (r *receiving) moving() time.Duration {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	since := r.l.activity.progress
	switch r.state {
	case armed:
	case asked:
		since = r.at
	default:
		return 0
	}
	return r.l.activity.patience(&r.l.b.cfg) - time.Since(since)
}

// release gives up what the slice held. Nothing is written for the slice any more. Called
// without lane.mu: an attempt that takes over chunks holds the grant's claims while it fails the
// lane.
func (r *receiving) release() {
	r.claim.Release()
	r.claimed = false
	r.trip.drop()
	if r.slab != nil {
		r.slab.release()
		r.slab = nil
	}
	for i, k := range r.keys {
		k.put()
		r.keys[i] = nil
	}
	r.keys = r.keys[:0]
}

// read takes frames until the socket ends.
func (l *lane) read() error {
	in := bufio.NewReaderSize(l.c, readBuffer)
	var raw [headBytes]byte
	var h head
	var cells []byte
	results := make([]transport.Result, 1)
	for {
		if _, err := io.ReadFull(in, raw[:]); err != nil {
			return fmt.Errorf("gdr: lane %d: %w", l.id, err)
		}
		if err := parseHead(&raw, &h); err != nil {
			return err
		}
		var err error
		switch h.kind {
		case kindAsk:
			err = l.dst.asked(h)
		case kindEnd:
			err = l.src.ended(&h, results)
		case kindGo:
			n := int(h.cells) * cellBytes
			if cap(cells) < n {
				cells = make([]byte, n)
			}
			if _, err = io.ReadFull(in, cells[:n]); err == nil {
				err = l.src.proceed(&h, cells[:n])
			}
		}
		if err != nil {
			return err
		}
	}
}

// asked answers one ASK, at once or when the claims in its way have ended. An error ends the lane.
func (dst *destination) asked(h head) error {
	dst.l.mu.Lock()
	r := &dst.in[h.id]
	free := r.state == idle
	if free {
		r.state, r.seq, r.at = asked, h.seq, time.Now()
	}
	dst.l.mu.Unlock()
	if !free {
		return fmt.Errorf("%w: ASK for slice %d, which is in flight", errFrame, h.id)
	}
	g, why := dst.l.b.host.Grant(dst.l.peer, h.slot, h.gen)
	if g == nil && why == transfer.ReasonNone {
		why = transfer.ReasonUnknownSlot
	}
	if g != nil {
		why = transfer.ReasonNone
		if h.r.Count == 0 || h.r.Count > maxSliceChunks ||
			uint64(h.r.First)+uint64(h.r.Count) > transfer.MaxSlotChunks {
			why = transfer.ReasonRange
		} else if n, err := g.Memory.Bytes(h.r); err != nil {
			why = transfer.ReasonRange
		} else if n != h.bytes {
			why = transfer.ReasonLength
		}
	}
	if why != transfer.ReasonNone {
		dst.refuse(h.id, why)
		return nil
	}
	r.trip = dst.l.dev.trip(g.Memory.Device(), true, h.bytes)
	err := dst.arm(g, &h, false)
	if !errors.Is(err, errLater) {
		return err
	}
	dst.armLater(g, h)
	return nil
}

// armLater is separate from asked so that a head is on the heap only here.
func (dst *destination) armLater(g *transport.Grant, h head) {
	dst.l.asks.Go(func() {
		if err := dst.arm(g, &h, true); err != nil {
			dst.l.fail(err)
		}
	})
}

// claimFor claims the chunks of a slice. It lets slices in its way end by themselves as long as
// their lanes make progress.
func (dst *destination) claimFor(g *transport.Grant, h *head, wait bool) (transfer.Reason, error) {
	var patience *time.Timer
	var doubted *lane // a lane without progress that was made to poll completions
	for force := false; ; {
		why, holder, ended := g.ClaimDevice(&dst.in[h.id].claim, h.r, h.attempt, &dst.in[h.id], force)
		switch {
		case holder == nil:
			return why, nil
		case !wait:
			return why, errLater
		case g.Revoked():
			return transfer.ReasonRevoked, nil
		}
		left := time.Duration(0)
		var looked <-chan struct{}
		if x, ours := holder.(*receiving); ours {
			switch left = x.moving(); {
			case left > 0:
			case doubted != x.l:
				// If this process was suspended, completions of its NIC wait to be polled.
				doubted, left, looked = x.l, dst.l.b.cfg.Patience, x.l.lookAgain()
			default:
				left = dst.l.b.movingIn(dst.l.peer, g, h.r) // force stops all of them
			}
		}
		if force = left <= 0; force {
			continue
		}
		if patience == nil {
			patience = time.NewTimer(left)
			defer patience.Stop()
		} else {
			patience.Reset(left)
		}
		select {
		case <-ended:
		case <-looked:
		case <-dst.l.settled:
			return transfer.ReasonLaneLost, nil
		case <-patience.C:
		}
	}
}

// movingIn is the longest time to wait for the slices that may write chunks r of a grant.
func (b *Backend) movingIn(peer transfer.Boot, g *transport.Grant,
	r transfer.Range) (left time.Duration) {
	for _, l := range b.lanesOf(peer) {
		for i := range l.dst.in {
			x := &l.dst.in[i]
			l.mu.Lock()
			hit := x.g == g && x.r.First < r.End() && r.First < x.r.End()
			l.mu.Unlock()
			if hit {
				left = max(left, x.moving())
			}
		}
	}
	return left
}

// arm claims the chunks of a slice and permits the peer to write them. errLater: it would have to
// wait for another slice or a registration; it keeps a claim.
func (dst *destination) arm(g *transport.Grant, h *head, wait bool) error {
	r := &dst.in[h.id]
	if !r.claimed {
		why, err := dst.claimFor(g, h, wait)
		if err != nil {
			return err
		}
		if why != transfer.ReasonNone {
			dst.refuse(h.id, why)
			return nil
		}
		r.claimed = true
	}
	if err := dst.offer(g, h, r, wait); err != nil {
		switch {
		case errors.Is(err, errRange):
			dst.refuse(h.id, transfer.ReasonRange)
		case errors.Is(err, errLong):
			dst.refuse(h.id, transfer.ReasonLength)
		case errors.Is(err, errNoSlab):
			dst.l.b.faults.Note(slog.LevelWarn, "slice refused", "lane", dst.l.id, "err", err)
			dst.refuse(h.id, transfer.ReasonMemory)
		default:
			return err
		}
		return nil
	}
	// Under the claim and the guard: an attempt that takes over stops armed slices, and a fence
	// checks for them after the guard is idle.
	if why := r.claim.Enter(); why != transfer.ReasonNone {
		dst.refuse(h.id, why)
		return nil
	}
	dst.l.mu.Lock()
	dead := dst.l.err != nil
	if !dead {
		r.state, r.r = armed, h.r
		if r.slab == nil {
			r.g = g
		}
		dst.l.activity.progress = time.Now()
		dst.l.activity.sliceAt = dst.l.activity.progress
		if !wait || r.slab != nil { // else the time includes a registration
			r.trip.start(dst.l.activity.progress)
		}
	}
	dst.l.mu.Unlock()
	r.claim.Leave()
	if !dead {
		dst.l.send(&head{kind: kindGo, id: h.id, seq: h.seq}, r.runs)
	}
	return nil
}

var errRange = errors.New("gdr: the grant does not resolve")

// offer lists the memory that the peer may write: chunks that have not landed yet.
func (dst *destination) offer(g *transport.Grant, h *head, r *receiving, wait bool) error {
	if r.trip.way == direct {
		err := dst.directOffer(g, h, r, wait)
		if !errors.Is(err, errUnreachable) {
			return err
		}
		r.trip.detour(err)
	}
	if !wait {
		return errLater
	}
	return dst.stageOffer(g, h, r)
}

func (dst *destination) directOffer(g *transport.Grant, h *head, r *receiving,
	wait bool) (err error) {
	r.runs = r.runs[:0]
	for at := h.r; at.Count > 0; {
		n, fresh := r.claim.Fresh(at)
		part := transfer.Range{First: at.First, Count: n}
		at = transfer.Range{First: at.First + n, Count: at.Count - n}
		if !fresh {
			bytes, err := g.Memory.Bytes(part)
			if err != nil || bytes > maxSpan {
				return errRange
			}
			r.runs = append(r.runs, single(span{len: uint32(bytes)}))
			continue
		}
		if r.blocks, err = g.Memory.Resolve(r.blocks[:0], part); err != nil {
			return errRange
		}
		if r.runs, r.keys, err = dst.l.runs(r.runs, r.keys, r.blocks, access{remote: true,
			wait: wait}); err != nil {
			return err
		}
	}
	if spans, bytes := total(r.runs); spans > maxSpans || bytes != h.bytes {
		return errRange
	}
	return nil
}

// refuse ends a slice that may not be written.
func (dst *destination) refuse(id uint8, why transfer.Reason) {
	dst.l.b.host.Refused(dst.l, why)
	dst.finish(id, why)
}

// finish frees the slice's id and sends END, in this order, because the peer reuses the id. Nothing
// can be written for the slice any more, so a fence need not check the released keys.
func (dst *destination) finish(id uint8, why transfer.Reason) {
	r := &dst.in[id]
	dst.l.mu.Lock()
	r.g = nil
	dst.changedLocked()
	dst.l.mu.Unlock()
	r.release()
	dst.l.mu.Lock()
	r.state = idle
	seq := r.seq
	dst.l.mu.Unlock()
	dst.l.send(&head{kind: kindEnd, id: id, reason: why, seq: seq}, nil)
}

// land processes verdicts: all bytes of the slice are in place. Claim and guard decide whether they
// count.
func (dst *destination) land() {
	for imm := range dst.verdicts {
		dst.again()
		id, why, seq := parseVerdict(imm)
		dst.l.mu.Lock()
		ok := id < maxInFlight && int(why) < transfer.NumReasons && dst.in[id].state == armed &&
			dst.in[id].seq == seq
		dst.l.mu.Unlock()
		if !ok {
			dst.l.fail(fmt.Errorf("%w: a verdict on slice %d.%d, which is not in flight", errFrame, id, seq))
			continue
		}
		if why == transfer.ReasonNone {
			why = dst.in[id].place()
		}
		if why != transfer.ReasonNone {
			dst.l.b.host.Refused(dst.l, why)
		}
		dst.finish(id, why)
	}
}

// place lands a slice of which every byte has arrived.
func (r *receiving) place() (why transfer.Reason) {
	_, bytes := total(r.runs)
	if r.slab != nil {
		var err error
		if why, err = r.claim.LandFrom(r.slab.bytes(bytes), r.l, &r.blocks); err != nil {
			r.trip.fault(err)
			r.l.b.faults.Note(slog.LevelWarn, "device memory not written", "lane", r.l.id, "err", err)
		}
	} else if why = r.show(); why == transfer.ReasonNone {
		why = r.claim.Land(r.l)
	}
	if why == transfer.ReasonNone {
		r.trip.ended(bytes)
	}
	return why
}

// show makes the NIC's writes visible to the GPUs that own the memory.
func (r *receiving) show() transfer.Reason {
	for _, k := range r.keys {
		if k.flush == nil {
			continue
		}
		if err := k.flush(); err != nil {
			r.l.b.cfg.Log.Warn("landed bytes cannot be made visible", "transport", Name, "lane",
				r.l.id, "err", err)
			return transfer.ReasonMemory
		}
	}
	return transfer.ReasonNone
}

// armedFor is nil if nothing may be written to a grant through this lane; otherwise it is closed at
// the next change.
func (dst *destination) armedFor(g *transport.Grant) <-chan struct{} {
	dst.l.mu.Lock()
	defer dst.l.mu.Unlock()
	for i := range dst.in {
		if dst.in[i].g == g {
			if dst.change == nil {
				dst.change = make(chan struct{})
			}
			return dst.change
		}
	}
	return nil
}

// invalidate ends the keys under which a grant (nil: every grant) may be written through this lane,
// whose device does not drain.
func (dst *destination) invalidate(g *transport.Grant) (err error) {
	match := func(r *receiving) bool { return r.g != nil && (g == nil || r.g == g) }
	var held []*key
	dst.l.mu.Lock()
	for i := range dst.in {
		if r := &dst.in[i]; match(r) {
			held = append(held, r.keys...)
		}
	}
	dst.l.mu.Unlock()
	for _, k := range held {
		err = errors.Join(err, k.invalidate())
	}
	if err != nil {
		return err
	}
	// No slice was armed in the meantime: the guard is revoked, or the lane has failed.
	dst.l.mu.Lock()
	defer dst.l.mu.Unlock()
	for i := range dst.in {
		if r := &dst.in[i]; match(r) {
			r.g = nil
		}
	}
	dst.changedLocked()
	return nil
}
