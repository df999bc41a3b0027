package peer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/cluster/gossip"
	"github.com/kvspray/kvspray/control/peer/delivery"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// patience of a test that is about to fail; the machine may be busy.
const patience = time.Minute

const childEnv = "KVSPRAY_PEER_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		child()
	}
	leaktest.Main(m)
}

func TestHandshake(t *testing.T) {
	c, err := keys.NewCluster()
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Options){"open": nil, "secured": secured(t, c)} {
		t.Run(name, func(t *testing.T) {
			rails := []*peerv1.Rail{{Transport: "tcp", Name: "lo", Address: "127.0.0.1:5"}}
			a := start(t, change)
			b := start(t, func(o *Options) {
				o.Rails = func() []*peerv1.Rail { return rails }
				if change != nil {
					change(o)
				}
			})
			join(t, a, b)
			var p Peer
			a.until("up", func() bool { p = a.ups[0]; return true })
			if p.Endpoint != b.Endpoint() || !p.SameHost || p.Version != hello.Protocol.Max ||
				len(p.Rails) != 1 ||
				!proto.Equal(p.Rails[0], rails[0]) {
				t.Errorf("peer %+v", p)
			}
			ka, _ := a.PeerKey(b.opt.Boot)
			kb, ok := b.PeerKey(a.opt.Boot)
			if !ok || ka != kb || ka == ([32]byte{}) || ka != p.Key {
				t.Error("the two do not share a key")
			}
			for i := range uint64(500) {
				if a.Send(b.opt.Boot, await(i+1)) != nil || b.Send(a.opt.Boot, commit(i+1)) != nil {
					t.Fatal("not sent")
				}
			}
			a.inOrder(b.opt.Boot, 500)
			b.inOrder(a.opt.Boot, 500)
			if l, err := a.Mesh.Describe(t.Context(), b.opt.Boot, [32]byte{1}, [32]byte{}); err != nil ||
				string(l) != "layout 0" {
				t.Errorf("describe: %q %v", l, err)
			}
			if l, err := a.Mesh.Describe(t.Context(), b.opt.Boot, [32]byte{1}, [32]byte{4}); err != nil ||
				string(l) != "layout 4" {
				t.Errorf("describe with a fingerprint: %q %v", l, err)
			}
			for _, name := range [][2][32]byte{{{2}, {}}, {{1}, {9}}} {
				if _, err := a.Mesh.Describe(t.Context(), b.opt.Boot, name[0], name[1]); err == nil {
					t.Errorf("an unknown layout was described: %v", name)
				}
			}
			if r, err := a.Probe(t.Context(), b.Endpoint()); err != nil || !bytes.Equal(r.Boot,
				b.opt.Boot[:]) {
				t.Errorf("probe: %v %v", r, err)
			}
			a.Connect(b.Endpoint())
			a.until("a second answer", func() bool { return len(a.ups) >= 2 })
			acknowledged(t, a.sessionOf(b))
		})
	}
}

func TestSelf(t *testing.T) {
	a := start(t, nil)
	a.Connect(a.Endpoint())
	a.until("up", func() bool { return len(a.ups) == 1 && a.ups[0].Boot == a.opt.Boot })
	for i := range uint64(100) {
		if err := a.Send(a.opt.Boot, await(i+1)); err != nil {
			t.Fatal(err)
		}
	}
	a.inOrder(a.opt.Boot, 100)
}

func TestRefused(t *testing.T) {
	c1, _ := keys.NewCluster()
	c2, _ := keys.NewCluster()
	for name, x := range map[string]struct {
		a, b func(*Options)
		want string
	}{
		"wrong key": {secured(t, c1), secured(t, c2), "certificate"},
		"no key":    {nil, secured(t, c2), ""},
		"open peer": {secured(t, c1), nil, ""},
		"newer only": {nil, func(o *Options) {
			o.Versions = wire.Versions{Min: wire.V(2, 0),
				Max: wire.V(3, 1)}
		}, "control protocol 1.0 at "},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := start(t, x.a), start(t, x.b)
			a.Connect(b.Endpoint())
			var ups []Peer
			var failed []error
			a.until("an answer", func() bool {
				ups, failed = a.ups,
					a.failed
				return len(failed)+len(ups) > 0
			})
			if len(ups) > 0 || !strings.Contains(failed[0].Error(), x.want) {
				t.Errorf("up %v, failed %v, want %q", ups, failed, x.want)
			}
			if _, ok := b.PeerKey(a.opt.Boot); ok {
				t.Error("the refusing side has a key")
			}
		})
	}
	if _, err := New(Options{Boot: transfer.Boot{1}, Handler: &node{}, Listen: "0.0.0.0:0"}); !errors.
		Is(err, ErrUnsafe) || !strings.Contains(err.Error(), "peer.cluster_key_file") {
		t.Errorf("bound off loopback: %v", err)
	}
	a := start(t, nil)
	a.Connect("192.0.2.1:1")
	a.until("refused", func() bool { return len(a.failed) == 1 && errors.Is(a.failed[0], ErrUnsafe) })
}

