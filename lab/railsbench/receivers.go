package railsbench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/lab/machine"
	"github.com/kvspray/kvspray/lab/progress"
	"github.com/kvspray/kvspray/lab/railsbench/netrig"
	"github.com/kvspray/kvspray/lab/timeline"
)

// Of a run with several receivers.
const (
	urgentTotal  = 8 << 20 // bytes of a transfer that a decode waits for, by default
	loadTotal    = 4 << 20 // bytes of each of the others
	loadAtOnce   = 2       // of one receiver
	loadSlots    = 2 * loadAtOnce
	phaseSpan    = 10 * time.Second // of each measurement, by default
	minPhase     = time.Second
	loadSettle   = time.Second           // until every receiver has been served for a while
	urgentPause  = 20 * time.Millisecond // between two, at most
	urgentSlots  = 2
	fewestWaited = 2
)

// Waited is how long transfers took that a decode waited for.
type Waited struct {
	Count int              `json:"count"`
	P50   timeline.Seconds `json:"p50_seconds"`
	P95   timeline.Seconds `json:"p95_seconds"`
	P99   timeline.Seconds `json:"p99_seconds"`
	Max   timeline.Seconds `json:"max_seconds"`
}

// Beside is Waited while the other receivers are sent transfers of another priority without end.
type Beside struct {
	Priority string `json:"priority"` // of those transfers
	Waited
	// By the median of those alone.
	P50Times float64       `json:"p50_times"`
	P95Times float64       `json:"p95_times"`
	P99Times float64       `json:"p99_times"`
	MaxTimes float64       `json:"max_times"`
	Moved    timeline.Rate `json:"moved_bits_per_second"` // to all receivers
	Share    float64       `json:"share"`                 // Moved, of plain streams
}

// Shares is what peers of one class got of the rails that they share.
type Shares struct {
	Each   []timeline.Rate `json:"each_bits_per_second"`
	Lowest float64         `json:"min_over_max"`
	Moved  timeline.Rate   `json:"moved_bits_per_second"`
	Share  float64         `json:"share"` // Moved, of plain streams
}

// FanResult is a run with several receivers.
type FanResult struct {
	Bench     string           `json:"bench"` // receivers
	Version   string           `json:"version"`
	Host      string           `json:"host"`
	Receivers int              `json:"receivers"`
	Block     int              `json:"block_bytes"`
	Total     int64            `json:"urgent_bytes"`
	Duration  timeline.Seconds `json:"duration_seconds"`
	Rails     []timeline.Rail  `json:"rails"`
	Together  timeline.Rate    `json:"together_bits_per_second"`
	Alone     Waited           `json:"alone"`
	Beside    []Beside         `json:"beside"`
	Fair      Shares           `json:"fair"`   // from one sender to all receivers
	Incast    Shares           `json:"incast"` // from all receivers to the sender
	Transfers int              `json:"transfers"`
	Failed    int              `json:"failed_transfers"`
	Error     string           `json:"error,omitempty"` // of the first that failed
}

// Print writes the result for people.
func (r *FanResult) Print(w io.Writer) error {
	var b bytes.Buffer
	p := func(format string, args ...any) { fmt.Fprintf(&b, format, args...) }
	p("receivers, %s; blocks of %s, %d receivers\n",
		r.Host, timeline.FormatSize(int64(r.Block)), r.Receivers)
	for _, x := range r.Rails {
		p("  %-8s %10s, alone %s\n", x.Name, x.Rate, x.Alone)
	}
	p("plain streams together %s; %d transfers, %d failed\n", r.Together, r.Transfers, r.Failed)
	p("%s that a decode waits for, to one receiver:\n", timeline.FormatSize(r.Total))
	p("  alone: p50 %s, p95 %s, p99 %s, most %s of %d\n",
		r.Alone.P50, r.Alone.P95, r.Alone.P99, r.Alone.Max, r.Alone.Count)
	for _, x := range r.Beside {
		p("  beside %s to %d others: p50 %s, p95 %s, p99 %s, most %s of %d: ",
			x.Priority, r.Receivers-1, x.P50, x.P95, x.P99, x.Max, x.Count)
		p("%.2f, %.2f, %.2f, %.2f times the median alone; all moved %s, %.3f of plain streams\n",
			x.P50Times, x.P95Times, x.P99Times, x.MaxTimes, x.Moved, x.Share)
	}
	for _, x := range []struct {
		what string
		Shares
	}{
		{"layer streams to all receivers", r.Fair},
		{"layer streams from all of them to the sender", r.Incast},
	} {
		p("%s: the least gets %.3f of the most; %s, %.3f of plain streams\n",
			x.what, x.Lowest, x.Moved, x.Share)
	}
	_, err := w.Write(b.Bytes())
	return err
}

