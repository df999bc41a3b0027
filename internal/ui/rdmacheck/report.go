// Package rdmacheck tests RDMA on real devices: `kvspray doctor --rdma` and `kvspray-bench rdma`.
// It does with queue pairs what the transport does, between two ends: of one process (loopback), or
// of this process and one that runs Serve on another host. The prober sends requests (end.go) to
// both. Each works on memory and queue pairs of its own, so neither disturbs an engine.
//
// A report names each fault with its remedy. It has no addresses and no names of hosts, so that it
// can be sent to others. Nothing but the report, and the packets of the test, leaves the process.
//
// Invariants: a canary that must stay is written after memory was seen to change under traffic, so
// that a canary that stays proves something. Every wait is bounded. A peer's requests are checked
// against the bounds of end.go.
//
// Goroutines: a stream, the receiving half of a write, and one that waits for ib_write_bw. The call
// or the end that has started one joins it.
package rdmacheck

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"

	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/ui/doctor"
)

// Line is a finding, with its remedy.
type Line = doctor.Result

// Rail is a port under test.
type Rail struct {
	Name string  `json:"name"`
	Gbps float64 `json:"gbps"` // 0: unknown
}

// Env is an end's host.
type Env struct {
	Version string
	Rails   []Rail
	Host    []Line // the checks of the host
	// Open opens a rail; mtu 0: its own.
	Open func(rail string, mtu verbs.MTU) (verbs.Device, error)
	// Card opens the GPU that is next to a rail; nil: this host has none.
	Card   func(rail string) (device.Card, error)
	Resent func(rail string) uint64 // retransmissions that the device has counted
	Timer  int                      // exponent of the time-out of acknowledgements

	// For tests: a simulation that stands still during a function, and a call for each connected
	// queue pair.
	still     func(func())
	connected func(rail string, q verbs.QueuePair)
}

// Options of a test.
type Options struct {
	Peer   string        // host and port of Serve on the peer; empty: loopback
	Rounds int           // of revocation under traffic
	Span   time.Duration // of one measurement of the rate
	Rails  []string      // some of the rails; empty: all
	// Key proves both ends to each other; nil: neither end does.
	Key *keys.Credentials

	host string   // the peer, or this host
	only []string // for tests: beside the tests without which nothing works
}

// Defaults of Options.
const (
	DefaultRounds = 5
	DefaultSpan   = time.Second
	maxPairs      = 32
)

// Rate is what some queue pairs carry together, in MiB/s.
type Rate struct {
	Queues   int     `json:"queue_pairs"`
	MiBps    float64 `json:"mib_per_second"`
	Baseline float64 `json:"ib_write_bw,omitempty"`
}

// Figures are the measurements of a pair.
type Figures struct {
	RegisterMs float64 `json:"register_64_mib_ms"`
	MTU        int     `json:"mtu"`
	Early      int     `json:"writes_seen_out_of_order"`
	NoticedMs  float64 `json:"killed_queue_pair_noticed_ms"`
	FlushMs    float64 `json:"slowest_flush_ms"`
	LateWrites int     `json:"late_writes"`
	Rates      []Rate  `json:"rates,omitempty"`
	GPU        string  `json:"gpu_registered_by,omitempty"`
}

// Pair is the test of two rails.
type Pair struct {
	Near    string  `json:"near"`
	Far     string  `json:"far"`
	Gbps    float64 `json:"gbps"` // of the slower one; 0: unknown
	Lines   []Line  `json:"lines"`
	Figures Figures `json:"figures"`
}

// Report is the result.
type Report struct {
	Version     string `json:"version"`
	PeerVersion string `json:"peer_version,omitempty"`
	Host        []Line `json:"host"`
	PeerHost    []Line `json:"peer_host,omitempty"`
	Pairs       []Pair `json:"pairs"`
}

// Run tests the rails of this host in loopback, or each with the rail in the same place of the
// peer's list.
func Run(ctx context.Context, env Env, opt Options) (r *Report, err error) {
	r = &Report{Version: env.Version, Host: env.Host}
	rails, err := pick(env.Rails, opt.Rails)
	if err != nil {
		return nil, err
	}
	near := newLocal(ctx, env)
	defer func() { err = errors.Join(err, near.close()) }()
	var far caller
	farRails, whose := rails, ""
	if opt.Peer == "" {
		opt.host = "localhost:0"
		l := newLocal(ctx, env)
		defer func() { err = errors.Join(err, l.close()) }()
		far = l
	} else {
		opt.host, whose = opt.Peer, "the peer's "
		c, err := dial(ctx, opt.Peer, opt.Key)
		if err != nil {
			return nil, err
		}
		defer func() { _ = c.close() }()
		far = c
		a, err := far.call(ctx, &request{Op: opHello})
		if err != nil {
			return nil, fmt.Errorf("%w: %s", err, sameKey)
		}
		r.PeerVersion, r.PeerHost, farRails = a.Version, a.Host, a.Rails
		if len(farRails) == 0 {
			return r, nil
		}
	}
	for i, x := range rails[:min(len(rails), maxPairs)] {
		y := farRails[i%len(farRails)]
		out := Pair{Near: x.Name, Far: y.Name, Gbps: min(cmp.Or(x.Gbps, y.Gbps), cmp.Or(y.Gbps, x.Gbps))}
		p := &prober{opt: &opt, out: &out, near: &side{caller: near, rail: x.Name, what: x.Name},
			far: &side{caller: far, rail: y.Name, what: whose + y.Name}}
		p.run(ctx)
		r.Pairs = append(r.Pairs, out)
		if ctx.Err() != nil {
			return r, context.Cause(ctx)
		}
	}
	return r, nil
}

