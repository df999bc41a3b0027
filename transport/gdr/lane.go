package gdr

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/mem"
	"github.com/kvspray/kvspray/internal/verbs"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// A confirmation on the lane's socket: slot, reason, a zero byte, generation, chunk.
const confirmBytes = 2 + 1 + 1 + 4 + 4

// lane is one end of a queue pair and of the socket that goes with it.
type lane struct {
	b      *Backend
	c      net.Conn
	q      verbs.QueuePair
	cq     verbs.CompletionQueue
	id     uint64
	peer   transfer.Boot
	remote string
	done   chan struct{}

	sendMu sync.Mutex // orders confirmations on the socket

	mu sync.Mutex
	// guarded by mu
	err    error
	seq    uint64
	slices map[uint64]*moved
	open   map[chunkKey]*moved // chunks in flight
	posted int
}

type chunkKey struct {
	slot  transfer.Slot
	gen   transfer.Gen
	chunk uint32
}

type moved struct {
	s        transport.Slice
	seq      uint64
	at       time.Time
	works    int // posted; given back when the slice ends
	complete uint32
	confirm  uint32 // chunks answered
	reason   transfer.Reason
	reading  bool // the NIC may still read the source
	disowned bool
	checked  bool // disowned is known
}

var _ transport.Lane = (*lane)(nil)

func (b *Backend) prepare(c net.Conn) (*lane, error) {
	cq, err := b.cfg.Device.NewCompletionQueue(maxSends + maxChunks)
	if err != nil {
		return nil, fmt.Errorf("gdr: new lane: %w", err)
	}
	q, err := b.cfg.Device.NewQueuePair(cq, maxSends, maxChunks)
	if err != nil {
		return nil, fmt.Errorf("gdr: new lane: %w", err)
	}
	return &lane{b: b, c: c, q: q, cq: cq, id: transport.NextLaneID(), done: make(chan struct{}), slices: map[uint64]*moved{},
		open: map[chunkKey]*moved{}}, nil
}

func (l *lane) attach() []byte {
	name := l.b.cfg.Device.Name()
	return append(encodeAddress(l.q.Address()), name[:min(len(name), maxRailName)]...)
}

// start connects to the proved peer. Both ends say on the socket that their receives are posted before either sends.
func (l *lane) start(o *wire.Opened) error {
	addr, rail, err := decodeAddress(o.Attach)
	if err != nil {
		return err
	}
	l.remote = rail
	ids := make([]uint64, maxChunks)
	if err := errors.Join(l.q.ToInit(), l.q.ToReadyToReceive(addr), l.q.PostReceive(ids), l.q.ToReadyToSend()); err != nil {
		return err
	}
	var ready [1]byte
	if _, err := l.c.Write(ready[:]); err != nil {
		return fmt.Errorf("gdr: ready: %w", err)
	}
	if _, err := io.ReadFull(l.c, ready[:]); err != nil {
		return fmt.Errorf("gdr: the peer's ready: %w", err)
	}
	_ = l.c.SetDeadline(time.Time{})
	l.peer = o.Peer
	l.b.mu.Lock()
	if l.b.closed {
		l.b.mu.Unlock()
		return net.ErrClosed
	}
	l.b.lanes[l] = struct{}{}
	l.b.wg.Add(2)
	l.b.mu.Unlock()
	l.b.host.LaneUp(l)
	follower := make(chan struct{})
	go func() {
		defer l.b.wg.Done()
		defer close(follower)
		l.follow()
	}()
	go func() {
		defer l.b.wg.Done()
		l.close(l.read())
		close(l.done)
		<-follower
		l.end()
	}()
	return nil
}

func (l *lane) ID() uint64          { return l.id }
func (l *lane) Peer() transfer.Boot { return l.peer }
func (l *lane) Backend() string     { return Name }
func (l *lane) Local() string       { return l.b.cfg.Device.Name() }
func (l *lane) Remote() string      { return l.remote }
func (l *lane) MaxInFlight() int    { return maxInFlight }

