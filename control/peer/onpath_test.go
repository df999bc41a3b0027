// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// onPath is whoever carries the bytes of connections, and may change the TLS records that go to the
// listener. nil ends the connection.
func onPath(t *testing.T, to string, change func(record []byte) []byte) string {
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
				in := bufio.NewReader(c)
				for {
					rec := make([]byte, 5) // type, version, length: RFC 8446, 5.1
					if _, err := io.ReadFull(in, rec); err != nil {
						return
					}
					rec = append(rec, make([]byte, binary.BigEndian.Uint16(rec[3:]))...)
					if _, err := io.ReadFull(in, rec[5:]); err != nil {
						return
					}
					out := change(rec)
					if out == nil {
						return
					}
					if _, err := up.Write(out); err != nil {
						return
					}
				}
			})
		}
	})
	return ln.Addr().String()
}

// An attacker on the path of a control lane changes, repeats, drops or cuts one record. The
// receiver refuses the record, and the lane ends. The receiver handles no frame that was not sent,
// none twice and none out of order.
func TestControlLaneOnPath(t *testing.T) {
	c, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	// What becomes of the second record, and how the receiver's lane ends. Nobody touches the
	// others.
	for name, x := range map[string]struct {
		attack func(rec []byte) []byte
		ends   string
	}{
		"untouched": {func(rec []byte) []byte { return rec }, ""},
		"a flipped bit": {func(rec []byte) []byte { rec[len(rec)/2] ^= 1; return rec },
			"bad record MAC"},
		"a replayed record": {func(rec []byte) []byte { return append(bytes.Clone(rec), rec...) },
			"bad record MAC"},
		"a record left out": {func([]byte) []byte { return []byte{} }, "bad record MAC"},
		"a cut record": {func(rec []byte) []byte { return rec[:len(rec)-1] },
			"bad record MAC"},
		"a cut lane": {func([]byte) []byte { return nil }, "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			sec := secured(t, c)
			quiet := func(o *Options) { sec(o); slow(o) } // no ping ends a lane
			a, b := start(t, quiet), start(t, quiet)
			join(t, a, b)
			s := a.session(b.opt.Boot)
			var on atomic.Bool
			var n atomic.Int32
			at := onPath(t, b.Endpoint(), func(rec []byte) []byte {
				if on.Load() && n.Add(1) == 2 {
					return x.attack(rec)
				}
				return rec
			})
			if err := a.dialLane(t.Context(), s, target{at, 0}); err != nil {
				t.Fatal(err)
			}
			s.mu.Lock()
			tapped, first := s.lanes[len(s.lanes)-1], s.lanes[0].conn.LocalAddr().String()
			s.mu.Unlock()
			far := b.session(a.opt.Boot)
			var theirs *lane // the other end of the one that is tapped
			poll(t, "both lanes at the other end", func() bool {
				far.mu.Lock()
				defer far.mu.Unlock()
				for _, l := range far.lanes {
					if l.conn.RemoteAddr().String() != first {
						theirs = l
					}
				}
				return theirs != nil
			})
			s.mu.Lock()
			for _, l := range s.lanes[:len(s.lanes)-1] {
				l.fail(errLinkDown)
			}
			s.mu.Unlock()
			poll(t, "the tapped lane is the only one", func() bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				return len(s.lanes) == 1
			})
			on.Store(true)
			for i := range uint64(20) {
				if err := a.Send(b.opt.Boot, await(i+1)); err != nil {
					t.Fatal(err)
				}
			}
			b.inOrder(a.opt.Boot, 20) // of those attacked by another lane
			b.mu.Lock()
			if n := len(b.got[a.opt.Boot]); n != 20 {
				t.Errorf("%d frames were handled, 20 were sent", n)
			}
			b.mu.Unlock()
			if x.ends == "" {
				if dead := theirs.ended(); dead != nil {
					t.Errorf("a lane that nobody touched ended: %v", dead)
				}
				return
			}
			poll(t, "the lane under attack ends at both ends", func() bool {
				return theirs.ended() != nil && tapped.ended() != nil
			})
			if err := theirs.ended(); !strings.Contains(err.Error(), x.ends) {
				t.Errorf("the receiver's lane ended with %v, want %q", err, x.ends)
			}
		})
	}
}

// ended is why a lane has ended; nil: it lives.
func (l *lane) ended() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// A lane without TLS is refused where there are credentials, with a word that says what to do; so
// is one whose TLS session shows another certificate than its boot's, and a proof that was made
// over another session.
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
	params := wire.DialParams{Purpose: wire.PurposeControl, Self: a.opt.Boot, Peer: b.opt.Boot,
		Key: key, Attach: s.mine[:]}
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
