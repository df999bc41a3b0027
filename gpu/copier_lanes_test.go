package gpu

import (
	"bytes"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/multipath"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// until waits for a condition that another goroutine brings about.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for limit := time.Now().Add(patience); !ok(); runtime.Gosched() {
		if time.Now().After(limit) {
			t.Fatal("never: " + what)
		}
	}
}

// cells are lists of random cells, each cut at random on either side.
func cells(rng *rand.Rand, dst, src *mem.Region, n int) (to, from []mem.Block, copies []struct {
	d,
	s, n uint64
}) {
	const cell = 256 << 10
	a, z := rng.Perm(copyBytes / cell)[:n], rng.Perm(copyBytes / cell)[:n]
	cut := func(out []mem.Block, r *mem.Region, at uint64) []mem.Block {
		k := uint64(rng.IntN(cell + 1)) // 0 and all of it are cuts, too
		return append(out, mem.Block{Region: r, Off: at, Len: k}, mem.Block{Region: r, Off: at + k,
			Len: cell - k})
	}
	for i := range n {
		to, from = cut(to, dst, uint64(z[i]*cell)), cut(from, src, uint64(a[i]*cell))
		copies = append(copies, struct{ d, s, n uint64 }{uint64(z[i] * cell), uint64(a[i] * cell), cell})
	}
	return to, from, copies
}

// TestLanesContent: random lists, cut differently at both ends, arrive over several links in either
// direction, and no other byte changes. Lists of several GPUs and directions may be mixed.
func TestLanesContent(t *testing.T) {
	r := newCopyRig(t, 3)
	rng := rand.New(rand.NewPCG(11, 4))
	for round := range 12 {
		want := make([][]byte, 3)
		host := bytes.Clone(r.near)
		for k := range want {
			want[k] = bytes.Clone(r.far[k])
		}
		var to, from []mem.Block
		for _, k := range rng.Perm(3)[:1+round%3] {
			d, s, moved := cells(rng, r.gpu[k], r.host, 4+rng.IntN(12))
			if round%2 > 0 {
				d, s, moved = cells(rng, r.host, r.gpu[k], 4)
			}
			r.reach(t, d, s)
			r.threshold(t, k, 512<<10)
			to, from = append(to, d...), append(from, s...)
			for _, m := range moved {
				if round%2 > 0 {
					copy(host[m.d:][:m.n], r.far[k][m.s:])
				} else {
					copy(want[k][m.d:][:m.n], r.near[m.s:])
				}
			}
			if round%2 > 0 { // one at a time: two lists may name the same place of the host
				break
			}
		}
		if err := r.c.Carry(to, from); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(host, r.near) {
			t.Fatalf("round %d: host memory differs", round)
		}
		for k := range want {
			if !bytes.Equal(want[k], r.far[k]) {
				t.Fatalf("round %d: memory of GPU %d differs", round, k)
			}
		}
	}
	state := r.c.State()
	if len(state) != 3 {
		t.Fatalf("state of %d path sets, want 3", len(state))
	}
	for _, p := range state {
		if len(p.Links) != 3 || p.Links[0].GPU != p.GPU {
			t.Errorf("GPU %d: links %+v", p.GPU, p.Links)
		}
		for _, l := range p.Links {
			if l.InFlight != 0 || l.State == multipath.LinkMoves || l.State == multipath.LinkDead {
				t.Errorf("GPU %d at rest: %+v", p.GPU, l)
			}
		}
	}
}

