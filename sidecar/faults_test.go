package sidecar

import (
	"context"
	mrand "math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transport"
)

const tokens = 2048

// underway is one prompt under way between two engines.
type underway struct {
	prompt
	src, dst uint64
	pt, dt   []uint32
}

func begin(t testing.TB, p *running, pe, de *engine, seed uint64, ready uint32,
	steps ...msg.PendingStep) underway {
	t.Helper()
	rng := mrand.New(mrand.NewPCG(seed, 3))
	x := underway{prompt: newPrompt(tokens)}
	n := blocksFor(tokens, 16)
	x.pt, x.dt = table(rng, 256, n), table(rng, 256, n)
	var err error
	if x.src, err = pe.Intent(msg.Intent{Xfer: x.xfer, Hash: x.hash, Tokens: tokens, Fanout: 1,
		Blocks: [][]uint32{x.pt}, Ready: ready, Steps: steps,
		DeadlineMS: deadlineMS}); err != nil {
		t.Fatal(err)
	}
	if x.dst, err = de.Expect(msg.Expect{Xfer: x.xfer, Hash: x.hash, Tokens: tokens,
		Peer: p.Endpoint(), Skip: []uint32{0}, Blocks: [][]uint32{x.dt},
		DeadlineMS: deadlineMS, MatchTimeoutMS: matchMS}); err != nil {
		t.Fatal(err)
	}
	return x
}

func each(t *testing.T, f func(t *testing.T, p, d *running)) {
	for _, tr := range []string{"tcp", "shm"} {
		t.Run(tr, func(t *testing.T) {
			p, d := pairOf(t, tr)
			f(t, p, d)
		})
	}
}

// bound waits until the receiver's grant is bound.
func bound(t testing.TB, d *running) {
	t.Helper()
	until(t, func() bool {
		v := viewOf(d)
		return len(v.Dests) > 0 && v.Dests[0].State == "landing"
	})
}

func landedBytes(d *running) (n uint64) {
	for i := range d.observer.totals.bytes {
		n += d.observer.totals.bytes[i].Load()
	}
	return n
}

// Layers leave one by one as their flags come, in two steps.
func TestStreamsWithFlags(t *testing.T) {
	each(t, func(t *testing.T, p, d *running) {
		pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
		pe.random()
		x := begin(t, p, pe, de, 1, 0, msg.PendingStep{Step: 1, End: 1024},
			msg.PendingStep{Step: 2, End: 2048})
		bound(t, d)
		for l := range testShape.Layers {
			pe.SignalLayer(l, 1)
			until(t, func() bool { return landedBytes(d) == uint64(l+1)*1024*1024 })
		}
		pe.SignalStep(1)
		for l := range testShape.Layers {
			pe.SignalLayer(l, 2)
		}
		pe.SignalStep(2)
		de.ok(x.dst)
		same(t, pe, de, x.pt, x.dt, tokens, 0)
		pe.ok(x.src)
	})
}

// The prefill takes its blocks back in mid transfer and presents others later: the receiver gets
// the second attempt only.
func TestPreempt(t *testing.T) {
	each(t, func(t *testing.T, p, d *running) {
		pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
		pe.random()
		x := begin(t, p, pe, de, 2, 0, msg.PendingStep{Step: 1, End: 1024},
			msg.PendingStep{Step: 2, End: 2048})
		bound(t, d)
		pe.SignalLayer(0, 1)
		pe.SignalLayer(1, 1)
		until(t, func() bool { return landedBytes(d) > 0 })
		pe.BumpEpoch()
		if err := pe.Preempt(x.src); err != nil {
			t.Fatal(err)
		}
		pe.random()
		again := table(mrand.New(mrand.NewPCG(9, 9)), 256, len(x.pt))
		if err := pe.Step(msg.Step{Step: 5, Reqs: []msg.StepReq{{Lease: x.src, End: tokens,
			Blocks: [][]uint32{again}, Attempt: 1}}}); err != nil {
			t.Fatal(err)
		}
		for l := range testShape.Layers {
			pe.SignalLayer(l, 5)
		}
		pe.SignalStep(5)
		de.ok(x.dst)
		same(t, pe, de, again, x.dt, tokens, 0)
		pe.ok(x.src)
	})
}

