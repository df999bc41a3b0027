package pages

import (
	"context"
	"log/slog"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
	"github.com/kvspray/kvspray/store"
)

// ended counts and traces a lease.
func (s *Service) ended(w *engines.Worker, r *connector.Pages, c *engines.Completion) {
	outcome := metrics.OutcomeOf(c.Status)
	t := trace.Pages{Side: "get", Outcome: string(outcome), Req: r.Req, Engine: w.Name,
		Lease: r.Lease.String(), Pages: len(r.Blocks), Bytes: c.Bytes, TookUS: c.Took.Microseconds(),
		Reason: c.Reason}
	if r.Put {
		t.Side = "put"
	}
	broken := false // a page could not be copied, or was not what had been stored
	for _, p := range c.Pages {
		o, tier := connector.SplitPageResult(p)
		switch store.Outcome(o) {
		case store.Hit:
			switch store.Tier(tier) {
			case store.Disk:
				t.Disk++
			case store.Object:
				t.Object++
			case store.Peer:
				t.Peer++
			default:
				t.Memory++
			}
		case store.Miss:
			t.Missing++
		case store.Stored:
			t.Stored++
		case store.Existed:
			t.Existed++
		default:
			t.Failed++
			broken = broken || store.Outcome(o) == store.Failed || store.Outcome(o) == store.Damaged
		}
	}
	s.o.Metrics.Request(t.Side, outcome, c.Took)
	switch {
	case t.Object > 0:
		s.waited(store.Object, c.Bytes, c.Took)
	case t.Peer > 0:
		s.waited(store.Peer, c.Bytes, c.Took)
	case t.Disk > 0:
		s.waited(store.Disk, c.Bytes, c.Took)
	case t.Memory > 0:
		s.waited(store.Memory, c.Bytes, c.Took)
	}
	level, note := slog.LevelDebug, func(level slog.Level, msg string, args ...any) {
		s.o.Log.Log(context.Background(), level, msg, args...)
	}
	if c.Status != engines.StatusOK && c.Status != engines.StatusCancelled || broken {
		// A disk that is gone, or an engine, makes every request fail.
		level, note = slog.LevelWarn, s.failures.Note
	}
	note(level, "store request", "op", t.Side, "outcome", t.Outcome,
		"worker", w.Name, "req", t.Req, "lease", t.Lease, "pages", t.Pages, "memory", t.Memory, "disk",
		t.Disk, "object", t.Object, "peer", t.Peer, "missing", t.Missing, "stored", t.Stored,
		"existed", t.Existed,
		"failed", t.Failed, "bytes", t.Bytes, "took_us", t.TookUS, "reason", t.Reason)
	s.o.Transfers.Put(t)
}
