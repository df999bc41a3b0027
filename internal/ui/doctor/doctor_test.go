package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/google/go-cmp/cmp"

	peerkeys "github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/sys/topo"
	"github.com/kvspray/kvspray/internal/testutil"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// root makes a file tree for a Host.
func root(t *testing.T, files map[string]string) *Host {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return &Host{Root: dir, Config: config.Default()}
}

// This machine runs the tests, so that it can run the sidecar; each line is complete.
func TestRunHere(t *testing.T) {
	c := config.Default()
	c.Engine.Socket = filepath.Join(t.TempDir(), "s.sock")
	results := Run(context.Background(), &Host{Config: c})
	if !Healthy(results) {
		t.Errorf("not healthy: %+v", results)
	}
	seen := map[string]bool{}
	for _, r := range results {
		seen[r.Name] = true
		if r.Detail == "" || r.Name == "" || r.State != OK && r.State != Warn && r.State != Fail &&
			r.State != Skip ||
			(r.State == Warn || r.State == Fail) && r.Remedy == "" || r.State == OK && r.Remedy != "" {
			t.Errorf("incomplete: %+v", r)
		}
	}
	for _, name := range []string{"kernel", "transport shm", "transport tcp", "transport gdr",
		"rail lo", "memlock", "shared memory", "ptrace scope",
		"peer pidfd", "engine packages", "rdma devices", "gpu"} {
		if !seen[name] {
			t.Errorf("no line for %s", name)
		}
	}
	var text, js bytes.Buffer
	if err := WriteText(&text, results); err != nil || !strings.Contains(text.String(),
		"transport tcp") {
		t.Errorf("%v %s", err, text.String())
	}
	var back []Result
	if err := WriteJSON(&js, results); err != nil || json.Unmarshal(js.Bytes(), &back) != nil ||
		len(back) != len(results) {
		t.Errorf("%v %s", err, js.String())
	}
}

// The check has the numbers of serve: the limit of the cgroup, and what the sidecar itself needs.
func TestStoreMemory(t *testing.T) {
	for want, state := range map[config.Size]State{0: Skip, 1 << 20: OK, 2 << 30: Warn,
		1 << 50: Warn} {
		h := root(t, map[string]string{"proc/meminfo": "MemAvailable: 33554432 kB",
			"sys/fs/cgroup/memory.max": "2147483648"})
		h.Config.Store.Memory = want
		got := storeMemory(t.Context(), h)
		if got.State != state || state == Warn &&
			(!strings.Contains(got.Detail, bytesText(uint64(want))) ||
				!strings.Contains(got.Detail, "memory.max") ||
				!strings.Contains(got.Remedy, "lower it to 18")) {
			t.Errorf("%s: %+v", want, got)
		}
	}
}

// A service that is away, or refuses, is reported with the remedy, before a sidecar misses pages.
func TestStoreDirectory(t *testing.T) {
	s := miniredis.RunT(t)
	c := config.Default()
	h := &Host{Config: c}
	if r := storeDirectory(t.Context(), h); r.State != Skip {
		t.Errorf("%+v", r)
	}
	c.Store.Memory, c.Store.Directory = 1<<20, config.DirRedis
	c.Store.Redis.Addresses = []string{s.Addr()}
	if r := storeDirectory(t.Context(), h); r.State != OK {
		t.Errorf("%+v", r)
	}
	s.RequireAuth("secret")
	if r := storeDirectory(t.Context(), h); r.State != Warn ||
		!strings.Contains(r.Detail, "NOAUTH") || !strings.Contains(r.Detail, "password_file") {
		t.Errorf("%+v", r)
	}
	s.Close()
	if r := storeDirectory(t.Context(), h); r.State != Warn ||
		!strings.Contains(r.Detail, c.Store.Redis.Addresses[0]) {
		t.Errorf("%+v", r)
	}
	c.Store.Redis.PasswordFile = filepath.Join(t.TempDir(), "none")
	if r := storeDirectory(t.Context(), h); r.State != Fail {
		t.Errorf("%+v", r)
	}
}

func TestDescriptors(t *testing.T) {
	c := config.Default()
	if r := descriptorsOf(65536, c); r.State != OK {
		t.Errorf("%+v", r)
	}
	c.Engine.MaxSessions = 1024
	if r := descriptorsOf(1024, c); r.State != Warn || !strings.Contains(r.Remedy, "LimitNOFILE=") ||
		!strings.Contains(r.Detail, "max_sessions of 1024") {
		t.Errorf("%+v", r)
	}
}

