package sidecar

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	kvexec "github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/gdr"
)

// The tests of this file run in the guests of test/rdma: real verbs over soft-RoCE, four rails.
// They move what a Llama-8B leaves for 4,096 tokens: 32 layers, 512 MiB. KVSPRAY_RDMA_LAYERS makes
// it fewer where the processor is shared. KVSPRAY_RDMA_DEAD_PATH sets how soon a dead path is
// noticed, KVSPRAY_RDMA_QUEUE_PAIRS how many queue pairs each pair of rails has; without them, what
// a sidecar has by default where the guest is quick enough for that, else 500 ms and 1: to 50 ms an
// emulated processor that is busy looks like a dead path.

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

// stoodStill is the longest time for which a processor of this guest did nothing while all of them
// were busy.
var stoodStill = sync.OnceValue(func() time.Duration {
	const look = 500 * time.Millisecond
	gaps := make([]time.Duration, runtime.NumCPU())
	var all sync.WaitGroup
	for i := range gaps {
		all.Go(func() {
			for began, last := time.Now(), time.Now(); last.Sub(began) < look; {
				now := time.Now()
				gaps[i] = max(gaps[i], now.Sub(last))
				last = now
			}
		})
	}
	all.Wait()
	return slices.Max(gaps)
})

// quick reports whether the guest bears a sidecar's defaults: a processor for each rail, none of
// which stands still for as long as the device's timers wait at least.
func quick() bool {
	least, _ := gdr.Timers(time.Duration(config.Default().Transports.GDR.DeadPath))
	return runtime.NumCPU() >= rdmaRails && stoodStill() < least
}

func queuePairs(t testing.TB) int {
	s := os.Getenv("KVSPRAY_RDMA_QUEUE_PAIRS")
	if s == "" {
		if quick() {
			return config.Default().Transports.GDR.QueuePairs
		}
		return 1
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("KVSPRAY_RDMA_QUEUE_PAIRS=%q", s)
	}
	return n
}

// underWhat says what a table was made with.
func underWhat(t testing.TB) string {
	least, most := gdr.Timers(deadPath(t))
	return fmt.Sprintf("dead_path %s, of which the device's timers take %s to %s; queue_pairs %d; a busy processor stood still for %s", deadPath(t),
		least.Round(100*time.Microsecond), most.Round(100*time.Microsecond), queuePairs(t), stoodStill().Round(100*time.Microsecond))
}

// noticedBy says how a device finds a fault out, and how long that takes it by itself.
func (f *fault) noticedBy(t testing.TB) string {
	if f.by != "" || f.inject == "" && f.act == nil {
		return f.by
	}
	least, most := gdr.Timers(deadPath(t))
	return fmt.Sprintf("its timers: %d to %d ms", least.Milliseconds(), most.Milliseconds())
}

