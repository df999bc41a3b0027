package verbs

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
)

// Each limit has a remedy of its own, and what is none is left as it was.
func TestRefusals(t *testing.T) {
	l := Limits{MaxRegistration: 1 << 30, MaxRegistrations: 100, MaxQueuePairs: 50}
	const mib = 1 << 20
	tight := LockedMemory{Limit: 8 * mib, Locked: 7 * mib}
	roomy := LockedMemory{Limit: 8 * mib}
	free := LockedMemory{Limit: 8 * mib, Locked: 7 * mib, Free: true}
	const memlock, table, size, pairs = "ulimit -l unlimited", "remove it from transports.gdr.rails",
		"register in parts", "lower transports.gdr.queue_pairs"
	all := []string{memlock, table, size, pairs}
	wrap := func(e syscall.Errno) error { return fmt.Errorf("verbs: it: %w", e) }
	mr := func(e syscall.Errno, n uint64, own int, lock LockedMemory) error {
		return RefuseRegistration(wrap(e), "mlx5_0", n, own, l, lock)
	}
	for name, c := range map[string]struct {
		err      error
		errno    syscall.Errno
		contains string // none of the others; empty: none at all
	}{
		"memlock": {mr(syscall.ENOMEM, 2*mib, 3, tight),
			syscall.ENOMEM, memlock},
		"memlock, by EPERM": {mr(syscall.EPERM, 2*mib, 3, tight),
			syscall.EPERM, memlock},
		"memlock, by EAGAIN": {mr(syscall.EAGAIN, 2*mib, 3, tight),
			syscall.EAGAIN, memlock},
		"more than may ever be locked": {mr(syscall.ENOMEM, 9*mib, 0, roomy),
			syscall.ENOMEM, memlock},
		"to the last byte": {mr(syscall.ENOMEM, mib, 3, tight), syscall.ENOMEM, table},
		"a byte more": {mr(syscall.ENOMEM, mib+1, 3, tight),
			syscall.ENOMEM, memlock},
		"a full table under a limit": {mr(syscall.ENOMEM, 2*mib, 100, roomy),
			syscall.ENOMEM, table},
		"a full table, the limit is not ours": {mr(syscall.ENOMEM, 2*mib, 100, free),
			syscall.ENOMEM, table},
		"a full table of soft-RoCE": {mr(syscall.EINVAL, 2*mib, 100, roomy),
			syscall.EINVAL, table},
		"too long":      {mr(syscall.EINVAL, 2<<30, 0, free), syscall.EINVAL, size},
		"another error": {mr(syscall.EINVAL, 2*mib, 99, free), syscall.EINVAL, ""},
		"a bad address": {mr(syscall.EFAULT, 2*mib, 3, tight), syscall.EFAULT, ""},
		"queue pairs": {RefuseQueuePair(wrap(syscall.ENOMEM), "mlx5_0", 50, l),
			syscall.ENOMEM, pairs},
		"queue pairs of soft-RoCE": {RefuseQueuePair(wrap(syscall.EINVAL), "mlx5_0", 50, l),
			syscall.EINVAL, pairs},
		"no queue pair for another reason": {RefuseQueuePair(wrap(syscall.EINVAL), "mlx5_0", 49, l),
			syscall.EINVAL, ""},
	} {
		if !errors.Is(c.err, c.errno) {
			t.Errorf("%s: the library's error is lost: %v", name, c.err)
		}
		if limit := c.contains != "" && c.contains != memlock; errors.Is(c.err, ErrFull) != limit {
			t.Errorf("%s: full: %v: %v", name, !limit, c.err)
		}
		for _, s := range all {
			if strings.Contains(c.err.Error(), s) != (s == c.contains) {
				t.Errorf("%s: %q, want %q", name, c.err, c.contains)
			}
		}
	}
	for _, contains := range []string{
		"mlx5_0 has room for 100 registrations, and this process holds 100",
		"mlx5_0 has room for 50 queue pairs, and this process holds 50"} {
		if got := mr(syscall.ENOMEM, mib, 100, free).Error() + RefuseQueuePair(wrap(syscall.ENOMEM),
			"mlx5_0", 50, l).Error(); !strings.Contains(got, contains) {
			t.Errorf("%q lacks %q", got, contains)
		}
	}
}
