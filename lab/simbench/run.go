package simbench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/internal/version"
	"github.com/kvspray/kvspray/lab/progress"
	"github.com/kvspray/kvspray/lab/timeline"
	"github.com/kvspray/kvspray/test/sim"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport/simfabric"
)

// What stands for the kernel's part. The figures are those of netrig and of package tcp.
const (
	// of a full Ethernet frame that carries TCP with timestamps: what a plain stream gets of a
	// shaper's rate.
	payload   = 1448.0 / 1514
	queueTime = 20 * time.Millisecond
	// a chunk stands for its packets: in front of slow rails there is room for several at least.
	minQueue    = 3 * transfer.ChunkBytes
	defaultRTT  = 100 * time.Microsecond
	hostRate    = 200e9 // out of a host, where nothing is shaped
	sliceBytes  = 1 << 20
	maxInFlight = 16
	// a link that comes up has two events; package topo looks again after 40 ms, and holds it back for
	// 20.
	lookPause = 60 * time.Millisecond
)

// How a run goes.
const (
	MaxNodes     = 4096
	maxTotal     = 4 << 30                // bytes: each chunk is several events
	meet         = 200 * time.Millisecond // until every lane is up
	pipelined    = 2                      // transfers that are wanted at a time under --duration
	engineTime   = time.Millisecond       // a prefill that has everything at once
	plainWarm    = 500 * time.Millisecond
	plainSpan    = 2 * time.Second
	deadline     = 5 * time.Minute
	patience     = 10 * time.Minute // of virtual time, for what is to end
	checkContext = 1 << 14          // events
	granule      = sim.Layers * 4096
)

// Setup is one run.
type Setup struct {
	Options *timeline.Options
	Nodes   int
	Seed    uint64
	// Rails are as they were measured; nil: from the rates.
	Rails []timeline.Rail
	// Together is what plain streams got over all rails at once, where something else than the rails
	// was in the way; 0: nothing was.
	Together timeline.Rate
	Line     *progress.Line // nil: no output
}

func (s *Setup) check() error {
	o := s.Options
	switch {
	case s.Nodes < 2 || s.Nodes > MaxNodes || s.Nodes%2 != 0:
		return fmt.Errorf("--nodes %d: must be even, 2 to %d", s.Nodes, MaxNodes)
	case o.Total%granule != 0:
		return fmt.Errorf("--total %s: must be a multiple of %s", timeline.FormatSize(o.Total),
			timeline.FormatSize(granule))
	case o.Total > maxTotal:
		return fmt.Errorf("--total %s: at most %s", timeline.FormatSize(o.Total),
			timeline.FormatSize(maxTotal))
	}
	return nil
}

// granules is total rounded down to what the simulation can move; what is too small stays.
func granules(total int64) int64 {
	if total < granule {
		return total
	}
	return total - total%granule
}

// rails are those of one pair of nodes: rates are of content.
func (s *Setup) rails() []timeline.Rail {
	if s.Rails != nil {
		return s.Rails
	}
	var out []timeline.Rail
	for i, r := range s.Options.Rates {
		out = append(out, timeline.Rail{Name: fmt.Sprintf("rail%d", i), Rate: r, Alone: r * payload})
	}
	return out
}

func spec(r timeline.Rail) simfabric.RailSpec {
	link := simfabric.LinkSpec{BitsPerSecond: float64(r.Alone), Latency: defaultRTT / 2,
		Buffer: r.Buffer}
	if r.RTT > 0 {
		link.Latency = r.RTT.D() / 2
	}
	if link.Buffer == 0 {
		link.Buffer = int(r.Alone.Over(queueTime))
	}
	link.Buffer = max(link.Buffer, minQueue)
	out := link
	out.BitsPerSecond, out.Latency = hostRate, 0
	return simfabric.RailSpec{Name: r.Name, Link: link, Out: &out}
}

