package feed

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/proxy/internal/feed/feedtest"
	"github.com/kvspray/kvspray/proxy/internal/kvevents"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const patience = time.Minute // of a test that is about to fail

// sink has the first token of each block.
type sink struct {
	mu    sync.Mutex
	have  map[kvevents.Name]uint32
	live  bool
	voids int
}

func (s *sink) Apply(_ context.Context, b *kvevents.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range b.Events {
		switch e.Kind {
		case kvevents.Stored:
			for i, n := range e.Blocks {
				s.have[n] = e.Tokens[i*e.BlockSize]
			}
		case kvevents.Removed:
			for _, n := range e.Blocks {
				delete(s.have, n)
			}
		case kvevents.Cleared:
			clear(s.have)
		}
	}
}

func (s *sink) Void() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.have)
	s.voids++
}

func (s *sink) Live(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live = on
}

// firsts are the first tokens of all blocks, and whether the sink is live.
func (s *sink) firsts() (map[uint32]bool, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[uint32]bool{}
	for _, t := range s.have {
		out[t] = true
	}
	return out, s.live
}

// syncLog is a log that a test reads while it is written.
type syncLog struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *syncLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *syncLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

type rig struct {
	*testing.T
	*feedtest.Publisher
	sink *sink
	log  *syncLog
	feed *Feed
}

func newRig(t *testing.T) *rig {
	return &rig{T: t, Publisher: feedtest.New(t), sink: &sink{have: map[kvevents.Name]uint32{}},
		log: &syncLog{}}
}

// follow starts the feed; the returned function ends it.
func (r *rig) follow(replay bool) func() {
	cfg := Config{Engine: "http://engine", Endpoint: r.Endpoint(), Sink: r.sink,
		Log: slog.New(slog.NewTextHandler(r.log, nil))}
	if replay {
		cfg.Replay = r.Replay()
	}
	r.feed = New(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); r.feed.Run(ctx) }()
	stop := sync.OnceFunc(func() { cancel(); <-done })
	r.Cleanup(stop)
	return stop
}

// block is an event about one block, whose tokens are its number.
func block(n int) any {
	return feedtest.Stored([]string{fmt.Sprint("block ", n)}, nil, []uint32{uint32(n)}, 1)
}

func lost(n int) any { return feedtest.Removed(fmt.Sprint("block ", n)) }

// want waits until a live sink has some blocks.
func (r *rig) want(blocks ...uint32) {
	r.Helper()
	all := map[uint32]bool{}
	for _, b := range blocks {
		all[b] = true
	}
	r.until(fmt.Sprint("blocks ", blocks), func() bool {
		got, live := r.sink.firsts()
		return live && maps.Equal(got, all)
	})
}

func (r *rig) until(what string, ok func() bool) {
	r.Helper()
	late := time.After(patience)
	for !ok() {
		select {
		case <-late:
			got, live := r.sink.firsts()
			r.Fatalf("%s: have %v, live %v\n%s", what, got, live, r.log)
		case <-time.After(time.Millisecond):
		}
	}
}

func TestFollows(t *testing.T) {
	for _, replay := range []bool{true, false} {
		r := newRig(t)
		stop := r.follow(replay)
		r.Subscribed(1)
		r.want()
		r.Publish(block(1), block(2))
		r.Publish(block(3), lost(1))
		r.want(2, 3)
		r.Publish(feedtest.Cleared(), block(4))
		r.want(4)
		if s := r.feed.Stats(); s.Batches != 3 || s.Events != 6 || s.Gaps != 0 || r.sink.voids != 0 ||
			!s.Live {
			t.Errorf("%+v", s)
		}
		stop()
		if r.feed.Stats().Live {
			t.Error("live after its end")
		}
	}
}

// A router that starts later gets everything by replay.
func TestReplayFromTheStart(t *testing.T) {
	r := newRig(t)
	var want []uint32
	for i := range 300 {
		r.Publish(block(i))
		want = append(want, uint32(i))
	}
	r.Queue(90) // the publisher's queue loses the rest, and the end, of each replay
	r.follow(true)
	r.want(want...)
	if n := r.Asked(); n < 4 {
		t.Errorf("%d replays", n)
	}
	r.Publish(lost(0))
	r.want(want[1:]...)
}

func TestGapIsMended(t *testing.T) {
	r := newRig(t)
	r.follow(true)
	r.Subscribed(1)
	r.Publish(block(1))
	r.want(1)
	r.Lose(block(2))
	r.Lose(lost(1))
	r.Publish(block(3))
	r.want(2, 3)
	if s := r.feed.Stats(); s.Gaps != 1 || r.sink.voids != 0 || s.Replays != 2 {
		t.Errorf("%+v, %d voids", s, r.sink.voids)
	}
}

