package railsbench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/kvspray/kvspray/lab/machine"
	"github.com/kvspray/kvspray/lab/progress"
	"github.com/kvspray/kvspray/lab/railsbench/netrig"
	"github.com/kvspray/kvspray/lab/timeline"
)

// How a run is made up.
const (
	plainSpan = 2 * time.Second // over all rails at once
	aloneSpan = time.Second     // over each of them, at most
	minPlain  = 100 * time.Millisecond
	maxPlain  = time.Minute
	settle    = 200 * time.Millisecond
)

// ErrVoid means that the machine did not let plain streams have the rails, so that there is nothing
// to compare transfers with.
var ErrVoid = errors.New("the run is void")

// Of the baseline.
const (
	// of a rail's rate that plain streams carry, 0.94 to 0.97 on a quiet machine: the rest is headers.
	minShare   = 0.8
	plainTries = 3
	voidRemedy = "other load takes the processors, or they cannot do more; try again on a quiet " +
		"machine, or with lower --rates"
)

// Pipelined is how many transfers are wanted at a time under --duration: the wire is never idle
// between two.
const Pipelined = 2

// Run measures the rails with plain streams, moves transfers through the sidecars while the faults
// happen, and judges.
func Run(ctx context.Context, o *timeline.Options, s Setup, stderr io.Writer) (*timeline.Result,
	error) {
	here := machine.Here()
	line := progress.Start(stderr)
	defer line.Close()
	line.Phase("making %d rails and a sidecar at each end", len(s.Rates))
	f, err := Open(ctx, s)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	f.line = line
	res := &timeline.Result{Bench: "rails", Version: here.Version, Host: here.String(), Block: o.Block,
		Total:    o.Total,
		Duration: timeline.Seconds(o.Duration), Faults: o.Faults}
	if res.Rails, res.Together, err = f.Baseline(ctx); err != nil {
		return nil, err
	}
	for _, r := range res.Rails {
		line.Print("%s of %s: a plain stream alone carries %s", r.Name, r.Rate, r.Alone)
	}
	line.Print("plain streams over all of them at once carry %s", res.Together)
	line.Phase("making two engines with a cache for %d transfers of %s", Pipelined+1,
		timeline.FormatSize(o.Total))
	p, err := f.Engines(ctx, o.Block, o.Total, Pipelined+1)
	if err != nil {
		return nil, err
	}
	if err := f.Meet(ctx, p); err != nil {
		return nil, err
	}
	if err := pause(ctx, settle); err != nil {
		return nil, err
	}
	what := "two transfers"
	if o.Duration > 0 {
		what = o.Duration.String() + " of transfers"
	}
	line.Phase("moving %s of %s, and comparing what came", what, timeline.FormatSize(o.Total))
	return res, f.Move(ctx, p, o, Pipelined, res)
}

// Baseline is Plain on a machine that is quiet enough, at one of a few tries.
func (f *Field) Baseline(ctx context.Context) (rails []timeline.Rail, all timeline.Rate,
	err error) {
	for try := 1; ; try++ {
		if rails, all, err = f.Plain(ctx, f.setup.Plain); err != nil {
			return nil, 0, err
		}
		if err = void(rails, all); err == nil {
			return rails, all, nil
		}
		if try == plainTries {
			return nil, 0, err
		}
		f.line.Print("%v", err)
	}
}

// void is the error of a run that would compare with a disturbed baseline: its shares would be
// those of the disturbance, and not of the rails.
func void(rails []timeline.Rail, together timeline.Rate) error {
	var sum timeline.Rate
	for _, r := range rails {
		if r.Alone < minShare*r.Rate {
			return fmt.Errorf("%w: a plain stream over %s of %s carries %s, less than %g of it: %s", ErrVoid,
				r.Name, r.Rate, r.Alone, minShare, voidRemedy)
		}
		sum += r.Rate
	}
	if together < minShare*sum {
		return fmt.Errorf(
			"%w: plain streams over all rails, %s together, carry %s, less than %g of it: %s", ErrVoid, sum,
			together, minShare, voidRemedy)
	}
	return nil
}

// Plain measures each rail alone, and then all of them at once, with plain streams.
func (f *Field) Plain(ctx context.Context, span time.Duration) (rails []timeline.Rail,
	all timeline.Rate, err error) {
	for i, r := range f.setup.Rates {
		f.line.Phase("measuring %s of %s with a plain stream", netrig.Name(i), r)
		alone, err := Streams(ctx, f.Rig, []int{i}, min(span, aloneSpan))
		if err != nil {
			return nil, 0, err
		}
		rails = append(rails, timeline.Rail{Name: netrig.Name(i), Rate: r, Alone: alone[0],
			Buffer: f.Rig.Buffer(i)})
	}
	f.line.Phase("measuring all rails at once")
	all, err = Together(ctx, f.Rig, span)
	return rails, all, err
}

// Move moves transfers for o.Duration, a number at a time, or a cold and a warm one, while the
// faults happen, and fills in the fields of res about that.
func (f *Field) Move(ctx context.Context, p *Pair, o *timeline.Options, atOnce int,
	res *timeline.Result) error {
	if o.Duration == 0 {
		return f.move(ctx, p, o.Faults, 1, func(n int, _ time.Duration) bool { return n < 2 }, res)
	}
	return f.move(ctx, p, o.Faults, atOnce, func(_ int, since time.Duration) bool {
		return since < o.Duration
	}, res)
}

