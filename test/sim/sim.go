// Package sim runs whole clusters in virtual time: the production executor and driver
// (control/driver) of every node over simfabric, between played engines. What differs from a
// sidecar is in the interfaces of the driver (process.go) and in the faults of its backend
// (backend.go). check.go has the promises that must hold after each event.
//
// A word stands for a chunk's bytes: it names the transfer, the chunk and the epoch of the source's
// blocks, so whatever is in the wrong place shows. Sidecars and engines die and come back as new
// boots, processes freeze, clocks leap, control lanes are cut and repeat frames. A Cluster and
// all below it belong to one goroutine; same Config, same calls, same Trace.
package sim

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// What the played engines are like.
const (
	Layers        = 4
	unitBytes     = 4096 // of a token in a layer
	blockTokens   = 16
	garbage       = 0xbad
	maxViolations = 20
)

// Config of a cluster.
type Config struct {
	Fabric simfabric.Config
	Exec   exec.Config // Boot, Endpoint and Planner are the cluster's
	// Twice is the share of everything that backends report (results, fences, full bitmaps) that is
	// repeated.
	Twice float64
	// Replay is the share of control frames after which an earlier one of the same two processes comes
	// again.
	Replay float64
	// Lies is the share of slices of which a backend reports falsely: that they have
	// landed and has sent nothing, or that they have not and sends them later.
	Lies float64
	// Errors is the share of slices that a backend returns at once.
	Errors float64
	// FenceFails is the share of fences and closes that fail at first; the executor tries them again
	// after its grace.
	FenceFails float64
	// Fence is how long fences take at most, Handshake what a lane's opening takes beside the way.
	Fence     time.Duration
	Handshake time.Duration
	// Record is the maximum between an engine's taking blocks back and its word of it.
	Record time.Duration
	// Skew is what lies between the clocks of two nodes that follow one another; 0: minutes.
	Skew time.Duration
}

const defaultSkew = 17 * time.Minute

// How the driver goes on where something fails.
const (
	redialFirst  = 20 * time.Millisecond
	redialMax    = time.Second
	controlRetry = 5 * time.Millisecond
	controlDown  = time.Second // without a way for control frames, until the executor sees it
)

// Cluster is nodes on one fabric.
type Cluster struct {
	F     *simfabric.Fabric
	Nodes []*Node

	cfg        Config
	byAddr     map[string]*Node
	boots      uint64
	transfers  []*Transfer
	violations []string
	open       int // leases that have not ended
	stats      Stats
}

// Stats count what the cluster did to its nodes.
type Stats struct {
	// reports; control frames that came again; of a boot that is over; that were refused
	Twice, Replayed, Stale, Refused int
	FencesFailed, Lies              int
	Late                            int // slices that came for a grant that was over
	Restarts, EngineDeaths          int
	Canceled, Preempted             int
	Leases                          int // that ended
	// bytes at most: that went before what is more urgent, that a lower priority was behind its share
	Overtook, Lacked int
}

// New returns a cluster without nodes.
func New(cfg Config) *Cluster {
	if cfg.Fence <= 0 {
		cfg.Fence = 200 * time.Microsecond
	}
	if cfg.Handshake <= 0 {
		cfg.Handshake = time.Millisecond
	}
	if cfg.Record <= 0 {
		cfg.Record = 200 * time.Microsecond
	}
	if cfg.Skew == 0 {
		cfg.Skew = defaultSkew
	}
	return &Cluster{F: simfabric.New(cfg.Fabric), cfg: cfg, byAddr: map[string]*Node{}}
}

// Violations of what engines are promised; the first few.
func (c *Cluster) Violations() []string { return c.violations }

// Transfers that were begun.
func (c *Cluster) Transfers() []*Transfer { return c.transfers }

// Open counts leases that have not ended.
func (c *Cluster) Open() int { return c.open }

// Stats of the run so far.
func (c *Cluster) Stats() Stats { return c.stats }

func (c *Cluster) violation(format string, args ...any) {
	if len(c.violations) < maxViolations {
		c.violations = append(c.violations, fmt.Sprintf("%v: ", c.F.Now())+fmt.Sprintf(format, args...))
	}
}

func (c *Cluster) chance(p float64) bool { return p > 0 && c.F.Rand().Float64() < p }

// boot names one life of one process. Not random: runs are to be the same.
func (c *Cluster) boot() (b transfer.Boot) {
	c.boots++
	binary.BigEndian.PutUint64(b[:], c.boots)
	return b
}

// Join makes two nodes peers, for good: whenever a sidecar of either begins a new life, it is
// reached again. Lanes are opened by the first, one for each of its rails.
func (c *Cluster) Join(a, b *Node) {
	for _, n := range a.joined {
		if n == b {
			return
		}
	}
	a.joined = append(a.joined, b)
	if a != b {
		b.joinedBy = append(b.joinedBy, a)
	}
	c.meet(a, b)
}

// meet introduces the sidecars that two nodes have now.
func (c *Cluster) meet(a, b *Node) {
	x, y := a.side, b.side
	if x == nil || y == nil {
		return
	}
	x.peerUp(y)
	if a == b {
		return
	}
	y.peerUp(x)
	if p, q := x.pipe(y.boot), y.pipe(x.boot); p.lanes || q.lanes {
		return
	} else {
		p.lanes = true
	}
	for i, r := range x.rails {
		d := &dial{s: x, to: y, local: r, remote: y.rails[i%len(y.rails)]}
		x.dialed = append(x.dialed, d)
		d.again()
	}
}
