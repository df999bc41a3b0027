package segments

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/transfer"
)

// executor ends each lease that is canceled, and no other.
type executor struct {
	s *Segments

	mu     sync.Mutex // guards what follows
	open   map[uint64]bool
	wrote  []transfer.Key
	frames []*peerv1.ControlFrame
}

func (x *executor) events(all []engines.Event) {
	for _, e := range all {
		x.mu.Lock()
		var ended []uint64
		switch e.Kind {
		case engines.SourceOpened:
			x.open[e.Intent.Lease.ID] = true
		case engines.DestOpened:
			x.open[e.Expect.Lease.ID] = true
			x.wrote = append(x.wrote, e.Expect.Key)
		case engines.Canceled:
			ended = append(ended, e.Lease)
		case engines.WorkerGone:
			for id := range x.open {
				ended = append(ended, id)
			}
		}
		for _, id := range ended {
			delete(x.open, id)
		}
		x.mu.Unlock()
		for _, id := range ended {
			x.s.Completed(engines.Completion{Lease: transfer.LeaseID{ID: id},
				Status: engines.StatusCancelled}, nil)
		}
		if e.Kind == engines.WorkerGone {
			e.Fenced()
		}
	}
}

func (x *executor) send(_ transfer.Boot, f *peerv1.ControlFrame) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.frames = append(x.frames, f)
	return nil
}

// victim is a node with a segment "pool" of 4096 bytes, of which node "good" may use the first
// half, and others nothing.
func victim(t testing.TB) (s *Segments, x *executor) {
	t.Helper()
	x = &executor{open: map[uint64]bool{}}
	s = New(Options{Self: transfer.Boot{1}, Node: "self", Endpoint: func() string { return "self:1" },
		Registry: parseblock.Default(), Leases: local.New(context.Background()), Events: x.events,
		Send: x.send, Connect: func(string) {}, Member: func(string) string { return "" },
		Complete: func(*engines.Worker, engines.Completion) error { return nil },
		Log:      slog.New(slog.DiscardHandler)})
	x.s = s
	if err := s.Attach(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := s.Register(&engines.Worker{Name: "owner"}, connector.Segment{Name: "pool",
		Region: testRegion(t, 4096), Len: 4096, Grants: []connector.Grant{{To: "good", Read: true,
			Write: true, Len: 2048}}}); err != nil {
		t.Fatal(err)
	}
	s.PeerUp(transfer.Boot{2}, "good", "good:1", "", []string{Feature})
	s.PeerUp(transfer.Boot{3}, "bad", "bad:1", "", []string{Feature})
	return s, x
}

func wireOf(off, n, stride uint64, count uint32) []byte {
	b := binary.LittleEndian.AppendUint64(nil, off)
	b = binary.LittleEndian.AppendUint64(b, n)
	b = binary.LittleEndian.AppendUint64(b, stride)
	return binary.LittleEndian.AppendUint32(b, count)
}

func batchFrame(id uint64, entries []byte) *peerv1.SegmentBatch {
	return &peerv1.SegmentBatch{Id: id, Name: "pool", Write: true, Nonce: make([]byte, 16),
		Entries: entries, DeadlineMs: 1000}
}

func frameOf(m *peerv1.SegmentBatch) *peerv1.ControlFrame {
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SegmentBatch{SegmentBatch: m}}
}

// FuzzFrames feeds foreign frames about segments to a node. Whatever comes, only the granted bytes
// are in a lease, at most the bound of leases is open, and all of them end.
func FuzzFrames(f *testing.F) {
	seed := func(c *peerv1.ControlFrame) {
		b, err := proto.Marshal(c)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	seed(frameOf(batchFrame(1, wireOf(0, 8, 0, 1))))
	seed(frameOf(batchFrame(1, wireOf(2040, 16, 0, 1))))
	seed(frameOf(batchFrame(1, wireOf(0, 1, 1<<63, 3))))
	seed(&peerv1.ControlFrame{Body: &peerv1.ControlFrame_SegmentCancel{
		SegmentCancel: &peerv1.SegmentCancel{Id: 1, Reason: strings.Repeat("x", 5000)}}})
	seed(&peerv1.ControlFrame{Body: &peerv1.ControlFrame_SegmentDone{
		SegmentDone: &peerv1.SegmentDone{Id: 1, Status: 1 << 20}}})
	seed(&peerv1.ControlFrame{Body: &peerv1.ControlFrame_SegmentLocate{
		SegmentLocate: &peerv1.SegmentLocate{Id: 1, Name: "pool"}}})
	f.Fuzz(func(t *testing.T, b []byte) {
		var c peerv1.ControlFrame
		if proto.Unmarshal(b, &c) != nil {
			return
		}
		s, _ := victim(t)
		for _, from := range []transfer.Boot{{2}, {3}, {4}} {
			_ = s.Handle(from, proto.Clone(&c).(*peerv1.ControlFrame))
		}
		if s.Open() > 1 {
			t.Errorf("%d leases are open", s.Open())
		}
		s.ranges.mu.Lock()
		for _, x := range s.ranges.all {
			for _, spans := range x.spans {
				for _, r := range spans {
					if r.from >= r.to || r.to > 2048 {
						t.Errorf("bytes [%d, %d) are in a lease", r.from, r.to)
					}
				}
			}
		}
		s.ranges.mu.Unlock()
	})
}

// A peer without a grant gets the same refusal for a segment and for a name that does not exist,
// and no lease. Another peer can end no lease and answer no question that is not its own.
func TestOtherPeersHaveNoRights(t *testing.T) {
	s, x := victim(t)
	for i, m := range []*peerv1.SegmentBatch{batchFrame(1, wireOf(0, 8, 0, 1)),
		batchFrame(2, wireOf(0, 8, 0, 1))} {
		if i == 1 {
			m.Name = "none"
		}
		if err := s.Handle(transfer.Boot{3}, frameOf(m)); err != nil {
			t.Fatal(err)
		}
	}
	x.mu.Lock()
	if len(x.frames) != 2 || len(x.open) != 0 {
		t.Fatalf("%d answers, %d leases", len(x.frames), len(x.open))
	}
	a, b := x.frames[0].GetSegmentDone(), x.frames[1].GetSegmentDone()
	x.mu.Unlock()
	if strings.ReplaceAll(a.Reason, "pool", "none") != b.Reason ||
		a.Status != uint32(engines.StatusRefused) {
		t.Errorf("%d %q, and of no segment %q", a.Status, a.Reason, b.Reason)
	}
	if err := s.Handle(transfer.Boot{2}, frameOf(batchFrame(7, wireOf(0, 8, 0, 1)))); err != nil {
		t.Fatal(err)
	}
	_ = s.Handle(transfer.Boot{3}, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SegmentCancel{
		SegmentCancel: &peerv1.SegmentCancel{Id: 7}}})
	if s.Open() != 1 {
		t.Error("another peer has ended a lease")
	}
	q := &ask{peer: transfer.Boot{2}, done: make(chan *peerv1.SegmentDone, 1)}
	id, err := s.open(q)
	if err != nil {
		t.Fatal(err)
	}
	done := &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SegmentDone{
		SegmentDone: &peerv1.SegmentDone{Id: id}}}
	if _ = s.Handle(transfer.Boot{3}, done); len(q.done) != 0 {
		t.Error("another peer has answered")
	}
	if _ = s.Handle(transfer.Boot{2}, done); len(q.done) != 1 {
		t.Error("the peer has not answered")
	}
}

