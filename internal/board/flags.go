package board

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
)

// Flags is a view of a flags memory: step flags, load flags, the source epoch and, if the shim has
// them, replay flags and the stream mark.
type Flags struct {
	mem    []byte
	boot   [16]byte
	layers int
	layer  uint64 // offsets, checked
	load   uint64
	epoch  uint64
	replay uint64 // 0: none
	mark   uint64 // 0: none
}

// FlagsBytes is the size of a flags memory for the given layers.
func FlagsBytes(layers int) int {
	return SizeFlagsHeader + (layers+1)*SizeFlag + layers*SizeFlag + CacheLine +
		(layers+1)*SizeFlag + CacheLine
}

// InitFlags writes a header into zeroed memory and returns the view. The shim's side.
func InitFlags(mem []byte, boot [16]byte, layers int) (*Flags, error) {
	if layers < 1 || layers > MaxLayers {
		return nil, fmt.Errorf("board: flags: layers = %d, want 1..%d", layers, MaxLayers)
	}
	if len(mem) < FlagsBytes(layers) {
		return nil, fmt.Errorf("board: flags: %d bytes for %d layers, want %d", len(mem), layers,
			FlagsBytes(layers))
	}
	le := binary.LittleEndian
	le.PutUint32(mem[OffFlagsHeaderMagic:], FlagsMagic)
	le.PutUint16(mem[OffFlagsHeaderMajor:], BoardMajor)
	le.PutUint16(mem[OffFlagsHeaderMinor:], BoardMinor)
	copy(mem[OffFlagsHeaderBoot:], boot[:])
	le.PutUint32(mem[OffFlagsHeaderLayers:], uint32(layers))
	le.PutUint32(mem[OffFlagsHeaderStride:], CacheLine)
	layer := uint64(SizeFlagsHeader)
	load := layer + uint64(layers+1)*SizeFlag
	le.PutUint64(mem[OffFlagsHeaderLayerFlags:], layer)
	le.PutUint64(mem[OffFlagsHeaderLoadFlags:], load)
	epoch := load + uint64(layers)*SizeFlag
	le.PutUint64(mem[OffFlagsHeaderSourceEpoch:], epoch)
	le.PutUint64(mem[OffFlagsHeaderReplayFlags:], epoch+CacheLine)
	le.PutUint64(mem[OffFlagsHeaderStreamMark:], epoch+CacheLine+uint64(layers+1)*SizeFlag)
	le.PutUint64(mem[OffFlagsHeaderTotalBytes:], uint64(len(mem)))
	return ParseFlags(mem)
}

// ParseFlags copies the header once, validates the copy and returns the view.
func ParseFlags(mem []byte) (*Flags, error) {
	if len(mem) < SizeFlagsHeader {
		return nil, fmt.Errorf("board: flags: %d bytes, shorter than the header of %d", len(mem),
			SizeFlagsHeader)
	}
	if err := aligned(mem); err != nil {
		return nil, err
	}
	var h [SizeFlagsHeader]byte
	copy(h[:], mem)
	le := binary.LittleEndian
	if err := version("flags", FlagsMagic, le.Uint32(h[OffFlagsHeaderMagic:]),
		le.Uint16(h[OffFlagsHeaderMajor:])); err != nil {
		return nil, err
	}
	f := &Flags{mem: mem,
		layer:  le.Uint64(h[OffFlagsHeaderLayerFlags:]),
		load:   le.Uint64(h[OffFlagsHeaderLoadFlags:]),
		epoch:  le.Uint64(h[OffFlagsHeaderSourceEpoch:]),
		replay: le.Uint64(h[OffFlagsHeaderReplayFlags:]),
		mark:   le.Uint64(h[OffFlagsHeaderStreamMark:])}
	copy(f.boot[:], h[OffFlagsHeaderBoot:])
	layers, stride := le.Uint32(h[OffFlagsHeaderLayers:]), le.Uint32(h[OffFlagsHeaderStride:])
	if layers < 1 || layers > MaxLayers {
		return nil, fmt.Errorf("board: flags: layers = %d, want 1..%d", layers, MaxLayers)
	}
	if stride != CacheLine {
		return nil, fmt.Errorf("board: flags: stride = %d, want %d", stride, CacheLine)
	}
	f.layers = int(layers)
	total := le.Uint64(h[OffFlagsHeaderTotalBytes:])
	if total > uint64(len(mem)) {
		return nil, fmt.Errorf("board: flags: total_bytes = %d, but the memory has %d", total, len(mem))
	}
	parts := []part{{"header", 0, SizeFlagsHeader},
		{"layer_flags", f.layer, uint64(layers+1) * SizeFlag},
		{"load_flags", f.load, uint64(layers) * SizeFlag},
		{"source_epoch", f.epoch, 8},
		{"replay_flags", f.replay, uint64(layers+1) * SizeFlag},
		{"stream_mark", f.mark, 8}}
	if err := disjoint("flags", total, 8, parts...); err != nil {
		return nil, err
	}
	return f, nil
}

