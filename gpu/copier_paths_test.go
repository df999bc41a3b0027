package gpu

import (
	"bytes"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/multipath"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// countedPlatform counts the bytes that are allocated on each GPU.
type countedPlatform struct {
	*gputest.Platform
	changed func(gpu int, bytes uint64) // after an allocation, and after memory is freed

	mu    sync.Mutex
	bytes []uint64
	sizes map[cuda.Ptr]uint64
}

type countedCard struct {
	*gputest.Card
	p *countedPlatform
}

type countedDevice struct {
	*gputest.Device
	c *countedCard
}

func (p *countedPlatform) Open(i int) (device.Card, error) {
	return &countedCard{&gputest.Card{Platform: p.Platform, Index: i}, p}, nil
}

func (c *countedCard) NewPacker() (device.Packer, error) {
	d, err := c.Card.NewPacker()
	if err != nil {
		return nil, err
	}
	return &countedDevice{d.(*gputest.Device), c}, nil
}

func (d *countedDevice) Alloc(n uint64) (cuda.Ptr, error) {
	at, err := d.Device.Alloc(n)
	if err == nil {
		d.c.p.count(d.c.Index, at, n)
	}
	return at, err
}

func (d *countedDevice) Free(at cuda.Ptr) error {
	err := d.Device.Free(at)
	if err == nil {
		d.c.p.count(d.c.Index, at, 0)
	}
	return err
}

// count notes that n bytes are now at an address.
func (p *countedPlatform) count(gpu int, at cuda.Ptr, n uint64) {
	p.mu.Lock()
	p.bytes[gpu] += n - p.sizes[at] // may wrap
	p.sizes[at] = n
	sum, f := p.bytes[gpu], p.changed
	p.mu.Unlock()
	if f != nil {
		f(gpu, sum)
	}
}

// relaysOf makes the paths to u where they are not made, and lists the GPUs that relay.
func relaysOf(t *testing.T, c *Copier, u *GPU) (m *multipath.Multipath, all []int) {
	t.Helper()
	p := gputest.Must(c.path(u))(t)
	defer p.mu.RUnlock()
	for _, r := range p.relays {
		all = append(all, r.index)
	}
	return p.m, all
}

// TestRelaysOfNewPathsCountOnce: where each GPU has room for the relay buffers of all others, all
// of them relay also when one comes later and is the first to copy. Buffers that replace others
// take their room and leave none meanwhile. The allocated memory never exceeds the limit.
func TestRelaysOfNewPathsCountOnce(t *testing.T) {
	const gpus = 4
	cfg := small()
	shape := copierShape{rigMin, rigMax, 4 * rigMin, 2 * rigMin, 1 << 20, 64 << 10}
	full := (gpus - 1) * shape.relayBytes()
	cfg.Memory = uint64(cfg.Slots)*SlotBytes + full
	p := &countedPlatform{Platform: gputest.NewPlatform(gpus), bytes: make([]uint64, gpus),
		sizes: map[cuda.Ptr]uint64{}}
	p.changed = func(gpu int, bytes uint64) {
		if bytes > cfg.Memory {
			t.Errorf("GPU %d: %d bytes are allocated, the limit is %d", gpu, bytes, cfg.Memory)
		}
	}
	g := gputest.Must(newGPUs(p, cfg))(t)
	c := newCopier(g, shape)
	var lent []*mem.Region
	var all []*GPU
	lend := func(i int) {
		h, _ := p.Lend(i, 1<<20, 0)
		r := gputest.Must(g.Import(mem.NewID(), h.Append(nil), -1, 1<<20))(t)
		lent, all = append(lent, r), append(all, r.Device().(*GPU))
	}
	for i := range gpus - 1 {
		lend(i)
	}
	for _, u := range all {
		relaysOf(t, c, u)
	}
	lend(gpus - 1)
	relaysOf(t, c, all[gpus-1])
	bounded := p.changed
	p.changed = func(gpu int, bytes uint64) {
		bounded(gpu, bytes)
		if held := all[gpu].budget.bytes(forRelays); gpu < gpus-1 && held != full {
			t.Errorf("GPU %d: %d bytes are reserved for relays while paths are replaced, want %d", gpu,
				held, full)
		}
	}
	for _, u := range all {
		relaysOf(t, c, u)
	}
	p.changed = bounded
	for i, u := range all {
		want := slices.DeleteFunc([]int{0, 1, 2, 3}, func(k int) bool { return k == i })
		if _, got := relaysOf(t, c, u); !slices.Equal(got, want) {
			t.Errorf("GPU %d is relayed to by %v, want %v", i, got, want)
		}
		if held := u.budget.bytes(forRelays); held != full || p.bytes[i] != cfg.Memory {
			t.Errorf("GPU %d: %d bytes for relays, want %d; %d allocated of %d", i, held, full,
				p.bytes[i], cfg.Memory)
		}
	}
	gputest.Must(0, c.Close())(t)
	for i, u := range all {
		if held := u.budget.bytes(forRelays); held != 0 {
			t.Errorf("GPU %d: %d bytes for relays after Close", i, held)
		}
		lent[i].Release()
	}
	gputest.Must(0, g.Close())(t)
}

// TestRelaysByConfiguration: with one engine alone, GPUs relay that the configuration names, the
// best ranks first and at most maxRelays. A GPU that is only open relays nothing.
func TestRelaysByConfiguration(t *testing.T) {
	const gpus = maxRelays + 4
	cfg := small()
	cfg.RelayRank = func(target, relay string) int {
		if target != "0000:1b:00.0" {
			t.Errorf("ranked for %s", target)
		}
		if relay < "0000:1e:00.0" { // GPUs 0 to 2
			return 1
		}
		return 0
	}
	p := gputest.NewPlatform(gpus)
	g := gputest.Must(newGPUs(p, cfg))(t)
	c := newCopier(g, copierShape{rigMin, rigMax, 4 * rigMin, 2 * rigMin, 1 << 20, 64 << 10})
	h, _ := p.Lend(0, 1<<20, 0)
	r := gputest.Must(g.Import(mem.NewID(), h.Append(nil), -1, 1<<20))(t)
	u := r.Device().(*GPU)
	check := func(want ...int) {
		t.Helper()
		if _, got := relaysOf(t, c, u); !slices.Equal(got, want) {
			t.Errorf("relays %v, want %v", got, want)
		}
	}
	gputest.Must(0, g.Use([]string{"1"}))(t)
	check()
	gputest.Must(0, g.Relay([]string{"2", "5"}))(t)
	check(5, 2)
	gputest.Must(0, g.Relay([]string{All}))(t)
	check(3, 4, 5, 6, 7, 8, 9)
	gputest.Must(0, c.Close())(t)
	r.Release()
	gputest.Must(0, g.Close())(t)
}

// TestRelayIsTriedAgain: a GPU without room for relay buffers, or whose buffers cannot be made,
// relays later, for copies and for lanes. Until then paths stay as they are.
func TestRelayIsTriedAgain(t *testing.T) {
	for name, lanes := range map[string]bool{"copies": false, "lanes": true} {
		t.Run(name, func(t *testing.T) {
			cfg := small()
			r := rigOf(t, &separateContexts{Platform: gputest.NewPlatform(3)}, cfg)
			at := time.Unix(1000, 0)
			r.g.now = func() time.Time { return at }
			u, relay := r.gpu[0].Device().(*GPU), r.gpu[1].Device().(*GPU)
			to, from := whole(r.gpu[0], r.host, 0, copyBytes)
			// look has the paths looked up again where that is due, by a copy or by a lane.
			look := func() (*multipath.Multipath, []int) {
				t.Helper()
				if !lanes {
					return relaysOf(t, r.c, u)
				}
				r.c.Reaches(to, from)
				r.settle(t)
				p := r.c.paths[u]
				p.mu.RLock()
				defer p.mu.RUnlock()
				var all []int
				for _, r := range p.relays {
					all = append(all, r.index)
				}
				return p.m, all
			}
			taken := relay.budget.limit - relay.budget.bytes(forStaging)
			gputest.Must(0, relay.budget.take(forPipelines, taken))(t)
			m, got := look()
			if !slices.Equal(got, []int{2}) {
				t.Fatalf("relays %v, want 2 alone", got)
			}
			at = at.Add(retryRelay)
			if n, got := look(); n != m || len(got) != 1 {
				t.Errorf("paths were replaced by the same ones: relays %v", got)
			}
			relay.budget.release(forPipelines, taken)
			at = at.Add(retryRelay - 1)
			if n, _ := look(); n != m {
				t.Error("tried again too early")
			}
			at = at.Add(1)
			r.p.Broken[2] = true
			if _, got := look(); len(got) != 0 || relay.budget.bytes(forRelays) != 0 {
				t.Errorf("a relay is broken: relays %v", got)
			}
			r.p.Broken[2] = false
			at = at.Add(retryRelay)
			m, got = look()
			if !slices.Equal(got, []int{1, 2}) {
				t.Errorf("relays %v, want 1 and 2", got)
			}
			at = at.Add(2 * retryRelay)
			if n, _ := look(); n != m {
				t.Error("paths with every relay were replaced")
			}
			r.reach(t, to, from)
			r.threshold(t, 0, 1<<20)
			if err := r.c.Carry(to, from); err != nil || !bytes.Equal(r.far[0], r.near) {
				t.Errorf("%v, or content differs", err)
			}
		})
	}
}

// TestTableWithWhatFits: where the limit leaves less than a measurement wants, it takes a part,
// and all of it is given back.
func TestTableWithWhatFits(t *testing.T) {
	shape := copierShape{rigMin, rigMax, 4 * rigMin, 2 * rigMin, 1 << 20, 64 << 10}
	for _, c := range []struct {
		room     uint64
		measured bool
	}{{4 * rigMin, true}, {4*rigMin - 1, true}, {2 * rigMin, true}, {2*rigMin - 1, false}} {
		cfg := small()
		cfg.Memory = uint64(cfg.Slots)*SlotBytes + shape.relayBytes()
		r := rigOf(t, &separateContexts{Platform: gputest.NewPlatform(2)}, cfg)
		u := r.gpu[0].Device().(*GPU)
		gputest.Must(0, u.budget.take(forPipelines, shape.relayBytes()-c.room))(t)
		m, relays := relaysOf(t, r.c, u)
		if n := m.Threshold(); len(relays) != 1 || c.measured != (n < multipath.DefaultThreshold) {
			t.Errorf("room for %d bytes: relays %v, every link from %d bytes", c.room, relays, n)
		}
		if n := u.budget.bytes(forMeasurement); n != 0 {
			t.Errorf("room for %d bytes: %d are held after the measurement", c.room, n)
		}
	}
	const mib = 1 << 20
	for room, want := range map[uint64]uint64{300: 256, 256: 256, 255: 128, 100: 64, 63: 32, 32: 32,
		31: 0, 0: 0} {
		u := &GPU{budget: budget{limit: room * mib}}
		n, err := NewCopier(nil).takeMeasurement(u)
		if n != want*mib || (err == nil) != (want > 0) || u.budget.bytes(forMeasurement) != n {
			t.Errorf("room for %d MiB: %d bytes, want %d MiB: %v", room, n, want, err)
		}
	}
}
