package connector_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		childMain()
		return
	}
	leaktest.Main(m)
}

// recorder is a control layer that records its events.
type recorder struct {
	mu      sync.Mutex
	changed chan struct{}
	turn    sync.Mutex // held while empty batches hang
	events
	autoGone bool // fence at once
	onIntent func(*engines.Worker, engines.Intent)
}

// events holds the events so far.
type events struct {
	ups       []*engines.Worker
	gone      []error
	fenced    []func()
	intents   []engines.Intent
	expects   []engines.Expect
	progress  []engines.Progress
	copies    []connector.Copy
	cancels   map[uint64]string
	preempts  []uint64
	announced []transfer.LeaseID
	holds     []uint64
	awaits    []engines.Await
	declines  []engines.Decline
	refused   map[uint64]string // destination leases, with the reason
	yields    []uint64
	// sessions of Await that are over
	schedulersGone []uint64
	order          []string
}

// seen returns the events so far. The server may continue: slices only grow, the maps are copies.
func (r *recorder) seen() events {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.events
	e.cancels, e.refused = maps.Clone(e.cancels), maps.Clone(e.refused)
	return e
}

func newRecorder() *recorder {
	return &recorder{changed: make(chan struct{}), events: events{cancels: map[uint64]string{},
		refused: map[uint64]string{}}, autoGone: true}
}

// atIntent has f called for every intent from now on.
func (r *recorder) atIntent(f func(*engines.Worker, engines.Intent)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.onIntent = f
}

// fenceAtOnce sets whether the recorder fences a worker that is gone, or leaves that to the test.
func (r *recorder) fenceAtOnce(yes bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.autoGone = yes
}

func (r *recorder) note(what string, f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
	r.order = append(r.order, what)
	close(r.changed)
	r.changed = make(chan struct{})
}

// handle is Options.Events.
func (r *recorder) handle(batch []engines.Event) {
	for i := range batch {
		r.one(&batch[i])
	}
	if len(batch) == 0 {
		r.turn.Lock()
		defer r.turn.Unlock()
	}
}

func (r *recorder) one(ev *engines.Event) {
	var after func()
	switch ev.Kind {
	case engines.WorkerUp:
		r.note("up", func() { r.ups = append(r.ups, ev.Worker) })
	case engines.WorkerGone:
		r.note("gone", func() {
			r.gone = append(r.gone, ev.Err)
			r.fenced = append(r.fenced, ev.Fenced)
			if r.autoGone {
				after = ev.Fenced
			}
		})
	case engines.SourceOpened:
		r.note(fmt.Sprint("intent ", ev.Intent.Lease.ID), func() {
			r.intents = append(r.intents, *ev.Intent)
			if f := r.onIntent; f != nil {
				after = func() { f(ev.Worker, *ev.Intent) }
			}
		})
	case engines.LayersComplete:
		r.note(fmt.Sprint("progress ", ev.Progress[0].Lease.ID),
			func() { r.progress = append(r.progress, ev.Progress...) })
	case engines.DestOpened:
		r.note(fmt.Sprint("expect ", ev.Expect.Lease.ID),
			func() { r.expects = append(r.expects, *ev.Expect) })
	case engines.DestRefused:
		r.note(fmt.Sprint("refused ", ev.Expect.Lease.ID),
			func() { r.refused[ev.Expect.Lease.ID] = ev.Reason })
	case engines.Canceled:
		r.note(fmt.Sprint("cancel ", ev.Lease), func() { r.cancels[ev.Lease] = ev.Reason })
	case engines.Preempted:
		r.note(fmt.Sprint("preempt ", ev.Lease), func() { r.preempts = append(r.preempts, ev.Lease) })
	case engines.StepAnnounced:
		r.note(fmt.Sprint("announced ", len(ev.Leases)),
			func() { r.announced = append(r.announced, ev.Leases...) })
	case engines.Held:
		r.note(fmt.Sprint("hold ", ev.Lease), func() { r.holds = append(r.holds, ev.Lease) })
	case engines.Yielded:
		r.note(fmt.Sprint("yield ", ev.Lease), func() { r.yields = append(r.yields, ev.Lease) })
	case engines.SchedulerGone:
		r.note("scheduler gone", func() { r.schedulersGone = append(r.schedulersGone, ev.Session) })
	case engines.Asked:
		r.note("await", func() { r.awaits = append(r.awaits, *ev.Await) })
	case engines.Declined:
		r.note("decline", func() { r.declines = append(r.declines, *ev.Decline) })
	}
	if after != nil {
		after()
	}
}

