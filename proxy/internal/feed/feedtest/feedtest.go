// Package feedtest is a publisher of KV events for tests: a PUB and a ROUTER socket that behave as
// those of vLLM, and that lose, forget and forge on request.
//
// Goroutines: one for each listener and connection, which Close joins.
package feedtest

import (
	"context"
	"encoding/binary"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvspray/kvspray/proxy/internal/zmtp"
)

type batch struct {
	n       uint64
	payload []byte
}

// Publisher publishes batches.
type Publisher struct {
	tb          testing.TB
	ctx         context.Context
	cancel      context.CancelFunc
	pub, replay net.Listener
	wg          sync.WaitGroup

	mu    sync.Mutex // guards all below
	next  uint64
	kept  []batch
	subs  map[*zmtp.Conn]bool
	limit int // of batches that are kept; 0: all
	queue int // batches that one replay sends, without an end after them; 0: all
	mute  bool
	asked int
	other *Publisher // whose replay endpoint stands for this one's; nil: none
}

// New starts a publisher, which ends with the test.
func New(tb testing.TB) *Publisher {
	tb.Helper()
	p := &Publisher{tb: tb, subs: map[*zmtp.Conn]bool{}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	for _, l := range []*net.Listener{&p.pub, &p.replay} {
		var err error
		if *l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			tb.Fatal(err)
		}
	}
	p.wg.Go(func() { p.accept(p.pub, zmtp.Publisher, p.subscribed) })
	p.wg.Go(func() { p.accept(p.replay, zmtp.Router, p.answer) })
	tb.Cleanup(p.Close)
	return p
}

// Close ends it.
func (p *Publisher) Close() {
	p.cancel()
	_ = p.pub.Close()
	_ = p.replay.Close()
	p.wg.Wait()
}

// Endpoint is that of the PUB socket.
func (p *Publisher) Endpoint() string { return "tcp://" + p.pub.Addr().String() }

// Replay is that of the ROUTER socket.
func (p *Publisher) Replay() string {
	if p.other != nil {
		return p.other.Replay()
	}
	return "tcp://" + p.replay.Addr().String()
}

// ReplayOf makes Replay another publisher's, as a wrong setting does. It comes before all else.
func (p *Publisher) ReplayOf(other *Publisher) { p.other = other }

func (p *Publisher) accept(l net.Listener, kind zmtp.Kind, serve func(*zmtp.Conn)) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() {
			c, err := zmtp.Open(p.ctx, conn, kind)
			if err != nil {
				return
			}
			defer c.Close()
			serve(c)
		})
	}
}

func (p *Publisher) subscribed(c *zmtp.Conn) {
	if _, err := c.Recv(); err != nil {
		return
	}
	p.mu.Lock()
	p.subs[c] = true
	p.mu.Unlock()
	_, _ = c.Recv() // until it ends
	p.mu.Lock()
	delete(p.subs, c)
	p.mu.Unlock()
}

func numbered(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func (p *Publisher) answer(c *zmtp.Conn) {
	frames, err := c.Recv()
	if err != nil || len(frames) != 2 || len(frames[1]) != 8 {
		return
	}
	p.mu.Lock()
	p.asked++
	kept, queue, mute := append([]batch(nil), p.kept...), p.queue, p.mute
	p.mu.Unlock()
	if mute {
		return
	}
	sent := 0
	for _, b := range kept {
		if b.n < binary.BigEndian.Uint64(frames[1]) {
			continue
		}
		if queue > 0 && sent == queue {
			return
		}
		sent++
		if c.Send(nil, []byte("topic"), numbered(b.n), b.payload) != nil {
			return
		}
	}
	_ = c.Send(nil, nil, numbered(^uint64(0)), nil)
	_, _ = c.Recv() // until it ends
}

// Subscribed waits for a number of subscribers.
func (p *Publisher) Subscribed(n int) {
	p.tb.Helper()
	late := time.After(time.Minute)
	for {
		p.mu.Lock()
		have := len(p.subs)
		p.mu.Unlock()
		if have == n {
			return
		}
		select {
		case <-late:
			p.tb.Fatalf("%d subscribers, want %d", have, n)
		case <-time.After(time.Millisecond):
		}
	}
}

// Publish sends a batch of events to all subscribers.
func (p *Publisher) Publish(events ...any) { p.Raw(Payload(p.tb, events...), false) }

// Lose keeps a batch, but sends it to no subscriber.
func (p *Publisher) Lose(events ...any) { p.Raw(Payload(p.tb, events...), true) }

// Raw publishes bytes.
func (p *Publisher) Raw(payload []byte, lose bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.next
	p.next++
	p.kept = append(p.kept, batch{n, payload})
	if p.limit > 0 && len(p.kept) > p.limit {
		p.kept = p.kept[len(p.kept)-p.limit:]
	}
	if lose {
		return
	}
	for c := range p.subs {
		_ = c.Send([]byte("topic"), numbered(n), payload) // a subscriber that left is no error
	}
}

// Keep bounds the batches that are kept for replays.
func (p *Publisher) Keep(limit int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.limit = limit
	if limit > 0 && len(p.kept) > limit {
		p.kept = p.kept[len(p.kept)-limit:]
	}
}

// Queue bounds the batches that one replay sends. The rest and the end are lost.
func (p *Publisher) Queue(limit int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue = limit
}

// Mute makes replays end without an answer.
func (p *Publisher) Mute(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mute = on
}

// Asked counts replays.
func (p *Publisher) Asked() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked
}

// Disconnect ends all subscriptions.
func (p *Publisher) Disconnect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.subs {
		c.Close()
		delete(p.subs, c)
	}
}

// Restart is what a new process at the same endpoints does: it numbers batches from 0.
func (p *Publisher) Restart() {
	p.mu.Lock()
	p.next, p.kept = 0, nil
	p.mu.Unlock()
	p.Disconnect()
}

// Rewind numbers batches from 0, and keeps the connections.
func (p *Publisher) Rewind() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next, p.kept = 0, nil
}

// Payload encodes a batch.
func Payload(tb testing.TB, events ...any) []byte {
	tb.Helper()
	if events == nil {
		events = []any{}
	}
	b, err := msgpack.Marshal([]any{float64(time.Now().UnixNano()), events, 0})
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// Stored is an event about blocks that follow a parent, or nil.
func Stored(hashes []string, parent any, tokens []uint32, size int) map[string]any {
	return map[string]any{"type": "BlockStored", "block_hashes": raw(hashes),
		"parent_block_hash": parent, "token_ids": tokens, "block_size": size, "lora_id": nil,
		"medium": "GPU", "lora_name": nil}
}

// Removed is an event about blocks.
func Removed(hashes ...string) map[string]any {
	return map[string]any{"type": "BlockRemoved", "block_hashes": raw(hashes), "medium": "GPU"}
}

// Cleared is the event that all blocks are gone.
func Cleared() map[string]any { return map[string]any{"type": "AllBlocksCleared"} }

func raw(hashes []string) [][]byte {
	var out [][]byte
	for _, h := range hashes {
		out = append(out, []byte(h))
	}
	return out
}
