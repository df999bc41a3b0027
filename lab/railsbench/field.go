package railsbench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/lab/progress"
	"github.com/kvspray/kvspray/lab/railsbench/netrig"
	"github.com/kvspray/kvspray/lab/timeline"
)

// Bounds of what the sidecars may take.
const (
	startPatience = 30 * time.Second
	stopPatience  = 5 * time.Second
	meetPatience  = 30 * time.Second
	logTail       = 4 << 10 // bytes of a sidecar's log that an error repeats
	usageExit     = 2       // of a sidecar whose configuration is wrong
)

// Setup is what a field is made from.
type Setup struct {
	Rates     []timeline.Rate
	Receivers int             // 0 is 1
	Claims    []timeline.Rate // what the links claim; nil: nothing, as a veth
	Integrity string          // off, crc32c or aead; "" is the sidecars' default
	Set       []string        // more of the sidecars' configuration, key=value
	Kvspray   string          // the binary
	Plain     time.Duration   // Run: that plain streams over all rails at once are measured
}

// Field is rails with a sidecar at each end: a sender and one receiver or several.
type Field struct {
	Rig *netrig.Rig

	setup Setup
	line  *progress.Line // nil: no output
	dir   string
	nodes []*node // by Side
	pairs []*Pair
	made  int // pairs so far
}

// node is one sidecar process.
type node struct {
	side   netrig.Side
	socket string
	log    string
	cmd    *exec.Cmd
	exited chan error
	http   *http.Client
	peer   string // endpoint
	at     string // of its HTTP
}

// Open builds the rails and starts the sidecars. They have not met.
func Open(ctx context.Context, s Setup) (_ *Field, err error) {
	if len(s.Claims) != 0 && len(s.Claims) != len(s.Rates) {
		return nil, fmt.Errorf("%d claimed rates for %d rails: want one for each, or none", len(s.Claims),
			len(s.Rates))
	}
	f := &Field{setup: s}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	if f.Rig, err = netrig.NewFan(s.Rates, max(s.Receivers, 1)); err != nil {
		return nil, err
	}
	f.nodes = make([]*node, 1+f.Rig.Receivers())
	if f.dir, err = os.MkdirTemp("", "kvrails"); err != nil {
		return nil, err
	}
	key, err := keys.NewCluster()
	if err != nil {
		return nil, err
	}
	if err := keys.WriteCluster(filepath.Join(f.dir, "cluster.key"), key); err != nil {
		return nil, err
	}
	return f, f.startNodes(ctx)
}

// atStart is why a sidecar was not there at all. What it refused comes from --set; a panic has the
// same exit code, and no hint.
func atStart(err error, log string) error {
	why := fmt.Errorf("ended at its start: %w\n%s", err, log)
	if x := (*exec.ExitError)(nil); errors.As(err, &x) && x.ExitCode() == usageExit &&
		strings.HasSuffix(log, " --help'.") {
		return usage.Of(why)
	}
	return why
}

func (f *Field) startNodes(ctx context.Context) error {
	for side := range f.nodes {
		n, err := f.startNode(ctx, netrig.Side(side))
		if err != nil {
			return fmt.Errorf("sidecar %d: %w", side, err)
		}
		f.nodes[side] = n
	}
	return nil
}

// Renew replaces the sidecars by new ones, which have no history, and connects the engines to them.
func (f *Field) Renew(ctx context.Context) error {
	for i, n := range f.nodes {
		n.stop()
		f.nodes[i] = nil
	}
	if err := f.startNodes(ctx); err != nil {
		return err
	}
	for _, p := range f.pairs {
		if err := p.connect(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (f *Field) startNode(ctx context.Context, side netrig.Side) (*node, error) {
	n := &node{side: side, socket: filepath.Join(f.dir, fmt.Sprintf("%d.sock", side)),
		log:    filepath.Join(f.dir, fmt.Sprintf("%d.log", side)),
		exited: make(chan error, 1)}
	ready := filepath.Join(f.dir, fmt.Sprintf("%d.ready", side))
	_ = os.Remove(ready) // an earlier sidecar's
	config := filepath.Join(f.dir, fmt.Sprintf("%d.yaml", side))
	if err := os.WriteFile(config, []byte(f.config(n)), 0o600); err != nil {
		return nil, err
	}
	args := []string{"serve", "--config", config, "--ready-file", ready}
	for _, s := range f.setup.Set {
		args = append(args, "--set", s)
	}
	n.cmd = exec.Command(f.setup.Kvspray, args...)
	log, err := os.OpenFile(n.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	n.cmd.Stderr = log
	err = f.Rig.Start(side, n.cmd)
	_ = log.Close() // the child has it
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", f.setup.Kvspray, err)
	}
	go func() { n.exited <- n.cmd.Wait() }()
	n.http = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _,
		addr string) (net.Conn, error) {
		return f.Rig.Dial(ctx, side, netip.Addr{}, addr)
	}}}
	limit := time.NewTimer(startPatience)
	defer limit.Stop()
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	for {
		select {
		case err := <-n.exited:
			n.exited <- err
			return nil, atStart(err, n.tail())
		case <-limit.C:
			n.stop()
			return nil, fmt.Errorf("not ready after %v\n%s", startPatience, n.tail())
		case <-ctx.Done():
			n.stop()
			return nil, ctx.Err()
		case <-poll.C:
		}
		b, err := os.ReadFile(ready)
		if err != nil {
			continue
		}
		var at struct{ Peer, HTTP string }
		if err := json.Unmarshal(b, &at); err != nil {
			return nil, fmt.Errorf("%s: %w", ready, err)
		}
		n.peer, n.at = at.Peer, at.HTTP
		return n, nil
	}
}

