// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// socket is the unix socket at the configured path.
type socket struct {
	path string
	ln   *net.UnixListener
	lock *os.File
	made os.FileInfo // as the path led to it
}

// there reports whether the path leads to the socket.
func (at *socket) there() bool {
	st, err := os.Lstat(at.path)
	return err == nil && os.SameFile(st, at.made)
}

// close removes the socket, unless the path leads to another one by now.
func (at *socket) close() {
	if at.ln == nil {
		return
	}
	if at.there() {
		_ = os.Remove(at.path)
	}
	_ = at.ln.Close()
	_ = at.lock.Close()
}

// Listen makes the socket with mode 0600 in a directory with mode 0700. A dead sidecar's socket is
// replaced; a live one's is an error. Serve calls Listen unless the caller has.
func (s *Server) Listen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	if s.at.ln != nil {
		return nil
	}
	at, err := s.bind(nil)
	if err != nil {
		return err
	}
	s.at = *at
	s.wg.Go(s.watch.Run)
	s.wg.Go(s.keepSocket)
	return nil
}

// bind makes the socket. had is the lock that this server has already; nil: none.
func (s *Server) bind(had *os.File) (at *socket, err error) {
	path := s.opt.Socket
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, unwritable("directory", path, err)
	}
	lock, err := lockOf(path, had)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*socket, error) {
		if lock != had {
			_ = lock.Close()
		}
		return nil, err
	}
	if st, err := os.Lstat(path); err == nil {
		if st.Mode()&os.ModeSocket == 0 {
			return fail(fmt.Errorf("connector: socket %s: %s has this path: move it away, or choose "+
				"another socket", path, what(st.Mode())))
		}
		if c, err := net.Dial("unixpacket", path); err == nil {
			_ = c.Close()
			return fail(fmt.Errorf("connector: socket %s: another program listens there: stop it, or "+
				"choose another socket", path))
		}
		if err := os.Remove(path); err != nil {
			return fail(fmt.Errorf("connector: replace the stale socket %s: %w", path, err))
		}
		s.log.Info("replaced a stale socket", "socket", path)
	}
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return fail(unwritable("listen", path, err))
	}
	ln.SetUnlinkOnClose(false) // the path may lead to another socket then
	err = os.Chmod(path, os.FileMode(s.opt.SocketMode))
	var made os.FileInfo
	if err == nil {
		made, err = os.Lstat(path)
	}
	if err != nil {
		_ = ln.Close()
		return fail(fmt.Errorf("connector: mode of socket %s: %w", path, err))
	}
	return &socket{path: path, ln: ln, lock: lock, made: made}, nil
}

// lockOf takes the lock of a socket. The lock, not the socket, proves that a sidecar lives: it ends
// with its process, and two sidecars that start at once cannot both take the place of a dead one. A
// lock that the path does not lead to any more proves nothing.
func lockOf(path string, had *os.File) (*os.File, error) {
	path += ".lock"
	if had != nil {
		st, err := os.Lstat(path)
		own, err2 := had.Stat()
		if err == nil && err2 == nil && os.SameFile(st, own) {
			return had, nil
		}
	}
	lock, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, unwritable("lock", path, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = errors.New("another sidecar serves it: stop that one, or choose another socket with " +
				"--socket (engine.socket)")
		}
		return nil, fmt.Errorf("connector: socket %s: %w", path, err)
	}
	return lock, nil
}

func unwritable(what, path string, err error) error {
	return fmt.Errorf("connector: socket %s: %s: %w: choose a path in a directory that this user "+
		"may write to with --socket (engine.socket)", path, what, err)
}

// Unreachable is why engines cannot connect, as when the socket was removed; empty: they can.
func (s *Server) Unreachable() string {
	s.mu.Lock()
	at, lost, closed := s.at, s.lost, s.closed
	s.mu.Unlock()
	switch {
	case closed:
		return "the sidecar stops"
	case at.ln == nil:
		return "the socket is not made yet"
	case at.there():
		return ""
	case lost != "":
		return lost
	}
	return "socket " + at.path + ": it was removed, and is made again within " + s.opt.Look.String()
}

// keepSocket makes the socket again whenever its path does not lead to it any more.
func (s *Server) keepSocket() {
	t := time.NewTicker(s.opt.Look)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			s.rebind()
		case <-s.ends:
			return
		}
	}
}

func (s *Server) rebind() {
	s.mu.Lock()
	old, lost := s.at, s.lost
	s.mu.Unlock()
	if old.there() {
		return
	}
	at, err := s.bind(old.lock)
	if err != nil {
		if err.Error() != lost {
			s.log.Error("the engines' socket was removed, and cannot be made again; retrying each "+
				"second", "err", err)
		}
		s.mu.Lock()
		s.lost = err.Error()
		s.mu.Unlock()
		return
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		at.close() // idempotent
		return
	}
	s.at, s.lost = *at, ""
	s.mu.Unlock()
	// Serve continues with the new one.
	_ = old.ln.Close()
	if old.lock != at.lock {
		_ = old.lock.Close()
	}
	s.log.Warn("the engines' socket was removed, and is made again", "socket", at.path)
}

// listener is the socket to accept from after last; nil: the server ends.
func (s *Server) listener(last *net.UnixListener) *net.UnixListener {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.at.ln == last {
		return nil
	}
	return s.at.ln
}
