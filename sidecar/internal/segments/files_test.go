package segments

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
	"github.com/kvspray/kvspray/transfer"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// rooted is a victim with a directory for files, in which "page" has 8192 bytes.
func rooted(t *testing.T) (s *Segments, root string) {
	t.Helper()
	root = t.TempDir()
	must(t, os.WriteFile(filepath.Join(root, "page"), make([]byte, 8192), 0o600))
	s, _ = victim(t)
	var err error
	s.root, err = openRoot(root)
	must(t, err)
	return s, root
}

func writable() []connector.Grant { return []connector.Grant{{To: "*", Read: true, Write: true}} }

// A path reaches only regular files below the root, and no symbolic link is followed, whichever
// part of the path it is.
func TestPathsStayBelowTheRoot(t *testing.T) {
	s, root := rooted(t)
	outside := filepath.Join(t.TempDir(), "outside")
	must(t, os.WriteFile(outside, make([]byte, 8192), 0o600))
	must(t, os.Mkdir(filepath.Join(root, "dir"), 0o700))
	must(t, os.WriteFile(filepath.Join(root, "dir", "inner"), make([]byte, 10), 0o600))
	must(t, os.WriteFile(filepath.Join(root, "empty"), nil, 0o600))
	must(t, os.Symlink(outside, filepath.Join(root, "out")))
	must(t, os.Symlink("page", filepath.Join(root, "in")))
	must(t, os.Symlink(filepath.Dir(outside), filepath.Join(root, "outdir")))
	must(t, unix.Mkfifo(filepath.Join(root, "fifo"), 0o600))
	up, err := filepath.Rel(root, outside)
	must(t, err)
	w := &engines.Worker{Name: "w"}
	for _, x := range []struct {
		path     string
		off, n   uint64
		field    string // empty: it is registered
		contains string
	}{
		{"page", 0, 0, "", ""},
		{"page", 4096, 4096, "", ""},
		{"dir/../page", 0, 0, "", ""},
		{"dir/inner", 3, 0, "", ""},
		{up, 0, 0, "path", "leaves segments.root"},
		{"dir/../../" + filepath.Base(root) + "/page", 0, 0, "path", "leaves segments.root"},
		{outside, 0, 0, "path", "leaves segments.root"},
		{"/proc/self/mem", 0, 0, "path", "leaves segments.root"},
		{"out", 0, 0, "path", "symbolic link"},
		{"in", 0, 0, "path", "symbolic link"},
		{"outdir/outside", 0, 0, "path", "symbolic link"},
		{"fifo", 0, 0, "path", "no regular file"},
		{"dir", 0, 0, "path", ""},
		{"none", 0, 0, "path", "no such file"},
		{"page\x00", 0, 0, "path", ""},
		{"page", 8192, 0, "bytes", "outside of a file of 8192"},
		{"page", 1, 8192, "bytes", "outside"},
		{"page", 1<<64 - 1, 2, "bytes", "outside"},
		{"empty", 0, 0, "bytes", "outside"},
	} {
		n := connector.Segment{Name: "file", Path: x.path, Off: x.off, Len: x.n, Grants: writable()}
		err := s.OpenFile(&n)
		var refusal *msg.Error
		switch {
		case x.field == "" && err != nil:
			t.Errorf("%q: %v", x.path, err)
		case x.field != "" && (!errors.As(err, &refusal) || refusal.Field != x.field ||
			refusal.Remedy == "" || !strings.Contains(refusal.Problem, x.contains)):
			t.Errorf("%q: %v, want a refusal of %s with %q", x.path, err, x.field, x.contains)
		}
		if err == nil {
			must(t, s.Register(w, n))
			must(t, s.Revoke(w, "file", "", func() {}))
		}
	}
	s.root = nil
	var refusal *msg.Error
	if err := s.OpenFile(&connector.Segment{Name: "file", Path: "page"}); !errors.As(err,
		&refusal) || !strings.Contains(refusal.Remedy, "segments.root") {
		t.Errorf("without a root: %v", err)
	}
}

// A file that only readers may use is not opened for writing.
func TestReadersDoNotNeedToWrite(t *testing.T) {
	s, root := rooted(t)
	must(t, os.Chmod(filepath.Join(root, "page"), 0o400))
	f, err := s.openFile(&connector.Segment{Path: "page", Grants: []connector.Grant{{Read: true}}})
	must(t, err)
	defer f.Close()
	if err := f.do(t.Context(), []call{{0, 0, 4, false}}, make([]byte, 4), true); err == nil {
		t.Error("written")
	}
}

