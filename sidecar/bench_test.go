package sidecar

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/config"
)

// One 4 KiB block between two sidecars, from the intent to the completion that the other engine
// sees. In "grant-there" the expect came first, so that only the intent, the bytes and the
// completion are on the clock.
func BenchmarkBlock4K(b *testing.B) {
	shape := connectortest.Shape{Layers: 1, NumBlocks: 64, TokensPerBlock: 16, TokenBytes: 256}
	for _, transport := range []string{"tcp", "shm"} {
		for _, mode := range []string{"grant-there", "grant-later"} {
			b.Run(transport+"/"+mode, func(b *testing.B) {
				f := func(c *config.Config) {
					c.Transports.Order, c.Trace.BlockHashes, c.Trace.Transfers = []string{transport}, "", ""
				}
				p, d := start(b, f), start(b, f)
				pe, de := newEngine(b, p, shape), newEngine(b, d, shape)
				var took []time.Duration
				for i := 0; b.Loop(); i++ {
					pr := newPrompt(16)
					intent := msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: 16, Fanout: 1,
						Blocks: [][]uint32{{uint32(i) % 64}}, Ready: 16}
					expect := msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: 16, Peer: p.Endpoint(),
						Skip: []uint32{0}, Blocks: [][]uint32{{uint32(i) % 64}}}
					var dst uint64
					if mode == "grant-there" {
						dst, _ = de.Expect(expect)
						until(b, func() bool {
							v := viewOf(p).Pending
							return v == 1
						})
					}
					from := time.Now()
					src, err := pe.Intent(intent)
					if err != nil {
						b.Fatal(err)
					}
					if mode != "grant-there" {
						dst, _ = de.Expect(expect)
					}
					de.ok(dst)
					if i > 10 { // the first ones open lanes
						took = append(took, time.Since(from))
					}
					pe.ok(src)
				}
				if len(took) > 0 {
					slices.Sort(took)
					b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-us")
					b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-us")
				}
			})
		}
	}
}

// BenchmarkBatch4K is the time of a batch of one entry of 4 KiB, beside BenchmarkBlock4K.
func BenchmarkBatch4K(b *testing.B) {
	for _, transport := range []string{"tcp", "shm"} {
		for _, write := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/write=%v", transport, write), func(b *testing.B) {
				f := func(c *config.Config) {
					c.Transports.Order, c.Trace.BlockHashes, c.Trace.Transfers = []string{transport}, "", ""
				}
				p, d := start(b, f), start(b, f)
				user, owner := newSegmenter(b, p, "user"), newSegmenter(b, d, "owner")
				owner.lend("pool", everyone())
				m := msg.Batch{Peer: d.Endpoint(), Segment: "pool", Write: write}
				user.ok(user.batch(m, entry{bytes: 4096})) // they have met
				var took []time.Duration
				for b.Loop() {
					from := time.Now()
					user.ok(user.batch(m, entry{bytes: 4096}))
					took = append(took, time.Since(from))
				}
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-us")
				b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-us")
			})
		}
	}
}

// 128 MiB of scattered pages of 16 KiB between two sidecars over loopback, from the expect to the
// completion.
func BenchmarkTransfer(b *testing.B) {
	const layers, blocks = 32, 256
	shape := connectortest.Shape{Layers: layers, NumBlocks: blocks, TokensPerBlock: 16,
		TokenBytes: 1024}
	for _, transport := range []string{"tcp", "shm"} {
		for _, rails := range []int{1, 4} {
			if transport == "shm" && rails > 1 {
				continue
			}
			b.Run(fmt.Sprint(transport, "/", rails), func(b *testing.B) {
				f := func(c *config.Config) {
					c.Transports.Order, c.Trace.BlockHashes, c.Trace.Transfers = []string{transport}, "", ""
					c.Transports.TCP.Rails = nil
					for i := range rails {
						c.Transports.TCP.Rails = append(c.Transports.TCP.Rails, config.Rail{Name: fmt.Sprint("r", i),
							Listen: fmt.Sprintf("127.0.0.%d:0", i+1)})
					}
				}
				p, d := start(b, f), start(b, f)
				pe, de := newEngine(b, p, shape), newEngine(b, d, shape)
				table := func() (t []uint32) {
					for _, v := range rand.Perm(blocks) {
						t = append(t, uint32(v))
					}
					return t
				}
				move := func() {
					pr := newPrompt(blocks * 16)
					src, err := pe.Intent(msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: pr.tokens, Fanout: 1,
						Blocks: [][]uint32{table()}, Ready: pr.tokens})
					if err != nil {
						b.Fatal(err)
					}
					dst, err := de.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: pr.tokens,
						Peer: p.Endpoint(), Skip: []uint32{0},
						Blocks: [][]uint32{table()}})
					if err != nil {
						b.Fatal(err)
					}
					de.ok(dst)
					pe.ok(src)
				}
				move()
				b.SetBytes(layers * blocks * int64(shape.PageBytes()))
				for b.Loop() {
					move()
				}
			})
		}
	}
}

// until waits for a condition that nothing announces.
func until(t testing.TB, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for tick := time.NewTicker(50 * time.Microsecond); !ok(); <-tick.C {
		if ctx.Err() != nil {
			tick.Stop()
			t.Fatal("a condition did not come true in time")
		}
	}
}
