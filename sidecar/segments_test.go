package sidecar

import (
	"bytes"
	"encoding/binary"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/faulttest"
)

const (
	lentBytes = 4 << 20
	listBytes = 8 << 20
)

// entry is one of a batch.
type entry struct {
	local, remote, bytes, localStride, remoteStride uint64
	count, region                                   uint32
}

// segmenter is an engine worker without a layout: region 0 is memory, region 1 has lists.
type segmenter struct {
	*engine
	list []byte
}

func newSegmenter(t testing.TB, r *running, name string) *segmenter {
	t.Helper()
	return newSegmenterOn(t, r, name, nil)
}

// newSegmenterOn is newSegmenter with region 0 on a device.
func newSegmenterOn(t testing.TB, r *running, name string, gpu *heldGPU) *segmenter {
	t.Helper()
	var all []*mem.Region
	for _, n := range []uint64{lentBytes, listBytes} {
		x, err := mem.NewAnonymous("lent", n)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(x.Release)
		all = append(all, x)
	}
	cfg := connectortest.Config{Socket: r.cfg.Engine.Socket, Regions: all, Layers: 1,
		Engine: msg.Engine{Name: "test", ID: name}}
	if gpu != nil {
		lent, err := gpu.Region(must(all[0].Bytes()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(lent.Release)
		cfg.Tamper = func(m *msg.Register, fds []int) []int {
			m.Regions[0].Kind, m.Regions[0].Handle, m.Regions[0].FD = msg.KindDevice, lent.Handle(), msg.NoFD
			return fds
		}
	}
	w, err := connectortest.DialWorker(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() })
	return &segmenter{engine: &engine{Worker: w, t: t, region: all[0],
		done: map[uint64]connectortest.Completion{}}, list: must(all[1].Bytes())}
}

func (l *segmenter) memory() []byte { return must(l.region.Bytes()) }

// write puts entries into the list from entry `first` on.
func (l *segmenter) write(first int, entries []entry) {
	b := l.list[first*msg.EntryBytes : first*msg.EntryBytes]
	for _, e := range entries {
		for _, v := range []uint64{e.local, e.remote, e.bytes, e.localStride, e.remoteStride} {
			b = binary.LittleEndian.AppendUint64(b, v)
		}
		b = binary.LittleEndian.AppendUint32(b, max(e.count, 1))
		b = binary.LittleEndian.AppendUint32(b, e.region)
	}
}

// batch opens a batch with entries, which stay in the list until the next call.
func (l *segmenter) batch(m msg.Batch, entries ...entry) (lease uint64) {
	l.t.Helper()
	l.write(0, entries)
	m.List, m.Entries = 1, uint32(len(entries))
	if m.Regions == nil {
		m.Regions = []uint32{0}
	}
	if m.DeadlineMS == 0 {
		m.DeadlineMS = deadlineMS
	}
	lease, err := l.Batch(m)
	if err != nil {
		l.t.Fatal(err)
	}
	return lease
}

// lend registers all of the memory.
func (l *segmenter) lend(name string, grants ...msg.SegmentGrant) {
	l.t.Helper()
	if err := l.Segment(l.t.Context(), msg.Segment{Name: name, Bytes: lentBytes,
		Grants: grants}); err != nil {
		l.t.Fatal(err)
	}
}

func everyone() msg.SegmentGrant { return msg.SegmentGrant{To: "*", Read: true, Write: true} }

// segmenters starts two nodes with a segmenter each: a sends batches to b.
func segmenters(t *testing.T, order ...string) (a, b *segmenter, na, nb *running) {
	t.Helper()
	change := func(c *config.Config) {
		if len(order) > 0 {
			c.Transports.Order = order
		}
	}
	na, nb = start(t, change), start(t, change)
	return newSegmenter(t, na, "a"), newSegmenter(t, nb, "b"), na, nb
}

// Batches read and write ranges of a segment of another node and of the same node, large and tiny
// ones, strided ones included, and nothing besides.
func TestBatchesMoveTheirRanges(t *testing.T) {
	for _, order := range [][]string{{"tcp"}, {"shm", "tcp"}} {
		a, b, na, nb := segmenters(t, order...)
		b.lend("pool", everyone())
		for _, at := range []struct {
			node *running
			peer string
			to   *segmenter
		}{{na, nb.Endpoint(), a}, {nb, "", newSegmenter(t, nb, "same")}} {
			at.to.random()
			b.random()
			rng := newRand(3)
			for i := range 12 {
				write := i%2 == 0
				entries := make([]entry, 1+rng.IntN(300))
				slot := uint64(lentBytes / len(entries))
				for k := range entries {
					n := 1 + rng.Uint64N(slot)
					e := entry{local: uint64(k) * slot, remote: uint64(len(entries)-1-k) * slot, bytes: n}
					if n >= 64 && k%3 == 0 {
						e.bytes, e.count, e.localStride, e.remoteStride = n/8, 4, n/4, n/5
					}
					entries[k] = e
				}
				wantLocal, wantRemote := bytes.Clone(at.to.memory()), bytes.Clone(b.memory())
				for _, e := range entries {
					for p := range uint64(max(e.count, 1)) {
						x, y := e.local+p*e.localStride, e.remote+p*e.remoteStride
						if write {
							copy(wantRemote[y:y+e.bytes], at.to.memory()[x:])
						} else {
							copy(wantLocal[x:x+e.bytes], b.memory()[y:])
						}
					}
				}
				c := at.to.ok(at.to.batch(msg.Batch{Peer: at.peer, Segment: "pool", Write: write}, entries...))
				if !bytes.Equal(at.to.memory(), wantLocal) || !bytes.Equal(b.memory(), wantRemote) {
					t.Fatalf("%v, batch %d (write %v, %d entries): other bytes", order, i, write, len(entries))
				}
				if c.Received.Bytes == 0 {
					t.Error("a completion without bytes")
				}
			}
		}
	}
}

// Segments of GPU memory are read and written like those of host memory.
func TestBatchesOfDeviceMemory(t *testing.T) {
	for _, order := range [][]string{{"tcp"}, {"shm", "tcp"}} {
		change := func(c *config.Config) { c.Transports.Order = order }
		na, nb := start(t, change), start(t, change)
		gpu := holdGPU(t, nb)
		close(gpu.gate)
		go func() {
			for {
				select {
				case <-gpu.entered: // nothing waits
				case <-t.Context().Done():
					return
				}
			}
		}()
		a, b := newSegmenter(t, na, "a"), newSegmenterOn(t, nb, "b", gpu)
		b.lend("pool", everyone())
		a.random()
		b.random()
		entries := []entry{{local: 100, remote: 3, bytes: 1 << 20},
			{local: 2 << 20, remote: 2 << 20, bytes: 100, count: 1000, localStride: 100, remoteStride: 300}}
		for _, write := range []bool{true, false} {
			if !write {
				a.random()
			}
			a.ok(a.batch(msg.Batch{Peer: nb.Endpoint(), Segment: "pool", Write: write}, entries...))
			if !bytes.Equal(a.memory()[100:100+1<<20], b.memory()[3:3+1<<20]) ||
				!bytes.Equal(a.memory()[2<<20+99900:][:100], b.memory()[2<<20+999*300:][:100]) {
				t.Errorf("%v, write %v: other bytes", order, write)
			}
		}
	}
}

// refusedBatch wants a refusal with these words, and nothing written.
func (l *segmenter) refusedBatch(t *testing.T, owner *segmenter, words string, m msg.Batch,
	entries ...entry) {
	t.Helper()
	local, remote := bytes.Clone(l.memory()), bytes.Clone(owner.memory())
	c := l.wait(l.batch(m, entries...))
	if c.Status != engines.StatusRefused || !strings.Contains(c.Received.Reason, words) {
		t.Errorf("status %d, reason %q: want a refusal with %q", c.Status, c.Received.Reason, words)
	}
	if !bytes.Equal(l.memory(), local) || !bytes.Equal(owner.memory(), remote) {
		t.Errorf("%q: refused, and bytes have changed", words)
	}
}

// Bad batches are refused by field, value and remedy, and nothing is written.
func TestBatchRefusals(t *testing.T) {
	a, b, na, nb := segmenters(t)
	b.lend("pool", everyone())
	b.lend("part", msg.SegmentGrant{To: "*", Read: true, Offset: 4096, Bytes: 4096},
		msg.SegmentGrant{To: "another node", Write: true})
	a.random()
	b.random()
	one := entry{bytes: 8}
	peer := nb.Endpoint()
	for _, x := range []struct {
		words   string
		m       msg.Batch
		entries []entry
	}{
		{"entries[1].local", msg.Batch{Segment: "pool", Write: true},
			[]entry{one, {local: lentBytes - 7, bytes: 8, remote: 100}}},
		{"entries[0].local", msg.Batch{Segment: "pool"}, []entry{{local: 1<<64 - 8, bytes: 16}}},
		{"entries[0].local", msg.Batch{Segment: "pool"},
			[]entry{{bytes: 1, count: 3, localStride: 1 << 63, remoteStride: 1}}},
		{"entries[0].remote", msg.Batch{Segment: "pool", Write: true},
			[]entry{{remote: lentBytes - 7, bytes: 8}}},
		{"entries[1].remote", msg.Batch{Segment: "pool", Write: true},
			[]entry{one, {local: 8, bytes: 2, count: 2, localStride: 2, remoteStride: 1<<64 - 1}}},
		{"entries[0].bytes", msg.Batch{Segment: "pool"}, []entry{{}}},
		{"entries[0].region", msg.Batch{Segment: "pool"}, []entry{{bytes: 1, region: 1}}},
		{"entries[0].count", msg.Batch{Segment: "pool"},
			[]entry{{bytes: 1, count: msg.MaxBatchPieces + 1, localStride: 1, remoteStride: 1}}},
		{"written twice", msg.Batch{Segment: "pool"}, []entry{one, {local: 7, remote: 100, bytes: 8}}},
		{"written twice", msg.Batch{Segment: "pool", Write: true},
			[]entry{one, {local: 100, remote: 7, bytes: 8}}},
		{"written twice", msg.Batch{Segment: "pool", Write: true},
			[]entry{{bytes: 8, count: 2, localStride: 8, remoteStride: 4}}},
		{"entries[0].remote", msg.Batch{Segment: "part"}, []entry{{remote: 4090, bytes: 8}}},
		{"entries[0].remote", msg.Batch{Segment: "part"}, []entry{{remote: 8190, bytes: 8}}},
		{"no segment that node", msg.Batch{Segment: "part", Write: true}, []entry{one}},
		{"no segment that node", msg.Batch{Segment: "none"}, []entry{one}},
		{"regions[0]", msg.Batch{Segment: "pool", Regions: []uint32{7}}, []entry{one}},
	} {
		x.m.Peer = peer
		a.refusedBatch(t, b, x.words, x.m, x.entries...)
	}
	// A node's own memory is no segment, and an unknown peer is named.
	a.refusedBatch(t, b, "no segment that node", msg.Batch{Segment: "pool"}, one)
	a.refusedBatch(t, b, "has the name", msg.Batch{Peer: "nobody", Segment: "pool"}, one)
	a.refusedBatch(t, b, "is not reached", msg.Batch{Peer: "127.0.0.1:1", Segment: "pool"}, one)
	// The same memory in one batch, on one node.
	b.refusedBatch(t, b, "this batch", msg.Batch{Segment: "pool", Write: true},
		entry{bytes: 8, remote: 4})
	c := a.ok(a.batch(msg.Batch{Peer: peer, Segment: "part"}, entry{remote: 4096, bytes: 4096}))
	if c.Received.Bytes != 4096 {
		t.Errorf("%d bytes", c.Received.Bytes)
	}
	_ = na
}

// silent starts two nodes of which the first one sends no byte until the plan releases.
func silent(t *testing.T) (a, b *segmenter, na, nb *running, send func()) {
	t.Helper()
	return silentWith(t, func(*config.Config) {})
}

// silentWith is silent with another configuration.
func silentWith(t *testing.T, more func(*config.Config)) (a, b *segmenter, na, nb *running,
	send func()) {
	t.Helper()
	var on atomic.Bool
	on.Store(true)
	plan := faulttest.New(1, faulttest.Rule{Kind: faulttest.Hold,
		Only: func(transport.Lane, transport.Slice) bool { return on.Load() }})
	tcp := func(c *config.Config) {
		c.Transports.Order = []string{"tcp"}
		more(c)
	}
	na = startConfig(t, testConfig(t, tcp), func(n *Node) {
		for i, b := range n.backends {
			n.backends[i] = faulttest.Wrap(b, plan)
		}
	})
	nb = start(t, tcp)
	return newSegmenter(t, na, "a"), newSegmenter(t, nb, "b"), na, nb, func() {
		on.Store(false)
		plan.Release()
	}
}

// A batch whose ranges an open one excludes is refused, or waits at its request; they never run
// together.
func TestBatchesExcludeOneAnother(t *testing.T) {
	a, b, na, nb, send := silent(t)
	b.lend("pool", everyone())
	peer := nb.Endpoint()
	other := newSegmenter(t, na, "other")
	first := a.batch(msg.Batch{Peer: peer, Segment: "pool", Write: true}, entry{bytes: lentBytes})
	until(t, func() bool { return nb.segments.Open() == 1 })
	opened := func(n int) { until(t, func() bool { return nb.segments.Open() == n }) }
	a.refusedBatch(t, b, "which an open one reads", msg.Batch{Peer: peer, Segment: "pool"},
		entry{local: 8, bytes: 1})
	other.refusedBatch(t, b, "which an open one writes", msg.Batch{Peer: peer, Segment: "pool"},
		entry{remote: 77, bytes: 1})
	other.refusedBatch(t, b, "which an open one writes", msg.Batch{Peer: peer, Segment: "pool",
		Write: true}, entry{remote: lentBytes - 1, bytes: 1})
	b.refusedBatch(t, b, "which an open one writes", msg.Batch{Peer: peer, Segment: "pool",
		Write: true}, entry{remote: 5, bytes: 1})
	late := other.batch(msg.Batch{Peer: peer, Segment: "pool", Wait: true},
		entry{remote: 77, bytes: 1})
	opened(2)
	w := other.batch(msg.Batch{Peer: peer, Segment: "pool", Write: true, Wait: true},
		entry{local: 1, remote: 77, bytes: 1})
	opened(3)
	canceled := other.batch(msg.Batch{Peer: peer, Segment: "pool", Wait: true},
		entry{local: 9, remote: 7, bytes: 1})
	opened(4)
	if err := other.Cancel(canceled, "not needed", false); err != nil {
		t.Fatal(err)
	}
	if c := other.wait(canceled); c.Status != engines.StatusCancelled {
		t.Errorf("a batch that waits is canceled with status %d, %q", c.Status, c.Received.Reason)
	}
	short := other.batch(msg.Batch{Peer: peer, Segment: "pool", Wait: true, DeadlineMS: 1},
		entry{local: 9, remote: 7, bytes: 1})
	if c := other.wait(short); c.Status != engines.StatusExpired {
		t.Errorf("a batch that waits too long has status %d, %q", c.Status, c.Received.Reason)
	}
	if n := nb.segments.Open(); n != 3 {
		t.Errorf("%d batches are open at the owner, want 3", n)
	}
	send()
	a.ok(first)
	other.ok(late)
	other.ok(w)
	until(t, func() bool { return nb.segments.Open() == 0 })
}

// Once a revocation has returned, no byte of the segment changes, although bytes of batches that
// used it are in flight; a batch of another grant goes on.
func TestRevocationReturnsAfterTheFence(t *testing.T) {
	for _, to := range []string{"", "one"} {
		a, b, na, nb, send := silent(t)
		g := everyone()
		if to != "" {
			to = na.cfg.Node
			g.To = to
		}
		b.lend("pool", g)
		leases := make([]uint64, 8)
		for i := range leases {
			leases[i] = a.batch(msg.Batch{Peer: nb.Endpoint(), Segment: "pool", Write: true,
				Note: []byte{1}}, entry{local: uint64(i) << 16, remote: uint64(i) << 16, bytes: 1 << 16})
			until(t, func() bool { return nb.segments.Open() == i+1 }) // the list is read
		}
		a.random()
		if err := b.Revoke(t.Context(), "pool", to); err != nil {
			t.Fatal(err)
		}
		want := bytes.Clone(b.memory())
		send()
		for _, l := range leases {
			if c := a.wait(l); c.Status == engines.StatusOK {
				t.Error("a batch of a revoked segment is complete")
			}
		}
		a.refusedBatch(t, b, "no segment that node", msg.Batch{Peer: nb.Endpoint(), Segment: "pool",
			Write: true}, entry{bytes: 1})
		until(t, func() bool { return flights(na) == 0 })
		if !bytes.Equal(b.memory(), want) {
			t.Error("bytes changed after the revocation")
		}
		if notes, err := b.Notes(t.Context(), 0); err != nil || len(notes) > 0 {
			t.Errorf("notifications of batches that failed: %+v, %v", notes, err)
		}
	}
}

// A grant ends at its time: its batches are fenced by then, and no others begin.
func TestGrantsEnd(t *testing.T) {
	a, b, _, nb, _ := silent(t)
	b.lend("pool", msg.SegmentGrant{To: "*", Read: true, Write: true, EndMS: 500})
	lease := a.batch(msg.Batch{Peer: nb.Endpoint(), Segment: "pool", Write: true}, entry{bytes: 1})
	if c := a.wait(lease); c.Status != engines.StatusExpired && c.Status != engines.StatusRefused {
		t.Errorf("status %d, %q", c.Status, c.Received.Reason)
	}
	until(t, func() bool {
		c := a.wait(a.batch(msg.Batch{Peer: nb.Endpoint(), Segment: "pool"}, entry{bytes: 1}))
		return c.Status == engines.StatusRefused && strings.Contains(c.Received.Reason, "no segment")
	})
}

// The engine of a segment receives a notification after the bytes, in order, once, and only of
// batches that are complete.
func TestNotesFollowTheirBytes(t *testing.T) {
	a, b, na, nb := segmenters(t)
	b.lend("pool", everyone())
	for i := range uint64(20) {
		copy(a.memory(), bytes.Repeat([]byte{byte(i + 1)}, 300))
		lease := a.batch(msg.Batch{Peer: nb.Endpoint(), Segment: "pool", Write: i%2 == 0,
			Note: []byte{byte(i), 2}}, entry{remote: i * 300, local: 0, bytes: 300})
		notes, err := b.Notes(t.Context(), uint64(patience.Milliseconds()))
		if err != nil || len(notes) != 1 || !bytes.Equal(notes[0].Note, []byte{byte(i), 2}) ||
			notes[0].Segment != "pool" || notes[0].From != na.cfg.Node || notes[0].Bytes != 300 {
			t.Fatalf("%v %+v", err, notes)
		}
		if got := b.memory()[i*300]; notes[0].Write && got != byte(i+1) {
			t.Fatalf("the notification came before the bytes: %d", got)
		}
		a.ok(lease)
	}
	a.refusedBatch(t, b, "no segment", msg.Batch{Peer: nb.Endpoint(), Segment: "none",
		Note: []byte{1}}, entry{bytes: 1})
	if notes, err := b.Notes(t.Context(), 0); err != nil || len(notes) != 0 {
		t.Errorf("notifications of nothing: %+v, %v", notes, err)
	}
}

// A segment's name belongs to one engine of the node; a peer finds it with the rights that it has.
func TestSegmentsAreFoundByName(t *testing.T) {
	a, b, na, nb := segmenters(t)
	b.lend("pool", msg.SegmentGrant{To: na.cfg.Node, Read: true, EndMS: 3600_000})
	other := newSegmenter(t, nb, "other")
	err := other.Segment(t.Context(), msg.Segment{Name: "pool", Bytes: 1,
		Grants: []msg.SegmentGrant{everyone()}})
	if err == nil || !strings.Contains(err.Error(), "is a segment of") {
		t.Errorf("another engine claims the name: %v", err)
	}
	l, err := a.Locate(t.Context(), msg.Locate{Peer: nb.Endpoint(), Name: "pool",
		DeadlineMS: deadlineMS})
	if err != nil || l.Bytes != lentBytes || !l.Read || l.Write || l.EndMS == 0 {
		t.Errorf("%+v, %v", l, err)
	}
	if l, err := a.Locate(t.Context(), msg.Locate{Peer: nb.cfg.Node, Name: "pool",
		DeadlineMS: deadlineMS}); err != nil {
		t.Errorf("by the node's name: %+v, %v", l, err)
	}
	if _, err := b.Locate(t.Context(), msg.Locate{Name: "pool", DeadlineMS: deadlineMS}); err == nil {
		t.Error("a node without a grant finds the segment")
	}
	if err := b.Revoke(t.Context(), "pool", ""); err != nil {
		t.Fatal(err)
	}
	if err := other.Segment(t.Context(), msg.Segment{Name: "pool", Bytes: 1}); err != nil {
		t.Errorf("after the revocation: %v", err)
	}
	for _, x := range []struct {
		m     msg.Segment
		field string
	}{
		{msg.Segment{Name: "x", Bytes: lentBytes + 1}, "region"},
		{msg.Segment{Name: "x", Offset: 1, Bytes: lentBytes}, "region"},
		{msg.Segment{Name: "x", Region: 9, Bytes: 1}, "region"},
		{msg.Segment{Name: "pool", Bytes: 1}, "name"},
		{msg.Segment{Name: "x", Bytes: 4, Grants: []msg.SegmentGrant{{To: "*", Read: true, Offset: 3,
			Bytes: 2}}}, "grants[0]"},
	} {
		err := other.Segment(t.Context(), x.m)
		if e, ok := err.(*connectortest.ServerError); !ok || e.Field != x.field || e.Remedy == "" {
			t.Errorf("%+v: %v", x.m, err)
		}
	}
}

// The late-write attack on batches: once the owner's engine has the notification of a batch, or has
// revoked its segment, the memory is never written again, although copies of chunks are in flight
// at that moment, and arrive.
func TestLateWritesOfBatches(t *testing.T) {
	for _, tr := range []struct {
		held  string
		order []string
	}{{"tcp", []string{"tcp"}}, {"shm", []string{"shm", "tcp"}}} {
		for name, revoked := range map[string]bool{"notified": false, "revoked": true} {
			t.Run(tr.held+"/"+name, func(t *testing.T) { lateBatches(t, tr.held, tr.order, revoked) })
		}
	}
}

func lateBatches(t *testing.T, held string, order []string, revoked bool) {
	at := newAttack(held)
	p, d := attacked(t, at, order...)
	lanesUp(t, p, d, order)
	user, owner := newSegmenter(t, p, "user"), newSegmenter(t, d, "owner")
	user.random()
	rng := newRand(7)
	c := newCanary(t, owner.engine)
	copies, attacks, want := 0, 0, attackRuns(t)/2
	for i := 0; attacks < want; i++ {
		if i > spareRuns*want {
			t.Fatalf("in only %d of %d runs a copy was in flight: nothing was attacked", attacks, i)
		}
		owner.lend("pool", everyone())
		at.begin(notEarly)
		lease := user.batch(msg.Batch{Peer: d.Endpoint(), Segment: "pool", Write: true, Note: []byte{1}},
			entry{bytes: lentBytes})
		ended := false
		if revoked {
			until(t, func() bool { return at.plan.Held() > 0 })
			spin(time.Duration(rng.IntN(1500)) * time.Microsecond)
			at.freeze() // the source gets a revoke before the fence
		} else {
			notes, err := owner.Notes(t.Context(), uint64(patience.Milliseconds()))
			if err != nil || len(notes) != 1 {
				t.Fatalf("%+v, %v", notes, err)
			}
			if ended = true; !bytes.Equal(owner.memory(), user.memory()) {
				t.Fatal("the notification came before the bytes")
			}
		}
		if err := owner.Revoke(t.Context(), "pool", ""); err != nil {
			t.Fatal(err)
		}
		c.sing()
		at.strike(t)
		n := at.end(t)
		if copies += n; n > 0 {
			attacks++
		}
		c.alive(t, i, "when nothing was in flight any more")
		if got := user.wait(lease); ended && got.Status != engines.StatusOK {
			t.Errorf("run %d: status %d, %q", i, got.Status, got.Received.Reason)
		}
		c.alive(t, i, "when the batch was over")
		if _, err := owner.Notes(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d copies in flight", copies)
}