// TestLanesOnlyBetweenHostAndGPU: other lists, and small pieces that kernels cannot move, are
// refused, and nothing is prepared for them.
func TestLanesOnlyBetweenHostAndGPU(t *testing.T) {
	r := newCopyRig(t, 2)
	other := gputest.Must(mem.NewAnonymous("other", copyBytes))(t)
	defer other.Release()
	lists := func(dst, src *mem.Region, piece, stride uint64) (to, from []mem.Block) {
		for off := uint64(0); off+piece <= copyBytes; off += stride {
			to, from = append(to, mem.Block{Region: dst, Off: off, Len: piece}),
				append(from, mem.Block{Region: src, Off: off, Len: piece})
		}
		return to, from
	}
	for name, c := range map[string]struct {
		dst, src      *mem.Region
		piece, stride uint64
	}{
		"host to host":            {r.host, other, 1 << 20, 1 << 20},
		"GPU to GPU":              {r.gpu[0], r.gpu[1], 1 << 20, 1 << 20},
		"within a GPU":            {r.gpu[0], r.gpu[0], 1 << 20, 1 << 20},
		"small and odd, to a GPU": {r.gpu[0], r.host, 16<<10 - 8, 32 << 10},
		"small and odd, from one": {r.host, r.gpu[0], 16<<10 - 8, 32 << 10},
	} {
		to, from := lists(c.dst, c.src, c.piece, c.stride)
		if r.c.Reaches(to, from) {
			t.Errorf("%s: links reach it", name)
		}
	}
	mixed, from := lists(r.gpu[0], r.host, 1<<20, 1<<20)
	mixed[1].Region = r.gpu[1]
	if r.c.Reaches(mixed, from) || r.c.Reaches(mixed[:2], from) || r.c.Reaches(nil, nil) {
		t.Error("lists of two GPUs, of different lengths, or of nothing, are taken")
	}
	beyond := []mem.Block{{Region: r.gpu[0], Off: copyBytes - 4096, Len: 1 << 20}}
	if r.c.Reaches(beyond, []mem.Block{{Region: r.host, Len: 1 << 20}}) || r.c.Carry(beyond,
		[]mem.Block{{Region: r.host, Len: 1 << 20}}) == nil {
		t.Error("blocks outside their region are taken")
	}
	if n := len(r.c.preparations.queued); n != 0 || len(r.c.State()) != 0 || r.c.windows != 0 {
		t.Errorf("%d things are wanted, %d path sets and %d windows made", n, len(r.c.State()),
			r.c.windows)
	}
	// And blocks that lie side by side are large together.
	to, from := lists(r.gpu[0], r.host, 16<<10, 16<<10)
	r.reach(t, to, from)
}

// TestLanesDoNotWait: while the driver pins, Reaches and copies of pinned memory go on. Forget
// waits for the driver.
func TestLanesDoNotWait(t *testing.T) {
	r := newCopyRig(t, 2)
	to, from := whole(r.gpu[0], r.host, 0, 1<<20)
	r.reach(t, to, from)
	r.p.slow = make(chan struct{})
	to2, from2 := whole(r.gpu[0], r.host, 2<<20, 1<<20)
	until(t, "the driver is at the second window", func() bool {
		if r.c.Reaches(to2, from2) {
			t.Fatal("Reaches returned true before the memory was pinned")
		}
		r.c.mu.Lock()
		defer r.c.mu.Unlock()
		return r.c.preparations.current != nil
	})
	if !r.c.Reaches(to, from) {
		t.Error("the first window is not reached any more")
	}
	if err := r.c.Carry(to, from); err != nil {
		t.Error(err)
	}
	gone := make(chan error, 1)
	go func() { gone <- r.c.Forget([]*mem.Region{r.host}) }()
	select {
	case <-gone:
		t.Error("Forget did not wait for the driver")
	case <-time.After(50 * time.Millisecond): // for what must not come
	}
	close(r.p.slow)
	if err := <-gone; err != nil {
		t.Error(err)
	}
	if r.c.windows != 0 || len(r.c.pins) != 0 {
		t.Errorf("%d windows of %d regions are pinned after Forget", r.c.windows, len(r.c.pins))
	}
	if err := r.c.Carry(to, from); err == nil {
		t.Error("memory that was forgotten is carried")
	}
}

// TestLanesRefused: memory that cannot be pinned is not tried again for each list. A peer's file
// with holes is not filled, and is only read.
func TestLanesRefused(t *testing.T) {
	r := newCopyRig(t, 2)
	foreign := func(n int) *mem.Region {
		owner := gputest.Must(mem.NewAnonymous("owner", copyBytes))(t)
		defer owner.Release()
		b, _ := owner.Bytes()
		for off := 0; off < n; off += 4096 {
			b[off] = byte(off >> 12)
		}
		fd := gputest.Must(unix.Dup(owner.FD()))(t)
		m := gputest.Must(mem.MapMemfd(mem.NewID(), fd, copyBytes, mem.ReadOnly()))(t)
		t.Cleanup(m.Release)
		return m
	}
	holes, full := foreign(1<<20), foreign(copyBytes)
	for range 3 {
		to, from := whole(r.gpu[0], holes, 0, 1<<20)
		if r.c.Reaches(to, from) {
			t.Fatal("a file with holes is pinned")
		}
		r.settle(t)
	}
	if !r.c.preparations.refused[holes] || r.c.windows != 0 {
		t.Errorf("%d windows are pinned, refused: %v", r.c.windows, r.c.preparations.refused)
	}
	to, from := whole(r.gpu[0], full, 0, copyBytes)
	r.reach(t, to, from)
	if err := r.c.Carry(to, from); err != nil {
		t.Fatal(err)
	}
	if b, _ := full.Bytes(); !bytes.Equal(b, r.far[0]) {
		t.Error("content differs")
	}
	if err := r.c.Forget([]*mem.Region{holes, full}); err != nil || len(r.c.preparations.refused) !=
		0 || r.c.windows != 0 {
		t.Errorf("after Forget: %v, %d refusals, %d windows", err, len(r.c.preparations.refused),
			r.c.windows)
	}
}

