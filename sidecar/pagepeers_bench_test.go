package sidecar

import (
	"crypto/rand"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/directory"
	"github.com/kvspray/kvspray/store/page"
)

// benchSide is a node with a namespace and a pool of one batch.
type benchSide struct {
	*running
	space *store.Space
	pool  *store.Pool
}

func newBenchSide(b *testing.B, ns page.Namespace, batch int,
	transport, at, listen string) benchSide {
	b.Helper()
	r := start(b, func(c *config.Config) {
		c.Store.Memory = 512 << 20
		c.Peer.Gossip.Listen, c.Peer.Gossip.Join = listen, []string{at}
		c.Transports.Order = []string{transport}
		c.Trace = config.Trace{}
	})
	s := benchSide{running: r}
	var err error
	if s.space, err = r.pages.store.Space(ns, store.Shares{}); err != nil {
		b.Fatal(err)
	}
	region, err := mem.NewAnonymous("bench", uint64(batch), mem.Populate())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(region.Release)
	all, _ := region.Bytes()
	_, _ = rand.Read(all)
	s.pool, err = store.NewPool([]store.Piece{{Region: region, Stride: uint64(ns.PageBytes),
		Len: uint64(ns.PageBytes)}}, batch/ns.PageBytes)
	if err != nil {
		b.Fatal(err)
	}
	return s
}

// BenchmarkPeerGet gets 64 MiB of pages that another node has in memory. Compare it with
// kvspray-bench copy over the same transport.
func BenchmarkPeerGet(b *testing.B) {
	const batch = 64 << 20
	for _, transport := range []string{config.TransTCP, config.TransSHM} {
		for _, size := range []int{256 << 10, 4 << 20} {
			b.Run(fmt.Sprintf("%s/page=%dKiB", transport, size>>10), func(b *testing.B) {
				ln, err := net.Listen("tcp", net.JoinHostPort(testutil.Loopback(), "0"))
				if err != nil {
					b.Fatal(err)
				}
				at := ln.Addr().String()
				_ = ln.Close()
				ns := page.Namespace{Weights: "w", DType: "bfloat16", Layout: "l", PageTokens: 16,
					PageBytes: size, Algorithm: "sglang-sha256"}
				from := newBenchSide(b, ns, batch, transport, at, at)
				to := newBenchSide(b, ns, batch, transport, at, "127.0.0.1:0")
				n := batch / size
				keys, blocks := make([]page.Key, n), make([]uint32, n)
				for i := range keys {
					_, _ = rand.Read(keys[i][:])
					blocks[i] = uint32(i)
				}
				put, err := from.space.Put(keys, nil, from.pool, blocks)
				if err != nil {
					b.Fatal(err)
				}
				<-put.Done()
				until(b, func() bool {
					found := page.NewBitmap(n)
					to.pages.exchange.Find(keys, found)
					return found.Count() == n
				})
				b.SetBytes(batch)
				for b.Loop() {
					get, err := to.space.Get(keys, to.pool, blocks)
					if err != nil {
						b.Fatal(err)
					}
					<-get.Done()
					for i, r := range get.Results() {
						if r.Outcome != store.Hit || r.Tier != store.Peer {
							b.Fatalf("page %d: %+v", i, r)
						}
					}
					b.StopTimer()
					if err := to.space.Remove(); err != nil {
						b.Fatal(err)
					}
					b.StartTimer()
				}
			})
		}
	}
}

// BenchmarkPeerExists looks up 10,000 pages with two remote owners, over control lanes.
func BenchmarkPeerExists(b *testing.B) {
	ln, err := net.Listen("tcp", net.JoinHostPort(testutil.Loopback(), "0"))
	if err != nil {
		b.Fatal(err)
	}
	at := ln.Addr().String()
	_ = ln.Close()
	ns := page.Namespace{Weights: "w", DType: "bfloat16", Layout: "l", PageTokens: 16,
		PageBytes: 4096, Algorithm: "sglang-sha256"}
	all := []benchSide{newBenchSide(b, ns, 1<<20, config.TransTCP, at, at),
		newBenchSide(b, ns, 1<<20, config.TransTCP, at, "127.0.0.1:0"),
		newBenchSide(b, ns, 1<<20, config.TransTCP, at, "127.0.0.1:0")}
	for _, s := range all {
		until(b, func() bool {
			return len(s.pages.hintMembers()) == 3 && len(s.pages.exchange.Peers()) == 2
		})
	}
	keys := make([]page.Key, page.MaxBatch)
	for i := range keys {
		_, _ = rand.Read(keys[i][:])
	}
	d := all[0].pages.directory
	count := func(ask int) (n int) {
		found := directory.NewFound(len(keys))
		if err := all[ask].pages.directory.Lookup(b.Context(), keys, found); err != nil {
			b.Fatal(err)
		}
		for i := range keys {
			for range found.Of(i) {
				n++
			}
		}
		return n
	}
	if err := d.Announce(b.Context(), keys); err != nil {
		b.Fatal(err)
	}
	until(b, func() bool { return count(1) == len(keys) })
	best := time.Hour
	for b.Loop() {
		began := time.Now()
		if n := count(1); n != len(keys) {
			b.Fatalf("%d of %d", n, len(keys))
		}
		best = min(best, time.Since(began))
	}
	b.ReportMetric(float64(best.Microseconds())/1000, "best-ms")
}
