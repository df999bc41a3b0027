package tcp

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/wire"
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

// relay stands between two backends: every byte from A to B passes through edit, which may change it or end the
// connection by an error.
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
func dialThrough(t *testing.T, p *transporttest.Pair, edit func(at int64, p []byte) error) transport.Lane {
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

// afterOpening is more than the opening of a lane says, and less than the header and first block of a frame.
const afterOpening = 1200

// One byte damaged on the wire: with integrity the receiver refuses that slice, the lane lives, the retry lands. Without,
// the damage lands, which is what the level says.
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
		b.Sink.Seed.Store(5)
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
		b.Sink.Seed.Store(5)
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

// fullLane is a lane whose socket is full: the relay stopped taking after 1 MiB, and 64 MiB are to go, more than two sockets hold. It takes
// no more when the test is over, or end is called.
func fullLane(t *testing.T, p *transporttest.Pair) (a transport.Lane, b *transporttest.Bind, results func() []transport.Result, end func()) {
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

// A lane that dies with a full socket: what had begun is in doubt, what had not is proved not to have landed.
func TestDeathOfAFullLane(t *testing.T) {
	p := transporttest.NewPair(t, factory(Config{MaxInFlight: 64}))
	a, b, results, _ := fullLane(t, p)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	count := map[transfer.Outcome]int{}
	for _, r := range results() {
		count[r.Outcome]++
		if r.Outcome != transfer.Landed && (r.Reason != transfer.ReasonLaneLost || !errors.Is(r.Err, net.ErrClosed)) {
			t.Errorf("%s %s: %v", r.Outcome, r.Reason, r.Err)
		}
	}
	if count[transfer.InDoubt] == 0 || count[transfer.NotLanded] == 0 || count[transfer.Rejected] != 0 {
		t.Errorf("outcomes %v", count)
	}
	b.End(t)
}

// What a stalled rail leaves unsent in the kernel is bounded by the configuration and one segment, however much waits: bytes there are
// bytes that no better rail can take any more. Without the bound there is more.
func TestUnsentIsBounded(t *testing.T) {
	const bound, segment = 64 << 10, 64 << 10
	for _, c := range []struct {
		notSent int
		bounded bool
	}{{bound, true}, {64 << 20, false}} {
		p := transporttest.NewPair(t, factory(Config{MaxInFlight: 64, NotSent: c.notSent}))
		a, b, results, end := fullLane(t, p)
		most, last, still := uint32(0), uint32(0), 0
		for deadline := time.Now().Add(patience); still < 10; <-time.After(10 * time.Millisecond) {
			n := unsent(t, a.(*lane).conn)
			if still++; n != last || n == 0 {
				still = 0
			}
			last, most = n, max(most, n)
			if time.Now().After(deadline) {
				t.Fatalf("%d bytes unsent, and they still change", last)
			}
		}
		if over := most > bound+segment; over == c.bounded {
			t.Errorf("TCP_NOTSENT_LOWAT %d: %d bytes were unsent; want at most %d: %t", c.notSent, most, bound+segment, c.bounded)
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
	cerr := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	if err := errors.Join(cerr, err); err != nil {
		t.Fatal(err)
	}
	return info.Notsent_bytes
}

// Either end's wish for checksums is enough.
func TestIntegrityIsNegotiated(t *testing.T) {
	for _, first := range []bool{true, false} {
		n := 0
		p := transporttest.NewPair(t, func(tb testing.TB) transport.Backend {
			n++
			return factory(Config{CRC32C: (n == 1) == first})(tb)
		})
		a, b := p.Dial()
		if !a.(*lane).crc || !b.(*lane).crc {
			t.Errorf("first end wants it: %v; dialled %v, accepted %v", first, a.(*lane).crc, b.(*lane).crc)
		}
	}
}

// raw opens a lane to B by hand, so that a test can say anything on it.
func raw(t *testing.T, p *transporttest.Pair) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", p.B.Rails[0].Address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := wire.Dial(c, wire.DialParams{Purpose: wire.PurposeTCPData, Self: p.A.Boot, Peer: p.B.Boot, Key: p.Key,
		Attach: attachment{local: "x", remote: "lo"}.encode()}); err != nil {
		t.Fatal(err)
	}
	return c
}

func frame(h wire.Header, payload []byte, status wire.Status) []byte {
	out := make([]byte, wire.HeaderBytes, wire.HeaderBytes+len(payload)+wire.TrailerBytes)
	h.Kind, h.Length = wire.KindData, uint64(len(payload))
	wire.PutHeader(out, &h)
	out = append(out, payload...)
	out = out[:len(out)+wire.TrailerBytes]
	wire.PutTrailer(out[len(out)-wire.TrailerBytes:], &wire.Trailer{Status: status, Seq: h.Seq, CRC32C: mem.CRC32C(0, payload)})
	return out
}

func readConfirm(t *testing.T, c net.Conn) wire.Entry {
	t.Helper()
	var b [wire.HeaderBytes]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		t.Fatalf("no confirmation: %v", err)
	}
	var h wire.Header
	if err := wire.ParseHeader(b[:], &h); err != nil || h.Kind != wire.KindConfirm || h.Length != 0 {
		t.Fatalf("%+v: %v", h, err)
	}
	return h.Entry()
}

