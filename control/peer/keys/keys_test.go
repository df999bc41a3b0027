package keys

import (
	"bytes"
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
)

// shake runs a handshake of two ends over loopback.
func shake(t *testing.T, server, client *Credentials, host string) error {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	b, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	end := time.Now().Add(10 * time.Second)
	_, _ = a.SetDeadline(end), b.SetDeadline(end)
	done := make(chan error, 1)
	go func() {
		s := tls.Server(a, server.Server())
		err := s.Handshake()
		if err == nil {
			_, err = s.Write([]byte("x"))
		}
		_ = a.Close()
		done <- err
	}()
	c := tls.Client(b, client.Client(host))
	err = c.Handshake()
	if err == nil {
		_, err = c.Read(make([]byte, 1)) // under TLS 1.3 the client sees a refusal only here
	}
	_ = b.Close()
	if serr := <-done; err == nil {
		err = serr
	}
	return err
}

func cluster(t *testing.T, c Cluster) *Credentials {
	t.Helper()
	cr, err := FromCluster(c, "n")
	if err != nil {
		t.Fatal(err)
	}
	return cr
}

func TestCluster(t *testing.T) {
	c, err := NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	other, _ := NewCluster()
	path := filepath.Join(t.TempDir(), "key")
	if err := WriteCluster(path, c); err != nil {
		t.Fatal(err)
	}
	if err := WriteCluster(path, c); err == nil || !strings.Contains(err.Error(), "move it away") {
		t.Error("a key was overwritten:", err)
	}
	got, err := LoadCluster(path)
	if err != nil || len(got) != 1 || got[0] != c[0] {
		t.Fatal(got, err)
	}
	if err := shake(t, cluster(t, c), cluster(t, got), "anything"); err != nil {
		t.Error(err)
	}
	if err := shake(t, cluster(t, c), cluster(t, other), "anything"); err == nil {
		t.Error("another cluster's key was accepted")
	}
	// Each step of a rotation connects to the one before and after it.
	both, swapped := append(c[:1:1], other...), append(other[:1:1], c...)
	for _, x := range [][2]Cluster{{c, both}, {both, swapped}, {swapped, other}} {
		if err := shake(t, cluster(t, x[0]), cluster(t, x[1]), ""); err != nil {
			t.Error(err)
		}
		if err := shake(t, cluster(t, x[1]), cluster(t, x[0]), ""); err != nil {
			t.Error(err)
		}
	}
	g1, _ := c.Gossip()
	g2, _ := other.Gossip()
	if len(g1) != 1 || len(g1[0]) != 32 || bytes.Equal(g1[0], g2[0]) || bytes.Equal(g1[0], c[0][:]) {
		t.Error("gossip keys", g1, g2)
	}
}

func TestBadFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	for name, x := range map[string]struct {
		text string
		mode os.FileMode
		want string
	}{
		"short":    {"abcd\n", 0o600, "64 hexadecimal"},
		"not hex":  {strings.Repeat("zz", 32), 0o600, "not hexadecimal"},
		"zero":     {strings.Repeat("00", 32), 0o600, "all zeroes"},
		"too many": {strings.Repeat(strings.Repeat("ab", 32)+"\n", 5), 0o600, "at most 4"},
		"open":     {strings.Repeat("ab", 32), 0o644, "chmod 600"},
	} {
		_ = os.Remove(path)
		if err := os.WriteFile(path, []byte(x.text), x.mode); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadCluster(path); err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q", name, err, x.want)
		} else if strings.Contains(err.Error(), "abab") {
			t.Errorf("%s: the error has the secret", name)
		}
	}
	if _, err := LoadCluster(path + "x"); err == nil || !strings.Contains(err.Error(),
		"keygen cluster") {
		t.Error(err)
	}
	// A key file of another user: the remedy is its mode, not a new key.
	if err := os.Chmod(path, 0); err != nil {
		t.Fatal(err)
	}
	testutil.AsNobody(t, func() {
		if _, err := LoadCluster(path); err == nil || !strings.Contains(err.Error(),
			"let this user read it") || strings.Contains(err.Error(), "keygen") {
			t.Error(err)
		}
	})
}

