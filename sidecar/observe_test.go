package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/faulttest"
)

// value sums the series of a metric whose labels are as given, in pairs.
func value(t testing.TB, r *running, name string, labels ...string) (sum float64) {
	t.Helper()
	families, err := r.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			have := map[string]string{}
			for _, l := range m.GetLabel() {
				have[l.GetName()] = l.GetValue()
			}
			fits := true
			for i := 0; i < len(labels); i += 2 {
				fits = fits && have[labels[i]] == labels[i+1]
			}
			if fits {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// stuck is a backend whose fences fail while it is on.
type stuck struct {
	*faulttest.Backend
	on *atomic.Bool
}

func (s stuck) Fence(ctx context.Context, g *transport.Grant) error {
	if s.on.Load() {
		return errors.New("no acknowledgement")
	}
	return s.Backend.Fence(ctx, g)
}

// stuckNode is a node with such a backend.
func stuckNode(t testing.TB) (*running, *atomic.Bool) {
	t.Helper()
	on := new(atomic.Bool)
	cfg := testConfig(t, func(c *config.Config) {
		c.Transports.Order = []string{"tcp"}
		c.Transfer.Grace = config.Duration(200 * time.Millisecond)
	})
	return startConfig(t, cfg, func(n *Node) {
		for i, b := range n.backends {
			n.backends[i] = stuck{faulttest.Wrap(b, faulttest.New(1)), on}
		}
	}), on
}

// While a fence is not acknowledged, the gauge for alerts shows it, and the engine gets no
// completion. The cause of the fence is counted once, when the fence ends.
func TestStuckFence(t *testing.T) {
	for cause, end := range map[string]func(t *testing.T, d *running, de *engine, x underway){
		"cancel": func(t *testing.T, _ *running, de *engine, x underway) {
			if err := de.Cancel(x.dst, "aborted", false); err != nil {
				t.Fatal(err)
			}
		},
		"engine_gone": func(_ *testing.T, d *running, _ *engine, _ underway) {
			d.events.Handle([]engines.Event{{Kind: engines.WorkerGone, Worker: d.engine.Workers()[0],
				Err: errors.New("exited"), Fenced: func() {}}})
		},
		"drain": func(_ *testing.T, d *running, _ *engine, _ underway) {
			d.driver.Do(func(ex *exec.Exec, now exec.Instant) { ex.Abort(now, "the sidecar stops") })
		},
	} {
		t.Run(cause, func(t *testing.T) {
			p := start(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
			d, on := stuckNode(t)
			pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
			x := begin(t, p, pe, de, 3, 0, msg.PendingStep{Step: 1, End: tokens})
			bound(t, d)
			pe.SignalLayer(0, 1)
			until(t, func() bool { return landedBytes(d) > 0 })
			on.Store(true)
			if value(t, d, "kvspray_lease_quarantined") != 0 {
				t.Error("something is in quarantine before anything happened")
			}
			end(t, d, de, x)
			until(t, func() bool { return value(t, d, "kvspray_lease_quarantined") == 1 })
			if n := value(t, d, "kvspray_lease_fences_total"); n != 0 {
				t.Errorf("%v fences are counted before one was acknowledged", n)
			}
			open := 0
			d.driver.View(func(ex *exec.Exec, _ exec.Instant) { open, _ = ex.Open() })
			if open != 1 {
				t.Errorf("%d leases are open behind a fence that failed: want 1", open)
			}
			on.Store(false)
			until(t, func() bool { return value(t, d, "kvspray_lease_quarantined") == 0 })
			until(t, func() bool {
				return value(t, d, "kvspray_lease_fences_total", "cause", cause) == 1 &&
					value(t, d, "kvspray_lease_fences_total") == 1
			})
			if cause == "cancel" {
				if c := de.wait(x.dst); c.Status != engines.StatusCancelled {
					t.Errorf("status %d", c.Status)
				}
				// What landed is counted by how its transfer ended.
				until(t, func() bool {
					return value(t, d, "kvspray_transfer_payload_bytes_total", "side", "destination", "outcome",
						"cancelled", "transport", "tcp") > 0
				})
				if n := value(t, d, "kvspray_transfer_payload_bytes_total", "outcome", "ok"); n != 0 {
					t.Errorf("%v bytes are counted as committed", n)
				}
			}
		})
	}
}

// Each end of a transfer leaves one line with its times, which add up, in the file and in the log.
func TestTraceAddsUp(t *testing.T) {
	var logs [2]testutil.Log
	var nodes [2]*running
	for i := range nodes {
		cfg := testConfig(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
		nodes[i] = startLog(t, cfg, slog.New(slog.NewJSONHandler(&logs[i], nil)))
	}
	p, d := nodes[0], nodes[1]
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	x := begin(t, p, pe, de, 1, 0, msg.PendingStep{Step: 1, End: tokens})
	bound(t, d)
	for l := range testShape.Layers {
		pe.SignalLayer(l, 1)
	}
	pe.SignalStep(1)
	de.ok(x.dst)
	pe.ok(x.src)
	for i, side := range []string{"source", "destination"} {
		find := func(b []byte, ours func(m map[string]any) bool) (m map[string]any) {
			for line := range bytes.Lines(b) {
				m = nil
				if json.Unmarshal(line, &m) == nil && ours(m) {
					return m
				}
			}
			return nil
		}
		var file, line map[string]any
		until(t, func() bool {
			b, err := os.ReadFile(nodes[i].cfg.Trace.Transfers)
			if err != nil {
				t.Fatal(err)
			}
			file = find(b, func(m map[string]any) bool { return m["side"] == side })
			line = find([]byte(logs[i].String()), func(m map[string]any) bool {
				return m["msg"] ==
					"transfer" && m["side"] == side
			})
			return file != nil && line != nil
		})
		for what, m := range map[string]map[string]any{"file": file, "log": line} {
			us := func(key string) float64 {
				v, ok := m[key].(float64)
				if !ok || v < 0 {
					t.Errorf("%s, %s: %s is %v", side, what, key, m[key])
				}
				return v
			}
			// Each of the three is cut to a microsecond.
			sum, took := us("queue_us")+us("wire_us")+us("commit_us"), us("took_us")
			if took <= 0 || sum > took || sum < took-3 {
				t.Errorf("%s, %s: queue, wire and commit are %v us together, of %v: %v", side, what,
					sum, took, m)
			}
			if us("wire_us") == 0 || side == "destination" && us("commit_us") == 0 {
				t.Errorf("%s, %s: no time on the wire, or none for the fence: %v", side, what, m)
			}
			if flag := m["flag_us"]; side == "source" && (flag == nil || us("flag_us") <= 0 ||
				us("flag_us") > took) {
				t.Errorf("%s, %s: flag_us is %v of %v", side, what, flag, took)
			}
		}
		for _, key := range []string{"xfer", "hash", "source", "dest", "peer", "slot", "gen", "route",
			"bytes", "grants", "queue_us", "wire_us", "commit_us", "took_us"} {
			if file[key] != line[key] {
				t.Errorf("%s: %s is %v in the file and %v in the log", side, key, file[key], line[key])
			}
		}
	}
}

// The liveness probe fails while the executor makes no progress, and passes again afterwards. A
// test of the driver checks the time that the probe takes.
func TestHealthOfTheExecutor(t *testing.T) {
	r := start(t, nil)
	healthy := func() bool { code, _ := get(t, r, "/healthz"); return code == http.StatusOK }
	until(t, healthy)
	for why, wedge := range map[string]func() (undo func()){
		"lock": func() func() { return hold(r.Node) },
		"action": func() func() {
			in, out := make(chan struct{}), make(chan struct{})
			go r.driver.Handle([]engines.Event{{Kind: engines.Asked, Await: &engines.Await{
				Key: transfer.Key{Xfer: transfer.XferID{1}}, Peer: r.Endpoint(), TTL: time.Millisecond,
				Reply: func(engines.Admission) { close(in); <-out }}}})
			<-in
			return func() { close(out) }
		},
	} {
		undo := wedge()
		from := time.Now()
		code, body := get(t, r, "/healthz")
		took := time.Since(from)
		undo()
		if code != http.StatusServiceUnavailable || !strings.Contains(body, why) ||
			took < driver.WedgedAfter {
			t.Errorf("wedged %s: %d %s after %v", why, code, body, took)
		}
		until(t, healthy) // again
	}
}