func (l *lane) Close() error {
	l.close(net.ErrClosed)
	return nil
}

// close puts the queue pair in the error state, which flushes it, and ends the socket, which ends the reader.
func (l *lane) close(err error) {
	l.mu.Lock()
	if l.err == nil {
		l.err = err
	}
	l.mu.Unlock()
	_ = l.q.ToError() // from RTS it cannot fail
	_ = l.c.Close()
}

// Move implements transport.Lane.
func (l *lane) Move(batch []transport.Slice) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	fail := func(err error) error { return fmt.Errorf("gdr: move on lane %d: %w", l.id, err) }
	if l.err != nil {
		return fail(errors.Join(net.ErrClosed, l.err))
	}
	var chunks uint32
	for i := range batch {
		chunks += batch[i].Range.Count
	}
	if len(l.slices)+len(batch) > maxInFlight || len(l.open)+int(chunks) > maxChunks {
		return fail(fmt.Errorf("%d slices of %d chunks beside %d of %d: %w", len(batch), chunks, len(l.slices), len(l.open), verbs.ErrFull))
	}
	// All is planned before anything is posted: an error means that nothing was taken.
	var works []verbs.Work
	var taken []*moved
	undo := func(err error) error {
		for _, m := range taken {
			l.dropLocked(m)
		}
		return fail(err)
	}
	for i := range batch {
		m := &moved{s: batch[i], at: time.Now(), seq: l.seq + 1}
		before := len(works)
		var err error
		if works, err = l.planLocked(works, m); err != nil {
			return undo(err)
		}
		m.works = len(works) - before
		if l.posted+m.works > maxSends {
			return undo(verbs.ErrFull)
		}
		if !l.b.startUse(m.s.Origin) {
			return undo(fmt.Errorf("origin %d.%d is closed", m.s.Origin.Slot, m.s.Origin.Gen))
		}
		m.reading = true
		l.seq++
		l.slices[m.seq] = m
		l.posted += m.works
		for c := m.s.Range.First; c < m.s.Range.End(); c++ {
			l.open[m.key(c)] = m
		}
		taken = append(taken, m)
	}
	if err := l.q.PostSend(works); err != nil {
		return undo(err)
	}
	return nil
}

func (m *moved) key(chunk uint32) chunkKey { return chunkKey{m.s.Origin.Slot, m.s.Origin.Gen, chunk} }

// planLocked appends the writes of a slice: for each chunk both sides' blocks walked together, the last one with the immediate.
func (l *lane) planLocked(works []verbs.Work, m *moved) ([]verbs.Work, error) {
	o := m.s.Origin
	t, err := decodeToken(o.Token)
	if err != nil {
		return works, err
	}
	if m.s.Range.Count == 0 || uint64(m.s.Range.First)+uint64(m.s.Range.Count) > uint64(len(t.chunks)) {
		return works, fmt.Errorf("chunks [%d, +%d) of a grant of %d", m.s.Range.First, m.s.Range.Count, len(t.chunks))
	}
	var blocks []mem.Block
	for c := m.s.Range.First; c < m.s.Range.End(); c++ {
		if l.open[m.key(c)] != nil {
			return works, fmt.Errorf("chunk %d is in flight on this lane already", c)
		}
		if blocks, err = o.Source.Resolve(blocks[:0], transfer.Range{First: c, Count: 1}); err != nil {
			return works, err
		}
		first := len(works)
		dst := append([]remoteBlock(nil), t.chunks[c]...)
		for _, s := range blocks {
			local, err := l.b.registered(s.Region)
			if err != nil {
				return works, err
			}
			for s.Len > 0 {
				if len(dst) == 0 {
					return works, fmt.Errorf("chunk %d is longer here than in the grant", c)
				}
				n := min(s.Len, uint64(dst[0].len))
				works = append(works, verbs.Work{ID: m.seq, Op: verbs.Write, LocalAddr: local.Addr() + s.Off, LocalKey: local.LocalKey(),
					Len: uint32(n), RemoteAddr: dst[0].addr, RemoteKey: dst[0].key})
				s.Off, s.Len = s.Off+n, s.Len-n
				dst[0].addr += n
				if dst[0].len -= uint32(n); dst[0].len == 0 {
					dst = dst[1:]
				}
			}
		}
		if len(dst) != 0 || len(works) == first {
			return works, fmt.Errorf("chunk %d is shorter here than in the grant", c)
		}
		last := &works[len(works)-1]
		last.Op, last.Imm, last.Signaled = verbs.WriteImm, uint32(o.Slot)<<16|c, true
	}
	return works, nil
}

