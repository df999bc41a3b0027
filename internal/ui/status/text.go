package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/internal/nodeapi"
)

// Bounds of the text; JSON has all.
const (
	shownRows     = 16 // of each table
	shownTroubles = 8
)

// Text shows s on one screen. Rates are changes since prev, if prev is of the same process.
func (s *Status) Text(prev *Status) string {
	if prev != nil && (prev.Boot != s.Boot || !s.At.After(prev.At)) {
		prev = nil // another process: its counters began at 0
	}
	var b strings.Builder
	s.head(&b, prev)
	s.peers(prev).write(&b, "peers", "none yet: requests and gossip name them")
	s.rails(prev).write(&b, "rails", "")
	s.leases().write(&b, "leases", "")
	s.tiers(prev).write(&b, "store", "off")
	if len(s.Troubles) > 0 {
		b.WriteString("\n")
	}
	for _, text := range s.Troubles[:min(len(s.Troubles), shownTroubles)] {
		fmt.Fprintf(&b, "! %s\n", clean(text))
	}
	more(&b, len(s.Troubles)-shownTroubles)
	lines := strings.Split(b.String(), "\n")
	for i, l := range lines {
		lines[i] = strings.TrimRight(l, " ")
	}
	return strings.Join(lines, "\n")
}

func (s *Status) head(b *strings.Builder, prev *Status) {
	line := func(format string, a ...any) {
		b.WriteString(clean(fmt.Sprintf(format, a...)) + "\n")
	}
	phase := s.Phase
	engines := cmp.Or(strings.Join(s.Workers, ", "), "none")
	switch {
	case s.Phase == "leaving" && s.LeavingSeconds == 0:
		engines += " (their devices have failed: no requests from routers)"
	case s.Phase == "leaving":
		phase = fmt.Sprintf("leaving, %d s left", s.LeavingSeconds)
		engines += fmt.Sprintf(" (leaving: no new requests from routers for %d s)", s.LeavingSeconds)
	}
	line("%s  %s  %s  boot %s  kvspray %s", s.Node.Node, phase, s.Endpoint, short(s.Boot), s.Version)
	line("engines    %s", engines)
	var ended, received, waiting []string
	for _, k := range slices.Sorted(maps.Keys(s.Totals.Transfers)) {
		text := fmt.Sprintf("%s %d", strings.ReplaceAll(k, "_", " "), s.Totals.Transfers[k])
		if prev != nil && s.Totals.Transfers[k] > prev.Totals.Transfers[k] {
			text += fmt.Sprintf(" (+%d)", s.Totals.Transfers[k]-prev.Totals.Transfers[k])
		}
		ended = append(ended, text)
	}
	for _, k := range slices.Sorted(maps.Keys(s.Totals.Bytes)) {
		text := k + " " + size(s.Totals.Bytes[k])
		if prev != nil {
			text += " at " + speed(rate(prev.Totals.Bytes[k], s.Totals.Bytes[k], s.At.Sub(prev.At)))
		}
		received = append(received, text)
	}
	for p := spray.DecodeWaits; p <= spray.Background; p++ {
		if n := s.Leases.Rails.Waiting[p.String()]; n > 0 {
			waiting = append(waiting, fmt.Sprintf("%s %d", strings.ReplaceAll(p.String(), "_", " "), n))
		}
	}
	line("transfers  %d receiving, %d sending; ended: %s", s.Leases.Open[0], s.Leases.Open[1],
		cmp.Or(strings.Join(ended, ", "), "none"))
	line("received   %s", cmp.Or(strings.Join(received, ", "), "nothing"))
	line("queue      chunks %s; %d slices in flight; waiting for a prefill: %d",
		cmp.Or(strings.Join(waiting, ", "), "none"), s.Leases.Flights, s.Leases.Pending)
}

// table is rows of cells under a header; more are not shown.
type table struct {
	header []string
	rows   [][]string
	more   int
}

func newTable(header ...string) *table { return &table{header: header} }

func (t *table) row(cells ...string) {
	if len(t.rows) == shownRows {
		t.more++
		return
	}
	t.rows = append(t.rows, cells)
}

