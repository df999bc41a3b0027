package shm

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transport"
)

// The sidecar does not dial an impossible lane again. So Dial reports a lane as impossible only if
// every later attempt would fail, too.
func TestDialThatMayDoLater(t *testing.T) {
	p := newPair(t, Config{})
	dial := func(path string) error {
		_, err := p.src.b.Dial(t.Context(), transport.Peer{Boot: p.dst.boot, Self: p.src.boot,
			Key: p.src.key}, p.src.rail,
			transport.Rail{Name: Name, Address: path})
		return err
	}
	dir := testutil.ShortDir(t)
	// A socket with room for one connection, without an acceptor.
	full := filepath.Join(dir, "full")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: full}), unix.Listen(fd,
		0)); err != nil {
		t.Fatal(err)
	}
	waits, err := net.Dial("unixpacket", full)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = waits.Close() })
	// One whose listener is gone.
	dead := filepath.Join(dir, "dead")
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: dead, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	stream := filepath.Join(dir, "stream")
	other, err := net.Listen("unix", stream)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path  string
		never bool
		err   error
	}{
		{full, false, unix.EAGAIN},
		{dead, false, unix.ECONNREFUSED},
		{file, false, unix.ECONNREFUSED},
		{filepath.Join(dir, "absent"), true, unix.ENOENT},
		{filepath.Join(file, "below"), true, unix.ENOTDIR},
		{stream, true, unix.EPROTOTYPE},
	} {
		if err := dial(c.path); !errors.Is(err, c.err) || errors.Is(err,
			transport.ErrNotSupported) != c.never {
			t.Errorf("%s: %v; want %v, given up: %v", filepath.Base(c.path), err, c.err, c.never)
		}
	}
}
