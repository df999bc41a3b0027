package gdr

import (
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// The host at the other end is lost while slices have only asked: there is nothing that the NIC's
// timers watch. All of gdr's own are an hour here, so only the socket shows it.
func TestLostHost(t *testing.T) {
	if !testutil.InNamespace(t) {
		return
	}
	const hour = time.Hour
	_, p, _, _ := oddPair(t, func(c *Config) {
		c.Patience, c.Silence, c.Drain, c.HostSilence = hour, hour, hour, time.Second
	})
	for name, asks := range map[string]bool{"asked": true, "idle": false} {
		t.Run(name, func(t *testing.T) {
			x, y := p.Dial()
			here, there := x.(*lane), y.(*lane)
			src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
			b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
			testutil.LoseHost(t, here.c, there.c)
			var res <-chan transport.Result
			if asks {
				res = p.A.Move(here, b.Origin, src.All(), 1)
			}
			for _, l := range []*lane{here, there} {
				until(t, "the lane is given up", func() bool { return l.failure() != nil })
				if err := l.failure(); !errors.Is(err, syscall.ETIMEDOUT) {
					t.Errorf("the lane ended with %v", err)
				}
			}
			if asks {
				if r := <-res; r.Outcome != transfer.NotLanded || r.Reason != transfer.ReasonLaneLost ||
					!errors.Is(r.Err, net.ErrClosed) {
					t.Errorf("%s %s: %v", r.Outcome, r.Reason, r.Err)
				}
			}
			b.End(t)
		})
	}
}

// A peer that is stopped reads and answers nothing, and its kernel acknowledges: the lane stays.
func TestStoppedPeerIsNotLost(t *testing.T) {
	const silence = time.Second
	_, p, _, _ := oddPair(t, func(c *Config) { c.HostSilence = silence })
	x, y := p.Dial()
	here, there := x.(*lane), y.(*lane)
	src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
	src.Write(seedOld)
	b := transporttest.NewBind(t, p.A, p.B, src, dst, 1, 1)
	b.Dest.Seed.Store(seedOld)
	there.mu.Lock() // none of its goroutines gets past this
	res := p.A.Move(here, b.Origin, src.All(), 1)
	began := time.Now()
	until(t, "twice the silence has passed", func() bool {
		return here.failure() != nil ||
			time.Since(began) > 2*silence
	})
	there.mu.Unlock()
	if r := <-res; r.Outcome != transfer.Landed {
		t.Errorf("after it goes on: %s %s: %v", r.Outcome, r.Reason, r.Err)
	}
	for name, l := range map[string]*lane{"dialed": here, "accepted": there} {
		if err := l.failure(); err != nil {
			t.Errorf("the %s end of a healthy lane was lost: %v", name, err)
		}
	}
	b.End(t)
}
