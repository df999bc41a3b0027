package board_test

import (
	"encoding/binary"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func newRings(t testing.TB) (*board.Rings, []byte) {
	t.Helper()
	mem := make([]byte, board.RingsBytes(board.RingMinBytes, board.RingMinBytes))
	r, err := board.InitRings(mem, [16]byte{9}, board.RingMinBytes, board.RingMinBytes)
	if err != nil {
		t.Fatal(err)
	}
	return r, mem
}

const (
	subHead = board.SizeRingsHeader + board.OffRingHead
	subData = board.SizeRingsHeader + board.SizeRing
)

func TestFlags(t *testing.T) {
	mem := make([]byte, board.FlagsBytes(3))
	f, err := board.InitFlags(mem, [16]byte{7}, 3)
	if err != nil {
		t.Fatal(err)
	}
	if f.Layers() != 3 || f.Boot() != [16]byte{7} {
		t.Fatalf("%d layers, boot %x", f.Layers(), f.Boot())
	}
	f.SetLayer(3, 5)
	f.SetLayer(3, 4)
	if got := f.Layer(3); got != 5 {
		t.Errorf("step end = %d: a flag shrank", got)
	}
	if f.Layer(0) != 0 || f.SourceEpoch() != 0 || f.BumpSourceEpoch() != 1 || f.SourceEpoch() != 1 {
		t.Error("words share memory")
	}
	if !f.SetLoad(2, 9) || f.Load(2) != 9 {
		t.Error("load flag not set")
	}
	if f.SetLoad(2, 8) || f.SetLoad(2, 9) || f.Load(2) != 9 {
		t.Error("load flag fell")
	}
}

func TestReplayFlags(t *testing.T) {
	f, err := board.InitFlags(make([]byte, board.FlagsBytes(3)), [16]byte{7}, 3)
	if err != nil {
		t.Fatal(err)
	}
	want := func(when string, w ...uint64) {
		t.Helper()
		for i, v := range w {
			if got := f.Layer(i); got != v {
				t.Errorf("%s: layer %d = %d, want %d", when, i, got, v)
			}
		}
	}
	f.SetReplayed(0) // a replay that no step was announced for
	want("before any step", 0, 0, 0, 0)
	f.StartReplay(4)
	want("started", 0, 0, 0, 0)
	f.SetReplayed(0)
	f.SetReplayed(2)
	want("replayed", 4, 0, 4, 0)
	f.SetLayer(1, 5) // as an eager step of the same engine does
	f.SetLayer(3, 4)
	want("both", 4, 5, 4, 4)
	f.StartReplay(6)
	want("cleared", 0, 5, 0, 4)
	f.SetLayer(0, 6)
	f.SetReplayed(1)
	want("the greater one", 6, 6, 0, 4)
	if f.SourceEpoch() != 0 || f.Load(0) != 0 || f.Load(2) != 0 {
		t.Error("words share memory")
	}
}

// TestReplayFlagsAreNeverEarly: whatever the reader sees of a step and of its flags, the layer was
// complete in that step.
func TestReplayFlagsAreNeverEarly(t *testing.T) {
	const layers = 2
	f, err := board.InitFlags(make([]byte, board.FlagsBytes(layers)), [16]byte{7}, layers)
	if err != nil {
		t.Fatal(err)
	}
	var done [layers]atomic.Uint64
	var stop atomic.Bool
	var wg sync.WaitGroup
	for i := range layers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for !stop.Load() {
				v := f.Layer(i) // before what is true by now
				if at := done[i].Load(); v > at {
					t.Errorf("layer %d is complete in step %d, want %d", i, v, at)
					return
				}
			}
		}()
	}
	end := time.Now().Add(time.Second)
	for s := uint64(1); s%1024 != 0 || time.Now().Before(end); s++ {
		f.StartReplay(s)
		for i := range layers {
			done[i].Store(s)
			f.SetReplayed(i)
		}
	}
	stop.Store(true)
	wg.Wait()
}

func TestFlagsHeaderRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func([]byte)
		want   string
	}{
		"magic": {func(b []byte) { b[0]++ }, "magic"},
		"major": {func(b []byte) { b[board.OffFlagsHeaderMajor] = 2 }, "ABI version 2, this " +
			"side supports 1"},
		"no layers": {func(b []byte) { put32(b, board.OffFlagsHeaderLayers, 0) }, "layers = 0"},
		"many layers": {func(b []byte) { put32(b, board.OffFlagsHeaderLayers, 1025) },
			"layers = 1025"},
		"stride": {func(b []byte) { put32(b, board.OffFlagsHeaderStride, 8) }, "stride = 8"},
		"total": {func(b []byte) { put64(b, board.OffFlagsHeaderTotalBytes, 1<<40) },
			"total_bytes"},
		"outside": {func(b []byte) { put64(b, board.OffFlagsHeaderLoadFlags, 1<<63) },
			"load_flags"},
		"overflow": {func(b []byte) { put64(b, board.OffFlagsHeaderLayerFlags, ^uint64(0)-63) },
			"layer_flags"},
		"unaligned": {func(b []byte) { put64(b, board.OffFlagsHeaderSourceEpoch, 129) },
			"multiple of 8"},
		"overlap": {func(b []byte) {
			put64(b, board.OffFlagsHeaderLoadFlags, board.SizeFlagsHeader)
		}, "overlaps layer_flags"},
		"in header": {func(b []byte) { put64(b, board.OffFlagsHeaderSourceEpoch, 64) },
			"overlaps header"},
		"few bytes": {func(b []byte) { put32(b, board.OffFlagsHeaderLayers, 1024) }, "outside"},
		"replay outside": {func(b []byte) {
			put64(b, board.OffFlagsHeaderReplayFlags, uint64(len(b))-3*64)
		}, "replay_flags"},
		"replay overlap": {func(b []byte) {
			put64(b, board.OffFlagsHeaderReplayFlags, board.SizeFlagsHeader+4*64)
		}, "replay_flags"},
		"no replay": {func(b []byte) { put64(b, board.OffFlagsHeaderReplayFlags, 0) },
			"overlaps header"},
		"no mark": {func(b []byte) { put64(b, board.OffFlagsHeaderStreamMark, 0) },
			"overlaps header"},
		"newer minor":  {func(b []byte) { b[board.OffFlagsHeaderMinor] = 9 }, ""},
		"new features": {func(b []byte) { put64(b, board.OffFlagsHeaderFeatures, 255) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			mem := make([]byte, board.FlagsBytes(3))
			if _, err := board.InitFlags(mem, [16]byte{7}, 3); err != nil {
				t.Fatal(err)
			}
			c.change(mem)
			_, err := board.ParseFlags(mem)
			wantError(t, err, c.want)
		})
	}
	if _, err := board.ParseFlags(make([]byte, 127)); err == nil {
		t.Error("a short header parses")
	}
	if _, err := board.ParseFlags(nil); err == nil {
		t.Error("no memory parses")
	}
	if _, err := board.ParseFlags(make([]byte, 4096)[4:]); err == nil || !strings.Contains(err.Error(),
		"multiple of 8") {
		t.Errorf("unaligned memory: %v", err)
	}
}

func TestRingsHeaderRefused(t *testing.T) {
	for name, c := range map[string]struct {
		change func([]byte)
		want   string
	}{
		"magic": {func(b []byte) { b[0]++ }, "magic"},
		"major": {func(b []byte) { b[board.OffRingsHeaderMajor] = 7 }, "ABI version 7"},
		"small": {func(b []byte) { put32(b, board.OffRingsHeaderSubmissionBytes, 1<<15) },
			"submission_bytes = 32768"},
		"large": {func(b []byte) { put32(b, board.OffRingsHeaderCompletionBytes, 1<<25) },
			"completion_bytes"},
		"odd": {func(b []byte) { put32(b, board.OffRingsHeaderCompletionBytes, 100_000) },
			"power of two"},
		"overlap": {func(b []byte) {
			put64(b, board.OffRingsHeaderCompletion, board.SizeRingsHeader+64)
		}, "overlaps submission"},
		"outside": {func(b []byte) { put64(b, board.OffRingsHeaderCompletion, 1<<50) }, "outside"},
		"overflow": {func(b []byte) { put64(b, board.OffRingsHeaderSubmission, ^uint64(0)-7) },
			"submission"},
		"unaligned": {func(b []byte) { put64(b, board.OffRingsHeaderSubmission, 129) }, "multiple of 8"},
		"minor":     {func(b []byte) { b[board.OffRingsHeaderMinor] = 3 }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, mem := newRings(t)
			c.change(mem)
			_, err := board.ParseRings(mem)
			wantError(t, err, c.want)
		})
	}
}

