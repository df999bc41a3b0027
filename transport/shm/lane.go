package shm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// ErrBusy is returned by Move for more slices than MaxInFlight permits.
var ErrBusy = errors.New("more slices than the lane takes at once")

// lane is one end of a connection. It is the source of the slices of its own Move, and the
// destination of arriving pulls.
type lane struct {
	b      *Backend
	c      *net.UnixConn
	out    *outbox
	id     uint64
	peer   transfer.Boot
	remote string

	done chan struct{} // closed first at the end; the writer leaves

	axes   int  // of the runs that the peer supports
	eager  bool // the peer supports pushes
	rouses bool // the peer supports wake-up hints
	// to askers, with room for every slice in flight; nil: Move makes the pulls, as it does for
	// small slices
	asks chan *moved
	gone sync.WaitGroup // the askers

	moveMu sync.Mutex // serialises Move; taken before mu
	// guarded by moveMu
	self asker

	mu sync.Mutex // taken before Backend.mu
	// guarded by mu
	err     error // why the lane ended
	ended   bool
	slices  int // taken and not ended
	pulls   [maxPulls]pull
	free    []uint16
	stalled []stalled // wait for a free pull, oldest first; at most maxInFlight
	seq     uint64
	regions map[*mem.Region]uint32 // regions announced to the peer, by index
	nextReg uint32
	late    []transport.Result // ended inside Move; the writer reports them
	spare   []*moved           // recycled; at most maxInFlight

	dst destination

	results []transport.Result // the reader's
	roused  bool               // hint since the reader's last check; the reader's
	rousing                    // the reader's
	// the peer wants memory here to be written, since the reader's last check; the reader's
	asked  bool
	handed bool // some of that went to a copier or a mover; the reader's
}

// moved is a slice that Move accepted.
type moved struct {
	s       transport.Slice
	at      time.Time
	left    int // pulls that have not ended; guarded by lane.mu
	outcome transfer.Outcome
	reason  transfer.Reason
	err     error
}

// pull is one request of a slice, or one push, from Move to its end.
type pull struct {
	tag     uint64 // 0: free
	m       *moved
	r       transfer.Range
	reading bool // the peer may still read the source's memory
	// the verdict was "valid", or it is a push: from here on the peer may have landed it
	valid bool
}

// stalled is the rest of a slice that was not requested because all pulls were in flight: slices of
// many small pieces need more pulls than the lane has.
type stalled struct {
	m    *moved
	rest transfer.Range
	most uint32 // saved asker.most
}

var errNoPull = fmt.Errorf("shm: %d pulls are in flight", maxPulls)

var _ transport.Rouser = (*lane)(nil)

func (b *Backend) newLane(c *net.UnixConn, o *wire.Opened, peer transfer.Boot, remote string) (*lane, error) {
	_ = c.SetDeadline(time.Time{})
	out, err := newOutbox(c)
	if err != nil {
		return nil, fmt.Errorf("shm: new lane: %w", err)
	}
	l := &lane{b: b, c: c, out: out, id: transport.NextLaneID(), peer: peer, remote: remote, done: make(chan struct{}),
		axes: runVersions.Axes(o.Version), eager: o.Version >= framesPush, rouses: o.Version >= framesRouse, regions: map[*mem.Region]uint32{}, free: make([]uint16, 0, maxPulls)}
	for i := maxPulls - 1; i >= 0; i-- {
		l.free = append(l.free, uint16(i))
	}
	l.dst.init(l)
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return nil, net.ErrClosed
	}
	b.lanes[l] = struct{}{}
	b.wg.Add(2)
	b.mu.Unlock()
	if n := b.cfg.askers(); n > 0 {
		l.asks = make(chan *moved, maxInFlight)
		for range n {
			l.gone.Go(l.askFor)
		}
	}
	b.host.LaneUp(l)
	writerGone := make(chan struct{})
	go func() {
		defer b.wg.Done()
		defer close(writerGone)
		l.write()
	}()
	go func() {
		defer b.wg.Done()
		err := l.read()
		l.end(err, writerGone)
	}()
	return l, nil
}