// Random runs of a file are read and written as a model does, aligned or not, in parts of several
// calls, and nothing else is touched.
func TestFileRunsAgainstAModel(t *testing.T) {
	s, root := rooted(t)
	const size = 2*callBytes + 12345
	rng := rand.New(rand.NewPCG(5, 6))
	model := make([]byte, size)
	for i := range model {
		model[i] = byte(rng.Uint32())
	}
	name := filepath.Join(root, "file")
	must(t, os.WriteFile(name, model, 0o600))
	f, err := s.openFile(&connector.Segment{Path: "file", Grants: writable()})
	must(t, err)
	defer f.Close()
	for round := range 12 {
		var runs []plans.Run
		for at := uint64(0); at < size; {
			r := plans.Run{Off: at, Len: 1 + rng.Uint64N(9000), Count: 1 + rng.Uint32N(4)}
			if rng.IntN(2) == 0 {
				r.Off, r.Len = (at+4095)&^4095, (1+rng.Uint64N(1200))*4096
			}
			r.Stride = r.Len + rng.Uint64N(3)*4096
			end, ok := last(r.Off, r.Len, r.Stride, r.Count)
			if !ok || end > size {
				break
			}
			runs = append(runs, r)
			at = end + rng.Uint64N(100)
		}
		staged, calls, total, err := f.stage(runs)
		must(t, err)
		write := round%2 == 0
		memory := testRegion(t, max(total, 1))
		b, _ := memory.Bytes()
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		if err := f.do(t.Context(), calls, b, write); err != nil {
			t.Fatal(err)
		}
		for i := range runs {
			for k := range uint64(runs[i].Count) {
				in := model[runs[i].Off+k*runs[i].Stride:][:runs[i].Len]
				at := b[staged[i].Off+k*staged[i].Stride:][:runs[i].Len]
				if write {
					copy(in, at)
				} else if !bytes.Equal(in, at) {
					t.Fatalf("round %d, run %d, piece %d: other bytes", round, i, k)
				}
			}
		}
		now, err := os.ReadFile(name)
		must(t, err)
		if !bytes.Equal(now, model) {
			t.Fatalf("round %d: the file differs", round)
		}
	}
	must(t, f.durable())
}

// A file that has shrunk is refused before anything is read or written, and a write does not make
// it longer again.
func TestShrunkenFiles(t *testing.T) {
	s, root := rooted(t)
	f, err := s.openFile(&connector.Segment{Path: "page", Grants: writable()})
	must(t, err)
	defer f.Close()
	runs := []plans.Run{{Off: 0, Len: 8, Count: 1}, {Off: 4096, Len: 4096, Count: 1}}
	must(t, f.covers(runs))
	must(t, os.Truncate(filepath.Join(root, "page"), 8191))
	var refusal *msg.Error
	if err := f.covers(runs); !errors.As(err, &refusal) || refusal.Field != "entries[1].remote" ||
		!strings.Contains(refusal.Problem, "shrunk to 8191") {
		t.Errorf("%v", err)
	}
	_, calls, total, err := f.stage(runs)
	must(t, err)
	b, _ := testRegion(t, total).Bytes()
	if err := f.do(t.Context(), calls, b, false); err == nil ||
		!strings.Contains(err.Error(), "shrunk to 8191") {
		t.Errorf("a short read: %v", err)
	}
	ctx, stop := context.WithCancelCause(t.Context())
	stop(errRevoked)
	if err := f.do(ctx, calls, b, true); !errors.Is(err, errRevoked) {
		t.Errorf("a write after the revocation: %v", err)
	}
}

// Batches of more bytes than the staging memory has for one are refused, whatever their form.
func TestStagedBytesAreBounded(t *testing.T) {
	f := &file{direct: &os.File{}}
	for _, r := range [][]plans.Run{
		{{Len: maxStaged + 1, Count: 1}},
		{{Len: maxStaged, Count: 1}, {Off: maxStaged, Len: 1, Count: 1}},
		{{Len: 1 << 62, Stride: 1 << 62, Count: 4}},
		{{Len: 4096, Stride: 4096, Count: maxStaged/4096 + 1}},
		slices.Repeat([]plans.Run{{Len: 4096, Count: 1}, {Off: 1, Len: 1, Count: 1}}, maxStaged/8192+1),
	} {
		var refusal *msg.Error
		if _, _, _, err := f.stage(r); !errors.As(err, &refusal) || refusal.Field != "entries" {
			t.Errorf("%d runs: %v", len(r), err)
		}
	}
	_, calls, total, err := f.stage([]plans.Run{{Len: maxStaged, Count: 1}})
	if err != nil || total != maxStaged || len(calls) != maxStaged/callBytes {
		t.Errorf("%d calls, %d bytes, %v", len(calls), total, err)
	}
}

