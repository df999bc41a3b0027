package placebench

import "github.com/kvspray/kvspray/placement/index"

// cache is a node's pages, the least recently used one first to go. It keeps the index up to date.
type cache struct {
	node    int
	limit   int
	of      map[uint64]int32
	entries []entry // entry 0 is the end of the list
	shared  *index.Table
}

type entry struct {
	page       uint64
	prev, next int32
}

func newCache(node, limit int, shared *index.Table) *cache {
	return &cache{node, limit, map[uint64]int32{}, make([]entry, 1), shared}
}

func (c *cache) unlink(i int32) {
	e := c.entries[i]
	c.entries[e.prev].next, c.entries[e.next].prev = e.next, e.prev
}

func (c *cache) push(i int32) {
	first := c.entries[0].next
	c.entries[i].prev, c.entries[i].next = 0, first
	c.entries[first].prev, c.entries[0].next = i, i
}

// use adds or refreshes pages, the last one first, so that a prompt's end goes before its begin.
func (c *cache) use(pages []uint64) {
	for k := len(pages) - 1; k >= 0; k-- {
		p := pages[k]
		i, ok := c.of[p]
		switch {
		case ok:
			c.unlink(i)
		case len(c.of) < c.limit:
			i = int32(len(c.entries))
			c.entries = append(c.entries, entry{page: p})
		default:
			i = c.entries[0].prev
			c.unlink(i)
			delete(c.of, c.entries[i].page)
			c.shared.Remove(c.entries[i].page, c.node)
			c.entries[i].page = p
		}
		if !ok {
			c.of[p] = i
			c.shared.Add(p, c.node)
		}
		c.push(i)
	}
}

// drop loses everything.
func (c *cache) drop() {
	for p := range c.of {
		c.shared.Remove(p, c.node)
	}
	clear(c.of)
	c.entries = make([]entry, 1)
}

func (c *cache) has(page uint64) bool {
	_, ok := c.of[page]
	return ok
}
