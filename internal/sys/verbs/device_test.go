package verbs_test

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/testutil"
)

const patience = 20 * time.Second

// open opens one end of a rail of the guest that test/rdma makes.
func open(t *testing.T, name string) verbs.Device {
	t.Helper()
	d, err := verbs.Open(verbs.Config{Device: name, GIDIndex: verbs.AutoGID,
		Timer: verbs.DefaultTimer + 4, Retries: verbs.DefaultRetries})
	if errors.Is(err, verbs.ErrNotSupported) || err != nil && strings.Contains(err.Error(),
		"has no port") {
		testutil.Skip(t, "rdma", err.Error())
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

type end struct {
	t   *testing.T
	d   verbs.Device
	p   verbs.Domain
	cq  verbs.CompletionQueue
	q   verbs.QueuePair
	m   verbs.Memory
	mem []byte
}

func newEnd(t *testing.T, name string) *end {
	return newEndOn(t, open(t, name))
}

func newEndOn(t *testing.T, d verbs.Device) *end {
	e := &end{t: t, d: d}
	var err error
	if e.p, err = e.d.NewDomain(); err != nil {
		t.Fatal(err)
	}
	if e.cq, err = e.d.NewCompletionQueue(256); err != nil {
		t.Fatal(err)
	}
	if e.q, err = e.p.NewQueuePair(e.cq, 128, 32); err != nil {
		t.Fatal(err)
	}
	if e.mem, err = unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		t.Fatal(err)
	}
	if e.m, err = e.p.Register(e.mem, true); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(e.m.Close(), e.q.Close(), e.cq.Close(), e.p.Close(),
			unix.Munmap(e.mem)); err != nil {
			t.Error(err)
		}
	})
	return e
}

func (e *end) connect(o *end) {
	e.t.Helper()
	if err := errors.Join(e.q.ToInit(), e.q.ToReadyToReceive(o.q.Address()),
		e.q.ToReadyToSend()); err != nil {
		e.t.Fatal(err)
	}
}

// wait takes n completions.
func (e *end) wait(n int) (all []verbs.Completion) {
	e.t.Helper()
	deadline := time.After(patience)
	var buf [64]verbs.Completion
	for len(all) < n {
		k, err := e.cq.Poll(buf[:])
		if err != nil {
			e.t.Fatal(err)
		}
		all = append(all, buf[:k]...)
		if k > 0 {
			continue
		}
		select {
		case <-e.cq.Ready():
		case <-deadline:
			e.t.Fatalf("%d of %d completions: %+v", len(all), n, all)
		}
	}
	return all
}

func rail(t *testing.T) (a, b *end) {
	a, b = newEnd(t, "r0a"), newEnd(t, "r0b")
	a.connect(b)
	b.connect(a)
	for i := range a.mem {
		a.mem[i] = byte(i * 7)
	}
	return a, b
}

func work(a, b *end, id uint64, off, n uint32) verbs.Work {
	return verbs.Work{ID: id, Op: verbs.Write, LocalAddr: a.m.Addr() + uint64(off),
		LocalKey: a.m.LocalKey(), Len: n,
		RemoteAddr: b.m.Addr() + uint64(off), RemoteKey: b.m.RemoteKey(), Signaled: true}
}

// TestWrite moves a batch of more requests than one call of the library takes, and the immediate
// behind them.
func TestWrite(t *testing.T) {
	a, b := rail(t)
	if err := b.q.PostReceive([]uint64{77}); err != nil {
		t.Fatal(err)
	}
	var batch []verbs.Work
	for i := range uint32(100) {
		w := work(a, b, uint64(i), i*8192, 8192)
		w.Signaled = i == 99
		batch = append(batch, w)
	}
	small := work(a, b, 100, 100*8192, 32)
	small.Inline = 32 <= a.q.MaxInline()
	imm := verbs.Work{ID: 101, Op: verbs.WriteImm, Imm: 7<<16 | 3, Signaled: true}
	if _, err := a.q.PostSend(append(batch, small, imm)); err != nil {
		t.Fatal(err)
	}
	if got := b.wait(1)[0]; got.ID != 77 || got.Imm != 7<<16|3 || got.Op != verbs.Receive ||
		got.Status != verbs.OK {
		t.Fatalf("%+v", got)
	}
	if !bytes.Equal(a.mem[:100*8192+32], b.mem[:100*8192+32]) {
		t.Fatal("the immediate came before the bytes")
	}
	got := a.wait(3)
	for i, id := range []uint64{99, 100, 101} {
		if got[i].ID != id || got[i].Status != verbs.OK {
			t.Fatalf("%+v", got)
		}
	}
}

