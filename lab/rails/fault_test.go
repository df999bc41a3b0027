package rails

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/lab/railsbench"
	"github.com/kvspray/kvspray/lab/railsbench/netrig"
	"github.com/kvspray/kvspray/lab/timeline"
)

// What a fault may cost.
const (
	linkDown  = 20 * time.Millisecond  // the kernel reports it
	silent    = 150 * time.Millisecond // the kernel reports nothing
	readmit   = 2 * time.Second        // after healing, at readmitAt of all rails
	readmitAt = 0.97
)

var kinds = []struct {
	kind string
	cost time.Duration
}{
	{"down", linkDown}, {"drop", silent}, {"ackdrop", silent}, {"rate=1/20", silent},
	{"flap=300ms", silent}, {"blackhole", silent},
}

// each is all of a list, or one of it under the race detector: it looks at what moves transfers and
// lets faults happen here, not at the sidecars, and make test-rails runs all of them without it.
func each[T any](all []T) []T {
	if testutil.Race && how == smoke {
		return all[1:2]
	}
	return all
}

// someFaults is how many make test-rails makes of each kind.
const someFaults = 4

// A rail dies in mid transfer, each way. No transfer fails, content is right; the others go on as
// if nothing had happened, the transfer in flight ends as soon as they allow, and the rail is used
// again soon after it has healed.
func TestFaults(t *testing.T) {
	rr := goal(t)
	// What the rails carry is measured once, and each kind has sidecars of its own.
	f := open(t, railsbench.Setup{Rates: rr})
	p := engines(t, f, 16*kib, total(), 2)
	r := measured(t, f, rr)
	for i, k := range each(kinds) {
		t.Run(k.kind, func(t *testing.T) {
			if i > 0 {
				renew(t, f, p)
			}
			n := 1
			switch {
			case how == long:
				n = 20
			case figures():
				n = someFaults
			}
			// In mid transfer: each takes more than half a second over all rails. Healed after a second, and
			// then all the time that there is to come back.
			at := []string{"250ms:rail0:" + k.kind, "1250ms:rail0:heal"}
			o := &timeline.Options{Duration: 1250*time.Millisecond + readmit + againWindow,
				Faults: faults(t, at...)}
			// took: by the command that makes the fault; all else counts from its end
			var windows, lates, back, took []time.Duration
			transfers, missed := 0, 0
			// A few runs on a machine that may have other work are judged by their median; the worst counts
			// where nothing disturbs.
			judged := 0.5
			if how == long {
				judged = 1
			}
			met := func() bool {
				return len(windows) > 0 && quantile(windows, judged) <= k.cost && quantile(lates,
					judged) <= k.cost && quantile(back, judged) <= readmit
			}
			more := patience{left: moreRounds}
			for i := 0; i < n || more.again(met()); i++ {
				transfer(t, p, railsbench.Order{}) // warm
				r.Transfers, r.Faults = nil, o.Faults
				r.Together = together(t, f)
				if err := f.Move(t.Context(), p, o, 1, r); err != nil {
					t.Fatal(err)
				}
				for _, x := range r.Transfers {
					if x.Error != "" {
						t.Errorf("run %d: a transfer that began at %v failed: %s", i, x.Began, x.Error)
					}
				}
				transfers += len(r.Transfers)
				// The fault may meet the moment between two transfers where the machine is busy. Then it is
				// made again.
				const misses = 5
				miss := func(format string, args ...any) {
					t.Helper()
					if t.Logf("run %d: "+format, append([]any{i}, args...)...); missed == misses {
						t.Fatalf("the fault met a transfer in none of %d runs", misses)
					}
					missed++
					n++
				}
				if len(r.Dips) != 2 {
					miss("%d dips for two events; %d transfers until %v", len(r.Dips), len(r.Transfers),
						r.Transfers[len(r.Transfers)-1].Began)
					continue
				}
				w := r.Dips[0].Recovered.D()
				if w < 0 {
					w = time.Hour // never
				}
				l, ok := railsbench.Late(r, &r.Dips[0])
				if !ok {
					miss("no transfer was in flight at the fault")
					continue
				}
				windows, lates, back = append(windows, w), append(lates, l),
					append(back, again(r, r.Dips[1].At.D()))
				took = append(took, r.Dips[0].Took.D())
			}
			t.Logf("%d faults, made in %v at most, %d transfers, all right; the first window of %v with "+
				"the other rails at %.2f: median %v, worst %v; in flight, late by: median %v, worst %v; back "+
				"at %.2f after: median %v, worst %v",
				len(windows), quantile(took, 1), transfers, timeline.Window, timeline.Enough, median(windows),
				quantile(windows, 1), median(lates), quantile(lates, 1), readmitAt, median(back),
				quantile(back, 1))
			rejoined(t, f, p)
			if !figures() || met() || !more.judges(t) {
				return
			}
			if w := quantile(windows, judged); w > k.cost {
				t.Errorf("the other rails were disturbed: the first window at %.2f of what they carry began "+
					"%v after the fault, want %v", timeline.Enough, w, k.cost)
			}
			if l := quantile(lates, judged); l > k.cost {
				t.Errorf(
					"the transfer in flight ended %v later than the rails that were left allow, want %v: %v", l,
					k.cost, lates)
			}
			if b := quantile(back, judged); b > readmit {
				t.Errorf("back at %.2f %v after healing, want %v: %v", readmitAt, b, readmit, back)
			}
		})
	}
}

