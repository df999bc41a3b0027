package client

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
)

// Entry is a range of a batch: Bytes bytes at Local in the memory, and at Remote in the segment. A
// strided entry has several such pieces, LocalStride and RemoteStride bytes apart.
type Entry struct {
	Memory                    *Memory
	Local, Remote, Bytes      uint64
	LocalStride, RemoteStride uint64
	Pieces                    uint32 // 0: 1
}

// Priority is the class of a batch, as of a transfer.
type Priority uint32

const (
	DecodeWaits Priority = msg.PrioDecodeWaits
	Stream      Priority = msg.PrioStream
	Background  Priority = msg.PrioBackground
)

// Options of a batch.
type Options struct {
	Priority Priority
	Deadline time.Duration // then it ends as Expired, after its fence; 0: the sidecar's default
	Wait     bool          // for open batches that exclude this one; else it is refused
	Note     []byte        // for the owner of the segment, once the batch is complete
	Durable  bool          // of a write to a file: it ends once its data is on the disk
	Request  string        // for traces
}

// Status is how a batch has ended. docs/segments.md has the meanings.
type Status uint16

const (
	OK       Status = board.OK
	Failed   Status = board.Failed
	Canceled Status = board.Cancelled
	Expired  Status = board.Expired
	Refused  Status = board.Refused
	Lost     Status = board.Lost
)

// String implements fmt.Stringer.
func (s Status) String() string {
	names := map[Status]string{OK: "ok", Failed: "failed", Canceled: "canceled", Expired: "expired",
		Refused: "refused", Lost: "lost"}
	if name, ok := names[s]; ok {
		return name
	}
	return strconv.Itoa(int(s))
}

// Result is the end of a batch.
type Result struct {
	Status Status
	Bytes  uint64
	Reason string

	arrived []byte
	entries int
}

// Arrived reports whether all bytes of entry i are in place. If not, and the batch was not refused,
// any part of it may be.
func (r *Result) Arrived(i int) bool {
	if i < 0 || i >= r.entries {
		return false
	}
	return r.Status == OK || i/8 < len(r.arrived) && r.arrived[i/8]&(1<<(i%8)) != 0
}

// Batch is an open one. The memory of its entries is the sidecar's until Done is closed.
type Batch struct {
	c       *Client
	lease   uint64
	list    span
	entries int
	done    chan struct{}
	result  Result // once done is closed
}

// Read copies ranges of a segment into memory of this client. peer is as in Find.
func (c *Client) Read(peer, segment string, o Options, entries ...Entry) (*Batch, error) {
	return c.start(msg.Batch{Peer: peer, Segment: segment}, &o, entries)
}

// Write copies memory of this client into ranges of a segment.
func (c *Client) Write(peer, segment string, o Options, entries ...Entry) (*Batch, error) {
	return c.start(msg.Batch{Peer: peer, Segment: segment, Write: true}, &o, entries)
}

func (c *Client) start(m msg.Batch, o *Options, entries []Entry) (*Batch, error) {
	if n := len(entries); n == 0 || n > msg.MaxBatchEntries {
		return nil, fmt.Errorf("client: batch: %d entries: want 1 to %d; split it", n,
			msg.MaxBatchEntries)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	select {
	case <-c.conn.Done():
		return nil, ErrClosed
	default:
	}
	c.lease++
	b := &Batch{c: c, lease: c.lease, entries: len(entries), done: make(chan struct{})}
	var ok bool
	if b.list, ok = c.takeLocked(uint64(len(entries)) * msg.EntryBytes); !ok {
		return nil, fmt.Errorf("client: batch: the entries of open batches leave no room for %d more; "+
			"wait for one", len(entries))
	}
	lists, _ := c.lists.Bytes()
	var err error
	if m.Regions, err = c.write(lists[b.list.from:b.list.from], entries); err != nil {
		return nil, err
	}
	m.List, m.Offset, m.Entries = listNumber, b.list.from, uint32(len(entries))
	m.Priority, m.DeadlineMS = uint32(o.Priority), milliseconds(o.Deadline)
	m.Wait, m.Note, m.Durable, m.Req = o.Wait, o.Note, o.Durable, o.Request
	body := m.Append(nil)
	if _, err := msg.DecodeBatch(body); err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	if err := c.rings.Push(board.RecBatch, b.lease, 0, body); err != nil {
		return nil, fmt.Errorf("client: batch: %w", err)
	}
	c.open[b.lease] = b
	c.useLocked(b.list)
	return b, nil
}

// takeLocked finds room for a list.
func (c *Client) takeLocked(n uint64) (s span, ok bool) {
	for _, u := range c.used {
		if s.from+n <= u.from {
			break
		}
		s.from = u.to
	}
	s.to = s.from + n
	return s, s.to <= listBytes
}

// useLocked notes the list of an open batch.
func (c *Client) useLocked(s span) {
	i, _ := slices.BinarySearchFunc(c.used, s.from, func(u span, at uint64) int {
		return cmp.Compare(u.from, at)
	})
	c.used = slices.Insert(c.used, i, s)
}

// write puts entries into a list, and returns the numbers of their regions.
func (c *Client) write(list []byte, entries []Entry) (regions []uint32, err error) {
	for i := range entries {
		e := &entries[i]
		if e.Memory == nil || e.Memory.c != c {
			return nil, fmt.Errorf("client: batch: entries[%d].Memory is not of this client; use that of "+
				"its NewMemory", i)
		}
		at := slices.Index(regions, e.Memory.number)
		if at < 0 {
			at = len(regions)
			if regions = append(regions, e.Memory.number); len(regions) > msg.MaxBatchRegions {
				return nil, fmt.Errorf("client: batch: entries[%d].Memory is the %dth; want at most %d",
					i, len(regions), msg.MaxBatchRegions)
			}
		}
		for _, v := range []uint64{e.Local, e.Remote, e.Bytes, e.LocalStride, e.RemoteStride} {
			list = binary.LittleEndian.AppendUint64(list, v)
		}
		list = binary.LittleEndian.AppendUint32(list, max(e.Pieces, 1))
		list = binary.LittleEndian.AppendUint32(list, uint32(at))
	}
	return regions, nil
}

func (b *Batch) end(r Result) {
	b.result = r
	close(b.done)
}

// Done is closed once the batch has ended.
func (b *Batch) Done() <-chan struct{} { return b.done }

// Wait returns the end of the batch. If ctx ends before, the batch goes on, and its memory is still
// in use.
func (b *Batch) Wait(ctx context.Context) (Result, error) {
	select {
	case <-b.done:
		return b.result, nil
	default:
	}
	select {
	case <-b.done:
		return b.result, nil
	case <-ctx.Done():
		return Result{}, ctx.Err()
	case <-b.c.ended:
	}
	select {
	case <-b.done:
		return b.result, nil
	default:
		return Result{}, ErrClosed
	}
}

// Cancel ends the batch soon. Wait returns after its fence.
func (b *Batch) Cancel(reason string) error {
	b.c.mu.Lock()
	defer b.c.mu.Unlock()
	if b.c.closed || b.c.open[b.lease] == nil {
		return nil
	}
	return b.c.rings.Push(board.RecCancel, b.lease, 0, (&msg.Cancel{Reason: reason}).Append(nil))
}
