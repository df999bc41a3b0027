// Package keys makes, writes, loads and uses the secrets with which sidecars authenticate each
// other: the cluster key, and certificates.
//
// With a cluster key alone, every holder derives the same certificate authority from it
// (HKDF-SHA256 to an ed25519 seed) and issues itself a leaf for a fresh key at start. That is as
// strong as the shared secret: each holder of the cluster key can sign, and is a member. TLS 1.3
// adds forward secrecy. A cluster key cannot distinguish members or expel one. Certificates of an
// authority whose key stays off the nodes can.
//
// Invariants: secrets are written with mode 0600 and never over an existing file; a secret that
// other users may read is refused; no error text has a secret. There are no goroutines. Only
// Credentials have state, and their methods may be called from any goroutine.
package keys

import (
	"bytes"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// Bounds of key and certificate files.
const (
	ClusterKeyBytes = 32
	MaxClusterKeys  = 4       // in one file, while a key is rotated
	maxFileBytes    = 1 << 20 // of a key or certificate file

	publicMode  = 0o644
	secretMode  = 0o600
	othersMode  = 0o037 // a pod mounts a secret as 0440 for its group
	serialBits  = 120
	clusterName = "peer.kvspray.internal" // the name in each leaf of a cluster key
	caName      = "kvspray cluster authority"
	pemCert     = "CERTIFICATE"
	pemKey      = "PRIVATE KEY"
)

// The leaf of a cluster key lives as long as its process, and the authority as long as the cluster
// key. Neither has dates of its own, because hosts with different clocks must stay connected.
var (
	clusterFrom = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	// "no well-defined expiration", RFC 5280 4.1.2.5.
	clusterUntil = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
)

// Cluster is the shared secret of a cluster. The first key is used; all are accepted, so that a key
// can be rotated node by node.
type Cluster [][ClusterKeyBytes]byte

// Format prints the number of keys, and none of them.
func (c Cluster) Format(f fmt.State, _ rune) { _, _ = fmt.Fprintf(f, "(%d keys)", len(c)) }

// NewCluster makes a fresh key.
func NewCluster() (Cluster, error) {
	c := make(Cluster, 1)
	if _, err := rand.Read(c[0][:]); err != nil {
		return nil, fmt.Errorf("keys: make cluster key: %w", err)
	}
	return c, nil
}

// WriteCluster writes a key file: one key per line in hexadecimal, mode 0600. It does not change an
// existing file.
func WriteCluster(path string, c Cluster) error {
	var b []byte
	for i := range c {
		b = hex.AppendEncode(b, c[i][:])
		b = append(b, '\n')
	}
	return writeNew(path, b, secretMode)
}

// LoadCluster reads a key file: lines of 64 hexadecimal digits, the one to use first; or exactly 32
// raw bytes.
func LoadCluster(path string) (Cluster, error) {
	b, err := readSecret(path, "make one with 'kvspray keygen cluster'")
	if err != nil {
		return nil, err
	}
	if len(b) == ClusterKeyBytes {
		return checked(path, Cluster{[ClusterKeyBytes]byte(b)})
	}
	var c Cluster
	for i, line := range bytes.Split(bytes.TrimSpace(b), []byte("\n")) {
		line = bytes.TrimSpace(line)
		var k [ClusterKeyBytes]byte
		if len(line) != hex.EncodedLen(ClusterKeyBytes) {
			return nil, fmt.Errorf("keys: cluster key %s line %d: %d characters, want %d hexadecimal "+
				"digits (or a file of %d raw bytes): make one with 'kvspray keygen cluster'",
				path, i+1, len(line), hex.EncodedLen(ClusterKeyBytes), ClusterKeyBytes)
		}
		if _, err := hex.Decode(k[:], line); err != nil {
			return nil, fmt.Errorf("keys: cluster key %s line %d: not hexadecimal: make one with 'kvspray "+
				"keygen cluster'", path, i+1)
		}
		c = append(c, k)
	}
	return checked(path, c)
}

func checked(path string, c Cluster) (Cluster, error) {
	if len(c) > MaxClusterKeys {
		return nil, fmt.Errorf("keys: cluster key %s: %d keys, at most %d: remove those that no node "+
			"uses first", path, len(c), MaxClusterKeys)
	}
	for i := range c {
		if c[i] == ([ClusterKeyBytes]byte{}) {
			return nil, fmt.Errorf("keys: cluster key %s: key %d is all zeroes: make one with 'kvspray "+
				"keygen cluster'", path, i+1)
		}
	}
	return c, nil
}

// Gossip returns the keys of the membership protocol, the one to encrypt with first.
func (c Cluster) Gossip() ([][]byte, error) {
	out := make([][]byte, 0, len(c))
	for i := range c {
		k, err := derive(c[i], "kvspray gossip 1", ClusterKeyBytes)
		if err != nil {
			return nil, err
		}
		out = append(out, k)
	}
	return out, nil
}

func derive(k [ClusterKeyBytes]byte, purpose string, n int) ([]byte, error) {
	b, err := hkdf.Key(sha256.New, k[:], nil, purpose, n)
	if err != nil {
		return nil, fmt.Errorf("keys: derive %s: %w", purpose, err)
	}
	return b, nil
}

// authority is the same for every holder of k.
func authority(k [ClusterKeyBytes]byte) (*x509.Certificate, ed25519.PrivateKey, error) {
	seed, err := derive(k, "kvspray peer authority 1", ed25519.SeedSize)
	if err != nil {
		return nil, nil, err
	}
	key := ed25519.NewKeyFromSeed(seed)
	id := sha256.Sum256(key.Public().(ed25519.PublicKey))
	// The key's hash in the name lets a verifier that holds two authorities, in a rotation, find the
	// right one.
	t := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: caName,
		SerialNumber: hex.EncodeToString(id[:8])},
		NotBefore: clusterFrom, NotAfter: clusterUntil, IsCA: true, BasicConstraintsValid: true,
		MaxPathLenZero: true,
		KeyUsage:       x509.KeyUsageCertSign, SubjectKeyId: id[:20]}
	return sign(t, t, key.Public().(ed25519.PublicKey), key)
}

