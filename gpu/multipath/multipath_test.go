package multipath

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net"
	"sync"
	"testing"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

const testMin, testMax = 32 << 10, 256 << 10

type rig struct {
	m    *gputest.Machine
	devs []*gputest.Device
	mp   *Multipath
	host cuda.Ptr
	dev  cuda.Ptr
	n    uint64
}

func newRig(t *testing.T, links int, n uint64) *rig {
	t.Helper()
	r := &rig{m: gputest.NewMachine(), n: n}
	var relays []device.Device
	for i := range links {
		d := r.m.Device()
		r.devs = append(r.devs, d)
		if i > 0 {
			relays = append(relays, d)
		}
	}
	r.host, r.dev = r.m.Alloc(n), r.m.Alloc(n)
	mp, err := NewSized(testMin, testMax, r.devs[0], relays...)
	if err != nil {
		t.Fatal(err)
	}
	mp.SetThreshold(testMin)
	r.mp = mp
	t.Cleanup(func() {
		if err := mp.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		for i, d := range r.devs {
			if d.Allocated != 0 {
				t.Errorf("device %d: %d allocations leaked", i, d.Allocated)
			}
		}
	})
	return r
}

func (r *rig) fill(p cuda.Ptr, seed uint64) []byte {
	b := r.m.At(p, r.n)
	rng := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)})
	rng.Read(b)
	return bytes.Clone(b)
}

// TestMultipathContent: every byte arrives, for all sizes, directions and numbers of links, and no
// other byte changes.
func TestMultipathContent(t *testing.T) {
	for _, links := range []int{1, 2, 4} {
		for _, n := range []uint64{1, 4096, testMin - 1, testMin, 3*testMin + 17, 20*testMax + 5} {
			for _, dir := range []device.Direction{device.HostToDevice, device.DeviceToHost} {
				r := newRig(t, links, n+64)
				from, to := r.host, r.dev
				if dir == device.DeviceToHost {
					from, to = to, from
				}
				want, before := r.fill(from, n), r.fill(to, n+1)
				if err := r.mp.Copy(dir, r.host+32, r.dev+32, n); err != nil {
					t.Fatal(err)
				}
				got := r.m.At(to, r.n)
				if !bytes.Equal(got[32:32+n], want[32:32+n]) {
					t.Fatalf("%d links, %d bytes, direction %d: content differs", links, n, dir)
				}
				if !bytes.Equal(got[:32], before[:32]) || !bytes.Equal(got[32+n:], before[32+n:]) {
					t.Fatalf("%d links, %d bytes, direction %d: bytes outside were touched", links, n, dir)
				}
			}
		}
	}
}

// TestMultipathThresholdAndYield: below the threshold relays are not used; above it only a relay
// whose GPU is busy is not.
func TestMultipathThresholdAndYield(t *testing.T) {
	r := newRig(t, 3, 40*testMax)
	r.mp.SetThreshold(20 * testMax)
	if err := r.mp.Copy(device.HostToDevice, r.host, r.dev, 10*testMax); err != nil {
		t.Fatal(err)
	}
	if r.devs[1].Copies+r.devs[2].Copies != 0 || r.devs[0].Copies != 1 {
		t.Fatalf("copies by link: %d %d %d, want 1 0 0", r.devs[0].Copies, r.devs[1].Copies,
			r.devs[2].Copies)
	}
	if err := r.mp.Yield(0, true); err != nil {
		t.Fatal(err)
	}
	// The direct link is held until the idle relay has done some work, so that the test does not
	// depend on timing.
	gate := make(chan struct{})
	r.devs[0].Gate = gate
	done := make(chan error, 1)
	go func() { done <- r.mp.Copy(device.HostToDevice, r.host, r.dev, 40*testMax) }()
	for {
		r.devs[2].Mu.Lock()
		n := r.devs[2].Copies
		r.devs[2].Mu.Unlock()
		if n > 0 {
			break
		}
	}
	close(gate)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if r.devs[1].Copies != 0 {
		t.Errorf("the busy relay made %d copies", r.devs[1].Copies)
	}
	if err := r.mp.Yield(2, true); err == nil {
		t.Error("Yield of a relay that does not exist succeeded")
	}
}

// TestMultipathLinkDies: a link that fails returns its chunks. The copy succeeds while one link is
// left, even a relay.
func TestMultipathLinkDies(t *testing.T) {
	for dies := range 3 {
		for _, after := range []int{0, 2} {
			for _, n := range []uint64{24 * testMax, testMax + 9} {
				r := newRig(t, 3, n)
				r.devs[dies].FailAfter = after
				if n < 20*testMax {
					r.mp.SetThreshold(1 << 40) // direct only, in one piece that fits no relay
				}
				for _, dir := range []device.Direction{device.HostToDevice, device.DeviceToHost} {
					from, to := r.host, r.dev
					if dir == device.DeviceToHost {
						from, to = to, from
					}
					want := r.fill(from, uint64(after))
					if err := r.mp.Copy(dir, r.host, r.dev, n); err != nil {
						t.Fatalf("link %d after %d copies: %v", dies, after, err)
					}
					if !bytes.Equal(r.m.At(to, n), want) {
						t.Fatalf("link %d after %d copies: content differs", dies, after)
					}
				}
			}
		}
	}
}

func TestMultipathAllLinksDie(t *testing.T) {
	r := newRig(t, 2, 20*testMax)
	r.devs[0].FailAfter, r.devs[1].FailAfter = 1, 1
	if err := r.mp.Copy(device.HostToDevice, r.host, r.dev, r.n); !errors.Is(err, gputest.ErrBroken) {
		t.Fatalf("Copy: %v, want the device's error", err)
	}
	if err := r.mp.Copy(device.HostToDevice, r.host, r.dev, r.n); err == nil {
		t.Fatal("Copy succeeded without a link")
	}
}

// TestMultipathConcurrent: many concurrent copies are exact, and Close ends later ones.
func TestMultipathConcurrent(t *testing.T) {
	const n, copies = 10 * testMax, 12
	r := newRig(t, 4, n*copies)
	want := r.fill(r.host, 7)
	var wg sync.WaitGroup
	for i := range copies {
		wg.Go(func() {
			if err := r.mp.Copy(device.HostToDevice, r.host+cuda.Ptr(i*n), r.dev+cuda.Ptr(i*n),
				n); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if !bytes.Equal(r.m.At(r.dev, r.n), want) {
		t.Fatal("content differs")
	}
	if err := r.mp.Close(); err != nil {
		t.Fatal(err)
	}
	if err := r.mp.Copy(device.HostToDevice, r.host, r.dev, 1); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("Copy after Close: %v", err)
	}
}

// closes is a device without queues that notes whether it was closed.
type closes struct {
	*gputest.Device
	closed bool
}

func (d *closes) NewQueue() (device.Queue, error) { return nil, gputest.ErrBroken }

func (d *closes) Close() error {
	d.closed = true
	return d.Device.Close()
}

// TestNewFails: when a link cannot be made, the devices of all links are closed.
func TestNewFails(t *testing.T) {
	m := gputest.NewMachine()
	a, b := &closes{Device: m.Device()}, &closes{Device: m.Device()}
	if _, err := New(a, b); !errors.Is(err, gputest.ErrBroken) || !a.closed || !b.closed {
		t.Errorf("%v; closed: %v, %v", err, a.closed, b.closed)
	}
}