func (l *lane) dropLocked(m *moved) {
	if m.reading {
		m.reading = false
		l.b.endUse(m.s.Origin)
	}
	if l.slices[m.seq] == m {
		delete(l.slices, m.seq)
		l.posted -= m.works
	}
	for c := m.s.Range.First; c < m.s.Range.End(); c++ {
		if l.open[m.key(c)] == m {
			delete(l.open, m.key(c))
		}
	}
}

// follow takes completions until the lane is done and drained.
func (l *lane) follow() {
	buf := make([]verbs.Completion, 256)
	for {
		n, err := l.cq.Poll(buf)
		for _, c := range buf[:n] {
			l.completed(c)
		}
		if err != nil {
			l.close(err)
		}
		if n > 0 {
			continue
		}
		select {
		case <-l.cq.Ready():
		case <-l.done:
			// The queue pair is in the error state: everything posted was flushed before done was closed.
			for n, _ := l.cq.Poll(buf); n > 0; n, _ = l.cq.Poll(buf) {
				for _, c := range buf[:n] {
					l.completed(c)
				}
			}
			return
		}
	}
}

func (l *lane) completed(c verbs.Completion) {
	if c.Status != verbs.OK {
		if c.Status != verbs.Flushed {
			l.close(fmt.Errorf("gdr: lane %d: work request failed: %s", l.id, c.Status))
		}
		return // the end of the lane ends the slices
	}
	if c.Op == verbs.Receive {
		l.arrived(transfer.Slot(c.Imm>>16), c.Imm&0xffff)
		return
	}
	l.mu.Lock()
	m := l.slices[c.ID]
	var res []transport.Result
	if m != nil {
		if m.complete++; m.complete == m.s.Range.Count {
			m.reading = false
			l.b.endUse(m.s.Origin)
			o := m.s.Origin
			l.mu.Unlock()
			valid := o.Enter()
			if valid {
				valid = o.Source.Valid(m.s.Range)
				o.Leave()
			}
			l.mu.Lock()
			m.disowned, m.checked = !valid, true
		}
		res = l.maybeEndLocked(m)
	}
	l.mu.Unlock()
	if len(res) > 0 {
		l.b.host.Done(l, res)
	}
}

// maybeEndLocked ends a slice whose writes completed and whose chunks were all answered.
func (l *lane) maybeEndLocked(m *moved) []transport.Result {
	if !m.checked || m.confirm < m.s.Range.Count || l.slices[m.seq] != m {
		return nil
	}
	l.dropLocked(m)
	r := transport.Result{Slice: m.s, Outcome: transfer.Landed, Took: time.Since(m.at)}
	switch {
	case m.reason != transfer.ReasonNone:
		r.Outcome, r.Reason = transfer.Rejected, m.reason
	case m.disowned:
		r.Outcome, r.Reason = transfer.NotLanded, transfer.ReasonDisowned
	}
	if r.Outcome != transfer.Landed {
		r.Err = fmt.Errorf("gdr: slot %d.%d at boot %s: %s", m.s.Origin.Slot, m.s.Origin.Gen, l.peer, r.Reason)
	}
	return []transport.Result{r}
}

