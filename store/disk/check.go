package disk

import (
	"context"
	"encoding/hex"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/offheap"
	"github.com/kvspray/kvspray/store/page"
)

// MaxFindings bounds the findings of a Report; more are counted only.
const MaxFindings = 1000

// Report is what Inspect has found.
type Report struct {
	Store      string `json:"store"`
	Segments   int    `json:"segments"`
	Used       int    `json:"used_segments"`
	Pages      uint64 `json:"pages"` // that are whole, and not forgotten
	Bytes      uint64 `json:"bytes"`
	Forgotten  uint64 `json:"forgotten_pages"` // of namespaces that were removed
	Unfinished int    `json:"unfinished_segments"`
	Damaged    uint64 `json:"damaged"` // pages, and segments whose header or content cannot be read
	// pages of unfinished segments that differ from their checksum. They may have been under way when
	// the process ended, or be damaged since: the two look alike.
	Torn     uint64    `json:"torn"`
	Findings []Finding `json:"findings"`
}

// Finding is one piece of damage.
type Finding struct {
	Path      string `json:"path"`
	Segment   uint32 `json:"segment"`
	Offset    int64  `json:"offset"` // bytes, on the device
	Namespace string `json:"namespace,omitempty"`
	Key       string `json:"key,omitempty"` // of a page; empty: the segment
	Problem   string `json:"problem"`
}

// Inspect reads all segments of a store that no process has open, and compares every page with its
// checksum. It writes nothing. The paths are those of store.disk, in their order.
func Inspect(ctx context.Context, paths []string) (*Report, error) {
	if len(paths) == 0 || len(paths) > MaxDevices {
		return nil, fmt.Errorf("store.disk: %d devices: name 1 to %d", len(paths), MaxDevices)
	}
	t := &Tier{}
	var devices []opened
	defer func() {
		for _, l := range t.logs {
			l.scratch.Free()
		}
		for _, d := range devices {
			_ = d.file.Close() // read only
		}
	}()
	for _, path := range paths {
		f, size, err := openLocked(path, os.O_RDONLY, unix.LOCK_SH)
		if err != nil {
			return nil, fmt.Errorf("store.disk path %s: %w", path, err)
		}
		devices = append(devices, opened{path: path, file: f, have: size, direct: f.direct})
		if size < segmentsAt {
			return nil, fmt.Errorf("store.disk path %s: %d bytes are no store; name a path of store.disk",
				path, size)
		}
	}
	if err := t.identify(devices); err != nil {
		return nil, err
	}
	if _, err := t.loadLedger(); err != nil {
		return nil, err
	}
	ids := t.ledger.byEra()
	buf, err := offheap.New[byte](int(t.segb) * block)
	if err != nil {
		return nil, err
	}
	defer buf.Free()
	r := &Report{Store: hex.EncodeToString(t.id[:]), Findings: []Finding{}}
	if n := t.stats.Damaged; n > 0 { // a copy of the ledger
		r.note(Finding{Path: paths[0], Offset: ledgerAt, Problem: "a copy of the record of namespaces " +
			"cannot be read"})
	}
	for _, l := range t.logs {
		r.Segments += len(l.segments)
		for i := range uint32(len(l.segments)) {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			l.check(r, i, buf.Elems(), ids)
		}
	}
	return r, nil
}

func (r *Report) note(f Finding) {
	r.Damaged++
	r.add(f)
}

func (r *Report) add(f Finding) {
	if len(r.Findings) < MaxFindings {
		r.Findings = append(r.Findings, f)
	}
}

// check compares the pages of one segment, which it reads into b.
func (l *log) check(r *Report, seg uint32, b []byte, ids map[page.Era]page.ID) {
	t := l.t
	at := l.offset(seg, 0)
	seq := l.life(seg)
	switch {
	case seq == neverUsed:
		return
	case seq == unknownLife || seq >= t.ledger.first:
		r.note(Finding{Path: l.path, Segment: seg, Offset: at, Problem: "the header of the segment is " +
			"damaged: none of its pages is found"})
		return
	}
	r.Used++
	if err := l.file.ReadAt(b, at); err != nil {
		r.note(Finding{Path: l.path, Segment: seg, Offset: at, Problem: err.Error()})
		return
	}
	if tab := l.footer(seg, seq); tab != nil {
		l.compare(r, seg, tab, b, ids)
		return
	}
	r.Unfinished++
	for at := uint32(1); at < t.segb; {
		tab, err := parse(b[at*block:(at+1)*block], t.id, kindGroup, seq, t.segb)
		if err != nil {
			at++
			continue
		}
		l.compare(r, seg, tab, b, ids)
		next := at + 1
		for _, e := range tab.entries {
			next = max(next, e.at+blocksOf(int(tab.spaces[e.space].pageBytes)))
		}
		at = next
	}
}

// compare compares the pages of a table with their checksums.
func (l *log) compare(r *Report, seg uint32, tab *table, b []byte, ids map[page.Era]page.ID) {
	for _, e := range tab.entries {
		s := tab.spaces[e.space]
		id, ok := ids[s.era]
		switch {
		case !ok:
			r.Forgotten++
		case mem.CRC32C(0, b[int(e.at)*block:][:s.pageBytes]) != e.crc:
			f := Finding{Path: l.path, Segment: seg, Offset: l.offset(seg, e.at),
				Namespace: id.String(), Key: hex.EncodeToString(e.key[:]),
				Problem: "the page differs from its checksum"}
			if tab.kind == kindGroup {
				f.Problem = "the page differs from its checksum, and its segment is unfinished"
				r.Torn++
			} else {
				r.Damaged++
			}
			r.add(f)
		default:
			r.Pages++
			r.Bytes += uint64(s.pageBytes)
		}
	}
}