func deadPath(t testing.TB) time.Duration {
	s := os.Getenv("KVSPRAY_RDMA_DEAD_PATH")
	if s == "" {
		if quick() {
			return time.Duration(config.Default().Transports.GDR.DeadPath)
		}
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
	return start(t, overRDMA(t, cluster, listen, devices, change))
}

func overRDMA(t testing.TB, cluster, listen string, devices []string, change func(*config.Config)) func(*config.Config) {
	return func(c *config.Config) {
		c.Peer.ClusterKeyFile = cluster
		c.Peer.Listen = listen
		c.Transports.Order = []string{config.TransGDR}
		c.Transports.GDR.Rails = devices
		c.Transports.GDR.QueuePairs = queuePairs(t)
		c.Transports.GDR.DeadPath = config.Duration(deadPath(t))
		c.Trace.BlockHashes = ""
		c.Transfer.Deadline = config.Duration(rdmaDeadline)
		c.Transfer.MaxAttempts = 64
		if change != nil {
			change(c)
		}
	}
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

// lanesOn are the lanes of a node to others over one of its rails. Those to itself survive what
// happens between hosts.
func lanesOn(n *running, rail string) (ids []uint64) {
	for _, l := range lanesOf(n.Node, func(l transport.Lane) bool { return l.Local() == rail && l.Peer() != n.boot }) {
		ids = append(ids, l.ID())
	}
	return ids
}

// gone reports whether a node has lost all of these lanes.
func gone(n *running, ids []uint64) bool {
	return !slices.ContainsFunc(ids, func(id uint64) bool { _, up := n.driver.Down(id); return up })
}

// whenGone tells when a node has lost all of these lanes, or closes without a word once it is over.
func whenGone(n *running, ids []uint64, over <-chan struct{}) <-chan time.Time {
	lost := make(chan time.Time, 1)
	go func() {
		defer close(lost)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for !gone(n, ids) {
			select {
			case <-over:
				return
			case <-tick.C:
			}
		}
		lost <- time.Now()
	}()
	return lost
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
	quiet  bool   // it ends by itself, before anybody must notice
	by     string // what tells the device; empty: its timers
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

// What tells a device of a fault before its timers do. Both ends of a rail of one guest go down
// together.
const (
	byPort    = "its port's event"
	byAnswer  = "the peer's refusal"
	byNothing = "nothing: packets are sent again"
)

var faults = []fault{
	{name: "none"},
	{name: "requests dropped at the receiver", inject: "iptables -A INPUT -i r0b -p udp --dport 4791 -j DROP", heal: "iptables -F"},
	{name: "acknowledgements dropped", inject: "iptables -A INPUT -i r0a -p udp --dport 4791 -j DROP", heal: "iptables -F"},
	{name: "local link down", inject: "ip link set r0a down", heal: up("r0a"), by: byPort},
	{name: "peer's link down", inject: "ip link set r0b down", heal: up("r0b"), by: byPort},
	{name: "both ends of two rails down", inject: "ip link set r0a down; ip link set r1b down", heal: up("r0a") + ";" + up("r1b"), by: byPort},
	{name: "link flaps for 0.3 s", inject: "ip link set r0a down; sleep 0.3; " + up("r0a"), quiet: true, by: byPort},
	{name: "peer's queue pair in the error state", act: func(t testing.TB, _, d *running) {
		for _, l := range lanesOf(d.Node, func(l transport.Lane) bool { return l.Local() == "r0b" }) {
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		}
	}, quiet: true},
	{name: "peer's memory region deregistered", act: func(t testing.TB, _, d *running) { endKeys(t, d, "r0b") }, by: byAnswer},
	{name: "5% of the packets lost", inject: "tc qdisc add dev r0a root netem loss 5%", heal: "tc qdisc del dev r0a root", quiet: true, by: byNothing},
	{name: "link removed", inject: "ip link del r0a", by: byPort, heal: "ip link add r0a type veth peer name r0b && ip addr add 10.9.0.1/24 dev r0a && ip addr add 10.9.0.2/24 dev r0b" +
		" && ip link set r0a mtu 4500 up && ip link set r0b mtu 4500 up && ip route replace 10.9.0.2 dev r0a src 10.9.0.1 table 100" +
		" && ip route replace 10.9.0.1 dev r0b src 10.9.0.2 table 100 && rdma link add r0a type rxe netdev r0a && rdma link add r0b type rxe netdev r0b"},
}

// TestRDMAFaults moves the list over four rails and breaks one in mid transfer: no transfer fails,
// the content is right, and the rail comes back.
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
			over := make(chan struct{})
			lost := whenGone(p, there, over)
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
			fmt.Fprintf(&table_, "| %s | %.1f s | %s | %s | %d ms | %d ms | %d ms |\n", f.name, took.Seconds(), gone, f.noticedBy(t), command.Milliseconds(), longest.Milliseconds(), back.Milliseconds())
		})
	}
	fmt.Printf("%s\n| fault | %d MiB took | its lanes gone after | the device finds out by | the command took | longest stall | lanes back after healing |\n|---|---|---|---|---|---|---|\n%s",
		underWhat(t), whole()>>20, table_.String())
}

// hostFault is what one of two hosts does to itself while a list moves from host 1 to host 2.
type hostFault struct {
	fault
	at   string // the host: 1 or 2
	rail string // that is broken
}

