// Package sock has listeners on unix sockets. If the path of a socket is removed, for example by a
// program that cleans /tmp, no client can connect to the socket any more. A Listener then makes the
// socket again.
//
// A Listener replaces only a stale socket: one that refuses connections, because its process has
// ended. It never replaces another socket or another file. It has one goroutine, which checks the
// path each second. Close waits for the end of the goroutine.
package sock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// DefaultLook is the time between two checks of the path.
const DefaultLook = time.Second

// Options of a Listener. Only Look, Prepare and Setting may be zero.
type Options struct {
	Name    string // in the log, with its article
	Network string // "unix" or "unixpacket"
	Path    string
	Setting string // the flag or key that sets the path; errors name it as the remedy
	Mode    os.FileMode
	Look    time.Duration // zero: DefaultLook
	// Prepare runs before each attempt to make the socket, never twice at once. It can make the
	// directory, for example.
	Prepare func() error
	Log     *slog.Logger
}

// Listener is a unix socket at a path.
type Listener struct {
	o    Options
	stop context.CancelFunc
	done chan struct{} // closed by the goroutine at its end
	once sync.Once     // of Close

	mu   sync.Mutex // protects all below
	ln   *net.UnixListener
	made os.FileInfo // of the path when the socket was made
	lost string      // why the last attempt to make it again failed; empty: none has failed
}

var _ net.Listener = (*Listener)(nil)

// Listen makes the socket.
func Listen(o Options) (*Listener, error) {
	if o.Look <= 0 {
		o.Look = DefaultLook
	}
	if o.Prepare == nil {
		o.Prepare = func() error { return nil }
	}
	l := &Listener{o: o, done: make(chan struct{})}
	var err error
	if l.ln, l.made, err = l.bind(); err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	l.stop = stop
	go l.keep(ctx)
	return l, nil
}

func (l *Listener) bind() (*net.UnixListener, os.FileInfo, error) {
	path := l.o.Path
	if err := l.o.Prepare(); err != nil {
		return nil, nil, l.remedy(err)
	}
	if st, err := os.Lstat(path); err == nil {
		if st.Mode()&os.ModeSocket == 0 {
			return nil, nil, fmt.Errorf("%s has this path: move it away, or choose another socket",
				what(st.Mode()))
		}
		c, err := net.Dial(l.o.Network, path)
		switch {
		case err == nil:
			_ = c.Close()
			return nil, nil, errors.New("another program listens there: stop it, or choose another socket")
		case !errors.Is(err, syscall.ECONNREFUSED): // a full backlog, or a socket of another user
			return nil, nil, fmt.Errorf("find out whether another program listens there: %w: stop it, "+
				"remove the socket of one that has ended, or choose another socket", err)
		}
		if err := os.Remove(path); err != nil {
			return nil, nil, l.remedy(fmt.Errorf("replace a stale socket: %w", err))
		}
	}
	ln, err := net.ListenUnix(l.o.Network, &net.UnixAddr{Name: path, Net: l.o.Network})
	if err != nil {
		return nil, nil, l.remedy(err) // it names operation and path
	}
	ln.SetUnlinkOnClose(false) // at that time the path may lead to another socket
	err = os.Chmod(path, l.o.Mode)
	var made os.FileInfo
	if err == nil {
		made, err = os.Lstat(path)
	}
	if err != nil {
		_ = ln.Close()
		return nil, nil, fmt.Errorf("mode: %w", err)
	}
	return ln, made, nil
}

// remedy adds to an error of the path's directory the setting that chooses another path.
func (l *Listener) remedy(err error) error {
	for _, e := range []error{syscall.EACCES, syscall.EPERM, syscall.EROFS, syscall.ENOENT,
		syscall.ENOTDIR} {
		if l.o.Setting != "" && errors.Is(err, e) {
			return fmt.Errorf("%w: choose a path in a directory that this user may write to with %s", err,
				l.o.Setting)
		}
	}
	return err
}

// what describes a file that is not a socket.
func what(m os.FileMode) string {
	switch {
	case m.IsDir():
		return "a directory"
	case m.IsRegular():
		return "a file"
	}
	return "a file that is not a socket (" + m.Type().String() + ")"
}

// Unreachable returns the reason why no client can connect, for example the removal of the socket.
// If clients can connect, it returns an empty string.
func (l *Listener) Unreachable() string {
	l.mu.Lock()
	made, lost := l.made, l.lost
	l.mu.Unlock()
	switch {
	case leadsTo(l.o.Path, made):
		return ""
	case lost != "":
		return lost
	}
	return "it was removed, and is made again within " + l.o.Look.String()
}

func leadsTo(path string, made os.FileInfo) bool {
	st, err := os.Lstat(path)
	return err == nil && os.SameFile(st, made)
}

func (l *Listener) keep(ctx context.Context) {
	defer close(l.done)
	t := time.NewTicker(l.o.Look)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			l.look()
		case <-ctx.Done():
			return
		}
	}
}

// look makes the socket again if the path does not lead to it. After Listen, only look changes the
// fields that mu protects.
func (l *Listener) look() {
	if leadsTo(l.o.Path, l.made) {
		return
	}
	ln, made, err := l.bind()
	if err != nil {
		if err.Error() != l.lost {
			l.o.Log.Error(l.o.Name+" was removed, and cannot be made again; retrying", "socket", l.o.Path,
				"every", l.o.Look, "err", err)
		}
		l.mu.Lock()
		l.lost = err.Error()
		l.mu.Unlock()
		return
	}
	l.mu.Lock()
	old := l.ln
	l.ln, l.made, l.lost = ln, made, ""
	l.mu.Unlock()
	_ = old.Close() // Accept continues with the new one
	l.o.Log.Warn(l.o.Name+" was removed, and is made again", "socket", l.o.Path)
}

func (l *Listener) current() *net.UnixListener {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ln
}

// AcceptUnix accepts a connection. If look replaces the socket meanwhile, AcceptUnix continues with
// the new one.
func (l *Listener) AcceptUnix() (*net.UnixConn, error) {
	for {
		ln := l.current()
		c, err := ln.AcceptUnix()
		if err == nil || !errors.Is(err, net.ErrClosed) || ln == l.current() {
			return c, err //nolint:wrapcheck // the listener's own
		}
	}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.AcceptUnix()
	if err != nil {
		return nil, err // no typed nil
	}
	return c, nil
}

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr { return l.current().Addr() }

// Close removes the socket, unless the path leads to another one by now. A second call only returns
// net.ErrClosed.
func (l *Listener) Close() error {
	err := net.ErrClosed
	l.once.Do(func() {
		l.stop()
		<-l.done
		if leadsTo(l.o.Path, l.made) {
			_ = os.Remove(l.o.Path)
		}
		err = l.ln.Close()
	})
	return err //nolint:wrapcheck // the listener's own
}
