package sidecar

import (
	"bytes"
	"context"
	"crypto/rand"
	"os"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
)

// A prompt of which one rank gets more than 4 GiB, and so more chunks than 16 bits can name. The
// caches take little memory, because it comes again and again in them: 1 MiB blocks b and b+31 are
// the same. A prompt's block i is block i of the receiver and i+31*7+3 of the source, round the
// end, so that what is written twice is the same twice, and a chunk that is taken for another finds
// other bytes: 31 divides no power of two. Nightly: TestMoreThan32Bits of parseblock is what every
// change must pass.
func TestMoreThan4GiB(t *testing.T) {
	if os.Getenv("KVSPRAY_LARGE") == "" {
		testutil.Skip(t, "large", "moves 4 GiB twice, seconds of a quiet machine: KVSPRAY_LARGE=1, or "+
			"make test-laws")
	}
	for _, transport := range []string{config.TransTCP, config.TransSHM} {
		t.Run(transport, func(t *testing.T) { moreThan4GiB(t, transport) })
	}
}

func moreThan4GiB(t *testing.T, transport string) {
	const (
		limit  = 2 * time.Minute
		same   = 31 // blocks that are different
		times  = 133
		blocks = same * times
		shift  = 7*same + 3
	)
	shape := connectortest.Shape{Layers: 1, NumBlocks: blocks, TokensPerBlock: 16,
		TokenBytes: 64 << 10}
	held := uint32(blocks) // by the source
	f := func(c *config.Config) {
		c.Transports.Order, c.Trace.BlockHashes, c.Trace.Transfers = []string{transport}, "", ""
	}
	large := func(r *running) (*engine, []byte) {
		reg, memory := folded(t, same*uintptr(shape.PageBytes()), times)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		w, err := connectortest.DialWorker(ctx, connectortest.Config{Socket: r.cfg.Engine.Socket,
			Layout: shape.Layout(), Regions: []*mem.Region{reg},
			Engine: msg.Engine{Name: "test", Version: "1", ID: "e"}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = w.Close() })
		return &engine{Worker: w, t: t, shape: shape, region: reg,
			done: map[uint64]connectortest.Completion{}}, memory
	}
	p, d := start(t, f), start(t, f)
	de, got := large(d)
	var pe *engine
	var sent []byte
	if transport == config.TransSHM {
		// The peer maps what the source has: memory of a file, and a prompt in whose table the same
		// blocks come again and again.
		held = same
		few := shape
		few.NumBlocks = same
		pe = newEngine(t, p, few)
		sent, _ = pe.region.Bytes()
	} else {
		pe, sent = large(p)
	}
	_, _ = rand.Read(sent)
	var from, to []uint32
	for i := range uint32(blocks) {
		from, to = append(from, (i+shift)%blocks%held), append(to, i)
	}
	const tokens = blocks * 16
	pr := newPrompt(tokens)
	src, err := pe.Intent(msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens, Fanout: 1,
		Blocks: [][]uint32{from}, Ready: tokens, DeadlineMS: uint64(limit.Milliseconds())})
	if err != nil {
		t.Fatal(err)
	}
	dst, err := de.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens, Peer: p.Endpoint(),
		Skip: []uint32{0}, Blocks: [][]uint32{to},
		DeadlineMS: uint64(limit.Milliseconds())})
	if err != nil {
		t.Fatal(err)
	}
	c := de.waitFor(dst, limit)
	if c.Status != 0 || c.Received.Transport != transport {
		t.Fatalf("%+v", c.Received)
	}
	if want := blocks * shape.PageBytes(); c.Received.Bytes != want ||
		want <= 1<<16*transfer.ChunkBytes {
		t.Errorf("%d bytes were received, want %d", c.Received.Bytes, want)
	}
	pe.ok(src)
	page := int(shape.PageBytes())
	for i := range same {
		k := (i + shift) % same
		if !bytes.Equal(got[i*page:][:page], sent[k*page:][:page]) {
			t.Fatalf("block %d of the receiver is not block %d of the source", i, k)
		}
	}
}