// TestLanesLinkDies: a relay that fails returns its chunks and is reported dead; the copy is
// complete.
func TestLanesLinkDies(t *testing.T) {
	for dies := range 3 {
		r := newCopyRig(t, 3)
		to, from := whole(r.gpu[0], r.host, 0, copyBytes)
		r.reach(t, to, from)
		p := r.threshold(t, 0, 1<<20)
		d := p.m.Devices()[dies].(*gputest.Device)
		d.Mu.Lock()
		d.FailAfter = 3
		d.Mu.Unlock()
		until(t, "it dies", func() bool {
			clear(r.far[0])
			if err := r.c.Carry(to, from); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(r.far[0], r.near) {
				t.Fatalf("link %d dies: content differs", dies)
			}
			return r.c.State()[0].Links[dies].State == multipath.LinkDead
		})
		l := r.c.State()[0].Links
		if l[dies].State != multipath.LinkDead || l[dies].Returned == 0 || l[dies].InFlight != 0 {
			t.Errorf("the dead link: %+v", l[dies])
		}
		if n := slices.IndexFunc(l, func(s multipath.LinkState) bool {
			return s.State ==
				multipath.LinkDead && s.GPU != dies
		}); n >= 0 {
			t.Errorf("link %d died, %+v", dies, l)
		}
	}
}

// TestLanesLinkHangs: while a relay may still write, Carry does not return, so that its guard is
// held. The other links do the rest, and later lists do not use the relay.
func TestLanesLinkHangs(t *testing.T) {
	r := newCopyRig(t, 3)
	const part = 3 << 20
	to, from := whole(r.gpu[0], r.host, 0, part)
	rest, restFrom := whole(r.gpu[0], r.host, part, copyBytes-part)
	r.reach(t, to, from)
	r.reach(t, rest, restFrom)
	p := r.threshold(t, 0, 1<<20)
	gate, first := make(chan struct{}), make(chan struct{})
	open, openFirst := sync.OnceFunc(func() { close(gate) }), sync.OnceFunc(func() { close(first) })
	t.Cleanup(func() { // before the rig's, which waits for all links
		open()
		openFirst()
	})
	p.m.Devices()[2].(*gputest.Device).Gate = gate
	for _, d := range p.m.Devices()[:2] { // they take what they can hold, and leave the relay the rest
		d.(*gputest.Device).Gate = first
	}
	done := make(chan error, 1)
	state := func(i int) multipath.LinkState { return p.m.Links()[i] }
	go func() { done <- r.c.Carry(to, from) }()
	until(t, "the relay holds something", func() bool { return state(2).InFlight > 0 })
	openFirst()
	until(t, "the others have done the rest, and the relay is silent", func() bool {
		return p.m.Waiting() == 0 && state(0).InFlight == 0 && state(1).InFlight == 0 &&
			state(2).State == multipath.LinkSilent
	})
	held := state(2).InFlight
	for range 3 {
		if err := r.c.Carry(rest, restFrom); err != nil {
			t.Fatal(err)
		}
	}
	if state(2).InFlight != held {
		t.Error("the silent relay has taken more")
	}
	select {
	case err := <-done:
		t.Fatalf("Carry returned, and a relay may still write: %v", err)
	default:
	}
	open()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(r.far[0], r.near) {
		t.Fatal("content differs")
	}
}

// TestLanesConcurrent: lists to every GPU at once, each relaying for the others, while regions come
// and go.
func TestLanesConcurrent(t *testing.T) {
	r := newCopyRig(t, 3)
	var wg sync.WaitGroup
	for k := range r.gpu {
		for w := range 2 {
			wg.Go(func() {
				for i := range 6 {
					h := gputest.Must(mem.NewAnonymous("lane", copyBytes))(t)
					b, _ := h.Bytes()
					_, _ = rand.NewChaCha8([32]byte{byte(k), byte(w), byte(i)}).Read(b)
					const half = copyBytes / 2 &^ 4095
					off := uint64(w) * half
					to, from := []mem.Block{{Region: r.gpu[k], Off: off, Len: half}},
						[]mem.Block{{Region: h, Off: 4096, Len: half}}
					until(t, "links reach it", func() bool { return r.c.Reaches(to, from) })
					if err := r.c.Carry(to, from); err != nil {
						t.Error(err)
					} else if !bytes.Equal(r.far[k][off:off+half], b[4096:4096+half]) {
						t.Errorf("GPU %d: content differs", k)
					}
					if err := r.c.Forget([]*mem.Region{h}); err != nil {
						t.Error(err)
					}
					h.Release()
				}
			})
		}
	}
	wg.Wait()
	r.settle(t)
	if r.c.windows != 0 {
		t.Errorf("%d windows are left", r.c.windows)
	}
}
