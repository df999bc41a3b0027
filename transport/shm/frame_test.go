package shm

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
)

// recorder writes down what a packet contains, and encodes it again.
type recorder struct {
	fields []string
	again  []byte
}

func (r *recorder) note(f string, args ...any) error {
	r.fields = append(r.fields, fmt.Sprintf(f, args...))
	return nil
}

func (r *recorder) region(f regionFrame) error {
	r.again = appendRegion(r.again, f)
	return r.note("region %d %s %d", f.index, f.id, f.size)
}

func (r *recorder) device(f deviceFrame) error {
	r.again = appendDevice(r.again, f)
	return r.note("device %d %s %d %v %x", f.index, f.id, f.size, f.hasFD, f.handle)
}

func (r *recorder) forget(i uint32) error {
	r.again = appendForget(r.again, i)
	return r.note("forget %d", i)
}

func (r *recorder) pull(f pullFrame) error {
	b := appendPull(nil, f)
	fields := fmt.Sprintf("pull %d %d.%d %v %d:", f.tag, f.slot, f.gen, f.r, f.attempt)
	for cells := f.cells; len(cells) > 0; {
		var x run
		rest, err := x.next(cells)
		if err != nil {
			return err
		}
		b, cells = appendRun(b, &x), rest
		fields += fmt.Sprintf(" %d[%d+%d", x.region, x.off, x.len)
		if x.Count > 1 {
			fields += fmt.Sprintf(" %d times by %d", x.Count, int64(x.Stride))
		}
		if x.Rows > 1 {
			fields += fmt.Sprintf(", %d times by %d", x.Rows, int64(x.Outer))
		}
		fields += "]"
	}
	setTag(b, f.tag)
	endPull(b)
	r.again = append(r.again, b...)
	return r.note("%s", fields)
}

func (r *recorder) push(f pullFrame) error {
	r.again = append(r.again, pushOf(f)...)
	return r.note("push %d %d.%d %v %d: %x", f.tag, f.slot, f.gen, f.r, f.attempt, f.cells)
}

func (r *recorder) pulled(tag uint64, why transfer.Reason) error {
	r.again = appendPulled(r.again, tag, why)
	return r.note("pulled %d %s", tag, why)
}

func (r *recorder) hint() error {
	r.again = appendHint(r.again)
	return r.note("hint")
}

func (r *recorder) verdict(tag uint64, valid bool) error {
	r.again = appendVerdict(r.again, tag, valid)
	return r.note("verdict %d %v", tag, valid)
}

func (r *recorder) confirm(tag uint64, o transfer.Outcome, why transfer.Reason) error {
	r.again = appendConfirm(r.again, tag, o, why)
	return r.note("confirm %d %s %s", tag, o, why)
}

func pushOf(f pullFrame) []byte {
	b := append(appendPush(nil, f), f.cells...)
	setTag(b, f.tag)
	endPush(b)
	return b
}

func pullOf(f pullFrame, runs ...run) []byte {
	b := appendPull(nil, f)
	for i := range runs {
		b = appendRun(b, &runs[i])
	}
	setTag(b, f.tag)
	endPull(b)
	return b
}

// samplePacket has one frame of each kind.
func samplePacket() []byte {
	b := appendRegion(nil, regionFrame{index: 3, id: mem.ID{7}, size: 1 << 40})
	b = append(b, pullOf(pullFrame{tag: 1 << 20, slot: 65535, gen: 9, r: transfer.Range{First: 1,
		Count: 2}, attempt: 4},
		run{region: 3, len: 4096, off: 1 << 33, Strides: mem.Single}, run{region: 3, len: 1, off: 0,
			Strides: mem.Single},
		run{region: 3, len: 512, off: 1 << 20, Strides: mem.Strides{Stride: 4096, Count: 100, Rows: 1}},
		run{region: 4, len: 64, off: 1 << 20, Strides: mem.Strides{Stride: 1<<64 - 128,
			Count: 3, Rows: 1}},
		run{region: 4, len: 512, off: 1 << 21, Strides: mem.Strides{Stride: 8192, Outer: 512, Count: 8,
			Rows: 16}})...)
	b = appendPulled(b, 5, transfer.ReasonRange)
	b = appendVerdict(b, 6, true)
	b = appendConfirm(b, 7, transfer.Landed, transfer.ReasonNone)
	b = appendDevice(b, deviceFrame{regionFrame{index: 4, id: mem.ID{8}, size: 1 << 30}, true,
		[]byte{0xab, 0xcd}})
	b = append(b, pushOf(pullFrame{tag: 8, slot: 9, gen: 10, r: transfer.Range{First: 11, Count: 1},
		attempt: 12, cells: []byte{13, 14}})...)
	return appendForget(appendHint(b), 3)
}