// write writes a table below its name, or none beside it. Without a text for none, an empty table
// is left out.
func (t *table) write(b *strings.Builder, name, none string) {
	if len(t.rows) == 0 {
		if none != "" {
			fmt.Fprintf(b, "%-10s %s\n", name, none)
		}
		return
	}
	fmt.Fprintf(b, "\n%s\n", name)
	// A strings.Builder returns no error.
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	for _, cells := range append([][]string{t.header}, t.rows...) {
		for i, c := range cells {
			cells[i] = clean(c)
		}
		_, _ = fmt.Fprintf(w, "  %s\n", strings.Join(cells, "\t"))
	}
	_ = w.Flush()
	more(b, t.more)
}

func more(b *strings.Builder, n int) {
	if n > 0 {
		fmt.Fprintf(b, moreTroubles+"%d more (--output json)\n", n)
	}
}

func (s *Status) peers(prev *Status) *table {
	t := newTable("reached at", "node", "lanes", "now", "sent", "routes")
	for i := range s.Reach {
		p := &s.Reach[i]
		n, idle := lanesOf(p)
		lanes := strconv.Itoa(n)
		if n == 0 && idle {
			lanes = "idle"
		}
		at := p.Endpoint
		switch {
		case at == "" && p.Claimed == "":
			at = "(it connected)"
		case at == "":
			at = fmt.Sprintf("(it connected, and announced %s)", p.Claimed)
		}
		now := "-"
		if prev != nil {
			now = speed(rate(prev.sent(p.Boot), s.sent(p.Boot), s.At.Sub(prev.At)))
		}
		t.row(at, cmp.Or(p.Node, "-"), lanes, now, size(s.sent(p.Boot)), routes(p))
	}
	return t
}

// sent counts the bytes to a peer, over all rails.
func (s *Status) sent(boot string) (n uint64) {
	for _, p := range s.Leases.Rails.Pairs {
		if p.Peer == boot {
			n += p.Counters.Bytes
		}
	}
	return n
}

// routes has transport:rail of each local rail with a lane.
func routes(p *nodeapi.PeerReach) string {
	var out []string
	for _, pair := range p.Pairs {
		if pair.Lanes > 0 {
			out = append(out, pair.Transport+":"+pair.Local)
		}
	}
	slices.Sort(out)
	return strings.Join(slices.Compact(out), " ")
}

type pairKey struct {
	peer string
	path spray.Path
}

// rails are the rail pairs to other sidecars, and to this one if used. Those that are out of use
// come first.
func (s *Status) rails(prev *Status) *table {
	before := map[pairKey]spray.PairView{}
	if prev != nil {
		for _, p := range prev.Leases.Rails.Pairs {
			before[pairKey{p.Peer, p.Path}] = p
		}
	}
	t := newTable("rail", "to", "peer", "state", "now", "learned", "in flight", "window", "slices",
		"delay", "bytes", "errors", "retries", "hedges", "excluded", "back")
	pairs := slices.Clone(s.Leases.Rails.Pairs)
	slices.SortStableFunc(pairs, func(a, b spray.PairView) int {
		return cmp.Compare(min(len(b.Reason), 1), min(len(a.Reason), 1))
	})
	for _, p := range pairs {
		c := &p.Counters
		if p.Peer == s.Boot && c.Bytes == 0 && p.Flights == 0 {
			continue
		}
		now, learned := "-", "-"
		if was, ok := before[pairKey{p.Peer, p.Path}]; ok {
			now = speed(rate(was.Counters.Bytes, c.Bytes, s.At.Sub(prev.At)))
		}
		if p.Samples > 0 {
			learned = speed(p.Rate)
		}
		t.row(p.Path.Transport+":"+p.Path.Local, p.Path.Remote, s.name(p.Peer), p.State, now, learned,
			size(p.InFlight), size(p.Window), strconv.Itoa(p.Flights), brief(p.Delay), size(c.Bytes),
			count(c.Errors), count(c.Failed+c.Refused+c.Lost+c.Doubled+c.TimedOut), count(c.Hedges),
			count(c.Exclusions), count(c.Readmissions))
	}
	return t
}

