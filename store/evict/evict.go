// Package evict decides which page a tier gives up. It is pure: nodes are numbers, time is an
// argument, and the memory for its links is lent by the tier.
//
// The policy is LRU with two queues (2Q) of weighted age. A page that was stored and never asked
// for stands in the queue Once, any other in Again; both are in the order of the last use. The page
// that goes is the oldest of Once or the oldest of Again, where a page of Again counts as half as
// old: a conversation that went on once is more likely to go on. The policy remembers pages that it
// gave up for a while, in its history; they stand in Again when they come back.
//
// S3-FIFO (Yang et al., SOSP 2023) was measured first and is far worse than LRU here: a
// conversation comes back after two minutes, and by then the queue Once has given its pages up.
// rates_test.go holds it, and the figures.
//
// Two things are added. First, a page is useless without the pages before it in its prompt. So
// pages form trees, and a page goes after everything that follows it. A page that is the oldest of
// its queue, and has pages behind it, leaves the queue: it is overdue, and goes when the last of
// those has gone. A page of Again has no ancestor in Once. Second, each owner has queues of its
// own, with a quota that it cannot exceed and a reserve that other owners cannot take; among
// owners, the oldest page goes. A pin counts as a page that follows.
//
// Invariants: a resident page without kids is linked in its queue; the bytes of an owner are the
// sum of its resident pages; every call takes constant time on average, and Victim a scan of the
// owners (at most MaxOwners) besides. It does not lock and starts no goroutine.
package evict

import "fmt"

// MaxOwners bounds the owners: MaxSpaces namespaces of a store, and namespaces that the store has
// given up while the object tier uploads or deletes their last objects.
const MaxOwners = MaxSpaces + 128

// MaxSpaces bounds the namespaces of a store.
const MaxSpaces = 1024

// weight is how much older a page of Again must be to go before one of Once.
const weight = 2

// Queue is where a page stands.
type Queue uint8

// The places of a page.
const (
	Nowhere Queue = iota // the node is unused
	Once
	Again
	Hole // the page is gone, and pages that follow it are still here
)

// Link is the state of one page. The zero Link is unused.
type Link struct {
	next, prev uint32 // towards the younger and the older end
	parent     uint32 // the page before it in its prompt; 0: none that is known
	kids       uint32 // pages whose parent this is, and pins
	tick       uint32 // its last use
	owner      uint16
	queue      Queue
	linked     bool
}

// Owner is one namespace's share of a tier.
type Owner struct {
	PageBytes uint64
	Class     uint8  // pages of one class can take each other's place
	Max       uint64 // bytes; 0: no limit
	Min       uint64 // bytes that no other owner can take
}

type fifo struct {
	old, young uint32
	used       uint64 // bytes of all resident pages that belong to the queue, linked or not
}

type owner struct {
	Owner
	known bool
	lists [Again + 1]fifo
}

func (o *owner) used() uint64 { return o.lists[Once].used + o.lists[Again].used }

// Policy is 2Q over trees of pages. Its owner locks.
type Policy struct {
	links   []Link
	history history
	owners  [MaxOwners]owner
	top     uint16 // owners from here on were never used
	pages   int
}

// New makes a policy over nodes 1 to len(links)-1. The memory of both slices is zero, and the
// policy's from now on. past has HistoryEntries entries.
func New(links []Link, past []uint32) *Policy {
	return &Policy{links: links, history: newHistory(past)}
}

// HistoryEntries is how many entries of the history suit a number of pages.
func HistoryEntries(pages int) int { return max(ways, pages/10*9/ways*ways) }

// SetOwner makes or changes an owner. Its page size and class stay while it has pages.
func (p *Policy) SetOwner(id uint16, o Owner) {
	p.owners[id].Owner, p.owners[id].known = o, true
	p.top = max(p.top, id+1)
}

// DropOwner forgets an owner that has no pages.
func (p *Policy) DropOwner(id uint16) {
	if o := &p.owners[id]; o.used() != 0 {
		panic(fmt.Sprintf("evict: owner %d is dropped with %d bytes", id, o.used()))
	}
	p.owners[id] = owner{}
}

// Reserved is how many bytes all owners but one have reserved.
func (p *Policy) Reserved(but uint16) (sum uint64) {
	for id := range p.top {
		if o := &p.owners[id]; o.known && id != but {
			sum += o.Min
		}
	}
	return sum
}

