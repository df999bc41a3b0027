// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Available is how many bytes of memory this process can take: what the kernel counts as available,
// or the limit of its cgroup if that is lower. Sources: /proc/meminfo; memory.max of cgroup v2.
func Available() (uint64, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	n, err := availableOf(string(text))
	if err != nil {
		return 0, err
	}
	if text, err := os.ReadFile("/sys/fs/cgroup/memory.max"); err == nil {
		if limit, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err == nil {
			n = min(n, limit)
		}
	}
	return n, nil
}

// availableOf reads MemAvailable, which /proc/meminfo has in KiB.
func availableOf(meminfo string) (uint64, error) {
	for line := range strings.Lines(meminfo) {
		if rest, ok := strings.CutPrefix(line, "MemAvailable:"); ok {
			kib, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 54)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("/proc/meminfo has no MemAvailable")
}