// Boot is the boot id of the engine worker.
func (f *Flags) Boot() [16]byte { return f.boot }

// Layers is the number of layer flags, without the step's end.
func (f *Flags) Layers() int { return f.layers }

// Layer returns the last step for which layer i is known to be complete; i = Layers() is the end of
// the step. For a layer that a replayed graph signals, the value is forgotten when the next step
// begins, so it may fall (the end of the step does not). Each returned value stays true for good.
func (f *Flags) Layer(i int) uint64 {
	if uint(i) > uint(f.layers) {
		panic("board: layer flag out of range")
	}
	v := word64(f.mem, f.layer+uint64(i)*SizeFlag).Load()
	if i == f.layers {
		return v
	}
	// The step is loaded first: a reader that sees it also sees its zeros, so a 1 found after it
	// belongs to this step or a later one.
	if step := f.replayWord(f.layers).Load(); step > v && f.replayWord(i).Load() != 0 {
		return step
	}
	return v
}

// SetLayer is the engine's side: layer i of this step is complete. A value that does not grow is
// ignored.
func (f *Flags) SetLayer(i int, step uint64) {
	if uint(i) > uint(f.layers) {
		panic("board: layer flag out of range")
	}
	w := word64(f.mem, f.layer+uint64(i)*SizeFlag)
	for old := w.Load(); old < step && !w.CompareAndSwap(old, step); old = w.Load() {
	}
}

// StartReplay is the engine's side: later calls of SetReplayed are about this step. One replay at a
// time.
func (f *Flags) StartReplay(step uint64) {
	for i := range f.layers {
		f.replayWord(i).Store(0)
	}
	f.replayWord(f.layers).Store(step)
}

// SetReplayed is the engine's side: layer i of the step of StartReplay is complete.
func (f *Flags) SetReplayed(i int) {
	if uint(i) >= uint(f.layers) {
		panic("board: replay flag out of range")
	}
	f.replayWord(i).Store(1)
}

// replayWord is the replay flag of layer i, or, for i = Layers(), the step of the flags.
func (f *Flags) replayWord(i int) *atomic.Uint64 {
	return word64(f.mem, f.replay+uint64(i)*SizeFlag)
}

// Load returns load flag i.
func (f *Flags) Load(i int) uint64 { return f.loadWord(i).Load() }

// SetLoad stores the step whose data has landed for layer i. A value that does not grow is ignored.
// It reports whether it did.
func (f *Flags) SetLoad(i int, step uint64) bool {
	w := f.loadWord(i)
	for old := w.Load(); old < step; old = w.Load() {
		if w.CompareAndSwap(old, step) {
			return true
		}
	}
	return false
}

func (f *Flags) loadWord(i int) *atomic.Uint64 {
	if uint(i) >= uint(f.layers) {
		panic("board: load flag out of range")
	}
	return word64(f.mem, f.load+uint64(i)*SizeFlag)
}

// SourceEpoch returns the source epoch. On x86 the load comes after every earlier read of source
// blocks in program order.
func (f *Flags) SourceEpoch() uint64 { return word64(f.mem, f.epoch).Load() }

// BumpSourceEpoch is the shim's side: some source blocks are about to lose their contents.
func (f *Flags) BumpSourceEpoch() uint64 { return word64(f.mem, f.epoch).Add(1) }

// Mark returns the stream mark: everything that the engine enqueued before a mark up to this one is
// complete.
func (f *Flags) Mark() uint64 { return word64(f.mem, f.mark).Load() }

// SetMark is the engine's side.
func (f *Flags) SetMark(mark uint64) { word64(f.mem, f.mark).Store(mark) }

func version(what string, wantMagic, magic uint32, major uint16) error {
	if magic != wantMagic {
		return fmt.Errorf("board: %s: magic = %#08x, want %#08x: this is not a %s memory of kvspray",
			what, magic, wantMagic, what)
	}
	if major != BoardMajor {
		return fmt.Errorf(
			"board: %s: ABI version %d, this side supports %d: upgrade the older of the two", what,
			major, BoardMajor)
	}
	return nil
}

type part struct {
	name       string
	off, bytes uint64
}

// disjoint checks that every part is aligned, inside total, and apart from the others.
func disjoint(what string, total, align uint64, parts ...part) error {
	for i, p := range parts {
		if p.off%align != 0 {
			return fmt.Errorf("board: %s: %s at offset %d, want a multiple of %d", what, p.name,
				p.off, align)
		}
		if p.bytes > total || p.off > total-p.bytes {
			return fmt.Errorf("board: %s: %s [%d, +%d) is outside the %d bytes", what, p.name, p.off,
				p.bytes, total)
		}
		for _, q := range parts[:i] {
			if p.off < q.off+q.bytes && q.off < p.off+p.bytes {
				return fmt.Errorf("board: %s: %s [%d, +%d) overlaps %s [%d, +%d)", what, p.name, p.off, p.bytes,
					q.name, q.off, q.bytes)
			}
		}
	}
	return nil
}