func TestFramesRoundTrip(t *testing.T) {
	p := samplePacket()
	var r recorder
	if err := parse(p, &r); err != nil {
		t.Fatal(err)
	}
	want := []string{"region 3 07000000000000000000000000000000 1099511627776",
		"pull 1048576 65535.9 {1 2} 4: 3[8589934592+4096] 3[0+1] 3[1048576+512 100 times by 4096] " +
			"4[1048576+64 3 times by -128] 4[2097152+512 8 times by 8192, 16 times by 512]",
		"pulled 5 range",
		"verdict 6 true", "confirm 7 landed none", "device 4 08000000000000000000000000000000 " +
			"1073741824 true abcd",
		"push 8 9.10 {11 1} 12: 0d0e", "hint", "forget 3"}
	if !slices.Equal(r.fields, want) {
		t.Fatalf("got %q, want %q", r.fields, want)
	}
	if !slices.Equal(r.again, p) {
		t.Fatal("the packet does not survive the round trip")
	}
	for n := range p {
		var cut recorder
		if err := parse(p[:n], &cut); err == nil && !slices.Equal(cut.again, p[:n]) {
			t.Fatalf("cut at %d: accepted as something else", n)
		}
	}
}

// Golden vector: a pull, byte for byte: a piece, a run and a run of rows.
func TestPullGolden(t *testing.T) {
	f := pullFrame{tag: 0x0102030405060708, slot: 9, gen: 10, r: transfer.Range{First: 11, Count: 12},
		attempt: 13}
	got := hex.EncodeToString(pullOf(f, run{region: 1, len: 4096, off: 1 << 33, Strides: mem.Single},
		run{region: 2, len: 512, off: 1 << 20, Strides: mem.Strides{Stride: 4096, Count: 100, Rows: 1}},
		run{region: 3, len: 512, off: 1 << 21, Strides: mem.Strides{Stride: 8192, Outer: 1<<64 - 512,
			Count: 8, Rows: 16}}))
	want := "03" + "00" + "7c00" + // kind, zero, bytes of the body
		// tag, slot, cells, generation, chunks, attempt
		"0807060504030201" + "0900" + "0600" + "0a000000" + "0b000000" + "0c000000" + "0d000000" +
		"01000000" + "00100000" + "0000000002000000" + // region, length, offset
		// flagged; stride, count, no rows
		"02000000" + "00020080" + "0000100000000000" + "0010000000000000" + "64000000" + "00000000" +
		// flagged; stride, count, rows
		"03000000" + "00020080" + "0000200000000000" + "0020000000000000" + "08000000" + "10000000" +
		"00feffffffffffff" + "0000000000000000" // outer stride
	if got != want {
		t.Errorf("\n%s, want\n%s", got, want)
	}
}