func TestWrongKey(t *testing.T) {
	a, b := rail(t)
	w := work(a, b, 1, 0, 4096)
	w.RemoteKey ^= 0x5555
	if _, err := a.q.PostSend([]verbs.Work{w, work(a, b, 2, 0, 4096)}); err != nil {
		t.Fatal(err)
	}
	got := a.wait(2)
	if got[0].Status != verbs.RemoteAccess || got[1].Status != verbs.Flushed {
		t.Fatalf("%+v", got)
	}
	for _, c := range b.mem {
		if c != 0 {
			t.Fatal("bytes came through a wrong key")
		}
	}
}

// TestForeignDomain: a key of another domain of the same device is worth nothing, whichever queue
// pair has learned it.
func TestForeignDomain(t *testing.T) {
	a, b := rail(t)
	other := newEndOn(t, b.d)
	if _, err := a.q.PostSend([]verbs.Work{work(a, other, 1, 0, 4096)}); err != nil {
		t.Fatal(err)
	}
	if got := a.wait(1)[0]; got.Status != verbs.RemoteAccess {
		t.Fatalf("%+v", got)
	}
	if !bytes.Equal(other.mem, make([]byte, len(other.mem))) {
		t.Fatal("bytes came through another domain's key")
	}
	if err := other.p.Close(); err == nil {
		t.Error("a domain was given back with a queue pair and memory in it")
	}
	if err := other.d.Close(); err == nil {
		t.Error("a device was closed with a domain on it")
	}
}

// again makes both ends of a rail new.
func again(t *testing.T, a, b *end) {
	t.Helper()
	if err := errors.Join(a.q.ToReset(), b.q.ToReset()); err != nil {
		t.Fatal(err)
	}
	a.connect(b)
	b.connect(a)
}

// TestReceiverStops: after the receiver's error state and its flush, nothing arrives, whatever the
// sender posts.
func TestReceiverStops(t *testing.T) {
	a, b := rail(t)
	var batch []verbs.Work
	for i := range uint32(100) {
		batch = append(batch, work(a, b, uint64(i), i*8192, 8192))
	}
	stopped := false
	// where a processor is shared, all of it may have arrived before the stop
	for attempt := 0; !stopped && attempt < 20; attempt++ {
		if err := b.q.PostReceive([]uint64{5}); err != nil {
			t.Fatal(err)
		}
		if _, err := a.q.PostSend(batch); err != nil {
			t.Fatal(err)
		}
		if err := b.q.ToError(); err != nil {
			t.Fatal(err)
		}
		if got := b.wait(1)[0]; got.ID != 5 || got.Status != verbs.Flushed {
			t.Fatalf("%+v", got)
		}
		clear(b.mem)
		got := a.wait(len(batch))
		for _, c := range b.mem {
			if c != 0 {
				t.Fatal("bytes came after the flush")
			}
		}
		switch last := got[len(got)-1].Status; last {
		case verbs.Flushed, verbs.RetryExceeded:
			stopped = true
		case verbs.OK:
		default:
			t.Fatalf("%s", last)
		}
		again(t, a, b)
	}
	if !stopped {
		t.Fatal("everything had arrived before each stop: this proves nothing")
	}
	// The same queue pairs work again after a reset of both.
	if _, err := a.q.PostSend([]verbs.Work{work(a, b, 7, 0, 8192)}); err != nil {
		t.Fatal(err)
	}
	if got := a.wait(1)[0]; got.ID != 7 || got.Status != verbs.OK || !bytes.Equal(a.mem[:8192],
		b.mem[:8192]) {
		t.Fatalf("%+v", got)
	}
}

