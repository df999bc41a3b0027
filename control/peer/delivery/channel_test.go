package delivery

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/frame"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// fake is one end of a lane in memory. The far end receives each frame in a goroutine of its own.
type fake struct {
	local netip.Addr
	far   *end // nil: frames go nowhere
	back  *fake

	mu       sync.Mutex // protects all below
	silent   bool       // frames are lost from now on
	backlog  int
	received int64
	err      error
	queue    [][]byte
	busy     bool // pass runs
}

// end is a channel with the frames that it has delivered.
type end struct {
	*Channel
	mu  sync.Mutex // protects got
	got []uint64
}

func newEnd(boot byte) *end {
	e := &end{}
	e.Channel = New(transfer.Boot{boot}, NewBudget(MaxWaiting, func() {}),
		func(f *peerv1.ControlFrame) {
			e.mu.Lock()
			e.got = append(e.got, f.GetAwait().GetToken()+f.GetCommit().GetDestination().GetId())
			e.mu.Unlock()
		})
	return e
}

func (e *end) delivered() []uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.got)
}

// connect makes a lane between two channels.
func connect(t *testing.T, a, b *end, local netip.Addr) (x, y *fake) {
	t.Helper()
	x, y = &fake{local: local, far: b}, &fake{local: local, far: a}
	x.back, y.back = y, x
	for _, l := range []*fake{x, y} {
		l.received = time.Now().UnixNano()
	}
	if err := a.Add(x); err != nil {
		t.Fatal(err)
	}
	if err := b.Add(y); err != nil {
		t.Fatal(err)
	}
	return x, y
}

func (l *fake) Write(b []byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return false
	}
	if l.silent || l.far == nil {
		return true
	}
	l.queue = append(l.queue, bytes.Clone(b))
	if !l.busy {
		l.busy = true
		go l.pass()
	}
	return true
}

// pass passes frames to the far end, in order.
func (l *fake) pass() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.queue) > 0 {
		b := l.queue[0]
		l.queue = l.queue[1:]
		l.mu.Unlock()
		f, _, err := frame.Read(bytes.NewReader(b), nil)
		l.back.mu.Lock()
		l.back.received = time.Now().UnixNano()
		l.back.mu.Unlock()
		if err == nil {
			err = l.far.Receive(l.back, f)
		}
		if err != nil {
			panic(err)
		}
		l.mu.Lock()
	}
	l.busy = false
}

func (l *fake) silence() {
	l.mu.Lock()
	l.silent = true
	l.mu.Unlock()
}

func (l *fake) Backlog() int      { l.mu.Lock(); defer l.mu.Unlock(); return l.backlog }
func (l *fake) Received() int64   { l.mu.Lock(); defer l.mu.Unlock(); return l.received }
func (l *fake) Err() error        { l.mu.Lock(); defer l.mu.Unlock(); return l.err }
func (l *fake) Fail(err error)    { l.mu.Lock(); defer l.mu.Unlock(); l.err = err }
func (l *fake) Local() netip.Addr { return l.local }
func (*fake) Address() string     { return "" }
func (*fake) String() string      { return "fake" }

func await(i uint64) *peerv1.ControlFrame {
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Await{Await: &peerv1.Await{Token: i}}}
}

// Duplicates and frames in another order are delivered once and in order.
func TestReorder(t *testing.T) {
	e := newEnd(1)
	l := &fake{}
	defer e.Close(nil)
	for _, seq := range []uint64{3, 3, 2, 5, 1, 1, 4, 2, 5} {
		f := await(seq)
		f.Seq = seq
		if err := e.Receive(l, f); err != nil {
			t.Fatal(err)
		}
	}
	if got := e.delivered(); !slices.Equal(got, []uint64{1, 2, 3, 4, 5}) {
		t.Error(got)
	}
	f := await(1)
	if f.Seq = 3 * MaxUnacked; e.Receive(l, f) == nil {
		t.Error("a frame far ahead was kept")
	}
	f.Seq, f.Ack = 6, 99
	if e.Receive(l, f) == nil {
		t.Error("an acknowledgement of a frame that was never sent was accepted")
	}
}

