package exchange

import (
	"context"
	"sync"
	"time"
)

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

// announce reports to the directory what the store holds: changes as they come, and all pages at
// the start, from time to time, and when the members have changed.
func (x *Exchange) announce(ctx context.Context) {
	again := time.NewTicker(announceAgain)
	defer again.Stop()
	var delay, pace, settle <-chan time.Time
	changed := x.o.Changed()
	cursor, walking, twice, failed, gaveUp := uint64(0), false, false, 0, false
	walk := func() {
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

// changes announces some of what has changed, and reports whether more may be left, and whether the
// directory took it.
func (x *Exchange) changes(ctx context.Context) (more bool, err error) {
	ctx, stop := context.WithTimeout(ctx, announceTime)
	defer stop()
	held, gone := x.store.Changes(announceKeys)
	if len(held) > 0 {
		err = x.noted(x.o.Directory.Announce(ctx, held))
	}
	if len(gone) > 0 {
		// A hint that stays is only a stale one, and is not sent again.
		_ = x.noted(x.o.Directory.Withdraw(ctx, gone))
	}
	return len(held)+len(gone) == announceKeys, err
}

// part announces a part of all pages, and returns the cursor of the next one.
func (x *Exchange) part(ctx context.Context, cursor uint64) (next uint64, err error) {
	ctx, stop := context.WithTimeout(ctx, announceTime)
	defer stop()
	keys, next := x.store.Walk(cursor, walkPlaces)
	for len(keys) > 0 {
		n := min(len(keys), announceKeys)
		if err := x.noted(x.o.Directory.Announce(ctx, keys[:n])); err != nil {
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
