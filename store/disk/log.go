package disk

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/evict"
	"github.com/kvspray/kvspray/store/index"
	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

// state is what a segment is.
type state uint8

const (
	free state = iota
	current
	full
	wiped // it is being overwritten
)

// segment is guarded by Tier.mu.
type segment struct {
	state   state
	seq     uint64
	live    uint64 // bytes of pages that the catalog places here
	readers int
	bad     bool       // it could not be wiped
	eras    []page.Era // of pages that it has, or may still have of its life before
}

// log is one device: its segments, and the one that is appended to.
type log struct {
	t        *Tier
	path     string
	file     File
	first    uint32 // number of its first segment among all
	segments []segment
	capacity uint64 // bytes of pages that the policy lets it hold
	// guarded by Tier.mu
	live    uint64 // bytes of pages in its segments
	pending uint64 // bytes of the pages of writers that wait for mu, or have it
	broken  bool   // its last write could not be made durable

	mu      sync.Mutex // guards what follows and the file's log
	at      int        // the segment that is appended to; -1: none
	pos     uint32     // the next free block in it
	spaces  []space    // of its footer
	entries []entry
	scratch *offheap.Array[byte] // aligned; a table at most
	bounce  *offheap.Array[byte] // for pages that are moved; made when needed

	syncing sync.Mutex // see durably; taken last
}

// durably writes and syncs. The kernel reports an error of a write once, to the next sync: so no
// call syncs what another has written.
func (l *log) durably(bufs [][]byte, off int64) error {
	l.syncing.Lock()
	defer l.syncing.Unlock()
	if err := l.file.WriteAt(bufs, off); err != nil {
		return err
	}
	return l.file.Sync()
}

// Record is one page to write.
type Record struct {
	Key   page.Key
	After *page.Key // the page before it in its prompt; nil: none that is known
	Data  []byte    // aligned to 4 KiB, PaddedBytes long, and not changed until Write returns
	CRC   uint32    // of the page's own bytes
	// Fresh: CRC was computed while Data was filled, for this Write. Data is not read once more to
	// compare it: that takes a fifth of the time of the write. A get compares it.
	Fresh bool
}

// GroupPages is how many pages of a size one Write takes.
func (t *Tier) GroupPages(pageBytes int) int {
	segment := (t.segb - 3 - blocksOf(tableBytes(1, groupPages))) / blocksOf(pageBytes)
	return min(groupPages, max(1, MaxGroupBytes/PaddedBytes(pageBytes)), max(1, int(segment)))
}

