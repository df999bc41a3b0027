package shm

import (
	"fmt"
	"log/slog"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

const (
	// guardBytes are copied under one hold of the grant's guard: 10 to 40 us, the time for which a
	// fence may have to wait.
	guardBytes = 128 << 10
	// inlineBytes are copied by the reader itself: a hand-over costs more than the copy.
	inlineBytes = 128 << 10
	// batchAnswers bounds the answers that a copier holds back while it has more to copy.
	batchAnswers = 4
)

// job is one pull or push at its destination.
type job struct {
	l      *lane
	tag    uint64
	slot   transfer.Slot
	gen    transfer.Gen
	r      transfer.Range
	cells  []byte // of the pull, checked: every piece lies in its mapping
	maps   []held // referenced until the copy is over
	total  uint64 // bytes
	pieces uint64
	copied bool // guarded by destination.mu
	grant  *transport.Grant
	claim  transport.Claim // the right to write the chunks; from the copy to the verdict
	blocks []mem.Block

	attempt uint32
	pushed  bool    // by a push: its bytes are in sent, and no verdict follows
	sent    mapping // used by this job only
	kept    []byte  // of sent, if the packet's memory does not last
}

// held is a mapping that a pull names, by the peer's index.
type held struct {
	index uint32
	*mapping
}

// sourcePiece is a piece of the peer's memory, or a part of one.
type sourcePiece struct {
	m        *mapping
	off, len uint64
}

func (j *job) hold(index uint32, m *mapping) {
	if j.find(index) != nil {
		return
	}
	j.l.b.maps.acquire(m)
	j.maps = append(j.maps, held{index, m})
}

func (j *job) find(index uint32) *mapping {
	for i := range j.maps {
		if j.maps[i].index == index {
			return j.maps[i].mapping
		}
	}
	return nil
}

// admit checks the pull against its grant and claims the chunks.
func (j *job) admit() transfer.Reason {
	g, reason := j.l.b.host.Grant(j.l.peer, j.slot, j.gen)
	if g == nil {
		return reason
	}
	j.grant = g
	want, err := g.Memory.Bytes(j.r)
	if err != nil {
		return transfer.ReasonRange
	}
	if want != j.total {
		return transfer.ReasonLength
	}
	return g.Claim(&j.claim, j.r, j.attempt)
}

// resolve finds the grant's memory.
func (j *job) resolve() transfer.Reason {
	var err error
	if j.blocks, err = j.grant.Memory.Resolve(j.blocks[:0], j.r); err != nil {
		return transfer.ReasonRange
	}
	return transfer.ReasonNone
}

// copy moves the bytes into the grant's memory, or returns why it did not.
func (j *job) copy() transfer.Reason {
	if reason := j.admit(); reason != transfer.ReasonNone {
		return reason
	}
	if reason := j.resolve(); reason != transfer.ReasonNone {
		return reason
	}
	c := cursor{job: j, cells: j.cells}
	return j.walk(c.run)
}

// walk calls f for the claimed chunks in order, with the bytes of consecutive chunks that are all
// fresh or have all landed from another attempt. Landed chunks are never written again: f skips
// them. The first reason ends the walk.
func (j *job) walk(f func(bytes uint64, fresh bool) transfer.Reason) transfer.Reason {
	for rest := j.r; rest.Count > 0; {
		n, fresh := j.claim.Fresh(rest)
		bytes, err := j.grant.Memory.Bytes(transfer.Range{First: rest.First, Count: n})
		if err != nil {
			return transfer.ReasonRange
		}
		if reason := f(bytes, fresh); reason != transfer.ReasonNone {
			return reason
		}
		rest.First, rest.Count = rest.First+n, rest.Count-n
	}
	return transfer.ReasonNone
}

// run copies the next n bytes, or skips them.
func (c *cursor) run(n uint64, fresh bool) transfer.Reason {
	for n > 0 {
		k := min(n, guardBytes)
		if fresh {
			if reason := c.claim.Enter(); reason != transfer.ReasonNone {
				return reason
			}
		}
		err := c.advance(k, fresh)
		if fresh {
			c.claim.Leave()
		}
		if err != nil {
			c.l.b.faults.Note(slog.LevelWarn, "shm copy", "peer", c.l.peer, "slot", c.slot, "err", err)
			return transfer.ReasonMemory
		}
		n -= k
	}
	return transfer.ReasonNone
}

// cursor walks the pieces of both sides together.
type cursor struct {
	*job
	cells      []byte // of the source, after from
	from       run
	at         mem.Offsets // of the current piece of from
	more       bool        // there is one
	m          *mapping    // of from
	di         int
	soff, doff uint64 // in the current piece of each
}

// advance moves the next n bytes, with the claim entered, or skips them.
func (c *cursor) advance(n uint64, write bool) error {
	return c.each(n, func(d mem.Block, s sourcePiece) error {
		if !write {
			return nil
		}
		from := s.m.bytes[s.off:][:s.len]
		// A mapped region is copied into directly; a region of another process needs a system call.
		if p, ok := d.Bytes(); ok {
			mem.Copy(p, from)
			return nil
		}
		return d.Region.WriteAt(from, d.Off)
	})
}

// each calls f for the next n bytes, cut where the pieces of either side end.
func (c *cursor) each(n uint64, f func(d mem.Block, s sourcePiece) error) error {
	for n > 0 {
		if !c.source() || c.di >= len(c.blocks) {
			return fmt.Errorf("shm: the blocks of chunks [%d, +%d) hold fewer bytes than their length",
				c.r.First, c.r.Count)
		}
		d, size := &c.blocks[c.di], uint64(c.from.len)
		k := min(n, size-c.soff, d.Len-c.doff)
		if err := f(mem.Block{Region: d.Region, Off: d.Off + c.doff, Len: k}, sourcePiece{c.m, c.at.Off +
			c.soff, k}); err != nil {
			return err
		}
		n -= k
		if c.soff += k; c.soff == size {
			c.soff = 0
			c.more = c.at.Next(&c.from.Strides)
		}
		if c.doff += k; c.doff == d.Len {
			c.di, c.doff = c.di+1, 0
		}
	}
	return nil
}

// source ensures that from has a piece left.
func (c *cursor) source() bool {
	if c.more {
		return true
	}
	if len(c.cells) == 0 {
		return false
	}
	index := c.from.region
	var err error
	if c.cells, err = c.from.next(c.cells); err != nil { // already checked
		return false
	}
	if c.m == nil || c.from.region != index {
		c.m = c.find(c.from.region)
	}
	c.at.Start(c.from.off, &c.from.Strides)
	c.more = true
	return true
}

// finish answers the pull; after a copy the job stays until the verdict.
func (j *job) finish(reason transfer.Reason) {
	l, d := j.l, &j.l.dst
	if j.pushed {
		j.land(reason)
		return
	}
	for _, m := range j.maps {
		l.b.maps.release(m.mapping)
	}
	clear(j.maps)
	j.maps = j.maps[:0]
	tag := j.tag
	d.mu.Lock()
	gone := d.ended
	if reason == transfer.ReasonNone && !gone {
		j.copied = true
	} else {
		d.dropLocked(j)
	}
	d.mu.Unlock()
	if gone {
		return
	}
	if reason != transfer.ReasonNone {
		l.b.host.Refused(l, reason)
	}
	var buf [frameHeader + pulledBytes]byte
	l.out.put(appendPulled(buf[:0], tag, reason), -1)
}

// land ends a job whose bytes are in place and valid, or, with a reason, a push whose bytes are
// not.
func (j *job) land(reason transfer.Reason) {
	l, d, tag := j.l, &j.l.dst, j.tag
	o := transfer.Landed
	d.mu.Lock()
	gone := d.ended
	if !gone {
		d.landing.Add(1)
		defer d.landing.Done()
	}
	d.mu.Unlock()
	if reason == transfer.ReasonNone && !gone {
		reason = j.claim.Land(l)
	}
	d.mu.Lock()
	d.dropLocked(j)
	d.mu.Unlock()
	if gone {
		return
	}
	if reason != transfer.ReasonNone {
		l.b.host.Refused(l, reason)
		o = transfer.Rejected
	}
	var buf [frameHeader + confirmBytes]byte
	l.out.put(appendConfirm(buf[:0], tag, o, reason), -1)
}
