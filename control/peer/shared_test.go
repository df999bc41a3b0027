// SPDX-License-Identifier: Apache-2.0

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

// forward is an address behind which one process after another may be: each connection goes to the
// one that `to` names when it comes.
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
func (n *node) cut(t *testing.T, peer *node) { laneOf(t, n, peer).fail(errors.New("cut")) }

// aim changes where a forwarded address leads.
func aim(p *atomic.Pointer[string], to string) { p.Store(&to) }

// reach connects as the executor does, again after a failure, until boot is up at endpoint, or
// refuses for good. A process that is met anew fails the first try: the lane tells it that the last
// session is over.
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

// tell says something to a peer until it has heard it. What is lost must be lost with a session
// that is told to be over.
func (n *node) tell(peer *node) {
	n.t.Helper()
	for heard := false; !heard; {
		n.mu.Lock()
		downs := len(n.downs)
		n.mu.Unlock()
		if err := n.reach(peer.Endpoint(), peer.opt.Boot); err != nil {
			n.t.Fatal(err)
		}
		_ = n.Send(peer.opt.Boot, await(1)) // the session may be over
		poll(n.t, "the frame is heard, or its session over", func() bool {
			peer.mu.Lock()
			heard = len(peer.got[n.opt.Boot]) > 0
			peer.mu.Unlock()
			n.mu.Lock()
			defer n.mu.Unlock()
			return heard || len(n.downs) > downs
		})
	}
}

// An address leads to two processes. The lanes to the first are cut for a moment, and it is reached
// at its own address, as the second answers at the shared one: both are up, and each is told of
// what is for it.
func TestSharedAddress(t *testing.T) {
	a, b, d := start(t, slow), start(t, slow), start(t, slow)
	var to atomic.Pointer[string]
	aim(&to, a.Endpoint())
	shared := forward(t, &to)
	d.Connect(shared)
	d.until("a up", func() bool { return len(d.ups) == 1 })
	aim(&to, b.Endpoint())
	d.cut(t, a)
	// Its lane is dialed at its own address at the same time as the shared one says hello: where that
	// is quicker, a is met anew.
	d.Connect(shared)
	d.until("b up", func() bool {
		return slices.ContainsFunc(d.ups,
			func(p Peer) bool { return p.Boot == b.opt.Boot })
	})
	for _, n := range []*node{a, b} {
		d.tell(n)
	}
}

// The same, where the first cannot be reached at its own address either when the second answers at
// the shared one: its session is over, as all of it may be, and it is met anew once its own address
// leads to it again. Only a process at whose own address another answers is gone for good.
func TestGoneOnlyAtItsOwnAddress(t *testing.T) {
	for name, own := range map[string]bool{"at a shared address": false, "at its own": true} {
		t.Run(name, func(t *testing.T) {
			var toShared, toOwn atomic.Pointer[string]
			const nowhere = "127.0.0.1:1"
			aim(&toOwn, nowhere)
			advertised := forward(t, &toOwn)
			a, b, d := start(t, func(o *Options) { slow(o); o.Advertise = advertised }), start(t, slow),
				start(t, slow)
			a.Mesh.mu.Lock()
			listens := a.served.Addr().String()
			a.Mesh.mu.Unlock()
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
