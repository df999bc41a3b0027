package sidecar

import (
	"context"
	"log/slog"
	"strings"
	"time"
)

// problemLooks is the time between two looks for problems that are to be logged.
const problemLooks = time.Second

// problem is why an optional part of the store does not work. The node runs without it, so only a
// report shows this.
type problem struct{ part, why string }

// problems need an operator, or end by themselves.
func (n *Node) problems() (out []string) {
	if !n.serving.Load() {
		return nil
	}
	if why := n.unreachable(); why != "" {
		out = append(out, "engines cannot connect: "+why)
	}
	for _, f := range n.health().Faults {
		text := f.Device + ": " + f.Text
		if f.Remedy != "" {
			text += ": " + f.Remedy
		}
		out = append(out, text)
	}
	for _, p := range n.pages.problems() {
		out = append(out, p.part+": "+p.why)
	}
	if p := n.served.problems.Load(); p != nil {
		out = append(out, *p...)
	}
	if missed := n.conv.missed.Load(); missed != nil && len(*missed) > 0 {
		out = append(out, "peer.gossip.join: no answer from "+strings.Join(*missed, ", "))
	}
	if t := n.observer.tracing; t != nil {
		if why := t.spans.Problem(); why != "" {
			out = append(out, "trace.otlp: "+why)
		}
	}
	return out
}

// problems are those of the store.
func (p *pageStore) problems() (out []problem) {
	if p.service == nil {
		return nil
	}
	if why := p.store.ObjectProblem(); why != "" {
		out = append(out, problem{"store tier object", why})
	}
	if p.exchange != nil {
		if why := p.exchange.Problem(); why != "" {
			out = append(out, problem{"store directory", why})
		}
	}
	return out
}

// logProblems logs when a part fails and when it works again, until ctx ends: a line for each
// change, whatever the reasons that it has meanwhile.
func logProblems(ctx context.Context, log *slog.Logger, problems func() []problem) {
	failing := map[string]bool{}
	t := time.NewTicker(problemLooks)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
		now := map[string]bool{}
		for _, p := range problems() {
			now[p.part] = true
			if !failing[p.part] {
				log.Warn("a part fails; the node runs without it", "part", p.part, "err", p.why)
			}
		}
		for part := range failing {
			if !now[part] {
				log.Info("a part works again", "part", part)
			}
		}
		failing = now
	}
}
