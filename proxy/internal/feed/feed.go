// Package feed follows the KV events of one engine: it subscribes to vLLM's publisher, and asks
// the publisher's replay endpoint for what it missed.
//
// What a sink has is at any time a part of what the engine published last, without a gap. Then a
// block of the sink is a block of the engine. If the feed cannot mend a gap, or the engine
// restarted, the sink loses everything and begins anew with later batches: it then has fewer
// blocks than the engine, never others.
//
// A batch has a number, and a replay begins with the last batch that the feed has. If the engine
// answers with another batch of that number, it restarted. In the same way a batch of the
// subscription must be the one that a replay had under its number: the two endpoints may be those
// of two engines.
//
// Run owns the connections, and everything but Stats belongs to its goroutine. Messages, replays
// and the rate of connections are bounded.
package feed

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/proxy/internal/kvevents"
	"github.com/kvspray/kvspray/proxy/internal/zmtp"
)

// Bounds.
const (
	minPause   = 100 * time.Millisecond // before a new connection, with growth
	maxPause   = 5 * time.Second
	stableTime = 5 * time.Second // of a connection after which the pause is short again
	logEvery   = time.Minute     // lines with one reason; metrics count all

	replayFirst = 3 * time.Second // until the first batch of a replay
	// Between batches, with growth. A publisher sends all at once: the rest of a replay was lost.
	replayQuiet  = 250 * time.Millisecond
	replayTime   = 30 * time.Second
	replayBytes  = 1 << 30 // of one replay
	replayRounds = 64      // a publisher drops what its queue of 1,000 messages cannot hold
	replayTries  = 3       // rounds without a new batch

	// Hashes of the last batches. More are not published during one replay.
	keptSums = 1 << 13
)

// Reasons why a sink lost everything.
const (
	Restart = "restart" // the engine restarted
	Gap     = "gap"     // batches are missing, and no replay has them
	Garbage = "garbage" // a batch was malformed
	Replay  = "replay"  // the replay had other batches than the subscription
)

// Reasons lists them.
func Reasons() []string { return []string{Restart, Gap, Garbage, Replay} }

// Sink takes events of one engine, from one goroutine.
type Sink interface {
	Apply(context.Context, *kvevents.Batch)
	Void()     // everything that it has is gone
	Live(bool) // whether it is up to date
}

// Config configures a Feed.
type Config struct {
	Engine   string // for logs
	Endpoint string // of the publisher, tcp://host:port
	Replay   string // empty: gaps cannot be mended
	Sink     Sink
	Log      *slog.Logger
}

// Stats are counters since the start.
type Stats struct {
	Batches, Events, Unknown uint64
	Gaps                     uint64 // numbers that were skipped
	Replays, ReplaysFailed   uint64
	Voids                    map[string]uint64 // by reason
	Live                     bool
}

// Feed follows one engine.
type Feed struct {
	cfg  Config
	seed maphash.Seed

	next    int64                // number of the next batch; -1: any
	from    int64                // number of the first batch that the sink has, if next is above 0
	sums    []uint64             // hashes of the batches before next, by their number
	down    bool                 // a line about the connection was logged
	unasked bool                 // the same about replays
	spoiled bool                 // the last batch was malformed
	logged  map[string]time.Time // the last line of a kind

	batches, events, unknown, gaps, replays, failed atomic.Uint64
	restarts, holes, garbage, foreign               atomic.Uint64
	live                                            atomic.Bool
}

// New makes a Feed; it starts nothing.
func New(cfg Config) *Feed {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Feed{cfg: cfg, seed: maphash.MakeSeed(), next: -1, logged: map[string]time.Time{}}
}

// Stats returns the counters.
func (f *Feed) Stats() Stats {
	return Stats{Batches: f.batches.Load(), Events: f.events.Load(), Unknown: f.unknown.Load(),
		Gaps: f.gaps.Load(), Replays: f.replays.Load(), ReplaysFailed: f.failed.Load(),
		Voids: map[string]uint64{Restart: f.restarts.Load(), Gap: f.holes.Load(),
			Garbage: f.garbage.Load(), Replay: f.foreign.Load()}, Live: f.live.Load()}
}

// Live reports whether the sink is up to date.
func (f *Feed) Live() bool { return f.live.Load() }

