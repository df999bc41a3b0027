package gpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/multipath"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// TestCopierContent: random lists arrive on every path, and no other byte changes.
func TestCopierContent(t *testing.T) {
	for _, gpus := range []int{1, 3} {
		t.Run(fmt.Sprint(gpus, " GPUs"), func(t *testing.T) {
			r := newCopyRig(t, gpus)
			rng := rand.New(rand.NewPCG(3, uint64(gpus)))
			seen := map[string]int{}
			for i := range 18 {
				k := rng.IntN(gpus)
				r.threshold(t, k, 1<<20)
				cell := []int{2 << 10, 16 << 10, 512 << 10}[i%3]
				n := 1 + rng.IntN(copyBytes/cell)
				a, z := rng.Perm(copyBytes / cell)[:n], rng.Perm(copyBytes / cell)[:n]
				if i%4 == 0 { // side by side
					for j := range n {
						a[j], z[j] = j, j
					}
				}
				src, dst, sb, db := r.host, r.gpu[k], r.near, r.far[k]
				if i%2 == 0 {
					src, dst, sb, db = dst, src, db, sb
				}
				want := bytes.Clone(db)
				var from, to []mem.Block
				for j := range n {
					size := uint64(cell)
					if rng.IntN(2) == 0 && i%4 != 0 {
						size = 1 + uint64(rng.IntN(cell))
					}
					if i%4 == 1 {
						size = (size + device.Align - 1) &^ (device.Align - 1)
					}
					from = append(from, mem.Block{Region: src, Off: uint64(a[j] * cell), Len: size})
					to = append(to, mem.Block{Region: dst, Off: uint64(z[j] * cell), Len: size})
					copy(want[z[j]*cell:][:size], sb[a[j]*cell:][:size])
				}
				path, err := r.c.Copy(to, from)
				if err != nil {
					t.Fatal(err)
				}
				seen[path]++
				if !bytes.Equal(db, want) {
					t.Fatalf("copy %d by %s: content differs", i, path)
				}
			}
			ways := []string{PathStaged, PathPacked, PathDirect, PathMultipath}
			if gpus == 1 {
				ways = ways[:3]
			}
			for _, path := range ways {
				if seen[path] == 0 {
					t.Errorf("nothing went the way %q: %v", path, seen)
				}
			}
			if gpus == 1 && seen[PathMultipath] > 0 {
				t.Errorf("one GPU has several links: %v", seen)
			}
		})
	}
}

func TestCopierBetweenGPUs(t *testing.T) {
	r := newCopyRig(t, 2)
	to, from := whole(r.gpu[1], r.gpu[0], 100, copyBytes-200)
	if path, err := r.c.Copy(to, from); path != PathPeer || err != nil {
		t.Fatal(path, err)
	}
	if !bytes.Equal(r.far[1][100:copyBytes-100], r.far[0][100:copyBytes-100]) {
		t.Fatal("content differs")
	}
}

// TestCopierYields: a relay with work of its own gets no chunks until that work ends.
func TestCopierYields(t *testing.T) {
	r := newCopyRig(t, 3)
	p := r.threshold(t, 0, 1<<20)
	to, from := whole(r.gpu[0], r.host, 0, copyBytes)
	// GPU 0 is the target, the others follow in order
	relay := func(gpu int) *gputest.Device { return p.m.Devices()[gpu].(*gputest.Device) }
	// The target's own link is held, so that the relays' share does not depend on who is faster.
	gate := make(chan struct{})
	relay(0).Gate = gate
	own := r.gpu[1].Device().(*GPU)
	slot := <-own.slots
	before := [3]int{copies(relay(0)), copies(relay(1)), copies(relay(2))}
	done := make(chan error, 1)
	go func() {
		_, err := r.c.Copy(to, from)
		done <- err
	}()
	for limit := time.Now().Add(patience); copies(relay(2)) == before[2]; runtime.Gosched() {
		if time.Now().After(limit) {
			t.Fatal("the idle relay did nothing")
		}
	}
	if n := copies(relay(1)); n != before[1] {
		t.Errorf("the busy relay made %d copies", n-before[1])
	}
	own.slots <- slot
	close(gate)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	// A copy of its own is as good a reason as a slot.
	to2, from2 := whole(r.gpu[1], r.host, 0, copyBytes)
	r.threshold(t, 1, 1<<40)
	if _, err := r.c.Copy(to2, from2); err != nil {
		t.Fatal(err)
	}
	q := r.c.paths[own]
	q.active.Add(1)
	before[1] = copies(relay(1))
	if _, err := r.c.Copy(to, from); err != nil {
		t.Fatal(err)
	}
	q.active.Add(-1)
	if n := copies(relay(1)); n != before[1] {
		t.Errorf("the relay with a copy of its own made %d copies", n-before[1])
	}
	r.c.yield(p)
	if p.m.Links()[1].State == multipath.LinkYields {
		t.Error("the relay is busy for ever")
	}
}

