package connector_test

import (
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// attachments keeps what was attached.
type attachments struct {
	mu       sync.Mutex
	attached []connector.Engine
	detached int
	useless  bool
}

func (e *attachments) Attach(x connector.Engine) func() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.attached = append(e.attached, x)
	if e.useless {
		x.End()
		return nil
	}
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.detached++
		x.End()
	}
}

func (e *attachments) first() connector.Engine {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.attached[0]
}

func (e *attachments) counts() (attached, detached int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.attached), e.detached
}

// withWork adds a work memory and its doorbell to a registration.
func withWork(memory *mem.Region, bell int) func(*msg.Register, []int) []int {
	return func(m *msg.Register, fds []int) []int {
		m.FDs.Work, m.FDs.WorkBell = uint32(len(fds)), uint32(len(fds)+1)
		return append(fds, memory.FD(), bell)
	}
}

func workMemory(t *testing.T) *mem.Region {
	t.Helper()
	r, err := mem.NewAnonymous("work", board.WorkBytes)
	must(t, err)
	t.Cleanup(r.Release)
	b, _ := r.Bytes()
	_, err = board.InitWork(b)
	must(t, err)
	return r
}

func eventfd(t *testing.T, flags int) int {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|flags)
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// What an engine does in its GPU context is handed on with what belongs to it, and taken back once
// its leases are fenced.
func TestWorkIsAttached(t *testing.T) {
	for _, useless := range []bool{false, true} {
		e := &attachments{useless: useless}
		r := start(t, func(o *connector.Options) { o.Engines = e })
		memory, bell := workMemory(t), eventfd(t, unix.EFD_NONBLOCK)
		w := r.worker(t, func(c *connectortest.Config) { c.Tamper = withWork(memory, bell) })
		if f := w.Welcome().Features; !slices.Contains(f, msg.FeatureWork) {
			t.Errorf("features %q", f)
		}
		if n, _ := e.counts(); n != 1 {
			t.Fatalf("%d engines attached", n)
		}
		x := e.first()
		if !useless {
			if len(x.Regions) != len(r.lastUp(t).Regions) || x.Regions[0] != r.lastUp(t).Regions[0] ||
				x.Exited() {
				t.Errorf("%d regions, exited %v", len(x.Regions), x.Exited())
			}
			x.Work.Post(2, 1, board.WorkRequest{Op: board.WorkPack})
			x.Ring()
			var n [8]byte
			if _, err := unix.Read(bell, n[:]); err != nil || n[0] != 1 {
				t.Errorf("the doorbell has %v, %v", n, err)
			}
			b, _ := memory.Bytes()
			mine, err := board.ParseWork(b)
			must(t, err)
			if _, _, ok := mine.Take(2); !ok {
				t.Error("what was posted is not there")
			}
		}
		_, err := w.Intent(intent(16, 1))
		must(t, err)
		r.rec.until(t, "the intent", func() bool { return len(r.rec.intents) == 1 })
		r.rec.fenceAtOnce(false)
		must(t, w.Close())
		next := r.worker(t, func(c *connectortest.Config) {
			c.Tamper = withWork(workMemory(t),
				eventfd(t, unix.EFD_NONBLOCK))
		})
		if n, gone := e.counts(); n != 2 || gone != 0 {
			t.Errorf("%d engines attached, %d detached before their leases are fenced", n, gone)
		}
		must(t, next.Close())
		must(t, r.Server.Close())
		if _, gone := e.counts(); gone != 0 {
			t.Errorf("%d engines detached before their leases are fenced", gone)
		}
		r.rec.mu.Lock()
		fenced := slices.Clone(r.rec.fenced)
		r.rec.mu.Unlock()
		for _, f := range fenced {
			f()
		}
		if _, gone := e.counts(); !useless && gone != 2 {
			t.Errorf("%d of 2 engines detached", gone)
		}
		x.Ring() // after End: nothing
	}
}

func TestWorkRefused(t *testing.T) {
	e := &attachments{}
	r := start(t, func(o *connector.Options) { o.Engines = e })
	good, bell := workMemory(t), eventfd(t, unix.EFD_NONBLOCK)
	bad := workMemory(t)
	b, _ := bad.Bytes()
	b[0]++
	short, err := mem.NewAnonymous("short", 4096)
	must(t, err)
	t.Cleanup(short.Release)
	for name, c := range map[string]struct {
		tamper func(*msg.Register, []int) []int
		code   string
		field  string
		want   string
	}{
		"magic":     {withWork(bad, bell), msg.CodeBoard, "fds.work", "magic"},
		"short":     {withWork(short, bell), msg.CodeBoard, "fds.work", "want 790528"},
		"blocking":  {withWork(good, eventfd(t, 0)), msg.CodeBoard, "fds.work_bell", "eventfd blocks"},
		"no memory": {withWork(good, good.FD()), msg.CodeBoard, "fds.work_bell", "want an eventfd"},
		"twice": {func(m *msg.Register, fds []int) []int {
			m.FDs.Work, m.FDs.WorkBell = m.FDs.Rings, m.FDs.Bell
			return fds
		}, msg.CodeProtocol, "fds.work", "named twice"},
		"absent": {func(m *msg.Register, fds []int) []int {
			m.FDs.Work, m.FDs.WorkBell = 31, 32
			return fds
		}, msg.CodeProtocol, "fds.work", "index 31"},
	} {
		t.Run(name, func(t *testing.T) {
			w, err := connectortest.NewWorker(r.config(t,
				func(cfg *connectortest.Config) { cfg.Tamper = c.tamper }))
			must(t, err)
			defer w.Close()
			_, err = w.Connect(testContext(t))
			refused(t, err, c.code, c.field, c.want)
		})
	}
	if n, _ := e.counts(); n != 0 {
		t.Errorf("%d engines attached", n)
	}
}

// A sidecar that has no use for it says nothing of it, and takes nothing.
func TestWorkUnused(t *testing.T) {
	r := start(t, nil)
	memory, bell := workMemory(t), eventfd(t, unix.EFD_NONBLOCK)
	w := r.worker(t, func(c *connectortest.Config) { c.Tamper = withWork(memory, bell) })
	if f := w.Welcome().Features; slices.Contains(f, msg.FeatureWork) {
		t.Errorf("features %q", f)
	}
	must(t, w.Close())
}
