package disk

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

// identify reads the first block of each device, or writes it where all are new, and makes the
// logs.
func (t *Tier) identify(devices []opened) error {
	buf, err := offheap.New[byte](block)
	if err != nil {
		return err
	}
	defer buf.Free()
	b := buf.Elems()
	fresh := 0
	for _, d := range devices {
		if d.fresh {
			fresh++
		}
	}
	if fresh == len(devices) {
		if err := t.format(devices, b); err != nil {
			return err
		}
	} else if fresh > 0 {
		i := slices.IndexFunc(devices, func(d opened) bool { return d.fresh })
		return fmt.Errorf("store.disk path %s: it is empty, and other paths hold a store; name "+
			"all paths of one store, or empty the others yourself",
			devices[i].path)
	}
	for i, d := range devices {
		if err := d.file.ReadAt(b, 0); err != nil {
			return fmt.Errorf("store.disk path %s: %w", d.path, err)
		}
		s, err := parseSuper(b)
		if err != nil {
			return fmt.Errorf("store.disk path %s: %w", d.path, err)
		}
		if i == 0 {
			t.id, t.segb = s.store, s.segment
		}
		if s.store != t.id || int(s.device) != i || int(s.devices) != len(devices) ||
			s.segment != t.segb {
			return fmt.Errorf("store.disk path %s: it is device %d of the %d of store %x, and "+
				"should be device %d of the %d of store %x; "+
				"name the paths as before, in their order", d.path, s.device+1, s.devices,
				s.store[:4], i+1, len(devices), t.id[:4])
		}
		if end := segmentsAt + int64(s.segments)*int64(s.segment)*block; end > d.have {
			return fmt.Errorf("store.disk path %s: its store needs %d bytes, the device has %d: "+
				"it was cut, or copied in part; restore it, or empty it yourself: its pages are lost",
				d.path, end, d.have)
		}
		l := &log{t: t, path: d.path, file: d.file, segments: make([]segment, s.segments), at: -1}
		if l.scratch, err = offheap.New[byte](block); err != nil {
			return err
		}
		t.logs = append(t.logs, l)
	}
	t.stats.Direct = !slices.ContainsFunc(devices, func(d opened) bool { return !d.direct })
	return nil
}

// format writes the first blocks. A crash in between leaves devices that are new and others that
// are not, which is refused by name: nothing was stored in them.
func (t *Tier) format(devices []opened, b []byte) error {
	id := newStoreID()
	for _, d := range devices { // before anything is written
		if d.size > d.have {
			return fmt.Errorf("store.disk path %s: size %d: the device has %d bytes; lower size",
				d.path, d.size, d.have)
		}
	}
	for i, d := range devices {
		segments := (d.size - segmentsAt) / (int64(t.segb) * block)
		if segments < minSegments {
			return fmt.Errorf("store.disk path %s: size %d holds %d segments of %d bytes, at "+
				"least %d are needed; raise size, or lower store.segment",
				d.path, d.size, segments, t.segb*block, minSegments)
		}
		clear(b)
		s := super{store: id, device: uint32(i), devices: uint32(len(devices)), segment: t.segb,
			segments: uint32(segments)}
		s.encode(b)
		if err := d.file.WriteAt([][]byte{b}, 0); err != nil {
			return fmt.Errorf("store.disk path %s: %w", d.path, err)
		}
		if err := d.file.Sync(); err != nil {
			return fmt.Errorf("store.disk path %s: %w", d.path, err)
		}
	}
	return nil
}

// found is a segment with its table, at the start.
type found struct {
	l      *log
	number uint32
	strays bool // it has bytes of no page: of its life before, or of pages written in part
	*table
}

// recover fills the catalog with what the devices hold, the oldest segments first.
func (t *Tier) recover() error {
	if err := t.readLedger(); err != nil {
		return err
	}
	t.seq = t.ledger.first
	var all []found
	whole, err := offheap.New[byte](int(t.segb) * block)
	if err != nil {
		return err
	}
	defer whole.Free()
	for _, l := range t.logs {
		for i := range uint32(len(l.segments)) {
			seq := l.life(i)
			if seq >= t.ledger.first {
				seq = unknownLife // no start has given this number
			}
			l.segments[i] = segment{seq: seq}
			if seq <= unknownLife {
				continue
			}
			l.segments[i].state = full
			tab, strays := l.footer(i, seq), false
			if tab == nil {
				end := uint32(0)
				tab, end, strays = l.scan(i, seq, whole.Elems())
				l.resume(i, tab, end)
			}
			all = append(all, found{l, i, strays, tab})
		}
	}
	for _, l := range t.logs {
		// Pages written before a kill may not be durable yet, and count as stored from now on.
		if err := l.file.Sync(); err != nil {
			return fmt.Errorf("store.disk path %s: %w", l.path, err)
		}
	}
	slices.SortFunc(all, func(a, b found) int { return cmp.Compare(a.seq, b.seq) })
	t.mu.Lock()
	defer t.mu.Unlock()
	ids := t.ledger.byEra()
	for _, f := range all {
		t.adoptLocked(f, ids)
	}
	for _, l := range t.logs {
		for i := range l.segments {
			if s := &l.segments[i]; s.state == full && s.live == 0 {
				s.state = free
			}
		}
	}
	return nil
}

