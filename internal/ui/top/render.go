// SPDX-License-Identifier: Apache-2.0

package top

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"charm.land/lipgloss/v2"
	"charm.land/lipgloss/v2/table"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
)

// Least width of the tables; a narrower terminal cuts lines.
const minWidth = 60

// Style holds text attributes. Plain has none.
type Style struct{ Title, Head, Good, Warn, Bad, Faint lipgloss.Style }

// Plain is for files, pipes and terminals without attributes.
var Plain = Style{}

// Colored is for terminals. The terminal library reduces it to the terminal's abilities.
var Coloured = Style{
	Title: lipgloss.NewStyle().Bold(true),
	Head:  lipgloss.NewStyle().Faint(true),
	Good:  lipgloss.NewStyle().Foreground(lipgloss.Color("2")),
	Warn:  lipgloss.NewStyle().Foreground(lipgloss.Color("3")),
	Bad:   lipgloss.NewStyle().Foreground(lipgloss.Color("1")),
	Faint: lipgloss.NewStyle().Faint(true),
}

// Render draws cur. Rates are changes since prev, if prev is of the same process. Lines are at most
// width wide; 0: unlimited.
func Render(prev, cur *Snapshot, width int, st Style) string {
	if prev != nil && (prev.Boot != cur.Boot || !cur.At.After(prev.At)) {
		prev = nil // another process: its counters began at 0
	}
	var b strings.Builder
	head(&b, prev, cur, st)
	section(&b, "RAILS", rails(prev, cur, st), st)
	section(&b, "PEERS", peers(prev, cur, st), st)
	section(&b, "LEASES", leases(cur, st), st)
	if cur.Store != nil {
		section(&b, "STORE", tiers(prev, cur.Store, st), st)
	}
	lines := strings.Split(strings.TrimRight(b.String(), "\n"), "\n")
	for i, l := range lines {
		l = strings.TrimRight(l, " ")
		if width > 0 {
			l = lipgloss.NewStyle().MaxWidth(max(width, minWidth)).Render(l)
		}
		lines[i] = l
	}
	return strings.Join(lines, "\n") + "\n"
}

func section(b *strings.Builder, name string, t *table.Table, st Style) {
	if t == nil {
		fmt.Fprintf(b, "\n%s\n%s\n", st.Title.Render(name), st.Faint.Render("  none"))
		return
	}
	fmt.Fprintf(b, "\n%s\n%s\n", st.Title.Render(name), t.Render())
}

func newTable(st Style, left int, headers ...string) *table.Table {
	return table.New().Border(lipgloss.HiddenBorder()).BorderTop(false).BorderBottom(
		false).BorderHeader(false).BorderRow(false).BorderRight(false).
		Wrap(false).Headers(headers...).StyleFunc(func(row, col int) lipgloss.Style {
		s := lipgloss.NewStyle()
		if row == table.HeaderRow {
			s = st.Head
		}
		// Names to the left, numbers to the right, notes at the end to the left.
		if col >= left && col < len(headers)-1 {
			s = s.Align(lipgloss.Right)
		}
		return s
	})
}

