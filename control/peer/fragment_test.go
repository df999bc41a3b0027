package peer

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/delivery"
	"github.com/kvspray/kvspray/control/peer/frame"
	"github.com/kvspray/kvspray/transfer"
)

// longGrant is a grant of many ranks, each with the longest name and share that an executor
// accepts, and a token for each transport.
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

// fragmentBytes are in each fragment of these tests: few enough for a frame.
const fragmentBytes = frame.FragmentBytes - 64

func fragment(piece []byte, last bool) *peerv1.ControlFrame {
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Fragment{
		Fragment: &peerv1.Fragment{Piece: piece, Last: last}}}
}

// fragments divides a message.
func fragments(t *testing.T, f *peerv1.ControlFrame) (all []*peerv1.ControlFrame) {
	t.Helper()
	b, err := proto.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	for piece := range slices.Chunk(b, fragmentBytes) {
		all = append(all, fragment(piece, false))
	}
	all[len(all)-1].GetFragment().Last = true
	return all
}

// limit replaces the limits of what waits in all sessions, before there is any.
func (n *node) limit(limit int64, stuckAfter time.Duration) *delivery.Budget {
	n.sessions.budget = delivery.NewBudget(limit, n.sessions.shedSoon)
	n.sessions.stuckAfter = stuckAfter
	return n.sessions.budget
}

// raw writes numbered frames on a lane to a peer, if there is one.
func (n *node) raw(t *testing.T, peer *node, frames ...*peerv1.ControlFrame) {
	t.Helper()
	s := n.sessionOf(peer)
	if s == nil {
		return
	}
	lanes := s.channel.Lanes()
	for _, f := range frames {
		b, err := frame.Append(nil, f)
		if err != nil {
			t.Fatal(err)
		}
		if len(lanes) > 0 {
			lanes[0].Write(b)
		}
	}
}

// The longest grant of an executor arrives unchanged and in order among short frames, whatever
// happens to lanes.
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
	if n := proto.Size(long); n < 16*frame.Max || n > MaxMessage/2 {
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
		if lanes := a.sessionOf(b).channel.Lanes(); len(lanes) > 0 {
			lanes[0].Fail(errors.New("cut"))
		}
	}
	poll(t, "all frames",
		func() bool { mu.Lock(); defer mu.Unlock(); return len(got) == len(want) })
	for i := range want {
		if !proto.Equal(&peerv1.ControlFrame{Body: want[i].Body},
			&peerv1.ControlFrame{Body: got[i].Body}) {
			t.Fatalf("frame %d arrived as %T, or with another content", i, got[i].Body)
		}
	}
}

// Send refuses a frame that does not fit at once, and leaves no part of it in the queue.
func TestFramesThatDoNotFit(t *testing.T) {
	hold := make(chan struct{})
	a, b := start(t, nil), start(t, nil)
	b.on = func(transfer.Boot, *peerv1.ControlFrame) { <-hold }
	join(t, a, b)
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
	_, bytes := delivery.Limits(longGrant(64))
	unacked, each := a.sessionOf(b).channel.State().Unacked, proto.Size(longGrant(64))
	frames := (each-1)/frame.FragmentBytes + 1
	if !errors.Is(err, ErrQueueFull) || sent == 0 || unacked*(each/frames) > bytes ||
		unacked > sent*frames {
		t.Errorf("%v after %d messages of %d bytes, %d frames wait", err, sent, each, unacked)
	}
	if err := a.Send(b.opt.Boot, commit(1)); err != nil {
		t.Errorf("a frame that ends something has reserved room: %v", err)
	}
	close(hold)
	poll(t, "the queue moves again", func() bool {
		return a.Send(b.opt.Boot, longGrant(64)) == nil
	})
}

