package disk

import (
	"slices"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/index"
	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

// keepFree is how many segments a log keeps for cleaning: what one segment holds fits into one.
const keepFree = 1

// makeFree cleans segments until there is one to begin and one to clean into. Each round frees one
// and fills less than one.
func (l *log) makeFree() error {
	for range 2 * len(l.segments) {
		l.t.mu.Lock()
		left := 0
		for i := range l.segments {
			if l.segments[i].state == free {
				left++
			}
		}
		l.t.mu.Unlock()
		if left > keepFree {
			return nil
		}
		if err := l.clean(left == 0 && l.at < 0); err != nil {
			return err
		}
	}
	return errNoSegment
}

// clean empties the segment with the fewest bytes of pages. It may end the current segment, and
// begin another one. Where there is no segment to move pages into, because one could not be
// written, it gives up what is there.
func (l *log) clean(nowhere bool) error {
	t := l.t
	t.mu.Lock()
	victim := -1
	for i := range l.segments {
		if s := &l.segments[i]; s.state == full && (victim < 0 ||
			s.live < l.segments[victim].live) {
			victim = i
		}
	}
	if victim < 0 {
		t.mu.Unlock()
		return errNoSegment
	}
	seq := l.segments[victim].seq
	t.mu.Unlock()
	return l.empty(uint32(victim), seq, nowhere)
}

// empty moves the pages of a segment that is full, and makes it free.
func (l *log) empty(victim uint32, seq uint64, nowhere bool) error {
	t := l.t
	seg := &l.segments[victim]
	t.mu.Lock()
	live := seg.live
	t.mu.Unlock()
	if live > 0 {
		if err := l.evacuate(victim, seq, nowhere); err != nil {
			return err
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for seg.readers > 0 { // they read one page each, and no new ones come
		t.drained.Wait()
	}
	seg.state = free
	t.stats.Cleaned++
	return nil
}

// evacuate moves the pages of a segment. What the footer does not name, the index does.
func (l *log) evacuate(seg uint32, seq uint64, nowhere bool) error {
	t := l.t
	for _, entries := range []func(uint32, uint64) []entry{l.readFooter, l.searchIndex} {
		moving := l.wanted(seg, entries(seg, seq), nowhere)
		for len(moving) > 0 {
			n, err := l.moveSome(moving)
			if err != nil {
				return err
			}
			moving = moving[n:]
		}
		t.mu.Lock()
		left := l.segments[seg].live
		t.mu.Unlock()
		if left == 0 {
			return nil
		}
	}
	return errNoSegment
}

// searchIndex lists a segment's pages where its footer cannot be read. The entries then lack the
// pages before them in their prompts.
func (l *log) searchIndex(seg uint32, _ uint64) (entries []entry) {
	t := l.t
	t.mu.Lock()
	defer t.mu.Unlock()
	base := (l.first + seg) * t.segb
	for n := index.Node(1); n <= t.pages.Last(); n++ {
		if e := t.pages.At(n); e.State == index.Live && e.Loc-base < t.segb {
			entries = append(entries, entry{key: e.Key, at: e.Loc - base})
		}
	}
	return entries
}

// resident is a page that stays, with what its table has to contain.
type resident struct {
	node  index.Node
	key   page.Key
	after page.Key
	loc   uint32
	space space // with the era that it is of
}

// wanted holds the pages of a segment that stay, and returns them in their order; where there is
// nowhere to move them to it gives them up, those at the end of a prompt first.
func (l *log) wanted(seg uint32, entries []entry, nowhere bool) (out []resident) {
	t := l.t
	t.mu.Lock()
	defer t.mu.Unlock()
	base := (l.first + seg) * t.segb
	for i := len(entries) - 1; i >= 0; i-- {
		e := &entries[i]
		n := t.pages.Find(&e.key)
		if n == 0 || t.pages.At(n).State != index.Live || t.pages.At(n).Loc != base+e.at {
			continue
		}
		o := t.owners[t.pages.Owner(uint32(n))]
		// While the owner is emptied, pages of its last era may not be forgotten yet.
		s, ok := t.spaceLocked(o)
		if !ok && !t.pages.At(n).Doomed {
			t.pages.Hold(n)
			t.pages.Doom(n)
			t.pages.Drop(n)
			if t.pages.At(n).State != index.Live {
				continue
			}
		}
		if t.pages.At(n).Doomed { // it is pinned, and can be read no more
			t.moveLocked(n, o, noPlace)
			continue
		}
		if nowhere && t.pages.At(n).Pins == 0 {
			t.pages.GiveUp(n)
			continue
		}
		t.pages.Hold(n)
		out = append(out, resident{n, e.key, e.after, base + e.at, s})
	}
	slices.Reverse(out)
	return out
}

// readFooter reads a segment's footer; nil: there is none, or it is damaged.
func (l *log) readFooter(seg uint32, seq uint64) []entry {
	tab := l.footer(seg, seq)
	if tab == nil {
		return nil
	}
	return tab.entries
}

func (l *log) footer(seg uint32, seq uint64) *table {
	t := l.t
	b := l.scratch.Elems()[:block]
	if l.file.ReadAt(b, l.offset(seg, t.segb-1)) != nil {
		return nil
	}
	n := parseEnd(b, t.id, seq, t.segb)
	if n == 0 || int(n)*block > tableBytes(maxSpaces, maxEntries)+block {
		return nil
	}
	buf, err := offheap.New[byte](int(n) * block)
	if err != nil {
		return nil
	}
	defer buf.Free()
	if l.file.ReadAt(buf.Elems(), l.offset(seg, t.segb-1-n)) != nil {
		return nil
	}
	tab, err := parse(buf.Elems(), t.id, kindFooter, seq, t.segb)
	if err != nil {
		return nil
	}
	return tab
}

// moveSome appends the first of the held pages again, as many as one group takes, and ends their
// holds. It returns how many.
func (l *log) moveSome(pages []resident) (done int, err error) {
	t := l.t
	t.mu.Lock()
	o, s := t.owners[t.pages.Owner(uint32(pages[0].node))], pages[0].space
	size, padded := int(o.pageBytes), PaddedBytes(int(o.pageBytes))
	limit := t.GroupPages(size)
	for done < len(pages) && done < limit && pages[done].space == s {
		done++
	}
	crcs := make([]uint32, done)
	for i, p := range pages[:done] {
		crcs[i] = t.pages.At(p.node).CRC
	}
	t.mu.Unlock()

	var records []Record
	var which, from []int
	var places []uint32
	damaged := make([]bool, done)
	err = l.needBounce(done * padded)
	for i := 0; i < done && err == nil; i++ {
		buf := l.bounce.Elems()[i*padded : (i+1)*padded]
		if l.fetch(pages[i].loc, buf) != nil || mem.CRC32C(0, buf[:size]) != crcs[i] {
			damaged[i] = true
			continue
		}
		r := Record{Key: pages[i].key, Data: buf, CRC: crcs[i]}
		if pages[i].after != (page.Key{}) {
			r.After = &pages[i].after
		}
		which, from = append(which, len(records)), append(from, i)
		records = append(records, r)
	}
	for err == nil && len(places) < len(records) {
		var n int
		if n, err = l.ensure(s, len(records)-len(places), false); err != nil {
			break
		}
		var some []uint32
		if some, err = l.group(s, records, which[len(places):len(places)+n]); err != nil {
			l.failed()
			break
		}
		places = append(places, some...)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for j, i := range from[:len(places)] {
		t.moveLocked(pages[i].node, o, places[j])
		t.stats.Moved++
	}
	for i, p := range pages[:done] {
		if damaged[i] {
			t.stats.Damaged++
			t.pages.Doom(p.node)
			t.moveLocked(p.node, o, noPlace)
		}
		t.pages.Drop(p.node)
	}
	if err != nil {
		for _, p := range pages[done:] {
			t.pages.Drop(p.node)
		}
	}
	return done, err
}

func (l *log) needBounce(n int) (err error) {
	if l.bounce != nil && len(l.bounce.Elems()) >= n {
		return nil
	}
	l.bounce.Free()
	l.bounce, err = offheap.New[byte](max(n, block))
	return err
}
