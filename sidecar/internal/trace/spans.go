package trace

import (
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/spans"
)

// Names of spans. docs/tracing.md describes them.
const (
	spanReceive   = "kvspray.receive" // destination: from the engine's request to its result
	spanAdmission = "kvspray.admission"
	spanGrant     = "kvspray.grant"
	spanArrive    = "kvspray.arrive"
	spanFence     = "kvspray.fence"
	spanCommit    = "kvspray.commit"
	spanOffer     = "kvspray.offer" // source: from the engine's request to the release of its blocks
	spanSend      = "kvspray.send"  // source: what one receiver gets
	spanQueue     = "kvspray.queue"
	spanWire      = "kvspray.wire" // on one pair of rails

	maxReceived = 5 // children of spanReceive
	maxSent     = 3 // spans of one receiver, without those of pairs of rails
)

// TransferSpans are the spans of a lease that has ended.
type TransferSpans struct {
	Trace      *exec.Trace
	Completion engines.Completion
	Route      string
	Reported   exec.Instant // when the engine had the result
	// ReportedAt is the same by the wall clock. It places all spans: the clock may have been set since
	// the start of the process.
	ReportedAt time.Time
}

// Traced reports whether there are any.
func (s *TransferSpans) Traced() bool {
	if s.Trace == nil {
		return false
	}
	traced := s.Trace.Span.Own != ""
	for i := range s.Trace.Sends {
		traced = traced || s.Trace.Sends[i].Traceparent != ""
	}
	return traced
}

// Max is the maximum of their number.
func (s *TransferSpans) Max() int {
	if s.Completion.Received {
		return 1 + maxReceived
	}
	n := 1
	for i := range s.Trace.Sends {
		n += maxSent + len(s.Trace.Sends[i].Rails)
	}
	return n
}

// Spans makes them.
func (s *TransferSpans) Spans() []spans.Span {
	if s.Completion.Received {
		return s.received()
	}
	return s.sent()
}

// at is an instant as a time. Spans of other hosts are placed by the clocks of these.
func (s *TransferSpans) at(i exec.Instant) time.Time { return s.ReportedAt.Add(i - s.Reported) }

// attributes are those of every span of a lease.
func (s *TransferSpans) attributes(more ...spans.Attr) []spans.Attr {
	return append([]spans.Attr{spans.Text("kvspray.request", s.Trace.Req),
		spans.Text("kvspray.transfer", s.Trace.Key.Xfer.String())}, more...)
}

func (s *TransferSpans) outcome() spans.Attr {
	return spans.Text("kvspray.outcome", string(metrics.OutcomeOf(s.Completion.Status)))
}

// failed is why the lease's span failed; empty: it did not.
func (s *TransferSpans) failed() string {
	switch c := &s.Completion; {
	case c.Status == engines.StatusOK || c.Status == engines.StatusCancelled:
		return ""
	case c.Reason == "":
		return string(metrics.OutcomeOf(c.Status))
	default:
		return c.Reason
	}
}

// family makes a span's children.
type family struct {
	s      *TransferSpans
	parent spans.Context
	out    []spans.Span
}

func (f *family) add(name string, from, to exec.Instant, more ...spans.Attr) {
	f.out = append(f.out, spans.Span{Name: name, Kind: spans.Internal, Self: spans.NewChild(f.parent),
		Parent: f.parent, Start: f.s.at(from), End: f.s.at(to), Attrs: f.s.attributes(more...)})
}

// received are the spans of a destination lease.
func (s *TransferSpans) received() []spans.Span {
	t := s.Trace
	own, ok := spans.Parse(t.Span.Own)
	parent, child := spans.Parse(t.Span.Parent)
	if !ok || !child {
		return nil
	}
	began := t.Began
	if t.Span.Asked > 0 {
		began = min(began, t.Span.Asked)
	}
	f := family{s: s, parent: own}
	attrs := s.attributes(s.outcome(), spans.Text("kvspray.peer", t.Peer.String()),
		spans.Text("kvspray.route", s.Route), spans.Number("kvspray.bytes", s.Completion.Bytes),
		spans.Number("kvspray.grants", t.Grants), spans.Number("kvspray.ranks", t.Parts))
	f.out = append(f.out, spans.Span{Name: spanReceive, Kind: spans.Internal, Self: own,
		Parent: parent, Start: s.at(began), End: s.at(s.Reported), Failed: s.failed(), Attrs: attrs})
	if t.Span.Asked > 0 && t.Span.Admitted >= t.Span.Asked {
		f.add(spanAdmission, t.Span.Asked, t.Span.Admitted)
	}
	// The source sends its slices first and the reply behind them: the bitmap may be full before it.
	granted := t.Bound
	if t.Filled > 0 {
		granted = min(granted, t.Filled)
	}
	if t.Bound > 0 {
		f.add(spanGrant, t.Began, granted)
	}
	if t.Bound > 0 && t.Filled > 0 {
		f.add(spanArrive, granted, t.Filled, spans.Text("kvspray.route", s.Route),
			spans.Number("kvspray.bytes", s.Completion.Bytes))
		// Both are known only if the lease ended by its commit.
		if s.Completion.Status == engines.StatusOK {
			f.add(spanFence, t.Filled, t.Ended)
			f.add(spanCommit, t.Ended, s.Reported)
		}
	}
	return f.out
}

// sent are the spans of a source lease and of what was sent from it.
func (s *TransferSpans) sent() (out []spans.Span) {
	t := s.Trace
	own, traced := spans.Parse(t.Span.Own)
	if parent, ok := spans.Parse(t.Span.Parent); ok && traced {
		out = append(out, spans.Span{Name: spanOffer, Kind: spans.Internal, Self: own, Parent: parent,
			Start: s.at(t.Began), End: s.at(s.Reported), Failed: s.failed(), Attrs: s.attributes(s.outcome(),
				spans.Text("kvspray.route", s.Route), spans.Number("kvspray.bytes", s.Completion.Bytes),
				spans.Number("kvspray.early_bytes", t.BytesBefore),
				spans.Number("kvspray.grants", t.Grants))})
	}
	for i := range t.Sends {
		r := &t.Sends[i]
		// A receiver that names a span is the better parent: its own children have the rest.
		parent, ok := spans.Parse(r.Traceparent)
		if !ok {
			if parent, ok = own, traced; !ok {
				continue
			}
		}
		self := spans.NewChild(parent)
		outcome := "ended"
		if r.Committed {
			outcome = "committed"
		}
		f := family{s: s, parent: self}
		if r.First > 0 {
			f.add(spanQueue, r.Bound, r.First)
		}
		for _, rail := range r.Rails {
			f.add(spanWire, rail.First, rail.Last, spans.Text("kvspray.transport", rail.Path.Transport),
				spans.Text("kvspray.rail", rail.Path.Local),
				spans.Text("kvspray.rail.remote", rail.Path.Remote),
				spans.Number("kvspray.bytes", rail.Bytes), spans.Number("kvspray.slices", rail.Slices),
				spans.Number("kvspray.slices.failed", rail.Failed))
		}
		if r.Committed && r.Last > 0 {
			f.add(spanCommit, r.Last, r.Ended)
		}
		out = append(append(out, spans.Span{Name: spanSend, Kind: spans.Internal, Self: self,
			Parent: parent, Start: s.at(r.Bound), End: s.at(r.Ended), Attrs: s.attributes(
				spans.Text("kvspray.outcome", outcome), spans.Text("kvspray.peer", r.Peer.String()),
				spans.Number("kvspray.bytes", r.Bytes))}), f.out...)
	}
	return out
}