// Write stores pages of one owner, at most GroupPages, and returns when they are durable: for each
// record nil, catalog.ErrExists, catalog.ErrBusy, or why it is not stored. wanted is called with
// the tier's lock held. It reports whether no removal of the namespace has begun since the pages
// are its own; nil: none has.
func (t *Tier) Write(id uint16, records []Record, wanted func() bool) []error {
	errs := make([]error, len(records))
	fresh := make([]int, 0, len(records)) // those that are written
	nodes := make([]index.Node, len(records))
	o, s, err := t.enterEra(id, wanted)
	if err != nil {
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	t.mu.Lock()
	l, bytes := t.emptiestLocked(), uint64(len(records))*o.cost
	l.pending += bytes
	for i := range records {
		if t.pages.Readable(t.pages.Find(&records[i].Key), id) {
			errs[i] = catalog.ErrExists // most pages of a prompt are here
		}
	}
	t.mu.Unlock()
	if limit := t.GroupPages(int(o.pageBytes)); len(records) > limit {
		panic(fmt.Sprintf("disk: a write of %d pages, at most %d", len(records), limit))
	}
	for i := range records {
		if errs[i] != nil || records[i].Fresh {
			continue
		}
		// A bit may have flipped in memory, too.
		if mem.CRC32C(0, records[i].Data[:o.pageBytes]) != records[i].CRC {
			errs[i] = fmt.Errorf("store.disk: page %s changed in memory: %w", records[i].Key, ErrDamaged)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	t.mu.Lock()
	defer func() { // with t.mu
		l.pending -= bytes
		t.mu.Unlock()
	}()
	for i := range records {
		// They would be of an era that has ended. And a page that was here is so no more.
		if !t.isNowLocked(o, s) && (errs[i] == nil || errors.Is(errs[i], catalog.ErrExists)) {
			errs[i] = ErrRemoved
		}
		if errs[i] != nil {
			continue
		}
		r := &records[i]
		nodes[i], errs[i] = t.pages.Begin(id, &r.Key, r.After, func() (uint32,
			error) {
			return t.roomLocked(id, o)
		})
		if errs[i] == nil {
			fresh = append(fresh, i)
		}
	}
	if len(fresh) == 0 {
		return errs
	}
	t.mu.Unlock()
	left, err := l.append(s, records, fresh, func(which []int, places []uint32) {
		t.mu.Lock()
		defer t.mu.Unlock()
		for j, i := range which {
			n := nodes[i]
			t.moveLocked(n, o, places[j])
			t.pages.Finish(n, records[i].CRC)
			if t.pages.At(n).Doomed {
				errs[i] = ErrRemoved
			}
			t.pages.Drop(n)
		}
	})
	t.mu.Lock()
	l.broken = err != nil && !errors.Is(err, errNoSegment)
	for _, i := range left {
		errs[i] = err
		t.pages.Doom(nodes[i])
		t.pages.Drop(nodes[i])
	}
	return errs
}

// retryTurns: one write in retryTurns goes to a device that could not be written last.
const retryTurns = 16

// emptiestLocked is the log whose device is filled least, so that devices of unequal sizes and
// speeds hold pages in proportion to their sizes. A device that cannot be written stays empty, and
// is left out but for some turns.
func (t *Tier) emptiestLocked() *log {
	t.turn++
	var best *log
	for _, l := range t.logs {
		if l.broken && t.turn%retryTurns != 0 {
			continue
		}
		if best == nil || l.filled() < best.filled() {
			best = l
		}
	}
	if best == nil { // none can be written
		best = t.logs[t.turn%len(t.logs)]
	}
	return best
}

// filled is the share of a device that has pages, those that are being written among them.
func (l *log) filled() float64 { return float64(l.live+l.pending) / float64(l.capacity) }

// moveLocked gives a page another place.
func (t *Tier) moveLocked(n index.Node, o *owner, loc uint32) {
	e := t.pages.At(n)
	t.countLocked(e.Loc, -o.cost)
	e.Loc = loc
	t.countLocked(loc, o.cost)
}

// countLocked adds to the bytes of pages at a place.
func (t *Tier) countLocked(loc uint32, bytes uint64) {
	if loc == noPlace {
		t.limbo += bytes
		return
	}
	l := t.logOf(loc)
	l.segments[loc/t.segb-l.first].live += bytes
	l.live += bytes
}

// roomLocked gives up pages until one more fits into what the tier may hold.
func (t *Tier) roomLocked(id uint16, o *owner) (uint32, error) {
	n := o.cost
	for t.bytes+n > t.capacity {
		if err := t.pages.GiveUpOne(id, evict.Any); err != nil {
			return 0, fmt.Errorf("store.disk: %w", err)
		}
	}
	return t.limboLocked(o), nil
}

// limboLocked counts one more page, which has no place yet.
func (t *Tier) limboLocked(o *owner) uint32 {
	t.bytes += o.cost
	t.limbo += o.cost
	return noPlace
}

// errNoSegment: the device has no segment that could be emptied.
var errNoSegment = errors.New("store.disk: no segment can be emptied; raise size, or unpin pages")

// append writes pages, synced, in as many groups as segments have room for. A segment that cannot
// be written is not written any more, and the group goes into the next one, once. placed is called
// after each group: the next one may need room, and what has no place yet is not kept. It returns
// the pages that were not written, and why.
func (l *log) append(s space, records []Record, which []int,
	placed func(which []int, places []uint32)) (left []int, err error) {
	failures := 0
	for len(which) > 0 {
		n, err := l.ensure(s, len(which), true)
		if err != nil {
			return which, err
		}
		places, err := l.group(s, records, which[:n])
		if err != nil {
			l.failed()
			if failures++; failures > 1 {
				return which, fmt.Errorf("store.disk path %s: %w", l.path, err)
			}
			continue
		}
		placed(which[:n], places)
		which = which[n:]
	}
	return nil, nil
}

// ensure makes the current segment one with room, and returns for how many of the pages it has
// room, at least one. clean: segments may be cleaned for it.
func (l *log) ensure(s space, pages int, clean bool) (int, error) {
	fits := func() int {
		n := pages
		if len(l.spaces) == maxSpaces {
			return 0
		}
		for n > 0 && l.pos+1+uint32(n)*blocksOf(int(s.pageBytes))+l.footerBlocks(n) >= l.t.segb {
			n--
		}
		return n
	}
	if l.at >= 0 {
		if n := fits(); n > 0 {
			return n, nil
		}
		l.close()
	}
	if clean {
		if err := l.makeFree(); err != nil {
			return 0, err
		}
		if l.at >= 0 { // cleaning began one
			if n := fits(); n > 0 {
				return n, nil
			}
			l.close()
		}
	}
	if err := l.begin(); err != nil {
		return 0, err
	}
	return fits(), nil
}

// footerBlocks is how long the footer is with these pages more, and one namespace more.
func (l *log) footerBlocks(pages int) uint32 {
	return blocksOf(tableBytes(len(l.spaces)+1, len(l.entries)+pages))
}

// group writes one group at the current position.
func (l *log) group(s space, records []Record, which []int) ([]uint32, error) {
	blocks := blocksOf(int(s.pageBytes))
	tab := table{kind: kindGroup, seq: l.segments[l.at].seq, spaces: []space{s}}
	bufs := make([][]byte, 1, 1+len(which))
	at := l.pos + 1
	places := make([]uint32, 0, len(which))
	for _, i := range which {
		e := entry{key: records[i].Key, crc: records[i].CRC, at: at}
		if records[i].After != nil {
			e.after = *records[i].After
		}
		tab.entries = append(tab.entries, e)
		bufs = append(bufs, records[i].Data)
		places = append(places, (l.first+uint32(l.at))*l.t.segb+at)
		at += blocks
	}
	bufs[0] = l.scratch.Elems()[:block]
	clear(bufs[0])
	tab.encode(bufs[0], l.t.id)
	l.t.mu.Lock()
	// A write that fails may leave bytes, too.
	if seg := &l.segments[l.at]; !slices.Contains(seg.eras, s.era) {
		seg.eras = append(seg.eras, s.era)
	}
	l.t.mu.Unlock()
	if err := l.durably(bufs, l.offset(uint32(l.at), l.pos)); err != nil {
		return nil, err
	}
	l.pos = at
	l.note(&tab)
	return places, nil
}

// note adds a group's pages to the footer to come.
func (l *log) note(tab *table) {
	for _, e := range tab.entries {
		s := tab.spaces[e.space]
		i := 0
		for i < len(l.spaces) && l.spaces[i] != s {
			i++
		}
		if i == len(l.spaces) {
			l.spaces = append(l.spaces, s)
		}
		e.space = uint16(i)
		l.entries = append(l.entries, e)
	}
}

// close ends the current segment with its footer, which is not synced: where it is lost, the groups
// are read instead. Nothing of the segment's life before is left.
func (l *log) close() {
	seg, end := uint32(l.at), l.t.segb-1-blocksOf(tableBytes(len(l.spaces), len(l.entries)))
	eras := erasOf(l.spaces)
	l.t.mu.Lock()
	before := slices.ContainsFunc(l.segments[seg].eras, func(e page.Era) bool {
		return !slices.Contains(eras, e)
	})
	l.t.mu.Unlock()
	overwritten := !before || l.zero(seg, l.pos, end) == nil
	l.end()
	if overwritten {
		l.t.mu.Lock()
		l.segments[seg].eras = eras
		l.t.mu.Unlock()
	}
}

// end is close of a segment that may have more of its life before.
func (l *log) end() {
	l.writeFooter(uint32(l.at), table{kindFooter, l.segments[l.at].seq, l.spaces, l.entries})
	l.retire()
}

func erasOf(spaces []space) (eras []page.Era) {
	for _, s := range spaces {
		eras = append(eras, s.era)
	}
	return eras
}

// retire ends the current segment as it is.
func (l *log) retire() {
	if l.at < 0 {
		return
	}
	l.t.mu.Lock()
	l.segments[l.at].state = full
	l.t.mu.Unlock()
	l.at, l.spaces, l.entries = -1, nil, nil
}

// writeFooter writes a footer so that it ends with the segment. An error costs time at the next
// start, and nothing else.
func (l *log) writeFooter(seg uint32, tab table) {
	n := blocksOf(tableBytes(len(tab.spaces), len(tab.entries)))
	buf, err := offheap.New[byte](int(n+1) * block)
	if err != nil {
		return
	}
	defer buf.Free()
	b := buf.Elems()
	tab.encode(b, l.t.id)
	encodeEnd(b[n*block:], l.t.id, tab.seq, n)
	_ = l.file.WriteAt([][]byte{b}, l.offset(seg, l.t.segb-n-1))
}

// begin takes a free segment. Its new life is durable before anything is written into it.
func (l *log) begin() error {
	t := l.t
	t.mu.Lock()
	at := -1
	for i := range l.segments {
		if l.segments[i].state == free && l.segments[i].readers == 0 {
			at = i
			break
		}
	}
	if at < 0 {
		t.mu.Unlock()
		return errNoSegment
	}
	l.segments[at].state = current
	t.mu.Unlock()
	err := l.newLife(uint32(at))
	l.at, l.pos, l.spaces, l.entries = at, 1, nil, nil
	if err != nil {
		l.failed()
	}
	return err
}

// newLife writes the header of a segment that has no pages, durably. All that the segment held
// counts no more.
func (l *log) newLife(seg uint32) error {
	t := l.t
	t.mu.Lock()
	if t.seq+1 >= t.ledger.limit {
		t.mu.Unlock()
		return fmt.Errorf("store.disk path %s: %d segments were begun since the start; restart",
			l.path, uint64(livesPerStart))
	}
	t.seq++
	seq := t.seq
	t.mu.Unlock()
	b := l.scratch.Elems()[:block]
	clear(b)
	encodeSegment(b, t.id, seq)
	if err := l.durably([][]byte{b}, l.offset(seg, 0)); err != nil {
		return fmt.Errorf("store.disk path %s: %w", l.path, err)
	}
	t.mu.Lock()
	// not before: what was removed is remembered as long as an old life is on the device
	l.segments[seg].seq = seq
	t.mu.Unlock()
	return nil
}

// failed ends the current segment, which could not be written.
func (l *log) failed() {
	l.t.mu.Lock()
	l.t.stats.Failed++
	l.t.mu.Unlock()
	l.retire()
}

// offset is where a block of a segment is on the device.
func (l *log) offset(seg, at uint32) int64 {
	return segmentsAt + (int64(seg)*int64(l.t.segb)+int64(at))*block
}
