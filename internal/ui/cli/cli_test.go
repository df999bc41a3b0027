package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/ui/command"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func run(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = Main(args, &out, &errs)
	return code, out.String(), errs.String()
}

func TestExitCodes(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("peer:\n  lisen: x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	router := filepath.Join(filepath.Dir(bad), "router.yaml")
	if err := os.WriteFile(router, []byte("engines: [{url: http://b:1, role: x}]\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	const decode = "url=http://a:1,role=decode"
	for name, c := range map[string]struct {
		args []string
		code int
		text string // on either stream
	}{
		"help":         {nil, command.ExitOK, "kvspray serve"},
		"version":      {[]string{"version"}, command.ExitOK, "kvspray "},
		"version json": {[]string{"version", "--json"}, command.ExitOK, `"version"`},
		"output json":  {[]string{"version", "--output", "json"}, command.ExitOK, `"version"`},
		"output xml": {[]string{"version", "--output", "xml"}, command.ExitUsage,
			`invalid argument "xml" for "--output" flag: want text or json`},
		"completion": {[]string{"completion", "bash"}, command.ExitOK, "__start_kvspray"},
		"status nowhere": {[]string{"status", "--http", "127.0.0.1:1"}, command.ExitFailure,
			"no sidecar answers at http://127.0.0.1:1"},
		// No usage error: a hook with no time beyond the notice still marks the sidecar.
		"drain nowhere": {[]string{"drain", "--socket", "/nowhere", "--notice", "1ms", "--timeout",
			"1ms"}, command.ExitFailure, "no sidecar answers at /nowhere.admin"},
		"drain relative": {[]string{"drain", "--socket", "here"}, command.ExitUsage, `--socket "here"`},
		"role nowhere": {[]string{"role", "set", "e", "decode", "--socket", "/nowhere"},
			command.ExitFailure, "no sidecar answers at /nowhere.admin"},
		"role unknown": {[]string{"role", "set", "e", "chef", "--socket", "/nowhere"},
			command.ExitUsage, `role "chef" is not one of prefill, decode, both`},
		"join without key": {[]string{"proxy", "--join", "10.0.0.1:1"}, command.ExitUsage,
			"set cluster_key_file to peer.cluster_key_file"},
		"join nowhere": {[]string{"proxy", "--join", "here"}, command.ExitUsage, "join[0]"},
		"allow without join": {[]string{"proxy", "--engine", decode, "--allow", "10.0.0.0/8"},
			command.ExitUsage, "set without join"},
		"status address": {[]string{"status", "--http", "here"}, command.ExitUsage, `--http "here"`},
		"ping whom": {[]string{"ping"}, command.ExitUsage,
			"ping takes 1 arguments, PEER, and got none"},
		"ping count": {[]string{"ping", "127.0.0.1:1", "--count", "0"}, command.ExitUsage,
			"--count 0: want 1 to 100"},
		"ping nobody": {[]string{"ping", "127.0.0.1:1"}, command.ExitFailure, "nothing listens there"},
		"ping name": {[]string{"ping", "d0", "--http", "127.0.0.1:1"}, command.ExitFailure,
			`"d0": not host:port, and no node`},
		"ping without key": {[]string{"ping", "10.0.0.1:1", "--http", "off"}, command.ExitFailure,
			"keygen cluster"},
		"report twice": {[]string{"bugreport", "--out", bad}, command.ExitFailure,
			"name a file that does not exist yet"},
		"no command": {[]string{"sreve"}, command.ExitUsage, "Did you mean"},
		"no flag":    {[]string{"serve", "--nope"}, command.ExitUsage, "--help"},
		"argument":   {[]string{"doctor", "x"}, command.ExitUsage, "--help"},
		"bad file": {[]string{"config", "check", "--config", bad}, command.ExitUsage,
			bad + ":2: peer.lisen: \"x\": unknown key; did you mean \"listen\"?"},
		"bad file serve": {[]string{"serve", "--config", bad}, command.ExitUsage, "peer.lisen"},
		"open listen":    {[]string{"serve", "--listen", "10.0.0.1:1"}, command.ExitUsage, "keygen"},
		"no key file": {[]string{"serve", "--set", "peer.cluster_key_file=/does/not/exist"},
			command.ExitUsage, "keygen cluster"},
		"good":      {[]string{"config", "check"}, command.ExitOK, "ok"},
		"good json": {[]string{"config", "check", "--json"}, command.ExitOK, `{"ok":true}`},
		"bad json": {[]string{"config", "check", "--json", "--set", "nope=1"}, command.ExitUsage,
			`{"ok":false,"error":"nope: \"1\": unknown key`},
		"level": {[]string{"serve", "--log-level", "loud"}, command.ExitUsage,
			`--log-level "loud" is not debug, info, warn or error`},
		"level before": {[]string{"serve", "--log-level", "warn", "--set",
			"peer.cluster_key_file=/does/not/exist"}, command.ExitUsage, "keygen cluster"},
		"no empty level": {[]string{"serve", "--log-level", ""}, command.ExitUsage, "--log-level"},
		"json nowhere": {[]string{"status", "--json", "--http", "127.0.0.1:1"}, command.ExitFailure,
			"no sidecar answers at http://127.0.0.1:1"},
		"print":         {[]string{"config", "print", "--set", "node=n1"}, command.ExitOK, "node: n1"},
		"docs":          {[]string{"config", "print", "--docs"}, command.ExitOK, "| `peer.listen` |"},
		"proxy nothing": {[]string{"proxy"}, command.ExitUsage, "no engine decodes"},
		"proxy events": {[]string{"proxy", "--policy", "auto", "--engine", decode +
			",events=tcp://*:5557"}, command.ExitUsage, "the host is missing"},
		"proxy events without a policy": {[]string{"proxy", "--engine", decode +
			",events=tcp://a:5557"}, command.ExitUsage, "set it for instance to auto"},
		"proxy no sidecar": {[]string{"proxy", "--engine", "url=http://a:1,role=both"},
			command.ExitUsage, "set peer to host:port or sidecar"},
		"proxy no file": {[]string{"proxy", "--config", ""}, command.ExitUsage, "unset variable"},
		"proxy flag": {[]string{"proxy", "--engine", decode, "--max-body", "5", "--config", router},
			command.ExitUsage, `max_body: "5": not a number with its unit`},
		"proxy file": {[]string{"proxy", "--engine", decode, "--config", router}, command.ExitUsage,
			router + `:1: engines[0].role: "x": not one of prefill, decode, both`},
		"proxy calibration": {[]string{"proxy", "--engine", decode, "--calibration", bad + "x"},
			command.ExitUsage, "no such file"},
		"empty config": {[]string{"config", "check", "--config", ""}, command.ExitUsage,
			`--config "": empty, maybe an unset variable`},
		"empty socket": {[]string{"serve", "--socket", ""}, command.ExitUsage,
			`--socket "": empty, maybe an unset variable`},
		"empty listen": {[]string{"serve", "--listen", ""}, command.ExitUsage,
			`--listen "": empty, maybe an unset variable`},
		"empty set": {[]string{"serve", "--set", ""}, command.ExitUsage,
			`--set "": not of the form key=value: write for instance`},
		"set no key": {[]string{"config", "check", "--set", "=x"}, command.ExitUsage,
			`--set "=x": not of the form`},
		"set no value": {[]string{"config", "check", "--set", "node"}, command.ExitUsage,
			`--set "node": not of the form`},
		"ready folder": {[]string{"serve", "--ready-file", filepath.Join(bad, "x")}, command.ExitUsage,
			"name a file in an existing directory"},
		"ready file": {[]string{"proxy", "--engine", decode, "--ready-file", filepath.Dir(bad)},
			command.ExitUsage, "is a directory"},
		"no python": {[]string{"doctor", "--python", ""}, command.ExitUsage, `--python ""`},
		"odd python": {[]string{"doctor", "--python", "/does/not/exist"}, command.ExitFailure,
			"/does/not/exist is no interpreter"},
		"peers off": {[]string{"doctor", "--peers", "--http", "off"}, command.ExitUsage,
			"name it with --http"},
		"watch nowhere": {[]string{"status", "--watch", "--http", "127.0.0.1:1"}, command.ExitFailure,
			"no sidecar answers at http://127.0.0.1:1"},
		"watch json": {[]string{"status", "--watch", "--json"}, command.ExitUsage, "text only"},
		"fast": {[]string{"status", "--watch", "--interval", "1ms"}, command.ExitUsage,
			"must be 100ms to 1m0s"},
		"no watch": {[]string{"status", "--interval", "3s"}, command.ExitUsage, "add --watch"},
		"calibrate out": {[]string{"calibrate", "--out", filepath.Join(bad, "x")}, command.ExitUsage,
			"name a file in an existing directory"},
		"key nowhere": {[]string{"keygen", "cluster", "--out", filepath.Join(bad, "x")},
			command.ExitFailure, "name a file in an existing directory"},
		"no authority": {[]string{"keygen", "node", "--name", "n", "--host", "h", "--ca",
			"/does/not/exist"}, command.ExitFailure, "keygen ca', or name it with --ca"},
		"proxy listen": {[]string{"proxy", "--engine", decode, "--listen", "256.0.0.1:1"},
			command.ExitFailure, "--listen"},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, errs := run(c.args...)
			if code != c.code || !strings.Contains(out+errs, c.text) {
				t.Errorf("%v: code %d, want %d with %q:\n%s%s", c.args, code, c.code, c.text, out, errs)
			}
		})
	}
}

// The order is: file, environment, --set.
func TestEnvironment(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.yaml")
	if err := os.WriteFile(file, []byte("node: of-file\nlog: {level: debug}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KVSPRAY_SET_NODE", "of-environment")
	t.Setenv("KVSPRAY_SET_LOG_FORMAT", "json")
	args := []string{"config", "print", "--config", file}
	for want, more := range map[string][]string{"node: of-environment": nil,
		"node: of-flag": {"--set", "node=of-flag"}, "level: debug": nil, "format: json": nil} {
		if code, out, errs := run(append(args, more...)...); code != 0 || !strings.Contains(out, want) {
			t.Errorf("%d, no %q in:\n%s%s", code, want, out, errs)
		}
	}
	t.Setenv("KVSPRAY_SET_LOG_LEVLE", "info")
	if code, _, errs := run(args...); code != command.ExitUsage || !strings.Contains(errs,
		"did you mean KVSPRAY_SET_LOG_LEVEL?") {
		t.Errorf("%d: %s", code, errs)
	}
}

func TestPrintedConfigLoads(t *testing.T) {
	_, out, _ := run("config", "print")
	if _, err := config.Parse("printed", []byte(out)); err != nil {
		t.Error(err)
	}
}

// Every command and flag has a help text.
func TestEverythingHasHelp(t *testing.T) {
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Hidden {
			return
		}
		if c.Short == "" {
			t.Errorf("%s has no help", c.CommandPath())
		}
		if !c.HasSubCommands() && c.RunE == nil && c.Run == nil {
			t.Errorf("%s does nothing", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot())
}

func TestReadyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ready")
	if err := writeReady(path, map[string]string{"http": "127.0.0.1:1"}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	var got map[string]string
	if err != nil || json.Unmarshal(b, &got) != nil || got["http"] != "127.0.0.1:1" {
		t.Errorf("%s, %v", b, err)
	}
	if err := writeReady(filepath.Join(t.TempDir(), "none", "ready"), nil); err == nil ||
		!strings.Contains(err.Error(), "--ready-file") {
		t.Error(err)
	}
	dir := t.TempDir()
	for d, mode := range map[string]os.FileMode{filepath.Dir(dir): 0o755, dir: 0o555} {
		if err := os.Chmod(d, mode); err != nil {
			t.Fatal(err)
		}
	}
	testutil.AsNobody(t, func() {
		if err := readyFile(filepath.Join(dir, "ready")); err == nil || !strings.Contains(err.Error(),
			"name a file in a directory that this user may write to") {
			t.Error(err)
		}
	})
	if err := readyFile(path); err != nil {
		t.Error(err)
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".ready-*")); err != nil ||
		len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// The arguments that the Helm chart gives to the binary are right: every flag exists.
func TestChartArguments(t *testing.T) {
	f, err := os.Open("../../../deploy/charttest/testdata/gpu.golden.yaml")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	dec := yaml.NewDecoder(f)
	seen := map[string]int{}
	for {
		type container struct {
			Name string
			Args []string
		}
		var doc struct {
			Spec struct {
				Template struct {
					Spec struct {
						ShareProcessNamespace bool        `yaml:"shareProcessNamespace"`
						InitContainers        []container `yaml:"initContainers"`
						Containers            []container
					}
				}
			}
		}
		if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		pod := doc.Spec.Template.Spec
		for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
			seen[c.Name]++
			if c.Name == "engine" {
				checkEngineArgs(t, c.Args)
				if !pod.ShareProcessNamespace {
					t.Error("a pod whose engine cannot see its sidecar's process")
				}
				continue
			}
			cmd, rest, err := newRoot().Find(c.Args)
			if err != nil {
				t.Fatalf("%v: %v", c.Args, err)
			}
			var flags routerFlags
			if c.Name == "router" {
				cmd = &cobra.Command{}
				flags.add(cmd)
				for i := range rest { // as the kubelet does
					rest[i] = strings.ReplaceAll(rest[i], "$(POD_IP)", "10.0.0.7")
				}
			}
			if err := cmd.ParseFlags(rest); err != nil {
				t.Errorf("%v: %v", c.Args, err)
			}
			if c.Name == "router" {
				if _, err := config.LoadRouter("", flags.sets, flags.engines); err != nil {
					t.Errorf("%v: %v", c.Args, err)
				}
			}
		}
	}
	if seen["kvspray"] != 2 || seen["router"] != 1 || seen["engine"] != 2 {
		t.Errorf("%v", seen)
	}
}

func checkEngineArgs(t *testing.T, args []string) {
	t.Helper()
	for _, a := range args {
		text, ok := strings.CutPrefix(a, "--kv-transfer-config=")
		if !ok {
			continue
		}
		var c map[string]any
		if err := json.Unmarshal([]byte(text), &c); err != nil || c["kv_connector"] !=
			"KVSprayConnector" {
			t.Errorf("%s: %v", text, err)
		}
		return
	}
	t.Errorf("%v has no --kv-transfer-config", args)
}

// What keygen makes, serve's check takes.
func TestKeygen(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	must := func(args ...string) {
		t.Helper()
		if code, out, errs := run(args...); code != command.ExitOK {
			t.Fatalf("%v: %d %s%s", args, code, out, errs)
		}
	}
	if code, _, _ := run("keygen", "ca", "--cert", filepath.Join(at("none"), "ca.crt"), "--key",
		at("ca.key")); code != command.ExitFailure {
		t.Errorf("a certificate in a missing directory: %d", code)
	}
	must("keygen", "cluster", "--out", at("k")) // and what has failed is not in the way
	must("config", "check", "--set", "peer.cluster_key_file="+at("k"), "--listen", "10.0.0.1:7650")
	must("keygen", "ca", "--cert", at("ca.crt"), "--key", at("ca.key"))
	must("keygen", "node", "--ca", at("ca.crt"), "--ca-key", at("ca.key"), "--name", "n0", "--host",
		"10.0.0.1,n0", "--cert", at("n.crt"), "--key", at("n.key"))
	must("config", "check", "--listen", "10.0.0.1:7650", "--set", "peer.tls.cert="+at("n.crt"),
		"--set", "peer.tls.key="+at("n.key"),
		"--set", "peer.tls.ca="+at("ca.crt"))
	for name, c := range map[string]struct {
		args []string
		code int
	}{
		"overwrite": {[]string{"keygen", "cluster", "--out", at("k")}, command.ExitFailure},
		"no host":   {[]string{"keygen", "node", "--name", "x"}, command.ExitUsage},
		"path name": {[]string{"keygen", "node", "--name", "../x", "--host", "h"}, command.ExitUsage},
		"life":      {[]string{"keygen", "ca", "--valid", "-1h"}, command.ExitUsage},
	} {
		if code, out, errs := run(c.args...); code != c.code {
			t.Errorf("%s: %d, want %d: %s%s", name, code, c.code, out, errs)
		}
	}
}

// An address that cannot be listened on is an error that names those that can.
func TestServeElsewhere(t *testing.T) {
	dir, err := os.MkdirTemp("", "kvs") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	key := filepath.Join(dir, "key")
	if code, out, errs := run("keygen", "cluster", "--out", key); code != command.ExitOK {
		t.Fatal(out, errs)
	}
	taken, err := net.Listen("tcp", net.JoinHostPort(testutil.Loopback(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	const foreign = "203.0.113.77:7650" // of a network for documentation
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"foreign": {[]string{"--listen", foreign}, []string{"--listen", foreign, "not an address of " +
			"this host", "127.0.0.1", "peer.advertise"}},
		"gossip": {[]string{"--listen", "127.0.0.1:0", "--set", "peer.gossip.listen=" + foreign},
			[]string{"peer.gossip.listen", foreign, "name an address of this host"}},
		"rail": {[]string{"--listen", "127.0.0.1:0", "--set", "transports.tcp.rails=lo@" + foreign},
			[]string{`rail "lo"`, foreign,
				"name an address of this host"}},
		"socket folder": {[]string{"--socket", "/proc/x.sock"}, []string{"--socket (engine.socket) " +
			"/proc/x.sock", "name a directory that this user may write to"}},
		"socket alone": {[]string{"--socket", "/proc/x.sock", "--set", "transports.order=tcp"},
			[]string{"/proc/x.sock", "--socket (engine.socket)",
				"choose a path in a directory that this user may write to"}},
		"shm folder": {[]string{"--set", "transports.shm.dir=/proc"}, []string{"transports.shm.dir",
			"/proc", "name a directory that this user may write to"}},
		"taken": {[]string{"--listen", taken.Addr().String()}, []string{taken.Addr().String(),
			"another sidecar?", "--listen"}},
	} {
		args := append([]string{"serve", "--socket", filepath.Join(dir, "s.sock"), "--http", "off",
			"--set", "peer.cluster_key_file=" + key}, c.args...)
		if name != "gossip" {
			args = append(args, "--set", "peer.gossip.listen=off")
		}
		code, _, errs := run(args...)
		if code != command.ExitFailure {
			t.Errorf("%s: %d, want %d: %s", name, code, command.ExitFailure, errs)
		}
		for _, want := range c.want {
			if !strings.Contains(errs, want) {
				t.Errorf("%s: %q is not in %s", name, want, errs)
			}
		}
	}
}

// serve with no configuration but free ports: ready, its metrics are there, and the end of its
// context drains it.
func TestServe(t *testing.T) {
	dir, err := os.MkdirTemp("", "kvs") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	ready := filepath.Join(dir, "ready")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	root := newRoot()
	var logs bytes.Buffer
	root.SetOut(&logs)
	root.SetErr(&logs)
	root.SetArgs([]string{"serve", "--socket", filepath.Join(dir, "s.sock"), "--listen", "127.0.0.1:0",
		"--http", "127.0.0.1:0",
		"--set", "peer.gossip.listen=off", "--ready-file", ready})
	done := make(chan error, 1)
	go func() { done <- root.ExecuteContext(ctx) }()
	var addrs map[string]string
	for deadline := time.After(time.Minute); addrs == nil; {
		select {
		case err := <-done:
			t.Fatalf("%v\n%s", err, logs.String())
		case <-deadline:
			t.Fatal("not ready")
		case <-time.After(10 * time.Millisecond):
		}
		if b, err := os.ReadFile(ready); err == nil {
			if err := json.Unmarshal(b, &addrs); err != nil {
				t.Fatal(err)
			}
		}
	}
	for path, want := range map[string]string{"/healthz": "ok", "/readyz": "ready",
		"/metrics": "kvspray_sidecar_draining 0", "/v1/node": addrs["peer"]} {
		resp, err := http.Get("http://" + addrs["http"] + path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		if cerr := resp.Body.Close(); err != nil || cerr != nil || resp.StatusCode != http.StatusOK ||
			!strings.Contains(string(b), want) {
			t.Errorf("%s: %s, %v: %.300s", path, resp.Status, err, b)
		}
	}
	http.DefaultClient.CloseIdleConnections()

	// What a drain does is in view, and how long it lasts.
	at := []string{"--http", addrs["http"]}
	for _, c := range []struct {
		drain []string
		want  []string // in text and JSON
	}{{[]string{"--notice", "0s", "--timeout", "0s"}, []string{"  leaving, ", " s left",
		`"state": "leaving"`, `"leaving_seconds": `}},
		{[]string{"--undo"}, []string{"  ready  ", `"state": "ready"`, `"leaving_seconds": 0`}}} {
		if code, _, errs := run(slices.Concat([]string{"drain", "--socket", filepath.Join(dir,
			"s.sock")}, c.drain)...); code != 0 {
			t.Errorf("drain %v: %d, %s", c.drain, code, errs)
		}
		_, text, errs := run(append([]string{"status"}, at...)...)
		_, asJSON, errs2 := run(append([]string{"status", "--output", "json"}, at...)...)
		for _, want := range c.want {
			if !strings.Contains(text+asJSON, want) {
				t.Errorf("status after drain %v has no %q: %s%s%s%s", c.drain, want, text, asJSON, errs, errs2)
			}
		}
	}

	// A second sidecar on an address or socket in use names it and a remedy, and neither sidecar
	// logs a warning.
	own := func(taken, value string) []string {
		args := []string{"serve", "--set", "peer.gossip.listen=off"}
		for flag, v := range map[string]string{"--socket": filepath.Join(dir, "b.sock"),
			"--listen": "127.0.0.1:0", "--http": "127.0.0.1:0", taken: value} {
			args = append(args, flag, v)
		}
		return args
	}
	for flag, value := range map[string]string{"--listen": addrs["peer"], "--http": addrs["http"],
		"--socket": filepath.Join(dir, "s.sock")} {
		never := filepath.Join(t.TempDir(), "ready")
		code, _, errs := run(append(own(flag, value), "--ready-file", never)...)
		if _, err := os.Stat(never); err == nil {
			t.Errorf("a second one with %s %s wrote its ready file", flag, value)
		}
		if code != command.ExitFailure || !strings.Contains(errs, value) || !strings.Contains(errs,
			"another") || !strings.Contains(errs, flag) || strings.Contains(errs, "WARN") {
			t.Errorf("a second one with %s %s: exit code %d: %s", flag, value, code, errs)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("%v\n%s", err, logs.String())
	}
	if strings.Contains(logs.String(), "WARN") {
		t.Errorf("the first one was bothered:\n%s", logs.String())
	}
	if !strings.Contains(logs.String(), "drained") {
		t.Errorf("it did not drain:\n%s", logs.String())
	}
}
