package exchange

import (
	"slices"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/transfer"
)

// A holder that lacks a removal offers nothing, and learns the removal from the request.
func TestHolderFromBeforeARemoval(t *testing.T) {
	c, n := newCable(t, 3)
	n[0].put(1, 2)
	c.hint(n[0].boot, 1, 2)
	n[1].remove(5)
	want(t, n[1].get(1, 2), store.Miss, store.Miss)
	if !slices.Contains(n[0].learned, 5) {
		t.Errorf("learned %v", n[0].learned)
	}
	// It has the removal now, and has not applied it: no node gets its pages.
	want(t, n[1].get(1), store.Miss)
	want(t, n[2].get(1), store.Miss)
	n[0].remove(5)
	want(t, n[1].get(1), store.Miss)
	// Pages stored afterwards are valid.
	n[0].put(1)
	want(t, n[1].get(1, 2), store.Hit, store.Miss)
	// A node that lacks the removal may get later pages.
	want(t, n[2].get(1), store.Hit)
}

// An offer of pages from before a removal is not taken, whatever the holder was asked.
func TestOfferFromBeforeARemoval(t *testing.T) {
	c, n := newCable(t, 2)
	n[0].put(1)
	c.hint(n[0].boot, 1)
	asked := 0
	c.drop = func(_, _ transfer.Boot, f *peerv1.ControlFrame) bool {
		if m := f.GetPageRequest(); m != nil {
			asked++
			m.Removal = 0
		}
		if m := f.GetPageOffer(); m != nil {
			m.Removal = 0
		}
		return false
	}
	n[1].remove(5)
	want(t, n[1].get(1), store.Miss)
	if asked == 0 {
		t.Error("not asked")
	}
}

// A removal while a page is on its way: the page is not found afterwards.
func TestRemovalDuringATransfer(t *testing.T) {
	c, n := newCable(t, 2)
	n[0].put(1)
	c.hint(n[0].boot, 1)
	once := make(chan struct{}, 1)
	once <- struct{}{}
	c.drop = func(_, _ transfer.Boot, f *peerv1.ControlFrame) bool {
		if f.GetPageOffer() != nil {
			select {
			case <-once:
				n[1].remove(5) // applied before the bytes move
			default:
			}
		}
		return false
	}
	n[1].get(1) // it began before the removal
	found, err := n[1].space.Exists(keysOf(1))
	if err != nil || found.Get(0) {
		t.Errorf("the page has come back: %v", err)
	}
	want(t, n[1].get(1), store.Miss)
}

// A node that lacks its peers' removals takes no pages of others, and offers none.
func TestNothingBeforeRemovalsAreSettled(t *testing.T) {
	c, n := newCable(t, 2)
	n[0].put(1)
	c.hint(n[0].boot, 1)
	n[1].unsettled.Store(true)
	want(t, n[1].get(1), store.Miss)
	n[1].unsettled.Store(false)
	n[0].unsettled.Store(true)
	want(t, n[1].get(1), store.Miss)
	n[0].unsettled.Store(false)
	want(t, n[1].get(1), store.Hit)
}