// resume goes on with a segment that has no footer, if it is the last one of its log: the segments
// that are free are not more than before, and what was being moved goes on into it.
func (l *log) resume(seg uint32, tab *table, end uint32) {
	if l.at >= 0 && l.segments[l.at].seq > tab.seq {
		return
	}
	if l.at >= 0 {
		l.segments[l.at].state = full
	}
	l.segments[seg].state = current
	l.at, l.pos, l.spaces, l.entries = int(seg), end, tab.spaces, tab.entries
}

// life reads the header of a segment. A header that cannot be read is no reason not to start: the
// pages of the segment are dropped. They are not searched for, because it is then unknown which of
// the lives in the segment was the last one.
func (l *log) life(seg uint32) uint64 {
	b := l.scratch.Elems()[:block]
	if err := l.file.ReadAt(b, l.offset(seg, 0)); err != nil {
		l.t.stats.Damaged++
		return unknownLife
	}
	return parseSegment(b, l.t.id)
}

// scan reads a segment that has no footer: its groups, with the checksum of every page, because the
// last group may have been written in part. A block that is no table is passed over. It returns
// where the last group ends, and whether there are bytes of no page.
func (l *log) scan(seg uint32, seq uint64, b []byte) (out *table, end uint32, strays bool) {
	t := l.t
	out = &table{kind: kindFooter, seq: seq}
	if l.file.ReadAt(b, l.offset(seg, 0)) != nil {
		return out, t.segb, true // nothing is written into it
	}
	end = 1
	index := map[space]uint16{}
	for at := uint32(1); at < t.segb; {
		tab, err := parse(b[at*block:min(int(at+1)*block, len(b))], t.id, kindGroup, seq, t.segb)
		if err != nil {
			strays = strays || slices.ContainsFunc(b[at*block:(at+1)*block],
				func(b byte) bool { return b != 0 })
			at++
			continue
		}
		next := at + 1
		for _, e := range tab.entries {
			s := tab.spaces[e.space]
			next = max(next, e.at+blocksOf(int(s.pageBytes)))
			if mem.CRC32C(0, b[int(e.at)*block:][:s.pageBytes]) != e.crc {
				strays = true
				continue
			}
			i, ok := index[s]
			if !ok {
				i = uint16(len(out.spaces))
				index[s] = i
				out.spaces = append(out.spaces, s)
			}
			e.space = i
			out.entries = append(out.entries, e)
		}
		at = next
		end = next
	}
	return out, end, strays
}

// adoptLocked puts the pages of a segment into the catalog whose eras count.
func (t *Tier) adoptLocked(f found, ids map[page.Era]page.ID) {
	base := (f.l.first + f.number) * t.segb
	f.l.segments[f.number].eras = erasOf(f.spaces)
	if f.strays { // their eras are unknown: it is one that has ended
		f.l.segments[f.number].eras = append(f.l.segments[f.number].eras, page.Era{})
	}
	for i := range f.entries {
		e := &f.entries[i]
		s := f.spaces[e.space]
		space, ok := ids[s.era]
		if !ok {
			continue
		}
		id, ok := t.ids[space]
		if !ok {
			if id, ok = t.hiddenLocked(); !ok || t.perSegment(int(s.pageBytes)) == 0 {
				continue // nothing that was ever written
			}
			t.setOwnerLocked(id, space, int(s.pageBytes), 0, 0)
		}
		o := t.owners[id]
		if o.pageBytes != s.pageBytes {
			continue
		}
		var after *page.Key
		if e.after != (page.Key{}) {
			after = &e.after
		}
		if n := t.pages.Find(&e.key); t.pages.Readable(n, id) {
			t.moveLocked(n, o, base+e.at) // it was moved, and this is where it is now
			t.pages.At(n).CRC = e.crc
			continue
		}
		// All that is on the device is found, also what had been given up and not been overwritten:
		// which pages those are is not written down. The next write gives up what is too much, the
		// oldest pages first.
		n, err := t.pages.Begin(id, &e.key, after, func() (uint32,
			error) {
			return t.limboLocked(o), nil
		})
		if err != nil {
			continue
		}
		t.moveLocked(n, o, base+e.at)
		t.pages.Finish(n, e.crc)
		t.pages.Drop(n)
	}
}

// hiddenLocked is a number for a namespace that is on the disk and not opened yet.
func (t *Tier) hiddenLocked() (uint16, bool) {
	for n := uint16(0); n < maxSpaces; n++ {
		if t.owners[n] == nil {
			return n, true
		}
	}
	return 0, false
}
