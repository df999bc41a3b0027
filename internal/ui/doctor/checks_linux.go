package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"runtime"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	peerkeys "github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/limits"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/directory"
	"github.com/kvspray/kvspray/store/directory/redis"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds of the checks.
const (
	minKernelMajor, minKernelMinor = 5, 3 // pidfd_open
	minMemlock                     = 1 << 30
	minDevShm                      = 1 << 30
	soPeerPidfd                    = 77 // asm-generic/socket.h, Linux 6.5
	maxFileBytes                   = 64 << 10
	directoryTime                  = 3 * time.Second
)

func (h *Host) read(path string) (string, error) {
	f, err := os.Open(h.path(path))
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // read only
	b, err := io.ReadAll(io.LimitReader(f, maxFileBytes))
	return strings.TrimSpace(string(b)), err
}

func kernel(_ context.Context, _ *Host) Result {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return skip("", "uname: %v", err)
	}
	release := unix.ByteSliceToString(u.Release[:])
	major, minor, ok := parseKernel(release)
	if !ok {
		return skip("", "release %q", release)
	}
	if major < minKernelMajor || major == minKernelMajor && minor < minKernelMinor {
		return fail(fmt.Sprintf("use a kernel of %d.%d or newer", minKernelMajor, minKernelMinor),
			"Linux %s has no pidfd_open", release)
	}
	return good("Linux %s", release)
}

func memoryCopies(_ context.Context, _ *Host) Result {
	return good("chosen by size: %s", strings.Join(mem.CopyChoices(), "; "))
}

func parseKernel(release string) (major, minor int, ok bool) {
	a, rest, found := strings.Cut(release, ".")
	if !found {
		return 0, 0, false
	}
	digits := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
	if digits < 0 {
		digits = len(rest)
	}
	major, err1 := strconv.Atoi(a)
	minor, err2 := strconv.Atoi(rest[:digits])
	return major, minor, err1 == nil && err2 == nil
}

func cores(_ context.Context, h *Host) Result {
	return good("%d usable, threads that copy for shm: %d", runtime.NumCPU(),
		h.Config.CopyThreads(runtime.NumCPU()))
}

// transportSHM makes, seals and maps a memfd, the only kernel functions that the backend needs.
func transportSHM(_ context.Context, _ *Host) Result {
	const size = 1 << 20 // bytes
	fd, err := unix.MemfdCreate("kvspray-doctor", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return fail(limits.Advice(err, "allow memfd_create in the container's seccomp profile"),
			"memfd_create: %v", err)
	}
	defer func() { _ = unix.Close(fd) }() // a memfd holds nothing to flush
	if err := unix.Ftruncate(fd, size); err != nil {
		return fail(limits.Advice(err, "raise the memory limit of the container"),
			"size a memfd of %d bytes: %v", size, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS,
		unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return fail("use a kernel with memfd seals", "seal a memfd: %v", err)
	}
	m, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fail(limits.Advice(err, "raise the address space limit (ulimit -v)"),
			"map a memfd: %v", err)
	}
	if err := unix.Munmap(m); err != nil {
		return skip("", "unmap a memfd: %v", err)
	}
	if err := unix.Ftruncate(fd, 0); !errors.Is(err, unix.EPERM) {
		return fail("use a kernel with memfd seals", "a sealed memfd could be truncated (%v)", err)
	}
	return good("memfds can be sealed and mapped")
}

func transportTCP(ctx context.Context, _ *Host) Result {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return fail("bring up the loopback interface", "listen on 127.0.0.1: %v", err)
	}
	defer func() { _ = l.Close() }() // nothing was accepted
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		return fail("look for a firewall on the loopback interface", "connect to %s: %v", l.Addr(), err)
	}
	if err := c.Close(); err != nil {
		return skip("", "close: %v", err)
	}
	return good("listens and connects on loopback")
}

