// Package eventfd checks and signals the eventfds that an engine passes to the sidecar.
//
// The engine can change the flags of an eventfd at any time, so no call of this package may block
// because of them. No goroutines.
package eventfd

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Check refuses anything but a non-blocking eventfd: other files could block a write or give it a
// meaning.
func Check(fd int) error {
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

// Signal adds one. A full counter wakes its reader as well and is left unchanged: the engine can
// make an addition to it block, and callers hold locks. A negative descriptor is ignored.
func Signal(fd int) {
	if fd < 0 || !writable(fd) {
		return
	}
	_, _ = unix.Write(fd, binary.NativeEndian.AppendUint64(nil, 1))
}

func writable(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1 && fds[0].Revents&unix.POLLOUT != 0
}
