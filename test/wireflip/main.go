// Command wireflip sits on the tcp rails of sidecars and turns one bit of one payload.
//
// It copies connections from each -listen to the -target in the same place and follows the frames
// inside. In the data frame number -frame, counted over all rails and connections in both
// directions, it flips one bit in the middle of the payload, and reports it in one line of JSON on
// standard output. It owns its connections and one goroutine for each direction; it ends when its
// standard input does, or at SIGTERM.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvspray/kvspray/internal/wire"
)

const (
	bufferBytes = 256 << 10
	dialTimeout = 5 * time.Second
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "wireflip:", err)
		os.Exit(1)
	}
}

func run() error {
	listen := flag.String("listen", "127.0.0.1:0", "host:port to accept lanes on, for each rail, "+
		"separated by commas")
	target := flag.String("target", "", "host:port of the rail that lanes go on to, for each rail")
	frame := flag.Int64("frame", 1,
		"number of the data frame whose payload is changed; 0 changes nothing")
	flag.Parse()
	listens, targets := strings.Split(*listen, ","), strings.Split(*target, ",")
	if *target == "" || len(listens) != len(targets) {
		return fmt.Errorf(
			"-listen names %d rails and -target %q: give the host:port of each rail's listener",
			len(listens), *target)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	f := &flipper{frame: *frame, out: json.NewEncoder(os.Stdout)}
	var lns []net.Listener
	for _, address := range listens {
		ln, err := net.Listen("tcp", address)
		if err != nil {
			return fmt.Errorf("listen on %s: %w", address, err)
		}
		f.print(event{Event: "listening", Address: ln.Addr().String()})
		context.AfterFunc(ctx, func() { _ = ln.Close() }) // Accept's error is the answer
		lns = append(lns, ln)
	}
	ended := make(chan error)
	for i, ln := range lns {
		go func() { ended <- f.serve(ctx, ln, targets[i]) }()
	}
	var all error
	for range lns {
		all = errors.Join(all, <-ended)
		stop() // one rail is no use without the others
	}
	return all
}

// serve copies what comes to a listener, until that is closed.
func (f *flipper) serve(ctx context.Context, ln net.Listener, target string) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := ln.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("accept on %s: %w", ln.Addr(), err)
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			f.relay(ctx, c, target)
		}()
	}
}

// event is one line of output.
type event struct {
	Event   string `json:"event"`
	Address string `json:"address,omitempty"`
	Frame   int64  `json:"frame,omitempty"`
	First   uint32 `json:"first_chunk,omitempty"`
	Count   uint32 `json:"chunks,omitempty"`
	Offset  uint64 `json:"offset,omitempty"` // of the changed byte in the payload
	Length  uint64 `json:"length,omitempty"`
	CRC     bool   `json:"crc32c,omitempty"` // the frame carries a check sum
	Error   string `json:"error,omitempty"`
}

type flipper struct {
	frame int64
	seen  atomic.Int64

	mu  sync.Mutex // protects out
	out *json.Encoder
}

func (f *flipper) print(e event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	_ = f.out.Encode(e) // the reader may have ended
}

func (f *flipper) relay(ctx context.Context, c net.Conn, target string) {
	defer c.Close()
	d := net.Dialer{Timeout: dialTimeout}
	t, err := d.DialContext(ctx, "tcp", target)
	if err != nil {
		f.print(event{Event: "dial failed", Address: target, Error: err.Error()})
		return
	}
	defer t.Close()
	stop := context.AfterFunc(ctx, func() {
		_ = c.Close() // the copies end with it
		_ = t.Close()
	})
	defer stop()
	var wg sync.WaitGroup
	for _, pair := range [][2]net.Conn{{c, t}, {t, c}} {
		wg.Add(1)
		go func() {
			defer wg.Done()
			_ = f.copy(pair[1], pair[0]) // a lane that dies is its peers' business
			if tcp, ok := pair[1].(*net.TCPConn); ok {
				_ = tcp.CloseWrite()
			}
		}()
	}
	wg.Wait()
}

// follower has the place of the next byte in a stream of frames. Before the first frame there is
// the opening of the lane, whose form is not its business: it looks for the first header that
// passes its own check.
type follower struct {
	f      *flipper
	framed bool
	header wire.Header
	left   uint64 // of payload or entries
	at     uint64 // in the payload
	tail   int    // of trailer
	flip   bool
}

func (f *flipper) copy(dst io.Writer, src io.Reader) error {
	w := &follower{f: f}
	buf := make([]byte, bufferBytes)
	held := 0
	for {
		n, err := src.Read(buf[held:])
		data := buf[:held+n]
		done := w.advance(data)
		if _, werr := dst.Write(data[:done]); werr != nil {
			return werr
		}
		held = copy(buf, data[done:])
		if err != nil {
			_, _ = dst.Write(buf[:held]) // what was held back as the possible start of a header
			return err
		}
	}
}

// advance follows the bytes, changes at most one of them, and returns how many may go on; the rest
// is part of a header.
func (w *follower) advance(data []byte) int {
	at := 0
	for at < len(data) {
		rest := data[at:]
		switch {
		case w.left > 0:
			n := int(min(w.left, uint64(len(rest))))
			if w.flip && w.at+uint64(n) > w.header.Length/2 {
				i := w.header.Length/2 - w.at
				rest[i] ^= 0x10
				w.flip = false
				w.f.print(event{Event: "flipped", Frame: w.f.frame, First: w.header.Range.First,
					Count:  w.header.Range.Count,
					Offset: w.header.Length / 2, Length: w.header.Length,
					CRC: w.header.Flags&wire.FlagCRC32C != 0})
			}
			w.left -= uint64(n)
			w.at += uint64(n)
			at += n
		case w.tail > 0:
			n := min(w.tail, len(rest))
			w.tail -= n
			at += n
		default:
			if !w.framed {
				i := bytes.Index(rest, []byte("KVSF"))
				if i < 0 {
					return len(data) - partial(rest)
				}
				at += i
				rest = rest[i:]
			}
			if len(rest) < wire.HeaderBytes {
				return at
			}
			if err := wire.ParseHeader(rest, &w.header); err != nil {
				// Not a header (in the opening), or a damaged one: pass it on, and look for the next.
				w.framed = false
				at++
				continue
			}
			w.framed = true
			w.left, w.at, w.tail, w.flip = w.header.Length, 0, 0, false
			if w.header.Kind == wire.KindData {
				w.tail = wire.TrailerBytes
				w.flip = w.header.Length > 0 && w.f.seen.Add(1) == w.f.frame
			}
			at += wire.HeaderBytes
		}
	}
	return at
}

// partial returns how many bytes at the end of b may be the start of a magic number.
func partial(b []byte) int {
	for n := min(3, len(b)); n > 0; n-- {
		if bytes.HasPrefix([]byte("KVSF"), b[len(b)-n:]) {
			return n
		}
	}
	return 0
}
