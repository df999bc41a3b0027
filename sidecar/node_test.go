package sidecar

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	mrand "math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
	"github.com/kvspray/kvspray/transport"
)

const (
	patience = time.Minute // of a test that is about to fail
	// of a transfer that has to come; a machine may have other things to do.
	deadlineMS = 60000
	matchMS    = 30000 // of an expect whose intent has to come
)

// tb is what helpers need of a test or a benchmark.
type running struct {
	*Node
	cfg  *config.Config
	stop func() error
}

func start(t testing.TB, change func(*config.Config)) *running {
	t.Helper()
	return startConfig(t, testConfig(t, change))
}

// testConfig is that of a node which meets only peers that the test names to it.
func testConfig(t testing.TB, change func(*config.Config)) *config.Config {
	t.Helper()
	dir := testutil.ShortDir(t)
	cfg := config.Default()
	cfg.Node = filepath.Base(dir)
	cfg.Engine.Socket = filepath.Join(dir, "s.sock")
	cfg.Peer.Listen = "127.0.0.1:0"
	cfg.Peer.Gossip.Listen = config.Off
	cfg.HTTP.Listen = "127.0.0.1:0"
	cfg.Drain.Timeout = config.Duration(2 * time.Second)
	cfg.Trace.BlockHashes = filepath.Join(dir, "hashes")
	cfg.Trace.Transfers = filepath.Join(dir, "transfers")
	if change != nil {
		change(cfg)
	}
	return cfg
}

// startConfig runs a node; prepare changes its parts before it runs.
func startConfig(t testing.TB, cfg *config.Config, prepare ...func(*Node)) *running {
	t.Helper()
	var out io.Writer = io.Discard
	if testing.Verbose() {
		out = t.Output()
	}
	return startLog(t, cfg, slog.New(slog.NewTextHandler(out,
		&slog.HandlerOptions{Level: slog.LevelDebug})), prepare...)
}

// startLog is startConfig with a log.
func startLog(t testing.TB, cfg *config.Config, log *slog.Logger, prepare ...func(*Node)) *running {
	t.Helper()
	n, err := New(Options{Config: cfg, Version: "test", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range prepare {
		f(n)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	r := &running{Node: n, cfg: cfg}
	stopped := false
	r.stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(patience):
			return fmt.Errorf("the node did not stop")
		}
	}
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	})
	select {
	case <-n.Started():
	case <-time.After(patience):
		t.Fatal("the node did not start")
	}
	if !n.Ready() {
		t.Fatalf("the node is not ready: %v", r.stop())
	}
	return r
}

var testShape = connectortest.Shape{Layers: 4, NumBlocks: 256, TokensPerBlock: 16, TokenBytes: 1024}

type engine struct {
	*connectortest.Worker
	t      testing.TB
	shape  connectortest.Shape
	region *mem.Region
	done   map[uint64]connectortest.Completion
}

func newEngine(t testing.TB, r *running, shape connectortest.Shape) *engine {
	t.Helper()
	return engineOf(t, r, shape, func(*layout.Layout) {})
}