// CheckShares returns an error if an owner's quota or reserve is not possible in a tier: a quota
// holds one page and the reserve, and all reserves together take half of the tier at most, so that
// pages of others find room. key is the tier's, in the configuration.
func (p *Policy) CheckShares(key string, id uint16, o Owner, tier uint64) error {
	if o.Max != 0 && (o.Max < o.PageBytes || o.Min > o.Max) {
		return fmt.Errorf("%s: quota of %d bytes: must hold one page, which takes %d bytes, and "+
			"the reserve of %d bytes; raise it", key, o.Max, o.PageBytes, o.Min)
	}
	others := p.Reserved(id)
	if o.Min > tier/2 || others > tier/2-o.Min {
		return fmt.Errorf("%s: reserve of %d bytes: other namespaces have reserved %d bytes, and "+
			"all may have half of the tier, %d bytes; lower a reserve, or make the tier larger",
			key, o.Min, others, tier/2)
	}
	return nil
}

// Used is how many bytes of pages an owner has.
func (p *Policy) Used(id uint16) uint64 { return p.owners[id].used() }

// Owner is the owner of a page.
func (p *Policy) Owner(n uint32) uint16 { return p.links[n].owner }

// Parent is the page before one in its prompt, if that is known; otherwise 0.
func (p *Policy) Parent(n uint32) uint32 { return p.links[n].parent }

// Pages is how many pages are resident.
func (p *Policy) Pages() int { return p.pages }

// Over reports whether one more page would take an owner over its quota. Victim then names a page
// of its own.
func (p *Policy) Over(id uint16) bool {
	o := &p.owners[id]
	return o.Max != 0 && o.used()+o.PageBytes > o.Max
}

// Insert makes a node resident. Its parent is the page before it in its prompt, or 0. A node that
// is a Hole keeps its place in the tree.
func (p *Policy) Insert(n, parent uint32, hash uint64, id uint16, now uint32) {
	l := &p.links[n]
	queue := Once
	returned := p.history.take(hash, p.pages)
	switch {
	case l.queue == Hole:
		queue = Again // what follows it is still wanted
	case l.queue != Nowhere:
		panic(fmt.Sprintf("evict: node %d is inserted twice", n))
	default:
		*l = Link{owner: id}
		p.adopt(n, parent)
	}
	if returned {
		queue = Again
	}
	l.queue, l.tick = queue, now
	o := &p.owners[id]
	o.lists[queue].used += o.PageBytes
	p.pages++
	p.pushYoung(n)
	if queue == Again {
		p.raise(l.parent, now)
	}
}

// maxDepth bounds the ancestors that Follow looks at.
const maxDepth = 1 << 16

// Follow makes parent the page before n, if none is known: the pages of a prompt may be inserted in
// any order. A page that would be its own ancestor stays as it is.
func (p *Policy) Follow(n, parent, now uint32) {
	if l := &p.links[n]; l.queue == Nowhere || l.parent != 0 {
		return
	}
	depth := 0
	for up := parent; up != 0; up = p.links[up].parent {
		if depth++; up == n || depth > maxDepth {
			return
		}
	}
	p.adopt(n, parent)
	if p.links[n].queue == Again {
		p.raise(p.links[n].parent, now)
	}
}

// adopt makes n a kid of parent, if that is in use and the same owner's. parent is no descendant of
// n: a node without kids has none.
func (p *Policy) adopt(n, parent uint32) {
	if parent == 0 || parent == n {
		return
	}
	pl := &p.links[parent]
	if pl.queue == Nowhere || pl.owner != p.links[n].owner {
		return
	}
	pl.kids++
	p.links[n].parent = parent
}

// raise moves n and its ancestors from Once to Again. A use of a page is one of all before it.
func (p *Policy) raise(n, now uint32) {
	for n != 0 && p.links[n].queue != Again {
		if p.links[n].queue == Once {
			p.again(n, now)
		}
		n = p.links[n].parent
	}
}

// Touch counts a use.
func (p *Policy) Touch(n, now uint32) {
	p.again(n, now)
	p.raise(p.links[n].parent, now)
}

// again puts a page at the young end of Again.
func (p *Policy) again(n, now uint32) {
	p.unlink(n)
	l := &p.links[n]
	o := &p.owners[l.owner]
	o.lists[l.queue].used -= o.PageBytes
	o.lists[Again].used += o.PageBytes
	l.queue, l.tick = Again, now
	p.pushYoung(n)
}

// Queued is a page of an owner that is in a queue; 0: there is none.
func (p *Policy) Queued(id uint16) uint32 {
	o := &p.owners[id]
	if n := o.lists[Once].old; n != 0 {
		return n
	}
	return o.lists[Again].old
}

