package tcp

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

const patience = time.Minute // of a test that is about to fail

func open(t *testing.T, cfg Config) (*transporttest.Pair, transport.Lane) {
	t.Helper()
	p := transporttest.NewPair(t, factory(cfg))
	a, _ := p.Dial()
	return p, a
}

var someShape = transporttest.Shape{Chunks: 24, BlockBytes: 8 << 10, Shuffle: true, TailBytes: 4096}

// relay stands between two backends: every byte from A to B passes through edit, which may change
// it or end the connection by an error.
func relay(t *testing.T, to string, edit func(at int64, p []byte) error) (address string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	t.Cleanup(func() {
		_ = ln.Close()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			in, err := ln.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				_ = in.Close()
				continue
			}
			mu.Lock()
			conns = append(conns, in, out)
			mu.Unlock()
			shut := func() { _ = in.Close(); _ = out.Close() }
			wg.Go(func() {
				defer shut()
				buf := make([]byte, 32<<10)
				var at int64
				for {
					n, err := in.Read(buf)
					if n > 0 {
						if edit(at, buf[:n]) != nil {
							return
						}
						at += int64(n)
						if _, err := out.Write(buf[:n]); err != nil {
							return
						}
					}
					if err != nil {
						return
					}
				}
			})
			wg.Go(func() {
				defer shut()
				_, _ = io.Copy(in, out)
			})
		}
	})
	return ln.Addr().String()
}

// dialThrough opens a lane from A to B by way of a relay.
func dialThrough(t *testing.T, p *transporttest.Pair, edit func(at int64,
	p []byte) error) transport.Lane {
	t.Helper()
	rail := p.B.Rails[0]
	rail.Address = relay(t, rail.Address, edit)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	peer, _ := p.A.PeerKey(p.B.Boot)
	l, err := p.A.Backend.Dial(ctx, peer, p.A.Rails[0], rail)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// One byte damaged on the wire: with integrity the receiver refuses that slice, the lane lives, the
// retry lands. Without, the damage lands, as the level promises.
func TestDamageOnTheWire(t *testing.T) {
	for _, crc := range []bool{true, false} {
		p := transporttest.NewPair(t, factory(Config{CRC32C: crc}))
		var done atomic.Bool
		a := dialThrough(t, p, func(at int64, b []byte) error {
			if at+int64(len(b)) > afterOpening && !done.Swap(true) {
				b[max(0, afterOpening-at)] ^= 0x10
			}
			return nil
		})
		src, dst := transporttest.NewMemory(t, someShape), transporttest.NewMemory(t, someShape)
		src.Write(5)
		b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
		r := p.A.MoveWait(a, b.Origin, src.All(), 1)
		if !crc {
			if r.Outcome != transfer.Landed {
				t.Fatalf("integrity off: %s %s: %v", r.Outcome, r.Reason, r.Err)
			}
			wrong := 0
			for c := range src.Chunks() {
				if _, ok := dst.Holds(5, int(c)); !ok {
					wrong++
				}
			}
			if wrong != 1 {
				t.Errorf("integrity off: %d chunks are wrong, one byte was damaged", wrong)
			}
			b.End(t)
			continue
		}
		b.Dest.Seed.Store(5)
		if r.Outcome != transfer.Rejected || r.Reason != transfer.ReasonChecksum {
			t.Fatalf("crc32c: %s %s: %v", r.Outcome, r.Reason, r.Err)
		}
		if n := p.B.RefusedFor(transfer.ReasonChecksum); n != 1 {
			t.Errorf("%d frames refused", n)
		}
		if r := p.A.MoveWait(a, b.Origin, src.All(), 2); r.Outcome != transfer.Landed {
			t.Fatalf("retry: %s %s: %v", r.Outcome, r.Reason, r.Err)
		}
		b.End(t)
	}
}

// A lane cut or damaged at any byte: slices end once, nothing wrong lands, the next lane works.
func TestCutAnywhere(t *testing.T) {
	p := transporttest.NewPair(t, factory(Config{CRC32C: true}))
	src, dst := transporttest.NewMemory(t, someShape), transporttest.NewMemory(t, someShape)
	src.Write(5)
	for run := range 40 {
		cut := afterOpening/2 + rand.Int64N(4<<20)
		damage := run%2 == 0
		var done atomic.Bool
		a := dialThrough(t, p, func(at int64, b []byte) error {
			if at+int64(len(b)) <= cut || done.Swap(true) {
				return nil
			}
			if damage {
				b[max(0, cut-at)] ^= byte(1 + rand.Uint32N(255))
				return nil
			}
			return io.ErrUnexpectedEOF
		})
		b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, transfer.Gen(run+1))
		b.Dest.Seed.Store(5)
		for i := range uint32(8) {
			r := p.A.MoveWait(a, b.Origin, transfer.Range{First: 3 * i, Count: 3}, 1)
			switch {
			case r.Outcome == transfer.Landed, r.Reason == transfer.ReasonChecksum && damage:
			case r.Reason == transfer.ReasonLaneLost:
			default:
				t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
			}
		}
		_ = a.Close()
		b.End(t)
	}
}

