package sidecar

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	kvexec "github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transport"
)

// hostFault is what one of two hosts does to itself while a list moves from host 1 to host 2.
type hostFault struct {
	fault
	at   string // the host: 1 or 2
	rail string // that is broken
}

// twoFaults has no fault that drops the sender's own packets as they leave: its device does not
// notice that.
var twoFaults = []hostFault{
	{fault: fault{name: "none"}},
	{fault{name: "requests dropped at the receiver", inject: "iptables -A INPUT -i eth0 -p udp " +
		"--dport 4791 -j DROP", heal: "iptables -F"}, "2", "r0"},
	{fault{name: "acknowledgements dropped",
		inject: "iptables -A INPUT -i eth0 -p udp --dport 4791 -j DROP", heal: "iptables -F"}, "1", "r0"},
	{fault{name: "local link down", inject: "ip link set eth1 down", heal: "ip link set eth1 up",
		by: byPort}, "1", "r1"},
	{fault{name: "peer's link down", inject: "ip link set eth1 down", heal: "ip link set eth1 up"},
		"2", "r1"},
	{fault{name: "link flaps for 0.3 s",
		inject: "ip link set eth1 down; sleep 0.3; ip link set eth1 up", quiet: true, by: byPort}, "1",
		"r1"},
	{fault{name: "peer's queue pairs in the error state", act: func(t testing.TB, _, d *running) {
		for _, l := range lanesOf(d.Node, func(l transport.Lane) bool {
			return l.Local() == "r1" &&
				l.Peer() != d.boot
		}) {
			ok(t, l.Close())
		}
	}}, "2", "r1"},
	{fault{name: "peer's memory region deregistered", act: func(t testing.TB, _,
		d *running) {
		endKeys(t, d, "r1")
	}, by: byAnswer}, "2", "r1"},
	{fault{name: "5% of the packets lost", inject: "tc qdisc add dev eth0 root netem loss 5%",
		heal: "tc qdisc del dev eth0 root", quiet: true, by: byNothing}, "1", "r0"},
	{fault{name: "card pulled out", by: byPort, inject: "echo 1 > $(readlink -f " +
		"/sys/class/net/eth1/device/..)/remove",
		heal: "echo 1 > /sys/bus/pci/rescan; until [ -e /sys/class/net/eth1 ]; do sleep 0.1; done; " +
			"ip addr add 10.9.1.1/24 dev eth1 && ip link set eth1 mtu 4500 up && rdma link add r1 type " +
			"rxe netdev eth1"}, "1", "r1"},
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
	share   string // a directory that both see
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
		h.put("key", b)
	}
	h.key = filepath.Join(t.TempDir(), "key")
	ok(t, os.WriteFile(h.key, h.get("key"), 0o600)) // a file that only its owner reads
	return h
}

// put leaves a message for the other host, once in a test, and get waits for it.
func (h *rdmaHost) put(what string, b []byte) {
	h.t.Helper()
	path := h.path(what)
	ok(h.t, os.WriteFile(path+".new", b, 0o600))
	ok(h.t, os.Rename(path+".new", path))
}

func (h *rdmaHost) get(what string) (b []byte) {
	h.t.Helper()
	eventually(h.t, "the other host's message "+what, func() bool {
		var err error
		b, err = os.ReadFile(h.path(what))
		return err == nil
	})
	return b
}

