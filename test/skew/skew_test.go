// SPDX-License-Identifier: Apache-2.0

package skew

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
)

const (
	patience = 60 * time.Second // for what has to come; the machine may have other things to do
	tokens   = 1000             // the last block is not full
	perBlock = 16
)

// shape is large enough for several slices: 4 MiB of a prompt, in four layers.
var shape = connectortest.Shape{Layers: 4, NumBlocks: 256, TokensPerBlock: perBlock,
	TokenBytes: 1024}

// sidecar is a running release.
type sidecar struct {
	release
	endpoint, socket, log string
}

func start(t *testing.T, r release) *sidecar {
	t.Helper()
	dir := testutil.ShortDir(t)
	s := &sidecar{release: r, endpoint: free(t), socket: filepath.Join(dir, "s.sock"),
		log: filepath.Join(dir, "log")}
	cfg, err := json.Marshal(map[string]any{"node": r.name,
		"engine":     map[string]any{"socket": s.socket},
		"peer":       map[string]any{"listen": s.endpoint, "gossip": map[string]any{"listen": "off"}},
		"http":       map[string]any{"listen": "127.0.0.1:0"},
		"transports": map[string]any{"order": []string{"tcp"}}})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "config.yaml") // JSON is YAML
	if err := os.WriteFile(path, cfg, 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(s.log)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }() // the process has its own
	cmd := exec.Command(r.binary, "serve", "--config", path)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("%s wrote:\n%s", r.name, s.written(t))
		}
	})
	wait(t, "the socket of "+r.name, func() bool { _, err := os.Stat(s.socket); return err == nil })
	return s
}

func (s *sidecar) written(t *testing.T) string {
	b, err := os.ReadFile(s.log)
	if err != nil {
		t.Error(err)
	}
	return string(b)
}

func free(t *testing.T) string {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", net.JoinHostPort(testutil.Loopback(),
		"0"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }() // nobody else takes an address of this process's own
	return l.Addr().String()
}

func wait(t *testing.T, what string, ok func() bool) {
	t.Helper()
	end, look := time.After(patience), time.NewTicker(10*time.Millisecond)
	defer look.Stop()
	for !ok() {
		select {
		case <-look.C:
		case <-end:
			t.Fatalf("%s did not come within %s", what, patience)
		}
	}
}

// engine is one in host memory.
type engine struct {
	*connectortest.Worker
	region *mem.Region
}

func (s *sidecar) engine(t *testing.T, id string) *engine {
	t.Helper()
	reg, err := shape.Region()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	w, err := connectortest.DialWorker(ctx, connectortest.Config{Socket: s.socket,
		Layout:  shape.Layout(),
		Regions: []*mem.Region{reg}, Engine: msg.Engine{Name: "test", Version: "1", ID: id}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = w.Close()
		reg.Release()
	})
	return &engine{w, reg}
}

func (e *engine) end(t *testing.T, lease uint64) connectortest.Completion {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		c, err := e.Wait(ctx)
		if err != nil {
			t.Fatalf("lease %d: %v", lease, err)
		}
		if c.Lease == lease {
			return c
		}
	}
}

// move asks for a prompt of random content, and returns what decode's engine is told. Where that is
// that all came, all of it is compared.
func move(t *testing.T, from *sidecar, prefill, decode *engine,
	partner time.Duration) connectortest.Completion {
	t.Helper()
	b, _ := prefill.region.Bytes()
	_, _ = rand.Read(b)
	d, _ := decode.region.Bytes()
	kept := bytes.Clone(d)
	var in msg.Intent
	_, _ = rand.Read(in.Xfer[:])
	_, _ = rand.Read(in.Hash[:])
	blocks := (tokens + perBlock - 1) / perBlock
	var pt, dt []uint32
	for i := range uint32(blocks) {
		pt, dt = append(pt, 255-3*i), append(dt, 2*i+7)
	}
	in.Tokens, in.Ready, in.Fanout, in.Blocks, in.DeadlineMS = tokens, tokens, 1, [][]uint32{pt},
		uint64(patience.Milliseconds())
	src, err := prefill.Intent(in)
	dst, err2 := decode.Expect(msg.Expect{Xfer: in.Xfer, Hash: in.Hash, Tokens: tokens,
		Peer: from.endpoint, Skip: []uint32{0},
		Blocks: [][]uint32{dt}, DeadlineMS: in.DeadlineMS,
		PartnerMS: uint64(partner.Milliseconds())})
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	c := decode.end(t, dst)
	if c.Status != 0 {
		if !bytes.Equal(d, kept) {
			t.Error("bytes came, of a transfer that was refused")
		}
		if err := prefill.Cancel(src, "test", true); err != nil {
			t.Fatal(err)
		}
		prefill.end(t, src)
		return c
	}
	prefill.end(t, src)
	for l := range shape.Layers {
		for i := range pt {
			n := min(tokens-i*perBlock, perBlock) * int(shape.TokenBytes)
			if !bytes.Equal(shape.Page(prefill.region, l, pt[i])[:n], shape.Page(decode.region, l,
				dt[i])[:n]) {
				t.Fatalf("layer %d, block %d of the prompt differs", l, i)
			}
		}
	}
	return c
}