// fullLane is a lane whose socket is full: the relay stopped taking after 1 MiB, and 64 MiB are to
// go, more than two sockets hold. It takes no more when the test is over, or end is called.
func fullLane(t *testing.T, p *transporttest.Pair) (a transport.Lane, b *transporttest.Bind,
	results func() []transport.Result, end func()) {
	t.Helper()
	stalled, hold := make(chan struct{}), make(chan struct{})
	stall := sync.OnceFunc(func() { close(stalled) })
	end = sync.OnceFunc(func() { close(hold) })
	a = dialThrough(t, p, func(at int64, b []byte) error {
		if at+int64(len(b)) > 1<<20 {
			stall()
			<-hold
			return io.ErrUnexpectedEOF
		}
		return nil
	})
	t.Cleanup(end) // before the relay's, which waits for it
	s := transporttest.Shape{Chunks: 64 * 16, BlockBytes: 64 << 10}
	src, dst := transporttest.NewMemory(t, s), transporttest.NewMemory(t, s)
	src.Write(5)
	b = transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	var got []<-chan transport.Result
	for i := range uint32(64) {
		got = append(got, p.A.Move(a, b.Origin, transfer.Range{First: 16 * i, Count: 16}, 1))
	}
	select {
	case <-stalled:
	case <-time.After(patience):
		t.Fatal("nothing came through")
	}
	return a, b, func() (all []transport.Result) {
		t.Helper()
		for _, c := range got {
			select {
			case r := <-c:
				all = append(all, r)
			case <-time.After(patience):
				t.Fatal("a slice never ended")
			}
		}
		return all
	}, end
}

// A lane that dies with a full socket: what had begun is in doubt, what had not is proved not to
// have landed.
func TestDeathOfAFullLane(t *testing.T) {
	p := transporttest.NewPair(t, factory(Config{MaxInFlight: 64}))
	a, b, results, _ := fullLane(t, p)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	count := map[transfer.Outcome]int{}
	for _, r := range results() {
		count[r.Outcome]++
		if r.Outcome != transfer.Landed && (r.Reason != transfer.ReasonLaneLost || !errors.Is(r.Err,
			net.ErrClosed)) {
			t.Errorf("%s %s: %v", r.Outcome, r.Reason, r.Err)
		}
	}
	if count[transfer.InDoubt] == 0 || count[transfer.NotLanded] == 0 ||
		count[transfer.Rejected] != 0 {
		t.Errorf("outcomes %v", count)
	}
	b.End(t)
}

