package peer

import (
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/transfer"
)

// forward returns an address that leads to one process after another: each connection goes to the
// one that `to` names at that moment.
func forward(t *testing.T, to *atomic.Pointer[string]) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	done := make(chan struct{})
	pass := func(c net.Conn) {
		defer func() { _ = c.Close() }()
		up, err := net.Dial("tcp", *to.Load())
		if err != nil {
			return
		}
		defer func() { _ = up.Close() }()
		ended := make(chan struct{}, 2)
		all.Go(func() { _, _ = io.Copy(up, c); ended <- struct{}{} })
		all.Go(func() { _, _ = io.Copy(c, up); ended <- struct{}{} })
		select {
		case <-ended:
		case <-done:
		}
	}
	all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			all.Go(func() { pass(c) })
		}
	})
	t.Cleanup(func() {
		close(done)
		_ = ln.Close()
		all.Wait()
	})
	return ln.Addr().String()
}

// cut ends the lane to a peer.
func (n *node) cut(t *testing.T, peer *node) { laneOf(t, n, peer).Fail(errors.New("cut")) }

// aim changes where a forwarded address leads.
func aim(p *atomic.Pointer[string], to string) { p.Store(&to) }

// reach connects as the executor does, again after a failure, until boot is up at endpoint, or
// refuses for good. The first try fails if the peer has lost its session: only the lane reveals
// that.
func (n *node) reach(endpoint string, boot transfer.Boot) (refused error) {
	n.t.Helper()
	for {
		n.mu.Lock()
		ups, failed := len(n.ups), len(n.failed)
		n.mu.Unlock()
		n.Connect(endpoint)
		up := false
		n.until("an answer at "+endpoint, func() bool {
			up = slices.ContainsFunc(n.ups[ups:], func(p Peer) bool {
				return p.Boot == boot &&
					p.Endpoint == endpoint
			})
			if len(n.failed) > failed {
				refused = n.failed[failed]
			}
			return up || refused != nil
		})
		if up {
			return nil
		}
		if strings.Contains(refused.Error(), "was superseded") {
			return refused
		}
		refused = nil
	}
}

// deliver sends a frame to a peer until one has arrived. A frame may be lost only with a session
// whose end is reported.
func (n *node) deliver(peer *node) {
	n.t.Helper()
	for received := false; !received; {
		n.mu.Lock()
		downs := len(n.downs)
		n.mu.Unlock()
		if err := n.reach(peer.Endpoint(), peer.opt.Boot); err != nil {
			n.t.Fatal(err)
		}
		_ = n.Send(peer.opt.Boot, await(1)) // the session may be over
		poll(n.t, "the frame has arrived, or its session is over", func() bool {
			peer.mu.Lock()
			received = len(peer.got[n.opt.Boot]) > 0
			peer.mu.Unlock()
			n.mu.Lock()
			defer n.mu.Unlock()
			return received || len(n.downs) > downs
		})
	}
}

// An address leads to two processes. The lanes to the first are cut for a moment, and it is reached
// at its own address while the second answers at the shared one: both are up, and each gets its own
// frames.
func TestSharedAddress(t *testing.T) {
	a, b, d := start(t, slow), start(t, slow), start(t, slow)
	var to atomic.Pointer[string]
	aim(&to, a.Endpoint())
	shared := forward(t, &to)
	d.Connect(shared)
	d.until("a up", func() bool { return len(d.ups) == 1 })
	aim(&to, b.Endpoint())
	d.cut(t, a)
	// The lane to a is dialed at its own address while a Hello goes to the shared one. If the Hello is
	// faster, a gets a new session.
	d.Connect(shared)
	d.until("b up", func() bool {
		return slices.ContainsFunc(d.ups,
			func(p Peer) bool { return p.Boot == b.opt.Boot })
	})
	for _, n := range []*node{a, b} {
		d.deliver(n)
	}
}

// The same, but the first cannot be reached at its own address either when the second answers at
// the shared one. Its session ends, because its process may have ended, and it gets a new one once
// its own address leads to it again. Only a process at whose own address another answers is
// superseded for good.
func TestGoneOnlyAtItsOwnAddress(t *testing.T) {
	for name, own := range map[string]bool{"at a shared address": false, "at its own": true} {
		t.Run(name, func(t *testing.T) {
			var toShared, toOwn atomic.Pointer[string]
			const nowhere = "127.0.0.1:1"
			aim(&toOwn, nowhere)
			advertised := forward(t, &toOwn)
			a, b, d := start(t, func(o *Options) { slow(o); o.Advertise = advertised }), start(t, slow),
				start(t, slow)
			listens := a.listeners.bound().String()
			aim(&toOwn, listens)
			aim(&toShared, listens)
			shared := forward(t, &toShared)
			at, to := shared, &toShared
			if own {
				at, to = advertised, &toOwn
			}
			d.Connect(at)
			d.until("a up", func() bool { return len(d.ups) == 1 })
			aim(&toOwn, nowhere)
			aim(to, b.Endpoint())
			d.cut(t, a)
			d.until("a down, b up", func() bool {
				return len(d.downs) > 0 && slices.ContainsFunc(d.ups,
					func(p Peer) bool { return p.Boot == b.opt.Boot })
			})
			aim(&toOwn, listens)
			if err := d.reach(advertised, a.opt.Boot); (err != nil) != own {
				t.Errorf("at its own address: %v", err)
			}
		})
	}
}
