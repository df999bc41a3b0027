package limits

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

var remedies = []struct {
	errno  unix.Errno
	remedy string
}{
	{unix.ENOMEM, "raise the memory limit (resources.limits.memory, MemoryMax=) or ulimit -v, or, " +
		"with vm.overcommit_memory=2, vm.overcommit_ratio"},
	{unix.EMFILE, "raise the limit of open files (ulimit -n, LimitNOFILE=, --ulimit nofile=)"},
	{unix.ENFILE, "raise the host's limit of open files, fs.file-max"},
	{unix.ENOSPC, "make room on that file system; of /dev/shm: docker run --shm-size=, or an " +
		"emptyDir of medium Memory"},
	{unix.EDQUOT, "make room in this user's quota on that file system"},
	{unix.EPERM, "allow the call in the container's seccomp profile, or give the capability that it " +
		"needs"},
	{unix.EACCES, "let this user access it"},
	{unix.ENOSYS, "use a kernel, or a container runtime, that has the call"},
	{unix.EAGAIN, "raise the limit of locked memory or of processes (ulimit -l, ulimit -u)"},
}

// Remedy adds to an error of the kernel what lifts the limit behind it, if it is one.
func Remedy(err error) error {
	for _, r := range remedies {
		if errors.Is(err, r.errno) {
			return fmt.Errorf("%w: %s", err, r.remedy)
		}
	}
	return err
}

// Advice is the remedy alone, or other for an error without one.
func Advice(err error, other string) string {
	for _, r := range remedies {
		if errors.Is(err, r.errno) {
			return r.remedy
		}
	}
	return other
}

// Descriptors is how many files this process may have open. The Go runtime has raised the soft
// limit to it.
func Descriptors() (uint64, error) {
	var l unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l)
	return l.Max, err //nolint:wrapcheck // the caller names it
}

// Memlock is how many bytes this process may lock; unix.RLIM_INFINITY: any number.
func Memlock() (uint64, error) {
	var l unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l)
	return l.Cur, err //nolint:wrapcheck // the caller names it
}