// engineOf is newEngine with a layout that is changed.
func engineOf(t testing.TB, r *running, shape connectortest.Shape,
	change func(*layout.Layout)) *engine {
	t.Helper()
	reg, err := shape.Region()
	if err != nil {
		t.Fatal(err)
	}
	l := shape.Layout()
	change(l)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	w, err := connectortest.DialWorker(ctx, connectortest.Config{Socket: r.cfg.Engine.Socket,
		Layout: l, Regions: []*mem.Region{reg},
		Engine: msg.Engine{Name: "test", Version: "1", ID: "e"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = w.Close()
		reg.Release()
	})
	return &engine{Worker: w, t: t, shape: shape, region: reg,
		done: map[uint64]connectortest.Completion{}}
}

// wait returns the completion of one lease, and keeps those of others.
func (e *engine) wait(lease uint64) connectortest.Completion {
	e.t.Helper()
	return e.waitFor(lease, patience)
}

func (e *engine) waitFor(lease uint64, limit time.Duration) connectortest.Completion {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for {
		if c, ok := e.done[lease]; ok {
			delete(e.done, lease)
			return c
		}
		c, err := e.Wait(ctx)
		if err != nil {
			var stacks strings.Builder
			_ = pprof.Lookup("goroutine").WriteTo(&stacks, 1)
			e.t.Fatalf("completion of lease %d: %v\n%s", lease, err, &stacks)
		}
		e.done[c.Lease] = c
	}
}

func (e *engine) ok(lease uint64) connectortest.Completion {
	e.t.Helper()
	c := e.wait(lease)
	if c.Status != 0 {
		e.t.Fatalf("lease %d: status %d, %+v %+v", lease, c.Status, c.Received, c.Sent)
	}
	return c
}

func (e *engine) random() {
	b, _ := e.region.Bytes()
	_, _ = rand.Read(b)
}

func table(rng *mrand.Rand, blocks uint32, n int) []uint32 {
	t := make([]uint32, n)
	for i, v := range rng.Perm(int(blocks))[:n] {
		t[i] = uint32(v)
	}
	return t
}

func newRand(seed uint64) *mrand.Rand { return mrand.New(mrand.NewPCG(seed, 5)) }

type prompt struct {
	xfer   [16]byte
	hash   [32]byte
	tokens uint32
}

func newPrompt(tokens uint32) (p prompt) {
	_, _ = rand.Read(p.xfer[:])
	_, _ = rand.Read(p.hash[:])
	p.tokens = tokens
	return p
}

func blocksFor(tokens, per uint32) int { return int((tokens + per - 1) / per) }

// same compares what the plan moves: full pages, and the tokens of the last one.
func same(t testing.TB, p, d *engine, pt, dt []uint32, tokens, skip uint32) {
	t.Helper()
	per := p.shape.TokensPerBlock
	for l := range p.shape.Layers {
		for k := int(skip / per); k < blocksFor(tokens, per); k++ {
			n := min(tokens-uint32(k)*per, per) * uint32(p.shape.TokenBytes)
			if !bytes.Equal(p.shape.Page(p.region, l, pt[k])[:n], d.shape.Page(d.region, l, dt[k])[:n]) {
				t.Fatalf("layer %d, block %d of the prompt differs", l, k)
			}
		}
	}
}

func pairOf(t testing.TB, transports ...string) (p, d *running) {
	t.Helper()
	f := func(c *config.Config) { c.Transports.Order = transports }
	return start(t, f), start(t, f)
}

// Whole prompts of many lengths, over random block tables, with and without tokens that the
// receiver has already.
func TestMoves(t *testing.T) {
	for _, transports := range [][]string{{"tcp"}, {"shm"}, {"shm", "tcp"}} {
		t.Run(strings.Join(transports, "+"), func(t *testing.T) {
			p, d := pairOf(t, transports...)
			pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
			rng, began := mrand.New(mrand.NewPCG(1, 2)), time.Now()
			lengths := []uint32{1, 15, 16, 17, 160, 1000, 2048}
			var served string
			// Until the preferred transport's lane is up another one may serve, and while this
			// process is not run; then it does.
			for i := 0; i < len(lengths) || served != transports[0] && time.Since(began) < patience; i++ {
				tokens := lengths[i%len(lengths)]
				pe.random()
				pr := newPrompt(tokens)
				n := blocksFor(tokens, 16)
				pt, dt := table(rng, 256, n), table(rng, 256, n)
				skip := uint32(rng.IntN(int(tokens)/16+1)) * 16
				if skip == tokens {
					skip = 0
				}
				intent := msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens, Fanout: 1,
					Blocks: [][]uint32{pt}, Ready: tokens, DeadlineMS: deadlineMS}
				expect := msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens, Peer: p.Endpoint(),
					Skip: []uint32{skip}, Blocks: [][]uint32{dt},
					DeadlineMS: deadlineMS, MatchTimeoutMS: matchMS, Req: fmt.Sprint("req-", i)}
				var src, dst uint64
				var err, err2 error
				if i%2 == 0 {
					src, err = pe.Intent(intent)
					dst, err2 = de.Expect(expect)
				} else {
					dst, err2 = de.Expect(expect)
					src, err = pe.Intent(intent)
				}
				if err != nil || err2 != nil {
					t.Fatal(err, err2)
				}
				c := de.ok(dst)
				same(t, pe, de, pt, dt, tokens, skip)
				served = c.Received.Transport
				if !slices.Contains(transports, served) || c.Received.Bytes != uint64(tokens-skip)*1024*4 {
					t.Errorf("received %+v: want %d bytes over one of %v", c.Received,
						(tokens-skip)*1024*4, transports)
				}
				pe.ok(src)
			}
			if served != transports[0] {
				t.Errorf("served over %s in the end: want %s", served, transports[0])
			}
			if err := d.stop(); err != nil {
				t.Fatal(err)
			}
			if err := p.stop(); err != nil {
				t.Fatal(err)
			}
			equalHashes(t, p, d)
		})
	}
}

// equalHashes compares the trace of both sides: every page that left is the page that arrived.
func equalHashes(t testing.TB, p, d *running) {
	t.Helper()
	read := func(r *running) map[trace.PageHash]bool {
		b, err := os.ReadFile(r.cfg.Trace.BlockHashes)
		if err != nil {
			t.Fatal(err)
		}
		m := map[trace.PageHash]bool{}
		for l := range strings.Lines(string(b)) {
			var h trace.PageHash
			if err := json.Unmarshal([]byte(l), &h); err != nil {
				t.Fatal(err)
			}
			h.Side = ""
			m[h] = true
		}
		return m
	}
	a, b := read(p), read(d)
	if len(a) == 0 || len(a) != len(b) {
		t.Fatalf("%d pages hashed by the source, %d by the receiver", len(a), len(b))
	}
	for h := range b {
		if !a[h] {
			t.Errorf("page %+v differs, or is missing at the source", h)
		}
	}
}

func get(t testing.TB, r *running, path string) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.HTTPAddr()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

// viewOf is the state of a node's executor.
func viewOf(n *running) (v exec.View) {
	n.driver.View(func(ex *exec.Exec, now exec.Instant) { v = ex.View(now) })
	return v
}

// lanesOf are the lanes of a node that match.
func lanesOf(n *Node, match func(l transport.Lane) bool) (all []transport.Lane) {
	n.driver.Lanes(func(l transport.Lane) {
		if match(l) {
			all = append(all, l)
		}
	})
	return all
}

// hold takes the lock of a node's executor until release is called.
func hold(n *Node) (release func()) {
	held, done, out := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(out)
		n.driver.View(func(*exec.Exec, exec.Instant) {
			close(held)
			<-done
		})
	}()
	<-held
	return func() {
		close(done)
		<-out
	}
}
