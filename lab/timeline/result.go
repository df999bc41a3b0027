package timeline

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"
)

// Result is one run.
type Result struct {
	Bench   string `json:"bench"` // rails or sim
	Version string `json:"version"`
	Host    string `json:"host"` // CPUs and kernel, or what stands for them

	Nodes int    `json:"nodes,omitempty"` // sim
	Seed  uint64 `json:"seed,omitempty"`  // sim
	Trace string `json:"trace,omitempty"` // sim: the same flags give the same

	Block    int     `json:"block_bytes"`
	Total    int64   `json:"total_bytes"`
	Duration Seconds `json:"duration_seconds,omitempty"`
	Faults   []Fault `json:"faults,omitempty"`
	// Applied is when each of Faults was made, as far as the run came; shorter where that was not
	// recorded: then a fault is taken to have happened at the very time that it names, as it does in
	// sim.
	Applied []Span `json:"faults_applied,omitempty"`

	Rails []Rail `json:"rails"`
	// Together is what plain streams over all rails at once carry; of sim, over those of all senders.
	Together Rate `json:"together_bits_per_second"`

	Transfers []Transfer `json:"transfers"`
	Samples   Samples    `json:"samples"`

	// What follows is read out of the above by Judge.
	// content, from the first beginning to the last end
	Goodput Rate    `json:"goodput_bits_per_second"`
	Share   float64 `json:"share,omitempty"` // Goodput, of Together
	// a sender's first transfer, of what its rails carry together: the median of senders
	Cold   float64 `json:"cold_share"`
	Warm   float64 `json:"warm_share,omitempty"` // the median of all later ones
	Failed int     `json:"failed_transfers"`     // more than none is a failure of the run
	Dips   []Dip   `json:"dips,omitempty"`       // one for each time at which something happened
}

// Rail is one of them.
type Rail struct {
	Name   string  `json:"name"`
	Rate   Rate    `json:"rate_bits_per_second"`   // as it was asked for
	Alone  Rate    `json:"alone_bits_per_second"`  // what a plain stream carried over it
	RTT    Seconds `json:"rtt_seconds,omitempty"`  // when idle
	Buffer int     `json:"buffer_bytes,omitempty"` // of its shaper
}

// Span is how long the command that makes a fault ran. At its end the fault has taken effect,
// before its beginning it has not.
type Span struct {
	From Seconds `json:"from_seconds"`
	To   Seconds `json:"to_seconds"`
}

// Transfer is one of those that followed each other.
type Transfer struct {
	Began Seconds `json:"began_seconds"` // after the first one
	Took  Seconds `json:"took_seconds"`
	Bytes uint64  `json:"bytes"`
	// Sender is who sent it, of the Nodes/2 of sim.
	Sender int `json:"sender,omitempty"`
	// Error is why it failed; "" means that it came and that its content was verified.
	Error string `json:"error,omitempty"`
}

// Samples are the bytes that each rail's receiver has counted so far, at equal times from the first
// transfer's beginning.
type Samples struct {
	Every Seconds    `json:"every_seconds"`
	Bytes [][]uint64 `json:"rail_bytes"` // [rail][sample]
}

// Dip is what one fault, or several of one time, did to the throughput.
type Dip struct {
	Faults []Fault `json:"faults"`
	// At is when they had taken effect: what follows counts from there.
	At Seconds `json:"at_seconds"`
	// Took is how long their commands ran before that.
	Took Seconds `json:"took_seconds,omitempty"`
	// Expected is what the rails that are left carry, a slowed one its part.
	Expected Rate `json:"expected_bits_per_second"`
	// Surviving is what those carry to which nothing has happened.
	Surviving Rate `json:"surviving_bits_per_second"`
	// Recovered is when the first window begins in which these rails, and no other, bring enough of
	// that; negative: none did before the next fault. A rail that flaps is no survivor while it is up
	// either: its bytes are not owed.
	Recovered Seconds `json:"recovered_after_seconds"`
	// Share of what was expected that came in the time after the fault that Depth names, or until the
	// next, over rails that deliver.
	Share float64 `json:"share"`
}

