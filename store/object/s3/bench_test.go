package s3_test

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/page"
	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"golang.org/x/sys/unix"
)

// cpu is the processor time of this process.
func cpu(tb testing.TB) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkGet is a get of pages that only a real S3 server on this host has, beside ranged reads
// of the same objects by the client's own GetObject, of as many bytes each, as many at the same
// time, into memory. Both in turns.
func BenchmarkGet(b *testing.B) {
	for _, pageBytes := range []int{256 << 10, 4 << 20} {
		for _, readers := range []int{1, 4} {
			b.Run(fmt.Sprintf("%dKiB/%d", pageBytes>>10, readers), func(b *testing.B) {
				benchmarkGet(b, pageBytes, readers)
			})
		}
	}
}

func benchmarkGet(b *testing.B, pageBytes, readers int) {
	const total = 512 << 20
	mem.ChooseCopies()
	server := startServer(b)
	login(b, rootKey, rootSecret)
	raw := open(b, server.url, bucketName)
	defer raw.Close()
	tier := start(b, object.Config{Bucket: open(b, server.url, bucketName), Prefix: "n",
		Size: 4 << 30})
	// A quarter of the memory is a range for each fetcher.
	s, err := store.Open(store.Config{Memory: memory.Config{Populate: true,
		Bytes: uint64(4 * readers * object.MaxRangeBytes)}, OpenedObject: tier, ObjectAtPut: true,
		Fetchers: readers, Workers: 1})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = s.Close() }() // nothing is left to upload
	ns := page.Namespace{Weights: "w", DType: "d", Layout: "l", PageTokens: 16,
		PageBytes: pageBytes, Algorithm: "sglang-sha256"}
	sp, err := s.Space(ns, store.Shares{})
	if err != nil {
		b.Fatal(err)
	}
	defer sp.Close()
	region, err := mem.NewAnonymous("engine", total, mem.Populate())
	if err != nil {
		b.Fatal(err)
	}
	defer region.Release()
	whole, _ := region.Bytes()
	for i := range whole {
		whole[i] = byte(i * i >> 7)
	}
	var keys []page.Key
	var blocks []uint32
	for i := range total / pageBytes {
		keys = append(keys, key(i))
		blocks = append(blocks, uint32(i))
	}
	pool, err := store.NewPool([]store.Piece{{Region: region, Stride: uint64(pageBytes),
		Len: uint64(pageBytes)}}, len(blocks))
	if err != nil {
		b.Fatal(err)
	}
	began := time.Now()
	for i := 0; i < len(keys); i += 32 << 20 / pageBytes { // no faster than the uploads
		n := min(len(keys), i+32<<20/pageBytes)
		batch, err := sp.Put(keys[i:n], nil, pool, blocks[i:n])
		if err != nil {
			b.Fatal(err)
		}
		<-batch.Done()
		if i/(32<<20/pageBytes)%3 == 2 || n == len(keys) {
			if err := s.Flush(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	}
	put := time.Since(began)
	if st := s.Stats(); st.Object.Pages != uint64(len(keys)) {
		b.Fatalf("%+v", st)
	}
	var spans []span
	if err := raw.List(b.Context(), "n/pages/", "", func(name string, size int64) error {
		for off := int64(0); off+object.MaxRangeBytes <= size; off += object.MaxRangeBytes {
			spans = append(spans, span{name, off})
		}
		return nil
	}); err != nil {
		b.Fatal(err)
	}
	// What the fetchers need, so that hardly a page is in memory for the next get.
	quota := uint64(readers * object.MaxRangeBytes)
	again, err := s.Space(ns, store.Shares{store.Memory: store.Share{Quota: quota}})
	if err != nil {
		b.Fatal(err)
	}
	defer again.Close()
	client, closeClient := newClient(b, server.url)
	defer closeClient()
	var ours, ofClient, ourCPU, clientCPU []float64
	for b.Loop() {
		n := float64(len(spans) * object.MaxRangeBytes)
		c, began := cpu(b), time.Now()
		readRanges(b, spans, readers, whole, func(s span) (io.ReadCloser, error) {
			var o minio.GetObjectOptions
			if err := o.SetRange(s.off, s.off+object.MaxRangeBytes-1); err != nil {
				return nil, err
			}
			return client.GetObject(context.Background(), bucketName, s.name, o)
		})
		clientRate := n / time.Since(began).Seconds()
		clientCPU = append(clientCPU, (cpu(b)-c).Seconds()/n*1e9)

		clear(whole[total-pageBytes:])
		c, began = cpu(b), time.Now()
		batch, err := sp.Get(keys, pool, blocks)
		if err != nil {
			b.Fatal(err)
		}
		<-batch.Done()
		took, used := time.Since(began), cpu(b)-c
		fetched := 0
		for _, r := range batch.Results() {
			if r.Outcome != store.Hit {
				b.Fatalf("%+v", r)
			}
			if r.Tier == store.Object {
				fetched++
			}
		}
		if fetched < len(keys)*3/4 {
			b.Fatalf("%d of %d pages came from the object store", fetched, len(keys))
		}
		n = float64(fetched * pageBytes) // what came from memory counts as time only
		rate := n / took.Seconds()
		ours = append(ours, rate)
		ofClient = append(ofClient, rate/clientRate)
		ourCPU = append(ourCPU, used.Seconds()/n*1e9)
	}
	b.ReportMetric(median(ours)/1e6, "MB/s")
	b.ReportMetric(median(ofClient), "of-client")
	b.ReportMetric(median(ourCPU), "cpu-s/GB")
	b.ReportMetric(median(clientCPU), "client-cpu-s/GB")
	b.ReportMetric(total/put.Seconds()/1e6, "put-MB/s")
}

// span is MaxRangeBytes of an object.
type span struct {
	name string
	off  int64
}

// newClient is the client as its documents show it.
func newClient(b *testing.B, server string) (*minio.Client, func()) {
	b.Helper()
	transport, err := minio.DefaultTransport(false)
	if err != nil {
		b.Fatal(err)
	}
	c, err := minio.New(strings.TrimPrefix(server, "http://"), &minio.Options{Region: "us-east-1",
		Creds: credentials.NewStaticV4(rootKey, rootSecret, ""), Transport: transport})
	if err != nil {
		b.Fatal(err)
	}
	return c, transport.CloseIdleConnections
}

// readRanges reads ranges with several goroutines, into memory.
func readRanges(b *testing.B, spans []span, readers int, to []byte,
	get func(span) (io.ReadCloser, error)) {
	b.Helper()
	var next atomic.Int64
	var g sync.WaitGroup
	for range readers {
		g.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(spans) {
					return
				}
				body, err := get(spans[i])
				if err == nil {
					_, err = io.ReadFull(body, to[i*object.MaxRangeBytes:][:object.MaxRangeBytes])
					_ = body.Close() // all was read, or there is an error
				}
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	g.Wait()
}

func median(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/2]
}
