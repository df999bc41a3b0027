package peer

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/control/peer/delivery"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/control/peer/lane"
)

// onPath forwards connections to an address, and passes the TLS records for it through change. If
// change returns nil, the connection ends.
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
	// What becomes of the second record, and how the receiver's lane ends. The others are not
	// changed.
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
			s := a.sessionOf(b)
			var on atomic.Bool
			var n atomic.Int32
			at := onPath(t, b.Endpoint(), func(rec []byte) []byte {
				if on.Load() && n.Add(1) == 2 {
					return x.attack(rec)
				}
				return rec
			})
			if err := a.dialer.dialLane(t.Context(), s, target{at, 0}); err != nil {
				t.Fatal(err)
			}
			lanes := s.channel.Lanes()
			direct, tapped := lanes[:len(lanes)-1], lanes[len(lanes)-1]
			first := direct[0].(*lane.Lane).Conn().LocalAddr().String()
			var theirs delivery.Lane // the other end of the tapped lane
			poll(t, "both lanes at the other end", func() bool {
				for _, l := range b.sessionOf(a).channel.Lanes() {
					if l.(*lane.Lane).Conn().RemoteAddr().String() != first {
						theirs = l
					}
				}
				return theirs != nil
			})
			for _, l := range direct {
				l.Fail(errLinkDown)
			}
			poll(t, "the tapped lane is the only one", func() bool {
				return s.channel.State().Lanes == 1
			})
			on.Store(true)
			for i := range uint64(20) {
				if err := a.Send(b.opt.Boot, await(i+1)); err != nil {
					t.Fatal(err)
				}
			}
			b.inOrder(a.opt.Boot, 20) // those that were attacked by another lane
			b.mu.Lock()
			if n := len(b.got[a.opt.Boot]); n != 20 {
				t.Errorf("%d frames were handled, 20 were sent", n)
			}
			b.mu.Unlock()
			if x.ends == "" {
				if err := theirs.Err(); err != nil {
					t.Errorf("a lane without an attack ended: %v", err)
				}
				return
			}
			poll(t, "the lane under attack ends at both ends", func() bool {
				return theirs.Err() != nil && tapped.Err() != nil
			})
			if err := theirs.Err(); !strings.Contains(err.Error(), x.ends) {
				t.Errorf("the receiver's lane ended with %v, want %q", err, x.ends)
			}
		})
	}
}