// againWindow is what again looks at.
const againWindow = 250 * time.Millisecond

// again is how long after healing the first window of a quarter of a second begins in which all
// rails together carry what they should. Transfers follow one another here, so a window has a pause
// in it: what is missing of the wire's time between two of them does not count.
func again(r *timeline.Result, healed time.Duration) time.Duration {
	const window = againWindow
	var idle = func(from,
		to time.Duration) (sum time.Duration) {
		for i := 1; i < len(r.Transfers); i++ {
			a, b := r.Transfers[i-1].Began.D()+r.Transfers[i-1].Took.D(), r.Transfers[i].Began.D()
			if lo, hi := max(a, from), min(b, to); hi > lo {
				sum += hi - lo
			}
		}
		return sum
	}
	last := r.Transfers[len(r.Transfers)-1]
	for from := healed; from+window <= last.Began.D()+last.Took.D(); from += timeline.SampleEvery {
		want := r.Together.Over(window-idle(from, from+window)) * readmitAt
		if float64(r.Samples.Between(from, from+window)) >= want {
			return from - healed
		}
	}
	return time.Hour // never
}

// All rails dead for three seconds, then back: a transfer with time finishes, one without fails for
// its deadline, and the wire is used again.
func TestAllDeadThenBack(t *testing.T) {
	rr := goal(t)
	for _, kind := range each([]string{"down", "drop"}) {
		t.Run(kind, func(t *testing.T) {
			f := open(t, railsbench.Setup{Rates: rr})
			// A number of blocks that nothing divides has one layer, so that a block that came is a block
			// that need not be named.
			p := engines(t, f, 16*kib, total()+16*kib, 3)
			transfer(t, p, railsbench.Order{})
			patient, err := p.Begin(t.Context(), railsbench.Order{Deadline: time.Minute})
			if err != nil {
				t.Fatal(err)
			}
			hasty, err := p.Begin(t.Context(), railsbench.Order{Deadline: 1500 * time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			after(t, 200*time.Millisecond)
			apply(t, f, "0s:all:"+kind)
			died := time.Now()
			after(t, 3*time.Second)
			apply(t, f, "0s:all:heal")
			if patient.Wait(); patient.Err != nil {
				t.Errorf("a transfer with a minute: %v", patient.Err)
			}
			took := patient.Ended.Sub(died)
			t.Logf("dead for 3 s; the patient one ended %v after it began to be", took)
			if hasty.Wait(); hasty.Err == nil {
				t.Error("a transfer with 1.5 s came through 3 s without a rail")
			} else if !strings.Contains(hasty.Err.Error(), "deadline") {
				t.Errorf("the one past its deadline failed for another reason: %v", hasty.Err)
			} else if hasty.Recompute == 0 || hasty.Recompute > hasty.Tokens() {
				// It was granted, and its engines resume anywhere: what did not come has a name, and that is
				// not nothing.
				t.Errorf("%d tokens are named as missing of a prompt of %d", hasty.Recompute, hasty.Tokens())
			} else if strings.Contains(hasty.Err.Error(), "content differs") {
				t.Errorf("what it does not name as missing is not there: %v", hasty.Err)
			}
			t.Logf("the hasty one names %d of %d tokens as missing: %v", hasty.Recompute,
				hasty.Tokens(), hasty.Err)
			if limit := 3*time.Second + 2*readmit; took > limit && figures() {
				t.Errorf("the patient one ended %v after the rails died, want %v", took, limit)
			}
			rejoined(t, f, p)
		})
	}
}

// tcp as a whole is gone in mid transfer, in silence or because every connection is reset and every
// new one refused; another transport can reach the peer: the same transfer carries on, and what had
// come does not come again.
func TestOtherTransportCarriesOn(t *testing.T) {
	rr := goal(t)
	for _, kind := range each([]string{"down", "drop", "reset"}) {
		t.Run(kind, func(t *testing.T) {
			f := open(t, railsbench.Setup{Rates: rr, Set: []string{"transports.order=tcp,shm",
				"transports.shm.dir=" + t.TempDir()}})
			p := engines(t, f, 16*kib, total(), 2)
			kill := func() time.Time {
				apply(t, f, "0s:all:"+kind)
				return time.Now()
			}
			heal := func() { apply(t, f, "0s:all:heal") }
			if kind == "reset" {
				kill = func() time.Time { return refuse(t, f, true) }
				heal = func() {
					lanesEnd(t, f)
					refuse(t, f, false)
				}
			}
			// Where the machine is busy the fault may come after the transfer, or before much of it has
			// come. Then it is made again.
			const tries = 5
			for n := 1; ; n++ {
				transfer(t, p, railsbench.Order{})
				before := carried(t, f)
				x, err := p.Begin(t.Context(), railsbench.Order{Deadline: time.Minute})
				if err != nil {
					t.Fatal(err)
				}
				after(t, 200*time.Millisecond)
				flying := 2 * carried(t, f).room // windows grow until the fault, and no faster than that
				died := kill()
				select {
				case <-x.Done():
				case <-time.After(30 * time.Second):
					t.Error("half a minute after tcp was gone the transfer has not ended")
				}
				// The receiver's engine has it. The word of that comes to the sender by control lanes, which
				// have no other way than the rails.
				heal()
				if x.Wait(); x.Err != nil {
					t.Fatal(x.Err)
				}
				now := carried(t, f)
				byTCP, bySHM := now.tcp-before.tcp, now.shm-before.shm
				again := int64(byTCP+bySHM) - int64(x.Bytes)
				t.Logf("ended %v after tcp was gone, by %s; %d bytes came by tcp, %d were sent by shm: %d of "+
					"%d twice, where %d may have been in flight", x.Ended.Sub(died),
					x.Transport, byTCP, bySHM, again, x.Bytes, flying)
				// A slice that came and whose confirmation did not is sent again. Nothing else is: those in
				// flight are all that may be.
				if again < 0 || again > int64(flying) {
					t.Errorf("%d bytes by tcp and %d by shm make %d more than the transfer has, want 0 to %d: "+
						"what is missing was not all that was sent", byTCP, bySHM, again, flying)
				}
				// Had all been sent again, that would be more than the slices in flight.
				if byTCP > flying && bySHM > 0 && x.Ended.After(died) {
					break
				}
				if n == tries {
					t.Fatalf("in none of %d tries a part of the transfer went by tcp and, once that was gone, "+
						"the rest by shm", tries)
				}
			}
		})
	}
}

// refuse has the kernel answer whatever tcp sends over any rail with a reset, or no more, and
// returns when that began. It is looked at: what connects is refused, and what was connected ends.
func refuse(t *testing.T, f *railsbench.Field, on bool) (since time.Time) {
	t.Helper()
	listeners, old := make([]net.Listener, f.Rig.Rails()), make([]net.Conn, f.Rig.Rails())
	dial := func(rail int, refused bool) net.Conn {
		c, err := f.Rig.Dial(t.Context(), netrig.Sender, netrig.Addr(netrig.Sender, rail),
			listeners[rail].Addr().String())
		if err != nil && !errors.Is(err, unix.ECONNREFUSED) || refused != (err != nil) {
			t.Fatalf("rail %d: a new connection: %v; refused should be %t", rail, err, refused)
		}
		if c != nil {
			t.Cleanup(func() { _ = c.Close() })
		}
		return c
	}
	for i := range listeners {
		var err error
		if listeners[i], err = f.Rig.Listen(t.Context(), netrig.Receiver,
			netip.AddrPortFrom(netrig.Addr(netrig.Receiver, i), 0).String()); err != nil {
			t.Fatal(err)
		}
		old[i] = dial(i, !on)
	}
	// The rules are there before the call is through: on a quick machine the transfer's end is, too.
	since = time.Now()
	if err := f.Rig.Refuse(on); err != nil {
		t.Fatal(err)
	}
	for i, l := range listeners {
		dial(i, on)
		if c := old[i]; c != nil {
			_, werr := c.Write([]byte{1})
			_, rerr := c.Read(make([]byte, 1))
			// the first that comes after it is rejected
			if err := errors.Join(werr, rerr); !errors.Is(err, unix.ECONNRESET) {
				t.Fatalf("rail %d: a connection of before: %v, want a reset", i, err)
			}
		}
		_ = l.Close()
	}
	return since
}

// lanesEnd waits until the sender has no lane by tcp to its peer: all that there were have been
// reset.
func lanesEnd(t *testing.T, f *railsbench.Field) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; after(t, 10*time.Millisecond) {
		s, err := f.State(t.Context(), netrig.Sender)
		if err != nil {
			t.Fatal(err)
		}
		left := 0
		for _, l := range s.Lanes {
			if l.Transport == "tcp" && l.Peer != s.Boot {
				left++
			}
		}
		if left == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d lanes by tcp are up though every connection is reset", left)
		}
	}
}