// Rooms never overlap and stay in the memory, no peer has more than its share, those that wait get
// room in their order and as soon as there is some, and in the end nothing is left.
func TestStagingAgainstAModel(t *testing.T) {
	for seed := range uint64(50) {
		testutil.Bubble(t, func(t *testing.T) {
			g := &staging{peers: map[transfer.Boot]uint64{}}
			rng := rand.New(rand.NewPCG(seed, 9))
			check := func() {
				g.mu.Lock()
				defer g.mu.Unlock()
				shares := map[transfer.Boot]uint64{}
				for i, u := range g.used {
					if u.to > stagingBytes || i > 0 && g.used[i-1].to > u.from || u.from%directAlign != 0 {
						t.Errorf("rooms %v", g.used)
					}
					shares[u.peer] += u.to - u.from
				}
				for p, n := range shares {
					if n > maxPeerStaged || g.peers[p] != n {
						t.Errorf("peer %v has %d bytes, counted %d", p[0], n, g.peers[p])
					}
				}
			}
			// served checks that the first batch of each peer that waits has no room, or waits behind one
			// that waits for the memory itself.
			served := func() {
				g.mu.Lock()
				defer g.mu.Unlock()
				seen := map[transfer.Boot]bool{}
				for _, w := range g.waits {
					if seen[w.peer] {
						continue
					}
					if seen[w.peer] = true; g.peers[w.peer]+w.bytes > maxPeerStaged {
						continue
					}
					at := uint64(0)
					for _, u := range append(slices.Clip(g.used), room{span: span{from: stagingBytes}}) {
						if at+w.bytes <= u.from {
							t.Errorf("seed %d: peer %v waits for %d bytes, which are free at %d", seed, w.peer[0],
								w.bytes, at)
						}
						at = (u.to + directAlign - 1) / directAlign * directAlign
					}
					return
				}
			}
			for range 60 {
				n, peer := 1+rng.Uint64N(maxStaged), transfer.Boot{byte(rng.IntN(4))}
				wait, quits := rng.IntN(4) > 0, rng.IntN(5) == 0
				held := time.Duration(rng.IntN(1000))
				go func() {
					ctx, stop := context.WithCancelCause(context.Background())
					defer stop(nil)
					if quits {
						stop(errRevoked)
					}
					r, err := g.take(ctx, n, peer, wait)
					if err != nil {
						return
					}
					check()
					time.Sleep(held) // virtual
					g.give(r)
				}()
				synctest.Wait()
				served()
				time.Sleep(time.Duration(rng.IntN(200)))
				synctest.Wait()
				served()
			}
			time.Sleep(time.Hour)
			synctest.Wait()
			if len(g.used)+len(g.waits)+len(g.peers) > 0 {
				t.Errorf("left: %v, %d waits, %v", g.used, len(g.waits), g.peers)
			}
		})
	}
}

// A peer that has its share, and batches that wait, leaves free memory and waits for others.
func TestStagingOfOnePeerIsBounded(t *testing.T) {
	g := &staging{peers: map[transfer.Boot]uint64{}}
	one, two := transfer.Boot{1}, transfer.Boot{2}
	enter := func(n uint64, peer transfer.Boot, wait bool) (*stageWait, error) {
		w := &stageWait{n, peer, make(chan room, 1)}
		return w, g.enter(w, wait)
	}
	for range maxPeerStaged / maxStaged {
		w, err := enter(maxStaged, one, false)
		if must(t, err); len(w.room) == 0 {
			t.Fatal("the share of a peer is less than its bound")
		}
	}
	for i := range maxPeerStageWaits + 1 {
		if _, err := enter(1, one, true); (err != nil) != (i == maxPeerStageWaits) {
			t.Fatalf("batch %d that waits: %v", i, err)
		}
	}
	for range (stagingBytes - maxPeerStaged) / maxStaged {
		if w, err := enter(maxStaged, two, false); err != nil || len(w.room) == 0 {
			t.Fatalf("another peer gets no free memory: %v", err)
		}
	}
	if _, err := enter(1, two, true); err != nil {
		t.Errorf("another peer does not wait: %v", err)
	}
	if _, err := enter(1, two, false); err == nil {
		t.Error("a batch without wait has no room, and is not refused")
	}
}

