// Package embedded is a directory that needs no service: the members of the cluster keep the hints
// of each other's pages, each those of the keys that rendezvous hashing gives to it.
//
// Nothing agrees on the members. Two that see others for a while ask different owners, and miss.
// Hints end by their time, and holders repeat them.
//
// Ownership: a table off the heap has the hints of this member. It never grows: hints push out
// older ones. One goroutine takes hints and one answers lookups of others, behind queues that drop
// what does not fit; Close joins them. Handle and Send do not block.
//
// Messages of members are foreign: their lengths are checked, an answer counts only for the
// question that was asked, from the member that was asked, and names holders only.
package embedded

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/store/directory"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds and times.
const (
	// DefaultTTL is how long a hint counts. Holders repeat theirs in a third of it.
	DefaultTTL = 15 * time.Minute
	tick       = 10 * time.Second

	keyBytes    = len(directory.Short{})
	hintKeys    = 2048 // of one message: a frame that needs no fragments
	maxQueue    = 256  // messages of others that wait
	maxLookups  = 1024 // lookups of this process under way
	maxPerReply = 255  // holders in one answer
)

// ErrNoAnswer is returned by a lookup that some owner did not answer in time.
var ErrNoAnswer = errors.New("directory: an owner of keys has not answered")

// Options make a Directory. All fields are required but TTL.
type Options struct {
	Self transfer.Boot
	// Members are those that keep hints, this one included. Called often.
	Members  func() []transfer.Boot
	Send     func(transfer.Boot, *peerv1.ControlFrame) error
	Capacity int // hints that this process keeps
	TTL      time.Duration
}

// Directory is this process's part of the directory.
type Directory struct {
	o     Options
	began time.Time
	queue chan message // hints
	asks  chan message // lookups
	stop  context.CancelFunc
	ctx   context.Context
	wg    sync.WaitGroup

	mu    sync.Mutex // guards what follows
	hints *hints

	waitMu  sync.Mutex // guards what follows
	lookups map[uint64]*lookup
	last    uint64
}

type message struct {
	from   transfer.Boot
	hints  *peerv1.PageHints
	lookup *peerv1.PageLookup
}

// lookup is a question to one owner.
type lookup struct {
	owner  transfer.Boot
	keys   int
	answer chan *peerv1.PageHolders
}

// New makes a directory. Close ends it.
func New(o Options) (*Directory, error) {
	if o.TTL == 0 {
		o.TTL = DefaultTTL
	}
	t, err := newHints(o.Capacity, uint16(min(o.TTL/tick, 1<<15)))
	if err != nil {
		return nil, fmt.Errorf("directory of %d hints: %w", o.Capacity, err)
	}
	d := &Directory{o: o, began: time.Now(), queue: make(chan message, maxQueue),
		asks: make(chan message, maxQueue), hints: t, lookups: map[uint64]*lookup{}}
	d.ctx, d.stop = context.WithCancel(context.Background())
	d.wg.Go(func() { d.serve(d.queue) })
	d.wg.Go(func() { d.serve(d.asks) })
	return d, nil
}

// Close implements directory.Directory.
func (d *Directory) Close() error {
	d.stop()
	d.wg.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hints.array.Free()
	d.hints = nil
	return nil
}

func (d *Directory) now() uint16 { return uint16(time.Since(d.began) / tick) }

// Stats are the hints that this process keeps, its holders, and the memory of the table.
type Stats struct{ Hints, Capacity, Holders, Bytes int }

// Stats returns them.
func (d *Directory) Stats() (s Stats) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if t := d.hints; t != nil {
		s = Stats{t.used, len(t.array.Elems()), len(t.current), t.array.Bytes()}
	}
	return s
}

// owner is a member with the part of a batch of keys that it keeps.
type owner struct {
	boot  transfer.Boot
	seed  uint64
	keys  []byte
	index []int32 // of the keys in the batch
}

// mix is the finalizer of SplitMix64. The words of keys are of hashes.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// divide gives each key to its owner: of all members the one with the highest score.
func (d *Directory) divide(keys []page.Key) []owner {
	boots := d.o.Members()
	all := make([]owner, len(boots))
	for i, b := range boots {
		s := directory.Short(b)
		all[i] = owner{boot: b, seed: mix(s.Word())}
	}
	if len(all) == 0 {
		return nil
	}
	for i := range keys {
		k := directory.ShortOf(&keys[i])
		w := k.Word()
		best, highest := 0, uint64(0)
		for j := range all {
			if s := mix(w ^ all[j].seed); s >= highest {
				best, highest = j, s
			}
		}
		o := &all[best]
		o.keys = append(o.keys, k[:]...)
		o.index = append(o.index, int32(i))
	}
	return slices.DeleteFunc(all, func(o owner) bool { return len(o.index) == 0 })
}

