package tcp

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// onPath carries a lane, and gives the records of the dialing end to attack, which returns what
// becomes of the n-th; nil ends the lane.
func onPath(t *testing.T, to string, attack func(n int, rec []byte) []byte) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	done := make(chan struct{})
	t.Cleanup(func() { close(done); _ = ln.Close(); all.Wait() })
	all.Go(func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer func() { _ = c.Close() }()
		up, err := net.Dial("tcp", to)
		if err != nil {
			return
		}
		defer func() { _ = up.Close() }()
		all.Go(func() { _, _ = io.Copy(c, up); _ = c.Close() })
		all.Go(func() { <-done; _, _ = c.Close(), up.Close() })
		// The opening comes in two parts, between which the other end answers.
		head := make([]byte, 8)
		if _, err := io.ReadFull(c, head); err != nil {
			return
		}
		const hello, finish = 4 + 2 + 2 + 4 + 4 + wire.MaxPurpose + 16 + 16 + 32, 4 + 2 + 2 + 32
		for i, n := range []int{hello - len(head) + int(binary.LittleEndian.Uint16(head[4:])), finish} {
			part := make([]byte, n)
			if _, err := io.ReadFull(c, part); err != nil {
				return
			}
			if i == 0 {
				part = append(head, part...)
			}
			if _, err := up.Write(part); err != nil {
				return
			}
		}
		for n := 0; ; n++ {
			rec := make([]byte, 16)
			if _, err := io.ReadFull(c, rec); err != nil {
				return
			}
			body := make([]byte, int(binary.LittleEndian.Uint32(rec[4:]))+wire.RecordOverhead-len(rec))
			if _, err := io.ReadFull(c, body); err != nil {
				return
			}
			out := attack(n, append(rec, body...))
			if out == nil {
				return
			}
			if _, err := up.Write(out); err != nil {
				return
			}
		}
	})
	return ln.Addr().String()
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(patience)
	for tick := time.NewTicker(time.Millisecond); !ok(); <-tick.C {
		if time.Now().After(end) {
			tick.Stop()
			t.Fatalf("not in time: %s", what)
		}
	}
}

// content is a copy of all chunks, in order.
func content(t *testing.T, m *transporttest.Memory) (all []byte) {
	blocks, err := m.Resolve(nil, m.All())
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		p, ok := b.Bytes()
		if !ok {
			t.Fatal("memory of no host")
		}
		all = append(all, p...)
	}
	return all
}

// An attacker on the path of a sealed lane that touches a record ends the lane: the reason is
// counted by its name, and the slice does not land. In the memory that was granted there is what
// was there before, zeros, or, up to the record that was touched, what was sent; nothing else.
func TestSealedOnPath(t *testing.T) {
	var kept []byte
	for name, c := range map[string]struct {
		attack func(n int, rec []byte) []byte
		why    transfer.Reason
		whole  int // records that come as they were sent, before one that does not
	}{
		"a flipped bit of the payload": {func(n int, rec []byte) []byte {
			if n == 1 {
				rec[len(rec)/2] ^= 1
			}
			return rec
		}, transfer.ReasonForged, 1},
		"a flipped bit of a header": {func(n int, rec []byte) []byte {
			if n == 0 {
				rec[20] ^= 1
			}
			return rec
		}, transfer.ReasonForged, 0},
		"a replayed record": {func(n int, rec []byte) []byte {
			if n == 1 {
				return append(bytes.Clone(rec), rec...)
			}
			return rec
		}, transfer.ReasonReplayed, 2},
		"records out of order": {func(n int, rec []byte) []byte {
			if n == 1 {
				kept = bytes.Clone(rec)
				return []byte{}
			}
			if n == 2 {
				return append(rec, kept...)
			}
			return rec
		}, transfer.ReasonReordered, 1},
		"a nonce that is not its own": {func(n int, rec []byte) []byte {
			if n == 1 {
				binary.LittleEndian.PutUint64(rec[8:], 7)
			}
			return rec
		}, transfer.ReasonReordered, 1},
		"a record cut": {func(n int, rec []byte) []byte {
			switch n {
			case 1:
				return rec[:len(rec)-1]
			case 2:
				return nil
			}
			return rec
		}, transfer.ReasonTruncated, 1},
		"a frame cut between records": {func(n int, rec []byte) []byte {
			if n == 2 {
				return nil
			}
			return rec
		}, transfer.ReasonTruncated, 2},
	} {
		t.Run(name, func(t *testing.T) {
			p := transporttest.NewPair(t, factory(Config{AEAD: true}))
			peer, _ := p.A.PeerKey(p.B.Boot)
			via := p.B.Rails[0]
			via.Address = onPath(t, via.Address, c.attack)
			l, err := p.A.Backend.Dial(t.Context(), peer, p.A.Rails[0], via)
			if err != nil {
				t.Fatal(err)
			}
			shape := transporttest.Shape{Chunks: 4, BlockBytes: 64 << 10}
			src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
			src.Write(1)
			dst.Write(2)
			sent, before := content(t, src), content(t, dst)
			bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
			defer bind.End(t)
			if r := p.A.MoveWait(l, bind.Origin, src.All(), 1); r.Outcome == transfer.Landed {
				t.Errorf("it landed")
			}
			await(t, c.why.String()+" is counted", func() bool { return p.B.RefusedFor(c.why) == 1 })
			if bind.Dest.Full() {
				t.Error("the grant is full")
			}
			after := content(t, dst)
			// At most: the header of the frame takes some of it.
			upTo := min(c.whole*wire.RecordBytes, len(after))
			for i, b := range after {
				if b != before[i] && b != 0 && (b != sent[i] || i >= upTo) {
					t.Fatalf("byte %d of %d is %#x: it was %#x, %#x was sent, and %d records came whole",
						i, len(after), b, before[i], sent[i], c.whole)
				}
			}
		})
	}
}

