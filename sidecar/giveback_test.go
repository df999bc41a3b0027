package sidecar

import (
	"errors"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/transfer"
)

// The memory of an engine that is gone takes seconds to be unmapped where it is large. Other
// engines do not wait for that.
func TestMemoryIsGivenBackAside(t *testing.T) {
	// GPUs take a goroutine anyway
	n := start(t, func(c *config.Config) { c.Transports.GPU.Enabled = config.Off })
	w := &engines.Worker{Boot: transfer.Boot{7}}
	n.driver.Handle([]engines.Event{{Kind: engines.WorkerUp, Worker: w}})
	unmapping, done := make(chan struct{}), make(chan struct{})
	defer close(done)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		n.events.Handle([]engines.Event{{Kind: engines.WorkerGone, Worker: w,
			Err: errors.New("exited"), Fenced: func() { close(unmapping); <-done }}})
	}()
	late := time.After(patience)
	wait := func(what string, c <-chan struct{}) {
		t.Helper()
		select {
		case <-c:
		case <-late:
			t.Fatal("not in time: " + what)
		}
	}
	wait("the memory is given back", unmapping)
	wait("the word of its end", gone)
	answered := make(chan struct{})
	n.driver.Handle([]engines.Event{{Kind: engines.Asked, Await: &engines.Await{
		Key: transfer.Key{Xfer: transfer.XferID{1}}, Peer: n.Endpoint(), TTL: time.Millisecond,
		Reply: func(engines.Admission) { close(answered) }}}})
	wait("an answer to another engine", answered)
}
