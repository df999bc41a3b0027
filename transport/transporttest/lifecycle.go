package transporttest

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

func testKill(t *testing.T, f Factory) {
	p := NewPair(t, f)
	s := Shape{Chunks: 32, BlockBytes: 16 << 10, Shuffle: true}
	src, dst := p.A.Memory(s), p.B.Memory(s)
	src.Write(5)
	for run := range 3 * attackRuns(t) {
		a, b := p.Dial()
		bind := NewBind(t, p.A, p.B, src, dst, 1, transfer.Gen(run+1))
		bind.Dest.Expect(5)
		var wg sync.WaitGroup
		victim := a
		if run%2 == 0 {
			victim = b
		}
		after := rand.Int64N(12)
		var landed atomic.Int64
		for range 3 {
			wg.Go(func() {
				for {
					r := transfer.Range{First: rand.Uint32N(24), Count: 1 + rand.Uint32N(8)}
					res := p.A.MoveWait(a, bind.Origin, r, 1)
					switch {
					case res.Outcome == transfer.Landed || res.Reason == transfer.ReasonSuperseded:
						landed.Add(1)
					case res.Reason == transfer.ReasonLaneLost && res.Outcome != transfer.Rejected:
						if !errors.Is(res.Err, net.ErrClosed) {
							t.Errorf("lane lost with %v, want net.ErrClosed", res.Err)
						}
						return
					default:
						t.Errorf("%s %s: %v", res.Outcome, res.Reason, res.Err)
						return
					}
				}
			})
		}
		until(t, "some slices landed", func() bool { return landed.Load() >= after })
		if err := victim.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
		if l := p.A.down("LaneDown"); l.ID() != a.ID() {
			t.Errorf("lane %d is down, want %d", l.ID(), a.ID())
		}
		if l := p.B.down("LaneDown of the other end"); l.ID() != b.ID() {
			t.Errorf("lane %d is down, want %d", l.ID(), b.ID())
		}
		if n := p.A.open(); n != 0 {
			t.Fatalf("%d slices never ended", n)
		}
		if err := a.Close(); err != nil {
			t.Errorf("second close: %v", err)
		}
		bind.End(t)
	}
}

func testClose(t *testing.T, f Factory) {
	p := NewPair(t, f)
	a1, _ := p.Dial()
	a2, _ := p.Dial()
	s := Shape{Chunks: 32, BlockBytes: 16 << 10, Shuffle: true}
	src, dst := p.A.Memory(s), p.B.Memory(s)
	src.Write(5)
	b := NewBind(t, p.A, p.B, src, dst, 1, 1)
	push := push(p.A, []transport.Lane{a1, a2}, b.Origin, src.Chunks(), 1)
	until(t, "some slices ended", func() bool { return push.ended.Load() > 3 })
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if err := p.A.Backend.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		})
	}
	wg.Wait()
	push.stop()
	if n := p.A.open(); n != 0 {
		t.Fatalf("%d slices never ended", n)
	}
	for range 2 {
		p.A.down("LaneDown")
		p.B.down("LaneDown of the other end")
	}
	if err := a1.Move([]transport.Slice{{Origin: b.Origin, Range: src.All()}}); !errors.Is(err,
		net.ErrClosed) {
		t.Errorf("move after close: %v", err)
	}
	peer, _ := p.A.PeerKey(p.B.Boot)
	if _, err := p.A.Backend.Dial(context.Background(), peer, p.A.Rails[0], p.B.Rails[0]); !errors.Is(
		err, net.ErrClosed) {
		t.Errorf("dial after close: %v", err)
	}
	b.End(t)
	if err := p.A.Backend.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

// refusedDial dials as `peer` and expects an error, no lane at either end, and a working other end.
func refusedDial(t *testing.T, p *Pair, peer transport.Peer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	l, err := p.A.Backend.Dial(ctx, peer, p.A.Rails[0], p.B.Rails[0])
	if err == nil {
		_ = l.Close()
		t.Fatal("the lane opened")
	}
	for _, e := range []*End{p.A, p.B} {
		if l := e.anyUp(); l != nil {
			t.Fatalf("lane %d is up at the end of boot %s", l.ID(), e.Boot)
		}
	}
	p.Dial()
}

func testUnknownPeer(t *testing.T, f Factory) {
	p := NewPair(t, f)
	// an unknown process
	refusedDial(t, p, transport.Peer{Boot: p.B.Boot, Self: randomBoot(), Key: p.Key})
	// an earlier boot of the peer
	refusedDial(t, p, transport.Peer{Boot: randomBoot(), Self: p.A.Boot, Key: p.Key})
}

func testWrongKey(t *testing.T, f Factory) {
	p := NewPair(t, f)
	bad := p.Key
	bad[31] ^= 1
	refusedDial(t, p, transport.Peer{Boot: p.B.Boot, Self: p.A.Boot, Key: bad})
}

func testDialContext(t *testing.T, f Factory) {
	p := NewPair(t, f)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	peer, _ := p.A.PeerKey(p.B.Boot)
	if l, err := p.A.Backend.Dial(ctx, peer, p.A.Rails[0], p.B.Rails[0]); err == nil {
		_ = l.Close()
		t.Error("dialed under a cancelled context")
	}
}