// twoFaults: the sender has no packets of its own dropped as they leave, which tells its device
// nothing.
var twoFaults = []hostFault{
	{fault: fault{name: "none"}},
	{fault{name: "requests dropped at the receiver", inject: "iptables -A INPUT -i eth0 -p udp --dport 4791 -j DROP", heal: "iptables -F"}, "2", "r0"},
	{fault{name: "acknowledgements dropped", inject: "iptables -A INPUT -i eth0 -p udp --dport 4791 -j DROP", heal: "iptables -F"}, "1", "r0"},
	{fault{name: "local link down", inject: "ip link set eth1 down", heal: "ip link set eth1 up", by: byPort}, "1", "r1"},
	{fault{name: "peer's link down", inject: "ip link set eth1 down", heal: "ip link set eth1 up"}, "2", "r1"},
	{fault{name: "link flaps for 0.3 s", inject: "ip link set eth1 down; sleep 0.3; ip link set eth1 up", quiet: true, by: byPort}, "1", "r1"},
	{fault{name: "peer's queue pairs in the error state", act: func(t testing.TB, _, d *running) {
		for _, l := range lanesOf(d.Node, func(l transport.Lane) bool { return l.Local() == "r1" && l.Peer() != d.boot }) {
			ok(t, l.Close())
		}
	}}, "2", "r1"},
	{fault{name: "peer's memory region deregistered", act: func(t testing.TB, _, d *running) { endKeys(t, d, "r1") }, by: byAnswer}, "2", "r1"},
	{fault{name: "5% of the packets lost", inject: "tc qdisc add dev eth0 root netem loss 5%", heal: "tc qdisc del dev eth0 root", quiet: true, by: byNothing}, "1", "r0"},
	{fault{name: "card pulled out", by: byPort, inject: "echo 1 > $(readlink -f /sys/class/net/eth1/device/..)/remove",
		heal: "echo 1 > /sys/bus/pci/rescan; until [ -e /sys/class/net/eth1 ]; do sleep 0.1; done; " +
			"ip addr add 10.9.1.1/24 dev eth1 && ip link set eth1 mtu 4500 up && rdma link add r1 type rxe netdev eth1"}, "1", "r1"},
}

// sentBytes is what the cards of this host have sent, receivedBytes what they have received.
func sentBytes(t testing.TB, cards int) uint64 { return cardBytes(t, cards, "tx") }

func receivedBytes(t testing.TB, cards int) uint64 { return cardBytes(t, cards, "rx") }

