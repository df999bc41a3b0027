package gdr

import (
	"testing"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// Devices differ in their limits. Data arrives over one with each limit at its minimum, and
// with all of them at their minimum.
func TestUnlikeDevices(t *testing.T) {
	whole := fake.New().Device("any").Limits()
	with := func(change func(*verbs.Limits)) verbs.Limits {
		l := whole
		change(&l)
		return l
	}
	small := with(func(l *verbs.Limits) {
		l.MaxMessage, l.MaxWork, l.MaxRegistration = 1<<10, 2*maxInFlight, 1<<15
		l.MaxCompletions = 2*maxInFlight + receives
	})
	for name, x := range map[string]struct {
		limits verbs.Limits
		inline int
	}{
		"message":       {with(func(l *verbs.Limits) { l.MaxMessage = 1 << 10 }), 64},
		"work requests": {with(func(l *verbs.Limits) { l.MaxWork = 2 * maxInFlight }), 64},
		"completions": {with(func(l *verbs.Limits) {
			l.MaxCompletions = 2*maxInFlight + receives
		}), 64},
		"registration":    {with(func(l *verbs.Limits) { l.MaxRegistration = 1 << 15 }), 64},
		"inline":          {whole, 0},
		"all at the same": {small, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := fake.New()
			f.Limit(x.limits)
			f.Inline(x.inline)
			t.Cleanup(f.Serve())
			p := transporttest.NewPair(t, func(testing.TB) transport.Backend { return New(config(f)) })
			a, b := p.Dial()
			for i, l := range []transport.Lane{a, b} {
				from, to := p.A, p.B
				if i == 1 {
					from, to = p.B, p.A
				}
				src, dst := transporttest.NewMemory(t, shape), transporttest.NewMemory(t, shape)
				src.Write(5)
				bind := transporttest.NewBind(t, from, to, src, dst, transfer.Slot(i), 1)
				bind.Dest.Seed.Store(5) // Landed compares every chunk
				if res := from.MoveWait(l, bind.Origin, src.All(), 1); res.Outcome != transfer.Landed ||
					!bind.Dest.Full() {
					t.Fatalf("%s %s: %v", res.Outcome, res.Reason, res.Err)
				}
				bind.End(t)
				dst.GapsIntact(t)
			}
		})
	}
}