func wantError(t *testing.T, err error, want string) {
	t.Helper()
	if want == "" {
		if err != nil {
			t.Fatalf("refused: %v", err)
		}
		return
	}
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Fatalf("error %v, want one with %q", err, want)
	}
}

func put32(b []byte, off int, v uint32) { binary.LittleEndian.PutUint32(b[off:], v) }
func put64(b []byte, off int, v uint64) { binary.LittleEndian.PutUint64(b[off:], v) }

// TestConsumerRefuses breaks the ring in every way that the producer could.
func TestConsumerRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		body   int
		change func([]byte)
	}{
		"head not aligned": {8, func(b []byte) { put64(b, subHead, 49) }},
		"head too far":     {8, func(b []byte) { put64(b, subHead, board.RingMinBytes+8) }},
		"head went back":   {8, func(b []byte) { put64(b, subHead, ^uint64(7)) }},
		"length short":     {8, func(b []byte) { put32(b, subData, 32) }},
		"length odd":       {8, func(b []byte) { put32(b, subData, 47) }},
		"length past head": {8, func(b []byte) { put32(b, subData, 56) }},
		"length huge":      {8, func(b []byte) { put32(b, subData, 1<<31) }},
		"body longer":      {8, func(b []byte) { put32(b, subData+board.OffRecordBodyBytes, 9) }},
		"body shorter":     {8, func(b []byte) { put32(b, subData+board.OffRecordBodyBytes, 0) }},
		"body huge": {8, func(b []byte) {
			put32(b, subData+board.OffRecordBodyBytes, ^uint32(0))
		}},
		"seq gap":           {8, func(b []byte) { put64(b, subData+board.OffRecordSeq, 2) }},
		"seq zero":          {8, func(b []byte) { put64(b, subData+board.OffRecordSeq, 0) }},
		"pad in the middle": {8, func(b []byte) { put32(b, subData+board.OffRecordType, board.RecPad) }},
		"pad to the end": {8, func(b []byte) {
			put32(b, subData, board.RingMinBytes)
			put32(b, subData+4, board.RecPad)
		}},
		"pad of a whole ring": {8, func(b []byte) {
			put32(b, subData, board.RingMinBytes)
			put32(b, subData+4, board.RecPad)
			put64(b, subHead, board.RingMinBytes)
		}},
		"more than half ring": {8, func(b []byte) {
			put32(b, subData, board.RingMinBytes/2+8)
			put64(b, subHead, board.RingMinBytes/2+8)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r, mem := newRings(t)
			if _, err := r.SubmissionProducer().Push(board.RecStep, 0, 1, 0,
				make([]byte, c.body)); err != nil {
				t.Fatal(err)
			}
			c.change(mem)
			cons := r.SubmissionConsumer()
			_, ok, err := cons.Next()
			if ok || !errors.Is(err, board.ErrProtocol) {
				t.Fatalf("ok = %v, err = %v", ok, err)
			}
			if _, _, again := cons.Next(); !errors.Is(again, board.ErrProtocol) {
				t.Error("a broken ring is believed again")
			}
		})
	}
}

func TestProducerRefuses(t *testing.T) {
	r, mem := newRings(t)
	p := r.SubmissionProducer()
	if _, err := p.Push(board.RecStep, 0, 0, 0, make([]byte, board.RingMinBytes/2)); !errors.Is(err,
		board.ErrTooBig) {
		t.Errorf("too big: %v", err)
	}
	if _, err := p.Push(board.RecStep, 0, 0, 0,
		make([]byte, board.RingMinBytes/2-board.SizeRecord)); err != nil {
		t.Errorf("half the ring: %v", err)
	}
	if _, err := p.Push(board.RecStep, 0, 0, 0,
		make([]byte, board.RingMinBytes/2-board.SizeRecord)); err != nil {
		t.Errorf("the other half: %v", err)
	}
	if _, err := p.Push(board.RecStep, 0, 0, 0, nil); !errors.Is(err, board.ErrFull) {
		t.Errorf("full: %v", err)
	}
	for _, tail := range []uint64{1, 4, ^uint64(7), board.RingMinBytes + 8} {
		put64(mem, board.SizeRingsHeader+board.OffRingTail, tail)
		if _, err := p.Push(board.RecStep, 0, 0, 0, nil); !errors.Is(err, board.ErrProtocol) {
			t.Errorf("tail = %d: %v", tail, err)
		}
	}
}

