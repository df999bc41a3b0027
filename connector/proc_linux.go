package connector

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const soPeerPidFD = 77 // SO_PEERPIDFD, Linux 6.5

// peer is the process at the other end of a socket.
type peer struct {
	uid   uint32
	pid   int32    // 0 if it lives in a pid namespace that this process cannot see
	pidfd *os.File // readable once every thread of it has ended
}

// peerOf identifies the process behind a socket and holds it.
func peerOf(uc *net.UnixConn) (*peer, error) {
	rc, err := uc.SyscallConn()
	if err != nil {
		return nil, err
	}
	p := &peer{}
	fd := -1
	var opErr error
	err = rc.Control(func(s uintptr) {
		cred, e := unix.GetsockoptUcred(int(s), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if e != nil {
			opErr = fmt.Errorf("SO_PEERCRED: %w", e)
			return
		}
		p.uid, p.pid = cred.Uid, cred.Pid
		if fd, e = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, soPeerPidFD); e == nil {
			return
		}
		fd = -1
		if cred.Pid == 0 {
			opErr = fmt.Errorf("the process is in another pid namespace and this kernel has no SO_PEERPIDFD: share the pid namespace " +
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

// exited reports whether the process has ended, without waiting.
func (p *peer) exited() bool {
	rc, err := p.pidfd.SyscallConn()
	if err != nil {
		return false
	}
	done := false
	_ = rc.Control(func(fd uintptr) { done = readable(fd) })
	return done
}

// wait blocks in the netpoller until the process has ended (nil) or the pidfd is closed.
func (p *peer) wait() error {
	rc, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return rc.Read(readable)
}

func readable(fd uintptr) bool { return ready(fd, unix.POLLIN) }

// ready reports whether a descriptor has one of these events, without waiting.
func ready(fd uintptr, events int16) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1 && fds[0].Revents&events != 0
}

// hold returns a second handle for the same process.
func (p *peer) hold() (*peer, error) {
	rc, err := p.pidfd.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd, opErr := -1, error(nil)
	if err := rc.Control(func(s uintptr) { fd, opErr = unix.FcntlInt(s, unix.F_DUPFD_CLOEXEC, 0) }); err != nil || opErr != nil {
		return nil, fmt.Errorf("pidfd: %w", errors.Join(err, opErr))
	}
	return &peer{uid: p.uid, pid: p.pid, pidfd: os.NewFile(uintptr(fd), "pidfd")}, nil
}

func (p *peer) close() { _ = p.pidfd.Close() }

// checkEventfd refuses anything but a non-blocking eventfd: other files could block a write or give
// it a meaning. The shim can change the flag later; see ring and awaitDoorbell.
func checkEventfd(fd int) error {
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return err
	}
	if !strings.HasPrefix(name, "anon_inode:[eventfd") {
		return fmt.Errorf("descriptor is %q, want an eventfd", name)
	}
	fl, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return err
	}
	if fl&unix.O_NONBLOCK == 0 {
		return errors.New("eventfd blocks; create it with EFD_NONBLOCK")
	}
	return nil
}

// inode identifies the file behind a descriptor.
func inode(fd int) ([2]uint64, uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return [2]uint64{}, 0, err
	}
	return [2]uint64{uint64(st.Dev), st.Ino}, uint64(max(st.Size, 0)), nil
}

func kernelBootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