func (l *lane) ID() uint64          { return l.id }
func (l *lane) Peer() transfer.Boot { return l.peer }
func (l *lane) Backend() string     { return Name }
func (l *lane) Local() string       { return Name }
func (l *lane) Remote() string      { return l.remote }
func (l *lane) MaxInFlight() int    { return maxInFlight }

func (l *lane) Close() error {
	l.close(net.ErrClosed)
	return nil
}

// close starts the end; the reader finishes it.
func (l *lane) close(err error) {
	l.mu.Lock()
	if l.err == nil {
		l.err = err
	}
	l.mu.Unlock()
	l.out.fail(err)
	// Shut down first: the connection's own Close would wait for a send in progress.
	if rc := l.out.rc; rc != nil {
		_ = rc.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	}
}

// Move implements transport.Lane.
func (l *lane) Move(batch []transport.Slice) error {
	l.moveMu.Lock()
	defer l.moveMu.Unlock()
	l.mu.Lock()
	if l.ended || l.err != nil {
		err := l.err
		l.mu.Unlock()
		return fmt.Errorf("shm: move on lane %d: %w", l.id, errors.Join(net.ErrClosed, err))
	}
	if l.slices+len(batch) > maxInFlight {
		n := l.slices
		l.mu.Unlock()
		return fmt.Errorf("shm: move on lane %d: %d slices with %d in flight of %d: %w", l.id, len(batch), n, maxInFlight, ErrBusy)
	}
	l.slices += len(batch)
	l.mu.Unlock()
	now := time.Now()
	for i := range batch {
		l.mu.Lock()
		m := l.newMovedLocked(batch[i], now)
		l.mu.Unlock()
		if l.asks != nil && (m.s.Range.Count > askHere || len(l.asks) > 0) && transport.DeviceOf(m.s.Origin.Source) != nil {
			l.asks <- m
			continue
		}
		l.moveOne(&l.self, m)
	}
	l.out.kick()
	l.wakeIfLate()
	return nil
}

// Rouse implements transport.Rouser.
func (l *lane) Rouse() {
	// a peer with packets to read is awake, and the hint would be late
	if !l.rouses || l.out.waits() {
		return
	}
	var buf [frameHeader]byte
	l.out.put(appendRouse(buf[:0]), -1)
	l.out.kick()
}

// asker makes pulls of slices. It belongs to one goroutine.
type asker struct {
	resumes bool // it continues stalled slices; other askers append to them
	blocks  []mem.Block
	frame   []byte
	most    uint32 // chunks of the slice's last pull that was cut by a bound; 0: none was
}

// askHere is the largest number of chunks of GPU memory for which Move makes the pulls itself if no
// slice waits for an asker: the engine waits for the layer of a small request, and an asker would
// need longer to wake up.
const askHere = 4

// batchAsks bounds the slices whose pulls an asker holds back while it has more work: a packet has
// room for some.
const batchAsks = 4

// askFor makes the pulls of slices that Move has left to it: a GPU's link copies blocks faster than
// one core finds them.
func (l *lane) askFor() {
	var a asker
	waiting := 0 // slices whose pulls are not sent yet
	for m := range l.asks {
		l.moveOne(&a, m)
		if waiting++; waiting >= batchAsks || len(l.asks) == 0 {
			l.out.kick()
			waiting = 0
		}
		l.wakeIfLate()
	}
}

// moveOne cuts a slice into pulls. The writer handles the rest if pulls run out.
func (l *lane) moveOne(a *asker, m *moved) {
	a.most = 0
	rest := l.cut(a, m, m.s.Range)
	if rest.Count == 0 {
		return
	}
	l.mu.Lock()
	l.stalled = append(l.stalled, stalled{m, rest, a.most})
	if len(l.free) > 0 { // freed meanwhile; maybe nothing ends after this
		l.out.wakeUp()
	}
	l.mu.Unlock()
}