func TestKeyRevoked(t *testing.T) {
	a, b := rail(t)
	if err := b.m.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.q.PostSend([]verbs.Work{work(a, b, 1, 0, 4096)}); err != nil {
		t.Fatal(err)
	}
	if got := a.wait(1)[0]; got.Status != verbs.RemoteAccess {
		t.Fatalf("%+v", got)
	}
}

// domainOf makes a domain for one test.
func domainOf(t *testing.T, d verbs.Device) verbs.Domain {
	t.Helper()
	p, err := d.NewDomain()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func TestRefusedSetUp(t *testing.T) {
	d := open(t, "r0a")
	p := domainOf(t, d)
	cq, err := d.NewCompletionQueue(16)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := cq.Close(); err != nil {
			t.Error(err)
		}
	}()
	if _, err := p.NewQueuePair(cq, 1<<30, 1); !errors.Is(err, verbs.ErrFull) ||
		!strings.Contains(err.Error(),
			fmt.Sprintf("1073741824 sends and 1 receives with r0a: 1 to %d each", d.Limits().MaxWork)) {
		t.Errorf("a queue pair beyond the device: %v", err)
	}
	if _, err := d.NewCompletionQueue(1 << 30); !errors.Is(err, verbs.ErrFull) ||
		!strings.Contains(err.Error(), fmt.Sprintf("of 1073741824 with r0a: 1 to %d",
			d.Limits().MaxCompletions)) {
		t.Errorf("a completion queue beyond the device: %v", err)
	}
	if l := d.Limits(); l.MaxRegistrations < 1 || l.MaxQueuePairs < 1 {
		t.Errorf("a device without room for anything: %+v", l)
	}
	q, err := p.NewQueuePair(cq, 8, 8)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := q.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := q.ToInit(); err != nil {
		t.Fatal(err)
	}
	good := q.Address()
	for what, lie := range map[string]func(*verbs.Address){
		"another type of GID": func(a *verbs.Address) { a.Type = verbs.GIDRoCEv1 },
		"no GID":              func(a *verbs.Address) { a.GID = [16]byte{} },
		"an IPv6 GID":         func(a *verbs.Address) { a.GID[0] = 0x20 },
		"a multicast GID":     func(a *verbs.Address) { a.GID[12] = 224 },
		"no MTU":              func(a *verbs.Address) { a.MTU = 0 },
		"a long queue pair":   func(a *verbs.Address) { a.QP = 1 << 24 },
	} {
		bad := good
		lie(&bad)
		if err := q.ToReadyToReceive(bad); err == nil {
			t.Errorf("%s was taken", what)
		}
	}
	if _, err := q.PostSend([]verbs.Work{{}}); err == nil {
		t.Error("a request was taken in INIT")
	}
}

// TestMemlock: a registration beyond the limit names the limit and how to raise it.
func TestMemlock(t *testing.T) {
	p := domainOf(t, open(t, "r0a"))
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
		t.Fatal(err)
	}
	low := unix.Rlimit{Cur: 64 << 10, Max: old.Max}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &low); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old) }()
	// Root is exempt through CAP_IPC_LOCK: drop it for this thread's life.
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		t.Fatal(err)
	}
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its capabilities
		less := caps
		less[0].Effective &^= 1 << unix.CAP_IPC_LOCK
		if err := unix.Capset(&hdr, &less[0]); err != nil {
			result <- err
			return
		}
		mem, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err == nil {
			_, err = p.Register(mem, true)
		}
		result <- err
	}()
	if err := <-result; err == nil || !strings.Contains(err.Error(), "ulimit -l unlimited") {
		t.Errorf("%v", err)
	}
}