func (s *Setup) fabric() simfabric.Config {
	return simfabric.Config{Seed: s.Seed, SliceBytes: sliceBytes, MaxInFlight: maxInFlight,
		Resume: simfabric.DefaultRTO, CarrierBack: lookPause}
}

// Run measures the rails with plain streams, moves transfers while the faults happen, and judges.
func Run(ctx context.Context, s Setup) (*timeline.Result, error) {
	if err := s.check(); err != nil {
		return nil, usage.Of(err)
	}
	o := s.Options
	pairs := s.Nodes / 2
	res := &timeline.Result{Bench: "sim", Version: version.String(),
		Host: fmt.Sprintf("%d simulated nodes", s.Nodes), Nodes: s.Nodes, Seed: s.Seed,
		Block: o.Block, Total: o.Total, Duration: timeline.Seconds(o.Duration),
		Faults: o.Faults}
	rails := s.rails()
	s.Line.Phase("measuring %d simulated rails with plain streams, alone and together", len(rails))
	for i, r := range rails {
		alone, err := s.plain(rails[i : i+1])
		if err != nil {
			return nil, err
		}
		r.Alone = alone * timeline.Rate(pairs)
		res.Rails = append(res.Rails, r)
	}
	together, err := s.plain(rails)
	if err != nil {
		return nil, err
	}
	res.Together = together * timeline.Rate(pairs)
	what := "two transfers"
	if o.Duration > 0 {
		what = o.Duration.String() + " of transfers"
	}
	s.Line.Phase("moving %s of %s from each of %d nodes, in simulated time", what,
		timeline.FormatSize(o.Total), pairs)
	r := &run{s: s, res: res, c: sim.New(sim.Config{Fabric: s.fabric()})}
	if err := r.move(ctx, rails, pairs); err != nil {
		return nil, err
	}
	res.Trace = fmt.Sprintf("%016x", r.c.F.Trace())
	res.Judge()
	return res, nil
}

// run is the moving part.
type run struct {
	s     Setup
	res   *timeline.Result
	c     *sim.Cluster
	pairs []*pair
	begin time.Duration
}

// pair is two nodes and the transfers between them.
type pair struct {
	from, to *sim.Node
	cond     []timeline.Condition
	all      []*sim.Transfer
	flap     []int // counts changes of a rail's flapping
}

func (r *run) move(ctx context.Context, rails []timeline.Rail, pairs int) error {
	c, o := r.c, r.s.Options
	for range pairs {
		p := &pair{flap: make([]int, len(rails))}
		var specs []simfabric.RailSpec
		for _, x := range rails {
			specs = append(specs, spec(x))
			p.cond = append(p.cond, timeline.Healthy)
		}
		p.from, p.to = c.AddNode(specs...), c.AddNode(specs...)
		c.Join(p.from, p.to)
		r.pairs = append(r.pairs, p)
	}
	c.F.Run(meet, nil)
	r.begin = c.F.Now()
	for _, f := range o.Faults {
		c.F.After(f.At, func() {
			for _, p := range r.pairs {
				for i := range rails {
					if f.Meets(i) {
						r.turn(p, i, f)
					}
				}
			}
		})
	}
	for _, p := range r.pairs {
		for range r.window() {
			r.next(p)
		}
	}
	r.sample()
	events := 0
	c.F.Run(r.begin+patience, func() bool {
		if events++; events%checkContext == 0 {
			r.note()
			if ctx.Err() != nil {
				return true
			}
		}
		return c.Open() == 0 && r.done() || len(c.Violations()) > 0
	})
	switch v := c.Violations(); {
	case ctx.Err() != nil:
		return ctx.Err()
	case len(v) > 0:
		return fmt.Errorf("simulation: a promise was broken, which is a bug: %s", v[0])
	case c.Open() > 0:
		return errors.New("simulation: transfers never ended")
	}
	r.collect()
	return nil
}

// note shows how far the run is.
func (r *run) note() {
	begun := 0
	for _, p := range r.pairs {
		begun += len(p.all)
	}
	open := r.c.Open()
	r.s.Line.Note("%.2f s, %d transfers ended, %d under way", (r.c.F.Now() - r.begin).Seconds(),
		max(begun-open, 0), open)
}

