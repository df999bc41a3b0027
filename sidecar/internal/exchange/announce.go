// SPDX-License-Identifier: Apache-2.0

package exchange

import (
	"context"
	"sync"
	"time"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/transfer"
)

const firstEpoch = 1

// Times and sizes of announcements.
const (
	announceDelay = 10 * time.Millisecond // for changes to come together
	announceKeys  = 4096                  // at a time
	announceTime  = time.Second           // for one call of the directory
	walkPace      = 10 * time.Millisecond // between parts of a walk over all pages
	walkPlaces    = 16384                 // of one part
	// All pages are announced again, before hints end by their time.
	announceAgain = 5 * time.Minute
	membersSettle = 200 * time.Millisecond // members come and go together
	// A part of a walk that the directory did not take is sent again; then the walk is given up. A
	// walk also repeats changes that the directory did not take, unless the last one was given up.
	walkRetry   = time.Second
	walkRetries = 30
)

// Run serves peers and announces pages until ctx ends.
func (x *Exchange) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for range servers {
		wg.Go(func() { x.serveRequests(ctx) })
	}
	x.announce(ctx)
	wg.Wait()
}

// announce tells the directory what the store holds: changes as they come, and all pages at the
// start, from time to time, and when the members have changed.
func (x *Exchange) announce(ctx context.Context) {
	again := time.NewTicker(announceAgain)
	defer again.Stop()
	var delay, pace, settle <-chan time.Time
	changed := x.o.Changed()
	cursor, walking, twice, failed, gaveUp := uint64(0), false, false, 0, false
	walk := func() {
		x.announceEpoch()
		if walking {
			twice = true // pages that the walk has passed are announced, too
			return
		}
		cursor, walking, failed, pace = 0, true, 0, time.After(0)
	}
	walk()
	for {
		select {
		case <-ctx.Done():
			return
		case <-x.store.Changed():
			if delay == nil {
				delay = time.After(announceDelay)
			}
		case <-delay:
			delay = nil
			more, err := x.changes(ctx)
			if more {
				delay = time.After(announceDelay)
			}
			if err != nil && settle == nil && !gaveUp {
				settle = time.After(walkRetry)
			}
		case <-changed:
			changed, settle, gaveUp = x.o.Changed(), time.After(membersSettle), false
		case <-settle:
			settle = nil
			walk()
		case <-x.renew:
			walk()
		case <-again.C:
			gaveUp = false
			walk()
		case <-pace:
			next, err := x.part(ctx, cursor)
			if err != nil {
				if failed++; failed <= walkRetries {
					pace = time.After(walkRetry)
					continue
				}
				next, twice, gaveUp = 0, false, true
			}
			if cursor, failed = next, 0; cursor != 0 {
				pace = time.After(walkPace)
				continue
			}
			walking, pace = false, nil
			if twice {
				twice = false
				walk()
			}
		}
	}
}

func (x *Exchange) now() uint64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.epoch
}

// announceEpoch sends hints without pages to all peers: those of earlier epochs are void, even if
// no page is left to announce.
func (x *Exchange) announceEpoch() {
	x.mu.Lock()
	epoch := x.epoch
	var to []transfer.Boot
	for b, p := range x.peers {
		if p.pages && epoch > firstEpoch {
			to = append(to, b)
		}
	}
	x.mu.Unlock()
	for _, b := range to {
		_ = x.taken(x.o.Send(b, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_PageHints{
			PageHints: &peerv1.PageHints{Epoch: epoch}}}))
	}
}

// begun takes the epoch of a peer's hints: earlier ones are void, whichever directory has them.
func (x *Exchange) begun(from transfer.Boot, epoch uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if p := x.peers[from]; p != nil {
		p.epoch = max(p.epoch, epoch)
	}
}

// changes announces some of what has changed, and reports whether more may be left, and whether the
// directory took it.
func (x *Exchange) changes(ctx context.Context) (more bool, err error) {
	ctx, stop := context.WithTimeout(ctx, announceTime)
	defer stop()
	epoch := x.now()
	held, gone := x.store.Changes(announceKeys)
	if len(held) > 0 {
		err = x.noted(x.o.Directory.Announce(ctx, epoch, held))
	}
	if len(gone) > 0 {
		// A hint that stays is only a stale one, and is not sent again.
		_ = x.noted(x.o.Directory.Withdraw(ctx, epoch, gone))
	}
	return len(held)+len(gone) == announceKeys, err
}

// part announces a part of all pages, and returns the cursor of the next one.
func (x *Exchange) part(ctx context.Context, cursor uint64) (next uint64, err error) {
	ctx, stop := context.WithTimeout(ctx, announceTime)
	defer stop()
	epoch := x.now()
	keys, next := x.store.Walk(cursor, walkPlaces)
	for len(keys) > 0 {
		n := min(len(keys), announceKeys)
		if err := x.noted(x.o.Directory.Announce(ctx, epoch, keys[:n])); err != nil {
			return 0, err
		}
		keys = keys[n:]
	}
	return next, nil
}

// noted notes the result of an announcement, and returns it.
func (x *Exchange) noted(err error) error {
	x.announces.note(err)
	return x.taken(err)
}

// taken notes whether the directory took hints, and returns err.
func (x *Exchange) taken(err error) error {
	x.o.Metrics.Announced(err == nil)
	if err != nil {
		x.o.Log.Debug("directory: announce", "err", err)
	}
	return err
}