// copy is Options.Copy.
func (r *recorder) copy(_ *engines.Worker, c connector.Copy) {
	r.note(fmt.Sprint("copy ", c.Lease.ID), func() { r.copies = append(r.copies, c) })
}

// hang keeps an empty batch from returning until release is called.
func (r *recorder) hang() (release func()) {
	r.turn.Lock()
	return r.turn.Unlock
}

// retired is why each worker that is gone went. A child's exit may be noted at any moment, so it is
// read under the lock.
func (r *recorder) retired() []error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.gone)
}

// until waits for a condition over the recorder, under its lock.
func (r *recorder) until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	deadline := time.NewTimer(20 * time.Second)
	defer deadline.Stop()
	for {
		r.mu.Lock()
		ok, ch := cond(), r.changed
		order := fmt.Sprint(r.order)
		r.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-ch:
		case <-deadline.C:
			t.Fatalf("%s: not within 20 s; events so far: %s", what, order)
		}
	}
}

// eventually waits for what no event announces.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for deadline := time.Now().Add(20 * time.Second); !cond(); <-look.C {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 20 s", what)
		}
	}
}

type rig struct {
	*connector.Server
	rec    *recorder
	socket string
	logs   *testutil.Log
	bad    *counter
}

type counter struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *counter) add(k string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[k]++
}

func (c *counter) get(k string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[k]
}

func start(t testing.TB, change func(*connector.Options)) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "kvc") // t.TempDir is too long for a socket path
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{rec: newRecorder(), socket: filepath.Join(dir, "s"), logs: &testutil.Log{},
		bad: &counter{n: map[string]int{}}}
	opt := connector.Options{Socket: r.socket, Boot: transfer.Boot{1, 2, 3}, Node: "node",
		Endpoint: func() string { return "127.0.0.1:1" },
		Events:   r.rec.handle, Copy: r.rec.copy, Log: slog.New(slog.NewTextHandler(r.logs, nil))}
	opt.Hooks.Malformed = r.bad.add
	opt.Hooks.Ignored = func(k string) { r.bad.add("ignored " + k) }
	if change != nil {
		change(&opt)
	}
	if r.Server, err = connector.New(opt); err != nil {
		t.Fatal(err)
	}
	if err := r.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("Serve: %v", err)
		}
		_ = os.RemoveAll(dir)
		if t.Failed() {
			t.Logf("log of the server:\n%s", r.logs)
		}
	})
	return r
}

var shape = connectortest.Shape{Layers: 4, NumBlocks: 64, TokensPerBlock: 16, TokenBytes: 64}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func region(t testing.TB, s connectortest.Shape) *mem.Region {
	t.Helper()
	r, err := s.Region()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	return r
}

func (r *rig) worker(t testing.TB, change func(*connectortest.Config)) *connectortest.Worker {
	t.Helper()
	w, err := connectortest.DialWorker(testContext(t), r.config(t, change))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() })
	return w
}

func (r *rig) config(t testing.TB, change func(*connectortest.Config)) connectortest.Config {
	cfg := connectortest.Config{Socket: r.socket, Engine: msg.Engine{Name: "vllm", Version: "1",
		ID: "e"}, Layout: shape.Layout(),
		Regions: []*mem.Region{region(t, shape)}}
	if change != nil {
		change(&cfg)
	}
	return cfg
}

func (r *rig) lastUp(t testing.TB) *engines.Worker {
	t.Helper()
	r.rec.mu.Lock()
	defer r.rec.mu.Unlock()
	if len(r.rec.ups) == 0 {
		t.Fatal("no worker is up")
	}
	return r.rec.ups[len(r.rec.ups)-1]
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func key() (x [16]byte, h [32]byte) {
	_, _ = rand.Read(x[:])
	_, _ = rand.Read(h[:])
	return x, h
}

func intent(tokens uint32, blocks ...uint32) msg.Intent {
	x, h := key()
	return msg.Intent{Xfer: x, Hash: h, Tokens: tokens, Fanout: 1, Blocks: [][]uint32{blocks},
		Priority: msg.PrioStream}
}

func asJSON(v any) string {
	b, _ := json.Marshal(v)
	return string(b)
}

// finals counts the layers that are complete; under the recorder's lock.
func finals(rec *recorder) int {
	n := 0
	for _, p := range rec.progress {
		if p.Final {
			n++
		}
	}
	return n
}
