package connector_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
)

// TestTakeoverByAProcessThatHangs: the answer that a session is still being fenced comes only while
// the control layer runs, because the shim takes it as proof that the whole process runs.
func TestTakeoverByAProcessThatHangs(t *testing.T) {
	r := start(t, func(o *connector.Options) { o.Grace = 200 * time.Millisecond })
	r.rec.fenceAtOnce(false)
	w := r.worker(t, nil)
	var se *connectortest.ServerError
	for range 3 { // several within the grace
		began := time.Now()
		if _, err := w.Connect(testContext(t)); !errors.As(err, &se) || se.Code != msg.CodeFencing {
			t.Fatalf("not fenced, but: %v", err)
		}
		if took := time.Since(began); took < 50*time.Millisecond {
			t.Errorf("answered after %v, within the time for a fence", took)
		}
	}
	release := r.rec.hang()
	ctx, cancel := context.WithTimeout(testContext(t), time.Second)
	defer cancel()
	if _, err := w.Connect(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an answer of a process that hangs: %v", err)
	}
	release()
	if _, err := w.Connect(testContext(t)); !errors.As(err, &se) || se.Code != msg.CodeFencing {
		t.Errorf("no answer of one that runs again: %v", err)
	}
	r.rec.seen().fenced[0]()
	_, err := w.Connect(testContext(t))
	must(t, err)
}

// TestTakeover: a new session of the same boot waits until the older one's leases are fenced.
func TestTakeover(t *testing.T) {
	r := start(t, func(o *connector.Options) { o.FenceWait = 50 * time.Millisecond })
	r.rec.fenceAtOnce(false)
	w := r.worker(t, nil)
	id, err := w.Intent(intent(16, 1))
	must(t, err)
	r.rec.until(t, "intent", func() bool { return len(r.rec.intents) == 1 })
	old := r.lastUp(t)
	lease := r.rec.seen().intents[0].Lease

	_, err = w.Connect(testContext(t))
	var se *connectortest.ServerError
	if !errors.As(err, &se) || se.Code != msg.CodeFencing || se.Fatal {
		t.Fatalf("not fenced, but: %v", err)
	}
	if old.SourceValid(lease) {
		t.Error("a superseded lease is valid")
	}
	if err := r.Complete(old, engines.Completion{Lease: lease}); !errors.Is(err, connector.ErrGone) {
		t.Errorf("complete: %v", err)
	}
	if gone := r.rec.retired(); len(gone) != 1 || !errors.Is(gone[0], connector.ErrSuperseded) {
		t.Fatalf("gone: %v", gone)
	}
	r.rec.seen().fenced[0]()
	r.rec.seen().fenced[0]()
	_, err = w.Connect(testContext(t))
	must(t, err)
	if !w.Welcome().Fenced {
		t.Error("WELCOME lacks fenced")
	}
	must(t, w.IntentAs(id, intent(16, 1)))
	r.rec.until(t, "presented again", func() bool { return len(r.rec.intents) == 2 })
	if again := r.rec.seen().intents[1].Lease; again == lease || again.ID != id {
		t.Errorf("lease %s after %s: the name must differ", again, lease)
	}
	if old.SourceValid(r.rec.seen().intents[1].Lease) {
		t.Error("the old worker answers for the new one")
	}
	r.rec.fenceAtOnce(true)
}

type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func startChild(t *testing.T, socket string) *child {
	t.Helper()
	c := &child{cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(os.Environ(), childEnv+"="+socket)
	c.cmd.Stderr = os.Stderr
	var err error
	c.in, err = c.cmd.StdinPipe()
	must(t, err)
	out, err := c.cmd.StdoutPipe()
	must(t, err)
	c.out = bufio.NewScanner(out)
	must(t, c.cmd.Start())
	t.Cleanup(func() { _ = c.cmd.Process.Kill(); _ = c.cmd.Wait() })
	c.expect(t, "ready")
	return c
}

func (c *child) expect(t *testing.T, want string) {
	t.Helper()
	if !c.out.Scan() || c.out.Text() != want {
		t.Fatalf("the child wrote %q, want %q", c.out.Text(), want)
	}
}

// TestExit: only the proved exit of the process ends its leases, not the end of its socket.
func TestExit(t *testing.T) {
	r := start(t, nil)
	c := startChild(t, r.socket)
	r.rec.until(t, "intent", func() bool { return len(r.rec.intents) == 1 })
	_, err := fmt.Fprintln(c.in, "drop")
	must(t, err)
	c.expect(t, "dropped")
	// The server reports the end of file after it has seen it.
	eventually(t, "the end of the socket is seen",
		func() bool { return strings.Contains(r.logs.String(), "socket ended") })
	if len(r.rec.retired()) != 0 || r.Leases() != 1 ||
		!r.lastUp(t).SourceValid(r.rec.seen().intents[0].Lease) {
		t.Fatal("the lease did not survive the socket")
	}
	must(t, c.cmd.Process.Kill())
	r.rec.until(t, "exit", func() bool {
		return len(r.rec.gone) == 1 && errors.Is(r.rec.gone[0], connector.ErrExited)
	})
	eventually(t, "no lease and no worker is left", func() bool {
		return r.Leases() == 0 &&
			len(r.Workers()) == 0
	})
}

// TestForeignBoot: another process cannot take a live worker's place.
func TestForeignBoot(t *testing.T) {
	r := start(t, nil)
	startChild(t, r.socket)
	boot := r.lastUp(t).Boot
	_, err := connectortest.DialWorker(testContext(t),
		r.config(t, func(c *connectortest.Config) { c.Boot = boot }))
	var se *connectortest.ServerError
	if !errors.As(err, &se) || se.Code != msg.CodePermission || !strings.Contains(se.Message,
		"live process") {
		t.Fatalf("got %v", err)
	}
	if len(r.rec.retired()) != 0 {
		t.Error("the live worker was retired")
	}
}
