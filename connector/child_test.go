package connector_test

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/mem"
)

const childEnv = "KVSPRAY_TEST_CHILD_SOCKET"

// childMain is an engine worker of its own process: it registers, opens a lease, says so and waits to be killed.
func childMain() {
	fail := func(err error) {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	shape := childShape
	r, err := shape.Region()
	if err != nil {
		fail(err)
	}
	dialled, err := connectortest.DialWorker(context.Background(), connectortest.Config{Socket: os.Getenv(childEnv), Layout: shape.Layout(),
		Engine: msg.Engine{Name: "child"}, Regions: []*mem.Region{r}})
	if err != nil {
		fail(err)
	}
	w := childWorker{Worker: dialled}
	if w.lease, err = w.Intent(intent(16*followSteps, 1)); err != nil {
		fail(err)
	}
	fmt.Println("ready")
	var line string
	_, _ = fmt.Scanln(&line)
	if line == "steps" {
		w.stepEvery(20*time.Millisecond, followSteps)
	}
	if line == "drop" {
		w.Disconnect()
		fmt.Println("dropped")
		_, _ = fmt.Scanln(&line)
	}
	os.Exit(0)
}

// childShape has as many layers as a usual model.
var childShape = connectortest.Shape{Layers: 32, NumBlocks: 256, TokensPerBlock: 16, TokenBytes: 64}

const followSteps = 100

type childWorker struct {
	*connectortest.Worker
	lease uint64
}

// stepEvery runs steps of one prompt at the pace of an engine: every layer takes its share of the period. "done" follows.
func (w *childWorker) stepEvery(period time.Duration, steps int) {
	runtime.LockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0)
	var at unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &at)
	next := at.Nano()
	table := make([]uint32, 0, steps)
	for s := 1; s <= steps; s++ {
		table = append(table, uint32(s))
		if err := w.Step(msg.Step{Step: uint64(s), Reqs: []msg.StepReq{{Lease: w.lease, End: uint32(16 * s), Blocks: [][]uint32{table}}}}); err != nil {
			fmt.Println("error:", err)
			return
		}
		for l := range childShape.Layers {
			next += int64(period) / int64(childShape.Layers)
			at = unix.NsecToTimespec(next)
			_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &at, nil)
			w.SignalLayer(l, uint64(s))
		}
		w.SignalStep(uint64(s))
	}
	fmt.Println("done")
	_, _ = fmt.Scanln(new(string))
}