// MoveCount moves n transfers, one after the other, on healthy rails.
func (f *Field) MoveCount(ctx context.Context, p *Pair, count int, res *timeline.Result) error {
	return f.move(ctx, p, nil, 1, func(n int, _ time.Duration) bool { return n < count }, res)
}

// move begins transfers while more is true.
func (f *Field) move(ctx context.Context, p *Pair, faults []timeline.Fault, atOnce int,
	more func(n int, since time.Duration) bool, res *timeline.Result) error {
	err := f.Watch(ctx, faults, func(base time.Time) error {
		var all []*Transfer
		var wg sync.WaitGroup
		defer wg.Wait()
		window := make(chan struct{}, atOnce)
		for more(len(all), time.Since(base)) {
			select {
			case window <- struct{}{}:
			case <-ctx.Done():
				return ctx.Err()
			}
			if !more(len(all), time.Since(base)) {
				break
			}
			t, err := p.Begin(ctx, Order{})
			if err != nil {
				return err
			}
			all = append(all, t)
			f.line.Note("%d begun", len(all))
			wg.Go(func() { t.Landed(); <-window })
		}
		var turn time.Time
		for _, t := range all {
			t.Wait()
			// Transfers are served in the order in which they began: the wire belongs to one once its
			// predecessor is done.
			began := t.Began
			if turn.After(began) {
				began = turn
			}
			turn = t.Ended
			x := timeline.Transfer{Began: timeline.Seconds(began.Sub(base)),
				Took: timeline.Seconds(t.Ended.Sub(began)), Bytes: t.Bytes}
			if t.Err != nil {
				x.Error = t.Err.Error()
			}
			res.Transfers = append(res.Transfers, x)
		}
		return nil
	}, res)
	if err == nil {
		res.Judge()
	}
	return err
}

// Watch calls do, which fills in transfers, while it samples the receiver's counters and lets the
// faults happen; base is the time from which everything counts. res.Applied has when each fault
// had taken effect: its command has returned by then.
func (f *Field) Watch(ctx context.Context, faults []timeline.Fault, do func(base time.Time) error,
	res *timeline.Result) error {
	c, err := f.Rig.Counters(netrig.Receiver)
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	var readings []netrig.Reading
	var applied []timeline.Span
	// The first and the last reading are made here: where the machine is busy, the one that samples
	// may come late, and what it has not seen is missing.
	read := func() (netrig.Reading, error) {
		v := make([]uint64, f.Rig.Rails())
		err := c.Read(v)
		return netrig.Reading{At: time.Now(), Rx: v}, err
	}
	first, err := read()
	if err != nil {
		return err
	}
	base := first.At
	wg.Go(func() {
		var err error
		if readings, err = c.Watch(timeline.SampleEvery, stop); err != nil {
			cancel(err)
		}
	})
	wg.Go(func() {
		for _, x := range faults {
			if pause(ctx, time.Until(base.Add(x.At))) != nil {
				return
			}
			from := time.Since(base)
			if err := f.Rig.Apply(x); err != nil {
				cancel(err)
				return
			}
			applied = append(applied, timeline.Span{From: timeline.Seconds(from),
				To: timeline.Seconds(time.Since(base))})
		}
	})
	err = do(base)
	if err == nil {
		// The chart should show what came after the last end.
		err = pause(ctx, timeline.Window)
	}
	close(stop)
	cause := context.Cause(ctx)
	cancel(nil)
	wg.Wait()
	if err == nil || cause != nil {
		err = cause
	}
	last, rerr := read()
	if err == nil {
		err = rerr
	}
	res.Applied = applied
	res.Samples = grid(append(append([]netrig.Reading{first}, readings...), last), base, f.Rig.Rails())
	return err
}

// Late is how much later the transfer that was in flight when a fault had taken effect ended than
// it would have, had the rails that are left brought the rest of it at their full rate from then
// on. False: none was in flight.
func Late(r *timeline.Result, d *timeline.Dip) (time.Duration, bool) {
	at := d.At.D()
	for _, t := range r.Transfers {
		if end := t.Began.D() + t.Took.D(); t.Began.D() <= at && at < end && d.Expected > 0 {
			left := float64(t.Bytes) - float64(r.Samples.Between(t.Began.D(), at))
			due := at + time.Duration(max(left, 0)*8/float64(d.Expected)*float64(time.Second))
			return end - due, true
		}
	}
	return 0, false
}

// grid turns readings into samples at equal times from base on.
func grid(in []netrig.Reading, base time.Time, rails int) timeline.Samples {
	s := timeline.Samples{Every: timeline.Seconds(timeline.SampleEvery),
		Bytes: make([][]uint64, rails)}
	if len(in) == 0 {
		return s
	}
	zero := make([]uint64, rails)
	for n, k := 0, 0; ; n++ {
		at := base.Add(time.Duration(n) * timeline.SampleEvery)
		for k < len(in)-1 && !in[k+1].At.After(at) {
			k++
		}
		if k == len(in)-1 {
			return s
		}
		a, b := in[k], in[k+1]
		part := min(max(float64(at.Sub(a.At))/float64(b.At.Sub(a.At)), 0), 1)
		for i := range rails {
			v := a.Rx[i] + uint64(part*float64(b.Rx[i]-a.Rx[i]))
			if n == 0 {
				zero[i] = v
			}
			s.Bytes[i] = append(s.Bytes[i], v-zero[i])
		}
	}
}
