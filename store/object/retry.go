package object

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"
)

// maxTries bounds how often one request is sent, within its timeout.
const maxTries = 8

// silentAfter is how many requests fail, one after the other, until the object store counts as
// away: one that is late, as for a moment of load, is no problem.
const silentAfter = 3

// Pauses between two tries, and after the object store did not answer.
const (
	firstPause = 50 * time.Millisecond
	maxPause   = 5 * time.Second
	firstAway  = time.Second
	maxAway    = 30 * time.Second
)

// final are errors that another try does not mend.
func final(err error) bool {
	return mistake(err) || lost(err) || errors.Is(err, ErrChanged)
}

// lost reports whether an object is gone, or cut.
func lost(err error) bool { return errors.Is(err, ErrNotFound) || errors.Is(err, ErrShort) }

// try sends a request until it succeeds, its error is final, or its time is over. what is for
// errors; its first word names the right that the request needs.
func try[T any](ctx context.Context, t *Tier, limit time.Duration, what string,
	request func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	pause := backoff.NewExponentialBackOff()
	pause.InitialInterval, pause.MaxInterval = firstPause, maxPause
	var last error
	out, err := backoff.Retry(ctx, func() (T, error) {
		out, err := request(ctx)
		if final(err) {
			return out, backoff.Permanent(err)
		}
		if err != nil {
			last = err
		}
		return out, err
	}, backoff.WithBackOff(pause), backoff.WithMaxTries(maxTries),
		backoff.WithNotify(func(error, time.Duration) { t.count(&t.stats.Retries) }))
	if err != nil && !final(err) {
		t.count(&t.stats.Failed)
		err = errors.Join(err, last)
	}
	t.note(what, err)
	if err == nil {
		return out, nil
	}
	return out, fmt.Errorf("store.object: %s: %w", what, err)
}

// note keeps a refusal for Stats, until a request that needs the same right succeeds; and that the
// object store does not answer, until it does.
func (t *Tier) note(what string, err error) {
	kind, _, _ := strings.Cut(what, " ")
	t.mu.Lock()
	defer t.mu.Unlock()
	if mistake(err) {
		t.refused[kind] = fmt.Errorf("store.object: %s: %w", what, err)
	} else if err == nil {
		delete(t.refused, kind)
	}
	switch {
	case err == nil || final(err):
		t.silent, t.silence = 0, nil
	case !errors.Is(err, context.Canceled): // by the caller
		if t.silent++; t.silent >= silentAfter {
			t.silence = fmt.Errorf("store.object: %s: %w", what, err)
		}
	}
}

func (t *Tier) count(n *uint64) {
	t.mu.Lock()
	*n++
	t.mu.Unlock()
}

// isAwayLocked reports whether the object store did not answer a moment ago.
func (t *Tier) isAwayLocked() bool { return time.Now().Before(t.away) }

// answeredLocked notes whether the object store answered a read.
func (t *Tier) answeredLocked(ok bool) {
	if ok {
		t.away, t.pause = time.Time{}, 0
		return
	}
	if t.isAwayLocked() { // others were under way
		return
	}
	t.pause = min(max(2*t.pause, firstAway), maxAway)
	t.away = time.Now().Add(t.pause)
}

// readRange fills b with an object's bytes from off on.
func (t *Tier) readRange(ctx context.Context, name string, off int64, b []byte) error {
	_, err := try(ctx, t, t.c.Timeouts.Small, "read "+name, func(ctx context.Context) (int, error) {
		body, err := t.c.Bucket.Get(ctx, name, off, int64(len(b)))
		if err != nil {
			return 0, err
		}
		n, err := io.ReadFull(body, b)
		_ = body.Close() // all its bytes are here, or there is an error
		return n, err
	})
	return err
}
