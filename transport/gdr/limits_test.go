package gdr

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/sys/verbs/fake"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// Devices differ in their limits. Data arrives over one with each limit at its minimum, and
// with all of them at their minimum, from memory that the NIC reaches and memory that it does not.
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
		"registrations":   {with(func(l *verbs.Limits) { l.MaxRegistrations = 1 }), 64},
		"queue pairs":     {with(func(l *verbs.Limits) { l.MaxQueuePairs = 1 }), 64},
		"inline":          {whole, 0},
		"all at the same": {small, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := fake.New()
			f.Limit(x.limits)
			f.Inline(x.inline)
			t.Cleanup(f.Serve())
			ends := []string{"here", "there"}
			p := transporttest.NewPair(t, func(testing.TB) transport.Backend {
				name := ends[0]
				ends = ends[1:]
				return New(configOf(f, name))
			})
			a, b := p.Dial()
			for i, l := range []transport.Lane{a, b} {
				from, to := p.A, p.B
				if i == 1 {
					from, to = p.B, p.A
				}
				for k, apart := range []bool{false, true} {
					movedWithin(t, l, from, to, transfer.Slot(2*i+k), apart)
					for _, b := range []transport.Backend{p.A.Backend, p.B.Backend} {
						dropUnused(t, b.(*Backend))
					}
				}
			}
		})
	}
}

func movedWithin(t *testing.T, l transport.Lane, from, to *transporttest.End, slot transfer.Slot,
	apart bool) {
	t.Helper()
	src, dst := transporttest.NewMemory(t, stagedShape), transporttest.NewMemory(t, stagedShape)
	src.Write(5)
	if apart {
		onApart(t, src)
		onApart(t, dst)
	}
	bind := transporttest.NewBind(t, from, to, src, dst, slot, 1)
	bind.Dest.Seed.Store(5) // Landed compares every chunk
	var all []<-chan transport.Result
	for c := range src.Chunks() {
		all = append(all, from.Move(l, bind.Origin, transfer.Range{First: c, Count: 1}, 1))
	}
	for _, res := range all {
		if r := <-res; r.Outcome != transfer.Landed {
			t.Fatalf("staged %v: %s %s: %v", apart, r.Outcome, r.Reason, r.Err)
		}
	}
	if !bind.Dest.Full() {
		t.Error("not full")
	}
	bind.End(t)
	dst.GapsIntact(t)
}

// dropUnused releases what idle lanes and peers keep registered for a while.
func dropUnused(t *testing.T, b *Backend) {
	t.Helper()
	later := time.Now().Add(2 * idleKeys)
	for _, l := range b.allLanes() {
		l.trimStages(later, false)
		if err := l.dev.keys.sweep(later); err != nil {
			t.Fatal(err)
		}
	}
}

// A device without room for a lane is no rail, and the error names the limit.
func TestTooLowLimits(t *testing.T) {
	for name, change := range map[string]func(*verbs.Limits){
		fmt.Sprintf("reports %d work requests", 2*maxInFlight-1): func(l *verbs.Limits) {
			l.MaxWork = 2*maxInFlight - 1
		},
		fmt.Sprintf("%d completions", 2*maxInFlight+receives-1): func(l *verbs.Limits) {
			l.MaxCompletions = 2*maxInFlight + receives - 1
		},
		"0 and 1099511627776 bytes": func(l *verbs.Limits) { l.MaxMessage = 0 },
		"1048576 and 0 bytes":       func(l *verbs.Limits) { l.MaxRegistration = 0 },
	} {
		f := fake.New()
		l := f.Device("any").Limits()
		change(&l)
		f.Limit(l)
		b := New(config(f))
		_, err := b.Open(t.Context(), nil)
		if !errors.Is(err, transport.ErrNotSupported) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		_ = b.Close()
	}
}
