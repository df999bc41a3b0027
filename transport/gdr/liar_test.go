package gdr

import (
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// TestLiars: whatever an authenticated peer sends, it loses its own lane at most, and is
// distinguished in the log.
func TestLiars(t *testing.T) {
	_, factory := rig(t)
	p := transporttest.NewPair(t, factory)
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(seedOld)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	bind.Dest.Seed.Store(seedOld)
	one := transfer.Range{First: 3, Count: 1}
	verdict := func(imm uint32) func(*testing.T, *lane) {
		return func(t *testing.T, l *lane) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.src.posted++
			if _, err := l.q.PostSend([]verbs.Work{{ID: l.src.posted, Op: verbs.WriteImm, Imm: imm,
				Signaled: true}}); err != nil {
				t.Error(err)
			}
		}
	}
	frame := func(h head, spans ...span) func(*testing.T, *lane) {
		return func(_ *testing.T, l *lane) { l.send(&h, singles(spans)) }
	}
	for name, c := range map[string]struct {
		lie      func(*testing.T, *lane)
		contains string
	}{
		"END of nothing": {frame(head{kind: kindEnd, id: 3, seq: 1}), "not at its end"},
		"GO for nothing": {frame(head{kind: kindGo, id: 3, seq: 1}, span{1, 2, 3}),
			"did not ask"},
		"a slice beyond the window":   {frame(head{kind: kindAsk, id: maxInFlight}), "slice 16 of 16"},
		"a kind that is none":         {frame(head{kind: 9}), "kind 9"},
		"a reason that is none":       {frame(head{kind: kindEnd, reason: 200}), "reason 200"},
		"spans behind an ASK":         {frame(head{kind: kindAsk}, span{1, 2, 3}), "1 spans"},
		"a verdict on nothing":        {verdict(verdictOf(5, 0, 1)), "not in flight"},
		"a verdict beyond the window": {verdict(0xff000000), "not in flight"},
		"noise": {func(_ *testing.T, l *lane) {
			l.frames.mu.Lock()
			l.frames.buf = append(l.frames.buf, strings.Repeat("x", headBytes)...)
			l.frames.mu.Unlock()
			l.send(&head{kind: kindEnd}, nil)
		}, "malformed"},
		"the same id twice": {func(_ *testing.T, l *lane) {
			// The second comes while the first is armed: its source never writes. Both leave at
			// once, before the first GO, which has no request here, ends the lane at this end.
			ask := &head{kind: kindAsk, id: 7, seq: 1, slot: 1, gen: 1, r: one, attempt: 1, bytes: 4096}
			l.frames.mu.Lock()
			l.frames.buf = appendHead(appendHead(l.frames.buf, ask), ask)
			l.frames.mu.Unlock()
			l.frames.wake <- struct{}{}
		}, "in flight"},
		"writes through a key that is none": {func(t *testing.T, l *lane) {
			l.mu.Lock()
			defer l.mu.Unlock()
			k, err := l.dev.keys.get(keyName{src.Region, l.peer, false}, true)
			if err != nil {
				t.Error(err)
				return
			}
			defer k.put()
			l.src.posted++
			if _, err := l.q.PostSend([]verbs.Work{{ID: l.src.posted, Op: verbs.Write,
				LocalAddr: k.parts[0].Addr(), LocalKey: k.parts[0].LocalKey(), Len: 64,
				RemoteAddr: 1 << 40, RemoteKey: 0xdead, Signaled: true}}); err != nil {
				t.Error(err)
			}
		}, "flushed"},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := p.Dial()
			c.lie(t, a.(*lane))
			there := b.(*lane)
			until(t, "the lane is down", func() bool { return there.failure() != nil })
			err := there.failure()
			if c.contains == "flushed" && !strings.Contains(err.Error(), c.contains) {
				// One packet takes both ends down. The end that learns of it from its socket receives
				// it from the other, whose NIC had the reason.
				until(t, "the liar's lane is down", func() bool { return a.(*lane).failure() != nil })
				c.contains, err = "remote access", a.(*lane).failure()
			}
			if !strings.Contains(err.Error(), c.contains) {
				t.Errorf("%v, want %q", err, c.contains)
			}
		})
	}
	a, _ := p.Dial()
	if r := p.A.MoveWait(a, bind.Origin, src.All(), 2); r.Outcome != transfer.Landed {
		t.Fatalf("an honest lane afterwards: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	bind.End(t)
	dst.GapsIntact(t)
}

// TestWrongGo: an answer for another length than was asked for, or with pieces of no length, ends
// the lane before anything is written.
func TestWrongGo(t *testing.T) {
	one := transfer.Range{Count: 1}
	for name, c := range map[string]struct {
		spans    func(bytes uint32) []span
		contains string
	}{
		"too long": {func(uint32) []span {
			return []span{{addr: 1, len: 1 << 20,
				key: 1}}
		}, "GO for 1048576 bytes"},
		"nothing at the end": {func(n uint32) []span {
			return []span{{addr: 1, len: n, key: 1},
				{addr: 1, key: 1}}
		}, "empty span"},
		"nothing at the start": {func(n uint32) []span {
			return []span{{addr: 1, key: 1},
				{addr: 1, len: n, key: 1}}
		}, "empty span"},
		"nothing that is to skip": {func(n uint32) []span { return []span{{len: n}, {}} }, "empty span"},
	} {
		t.Run(name, func(t *testing.T) {
			_, factory := rig(t)
			p := transporttest.NewPair(t, factory)
			a, b := p.Dial()
			src := transporttest.NewMemory(t, shape)
			bind := transporttest.NewBind(t, p.A, p.B, src, transporttest.NewMemory(t, shape), 1, 1)
			there := b.(*lane)
			there.mu.Lock() // it answers nothing by itself
			res := p.A.Move(a, bind.Origin, one, 1)
			here := a.(*lane)
			here.mu.Lock()
			seq, n := here.src.out[0].seq, here.src.out[0].bytes
			here.mu.Unlock()
			there.send(&head{kind: kindGo, id: 0, seq: seq}, singles(c.spans(uint32(n))))
			until(t, "the lane is down", func() bool { return here.failure() != nil })
			there.mu.Unlock()
			r := <-res
			if r.Outcome == transfer.Landed || !strings.Contains(r.Err.Error(), c.contains) ||
				!errors.Is(r.Err, net.ErrClosed) {
				t.Errorf("%s: %v", r.Outcome, r.Err)
			}
			bind.End(t)
		})
	}
}

// TestLongAsk: a receiver resolves no more than the maximum of a slice.
func TestLongAsk(t *testing.T) {
	_, factory := rig(t)
	p := transporttest.NewPair(t, factory)
	a, _ := p.Dial()
	long := transporttest.Shape{Chunks: maxSliceChunks + 1, BlockBytes: 64 << 10, TailBytes: 64}
	src, dst := transporttest.NewMemory(t, long), transporttest.NewMemory(t, long)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	if r := p.A.MoveWait(a, bind.Origin, src.All(), 1); r.Outcome == transfer.Landed ||
		r.Reason != transfer.ReasonRange {
		t.Errorf("the mover takes it: %s %s", r.Outcome, r.Reason)
	}
	l := a.(*lane)
	l.send(&head{kind: kindAsk, id: 9, seq: 1, slot: 1, gen: 1, r: src.All(), attempt: 1,
		bytes: total64(t, bind, src.All())}, nil)
	until(t, "it is refused", func() bool { return p.B.RefusedFor(transfer.ReasonRange) > 0 })
	bind.End(t)
}

func total64(t *testing.T, b *transporttest.Bind, r transfer.Range) uint64 {
	t.Helper()
	n, err := b.Dest.Bytes(r)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