// cut makes pulls of rest, the last part of m, and returns the part without a free pull. If one
// pull cannot be made, it does not request the rest of the slice.
func (l *lane) cut(a *asker, m *moved, rest transfer.Range) transfer.Range {
	for {
		n, reason, err := l.pullSome(a, m, rest)
		if errors.Is(err, errNoPull) {
			return rest
		}
		if err != nil {
			l.mu.Lock()
			m.spoil(transfer.NotLanded, reason, err)
			l.mu.Unlock()
			break
		}
		rest.First += n
		if rest.Count -= n; rest.Count == 0 {
			break
		}
	}
	l.mu.Lock()
	if m.left--; m.left == 0 {
		l.late = append(l.late, l.resultLocked(m))
	}
	l.mu.Unlock()
	return transfer.Range{}
}

// unstall continues slices that wait for pulls, as far as some are free. The writer's.
func (l *lane) unstall(a *asker) {
	for {
		l.mu.Lock()
		if len(l.stalled) == 0 || len(l.free) == 0 {
			l.mu.Unlock()
			return
		}
		s := l.stalled[0] // it stays in front: only this goroutine takes pulls before it
		l.mu.Unlock()
		a.most = s.most
		rest := l.cut(a, s.m, s.rest)
		l.mu.Lock()
		if rest.Count > 0 {
			l.stalled[0].rest, l.stalled[0].most = rest, a.most
		} else {
			l.stalled = slices.Delete(l.stalled, 0, 1)
		}
		l.mu.Unlock()
		l.out.kick()
	}
}

// pullSome requests the chunks from the front of r that fit one pull, and returns their number.
func (l *lane) pullSome(a *asker, m *moved, r transfer.Range) (uint32, transfer.Reason, error) {
	if r.Count == 0 {
		return 0, transfer.ReasonRange, errors.New("shm: an empty range")
	}
	o := m.s.Origin
	most := uint32(maxPullBytes / transfer.ChunkBytes)
	if transport.DeviceOf(o.Source) != nil {
		most = deviceSlice / transfer.ChunkBytes
	}
	if a.most != 0 {
		most = a.most
	}
	r.Count = min(r.Count, most)
	// The source owns the memory until the pull counts as a read of it; the close of an origin
	// waits for reads.
	if !o.Enter() {
		return 0, transfer.ReasonSourceGone, fmt.Errorf("shm: origin %d.%d is closed", o.Slot, o.Gen)
	}
	defer o.Leave()
	for {
		blocks, err := o.Source.Resolve(a.blocks[:0], r)
		a.blocks = blocks[:0]
		if err != nil {
			return 0, transfer.ReasonRange, fmt.Errorf("shm: resolve chunks [%d, +%d): %w", r.First, r.Count, err)
		}
		if l.eager && few(blocks) {
			return l.send(a, m, r, blocks)
		}
		fits, reason, err := l.list(a, m, r, blocks)
		switch {
		case err != nil:
			return 0, reason, err
		case fits:
			return l.ask(a, m, r, pull{m: m, r: r, reading: true})
		case r.Count == 1:
			return 0, transfer.ReasonMemory, fmt.Errorf("shm: chunk %d has %d pieces: a pull takes %d, in %d cells: %w", r.First, len(blocks), maxPieces, maxCells,
				transport.ErrNotSupported)
		}
		r.Count /= 2
		a.most = r.Count
	}
}

// few reports whether blocks are pushed: at most pushBytes, all of them host memory of this
// process.
func few(blocks []mem.Block) bool {
	n := uint64(0)
	for i := range blocks {
		b := &blocks[i]
		if _, ok := b.Bytes(); !ok || b.Len > pushBytes-n {
			return false
		}
		n += b.Len
	}
	return n > 0
}

// send pushes the bytes of r, whose origin the caller has entered. A push certifies that the bytes
// were valid when they were read.
func (l *lane) send(a *asker, m *moved, r transfer.Range, blocks []mem.Block) (uint32, transfer.Reason, error) {
	o := m.s.Origin
	a.frame = appendPush(a.frame[:0], pullFrame{slot: o.Slot, gen: o.Gen, r: r, attempt: m.s.Attempt})
	for i := range blocks {
		from, _ := blocks[i].Bytes()
		at := len(a.frame)
		a.frame = slices.Grow(a.frame, len(from))[:at+len(from)]
		mem.Copy(a.frame[at:], from)
	}
	endPush(a.frame)
	if !o.Source.Valid(r) {
		return 0, transfer.ReasonDisowned, fmt.Errorf("shm: slot %d.%d: the source of chunks [%d, +%d) was invalidated", o.Slot, o.Gen, r.First, r.Count)
	}
	return l.ask(a, m, r, pull{m: m, r: r, valid: true})
}

