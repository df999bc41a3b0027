package sidecar

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
)

// The tests of this file run in the guests of test/rdma: real verbs over soft-RoCE, four rails. They move what a Llama-8B
// leaves for 4,096 tokens: 32 layers, 512 MiB. KVSPRAY_RDMA_LAYERS makes it fewer where the processor is shared, KVSPRAY_RDMA_DEAD_PATH
// sets how soon a dead path is noticed: with the default of 50 ms, an emulated processor that is busy looks like one.

var llama = connectortest.Shape{Layers: layers(), NumBlocks: 256, TokensPerBlock: 16, TokenBytes: 4096}

func layers() int {
	if n, err := strconv.Atoi(os.Getenv("KVSPRAY_RDMA_LAYERS")); err == nil && n > 0 && n < 32 {
		return n
	}
	return 32
}

// whole is the size of the list.
func whole() uint64 { return llamaTokens * llama.TokenBytes * uint64(llama.Layers) }

const (
	llamaTokens  = 4096
	rdmaRails    = 4
	rdmaDeadline = 120 * time.Second // an emulated processor moves 512 MiB in 5 to 20 s
)

func deadPath(t testing.TB) time.Duration {
	s := os.Getenv("KVSPRAY_RDMA_DEAD_PATH")
	if s == "" {
		return 500 * time.Millisecond
	}
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 {
		t.Fatalf("KVSPRAY_RDMA_DEAD_PATH=%q", s)
	}
	return d
}

// shell runs a command of the guest's.
func shell(t testing.TB, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
}

func needRails(t testing.TB, devices ...string) {
	t.Helper()
	for _, d := range devices {
		if _, err := os.Stat("/sys/class/infiniband/" + d); err != nil {
			testutil.Skip(t, "rdma", err.Error()+": make test-rdma runs this in a guest with soft-RoCE")
		}
	}
}

// startRDMA starts a node on these devices, with tcp behind them where it is to carry on.
func startRDMA(t testing.TB, cluster, listen string, devices []string, change func(*config.Config)) *running {
	return start(t, func(c *config.Config) {
		c.Peer.ClusterKeyFile = cluster
		c.Peer.Listen = listen
		c.Transports.Order = []string{config.TransGDR}
		c.Transports.GDR.Rails = devices
		c.Transports.GDR.QueuePairs = 1
		c.Transports.GDR.DeadPath = config.Duration(deadPath(t))
		c.Trace.BlockHashes = ""
		c.Transfer.Deadline = config.Duration(rdmaDeadline)
		c.Transfer.MaxAttempts = 64
		if change != nil {
			change(c)
		}
	})
}

