package keys

import (
	"crypto/tls"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// issue writes a certificate of an authority over existing files.
func issue(t *testing.T, dir, name string, now time.Time, valid time.Duration) {
	t.Helper()
	cert, key := filepath.Join(dir, "node.crt"), filepath.Join(dir, "node.key")
	for _, p := range []string{cert, key} {
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	if err := WriteNode(NodeFiles{CACert: filepath.Join(dir, "ca.crt"),
		CAKey: filepath.Join(dir, "ca.key"),
		Cert:  cert, Key: key}, name,
		[]string{"127.0.0.1"}, now, valid); err != nil {
		t.Fatal(err)
	}
}

// handshake does a handshake between two ends.
func handshake(a, b *Credentials) (*tls.ConnectionState, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer ln.Close()
	x, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		return nil, err
	}
	defer x.Close()
	y, err := ln.Accept()
	if err != nil {
		return nil, err
	}
	defer y.Close()
	srv := tls.Server(y, b.Server())
	done := make(chan error, 1)
	go func() { done <- srv.Handshake() }()
	c := tls.Client(x, a.Client("127.0.0.1"))
	err = c.Handshake()
	if err != nil {
		_ = x.Close()
	}
	if serr := <-done; err == nil {
		err = serr
	}
	s := c.ConnectionState()
	return &s, err
}

// A certificate that is renewed in place is used without a restart, with its own key, and
// identifies the same process. An unusable one is not used.
func TestRenewed(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	if err := WriteAuthority(filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key"), now,
		48*time.Hour); err != nil {
		t.Fatal(err)
	}
	issue(t, dir, "n", now, time.Hour)
	files := func() *Credentials {
		c, err := FromFiles(filepath.Join(dir, "node.crt"), filepath.Join(dir, "node.key"),
			filepath.Join(dir, "ca.crt"), now)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c, other := files(), files()
	first, err := handshake(other, c)
	if err != nil {
		t.Fatal(err)
	}
	if left := c.Expires().Sub(now); left < 59*time.Minute || left > time.Hour {
		t.Errorf("it ends in %v", left)
	}
	if again, err := c.Reload(now); again || err != nil {
		t.Errorf("files that have not changed: %t, %v", again, err)
	}
	issue(t, dir, "n", now, 24*time.Hour)
	if again, err := c.Reload(now); !again || err != nil {
		t.Fatalf("a renewed certificate: %t, %v", again, err)
	}
	if left := c.Expires().Sub(now); left < 23*time.Hour {
		t.Errorf("the new one ends in %v", left)
	}
	second, err := handshake(other, c)
	if err != nil {
		t.Fatal(err)
	}
	x, y := first.PeerCertificates[0], second.PeerCertificates[0]
	if x.Equal(y) || Identity(x) != Identity(y) {
		t.Error("the new certificate is the old one, or that of another process")
	}

	// First only half of it is written; then it has expired.
	key, err := os.ReadFile(filepath.Join(dir, "node.key"))
	if err != nil {
		t.Fatal(err)
	}
	issue(t, dir, "n", now, time.Hour)
	fresh, err := os.ReadFile(filepath.Join(dir, "node.key"))
	if err != nil {
		t.Fatal(err)
	}
	write := func(b []byte) {
		if err := os.WriteFile(filepath.Join(dir, "node.key"), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(key)
	if again, err := c.Reload(now); again || err == nil {
		t.Errorf("a certificate with the key of another one: %t, %v", again, err)
	}
	write(fresh)
	if again, err := c.Reload(now.Add(2 * time.Hour)); again || err == nil ||
		!strings.Contains(err.Error(), "valid from") {
		t.Errorf("an expired certificate: %t, %v", again, err)
	}
	if _, err := handshake(other, c); err != nil {
		t.Errorf("the previous certificate is no longer in use: %v", err)
	}
	// A certificate with another name identifies another process. A running process keeps its own,
	// and the error has both names.
	issue(t, dir, "m", now, time.Hour)
	if again, err := c.Reload(now); again || err == nil || !strings.Contains(err.Error(),
		"it names m, 127.0.0.1, the one in use n, 127.0.0.1") ||
		!strings.Contains(err.Error(), "restart it") {
		t.Errorf("a certificate with another name: %t, %v", again, err)
	}
	if s, err := handshake(other, c); err != nil || Identity(s.PeerCertificates[0]) != Identity(x) {
		t.Errorf("the process has another name than before: %v", err)
	}
	third, err := handshake(files(), files())
	if err != nil {
		t.Fatal(err)
	}
	if Identity(third.PeerCertificates[0]) == Identity(x) {
		t.Error("two names have the same identity")
	}
}

// Both ends report that a certificate has expired.
func TestExpired(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	past := now.Add(-3 * time.Hour)
	if err := WriteAuthority(filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key"), past,
		48*time.Hour); err != nil {
		t.Fatal(err)
	}
	load := func(valid time.Duration) *Credentials {
		issue(t, dir, "n", past, valid)
		c, err := FromFiles(filepath.Join(dir, "node.crt"), filepath.Join(dir, "node.key"),
			filepath.Join(dir, "ca.crt"), past)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	old, good := load(time.Hour), load(24*time.Hour)
	if _, err := handshake(good, old); err == nil || !strings.Contains(err.Error(),
		"certificate has expired or is not yet valid") {
		t.Errorf("the dialed end's has expired: %v", err)
	}
	if _, err := handshake(old, good); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Errorf("the dialling end's has expired: %v", err)
	}
}