// Unqueue takes a page with pins out of its queue, until the last pin ends.
func (p *Policy) Unqueue(n uint32) { p.unlink(n) }

// Pin keeps a page, and thus all before it, from being a victim, and a Hole's number from being
// freed.
func (p *Policy) Pin(n uint32) { p.links[n].kids++ }

// Unpin ends one Pin. The page was in use until now.
func (p *Policy) Unpin(n, now uint32, free func(uint32)) {
	l := &p.links[n]
	l.kids--
	switch {
	case l.queue == Hole:
		p.settle(n, free)
	case !l.linked:
		l.tick = now
		p.pushYoung(n)
	}
}

// Remove takes a page that is not pinned out of the policy. free is called with each node whose
// number is not needed any more: n itself, unless pages that follow it are here, and then Holes
// before it.
func (p *Policy) Remove(n uint32, free func(uint32)) {
	l := &p.links[n]
	if l.queue != Once && l.queue != Again {
		panic(fmt.Sprintf("evict: node %d is removed and not resident", n))
	}
	p.unlink(n)
	o := &p.owners[l.owner]
	o.lists[l.queue].used -= o.PageBytes
	p.pages--
	l.queue = Hole
	p.settle(n, free)
}

// settle frees n and those before it as far as they are Holes that nothing follows.
func (p *Policy) settle(n uint32, free func(uint32)) {
	for n != 0 && p.links[n].kids == 0 {
		l := &p.links[n]
		if l.queue != Hole {
			if !l.linked {
				p.pushOld(n) // it is overdue
			}
			return
		}
		up := l.parent
		*l = Link{}
		free(n)
		if up != 0 {
			p.links[up].kids--
		}
		n = up
	}
}

// Evict is Remove of a page that Victim named, and adds the page to the history.
func (p *Policy) Evict(n uint32, hash uint64, free func(uint32)) {
	p.history.add(hash)
	p.Remove(n, free)
}

// Age is how long a page has not been used.
func (p *Policy) Age(n, now uint32) uint32 { return now - p.links[n].tick }

// Any names any class.
const Any = 255

// Victim names the page of a class to give up so that owner by gets one more page; 0: there is
// none. It is one of by's own if by is at its quota.
func (p *Policy) Victim(by uint16, class uint8, now uint32) uint32 {
	over := p.Over(by)
	allowed := func(id uint16) bool {
		o := &p.owners[id]
		return (class == Any || o.Class == class) && (id == by || !over &&
			o.used() >= o.Min+o.PageBytes)
	}
	for {
		n := p.oldest(allowed, now)
		if n == 0 || p.links[n].kids == 0 {
			return n
		}
		p.unlink(n) // overdue
	}
}

// oldest is the page that has gone unused for longest, a page of Again counting as younger than it
// is.
func (p *Policy) oldest(allowed func(uint16) bool, now uint32) (n uint32) {
	var oldest uint64
	for id := range p.top {
		o := &p.owners[id]
		if !o.known || !allowed(id) {
			continue
		}
		for q := Once; q <= Again; q++ {
			end := o.lists[q].old
			if end == 0 {
				continue
			}
			age := uint64(now-p.links[end].tick) + 1
			if q == Once {
				age *= weight
			}
			if age > oldest {
				n, oldest = end, age
			}
		}
	}
	return n
}

func (p *Policy) pushYoung(n uint32) {
	l := &p.links[n]
	q := &p.owners[l.owner].lists[l.queue]
	l.prev, l.next = q.young, 0
	if q.young != 0 {
		p.links[q.young].next = n
	} else {
		q.old = n
	}
	q.young = n
	l.linked = true
}

func (p *Policy) pushOld(n uint32) {
	l := &p.links[n]
	q := &p.owners[l.owner].lists[l.queue]
	l.prev, l.next = 0, q.old
	if q.old != 0 {
		p.links[q.old].prev = n
	} else {
		q.young = n
	}
	q.old = n
	l.linked = true
}

// unlink takes a page out of its queue, if it is in it.
func (p *Policy) unlink(n uint32) {
	l := &p.links[n]
	if !l.linked {
		return
	}
	q := &p.owners[l.owner].lists[l.queue]
	if l.prev != 0 {
		p.links[l.prev].next = l.next
	} else {
		q.old = l.next
	}
	if l.next != 0 {
		p.links[l.next].prev = l.prev
	} else {
		q.young = l.prev
	}
	l.prev, l.next = 0, 0
	l.linked = false
}