// Announce implements directory.Directory.
func (d *Directory) Announce(_ context.Context, held []page.Key) error {
	return d.report(held, func(keys []byte) *peerv1.PageHints {
		return &peerv1.PageHints{Held: keys}
	})
}

// Withdraw implements directory.Directory.
func (d *Directory) Withdraw(_ context.Context, gone []page.Key) error {
	return d.report(gone, func(keys []byte) *peerv1.PageHints {
		return &peerv1.PageHints{Gone: keys}
	})
}

func (d *Directory) report(keys []page.Key, frame func([]byte) *peerv1.PageHints) error {
	var errs error
	for _, o := range d.divide(keys) {
		for len(o.keys) > 0 {
			n := min(len(o.keys), hintKeys*keyBytes)
			m := frame(o.keys[:n])
			o.keys = o.keys[n:]
			if o.boot == d.o.Self {
				d.takeHints(d.o.Self, m)
				continue
			}
			err := d.o.Send(o.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_PageHints{PageHints: m}})
			if err != nil {
				errs = err // of the last one; hints are repeated
				break
			}
		}
	}
	return errs
}

// Lookup implements directory.Directory.
func (d *Directory) Lookup(ctx context.Context, keys []page.Key, found *directory.Found) error {
	if len(keys) > directory.MaxBatch {
		return fmt.Errorf("directory: %d keys: at most %d", len(keys), directory.MaxBatch)
	}
	owners := d.divide(keys)
	waiting := make([]*lookup, len(owners))
	ids := make([]uint64, len(owners))
	var errs error
	for i := range owners {
		o := &owners[i]
		if o.boot == d.o.Self {
			continue
		}
		if ids[i], waiting[i] = d.open(o.boot, len(o.index)); waiting[i] == nil {
			errs = ErrNoAnswer
			continue
		}
		defer d.forget(ids[i])
		if err := d.o.Send(o.boot, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_PageLookup{
			PageLookup: &peerv1.PageLookup{Id: ids[i], Keys: o.keys}}}); err != nil {
			errs, waiting[i] = err, nil
		}
	}
	for i := range owners { // while the others answer
		if o := &owners[i]; o.boot == d.o.Self {
			d.add(found, o, d.find(o.keys))
		}
	}
	for i, w := range waiting {
		if w == nil {
			continue
		}
		select {
		case m := <-w.answer:
			d.add(found, &owners[i], m)
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ErrNoAnswer, ctx.Err())
		case <-d.ctx.Done():
			return fmt.Errorf("%w: closed", ErrNoAnswer)
		}
	}
	return errs
}

func (d *Directory) open(owner transfer.Boot, keys int) (uint64, *lookup) {
	d.waitMu.Lock()
	defer d.waitMu.Unlock()
	if len(d.lookups) >= maxLookups {
		return 0, nil
	}
	d.last++
	l := &lookup{owner: owner, keys: keys, answer: make(chan *peerv1.PageHolders, 1)}
	d.lookups[d.last] = l
	return d.last, l
}

func (d *Directory) forget(id uint64) {
	d.waitMu.Lock()
	defer d.waitMu.Unlock()
	delete(d.lookups, id)
}

// add takes an answer that was checked, or that this process made.
func (d *Directory) add(found *directory.Found, o *owner, m *peerv1.PageHolders) {
	for j, i := range o.index {
		for _, n := range m.At[j*directory.MaxHolders:][:directory.MaxHolders] {
			if n == 0 {
				break
			}
			found.Add(int(i), transfer.Boot(m.Holders[n-1]))
		}
	}
}

// Handle takes a message of a member. It returns an error for one that the protocol does not allow.
// Messages beyond the queues are dropped.
func (d *Directory) Handle(from transfer.Boot, f *peerv1.ControlFrame) error {
	switch b := f.Body.(type) {
	case *peerv1.ControlFrame_PageHints:
		h, g := len(b.PageHints.GetHeld()), len(b.PageHints.GetGone())
		if h%keyBytes != 0 || g%keyBytes != 0 || h+g > directory.MaxBatch*keyBytes {
			return fmt.Errorf("directory: hints of %d and %d bytes: want at most %d keys of %d bytes",
				h, g, directory.MaxBatch, keyBytes)
		}
		enqueue(d.queue, message{from: from, hints: b.PageHints})
	case *peerv1.ControlFrame_PageLookup:
		if n := len(b.PageLookup.GetKeys()); n%keyBytes != 0 || n > directory.MaxBatch*keyBytes {
			return fmt.Errorf("directory: lookup of %d bytes: want at most %d keys of %d bytes", n,
				directory.MaxBatch, keyBytes)
		}
		enqueue(d.asks, message{from: from, lookup: b.PageLookup})
	case *peerv1.ControlFrame_PageHolders:
		return d.answered(from, b.PageHolders)
	}
	return nil
}