// TestCopierOfSeveralRegions: each relay reaches each region at the address in its own context.
func TestCopierOfSeveralRegions(t *testing.T) {
	r := newCopyRig(t, 3)
	p := r.threshold(t, 0, 1<<20)
	gate := make(chan struct{}) // the target's own link does nothing until the relays have
	p.m.Devices()[0].(*gputest.Device).Gate = gate
	release := sync.OnceFunc(func() { close(gate) })
	defer release()
	h, b := r.p.lend(0, copyBytes, 4096)
	other := gputest.Must(r.g.Import(mem.NewID(), h.Append(nil), -1, copyBytes-4096))(t)
	defer other.Release()
	const n = copyBytes / 4
	var to, from []mem.Block
	for i, at := range []uint64{0, n, 2 * n} { // pieces of both regions in turn, cut at windows
		to = append(to, mem.Block{Region: r.gpu[0], Off: at, Len: n / 2},
			mem.Block{Region: other, Off: at, Len: n / 2})
		from = append(from, mem.Block{Region: r.host, Off: at + uint64(i), Len: n / 2},
			mem.Block{Region: r.host, Off: at + n/2 + uint64(i), Len: n / 2})
	}
	done := make(chan error, 1)
	go func() {
		_, err := r.c.Copy(to, from)
		done <- err
	}()
	until(t, "relays copy more than one region's blocks", func() bool {
		l := p.m.Links()
		return l[1].Bytes+l[2].Bytes > 3*n/2
	})
	release()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	for i := range to {
		got := r.far[0]
		if to[i].Region == other {
			got = b
		}
		if !bytes.Equal(got[to[i].Off:][:to[i].Len], r.near[from[i].Off:][:from[i].Len]) {
			t.Errorf("block %d: content differs", i)
		}
	}
}

// TestCopierPin: it pins all windows of a copy, and none after the end of its context.
func TestCopierPin(t *testing.T) {
	r := newCopyRig(t, 1)
	to, from := whole(r.gpu[0], r.host, 0, copyBytes)
	ctx, cancel := context.WithCancel(t.Context())
	r.p.slow = make(chan struct{})
	pinned := make(chan struct{})
	go func() {
		defer close(pinned)
		r.c.Pin(ctx, to, from)
	}()
	r.p.slow <- struct{}{}
	until(t, "a pinned window", func() bool {
		r.c.mu.Lock()
		defer r.c.mu.Unlock()
		return r.c.windows == 2
	})
	cancel()
	r.p.slow <- struct{}{} // it was begun
	<-pinned
	close(r.p.slow)
	if r.c.windows != 2 {
		t.Errorf("%d windows", r.c.windows)
	}
	r.c.Pin(t.Context(), to, from)
	if r.c.windows != 5 {
		t.Errorf("%d windows of 1 MiB, want 5", r.c.windows)
	}
}

