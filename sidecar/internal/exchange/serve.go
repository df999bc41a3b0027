package exchange

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

// Handle takes a frame of a peer, and does not block. It returns an error for one that the protocol
// does not allow.
func (x *Exchange) Handle(from transfer.Boot, f *peerv1.ControlFrame) error {
	switch b := f.Body.(type) {
	case *peerv1.ControlFrame_PageRequest:
		if err := checkRequest(b.PageRequest); err != nil {
			return err
		}
		select {
		case x.requests <- request{from, b.PageRequest, time.Now()}:
		default: // the peer misses
		}
	case *peerv1.ControlFrame_PageOffer:
		return x.offered(from, b.PageOffer)
	}
	return nil
}

func checkRequest(m *peerv1.PageRequest) error {
	n := len(m.GetKeys())
	switch {
	case len(m.GetSpace()) != len(page.ID{}):
		return fmt.Errorf("page request: namespace of %d bytes: want %d", len(m.GetSpace()),
			len(page.ID{}))
	case n == 0 || n%page.KeyBytes != 0 || n > page.MaxBatch*page.KeyBytes:
		return fmt.Errorf("page request: keys of %d bytes: want 1 to %d of %d", n, page.MaxBatch,
			page.KeyBytes)
	case m.GetPageBytes() < 1 || m.GetPageBytes() > page.MaxBytes:
		return fmt.Errorf("page request: pages of %d bytes: want 1 to %d", m.GetPageBytes(),
			page.MaxBytes)
	}
	return nil
}

// offered gives an offer to the request that waits for it.
func (x *Exchange) offered(from transfer.Boot, m *peerv1.PageOffer) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	a := x.asks[m.GetId()]
	if a == nil || a.holder != from {
		return nil // late
	}
	delete(x.asks, m.GetId())
	if err := checkOffer(m, a.pages); err != nil {
		close(a.offer)
		return err
	}
	a.offer <- m
	return nil
}

// checkOffer checks an offer against the number of pages that were asked for.
func checkOffer(m *peerv1.PageOffer, pages int) error {
	if len(m.Found) != (pages+7)/8 {
		return fmt.Errorf("page offer: %d bytes for %d pages: want %d", len(m.Found), pages, (pages+7)/8)
	}
	if int(m.Looked) > pages {
		return fmt.Errorf("page offer: %d of %d pages were looked at", m.Looked, pages)
	}
	found := 0
	for i := range len(m.Found) * 8 {
		if m.Found[i/8]>>(i%8)&1 == 1 {
			if found++; i >= pages {
				return fmt.Errorf("page offer: has page %d of %d", i, pages)
			}
		}
	}
	switch {
	case len(m.Crc) != found:
		return fmt.Errorf("page offer: %d checksums for %d pages", len(m.Crc), found)
	case found > 0 && (len(m.Xfer) != len(transfer.XferID{}) ||
		len(m.Hash) != len(transfer.PrefixHash{})):
		return fmt.Errorf("page offer: a key of %d and %d bytes: want %d and %d", len(m.Xfer),
			len(m.Hash), len(transfer.XferID{}), len(transfer.PrefixHash{}))
	}
	return nil
}

// serveRequests serves requests of peers until the context ends.
func (x *Exchange) serveRequests(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case r := <-x.requests:
			x.serve(&r)
		}
	}
}