// arrived: an immediate says that every byte of a chunk is in place. The guard decides whether that still counts.
func (l *lane) arrived(slot transfer.Slot, chunk uint32) {
	if err := l.q.PostReceive([]uint64{0}); err != nil {
		l.close(err)
		return
	}
	l.b.mu.Lock()
	gr := l.b.grants[grantKey{l.peer, slot}]
	l.b.mu.Unlock()
	var gen transfer.Gen
	reason := transfer.ReasonUnknownSlot
	if gr != nil {
		gen, reason = gr.g.Gen, transfer.ReasonRevoked
		if gr.g.Enter() {
			gr.g.Sink.Landed(l, transfer.Range{First: chunk, Count: 1})
			gr.g.Leave()
			reason = transfer.ReasonNone
		}
	}
	if reason != transfer.ReasonNone {
		l.b.host.Refused(l, reason)
	}
	b := binary.LittleEndian.AppendUint16(make([]byte, 0, confirmBytes), uint16(slot))
	b = append(b, byte(reason), 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(gen))
	b = binary.LittleEndian.AppendUint32(b, chunk)
	l.sendMu.Lock()
	defer l.sendMu.Unlock()
	if _, err := l.c.Write(b); err != nil {
		l.close(err)
	}
}

// read takes confirmations until the socket ends.
func (l *lane) read() error {
	var b [confirmBytes]byte
	for {
		if _, err := io.ReadFull(l.c, b[:]); err != nil {
			return fmt.Errorf("gdr: lane %d: %w", l.id, err)
		}
		k := chunkKey{transfer.Slot(binary.LittleEndian.Uint16(b[:])), transfer.Gen(binary.LittleEndian.Uint32(b[4:])), binary.LittleEndian.Uint32(b[8:])}
		reason := transfer.Reason(b[2])
		l.mu.Lock()
		m := l.open[k]
		if m == nil {
			l.mu.Unlock()
			return fmt.Errorf("gdr: lane %d: a confirmation of slot %d.%d chunk %d, which is not in flight", l.id, k.slot, k.gen, k.chunk)
		}
		delete(l.open, k)
		m.confirm++
		if reason != transfer.ReasonNone {
			m.reason = reason
		}
		res := l.maybeEndLocked(m)
		l.mu.Unlock()
		if len(res) > 0 {
			l.b.host.Done(l, res)
		}
	}
}

// end finishes the lane: what has not ended is in doubt, for its bytes may be anywhere.
func (l *lane) end() {
	l.mu.Lock()
	err := l.err
	var res []transport.Result
	for _, m := range l.slices {
		l.dropLocked(m)
		res = append(res, transport.Result{Slice: m.s, Outcome: transfer.InDoubt, Reason: transfer.ReasonLaneLost, Took: time.Since(m.at),
			Err: fmt.Errorf("gdr: lane %d to boot %s: %w", l.id, l.peer, errors.Join(net.ErrClosed, err))})
	}
	l.mu.Unlock()
	_ = l.q.Close()
	_ = l.cq.Close()
	if len(res) > 0 {
		l.b.host.Done(l, res)
	}
	l.b.mu.Lock()
	delete(l.b.lanes, l)
	l.b.mu.Unlock()
	l.b.host.LaneDown(l, err)
}

func (b *Backend) registered(r *mem.Region) (verbs.Memory, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, net.ErrClosed
	}
	return register(b.cfg.Device, b.local, r)
}

func (b *Backend) startUse(o *transport.Origin) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if o.Revoked() {
		return false
	}
	u := b.use[o]
	if u == nil {
		u = &using{done: make(chan struct{})}
		b.use[o] = u
	}
	u.n++
	return true
}

func (b *Backend) endUse(o *transport.Origin) {
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.use[o]
	if u.n--; u.n == 0 {
		delete(b.use, o)
		close(u.done)
	}
}