// A sender that stops in mid frame holds up no fence, and what it sends afterwards goes to scrap.
func TestFrozenSender(t *testing.T) {
	const soon, tries = time.Second, 5 // a fence may be late where the machine is busy; one that waits for a sender always is
	for n := 1; ; n++ {
		took := fenceFrozen(t)
		if took <= soon {
			return
		}
		if t.Logf("try %d: the fence took %s", n, took); n == tries {
			t.Fatalf("each of %d fences waited longer than %s for a frozen sender", tries, soon)
		}
	}
}

func fenceFrozen(t *testing.T) (took time.Duration) {
	t.Helper()
	p := transporttest.NewPair(t, factory(Config{}))
	c := raw(t, p)
	s := transporttest.Shape{Chunks: 8, BlockBytes: 64 << 10}
	src, dst := transporttest.NewMemory(t, s), transporttest.NewMemory(t, s)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	payload := make([]byte, 8*transfer.ChunkBytes)
	for i := range payload {
		payload[i] = 0xee
	}
	f := frame(wire.Header{Slot: 1, Gen: 1, Range: dst.All(), Attempt: 1, Seq: 0}, payload, wire.StatusValid)
	half := len(f)/2 + 13
	if _, err := c.Write(f[:half]); err != nil {
		t.Fatal(err)
	}
	mapped, _ := dst.Region.Bytes()
	deadline := time.Now().Add(patience)
	first, _ := dst.Resolve(nil, transfer.Range{Count: 1})
	for mapped[first[0].Off] != 0xee { // some of it is there
		if time.Now().After(deadline) {
			t.Fatal("nothing was read")
		}
		runtime.Gosched()
	}
	began := time.Now()
	b.Fence(t)
	took = time.Since(began)
	mem.Fill(mapped, 0x3c)
	if _, err := c.Write(f[half:]); err != nil {
		t.Fatal(err)
	}
	if e := readConfirm(t, c); e.Outcome != transfer.Rejected || e.Reason != transfer.ReasonRevoked {
		t.Errorf("%+v", e)
	}
	if at, ok := dst.Filled(0x3c); !ok {
		t.Fatalf("byte %d was written after the fence", at)
	}
	// The lane lives: the same connection serves the next grant.
	b2 := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 2)
	if _, err := c.Write(frame(wire.Header{Slot: 1, Gen: 2, Range: dst.All(), Attempt: 1, Seq: 1}, payload, wire.StatusValid)); err != nil {
		t.Fatal(err)
	}
	if e := readConfirm(t, c); e.Outcome != transfer.Landed || e.Seq != 1 {
		t.Errorf("%+v", e)
	}
	b2.End(t)
	return took
}