func (h *Host) list(dir string) ([]string, error) {
	entries, err := os.ReadDir(h.path(dir))
	if err != nil {
		return nil, err
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	sort.Strings(names)
	return names, nil
}

func memlock(_ context.Context, h *Host) Result {
	n, err := limits.Memlock()
	if err != nil {
		return skip("", "getrlimit: %v", err)
	}
	if n == unix.RLIM_INFINITY {
		return good("unlimited")
	}
	if n < minMemlock {
		result := warn
		if devices, err := h.list("/sys/class/infiniband"); err != nil || len(devices) == 0 {
			result = skip // nothing on this host locks memory
		}
		return result("for RDMA: ulimit -l unlimited, or CAP_IPC_LOCK for the container; tcp and shm "+
			"do not need it", "%s may be locked", bytesText(n))
	}
	return good("%s may be locked", bytesText(n))
}

func bytesText(n uint64) string {
	for _, u := range []struct {
		name  string
		shift uint
	}{{"GiB", 30}, {"MiB", 20}, {"KiB", 10}} {
		if n >= 1<<u.shift {
			return fmt.Sprintf("%.1f %s", float64(n)/float64(uint64(1)<<u.shift), u.name)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}

func sharedMemory(_ context.Context, h *Host) Result {
	var st unix.Statfs_t
	if err := unix.Statfs(h.path("/dev/shm"), &st); err != nil {
		return warn("mount a tmpfs at /dev/shm; engines use it between their own ranks, kvspray's "+
			"memfds do not", "/dev/shm: %v", err)
	}
	size, free := st.Blocks*uint64(st.Bsize), st.Bavail*uint64(st.Bsize)
	if size < minDevShm {
		return warn("docker run --shm-size=8g, or an emptyDir of medium Memory at /dev/shm in a pod; "+
			"engines with several ranks need it, kvspray's memfds do not",
			"/dev/shm has %s", bytesText(size))
	}
	return good("/dev/shm has %s, %s free; memfds count against the memory limit instead",
		bytesText(size), bytesText(free))
}

func memoryLimit(_ context.Context, h *Host) Result {
	m, err := limits.ReadMemory(h.Root)
	if err != nil {
		return skip("", "%v", err)
	}
	l := m.Tightest()
	if l == nil {
		return good("none; %s are available on this host", bytesText(m.Host))
	}
	free, _ := m.Free()
	return good("%s in %s, %s can still be taken; an engine's KV cache in a memfd counts for the "+
		"container that touches it first", bytesText(l.Bytes), l.File, bytesText(free))
}

func storeMemory(_ context.Context, h *Host) Result {
	if h.Config == nil || h.Config.Store.Memory == 0 {
		return skip("", "store.memory is not set: this node has no store")
	}
	m, err := limits.ReadMemory(h.Root)
	if err != nil {
		return skip("", "%v", err)
	}
	want := uint64(h.Config.Store.Memory)
	if f := m.Fits(want); f != nil {
		return warn(f.Remedy, "store.memory is %s; %s; a sidecar that runs here has taken its own "+
			"already", bytesText(want), f.Why)
	}
	free, _ := m.Free()
	return good("store.memory is %s, and %s are available", bytesText(want), bytesText(free))
}

// storeDirectory asks the service that the store's directory is in for a page. Whether it also
// takes what this node holds is a problem that the running sidecar reports.
func storeDirectory(ctx context.Context, h *Host) Result {
	if h.Config == nil || h.Config.Store.Memory == 0 || h.Config.Store.Directory != config.DirRedis {
		return skip("", "store.directory is not redis: no service is needed")
	}
	d, err := redis.Configured(transfer.Boot{}, &h.Config.Store.Redis)
	if err != nil {
		return fail("let this user read it, or name another file", "%v", err)
	}
	defer func() { _ = d.Close() }() // nothing was stored
	ctx, stop := context.WithTimeout(ctx, directoryTime)
	defer stop()
	if err := d.Lookup(ctx, make([]page.Key, 1), directory.NewFound(1)); err != nil {
		return warn("repair the service: until it answers, pages of other nodes are misses", "%s: %v",
			strings.Join(h.Config.Store.Redis.Addresses, ", "), err)
	}
	return good("%s answers", strings.Join(h.Config.Store.Redis.Addresses, ", "))
}

// descriptors compares the limit with what engine.max_sessions sessions take.
func descriptors(_ context.Context, h *Host) Result {
	n, err := limits.Descriptors()
	if err != nil {
		return skip("", "getrlimit: %v", err)
	}
	return descriptorsOf(n, h.Config)
}

// Descriptors that a sidecar takes.
const (
	ownFiles     = 512 // lanes to peers, rails, disks, HTTP
	sessionFiles = 24  // socket, pidfd, board, eventfds, and the memory of a worker
)

func descriptorsOf(n uint64, c *config.Config) Result {
	if c == nil {
		c = config.Default()
	}
	need := uint64(ownFiles + sessionFiles*c.Engine.MaxSessions)
	if n < need {
		return warn("raise it (ulimit -n, LimitNOFILE=, --ulimit nofile=), or lower engine.max_sessions",
			"%d files may be open, and engine.max_sessions of %d can take %d", n, c.Engine.MaxSessions, need)
	}
	return good("%d files may be open", n)
}

func ptraceScope(_ context.Context, h *Host) Result {
	text, err := h.read("/proc/sys/kernel/yama/ptrace_scope")
	if errors.Is(err, os.ErrNotExist) {
		return good("Yama is absent: processes of one user may read each other")
	}
	if err != nil {
		return skip("", "%v", err)
	}
	switch text {
	case "0":
		return good("0: processes of one user may read each other")
	case "1", "2", "3":
		return skip("not needed: engines share memfds, or pass a descriptor of their own memory",
			"%s: process_vm_readv between siblings is refused", text)
	}
	return skip("", "ptrace_scope is %q", text)
}

// processMemory checks the fallback for caches outside memfds: reading through a descriptor of
// /proc/self/mem.
func processMemory(_ context.Context, _ *Host) Result {
	f, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		return warn("let engines allocate their cache in memfds (the plug-in does where it can)",
			"/proc/self/mem: %v", err)
	}
	if err := f.Close(); err != nil {
		return skip("", "close: %v", err)
	}
	return good("an engine can pass a descriptor of its own memory")
}

func peerPidfd(_ context.Context, _ *Host) Result {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return skip("", "socketpair: %v", err)
	}
	defer func() { _, _ = unix.Close(fds[0]), unix.Close(fds[1]) }() // nothing was sent
	fd, err := unix.GetsockoptInt(fds[0], unix.SOL_SOCKET, soPeerPidfd)
	if err == nil {
		return closePidfd(fd, "SO_PEERPIDFD works: the exit of an engine is proved without a race")
	}
	fd, perr := unix.PidfdOpen(os.Getpid(), 0)
	if perr != nil {
		return warn("allow pidfd_open in the container's seccomp profile", "SO_PEERPIDFD: %v, "+
			"pidfd_open: %v", err, perr)
	}
	if err := unix.Close(fd); err != nil {
		return skip("", "close: %v", err)
	}
	return warn("use Linux 6.5 or later; before it kvspray uses pidfd_open, with a race of a reused "+
		"pid at connect", "SO_PEERPIDFD: %v", err)
}

func closePidfd(fd int, detail string) Result {
	if err := unix.Close(fd); err != nil {
		return skip("", "close: %v", err)
	}
	return good("%s", detail)
}

// killRight checks whether an engine could kill a stopped sidecar: without that right its blocks
// stay in quarantine.
func killRight(_ context.Context, h *Host) Result {
	uid := os.Getuid()
	for _, other := range h.Config.Engine.AllowedUIDs {
		if other != uid && other != 0 {
			return warn(
				"run both under one user, or give the engine CAP_KILL and a shared process namespace",
				"engines of user %d may not signal a sidecar of user %d: blocks of a stopped sidecar stay in "+
					"quarantine until it ends", other, uid)
		}
	}
	return good("engines of user %d may", uid)
}

const maxSocketPath = 107 // bytes of sun_path without its end

func keys(_ context.Context, h *Host) Result {
	if !h.Config.Secured() {
		return good("none configured: loopback only")
	}
	if err := h.Config.CheckFiles(); err != nil {
		return fail("see the message; 'kvspray keygen' makes keys and certificates", "%s",
			strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	p := h.Config.Peer
	now := time.Now()
	expires, err := peerkeys.Check(p.ClusterKeyFile, p.TLS.Cert, p.TLS.Key, p.TLS.CA, now)
	switch left := expires.Sub(now); {
	case err != nil:
		return fail("see the message; 'kvspray keygen' makes keys and certificates", "%v", err)
	case expires.IsZero():
		return good("usable, and not readable by others")
	case left < renewBefore:
		return warn("issue a new one with 'kvspray keygen node' and replace the file: the sidecar "+
			"reads it without a restart",
			"the certificate ends %s, in %s", expires.Format(time.RFC3339), left.Round(time.Minute))
	default:
		return good("usable, and not readable by others; the certificate ends %s, in %d days",
			expires.Format(time.RFC3339), int(left.Hours()/24))
	}
}

// renewBefore is the time before the end of a certificate at which it should have been renewed.
const renewBefore = 7 * 24 * time.Hour

func gpu(_ context.Context, h *Host) Result {
	entries, err := h.list("/dev")
	if err != nil {
		return skip("", "/dev: %v", err)
	}
	n := 0
	for _, e := range entries {
		if digits, ok := strings.CutPrefix(e, "nvidia"); ok && digits != "" && strings.Trim(digits,
			"0123456789") == "" {
			n++
		}
	}
	version, err := h.read("/proc/driver/nvidia/version")
	if n == 0 && err != nil {
		return skip("CPU engines need none", "no NVIDIA device or driver")
	}
	if n == 0 {
		return warn("give the container its GPUs (for instance --gpus all)", "the driver is loaded, "+
			"but no /dev/nvidia device is here")
	}
	if err != nil {
		return skip("", "%d device files, but the driver's version cannot be read: %v", n, err)
	}
	line, _, _ := strings.Cut(version, "\n")
	return good("%d, %s", n, strings.TrimPrefix(line, "NVRM version: "))
}

// gpus is that line, and one for each GPU.
func gpus(ctx context.Context, h *Host) []Result {
	first := gpu(ctx, h)
	if first.State != OK || h.Root != "" {
		return []Result{first}
	}
	return append(append([]Result{first}, gpuDevices()...), named("gpu table", gpuTable(ctx, h)))
}

// gpuTable checks whether the host's GPUs were measured. serve checks the content of the table.
func gpuTable(_ context.Context, h *Host) Result {
	c := h.Config
	if c == nil {
		c = config.Default()
	}
	path, _ := c.Transports.GPU.TablePath()
	if path == "" {
		return skip("", "transports.gpu.calibration is off")
	}
	text, err := h.read(path)
	if err != nil {
		return warn("run kvspray calibrate to measure the GPUs; until then kvspray uses built-in values",
			"%v", err)
	}
	var t struct {
		GPUs map[string]json.RawMessage `json:"gpus"`
	}
	if err := json.Unmarshal([]byte(text), &t); err != nil || len(t.GPUs) == 0 {
		return warn("make a new one with kvspray calibrate", "%s is not a table of GPUs: %v", path, err)
	}
	return good("%s has %s", path, strings.Join(slices.Sorted(maps.Keys(t.GPUs)), "; "))
}

func rdma(_ context.Context, h *Host) Result {
	devices, err := h.list("/sys/class/infiniband")
	if err != nil || len(devices) == 0 {
		return skip("tcp and shm need none", "no device in /sys/class/infiniband")
	}
	var active, idle []string
	for _, d := range devices {
		ports, err := h.list("/sys/class/infiniband/" + d + "/ports")
		if err != nil {
			return skip("", "%s: %v", d, err)
		}
		for _, port := range ports {
			base := "/sys/class/infiniband/" + d + "/ports/" + port
			state, err := h.read(base + "/state")
			if err != nil {
				return skip("", "%s: %v", d, err)
			}
			rate, err := h.read(base + "/rate")
			if err != nil {
				rate = "rate unknown"
			}
			if strings.Contains(state, "ACTIVE") {
				active = append(active, fmt.Sprintf("%s/%s %s", d, port, rate))
			} else {
				idle = append(idle, fmt.Sprintf("%s/%s %s", d, port, state))
			}
		}
	}
	if len(active) == 0 {
		return warn("check cable, switch and subnet manager", "no active port: %s",
			strings.Join(idle, ", "))
	}
	return good("%s", strings.Join(active, ", "))
}
