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
	"github.com/kvspray/kvspray/internal/sys/mem"
)

const childEnv = "KVSPRAY_TEST_CHILD_SOCKET"

// childMain is an engine worker in its own process: it registers, opens a lease, reports that and
// waits to be killed.
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
	dialed, err := connectortest.DialWorker(context.Background(),
		connectortest.Config{Socket: os.Getenv(childEnv), Layout: shape.Layout(),
			Engine: msg.Engine{Name: "child"}, Regions: []*mem.Region{r}})
	if err != nil {
		fail(err)
	}
	w := childWorker{Worker: dialed}
	table := make([]uint32, childShape.NumBlocks)
	for i := range table {
		table[i] = uint32(i)
	}
	if w.lease, err = w.Intent(intent(childTokens, table...)); err != nil {
		fail(err)
	}
	fmt.Println("ready")
	var line string
	_, _ = fmt.Scanln(&line)
	if line == "decode" {
		w.decode()
	}
	if line == "drop" {
		w.Disconnect()
		fmt.Println("dropped")
		_, _ = fmt.Scanln(&line)
	}
	os.Exit(0)
}

// childShape has as many layers as a usual model.
var childShape = connectortest.Shape{Layers: 32, NumBlocks: 1024, TokensPerBlock: 16,
	TokenBytes: 64}

const (
	childTokens  = 16 * 1024 // a token and a step each: minutes of decoding
	decodePeriod = 20 * time.Millisecond
)

type childWorker struct {
	*connectortest.Worker
	lease uint64
}

// decode runs a step for one token in every period, and every layer takes its share of it, until a
// line comes.
func (w *childWorker) decode() {
	runtime.LockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0)
	stop := make(chan struct{})
	go func() {
		_, _ = fmt.Scanln(new(string))
		close(stop)
	}()
	var at unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &at)
	next := at.Nano()
	for s := 1; s < childTokens; s++ {
		if err := w.Step(msg.Step{Step: uint64(s), Reqs: []msg.StepReq{{Lease: w.lease,
			End: uint32(s)}}}); err != nil {
			fmt.Println("error:", err)
			return
		}
		if s == 1 {
			fmt.Println("decoding")
		}
		for l := range childShape.Layers {
			next += int64(decodePeriod) / int64(childShape.Layers)
			at = unix.NsecToTimespec(next)
			_ = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &at, nil)
			w.SignalLayer(l, uint64(s))
		}
		w.SignalStep(uint64(s))
		select {
		case <-stop:
			fmt.Println("stopped")
			_, _ = fmt.Scanln(new(string))
			return
		default:
		}
	}
}