func enqueue(q chan message, m message) {
	select {
	case q <- m:
	default:
	}
}

// answered gives an answer to the lookup that waits for it.
func (d *Directory) answered(from transfer.Boot, m *peerv1.PageHolders) error {
	d.waitMu.Lock()
	l := d.lookups[m.GetId()]
	if l != nil && l.owner == from {
		delete(d.lookups, m.GetId())
	}
	d.waitMu.Unlock()
	if l == nil || l.owner != from {
		return nil // late
	}
	if err := check(m, l.keys); err != nil {
		m = &peerv1.PageHolders{At: make([]byte, l.keys*directory.MaxHolders)} // it has nothing
		l.answer <- m
		return err
	}
	l.answer <- m
	return nil
}

// check bounds an answer about n keys.
func check(m *peerv1.PageHolders, keys int) error {
	if len(m.Holders) > maxPerReply {
		return fmt.Errorf("directory: answer with %d holders: at most %d", len(m.Holders), maxPerReply)
	}
	for _, h := range m.Holders {
		if len(h) != len(transfer.Boot{}) {
			return fmt.Errorf("directory: answer with a boot of %d bytes: want %d", len(h),
				len(transfer.Boot{}))
		}
	}
	if len(m.At) != keys*directory.MaxHolders {
		return fmt.Errorf("directory: answer with %d positions for %d keys: want %d", len(m.At), keys,
			keys*directory.MaxHolders)
	}
	for _, n := range m.At {
		if int(n) > len(m.Holders) {
			return fmt.Errorf("directory: answer with position %d of %d holders", n, len(m.Holders))
		}
	}
	return nil
}

// serve takes messages of others until Close.
func (d *Directory) serve(q chan message) {
	for {
		select {
		case <-d.ctx.Done():
			return
		case m := <-q:
			if m.hints != nil {
				d.takeHints(m.from, m.hints)
				continue
			}
			r := d.find(m.lookup.Keys)
			r.Id = m.lookup.Id
			// What cannot be sent is missed.
			_ = d.o.Send(m.from, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_PageHolders{
				PageHolders: r}})
		}
	}
}

// lockKeys is how many keys are looked up under one hold of the lock.
const lockKeys = 512

// takeHints takes hints of a process.
func (d *Directory) takeHints(from transfer.Boot, m *peerv1.PageHints) {
	now := d.now()
	take := func(keys []byte, f func(*directory.Short, uint16)) {
		for len(keys) > 0 {
			n := min(len(keys), lockKeys*keyBytes)
			d.mu.Lock()
			if d.hints == nil {
				d.mu.Unlock()
				return
			}
			if number := d.hints.holder(from, now); number != 0 {
				for i := 0; i < n; i += keyBytes {
					f((*directory.Short)(keys[i:]), number)
				}
			}
			d.mu.Unlock()
			keys = keys[n:]
		}
	}
	take(m.Gone, func(k *directory.Short, n uint16) { d.hints.drop(k, n) })
	take(m.Held, func(k *directory.Short, n uint16) { d.hints.put(k, n, now) })
}

// find answers a lookup.
func (d *Directory) find(keys []byte) *peerv1.PageHolders {
	now := d.now()
	out := &peerv1.PageHolders{At: make([]byte, len(keys)/keyBytes*directory.MaxHolders)}
	position := map[uint16]byte{}
	for from := 0; from < len(keys); from += lockKeys * keyBytes {
		part := keys[from:min(len(keys), from+lockKeys*keyBytes)]
		d.mu.Lock()
		if d.hints == nil {
			d.mu.Unlock()
			break
		}
		for i := 0; i < len(part); i += keyBytes {
			at := out.At[(from+i)/keyBytes*directory.MaxHolders:][:0:directory.MaxHolders]
			d.hints.find((*directory.Short)(part[i:]), now, func(n uint16) {
				p := position[n]
				if p == 0 {
					if len(out.Holders) == maxPerReply {
						return
					}
					boot := d.hints.holders[n-1].boot
					out.Holders = append(out.Holders, boot[:])
					p = byte(len(out.Holders))
					position[n] = p
				}
				if len(at) < cap(at) {
					at = append(at, p)
				}
			})
		}
		d.mu.Unlock()
	}
	return out
}