// Run follows the engine until ctx ends.
func (f *Feed) Run(ctx context.Context) {
	pause := minPause
	for ctx.Err() == nil {
		start := time.Now()
		err := f.session(ctx)
		f.setLive(false)
		if ctx.Err() != nil {
			return
		}
		if !f.down && f.mayLog("down") {
			f.down = true
			f.cfg.Log.Warn("no KV events from an engine: its hits are guesses until they come",
				"url", f.cfg.Engine, "endpoint", f.cfg.Endpoint, "err", err,
				"remedy", "start vLLM with --kv-events-config and this endpoint")
		}
		if time.Since(start) > stableTime {
			pause = minPause
		}
		if !sleep(ctx, pause/2+rand.N(pause/2)) {
			return
		}
		pause = min(2*pause, maxPause)
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// mayLog reports whether the last line of a kind is long ago.
func (f *Feed) mayLog(kind string) bool {
	if last, ok := f.logged[kind]; ok && time.Since(last) < logEvery {
		return false
	}
	f.logged[kind] = time.Now()
	return true
}

func (f *Feed) setLive(on bool) {
	f.live.Store(on)
	f.cfg.Sink.Live(on)
}

var errMessage = errors.New("a message is not of the form topic, number, batch")

const numberBytes = 8

// number reads the number of a batch; -1 ends a replay.
func number(b []byte) (int64, error) {
	if len(b) != numberBytes {
		return 0, errMessage
	}
	n := int64(binary.BigEndian.Uint64(b))
	if n < -1 {
		return 0, errMessage
	}
	return n, nil
}

// session follows the engine over one connection.
func (f *Feed) session(ctx context.Context) error {
	conn, err := zmtp.Dial(ctx, f.cfg.Endpoint, zmtp.Subscriber)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.Subscribe(); err != nil {
		return err
	}
	// Batches may have come and gone without this connection.
	if err := f.catchUp(ctx); err != nil {
		return err
	}
	f.setLive(true)
	if f.down {
		f.down = false
		f.cfg.Log.Info("KV events of an engine", "url", f.cfg.Engine, "endpoint", f.cfg.Endpoint)
	}
	seen := int64(-1)
	for {
		frames, err := conn.Recv()
		if err != nil {
			return err
		}
		if len(frames) != 3 {
			return errMessage
		}
		n, err := number(frames[1])
		if err != nil || n < 0 {
			return errMessage
		}
		if n <= seen { // another engine behind one address: it, too, gets a session of its own
			f.void(Restart)
			return fmt.Errorf("batch %d came after batch %d", n, seen)
		}
		seen = n
		if err := f.taken(ctx, n, frames[2]); err != nil {
			return err
		}
	}
}

// taken takes a batch of the subscription.
func (f *Feed) taken(ctx context.Context, n int64, payload []byte) error {
	if f.next >= 0 && n > f.next {
		f.gaps.Add(1)
		f.setLive(false)
		if err := f.catchUp(ctx); err != nil {
			return err
		}
		f.setLive(true)
		if f.next >= 0 && n > f.next {
			f.void(Gap)
		}
	}
	sum := f.sum(payload)
	if f.next >= 0 && n < f.next { // a replay had it
		if have, ok := f.sumOf(n); ok && have == sum {
			return nil
		}
		f.void(Replay, "batch", n, "remedy", "name the replay_endpoint of this engine")
	}
	f.take(ctx, n, payload, sum)
	return nil
}

func (f *Feed) sum(payload []byte) uint64 { return maphash.Bytes(f.seed, payload) }

// sumOf is the hash of a batch that was taken; false: it is unknown.
func (f *Feed) sumOf(n int64) (uint64, bool) {
	if n >= f.next || n < max(f.from, f.next-keptSums) {
		return 0, false
	}
	return f.sums[n%keptSums], true
}

// take gives a batch to the sink.
func (f *Feed) take(ctx context.Context, n int64, payload []byte, sum uint64) {
	b, err := kvevents.Decode(payload)
	if err != nil {
		if !f.spoiled { // otherwise nothing has arrived since
			f.spoiled = true
			f.void(Garbage, "err", err)
		}
	} else {
		f.spoiled = false
		f.batches.Add(1)
		f.events.Add(uint64(len(b.Events)))
		f.unknown.Add(uint64(b.Unknown))
		f.cfg.Sink.Apply(ctx, b)
	}
	if n != f.next || n == 0 {
		f.from = n
	}
	if f.sums == nil {
		f.sums = make([]uint64, keptSums)
	}
	f.next, f.sums[n%keptSums] = n+1, sum
}

// void drops what the sink has. Any batch may be the next one. args are for the log.
func (f *Feed) void(reason string, args ...any) {
	had := f.next > 0
	f.next = -1
	f.cfg.Sink.Void()
	if !had && reason != Garbage {
		return
	}
	switch reason {
	case Restart:
		f.restarts.Add(1)
	case Gap:
		f.holes.Add(1)
	case Replay:
		f.foreign.Add(1)
	default:
		f.garbage.Add(1)
	}
	if !f.mayLog(reason) {
		return
	}
	f.cfg.Log.Warn("the cached blocks of an engine are forgotten",
		append([]any{"url", f.cfg.Engine, "reason", reason}, args...)...)
}

// catchUp asks for the batches that the feed missed. An error ends the session.
func (f *Feed) catchUp(ctx context.Context) error {
	if f.cfg.Replay == "" {
		if f.next > 0 {
			f.void(Gap)
		}
		f.next = -1
		return nil
	}
	left, late := replayBytes, time.Now().Add(replayTime)
	var err error
	for round, tries := 0, 0; round < replayRounds && tries < replayTries &&
		time.Now().Before(late); round++ {
		before := f.next
		var done bool
		if done, err = f.round(ctx, late, replayQuiet<<tries, &left); done {
			f.replays.Add(1)
			f.unasked = false
			return nil
		}
		if f.next != before {
			tries = 0
			continue
		}
		if tries++; !sleep(ctx, minPause<<tries) {
			break
		}
	}
	f.failed.Add(1)
	if !f.unasked && f.mayLog("unasked") {
		f.unasked = true
		f.cfg.Log.Warn("an engine does not replay its KV events", "url", f.cfg.Engine,
			"replay", f.cfg.Replay, "err", err, "remedy",
			"set replay_endpoint in vLLM's --kv-events-config, or leave the replay endpoint out")
	}
	f.void(Gap)
	return nil
}

var (
	errHole  = errors.New("batches are missing in the replay")
	errOther = errors.New("the engine restarted")
	errLarge = fmt.Errorf("the replay is longer than %d bytes", replayBytes)
)

// round asks once, from the last known batch on. done: the publisher has sent all that it has.
func (f *Feed) round(ctx context.Context, late time.Time, quiet time.Duration, left *int) (
	done bool, err error) {
	conn, err := zmtp.Dial(ctx, f.cfg.Replay, zmtp.Dealer)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	var from [numberBytes]byte
	binary.BigEndian.PutUint64(from[:], uint64(max(0, f.next-1)))
	if err := conn.Send(nil, from[:]); err != nil {
		return false, err
	}
	for first := true; ; first = false {
		wait := quiet
		if first {
			wait = replayFirst
		}
		conn.SetDeadline(earlier(time.Now().Add(wait), late))
		frames, err := conn.Recv()
		if err != nil {
			return false, err
		}
		n, payload, err := replayed(frames)
		if err != nil {
			return false, err
		}
		if n < 0 {
			return f.ended(first)
		}
		if *left -= len(payload); *left < 0 {
			return false, errLarge
		}
		switch known := f.next > 0; {
		case first && known && n == f.next-1:
			if have, ok := f.sumOf(n); !ok || f.sum(payload) != have {
				f.void(Restart)
				return false, errOther // ask again, from its start
			}
			continue
		case first && known && n > f.next-1:
			f.void(Gap) // what follows is the beginning
		case f.next >= 0 && n != f.next && !(first && !known):
			return false, errHole
		}
		if f.take(ctx, n, payload, f.sum(payload)); ctx.Err() != nil {
			return false, ctx.Err()
		}
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// ended takes the end of a replay. none: nothing arrived before it.
func (f *Feed) ended(none bool) (done bool, err error) {
	if none && f.next > 0 { // it must have the last known batch
		f.void(Restart)
		return false, errOther
	}
	f.next = max(0, f.next)
	return true, nil
}

// replayed reads a message of a replay: an empty frame, a topic in newer versions, the number and
// the batch.
func replayed(frames [][]byte) (int64, []byte, error) {
	if len(frames) > 0 && len(frames[0]) == 0 {
		frames = frames[1:]
	}
	if len(frames) == 3 {
		frames = frames[1:]
	}
	if len(frames) != 2 {
		return 0, nil, errMessage
	}
	n, err := number(frames[0])
	return n, frames[1], err
}
