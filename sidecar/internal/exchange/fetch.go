package exchange

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/directory"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

// Find sets the bits of pages that other nodes probably have, for those whose bit is not set.
func (x *Exchange) Find(keys []page.Key, found page.Bitmap) {
	missing := make([]page.Key, 0, len(keys))
	at := make([]int, 0, len(keys))
	for i := range keys {
		if !found.Get(i) {
			missing, at = append(missing, keys[i]), append(at, i)
		}
	}
	if len(missing) == 0 || !x.o.Removals.Settled() {
		return
	}
	holders := x.lookup(context.Background(), missing, lookupTime)
	x.mu.Lock()
	defer x.mu.Unlock()
	usable := make(map[transfer.Boot]bool, len(holders.Holders))
	for _, h := range holders.Holders {
		usable[h] = x.usableLocked(h)
	}
	for j, i := range at {
		for h := range holders.Of(j) {
			if usable[h] {
				found.Set(i)
				break
			}
		}
	}
}

func (x *Exchange) lookup(ctx context.Context, keys []page.Key,
	limit time.Duration) *directory.Found {
	began := time.Now()
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	found := directory.NewFound(len(keys))
	err := x.o.Directory.Lookup(ctx, keys, found)
	if err != nil {
		x.o.Log.Debug("directory: lookup", "keys", len(keys), "err", err)
	}
	if x.lookups.note(err) {
		x.announceAll() // it may have lost all hints, as a service that was restarted
	}
	x.o.Metrics.Lookup(err == nil, time.Since(began))
	return found
}

// usableLocked reports whether hints of a process can be followed: it is up, and takes messages
// about pages.
func (x *Exchange) usableLocked(boot transfer.Boot) bool {
	p := x.peers[boot]
	return p != nil && p.pages
}

// job is the pages of one Fetch.
type job struct {
	x         *Exchange
	space     page.ID
	pageBytes int
	keys      []page.Key
	slots     []mem.Block
	landed    func(int, uint32) bool
	removal   uint64 // the latest of the namespace

	mu    sync.Mutex // guards what follows
	ended []bool     // landed, or lost
	lost  []int
	tried [][]transfer.Boot // holders, by page
	again bool              // a holder had no room, and can be asked again
}

// Fetch implements store.Peers. It asks the holders of each page until one has it, several holders
// at the same time.
func (x *Exchange) Fetch(ctx context.Context, space page.ID, pageBytes int, keys []page.Key,
	slots []mem.Block, landed func(int, uint32) bool) []int {
	j := &job{x: x, space: space, pageBytes: pageBytes, keys: keys, slots: slots, landed: landed,
		ended: make([]bool, len(keys)), tried: make([][]transfer.Boot, len(keys)),
		// A later one removes the slots, which are the store's already.
		removal: x.o.Removals.Known(space)}
	if !x.o.Removals.Settled() {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-x.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	found := x.lookup(ctx, keys, fetchLookupTime)
	came, last := 0, time.Now() // pages, and when the last ones came
	for round := 0; round < maxRounds && ctx.Err() == nil; {
		groups := j.choose(found)
		if len(groups) == 0 {
			break
		}
		var wg sync.WaitGroup
		for holder, pages := range groups {
			wg.Go(func() { j.from(ctx, holder, pages) })
		}
		wg.Wait()
		if n := j.came(); n > came {
			came, last = n, time.Now()
		}
		if !j.again || time.Since(last) > roomTime {
			round++
			continue
		}
		j.again = false
		select {
		case <-time.After(roomPause):
		case <-ctx.Done():
		}
	}
	return j.lost
}

// came counts the pages that have landed, or are lost.
func (j *job) came() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := 0
	for _, e := range j.ended {
		if e {
			n++
		}
	}
	return n
}

// later lets a holder be asked again for pages for which it had no room.
func (j *job) later(holder transfer.Boot, pages []int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, i := range pages {
		j.tried[i] = slices.DeleteFunc(j.tried[i], func(b transfer.Boot) bool { return b == holder })
		j.again = true
	}
}

// choose gives each page that has not come to the least loaded of its holders that was not tried,
// and counts it there.
func (j *job) choose(found *directory.Found) map[transfer.Boot][]int {
	groups := map[transfer.Boot][]int{}
	load := map[transfer.Boot]uint64{}
	j.x.mu.Lock()
	defer j.x.mu.Unlock()
	for _, h := range found.Holders {
		if p := j.x.peers[h]; p != nil {
			load[h] = p.asked + p.load
		}
	}
	for i := range j.keys {
		if j.ended[i] {
			continue
		}
		var best transfer.Boot
		some := false
		for h := range found.Of(i) {
			if !j.x.usableLocked(h) || slices.Contains(j.tried[i], h) {
				continue
			}
			if !some || load[h] < load[best] {
				best, some = h, true
			}
		}
		if some {
			j.tried[i] = append(j.tried[i], best)
			groups[best] = append(groups[best], i)
			load[best] += j.slots[i].Len
			j.x.peers[best].asked += j.slots[i].Len
		}
	}
	return groups
}