func cardBytes(t testing.TB, cards int, way string) (sum uint64) {
	t.Helper()
	for i := range cards {
		b, err := os.ReadFile(fmt.Sprintf("/sys/class/net/eth%d/statistics/%s_bytes", i, way))
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

// rdmaHost is one of two hosts, each of which runs the same test.
type rdmaHost struct {
	t       *testing.T
	node    string // 1 or 2
	devices []string
	key     string
	share   string // a folder that both see
}

const rdmaPort = "7650"

func twoHosts(t *testing.T) *rdmaHost {
	t.Helper()
	h := &rdmaHost{t: t, node: os.Getenv("KVSPRAY_RDMA_NODE"), share: os.Getenv("KVSPRAY_RDMA_SHARE")}
	if h.node == "" {
		testutil.Skip(t, "rdma-two", "this is one of two hosts: make test-rdma-two runs both")
	}
	for i := 0; ; i++ {
		if _, err := os.Stat(fmt.Sprintf("/sys/class/infiniband/r%d", i)); err != nil {
			break
		}
		h.devices = append(h.devices, fmt.Sprintf("r%d", i))
	}
	needRails(t, "r0", "r1")
	if h.node == "1" {
		b, err := os.ReadFile(clusterKey(t))
		ok(t, err)
		h.say("key", b)
	}
	h.key = filepath.Join(t.TempDir(), "key")
	ok(t, os.WriteFile(h.key, h.hear("key"), 0o600)) // a file that only its owner reads
	return h
}

// say tells the other host something, once in a test, and hear waits for it.
func (h *rdmaHost) say(what string, b []byte) {
	h.t.Helper()
	path := h.path(what)
	ok(h.t, os.WriteFile(path+".new", b, 0o600))
	ok(h.t, os.Rename(path+".new", path))
}

func (h *rdmaHost) hear(what string) (b []byte) {
	h.t.Helper()
	eventually(h.t, "the other host says "+what, func() bool {
		var err error
		b, err = os.ReadFile(h.path(what))
		return err == nil
	})
	return b
}

// meet waits until the sidecars of both hosts are there: a decode does not wait long for a
// prefill's where nobody listens.
func (h *rdmaHost) meet() {
	h.t.Helper()
	h.say("ready-"+h.node, nil)
	h.hear("ready-1")
	h.hear("ready-2")
}

func (h *rdmaHost) path(what string) string {
	return filepath.Join(h.share, strings.NewReplacer("/", "-", " ", "-").Replace(h.t.Name()+"-"+what))
}

func (h *rdmaHost) listen() string { return "10.9.0." + h.node + ":" + rdmaPort }

func (h *rdmaHost) start() *running { return startRDMA(h.t, h.key, h.listen(), h.devices, nil) }

// process starts the sidecar of this host as a process of its own.
func (h *rdmaHost) process() *process {
	h.t.Helper()
	cfg := testConfig(h.t, overRDMA(h.t, h.key, h.listen(), h.devices, nil))
	_, cfg.HTTP.Listen = freePorts(h.t)
	var b bytes.Buffer
	ok(h.t, cfg.WriteYAML(&b))
	p := &process{t: h.t, path: cfg.Engine.Socket + ".yaml", socket: cfg.Engine.Socket, endpoint: cfg.Peer.Listen, http: cfg.HTTP.Listen}
	ok(h.t, os.WriteFile(p.path, b.Bytes(), 0o600))
	h.t.Cleanup(func() {
		p.kill()
		if log, err := os.ReadFile(p.path + ".log"); err == nil && h.t.Failed() {
			h.t.Logf("the child said:\n%s", log[max(0, len(log)-4096):])
		}
	})
	p.start()
	return p
}

// numbered is a prompt and its blocks, as both hosts make them from its number.
func numbered(seed uint64) (prompt, []uint32) {
	x := prompt{tokens: llamaTokens}
	x.xfer[0], x.hash[0] = byte(seed), byte(seed)
	return x, table(newRand(seed), llama.NumBlocks, int(llama.NumBlocks))
}

func rdmaIntent(x prompt, blocks []uint32) msg.Intent {
	return msg.Intent{Xfer: x.xfer, Hash: x.hash, Tokens: llamaTokens, Fanout: 1, Blocks: [][]uint32{blocks}, Ready: llamaTokens,
		DeadlineMS: uint64(rdmaDeadline.Milliseconds())}
}

func rdmaExpect(x prompt, blocks []uint32) msg.Expect {
	return msg.Expect{Xfer: x.xfer, Hash: x.hash, Tokens: llamaTokens, Peer: "10.9.0.1:" + rdmaPort, Skip: []uint32{0}, Blocks: [][]uint32{blocks},
		DeadlineMS: uint64(rdmaDeadline.Milliseconds()), PartnerMS: uint64(rdmaDeadline.Milliseconds())}
}

// TestRDMATwoHosts is one of two sidecars on two hosts, of which host 1 prefills and host 2
// decodes. What host 2 must find follows from the number of the round. Times are host 1's: where
// host 2 breaks something, from the moment at which it is told to.
func TestRDMATwoHosts(t *testing.T) {
	h := twoHosts(t)
	n := h.start()
	e := newEngine(t, n, llama)
	h.meet()
	var report strings.Builder
	for i, f := range twoFaults {
		seed := uint64(i + 1)
		x, tb := numbered(seed)
		round := fmt.Sprintf("%d-", i)
		// strike is done where the fault is, and tells how long the command took.
		strike := func() {
			began := time.Now()
			if f.inject != "" {
				shell(t, f.inject)
			}
			if f.act != nil {
				f.act(t, nil, n)
			}
			h.say(round+"struck", []byte(strconv.FormatInt(time.Since(began).Milliseconds(), 10)))
		}
		if h.node == "2" {
			began := time.Now()
			lease, err := e.Expect(rdmaExpect(x, tb))
			ok(t, err)
			if f.at == "2" {
				h.hear(round + "strike")
				strike()
			}
			if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
				t.Errorf("%s: receiver: %d %+v", f.name, c.Status, c.Received)
			} else if k := wrong(e, tb, seed); k > 0 {
				t.Errorf("%s: %d pages are wrong", f.name, k)
			}
			t.Logf("%s: %d MiB in %.1f s", f.name, whole()>>20, time.Since(began).Seconds())
			if f.at == "2" && f.heal != "" {
				h.hear(round + "heal")
				shell(t, f.heal)
				h.say(round+"healed", nil)
			}
			continue
		}
		fill(e, tb, seed)
		began := time.Now()
		lease, err := e.Intent(rdmaIntent(x, tb))
		ok(t, err)
		if f.at == "" {
			if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
				t.Errorf("%s: sender: %d %+v", f.name, c.Status, c.Sent)
			}
			fmt.Fprintf(&report, "| %s | %.1f s | | | | |\n", f.name, time.Since(began).Seconds())
			continue
		}
		before := sentBytes(t, len(h.devices))
		var there []uint64
		eventually(t, "a quarter was sent, and the rail has a lane", func() bool {
			there = lanesOn(n, f.rail)
			return sentBytes(t, len(h.devices))-before > whole()/4 && len(there) > 0
		})
		over := make(chan struct{})
		lost := whenGone(n, there, over)
		injected := time.Now()
		if f.at == "1" {
			strike()
		} else {
			h.say(round+"strike", nil)
		}
		c := e.waitFor(lease, 2*rdmaDeadline)
		took := time.Since(began)
		close(over)
		if c.Status != 0 {
			t.Errorf("%s: sender: %d %+v", f.name, c.Status, c.Sent)
		}
		command := h.hear(round + "struck")
		gone := "not before the list was through"
		switch at, noticed := <-lost; {
		case noticed:
			gone = fmt.Sprintf("%d ms", at.Sub(injected).Milliseconds())
		case f.quiet:
			gone = "no lane was lost"
		}
		healed := time.Now()
		if f.heal != "" && f.at == "1" {
			shell(t, f.heal)
			healed = time.Now()
		} else if f.heal != "" {
			h.say(round+"heal", nil)
			h.hear(round + "healed")
		}
		eventually(t, "the rail has lanes", func() bool { return len(lanesOn(n, f.rail)) > 0 })
		fmt.Fprintf(&report, "| %s | %.1f s | %s | %s | %s ms | %d ms |\n", f.name, took.Seconds(), gone, f.noticedBy(t), command, time.Since(healed).Milliseconds())
	}
	if h.node == "2" {
		h.hear("through") // host 1 waits for lanes after the last round
		return
	}
	h.say("through", nil)
	fmt.Printf("%s\n| fault | %d MiB took | its lanes gone after | the device finds out by | the command took | lanes back after healing |\n|---|---|---|---|---|---|\n%s", underWhat(t), whole()>>20, report.String())
}