// list writes the pull of r without its tag. False: it has too many pieces.
func (l *lane) list(a *asker, m *moved, r transfer.Range, blocks []mem.Block) (bool, transfer.Reason, error) {
	if len(blocks) > maxPieces {
		return false, 0, nil
	}
	o := m.s.Origin
	a.frame = appendPull(a.frame[:0], pullFrame{slot: o.Slot, gen: o.Gen, r: r, attempt: m.s.Attempt})
	a.frame = slices.Grow(a.frame, min(len(blocks), maxCells)*cellBytes)
	frame := a.frame
	var last *mem.Region
	var next run
	for len(blocks) > 0 {
		first := &blocks[0]
		// looking up a map for each block would be most of the cost of large caches
		if first.Region != last {
			var err error
			if next.region, err = l.regionIndex(first.Region); err != nil {
				return false, transfer.ReasonMemory, err
			}
			last = first.Region
		}
		if frame, blocks = appendPieces(frame, blocks, last, next.region); len(blocks) == 0 {
			break
		}
		if first = &blocks[0]; first.Region != last {
			continue
		}
		if first.Len > maxLen {
			return false, transfer.ReasonLength, fmt.Errorf("shm: a piece of %d bytes in %d chunks", first.Len, r.Count)
		}
		if len(frame)+maxRunBytes > maxPacketBytes {
			return false, 0, nil
		}
		next.off, next.len = first.Off, uint32(first.Len)
		next.Count, next.Rows = 1, 1 // the strides of one piece are unused
		if mem.Regular(blocks) {
			next.Strides = mem.Leading(blocks, l.axes)
		}
		frame = appendRun(frame, &next)
		blocks = blocks[next.Pieces():]
	}
	endPull(frame)
	a.frame = frame
	return true, 0, nil
}

// ask sends the written pull or push of r, and keeps p for its answer.
func (l *lane) ask(a *asker, m *moved, r transfer.Range, p pull) (uint32, transfer.Reason, error) {
	o := m.s.Origin
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended || l.err != nil {
		return 0, transfer.ReasonLaneLost, fmt.Errorf("shm: lane %d: %w", l.id, net.ErrClosed)
	}
	if len(l.free) == 0 || len(l.stalled) > 0 && !a.resumes {
		return 0, transfer.ReasonNone, errNoPull
	}
	if p.reading && !l.b.startRead(o) {
		return 0, transfer.ReasonSourceGone, fmt.Errorf("shm: origin %d.%d is closed", o.Slot, o.Gen)
	}
	i := l.free[len(l.free)-1]
	l.free = l.free[:len(l.free)-1]
	l.seq++
	tag := l.seq<<16 | uint64(i)
	setTag(a.frame, tag)
	p.tag = tag
	l.pulls[i] = p
	m.left++
	l.out.put(a.frame, -1)
	return r.Count, transfer.ReasonNone, nil
}

func (l *lane) regionIndex(r *mem.Region) (uint32, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.regionLocked(r)
}