func TestHost(t *testing.T) {
	long := strings.Repeat("a", 63)
	for _, h := range []string{"10.0.0.1", "::1", "fe80::1", "a", "prefill-0", "prefill-0.llm",
		"a_b.example", "1a.2b.3c", "10.example", "*.prefill.svc", long + "." + long,
		"xn--bcher-kva.example"} {
		if err := Host(h); err != nil {
			t.Error(err)
		}
	}
	for h, want := range map[string]string{
		"": "1 to 253", "a b": "letters, digits", " a": "letters, digits", "a,b": "letters, digits",
		"10.0.0.300": "looks like an IP", "10.0.0": "looks like an IP", "1": "looks like an IP",
		"010.0.0.1": "looks like an IP", "10.0.0.1:7650": "without a port", "[::1]": "letters, digits",
		"fe80::1%eth0": "letters, digits", "::g": "letters, digits",
		"a..b": "1 to 63", "a.": "1 to 63", ".a": "1 to 63", "-a.b": "hyphen", "a-.b": "hyphen", long +
			"a": "1 to 63", strings.Repeat("a.", 127) + "a": "1 to 253", "*": "letters, digits",
		"*.com": "letters, digits", "a.*.b": "letters, digits", "b\u00fccher.example": "letters, digits",
		"a\x00b": "letters, digits", "10.0.0.0/8": "letters, digits",
	} {
		if err := Host(h); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", h, err, want)
		}
	}
	d := t.TempDir()
	p := func(s string) string { return filepath.Join(d, s) }
	if err := WriteAuthority(p("ca"), p("ca-key"), time.Now(), time.Hour); err != nil {
		t.Fatal(err)
	}
	err := WriteNode(NodeFiles{CACert: p("ca"), CAKey: p("ca-key"),
		Cert: p("n"), Key: p("n-key")}, "n", []string{"10.0.0.1", "10.0.0.300"},
		time.Now(), time.Minute)
	if _, none := os.Stat(p("n-key")); err == nil || !strings.Contains(err.Error(), "10.0.0.300") ||
		none == nil {
		t.Errorf("%v, %v", err, none)
	}
}

func TestFiles(t *testing.T) {
	d := t.TempDir()
	p := func(s string) string { return filepath.Join(d, s) }
	now := time.Now()
	const year = 365 * 24 * time.Hour
	for _, ca := range []string{"ca", "other"} {
		if err := WriteAuthority(p(ca), p(ca+"-key"), now, year); err != nil {
			t.Fatal(err)
		}
	}
	for _, x := range []struct{ ca, name string }{{"ca", "a"}, {"ca", "b"}, {"other", "x"}} {
		if err := WriteNode(NodeFiles{CACert: p(x.ca), CAKey: p(x.ca + "-key"),
			Cert: p(x.name), Key: p(x.name + "-key")}, x.name,
			[]string{"127.0.0.1", x.name + ".example"}, now, year/2); err != nil {
			t.Fatal(err)
		}
	}
	load := func(name, ca string) *Credentials {
		t.Helper()
		c, err := FromFiles(p(name), p(name+"-key"), p(ca), now)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	a, b, x := load("a", "ca"), load("b", "ca"), load("x", "other")
	for host, ok := range map[string]bool{"127.0.0.1": true, "a.example": true, "b.example": false} {
		if err := shake(t, a, b, host); (err == nil) != ok {
			t.Errorf("dialed as %s: %v", host, err)
		}
	}
	if shake(t, a, x, "a.example") == nil || shake(t, x, a, "x.example") == nil {
		t.Error("another authority's node was accepted")
	}
	for want, f := range map[string]func() error{
		"keygen node": func() error {
			_, err := FromFiles(p("a"), p("a-key"), p("ca"), now.Add(year))
			return err
		},
		"made together": func() error {
			_, err := FromFiles(p("a"), p("b-key"), p("ca"), now)
			return err
		},
		"against authority": func() error {
			_, err := FromFiles(p("a"), p("a-key"), p("other"), now)
			return err
		},
		"outlive": func() error {
			return WriteNode(NodeFiles{CACert: p("ca"), CAKey: p("ca-key"),
				Cert: p("z"), Key: p("z-key")}, "z", []string{"z"}, now, 2*year)
		},
		"name the node": func() error {
			return WriteNode(NodeFiles{CACert: p("ca"), CAKey: p("ca-key"),
				Cert: p("z"), Key: p("z-key")}, "z",
				nil, now, year/2)
		},
	} {
		if err := f(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