// TestRDMAHostLost: the host of a decode is gone in mid transfer, without a word to anybody. Its
// peer's lanes end by their devices' timers, and what the prefill holds for it is released.
func TestRDMAHostLost(t *testing.T) {
	h := twoHosts(t)
	n := h.start()
	e := newEngine(t, n, llama)
	x, blocks := numbered(1)
	if h.node == "2" {
		h.meet()
		before := receivedBytes(t, len(h.devices))
		_, err := e.Expect(rdmaExpect(x, blocks))
		ok(t, err)
		eventually(t, "a quarter has come", func() bool { return receivedBytes(t, len(h.devices))-before > whole()/4 })
		h.say("killed", nil)
		// All that this host could say is said; vm.sh takes it from the console.
		console, err := os.OpenFile("/dev/console", os.O_WRONLY, 0)
		ok(t, err)
		_, err = console.WriteString("\nGUEST-EXIT:0\n")
		ok(t, err)
		ok(t, unix.IoctlSetInt(int(console.Fd()), unix.TCSBRK, 1)) // until it is through the wire
		// at once, as where the power fails
		ok(t, os.WriteFile("/proc/sysrq-trigger", []byte("b"), 0))
		select {}
	}
	fill(e, blocks, 1)
	lease, err := e.Intent(rdmaIntent(x, blocks))
	ok(t, err)
	h.meet()
	h.lanes(n)
	h.hear("killed") // before that, lanes come and go where the processor is shared
	eventually(t, "no lane to the dead host is left", func() bool {
		return !slices.ContainsFunc(h.devices, func(d string) bool { return len(lanesOn(n, d)) > 0 })
	})
	h.say("gone", nil)
	c := e.waitFor(lease, 2*rdmaDeadline)
	if c.Status != kvexec.StatusFailed {
		t.Errorf("the lease for a host that is gone: status %d, %+v", c.Status, c.Sent)
	}
	h.say("released", nil)
	nothingOpen(t, n)
	fmt.Printf("dead_path %s: the decode's host is gone: lanes gone after %d ms, its lease released after %d ms: %s\n", deadPath(t),
		h.said("gone").Sub(h.said("killed")).Milliseconds(), h.said("released").Sub(h.said("killed")).Milliseconds(), c.Sent.Reason)
}

