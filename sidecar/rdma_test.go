package sidecar

import (
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

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
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

var llama = connectortest.Shape{Layers: layers(), NumBlocks: 256, TokensPerBlock: 16,
	TokenBytes: 4096}

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
	low, _ := gdr.Timers(time.Duration(config.Default().Transports.GDR.DeadAfter))
	return runtime.NumCPU() >= rdmaRails && stoodStill() < low
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

// conditions are those under which a table was made.
func conditions(t testing.TB) string {
	low, high := gdr.Timers(deadPath(t))
	return fmt.Sprintf("dead_after %s, of which the device's timers take %s to %s; queue_pairs %d; a "+
		"busy processor stood still for %s", deadPath(t),
		low.Round(100*time.Microsecond), high.Round(100*time.Microsecond), queuePairs(t),
		stoodStill().Round(100*time.Microsecond))
}

// noticedBy is how a device finds out a fault, and how long that takes it by itself.
func (f *fault) noticedBy(t testing.TB) string {
	if f.by != "" || f.inject == "" && f.act == nil {
		return f.by
	}
	low, high := gdr.Timers(deadPath(t))
	return fmt.Sprintf("its timers: %d to %d ms", low.Milliseconds(), high.Milliseconds())
}

func deadPath(t testing.TB) time.Duration {
	s := os.Getenv("KVSPRAY_RDMA_DEAD_PATH")
	if s == "" {
		if quick() {
			return time.Duration(config.Default().Transports.GDR.DeadAfter)
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
func startRDMA(t testing.TB, cluster, listen string, devices []string,
	change func(*config.Config)) *running {
	return start(t, overRDMA(t, cluster, listen, devices, change))
}

func overRDMA(t testing.TB, cluster, listen string, devices []string,
	change func(*config.Config)) func(*config.Config) {
	return func(c *config.Config) {
		c.Peer.ClusterKeyFile = cluster
		c.Peer.Listen = listen
		c.Transports.Order = []string{config.TransGDR}
		c.Transports.GDR.Rails = devices
		c.Transports.GDR.QueuePairs = queuePairs(t)
		c.Transports.GDR.DeadAfter = config.Duration(deadPath(t))
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

// fill writes content that depends on its prompt and place.
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
	for _, l := range lanesOf(n.Node, func(l transport.Lane) bool {
		return l.Local() == rail &&
			l.Peer() != n.boot
	}) {
		ids = append(ids, l.ID())
	}
	return ids
}

// gone reports whether a node has lost all of these lanes.
func gone(n *running, ids []uint64) bool {
	return !slices.ContainsFunc(ids, func(id uint64) bool { _, up := n.driver.Down(id); return up })
}

// whenGone sends the time when a node has lost all of these lanes, or closes without it after over.
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
	quiet  bool   // it ends by itself, before a device must notice
	by     string // what shows it to the device; empty: its timers
	act    func(t testing.TB, p, d *running)
}

// up brings one end of a rail up again: its routes went with it.
func up(end string) string {
	i, side := end[1:2], end[2:]
	here, there := "1", "2"
	if side == "b" {
		here, there = "2", "1"
	}
	return fmt.Sprintf(
		"ip link set %s up; ip route replace 10.9.%s.%s dev %s src 10.9.%s.%s table 10%s", end, i, there,
		end, i, here, i)
}

// What shows a fault to a device before its timers do. Both ends of a rail of one guest go down
// together.
const (
	byPort    = "its port's event"
	byAnswer  = "the peer's refusal"
	byNothing = "nothing: packets are sent again"
)

var faults = []fault{
	{name: "none"},
	{name: "requests dropped at the receiver", inject: "iptables -A INPUT -i r0b -p udp --dport " +
		"4791 -j DROP", heal: "iptables -F"},
	{name: "acknowledgements dropped", inject: "iptables -A INPUT -i r0a -p udp --dport 4791 -j DROP",
		heal: "iptables -F"},
	{name: "local link down", inject: "ip link set r0a down", heal: up("r0a"), by: byPort},
	{name: "peer's link down", inject: "ip link set r0b down", heal: up("r0b"), by: byPort},
	{name: "both ends of two rails down", inject: "ip link set r0a down; ip link set r1b down",
		heal: up("r0a") + ";" + up("r1b"), by: byPort},
	{name: "link flaps for 0.3 s", inject: "ip link set r0a down; sleep 0.3; " + up("r0a"),
		quiet: true, by: byPort},
	{name: "peer's queue pair in the error state", act: func(t testing.TB, _, d *running) {
		for _, l := range lanesOf(d.Node, func(l transport.Lane) bool { return l.Local() == "r0b" }) {
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		}
	}, quiet: true},
	{name: "peer's memory region deregistered", act: func(t testing.TB, _, d *running) {
		endKeys(t, d, "r0b")
	}, by: byAnswer},
	{name: "5% of the packets lost", inject: "tc qdisc add dev r0a root netem loss 5%",
		heal: "tc qdisc del dev r0a root", quiet: true, by: byNothing},
	{name: "link removed", inject: "ip link del r0a", by: byPort, heal: "ip link add r0a type veth " +
		"peer name r0b && ip addr add 10.9.0.1/24 dev r0a && ip addr add 10.9.0.2/24 dev r0b" +
		" && ip link set r0a mtu 4500 up && ip link set r0b mtu 4500 up && ip route replace 10.9.0.2 " +
		"dev r0a src 10.9.0.1 table 100" +
		" && ip route replace 10.9.0.1 dev r0b src 10.9.0.2 table 100 && rdma link add r0a type rxe " +
		"netdev r0a && rdma link add r0b type rxe netdev r0b"},
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
			pt, dt := table(rng, llama.NumBlocks, int(llama.NumBlocks)), table(rng, llama.NumBlocks,
				int(llama.NumBlocks))
			fill(pe, pt, seed)
			x := newPrompt(llamaTokens)
			before := landedBytes(d)
			began := time.Now()
			src, err := pe.Intent(msg.Intent{Xfer: x.xfer, Hash: x.hash, Tokens: llamaTokens, Fanout: 1,
				Blocks: [][]uint32{pt}, Ready: llamaTokens,
				DeadlineMS: uint64(rdmaDeadline.Milliseconds())})
			if err != nil {
				t.Fatal(err)
			}
			dst, err := de.Expect(msg.Expect{Xfer: x.xfer, Hash: x.hash, Tokens: llamaTokens,
				Peer: p.Endpoint(), Skip: []uint32{0}, Blocks: [][]uint32{dt},
				DeadlineMS: uint64(rdmaDeadline.Milliseconds()), MatchTimeoutMS: 20000})
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
			fmt.Fprintf(&table_, "| %s | %.1f s | %s | %s | %d ms | %d ms | %d ms |\n", f.name,
				took.Seconds(), gone, f.noticedBy(t), command.Milliseconds(), longest.Milliseconds(),
				back.Milliseconds())
		})
	}
	fmt.Printf("%s\n| fault | %d MiB took | its lanes gone after | the device finds out by | the "+
		"command took | longest stall | lanes back after healing |\n|---|---|---|---|---|---|---|\n%s",
		conditions(t), whole()>>20, table_.String())
}
