package sim

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// backend is the fabric's transport, with faults of its own.
type backend struct {
	transport.Backend
	s *sidecar
}

// Grant has the sidecar watch what lands.
func (b backend) Grant(g *transport.Grant) ([]byte, error) {
	b.s.sinks[g].watch(g)
	token, err := b.Backend.Grant(g)
	if err != nil {
		b.s.c.violation("%s: grant: %v", b.s.n.addr, err)
	}
	return token, err
}

func (b backend) Fence(ctx context.Context, g *transport.Grant) error {
	err := b.s.fails()
	if err == nil {
		err = b.Backend.Fence(ctx, g)
	}
	if err == nil {
		b.s.sinks[g].fenced = true
	}
	return err
}

func (b backend) CloseOrigin(ctx context.Context, o *transport.Origin) error {
	err := b.s.fails()
	if err == nil {
		err = b.Backend.CloseOrigin(ctx, o)
	}
	if err == nil {
		b.s.sources[o].closed = true
	}
	return err
}

var errFence = errors.New("sim: a backend could not")

// fails makes a fence or a close fail, now and then.
func (s *sidecar) fails() error {
	if !s.c.chance(s.c.cfg.FenceFails) {
		return nil
	}
	s.c.stats.FencesFailed++
	return errFence
}

// lane is a lane of the fabric, with faults of its own.
type lane struct {
	transport.Meter
	s *sidecar
}

// RTT implements transport.Timed.
func (l lane) RTT() time.Duration {
	if t, ok := l.Meter.(transport.Timed); ok {
		return t.RTT()
	}
	return 0
}

// Move returns later what the fabric does not accept.
func (l lane) Move(batch []transport.Slice) error {
	s := l.s
	for _, x := range batch {
		if s.moving[x.Cookie] {
			s.c.violation("%s: slice %x was given out twice", s.n.addr, x.Cookie)
		}
		s.moving[x.Cookie] = true
	}
	s.gave(batch)
	batch = s.lie(l.ID(), batch)
	err := l.Meter.Move(batch)
	switch {
	case err == nil:
		return nil
	// what lies send counts, and the executor does not learn of it
	case !errors.Is(err, net.ErrClosed) && s.c.cfg.Lies == 0:
		s.c.violation("%s: lane %d %s: %v", s.n.addr, l.ID(), brokeBound, err)
	}
	res := make([]transport.Result, 0, len(batch))
	for _, x := range batch {
		res = append(res, transport.Result{Slice: x, Outcome: transfer.NotLanded,
			Reason: transfer.ReasonLaneLost, Err: err, Took: 1})
	}
	s.later(0, func() { s.results(res) })
	return nil
}

var errBackend = errors.New("sim: a backend gave a slice back")

// over marks slices that the executor believes to be over.
const over = 1 << 63

// lie takes slices out of a batch of which the backend will report falsely, or that it returns
// back.
func (s *sidecar) lie(lane uint64, batch []transport.Slice) []transport.Slice {
	if s.c.cfg.Lies+s.c.cfg.Errors == 0 {
		return batch
	}
	var honest []transport.Slice
	for _, x := range batch {
		switch {
		case s.c.chance(s.c.cfg.Errors):
			res := transport.Result{Slice: x, Outcome: transfer.NotLanded, Err: errBackend, Took: 1}
			s.later(0, func() { s.results([]transport.Result{res}) })
			continue
		case !s.c.chance(s.c.cfg.Lies):
			honest = append(honest, x)
			continue
		}
		s.c.stats.Lies++
		res := transport.Result{Slice: x, Outcome: transfer.Landed, Took: 1}
		if s.c.chance(0.7) {
			res.Outcome = transfer.NotLanded
			s.later(s.c.F.Jitter(300*time.Millisecond), func() {
				x.Cookie |= over
				_ = give(s.lanes[lane], []transport.Slice{x}) // what does not leave does no harm
			})
		}
		s.later(0, func() { s.results([]transport.Result{res}) })
	}
	return honest
}

func (s *sidecar) results(res []transport.Result) {
	s.run(func() {
		for i := range res {
			delete(s.moving, res[i].Cookie)
		}
		s.drv.Results(res)
	})
}

var errNoLane = errors.New("sim: no such lane")

func give(l transport.Lane, batch []transport.Slice) error {
	if l == nil {
		return errNoLane
	}
	return l.Move(batch)
}
