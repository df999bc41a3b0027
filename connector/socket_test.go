package connector_test

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/internal/testutil"
)

const soon = 20 * time.Second

// often lets a server notice at once that its socket is gone.
func often(o *connector.Options) { o.Look = time.Millisecond }

// A socket that was removed is made again: engines that start later find it, and the sessions of
// connected engines stay.
func TestSocketIsRemoved(t *testing.T) {
	dir := testutil.ShortDir(t)
	path := filepath.Join(dir, "sub", "s")
	r := start(t, func(o *connector.Options) {
		often(o)
		o.Socket = path
	})
	r.socket = path
	r.worker(t, nil)
	for what, remove := range map[string]func() error{
		"the socket": func() error { return os.Remove(path) },
		// RemoveAll fails if a socket is made meanwhile.
		"socket and lock": func() error { return os.Rename(filepath.Dir(path), filepath.Dir(path)+"2") },
		"a socket in its place": func() error {
			if err := os.Remove(path); err != nil {
				return err
			}
			dead, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
			if err != nil {
				return err
			}
			dead.SetUnlinkOnClose(false)
			return dead.Close()
		},
	} {
		must(t, remove())
		testutil.Eventually(t, soon, "after the removal of "+what+" engines cannot connect", func() bool {
			c, err := net.Dial("unixpacket", path)
			if err == nil {
				err = c.Close()
			}
			return err == nil && r.Unreachable() == ""
		})
		r.worker(t, nil)
		// A second sidecar still cannot take its place.
		second, err := connector.New(connector.Options{Socket: path, Events: r.rec.handle,
			Copy: r.rec.copy, Endpoint: func() string { return "" }})
		must(t, err)
		if err := second.Listen(); err == nil {
			t.Errorf("%s: a second sidecar has the socket, too", what)
		}
	}
	if len(r.rec.gone) > 0 {
		t.Errorf("the engine that was connected is gone: %v", r.rec.gone)
	}
	if n := strings.Count(r.logs.String(), "socket was removed"); n > 3 {
		t.Errorf("%d log lines for 3 removals", n)
	}
}

// While the socket cannot be made again the server is not ready for engines, which one line of the
// log reports, and it leaves alone what another sidecar has.
func TestSocketCannotBeMadeAgain(t *testing.T) {
	dir := testutil.ShortDir(t)
	own, other := filepath.Join(dir, "own"), filepath.Join(dir, "other")
	r := start(t, func(o *connector.Options) {
		often(o)
		o.Socket = filepath.Join(own, "s")
	})
	must(t, os.Mkdir(other, 0o700))
	lock, err := os.Create(filepath.Join(other, "s.lock"))
	must(t, err)
	defer lock.Close()
	must(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB))
	must(t, unix.Renameat2(unix.AT_FDCWD, own, unix.AT_FDCWD, other, unix.RENAME_EXCHANGE))
	testutil.Eventually(t, soon, "the server is ready without its socket", func() bool {
		return strings.Contains(r.Unreachable(), "another sidecar serves it")
	})
	must(t, lock.Close())
	testutil.Eventually(t, soon, "the socket is not made again", func() bool {
		return r.Unreachable() == ""
	})
	if n := strings.Count(r.logs.String(), "cannot be made again"); n != 1 {
		t.Errorf("%d log lines for one reason", n)
	}
}