// config is the configuration of a sidecar. Everything goes over the rails, the control lanes too:
// there is no other network.
func (f *Field) config(n *node) string {
	var b strings.Builder
	p := func(format string, args ...any) { _, _ = fmt.Fprintf(&b, format, args...) }
	p("node: rails-%d\nengine: {socket: %q}\n", n.side, n.socket)
	p("peer: {listen: %q, cluster_key_file: %q, gossip: {listen: \"off\"}}\n",
		netip.AddrPortFrom(netrig.Addr(n.side, 0), 0), filepath.Join(f.dir, "cluster.key"))
	p("http: {listen: \"127.0.0.1:0\"}\nlog: {level: info}\n")
	p("transports:\n  order: [tcp]\n  tcp:\n")
	if f.setup.Integrity != "" {
		p("    integrity: %q\n", f.setup.Integrity)
	}
	p("    rails:\n")
	for i := range f.setup.Rates {
		p("      - {name: %s, listen: %q", netrig.Name(i), netip.AddrPortFrom(netrig.Addr(n.side, i), 0))
		if len(f.setup.Claims) > 0 {
			p(", speed: %q", f.setup.Claims[i])
		}
		p("}\n")
	}
	return b.String()
}

// tail is the end of a sidecar's log.
func (n *node) tail() string {
	b, err := os.ReadFile(n.log)
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(b[max(len(b)-logTail, 0):]))
}

func (n *node) stop() {
	if n == nil {
		return
	}
	_ = n.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	limit := time.AfterFunc(stopPatience, func() { _ = n.cmd.Process.Kill() })
	<-n.exited
	limit.Stop()
	n.http.CloseIdleConnections()
}

// Logs are what the sidecars wrote last, for errors.
func (f *Field) Logs() string {
	out := "sending sidecar:\n" + f.nodes[netrig.Sender].tail()
	for _, n := range f.nodes[netrig.Receiver:] {
		out += "\nreceiving sidecar:\n" + n.tail()
	}
	return out
}

// Get reads a document of a sidecar's HTTP service into v.
func (f *Field) Get(ctx context.Context, side netrig.Side, path string, v any) error {
	n := f.nodes[side]
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.at+path, nil)
	if err != nil {
		return err
	}
	res, err := n.http.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", path, res.Status, b)
	}
	if s, ok := v.(*string); ok {
		*s = string(b)
		return nil
	}
	return json.Unmarshal(b, v)
}

// State is what a test needs of /debug/state.
type State struct {
	Boot   string `json:"boot"`
	Leases struct {
		Rails struct {
			Pairs []PairState `json:"pairs"`
		} `json:"rails"`
	} `json:"leases"`
	Lanes []struct {
		Peer      string `json:"peer"`
		Transport string `json:"transport"`
		Local     string `json:"local"`
	} `json:"lanes"`
}

// PairState is one pair of rails, as its sidecar sees it.
type PairState struct {
	Peer string `json:"peer"`
	Path struct {
		Transport string `json:"transport"`
		Local     string `json:"local"`
	} `json:"path"`
	State    string            `json:"state"`
	Reason   string            `json:"reason"`
	Last     string            `json:"last_reason"`
	Rate     float64           `json:"learned_bytes_per_second"`
	Window   uint64            `json:"window_bytes"`
	Slice    uint64            `json:"slice_bytes"`
	Delay    time.Duration     `json:"min_delay_ns"`
	Samples  int               `json:"samples"`
	Counters map[string]uint64 `json:"counters"`
}

// Sum is what the rails were asked to carry together.
func (f *Field) Sum() (sum timeline.Rate) {
	for _, r := range f.setup.Rates {
		sum += r
	}
	return sum
}

// State asks a sidecar.
func (f *Field) State(ctx context.Context, side netrig.Side) (*State, error) {
	var s State
	return &s, f.Get(ctx, side, "/debug/state", &s)
}

// Meet waits until the sidecars of a pair have a lane on every rail, without moving anything:
// an engine expects what is never sent.
func (f *Field) Meet(ctx context.Context, p *Pair) error {
	lease, err := p.expectNothing()
	if err != nil {
		return err
	}
	defer func() { _ = p.dst.Cancel(lease, "met", false) }()
	ctx, cancel := context.WithTimeout(ctx, meetPatience)
	defer cancel()
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	for {
		met := 0
		sides := []netrig.Side{p.from, p.to}
		for _, side := range sides {
			s, err := f.State(ctx, side)
			if err != nil {
				return fmt.Errorf("waiting for lanes: %w\n%s", err, f.Logs())
			}
			rails := map[string]bool{}
			for _, l := range s.Lanes {
				if l.Transport == "tcp" {
					rails[l.Local] = true
				}
			}
			if len(rails) == f.Rig.Rails() {
				met++
			}
		}
		if met == len(sides) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no lane on some rail after %v\n%s", meetPatience, f.Logs())
		case <-poll.C:
		}
	}
}

// Signal sends a signal to one sidecar.
func (f *Field) Signal(side netrig.Side, sig os.Signal) error {
	return f.nodes[side].cmd.Process.Signal(sig)
}

// Drop ends pairs of engines.
func (f *Field) Drop(pairs ...*Pair) {
	for _, p := range pairs {
		p.close()
	}
	f.pairs = slices.DeleteFunc(f.pairs, func(p *Pair) bool { return slices.Contains(pairs, p) })
}

// Close ends engines and sidecars and removes everything.
func (f *Field) Close() {
	for _, p := range f.pairs {
		p.close()
	}
	for _, n := range f.nodes {
		n.stop()
	}
	if f.Rig != nil {
		f.Rig.Close()
	}
	if f.dir != "" {
		_ = os.RemoveAll(f.dir)
	}
}

// errClosed ends what waits for engines that are gone.
var errClosed = errors.New("the engines are closed")
