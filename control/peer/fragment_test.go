// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/transfer"
)

// longGrant is a grant of so many ranks, each with the longest name and share that an executor
// takes, and a token for each transport.
func longGrant(ranks int) *peerv1.ControlFrame {
	g := &peerv1.Grant{Xfer: make([]byte, 16), Hash: make([]byte, 32), Fingerprint: make([]byte,
		32), Geometry: make([]byte, 32), Team: make([]byte, 16)}
	share := make([]uint32, 2048)
	for i := range share {
		share[i] = []uint32{1, 1<<15 - 2}[i%2]
	}
	for i := range ranks {
		g.Parts = append(g.Parts, &peerv1.Part{Rank: fmt.Sprintf("%064d", i),
			Geometry: bytes.Repeat([]byte{1}, 32), Digest: bytes.Repeat([]byte{2}, 32),
			Slot: uint32(i), Gen: 1<<32 - 1, Chunks: 1 << 22, Bytes: 1 << 38, Share: share,
			TokensByTransport: map[string][]byte{"gdr": make([]byte, 1024), "tcp": make([]byte,
				64)}})
	}
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Grant{Grant: g}}
}

// The longest grant that an executor makes comes across as it was said, in its place among short
// frames, whatever happens to lanes.
func TestLongFrames(t *testing.T) {
	const ranks = 256 // exec.MaxParts
	two := func(o *Options) { o.Control = []string{"127.0.0.1:0"} }
	a, b := start(t, two), start(t, two)
	var mu sync.Mutex
	var got []*peerv1.ControlFrame
	b.on = func(_ transfer.Boot, f *peerv1.ControlFrame) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, f)
	}
	join(t, a, b)
	long := longGrant(ranks)
	if n := proto.Size(long); n < 16*MaxFrame || n > MaxMessage/2 {
		t.Errorf("the longest grant has %d bytes: want it well below MaxMessage = %d, "+
			"and many frames long", n, MaxMessage)
	}
	var want []*peerv1.ControlFrame
	for i := range 6 {
		for _, f := range []*peerv1.ControlFrame{commit(uint64(i)), long, longGrant(8 + i)} {
			poll(t, "a place in the queue", func() bool {
				err := a.Send(b.opt.Boot, f)
				if err != nil && !errors.Is(err, ErrQueueFull) {
					t.Fatal(err)
				}
				return err == nil
			})
			want = append(want, f)
		}
		s := a.session(b.opt.Boot)
		s.mu.Lock()
		if len(s.lanes) > 0 {
			s.lanes[0].fail(errors.New("cut"))
		}
		s.mu.Unlock()
	}
	poll(t, "all frames",
		func() bool { mu.Lock(); defer mu.Unlock(); return len(got) == len(want) })
	for i := range want {
		if !proto.Equal(&peerv1.ControlFrame{Body: want[i].Body},
			&peerv1.ControlFrame{Body: got[i].Body}) {
			t.Fatalf("frame %d came as %T, or with another content", i, got[i].Body)
		}
	}
}

// Frames that cannot go are errors at once, and leave nothing of themselves in the queue.
func TestFramesThatDoNotFit(t *testing.T) {
	hold := make(chan struct{})
	a, b, older := start(t, nil), start(t, nil), start(t,
		func(o *Options) { o.Features = []string{} })
	b.on = func(transfer.Boot, *peerv1.ControlFrame) { <-hold }
	join(t, a, b)
	join(t, a, older)
	if err := a.Send(older.opt.Boot, longGrant(64)); !errors.Is(err, ErrTooBig) ||
		!strings.Contains(err.Error(), "upgrade the sidecar there") {
		t.Errorf("to a release without fragments: %v", err)
	}
	if err := a.Send(b.opt.Boot, longGrant(1024)); !errors.Is(err, ErrTooBig) {
		t.Errorf("past MaxMessage: %v", err)
	}
	sent := 0
	var err error
	for err == nil {
		if err = a.Send(b.opt.Boot, longGrant(64)); err == nil {
			sent++
		}
	}
	s := a.session(b.opt.Boot)
	s.mu.Lock()
	waiting, of := s.outBytes, sent*proto.Size(longGrant(64))
	s.mu.Unlock()
	if !errors.Is(err, ErrQueueFull) || sent == 0 || waiting > maxUnackedBytes-reservedBytes ||
		waiting > of+of/100 {
		t.Errorf("%v after %d frames of %d bytes, %d bytes wait", err, sent, of, waiting)
	}
	if err := a.Send(b.opt.Boot, commit(1)); err != nil {
		t.Errorf("what ends something has room of its own: %v", err)
	}
	close(hold)
	poll(t, "the queue moves again", func() bool {
		return a.Send(b.opt.Boot,
			longGrant(64)) == nil
	})
}

// FuzzJoin: whatever pieces come, what is kept is bounded, and what is whole is what was split.
func FuzzJoin(f *testing.F) {
	f.Add([]byte{1, 2, 3}, uint16(2), true)
	whole, err := proto.Marshal(commit(7))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole, uint16(3), true)
	f.Add(whole, uint16(0), false)
	f.Fuzz(func(t *testing.T, b []byte, size uint16, last bool) {
		var j joiner
		var out *peerv1.ControlFrame
		step := max(int(size), 1)
		for at := 0; at < len(b); at += step {
			end := min(at+step, len(b))
			got, err := j.add(fragment(b[at:end], last && end == len(b)))
			if len(j.b) > MaxMessage || err != nil && (got != nil || !errors.Is(err, errFragment)) {
				t.Fatalf("%d bytes are kept, %v, %v", len(j.b), got, err)
			}
			if got != nil {
				out = got
			}
		}
		var direct peerv1.ControlFrame
		if err := proto.Unmarshal(b, &direct); err == nil && last && len(b) > 0 &&
			direct.GetFragment() == nil && !proto.Equal(&direct, out) {
			t.Fatalf("%v became %v", &direct, out)
		}
		if f, err := j.add(commit(1)); (err == nil) != (f != nil) || len(j.b) != 0 {
			t.Fatalf("after the pieces: %v, %v, %d bytes", f, err, len(j.b))
		}
	})
}