func TestCancel(t *testing.T) {
	each(t, func(t *testing.T, p, d *running) {
		pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
		pe.random()
		for i, side := range []string{"source", "destination"} {
			step := uint64(i + 1)
			x := begin(t, p, pe, de, 3, 0, msg.PendingStep{Step: step, End: 2048})
			bound(t, d)
			pe.SignalLayer(0, step)
			if side == "source" {
				if err := pe.Cancel(x.src, "aborted", true); err != nil {
					t.Fatal(err)
				}
			} else if err := de.Cancel(x.dst, "aborted", false); err != nil {
				t.Fatal(err)
			}
			dc, sc := de.wait(x.dst), pe.wait(x.src)
			if side == "source" && (sc.Status != engines.StatusCancelled ||
				dc.Status != engines.StatusFailed) ||
				side == "destination" && (dc.Status != engines.StatusCancelled ||
					sc.Status != engines.StatusCancelled) {
				t.Errorf("cancelled by the %s: source %d, destination %d", side, sc.Status, dc.Status)
			}
			// The blocks are the engine's again: nothing of that transfer may touch them.
			b, _ := de.region.Bytes()
			clear(b)
			for l := range testShape.Layers {
				pe.SignalLayer(l, step)
			}
			pe.SignalStep(step)
			y := begin(t, p, pe, de, 4, tokens)
			de.ok(y.dst)
			pe.ok(y.src)
			same(t, pe, de, y.pt, y.dt, tokens, 0)
			owned := map[uint32]bool{}
			for _, k := range y.dt {
				owned[k] = true
			}
			for k := range testShape.NumBlocks {
				if !owned[k] && strings.Trim(string(de.shape.Page(de.region, 0, k)), "\x00") != "" {
					t.Fatalf("block %d was written after its lease was cancelled", k)
				}
			}
		}
	})
}

// Lanes die under transfers, again and again, and never before something has landed since the last
// one: each transfer ends well all the same.
func TestKillLanes(t *testing.T) {
	each(t, func(t *testing.T, p, d *running) {
		pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
		stop := make(chan struct{})
		done := make(chan struct{})
		const enough = 10 // lanes
		var killed atomic.Int32
		go func() {
			defer close(done)
			tick := time.NewTicker(30 * time.Millisecond)
			defer tick.Stop()
			for before := landedBytes(d); ; {
				select {
				case <-stop:
					return
				case <-tick.C:
				}
				now := landedBytes(d)
				if now == before {
					continue
				}
				before = now
				n := []*running{p, d}[killed.Load()%2]
				if all := lanesOf(n.Node, func(l transport.Lane) bool { return l.Peer() != n.boot }); len(
					all) > 0 {
					n.driver.CloseLane(all[0].ID())
					killed.Add(1)
				}
			}
		}()
		ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
		defer cancel()
		for i := uint64(0); killed.Load() < enough && ctx.Err() == nil; i++ {
			pe.random()
			x := begin(t, p, pe, de, i, tokens)
			de.ok(x.dst)
			same(t, pe, de, x.pt, x.dt, tokens, 0)
			pe.ok(x.src)
		}
		close(stop)
		<-done
		if n := killed.Load(); n < enough {
			t.Errorf("%d lanes died: want %d", n, enough)
		}
	})
}

// One sidecar serves both sides.
func TestSelf(t *testing.T) {
	for _, tr := range []string{"tcp", "shm"} {
		t.Run(tr, func(t *testing.T) {
			p := start(t, func(c *config.Config) { c.Transports.Order = []string{tr} })
			pe, de := newEngine(t, p, testShape), newEngine(t, p, testShape)
			for i := range 5 {
				pe.random()
				x := begin(t, p, pe, de, uint64(i), tokens)
				de.ok(x.dst)
				same(t, pe, de, x.pt, x.dt, tokens, 0)
				pe.ok(x.src)
			}
		})
	}
}

