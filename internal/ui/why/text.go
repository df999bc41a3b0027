package why

import (
	"cmp"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/kvspray/kvspray/internal/nodeapi"
)

const shownRecords = 8 // of one sidecar, in text; JSON has all

// lines collects the text.
type lines struct{ strings.Builder }

// add adds a line with an indent of depth levels, and makes foreign text safe for a terminal: a
// client chooses the id of its request.
func (l *lines) add(depth int, format string, a ...any) {
	l.WriteString(strings.Repeat("  ", depth) + strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, fmt.Sprintf(format, a...)) + "\n")
}

// Text is the report for people.
func (r *Report) Text() string {
	l := &lines{}
	for i := range r.Router[:min(len(r.Router), shownRecords)] {
		l.router(&r.Router[i])
	}
	for i := range r.Sidecars {
		l.sidecar(&r.Sidecars[i])
	}
	for _, text := range r.Unknown {
		l.add(0, "unknown: %s", text)
	}
	return l.String()
}

func (l *lines) router(e *nodeapi.Routed) {
	l.add(0, "router, %s: request %s, mode %s", clock(e.At), e.Req, e.Mode)
	switch {
	case e.Prefill != "":
		l.add(1, "prefill engine %s, decode engine %s", e.Prefill, cmp.Or(e.Decode, "none"))
	default:
		l.add(1, "decode engine %s, no prefill engine", cmp.Or(e.Decode, "none"))
	}
	if e.LocalPrefill != "" {
		l.add(1, "the decode engine computed the prompt itself: %s", e.LocalPrefill)
	}
	answer := fmt.Sprintf("answer %d, first byte after %s", e.Status, micros(e.FirstUS))
	if e.Status == 0 {
		answer = "the client disconnected before an answer"
	}
	l.add(1, "%s, all after %s", answer, micros(e.TookUS))
}

func (l *lines) sidecar(s *Sidecar) {
	if !s.some() {
		return
	}
	l.add(0, "sidecar %s (%s)", s.Node, s.Address)
	for _, d := range s.Dests {
		l.add(1, "open: engine %s receives %s: %s for %s, %s left", d.Engine, d.Req, d.State,
			brief(d.Age), brief(d.Left))
		sum := 0
		for _, part := range d.Arrived {
			sum += part
		}
		l.add(2, "%d grants; %d %% of the bytes have arrived", d.Grants, sum/max(len(d.Arrived), 1))
		if d.Trouble != "" {
			l.add(2, "last trouble: %s", d.Trouble)
		}
	}
	for _, x := range s.Sources {
		l.add(1, "open: engine %s offers %s: %s for %s, %s left", x.Engine, x.Req, x.State,
			brief(x.Age), brief(x.Left))
		l.add(2, "%d of %d layers are computed; sent to %d receivers, being sent to %d", x.Layers,
			x.LayersAll, x.Served, x.Serving)
	}
	for i := range s.Records[:min(len(s.Records), shownRecords)] {
		l.record(s, &s.Records[i])
	}
	if n := len(s.Records) - shownRecords; n > 0 {
		l.add(1, "%d more: give more of the id, or --output json", n)
	}
	for i, c := range s.Choices {
		if i == 0 || c.Peer != s.Choices[i-1].Peer {
			l.add(1, "transports to %s, in the order of preference, as they are now:", s.name(c.Peer))
		}
		l.add(2, "%-4s %s: %s", c.Transport, bytes(c.Bytes), c.Why)
	}
}

func (l *lines) record(s *Sidecar, e *nodeapi.Record) {
	head := func(format string, a ...any) {
		l.add(1, "%s: engine %s %s: %s after %s", clock(e.At), e.Engine, fmt.Sprintf(format, a...),
			e.Outcome, micros(e.TookUS))
	}
	req := cmp.Or(e.Req, "a request without an id")
	switch e.Side {
	case "destination":
		head("received %s of %s from %s", bytes(e.Bytes), req, s.name(e.Peer))
		l.waits(e, "the grant: the source had to bind its blocks",
			"the bytes: the layers that were not computed yet, the queue, the rails",
			"the fence and the checks")
	case "source":
		head("offered %s, and sent %s", req, bytes(e.Bytes))
		l.waits(e, "the first receiver", "the receivers", "")
		if e.FlagUS > 0 {
			l.add(2, "%s had arrived before the last layer was computed; the commit came %s after it",
				bytes(e.Early), micros(e.FlagUS))
		}
		for i := range e.Sends {
			l.send(s, &e.Sends[i])
		}
	case "copy":
		head("copied %s within itself for %s by %s", bytes(e.Bytes), req, cmp.Or(e.Route, "nothing"))
		l.waits(e, "its turn", "", "")
	default:
		head("store %s of %s for %s", e.Side, bytes(e.Bytes), req)
		if p := e.Pages; p != nil {
			l.pages(e.Side, p)
		}
	}
	if e.Reason != "" {
		l.add(2, "reason: %s", e.Reason)
	}
}

// waits writes how long the request waited for what. A wait with an empty text is left out.
func (l *lines) waits(e *nodeapi.Record, queue, wire, commit string) {
	for _, x := range []struct {
		us   int64
		text string
	}{{e.QueueUS, queue}, {e.WireUS, wire}, {e.CommitUS, commit}} {
		if x.us > 0 && x.text != "" {
			l.add(2, "waited %s for %s", micros(x.us), x.text)
		}
	}
}

func (l *lines) send(s *Sidecar, x *nodeapi.Send) {
	if len(x.Rails) == 0 {
		l.add(2, "to %s: no slice was sent", s.name(x.Peer))
		return
	}
	end := fmt.Sprintf("committed %s after the last one", micros(x.CommitUS))
	if !x.Committed {
		end = "ended without a commit"
	}
	l.add(2, "to %s: first slice %s after the match (first layer, queue), all confirmed %s later, %s",
		s.name(x.Peer), micros(x.FirstUS), micros(x.WireUS), end)
	for _, rail := range x.Rails {
		failed := ""
		if rail.Failed > 0 {
			failed = fmt.Sprintf(", %d of them failed and were retransmitted", rail.Failed)
		}
		l.add(3, "%s %s to %s: %s in %d slices%s", rail.Transport, rail.Local, rail.Remote,
			bytes(rail.Bytes), rail.Slices, failed)
	}
}

func (l *lines) pages(side string, p *nodeapi.PageCount) {
	if side == "put" {
		l.add(2, "%d pages: %d stored, %d were there already, %d failed", p.All, p.Stored, p.Existed,
			p.Failed)
		return
	}
	l.add(2, "%d pages: %d from memory, %d disk, %d object store, %d other nodes; %d missing, "+
		"%d failed", p.All, p.Memory, p.Disk, p.Object, p.Peer, p.Missing, p.Failed)
}

func clock(t time.Time) string { return t.Local().Format("15:04:05.000") }

func micros(us int64) string { return brief(time.Duration(us) * time.Microsecond) }

func brief(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(100 * time.Microsecond).String()
	}
	return d.Round(10 * time.Millisecond).String()
}

// bytes writes a size with a suitable unit.
func bytes(n uint64) string {
	const kib, mib, gib = 1 << 10, 1 << 20, 1 << 30
	switch {
	case n < kib:
		return fmt.Sprintf("%d B", n)
	case n < mib:
		return fmt.Sprintf("%.1f KiB", float64(n)/kib)
	case n < gib:
		return fmt.Sprintf("%.1f MiB", float64(n)/mib)
	}
	return fmt.Sprintf("%.2f GiB", float64(n)/gib)
}