// Members that leave a long frame without its end in many sessions fill a bound of the whole mesh,
// and their sessions end. The frames of others arrive: short ones at once, long ones after that.
func TestFragmentsWithoutEnd(t *testing.T) {
	const limit = MaxMessage + MaxMessage/2
	victim := start(t, slow)
	budget := victim.limit(limit, 5*time.Second) // longer than a busy machine pauses a sender
	var mu sync.Mutex
	var got []*peerv1.ControlFrame
	victim.on = func(_ transfer.Boot, f *peerv1.ControlFrame) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, f)
	}
	worst := int64(0)
	watch := func(ok func() bool) func() bool {
		return func() bool { worst = max(worst, budget.Waiting()); return ok() }
	}
	for i := range 3 {
		evil := start(t, nil)
		join(t, evil, victim)
		for range MaxMessage/fragmentBytes - 1 {
			if err := evil.Send(victim.opt.Boot, fragment(make([]byte, fragmentBytes), false)); err != nil {
				t.Error(err)
			}
		}
		if i == 0 {
			poll(t, "most of one waits", watch(func() bool { return budget.Waiting() > MaxMessage/2 }))
		}
	}
	poll(t, "no more may wait", watch(func() bool { return budget.Waiting()+frame.Max > limit }))
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
		t.Error("the long frame arrived with another content")
	}
	victim.until("an incomplete session is down", func() bool { return len(victim.downs) > 0 })
	if worst > limit {
		t.Errorf("%d bytes waited, at most %d", worst, limit)
	}
	for _, s := range victim.sessions.list() {
		victim.sessions.end(s, errEvicted)
	}
	if n := budget.Waiting(); n != 0 {
		t.Errorf("%d bytes count as waiting, and there is no session", n)
	}
}

// A peer that waits for room keeps its session, also where its frame began before those of the peer
// that holds the room, and where that peer completes a short frame now and then.
func TestWaitingForRoomEndsNoSession(t *testing.T) {
	victim := start(t, slow)
	budget := victim.limit(MaxMessage, 300*time.Millisecond)
	got := make(chan *peerv1.ControlFrame, 64)
	victim.on = func(b transfer.Boot, f *peerv1.ControlFrame) {
		if f.GetGrant() != nil {
			got <- f
		}
	}
	honest, evil := start(t, nil), start(t, nil)
	join(t, honest, victim)
	join(t, evil, victim)
	send := func(all ...*peerv1.ControlFrame) {
		t.Helper()
		for _, f := range all {
			if err := honest.Send(victim.opt.Boot, f); err != nil {
				t.Error(err)
			}
		}
	}
	long := longGrant(64)
	pieces := fragments(t, long)
	if len(pieces) < 5 {
		t.Fatalf("%d pieces", len(pieces))
	}
	send(pieces[:3]...)
	poll(t, "a part of the honest frame", func() bool { return budget.Waiting() > 2*fragmentBytes })
	// The other peer leaves a gap, fills a frame of it every 50 ms, and resends what has no room.
	const gap = 1000
	held := make([]*peerv1.ControlFrame, MaxMessage/fragmentBytes-3)
	for i := range held {
		held[i] = fragment(make([]byte, fragmentBytes), false)
		held[i].Seq = uint64(gap + 1 + i)
	}
	evil.raw(t, victim, held...)
	poll(t, "no more may wait", func() bool { return budget.Waiting()+2*frame.Max > MaxMessage })
	send(pieces[3:]...)
	deadline := time.After(patience)
	for seq := uint64(1); ; seq++ {
		select {
		case f := <-got:
			if !proto.Equal(&peerv1.ControlFrame{Body: f.Body}, long) {
				t.Error("the frame arrived with another content")
			}
			victim.until("the other one is down", func() bool { return len(victim.downs) > 0 })
			victim.mu.Lock()
			defer victim.mu.Unlock()
			if slices.Contains(victim.downs, fmt.Sprint(honest.opt.Boot, false)) {
				t.Error("the session of the peer that waits for room was ended")
			}
			return
		case <-deadline:
			t.Fatal("the honest frame has not arrived")
		case <-time.After(50 * time.Millisecond):
			evil.raw(t, victim, &peerv1.ControlFrame{Body: commit(seq).Body, Seq: seq})
			evil.raw(t, victim, held...)
		}
	}
}
