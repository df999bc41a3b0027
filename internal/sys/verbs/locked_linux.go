package verbs

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// lockedMemory asks the kernel. Missing data counts as no limit.
func lockedMemory() LockedMemory {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim) != nil || lim.Cur == unix.RLIM_INFINITY {
		return LockedMemory{Free: true}
	}
	status, err := os.ReadFile("/proc/thread-self/status") // capabilities are a thread's
	if err != nil {
		return LockedMemory{Free: true}
	}
	l := lockedIn(string(status))
	l.Limit = lim.Cur
	return l
}

// lockedIn reads the locked memory from a status file of /proc: memory locked by mlock, and memory
// pinned for devices, which RDMA counts separately.
func lockedIn(status string) (l LockedMemory) {
	for line := range strings.Lines(status) {
		name, text, _ := strings.Cut(line, ":")
		f := strings.Fields(text)
		if len(f) == 0 {
			continue
		}
		switch name {
		case "VmPin":
			kib, _ := strconv.ParseUint(f[0], 10, 54)
			l.Locked = kib << 10
		case "CapEff":
			caps, _ := strconv.ParseUint(f[0], 16, 64)
			l.Free = caps&(1<<unix.CAP_IPC_LOCK) != 0
		}
	}
	return l
}
