// Package limits reads how much of the host this process may take, where the kernel enforces it:
// memory in the process's own cgroup and in all of its parents, of cgroups v1 and v2; descriptors;
// memory that may be locked. It also has the remedy for each error of the kernel that such a limit
// causes. pybind/python/kvspray/limits.py does the same in engines.
//
// Everything is read anew at each call. No state, no goroutines.
package limits

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"strconv"
	"strings"
)

const (
	// A process that takes a pool needs memory for itself, too: connections and their buffers, the
	// index of the pool's pages, page tables.
	overheadBytes = 128 << 20
	overheadShare = 64 // and 1/64 of the pool

	// unlimited is above any limit: cgroup v1 has 2^63 less a page for none.
	unlimited    = 1 << 62
	maxFileBytes = 1 << 20
)

// Overhead is the memory that a process needs beside a pool of a given size.
func Overhead(pool uint64) uint64 { return overheadBytes + pool/overheadShare }

// Limit is one limit of a cgroup.
type Limit struct {
	File  string // which has it
	Bytes uint64
	Used  uint64 // of these, without the cache of files, which the kernel can reclaim
}

// Left is what may still be taken below this limit.
func (l *Limit) Left() uint64 { return l.Bytes - min(l.Used, l.Bytes) }

// Memory is what this process can still take.
type Memory struct {
	Host   uint64  // bytes that the kernel counts as available
	Limits []Limit // of the process's cgroup and its parents
}

// ReadMemory reads the limits below root: "" is this machine, another one is for tests. Limits of
// cgroups outside the process's namespace cannot be read, except that cgroup v1 has the lowest of
// them.
func ReadMemory(root string) (*Memory, error) {
	info, err := read(root + "/proc/meminfo")
	if err != nil {
		return nil, fmt.Errorf("limits: available memory: %w", err)
	}
	m := &Memory{}
	if m.Host, err = available(info); err != nil {
		return nil, fmt.Errorf("limits: %w", err)
	}
	// A process without these files is in no cgroup, or they are hidden: the usual places remain.
	own, _ := read(root + "/proc/self/cgroup")
	mounts, _ := read(root + "/proc/self/mountinfo")
	seen := map[string]bool{}
	for _, d := range cgroupDirs(own, mounts) {
		if !seen[d.path] {
			seen[d.path] = true
			m.Limits = append(m.Limits, d.limits(root)...)
		}
	}
	return m, nil
}

// Free is how many bytes can still be taken, and the limit that binds; nil: the host's memory does.
func (m *Memory) Free() (uint64, *Limit) {
	free, binds := m.Host, (*Limit)(nil)
	for i := range m.Limits {
		if l := &m.Limits[i]; l.Left() < free {
			free, binds = l.Left(), l
		}
	}
	return free, binds
}

// Tightest is the lowest limit of a cgroup; nil: there is none.
func (m *Memory) Tightest() *Limit {
	var tightest *Limit
	for i := range m.Limits {
		if l := &m.Limits[i]; tightest == nil || l.Bytes < tightest.Bytes {
			tightest = l
		}
	}
	return tightest
}

// Fits is the answer of Memory.Fits if a pool has no room.
type Fits struct{ Why, Remedy string }

// Fits returns nil if a pool has room beside what its process needs for itself.
func (m *Memory) Fits(pool uint64) *Fits {
	free, binds := m.Free()
	need := pool + Overhead(pool)
	if need <= free {
		return nil
	}
	f := &Fits{Why: fmt.Sprintf("with %d MiB for the process itself, %d MiB are needed, and this "+
		"host has %d MiB available", Overhead(pool)>>20, need>>20, free>>20),
		Remedy: "end what uses the memory"}
	if binds != nil {
		f.Why = fmt.Sprintf("with %d MiB for the process itself, %d MiB are needed, and %d MiB are "+
			"left of the %d MiB of %s", Overhead(pool)>>20, need>>20, free>>20, binds.Bytes>>20, binds.File)
		f.Remedy = "raise that limit (resources.limits.memory of a container, MemoryMax= of a unit)"
	}
	if limit := largestPool(free); limit > 0 {
		f.Remedy = fmt.Sprintf("lower it to %d MiB, or %s", limit>>20, f.Remedy)
	}
	return f
}

// largestPool is the largest pool for which the memory is enough, in whole MiB.
func largestPool(free uint64) uint64 {
	if free <= overheadBytes {
		return 0
	}
	return (free - overheadBytes) / (overheadShare + 1) * overheadShare >> 20 << 20
}

// available reads MemAvailable, which /proc/meminfo has in KiB.
func available(meminfo string) (uint64, error) {
	kib, ok := field(meminfo, "MemAvailable:")
	if !ok || kib > math.MaxUint64>>10 {
		return 0, errors.New("/proc/meminfo has no MemAvailable")
	}
	return kib << 10, nil
}