// regionLocked returns the peer's index of a region; the first call passes the descriptor.
func (l *lane) regionLocked(r *mem.Region) (uint32, error) {
	if i, ok := l.regions[r]; ok {
		return i, nil
	}
	if _, mapped := r.Bytes(); !mapped && r.Device() == nil {
		return 0, fmt.Errorf("shm: the peer cannot map region %s of %s memory: %w; use another transport", r.ID(), r.Kind(), transport.ErrNotSupported)
	}
	if len(l.regions) >= maxRegions {
		return 0, fmt.Errorf("shm: region %s: the lane has %d regions already: %w", r.ID(), maxRegions, ErrBusy)
	}
	i := l.nextReg
	if r.Device() != nil {
		fd := -1
		if r.FD() >= 0 {
			var err error
			if fd, err = unix.FcntlInt(uintptr(r.FD()), unix.F_DUPFD_CLOEXEC, 0); err != nil {
				return 0, fmt.Errorf("shm: region %s: duplicate its descriptor: %w", r.ID(), err)
			}
		}
		l.nextReg++
		l.regions[r] = i
		var buf [frameHeader + deviceFixed + mem.MaxHandleBytes]byte
		l.out.put(appendDevice(buf[:0], deviceFrame{regionFrame{index: i, id: r.ID(), size: r.Size()}, fd >= 0, r.Handle()}), fd)
		return i, nil
	}
	fd, err := reopenReadOnly(r)
	if err != nil {
		return 0, fmt.Errorf("shm: region %s: open its memfd read-only: %w", r.ID(), err)
	}
	l.nextReg++
	l.regions[r] = i
	var buf [frameHeader + regionBytes]byte
	l.out.put(appendRegion(buf[:0], regionFrame{index: i, id: r.ID(), size: r.Size()}), fd)
	return i, nil
}

// forgetFreed announces to the peer the regions that no engine holds any more.
func (l *lane) forgetFreed() {
	l.mu.Lock()
	for r, i := range l.regions {
		if r.Acquire() {
			r.Release()
			continue
		}
		delete(l.regions, r)
		var buf [frameHeader + forgetBytes]byte
		l.out.put(appendForget(buf[:0], i), -1)
	}
	l.mu.Unlock()
	l.out.kick()
}

// reads reports whether the peer may read memory of o for this lane.
func (l *lane) reads(o *transport.Origin) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.pulls {
		if p := &l.pulls[i]; p.tag != 0 && p.reading && p.m.s.Origin == o {
			return true
		}
	}
	return false
}

// spoil records that a part of the slice did not land; the worst part decides the slice's outcome.
func (m *moved) spoil(o transfer.Outcome, reason transfer.Reason, err error) {
	if o > m.outcome { // the outcomes are numbered from good to bad
		m.outcome, m.reason = o, reason
		m.err = err
	}
}

// endPullLocked frees pull i. The result is true for the slice's last pull.
func (l *lane) endPullLocked(i uint16, o transfer.Outcome, reason transfer.Reason, err error) (transport.Result, bool) {
	p := l.pulls[i]
	if p.reading {
		l.b.endRead(p.m.s.Origin)
	}
	l.pulls[i] = pull{}
	l.free = append(l.free, i)
	if len(l.stalled) > 0 {
		l.out.wakeUp()
	}
	p.m.spoil(o, reason, err)
	if p.m.left--; p.m.left > 0 {
		return transport.Result{}, false
	}
	return l.resultLocked(p.m), true
}

func (l *lane) resultLocked(m *moved) transport.Result {
	l.slices--
	res := transport.Result{Slice: m.s, Outcome: m.outcome, Reason: m.reason, Err: m.err, Took: time.Since(m.at)}
	*m = moved{}
	l.spare = append(l.spare, m)
	return res
}

func (l *lane) newMovedLocked(s transport.Slice, at time.Time) *moved {
	var m *moved
	if n := len(l.spare); n > 0 {
		m, l.spare = l.spare[n-1], l.spare[:n-1]
	} else {
		m = &moved{}
	}
	// The slice's own share keeps it open while its pulls are made, because the first may be
	// answered already.
	*m = moved{s: s, at: at, left: 1, outcome: transfer.Landed}
	return m
}

// wakeIfLate passes results of Move to the writer, because Move must not call Host.
func (l *lane) wakeIfLate() {
	l.mu.Lock()
	n := len(l.late)
	l.mu.Unlock()
	if n > 0 {
		l.out.wakeUp()
	}
}

// write is the writer: it continues after a full socket or a lack of pulls.
func (l *lane) write() {
	var results []transport.Result
	a := asker{resumes: true}
	for {
		select {
		case <-l.done:
			return
		case <-l.out.wake:
		}
		l.out.resume()
		l.unstall(&a)
		l.mu.Lock()
		results = append(results[:0], l.late...)
		l.late = l.late[:0]
		l.mu.Unlock()
		if len(results) > 0 {
			l.b.host.Done(l, results)
			clear(results)
		}
	}
}