func TestHealthy(t *testing.T) {
	all := []Result{{State: OK}, {State: Warn}, {State: Skip}, {State: Skip, Required: true}}
	if got, want := Summary(all), "1 ok, 1 warn, 0 fail, 2 skip: kvspray runs on this host"; !Healthy(
		all) || got != want {
		t.Errorf("%q, want %q", got, want)
	}
	all = append(all, Result{State: Fail, Required: true})
	if got := Summary(all); Healthy(all) || !strings.Contains(got, "1 fail, 2 skip: kvspray does "+
		"not run like this") {
		t.Errorf("%q", got)
	}
}

func TestFromFiles(t *testing.T) {
	const ib = "sys/class/infiniband/mlx5_0/ports/1/"
	for name, c := range map[string]struct {
		files map[string]string
		check func(context.Context, *Host) Result
		state State
		text  string
	}{
		"ptrace open": {map[string]string{"proc/sys/kernel/yama/ptrace_scope": "0\n"},
			ptraceScope, OK, "0:"},
		"ptrace restricted": {map[string]string{"proc/sys/kernel/yama/ptrace_scope": "1\n"}, ptraceScope,
			Skip, "1:"},
		"ptrace strange": {map[string]string{"proc/sys/kernel/yama/ptrace_scope": "x"},
			ptraceScope, Skip, "x"},
		"no yama": {nil, ptraceScope, OK, "absent"},
		"limit": {map[string]string{"proc/meminfo": "MemAvailable: 33554432 kB",
			"sys/fs/cgroup/memory.max":     "8589934592\n",
			"sys/fs/cgroup/memory.current": "1073741824\n"}, memoryLimit,
			OK, "8.0 GiB in /sys/fs/cgroup/memory.max, 7.0 GiB can still be taken"},
		"no limit": {map[string]string{"proc/meminfo": "MemAvailable: 33554432 kB",
			"sys/fs/cgroup/memory.max": "max"}, memoryLimit,
			OK, "none; 32.0 GiB are available"},
		"no meminfo": {nil, memoryLimit, Skip, "available memory"},
		"no shm":     {nil, sharedMemory, Warn, "/dev/shm"},
		"no gpu":     {map[string]string{"dev/null": ""}, gpu, Skip, "no NVIDIA"},
		"gpus": {map[string]string{"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "",
			"proc/driver/nvidia/version": "NVRM version: X 580\nGCC"},
			gpu, OK, "2, X 580"},
		"gpu not passed": {map[string]string{"dev/null": "", "proc/driver/nvidia/version": "X"}, gpu,
			Warn, "no /dev/nvidia"},
		"gpu no driver": {map[string]string{"dev/nvidia0": ""}, gpu, Skip, "1 device"},
		"no rdma":       {nil, rdma, Skip, "no device"},
		"rdma": {map[string]string{ib + "state": "4: ACTIVE\n",
			ib + "rate": "400 Gb/sec (4X NDR)\n"}, rdma, OK, "mlx5_0/1 400 Gb/sec"},
		"rdma down": {map[string]string{ib + "state": "1: DOWN\n", ib + "rate": "10 Gb/sec"}, rdma,
			Warn, "DOWN"},
	} {
		t.Run(name, func(t *testing.T) {
			r := c.check(context.Background(), root(t, c.files))
			if r.State != c.state || !strings.Contains(r.Detail, c.text) {
				t.Errorf("%+v, want %s with %q", r, c.state, c.text)
			}
		})
	}
}

func TestGDRRails(t *testing.T) {
	const ib = "sys/class/infiniband/mlx5_0/ports/1/"
	files := map[string]string{ib + "state": "4: ACTIVE\n", ib + "link_layer": "Ethernet",
		ib + "rate":   "400 Gb/sec (4X NDR)",
		ib + "gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001", ib + "gid_attrs/types/0": "RoCE v2",
		ib + "gid_attrs/ndevs/0": "eth7",
		ib + "gids/1":            "0000:0000:0000:0000:0000:ffff:0a01:0203",
		ib + "gid_attrs/types/1": "IB/RoCE v1",
		ib + "gid_attrs/ndevs/1": "eth7",
		ib + "gids/2":            "0000:0000:0000:0000:0000:ffff:0a01:0203",
		ib + "gid_attrs/types/2": "RoCE v2",
		ib + "gid_attrs/ndevs/2": "eth7"}
	check := func(h *Host) Result {
		t.Helper()
		r := gdrRails(context.Background(), h)
		if len(r) != 1 || r[0].Name != "gdr rail mlx5_0" {
			t.Fatalf("%+v", r)
		}
		return r[0]
	}
	r := check(root(t, files))
	for _, part := range []string{"400 Gbit/s", "GID 2: RoCEv2, 10.1.2.3 of eth7",
		"0 RoCEv2 fe80::1 eth7", "1 RoCEv1 10.1.2.3 eth7"} {
		if r.State != OK || !strings.Contains(r.Detail, part) {
			t.Errorf("%+v misses %q", r, part)
		}
	}
	h := root(t, files)
	h.Config.Transports.GDR.Rails = []string{"mlx5_0@1"}
	if r := check(h); r.State != OK || !strings.Contains(r.Detail, "index 1 is configured") {
		t.Errorf("%+v", r)
	}
	delete(files, ib+"gids/2")
	if r := check(root(t, files)); r.State != Warn || !strings.Contains(r.Remedy, "mlx5_0@INDEX") {
		t.Errorf("%+v", r)
	}
	if r := gdrRails(context.Background(), root(t, nil)); len(r) != 0 {
		t.Errorf("%+v", r)
	}
}

