package connector_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/page"
)

// fakeStore is a store whose requests end when the test ends them.
type fakeStore struct {
	mu       sync.Mutex
	pools    map[uint64]connector.Pool
	maxPools int // pools at once
	closed   []uint64
	began    chan connector.Pages
}

func (s *fakeStore) Open(_ *engines.Worker, p connector.Pool) (page.ID, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pools[p.ID] = p
	s.maxPools = max(s.maxPools, len(s.pools))
	return p.Namespace.ID(), nil
}

func (s *fakeStore) Close(_ *engines.Worker, pool uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pools, pool)
	s.closed = append(s.closed, pool)
}

func (s *fakeStore) pool(id uint64) connector.Pool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pools[id]
}

func (s *fakeStore) Start(_ *engines.Worker, p connector.Pages) { s.began <- p }

func (s *fakeStore) Exists(_ []page.ID, h page.Hashes) (page.Bitmap, error) {
	return page.NewBitmap(h.Len()), nil
}

func (s *fakeStore) Pin(_ []page.ID, h page.Hashes, _ time.Duration) (page.Bitmap, func(), error) {
	return page.NewBitmap(h.Len()), func() {}, nil
}

func (s *fakeStore) Remove(*engines.Worker, page.ID) (r connector.Removed, _ error) {
	return r, nil
}

const part = 8192 // of a shared file

// lender is a worker without a layout, whose regions come from one file.
type lender struct {
	*connectortest.Worker
	r     *rig
	store *fakeStore
	file  int
}