func sign(t, parent *x509.Certificate, pub ed25519.PublicKey, by ed25519.PrivateKey) (
	*x509.Certificate, ed25519.PrivateKey, error) {
	der, err := x509.CreateCertificate(rand.Reader, t, parent, pub, by)
	if err != nil {
		return nil, nil, fmt.Errorf("keys: sign certificate of %s: %w", t.Subject.CommonName, err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, fmt.Errorf("keys: read the certificate of %s back: %w",
			t.Subject.CommonName, err)
	}
	return c, by, nil
}

func serial() (*big.Int, error) {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), serialBits))
	if err != nil {
		return nil, fmt.Errorf("keys: serial number: %w", err)
	}
	return n.Add(n, big.NewInt(1)), nil
}

// leafTemplate is a certificate for both ends of a connection: every node dials and is dialed.
func leafTemplate(name string, hosts []string, from, until time.Time) (*x509.Certificate, error) {
	n, err := serial()
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{SerialNumber: n, Subject: pkix.Name{CommonName: name}, NotBefore: from,
		NotAfter: until, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, h)
		}
	}
	return t, nil
}

// Lengths that DNS allows, in bytes.
const (
	maxName  = 253
	maxLabel = 63
)

// Host checks a name or address that peers dial. No peer could verify an invalid one, and only the
// peer would report it.
func Host(h string) error {
	wrong := func(why string) error {
		return fmt.Errorf("%q: %s: write an IP address, or a DNS name, without a port", h, why)
	}
	if net.ParseIP(h) != nil {
		return nil
	}
	if h == "" || len(h) > maxName {
		return wrong(fmt.Sprintf("a name has 1 to %d characters", maxName))
	}
	labels := strings.Split(h, ".")
	if labels[0] == "*" && len(labels) > 2 {
		labels = labels[1:] // one level of any name, as certificates have it
	}
	for _, l := range labels {
		switch {
		case l == "" || len(l) > maxLabel:
			return wrong(fmt.Sprintf("a label between dots has 1 to %d characters", maxLabel))
		case strings.ContainsFunc(l, notOfName):
			return wrong("a name has letters, digits, hyphens and dots only")
		case l[0] == '-' || l[len(l)-1] == '-':
			return wrong("a label between dots neither begins nor ends with a hyphen")
		}
	}
	if !strings.ContainsFunc(labels[len(labels)-1], func(r rune) bool { return r < '0' || r > '9' }) {
		return wrong("it looks like an IP address and is none") // no top-level domain is a number
	}
	return nil
}