func clusterKey(t testing.TB) string {
	t.Helper()
	c, err := keys.NewCluster()
	path := filepath.Join(t.TempDir(), "key")
	if err == nil {
		err = keys.WriteCluster(path, c)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// fill writes content that says what and where it is.
func fill(e *engine, table []uint32, seed uint64) {
	for l := range e.shape.Layers {
		for k, b := range table {
			page := e.shape.Page(e.region, l, b)
			for i := 0; i+8 <= len(page); i += 8 {
				binary.LittleEndian.PutUint64(page[i:], content(seed, l, k, i))
			}
		}
	}
}

func content(seed uint64, layer, block, at int) uint64 {
	x := seed<<48 ^ uint64(layer)<<40 ^ uint64(block)<<24 ^ uint64(at)
	x *= 0x9e3779b97f4a7c15
	return x ^ x>>31
}

// wrong counts the pages that differ from what fill wrote.
func wrong(e *engine, table []uint32, seed uint64) (pages int) {
	for l := range e.shape.Layers {
		for k, b := range table {
			page := e.shape.Page(e.region, l, b)
			for i := 0; i+8 <= len(page); i += 8 {
				if binary.LittleEndian.Uint64(page[i:]) != content(seed, l, k, i) {
					pages++
					break
				}
			}
		}
	}
	return pages
}

// stall follows the landed bytes of a node and keeps the longest time without any.
type stall struct {
	longest atomic.Int64 // ns
	stop    chan struct{}
	done    chan struct{}
}

func watchStall(d *running) *stall {
	s := &stall{stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		last, at := landedBytes(d), time.Now()
		for {
			select {
			case <-s.stop:
				return
			case now := <-tick.C:
				s.longest.Store(max(s.longest.Load(), int64(now.Sub(at))))
				if n := landedBytes(d); n != last {
					last, at = n, now
				}
			}
		}
	}()
	return s
}

func (s *stall) end() time.Duration {
	close(s.stop)
	<-s.done
	return time.Duration(s.longest.Load())
}

// lanesOn are the lanes of a node to others over one of its rails. Those to itself survive what happens between hosts.
func lanesOn(n *running, rail string) (ids []uint64) {
	n.d.bindMu.RLock()
	defer n.d.bindMu.RUnlock()
	for id, e := range n.d.lanes {
		if e.lane.Local() == rail && e.lane.Peer() != n.boot {
			ids = append(ids, id)
		}
	}
	return ids
}

// gone reports whether a node has lost all of these lanes.
func gone(n *running, ids []uint64) bool {
	n.d.bindMu.RLock()
	defer n.d.bindMu.RUnlock()
	return !slices.ContainsFunc(ids, func(id uint64) bool { return n.d.lanes[id] != nil })
}

// eventually is until with a longer patience, and how long it took.
func eventually(t testing.TB, what string, ok func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for tick := time.NewTicker(time.Millisecond); !ok(); <-tick.C {
		if time.Since(began) > rdmaDeadline {
			tick.Stop()
			t.Fatalf("not within %s: %s", rdmaDeadline, what)
		}
	}
	return time.Since(began)
}

type fault struct {
	name   string
	inject string
	heal   string
	quiet  bool // it ends by itself, before anybody must notice
	act    func(t testing.TB, p, d *running)
}

// up brings one end of a rail up again: its routes went with it.
func up(end string) string {
	i, side := end[1:2], end[2:]
	here, there := "1", "2"
	if side == "b" {
		here, there = "2", "1"
	}
	return fmt.Sprintf("ip link set %s up; ip route replace 10.9.%s.%s dev %s src 10.9.%s.%s table 10%s", end, i, there, end, i, here, i)
}

var faults = []fault{
	{name: "none"},
	{name: "requests dropped at the receiver", inject: "iptables -A INPUT -i r0b -p udp --dport 4791 -j DROP", heal: "iptables -F"},
	{name: "acknowledgements dropped", inject: "iptables -A INPUT -i r0a -p udp --dport 4791 -j DROP", heal: "iptables -F"},
	{name: "local link down", inject: "ip link set r0a down", heal: up("r0a")},
	{name: "peer's link down", inject: "ip link set r0b down", heal: up("r0b")},
	{name: "both ends of two rails down", inject: "ip link set r0a down; ip link set r1b down", heal: up("r0a") + ";" + up("r1b")},
	{name: "link flaps for 0.3 s", inject: "ip link set r0a down; sleep 0.3; " + up("r0a"), quiet: true},
	{name: "peer's queue pair in the error state", act: func(t testing.TB, _, d *running) {
		d.d.bindMu.RLock()
		defer d.d.bindMu.RUnlock()
		for _, e := range d.d.lanes {
			if e.lane.Local() == "r0b" {
				if err := e.lane.Close(); err != nil {
					t.Error(err)
				}
			}
		}
	}, quiet: true},
	{name: "5% of the packets lost", inject: "tc qdisc add dev r0a root netem loss 5%", heal: "tc qdisc del dev r0a root", quiet: true},
	{name: "link removed", inject: "ip link del r0a", heal: "ip link add r0a type veth peer name r0b && ip addr add 10.9.0.1/24 dev r0a && ip addr add 10.9.0.2/24 dev r0b" +
		" && ip link set r0a mtu 4500 up && ip link set r0b mtu 4500 up && ip route replace 10.9.0.2 dev r0a src 10.9.0.1 table 100" +
		" && ip route replace 10.9.0.1 dev r0b src 10.9.0.2 table 100 && rdma link add r0a type rxe netdev r0a && rdma link add r0b type rxe netdev r0b"},
}

// TestRDMAFaults moves the list over four rails and breaks one in mid transfer: no transfer fails, the content is right, and
// the rail comes back.
func TestRDMAFaults(t *testing.T) {
	var a, b []string
	for i := range rdmaRails {
		a, b = append(a, fmt.Sprintf("r%da", i)), append(b, fmt.Sprintf("r%db", i))
	}
	needRails(t, append(a, b...)...)
	key := clusterKey(t)
	p, d := startRDMA(t, key, "127.0.0.1:0", a, nil), startRDMA(t, key, "127.0.0.1:0", b, nil)
	pe, de := newEngine(t, p, llama), newEngine(t, d, llama)
	rng := newRand(7)
	var table_ strings.Builder
	for i, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			seed := uint64(i + 1)
			pt, dt := table(rng, llama.NumBlocks, int(llama.NumBlocks)), table(rng, llama.NumBlocks, int(llama.NumBlocks))
			fill(pe, pt, seed)
			x := newPrompt(llamaTokens)
			before := landedBytes(d)
			began := time.Now()
			src, err := pe.Intent(msg.Intent{Xfer: x.xfer, Hash: x.hash, Tokens: llamaTokens, Fanout: 1, Blocks: [][]uint32{pt}, Ready: llamaTokens,
				DeadlineMS: uint64(rdmaDeadline.Milliseconds())})
			if err != nil {
				t.Fatal(err)
			}
			dst, err := de.Expect(msg.Expect{Xfer: x.xfer, Hash: x.hash, Tokens: llamaTokens, Peer: p.Endpoint(), Skip: []uint32{0}, Blocks: [][]uint32{dt},
				DeadlineMS: uint64(rdmaDeadline.Milliseconds()), PartnerMS: 20000})
			if err != nil {
				t.Fatal(err)
			}
			var there []uint64 // what is opened later belongs to the healing
			eventually(t, "a quarter landed, and the rail has a lane", func() bool {
				there = lanesOn(p, "r0a")
				return landedBytes(d)-before > whole()/4 && len(there) > 0
			})
			s := watchStall(d)
			lost := make(chan time.Time, 1)
			over := make(chan struct{})
			go func() {
				defer close(lost)
				tick := time.NewTicker(time.Millisecond)
				defer tick.Stop()
				for !gone(p, there) {
					select {
					case <-over:
						return
					case <-tick.C:
					}
				}
				lost <- time.Now()
			}()
			injected := time.Now()
			if f.inject != "" {
				shell(t, f.inject)
			}
			if f.act != nil {
				f.act(t, p, d)
			}
			command := time.Since(injected) // it takes effect before it returns
			dc, pc := de.waitFor(dst, 2*rdmaDeadline), pe.waitFor(src, 2*rdmaDeadline)
			took, longest := time.Since(began), s.end()
			close(over)
			at, noticed := <-lost
			gone := "not before the list was through"
			switch {
			case f.inject == "" && f.act == nil || f.quiet:
				gone = ""
			case noticed:
				gone = fmt.Sprintf("%d ms", at.Sub(injected).Milliseconds())
			}
			if dc.Status != 0 || pc.Status != 0 {
				t.Errorf("failed: receiver %d %+v, sender %d %+v", dc.Status, dc.Received, pc.Status, pc.Sent)
			} else if n := wrong(de, dt, seed); n > 0 {
				t.Errorf("%d pages are wrong", n)
			}
			if f.heal != "" {
				shell(t, f.heal)
			}
			back := eventually(t, "every rail has lanes at both ends", func() bool {
				for i := range rdmaRails {
					if len(lanesOn(p, a[i])) == 0 || len(lanesOn(d, b[i])) == 0 {
						return false
					}
				}
				return true
			})
			fmt.Fprintf(&table_, "| %s | %.1f s | %s | %d ms | %d ms | %d ms |\n", f.name, took.Seconds(), gone, command.Milliseconds(), longest.Milliseconds(), back.Milliseconds())
		})
	}
	fmt.Printf("dead_path %s\n| fault | %d MiB took | its lanes gone after | the command took | longest stall | lanes back after healing |\n|---|---|---|---|---|---|\n%s",
		deadPath(t), whole()>>20, table_.String())
}

