// Package client is a Go program's end of segments and batches: it registers memory with the
// sidecar of its host, gives ranges of it names, and reads and writes segments of other nodes.
// docs/segments.md has terms, units and errors.
//
// A Client owns its session and the memory of NewMemory, until Close. It does not reconnect.
//
// Invariant: a batch ends once nothing writes its memory any more: with the completion of the
// sidecar, which comes after the fence, or with the proof that the sidecar's process has ended.
//
// Goroutines: the reader of package session, and one that delivers completions, both joined by
// Close; one that stops the delivery at the end of the session.
package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/connector/internal/process"
	"github.com/kvspray/kvspray/connector/internal/session"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/version"
)

// Sizes of the shared memory of a client. The submission ring has room for 1,000 batches at least.
const (
	submissionBytes = 1 << 20
	completionBytes = 256 << 10
	// listBytes bounds the entries of all open batches.
	listBytes = 4 * msg.MaxBatchEntries * msg.EntryBytes
)

// listNumber is the region with the lists of entries.
const listNumber = 0

// Refusal is an error of the sidecar, with the field that it refuses and a remedy.
type Refusal = session.ServerError

// ErrClosed is the end of all calls after Close, or after the end of the session.
var ErrClosed = errors.New("client: the session has ended")

// Client is one session with the sidecar. Any goroutine may use it.
type Client struct {
	conn    *session.Conn
	rings   *session.Rings
	flags   *mem.Region
	lists   *mem.Region
	process *process.Peer // the sidecar
	welcome *msg.Welcome
	stop    context.CancelFunc // ends the goroutine
	ended   chan struct{}      // closed when it has ended

	growing sync.Mutex // the order of ADD_REGIONS; taken before mu

	mu     sync.Mutex // guards what follows, and submissions
	closed bool
	number uint32 // the last region
	memory map[*Memory]struct{}
	lease  uint64 // the last one
	open   map[uint64]*Batch
	used   []span // of lists, by open batches, in order
}

// span is bytes [from, to).
type span struct{ from, to uint64 }

// Dial opens a session with the sidecar at a socket. name and id are those of an engine: they name
// this process in logs, and id is unique on the host.
func Dial(ctx context.Context, socket, name, id string) (*Client, error) {
	c := &Client{memory: map[*Memory]struct{}{}, open: map[uint64]*Batch{},
		ended: make(chan struct{})}
	if err := c.dial(ctx, socket, msg.Engine{Name: name, ID: id}); err != nil {
		c.release()
		return nil, fmt.Errorf("client: socket %s: %w", socket, err)
	}
	var run context.Context
	run, c.stop = context.WithCancel(context.Background())
	go c.deliver(run)
	return c, nil
}

func (c *Client) dial(ctx context.Context, socket string, engine msg.Engine) (err error) {
	if c.conn, err = session.Dial(ctx, socket); err != nil {
		return err
	}
	if c.process, err = process.Of(c.conn.Unix()); err != nil {
		return err
	}
	var boot [16]byte
	_, _ = rand.Read(boot[:]) // it does not fail
	c.welcome, err = c.conn.Hello(ctx, msg.Hello{Min: msg.VersionMin, Max: msg.VersionMax,
		Role: msg.RoleWorker, Boot: boot, Release: version.String(), Engine: engine})
	if err != nil {
		return err
	}
	if !slices.Contains(c.welcome.Features, msg.FeatureSegments) {
		return fmt.Errorf("the sidecar of node %q, release %q, takes no segments; upgrade it",
			c.welcome.Node, c.welcome.Release)
	}
	if c.rings, err = session.NewRings(submissionBytes, completionBytes); err != nil {
		return err
	}
	if c.flags, _, err = session.NewFlags(boot, 1); err != nil {
		return err
	}
	if c.lists, err = mem.NewAnonymous("lists", listBytes); err != nil {
		return err
	}
	m, fds := c.rings.Register(c.flags)
	m.Regions = []msg.Region{regionMessage(c.lists, len(fds))}
	_, err = session.Ask[*msg.Registered](ctx, c.conn, func(id uint64) msg.Message {
		m.ID = id
		return m
	}, append(fds, c.lists.FD())...)
	return err
}

func regionMessage(r *mem.Region, fd int) msg.Region {
	return msg.Region{Region: r.ID(), Kind: msg.KindMemfd, Bytes: r.Size(), FD: uint32(fd)}
}

// Node is the name of this host's node, as grants name it.
func (c *Client) Node() string { return c.welcome.Node }