// Without the missing batches everything before them is void.
func TestGapThatCannotBeMended(t *testing.T) {
	for name, prepare := range map[string]func(*rig){
		"none":  func(*rig) {},
		"short": func(r *rig) { r.Keep(1) },
		"mute":  func(r *rig) { r.Mute(true) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.follow(name != "none")
			r.Subscribed(1)
			r.Publish(block(1))
			r.want(1)
			prepare(r)
			r.Lose(lost(1))
			r.Publish(block(3))
			r.want(3)
			if s := r.feed.Stats(); s.Gaps != 1 || s.Voids[Gap] != 1 {
				t.Errorf("%+v", s)
			}
			if n := strings.Count(r.log.String(), "are forgotten"); n != 1 {
				t.Errorf("%d lines:\n%s", n, r.log)
			}
		})
	}
}

func TestRestart(t *testing.T) {
	for name, after := range map[string][]uint32{"nothing": nil, "fewer": {7},
		"as many": {7, 8, 9}, "more": {6, 7, 8, 9}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.follow(true)
			r.Subscribed(1)
			for i := range 3 {
				r.Publish(block(i))
			}
			r.want(0, 1, 2)
			r.Restart()
			for _, b := range after {
				r.Lose(block(int(b)))
			}
			r.want(after...)
			r.Subscribed(1)
			r.Publish(block(20))
			r.want(append(after, 20)...)
			if s := r.feed.Stats(); s.Voids[Restart] != 1 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// A connection that was lost costs nothing with a replay, and everything without.
func TestReconnect(t *testing.T) {
	for _, replay := range []bool{true, false} {
		r := newRig(t)
		r.follow(replay)
		r.Subscribed(1)
		r.Publish(block(1))
		r.want(1)
		r.Disconnect()
		r.Lose(block(2))
		r.Subscribed(1)
		r.Publish(block(3))
		if replay {
			r.want(1, 2, 3)
		} else {
			r.want(3)
		}
		if got := r.sink.voids; (got == 0) != replay {
			t.Errorf("replay %v: %d voids", replay, got)
		}
	}
}

// A replay endpoint of another engine must not stand for this one's events.
func TestReplayOfAnotherEngine(t *testing.T) {
	other := newRig(t)
	for i := range 5 {
		other.Publish(block(100 + i))
	}
	r := newRig(t)
	r.Publisher.ReplayOf(other.Publisher)
	r.follow(true)
	r.want(100, 101, 102, 103, 104) // no event of the right engine has come yet
	r.Subscribed(1)
	r.Publish(block(1))
	r.Publish(block(2))
	r.want(1, 2)
	if s := r.feed.Stats(); s.Voids[Replay] != 1 || !strings.Contains(r.log.String(),
		"reason=replay") {
		t.Errorf("%+v\n%s", s, r.log)
	}
}

// A batch that both the subscription and a replay bring is taken once. One that cannot be compared,
// as its hash is not kept, voids.
func TestBatchesOfBothWays(t *testing.T) {
	r := newRig(t)
	f := New(Config{Engine: "e", Endpoint: r.Endpoint(), Replay: r.Replay(), Sink: r.sink})
	payload := func(n int) []byte { return feedtest.Payload(t, block(n)) }
	ctx := t.Context()
	var all [][]byte
	for i := range keptSums + 10 {
		all = append(all, payload(i))
		f.take(ctx, int64(i), all[i], f.sum(all[i]))
	}
	for _, i := range []int64{10, keptSums, keptSums + 9} {
		if err := f.taken(ctx, i, all[i]); err != nil || r.sink.voids != 0 {
			t.Fatalf("batch %d: %v, %d voids", i, err, r.sink.voids)
		}
	}
	if err := f.taken(ctx, 9, all[9]); err != nil || f.Stats().Voids[Replay] != 1 || f.next != 10 {
		t.Errorf("a batch whose hash is not kept: %v, %+v", err, f.Stats())
	}
	f.take(ctx, 10, all[10], f.sum(all[10]))
	if err := f.taken(ctx, 8, all[8]); err != nil || f.Stats().Voids[Replay] != 2 {
		t.Errorf("a batch before the first one: %v, %+v", err, f.Stats())
	}
}

// Lines about an engine that comes and goes have a bound in time.
func TestFlappingLogsLittle(t *testing.T) {
	r := newRig(t)
	r.follow(true)
	for range 4 {
		r.Subscribed(1)
		r.Disconnect()
	}
	r.Subscribed(1)
	for _, line := range []string{"no KV events", "KV events of an engine"} {
		if n := strings.Count(r.log.String(), line); n > 1 {
			t.Errorf("%d lines:\n%s", n, r.log)
		}
	}
}

// Numbers that go back within one connection are another engine's.
func TestNumbersGoBack(t *testing.T) {
	r := newRig(t)
	r.follow(true)
	r.Subscribed(1)
	r.Publish(block(1))
	r.Publish(block(2))
	r.want(1, 2)
	r.Rewind()
	r.Publish(block(3))
	r.until("a second session", func() bool { return r.feed.Stats().Voids[Restart] == 1 })
	r.want(3)
}

func TestGarbageVoids(t *testing.T) {
	r := newRig(t)
	r.follow(true)
	r.Subscribed(1)
	r.Publish(block(1))
	r.want(1)
	for range 3 {
		r.Raw([]byte("garbage"), false)
	}
	r.Publish(block(2))
	r.want(2)
	if s := r.feed.Stats(); s.Voids[Garbage] != 1 || s.Batches != 2 {
		t.Errorf("%+v", s)
	}
	if n := strings.Count(r.log.String(), "reason=garbage err="); n != 1 {
		t.Errorf("%d lines:\n%s", n, r.log)
	}
	r.Raw([]byte("more garbage"), false)
	r.Publish(block(2))
	r.until("a second loss", func() bool { return r.feed.Stats().Voids[Garbage] == 2 })
	r.want(2)
	if n := strings.Count(r.log.String(), "are forgotten"); n != 1 {
		t.Errorf("%d lines within a minute:\n%s", n, r.log)
	}
	r.Disconnect() // the replay that follows contains the garbage
	r.Lose(block(3))
	r.want(2, 3)
}

// An engine without events is named once.
func TestNoPublisher(t *testing.T) {
	r := newRig(t)
	endpoint := r.Endpoint()
	r.Close()
	r.feed = New(Config{Engine: "http://engine", Endpoint: endpoint, Sink: r.sink,
		Log: slog.New(slog.NewTextHandler(r.log, nil))})
	lines := func() int { return strings.Count(r.log.String(), "no KV events") }
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); r.feed.Run(ctx) }()
	r.until("a line in the log", func() bool { return lines() > 0 })
	<-time.After(2 * time.Second) // it tries again, without another line
	cancel()
	<-done
	if n := lines(); n != 1 {
		t.Errorf("%d lines:\n%s", n, r.log)
	}
}