func TestMalformedFrames(t *testing.T) {
	pull := appendPull(nil, pullFrame{tag: 1})
	run1 := run{region: 1, len: 16, Strides: mem.Strides{Stride: 32, Count: 5, Rows: 1}}
	rows := run{region: 1, len: 16, Strides: mem.Strides{Stride: 32, Outer: 1024, Count: 5, Rows: 3}}
	change := func(r run, at int, v uint32) []byte {
		b := pullOf(pullFrame{tag: 1}, r)
		binary.LittleEndian.PutUint32(b[frameHeader+pullFixed+at:], v)
		return b
	}
	for name, p := range map[string][]byte{
		"unknown kind":       {99, 0, 0, 0},
		"kind zero":          {0, 0, 0, 0},
		"reserved byte":      {byte(kindForget), 1, 4, 0, 0, 0, 0, 0},
		"longer than packet": {byte(kindForget), 0, 255, 255},
		"short body":         {byte(kindForget), 0, 3, 0, 1, 2, 3},
		"device, short":      {byte(kindDevice), 0, 28, 0, 27: 0, 31: 0},
		"device, handle of 257 bytes": appendDevice(nil, deviceFrame{handle: make([]byte,
			mem.MaxHandleBytes+1)}),
		"pull without pieces": pull,
		"pull, count of pieces": func() []byte {
			b := pullOf(pullFrame{tag: 1}, run{Strides: mem.Single})
			binary.LittleEndian.PutUint16(b[frameHeader+10:], 60000)
			return b
		}(),
		"pull, a run cut off": func() []byte {
			b := pullOf(pullFrame{tag: 1}, run1)
			b = b[:len(b)-cellBytes]
			endPull(b)
			return b
		}(),
		"pull, rows cut off": func() []byte {
			b := pullOf(pullFrame{tag: 1}, rows)
			b = b[:len(b)-cellBytes]
			endPull(b)
			return b
		}(),
		"push of nothing":  pushOf(pullFrame{tag: 1}),
		"push of too much": pushOf(pullFrame{tag: 1, cells: make([]byte, pushBytes+1)}),
		"push, reserved bytes set": func() []byte {
			b := pushOf(pullFrame{tag: 1, cells: []byte{1}})
			b[frameHeader+10] = 1
			return b
		}(),
		"pull, a run of one":       change(run1, cellBytes+8, 1),
		"pull, a run of none":      change(run1, cellBytes+8, 0),
		"pull, one row":            change(rows, cellBytes+12, 1),
		"pull, rows and no stride": change(run1, cellBytes+12, 2),
		"pull, rows of one":        change(rows, cellBytes+8, 1),
		"pull, rows of none":       change(rows, cellBytes+8, 0),
		"pull, reserved bytes set": change(rows, 2*cellBytes+12, 1),
	} {
		if err := parse(p, &recorder{}); !errors.Is(err, errFrame) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(samplePacket())
	f.Fuzz(func(t *testing.T, p []byte) {
		var r recorder
		if err := parse(p, &r); err != nil {
			return
		}
		var again recorder
		if err := parse(r.again, &again); err != nil || !slices.Equal(r.fields, again.fields) {
			t.Fatalf("%q became %q: %v", r.fields, again.fields, err)
		}
	})
}

func TestParseAllocatesNothing(t *testing.T) {
	p := samplePacket()
	var h nop
	if n := testing.AllocsPerRun(100, func() {
		if err := parse(p, &h); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

type nop struct{ sum uint64 }

func (n *nop) region(f regionFrame) error { n.sum += f.size; return nil }
func (n *nop) device(f deviceFrame) error { n.sum += f.size; return nil }
func (n *nop) forget(i uint32) error      { n.sum += uint64(i); return nil }
func (n *nop) pull(f pullFrame) error {
	var r run
	_, err := r.next(f.cells)
	n.sum += r.off
	return err
}
func (n *nop) push(f pullFrame) error {
	n.sum += uint64(
		len(f.cells))
	return nil
}
func (n *nop) pulled(t uint64, _ transfer.Reason) error { n.sum += t; return nil }
func (n *nop) verdict(t uint64, _ bool) error           { n.sum += t; return nil }
func (n *nop) hint() error                              { n.sum++; return nil }
func (n *nop) confirm(t uint64, _ transfer.Outcome, _ transfer.Reason) error {
	n.sum += t
	return nil
}
