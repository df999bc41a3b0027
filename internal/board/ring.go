package board

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
)

// Errors of a Producer.
var (
	ErrFull   = errors.New("board: ring is full")
	ErrTooBig = errors.New("board: record is longer than half the ring, or than KVS_RECORD_MAX_BYTES")
)

// ErrProtocol is wrapped by every error that means that the other side broke the ring. Nothing read
// from it later is valid.
var ErrProtocol = errors.New("board: protocol error")

// Rings is a view of a rings memory.
type Rings struct {
	session    [16]byte
	submission ring
	completion ring
}

type ring struct {
	head, tail *atomic.Uint64
	sleeping   *atomic.Uint32
	data       []byte // a power of two
}

// Record is one entry, copied by the consumer.
type Record struct {
	Type   uint16
	Status uint16
	Seq    uint64
	Lease  uint64
	Epoch  uint64
	Body   []byte // the consumer's buffer; valid until its next call
}

// RingsBytes is the size of a rings memory with the given data bytes in each direction.
func RingsBytes(submission, completion int) int {
	return SizeRingsHeader + 2*SizeRing + submission + completion
}

// InitRings writes a header into zeroed memory and returns the view. The shim's side.
func InitRings(mem []byte, session [16]byte, submission, completion int) (*Rings, error) {
	if want := RingsBytes(submission, completion); submission < 0 || completion < 0 ||
		len(mem) < want {
		return nil, fmt.Errorf("board: rings: %d bytes for rings of %d and %d, want %d", len(mem),
			submission, completion, want)
	}
	le := binary.LittleEndian
	le.PutUint32(mem[OffRingsHeaderMagic:], RingsMagic)
	le.PutUint16(mem[OffRingsHeaderMajor:], BoardMajor)
	le.PutUint16(mem[OffRingsHeaderMinor:], BoardMinor)
	copy(mem[OffRingsHeaderSession:], session[:])
	le.PutUint64(mem[OffRingsHeaderSubmission:], SizeRingsHeader)
	le.PutUint64(mem[OffRingsHeaderCompletion:], uint64(SizeRingsHeader+SizeRing+submission))
	le.PutUint32(mem[OffRingsHeaderSubmissionBytes:], uint32(submission))
	le.PutUint32(mem[OffRingsHeaderCompletionBytes:], uint32(completion))
	le.PutUint64(mem[OffRingsHeaderTotalBytes:], uint64(len(mem)))
	return ParseRings(mem)
}

// ParseRings copies the header once, validates the copy and returns the view.
func ParseRings(mem []byte) (*Rings, error) {
	if len(mem) < SizeRingsHeader {
		return nil, fmt.Errorf("board: rings: %d bytes, shorter than the header of %d", len(mem),
			SizeRingsHeader)
	}
	if err := aligned(mem); err != nil {
		return nil, err
	}
	var h [SizeRingsHeader]byte
	copy(h[:], mem)
	le := binary.LittleEndian
	if err := version("rings", RingsMagic, le.Uint32(h[OffRingsHeaderMagic:]),
		le.Uint16(h[OffRingsHeaderMajor:])); err != nil {
		return nil, err
	}
	total := le.Uint64(h[OffRingsHeaderTotalBytes:])
	if total > uint64(len(mem)) {
		return nil, fmt.Errorf("board: rings: total_bytes = %d, but the memory has %d", total, len(mem))
	}
	sub, comp := le.Uint64(h[OffRingsHeaderSubmission:]), le.Uint64(h[OffRingsHeaderCompletion:])
	subBytes, compBytes := le.Uint32(h[OffRingsHeaderSubmissionBytes:]),
		le.Uint32(h[OffRingsHeaderCompletionBytes:])
	for _, n := range []struct {
		name  string
		bytes uint32
	}{{"submission_bytes", subBytes}, {"completion_bytes", compBytes}} {
		if n.bytes < RingMinBytes || n.bytes > RingMaxBytes || n.bytes&(n.bytes-1) != 0 {
			return nil, fmt.Errorf("board: rings: %s = %d, want a power of two in %d..%d", n.name, n.bytes,
				RingMinBytes, RingMaxBytes)
		}
	}
	if err := disjoint("rings", total, 8, part{"header", 0, SizeRingsHeader},
		part{"submission", sub, SizeRing + uint64(subBytes)},
		part{"completion", comp, SizeRing + uint64(compBytes)}); err != nil {
		return nil, err
	}
	r := &Rings{submission: newRing(mem, sub, subBytes), completion: newRing(mem, comp, compBytes)}
	copy(r.session[:], h[OffRingsHeaderSession:])
	return r, nil
}