// notOfName reports characters that a label cannot have. Underscores are not allowed in host names,
// but used.
func notOfName(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
}

// Credentials authenticate this node to peers and peers to it.
type Credentials struct {
	server string    // the name in every certificate; empty: the host that was dialed
	paths  [3]string // of certificate, key and authority; empty: made from a cluster key

	mu   sync.RWMutex // protects the fields below
	cert tls.Certificate
	pool *x509.CertPool
	read [sha256.Size]byte // digest of the files when they were last read
	ends time.Time         // of the first certificate that ends; zero: none does
}

// Format prints none of the keys.
func (c *Credentials) Format(f fmt.State, _ rune) { _, _ = fmt.Fprint(f, "(credentials)") }

func (c *Credentials) now() (tls.Certificate, *x509.CertPool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.cert, c.pool
}

// Expires is when the certificate or its authority expires, whichever is first; zero: neither ever
// does.
func (c *Credentials) Expires() time.Time {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.ends
}

// Reload reads certificates again that were given as files, and uses them from the next connection
// on. If they are unusable or incomplete, it returns the reason, and the previous ones stay in use.
func (c *Credentials) Reload(now time.Time) (renewed bool, err error) {
	if c.paths[0] == "" {
		return false, nil
	}
	sum, err := digest(c.paths)
	c.mu.RLock()
	same := sum == c.read
	c.mu.RUnlock()
	if err != nil || same {
		return false, err
	}
	fresh, err := FromFiles(c.paths[0], c.paths[1], c.paths[2], now)
	if err != nil {
		return false, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if was, is := c.cert.Leaf, fresh.cert.Leaf; Identity(was) != Identity(is) {
		return false, fmt.Errorf("keys: certificate %s: it names %s, the one in use %s: peers "+
			"identify this process by the names and refuse others: restart it to change them, or issue "+
			"one with the same names", c.paths[0], names(is), names(was))
	}
	c.cert, c.pool, c.read, c.ends = fresh.cert, fresh.pool, fresh.read, fresh.ends
	return true, nil
}

// digest shows whether files have changed.
func digest(paths [3]string) (sum [sha256.Size]byte, err error) {
	h := sha256.New()
	for i, p := range paths {
		remedy := ""
		if i == 1 {
			remedy = "make one with 'kvspray keygen node'"
		}
		b, err := read(p, i == 1, remedy)
		if err != nil {
			return sum, err
		}
		h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(b))))
		h.Write(b)
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}

// FromCluster issues a leaf for the life of this process.
func FromCluster(c Cluster, node string) (*Credentials, error) {
	if len(c) == 0 {
		return nil, errors.New("keys: no cluster key: pass what LoadCluster returned")
	}
	cr := &Credentials{pool: x509.NewCertPool(), server: clusterName}
	for i := range c {
		ca, caKey, err := authority(c[i])
		if err != nil {
			return nil, err
		}
		cr.pool.AddCert(ca)
		if i > 0 {
			continue
		}
		pub, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return nil, fmt.Errorf("keys: make a key for this process: %w", err)
		}
		t, err := leafTemplate(node, []string{clusterName}, clusterFrom, clusterUntil)
		if err != nil {
			return nil, err
		}
		leaf, _, err := sign(t, ca, pub, caKey)
		if err != nil {
			return nil, err
		}
		cr.cert = tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}
	}
	return cr, nil
}

