package catalog

import (
	"encoding/binary"
	"testing"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/store/evict"
	"github.com/kvspray/kvspray/store/index"
	"github.com/kvspray/kvspray/store/page"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// A removal looks at the owner's pages, not at all entries, unless pages have pins; and no call
// looks at more than a bounded number of entries.
func TestRemoveSome(t *testing.T) {
	const others = 5 * maxWalked
	c, err := New(others+100, func(uint16, uint32) {})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetOwner(0, evict.Owner{PageBytes: 1})
	c.SetOwner(1, evict.Owner{PageBytes: 1})
	key := func(owner uint16, i int) (k page.Key) {
		binary.LittleEndian.PutUint64(k[:], uint64(i)<<8|uint64(owner)+1)
		return k
	}
	// add adds a prompt's pages, and returns those of them that are pinned.
	add := func(owner uint16, from, to int, pinned func(int) bool) (pins []index.Node) {
		var after *page.Key
		for i := from; i < to; i++ {
			k := key(owner, i)
			n, err := c.Begin(owner, &k, after, func() (uint32, error) { return 0, nil })
			if err != nil {
				t.Fatal(err)
			}
			c.Finish(n, 0)
			if pinned != nil && pinned(i) {
				pins = append(pins, n)
			} else {
				c.Drop(n)
			}
			if i%7 > 0 {
				after = &k
			} else {
				after = nil
			}
		}
		return pins
	}
	add(0, 0, others, nil)
	add(1, 0, 50, nil)
	if !c.RemoveSome(1, &Removing{}) || c.Used(1) != 0 {
		t.Fatal("a removal without pins looks at all entries")
	}
	pins := add(1, 0, 50, func(i int) bool { return i == 5 || i == 30 })
	// Pages that others follow leave their queue when they are its oldest.
	for range 20 {
		c.Victim(1, evict.Any, c.Now())
	}
	calls, r := 1, Removing{}
	for ; !c.RemoveSome(1, &r); calls++ {
	}
	if calls < 2 || calls > 2+others/maxWalked {
		t.Errorf("%d calls", calls)
	}
	for i := range 50 {
		k := key(1, i)
		if c.Readable(c.Find(&k), 1) {
			t.Errorf("page %d can be read", i)
		}
	}
	for _, n := range pins {
		c.Drop(n)
	}
	if c.Used(1) != 0 || c.Pages() != others {
		t.Errorf("%d bytes, %d pages are left", c.Used(1), c.Pages())
	}
}