func startLender(t *testing.T) *lender {
	t.Helper()
	l := &lender{store: &fakeStore{pools: map[uint64]connector.Pool{},
		began: make(chan connector.Pages, 16)}}
	l.r = start(t, func(o *connector.Options) { o.Store = l.store })
	l.Worker = l.r.worker(t, func(c *connectortest.Config) { c.Layout, c.Regions = nil, nil })
	l.file = memfd(t, 2000*part, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	return l
}

// parts are the numbered parts of the file, as regions.
func parts(from, to int) (all []msg.Region) {
	for i := from; i < to; i++ {
		all = append(all, msg.Region{Region: mem.NewID(), Kind: msg.KindMemfd, Bytes: part, FD: 0,
			Offset: uint64(i) * part})
	}
	return all
}

// open opens a pool of two blocks in a region.
func (l *lender) open(t *testing.T, region uint64) (uint64, error) {
	t.Helper()
	return l.OpenSpace(testContext(t), msg.Open{Namespace: msg.Namespace{Weights: "w",
		DType: "bfloat16", Layout: "l", PageTokens: 16, PageBytes: part / 2,
		Algorithm: "sglang-sha256"}, Blocks: 2,
		Pieces: []msg.PagePiece{{Region: region, Stride: part / 2, Len: part / 2}}})
}

// get begins a GET of one page into block 0 of a pool.
func (l *lender) get(t *testing.T, space uint64) connector.Pages {
	t.Helper()
	_, err := l.Get(msg.Get{Space: space, Hashes: make([]byte, 16), HashBytes: 16,
		Blocks: []uint32{0}})
	must(t, err)
	return <-l.store.began
}

// freed reports whether a region has no holder left.
func freed(r *mem.Region) bool {
	if r.Acquire() {
		r.Release()
		return false
	}
	return true
}

// descriptorsOf counts the descriptors of this process for a file.
func descriptorsOf(t *testing.T, file int) (n int) {
	t.Helper()
	var want unix.Stat_t
	must(t, unix.Fstat(file, &want))
	all, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	for _, f := range all {
		var st unix.Stat_t
		if unix.Stat("/proc/self/fd/"+f.Name(), &st) == nil && st.Dev == want.Dev && st.Ino == want.Ino {
			n++
		}
	}
	return n
}

// A thousand regions in one file take one descriptor of the sidecar, and each is its own memory.
func TestManyRegionsOfOneFile(t *testing.T) {
	l := startLender(t)
	all := parts(0, msg.MaxRegions)
	for from := 0; from < len(all); from += 256 {
		must(t, l.AddRegions(testContext(t), uint32(from), all[from:from+256], l.file))
	}
	if n := descriptorsOf(t, l.file) - 1; n != len(all)/256 {
		t.Errorf("%d regions in %d packets took %d descriptors", len(all), len(all)/256, n)
	}
	for _, i := range []uint64{0, 700, 1023} {
		space, err := l.open(t, i)
		must(t, err)
		must(t, l.store.pool(space).Pieces[0].Region.WriteAt([]byte(fmt.Sprint(i)), 4096))
		var got [4]byte
		_, err = unix.Pread(l.file, got[:], int64(i*part+4096))
		must(t, err)
		if want := fmt.Sprint(i); string(got[:len(want)]) != want {
			t.Errorf("region %d: %q", i, got)
		}
	}
	err := l.AddRegions(testContext(t), 1024, parts(1024, 1025), l.file)
	refused(t, err, msg.CodeLimit, "regions", "1025, at most 1024")
}

// Regions that share memory, lie outside their file, or would take a number twice are refused, and
// a packet with one of them adds none.
func TestRefusesRegions(t *testing.T) {
	l := startLender(t)
	must(t, l.AddRegions(testContext(t), 5, parts(10, 12), l.file))
	outside := parts(0, 1)[0]
	outside.Offset = 2000 * part
	unaligned := parts(0, 1)[0]
	unaligned.Offset = 100
	far := parts(0, 1)[0]
	far.Offset = 1<<64 - 4096
	process := parts(0, 1)[0]
	process.Kind = msg.KindProcess
	for _, c := range []struct {
		first      uint32
		regions    []msg.Region
		code, text string
	}{
		{7, append(parts(20, 21), parts(11, 12)...), msg.CodeRegion, "the same memory as region 6"},
		{7, append(parts(20, 21), parts(20, 21)...), msg.CodeRegion, "the same memory as region 7"},
		{7, append(parts(20, 21), outside), msg.CodeRegion, "memfd has"},
		{7, append(parts(20, 21), far), msg.CodeRegion, "exceed every file"},
		{7, append(parts(20, 21), unaligned), msg.CodeRegion, "multiple of"},
		{6, parts(20, 21), msg.CodeProtocol, "numbers below 7 have been used"},
		{msg.MaxRegionNumber, parts(20, 21), msg.CodeProtocol, "numbers below 7 have been used"},
		{7, append(parts(20, 21), process), msg.CodeRegion, "not a range of user memory"},
	} {
		err := l.AddRegions(testContext(t), c.first, c.regions, l.file)
		var se *connectortest.ServerError
		if !errors.As(err, &se) || se.Code != c.code || !strings.Contains(se.Message, c.text) {
			t.Errorf("%v, want %s with %q", err, c.code, c.text)
		}
	}
	must(t, l.AddRegions(testContext(t), 9, parts(20, 21), l.file))
	for want, numbers := range map[string][]uint32{"region 8 is not registered": {9, 8},
		"region 9 comes twice": {9, 9}} {
		err := l.DropRegions(testContext(t), numbers...)
		refused(t, err, msg.CodeRegion, "regions[1]", want)
	}
	_, err := l.open(t, 9)
	must(t, err)
}

// More descriptors than a packet holds come before REGISTER. A layout names their regions.
func TestManyFilesBeforeRegister(t *testing.T) {
	r := start(t, nil)
	const files, packet = 70, 32
	lay := shape.Layout()
	size := shape.PageBytes() * uint64(shape.NumBlocks)
	for i := range lay.Groups[0].Layers {
		x := &lay.Groups[0].Layers[i]
		x.Region, x.Base = files-1-i, 0
	}
	var staged []msg.Region
	var fds []int
	for i := range files {
		fds = append(fds, memfd(t, int64(size), unix.F_SEAL_SHRINK|unix.F_SEAL_GROW))
		staged = append(staged, msg.Region{Region: mem.NewID(), Kind: msg.KindMemfd, Bytes: size,
			FD: uint32(i % packet)})
	}
	w, err := connectortest.NewWorker(r.config(t, func(c *connectortest.Config) {
		c.Layout = lay
		c.Before = func(add func(uint32, []msg.Region, ...int) error) error {
			for from := 0; from < files; from += packet {
				to := min(from+packet, files)
				if err := add(uint32(from), staged[from:to], fds[from:to]...); err != nil {
					return err
				}
			}
			return nil
		}
		c.Tamper = func(m *msg.Register, board []int) []int {
			m.First, m.Regions = files, nil
			return board[:4]
		}
	}))
	must(t, err)
	t.Cleanup(func() { _ = w.Close() })
	_, err = w.Connect(testContext(t))
	must(t, err)
	up := r.lastUp(t)
	if len(up.Regions) != files {
		t.Fatalf("%d regions", len(up.Regions))
	}
	must(t, up.Regions[files-1].WriteAt([]byte("last"), 0))
	var got [4]byte
	_, err = unix.Pread(fds[files-1], got[:], 0)
	must(t, err)
	if string(got[:]) != "last" {
		t.Errorf("region %d is another file's: %q", files-1, got)
	}
	refused(t, w.DropRegions(testContext(t), 3), msg.CodeRegion, "regions[0]", "one of REGISTER")
}

// A session that passes regions and ends without REGISTER leaves nothing open.
func TestRegionsWithoutRegister(t *testing.T) {
	l := startLender(t)
	w, err := connectortest.NewWorker(l.r.config(t, func(c *connectortest.Config) {
		c.Before = func(add func(uint32, []msg.Region, ...int) error) error {
			if err := add(1, parts(0, 1), l.file); err == nil {
				t.Error("a gap before REGISTER was accepted")
			}
			return add(0, parts(0, 9), l.file)
		}
		c.Tamper = func(m *msg.Register, board []int) []int {
			m.First = 8 // one is missing: the layout would name others
			return board
		}
	}))
	must(t, err)
	_, err = w.Connect(testContext(t))
	refused(t, err, msg.CodeProtocol, "first", "8, and ADD_REGIONS has passed 9 regions")
	must(t, w.Close())
	eventually(t, "no descriptor left", func() bool { return descriptorsOf(t, l.file) == 1 })
}

// The release rule: a region is given back when no lease accesses it, not when the engine asks for
// that or cancels; and no new lease accesses it meanwhile.
func TestDropWaitsForLeases(t *testing.T) {
	l := startLender(t)
	must(t, l.AddRegions(testContext(t), 0, parts(0, 3), l.file))
	space, err := l.open(t, 0)
	must(t, err)
	other, err := l.open(t, 2)
	must(t, err)
	lent := l.store.pool(space).Pieces[0].Region
	get := l.get(t, space)
	copied, err := l.Copy(msg.Copy{Src: 2, Dst: 1, Blocks: []msg.CopyBlock{{Len: 64}}})
	must(t, err)
	l.r.rec.until(t, "the copy", func() bool { return len(l.r.rec.copies) == 1 })

	done := make(chan error, 1)
	go func() { done <- l.DropRegions(testContext(t), 1, 0) }()
	eventually(t, "the drop", func() bool {
		_, err := l.open(t, 0)
		return err != nil
	})
	for want, start := range map[string]func() error{
		fmt.Sprintf("GET.space: %d has no blocks", space): func() error {
			_, err := l.Get(msg.Get{Space: space, Hashes: make([]byte, 16), HashBytes: 16,
				Blocks: []uint32{1}})
			return err
		},
		"COPY.dst: region 1 is being dropped": func() error {
			_, err := l.Copy(msg.Copy{Src: 2, Dst: 1, Blocks: []msg.CopyBlock{{DstOff: 64, Len: 64}}})
			return err
		},
	} {
		must(t, start())
		c, err := l.Wait(testContext(t))
		must(t, err)
		if c.Status != board.Refused || !strings.Contains(c.Received.Reason, want) {
			t.Errorf("%+v %+v, want %q", c, c.Received, want)
		}
	}
	must(t, l.Cancel(get.Lease.ID, "dropped", false))
	l.r.rec.until(t, "the cancel", func() bool { return l.r.rec.cancels[get.Lease.ID] != "" })
	up := l.r.lastUp(t)
	end := func(id uint64) {
		t.Helper()
		lease := get.Lease
		if lease.ID != id {
			lease = l.r.rec.seen().copies[0].Lease
		}
		must(t, l.r.Complete(up, engines.Completion{Lease: lease, Received: true,
			Status: board.Cancelled}))
		_, err := l.Wait(testContext(t))
		must(t, err)
	}
	end(copied) // one of two
	select {
	case err := <-done:
		t.Fatalf("dropped while a canceled GET may still write: %v", err)
	default:
	}
	if freed(lent) {
		t.Fatal("the memory is gone while a canceled GET may still write")
	}
	must(t, lent.WriteAt([]byte("late"), 0)) // as the GET may until its fence
	end(get.Lease.ID)
	must(t, <-done)
	if !freed(lent) {
		t.Error("the region is still held")
	}
	if l.store.pool(space).ID != 0 || l.store.pool(other).ID != other {
		t.Errorf("closed pools %v, want those in region 0 only", l.store.closed)
	}
	refused(t, l.AddRegions(testContext(t), 1, parts(1, 2), l.file), msg.CodeProtocol, "first",
		"numbers below 3")
	must(t, l.AddRegions(testContext(t), 3, parts(0, 2), l.file)) // the memory, again
	if l.get(t, other).Pool != other {
		t.Error("another pool was closed")
	}
}

// A worker that goes while a drop waits keeps its memory until everything is fenced.
func TestDropAndTheWorkerGoes(t *testing.T) {
	l := startLender(t)
	l.r.rec.fenceAtOnce(false)
	must(t, l.AddRegions(testContext(t), 0, parts(0, 1), l.file))
	space, err := l.open(t, 0)
	must(t, err)
	lent := l.store.pool(space).Pieces[0].Region
	l.get(t, space)
	go func() { _ = l.DropRegions(testContext(t), 0) }()
	eventually(t, "the drop", func() bool {
		_, err := l.open(t, 0)
		return err != nil
	})
	l.Disconnect()
	go func() { _, _ = l.Connect(testContext(t)) }() // the same boot: the older session is retired
	l.r.rec.until(t, "the end of the worker", func() bool { return len(l.r.rec.gone) == 1 })
	if freed(lent) {
		t.Fatal("the memory is gone before the fence")
	}
	must(t, lent.WriteAt([]byte("late"), 0))
	l.r.rec.seen().fenced[0]()
	eventually(t, "the end of the memory", func() bool { return freed(lent) })
	l.r.rec.fenceAtOnce(true)
}
