package doctor

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// The memory file in which libkvspray_preload.so counts the copies of its process:
// struct table in pybind/preload/count.c.
const (
	countersLink  = "/memfd:kvspray-preload (deleted)"
	countersMagic = "kvspray1"
	countersHead  = 40      // bytes before the table
	maxCounters   = 1 << 20 // bytes of the whole file
	maxNames      = 256     // entry points, and outcomes
	maxNameBytes  = 256
	maxPreloaded  = 64 // processes that are reported

	// Texts of outcomes.
	bySidecar = "copied by the sidecar"
	noSidecar = "no sidecar"
)

// preloaded are the counters of one process.
type preloaded struct {
	pid    uint32 // as the process sees itself
	again  uint64 // copies that the driver made after the sidecar had not
	copies map[string]map[string]uint64
	bytes  map[string]uint64 // by outcome
}

// parseCounters reads the memory file.
func parseCounters(b []byte) (*preloaded, error) {
	if len(b) < countersHead || string(b[:8]) != countersMagic {
		return nil, errors.New("it has another form: use the library and the kvspray of one release")
	}
	le := binary.LittleEndian
	entries, outcomes, name := le.Uint32(b[12:]), le.Uint32(b[16:]), le.Uint32(b[20:])
	if entries > maxNames || outcomes > maxNames || name == 0 || name > maxNameBytes {
		return nil, fmt.Errorf("%d entry points, %d outcomes, names of %d bytes: want at most %d, %d "+
			"and %d", entries, outcomes, name, maxNames, maxNames, maxNameBytes)
	}
	names := countersHead + 16*entries*outcomes
	if want := names + (entries+outcomes)*name; uint32(len(b)) < want {
		return nil, fmt.Errorf("it has %d bytes, want %d", len(b), want)
	}
	text := func(i uint32) string {
		t, _, _ := bytes.Cut(b[names+i*name:][:name], []byte{0})
		return strings.ToValidUTF8(string(t), "?")
	}
	p := &preloaded{pid: le.Uint32(b[8:]), again: le.Uint64(b[24:]),
		copies: map[string]map[string]uint64{}, bytes: map[string]uint64{}}
	for e := range entries {
		for o := range outcomes {
			at := b[countersHead+16*(e*outcomes+o):]
			if n := le.Uint64(at); n > 0 {
				entry, outcome := text(e), text(entries+o)
				if p.copies[entry] == nil {
					p.copies[entry] = map[string]uint64{}
				}
				p.copies[entry][outcome] += n
				p.bytes[outcome] += le.Uint64(at[8:])
			}
		}
	}
	return p, nil
}

// String has the counters by entry point.
func (p *preloaded) String() string {
	var list []string
	for _, entry := range slices.Sorted(maps.Keys(p.copies)) {
		var parts []string
		for _, outcome := range slices.Sorted(maps.Keys(p.copies[entry])) {
			parts = append(parts, fmt.Sprintf("%d %s", p.copies[entry][outcome], outcome))
		}
		list = append(list, entry+": "+strings.Join(parts, ", "))
	}
	if p.again > 0 {
		list = append(list, fmt.Sprintf("%d were made again by the driver", p.again))
	}
	if len(list) == 0 {
		return "no copy of this process came by"
	}
	return strings.Join(list, "; ")
}

// preloads reports the processes of this user in which libkvspray_preload.so counts.
func preloads(ctx context.Context, h *Host) []Result {
	dirs, err := os.ReadDir(h.path("/proc"))
	if err != nil {
		return []Result{skip("", "%v", err)}
	}
	var out []Result
	for _, d := range dirs {
		if _, err := strconv.Atoi(d.Name()); err != nil || ctx.Err() != nil {
			continue
		}
		if r, ok := preload(filepath.Join(h.path("/proc"), d.Name())); ok && len(out) < maxPreloaded {
			out = append(out, r)
		}
	}
	if len(out) == 0 {
		return []Result{skip("", "no process that can be read has libkvspray_preload.so and has used a "+
			"GPU's driver")}
	}
	return out
}

// preload reports the process of a directory in /proc; false: it has no counters of its own.
func preload(dir string) (Result, bool) {
	fds, err := os.ReadDir(filepath.Join(dir, "fd"))
	if err != nil {
		return Result{}, false // of another user
	}
	for _, fd := range fds {
		path := filepath.Join(dir, "fd", fd.Name())
		if to, err := os.Readlink(path); err != nil || to != countersLink {
			continue
		}
		name := fmt.Sprintf("preload %s %s", filepath.Base(dir), comm(dir))
		f, err := os.Open(path)
		if err != nil {
			return named(name, skip("", "its counters cannot be read: %v", err)), true
		}
		b, err := io.ReadAll(io.LimitReader(f, maxCounters))
		_ = f.Close() // read to its end
		var p *preloaded
		if err == nil {
			p, err = parseCounters(b)
		}
		switch {
		case err != nil:
			return named(name, skip("", "its counters cannot be read: %v", err)), true
		case !slices.Contains(pids(dir), strconv.FormatUint(uint64(p.pid), 10)):
			continue // its parent's
		case p.bytes[noSidecar] > 0 && p.bytes[bySidecar] == 0:
			return named(name, warn("start a sidecar on the socket of KVSPRAY_PRELOAD_SOCKET: it would "+
				"make those of \"no sidecar\"", "%v", p)), true
		}
		return named(name, good("%v", p)), true
	}
	return Result{}, false
}

// comm is the name of a process.
func comm(dir string) string {
	b, err := os.ReadFile(filepath.Join(dir, "comm"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// pids are the numbers of a process, in the namespaces that it is in.
func pids(dir string) []string {
	b, err := os.ReadFile(filepath.Join(dir, "status"))
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "NSpid:"); ok {
			return strings.Fields(rest)
		}
	}
	return nil
}
