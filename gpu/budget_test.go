package gpu

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/peercopy"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// TestNamedGPUsAreTakenAtOnce: named GPUs are opened, with staging, before memory of them is
// imported; others are not.
func TestNamedGPUsAreTakenAtOnce(t *testing.T) {
	t.Parallel()
	named := func(i int) string {
		id := gputest.UUID(i)
		return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
	}
	for _, c := range []struct {
		names []string
		want  []int
	}{{[]string{All}, []int{0, 1, 2}}, {[]string{"2", "0"}, []int{0, 2}}, {[]string{named(1), "1"},
		[]int{1}}, {nil, nil}} {
		p := gputest.NewPlatform(3)
		cfg := small()
		g := gputest.Must(newGPUs(p, cfg))(t)
		if err := g.Use(c.names); err != nil {
			t.Fatal(err)
		}
		var got []int
		for _, m := range g.Memory() {
			got = append(got, m.GPU)
			if m.Staging != uint64(cfg.Slots)*SlotBytes || m.Pipelines != 0 || m.PinnedBytes == 0 ||
				m.Limit != defaultMemory {
				t.Errorf("%v: %+v", c.names, m)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%v opened %v, want %v", c.names, got, c.want)
		}
		for i := range 3 {
			if open := p.OnDevice(i) > 0; open != slices.Contains(c.want, i) {
				t.Errorf("%v: GPU %d: memory is allocated: %v", c.names, i, open)
			}
		}
		if len(c.want) > 0 { // the first import finds it open
			before := p.OnDevice(c.want[0])
			h, _ := p.Lend(c.want[0], 4096, 0)
			gputest.Must(g.Import(mem.NewID(), h.Append(nil), -1, 4096))(t).Release()
			if after := p.OnDevice(c.want[0]); after != before {
				t.Errorf("%v: %d allocations before the import, %d after it", c.names, before, after)
			}
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		if g.Memory() != nil {
			t.Error("memory is held after Close")
		}
	}
}

func TestGPUsThatAreNotThere(t *testing.T) {
	t.Parallel()
	p := gputest.NewPlatform(2)
	p.Broken[1] = true
	g := gputest.Must(newGPUs(p, small()))(t)
	for name, want := range map[string]string{
		"7": "no GPU 7: the driver lists 2",
		"GPU-00000000-0000-0000-0000-000000000000": "name one that nvidia-smi -L lists",
		"GPU-zz": "name one that nvidia-smi -L lists",
		"1":      "open GPU 1",
	} {
		if err := g.Use([]string{name}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", name, err, want)
		}
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}

// TestMemoryOfAGPUIsBounded: with any limit bytes arrive, by two pipelines, by one or through host
// memory. The reported memory is what is allocated, and never exceeds the limit.
func TestMemoryOfAGPUIsBounded(t *testing.T) {
	t.Parallel()
	cfg := small()
	staging, one := uint64(cfg.Slots)*SlotBytes, peercopy.Bytes(cfg.PeerStage)
	within := peercopy.WithinBytes()
	for _, c := range []struct {
		same       bool
		room, want uint64 // beside staging
	}{
		{true, 2 * within, 2 * within}, {true, 2*within - 1, within}, {true, within - 1, 0}, {true, 0, 0},
		{false, 2 * one, 2 * one}, {false, 2*one - 1, one}, {false, one - 1, 0},
	} {
		cfg.Memory = staging + c.room
		p := gputest.NewPlatform(2)
		g := gputest.Must(newGPUs(p, cfg))(t)
		const size = 1 << 20
		to := 1
		if c.same {
			to = 0
		}
		var regions []*mem.Region
		var content [][]byte
		for _, i := range []int{0, to} {
			h, b := p.Lend(i, size, 0)
			regions, content = append(regions, gputest.Must(g.Import(mem.NewID(), h.Append(nil), -1,
				size))(t)), append(content, b)
		}
		_, _ = rand.Read(content[0])
		var src, dst []mem.Block
		for off := uint64(0); off < size; off += 8 << 10 {
			src = append(src, mem.Block{Region: regions[0], Off: off, Len: 4 << 10})
			dst = append(dst, mem.Block{Region: regions[1], Off: size - off - 8<<10, Len: 4 << 10})
		}
		if err := mem.DeviceOf(src).Move(dst, src); err != nil {
			t.Fatal(err)
		}
		for i := range src {
			if !bytes.Equal(content[0][src[i].Off:][:src[i].Len], content[1][dst[i].Off:][:dst[i].Len]) {
				t.Fatalf("%+v: block %d differs", c, i)
			}
		}
		for _, m := range g.Memory() {
			if m.Staging != staging || m.Pipelines != c.want || m.Staging+m.Pipelines > m.Limit ||
				m.Limit != cfg.Memory {
				t.Errorf("%+v: %+v", c, m)
			}
		}
		for _, r := range regions {
			r.Release()
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
	cfg.Memory = staging - 1
	g := gputest.Must(newGPUs(gputest.NewPlatform(1), cfg))(t)
	if err := g.Use([]string{All}); err == nil || !strings.Contains(err.Error(),
		"raise transports.gpu.memory") {
		t.Errorf("staging alone exceeds the limit: %v", err)
	}
}

// TestWhatAGPUHasLeft: the driver's free memory is reported, or 0 where it is unknown.
func TestWhatAGPUHasLeft(t *testing.T) {
	t.Parallel()
	g := gputest.Must(newGPUs(&tellingPlatform{gputest.NewPlatform(2)}, small()))(t)
	if err := g.Use([]string{All}); err != nil {
		t.Fatal(err)
	}
	if m := g.Memory(); m[0].Free != 5<<30 || m[1].Free != 0 {
		t.Errorf("%+v", m)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}

type tellingPlatform struct{ *gputest.Platform }

func (p *tellingPlatform) Open(i int) (device.Card, error) {
	c, err := p.Platform.Open(i)
	return tellingCard{c.(*gputest.Card)}, err
}

type tellingCard struct{ *gputest.Card }

func (c tellingCard) Free() (uint64, error) {
	if c.Index > 0 {
		return 0, errors.New("fake: no")
	}
	return 5 << 30, nil
}

// TestBudgetIsTakenAtOnce: concurrent calls of take never exceed the limit together.
func TestBudgetIsTakenAtOnce(t *testing.T) {
	t.Parallel()
	const each, room = 3, 10
	b := budget{limit: each*room + 1}
	var taken atomic.Int32
	var wg sync.WaitGroup
	for range 8 * room {
		wg.Go(func() {
			if b.take(forRelays, each) == nil {
				taken.Add(1)
			}
		})
	}
	wg.Wait()
	if taken.Load() != room || b.bytes(forRelays) != each*room {
		t.Errorf("%d took, %d bytes of %d", taken.Load(), b.bytes(forRelays), b.limit)
	}
	b.release(forRelays, each)
	if b.take(forStaging, each) != nil || b.take(forStaging, each) == nil {
		t.Error("what was given back is not there once")
	}
}

// TestPairIsTriedAgain: a direction for which memory was missing gets its pipelines later.
func TestPairIsTriedAgain(t *testing.T) {
	t.Parallel()
	cfg := small()
	one := peercopy.Bytes(cfg.PeerStage)
	cfg.Memory = uint64(cfg.Slots)*SlotBytes + 2*one
	g := gputest.Must(newGPUs(gputest.NewPlatform(2), cfg))(t)
	at := time.Unix(1000, 0)
	g.now = func() time.Time { return at }
	a, b := gputest.Must(g.open(0))(t), gputest.Must(g.open(1))(t)
	gputest.Must(0, b.budget.take(forRelays, 2*one))(t)
	if _, err := g.pair(a, b); !errors.Is(err, errNoPeer) {
		t.Errorf("without room: %v", err)
	}
	if n := a.budget.bytes(forPipelines); n != 0 {
		t.Errorf("a pipeline that was not made keeps %d bytes", n)
	}
	b.budget.release(forRelays, 2*one)
	if _, err := g.pair(a, b); !errors.Is(err, errNoPeer) {
		t.Errorf("tried again at once: %v", err)
	}
	at = at.Add(retryPair)
	if p := gputest.Must(g.pair(a, b))(t); len(p.pipelines) != PeerPipelines {
		t.Errorf("%d pipelines", len(p.pipelines))
	}
	gputest.Must(0, g.Close())(t)
}