func newRing(mem []byte, off uint64, bytes uint32) ring {
	data := off + SizeRing
	return ring{head: word64(mem, off+OffRingHead), tail: word64(mem, off+OffRingTail),
		sleeping: word32(mem, off+OffRingSleeping),
		data:     mem[data : data+uint64(bytes) : data+uint64(bytes)]}
}

// Session is the random id of the connection that the rings belong to.
func (r *Rings) Session() [16]byte { return r.session }

// SubmissionProducer is the shim's end. Rings are new with every connection: both ends start at 0.
func (r *Rings) SubmissionProducer() *Producer { return &Producer{r: r.submission} }

// SubmissionConsumer is the sidecar's end.
func (r *Rings) SubmissionConsumer() *Consumer { return &Consumer{r: r.submission} }

// CompletionProducer is the sidecar's end.
func (r *Rings) CompletionProducer() *Producer { return &Producer{r: r.completion} }

// CompletionConsumer is the shim's end.
func (r *Rings) CompletionConsumer() *Consumer { return &Consumer{r: r.completion} }

// Producer writes records. Its own head and sequence number are authoritative; their copies in the
// ring are for the reader.
type Producer struct {
	r    ring
	head uint64
	seq  uint64 // of the last record
}

func padded(body int) uint64 { return (SizeRecord + uint64(body) + 7) &^ 7 }

// Push appends a record. wake: the consumer sleeps, and its eventfd must be written. ErrFull leaves
// the ring unchanged; an error that wraps ErrProtocol means that the consumer broke it.
func (p *Producer) Push(typ, status uint16, lease, epoch uint64, body []byte) (wake bool,
	err error) {
	size := uint64(len(p.r.data))
	length := padded(len(body))
	if length > RecordMaxBytes || length > size/2 {
		return false, fmt.Errorf("%w: body of %d bytes, ring of %d", ErrTooBig, len(body), size)
	}
	tail := p.r.tail.Load()
	used := p.head - tail
	if used > size || tail%8 != 0 {
		return false, fmt.Errorf("%w: tail = %d with head = %d in a ring of %d", ErrProtocol, tail,
			p.head, size)
	}
	pos := p.head & (size - 1)
	rest := size - pos
	need := length
	if rest < length {
		need += rest
	}
	if size-used < need {
		return false, ErrFull
	}
	le := binary.LittleEndian
	if rest < length {
		pad := p.r.data[pos : pos+8]
		le.PutUint32(pad[OffRecordLength:], uint32(rest))
		le.PutUint16(pad[OffRecordType:], RecPad)
		le.PutUint16(pad[OffRecordStatus:], 0)
		p.head += rest
		pos = 0
	}
	p.seq++
	rec := p.r.data[pos : pos+length]
	le.PutUint32(rec[OffRecordLength:], uint32(length))
	le.PutUint16(rec[OffRecordType:], typ)
	le.PutUint16(rec[OffRecordStatus:], status)
	le.PutUint64(rec[OffRecordSeq:], p.seq)
	le.PutUint64(rec[OffRecordLease:], lease)
	le.PutUint64(rec[OffRecordEpoch:], epoch)
	le.PutUint32(rec[OffRecordBodyBytes:], uint32(len(body)))
	le.PutUint32(rec[OffRecordBodyBytes+4:], 0)
	copy(rec[SizeRecord:], body)
	p.head += length
	p.r.head.Store(p.head)
	// Go's atomics are sequentially consistent: a consumer that has set sleeping either sees the
	// new head or is seen here.
	return p.r.sleeping.Load() != 0 && p.r.sleeping.CompareAndSwap(1, 0), nil
}