// TestCopierForget: a forgotten region leaves no pin and no import, and other regions work on.
func TestCopierForget(t *testing.T) {
	r := newCopyRig(t, 2)
	r.threshold(t, 0, 1<<20)
	to, from := whole(r.gpu[0], r.host, 0, copyBytes)
	for range 2 {
		if path, err := r.c.Copy(to, from); path != PathMultipath || err != nil {
			t.Fatal(path, err)
		}
		if r.c.windows != 5 || r.p.Mapped != 3 {
			t.Fatalf("%d windows of 1 MiB and %d imports, want 5 and 3", r.c.windows, r.p.Mapped)
		}
		all := []*mem.Region{r.gpu[0], r.host}
		if err := r.c.Forget(all); err != nil {
			t.Fatal(err)
		}
		if r.c.windows != 0 || r.p.Mapped != 2 {
			t.Fatalf("%d windows and %d imports after Forget, want 0 and 2", r.c.windows, r.p.Mapped)
		}
	}
}

// TestCopierForgetWaitsAlone: while the driver unmaps a forgotten region, no other call waits for
// it.
func TestCopierForgetWaitsAlone(t *testing.T) {
	r := newCopyRig(t, 2)
	r.threshold(t, 0, 1<<20)
	to, from := whole(r.gpu[0], r.host, 0, 1<<20)
	r.reach(t, to, from)
	h, b := r.p.lend(0, copyBytes, 0)
	other := gputest.Must(r.g.Import(mem.NewID(), h.Append(nil), -1, copyBytes))(t)
	defer other.Release()
	to2, from2 := whole(other, r.host, 0, 1<<20)
	r.reach(t, to2, from2)
	r.p.slowUnmap = make(chan struct{})
	gone := make(chan error, 1)
	go func() { gone <- r.c.Forget([]*mem.Region{r.gpu[0]}) }()
	until(t, "the import is taken out", func() bool {
		p := r.c.paths[r.gpu[0].Device().(*GPU)]
		p.importing.Lock()
		defer p.importing.Unlock()
		return len(p.imported) == 1
	})
	goes := make(chan error, 1)
	go func() {
		r.c.State()
		if !r.c.Reaches(to2, from2) {
			t.Error("other memory is not reached any more")
		}
		goes <- r.c.Carry(to2, from2)
	}()
	select {
	case err := <-goes:
		if err != nil || !bytes.Equal(b[:1<<20], r.near[:1<<20]) {
			t.Errorf("other memory: %v, or content differs", err)
		}
	case <-time.After(patience):
		t.Error("others wait for the driver, too")
	}
	select {
	case <-gone:
		t.Error("Forget did not wait for the driver")
	default:
	}
	close(r.p.slowUnmap)
	if err := <-gone; err != nil {
		t.Error(err)
	}
}

// TestCopierWithoutPins: where memory cannot be pinned, copies use staging slots.
func TestCopierWithoutPins(t *testing.T) {
	r := newCopyRig(t, 2)
	r.p.noRegister = true
	to, from := whole(r.gpu[0], r.host, 0, copyBytes)
	if path, err := r.c.Copy(to, from); path != PathStaged || err != nil {
		t.Fatal(path, err)
	}
	if !bytes.Equal(r.far[0], r.near) {
		t.Fatal("content differs")
	}
}

// TestCopierGrows: a new GPU relays later copies.
func TestCopierGrows(t *testing.T) {
	r := newCopyRig(t, 1)
	r.p.Count = 2
	g2 := gputest.Must(newGPUs(r.p, small()))(t)
	c := newCopier(g2, r.c.shape)
	h, b := r.p.lend(0, copyBytes, 0)
	one := gputest.Must(g2.Import(mem.NewID(), h.Append(nil), -1, copyBytes))(t)
	r.p.Devices = append(r.p.Devices, nil)
	defer func() {
		if err := errors.Join(c.Close(), g2.Close()); err != nil {
			t.Error(err)
		}
	}()
	to, from := whole(one, r.host, 0, copyBytes)
	if path, err := c.Copy(to, from); path != PathDirect || err != nil {
		t.Fatal(path, err)
	}
	h2, _ := r.p.lend(1, 1<<20, 0)
	two := gputest.Must(g2.Import(mem.NewID(), h2.Append(nil), -1, 1<<20))(t)
	p := gputest.Must(c.path(one.Device().(*GPU)))(t)
	p.m.SetThreshold(1)
	p.mu.RUnlock()
	clear(b)
	if path, err := c.Copy(to, from); path != PathMultipath || err != nil {
		t.Fatal(path, err)
	}
	if !bytes.Equal(b, r.near) {
		t.Fatal("content differs")
	}
	if err := c.Forget([]*mem.Region{one, two, r.host}); err != nil {
		t.Fatal(err)
	}
	one.Release()
	two.Release()
}