func TestRotation(t *testing.T) {
	c1, _ := keys.NewCluster()
	c2, _ := keys.NewCluster()
	join(t, start(t, secured(t, append(c1[:1:1], c2...))),
		start(t, secured(t, append(c2[:1:1], c1...))))
}

// Requests of an invented older and an invented newer build, to the byte.
func TestGoldenVersions(t *testing.T) {
	a := start(t, nil)
	v := newService(a.dialer)
	for name, x := range map[string]struct {
		hex  string
		want uint32
		err  string
	}{
		// 0.9 only; that build had nothing but versions and boot.
		"older": {"0a0408091009" + "1210" + strings.Repeat("11", 16), 0,
			"control protocol 0.9 at the caller's address (kvspray of an unknown release), 1.0 at "},
		"older, common": {"0a060809108180" + "04" + "1210" + strings.Repeat("11", 16),
			uint32(wire.V(1, 0)), ""},
		// 1.0 to 2.3, with fields 100 (varint) and 101 (bytes) that this build lacks, and one such in
		// the version range.
		"newer": {"0a0b08808004108380" + "08" + "a00607" + "1210" + strings.Repeat("22", 16) +
			"a00601" + "aa0603616263", uint32(wire.V(1, 0)), ""},
		"newer, only": {"0a0808808008108380" + "08" + "1210" + strings.Repeat("22", 16), 0,
			"control protocol 2.0 to 2.3 at the caller's address"},
	} {
		raw, err := hex.DecodeString(x.hex)
		if err != nil {
			t.Fatal(name, err)
		}
		var q peerv1.HelloRequest
		if err := proto.Unmarshal(raw, &q); err != nil {
			t.Fatal(name, err)
		}
		r, err := v.Hello(t.Context(), &q)
		if x.err == "" && (err != nil || r.Version != x.want) || x.err != "" &&
			(err == nil || !strings.Contains(err.Error(), x.err) || !strings.Contains(err.Error(),
				"upgrade")) {
			t.Errorf("%s: %v %v", name, r, err)
		}
	}
}

// Lanes are cut again and again under traffic in both directions, over two lanes: nothing is lost,
// repeated or out of order.
func TestLaneCut(t *testing.T) {
	two := func(o *Options) { o.Control = []string{"127.0.0.1:0"} }
	a, b := start(t, two), start(t, two)
	join(t, a, b)
	const count, every = 10000, 750 // more frames than may wait, and the frames between two cuts
	var wg sync.WaitGroup
	for _, x := range []struct{ from, to *node }{{a, b}, {b, a}} {
		wg.Go(func() {
			for i := range uint64(count) {
				var err error
				poll(t, "a place in the queue", func() bool {
					err = x.from.Send(x.to.opt.Boot, commit(i+1))
					return !errors.Is(err, ErrQueueFull)
				})
				if err != nil {
					t.Error(err)
					return
				}
				if i%every == every/2 {
					cutAll(x.from.sessionOf(x.to), net.ErrClosed)
				}
			}
		})
	}
	wg.Wait()
	a.inOrder(b.opt.Boot, count)
	b.inOrder(a.opt.Boot, count)
	for _, x := range []struct{ here, there *node }{{a, b}, {b, a}} {
		x.here.mu.Lock()
		if n := len(x.here.got[x.there.opt.Boot]); n != count ||
			slices.ContainsFunc(x.here.downs, proved) {
			t.Errorf("%d frames, downs %v", n, x.here.downs)
		}
		x.here.mu.Unlock()
	}
}

// proved reports whether PeerDown had over set.
func proved(down string) bool { return strings.HasSuffix(down, "true") }

func TestQueueBounds(t *testing.T) {
	hold := make(chan struct{})
	a := start(t, func(o *Options) { o.Pings.Timeout = time.Minute })
	b := start(t, nil)
	b.on = func(transfer.Boot, *peerv1.ControlFrame) { <-hold }
	join(t, a, b)
	n := 0
	for a.Send(b.opt.Boot, await(1)) == nil {
		n++
	}
	for a.Send(b.opt.Boot, commit(1)) == nil {
		n++
	}
	close(hold)
	if n != delivery.MaxUnacked {
		t.Errorf("%d frames taken, want %d", n, delivery.MaxUnacked)
	}
	big := &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{Commit: &peerv1.Commit{
		Destination: &peerv1.Lease{Boot: make([]byte, MaxMessage)}}}}
	poll(t, "the queue moves again", func() bool {
		return !errors.Is(a.Send(b.opt.Boot, big), ErrQueueFull)
	})
	if err := a.Send(b.opt.Boot, big); !errors.Is(err, ErrTooBig) {
		t.Error(err)
	}
}