// said is when something was, by the one clock that both hosts have: that of the folder.
func (h *rdmaHost) said(what string) time.Time {
	h.t.Helper()
	info, err := os.Stat(h.path(what))
	ok(h.t, err)
	return info.ModTime()
}

// TestRDMAKilled: kill -9 of a sidecar in mid transfer, its host goes on. The other one notices,
// releases what it held for the dead one, and serves the next one.
func TestRDMAKilled(t *testing.T) {
	t.Run("prefill", func(t *testing.T) { prefillKilled(t, twoHosts(t)) })
	t.Run("decode", func(t *testing.T) { decodeKilled(t, twoHosts(t)) })
}

// Nobody listens where the dead prefill was: once what it could write is fenced, the decode's
// blocks are the engine's again, who computes them itself. The next prefill's are fetched into the
// same ones.
func prefillKilled(t *testing.T, h *rdmaHost) {
	x, blocks := numbered(1)
	y, _ := numbered(2)
	if h.node == "1" {
		p := h.process()
		e := newEngine(t, p.asRunning(), llama)
		fill(e, blocks, 1)
		_, err := e.Intent(rdmaIntent(x, blocks))
		ok(t, err)
		h.meet()
		before := sentBytes(t, len(h.devices))
		eventually(t, "a quarter was sent", func() bool { return sentBytes(t, len(h.devices))-before > whole()/4 })
		h.say("killed", nil)
		p.kill()
		_ = e.Close() // of its board and memory; the socket is gone
		h.hear("released")
		p.start()
		e = newEngine(t, p.asRunning(), llama)
		fill(e, blocks, 2)
		lease, err := e.Intent(rdmaIntent(y, blocks))
		ok(t, err)
		h.say("again", nil)
		if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
			t.Errorf("sender: %d %+v", c.Status, c.Sent)
		}
		h.hear("through")
		return
	}
	n := h.start()
	e := newEngine(t, n, llama)
	h.meet()
	lease, err := e.Expect(rdmaExpect(x, blocks))
	ok(t, err)
	there := h.lanes(n)
	h.hear("killed")
	landed := landedBytes(n)
	if landed == 0 || landed >= whole() {
		t.Fatalf("%d of %d bytes had landed: this is not in mid transfer", landed, whole())
	}
	noticed := eventually(t, "no lane to the dead one is left", func() bool { return gone(n, there) })
	began := time.Now()
	c := e.waitFor(lease, 2*rdmaDeadline)
	if all := [][2]uint32{{0, llamaTokens}}; c.Status != kvexec.StatusExpired || !slices.Equal(c.Received.Recompute, all) {
		t.Errorf("the lease of a prefill that is dead: status %d, %+v", c.Status, c.Received)
	}
	released := noticed + time.Since(began)
	if k := value(t, n, "kvspray_lease_fences_total", "cause", "peer_lost"); k != 1 {
		t.Errorf("%v fences because of a lost peer: want 1", k)
	}
	nothingOpen(t, n)
	h.say("released", nil)
	h.hear("again")
	began = time.Now()
	lease, err = e.Expect(rdmaExpect(y, blocks))
	ok(t, err)
	if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
		t.Errorf("receiver: %d %+v", c.Status, c.Received)
	} else if k := wrong(e, blocks, 2); k > 0 {
		t.Errorf("%d pages are wrong", k)
	}
	t.Logf("prefill killed with %d of %d MiB there: lanes gone after %d ms, fenced and released after %d ms, the next one's fetched in %.1f s", landed>>20, whole()>>20,
		noticed.Milliseconds(), released.Milliseconds(), time.Since(began).Seconds())
	nothingOpen(t, n)
	h.say("through", nil)
}