func head(b *strings.Builder, prev, cur *Snapshot, st Style) {
	state := st.Bad.Render("starting")
	switch {
	case cur.Draining:
		state = st.Warn.Render("draining")
	case cur.Leaving:
		state = st.Warn.Render(fmt.Sprintf("leaving, %d s left", cur.LeavingSeconds))
	case cur.Ready:
		state = st.Good.Render("ready")
	}
	fmt.Fprintf(b, "%s  %s  %s  boot %s  kvspray %s\n", st.Title.Render(shown(cur.Node)), state,
		shown(cur.Endpoint), short(cur.Boot), shown(cur.Version))
	fmt.Fprintf(b, "engines: %s\n", shown(list(cur.Sessions, "none registered")))

	var ended []string
	for _, k := range sorted(cur.Totals.Transfers) {
		text := fmt.Sprintf("%s %d", strings.ReplaceAll(k, "_", " "), cur.Totals.Transfers[k])
		if prev != nil {
			if d := cur.Totals.Transfers[k] - min(prev.Totals.Transfers[k], cur.Totals.Transfers[k]); d > 0 {
				text += fmt.Sprintf(" (+%d)", d)
			}
		}
		ended = append(ended, text)
	}
	fmt.Fprintf(b, "transfers: %d receiving, %d sending; ended: %s\n", cur.Leases.Open[0],
		cur.Leases.Open[1], list(ended, "none"))

	var landed []string
	for _, k := range sorted(cur.Totals.Bytes) {
		text := k + " " + size(cur.Totals.Bytes[k])
		if prev != nil {
			text += " at " + speed(rate(prev.Totals.Bytes[k], cur.Totals.Bytes[k], cur.At.Sub(prev.At)))
		}
		landed = append(landed, text)
	}
	fmt.Fprintf(b, "landed here: %s\n", list(landed, "nothing"))

	var waiting []string
	for p := spray.DecodeWaits; p <= spray.Background; p++ {
		if n := cur.Leases.Rails.Waiting[p.String()]; n > 0 {
			waiting = append(waiting, fmt.Sprintf("%s %d", strings.ReplaceAll(p.String(), "_", " "), n))
		}
	}
	fmt.Fprintf(b, "queue: chunks %s; %d slices in flight; waiting for a prefill: %d\n",
		list(waiting, "none"), cur.Leases.Flights, cur.Leases.Pending)
}

type pairKey struct {
	peer string
	path spray.Path
}

// rails are the rail pairs to other sidecars, and to this one if used.
func rails(prev, cur *Snapshot, st Style) *table.Table {
	before := map[pairKey]spray.PairView{}
	if prev != nil {
		for _, p := range prev.Leases.Rails.Pairs {
			before[pairKey{p.Peer, p.Path}] = p
		}
	}
	t := newTable(st, 4, "rail", "to", "peer", "state", "now", "learned", "in flight", "window",
		"slices", "delay", "bytes", "errors", "retries", "hedges", "excluded", "back", "why")
	rows := 0
	for _, p := range cur.Leases.Rails.Pairs {
		c := &p.Counters
		if p.Peer == cur.Boot && c.Bytes == 0 && p.Flights == 0 {
			continue
		}
		now, learned := "-", "-"
		if was, ok := before[pairKey{p.Peer, p.Path}]; ok {
			now = speed(rate(was.Counters.Bytes, c.Bytes, cur.At.Sub(prev.At)))
		}
		if p.Samples > 0 {
			learned = speed(p.Rate)
		}
		state := p.State
		switch state {
		case "healthy":
			state = st.Good.Render(state)
		case "excluded", "down":
			state = st.Bad.Render(state)
		default:
			state = st.Warn.Render(state)
		}
		why := p.Reason
		if p.Left > 0 && p.Left < time.Hour { // an endless exclusion lasts until the link is back
			why += fmt.Sprintf(" (for %v)", p.Left.Round(time.Millisecond))
		}
		rows++
		t.Row(shown(p.Path.Transport+":"+p.Path.Local), shown(p.Path.Remote), short(p.Peer), state, now,
			learned, size(p.InFlight), size(p.Window), strconv.Itoa(p.Flights),
			brief(p.Delay), size(c.Bytes), count(c.Errors),
			count(c.Failed+c.Refused+c.Lost+c.Doubled+c.TimedOut), count(c.Hedges), count(c.Exclusions),
			count(c.Readmissions), shown(why))
	}
	if rows == 0 {
		return nil
	}
	return t
}

func peers(prev, cur *Snapshot, st Style) *table.Table {
	t := newTable(st, 2, "peer", "reached at", "lanes", "now", "sent", "rails out of use", "")
	rows := 0
	for _, boot := range sorted(cur.Peers) {
		lanes, out := 0, 0
		var sent, was uint64
		for _, l := range cur.Lanes {
			if l.Peer == boot {
				lanes++
			}
		}
		for _, p := range cur.Leases.Rails.Pairs {
			if p.Peer != boot {
				continue
			}
			sent += p.Counters.Bytes
			if p.State != "healthy" && p.State != "readmitted" {
				out++
			}
		}
		now := "-"
		if prev != nil {
			for _, p := range prev.Leases.Rails.Pairs {
				if p.Peer == boot {
					was += p.Counters.Bytes
				}
			}
			now = speed(rate(was, sent, cur.At.Sub(prev.At)))
		}
		note, at := "", shown(cur.Peers[boot])
		switch {
		case boot == cur.Boot:
			if sent == 0 {
				continue
			}
			note = "this sidecar"
		case at == "":
			at = "-"
			note = "connected to this sidecar"
			if c := cur.Claimed[boot]; c != "" {
				note += ", and announced " + shown(c)
			}
		}
		rows++
		t.Row(short(boot), at, strconv.Itoa(lanes), now, size(sent), count(uint64(out)), note)
	}
	if rows == 0 {
		return nil
	}
	return t
}

