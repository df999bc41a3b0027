package keys

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"
)

// WriteAuthority makes an authority for certificates: the file cert is for all nodes, the file key
// signs and belongs on none.
func WriteAuthority(certPath, keyPath string, now time.Time, valid time.Duration) error {
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return fmt.Errorf("keys: make authority: %w", err)
	}
	n, err := serial()
	if err != nil {
		return err
	}
	t := &x509.Certificate{SerialNumber: n, Subject: pkix.Name{CommonName: "kvspray authority"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(valid),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign |
			x509.KeyUsageCRLSign}
	ca, _, err := sign(t, t, pub, key)
	if err != nil {
		return err
	}
	return writePair(certPath, keyPath, ca, key)
}

// NodeFiles are the files of an authority, which exist, and of a node, which WriteNode makes.
type NodeFiles struct {
	CACert, CAKey string
	Cert, Key     string
}

// WriteNode issues a node's certificate. hosts are the names and addresses that peers dial; at
// least one.
func WriteNode(f NodeFiles, node string, hosts []string, now time.Time,
	valid time.Duration) error {
	if node == "" || len(hosts) == 0 {
		return fmt.Errorf("keys: issue certificate: node %q, hosts %q: name the node and every host or "+
			"address that peers dial", node, hosts)
	}
	for _, h := range hosts {
		if err := Host(h); err != nil {
			return fmt.Errorf("keys: issue certificate of %s: host %w", node, err)
		}
	}
	certPEM, err := read(f.CACert, false, "make one with 'kvspray keygen ca', or name it with --ca")
	if err != nil {
		return err
	}
	keyPEM, err := readSecret(f.CAKey, "make one with 'kvspray keygen ca', or name it with --ca-key")
	if err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return fmt.Errorf("keys: authority %s with key %s: %w: both must be PEM and made together",
			f.CACert, f.CAKey, err)
	}
	caKey, ok := pair.PrivateKey.(ed25519.PrivateKey)
	if !ok || pair.Leaf == nil || !pair.Leaf.IsCA {
		return fmt.Errorf(
			"keys: authority %s: not an ed25519 authority: make one with 'kvspray keygen ca'", f.CACert)
	}
	until := now.Add(valid)
	if until.After(pair.Leaf.NotAfter) {
		return fmt.Errorf("keys: issue certificate of %s: it would outlive the authority, which ends "+
			"%s: choose a shorter validity, or make another authority",
			node, pair.Leaf.NotAfter.Format(time.RFC3339))
	}
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return fmt.Errorf("keys: make key of %s: %w", node, err)
	}
	t, err := leafTemplate(node, hosts, now.Add(-time.Hour), until)
	if err != nil {
		return err
	}
	leaf, _, err := sign(t, pair.Leaf, pub, caKey)
	if err != nil {
		return err
	}
	return writePair(f.Cert, f.Key, leaf, key)
}

func writePair(certPath, keyPath string, c *x509.Certificate, key ed25519.PrivateKey) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("keys: encode key: %w", err)
	}
	if err := writeNew(keyPath, pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: der}),
		secretMode); err != nil {
		return err
	}
	if err := writeNew(certPath, pem.EncodeToMemory(&pem.Block{Type: pemCert, Bytes: c.Raw}),
		publicMode); err != nil {
		// without a certificate it would only block the next try
		return errors.Join(err, os.Remove(keyPath))
	}
	return nil
}

func writeNew(path string, b []byte, mode os.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("keys: write %s: it exists: move it away first", path)
	}
	if err != nil {
		return fmt.Errorf("keys: write %q: %w: name a file in an existing directory that can be "+
			"written to", path, err)
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("keys: write %s: %w", path, errors.Join(err, os.Remove(path)))
	}
	return nil
}

func readFile(path string) ([]byte, error) { return read(path, false, "") }

func readSecret(path, remedy string) ([]byte, error) { return read(path, true, remedy) }

func read(path string, secret bool, remedy string) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrPermission) {
		remedy = "let this user read it: chown it, or 0440 for a group of the user's"
	}
	if err != nil {
		if remedy != "" {
			return nil, fmt.Errorf("keys: read %s: %w: %s", path, err, remedy)
		}
		return nil, fmt.Errorf("keys: read %s: %w", path, err)
	}
	defer func() { _ = f.Close() }() // only read
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("keys: read %s: %w", path, err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("keys: read %s: not a regular file", path)
	}
	if m := st.Mode().Perm(); secret && m&othersMode != 0 {
		return nil, fmt.Errorf("keys: read %s: mode %04o lets others read a secret: chmod 600 %s, or "+
			"0440 where a pod mounts it for its group", path, m, path)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("keys: read %s: %w", path, err)
	}
	if len(b) > maxFileBytes {
		return nil, fmt.Errorf("keys: read %s: more than %d bytes: not a key or certificate", path,
			maxFileBytes)
	}
	return b, nil
}

// Load loads what authenticates a node to its peers: certificates if one of their files is named,
// else the cluster key; nil: no path is set.
func Load(cluster, cert, key, ca, node string, now time.Time) (*Credentials, error) {
	if cert != "" || key != "" || ca != "" {
		return FromFiles(cert, key, ca, now)
	}
	if cluster == "" {
		return nil, nil
	}
	c, err := LoadCluster(cluster)
	if err != nil {
		return nil, err
	}
	return FromCluster(c, node)
}

// Check loads files as a start would: cluster is the path of a cluster key, the others are those of
// FromFiles. Empty paths are skipped. expires is when the certificate ends;
// zero: it does not, or there is none.
func Check(cluster, cert, key, ca string, now time.Time) (expires time.Time, err error) {
	if cluster != "" {
		if _, err := LoadCluster(cluster); err != nil {
			return expires, err
		}
	}
	if cert != "" || key != "" || ca != "" {
		c, err := FromFiles(cert, key, ca, now)
		if err != nil {
			return expires, err
		}
		expires = c.Expires()
	}
	return expires, nil
}