func pick(all []Rail, names []string) (some []Rail, err error) {
	if len(names) == 0 {
		return all, nil
	}
	for _, name := range names {
		found := false
		for _, r := range all {
			if r.Name == name {
				some, found = append(some, r), true
			}
		}
		if !found {
			return nil, fmt.Errorf("rdmacheck: rail %q: this host has %v", name, all)
		}
	}
	return some, nil
}

// Works reports whether all tests passed on every rail, and there is one.
func (r *Report) Works() bool { return len(r.Pairs) > 0 && r.working() == len(r.Pairs) }

func (r *Report) working() (n int) {
	for i := range r.Pairs {
		if !r.Pairs[i].failed() {
			n++
		}
	}
	return n
}

func (p *Pair) failed() bool {
	for _, l := range p.Lines {
		if l.State == doctor.Fail {
			return true
		}
	}
	return false
}

// Verdict is one line.
func (r *Report) Verdict() string {
	if len(r.Pairs) == 0 {
		return "nothing was tested: this host, or the peer, has no usable RDMA port: see the lines " +
			"above. Without RDMA kvspray uses tcp and shm"
	}
	text := fmt.Sprintf("RDMA works on %d of %d rails", r.working(), len(r.Pairs))
	for i := range r.Pairs {
		if r.Pairs[i].Figures.LateWrites > 0 {
			return text + "; LATE WRITES: do not use gdr on this host"
		}
	}
	return text
}

// WriteJSON writes the report as one object.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteText writes a page: each finding that is not ok, with its remedy, and a line of figures for
// each rail.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "kvspray %s", r.Version)
	if r.PeerVersion != "" {
		fmt.Fprintf(&b, ", peer %s", r.PeerVersion)
	}
	b.WriteString("\n\nThis host\n")
	writeLines(&b, brief(r.Host), true)
	if len(r.PeerHost) > 0 {
		b.WriteString("\nThe peer\n")
		writeLines(&b, r.PeerHost, false)
	}
	for i := range r.Pairs {
		p := &r.Pairs[i]
		fmt.Fprintf(&b, "\n%s to %s\n", p.Near, p.Far)
		// the rails of a host are alike: all lines of the first one, of others those that are not ok
		writeLines(&b, p.Lines, i == 0)
		if i > 0 {
			writeFigures(&b, p)
		}
	}
	fmt.Fprintf(&b, "\n%s\n", r.Verdict())
	_, err := io.WriteString(w, onTerminal(b.String()))
	return err
}

// brief leaves out lines of ports that are ok if an equal line of another port is shown.
func brief(lines []Line) (out []Line) {
	seen := map[string]bool{}
	for _, l := range lines {
		kind, port := l.Name, ""
		if i := strings.LastIndexByte(l.Name, ' '); i > 0 {
			kind, port = l.Name[:i], l.Name[i:]
		}
		if l.State == doctor.OK && port != "" && seen[kind] {
			continue
		}
		seen[kind] = seen[kind] || l.State == doctor.OK
		out = append(out, l)
	}
	return out
}

func writeLines(b *strings.Builder, lines []Line, all bool) {
	width := 0
	for _, l := range lines {
		width = max(width, len(l.Name))
	}
	for _, l := range lines {
		if !all && (l.State == doctor.OK || l.State == doctor.Skip) {
			continue
		}
		fmt.Fprintf(b, "%-4s  %-*s  %s\n", l.State, width, l.Name, l.Detail)
		if l.Remedy != "" {
			fmt.Fprintf(b, "%-4s  %-*s  -> %s\n", "", width, "", l.Remedy)
		}
	}
}

func writeFigures(b *strings.Builder, p *Pair) {
	ok := 0
	for _, l := range p.Lines {
		if l.State == doctor.OK {
			ok++
		}
	}
	best := 0.0
	for _, x := range p.Figures.Rates {
		best = max(best, x.MiBps)
	}
	fmt.Fprintf(b, "ok    %d of %d tests; packets of %d bytes, %.0f MiB/s, flush %.1f ms\n", ok,
		len(p.Lines), p.Figures.MTU, best, p.Figures.FlushMs)
}

// onTerminal makes a text safe that contains words of a peer.
func onTerminal(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) || r == '\n' {
			return r
		}
		return '?'
	}, s)
}