// What a stalled rail leaves unsent in the kernel is bounded by the configuration and one segment,
// however much waits: bytes there are bytes that no better rail can take any more. Without the
// bound there is more.
func TestUnsentIsBounded(t *testing.T) {
	const bound, segment = 64 << 10, 64 << 10
	for _, c := range []struct {
		notSent int
		bounded bool
	}{{bound, true}, {64 << 20, false}} {
		p := transporttest.NewPair(t, factory(Config{MaxInFlight: 64, NotSent: c.notSent}))
		a, b, results, end := fullLane(t, p)
		peak, last, still := uint32(0), uint32(0), 0
		for deadline := time.Now().Add(patience); still < 10; <-time.After(10 * time.Millisecond) {
			n := unsent(t, a.(*lane).conn)
			if still++; n != last || n == 0 {
				still = 0
			}
			last, peak = n, max(peak, n)
			if time.Now().After(deadline) {
				t.Fatalf("%d bytes unsent, and they still change", last)
			}
		}
		if over := peak > bound+segment; over == c.bounded {
			t.Errorf("TCP_NOTSENT_LOWAT %d: %d bytes were unsent; want at most %d: %t", c.notSent, peak,
				bound+segment, c.bounded)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		results()
		end()
		b.End(t)
	}
}

// unsent is what the kernel has of a connection and has not sent yet.
func unsent(t *testing.T, c *net.TCPConn) uint32 {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	cerr := raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	if err := errors.Join(cerr, err); err != nil {
		t.Fatal(err)
	}
	return info.Notsent_bytes
}

func TestProcessMemory(t *testing.T) {
	for i, cfg := range []Config{{}, {CRC32C: true}, {}} {
		p, a := open(t, cfg)
		src, dst := transporttest.NewMemory(t, someShape), transporttest.NewMemory(t, someShape)
		src.Write(5)
		if i != 1 {
			src.ThroughProc(t)
		}
		if i != 2 {
			dst.ThroughProc(t)
		}
		b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
		b.Dest.Seed.Store(5)
		if r := p.A.MoveWait(a, b.Origin, src.All(), 1); r.Outcome != transfer.Landed {
			t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
		}
		b.End(t)
		dst.GapsIntact(t)
	}
}

// Memory that faults costs its slice, not the lane and not the process.
func TestFaultingMemory(t *testing.T) {
	p, a := open(t, Config{})
	s := transporttest.Shape{Chunks: 8, BlockBytes: 64 << 10}
	src, dst := transporttest.NewMemory(t, s), transporttest.NewMemory(t, s)
	src.Write(5)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	protect := func(m *transporttest.Memory, prot int) {
		t.Helper()
		mapped, _ := m.Region.Bytes()
		if err := unix.Mprotect(mapped[128<<10:256<<10], prot); err != nil {
			t.Fatal(err)
		}
	}
	protect(src, unix.PROT_NONE)
	if r := p.A.MoveWait(a, b.Origin, src.All(), 1); r.Outcome != transfer.NotLanded ||
		r.Reason != transfer.ReasonMemory {
		t.Errorf("source faults: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	protect(src, unix.PROT_READ|unix.PROT_WRITE)
	protect(dst, unix.PROT_READ)
	if r := p.A.MoveWait(a, b.Origin, src.All(), 2); r.Outcome != transfer.Rejected ||
		r.Reason != transfer.ReasonMemory {
		t.Errorf("destination faults: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	protect(dst, unix.PROT_READ|unix.PROT_WRITE)
	b.Dest.Seed.Store(5)
	if r := p.A.MoveWait(a, b.Origin, src.All(), 3); r.Outcome != transfer.Landed {
		t.Errorf("the lane did not survive: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	b.End(t)
}

// Slices allocate nothing once the lane runs.
func TestMeasureSliceAllocations(t *testing.T) {
	testutil.Measures(t)
	for _, crc := range []bool{false, true} {
		m := transporttest.NewMover(t, factory(Config{CRC32C: crc}), transporttest.Shape{Chunks: 256,
			BlockBytes: 16 << 10, Shuffle: true})
		m.Move(64, 8, 4)
		if n := testing.AllocsPerRun(20, func() { m.Move(64, 8, 4) }); n > 1 {
			t.Errorf("crc %v: %v allocations for 64 slices", crc, n)
		}
	}
}

// Lanes at full speed let the garbage collector in.
func TestMeasureCollectorDelayOfLanes(t *testing.T) {
	testutil.Measures(t)
	m := transporttest.NewMover(t, factory(Config{CRC32C: true}), transporttest.Shape{Chunks: 512,
		BlockBytes: 16 << 10, Shuffle: true})
	m.LetsCollectorIn(8)
}
