package sidecar

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
)

// childConfig names the configuration of a node that this test binary runs as a process of its own,
// which a test can kill.
const childConfig = "KVSPRAY_TEST_NODE"

func TestMain(m *testing.M) {
	if path := os.Getenv(childConfig); path != "" {
		if err := child(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	leaktest.Main(m)
}

func child(path string) error {
	cfg, err := config.Load(path)
	if err != nil {
		return err
	}
	n, err := New(Options{Config: cfg, Version: "test", Log: slog.New(slog.NewTextHandler(os.Stderr,
		&slog.HandlerOptions{Level: slog.LevelDebug}))})
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return n.Run(ctx)
}

// process is a node of its own.
type process struct {
	t        testing.TB
	path     string
	socket   string
	endpoint string
	http     string
	argv     []string // see command
	cmd      *exec.Cmd
}

// freePorts are addresses that nothing listens on, and that no other process takes before the child
// binds, or while the child is dead: they are this process's alone.
func freePorts(t testing.TB) (a, b string) {
	t.Helper()
	at := func() net.Listener {
		l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp",
			net.JoinHostPort(testutil.Loopback(), "0"))
		ok(t, err)
		return l
	}
	x, y := at(), at()
	ok(t, errors.Join(x.Close(), y.Close()))
	return x.Addr().String(), y.Addr().String()
}

func newProcess(t testing.TB, transport string, argv ...string) *process {
	t.Helper()
	dir := testutil.ShortDir(t)
	p := &process{t: t, argv: argv, path: filepath.Join(dir, "config.yaml"),
		socket: filepath.Join(dir, "s.sock")}
	p.endpoint, p.http = freePorts(t)
	b, err := json.Marshal(map[string]any{"node": filepath.Base(dir),
		"segments":   map[string]any{"root": dir},
		"engine":     map[string]any{"socket": p.socket},
		"peer":       map[string]any{"listen": p.endpoint, "gossip": map[string]any{"listen": "off"}},
		"http":       map[string]any{"listen": p.http},
		"transports": map[string]any{"order": []string{transport}}}) // JSON is YAML
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p.path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.kill()
		if log, err := os.ReadFile(p.path + ".log"); err == nil && t.Failed() {
			t.Logf("the child's log:\n%s", log[max(0, len(log)-4096):])
		}
	})
	p.start()
	return p
}

func (p *process) start() {
	p.t.Helper()
	var err error
	if p.cmd, err = p.command(); err != nil {
		p.t.Fatal(err)
	}
	log, err := os.OpenFile(p.path+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer func() { _ = log.Close() }() // the child has its own
	p.cmd.Stderr = log
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	up := false
	defer func() { // also where until ends this goroutine
		if !up {
			b, _ := os.ReadFile(p.path + ".log")
			p.t.Logf("the log of a sidecar that did not start: %s", b[max(0, len(b)-2000):])
		}
	}()
	until(p.t, func() bool {
		c, err := net.DialTimeout("tcp", p.http, time.Second)
		if err != nil {
			return false
		}
		_ = c.Close()
		up = true
		return true
	})
}

func (p *process) kill() {
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Kill() // it may have ended by itself
	_ = p.cmd.Wait()
	p.cmd = nil
}

func (p *process) signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
}

// asRunning is what helpers for nodes need of a process.
func (p *process) asRunning() *running {
	cfg := config.Default()
	cfg.Engine.Socket = p.socket
	n := &Node{life: newLife()}
	n.setEndpoint(p.endpoint)
	return &running{Node: n, cfg: cfg}
}

// kill -9 of the prefill's sidecar in mid transfer: its shim presents the lease to the next one,
// and the decode's blocks are fenced, granted again and filled.
func TestSourceSidecarKilled(t *testing.T) {
	for _, tr := range []string{"tcp", "shm"} {
		t.Run(tr, func(t *testing.T) {
			p := newProcess(t, tr)
			d := start(t, func(c *config.Config) { c.Transports.Order = []string{tr} })
			pe, de := newEngine(t, p.asRunning(), testShape), newEngine(t, d, testShape)
			pe.random()
			x := begin(t, p.asRunning(), pe, de, 1, 0, msg.PendingStep{Step: 1, End: tokens})
			bound(t, d)
			pe.SignalLayer(0, 1)
			until(t, func() bool { return landedBytes(d) > 0 })
			p.kill()
			p.start()
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			if _, err := pe.Connect(ctx); err != nil {
				t.Fatal(err)
			}
			if err := pe.IntentAs(x.src, msg.Intent{Xfer: x.xfer, Hash: x.hash, Tokens: tokens, Fanout: 1,
				Blocks: [][]uint32{x.pt}, Ready: tokens,
				DeadlineMS: deadlineMS}); err != nil {
				t.Fatal(err)
			}
			de.ok(x.dst)
			same(t, pe, de, x.pt, x.dt, tokens, 0)
			pe.ok(x.src)
			// One for the grant that the dead sidecar had, and one for the commit.
			until(t, func() bool {
				return value(t, d, "kvspray_lease_fences_total", "cause", "commit") == 1
			})
			if n := value(t, d, "kvspray_lease_fences_total", "cause", "peer_lost"); n != 1 {
				t.Errorf("%v fences because of a lost peer: want 1", n)
			}
		})
	}
}