// each runs f with a release on each side, and with the two exchanged.
func each(t *testing.T, a, b release, f func(t *testing.T, p, d *sidecar)) {
	t.Helper()
	for _, x := range [2][2]release{{a, b}, {b, a}} {
		t.Run(x[0].name+" to "+x[1].name, func(t *testing.T) {
			f(t, start(t, x[0]), start(t,
				x[1]))
		})
	}
}

// moves is what two releases that work together do.
func moves(t *testing.T, p, d *sidecar) {
	pe, de := p.engine(t, "p"), d.engine(t, "d")
	for range 3 {
		if c := move(t, p, pe, de, patience); c.Status != 0 {
			t.Fatalf("status %d: %+v", c.Status, c.Received)
		}
	}
}

// refused is what two releases do that do not: decode's engine has the reason, which names the
// sidecar to upgrade, and so has each log in one line.
func refused(t *testing.T, p, d, older *sidecar) {
	pe, de := p.engine(t, "p"), d.engine(t, "d")
	want := "upgrade the sidecar at " + older.endpoint
	for range 3 {
		c := move(t, p, pe, de, 2*time.Second)
		if c.Status == 0 || c.Received == nil || !strings.Contains(c.Received.Reason, want) {
			t.Errorf("status %d, %+v: want %q", c.Status, c.Received, want)
		}
	}
	if n := strings.Count(d.written(t), want); n == 0 {
		t.Errorf("the log of %s does not say %q", d.name, want)
	}
}

// TestLast: beside the last release. Sidecars before 1.1 of the control protocol have no digests of
// plans, and cannot refuse one that orders bytes otherwise: they are refused.
func TestLast(t *testing.T) {
	old, _ := last(t), now(t)
	each(t, now(t), old, func(t *testing.T, p, d *sidecar) {
		older := p
		if d.name == old.name {
			older = d
		}
		if strings.Contains(old.binary, before) {
			refused(t, p, d, older)
			return
		}
		pe, de := p.engine(t, "p"), d.engine(t, "d")
		c := move(t, p, pe, de, 2*time.Second)
		if c.Status == 0 {
			moves(t, p, d)
			return
		}
		refused(t, p, d, older)
	})
}

// TestFuture: beside a release that differs in whatever may differ between two that work together.
func TestFuture(t *testing.T) {
	each(t, now(t), future(t), moves)
}

// TestOtherPlans: a release that orders bytes otherwise is refused by the source, whichever is
// newer, and decode's engine has the field, both values and which side to upgrade.
func TestOtherPlans(t *testing.T) {
	each(t, now(t), ordered(t), func(t *testing.T, p, d *sidecar) {
		pe, de := p.engine(t, "p"), d.engine(t, "d")
		want := "plan_version = 1 at the receiver, 2 at the source: " +
			"upgrade the sidecar of the receiver (decode)"
		if d.name == "ordered" {
			want = "plan_version = 2 at the receiver, 1 at the source: " +
				"upgrade the sidecar of the source (prefill)"
		}
		c := move(t, p, pe, de, patience)
		if c.Status == 0 || c.Received == nil || !strings.Contains(c.Received.Reason, want) {
			t.Errorf("status %d, %+v: want %q", c.Status, c.Received, want)
		}
		for _, s := range []*sidecar{p, d} {
			wait(t, "the refusal in the log of "+s.name, func() bool {
				return strings.Contains(s.written(t), want)
			})
		}
	})
}