// TestCopierConcurrent: concurrent copies to every GPU are exact, each relaying for the others, and
// Close ends later ones.
func TestCopierConcurrent(t *testing.T) {
	r := newCopyRig(t, 3)
	for k := range r.gpu {
		r.threshold(t, k, 1<<20)
	}
	var wg sync.WaitGroup
	for k := range r.gpu {
		wg.Go(func() {
			for range 4 {
				to, from := whole(r.gpu[k], r.host, 0, copyBytes)
				if _, err := r.c.Copy(to, from); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for k := range r.gpu {
		if !bytes.Equal(r.far[k], r.near) {
			t.Errorf("GPU %d: content differs", k)
		}
	}
	if err := r.c.Close(); err != nil {
		t.Fatal(err)
	}
	to, from := whole(r.gpu[0], r.host, 0, copyBytes)
	if _, err := r.c.Copy(to, from); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("Copy after Close: %v", err)
	}
}

// TestCopierBounds: blocks outside their regions, and lists of different lengths, move nothing.
func TestCopierBounds(t *testing.T) {
	r := newCopyRig(t, 1)
	before := bytes.Clone(r.far[0])
	for _, n := range []uint64{copyBytes, 1 << 63} {
		to, from := whole(r.gpu[0], r.host, 1, n)
		if _, err := r.c.Copy(to, from); !errors.Is(err, mem.ErrBounds) {
			t.Errorf("%d bytes at 1: %v", n, err)
		}
	}
	to, from := whole(r.gpu[0], r.host, 0, 8)
	if _, err := r.c.Copy(to, append(from, from...)); !errors.Is(err, mem.ErrBounds) {
		t.Errorf("two blocks to one: %v", err)
	}
	if _, err := r.c.Copy(from, from); err == nil {
		t.Error("a copy without a GPU succeeded")
	}
	if !bytes.Equal(before, r.far[0]) {
		t.Error("something was written")
	}
}

// TestRelaysWithinTheLimit: buffers of relays count, a GPU without room relays nothing, and a GPU
// of which no engine has lent memory is no relay.
func TestRelaysWithinTheLimit(t *testing.T) {
	for _, room := range []bool{true, false} {
		cfg := small()
		shape := copierShape{maxChunk: rigMax}
		cfg.Memory = uint64(cfg.Slots)*SlotBytes + 4*rigMin // for the measurement
		if room {
			cfg.Memory += shape.relayBytes()
		}
		r := rigOf(t, &separateContexts{Platform: gputest.NewPlatform(2)}, cfg)
		p := r.threshold(t, 0, 1<<20)
		held := r.gpu[1].Device().(*GPU).budget.bytes(forRelays)
		if want := shape.relayBytes(); room && (len(p.relays) != 1 || held != want) || !room &&
			(len(p.relays) != 0 || held != 0) {
			t.Errorf("room %v: %d relays hold %d bytes", room, len(p.relays), held)
		}
		to, from := whole(r.gpu[0], r.host, 0, copyBytes)
		if _, err := r.c.Copy(to, from); err != nil || !bytes.Equal(r.far[0], r.near) {
			t.Errorf("room %v: %v, or content differs", room, err)
		}
	}
	r := newCopyRig(t, 1)
	r.p.Count = 2
	r.p.Devices = append(r.p.Devices, nil)
	r.g.ids = append(r.g.ids, gputest.UUID(1))
	gputest.Must(0, r.g.Use([]string{All}))(t)
	if p := r.threshold(t, 0, 1<<20); len(p.relays) != 0 {
		t.Error("a GPU that is only open relays")
	}
}