// TestWakeUp: of a sleeper and a producer that race, one sees the other, every time.
func TestWakeUp(t *testing.T) {
	r, _ := newRings(t)
	p, c := r.SubmissionProducer(), r.SubmissionConsumer()
	for range 20_000 {
		var wg sync.WaitGroup
		wg.Add(1)
		var wake bool
		go func() {
			defer wg.Done()
			wake, _ = p.Push(board.RecStep, 0, 1, 0, nil)
		}()
		asleep := c.Sleep()
		wg.Wait()
		if asleep && !wake {
			t.Fatal("the consumer sleeps without a wake-up")
		}
		if _, ok, err := c.Next(); !ok || err != nil {
			t.Fatal(ok, err)
		}
		c.Awake()
	}
}

func TestAllocations(t *testing.T) {
	r, _ := newRings(t)
	p, c := r.SubmissionProducer(), r.SubmissionConsumer()
	body := make([]byte, 300)
	turn := func() {
		if _, err := p.Push(board.RecStep, 0, 1, 0, body); err != nil {
			t.Fatal(err)
		}
		if _, ok, err := c.Next(); !ok || err != nil {
			t.Fatal(ok, err)
		}
	}
	turn()
	if n := testing.AllocsPerRun(1000, turn); n != 0 {
		t.Errorf("%v allocations per record", n)
	}
}

func BenchmarkRing(b *testing.B) {
	r, _ := newRings(b)
	p, c := r.SubmissionProducer(), r.SubmissionConsumer()
	body := make([]byte, 300)
	b.ReportAllocs()
	for b.Loop() {
		_, _ = p.Push(board.RecStep, 0, 1, 0, body)
		_, _, _ = c.Next()
	}
}

// FuzzRings takes any bytes for a rings memory. Whatever their values, nothing outside the slice is
// touched and the consumer ends.
func FuzzRings(f *testing.F) {
	_, mem := newRings(f)
	r, _ := board.ParseRings(mem)
	_, _ = r.SubmissionProducer().Push(board.RecStep, 0, 1, 0, []byte("body"))
	f.Add(mem[:1024])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		mem := make([]byte, board.RingsBytes(board.RingMinBytes, board.RingMinBytes))
		copy(mem, b)
		r, err := board.ParseRings(mem)
		if err != nil {
			return
		}
		for _, c := range []*board.Consumer{r.SubmissionConsumer(), r.CompletionConsumer()} {
			for n := 0; ; n++ {
				rec, ok, err := c.Next()
				if err != nil || !ok {
					break
				}
				if n > board.RingMinBytes/8 {
					t.Fatal("more records than fit the ring")
				}
				if len(rec.Body) > board.RingMinBytes/2 {
					t.Fatal("body longer than half the ring")
				}
			}
		}
		for _, p := range []*board.Producer{r.SubmissionProducer(), r.CompletionProducer()} {
			_, _ = p.Push(board.RecSent, 0, 1, 0, []byte("x"))
		}
	})
}

// FuzzFlags takes any bytes for a flags memory.
func FuzzFlags(f *testing.F) {
	mem := make([]byte, board.FlagsBytes(4))
	_, _ = board.InitFlags(mem, [16]byte{1}, 4)
	f.Add(mem)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		mem := make([]byte, board.FlagsBytes(64))
		copy(mem, b)
		fl, err := board.ParseFlags(mem)
		if err != nil {
			return
		}
		for i := 0; i <= fl.Layers(); i++ {
			fl.SetLayer(i, fl.Layer(i)+1)
		}
		for i := range fl.Layers() {
			fl.SetLoad(i, 1)
		}
		fl.BumpSourceEpoch()
	})
}