// window is how many transfers of a pair are wanted at a time.
func (r *run) window() int {
	if r.s.Options.Duration > 0 {
		return pipelined
	}
	return 1
}

// next begins a transfer, unless there were enough.
func (r *run) next(p *pair) {
	o := r.s.Options
	if o.Duration > 0 && r.c.F.Now()-r.begin >= o.Duration || o.Duration == 0 && len(p.all) == 2 {
		return
	}
	t := r.c.Begin(p.from, p.to, uint32(o.Total/granule), deadline, engineTime)
	t.OnReceived = func() { r.next(p) }
	p.all = append(p.all, t)
}

// done reports whether no transfer is to come.
func (r *run) done() bool {
	for _, p := range r.pairs {
		for _, t := range p.all {
			if t.Received == nil || r.c.F.Now() == t.ReceivedAt() { // what it causes is still to come
				return false
			}
		}
	}
	return true
}

// sample reads the receivers' counters again and again, for a little longer than transfers last.
func (r *run) sample() {
	b := &r.res.Samples
	if b.Bytes == nil {
		b.Every, b.Bytes = timeline.Seconds(timeline.SampleEvery), make([][]uint64, len(r.res.Rails))
	}
	now := r.c.F.Now()
	for i := range b.Bytes {
		var sum uint64
		for _, p := range r.pairs {
			sum += p.to.Host.Rails()[i].Rx().Passed(now)
		}
		if n := len(b.Bytes[i]); n > 0 {
			sum = max(sum, b.Bytes[i][n-1]) // a queue that drains faster again has less in it than it seemed
		}
		b.Bytes[i] = append(b.Bytes[i], sum)
	}
	if now-r.begin < patience {
		r.c.F.After(timeline.SampleEvery, r.sample)
	}
}

func (r *run) collect() {
	for sender, p := range r.pairs {
		var turn time.Duration
		for _, t := range p.all {
			// Transfers are served in the order in which they began: the wire belongs to one once its
			// predecessor is done.
			began := max(t.Began-r.begin, turn)
			turn = t.ReceivedAt() - r.begin
			x := timeline.Transfer{Began: timeline.Seconds(began), Took: timeline.Seconds(turn - began),
				Bytes: t.Bytes(), Sender: sender}
			if t.Received.Status != engines.StatusOK {
				x.Error = t.Received.Reason
			}
			r.res.Transfers = append(r.res.Transfers, x)
		}
	}
}

// turn moves a rail of a pair to its new condition, by what differs.
func (r *run) turn(p *pair, i int, f timeline.Fault) {
	was := p.cond[i]
	now := was.After(f)
	p.cond[i] = now
	if was.Flap != now.Flap {
		p.flap[i]++
		if now.Flap > 0 {
			r.flip(p, i, p.flap[i], false)
		}
	}
	if was.Down != now.Down || was.Flap > 0 && now.Flap == 0 {
		carrier(p, i, !now.Down)
	}
	a, b := p.from.Host.Rails()[i], p.to.Host.Rails()[i]
	b.Tx().SetSilent(now.Drop || now.AckDrop)
	b.Rx().SetSilent(now.Drop)
	a.Tx().SetBarred(now.Blackholed)
	a.Rx().SetRate(now.Share)
	b.Rx().SetRate(now.Share)
}

// flip takes the carrier away for half of each period.
func (r *run) flip(p *pair, i, turn int, up bool) {
	if p.flap[i] != turn {
		return
	}
	carrier(p, i, up)
	r.c.F.After(p.cond[i].Flap/2, func() { r.flip(p, i, turn, !up) })
}

// carrier is of the cable: both ends see it.
func carrier(p *pair, i int, up bool) {
	for _, n := range []*sim.Node{p.from, p.to} {
		if rail := n.Host.Rails()[i]; up {
			rail.Up()
		} else {
			rail.Down()
		}
	}
}