// Members that leave a long frame without its end in many sessions fill a bound of the whole mesh,
// and are ended. What others send comes across: short frames at once, long ones after that.
func TestFragmentsWithoutEnd(t *testing.T) {
	const most = MaxMessage + MaxMessage/2
	victim := start(t, slow)
	victim.mostWaiting, victim.stuckAfter = most, 500*time.Millisecond
	var mu sync.Mutex
	var got []*peerv1.ControlFrame
	victim.on = func(_ transfer.Boot, f *peerv1.ControlFrame) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, f)
	}
	worst := int64(0)
	watch := func(ok func() bool) func() bool {
		return func() bool { worst = max(worst, victim.waiting.Load()); return ok() }
	}
	for i := range 3 {
		evil := start(t, nil)
		join(t, evil, victim)
		s := evil.session(victim.opt.Boot)
		s.mu.Lock()
		for range MaxMessage/pieceBytes - 1 {
			if err := s.sendLocked(fragment(make([]byte, pieceBytes), false)); err != nil {
				t.Error(err)
			}
		}
		s.mu.Unlock()
		if i == 0 {
			poll(t, "most of one waits",
				watch(func() bool { return victim.waiting.Load() > MaxMessage/2 }))
		}
	}
	poll(t, "no more may wait", watch(func() bool { return !victim.mayWait(MaxFrame) }))
	honest := start(t, nil)
	join(t, honest, victim)
	long := longGrant(64)
	for _, f := range []*peerv1.ControlFrame{commit(1), long, commit(2)} {
		if err := honest.Send(victim.opt.Boot, f); err != nil {
			t.Fatal(err)
		}
	}
	poll(t, "the honest frames",
		watch(func() bool { mu.Lock(); defer mu.Unlock(); return len(got) == 3 }))
	if !proto.Equal(&peerv1.ControlFrame{Body: got[1].Body}, long) {
		t.Error("the long frame came otherwise")
	}
	victim.until("those without an end are down", func() bool { return len(victim.downs) > 0 })
	if worst > most {
		t.Errorf("%d bytes waited, at most %d", worst, most)
	}
	victim.Mesh.mu.Lock()
	left := slices.Collect(maps.Values(victim.sessions))
	victim.Mesh.mu.Unlock()
	for _, s := range left {
		victim.end(s, errNoRoom)
	}
	if n := victim.waiting.Load(); n != 0 {
		t.Errorf("%d bytes count as waiting, and there is no session", n)
	}
}

// A peer that waits for room keeps its session, also where its frame began before those of the peer
// that holds the room, and where that peer completes a short frame now and then.
func TestWaitingForRoomEndsNobody(t *testing.T) {
	victim := start(t, slow)
	victim.mostWaiting, victim.stuckAfter = MaxMessage, 300*time.Millisecond
	got := make(chan *peerv1.ControlFrame, 64)
	victim.on = func(b transfer.Boot, f *peerv1.ControlFrame) {
		if f.GetGrant() != nil {
			got <- f
		}
	}
	send := func(s *session, all ...*peerv1.ControlFrame) {
		t.Helper()
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, f := range all {
			if err := s.sendLocked(f); err != nil {
				t.Error(err)
			}
		}
	}
	honest, evil := start(t, nil), start(t, nil)
	join(t, honest, victim)
	join(t, evil, victim)
	to := honest.session(victim.opt.Boot)
	long := longGrant(64)
	pieces, err := to.split(long)
	if err != nil || len(pieces) < 5 {
		t.Fatalf("%d pieces, %v", len(pieces), err)
	}
	send(to, pieces[:3]...)
	poll(t, "a part of the honest frame", func() bool {
		return victim.waiting.Load() > 2*pieceBytes
	})
	// The other peer leaves a gap, and fills a piece of it every 50 ms.
	bad := evil.session(victim.opt.Boot)
	bad.mu.Lock()
	first := bad.next + 1
	bad.next += 1000
	bad.mu.Unlock()
	for range MaxMessage/pieceBytes - 3 {
		send(bad, fragment(make([]byte, pieceBytes), false))
	}
	poll(t, "no more may wait", func() bool { return !victim.mayWait(2 * MaxFrame) })
	send(to, pieces[3:]...)
	deadline := time.After(10 * time.Second)
	for seq := first; ; seq++ {
		select {
		case f := <-got:
			if !proto.Equal(&peerv1.ControlFrame{Body: f.Body}, long) {
				t.Error("the frame came otherwise")
			}
			victim.until("the other one is down", func() bool { return len(victim.downs) > 0 })
			victim.mu.Lock()
			defer victim.mu.Unlock()
			if slices.Contains(victim.downs, fmt.Sprint(honest.opt.Boot, false)) {
				t.Error("the session of the peer that waits for room was ended")
			}
			return
		case <-deadline:
			t.Fatal("the honest frame has not come")
		case <-time.After(50 * time.Millisecond):
			bad.mu.Lock()
			f := &peerv1.ControlFrame{Body: commit(seq).Body, Seq: seq, Ack: bad.handled}
			b, err := AppendFrame(nil, f)
			if l := bad.bestLocked(); err == nil && l != nil {
				l.write(b)
			}
			bad.mu.Unlock()
		}
	}
}
