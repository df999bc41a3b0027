// Package machine records the build and the machine of a benchmark's figures: they are worth
// nothing without. kvspray/machine.py does the same in Python. No goroutines.
package machine

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/version"
)

// Machine is what a result carries. Values that the kernel does not report stay empty.
type Machine struct {
	// of the build: its commit, and whether something was changed since
	Version   string  `json:"version"`
	Processor string  `json:"processor"`
	Cores     int     `json:"cores"`
	Kernel    string  `json:"kernel"`
	Go        string  `json:"go"`
	Load      float64 `json:"load_average"` // of the last minute before the run: what else ran
}

// Here looks at this machine. To be called before a run, which is load itself.
func Here() Machine {
	m := Machine{Version: version.String(), Processor: processor(), Cores: runtime.NumCPU(),
		Go: runtime.Version()}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	load, _ := os.ReadFile("/proc/loadavg") // none is 0
	minute, _, _ := strings.Cut(string(load), " ")
	m.Load, _ = strconv.ParseFloat(minute, 64)
	return m
}

func processor() string {
	b, _ := os.ReadFile("/proc/cpuinfo") // only to name it
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return runtime.GOARCH
}

// String is a line for people.
func (m Machine) String() string {
	return fmt.Sprintf("%d x %s, Linux %s, load before the run %.2f", m.Cores, m.Processor,
		m.Kernel, m.Load)
}