func TestNumbersAreChecked(t *testing.T) {
	for _, b := range [][]byte{nil, {1}, bytes.Repeat([]byte{0xfe}, 8), make([]byte, 9)} {
		if n, err := number(b); err == nil {
			t.Errorf("%v: %d", b, n)
		}
	}
	for _, frames := range [][][]byte{nil, {{}}, {{}, {1}, {}}, {{}, {}, {}, make([]byte, 8), {}}} {
		if n, _, err := replayed(frames); err == nil {
			t.Errorf("%v: %d", frames, n)
		}
	}
	if n, b, err := replayed([][]byte{{}, make([]byte, 8), {5}}); n != 0 || len(b) != 1 || err != nil {
		t.Errorf("a replay of former versions: %d %v %v", n, b, err)
	}
}

// Whatever is lost, and whenever the engine restarts, the sink has no block that the engine lacks.
// If every gap could be mended, it has all of them.
func TestRandomFaults(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel() // most of it is pauses
			r := newRig(t)
			r.follow(seed%4 != 0)
			rnd := rand.New(rand.NewPCG(seed, 1))
			truth := map[uint32]bool{}
			mended := seed%4 != 0
			marker := 1000
			for range 8 {
				r.Subscribed(1)
				for range rnd.IntN(20) {
					n := rnd.IntN(40)
					event := block(n)
					if truth[uint32(n)] {
						event = lost(n)
						delete(truth, uint32(n))
					} else {
						truth[uint32(n)] = true
					}
					r.Raw(feedtest.Payload(t, event), rnd.IntN(4) == 0)
				}
				switch rnd.IntN(6) {
				case 0:
					r.Disconnect()
				case 1:
					r.Restart()
					clear(truth)
				case 2:
					r.Keep(1 + rnd.IntN(10))
					mended = false
				case 3:
					r.Queue(2 + rnd.IntN(5)) // one is the batch that is known
				case 4:
					r.Keep(0)
				}
				r.Subscribed(1)
				// The marker comes after all else.
				marker++
				r.Publish(block(marker))
				truth[uint32(marker)] = true
				r.until("the marker", func() bool {
					got, live := r.sink.firsts()
					return live && got[uint32(marker)]
				})
				got, _ := r.sink.firsts()
				for b := range got {
					if !truth[b] {
						t.Fatalf("block %d is not the engine's: %v, it has %v\n%s", b, got, truth, r.log)
					}
				}
				if mended && len(got) != len(truth) {
					t.Fatalf("have %v, the engine has %v\n%s", got, truth, r.log)
				}
			}
		})
	}
}