// field is the number that follows a name at the beginning of a line.
func field(text, name string) (uint64, bool) {
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == name {
			n, err := strconv.ParseUint(f[1], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// cgroupDir is the directory of a cgroup.
type cgroupDir struct {
	path string
	v2   bool
}

// cgroupDirs are the process's own cgroup and all parents up to the mount's root, of each hierarchy
// that may limit memory; the usual places follow, which a runtime may have mounted over.
func cgroupDirs(own, mounts string) (out []cgroupDir) {
	v1Path, v2Path := ownPaths(own)
	for line := range strings.Lines(mounts) {
		m, ok := parseMount(line)
		if !ok {
			continue
		}
		p := v1Path
		if m.v2 {
			p = v2Path
		}
		if p == "" {
			continue
		}
		// A path outside the mount's root is another namespace's: the mount itself is what is left.
		rel, inside := under(p, m.root)
		if !inside {
			rel = ""
		}
		for dir := path.Join(m.point, rel); ; dir = path.Dir(dir) {
			out = append(out, cgroupDir{dir, m.v2})
			if dir == path.Clean(m.point) || dir == "/" {
				break
			}
		}
	}
	return append(out, cgroupDir{"/sys/fs/cgroup", true}, cgroupDir{"/sys/fs/cgroup/memory", false})
}

// ownPaths are the process's paths in the hierarchies, as /proc/self/cgroup has them; empty: none.
func ownPaths(own string) (v1, v2 string) {
	for line := range strings.Lines(own) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		switch {
		case len(f) < 3 || !strings.HasPrefix(f[2], "/"):
		case f[0] == "0" && f[1] == "":
			v2 = f[2]
		case has(f[1], "memory"):
			v1 = f[2]
		}
	}
	return v1, v2
}

func has(list, word string) bool {
	for w := range strings.SplitSeq(list, ",") {
		if w == word {
			return true
		}
	}
	return false
}

// under is the part of a path below a root, without ways out.
func under(p, root string) (rel string, ok bool) {
	if strings.Contains(p+"/", "/../") || strings.Contains(root+"/", "/../") {
		return "", false
	}
	if root == "/" {
		return p, true
	}
	rel, ok = strings.CutPrefix(p, root)
	return rel, ok && (rel == "" || rel[0] == '/')
}

type mount struct {
	root, point string
	v2          bool
}

// parseMount reads a line of /proc/self/mountinfo; false: it is no hierarchy with memory.
func parseMount(line string) (m mount, ok bool) {
	before, after, ok := strings.Cut(line, " - ")
	f, g := strings.Fields(before), strings.Fields(after)
	if !ok || len(f) < 6 || len(g) < 3 {
		return m, false
	}
	m = mount{root: unescape.Replace(f[3]), point: unescape.Replace(f[4]), v2: g[0] == "cgroup2"}
	return m, strings.HasPrefix(m.point, "/") && (m.v2 || g[0] == "cgroup" && has(g[2], "memory"))
}

// unescape reads the characters that mountinfo escapes.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// limits are those of one cgroup.
func (d cgroupDir) limits(root string) (out []Limit) {
	number := func(file string) (uint64, bool) {
		text, err := read(root + path.Join(d.path, file))
		if err != nil {
			return 0, false
		}
		n, err := strconv.ParseUint(strings.TrimSpace(text), 10, 64)
		return n, err == nil // "max" is none
	}
	add := func(file string, n, used uint64) {
		if n < unlimited {
			out = append(out, Limit{File: path.Join(d.path, file), Bytes: n, Used: used})
		}
	}
	stat, _ := read(root + path.Join(d.path, "memory.stat"))
	used, files, cached := uint64(0), []string{"memory.max", "memory.high"}, "inactive_file"
	if d.v2 {
		used, _ = number("memory.current")
	} else {
		used, _ = number("memory.usage_in_bytes")
		files, cached = []string{"memory.limit_in_bytes"}, "total_inactive_file"
	}
	cache, _ := field(stat, cached)
	active, _ := field(stat, strings.Replace(cached, "inactive", "active", 1))
	used -= min(used, cache+active)
	for _, file := range files {
		if n, ok := number(file); ok {
			add(file, n, used)
		}
	}
	if n, ok := field(stat, "hierarchical_memory_limit"); ok && !d.v2 {
		// The tightest of all parents, also of those that are not shown here.
		add("memory.stat", n, used)
	}
	return out
}

func read(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // read only
	b, err := io.ReadAll(io.LimitReader(f, maxFileBytes))
	return string(b), err
}
