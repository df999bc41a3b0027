package cli

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/ui/command"
)

// planted are secrets of a sidecar, and what it needs to start with them.
type planted struct {
	config  string
	dir     string
	secrets map[string]string
}

// plant makes keys and passwords, and services that refuse them.
func plant(t *testing.T) *planted {
	t.Helper()
	p := &planted{dir: testutil.ShortDir(t), secrets: map[string]string{
		"password of redis": "redis-hunter2-redis",
		"secret access key": "s3-hunter2-s3-secret-access-key",
		"session token":     "s3-hunter2-session-token", "header of spans": "otlp-hunter2-token"}}
	at := func(name string) string { return filepath.Join(p.dir, name) }
	for _, args := range [][]string{{"cluster", "--out", at("cluster.key")},
		{"ca", "--cert", at("ca.crt"), "--key", at("ca.key")},
		{"node", "--ca", at("ca.crt"), "--ca-key", at("ca.key"), "--name", "node", "--cert",
			at("node.crt"), "--key", at("node.key"), "--host", "127.0.0.1"}} {
		if code, _, errs := run(append([]string{"keygen"}, args...)...); code != command.ExitOK {
			t.Fatalf("keygen %v: %s", args, errs)
		}
	}
	for _, name := range []string{"cluster.key", "node.key", "ca.key"} {
		b, err := os.ReadFile(at(name))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			if line = strings.TrimSpace(line); !strings.HasPrefix(line, "-----") {
				p.secrets[name] = line
			}
		}
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "key-of-a-test")
	t.Setenv("AWS_SECRET_ACCESS_KEY", p.secrets["secret access key"])
	t.Setenv("AWS_SESSION_TOKEN", p.secrets["session token"])
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization="+p.secrets["header of spans"])
	err := os.WriteFile(at("redis"), []byte(p.secrets["password of redis"]+"\n"), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	refuses := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "refused", http.StatusForbidden)
	}))
	t.Cleanup(refuses.Close)
	b, err := json.Marshal(map[string]any{ // JSON is YAML
		"node":   "planted",
		"engine": map[string]any{"socket": at("s.sock")},
		"peer": map[string]any{"listen": "127.0.0.1:0", "cluster_key_file": at("cluster.key"),
			"tls":    map[string]any{"cert": at("node.crt"), "key": at("node.key"), "ca": at("ca.crt")},
			"gossip": map[string]any{"listen": "127.0.0.1:0", "join": []string{"127.0.0.1:1"}}},
		"http": map[string]any{"listen": "127.0.0.1:0"},
		"log":  map[string]any{"level": "debug"},
		"store": map[string]any{"memory": "64MiB", "directory": "redis",
			"redis": map[string]any{"addresses": []string{"127.0.0.1:1"}, "password_file": at("redis")},
			"object": map[string]any{"endpoint": refuses.URL, "bucket": "b", "prefix": "p",
				"size": "1GiB"}},
		"trace": map[string]any{"otlp": refuses.URL},
	})
	if err != nil {
		t.Fatal(err)
	}
	p.config = at("config.yaml")
	if err := os.WriteFile(p.config, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

// check fails for each secret that a text has, in any usual form.
func (p *planted) check(t *testing.T, what, text string) {
	t.Helper()
	for name, s := range p.secrets {
		for form, bad := range map[string]string{"": s, " in hexadecimal": hex.EncodeToString([]byte(s)),
			" in base64": base64.StdEncoding.EncodeToString([]byte(s)),
			" as bytes":  strings.Trim(fmt.Sprint([]byte(s)), "[]")} {
			if i := strings.Index(text, bad); i >= 0 {
				t.Errorf("%s has the %s%s: ...%.300s", what, name, form, text[max(0, i-150):])
			}
		}
	}
}

// No log, metric, page, command or report has a secret of the sidecar.
func TestNoSecretLeavesTheProcess(t *testing.T) {
	p := plant(t)
	ready, socket := filepath.Join(p.dir, "ready"), filepath.Join(p.dir, "s.sock")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	root := newRoot()
	var logs testutil.Buffer
	root.SetOut(&logs)
	root.SetErr(&logs)
	root.SetArgs([]string{"serve", "--config", p.config, "--ready-file", ready})
	done := make(chan error, 1)
	go func() { done <- root.ExecuteContext(ctx) }()
	var addrs map[string]string
	testutil.Eventually(t, time.Minute, "the sidecar is ready", func() bool {
		select {
		case err := <-done:
			t.Fatalf("%v\n%s", err, logs.String())
		default:
		}
		b, err := os.ReadFile(ready)
		return err == nil && json.Unmarshal(b, &addrs) == nil
	})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for _, path := range []string{"/", "/page/page.js", "/healthz", "/readyz", "/metrics", "/v1/node",
		"/v1/reach", "/v1/links", "/v1/layouts", "/v1/store", "/debug/state", "/debug/vars",
		"/debug/pprof/", "/debug/pprof/cmdline", "/v1/live", "/nowhere"} {
		res, err := client.Get("http://" + addrs["http"] + path)
		if err != nil {
			t.Fatal(err)
		}
		var text string
		if path == "/v1/live" {
			text, err = bufio.NewReader(res.Body).ReadString('\n') // an event; more follow
		} else {
			var b []byte
			b, err = io.ReadAll(res.Body)
			text = string(b)
		}
		if cerr := res.Body.Close(); err != nil || cerr != nil {
			t.Fatal(err, cerr)
		}
		p.check(t, path, text+fmt.Sprint(res.Header))
	}
	report := filepath.Join(p.dir, "report.tar.gz")
	log := filepath.Join(p.dir, "log")
	lines := "" // of another program's log
	for name, s := range p.secrets {
		lines += fmt.Sprintf("%s password=%s token: \"%s\" http://u:%s@h/ http://%s@h/\n", name[:1],
			s, s, s, s)
	}
	if err := os.WriteFile(log, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	at := []string{"--http", addrs["http"]}
	for _, args := range [][]string{
		append([]string{"status"}, at...), append([]string{"status", "--output", "json"}, at...),
		append([]string{"store", "stat"}, at...), append([]string{"store", "ls"}, at...),
		{"store", "drain", "--timeout", "1ms", "--socket", socket},
		{"store", "remove", strings.Repeat("ab", 32), "--socket", socket},
		{"drain", "--notice", "0s", "--timeout", "0s", "--socket", socket + "x"},
		{"config", "print", "--config", p.config}, {"config", "check", "--config", p.config},
		append([]string{"doctor", "--config", p.config}, at...),
		append([]string{"doctor", "--peers", "--config", p.config}, at...),
		append([]string{"ping", addrs["peer"], "--config", p.config}, at...),
		append([]string{"bugreport", "--config", p.config, "--out", report, "--log", log}, at...),
		{"drain", "--engine", "http://u:" + p.secrets["header of spans"] + "@127.0.0.1:1",
			"--notice", "0s", "--timeout", "0s", "--socket", socket},
		{"drain", "--engine", "u:" + p.secrets["header of spans"] + "@127.0.0.1:1", "--socket", socket},
		{"status", "--http", "http://u:" + p.secrets["header of spans"] + "@127.0.0.1:1"},
		{"layout", "check", "http://u:" + p.secrets["header of spans"] + "@127.0.0.1:1",
			"http://" + p.secrets["header of spans"] + "@127.0.0.1:1"},
		{"load", "--engine", "https://" + p.secrets["header of spans"] + "@127.0.0.1:1/x", "/m"},
		{"serve", "--set", "store.redis.password=" + p.secrets["password of redis"]},
		{"serve", "--set", "trace.otlp=https://" + p.secrets["header of spans"] + "@h"},
	} {
		_, out, errs := run(args...)
		if out+errs == "" {
			t.Errorf("%v prints nothing", args)
		}
		p.check(t, args[0], out+errs)
	}
	for name, text := range unpacked(t, report) {
		p.check(t, "the report's "+name, text)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	p.check(t, "the log", logs.String())
}

// unpacked is the content of an archive.
func unpacked(t *testing.T, path string) map[string]string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	zip, err := gzip.NewReader(bufio.NewReader(f))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if _, err := io.Copy(&b, r); err != nil {
			t.Fatal(err)
		}
		files[h.Name] = b.String()
	}
}