// serve pins the pages that are here, opens a source lease for them and offers it.
func (x *Exchange) serve(r *request) {
	m := r.m
	n := len(m.Keys) / page.KeyBytes
	space := page.ID(m.Space)
	left := time.Duration(m.DeadlineMs)*time.Millisecond - time.Since(r.at)
	if left <= 0 {
		return // the peer has given up
	}
	offer := &peerv1.PageOffer{Id: m.Id, Found: make([]byte, (n+7)/8)}
	// Before the pages are pinned: those of an earlier removal are gone then.
	offer.Removal = x.o.Removals.Applied(space)
	if offer.Removal < m.Removal || offer.Removal < x.o.Removals.Known(space) ||
		!x.o.Removals.Settled() {
		if m.Removal > 0 {
			x.o.Removals.Learn(r.from, space, m.Removal)
		}
		offer.Looked = uint32(n)
		x.answer(r.from, offer, 0)
		return
	}
	slot := (uint64(m.PageBytes) + unit - 1) / unit * unit
	// What the peer needs is taken from its share before pages are pinned.
	taken := x.take(r.from, uint64(n)*slot)
	n = int(taken / slot)
	x.give(r.from, taken-uint64(n)*slot) // of a part of a slot
	taken = uint64(n) * slot
	var id uint64
	if n > 0 {
		keys := make([]page.Key, n)
		for i := range keys {
			keys[i] = page.Key(m.Keys[i*page.KeyBytes:])
		}
		staged, err := x.store.Stage(space, int(m.PageBytes), keys)
		if err == nil && len(staged.Blocks) > 0 {
			id = x.offer(r.from, offer, staged, taken, min(left, fetchTime+askTime))
		} else {
			if err == nil {
				staged.Release()
			}
			x.give(r.from, taken)
		}
		if err == nil {
			n = staged.Looked
		}
	}
	offer.Looked = uint32(n)
	x.answer(r.from, offer, id)
}

// answer sends an offer with the lease, 0: none.
func (x *Exchange) answer(to transfer.Boot, offer *peerv1.PageOffer, id uint64) {
	x.mu.Lock()
	offer.Load = x.served
	x.mu.Unlock()
	err := x.o.Send(to, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_PageOffer{
		PageOffer: offer}})
	if err != nil && id != 0 {
		x.cancel(id, "the offer was not sent: "+err.Error())
	}
}

// take reserves bytes for an offer to a peer, at most want, and returns their number.
func (x *Exchange) take(to transfer.Boot, want uint64) uint64 {
	size := x.worker.Regions[0].Size()
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.peers[to]
	if p == nil || x.drains {
		return 0
	}
	room := func(limit, used uint64) uint64 { return limit - min(limit, used) }
	want = min(want, room(size/servedShare, x.served), room(size/peerShare, p.served))
	x.served += want
	p.served += want
	return want
}

func (x *Exchange) give(to transfer.Boot, bytes uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.served -= bytes
	if p := x.peers[to]; p != nil {
		p.served -= min(p.served, bytes) // it may have come back meanwhile
	}
}

// offer opens a source lease for staged pages, and completes the offer. 0: the node stops, and the
// pages are released.
func (x *Exchange) offer(to transfer.Boot, m *peerv1.PageOffer, staged *store.Staged, taken uint64,
	deadline time.Duration) (lease uint64) {
	var k transfer.Key
	_, _ = rand.Read(k.Xfer[:]) // it does not fail
	_, _ = rand.Read(k.Hash[:])
	table := table(staged.Blocks)
	tokens := uint32(len(table))
	if !x.open(func(c engines.Completion) {
		staged.Release()
		x.give(to, taken)
		if c.Status == engines.StatusOK {
			x.o.Metrics.Served(len(staged.Blocks), c.Bytes)
		}
	}, func(id transfer.LeaseID) {
		lease = id.ID
		x.event(engines.Event{Kind: engines.SourceOpened, Intent: &engines.Intent{Lease: id, Key: k,
			Tokens: tokens, Fanout: 1, Blocks: [][]uint32{table}, Held: true,
			Priority: engines.Background, Deadline: deadline, Req: "store"}})
		x.event(engines.Event{Kind: engines.LayersComplete,
			Progress: []engines.Progress{{Lease: id, Tokens: tokens, Final: true}}})
	}) {
		staged.Release()
		x.give(to, taken)
		return 0
	}
	for i := range min(len(m.Found), 8*len(staged.Found)) { // it may be of fewer pages
		m.Found[i] = byte(staged.Found[i/8] >> (i % 8 * 8))
	}
	m.Crc, m.Xfer, m.Hash = staged.CRCs, k.Xfer[:], k.Hash[:]
	return lease
}