// Reads and writes of 64 MiB with O_DIRECT and through the page cache, in turn: first of a file
// that the cache does not have.
func BenchmarkFile(b *testing.B) {
	name := filepath.Join(b.TempDir(), "file")
	must(b, os.WriteFile(name, make([]byte, maxStaged), 0o600))
	s := &Segments{}
	var err error
	s.root, err = openRoot(filepath.Dir(name))
	must(b, err)
	f, err := s.openFile(&connector.Segment{Path: "file", Grants: writable()})
	must(b, err)
	defer f.Close()
	region := testRegion(b, maxStaged)
	memory, _ := region.Bytes()
	rand.NewChaCha8([32]byte{}).Read(memory)
	for _, bytes := range []uint64{4 << 10, 64 << 10, callBytes} {
		b.Run(fmt.Sprintf("%dKiB", bytes>>10), func(b *testing.B) {
			var took [4]time.Duration
			for range b.N {
				for i := range took {
					direct, write := i%2 == 0, i/2 == 0
					var calls []call
					for at := uint64(0); at < maxStaged; at += bytes {
						calls = append(calls, call{at, at, bytes, direct})
					}
					must(b, unix.Fadvise(int(f.plain.Fd()), 0, 0, unix.FADV_DONTNEED))
					began := time.Now()
					must(b, f.do(b.Context(), calls, memory, write))
					if write {
						must(b, f.durable())
					}
					took[i] += time.Since(began)
				}
			}
			for i, what := range []string{"write-direct", "write-cached", "read-direct", "read-cached"} {
				b.ReportMetric(float64(maxStaged)*float64(b.N)/took[i].Seconds()/1e6, what+"-MB/s")
			}
		})
	}
}

// A file system that hangs in close holds up no revocation, and no worker that is gone.
func TestClosingFilesHoldsNoLock(t *testing.T) {
	s, _ := victim(t)
	w := &engines.Worker{Name: "w"}
	release := make(chan struct{})
	var closed []chan struct{}
	for _, name := range []string{"revoked", "gone"} {
		in, out, err := os.Pipe()
		must(t, err)
		defer out.Close()
		rc, err := in.SyscallConn()
		must(t, err)
		used, end := make(chan struct{}), make(chan struct{})
		closed = append(closed, end)
		go func() {
			_ = rc.Control(func(uintptr) { // close of a pipe waits for it
				close(used)
				<-release
			})
			close(end)
		}()
		<-used
		must(t, s.Register(w, connector.Segment{Name: name, File: &file{plain: in}}))
	}
	done := make(chan struct{})
	must(t, s.Revoke(w, "revoked", "", func() { close(done) }))
	<-done
	s.Gone(w)
	if s.Open() != 0 {
		t.Error("leases are open")
	}
	close(release)
	for _, end := range closed {
		<-end
	}
}

// Stop ends batches that wait for staging memory, which no lease of the executor has yet.
func TestStopEndsWaitsForStaging(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		s, _ := rooted(t)
		x := connector.Segment{Name: "file", Path: "page", Grants: writable()}
		must(t, s.OpenFile(&x))
		must(t, s.Register(&engines.Worker{Name: "w"}, x))
		for i := range stagingBytes / maxStaged {
			_, err := s.staging.take(t.Context(), maxStaged, transfer.Boot{10 + byte(i)}, false)
			must(t, err)
		}
		m := batchFrame(1, wireOf(0, 8, 0, 1))
		m.Name, m.Wait, m.DeadlineMs = "file", true, 3_600_000
		must(t, s.Handle(transfer.Boot{2}, frameOf(m)))
		synctest.Wait()
		if len(s.staging.waits) != 1 {
			t.Fatalf("%d batches wait", len(s.staging.waits))
		}
		began := time.Now()
		must(t, s.Stop(t.Context()))
		if took := time.Since(began); took > 0 { // virtual
			t.Errorf("stopped after %v", took)
		}
	})
}

// Stop does not wait longer than its context for a file system that hangs, and the lease is ended
// for other waiters.
func TestStopDoesNotWaitForFiles(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		s, _ := victim(t)
		hangs := make(chan struct{})
		defer close(hangs)
		s.mu.Lock()
		ctx, end := s.o.Leases.OpenPeer(&engines.Worker{}, 1, time.Hour)
		r := &remote{ctx: ctx, end: end}
		r.ctx, r.cancel = context.WithCancelCause(ctx)
		s.remotes[remoteID{transfer.Boot{2}, 1}] = r
		s.wg.Go(func() { <-hangs }) // as serve in a call of the file system
		s.mu.Unlock()
		stopping, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		if err := s.Stop(stopping); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Stop: %v", err)
		}
		if err := context.Cause(r.ctx); !errors.Is(err, errStops) {
			t.Errorf("the lease: %v", err)
		}
		s.o.Leases.Wait()
	})
}