// FromFiles loads certificates in PEM form and checks them against each other and against now.
func FromFiles(certPath, keyPath, caPath string, now time.Time) (*Credentials, error) {
	paths := [3]string{certPath, keyPath, caPath}
	sum, err := digest(paths) // before they are read, so that a later change is read again
	if err != nil {
		return nil, err
	}
	certPEM, err := readFile(certPath)
	if err != nil {
		return nil, err
	}
	keyPEM, err := readSecret(keyPath, "make one with 'kvspray keygen node'")
	if err != nil {
		return nil, err
	}
	caPEM, err := readFile(caPath)
	if err != nil {
		return nil, err
	}
	cert, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("keys: certificate %s with key %s: %w: both must be PEM and made together",
			certPath, keyPath, err)
	}
	if cert.Leaf == nil {
		return nil, fmt.Errorf("keys: certificate %s: no leaf", certPath)
	}
	if now.After(cert.Leaf.NotAfter) || now.Before(cert.Leaf.NotBefore) {
		return nil, fmt.Errorf("keys: certificate %s: valid from %s to %s, but the time is %s: issue "+
			"another with 'kvspray keygen node', or set the clock",
			certPath, cert.Leaf.NotBefore.Format(time.RFC3339), cert.Leaf.NotAfter.Format(time.RFC3339),
			now.UTC().Format(time.RFC3339))
	}
	cr := &Credentials{cert: cert, pool: x509.NewCertPool(), paths: paths, read: sum}
	if !cr.pool.AppendCertsFromPEM(caPEM) {
		return nil, fmt.Errorf("keys: authority %s: no certificate in PEM form", caPath)
	}
	mid := x509.NewCertPool()
	for _, der := range cert.Certificate[1:] {
		if c, perr := x509.ParseCertificate(der); perr == nil {
			mid.AddCert(c)
		}
	}
	var chains [][]*x509.Certificate
	for _, use := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		if chains, err = cert.Leaf.Verify(x509.VerifyOptions{Roots: cr.pool, Intermediates: mid,
			CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{use}}); err != nil {
			return nil, fmt.Errorf("keys: certificate %s against authority %s: %w: a node's certificate "+
				"must allow server and client authentication", certPath, caPath, err)
		}
	}
	cr.ends = lasting(chains)
	return cr, nil
}

// lasting is when the last of the chains expires.
func lasting(chains [][]*x509.Certificate) (last time.Time) {
	for _, chain := range chains {
		ends := chain[0].NotAfter
		for _, c := range chain {
			if c.NotAfter.Before(ends) {
				ends = c.NotAfter
			}
		}
		if ends.After(last) {
			last = ends
		}
	}
	return last
}

// names lists the names of a certificate, for errors.
func names(c *x509.Certificate) string {
	all := append([]string{c.Subject.CommonName}, c.DNSNames...)
	for _, ip := range c.IPAddresses {
		all = append(all, ip.String())
	}
	return strings.Join(all, ", ")
}

// Server returns the settings of a listening end. A peer without a certificate of the authority is
// refused.
func (c *Credentials) Server() *tls.Config {
	cert, pool := c.now()
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
}

// Client returns the settings of a dialing end. host is the dialed host, without its port.
func (c *Credentials) Client(host string) *tls.Config {
	name := c.server
	if name == "" {
		name = host
	}
	cert, pool := c.now()
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert},
		RootCAs: pool, ServerName: name}
}

// Identity distinguishes processes by their certificates. The identity of a certificate of an
// authority is the names in it, so that it can be renewed while its process lives. Certificates of
// a cluster key all have the same name. Their identity is the key that the process made.
func Identity(c *x509.Certificate) [sha256.Size]byte {
	if len(c.DNSNames)+len(c.IPAddresses) == 0 || slices.Contains(c.DNSNames, clusterName) {
		return sha256.Sum256(c.RawSubjectPublicKeyInfo)
	}
	names := slices.Sorted(slices.Values(c.DNSNames))
	for _, ip := range c.IPAddresses {
		names = append(names, ip.String())
	}
	slices.Sort(names[len(c.DNSNames):])
	h := sha256.New()
	h.Write([]byte("kvspray names 1"))
	for _, s := range append([]string{c.Subject.CommonName}, names...) {
		h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(s))))
		h.Write([]byte(s))
	}
	return [sha256.Size]byte(h.Sum(nil))
}