// The preferred address decides between lanes that are equally good, whatever their last reception.
// It does not decide against a lane that is suspect, or has a backlog.
func TestPreferredAddress(t *testing.T) {
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.1.1")
	lanes := func() (x, y *laneState) {
		return &laneState{Lane: &fake{local: a, received: 100}},
			&laneState{Lane: &fake{local: b, received: 200}}
	}
	for _, c := range []struct {
		name   string
		prefer netip.Addr
		change func(x, y *laneState)
		first  bool // the lane from a is chosen
	}{
		{"no preference", netip.Addr{}, nil, false},
		{"the lane with the earlier reception", a, nil, true},
		{"the lane with the last reception", b, nil, false},
		{"an address that no lane has", netip.MustParseAddr("10.0.2.1"), nil, false},
		{"a backlog", a, func(x, _ *laneState) { x.Lane.(*fake).backlog = 1 }, false},
		{"suspect", a, func(x, _ *laneState) { x.suspected = 150 }, false},
		{"the other is suspect", b, func(_, y *laneState) { y.suspected = 250 }, true},
	} {
		for _, reversed := range []bool{false, true} {
			x, y := lanes()
			if c.change != nil {
				c.change(x, y)
			}
			s := &Channel{lanes: []*laneState{x, y}, prefer: c.prefer}
			if reversed {
				slices.Reverse(s.lanes)
			}
			if got := s.bestLocked(); (got == x) != c.first {
				t.Errorf("%s, reversed %v: the lane from %v", c.name, reversed, got.Local())
			}
		}
	}
}

// A control lane that becomes silent, one way or both, delays a frame only until the lane is
// suspect. No connection ends and no ping is sent meanwhile.
func TestSilentLane(t *testing.T) {
	for name, both := range map[string]bool{"one way": false, "both ways": true} {
		t.Run(name, func(t *testing.T) {
			testutil.Bubble(t, func(t *testing.T) {
				a, b := newEnd(1), newEnd(2)
				defer a.Close(nil)
				defer b.Close(nil)
				connect(t, a, b, netip.MustParseAddr("10.0.0.1"))
				connect(t, a, b, netip.MustParseAddr("10.0.1.1"))
				send := func(from, to uint64) {
					for i := from; i <= to; i++ {
						if a.Send(await(i)) != nil || b.Send(await(i)) != nil {
							t.Fatal("not sent")
						}
					}
				}
				send(1, 10)
				synctest.Wait()
				a.mu.Lock()
				best := a.bestLocked()
				a.mu.Unlock()
				x := best.Lane.(*fake)
				x.silence()
				if both {
					x.back.silence()
				}
				send(11, 20)
				time.Sleep(2 * resendAfter)
				synctest.Wait()
				for _, e := range []*end{a, b} {
					if got := e.delivered(); len(got) != 20 || got[19] != 20 {
						t.Errorf("delivered %v", got)
					}
				}
				for range 10 {
					time.Sleep(resendMax)
				}
				a.mu.Lock()
				defer a.mu.Unlock()
				if n := len(a.unacked) + b.State().Unacked; best.suspected == 0 || n > 0 {
					t.Errorf("the silent lane was suspected at %d; %d frames are not acknowledged",
						best.suspected, n)
				}
			})
		})
	}
}

// The frames of a lane that ends leave at once on another lane.
func TestEndedLane(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		a, b := newEnd(1), newEnd(2)
		defer a.Close(nil)
		defer b.Close(nil)
		x, _ := connect(t, a, b, netip.MustParseAddr("10.0.0.1"))
		connect(t, a, b, netip.MustParseAddr("10.0.1.1"))
		a.Prefer(x.local)
		x.silence()
		for i := range uint64(3) {
			if err := a.Send(await(i + 1)); err != nil {
				t.Fatal(err)
			}
		}
		x.Fail(net.ErrClosed)
		if left, closed := a.Remove(x); left != 1 || closed {
			t.Errorf("%d lanes are left, closed %v", left, closed)
		}
		synctest.Wait() // no time passes
		if got := b.delivered(); !slices.Equal(got, []uint64{1, 2, 3}) {
			t.Errorf("delivered %v", got)
		}
	})
}