// Drained reports whether the consumer has taken everything.
func (p *Producer) Drained() bool { return p.r.tail.Load() == p.head }

// Consumer reads records. Its own tail and sequence number are authoritative.
type Consumer struct {
	r      ring
	tail   uint64
	seq    uint64 // of the last record
	buf    []byte
	broken error
}

// Next takes one record. ok is false if the ring is empty. An error wraps ErrProtocol and repeats
// for ever: the ring is out of step and its content invalid.
func (c *Consumer) Next() (rec Record, ok bool, err error) {
	if c.broken != nil {
		return Record{}, false, c.broken
	}
	size := uint64(len(c.r.data))
	for {
		head := c.r.head.Load()
		avail := head - c.tail
		if avail == 0 {
			return Record{}, false, nil
		}
		if avail > size || head%8 != 0 {
			return c.fail("head = %d with tail = %d in a ring of %d", head, c.tail, size)
		}
		pos := c.tail & (size - 1)
		rest := size - pos
		var h [SizeRecord]byte
		n := copy(h[:], c.r.data[pos:pos+min(rest, avail)])
		le := binary.LittleEndian
		length, typ := uint64(le.Uint32(h[OffRecordLength:])), le.Uint16(h[OffRecordType:])
		if typ == RecPad {
			// A pad never fills a whole ring: successive pads could keep this loop busy for ever.
			if pos == 0 || length != rest || length > avail {
				return c.fail("pad of %d bytes at %d, want the rest of %d (available: %d)", length, pos,
					rest, avail)
			}
			c.tail += length
			c.r.tail.Store(c.tail)
			continue
		}
		if n < SizeRecord || length < SizeRecord || length%8 != 0 || length > avail || length > rest ||
			length > size/2 || length > RecordMaxBytes {
			return c.fail("record of %d bytes at %d (available: %d, to the end: %d)", length, pos,
				avail, rest)
		}
		body := uint64(le.Uint32(h[OffRecordBodyBytes:]))
		if padded(int(body)) != length {
			return c.fail("record of %d bytes gives its body's length as %d", length, body)
		}
		if seq := le.Uint64(h[OffRecordSeq:]); seq != c.seq+1 {
			return c.fail("sequence number %d after %d", seq, c.seq)
		}
		if uint64(cap(c.buf)) < body {
			c.buf = make([]byte, body, max(4096, 2*body))
		}
		c.buf = c.buf[:body]
		copy(c.buf, c.r.data[pos+SizeRecord:])
		c.seq++
		c.tail += length
		c.r.tail.Store(c.tail)
		return Record{Type: typ, Status: le.Uint16(h[OffRecordStatus:]), Seq: c.seq,
			Lease: le.Uint64(h[OffRecordLease:]),
			Epoch: le.Uint64(h[OffRecordEpoch:]), Body: c.buf}, true, nil
	}
}

func (c *Consumer) fail(format string, args ...any) (Record, bool, error) {
	c.broken = fmt.Errorf("%w: "+format, append([]any{ErrProtocol}, args...)...)
	return Record{}, false, c.broken
}

// Sleep announces that the consumer is about to wait on its eventfd. False: a record came in
// between, or the ring is broken; call Next again.
func (c *Consumer) Sleep() bool {
	if c.broken != nil {
		return true
	}
	c.r.sleeping.Store(1)
	if c.r.head.Load() != c.tail {
		c.r.sleeping.Store(0)
		return false
	}
	return true
}

// Awake withdraws the announcement without a wake-up.
func (c *Consumer) Awake() { c.r.sleeping.Store(0) }