// read is the reader: it handles packets until the lane ends.
func (l *lane) read() error {
	in := newInbox(l.out.rc, &l.b.polling, l.b.cfg.pollers)
	for {
		packet, oob, flags, err := in.next()
		if err != nil {
			return fmt.Errorf("shm: lane %d: receive: %w", l.id, err)
		}
		if len(oob) > 0 {
			if l.dst.fds, err = rights(oob); err != nil {
				return fmt.Errorf("shm: lane %d: descriptors: %w", l.id, err)
			}
		}
		if len(packet) == 0 {
			return fmt.Errorf("shm: lane %d: %w", l.id, io.EOF)
		}
		if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
			err = fmt.Errorf("%w: a packet was cut", errFrame)
		} else {
			err = parse(packet, l)
		}
		l.dst.closeFDs()
		l.out.kick()
		if len(l.results) > 0 {
			l.b.host.Done(l, l.results)
			clear(l.results)
			l.results = l.results[:0]
		}
		if err != nil {
			return fmt.Errorf("shm: lane %d: %w", l.id, err)
		}
		if l.asked || l.roused {
			l.stayAwake(in, time.Now())
		}
		l.roused, l.asked, l.handed = false, false, false
	}
}

// rousing is the state of a lane's wake-up hints.
type rousing struct {
	since time.Time // time of a hint without a pull since then
	deaf  time.Time // hints are ignored until then
	used  time.Time // time of the last pulls, or of the last warming of the GPUs
}

// stayAwake makes the reader poll after a hint.
func (l *lane) stayAwake(in *inbox, now time.Time) {
	if late := l.since.Add(l.b.cfg.rouse); !l.since.IsZero() && now.After(late) { // too late
		l.since, l.deaf = time.Time{}, late.Add(deafFor)
	}
	if l.asked {
		l.since, l.used = time.Time{}, now
		if in.lingers() {
			in.linger(now.Add(l.b.cfg.stay))
		}
	}
	if l.roused && !now.Before(l.deaf) {
		if l.since.IsZero() {
			l.since = now
		}
		in.linger(l.since.Add(l.b.cfg.rouse))
		if in.lingers() && now.Sub(l.used) > l.b.cfg.cold {
			l.used = now
			l.dst.warm()
		}
	}
	if l.handed && in.lingers() {
		// the woken goroutine starts on this thread; waking another thread takes longer
		runtime.Gosched()
	}
}

