package redis

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/kvspray/kvspray/internal/redact"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/directory"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

const patience = 20 * time.Second

// server starts the real one where it is installed.
func server(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"valkey-server", "redis-server"} {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		ln, err := net.Listen("tcp", net.JoinHostPort(testutil.Loopback(), "0"))
		if err != nil {
			t.Fatal(err)
		}
		host, port, _ := net.SplitHostPort(ln.Addr().String())
		_ = ln.Close()
		cmd := exec.Command(path, "--bind", host, "--port", port, "--save", "", "--dir", t.TempDir())
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		end := time.Now().Add(patience)
		for tick := time.NewTicker(10 * time.Millisecond); ; <-tick.C {
			c, err := net.Dial("tcp", net.JoinHostPort(host, port))
			if err == nil {
				_ = c.Close()
				return net.JoinHostPort(host, port)
			}
			if time.Now().After(end) {
				t.Fatal(err)
			}
		}
	}
	testutil.Skip(t, "redis", "no redis-server or valkey-server in PATH")
	return ""
}

func open(t testing.TB, at string, self byte) *Directory {
	t.Helper()
	d := New(Options{Self: transfer.Boot{self}, Addresses: []string{at}, Prefix: "t:"})
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func randomKeys(n int) []page.Key {
	keys := make([]page.Key, n)
	for i := range keys {
		_, _ = rand.Read(keys[i][:])
	}
	return keys
}

func (d *Directory) of(t testing.TB, keys []page.Key) *directory.Found {
	t.Helper()
	f := directory.NewFound(len(keys))
	if err := d.Lookup(t.Context(), keys, f); err != nil {
		t.Fatal(err)
	}
	return f
}

func check(t *testing.T, at string) {
	t.Helper()
	a, b := open(t, at, 1), open(t, at, 2)
	keys := randomKeys(page.MaxBatch)
	if err := a.Announce(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	if err := b.Announce(t.Context(), keys[:10]); err != nil {
		t.Fatal(err)
	}
	if err := a.Withdraw(t.Context(), keys[5:7]); err != nil {
		t.Fatal(err)
	}
	f := b.of(t, keys)
	for i := range keys {
		got := slices.Collect(f.Of(i))
		wantA, wantB := i != 5 && i != 6, i < 10
		if slices.Contains(got, a.self) != wantA || slices.Contains(got, b.self) != wantB ||
			len(got) > 2 {
			t.Fatalf("page %d: %v", i, got)
		}
	}
	for i, f := 0, b.of(t, randomKeys(100)); i < 100; i++ {
		for h := range f.Of(i) {
			t.Fatalf("%v has a page that no node announced", h)
		}
	}
	// Time ends hints, also those of keys that others keep alive.
	a.now = func() time.Time { return time.Now().Add(ttl + time.Minute) }
	if f := a.of(t, keys[:10]); len(f.Holders) != 0 {
		t.Errorf("%v after its time", f.Holders)
	}
}

func TestRealServer(t *testing.T) { check(t, server(t)) }

func TestEmbeddedServer(t *testing.T) { check(t, miniredis.RunT(t).Addr()) }

// TestForeignMembers: what is no holder is skipped, and a key of another type is an error.
func TestForeignMembers(t *testing.T) {
	s := miniredis.RunT(t)
	d := open(t, s.Addr(), 1)
	keys := randomKeys(2)
	for _, m := range []string{"", "short", string(make([]byte, len(d.self)+1))} {
		if _, err := s.ZAdd(d.key(&keys[0]), 1e12, m); err != nil {
			t.Fatal(err)
		}
	}
	if f := d.of(t, keys); len(f.Holders) != 0 {
		t.Errorf("%v", f.Holders)
	}
	if err := s.Set(d.key(&keys[1]), "text"); err != nil {
		t.Fatal(err)
	}
	if err := d.Lookup(t.Context(), keys, directory.NewFound(2)); err == nil {
		t.Error("a text is a set of holders")
	}
}

// TestOtherFormats: keys have the number of their format, and those of another one are not read.
func TestOtherFormats(t *testing.T) {
	s := miniredis.RunT(t)
	d := open(t, s.Addr(), 1)
	keys := randomKeys(1)
	name, ok := strings.CutPrefix(d.key(&keys[0]), d.prefix+"1:")
	if !ok {
		t.Fatalf("key %q", d.key(&keys[0]))
	}
	for _, other := range []string{"", "2:"} {
		if _, err := s.ZAdd(d.prefix+other+name, 1e12, string(d.self[:])); err != nil {
			t.Fatal(err)
		}
	}
	if f := d.of(t, keys); len(f.Holders) != 0 {
		t.Errorf("%v", f.Holders)
	}
	if err := d.Announce(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	if f := d.of(t, keys); len(f.Holders) != 1 {
		t.Errorf("%v", f.Holders)
	}
}

// TestServiceRefuses: the error has what an operator can do about it.
func TestServiceRefuses(t *testing.T) {
	s := miniredis.RunT(t)
	d := open(t, s.Addr(), 1)
	keys := randomKeys(2)
	for text, want := range map[string]string{
		"NOAUTH Authentication required.":                              "store.redis.password_file",
		"READONLY You can't write against a read only replica.":        "name the primary",
		"OOM command not allowed when used memory > 'maxmemory'.":      "maxmemory-policy",
		"LOADING Redis is loading the dataset in memory":               "wait until",
		"NOPERM User u has no permissions to run the 'zadd' command":   "ZREVRANGEBYSCORE",
		"CLUSTERDOWN The cluster is down":                              "repair",
		"WRONGPASS invalid username-password pair or user is disabled": "store.redis.username",
	} {
		s.SetError(text)
		for _, err := range []error{d.Announce(t.Context(), keys),
			d.Lookup(t.Context(), keys, directory.NewFound(len(keys)))} {
			if !errors.Is(err, directory.ErrDown) || !strings.Contains(err.Error(), text) ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("%v: want %q and %q", err, text, want)
			}
		}
	}
	s.Close()
	err := d.Announce(t.Context(), keys)
	if !errors.Is(err, directory.ErrDown) ||
		!strings.Contains(err.Error(), "correct store.redis.addresses") {
		t.Errorf("%v", err)
	}
}

// TestServiceAway: a call ends in time, and works again once the service is back.
func TestServiceAway(t *testing.T) {
	s := miniredis.RunT(t)
	d := open(t, s.Addr(), 1)
	keys := randomKeys(3)
	if err := d.Announce(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	s.Close()
	ctx, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer stop()
	began := time.Now()
	if err := d.Lookup(ctx, keys, directory.NewFound(3)); err == nil {
		t.Error("a service that is away answers")
	}
	if took := time.Since(began); took > patience/2 {
		t.Errorf("it took %v", took)
	}
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	end := time.Now().Add(patience)
	for f := directory.NewFound(3); d.Lookup(t.Context(), keys, f) != nil; f = directory.NewFound(3) {
		if time.Now().After(end) {
			t.Fatal("it does not come back")
		}
	}
	if err := d.Announce(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	if f := d.of(t, keys); len(f.Holders) != 1 {
		t.Errorf("%v", f.Holders)
	}
}

// A service repeats the arguments of a command that it does not support. No error has the password.
func TestErrorsHideThePassword(t *testing.T) {
	const password = "hunter2"
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() { _ = ln.Close() }()
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer func() { _ = c.Close() }()
				b := make([]byte, 4096)
				for {
					n, err := c.Read(b)
					if err != nil {
						return
					}
					// one answer for each command of the pipeline
					for range strings.Count(string(b[:n]), "*") {
						args := strings.Join(strings.Fields(string(b[:n])), " ")
						if _, err := fmt.Fprintf(c, "-ERR unknown command, with args: %s\r\n", args); err != nil {
							return
						}
					}
				}
			})
		}
	})
	d := New(Options{Addresses: []string{ln.Addr().String()}, Password: redact.NewSecret(password)})
	defer func() { _ = d.Close() }()
	err = d.Announce(t.Context(), make([]page.Key, 1))
	if err == nil || strings.Contains(err.Error(), password) ||
		!strings.Contains(err.Error(), "unknown") {
		t.Errorf("%v", err)
	}
}
