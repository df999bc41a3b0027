package memory

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
)

// Extent is a part of a file that backs an engine's memory. Region ids are chosen by engines; an
// extent identifies the memory itself. Two regions that share memory could be written by two
// transfers without coordination.
type Extent struct {
	File     [2]uint64 // device, inode
	from, to uint64
	Field    string      // of REGISTER; the name of a region that was added
	Region   *mem.Region // nil: of the board. A region without a file has an empty extent
}

func (e *Extent) overlaps(o *Extent) bool {
	return e.File == o.File && e.from < o.to && o.from < e.to
}

// Overlapping returns the one of before that shares memory with e.
func Overlapping(before []Extent, e *Extent) *Extent {
	for i := range before {
		if before[i].overlaps(e) {
			return &before[i]
		}
	}
	return nil
}

// Bounds of reading a process's list of mappings.
const (
	maxMapsBytes   = 32 << 20
	maxViewExtents = 4096 // of one region
)

// viewed lists the files that a process shares at [addr, addr+bytes): a view of a memfd is the
// memfd. Private memory cannot be shared and is omitted. If the list cannot be read, nothing is
// returned: the descriptor in the packet has already proved access to the memory.
func viewed(pid int32, addr, bytes uint64, field string) ([]Extent, error) {
	if pid <= 0 {
		return nil, nil
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, nil //nolint:nilerr // unknown, not wrong
	}
	defer func() { _ = f.Close() }() // read only
	return parseMaps(io.LimitReader(f, maxMapsBytes), addr, bytes, field)
}

// parseMaps reads ordered lines like "7f00-7f10 rw-s 00001000 00:01 1234 /memfd:kv (deleted)".
func parseMaps(r io.Reader, addr, bytes uint64, field string) (out []Extent, err error) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 5 {
			continue
		}
		lo, hi, ok := strings.Cut(f[0], "-")
		major, minor, ok2 := strings.Cut(f[3], ":")
		if !ok || !ok2 {
			continue
		}
		var n [6]uint64
		for i, s := range []string{lo, hi, f[2], major, minor} {
			if n[i], err = strconv.ParseUint(s, 16, 64); err != nil {
				return nil, fmt.Errorf("mapping %.80q: %w", lines.Text(), err)
			}
		}
		if n[5], err = strconv.ParseUint(f[4], 10, 64); err != nil {
			return nil, fmt.Errorf("mapping %.80q: %w", lines.Text(), err)
		}
		start, end := max(n[0], addr), min(n[1], addr+bytes)
		if n[0] >= addr+bytes {
			break
		}
		if start >= end || n[5] == 0 || len(f[1]) < 4 || f[1][3] != 's' {
			continue
		}
		if len(out) == maxViewExtents {
			return nil, fmt.Errorf("more than %d mappings of files", maxViewExtents)
		}
		out = append(out, Extent{File: [2]uint64{unix.Mkdev(uint32(n[3]), uint32(n[4])), n[5]},
			from: n[2] + start - n[0], to: n[2] + end - n[0], Field: field})
	}
	return out, lines.Err() //nolint:wrapcheck // of a file that was named
}