// The engine of the dead decode has died with it: nobody presents its lease again. The prefill's
// blocks are released, and the next decode is served.
func decodeKilled(t *testing.T, h *rdmaHost) {
	x, blocks := numbered(1)
	y, next := numbered(2)
	if h.node == "2" {
		d := h.process()
		e := newEngine(t, d.asRunning(), llama)
		h.meet()
		before := receivedBytes(t, len(h.devices))
		_, err := e.Expect(rdmaExpect(x, blocks))
		ok(t, err)
		eventually(t, "a quarter has come", func() bool { return receivedBytes(t, len(h.devices))-before > whole()/4 })
		h.say("killed", nil)
		d.kill()
		_ = e.Close() // of its board and memory; the socket is gone
		h.hear("released")
		d.start()
		e = newEngine(t, d.asRunning(), llama)
		lease, err := e.Expect(rdmaExpect(y, next))
		ok(t, err)
		h.say("again", nil)
		if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
			t.Errorf("receiver: %d %+v", c.Status, c.Received)
		} else if k := wrong(e, next, 2); k > 0 {
			t.Errorf("%d pages are wrong", k)
		}
		h.say("through", nil)
		return
	}
	n := h.start()
	e := newEngine(t, n, llama)
	fill(e, blocks, 1)
	lease, err := e.Intent(rdmaIntent(x, blocks))
	ok(t, err)
	h.meet()
	there := h.lanes(n)
	h.hear("killed")
	noticed := eventually(t, "no lane to the dead one is left", func() bool { return gone(n, there) })
	began := time.Now()
	c := e.waitFor(lease, 2*rdmaDeadline)
	if c.Status != kvexec.StatusFailed || !strings.Contains(c.Sent.Reason, "presented the lease again") {
		t.Errorf("the lease of a receiver that did not come again: status %d, %+v", c.Status, c.Sent)
	}
	released := noticed + time.Since(began)
	nothingOpen(t, n)
	h.say("released", nil)
	fill(e, next, 2)
	lease, err = e.Intent(rdmaIntent(y, next))
	ok(t, err)
	h.hear("again")
	began = time.Now()
	if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
		t.Errorf("sender: %d %+v", c.Status, c.Sent)
	}
	t.Logf("decode killed: lanes gone after %d ms, its lease released after %d ms (partner %s), the next one served in %.1f s", noticed.Milliseconds(), released.Milliseconds(),
		n.cfg.Transfer.Partner, time.Since(began).Seconds())
	h.hear("through")
}

// lanes waits until every rail has one, and returns all of them.
func (h *rdmaHost) lanes(n *running) (ids []uint64) {
	h.t.Helper()
	eventually(h.t, "every rail has lanes", func() bool {
		ids = nil
		for _, d := range h.devices {
			on := lanesOn(n, d)
			if len(on) == 0 {
				return false
			}
			ids = append(ids, on...)
		}
		return true
	})
	return ids
}

// nothingOpen waits until the node holds no lease.
func nothingOpen(t testing.TB, n *running) {
	t.Helper()
	eventually(t, "no lease is open", func() bool {
		open := 0
		n.driver.View(func(ex *kvexec.Exec, _ kvexec.Instant) { open, _ = ex.Open() })
		return open == 0
	})
}
