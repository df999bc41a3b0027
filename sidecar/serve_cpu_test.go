package sidecar

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/testutil"
)

// What a whole `kvspray serve` may cost its host while it moves nothing, in cores.
const (
	idleShare   = 0.005 // engines are connected and compute nothing
	decodeShare = 0.03  // two engines decode, and every layer of every step is followed
)

// A share is that of all windows together, as in package connector's test: bursts count.
const (
	cpuWindows = 8
	cpuWindow  = 2 * time.Second
)

// decodePeriod is a step of a decoding engine.
const decodePeriod = 20 * time.Millisecond

// manyLayers has as many layers as a usual model.
var manyLayers = connectortest.Shape{Layers: 32, NumBlocks: 256, TokensPerBlock: 16, TokenBytes: 64}

// kvsprayBinary is the program that `make build` makes.
func kvsprayBinary(t *testing.T) string {
	t.Helper()
	path := os.Getenv("KVSPRAY_BINARY")
	if path == "" {
		path = filepath.Join("..", "bin", "kvspray")
	}
	if _, err := os.Stat(path); err != nil {
		testutil.Skip(t, "kvspray", "no "+path+": run make build")
	}
	return path
}

// TestMeasureServeCPU measures the process that people run, with everything in it, and not only its
// watcher: package connector has a test of that one.
func TestMeasureServeCPU(t *testing.T) {
	testutil.Measures(t)
	p := newProcess(t, "tcp", kvsprayBinary(t), "serve", "--config")
	engines := []*engine{newEngine(t, p.asRunning(), manyLayers), newEngine(t, p.asRunning(),
		manyLayers)}
	p.holds(t, "idle, with two engines connected", idleShare)

	var wg sync.WaitGroup
	stop := make(chan struct{})
	for _, e := range engines {
		pr := newPrompt(4000)
		lease, err := e.Intent(msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: pr.tokens, Fanout: 1,
			Blocks: [][]uint32{table(rand.New(rand.NewPCG(1, 1)), manyLayers.NumBlocks, blocksFor(pr.tokens,
				16))}, DeadlineMS: 120000})
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() { e.decode(lease, stop) })
	}
	p.holds(t, "two engines that decode, nothing to move", decodeShare)
	close(stop)
	wg.Wait()
}

// decode computes a token in every period, and every layer takes its share of it.
func (e *engine) decode(lease uint64, stop <-chan struct{}) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var at unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &at)
	next := at.Nano()
	for s := uint32(1); ; s++ {
		if err := e.Step(msg.Step{Step: uint64(s), Reqs: []msg.StepReq{{Lease: lease, End: s}}}); err !=
			nil {
			e.t.Errorf("step %d: %v", s, err)
			return
		}
		for l := range e.shape.Layers {
			next += int64(decodePeriod) / int64(e.shape.Layers)
			at = unix.NsecToTimespec(next)
			_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &at, nil)
			e.SignalLayer(l, uint64(s))
		}
		e.SignalStep(uint64(s))
		select {
		case <-stop:
			return
		default:
		}
	}
}

// cpu is what the process has used so far, in all its threads: utime and stime of /proc/PID/stat,
// in nanoseconds instead of ticks of 10 ms, two of which would be the whole allowance of a window.
func (p *process) cpu(t *testing.T) time.Duration {
	t.Helper()
	const sched = 2 // CPUCLOCK_SCHED: see clock_getcpuclockid(3)
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^p.cmd.Process.Pid<<3|sched), &ts); err != nil {
		t.Fatal(err)
	}
	return time.Duration(ts.Nano())
}

// holds fails the test unless the process stays under the limit over all windows.
func (p *process) holds(t *testing.T, what string, limit float64) {
	t.Helper()
	testutil.HoldsShare(t, what, limit, cpuWindows, cpuWindow,
		func() time.Duration { return p.cpu(t) }, nil)
}

// command is what a process runs: the configuration's path follows its arguments. None: this test
// binary, as a node.
func (p *process) command() (*exec.Cmd, error) {
	if len(p.argv) > 0 {
		return exec.Command(p.argv[0], append(p.argv[1:len(p.argv):len(p.argv)], p.path)...), nil
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childConfig+"="+p.path)
	return cmd, nil
}