// kill -9 of the decode's sidecar in mid transfer: the prefill's blocks are kept, the shim presents
// its lease to the next sidecar, and all of it comes. A lease that no shim presents again ends with
// the match timeout.
func TestDestinationSidecarKilled(t *testing.T) {
	for _, tr := range []string{"tcp", "shm"} {
		t.Run(tr, func(t *testing.T) {
			t.Parallel() // mostly waits
			d := newProcess(t, tr)
			p := start(t, func(c *config.Config) {
				// in which the next sidecar has to be there
				c.Transports.Order, c.Transfer.MatchTimeout = []string{tr}, config.Duration(8*time.Second)
			})
			pe, de := newEngine(t, p, testShape), newEngine(t, d.asRunning(), testShape)
			pe.random()
			x := begin(t, p, pe, de, 1, 0, msg.PendingStep{Step: 1, End: tokens})
			var rest []uint32 // blocks of the receiver that the first prompt does not have
			for k := range testShape.NumBlocks {
				if !slices.Contains(x.dt, k) {
					rest = append(rest, k)
				}
			}
			pr := newPrompt(tokens)
			lost, err := pe.Intent(msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens, Fanout: 1,
				Blocks: [][]uint32{x.pt},
				Steps:  []msg.PendingStep{{Step: 1, End: tokens}}, DeadlineMS: deadlineMS})
			_, err2 := de.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens, Peer: p.Endpoint(),
				Skip: []uint32{0}, Blocks: [][]uint32{rest},
				DeadlineMS: deadlineMS, MatchTimeoutMS: matchMS})
			if err != nil || err2 != nil {
				t.Fatal(err, err2)
			}
			until(t, func() bool {
				v := viewOf(p)
				return len(v.Sources) == 2 && v.Sources[0].Serving == 1 && v.Sources[1].Serving == 1
			})
			pe.SignalLayer(0, 1)
			d.kill()
			d.start()
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			if _, err := de.Connect(ctx); err != nil {
				t.Fatal(err)
			}
			again := msg.Expect{Xfer: x.xfer, Hash: x.hash, Tokens: tokens, Peer: p.Endpoint(),
				Skip: []uint32{0}, Blocks: [][]uint32{x.dt},
				DeadlineMS: deadlineMS, MatchTimeoutMS: matchMS}
			if err := de.Push(board.RecExpect, x.dst, again.Append(nil), false); err != nil {
				t.Fatal(err)
			}
			for l := range testShape.Layers {
				pe.SignalLayer(l, 1)
			}
			pe.SignalStep(1)
			de.ok(x.dst)
			same(t, pe, de, x.pt, x.dt, tokens, 0)
			pe.ok(x.src)
			if c := pe.wait(lost); c.Status != engines.StatusFailed || !strings.Contains(c.Sent.Reason,
				"presented the lease again") {
				t.Errorf("the lease of a receiver that did not come again: status %d, %+v", c.Status, c.Sent)
			}
			y := begin(t, p, pe, de, 2, tokens)
			de.ok(y.dst)
			same(t, pe, de, y.pt, y.dt, tokens, 0)
			pe.ok(y.src)
		})
	}
}

// A decode's sidecar that is stopped holds a source no longer than the deadline, and serves again
// when it goes on.
func TestDestinationSidecarStopped(t *testing.T) {
	d := newProcess(t, "tcp")
	p := start(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
	pe, de := newEngine(t, p, testShape), newEngine(t, d.asRunning(), testShape)
	pe.random()
	w := begin(t, p, pe, de, 3, tokens) // they meet
	de.ok(w.dst)
	pe.ok(w.src)
	// The receiver is stopped once the source serves it. On a busy machine the source's deadline
	// may pass before.
	const tries = 5
	pt := table(newRand(1), 256, blocksFor(tokens, 16))
	for n := 1; ; n++ {
		pr, step := newPrompt(tokens), uint64(n)
		src, err := pe.Intent(msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens, Fanout: 1,
			Blocks: [][]uint32{pt}, Ready: 0,
			Steps: []msg.PendingStep{{Step: step, End: tokens}}, DeadlineMS: 1500})
		if err != nil {
			t.Fatal(err)
		}
		dst, err := de.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: tokens, Peer: p.Endpoint(),
			Skip: []uint32{0}, Blocks: [][]uint32{pt},
			DeadlineMS: deadlineMS, MatchTimeoutMS: 1500})
		if err != nil {
			t.Fatal(err)
		}
		seen, serves := false, false
		until(t, func() bool {
			v := viewOf(p)
			seen = seen || len(v.Sources) > 0
			serves = len(v.Sources) > 0 && v.Sources[0].Serving == 1
			return serves || seen && len(v.Sources) == 0
		})
		if serves {
			d.signal(syscall.SIGSTOP)
			for l := range testShape.Layers {
				pe.SignalLayer(l, step)
			}
			pe.SignalStep(step)
		}
		sent := pe.wait(src)
		if serves {
			d.signal(syscall.SIGCONT)
		}
		if sent.Status != engines.StatusExpired && serves {
			t.Errorf("the source of a stopped receiver: status %d, %+v", sent.Status, sent.Sent)
		}
		if c := de.wait(dst); c.Status == engines.StatusOK {
			same(t, pe, de, pt, pt, tokens, 0)
		}
		if serves {
			break
		}
		if n == tries {
			t.Fatalf("in none of %d tries the source served before its deadline", tries)
		}
	}
	y := begin(t, p, pe, de, 2, tokens)
	de.ok(y.dst)
	same(t, pe, de, y.pt, y.dt, tokens, 0)
	pe.ok(y.src)
}
