package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// Rails come and go while lanes on others move: those of a rail that is taken away end, and nothing
// else notices.
func TestRailsComeAndGo(t *testing.T) {
	leaktest.Check(t)
	p := transporttest.NewPair(t, factory(Config{Rails: []Rail{{Name: "lo", Listen: "127.0.0.1:0"}}}))
	stays, _ := p.Dial()
	here, there := p.A.Backend.(*Backend), p.B.Backend.(*Backend)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	a, err := here.AddRail(ctx, Rail{Name: "second", Listen: "127.0.0.2:0"})
	if err != nil {
		t.Fatal(err)
	}
	b, err := there.AddRail(ctx, Rail{Name: "second", Listen: "127.0.0.3:0"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := here.AddRail(ctx, Rail{Name: "second", Listen: "127.0.0.4:0"}); err == nil {
		t.Error("two rails of one name")
	}
	peer, _ := p.A.PeerKey(p.B.Boot)
	l, err := here.Dial(ctx, peer, a, b)
	if err != nil {
		t.Fatal(err)
	}
	if got := l.(*lane).conn.LocalAddr().(*net.TCPAddr).IP.String(); got != "127.0.0.2" {
		t.Errorf("the lane leaves from %s", got)
	}
	m := transporttest.NewMemory(t, transporttest.Shape{Chunks: 4, BlockBytes: 64 << 10})
	dst := transporttest.NewMemory(t, transporttest.Shape{Chunks: 4, BlockBytes: 64 << 10})
	bind := transporttest.NewBind(t, p.A, p.B, m, dst, 1, 1)
	defer bind.End(t)
	moves := func(l transport.Lane, attempt uint32) {
		t.Helper()
		if r := p.A.MoveWait(l, bind.Origin, m.All(), attempt); r.Outcome != transfer.Landed {
			t.Errorf("%s %s: %v", r.Outcome, r.Reason, r.Err)
		}
	}
	moves(l, 1)
	if !here.RemoveRail("second") || here.RemoveRail("second") {
		t.Error("a rail is removed once")
	}
	for deadline := time.Now().Add(patience); !l.(*lane).failed(); {
		if time.Now().After(deadline) {
			t.Fatal("its lane lives on")
		}
	}
	if err := l.Move([]transport.Slice{{Origin: bind.Origin, Range: m.All(), Attempt: 2}}); !errors.Is(
		err, net.ErrClosed) {
		t.Errorf("move on a lane whose rail is gone: %v", err)
	}
	moves(stays, 3)
	if !there.RemoveRail("second") {
		t.Error("not there any more")
	}
	if _, err := here.Dial(ctx, peer, a, b); err == nil {
		t.Error("a rail that was taken away is dialed")
	}
	// The same address again, under the same name.
	if _, err := here.AddRail(ctx, Rail{Name: "second", Listen: "127.0.0.2:0"}); err != nil {
		t.Error(err)
	}
	for i := 2; i < maxRails; i++ {
		if _, err := here.AddRail(ctx, Rail{Name: fmt.Sprint("r", i), Listen: "127.0.0.1:0"}); err !=
			nil {
			t.Fatalf("rail %d: %v", i, err)
		}
	}
	if _, err := here.AddRail(ctx, Rail{Name: "one too many", Listen: "127.0.0.1:0"}); err == nil {
		t.Error("rails have no bound")
	}
}

// An unanswered SYN is followed by another soon: here the listener has no room for it until
// the second is about to go out.
func TestConnectsAgain(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}),
		unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "listener")
	ln, err := net.FileListener(f)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	address := ln.Addr().String()
	var full []net.Conn
	for len(full) < 8 { // a queue of one or two
		c, err := net.DialTimeout("tcp", address, 100*time.Millisecond)
		if err != nil {
			break
		}
		full = append(full, c)
	}
	if len(full) == 8 {
		t.Fatal("the listener's queue does not fill")
	}
	tries := 0
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := connect(ctx, net.Dialer{Control: func(_, _ string, _ syscall.RawConn) error {
		if tries++; tries == 2 {
			for range full {
				a, err := ln.Accept()
				if err != nil {
					return err
				}
				full = append(full, a)
			}
		}
		return nil
	}}, address)
	if err != nil || tries < 2 {
		t.Errorf("%d tries: %v", tries, err)
	}
	if c != nil {
		full = append(full, c)
	}
	for _, c := range full {
		_ = c.Close()
	}

	// A refusal is an error, and so is the end of the time.
	_ = ln.Close()
	tries = 0
	count := func(_, _ string, _ syscall.RawConn) error { tries++; return nil }
	if _, err := connect(ctx, net.Dialer{Control: count}, address); !errors.Is(err,
		syscall.ECONNREFUSED) || tries != 1 {
		t.Errorf("no listener: %d tries: %v", tries, err)
	}
	cancel()
	if _, err := connect(ctx, net.Dialer{Control: count}, address); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}
