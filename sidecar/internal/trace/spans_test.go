package trace

import (
	"slices"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/spans"
)

// A lease has at most the spans that it announces, and its end is at the wall clock's time of the
// report, whatever the clock was before.
func TestSpansOfALease(t *testing.T) {
	traceparent := func() string { return spans.Format(spans.NewRoot()) }
	at := time.Unix(1_700_000_000, 0)
	for _, received := range []bool{true, false} {
		s := &TransferSpans{Reported: exec.Instant(time.Hour), ReportedAt: at,
			Completion: engines.Completion{Received: received, Status: engines.StatusOK},
			Trace: &exec.Trace{Began: 10, Bound: 20, Filled: 30, Ended: 40,
				Span: engines.Trace{Parent: traceparent(), Own: traceparent(), Asked: 5, Admitted: 8}}}
		s.Trace.Sends = slices.Grow(s.Trace.Sends, 2)[:2]
		send := &s.Trace.Sends[0]
		send.Bound, send.First, send.Last, send.Ended, send.Committed = 1, 2, 3, 4, true
		send.Rails = slices.Grow(send.Rails, 2)[:2]
		all := s.Spans()
		want := s.Max()
		if !received {
			want -= 2 // the second receiver has neither queue nor commit
		}
		if !s.Traced() || len(all) != want {
			t.Errorf("%d spans, want %d of at most %d", len(all), want, s.Max())
		}
		if !all[0].End.Equal(at) || !all[0].Start.Before(at.Add(-time.Minute)) {
			t.Errorf("received %v: from %v to %v, reported at %v", received, all[0].Start, all[0].End, at)
		}
	}
}