// How a dip is read.
const (
	SampleEvery = 5 * time.Millisecond
	Window      = 50 * time.Millisecond
	Enough      = 0.95 // of what the remaining rails carry
	Depth       = 500 * time.Millisecond
	// Never is Recovered where no window came.
	Never = Seconds(-1)
)

// Judge fills in what is read out of transfers, rails and samples.
func (r *Result) Judge() {
	r.Goodput, r.Share, r.Cold, r.Warm, r.Failed, r.Dips = 0, 0, 0, 0, 0, nil
	var content uint64
	var end time.Duration
	var cold, warm []float64
	each := r.Together / Rate(r.senders())
	begun := map[int]bool{}
	for _, t := range r.Transfers {
		first := !begun[t.Sender]
		begun[t.Sender] = true
		if t.Error != "" {
			r.Failed++
			continue
		}
		content += t.Bytes
		end = max(end, t.Began.D()+t.Took.D())
		share := 0.0
		if each > 0 {
			share = float64(RateOf(t.Bytes, t.Took.D()) / each)
		}
		if first {
			cold = append(cold, share)
		} else {
			warm = append(warm, share)
		}
	}
	r.Goodput, r.Cold, r.Warm = RateOf(content, end), median(cold), median(warm)
	if r.Together > 0 {
		r.Share = float64(r.Goodput / r.Together)
	}
	for i := 0; i < len(r.Faults); {
		named := r.Faults[i].At
		n := i
		for n < len(r.Faults) && r.Faults[n].At == named {
			n++
		}
		from, at := r.applied(i).From.D(), r.applied(n-1).To.D()
		until := end
		if n < len(r.Faults) {
			until = min(end, r.applied(n).From.D())
		}
		if at < end {
			d := Dip{Faults: r.Faults[i:n], At: Seconds(at), Took: Seconds(at - from), Recovered: Never,
				Expected: r.left(named, Condition.Usable), Surviving: r.left(named, Condition.whole)}
			if after, ok := r.over(named, Condition.whole).recovered(at, until, d.Surviving); ok &&
				d.Surviving > 0 {
				d.Recovered = Seconds(after)
			}
			deep := min(until, at+Depth)
			if want := d.Expected.Over(deep - at); want > 0 {
				d.Share = float64(r.over(named, Condition.delivers).Between(at, deep)) / want
			}
			r.Dips = append(r.Dips, d)
		}
		i = n
	}
}

// Surviving is what came in [from, to) over the rails to which nothing had happened at a time that
// Faults name, of what these carry; 0 where there are none.
func (r *Result) Surviving(named, from, to time.Duration) float64 {
	want := r.left(named, Condition.whole).Over(to - from)
	if want <= 0 {
		return 0
	}
	return float64(r.over(named, Condition.whole).Between(from, to)) / want
}

// applied is when one of Faults was made.
func (r *Result) applied(fault int) Span {
	if fault < len(r.Applied) {
		return r.Applied[fault]
	}
	at := Seconds(r.Faults[fault].At)
	return Span{at, at}
}

// senders is how many nodes have rails of their own to send over.
func (r *Result) senders() int { return max(1, r.Nodes/2) }

// median is the upper one of two; 0 of none.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	return v[len(v)/2]
}

// left is what the rails carry together of which faults have left a share: never more than they did
// when all were measured at once.
func (r *Result) left(at time.Duration, share func(Condition) float64) (sum Rate) {
	var all Rate
	for i, x := range r.Rails {
		all += x.Alone
		sum += x.Alone * Rate(share(ConditionAt(r.Faults, i, at)))
	}
	if r.Together > 0 && all > r.Together {
		sum *= r.Together / all
	}
	return sum
}

// over is what came over the rails of which faults have left a share. What a receiver's device
// counts proves nothing about the others: a filter behind it swallows that, or no end learns that
// it came.
func (r *Result) over(at time.Duration, share func(Condition) float64) *Samples {
	s := &Samples{Every: r.Samples.Every}
	for i, b := range r.Samples.Bytes {
		if share(ConditionAt(r.Faults, i, at)) > 0 {
			s.Bytes = append(s.Bytes, b)
		}
	}
	return s
}

