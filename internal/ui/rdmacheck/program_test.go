package rdmacheck

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

func newKey(t *testing.T) *keys.Credentials {
	t.Helper()
	path := filepath.Join(t.TempDir(), "key")
	c, err := keys.NewCluster()
	if err == nil {
		err = keys.WriteCluster(path, c)
	}
	if err != nil {
		t.Fatal(err)
	}
	k, err := keys.Load(path, "", "", "", "test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestProof: ends with one key test each other. An end with another key, or with none, causes
// nothing at the other one.
func TestProof(t *testing.T) {
	f := fake.New()
	opt := short
	opt.Key, opt.only = newKey(t), []string{"rate"}
	if r := test(t, f, simulated(f, "a"), simulated(f, "b"), opt); !r.Works() {
		t.Errorf("with a key: %+v", r.Pairs)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- Serve(ctx, ln, Env{Version: "reached"}, opt.Key) }()
	address := ln.Addr().String()
	for _, key := range []*keys.Credentials{nil, newKey(t)} {
		opt := Options{Peer: address, Key: key}
		if r, err := Run(t.Context(), simulated(f, "a"), opt); err == nil ||
			!strings.Contains(err.Error(), "peer.cluster_key_file") {
			t.Errorf("another key, or none: %+v, %v", r, err)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestProgramRefuses: what would let strangers use the rails, and what could test nothing.
func TestProgramRefuses(t *testing.T) {
	for _, p := range []Program{{ServeAt: "192.0.2.1"}, {ServeAt: "0.0.0.0:1"}, {ServeAt: ":7659"},
		{Options: Options{Peer: "192.0.2.1"}}} {
		p.Config, p.Rounds, p.Span = config.Default(), 1, time.Second
		err := p.Run(t.Context())
		if !usage.Is(err) || !strings.Contains(err.Error(), "keygen cluster") {
			t.Errorf("%+v: %v", p, err)
		}
		p.Config.Peer.ClusterKeyFile = filepath.Join(t.TempDir(), "none")
		if err := p.Run(t.Context()); !usage.Is(err) || !strings.Contains(err.Error(), "keygen cluster") {
			t.Errorf("a key that is not there: %v", err)
		}
	}
	p := Program{ServeAt: "127.0.0.1:0"}
	if err := p.serve(t.Context(), Env{}); err == nil || !strings.Contains(err.Error(),
		"no RDMA port") {
		t.Errorf("no rails: %v", err)
	}
}