// Malformed frames are violations; a peer's leases, their bytes and its notes have bounds.
func TestFramesAreBounded(t *testing.T) {
	s, _ := victim(t)
	good := wireOf(0, 8, 0, 1)
	for name, change := range map[string]func(*peerv1.SegmentBatch){
		"no name":     func(m *peerv1.SegmentBatch) { m.Name = "" },
		"long name":   func(m *peerv1.SegmentBatch) { m.Name = strings.Repeat("n", msg.MaxNameBytes+1) },
		"no entries":  func(m *peerv1.SegmentBatch) { m.Entries = nil },
		"half entry":  func(m *peerv1.SegmentBatch) { m.Entries = good[:20] },
		"too many":    func(m *peerv1.SegmentBatch) { m.Entries = make([]byte, wireEntry*100_001) },
		"short nonce": func(m *peerv1.SegmentBatch) { m.Nonce = m.Nonce[:15] },
		"long note":   func(m *peerv1.SegmentBatch) { m.Note = make([]byte, msg.MaxNoteBytes+1) },
	} {
		m := batchFrame(1, good)
		change(m)
		if err := s.Handle(transfer.Boot{2}, frameOf(m)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for i := range uint64(maxPerPeer + 5) {
		m := batchFrame(10+i, wireOf(i, 1, 0, 1))
		binary.LittleEndian.PutUint64(m.Nonce, i)
		if err := s.Handle(transfer.Boot{2}, frameOf(m)); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.Open(); n != maxPerPeer {
		t.Errorf("%d leases of one peer are open, want %d", n, maxPerPeer)
	}
	s.PeerDown(transfer.Boot{2}, true)
}

// A long reason of a peer ends with a whole character: else neither an engine nor a frame takes it.
func TestReasonsStayText(t *testing.T) {
	long := "x" + strings.Repeat("é", maxReasonLen)
	if got := cut(long); len(got) > maxReasonLen || !utf8.ValidString(got) ||
		!strings.HasPrefix(long, got) {
		t.Errorf("%d bytes, %q at the end", len(got), got[len(got)-3:])
	}
}

// A question that is refused is answered without a lock: the answer may ask again.
func TestRefusedQuestionsHoldNoLock(t *testing.T) {
	s, _ := victim(t)
	s.mu.Lock()
	s.locates = maxLocates
	s.mu.Unlock()
	free := false
	s.Locate("", "pool", time.Second, func(connector.Located, error) {
		if free = s.mu.TryLock(); free {
			s.mu.Unlock()
		}
	})
	if !free {
		t.Error("the answer was given under the lock")
	}
}

// A sidecar of an older release is refused by its name, with a remedy, and gets no frame that it
// does not understand.
func TestOlderPeersAreRefused(t *testing.T) {
	s, x := victim(t)
	s.PeerUp(transfer.Boot{4}, "old", "old:1", "", []string{"store"})
	for _, peer := range []string{"old", "old:1"} {
		_, err := s.locate(t.Context(), peer, "pool")
		var refusal *msg.Error
		if !errors.As(err, &refusal) || refusal.Field != "peer" || refusal.Remedy == "" ||
			!strings.Contains(refusal.Problem, `node "old" takes no batches`) {
			t.Errorf("find at %q: %v", peer, err)
		}
		_, _, err = s.reach(t.Context(), peer)
		if !errors.As(err, &refusal) || refusal.Field != "peer" {
			t.Errorf("batch to %q: %v", peer, err)
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.frames) > 0 || len(x.open) > 0 {
		t.Errorf("frames %v, leases %v", x.frames, x.open)
	}
}