func TestParseKernel(t *testing.T) {
	for text, want := range map[string]string{"6.18.44-fc": "6 18 true", "5.3": "5 3 true",
		"5.15+": "5 15 true", "x": "0 0 false", "a.b": "0 0 false"} {
		a, b, ok := parseKernel(text)
		if got := fmt.Sprint(a, b, ok); got != want {
			t.Errorf("%s: %s", text, got)
		}
	}
}

func TestRails(t *testing.T) {
	h := root(t, map[string]string{"sys/class/net/lo/speed": "x"})
	h.Config.Transports.TCP.Rails = []config.Rail{{Name: "r0", Listen: "127.0.0.1:0"},
		{Name: "r1", Listen: "192.0.2.77:0"},
		{Name: "r2", Listen: "127.0.0.9:0"}, {Name: "r3", Listen: "localhost:0"},
		{Name: "r4", Listen: "0.0.0.0:0"}}
	var lo, missing bool
	for _, r := range rails(context.Background(), h) {
		lo = lo || r.Name == "rail lo" && r.State == OK && strings.Contains(r.Detail, "rail r0, r2, r3")
		if r.State == Warn && r.Name != "rail r1" {
			t.Errorf("a rail that works: %+v", r)
		}
		missing = missing || r.Name == "rail r1" && r.State == Warn
	}
	if !lo || !missing {
		t.Errorf("lo %v, missing %v", lo, missing)
	}
}