// carriage is what each transport has carried so far.
type carriage struct {
	tcp uint64 // that came for the first time, as the receiver counts
	shm uint64 // that was sent, as the sender counts
	// what the sender may have in flight by tcp: the windows of its pairs, each a slice over at most
	room uint64
}

func carried(t *testing.T, f *railsbench.Field) (c carriage) {
	t.Helper()
	s, err := f.State(t.Context(), netrig.Sender)
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range s.Leases.Rails.Pairs {
		if q.Path.Transport == "shm" {
			c.shm += q.Counters["bytes"]
		} else if q.Samples > 0 {
			c.room += q.Window + q.Slice
		}
	}
	var text string
	if err := f.Get(t.Context(), netrig.Receiver, "/metrics", &text); err != nil {
		t.Fatal(err)
	}
	rails := 0
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
		if !strings.HasPrefix(name, "kvspray_rail_bytes_total{") || !strings.Contains(name,
			`direction="in"`) || !strings.Contains(name, `transport="tcp"`) {
			continue
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		c.tcp += uint64(n)
		rails++
	}
	if rails != f.Rig.Rails() {
		t.Fatalf("the receiver counts bytes of %d rails, want %d: %s", rails, f.Rig.Rails(), text)
	}
	return c
}

// No healthy rail is blamed: a slow rail beside a fast one, and loss on all of them.
func TestNoFalseExclusion(t *testing.T) {
	only(t, minute)
	span := 20 * time.Second
	switch {
	case how == long:
		span = 10 * time.Minute
	case busy:
		span = 3 * time.Second
	}
	for name, c := range map[string]struct {
		rates []string
		loss  float64
	}{"5 Mbit/s beside 2 Gbit/s": {[]string{"2gbit", "5mbit"}, 0}, "1% loss": {[]string{"200mbit",
		"100mbit", "50mbit", "50mbit"}, 0.01}} {
		t.Run(name, func(t *testing.T) {
			rr := rates(t, c.rates...)
			f := open(t, railsbench.Setup{Rates: rr})
			p := engines(t, f, 16*kib, 64*mib, 3)
			transfer(t, p, railsbench.Order{})
			for i := range rr {
				if err := f.Rig.Loss(i, c.loss); err != nil {
					t.Fatal(err)
				}
			}
			// A sidecar that is not run for a while may take a rail for the cause. Then it is looked at once
			// more, with fresh ones.
			more := patience{left: 2}
			for {
				excluded := mixed(t, f, p, span, len(rr))
				if excluded == "" {
					return
				}
				t.Log(excluded)
				rejoined(t, f, p) // whichever was to blame
				if !judges(t) {
					return
				}
				if !more.again(false) {
					if !more.noisy {
						t.Error("what is healthy was excluded: " + excluded)
					}
					return
				}
				renew(t, f, p)
				for i := range rr {
					if err := f.Rig.Loss(i, c.loss); err != nil {
						t.Fatal(err)
					}
				}
			}
		})
	}
}

