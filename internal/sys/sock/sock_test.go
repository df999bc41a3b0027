package sock

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const soon = 20 * time.Second

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func listen(t *testing.T, o Options) (*Listener, error) {
	t.Helper()
	o.Network, o.Mode, o.Look, o.Name = "unix", 0o600, time.Millisecond, "the socket"
	l, err := Listen(o)
	if err == nil {
		t.Cleanup(func() { _ = l.Close() })
	}
	return l, err
}

// A listener makes its socket again after the path or its directory was removed, or a dead socket
// took its place.
func TestMadeAgain(t *testing.T) {
	dir := filepath.Join(testutil.ShortDir(t), "sub")
	path := filepath.Join(dir, "s")
	var logs testutil.Buffer
	l, err := listen(t, Options{Path: path, Log: slog.New(slog.NewTextHandler(&logs, nil)),
		Prepare: func() error { return os.MkdirAll(dir, 0o700) }})
	must(t, err)
	accepted := make(chan net.Conn)
	ended := make(chan error, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				ended <- err
				return
			}
			accepted <- c
		}
	}()
	for _, remove := range []func() error{
		func() error { return nil },
		func() error { return os.Remove(path) },
		func() error { return os.Rename(dir, dir+"2") }, // RemoveAll would race with the listener
		func() error {
			dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path + "2", Net: "unix"})
			if err != nil {
				return err
			}
			dead.SetUnlinkOnClose(false)
			return errors.Join(dead.Close(), os.Rename(path+"2", path))
		},
	} {
		must(t, remove())
		testutil.Eventually(t, soon, "the socket is not made again", func() bool {
			return l.Unreachable() == ""
		})
		c, err := net.Dial("unix", path)
		must(t, err)
		must(t, errors.Join(c.Close(), (<-accepted).Close()))
	}
	must(t, l.Close())
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept ended with %v", err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	if n := strings.Count(logs.String(), "is made again"); n != 3 ||
		strings.Contains(logs.String(), "cannot") {
		t.Errorf("the log of 3 removals: %s", logs.String())
	}
}

// A listener never replaces a live socket or a file, neither at its start nor later. It logs the
// reason once. The file in the place of its socket stays after Close.
func TestOthersStay(t *testing.T) {
	dir := testutil.ShortDir(t)
	path := filepath.Join(dir, "s")
	must(t, os.WriteFile(path, []byte("mine"), 0o600))
	if _, err := listen(t, Options{Path: path}); err == nil ||
		!strings.Contains(err.Error(), "a file") {
		t.Errorf("a file is replaced: %v", err)
	}
	must(t, os.Remove(path))
	var logs testutil.Buffer
	l, err := listen(t, Options{Path: path, Log: slog.New(slog.NewTextHandler(&logs, nil))})
	must(t, err)
	if _, err := listen(t, Options{Path: path}); err == nil ||
		!strings.Contains(err.Error(), "another program") {
		t.Errorf("a live socket is replaced: %v", err)
	}
	must(t, os.WriteFile(path+"2", []byte("mine"), 0o600))
	must(t, os.Rename(path+"2", path))
	testutil.Eventually(t, soon, "the loss is not reported", func() bool {
		return strings.Contains(l.Unreachable(), "a file")
	})
	must(t, l.Close())
	if err := l.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the second Close: %v", err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "mine" {
		t.Errorf("the file: %q, %v", b, err)
	}
	if n := strings.Count(logs.String(), "cannot be made again"); n != 1 {
		t.Errorf("%d log lines for one reason", n)
	}
}

// Two kinds of live sockets fail a connection attempt: one with a full backlog, and one of another
// type. A listener does not replace them either.
func TestBusySocketStays(t *testing.T) {
	for want, of := range map[syscall.Errno]int{
		syscall.EAGAIN:     unix.SOCK_STREAM, // its backlog is full
		syscall.EPROTOTYPE: unix.SOCK_SEQPACKET,
	} {
		path := filepath.Join(testutil.ShortDir(t), "s")
		fd, err := unix.Socket(unix.AF_UNIX, of|unix.SOCK_CLOEXEC, 0)
		must(t, err)
		defer unix.Close(fd)
		must(t, errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 0)))
		if of == unix.SOCK_STREAM {
			waiting, err := net.Dial("unix", path)
			must(t, err)
			defer waiting.Close()
		}
		before, err := os.Lstat(path)
		must(t, err)
		if _, err := listen(t, Options{Path: path}); !errors.Is(err, want) ||
			!strings.Contains(err.Error(), "choose another socket") {
			t.Errorf("%v: %v", want, err)
		}
		if st, err := os.Lstat(path); err != nil || !os.SameFile(before, st) {
			t.Errorf("%v: a live socket is replaced: %v", want, err)
		}
	}
}

// An error of the directory names the remedy, at the start and later: another path. An error that
// would be the same in another directory names no remedy.
func TestRemedies(t *testing.T) {
	const remedy = "choose a path in a directory that this user may write to with --here"
	dir := testutil.ShortDir(t)
	o := Options{Path: filepath.Join(dir, "none", "s"), Setting: "--here"}
	if _, err := listen(t, o); !errors.Is(err, syscall.ENOENT) ||
		!strings.HasSuffix(err.Error(), remedy) {
		t.Errorf("no directory: %v", err)
	}
	var refuse atomic.Pointer[os.SyscallError]
	o.Prepare = func() error {
		if err := refuse.Load(); err != nil {
			return err
		}
		return nil
	}
	o.Path = filepath.Join(dir, "s")
	var logs testutil.Buffer
	o.Log = slog.New(slog.NewTextHandler(&logs, nil))
	l, err := listen(t, o)
	must(t, err)
	for errno, has := range map[syscall.Errno]bool{syscall.EMFILE: false, syscall.EACCES: true,
		syscall.EADDRINUSE: false, syscall.EROFS: true} {
		refuse.Store(&os.SyscallError{Syscall: "open", Err: errno})
		_ = os.Remove(o.Path)
		testutil.Eventually(t, soon, "the loss is not reported", func() bool {
			return strings.Contains(l.Unreachable(), errno.Error()) &&
				strings.Contains(logs.String(), errno.Error())
		})
		if why := l.Unreachable(); strings.Contains(why, remedy) != has {
			t.Errorf("%v: %s", errno, why)
		}
	}
	if n := strings.Count(logs.String(), remedy); n != 2 {
		t.Errorf("%d remedies in the log, want 2: %s", n, logs.String())
	}
}