// If a peer has no matching prompt or does not listen, the engine gets its blocks back before the
// deadline, after the fence, and recomputes.
func TestAbsentPeer(t *testing.T) {
	p, d := pairOf(t, "tcp")
	de := newEngine(t, d, testShape)
	pr := newPrompt(64)
	dt := []uint32{0, 1, 2, 3}
	// Its deadline is later than the end of the wait: the match timeout ends the lease.
	for _, peer := range []string{p.Endpoint(), "127.0.0.1:1"} {
		lease, err := de.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: 64, Peer: peer,
			Skip: []uint32{0}, Blocks: [][]uint32{dt},
			DeadlineMS: 10 * deadlineMS, MatchTimeoutMS: 300})
		if err != nil {
			t.Fatal(err)
		}
		if c := de.wait(lease); c.Status != engines.StatusExpired {
			t.Errorf("peer %s: status %d (%s)", peer, c.Status, c.Received.Reason)
		}
	}
}

// The HTTP address of a sidecar in the place of its peer address is named, and does not cost a
// request all its patience.
func TestHTTPIsNoPeer(t *testing.T) {
	p, d := pairOf(t, "tcp")
	de := newEngine(t, d, testShape)
	pr := newPrompt(64)
	lease, err := de.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: 64, Peer: p.HTTPAddr(),
		Skip: []uint32{0}, Blocks: [][]uint32{{0, 1, 2, 3}},
		DeadlineMS: 60000, MatchTimeoutMS: 60000})
	if err != nil {
		t.Fatal(err)
	}
	if c := de.wait(lease); c.Status != engines.StatusExpired || !strings.Contains(c.Received.Reason,
		"not its http.listen") {
		t.Errorf("status %d: %s", c.Status, c.Received.Reason)
	}
}

func TestHTTP(t *testing.T) {
	p, d := pairOf(t, "tcp")
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	x := begin(t, p, pe, de, 1, tokens)
	de.ok(x.dst)
	pe.ok(x.src)
	for path, want := range map[string]string{"/": "page.js", "/page/page.js": "/v1/live",
		"/page/common.js": "export", "/page/page.css": "light-dark", "/healthz": "ok", "/readyz": "ready",
		"/v1/node": p.Endpoint(), "/debug/state": "slices_in_flight", "/v1/layouts": `"layout"`,
		"/metrics": `kvspray_transfers_total{outcome="ok",side="source"`} {
		// Engines get the completion before the counters change.
		until(t, func() bool {
			code, body := get(t, p, path)
			return code == 200 && strings.Contains(body, want)
		})
	}
	if _, body := get(t, p, "/metrics"); !strings.Contains(body,
		`kvspray_rail_pairs{rail="lo",state="healthy",transport="tcp"}`) ||
		!strings.Contains(body, `kvspray_rail_learned_bytes_per_second{rail="lo",transport="tcp"}`) {
		t.Error("/metrics lacks the state of the rails")
	}
	if _, body := get(t, p, "/debug/state"); !strings.Contains(body, `"gpu_links": []`) ||
		!strings.Contains(body, `"gpu_executors": []`) {
		t.Error("/debug/state lacks the links to GPUs, or what uses them")
	}
	// Routers leave a node that leaves. It serves its engine as before.
	for method, leaving := range map[string]string{"POST": "true", "DELETE": "false"} {
		if code, body := ask(t, d, method, "/v1/leave"); code != 200 || !strings.Contains(body,
			`"leaving": `+leaving) || !strings.Contains(body, `"ready": true`) {
			t.Errorf("%s /v1/leave: %d %s", method, code, body)
		}
		_, body := get(t, d, "/v1/node")
		if !strings.Contains(body, `"leaving": `+leaving) {
			t.Errorf("/v1/node after %s: %s", method, body)
		}
	}
	if code, body := ask(t, d, "POST", "/v1/leave"); code != 200 {
		t.Errorf("%d %s", code, body)
	}
	x = begin(t, p, pe, de, 2, tokens)
	de.ok(x.dst)
	pe.ok(x.src)
	p.draining.Store(true)
	if code, body := get(t, p, "/readyz"); code != 503 || !strings.Contains(body, "draining") {
		t.Errorf("GET /readyz while draining: %d %s", code, body)
	}
}