// mixed moves transfers for a while, and returns which rails were excluded meanwhile, and why.
func mixed(t *testing.T, f *railsbench.Field, p *railsbench.Pair, span time.Duration,
	rails int) (excluded string) {
	t.Helper()
	r := &timeline.Result{Rails: make([]timeline.Rail, rails)}
	if err := f.Move(t.Context(), p, &timeline.Options{Duration: span}, 2, r); err != nil {
		t.Fatal(err)
	}
	if r.Failed > 0 {
		t.Errorf("%d of %d transfers failed", r.Failed, len(r.Transfers))
	}
	s, err := f.State(t.Context(), netrig.Sender)
	if err != nil {
		t.Fatal(err)
	}
	used := 0
	for _, q := range s.Leases.Rails.Pairs {
		if q.Samples == 0 {
			continue
		}
		used++
		if n := q.Counters["exclusions"]; n > 0 {
			excluded += fmt.Sprintf("%s was excluded %d times, the last time: %s. ", q.Path.Local, n, q.Last)
		}
		t.Logf("%s: %d MiB, %d suspicions, %d received again", q.Path.Local, q.Counters["bytes"]>>20,
			q.Counters["suspicions"], q.Counters["slices_doubled"])
	}
	if used != rails {
		t.Errorf("%d rails were used of %d", used, rails)
	}
	t.Logf("%v, %d transfers, %v", span, len(r.Transfers), r.Goodput)
	return excluded
}