// Frames that break the protocol end their lane, and only that.
func TestMalformed(t *testing.T) {
	p := transporttest.NewPair(t, factory(Config{}))
	s := transporttest.Shape{Chunks: 8, BlockBytes: 64 << 10}
	src, dst := transporttest.NewMemory(t, s), transporttest.NewMemory(t, s)
	src.Write(5)
	mapped, _ := dst.Region.Bytes()
	mem.Fill(mapped, 0x11)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	good := frame(wire.Header{Slot: 1, Gen: 1, Range: transfer.Range{Count: 1}, Attempt: 1}, make([]byte, 64<<10), wire.StatusDisowned)
	damaged := append([]byte(nil), good...)
	damaged[9] ^= 1
	trailer := append([]byte(nil), good...)
	trailer[len(trailer)-7] ^= 1
	huge := make([]byte, wire.HeaderBytes)
	wire.PutHeader(huge, &wire.Header{Kind: wire.KindData, Slot: 1, Gen: 1, Range: transfer.Range{Count: 1}, Length: 1 << 40})
	for name, what := range map[string][]byte{
		"noise":                   []byte("GET / HTTP/1.1\r\nHost: 127.0.0.1:1234\r\nUser-Agent: something else entirely\r\n\r\n"),
		"damaged header":          damaged,
		"damaged trailer":         trailer,
		"a payload of a terabyte": huge,
		"a confirmation of nothing": wire.AppendConfirms(nil, []wire.Entry{{Slot: 1, Gen: 1, Range: transfer.Range{Count: 1},
			Outcome: transfer.Landed}}),
	} {
		c := raw(t, p)
		if _, err := c.Write(what); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%s: the lane lives: %v", name, err)
		}
	}
	// Chopped openings, and a scanner that says nothing.
	for _, n := range []int{0, 1, 60} {
		c, err := net.Dial("tcp", p.B.Rails[0].Address)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write(good[:n])
		_ = c.Close()
	}
	// Only the damaged trailer came behind a payload that may be written before it is known to be damaged.
	for c := uint32(1); c < dst.Chunks(); c++ {
		blocks, _ := dst.Resolve(nil, transfer.Range{First: c, Count: 1})
		for _, blk := range blocks {
			m, _ := blk.Bytes()
			for _, x := range m {
				if x != 0x11 {
					t.Fatalf("chunk %d was written", c)
				}
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	peer, _ := p.A.PeerKey(p.B.Boot)
	l, err := p.A.Backend.Dial(ctx, peer, p.A.Rails[0], p.B.Rails[0])
	if err != nil {
		t.Fatal(err)
	}
	if r := p.A.MoveWait(l, b.Origin, src.All(), 1); r.Outcome != transfer.Landed {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	b.End(t)
}

// A peer that sends and never reads cannot make a receiver's memory grow, nor stop other lanes.
func TestPeerThatNeverReads(t *testing.T) {
	p := transporttest.NewPair(t, factory(Config{}))
	c := raw(t, p)
	f := frame(wire.Header{Slot: 9, Gen: 1, Range: transfer.Range{Count: 1}, Attempt: 1}, nil, wire.StatusDisowned)
	var err error
	for err == nil { // until the receiver gives up on it
		_, err = c.Write(f)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("the receiver takes frames for ever")
	}
	src, dst := transporttest.NewMemory(t, someShape), transporttest.NewMemory(t, someShape)
	src.Write(5)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	a, _ := dialAgain(t, p)
	if r := p.A.MoveWait(a, b.Origin, src.All(), 1); r.Outcome != transfer.Landed {
		t.Fatalf("%s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	b.End(t)
}

func dialAgain(t *testing.T, p *transporttest.Pair) (transport.Lane, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	peer, _ := p.A.PeerKey(p.B.Boot)
	l, err := p.A.Backend.Dial(ctx, peer, p.A.Rails[0], p.B.Rails[0])
	if err != nil {
		t.Fatal(err)
	}
	return l, err
}

// processMemory gives a space the same bytes through /proc/self/mem.
func processMemory(t *testing.T, m *transporttest.Memory) {
	t.Helper()
	b, _ := m.Region.Bytes()
	fd, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	r, err := mem.OpenProcess(mem.NewID(), fd, uint64(uintptr(unsafe.Pointer(&b[0]))), uint64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	m.Replace(r)
}

func TestProcessMemory(t *testing.T) {
	for i, cfg := range []Config{{}, {CRC32C: true}, {}} {
		p, a := open(t, cfg)
		src, dst := transporttest.NewMemory(t, someShape), transporttest.NewMemory(t, someShape)
		src.Write(5)
		if i != 1 {
			processMemory(t, src)
		}
		if i != 2 {
			processMemory(t, dst)
		}
		b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
		b.Sink.Seed.Store(5)
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
	if r := p.A.MoveWait(a, b.Origin, src.All(), 1); r.Outcome != transfer.NotLanded || r.Reason != transfer.ReasonMemory {
		t.Errorf("source faults: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	protect(src, unix.PROT_READ|unix.PROT_WRITE)
	protect(dst, unix.PROT_READ)
	if r := p.A.MoveWait(a, b.Origin, src.All(), 2); r.Outcome != transfer.Rejected || r.Reason != transfer.ReasonMemory {
		t.Errorf("destination faults: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	protect(dst, unix.PROT_READ|unix.PROT_WRITE)
	b.Sink.Seed.Store(5)
	if r := p.A.MoveWait(a, b.Origin, src.All(), 3); r.Outcome != transfer.Landed {
		t.Errorf("the lane did not survive: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	b.End(t)
}

func TestRails(t *testing.T) {
	b, err := New(Config{Rails: []Rail{{Listen: "127.0.0.2:0", Name: "two", Advertise: "rail.example:7000", Gbps: 25, Tier: 2},
		{Listen: "127.0.0.3:0"}}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	rails, err := b.Open(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if r := rails[0]; r.Name != "two" || r.Address != "rail.example:7000" || r.Gbps != 25 || r.Tier != 2 || r.MTU == 0 || r.NUMA != -1 {
		t.Errorf("%+v", r)
	}
	if host, port, err := net.SplitHostPort(rails[1].Address); err != nil || host != "127.0.0.3" || port == "0" || rails[1].Name != "lo" {
		t.Errorf("%+v", rails[1])
	}
	for name, cfg := range map[string]Config{
		"slice":     {SliceBytes: 1000},
		"in flight": {MaxInFlight: -1},
		"buffers":   {SendBuffer: -1},
		"rails":     {Rails: make([]Rail, maxRails+1)},
	} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for name, cfg := range map[string]Config{
		"same name":   {Rails: []Rail{{Name: "x"}, {Name: "x"}}},
		"no such one": {Rails: []Rail{{Listen: "203.0.113.1:0"}}},
	} {
		b, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Open(context.Background(), nil); err == nil {
			t.Errorf("%s: accepted", name)
		}
		_ = b.Close()
	}
}

func TestAttachment(t *testing.T) {
	a := attachment{crc: true, local: "eth0", remote: "eth1"}
	if got, err := parseAttachment(append(a.encode(), "from a newer version"...)); err != nil || got != a {
		t.Errorf("%+v %v", got, err)
	}
	whole := a.encode()
	for n := range whole {
		if _, err := parseAttachment(whole[:n]); err == nil {
			t.Errorf("%d of %d bytes: accepted", n, len(whole))
		}
	}
}

// Slices allocate nothing once the lane runs.
func TestSliceDoesNotAllocate(t *testing.T) {
	if testutil.Race {
		testutil.Skip(t, "alloc", "the race detector allocates")
	}
	for _, crc := range []bool{false, true} {
		m := transporttest.NewMover(t, factory(Config{CRC32C: crc}), transporttest.Shape{Chunks: 256, BlockBytes: 16 << 10, Shuffle: true})
		m.Move(64, 8, 4)
		if n := testing.AllocsPerRun(20, func() { m.Move(64, 8, 4) }); n > 1 {
			t.Errorf("crc %v: %v allocations for 64 slices", crc, n)
		}
	}
}

// Lanes at full speed let the garbage collector in.
func TestLanesDoNotHoldTheCollector(t *testing.T) {
	if testutil.Race {
		testutil.Skip(t, "norace", "make test-all looks at it where nothing else runs, in its part bounds")
	}
	m := transporttest.NewMover(t, factory(Config{CRC32C: true}), transporttest.Shape{Chunks: 512, BlockBytes: 16 << 10, Shuffle: true})
	m.LetsCollectorIn(8)
}