func rights(oob []byte) ([]int, error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var fds []int
	for i := range msgs {
		if got, err := unix.ParseUnixRights(&msgs[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return fds, nil
}

// end finishes the lane on the reader's goroutine: everything that it held ends, then Host.LaneDown
// is called.
func (l *lane) end(err error, writerGone <-chan struct{}) {
	l.mu.Lock()
	l.ended = true
	if l.err == nil {
		l.err = err
	}
	err = l.err
	l.mu.Unlock()
	l.out.fail(err)
	_ = l.c.Close()
	close(l.done)
	<-writerGone
	l.dst.end()

	lost := fmt.Errorf("shm: lane %d to boot %s: %w", l.id, l.peer, errors.Join(net.ErrClosed, err))
	// a concurrent Move, and an asker, find the lane ended and leave their results in late
	l.moveMu.Lock()
	if l.asks != nil {
		close(l.asks)
		l.gone.Wait()
	}
	l.mu.Lock()
	results := append(l.results, l.late...)
	l.late = nil
	for i := range l.pulls {
		p := &l.pulls[i]
		if p.tag == 0 {
			continue
		}
		o := transfer.NotLanded // without the verdict of this end the peer counts nothing
		if p.valid {
			o = transfer.InDoubt
		}
		if res, last := l.endPullLocked(uint16(i), o, transfer.ReasonLaneLost, lost); last {
			results = append(results, res)
		}
	}
	for _, s := range l.stalled {
		s.m.spoil(transfer.NotLanded, transfer.ReasonLaneLost, lost)
		if s.m.left--; s.m.left == 0 {
			results = append(results, l.resultLocked(s.m))
		}
	}
	l.stalled = nil
	clear(l.regions)
	l.mu.Unlock()
	l.moveMu.Unlock()
	if len(results) > 0 {
		l.b.host.Done(l, results)
	}
	l.b.mu.Lock()
	delete(l.b.lanes, l)
	l.b.mu.Unlock()
	l.b.host.LaneDown(l, err)
}

// findLocked returns the pull of a peer's tag. mu is held.
func (l *lane) findLocked(tag uint64, want func(*pull) bool) (uint16, error) {
	i := uint16(tag)
	if i >= maxPulls || tag == 0 || l.pulls[i].tag != tag || !want(&l.pulls[i]) {
		return 0, fmt.Errorf("%w: an answer to pull %#x, which is not open", errFrame, tag)
	}
	return i, nil
}

// pulled: the peer has finished reading the source's memory. The source now decides whether the
// bytes count.
func (l *lane) pulled(tag uint64, reason transfer.Reason) error {
	l.mu.Lock()
	i, err := l.findLocked(tag, func(p *pull) bool { return p.reading })
	if err != nil {
		l.mu.Unlock()
		return err
	}
	p := &l.pulls[i]
	p.reading = false
	o, r := p.m.s.Origin, p.r
	l.b.endRead(o)
	if reason != transfer.ReasonNone {
		l.endLocked(i, refusal(reason), reason)
		l.mu.Unlock()
		return nil
	}
	l.mu.Unlock()

	// Under the guard: once CloseOrigin has revoked it, no pull can be declared valid.
	valid := o.Enter()
	if valid {
		valid = o.Source.Valid(r)
		o.Leave()
	}
	l.mu.Lock()
	p.valid = valid
	l.mu.Unlock()
	var buf [frameHeader + verdictBytes]byte
	l.out.put(appendVerdict(buf[:0], tag, valid), -1)
	if !valid {
		// After the verdict: the peer holds the pull until then, and the pull that replaces it must
		// not exceed the peer's bound.
		l.mu.Lock()
		l.endLocked(i, transfer.NotLanded, transfer.ReasonDisowned)
		l.mu.Unlock()
	}
	return nil
}

// refusal is the outcome of a pull that the destination did not copy: another attempt holds the
// chunks, its memory failed, or the destination refuses for good.
func refusal(reason transfer.Reason) transfer.Outcome {
	if reason == transfer.ReasonMemory || reason == transfer.ReasonSuperseded {
		return transfer.NotLanded
	}
	return transfer.Rejected
}

func (l *lane) confirm(tag uint64, o transfer.Outcome, reason transfer.Reason) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	i, err := l.findLocked(tag, func(p *pull) bool { return p.valid })
	if err != nil {
		return err
	}
	switch o {
	case transfer.Landed:
		reason = transfer.ReasonNone
	case transfer.Rejected:
		o = refusal(reason)
	default:
		return fmt.Errorf("%w: outcome %d confirmed", errFrame, o)
	}
	l.endLocked(i, o, reason)
	return nil
}

// endLocked ends a pull on the reader's goroutine.
func (l *lane) endLocked(i uint16, o transfer.Outcome, reason transfer.Reason) {
	var err error
	if o != transfer.Landed {
		origin := l.pulls[i].m.s.Origin
		err = fmt.Errorf("shm: slot %d.%d at boot %s: %s: %s", origin.Slot, origin.Gen, l.peer, o, reason)
	}
	if res, last := l.endPullLocked(i, o, reason, err); last {
		l.results = append(l.results, res)
	}
}

func (l *lane) region(f regionFrame) error           { return l.dst.region(f) }
func (l *lane) device(f deviceFrame) error           { return l.dst.device(f) }
func (l *lane) forget(index uint32) error            { return l.dst.forget(index) }
func (l *lane) pull(f pullFrame) error               { l.asked = true; return l.dst.pull(f) }
func (l *lane) push(f pullFrame) error               { l.asked = true; return l.dst.push(f) }
func (l *lane) rouse() error                         { l.roused = true; return nil }
func (l *lane) verdict(tag uint64, valid bool) error { return l.dst.verdict(tag, valid) }