// leases are the open ones, the oldest of each side first.
func (s *Status) leases() *table {
	v := &s.Leases
	t := newTable("side", "lease", "request", "state", "age", "left", "grants", "")
	slices.SortFunc(v.Dests, func(a, b exec.DestView) int { return cmp.Compare(b.Age, a.Age) })
	slices.SortFunc(v.Sources, func(a, b exec.SourceView) int { return cmp.Compare(b.Age, a.Age) })
	for _, d := range v.Dests {
		t.row("receives", d.Lease, d.Req, d.State, brief(d.Age), brief(d.Left), strconv.Itoa(d.Grants),
			d.Trouble)
	}
	for _, x := range v.Sources {
		t.row("sends", x.Lease, x.Req, x.State, brief(x.Age), brief(x.Left),
			fmt.Sprintf("%d of %d", x.Served, x.Served+x.Serving), "")
	}
	t.more += v.Open[0] + v.Open[1] - len(v.Dests) - len(v.Sources)
	return t
}

// tiers are those of the page store. Hit rate and mean get are of the pages and gets since prev, or
// since the start if there were none.
func (s *Status) tiers(prev *Status) *table {
	t := newTable("tier", "bytes", "capacity", "full", "hit rate", "mean get", "evicted", "")
	if s.Store == nil {
		return t
	}
	var was nodeapi.Store
	if prev != nil && prev.Store != nil {
		was = *prev.Store
	}
	now, before := asked(s.Store), asked(&was)
	if now <= before {
		was, before = nodeapi.Store{}, 0
	}
	for i, x := range s.Store.Tiers {
		var old nodeapi.StoreTier
		if i < len(was.Tiers) {
			old = was.Tiers[i]
		}
		full, hits, mean := "-", "-", "-"
		if x.Capacity > 0 {
			full = fmt.Sprintf("%.0f%%", 100*float64(x.Bytes)/float64(x.Capacity))
		}
		if now > before {
			hits = fmt.Sprintf("%.1f%%", 100*float64(x.Hits-old.Hits)/float64(now-before))
		}
		if n := x.Gets - old.Gets; n > 0 && x.Gets >= old.Gets {
			mean = brief(time.Duration((x.GetSeconds - old.GetSeconds) / float64(n) * 1e9))
		}
		note := x.Problem
		if note == "" && s.Store.Drained {
			note = "drained"
		}
		t.row(x.Name, size(x.Bytes), size(x.Capacity), full, hits, mean, count(x.Evicted), note)
	}
	return t
}

// asked counts the pages that gets asked for.
func asked(s *nodeapi.Store) uint64 {
	n := s.Misses
	for _, t := range s.Tiers {
		n += t.Hits
	}
	return n
}

// clean makes foreign text safe for a terminal and for a line: a client chooses the name of its
// request.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

func count(n uint64) string {
	if n == 0 {
		return "-"
	}
	return strconv.FormatUint(n, 10)
}

// rate is bytes per second between two readings of a counter.
func rate(was, is uint64, d time.Duration) float64 {
	if is <= was || d <= 0 {
		return 0
	}
	return float64(is-was) / d.Seconds()
}

// scaled writes a number with three digits and a suitable unit.
func scaled(v, step float64, units ...string) string {
	i := 0
	for ; v >= step && i < len(units)-1; i++ {
		v /= step
	}
	digits := 2
	if v >= 100 || i == 0 {
		digits = 0
	} else if v >= 10 {
		digits = 1
	}
	return strconv.FormatFloat(v, 'f', digits, 64) + " " + units[i]
}

func size(n uint64) string {
	return scaled(float64(n), 1024, "B", "KiB", "MiB", "GiB", "TiB", "PiB")
}

// speed is in bits, as is usual for rails.
func speed(bytes float64) string {
	return scaled(bytes*8, 1000, "b/s", "kb/s", "Mb/s", "Gb/s", "Tb/s")
}

func brief(d time.Duration) string {
	switch {
	case d == 0:
		return "-"
	case d < time.Millisecond && d > -time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second && d > -time.Second:
		return d.Round(100 * time.Microsecond).String()
	}
	return d.Round(100 * time.Millisecond).String()
}
