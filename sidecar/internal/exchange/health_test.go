package exchange

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/directory"
	"github.com/kvspray/kvspray/store/page"
)

// A directory that fails costs misses, so it is reported. A single call that fails is no problem.
func TestDirectoryFails(t *testing.T) {
	h := &health{call: "lookup"}
	for range 100 {
		h.note(errors.New("late"))
		h.note(errors.New("late"))
		h.note(nil)
		h.note(fmt.Errorf("lookup: %w", context.Canceled))
	}
	if s := h.text(); s != "" {
		t.Errorf("problem %q after single failures", s)
	}
	for range downAfter {
		h.note(errors.New("NOAUTH"))
	}
	if s := h.text(); s != "lookup: NOAUTH" {
		t.Errorf("problem %q", s)
	}
	h.note(nil)
	if h.note(fmt.Errorf("READONLY %w", directory.ErrDown)); h.text() == "" {
		t.Error("a refusal is no problem")
	}
	if h.note(nil); h.text() != "" {
		t.Errorf("problem %q of a directory that works", h.text())
	}
}

// The exchange notes lookups and announcements apart: a read-only replica takes no announcement,
// and answers lookups.
func TestDirectoryIsReadOnly(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		c, n := newCable(t, 1)
		c.mu.Lock()
		c.fails = 1000
		c.mu.Unlock()
		n[0].put(1, 2)
		time.Sleep(2 * downAfter * walkRetry)
		n[0].Find(keysOf(3), page.NewBitmap(1))
		if s := n[0].Problem(); s != "announce: the directory is gone" {
			t.Errorf("problem %q", s)
		}
		c.mu.Lock()
		c.fails = 0
		c.mu.Unlock()
		time.Sleep(2 * walkRetry)
		if s := n[0].Problem(); s != "" {
			t.Errorf("problem %q of a directory that works", s)
		}
		c.mu.Lock()
		c.silent = true
		c.mu.Unlock()
		for range downAfter {
			n[0].Find(keysOf(3), page.NewBitmap(1))
		}
		if s := n[0].Problem(); s != "lookup: no answer" {
			t.Errorf("problem %q", s)
		}
		// The node announces its pages again at once: the directory may have forgotten all.
		c.mu.Lock()
		c.silent, c.taken = false, 0
		c.mu.Unlock()
		n[0].Find(keysOf(3), page.NewBitmap(1))
		time.Sleep(time.Second)
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.taken != 2 {
			t.Errorf("%d of 2 pages are announced to a directory that works again", c.taken)
		}
	})
}