// twoFaults are what the sender's host does to itself while a list moves to the other one.
var twoFaults = []fault{
	{name: "none"},
	{name: "requests dropped", inject: "iptables -A INPUT -i eth0 -p udp --dport 4791 -j DROP", heal: "iptables -F"},
	{name: "link down", inject: "ip link set eth1 down", heal: "ip link set eth1 up"},
}

// sentBytes is what the cards of this host have sent.
func sentBytes(t testing.TB, cards int) (sum uint64) {
	t.Helper()
	for i := range cards {
		b, err := os.ReadFile(fmt.Sprintf("/sys/class/net/eth%d/statistics/tx_bytes", i))
		var n uint64
		if err == nil {
			n, err = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
		}
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	return sum
}

// TestRDMATwoHosts is one of two sidecars on two hosts, of which host 1 prefills and host 2 decodes. What host 2 must find follows
// from the number of the round.
func TestRDMATwoHosts(t *testing.T) {
	node, share := os.Getenv("KVSPRAY_RDMA_NODE"), os.Getenv("KVSPRAY_RDMA_SHARE")
	if node == "" {
		testutil.Skip(t, "rdma-two", "this is one of two hosts: make test-rdma-two runs both")
	}
	var devices []string
	for i := 0; ; i++ {
		if _, err := os.Stat(fmt.Sprintf("/sys/class/infiniband/r%d", i)); err != nil {
			break
		}
		devices = append(devices, fmt.Sprintf("r%d", i))
	}
	needRails(t, "r0", "r1")
	path := filepath.Join(share, "key")
	if node == "1" {
		b, err := os.ReadFile(clusterKey(t))
		if err == nil {
			err = os.WriteFile(path+".new", b, 0o600)
		}
		if err == nil {
			err = os.Rename(path+".new", path)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the other host has made a key", func() bool { _, err := os.Stat(path); return err == nil })
	b, err := os.ReadFile(path)
	key := filepath.Join(t.TempDir(), "key")
	if err == nil {
		err = os.WriteFile(key, b, 0o600) // a file that only its owner reads
	}
	if err != nil {
		t.Fatal(err)
	}
	const port = "7650"
	n := startRDMA(t, key, "10.9.0."+node+":"+port, devices, nil)
	e := newEngine(t, n, llama)
	for i, f := range twoFaults {
		seed := uint64(i + 1)
		x := prompt{tokens: llamaTokens}
		x.xfer[0], x.hash[0] = byte(seed), byte(seed)
		tb := table(newRand(seed), llama.NumBlocks, int(llama.NumBlocks))
		began := time.Now()
		if node == "1" {
			fill(e, tb, seed)
			lease, err := e.Intent(msg.Intent{Xfer: x.xfer, Hash: x.hash, Tokens: llamaTokens, Fanout: 1, Blocks: [][]uint32{tb}, Ready: llamaTokens,
				DeadlineMS: uint64(rdmaDeadline.Milliseconds())})
			if err != nil {
				t.Fatal(err)
			}
			if f.inject != "" {
				before := sentBytes(t, len(devices))
				eventually(t, "a quarter was sent", func() bool { return sentBytes(t, len(devices))-before > whole()/4 })
				shell(t, f.inject)
			}
			if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
				t.Errorf("%s: sender: %d %+v", f.name, c.Status, c.Sent)
			}
			if f.heal != "" {
				shell(t, f.heal)
			}
			continue
		}
		lease, err := e.Expect(msg.Expect{Xfer: x.xfer, Hash: x.hash, Tokens: llamaTokens, Peer: "10.9.0.1:" + port, Skip: []uint32{0}, Blocks: [][]uint32{tb},
			DeadlineMS: uint64(rdmaDeadline.Milliseconds()), PartnerMS: uint64(rdmaDeadline.Milliseconds())})
		if err != nil {
			t.Fatal(err)
		}
		if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
			t.Errorf("%s: receiver: %d %+v", f.name, c.Status, c.Received)
		} else if k := wrong(e, tb, seed); k > 0 {
			t.Errorf("%s: %d pages are wrong", f.name, k)
		}
		t.Logf("%s: %d MiB in %.1f s", f.name, whole()>>20, time.Since(began).Seconds())
	}
}
