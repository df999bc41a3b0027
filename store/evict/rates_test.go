package evict

import (
	"bufio"
	"container/list"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/kvspray/kvspray/store/trace"
)

// cache is a policy with its pages: it takes one prompt and returns how many of its first pages it
// had.
type cache interface{ prompt(pages []uint64) int }

// lru is what S3-FIFO is measured against: least recently used, the last page of a prompt first.
type lru struct {
	room  int
	order *list.List
	at    map[uint64]*list.Element
}

func newLRU(room int) *lru { return &lru{room, list.New(), map[uint64]*list.Element{}} }

func (c *lru) prompt(pages []uint64) int {
	hits := 0
	for hits < len(pages) && c.at[pages[hits]] != nil {
		hits++
	}
	for i := len(pages) - 1; i >= 0; i-- {
		if e := c.at[pages[i]]; e != nil {
			c.order.MoveToFront(e)
			continue
		}
		c.at[pages[i]] = c.order.PushFront(pages[i])
	}
	for c.order.Len() > c.room {
		delete(c.at, c.order.Remove(c.order.Back()).(uint64))
	}
	return hits
}

// s3fifo is S3-FIFO as in its paper, without trees: a small queue of a tenth, two bits of
// frequency, a history of evicted pages.
type s3fifo struct {
	room        int
	small, main []uint64
	freq        map[uint64]int // of resident pages
	history     map[uint64]int // when they were given up
	given       int
}

func newS3FIFO(room int) *s3fifo {
	return &s3fifo{room: room, freq: map[uint64]int{}, history: map[uint64]int{}}
}

func (c *s3fifo) prompt(pages []uint64) int {
	hits, leading := 0, true
	for _, name := range pages {
		if f, ok := c.freq[name]; ok {
			c.freq[name] = min(3, f+1)
			if leading {
				hits++
			}
			continue
		}
		leading = false
		for len(c.freq) >= c.room {
			c.evict()
		}
		c.freq[name] = 0
		if at, ok := c.history[name]; ok && c.given-at <= c.room*9/10 {
			c.main = append(c.main, name)
		} else {
			c.small = append(c.small, name)
		}
		delete(c.history, name)
	}
	return hits
}

func (c *s3fifo) evict() {
	if len(c.small)*10 >= c.room || len(c.main) == 0 {
		name := c.small[0]
		c.small = c.small[1:]
		if c.freq[name] > 1 {
			c.freq[name] = 0
			c.main = append(c.main, name)
			return
		}
		delete(c.freq, name)
		c.given++
		c.history[name] = c.given
		return
	}
	name := c.main[0]
	c.main = c.main[1:]
	if c.freq[name] > 0 {
		c.freq[name]--
		c.main = append(c.main, name)
		return
	}
	delete(c.freq, name)
}

// ours is the policy with the pages that it rules.
type ours struct {
	*Policy
	at    map[uint64]uint32
	names []uint64
	free  []uint32
	now   uint32
}

func newOurs(room int) *ours {
	c := &ours{Policy: New(make([]Link, room+1), make([]uint32, HistoryEntries(room))),
		at: map[uint64]uint32{}, names: make([]uint64, room+1)}
	c.SetOwner(0, Owner{PageBytes: 1})
	for n := room; n > 0; n-- {
		c.free = append(c.free, uint32(n))
	}
	return c
}

func spread(name uint64) uint64 {
	name = (name + 1) * 0x9e3779b97f4a7c15
	return (name ^ name>>29) * 0xbf58476d1ce4e5b9
}

func (c *ours) prompt(pages []uint64) int {
	c.now++
	hits := 0
	for ; hits < len(pages) && c.at[pages[hits]] != 0; hits++ {
		c.Touch(c.at[pages[hits]], c.now)
	}
	parent := uint32(0)
	for _, name := range pages {
		n := c.at[name]
		if n == 0 {
			if parent != 0 {
				c.Pin(parent)
			}
			for len(c.free) == 0 {
				v := c.Victim(0, Any, c.now)
				if v == 0 {
					return hits
				}
				delete(c.at, c.names[v])
				c.Evict(v, spread(c.names[v]), func(n uint32) { c.free = append(c.free, n) })
			}
			if parent != 0 {
				c.Unpin(parent, c.now, nil)
			}
			n = c.free[len(c.free)-1]
			c.free = c.free[:len(c.free)-1]
			c.at[name], c.names[n] = n, name
			c.Insert(n, parent, spread(name), 0, c.now)
		}
		parent = n
	}
	return hits
}

// rate is the share of pages that were there when they were wanted, over the second half of a
// trace.
func rate(c cache, prompts [][]uint64) float64 {
	hits, all := 0, 0
	for i, p := range prompts {
		n := c.prompt(p)
		if i >= len(prompts)/2 {
			hits, all = hits+n, all+len(p)
		}
	}
	return 100 * float64(hits) / float64(all)
}

func conversations(requests int, seed uint64) (out [][]uint64) {
	g := trace.New(trace.Conversation(), seed)
	for range requests {
		out = append(out, g.Next().Pages)
	}
	return out
}

// published reads a trace in Mooncake's form: KVSPRAY_TRACE names the file.
func published(t *testing.T, name string) (out [][]uint64) {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		var r struct {
			Pages []uint64 `json:"hash_ids"`
		}
		if err := json.Unmarshal(s.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		out = append(out, r.Pages)
	}
	return out
}

// The policy keeps what LRU keeps, on the shape of conversations, or more.
//
// One generated trace does not show a difference of 0.2 points: over six of them, the difference in
// one row goes from -0.6 to 0.5 points, for instance 50,000 pages: -0.22, -0.19, -0.02, 0.02, 0.46,
// 0.22. Hence the mean of several.
func TestHitRates(t *testing.T) {
	const tolerance = 0.2 // points
	var traces [][][]uint64
	what := "generated"
	if name := os.Getenv("KVSPRAY_TRACE"); name != "" {
		traces, what = [][][]uint64{published(t, name)}, name
	} else {
		for seed := range uint64(4) {
			traces = append(traces, conversations(12_000, seed+1))
		}
	}
	mean := func(c func() cache) (sum float64) {
		for _, prompts := range traces {
			sum += rate(c(), prompts)
		}
		return sum / float64(len(traces))
	}
	table := fmt.Sprintf("%s, %d requests: hits in %% of all pages, second half; the mean of %d "+
		"traces, and S3-FIFO and unbounded of the first one\n%8s %8s %8s %8s %10s\n", what,
		len(traces[0]), len(traces), "pages", "S3-FIFO", "LRU", "ours", "unbounded")
	unbounded := rate(newLRU(1<<30), traces[0])
	for _, room := range []int{2_000, 5_000, 10_000, 20_000, 50_000} {
		lru := mean(func() cache { return newLRU(room) })
		own := mean(func() cache { return newOurs(room) })
		table += fmt.Sprintf("%8d %8.2f %8.2f %8.2f %10.2f\n", room,
			rate(newS3FIFO(room), traces[0]), lru, own, unbounded)
		if own < lru-tolerance {
			t.Errorf("%d pages: the policy keeps %.2f%%, LRU %.2f%%", room, own, lru)
		}
	}
	t.Log("\n" + table)
}