// Each interface gets one line: what it is, whether it is a rail, and why not.
func TestRailLines(t *testing.T) {
	h := root(t, map[string]string{"sys/class/net/eth0/speed": "25000\n",
		"sys/class/net/eth1/speed": "100000\n", "sys/class/net/bond0/speed": "200000\n",
		"sys/class/net/bond0/lower_a/x": "", "sys/devices/system/node/online": "0-1\n"})
	link := func(name string, kind topo.Kind, change func(*topo.Link), addrs ...string) topo.Link {
		l := topo.Link{Name: name, Index: len(name), Kind: kind, MTU: 9000, Admin: true, Link: true}
		for _, a := range addrs {
			l.Addrs = append(l.Addrs, netip.MustParsePrefix(a))
		}
		if change != nil {
			change(&l)
		}
		return l
	}
	h.Links = func() ([]topo.Link, error) {
		return []topo.Link{
			link("lo", topo.Loopback, nil, "127.0.0.1/8"),
			link("eth0", topo.Physical, nil, "10.0.0.1/24"),
			link("eth1", topo.Physical, func(l *topo.Link) { l.Link = false }, "10.0.1.1/24"),
			link("eth2", topo.Physical, func(l *topo.Link) { l.Admin, l.Link = false, false },
				"10.0.2.1/24"),
			link("ib0", topo.Physical, nil),
			link("mgmt", topo.Physical, nil, "10.9.0.1/24"),
			link("docker0", topo.Bridge, nil, "172.17.0.1/16"),
		}, nil
	}
	h.Config.Peer.ClusterKeyFile = "/etc/k"
	h.Config.Transports.TCP.Rails = []config.Rail{{Match: "mgmt", Exclude: true}, {Match: "ib*"},
		{Match: "*"}, {Name: "fixed", Listen: "10.7.7.7:0"}}
	want := map[string]string{
		"rail lo":   "", // leads nowhere, and is no rail here
		"rail eth0": "ok 10.0.0.1, 25 Gbit/s, MTU 9000, rail eth0 by the pattern *",
		"rail eth1": "warn 10.0.1.1, 100 Gbit/s, MTU 9000, rail eth1 by the pattern *; its link has " +
			"no carrier",
		"rail eth2": "warn 10.0.2.1, speed unknown (a virtual interface); set rails[].speed, MTU " +
			"9000, rail eth2 by the pattern *; it is administratively down",
		"rail ib0": "warn no address that reaches beyond its link, speed unknown (a virtual " +
			"interface); set rails[].speed, MTU 9000, not used",
		"rail mgmt": "ok 10.9.0.1, speed unknown (a virtual interface); set rails[].speed, MTU 9000, " +
			"excluded by the pattern mgmt",
		"rail fixed": "warn no interface has 10.7.7.7",
	}
	got := map[string]string{}
	for _, r := range rails(context.Background(), h) {
		got[r.Name] = string(r.State) + " " + r.Detail
		if r.State == Warn && r.Remedy == "" {
			t.Errorf("%s: no remedy", r.Name)
		}
	}
	delete(want, "rail lo")
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// A file of the right size and mode is not a key yet.
func TestKeys(t *testing.T) {
	p := filepath.Join(t.TempDir(), "cluster.key")
	h := &Host{Config: config.Default()}
	if r := keys(context.Background(), h); r.State != OK {
		t.Errorf("%+v", r)
	}
	h.Config.Peer.ClusterKeyFile = p
	for content, want := range map[string]State{strings.Repeat("g", 64): Fail, strings.Repeat("0a",
		32): OK, "short": Fail} {
		if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if r := keys(context.Background(), h); r.State != want {
			t.Errorf("%s: %+v", content, r)
		}
	}
}

// A certificate is reported before it ends, and after.
func TestCertificates(t *testing.T) {
	now, day := time.Now(), 24*time.Hour
	for _, x := range []struct {
		valid time.Duration
		state State
		want  string
	}{
		{30 * day, OK, "the certificate ends "},
		{5 * day, Warn, "the certificate ends "},
		{time.Hour, Fail, "but the time is "},
	} {
		dir := t.TempDir()
		path := func(name string) string { return filepath.Join(dir, name) }
		h := &Host{Config: config.Default()}
		tls := &h.Config.Peer.TLS
		tls.Cert, tls.Key, tls.CA = path("node.crt"), path("node.key"), path("ca.crt")
		from := now
		if x.state == Fail {
			from = now.Add(-2 * time.Hour)
		}
		err := peerkeys.WriteAuthority(tls.CA, path("ca.key"), from, 60*day)
		if err == nil {
			err = peerkeys.WriteNode(peerkeys.NodeFiles{CACert: tls.CA, CAKey: path("ca.key"),
				Cert: tls.Cert, Key: tls.Key}, "n", []string{"127.0.0.1"}, from, x.valid)
		}
		if err != nil {
			t.Fatal(err)
		}
		r := keys(context.Background(), h)
		if r.State != x.state || !strings.Contains(r.Detail, x.want) ||
			r.State != OK && r.Remedy == "" {
			t.Errorf("valid for %v: %+v", x.valid, r)
		}
	}
}

func TestEngineSocket(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]State{
		filepath.Join(dir, "a/b/c.sock"): OK,
		file:                             Fail,
		filepath.Join(file, "c.sock"):    Fail,
		"/" + strings.Repeat("x", 120):   Fail,
	} {
		c := config.Default()
		c.Engine.Socket = path
		if r := engineSocket(context.Background(), &Host{Config: c}); r.State != want {
			t.Errorf("%s: %+v", path, r)
		}
	}
}