// from fetches pages from one holder.
func (j *job) from(ctx context.Context, holder transfer.Boot, pages []int) {
	x := j.x
	began := time.Now()
	var bytes uint64
	for _, i := range pages {
		bytes += j.slots[i].Len
	}
	x.mu.Lock()
	p := x.peers[holder]
	x.mu.Unlock()
	if p == nil {
		return
	}
	defer func() {
		x.mu.Lock()
		p.asked -= min(p.asked, bytes) // it may have come back meanwhile
		x.mu.Unlock()
	}()
	m, err := j.ask(ctx, holder, pages)
	if err != nil {
		x.o.Log.Debug("store: page request", "peer", holder.String(), "pages", len(pages), "err", err)
		x.o.Metrics.Fetched("no_answer", 0, 0, time.Since(began))
		return
	}
	if m.Removal < j.removal { // it has applied no such removal, and looked for nothing
		x.o.Metrics.Fetched("miss", 0, 0, time.Since(began))
		return
	}
	j.later(holder, pages[m.Looked:])
	var got []int
	for n, i := range pages {
		if m.Found[n/8]>>(n%8)&1 == 1 {
			got = append(got, i)
		}
	}
	if len(got) == 0 {
		x.o.Metrics.Fetched("miss", 0, 0, time.Since(began))
		return
	}
	c, ok := j.receive(ctx, p, m, got)
	switch {
	case !ok:
		j.mu.Lock()
		j.lost = append(j.lost, got...)
		for _, i := range got {
			j.ended[i] = true
		}
		j.mu.Unlock()
		x.o.Log.Error("store: a transfer has not ended; its memory stays unused", "peer", holder.String(),
			"pages", len(got))
		return
	case c.Status != engines.StatusOK:
		x.o.Log.Debug("store: transfer", "peer", holder.String(), "pages", len(got), "reason", c.Reason)
		x.o.Metrics.Fetched("failed", 0, 0, time.Since(began))
		return
	}
	good := 0
	for n, i := range got {
		if j.landed(i, m.Crc[n]) {
			good++
			j.mu.Lock()
			j.ended[i] = true
			j.mu.Unlock()
		}
	}
	if good < len(got) {
		x.damaged.Note(slog.LevelWarn, "store: pages of a peer differ from their checksums, and are "+
			"dropped", "peer", holder.String(), "pages", len(got)-good)
		x.o.Metrics.Damaged(len(got) - good)
	}
	x.o.Metrics.Fetched("hit", good, good*j.pageBytes, time.Since(began))
}

// ask sends a request, and waits for the offer.
func (j *job) ask(ctx context.Context, holder transfer.Boot, pages []int) (*peerv1.PageOffer,
	error) {
	x := j.x
	a := &ask{holder: holder, pages: len(pages), offer: make(chan *peerv1.PageOffer, 1)}
	x.mu.Lock()
	if x.over || len(x.asks) >= maxAsks {
		x.mu.Unlock()
		return nil, fmt.Errorf("%d requests are under way, or the node stops", maxAsks)
	}
	x.last++
	id := x.last
	x.asks[id] = a
	x.mu.Unlock()
	defer func() {
		x.mu.Lock()
		delete(x.asks, id)
		x.mu.Unlock()
	}()
	keys := make([]byte, 0, len(pages)*page.KeyBytes)
	for _, i := range pages {
		keys = append(keys, j.keys[i][:]...)
	}
	err := x.o.Send(holder, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_PageRequest{
		PageRequest: &peerv1.PageRequest{Id: id, Space: j.space[:], PageBytes: uint32(j.pageBytes),
			Keys: keys, DeadlineMs: uint32((askTime + fetchTime).Milliseconds()), Removal: j.removal}}})
	if err != nil {
		return nil, err
	}
	t := time.NewTimer(askTime)
	defer t.Stop()
	select {
	case m := <-a.offer:
		if m == nil {
			return nil, fmt.Errorf("the peer is gone")
		}
		return m, nil
	case <-t.C:
		return nil, fmt.Errorf("no answer within %v", askTime)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// receive opens a destination lease for pages that are offered, and waits for its end. It returns
// false if the lease has not ended: then its slots may still be written to.
func (j *job) receive(ctx context.Context, p *peer, m *peerv1.PageOffer, got []int) (
	engines.Completion, bool) {
	x := j.x
	blocks := make([]mem.Block, len(got))
	for n, i := range got {
		blocks[n] = j.slots[i]
	}
	table := table(blocks)
	end := make(chan engines.Completion, 1)
	x.mu.Lock()
	endpoint := p.endpoint
	p.load = m.Load
	x.mu.Unlock()
	var id transfer.LeaseID
	if !x.open(func(c engines.Completion) { end <- c }, func(l transfer.LeaseID) {
		id = l
		x.event(engines.Event{Kind: engines.DestOpened, Expect: &engines.Expect{Lease: id,
			Key:  transfer.Key{Xfer: transfer.XferID(m.Xfer), Hash: transfer.PrefixHash(m.Hash)},
			Peer: endpoint, Tokens: uint32(len(table)), Skip: []uint32{0}, Blocks: [][]uint32{table},
			Priority: engines.Background, Deadline: fetchTime, MatchTimeout: meetTime, Req: "store"}})
	}) {
		return engines.Completion{Status: engines.StatusCancelled, Reason: "the node stops"}, true
	}
	select {
	case c := <-end:
		return c, true
	case <-ctx.Done():
		x.cancel(id.ID, "not needed any more")
	case <-p.down:
		x.cancel(id.ID, "the holder is gone")
	}
	select {
	case c := <-end: // after its fence
		return c, true
	case <-x.stop:
	}
	t := time.NewTimer(fenceTime)
	defer t.Stop()
	select {
	case c := <-end:
		return c, true
	case <-t.C:
		return engines.Completion{}, false
	}
}

// table is the block table of slots.
func table(slots []mem.Block) (out []uint32) {
	for _, b := range slots {
		for off := b.Off; off < b.Off+b.Len; off += unit {
			out = append(out, uint32(off/unit))
		}
	}
	return out
}
