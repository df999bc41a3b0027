package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// afterOpening is longer than the opening of a lane, and less than the header and first block of
// a frame.
const afterOpening = 1200

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
			t.Errorf("first end wants it: %v; dialed %v, accepted %v", first, a.(*lane).crc, b.(*lane).crc)
		}
	}
}

// raw opens a lane to B by hand, so that a test can send anything on it.
func raw(t *testing.T, p *transporttest.Pair) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", p.B.Rails[0].Address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := wire.Dial(c, wire.DialParams{Purpose: wire.PurposeTCPData, Self: p.A.Boot,
		Peer: p.B.Boot, Key: p.Key,
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
	wire.PutTrailer(out[len(out)-wire.TrailerBytes:], &wire.Trailer{Status: status, Seq: h.Seq,
		CRC32C: mem.CRC32C(0, payload)})
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

// A sender that stops in mid frame holds up no fence, and what it sends afterwards is discarded.
func TestFrozenSender(t *testing.T) {
	p := transporttest.NewPair(t, factory(Config{}))
	c := raw(t, p)
	s := transporttest.Shape{Chunks: 8, BlockBytes: 64 << 10}
	src, dst := transporttest.NewMemory(t, s), transporttest.NewMemory(t, s)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	payload := make([]byte, 8*transfer.ChunkBytes)
	for i := range payload {
		payload[i] = 0xee
	}
	f := frame(wire.Header{Slot: 1, Gen: 1, Range: dst.All(), Attempt: 1, Seq: 0}, payload,
		wire.StatusValid)
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
	b.Fence(t) // it ends while the sender is frozen
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
	if _, err := c.Write(frame(wire.Header{Slot: 1, Gen: 2, Range: dst.All(), Attempt: 1, Seq: 1},
		payload, wire.StatusValid)); err != nil {
		t.Fatal(err)
	}
	if e := readConfirm(t, c); e.Outcome != transfer.Landed || e.Seq != 1 {
		t.Errorf("%+v", e)
	}
	b2.End(t)
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
	good := frame(wire.Header{Slot: 1, Gen: 1, Range: transfer.Range{Count: 1}, Attempt: 1},
		make([]byte, 64<<10), wire.StatusInvalidated)
	damaged := append([]byte(nil), good...)
	damaged[9] ^= 1
	trailer := append([]byte(nil), good...)
	trailer[len(trailer)-7] ^= 1
	huge := make([]byte, wire.HeaderBytes)
	wire.PutHeader(huge, &wire.Header{Kind: wire.KindData, Slot: 1, Gen: 1,
		Range: transfer.Range{Count: 1}, Length: 1 << 40})
	for name, what := range map[string][]byte{
		"noise": []byte("GET / HTTP/1.1\r\nHost: 127.0.0.1:1234\r\nUser-Agent: " +
			"something else entirely\r\n\r\n"),
		"damaged header":          damaged,
		"damaged trailer":         trailer,
		"a payload of a terabyte": huge,
		"a confirmation of nothing": wire.AppendConfirms(nil, []wire.Entry{{Slot: 1, Gen: 1,
			Range:   transfer.Range{Count: 1},
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
	// Chopped openings, and a scanner that sends nothing.
	for _, n := range []int{0, 1, 60} {
		c, err := net.Dial("tcp", p.B.Rails[0].Address)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write(good[:n])
		_ = c.Close()
	}
	// Only the damaged trailer came behind a payload that may be written before it is known to be
	// damaged.
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
	f := frame(wire.Header{Slot: 9, Gen: 1, Range: transfer.Range{Count: 1}, Attempt: 1}, nil,
		wire.StatusInvalidated)
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

func TestRails(t *testing.T) {
	b, err := New(Config{Rails: []Rail{{Listen: "127.0.0.2:0", Name: "two",
		Advertise: "rail.example:7000", Gbps: 25, Tier: 2},
		{Listen: "127.0.0.3:0"}}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	rails, err := b.Open(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if r := rails[0]; r.Name != "two" || r.Address != "rail.example:7000" || r.Gbps != 25 ||
		r.Tier != 2 || r.MTU == 0 || r.NUMA != -1 {
		t.Errorf("%+v", r)
	}
	if host, port, err := net.SplitHostPort(rails[1].Address); err != nil || host != "127.0.0.3" ||
		port == "0" || rails[1].Name != "lo" {
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
	if got, err := parseAttachment(append(a.encode(), "from a newer version"...)); err != nil ||
		got != a {
		t.Errorf("%+v %v", got, err)
	}
	whole := a.encode()
	for n := range whole {
		if _, err := parseAttachment(whole[:n]); err == nil {
			t.Errorf("%d of %d bytes: accepted", n, len(whole))
		}
	}
}
