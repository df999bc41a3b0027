package object

import (
	"context"
	"errors"

	"github.com/kvspray/kvspray/store/catalog"
)

func isHere(err error) bool {
	return errors.Is(err, catalog.ErrExists) || errors.Is(err, catalog.ErrBusy)
}

// upload sends builders that are sealed, until Close.
func (t *Tier) upload() {
	for {
		t.mu.Lock()
		for !t.closed && (len(t.queue) == 0 || t.state == opening) {
			t.wake.Wait()
		}
		if t.closed {
			t.mu.Unlock()
			return
		}
		b := t.queue[0]
		t.queue = t.queue[1:]
		err := t.unwantedLocked(b)
		t.mu.Unlock()
		sent := err == nil
		if sent {
			err = t.send(t.ctx, b)
		}
		t.mu.Lock()
		t.sentLocked(b, sent, err)
		t.mu.Unlock()
	}
}

// unwantedLocked is why a builder is not worth an upload, or may not be sent.
func (t *Tier) unwantedLocked(b *builder) error {
	switch {
	case t.state == stopped:
		return t.problem
	case b.x.live == 0 && b.moves == nil:
		return ErrMissing
	case t.ledger.eras[b.x.owner.id].era != b.x.era:
		return ErrRemoved
	}
	return nil
}

// send uploads the object of a builder that is sealed, once the ledger has its era. It sets what
// the object's header has.
func (t *Tier) send(ctx context.Context, b *builder) error {
	x := b.x
	if err := t.writeEras(ctx, b.since); err != nil {
		return err
	}
	size := x.owner.pageBytes
	whole, last := 0, 0
	for i := range b.entries {
		if b.entries[i].whole {
			whole++
			last = i + 1
		}
	}
	h := header{life: x.life, era: x.era, pageBytes: uint32(size),
		begin: uint32(headerBytes(whole)), entries: make([]entry, 0, whole)}
	h.bytes = uint64(int(h.begin) + last*size)
	for i, e := range b.entries {
		if e.whole {
			e.at = h.begin + uint32(i*size)
			h.entries = append(h.entries, e)
		}
	}
	begin := b.room - int(h.begin)
	data := b.mem.Elems()[begin : begin+int(h.bytes)]
	clear(data[:h.begin])
	t.mu.Lock()
	store := t.ledger.store
	x.begin, x.pages, x.bytes = h.begin, whole, h.bytes
	t.stored += x.bytes
	t.mu.Unlock()
	h.encode(data[:h.begin], store)
	_, err := try(ctx, t, t.c.Timeouts.Upload, "write "+x.name(t),
		func(ctx context.Context) (string, error) {
			return t.c.Bucket.Put(ctx, x.name(t), data, Condition{})
		})
	return err
}

// sentLocked ends a builder. sent: something may be in the bucket, whatever err is. Pages whose
// upload failed are given up.
func (t *Tier) sentLocked(b *builder, sent bool, err error) {
	x := b.x
	b.done = true
	x.stored, x.doomed = err == nil, err != nil && sent
	if err == nil {
		t.stats.Uploaded += uint64(x.pages)
		t.endKeepingLocked(b)
	} else {
		t.stats.Dropped += uint64(x.live)
		t.dropPagesLocked(b)
	}
	if x.readers == 0 {
		t.returnLocked(x)
	}
	t.touchLocked()
	t.wake.Broadcast()
}

// dropPagesLocked gives up the pages of a builder, but those that an older object has, too.
func (t *Tier) dropPagesLocked(b *builder) {
	defer t.endKeepingLocked(b)
	for i := range b.entries {
		n := t.pages.Find(&b.entries[i].key)
		if !t.pages.Readable(n, b.x.owner.number) ||
			t.pages.At(n).Loc != b.x.number<<placeBits|uint32(i) {
			continue
		}
		if t.fallBackLocked(b, uint32(i), n) {
			continue
		}
		t.pages.Hold(n)
		t.pages.Doom(n)
		t.pages.Drop(n)
	}
}