// meet waits until the sidecars of both hosts are there: a decode's sidecar does not wait long for
// a prefill's that does not listen.
func (h *rdmaHost) meet() {
	h.t.Helper()
	h.put("ready-"+h.node, nil)
	h.get("ready-1")
	h.get("ready-2")
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
	p := &process{t: h.t, path: cfg.Engine.Socket + ".yaml", socket: cfg.Engine.Socket,
		endpoint: cfg.Peer.Listen, http: cfg.HTTP.Listen}
	ok(h.t, os.WriteFile(p.path, b.Bytes(), 0o600))
	h.t.Cleanup(func() {
		p.kill()
		if log, err := os.ReadFile(p.path + ".log"); err == nil && h.t.Failed() {
			h.t.Logf("the child's log:\n%s", log[max(0, len(log)-4096):])
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
	return msg.Intent{Xfer: x.xfer, Hash: x.hash, Tokens: llamaTokens, Fanout: 1,
		Blocks: [][]uint32{blocks}, Ready: llamaTokens,
		DeadlineMS: uint64(rdmaDeadline.Milliseconds())}
}

func rdmaExpect(x prompt, blocks []uint32) msg.Expect {
	return msg.Expect{Xfer: x.xfer, Hash: x.hash, Tokens: llamaTokens, Peer: "10.9.0.1:" + rdmaPort,
		Skip: []uint32{0}, Blocks: [][]uint32{blocks},
		DeadlineMS:     uint64(rdmaDeadline.Milliseconds()),
		MatchTimeoutMS: uint64(rdmaDeadline.Milliseconds())}
}

// TestRDMATwoHosts is one of two sidecars on two hosts, of which host 1 prefills and host 2
// decodes. What host 2 must find follows from the number of the round. Times are host 1's: where
// host 2 breaks something, from the moment at which host 1 asks for it.
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
		// strike is done where the fault is, and sends the time that the command took.
		strike := func() {
			began := time.Now()
			if f.inject != "" {
				shell(t, f.inject)
			}
			if f.act != nil {
				f.act(t, nil, n)
			}
			h.put(round+"struck", []byte(strconv.FormatInt(time.Since(began).Milliseconds(), 10)))
		}
		if h.node == "2" {
			began := time.Now()
			lease, err := e.Expect(rdmaExpect(x, tb))
			ok(t, err)
			if f.at == "2" {
				h.get(round + "strike")
				strike()
			}
			if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
				t.Errorf("%s: receiver: %d %+v", f.name, c.Status, c.Received)
			} else if k := wrong(e, tb, seed); k > 0 {
				t.Errorf("%s: %d pages are wrong", f.name, k)
			}
			t.Logf("%s: %d MiB in %.1f s", f.name, whole()>>20, time.Since(began).Seconds())
			if f.at == "2" && f.heal != "" {
				h.get(round + "heal")
				shell(t, f.heal)
				h.put(round+"healed", nil)
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
			h.put(round+"strike", nil)
		}
		c := e.waitFor(lease, 2*rdmaDeadline)
		took := time.Since(began)
		close(over)
		if c.Status != 0 {
			t.Errorf("%s: sender: %d %+v", f.name, c.Status, c.Sent)
		}
		command := h.get(round + "struck")
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
			h.put(round+"heal", nil)
			h.get(round + "healed")
		}
		eventually(t, "the rail has lanes", func() bool { return len(lanesOn(n, f.rail)) > 0 })
		fmt.Fprintf(&report, "| %s | %.1f s | %s | %s | %s ms | %d ms |\n", f.name, took.Seconds(), gone,
			f.noticedBy(t), command, time.Since(healed).Milliseconds())
	}
	if h.node == "2" {
		h.get("through") // host 1 waits for lanes after the last round
		return
	}
	h.put("through", nil)
	fmt.Printf("%s\n| fault | %d MiB took | its lanes gone after | the device finds out by | the "+
		"command took | lanes back after healing |\n|---|---|---|---|---|---|\n%s", conditions(t),
		whole()>>20, report.String())
}

// TestRDMAHostLost: the host of a decode is gone in mid transfer, without a message. Its peer's
// lanes end by their devices' timers, and what the prefill holds for it is released.
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
		eventually(t, "a quarter has come", func() bool {
			return receivedBytes(t, len(h.devices))-before > whole()/4
		})
		h.put("killed", nil)
		// This host has no more to report; vm.sh takes its exit from the console.
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
	h.get("killed") // before that, lanes come and go where the processor is shared
	eventually(t, "no lane to the dead host is left", func() bool {
		return !slices.ContainsFunc(h.devices, func(d string) bool { return len(lanesOn(n, d)) > 0 })
	})
	h.put("gone", nil)
	c := e.waitFor(lease, 2*rdmaDeadline)
	if c.Status != engines.StatusFailed {
		t.Errorf("the lease for a host that is gone: status %d, %+v", c.Status, c.Sent)
	}
	h.put("released", nil)
	nothingOpen(t, n)
	fmt.Printf("dead_after %s: the decode's host is gone: lanes gone after %d ms, its lease released "+
		"after %d ms: %s\n", deadPath(t),
		h.putAt("gone").Sub(h.putAt("killed")).Milliseconds(),
		h.putAt("released").Sub(h.putAt("killed")).Milliseconds(), c.Sent.Reason)
}

