package connector_test

import (
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
)

// hookedStrategy calls a function before each of its answers.
type hookedStrategy struct {
	parseblock.Strategy
	before func()
}

func (h hookedStrategy) Planes(p []layout.Plane, g *layout.Group, l *layout.Layer) ([]layout.Plane,
	error) {
	h.before()
	return h.Strategy.Planes(p, g, l)
}

// A registration that fails for want of descriptors closes each that it has taken once. A second
// close would hit a descriptor that another part of the process has opened meanwhile.
func TestNoDescriptorIsClosedTwice(t *testing.T) {
	var old unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	restore := func() { must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }
	t.Cleanup(restore)
	none := sync.OnceFunc(func() { // after the packet's descriptors have come
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: old.Max})
	})
	var all []parseblock.Strategy
	for _, name := range parseblock.Default().Names() {
		s, _ := parseblock.Default().Get(name)
		all = append(all, hookedStrategy{s, none})
	}
	hooked, err := parseblock.NewRegistry(all...)
	must(t, err)
	r := start(t, func(o *connector.Options) { o.Engines, o.Layouts = &attachments{}, hooked })
	memory, bell := workMemory(t), eventfd(t, unix.EFD_NONBLOCK)
	w, err := connectortest.NewWorker(r.config(t, func(c *connectortest.Config) {
		c.Tamper = withWork(memory, bell)
	}))
	must(t, err)
	defer w.Close()
	_, err = w.Connect(testContext(t))
	restore()
	refused(t, err, msg.CodeLimit, "fds.work", "too many open files")

	var mine []int // they get the numbers that became free
	for range 64 {
		mine = append(mine, eventfd(t, unix.EFD_NONBLOCK))
	}
	for range 3 {
		runtime.GC()
	}
	for _, fd := range mine {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			t.Errorf("descriptor %d was closed by the sidecar: %v", fd, err)
		}
	}
}