// Write writes the result as JSON.
func (r *FanResult) Write(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// RunReceivers measures how several receivers share the sender's rails, and the sender theirs.
func RunReceivers(ctx context.Context, o *timeline.Options, s Setup, stderr io.Writer) (
	*FanResult, error) {
	here := machine.Here()
	line := progress.Start(stderr)
	defer line.Close()
	line.Phase("making %d rails, a switch for each, and %d sidecars", len(s.Rates), 1+s.Receivers)
	f, err := Open(ctx, s)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	f.line = line
	res := &FanResult{Bench: "receivers", Version: here.Version, Host: here.String(),
		Receivers: s.Receivers, Block: o.Block, Total: o.Total,
		Duration: timeline.Seconds(o.Duration)}
	if res.Rails, res.Together, err = f.Baseline(ctx); err != nil {
		return nil, err
	}
	line.Print("plain streams over all rails at once carry %s", res.Together)
	r := &fanRun{f: f, o: o, res: res}
	if err := r.run(ctx); err != nil {
		return nil, err
	}
	return res, nil
}

// fanRun is the moving part.
type fanRun struct {
	f   *Field
	o   *timeline.Options
	res *FanResult

	mu sync.Mutex // protects res.Transfers, res.Failed and res.Error while there is load
}

func (r *fanRun) run(ctx context.Context) error {
	f := r.f
	f.line.Phase("making engines for %d receivers", r.res.Receivers)
	urgent, err := f.Engines(ctx, r.o.Block, r.o.Total, urgentSlots)
	if err != nil {
		return err
	}
	var load []*Pair
	for i := range r.res.Receivers {
		to := netrig.Receiver + netrig.Side(i)
		p, err := f.EnginesAt(ctx, netrig.Sender, to, r.o.Block, timeline.Whole(loadTotal, r.o.Block),
			loadSlots)
		if err != nil {
			return err
		}
		load = append(load, p)
	}
	for _, p := range append([]*Pair{urgent}, load...) {
		if err := r.first(ctx, p); err != nil {
			return err
		}
	}
	f.line.Phase("moving what a decode waits for, alone")
	if r.res.Alone, err = r.waited(ctx, urgent); err != nil {
		return err
	}
	for _, prio := range []struct {
		name string
		of   uint32
	}{{"background", msg.PrioBackground}, {"layer streams", msg.PrioStream}} {
		f.line.Phase("moving it beside %s to the others", prio.name)
		x := Beside{Priority: prio.name}
		_, x.Moved, err = r.under(ctx, load[1:], prio.of, func(ctx context.Context) (err error) {
			x.Waited, err = r.waited(ctx, urgent)
			return err
		})
		if err != nil {
			return err
		}
		alone := float64(r.res.Alone.P50)
		x.P50Times, x.P95Times = float64(x.P50)/alone, float64(x.P95)/alone
		x.P99Times, x.MaxTimes = float64(x.P99)/alone, float64(x.Max)/alone
		x.Share = float64(x.Moved / r.res.Together)
		r.res.Beside = append(r.res.Beside, x)
	}
	f.line.Phase("moving layer streams to all receivers")
	if r.res.Fair, err = r.shares(ctx, load); err != nil {
		return err
	}
	f.Drop(append(load, urgent)...)
	load = nil
	for i := range r.res.Receivers {
		from := netrig.Receiver + netrig.Side(i)
		p, err := f.EnginesAt(ctx, from, netrig.Sender, r.o.Block, timeline.Whole(loadTotal, r.o.Block),
			loadSlots)
		if err != nil {
			return err
		}
		load = append(load, p)
		if err := r.first(ctx, p); err != nil {
			return err
		}
	}
	f.line.Phase("moving layer streams from all of them to the sender")
	r.res.Incast, err = r.shares(ctx, load)
	return err
}

// first moves one transfer, so that the two sidecars have met.
func (r *fanRun) first(ctx context.Context, p *Pair) error {
	t, err := p.Begin(ctx, Order{})
	if err != nil {
		return err
	}
	if t.Wait().Err != nil {
		return fmt.Errorf("the first transfer to sidecar %d: %w\n%s", p.to, t.Err, r.f.Logs())
	}
	return nil
}

// ended counts a transfer.
func (r *fanRun) ended(t *Transfer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.res.Transfers++
	if t.Err != nil {
		if r.res.Failed++; r.res.Failed == 1 {
			r.res.Error = t.Err.Error()
		}
	}
}

// waited moves transfers that a decode waits for, one after the other with pauses between them, for
// as long as a phase takes.
func (r *fanRun) waited(ctx context.Context, p *Pair) (Waited, error) {
	var all []time.Duration
	for end := time.Now().Add(r.o.Duration); len(all) < fewestWaited || time.Now().Before(end); {
		t, err := p.Begin(ctx, Order{Priority: msg.PrioDecodeWaits})
		if err != nil {
			return Waited{}, err
		}
		t.Wait()
		r.ended(t)
		if t.Err != nil {
			return Waited{}, fmt.Errorf("what a decode waits for: %w", t.Err)
		}
		all = append(all, t.Ended.Sub(t.Began))
		r.f.line.Note("%d moved", len(all))
		if err := pause(ctx, time.Duration(rand.Int64N(int64(urgentPause)))); err != nil {
			return Waited{}, err
		}
	}
	slices.Sort(all)
	n := len(all)
	at := func(percent int) timeline.Seconds { return timeline.Seconds(all[n*percent/100]) }
	longest := timeline.Seconds(all[n-1])
	return Waited{Count: n, P50: at(50), P95: at(95), P99: at(99), Max: longest}, nil
}

// under calls do while every pair moves transfers without end, and returns what each sidecar that
// was sent something got meanwhile, and the rate of all of it.
func (r *fanRun) under(ctx context.Context, pairs []*Pair, prio uint32,
	do func(context.Context) error) ([]uint64, timeline.Rate, error) {
	loadCtx, stop := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	for _, p := range pairs {
		for range loadAtOnce {
			wg.Go(func() {
				for loadCtx.Err() == nil {
					t, err := p.Begin(loadCtx, Order{Priority: prio})
					if err != nil {
						if loadCtx.Err() == nil {
							stop(err)
						}
						return
					}
					t.Landed()
					wg.Go(func() { r.ended(t.Wait()) }) // its content is compared meanwhile
				}
			})
		}
	}
	each, moved, err := r.measure(loadCtx, pairs[0].from == netrig.Sender, do)
	if cause := context.Cause(loadCtx); cause != nil && ctx.Err() == nil {
		err = cause
	}
	stop(nil)
	wg.Wait()
	return each, moved, err
}

func (r *fanRun) measure(ctx context.Context, out bool, do func(context.Context) error) (
	each []uint64, moved timeline.Rate, err error) {
	if err := pause(ctx, loadSettle); err != nil {
		return nil, 0, err
	}
	read := r.f.taken
	if out {
		read = r.f.sent
	}
	begin := time.Now()
	from, err := read(ctx)
	if err != nil {
		return nil, 0, err
	}
	if err := do(ctx); err != nil {
		return nil, 0, err
	}
	to, err := read(ctx)
	if err != nil {
		return nil, 0, err
	}
	took := time.Since(begin)
	var sum uint64
	for peer, n := range to {
		if n -= from[peer]; n > 0 {
			each, sum = append(each, n), sum+n
		}
	}
	return each, timeline.RateOf(sum, took), nil
}

// shares is what all pairs get beside each other.
func (r *fanRun) shares(ctx context.Context, pairs []*Pair) (x Shares, err error) {
	var each []uint64
	began := time.Now()
	var took time.Duration
	each, x.Moved, err = r.under(ctx, pairs, msg.PrioStream, func(ctx context.Context) error {
		began = time.Now()
		err := pause(ctx, r.o.Duration)
		took = time.Since(began)
		return err
	})
	if err != nil {
		return x, err
	}
	if len(each) != len(pairs) {
		return x, fmt.Errorf("%d of %d peers moved something", len(each), len(pairs))
	}
	slices.Sort(each)
	for _, n := range each {
		x.Each = append(x.Each, timeline.RateOf(n, took))
	}
	x.Lowest = float64(each[0]) / float64(each[len(each)-1])
	x.Share = float64(x.Moved / r.res.Together)
	return x, nil
}

// sent is what each peer of the sender has confirmed to it so far.
func (f *Field) sent(ctx context.Context) (map[string]uint64, error) {
	s, err := f.State(ctx, netrig.Sender)
	if err != nil {
		return nil, err
	}
	out := map[string]uint64{}
	for _, p := range s.Leases.Rails.Pairs {
		out[p.Peer] += p.Counters["bytes"]
	}
	return out, nil
}

// taken is what the sender's sidecar has confirmed to each of the others so far.
func (f *Field) taken(ctx context.Context) (map[string]uint64, error) {
	out := map[string]uint64{}
	for i := range f.Rig.Receivers() {
		s, err := f.State(ctx, netrig.Receiver+netrig.Side(i))
		if err != nil {
			return nil, err
		}
		for _, p := range s.Leases.Rails.Pairs {
			out[s.Boot] += p.Counters["bytes"]
		}
	}
	return out, nil
}

// checkReceivers refuses options that a run with several receivers has no use for.
func checkReceivers(o *timeline.Options, n int) error {
	switch {
	case n > netrig.MaxReceivers:
		return fmt.Errorf("--receivers %d: must be 1 to %d", n, netrig.MaxReceivers)
	case len(o.Faults) > 0:
		return fmt.Errorf("--fault and --receivers %d: faults are made with one receiver only; "+
			"leave one of them out", n)
	case o.HTML != "":
		return fmt.Errorf("--html and --receivers %d: there is no chart of that; use --json", n)
	case o.Duration < minPhase:
		return fmt.Errorf("--duration %s: must be at least %s with --receivers", o.Duration, minPhase)
	case o.Block > loadTotal:
		return fmt.Errorf("--block %s: must be at most %s with --receivers",
			timeline.FormatSize(int64(o.Block)), timeline.FormatSize(loadTotal))
	}
	return nil
}

// failure is the error of a run in which transfers failed.
func (r *FanResult) failure() error {
	if r.Failed == 0 {
		return nil
	}
	return errors.New(fmt.Sprint(r.Failed, " of ", r.Transfers, " transfers failed; the first: ",
		r.Error))
}