// putAt is when a message was put, by the one clock that both hosts have: that of the directory.
func (h *rdmaHost) putAt(what string) time.Time {
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

// No sidecar listens where the dead prefill was: once what it could write is fenced, the decode's
// engine gets its blocks back, and computes them itself. The blocks of the next prefill are fetched
// into the same ones.
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
		eventually(t, "a quarter was sent", func() bool {
			return sentBytes(t, len(h.devices))-before > whole()/4
		})
		h.put("killed", nil)
		p.kill()
		_ = e.Close() // of its board and memory; the socket is gone
		h.get("released")
		p.start()
		e = newEngine(t, p.asRunning(), llama)
		fill(e, blocks, 2)
		lease, err := e.Intent(rdmaIntent(y, blocks))
		ok(t, err)
		h.put("again", nil)
		if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
			t.Errorf("sender: %d %+v", c.Status, c.Sent)
		}
		h.get("through")
		return
	}
	n := h.start()
	e := newEngine(t, n, llama)
	h.meet()
	lease, err := e.Expect(rdmaExpect(x, blocks))
	ok(t, err)
	there := h.lanes(n)
	h.get("killed")
	landed := landedBytes(n)
	if landed == 0 || landed >= whole() {
		t.Fatalf("%d of %d bytes had landed: this is not in mid transfer", landed, whole())
	}
	noticed := eventually(t, "no lane to the dead one is left", func() bool { return gone(n, there) })
	began := time.Now()
	c := e.waitFor(lease, 2*rdmaDeadline)
	if all := [][2]uint32{{0, llamaTokens}}; c.Status != engines.StatusExpired ||
		!slices.Equal(c.Received.Recompute, all) {
		t.Errorf("the lease of a prefill that is dead: status %d, %+v", c.Status, c.Received)
	}
	released := noticed + time.Since(began)
	if k := value(t, n, "kvspray_lease_fences_total", "cause", "peer_lost"); k != 1 {
		t.Errorf("%v fences because of a lost peer: want 1", k)
	}
	nothingOpen(t, n)
	h.put("released", nil)
	h.get("again")
	began = time.Now()
	lease, err = e.Expect(rdmaExpect(y, blocks))
	ok(t, err)
	if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
		t.Errorf("receiver: %d %+v", c.Status, c.Received)
	} else if k := wrong(e, blocks, 2); k > 0 {
		t.Errorf("%d pages are wrong", k)
	}
	t.Logf("prefill killed with %d of %d MiB there: lanes gone after %d ms, fenced and released "+
		"after %d ms, the next one's fetched in %.1f s", landed>>20, whole()>>20,
		noticed.Milliseconds(), released.Milliseconds(), time.Since(began).Seconds())
	nothingOpen(t, n)
	h.put("through", nil)
}

// The engine of the dead decode has died with it: no shim presents its lease again. The prefill's
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
		eventually(t, "a quarter has come", func() bool {
			return receivedBytes(t, len(h.devices))-before > whole()/4
		})
		h.put("killed", nil)
		d.kill()
		_ = e.Close() // of its board and memory; the socket is gone
		h.get("released")
		d.start()
		e = newEngine(t, d.asRunning(), llama)
		lease, err := e.Expect(rdmaExpect(y, next))
		ok(t, err)
		h.put("again", nil)
		if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
			t.Errorf("receiver: %d %+v", c.Status, c.Received)
		} else if k := wrong(e, next, 2); k > 0 {
			t.Errorf("%d pages are wrong", k)
		}
		h.put("through", nil)
		return
	}
	n := h.start()
	e := newEngine(t, n, llama)
	fill(e, blocks, 1)
	lease, err := e.Intent(rdmaIntent(x, blocks))
	ok(t, err)
	h.meet()
	there := h.lanes(n)
	h.get("killed")
	noticed := eventually(t, "no lane to the dead one is left", func() bool { return gone(n, there) })
	began := time.Now()
	c := e.waitFor(lease, 2*rdmaDeadline)
	if c.Status != engines.StatusFailed || !strings.Contains(c.Sent.Reason,
		"presented the lease again") {
		t.Errorf("the lease of a receiver that did not come again: status %d, %+v", c.Status, c.Sent)
	}
	released := noticed + time.Since(began)
	nothingOpen(t, n)
	h.put("released", nil)
	fill(e, next, 2)
	lease, err = e.Intent(rdmaIntent(y, next))
	ok(t, err)
	h.get("again")
	began = time.Now()
	if c := e.waitFor(lease, 2*rdmaDeadline); c.Status != 0 {
		t.Errorf("sender: %d %+v", c.Status, c.Sent)
	}
	t.Logf("decode killed: lanes gone after %d ms, its lease released after %d ms (match timeout "+
		"%s), the next one served in %.1f s", noticed.Milliseconds(), released.Milliseconds(),
		n.cfg.Transfer.MatchTimeout, time.Since(began).Seconds())
	h.get("through")
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