func leases(cur *Snapshot, st Style) *table.Table {
	v := &cur.Leases
	if len(v.Dests)+len(v.Sources) == 0 {
		return nil
	}
	t := newTable(st, 4, "side", "lease", "request", "state", "age", "left", "grants", "")
	slices.SortFunc(v.Dests, func(a, b exec.DestView) int { return cmp.Compare(b.Age, a.Age) })
	slices.SortFunc(v.Sources, func(a, b exec.SourceView) int { return cmp.Compare(b.Age, a.Age) })
	for _, d := range v.Dests {
		t.Row("receives", d.Lease, shown(d.Req), d.State, brief(d.Age), brief(d.Left),
			strconv.Itoa(d.Grants), shown(d.Trouble))
	}
	for _, s := range v.Sources {
		t.Row("sends", s.Lease, shown(s.Req), s.State, brief(s.Age), brief(s.Left),
			fmt.Sprintf("%d of %d", s.Served, s.Served+s.Serving), "")
	}
	if more := v.Open[0] + v.Open[1] - len(v.Dests) - len(v.Sources); more > 0 {
		t.Row(fmt.Sprintf("and %d more", more))
	}
	return t
}

// tiers are those of the page store. Hit rate and mean get are of the pages and gets since prev, or
// since the start if there were none.
func tiers(prev *Snapshot, cur *Store, st Style) *table.Table {
	var was Store
	if prev != nil && prev.Store != nil {
		was = *prev.Store
	}
	asked := cur.asked() - was.asked()
	if asked == 0 || cur.asked() < was.asked() {
		was, asked = Store{}, cur.asked()
	}
	t := newTable(st, 1, "tier", "bytes", "capacity", "full", "hit rate", "mean get", "evicted", "")
	for i, x := range cur.Tiers {
		var before Tier
		if i < len(was.Tiers) {
			before = was.Tiers[i]
		}
		full, hits, mean := "-", "-", "-"
		if x.Capacity > 0 {
			full = fmt.Sprintf("%.0f%%", 100*float64(x.Bytes)/float64(x.Capacity))
		}
		if asked > 0 {
			hits = fmt.Sprintf("%.1f%%", 100*float64(x.Hits-before.Hits)/float64(asked))
		}
		if n := x.Gets - before.Gets; n > 0 && x.Gets >= before.Gets {
			mean = brief(time.Duration((x.GetUS-before.GetUS)/n) * time.Microsecond)
		}
		note := st.Bad.Render(shown(x.Problem))
		if x.Problem == "" && cur.Drained {
			note = st.Warn.Render("drained")
		}
		t.Row(shown(x.Name), size(x.Bytes), size(x.Capacity), full, hits, mean, count(x.Evicted), note)
	}
	return t
}

// asked counts the pages that gets asked for.
func (s *Store) asked() uint64 {
	n := s.Misses
	for _, t := range s.Tiers {
		n += t.Hits
	}
	return n
}

func sorted[V any](m map[string]V) []string {
	var k []string
	for s := range m {
		k = append(k, s)
	}
	slices.Sort(k)
	return k
}

func list(s []string, none string) string {
	if len(s) == 0 {
		return none
	}
	return strings.Join(s, ", ")
}

// shown makes foreign text safe for a terminal: a client chooses the name of its request.
func shown(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

// short is the part of an id that suffices for people.
func short(id string) string { return id[:min(len(id), 8)] }

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
	return scaled(float64(n), 1024, "B", "KiB", "MiB", "GiB",
		"TiB", "PiB")
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
