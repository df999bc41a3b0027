package exec

import (
	"fmt"
	"time"

	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

type simLane struct {
	id       uint64
	from, to *simNode
	backend  string
	rail     string
	dead     bool
	hung     bool
	held     []transport.Slice
}

// join opens lanes both ways.
func (s *sim) join(a, b *simNode) {
	s.after(s.delay(time.Millisecond), func() {
		b.event(func() { b.ex.PeerUp(s.now, a.addr, a.boot) })
	})
	for i, backend := range []string{"shm", "tcp", "tcp"} {
		rail := fmt.Sprint(backend, i)
		s.lane(a, b, backend, rail)
		if a != b {
			s.lane(b, a, backend, rail)
		}
	}
}

func (s *sim) lane(from, to *simNode, backend, rail string) {
	s.lanes++
	l := &simLane{id: s.lanes, from: from, to: to, backend: backend, rail: rail}
	s.after(s.delay(3*time.Millisecond), func() {
		if from.dead || to.dead {
			return
		}
		from.lanes[l.id] = l
		from.event(func() {
			err := from.ex.LaneUp(s.now, to.boot, spray.LaneInfo{ID: l.id,
				Path:       spray.Path{Transport: backend, Local: rail, Remote: rail},
				SliceBytes: 2 * transfer.ChunkBytes, MaxSlices: 4}, backend == "shm")
			if err != nil {
				s.fatalf("%v", err)
			}
		})
		if s.chance(s.faults) {
			s.after(s.delay(time.Second), func() { l.hung = true })
		}
		if s.chance(s.faults) {
			s.after(s.delay(2*time.Second), func() { l.die() })
		}
	})
}

// die ends the lane: its slices end as unknown or not landed, and it returns later.
func (l *simLane) die() {
	if l.dead {
		return
	}
	l.dead = true
	s, n := l.from.s, l.from
	delete(n.lanes, l.id)
	n.event(func() { n.ex.LaneDown(s.now, l.id) })
	held := l.held
	l.held = nil
	for _, sl := range held {
		out := transfer.NotLanded
		if s.chance(0.5) {
			out = transfer.InDoubt
		}
		l.end(sl, out, transfer.ReasonLaneLost)
	}
	s.lane(l.from, l.to, l.backend, l.rail)
}

func (l *simLane) end(sl transport.Slice, out transfer.Outcome, why transfer.Reason) {
	n := l.from
	n.event(func() {
		n.ex.Results(n.s.now, []transport.Result{{Slice: sl, Outcome: out, Reason: why}})
	})
}

func (n *simNode) move(lane uint64, batch []transport.Slice) {
	s, l := n.s, n.lanes[lane]
	if l == nil {
		for _, sl := range batch {
			s.after(0, func() {
				n.event(func() {
					n.ex.Results(s.now, []transport.Result{{Slice: sl, Outcome: transfer.NotLanded,
						Reason: transfer.ReasonLaneLost}})
				})
			})
		}
		return
	}
	for _, sl := range batch {
		l.held = append(l.held, sl)
		s.after(s.delay(time.Millisecond), func() { l.read(sl) })
	}
}

func (l *simLane) release(sl transport.Slice) bool {
	for i := range l.held {
		if l.held[i].Cookie == sl.Cookie {
			l.held = append(l.held[:i], l.held[i+1:]...)
			return true
		}
	}
	return false
}

// read takes the bytes from the source.
func (l *simLane) read(sl transport.Slice) {
	s := l.from.s
	if l.dead || l.hung || l.from.dead {
		return
	}
	if l.from.stopped {
		l.from.later = append(l.from.later, func() { l.read(sl) })
		return
	}
	snd := sendingOf(sl)
	from := sl.Origin.Memory.(*simSource)
	src, version := from.lease, from.version
	if !sl.Origin.Enter() {
		if l.release(sl) {
			l.end(sl, transfer.NotLanded, transfer.ReasonSourceGone)
		}
		return
	}
	if src.done != nil {
		s.fatalf("lease %v is read after its completion", src.id)
	}
	read := make([]string, sl.Range.Count)
	for i := range read {
		read[i] = src.chunk(snd.Plan.(*simPlan), sl.Range.First+uint32(i))
	}
	table := from.table
	sl.Origin.Leave()
	valid := src.version == version
	if valid && (len(table) != len(src.table) || len(table) > 0 && &table[0] != &src.table[0]) {
		s.fatalf("lease %v is read by table %v, the engine reported %v", src.id, table, src.table)
	}
	s.after(s.delay(time.Millisecond), func() { l.land(sl, read, valid) })
}

func sendingOf(sl transport.Slice) *SendPart {
	return sl.Origin.Memory.(*simSource).snd
}

// simSource connects an origin with its part and the engine's lease.
type simSource struct {
	transport.Memory
	snd     *SendPart
	lease   *simLease
	version int // of the lease's blocks, at Bind
	table   [][]uint32
}

// chunk is the current content of the engine's memory.
func (l *simLease) chunk(p *simPlan, c uint32) string {
	seg := p.space.SegmentOf(c)
	r := p.Ready(seg, l.layers[seg], l.final[seg])
	if c >= r.First && c < r.End() {
		return l.key
	}
	return "garbage"
}

// land is the arrival of the frame at the receiver.
func (l *simLane) land(sl transport.Slice, read []string, valid bool) {
	s := l.from.s
	g := l.to.grants[[2]any{l.from.boot, sl.Origin.Slot}]
	why := transfer.ReasonNone
	switch {
	case l.to.dead:
		return
	case g == nil:
		why = transfer.ReasonUnknownSlot
	case g.l.Grant.Gen != sl.Origin.Gen:
		why = transfer.ReasonStaleGen
	case !g.l.Grant.Enter():
		why = transfer.ReasonRevoked
	}
	if why != transfer.ReasonNone {
		if l.release(sl) {
			l.end(sl, transfer.Rejected, why)
		}
		return
	}
	if g.lease.done != nil {
		s.fatalf("bytes land in lease %v after its completion", g.lease.id)
	}
	// A frame whose source was invalidated, or whose checksum is wrong, has written all the same.
	bad := s.chance(s.faults)
	for i, v := range read {
		c := sl.Range.First + uint32(i)
		if sl.Attempt < g.claim[c] {
			g.l.Grant.Leave()
			if l.release(sl) {
				l.end(sl, transfer.Rejected, transfer.ReasonSuperseded)
			}
			return
		}
		g.claim[c] = sl.Attempt
		if bad {
			v = "corrupt"
		}
		if !g.bitmap.Has(c) { // what has landed is read past, as transport.Claim does
			g.lease.content[c] = v
		}
	}
	if valid && !bad {
		g.bitmap.Set(sl.Range)
		g.l.Grant.Receipt.Set(sl.Range)
		if g.bitmap.Full() && !g.reported {
			g.reported = true
			l.to.event(func() { l.to.ex.Full(s.now, g.l) })
		}
	}
	g.l.Grant.Leave()
	if !l.release(sl) {
		return
	}
	switch {
	case !valid:
		l.end(sl, transfer.NotLanded, transfer.ReasonInvalidated)
	case bad:
		l.end(sl, transfer.Rejected, transfer.ReasonChecksum)
	case s.chance(s.faults):
		l.end(sl, transfer.InDoubt, transfer.ReasonTimeout) // the confirmation is lost
	default:
		l.end(sl, transfer.Landed, transfer.ReasonNone)
	}
}