// Endpoint is the address of this host's sidecar, for batches of other nodes.
func (c *Client) Endpoint() string { return c.welcome.Endpoint }

// Close ends the session. The memory of NewMemory must not be used any more. Revoke segments
// before, because the sidecar keeps them, and the memory of open batches, until this process ends.
func (c *Client) Close() {
	c.mu.Lock()
	closed := c.closed
	c.closed = true
	c.mu.Unlock()
	if closed {
		<-c.ended
		return
	}
	_ = c.conn.Send(&msg.Bye{Reason: "closed"})
	c.conn.Close()
	c.stop()
	<-c.ended
	c.release()
}

// release frees what dial has made.
func (c *Client) release() {
	if c.conn != nil {
		c.conn.Close()
	}
	if c.process != nil {
		c.process.Close()
	}
	if c.rings != nil {
		c.rings.Close()
	}
	for _, r := range []*mem.Region{c.flags, c.lists} {
		if r != nil {
			r.Release()
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for m := range c.memory {
		m.region.Release()
	}
	clear(c.memory) // Free may follow: its answer has come before the end of the session
}

// deliver ends batches until the session has ended, and then those that are left.
func (c *Client) deliver(ctx context.Context) {
	defer close(c.ended)
	alive, end := context.WithCancel(ctx)
	defer end()
	go func() { // it ends with conn
		<-c.conn.Done()
		end()
	}()
	for {
		rec, err := c.rings.Wait(alive)
		if err != nil {
			break
		}
		c.completed(rec)
	}
	c.conn.Close()
	c.lost(ctx)
}

// completed ends a batch.
func (c *Client) completed(rec board.Record) {
	c.mu.Lock()
	b := c.open[rec.Lease]
	delete(c.open, rec.Lease)
	if b != nil {
		c.used = slices.DeleteFunc(c.used, func(s span) bool { return s == b.list })
	}
	c.mu.Unlock()
	if b == nil {
		return
	}
	m, err := msg.DecodeReceived(rec.Body)
	if err != nil {
		m = &msg.Received{Reason: err.Error()}
		rec.Status = board.Failed
	}
	b.end(Result{Status: Status(rec.Status), Bytes: m.Bytes, Reason: m.Reason, arrived: m.Entries,
		entries: b.entries})
}

// lost ends the open batches once the sidecar's process has ended. ctx ends with Close: then they
// do not end.
func (c *Client) lost(ctx context.Context) {
	stop := context.AfterFunc(ctx, c.process.Close)
	defer stop()
	if c.process.Wait() != nil {
		return
	}
	for { // what the sidecar has completed before
		rec, ok, err := c.rings.Poll()
		if !ok || err != nil {
			break
		}
		c.completed(rec)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for lease, b := range c.open {
		delete(c.open, lease)
		b.end(Result{Status: Lost, Reason: "the sidecar's process has ended", entries: b.entries})
	}
	c.used = nil
}

// Memory is host memory that this process shares with the sidecar.
type Memory struct {
	c      *Client
	number uint32
	region *mem.Region
}

// NewMemory allocates memory for segments and batches.
func (c *Client) NewMemory(ctx context.Context, nbytes uint64) (*Memory, error) {
	r, err := mem.NewAnonymous("client", nbytes)
	if err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	c.growing.Lock()
	defer c.growing.Unlock()
	c.mu.Lock()
	c.number++
	m := &Memory{c: c, number: c.number, region: r}
	c.mu.Unlock()
	if err := c.done(ctx, func(id uint64) msg.Message {
		return &msg.AddRegions{ID: id, First: m.number, Regions: []msg.Region{regionMessage(r, 0)}}
	}, r.FD()); err != nil {
		r.Release()
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		r.Release()
		return nil, ErrClosed
	}
	c.memory[m] = struct{}{}
	return m, nil
}

// Bytes is the memory.
func (m *Memory) Bytes() []byte {
	b, _ := m.region.Bytes()
	return b
}

// Free revokes the segments in the memory, waits until no batch uses it, and unmaps it. After an
// error the memory stays.
func (m *Memory) Free(ctx context.Context) error {
	if err := m.c.done(ctx, func(id uint64) msg.Message {
		return &msg.DropRegions{ID: id, Regions: []uint32{m.number}}
	}); err != nil {
		return err
	}
	m.freed()
	return nil
}

// freed unmaps memory that the sidecar has dropped.
func (m *Memory) freed() {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	if _, ok := m.c.memory[m]; ok { // else Close has released it
		delete(m.c.memory, m)
		m.region.Release()
	}
}

// done sends a request that DONE answers.
func (c *Client) done(ctx context.Context, request func(id uint64) msg.Message, fds ...int) error {
	_, err := ask[*msg.Done](ctx, c, request, fds...)
	return err
}

func ask[T msg.Message](ctx context.Context, c *Client, request func(id uint64) msg.Message,
	fds ...int) (T, error) {
	a, err := askValid[T](ctx, c, request, fds...)
	if err != nil {
		return a, fmt.Errorf("client: %w", err)
	}
	return a, nil
}

// askValid refuses a request that the sidecar could not read, and would not answer.
func askValid[T msg.Message](ctx context.Context, c *Client, request func(id uint64) msg.Message,
	fds ...int) (answer T, err error) {
	p, err := msg.EncodePacket(request(1))
	if err != nil {
		return answer, err
	}
	if _, err := msg.DecodePacket(p); err != nil {
		return answer, err
	}
	return session.Ask[T](ctx, c.conn, request, fds...)
}

// Everyone in a Grant names every node of the cluster.
const Everyone = "*"

// Grant lets a node use Bytes bytes of a segment from Offset on; 0: all of the rest.
type Grant struct {
	To            string // Everyone, or the name of a node
	Read, Write   bool
	Offset, Bytes uint64
	For           time.Duration // 0: until it is revoked
}

// Register gives bytes of the memory a name. Other nodes may then use them as the grants allow.
func (m *Memory) Register(ctx context.Context, name string, offset, nbytes uint64,
	grants ...Grant) error {
	return m.c.segment(ctx, msg.Segment{Name: name, Region: m.number, Offset: offset, Bytes: nbytes},
		grants)
}

// RegisterFile gives bytes of a file a name. path begins at segments.root of the sidecar; nbytes is
// 0 for all of the rest.
func (c *Client) RegisterFile(ctx context.Context, name, path string, offset, nbytes uint64,
	grants ...Grant) error {
	return c.segment(ctx, msg.Segment{Name: name, Path: path, Offset: offset, Bytes: nbytes}, grants)
}

func (c *Client) segment(ctx context.Context, s msg.Segment, grants []Grant) error {
	s.Grants = grantMessages(grants)
	return c.done(ctx, func(id uint64) msg.Message {
		s.ID = id
		return &s
	})
}

func grantMessages(grants []Grant) (out []msg.SegmentGrant) {
	for _, g := range grants {
		out = append(out, msg.SegmentGrant{To: g.To, Read: g.Read, Write: g.Write, Offset: g.Offset,
			Bytes: g.Bytes, EndMS: milliseconds(g.For)})
	}
	return out
}

// milliseconds rounds up, so that a time above 0 does not become "none".
func milliseconds(d time.Duration) uint64 {
	return uint64((max(d, 0) + time.Millisecond - 1) / time.Millisecond)
}

// Revoke ends a segment, or only its grants to the node `to`. When it returns without an error,
// every batch that used them is fenced.
func (c *Client) Revoke(ctx context.Context, name, to string) error {
	return c.done(ctx, func(id uint64) msg.Message { return &msg.Revoke{ID: id, Name: name, To: to} })
}

// Found is a segment as this node may use it.
type Found struct {
	Bytes       uint64
	Read, Write bool
	For         time.Duration // until the last grant ends; 0: one of them has no end
}

// Find asks a sidecar for a segment. peer is its endpoint, or the name of its node; empty: this
// node.
func (c *Client) Find(ctx context.Context, peer, name string) (Found, error) {
	m := &msg.Locate{Peer: peer, Name: name}
	if at, ok := ctx.Deadline(); ok {
		m.DeadlineMS = max(milliseconds(time.Until(at)), 1)
	}
	a, err := ask[*msg.Located](ctx, c, func(id uint64) msg.Message {
		m.ID = id
		return m
	})
	if err != nil {
		return Found{}, err
	}
	return Found{Bytes: a.Bytes, Read: a.Read, Write: a.Write,
		For: time.Duration(a.EndMS) * time.Millisecond}, nil
}

// Note is the notification of a batch, whose bytes are visible to this process.
type Note = msg.Note

// Notes returns notifications of batches that used this client's segments, each once. It returns
// none if none comes within the time.
func (c *Client) Notes(ctx context.Context, wait time.Duration) ([]Note, error) {
	a, err := ask[*msg.Noted](ctx, c, func(id uint64) msg.Message {
		return &msg.Notes{ID: id, WaitMS: milliseconds(wait)}
	})
	if err != nil {
		return nil, err
	}
	return a.Notes, nil
}
