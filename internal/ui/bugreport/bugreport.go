// Package bugreport is `kvspray bugreport`: one archive with what a maintainer asks for first. It
// has the versions, the configuration, doctor's checks, the answers of the local sidecar's HTTP
// port, facts of the host, and the end of a log file. redact.go replaces what identifies people and
// hosts.
//
// A part that cannot be read becomes its error in the archive: the rest is still of use. No
// goroutines.
package bugreport

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/ui/ask"
	"github.com/kvspray/kvspray/internal/ui/doctor"
	"github.com/kvspray/kvspray/internal/version"
)

// Bounds of an archive's parts.
const (
	maxLog  = 4 << 20 // bytes, from the log's end
	maxFile = 1 << 20 // bytes, of a file of the kernel's
)

// Options are what goes into a report.
type Options struct {
	Config *config.Config // also has the address of the local sidecar
	Python string         // as doctor's
	Log    string         // file whose end is added; empty: none
	Now    time.Time
}

// paths of the sidecar's HTTP port, and the names of their files.
var paths = []struct{ path, file string }{
	{"/debug/state", "sidecar/state.json"}, {"/v1/node", "sidecar/node.json"},
	{"/v1/reach", "sidecar/reach.json"}, {"/v1/links", "sidecar/links.json"},
	{"/v1/layouts", "sidecar/layouts.json"}, {"/v1/store", "sidecar/store.json"},
	{"/healthz", "sidecar/healthz.txt"}, {"/readyz", "sidecar/readyz.txt"},
	{"/metrics", "sidecar/metrics.txt"},
}

// hostFiles describe the machine.
var hostFiles = []string{"/proc/version", "/proc/meminfo", "/proc/net/dev",
	"/proc/sys/kernel/yama/ptrace_scope",
	"/proc/self/limits", "/proc/self/cgroup", "/proc/self/mountinfo",
	"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/cpu.max",
	"/proc/driver/nvidia/version", "/etc/os-release"}

// Write writes the archive, a tar.gz with one directory.
func Write(ctx context.Context, o Options, w io.Writer) error {
	r := NewRedactor(o.Config)
	zip := gzip.NewWriter(w)
	archive := tar.NewWriter(zip)
	dir := "kvspray-bugreport-" + o.Now.UTC().Format("20060102-150405")
	add := func(name string, content []byte, err error) error {
		if err != nil {
			content = fmt.Appendf(content, "\nnot complete: %v\n", err)
		}
		content = r.Redact(content)
		h := &tar.Header{Name: dir + "/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: o.Now}
		if err := archive.WriteHeader(h); err != nil {
			return err
		}
		_, err = archive.Write(content)
		return err
	}
	// The state names nodes, and names are replaced from the first file on.
	answers := make([][]byte, len(paths))
	errs := make([]error, len(paths))
	for i, p := range paths {
		if o.Config.HTTP.Listen == config.Off {
			errs[i] = errors.New("http.listen is off")
			continue
		}
		answers[i], errs[i] = ask.Bytes(ctx, o.Config.HTTP.Listen, p.path)
		r.learn(answers[i])
	}
	release := fmt.Appendf(nil, "kvspray %s\n%s\n%d processors, GOMAXPROCS %d\n", version.String(),
		version.Go(), runtime.NumCPU(), runtime.GOMAXPROCS(0))
	all := []error{add("version.txt", release, nil)}
	var text bytes.Buffer
	err := o.Config.WriteYAML(&text)
	all = append(all, add("config.yaml", text.Bytes(), err))
	var checks bytes.Buffer
	results := doctor.Run(ctx, &doctor.Host{Config: o.Config, Python: o.Python})
	err = doctor.WriteText(&checks, results)
	all = append(all, add("doctor.txt", checks.Bytes(), err))
	for i, p := range paths {
		all = append(all, add(p.file, answers[i], errs[i]))
	}
	for _, path := range hostFiles {
		b, err := end(path, maxFile)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		all = append(all, add("host"+path, b, err))
	}
	if o.Log != "" {
		b, err := end(o.Log, maxLog)
		all = append(all, add("end-of-log.txt", b, err))
	}
	return errors.Join(append(all, archive.Close(), zip.Close())...)
}

// end reads at most the last limit bytes of a file.
func end(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe must not block
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // read only
	if st, err := f.Stat(); err == nil && st.Mode().IsRegular() && st.Size() > limit {
		if _, err := f.Seek(-limit, io.SeekEnd); err != nil {
			return nil, err
		}
	}
	return io.ReadAll(io.LimitReader(f, limit))
}
