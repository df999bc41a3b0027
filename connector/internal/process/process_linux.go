// Package process identifies the process at the other end of a unix socket and proves its exit.
//
// A Peer holds a pidfd, so the proof survives the reuse of the process id. No goroutines.
package process

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

const soPeerPidFD = 77 // SO_PEERPIDFD, Linux 6.5

// Peer is the process at the other end of a socket.
type Peer struct {
	UID   uint32
	PID   int32    // 0 if it lives in a pid namespace that this process cannot see
	pidfd *os.File // readable once every thread of it has ended
}

// Of identifies the process behind a socket and holds it.
func Of(uc *net.UnixConn) (*Peer, error) {
	rc, err := uc.SyscallConn()
	if err != nil {
		return nil, err
	}
	p := &Peer{}
	fd := -1
	var opErr error
	err = rc.Control(func(s uintptr) {
		cred, e := unix.GetsockoptUcred(int(s), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if e != nil {
			opErr = fmt.Errorf("SO_PEERCRED: %w", e)
			return
		}
		p.UID, p.PID = cred.Uid, cred.Pid
		if fd, e = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, soPeerPidFD); e == nil {
			return
		}
		fd = -1
		if cred.Pid == 0 {
			opErr = fmt.Errorf("the process is in another pid namespace and this kernel has no " +
				"SO_PEERPIDFD: share the pid namespace " +
				"(shareProcessNamespace in a pod), or use Linux 6.5 or later")
			return
		}
		// The pid may have been reused between connect and here. This pidfd then watches another
		// process, and the dead process's lease is held too long, never too short.
		if fd, e = unix.PidfdOpen(int(cred.Pid), 0); e != nil {
			fd = -1
			opErr = fmt.Errorf("pidfd_open %d: %w", cred.Pid, e)
		}
	})
	if err = errors.Join(err, opErr); err != nil {
		return nil, err
	}
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil { // our own descriptor, for the netpoller
		_ = unix.Close(fd)
		return nil, fmt.Errorf("pidfd: %w", err)
	}
	p.pidfd = os.NewFile(uintptr(fd), "pidfd")
	return p, nil
}

// Exited reports whether the process has ended, without waiting.
func (p *Peer) Exited() bool {
	rc, err := p.pidfd.SyscallConn()
	if err != nil {
		return false
	}
	done := false
	_ = rc.Control(func(fd uintptr) { done = readable(fd) })
	return done
}

// Wait blocks in the netpoller until the process has ended (nil) or the pidfd is closed.
func (p *Peer) Wait() error {
	rc, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return rc.Read(readable)
}

// readable reports whether the process has ended, without waiting.
func readable(fd uintptr) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1 && fds[0].Revents&unix.POLLIN != 0
}

// Close ends Wait and releases the process.
func (p *Peer) Close() { _ = p.pidfd.Close() }