// With a cluster key peers prove themselves; without it, or with another one, they do not meet.
func TestClusterKey(t *testing.T) {
	dir := testutil.ShortDir(t)
	key := func(name string) func(*config.Config) {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err != nil {
			c, err := keys.NewCluster()
			if err != nil {
				t.Fatal(err)
			}
			if err := keys.WriteCluster(path, c); err != nil {
				t.Fatal(err)
			}
		}
		return func(c *config.Config) {
			c.Peer.ClusterKeyFile, c.Transports.Order = path,
				[]string{"tcp"}
		}
	}
	none := func(c *config.Config) { c.Transports.Order = []string{"tcp"} }
	p, d := start(t, key("a")), start(t, key("a"))
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	pe.random()
	x := begin(t, p, pe, de, 1, tokens)
	de.ok(x.dst)
	same(t, pe, de, x.pt, x.dt, tokens, 0)
	pe.ok(x.src)
	open := start(t, none)
	for name, c := range map[string]struct {
		mine func(*config.Config)
		at   *running
	}{"another key": {key("b"), p}, "only the other has a key": {none, p},
		"only this one has a key": {key("b"), open}} {
		t.Run(name, func(t *testing.T) {
			se := newEngine(t, start(t, c.mine), testShape)
			began := time.Now()
			lease, err := se.Expect(msg.Expect{Xfer: x.xfer, Hash: x.hash, Tokens: tokens,
				Peer: c.at.Endpoint(), Skip: []uint32{0}, Blocks: [][]uint32{x.dt},
				DeadlineMS: 60000, MatchTimeoutMS: 60000})
			if err != nil {
				t.Fatal(err)
			}
			// The engine gets an answer soon, with the reason, and can compute.
			if got := se.wait(lease); got.Status != engines.StatusExpired ||
				!strings.Contains(got.Received.Reason, "do not share a cluster key") {
				t.Errorf("status %d, %q", got.Status, got.Received.Reason)
			}
			t.Logf("answered after %v", time.Since(began))
		})
	}
}

// A sidecar that is stopped in mid transfer ends the transfer first, and both engines get its
// success: the last completion is in the ring, and the last message at the peer, before the process
// is gone.
func TestDrainInMidTransfer(t *testing.T) {
	for _, tr := range []string{"tcp", "shm"} {
		t.Run(tr, func(t *testing.T) {
			order := func(c *config.Config) {
				c.Transports.Order, c.Drain.Timeout = []string{tr},
					config.Duration(patience)
			}
			stays := start(t, order)
			for i := range 6 {
				leaves := start(t, order)
				p, d := stays, leaves
				if i%2 == 1 {
					p, d = leaves, stays
				}
				pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
				pe.random()
				x := begin(t, p, pe, de, uint64(i), 0, msg.PendingStep{Step: 1, End: tokens})
				bound(t, d)
				before := landedBytes(d)
				pe.SignalLayer(0, 1)
				until(t, func() bool { return landedBytes(d) > before })
				ended := make(chan error, 1)
				go func() { ended <- leaves.stop() }()
				until(t, func() bool { return leaves.draining.Load() })
				for l := range testShape.Layers {
					pe.SignalLayer(l, 1)
				}
				pe.SignalStep(1)
				de.ok(x.dst)
				same(t, pe, de, x.pt, x.dt, tokens, 0)
				pe.ok(x.src)
				if err := <-ended; err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}