// At is how many bytes had come over all rails at a time, linear between samples.
func (s *Samples) At(at time.Duration) (n uint64) {
	if s.Every <= 0 {
		return 0
	}
	for _, b := range s.Bytes {
		i := int(at / s.Every.D())
		switch {
		case len(b) == 0 || at < 0:
		case i+1 >= len(b):
			n += b[len(b)-1]
		default:
			n += b[i] + uint64(float64(b[i+1]-b[i])*(float64(at%s.Every.D())/float64(s.Every)))
		}
	}
	return n
}

// Between is how many bytes came in [from, to).
func (s *Samples) Between(from, to time.Duration) uint64 { return s.At(to) - s.At(from) }

// recovered finds the first window after `at`, and over before `until`, that has enough of a rate.
func (s *Samples) recovered(at, until time.Duration, rate Rate) (time.Duration, bool) {
	want := rate.Over(Window) * Enough
	for from := at; s.Every > 0 && from+Window <= until; from += s.Every.D() {
		if float64(s.Between(from, from+Window)) >= want {
			return from - at, true
		}
	}
	return 0, false
}

// Write writes the result as JSON.
func (r *Result) Write(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// Read reads what Write wrote. Unknown fields are refused: they would be lost.
func Read(in io.Reader) (*Result, error) {
	d := json.NewDecoder(in)
	d.DisallowUnknownFields()
	var r Result
	if err := d.Decode(&r); err != nil {
		return nil, fmt.Errorf("timeline: read a result: %w", err)
	}
	for i, b := range r.Samples.Bytes {
		if !slices.IsSorted(b) {
			return nil, fmt.Errorf("timeline: read a result: samples of rail %d: counts go down", i)
		}
	}
	if n := len(r.Applied); n > len(r.Faults) {
		return nil, fmt.Errorf("timeline: read a result: faults_applied has %d entries for %d faults", n,
			len(r.Faults))
	}
	for i, x := range r.Applied {
		if x.From < 0 || x.To < x.From || i > 0 && x.From < r.Applied[i-1].To {
			return nil, fmt.Errorf("timeline: read a result: faults_applied[%d] is from %s to %s: want "+
				"one after the other", i, x.From, x.To)
		}
	}
	return &r, nil
}

// Print writes the result for people.
func (r *Result) Print(w io.Writer) error {
	var b bytes.Buffer
	p := func(format string, args ...any) { fmt.Fprintf(&b, format, args...) }
	p("%s, %s; blocks of %s\n", r.Bench, r.Host, FormatSize(int64(r.Block)))
	n := r.senders()
	for _, x := range r.Rails {
		p("  %-8s %10s, alone %s\n", x.Name, x.Rate, x.Alone/Rate(n))
	}
	if n > 1 {
		p("together %s for each of %d senders, %s in all", r.Together/Rate(n), n, r.Together)
	} else {
		p("together %s", r.Together)
	}
	p("; %d transfers of %s, %d failed\n", len(r.Transfers), FormatSize(r.Total), r.Failed)
	p("moved %s: %.3f of what the links carry together\n", r.Goodput, r.Share)
	if n > 1 {
		p("one transfer, of what its sender's links carry: the first %.3f", r.Cold)
	} else {
		p("one transfer, of what the links carry: the first %.3f", r.Cold)
	}
	if len(r.Transfers) > n {
		p(", later ones %.3f", r.Warm)
	}
	p("\n")
	for _, d := range r.Dips {
		p("  %v: %.3f of %s in the %s after", d.Faults, d.Share, d.Expected, Depth)
		switch {
		case d.Surviving == 0:
			p("; no rail is whole\n")
		case d.Recovered == Never:
			p("; no window of %s in which the rails that are whole are at %.2f of their %s\n", Window,
				Enough, d.Surviving)
		default:
			p("; the rails that are whole at %.2f of their %s after %s\n", Enough, d.Surviving, d.Recovered)
		}
	}
	happened := 0
	for _, d := range r.Dips {
		happened += len(d.Faults)
	}
	if late := r.Faults[min(happened, len(r.Faults)):]; len(late) > 0 {
		p("  %v: too late to be seen, every transfer had ended\n", late)
	}
	_, err := w.Write(b.Bytes())
	return err
}
