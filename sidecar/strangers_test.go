package sidecar

import (
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
)

// fewDescriptors runs a node with a usual limit, which the connections below exceed many times.
const fewDescriptors = "ulimit -n 1024 && " + childConfig + "=\"$1\" exec \"$0\""

// Strangers who hold thousands of connections cost members nothing, even where the process has few
// descriptors: the port answers others, an engine registers, and a new peer gets its blocks.
func TestStrangersTakeNoDescriptors(t *testing.T) {
	const many, perSecond = 10_000, 200
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := newProcess(t, "tcp", "sh", "-c", fewDescriptors, exe)
	for _, at := range []string{p.http, p.endpoint} {
		testutil.Strangers(t, at, many, perSecond, testutil.ManyStrangers, nil)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	for _, path := range []string{"/readyz", "/metrics", "/debug/state"} {
		res, err := client.Get("http://" + p.http + path)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", path, res.Status)
		}
	}
	d := start(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
	pe, de := newEngine(t, p.asRunning(), testShape), newEngine(t, d, testShape)
	pe.random()
	x := begin(t, p.asRunning(), pe, de, 1, tokens)
	de.ok(x.dst)
	same(t, pe, de, x.pt, x.dt, tokens, 0)
	pe.ok(x.src)
}

// The admin socket replaces that of a dead sidecar, no other file, and others reach it only if the
// configuration names their users.
func TestAdminSocketFile(t *testing.T) {
	stale := func(c *config.Config) {
		ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: config.AdminSocket(c.Engine.Socket)})
		if err != nil {
			t.Fatal(err)
		}
		ln.SetUnlinkOnClose(false)
		if err := ln.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for mode, change := range map[os.FileMode]func(*config.Config){
		0o600: stale,
		0o666: func(c *config.Config) { c.Engine.AdminUIDs = []int{65534} },
	} {
		r := start(t, change)
		path := config.AdminSocket(r.cfg.Engine.Socket)
		st, err := os.Stat(path)
		if err != nil || st.Mode() != mode|os.ModeSocket {
			t.Errorf("%v, want mode %v and not %v", err, mode|os.ModeSocket, st.Mode())
		}
		if code, body := ask(t, r, http.MethodPost, "/v1/leave"); code != http.StatusOK {
			t.Errorf("%d %s", code, body)
		}
		ok(t, r.stop())
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket is left: %v", err)
		}
	}
	// A cleaner that removes it leaves the commands without it for a moment only.
	r := start(t, nil)
	path := config.AdminSocket(r.cfg.Engine.Socket)
	ok(t, os.Remove(path))
	testutil.Eventually(t, 20*time.Second, "the socket is not made again", func() bool {
		_, err := os.Lstat(path)
		return err == nil
	})
	if code, body := ask(t, r, http.MethodPost, "/v1/leave"); code != http.StatusOK {
		t.Errorf("%d %s", code, body)
	}
	ok(t, r.stop())
	// Nor does the end of a sidecar remove the socket of another one.
	r = start(t, nil)
	path = config.AdminSocket(r.cfg.Engine.Socket)
	ok(t, os.Rename(path, path+".old"))
	other, err := net.Listen("unix", path)
	ok(t, err)
	defer func() { _ = other.Close() }()
	ok(t, r.stop())
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the socket of another sidecar: %v", err)
	}

	cfg := testConfig(t, nil)
	path = config.AdminSocket(cfg.Engine.Socket)
	ok(t, os.WriteFile(path, []byte("mine"), 0o600))
	n, err := New(Options{Config: cfg, Version: "test", Log: slog.New(slog.DiscardHandler)})
	ok(t, err)
	err = n.Run(t.Context())
	if b, rerr := os.ReadFile(path); err == nil || rerr != nil || string(b) != "mine" ||
		!strings.Contains(err.Error(), path) {
		t.Errorf("%v; the file: %q, %v", err, b, rerr)
	}
}