// Another process at the same endpoint.
func TestNewBoot(t *testing.T) {
	a, b := start(t, nil), start(t, restarts)
	join(t, a, b)
	at, old := b.Endpoint(), b.opt.Boot
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	c := start(t, func(o *Options) { o.Listen = at })
	a.until("the old one down, the new one up", func() bool {
		return slices.Contains(a.downs, fmt.Sprint(old, true)) && slices.ContainsFunc(a.ups,
			func(p Peer) bool { return p.Boot == c.opt.Boot })
	})
	if _, ok := a.PeerKey(old); ok {
		t.Error("the old boot still has a key")
	}
	if err := a.Send(old, await(1)); !errors.Is(err, ErrUnknown) {
		t.Error(err)
	}
}

func TestGossip(t *testing.T) {
	c1, _ := keys.NewCluster()
	c2, _ := keys.NewCluster()
	var first string
	mk := func(name string, c keys.Cluster) *node {
		k, err := c.Gossip()
		if err != nil {
			t.Fatal(err)
		}
		// no other process takes the port
		ln, err := net.Listen("tcp", net.JoinHostPort(testutil.Loopback(), "0"))
		if err != nil {
			t.Fatal(err)
		}
		at := ln.Addr().String()
		_ = ln.Close()
		g := gossip.Options{Listen: at, Keys: k}
		if first == "" {
			first = at
		} else {
			g.Join = []string{first}
		}
		return start(t, func(o *Options) { o.Node, o.Join = name, joiner(g) })
	}
	a, b, c, x := mk("a", c1), mk("b", c1), mk("c", c1), mk("x", c2)
	poll(t, "three members", func() bool {
		return len(a.Members()) == 3 && len(b.Members()) == 3 &&
			len(c.Members()) == 3
	})
	for _, m := range a.Members() {
		if m.Node == "b" && (m.Endpoint != b.Endpoint() || m.Boot != b.opt.Boot || m.Version != "test") ||
			m.Node == "x" {
			t.Errorf("member %+v", m)
		}
	}
	if len(x.Members()) != 1 {
		t.Errorf("the one with a wrong key sees %v", x.Members())
	}
}

func TestMany(t *testing.T) {
	const (
		each = 3
		// connects at once: two busy cores under the race detector make these handshakes well within
		// the time of one call
		wave = 8
	)
	all := make([]*node, 64)
	for i := range all {
		all[i] = start(t, func(o *Options) { o.Pings = Pings{} })
	}
	for k := range each {
		for first := 0; first < len(all); first += wave {
			for i := first; i < first+wave; i++ {
				all[i].Connect(all[(i+k*9+1)%len(all)].Endpoint())
			}
			for i := first; i < first+wave; i++ {
				n, to := all[i], all[(i+k*9+1)%len(all)].opt.Boot
				var failed []error
				n.until("peer", func() bool {
					failed = n.failed
					return len(failed) > 0 || slices.ContainsFunc(n.ups, func(p Peer) bool { return p.Boot == to })
				})
				if len(failed) > 0 {
					t.Fatal(failed)
				}
			}
		}
	}
	for _, n := range all {
		n.until("the peers that connected", func() bool { return len(n.ups) >= 2*each })
	}
}

// child is the peer of TestStopped, in a process of its own.
func child() {
	n := &node{got: map[transfer.Boot][]uint64{}, wake: make(chan struct{})}
	m, err := New(Options{Boot: transfer.Boot{7}, Listen: "127.0.0.1:0", Handler: n})
	if err == nil {
		err = m.Start(context.Background())
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(m.Endpoint())
	_, _ = io.Copy(io.Discard, os.Stdin) // until the parent closes it, or dies
	os.Exit(0)
}

// A stopped process is detected, and its frames arrive once it continues.
func TestStopped(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"=1")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = in.Close()
		_ = cmd.Process.Signal(syscall.SIGCONT)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	at, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(at, err)
	}
	boot := transfer.Boot{7}
	a := start(t, nil)
	a.Connect(strings.TrimSpace(at))
	a.until("up", func() bool { return len(a.ups) > 0 })
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var ups int
	a.until("down", func() bool {
		ups = len(a.ups)
		return slices.Contains(a.downs, fmt.Sprint(boot, false))
	})
	if err := a.Send(boot, commit(1)); err != nil {
		t.Error(err)
	}
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	a.until("up again", func() bool { return len(a.ups) > ups })
	acknowledged(t, a.sessions.get(boot))
}

func BenchmarkRoundTrip(b *testing.B) {
	x, y := start(b, func(o *Options) { o.Pings = Pings{} }),
		start(b, func(o *Options) { o.Pings = Pings{} })
	back := make(chan struct{}, 1)
	join(b, x, y)
	y.on = func(boot transfer.Boot, _ *peerv1.ControlFrame) { _ = y.Send(boot, commit(1)) }
	x.on = func(transfer.Boot, *peerv1.ControlFrame) { back <- struct{}{} }
	var took []time.Duration
	for b.Loop() {
		from := time.Now()
		if err := x.Send(y.opt.Boot, await(1)); err != nil {
			b.Fatal(err)
		}
		<-back
		took = append(took, time.Since(from))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/2e3, "one-way-p50-us")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/2e3, "one-way-p99-us")
}
