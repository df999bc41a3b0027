package connector

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/sock"
)

// Listen makes the socket with mode 0600 in a directory with mode 0700. A dead sidecar's socket is
// replaced; a live one's is an error. Serve calls Listen unless the caller has.
func (s *Server) Listen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	if s.at != nil {
		return nil
	}
	at, err := sock.Listen(sock.Options{Network: "unixpacket", Path: s.opt.Socket,
		Mode: os.FileMode(s.opt.SocketMode), Look: s.opt.Look, Prepare: s.prepare,
		Name: "the engines' socket", Setting: "--socket (engine.socket)", Log: s.log})
	if err != nil {
		_ = s.lock.Close() // of nil, too
		s.lock = nil
		return fmt.Errorf("connector: socket %s: %w", s.opt.Socket, err)
	}
	s.at = at
	s.wg.Go(s.watch.Run)
	return nil
}

// prepare makes the socket's directory, and takes its lock. The lock, not the socket, proves that a
// sidecar lives: it ends with its process, and two sidecars that start at once cannot both take the
// place of a dead one. A lock that the path does not lead to any more proves nothing.
func (s *Server) prepare() error {
	path := s.opt.Socket + ".lock"
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("directory: %w", err)
	}
	if s.lock != nil {
		st, err := os.Lstat(path)
		own, err2 := s.lock.Stat()
		if err == nil && err2 == nil && os.SameFile(st, own) {
			return nil
		}
	}
	lock, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = errors.New("another sidecar serves it: stop that one, or choose another socket with " +
				"--socket (engine.socket)")
		}
		return err
	}
	_ = s.lock.Close() // of nil, too
	s.lock = lock
	return nil
}

// Unreachable is why engines cannot connect, as when the socket was removed; empty: they can.
func (s *Server) Unreachable() string {
	s.mu.Lock()
	at, closed := s.at, s.closed
	s.mu.Unlock()
	switch {
	case closed:
		return "the sidecar stops"
	case at == nil:
		return "the socket is not made yet"
	}
	if why := at.Unreachable(); why != "" {
		return "socket " + s.opt.Socket + ": " + why
	}
	return ""
}