func TestEngines(t *testing.T) {
	script := func(body string) string {
		p := filepath.Join(t.TempDir(), "python")
		if err := os.WriteFile(p, []byte("#!/bin/sh\n"+body+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for body, want := range map[string]State{
		`echo '{"vllm": "1.0", "kvspray": "0.1"}'`: OK,
		`echo '{"vllm": "1.0"}'`:                   Warn,
		`echo '{}'`:                                Skip,
		`echo broken`:                              Fail,
		`echo oops >&2; exit 3`:                    Fail,
	} {
		r := engines(context.Background(), &Host{Python: script(body)})
		if len(r) != 1 || r[0].State != want {
			t.Errorf("%s: %+v", body, r)
		}
	}
	for _, other := range []string{"/bin/ls", "/bin/cat", "/bin/sh", "/bin/true", "/does/not/exist"} {
		r := engines(context.Background(), &Host{Python: other})
		if len(r) != 1 || r[0].State != Fail || !strings.Contains(fmt.Sprint(r), "--python") ||
			strings.Contains(fmt.Sprint(r), "json.dumps") {
			t.Errorf("%s: %+v", other, r)
		}
	}
}

func TestRunningSidecar(t *testing.T) {
	body := `{"node":"n0","endpoint":"127.0.0.1:7650","workers":["vllm/a/tp0"]}`
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter,
		_ *http.Request) {
		fmt.Fprint(w, body)
	}))
	defer srv.Close()
	c := config.Default()
	c.HTTP.Listen = strings.TrimPrefix(srv.URL, "http://")
	c.Engine.Socket = filepath.Join(t.TempDir(), "s.sock")
	socket := func() *net.UnixListener {
		t.Helper()
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: c.Engine.Socket, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	another := func(why string) {
		t.Helper()
		if r := running(context.Background(), &Host{Config: c}); r.State != Warn ||
			!strings.Contains(r.Detail, "n0 answers at "+c.HTTP.Listen) ||
			!strings.Contains(r.Detail, why) || !strings.Contains(r.Remedy, "allowed_uids") {
			t.Errorf("%+v", r)
		}
	}
	another("no such file") // the sidecar has another configuration
	l := socket()
	if err := os.Chmod(c.Engine.Socket, 0); err != nil {
		t.Fatal(err)
	}
	var err error
	testutil.AsNobody(t, func() { err = answers(context.Background(), c.Engine.Socket) })
	if !errors.Is(err, os.ErrPermission) {
		t.Errorf("another user's socket: %v", err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(c.Engine.Socket, 0o600); err != nil {
		t.Fatal(err)
	}
	another("connection refused") // a sidecar of this user has been killed
	if err := os.Remove(c.Engine.Socket); err != nil {
		t.Fatal(err)
	}
	l = socket()
	defer func() { _ = l.Close() }()
	if r := running(context.Background(), &Host{Config: c}); r.State != OK ||
		!strings.Contains(r.Detail, "vllm/a/tp0") {
		t.Errorf("%+v", r)
	}
	body = `{"node":"n0","workers":["vllm/a/tp0"],"leaving":true,"leaving_seconds":12}`
	if r := running(context.Background(), &Host{Config: c}); r.State != Warn ||
		!strings.Contains(r.Detail, "12 s") {
		t.Errorf("%+v", r)
	}
	body = `{"node":"n0","workers":[],"problems":["store directory: lookup: NOAUTH","x"]}`
	if r := running(context.Background(), &Host{Config: c}); r.State != Warn ||
		!strings.Contains(r.Detail, "lookup: NOAUTH; x") {
		t.Errorf("%+v", r)
	}
	body = "nonsense"
	if r := running(context.Background(), &Host{Config: c}); r.State != Skip {
		t.Errorf("%+v", r)
	}
	srv.Close()
	if r := running(context.Background(), &Host{Config: c}); r.State != Skip {
		t.Errorf("%+v", r)
	}
	c.HTTP.Listen = config.Off
	if r := running(context.Background(), &Host{Config: c}); r.State != Skip {
		t.Errorf("%+v", r)
	}
}

func TestKillRight(t *testing.T) {
	c := config.Default()
	c.Engine.AllowedUIDs = []int{os.Getuid() + 12345}
	if r := killRight(context.Background(), &Host{Config: c}); r.State != Warn ||
		!strings.Contains(r.Detail, "quarantine") {
		t.Errorf("%+v", r)
	}
}

// TestGPUTable: one that was measured is named with its models, and what is none has a remedy.
func TestGPUTable(t *testing.T) {
	c := config.Default()
	c.Transports.GPU.Table = "/t.json"
	for text, want := range map[string]struct {
		state State
		what  string
	}{
		`{"version": 1, "gpus": {"B, driver 2": {}, "A, driver 1": {}}}`: {OK, "/t.json has A, driver " +
			"1; B, driver 2"},
		`{"version": 1, "gpus": {}}`: {Warn, "not a table of GPUs"},
		"{":                          {Warn, "not a table of GPUs"},
		"":                           {Warn, "no such file"},
	} {
		root := t.TempDir()
		if text != "" {
			if err := os.WriteFile(filepath.Join(root, "t.json"), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		got := gpuTable(t.Context(), &Host{Root: root, Config: c})
		if got.State != want.state || !strings.Contains(got.Detail, want.what) || want.state == Warn &&
			!strings.Contains(got.Remedy, "kvspray calibrate") {
			t.Errorf("%q: %+v", text, got)
		}
	}
	c.Transports.GPU.Table = config.Off
	if got := gpuTable(t.Context(), &Host{Root: t.TempDir(), Config: c}); got.State != Skip {
		t.Errorf("off: %+v", got)
	}
}