// What a sealed lane carries is not to be read on the path, and what another one carried is not
// taken by it.
func TestSealedIsSecret(t *testing.T) {
	p := transporttest.NewPair(t, factory(Config{AEAD: true}))
	peer, _ := p.A.PeerKey(p.B.Boot)
	var mu sync.Mutex
	var seen [][]byte
	look := func(_ int, rec []byte) []byte {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, bytes.Clone(rec))
		return rec
	}
	via := p.B.Rails[0]
	via.Address = onPath(t, p.B.Rails[0].Address, look)
	l, err := p.A.Backend.Dial(t.Context(), peer, p.A.Rails[0], via)
	if err != nil {
		t.Fatal(err)
	}
	shape := transporttest.Shape{Chunks: 2, BlockBytes: 64 << 10}
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(1)
	bind := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	if r := p.A.MoveWait(l, bind.Origin, src.All(), 1); r.Outcome != transfer.Landed {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	bind.End(t)
	blocks, err := src.Resolve(nil, transfer.Range{First: 0, Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	plain, _ := blocks[0].Bytes()
	mu.Lock()
	first := seen
	mu.Unlock()
	for i, rec := range first {
		if bytes.Contains(rec, plain[:32]) || bytes.Contains(rec, []byte("KVSF")) {
			t.Errorf("record %d shows what it carries", i)
		}
	}
	via.Address = onPath(t, p.B.Rails[0].Address, func(n int, rec []byte) []byte {
		if n < len(first) {
			return first[n]
		}
		return rec
	})
	if l, err = p.A.Backend.Dial(t.Context(), peer, p.A.Rails[0], via); err != nil {
		t.Fatal(err)
	}
	bind = transporttest.NewBind(t, p.A, p.B, src, dst, 2, 2)
	defer bind.End(t)
	if r := p.A.MoveWait(l, bind.Origin, src.All(), 1); r.Outcome == transfer.Landed {
		t.Error("a lane took the records of another one")
	}
	await(t, "it is counted", func() bool { return p.B.RefusedFor(transfer.ReasonForged) == 1 })
}

// A lane is sealed where either end wants it.
func TestSealedByEitherEnd(t *testing.T) {
	for _, c := range []struct {
		ours, theirs attachment
		crc, aead    bool
	}{
		{attachment{}, attachment{}, false, false},
		{attachment{aead: true}, attachment{}, false, true},
		{attachment{}, attachment{aead: true, crc: true}, false, true},
		{attachment{crc: true}, attachment{}, true, false},
	} {
		back, err := parseAttachment(c.theirs.encode())
		if err != nil || back != c.theirs {
			t.Fatalf("%+v came back as %+v: %v", c.theirs, back, err)
		}
		if crc, aead := agree(c.ours, back); crc != c.crc || aead != c.aead {
			t.Errorf("%+v and %+v: crc %t, aead %t", c.ours, c.theirs, crc, aead)
		}
	}
}
