// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// onPath is whoever carries the bytes of connections, and may change those that go to the listener.
func onPath(t *testing.T, to string, change func(b []byte) []byte) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	done := make(chan struct{})
	t.Cleanup(func() { close(done); _ = ln.Close(); all.Wait() })
	all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", to)
			if err != nil {
				_ = c.Close()
				return
			}
			all.Go(func() { _, _ = io.Copy(c, up); _ = c.Close() })
			all.Go(func() { <-done; _, _ = c.Close(), up.Close() })
			all.Go(func() {
				defer func() { _ = up.Close() }()
				b := make([]byte, 64<<10)
				for {
					n, err := c.Read(b)
					if err != nil {
						return
					}
					if _, err := up.Write(change(b[:n])); err != nil {
						return
					}
				}
			})
		}
	})
	return ln.Addr().String()
}

// Whoever is on the path of a control lane and changes, repeats, leaves out or cuts what it carries ends the lane. No frame is handled that was
// not sent, none twice and none out of order.
func TestControlLaneOnPath(t *testing.T) {
	c, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	var last []byte
	attacks := map[string]func(b []byte) []byte{
		"a flipped bit": func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
		"a replayed record": func(b []byte) []byte {
			if last == nil {
				last = append([]byte(nil), b...)
				return b
			}
			return last
		},
		"a record left out": func(b []byte) []byte { return nil },
		"a cut record":      func(b []byte) []byte { return b[:len(b)-1] },
	}
	for name, attack := range attacks {
		t.Run(name, func(t *testing.T) {
			sec := secured(t, c)
			a, b := start(t, sec), start(t, sec)
			join(t, a, b)
			s := a.session(b.opt.Boot)
			var on atomic.Bool
			at := onPath(t, b.Endpoint(), func(b []byte) []byte {
				if on.Load() {
					return attack(b)
				}
				return b
			})
			if err := a.dialLane(t.Context(), s, target{at, 0}); err != nil {
				t.Fatal(err)
			}
			s.mu.Lock()
			tapped := s.lanes[len(s.lanes)-1]
			for _, l := range s.lanes[:len(s.lanes)-1] {
				l.fail(errLinkDown)
			}
			s.mu.Unlock()
			last = nil
			on.Store(true)
			for i := range uint64(20) {
				if err := a.Send(b.opt.Boot, await(i+1)); err != nil {
					t.Fatal(err)
				}
			}
			b.inOrder(a.opt.Boot, 20) // by another lane
			b.mu.Lock()
			if n := len(b.got[a.opt.Boot]); n != 20 {
				t.Errorf("%d frames were handled, 20 were sent", n)
			}
			b.mu.Unlock()
			poll(t, "the lane under attack ends", func() bool {
				tapped.mu.Lock()
				defer tapped.mu.Unlock()
				return tapped.dead
			})
		})
	}
}

// A lane without TLS is refused where there are credentials, with a word that says what to do; so is one whose TLS session shows another
// certificate than its boot's, and a proof that was made over another session.
func TestLaneNeedsItsChannel(t *testing.T) {
	c, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	sec := secured(t, c)
	a, b, evil := start(t, sec), start(t, sec), start(t, sec)
	join(t, a, b)
	s := a.session(b.opt.Boot)
	key, _ := a.PeerKey(b.opt.Boot)
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", b.Endpoint())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	params := wire.DialParams{Purpose: wire.PurposeControl, Self: a.opt.Boot, Peer: b.opt.Boot, Key: key, Attach: s.mine[:]}
	if _, err := wire.Dial(dial(), params); !errors.Is(err, wire.ErrVersion) {
		t.Errorf("without TLS: %v", err)
	}
	// Another member who has learned the key, as if it had leaked.
	over, err := evil.secure(t.Context(), dial(), b.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	params.Binding, _, _ = over.binding()
	if _, err := wire.Dial(over.Conn, params); !errors.Is(err, wire.ErrRefused) {
		t.Errorf("with another certificate: %v", err)
	}
	over, err = a.secure(t.Context(), dial(), b.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	params.Binding = make([]byte, bindingBytes)
	if _, err := wire.Dial(over.Conn, params); !errors.Is(err, wire.ErrProof) {
		t.Errorf("with the proof of another session: %v", err)
	}
	// Calls are not affected by what lanes negotiate.
	err = a.call(t.Context(), b.Endpoint(), func(ctx context.Context, c peerv1.PeerClient) error {
		r, err := c.Probe(ctx, &peerv1.ProbeRequest{})
		if err == nil && transfer.Boot(r.Boot) != b.opt.Boot {
			t.Errorf("%x answers", r.Boot)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
