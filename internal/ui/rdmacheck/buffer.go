package rdmacheck

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/verbs"
)

// canary fills memory that nothing may write any more.
const canary = 0xA5

// buffer is memory that a device can write, of the host or of a GPU.
type buffer struct {
	size  uint64
	bytes []byte // of the host
	m     verbs.Memory
	gpu   *gpuMemory
}

// gpuMemory is memory of a GPU, which is filled and read by the GPU through a pinned buffer.
type gpuMemory struct {
	packer device.Packer
	queue  device.Queue
	at     cuda.Ptr
	pinned []byte
	pin    cuda.Ptr
	flush  func() error // after the writes of a NIC; nil: not needed
}

// holds reports whether a range is inside.
func (b *buffer) holds(off, n uint64) bool { return off <= b.size && n <= b.size-off }

// patternWord is the content of a word of a buffer under a seed. It depends on its place, so that
// bytes in a wrong place are found.
func patternWord(seed, index uint64) uint64 {
	if seed == 0 {
		return canary * 0x0101010101010101
	}
	z := seed<<40 + (index+1)*0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

func patternByte(seed, off uint64) byte {
	return byte(patternWord(seed, off/8) >> (8 * (off % 8)))
}

func writePattern(p []byte, off, seed uint64) {
	for i := 0; i < len(p); {
		if at := off + uint64(i); at%8 == 0 && len(p)-i >= 8 {
			binary.LittleEndian.PutUint64(p[i:], patternWord(seed, at/8))
			i += 8
			continue
		}
		p[i] = patternByte(seed, off+uint64(i))
		i++
	}
}

// differs returns the number of the first byte, from 1, that is not the pattern's; 0: none.
func differs(p []byte, off, seed uint64) int64 {
	for i := 0; i < len(p); {
		if at := off + uint64(i); at%8 == 0 && len(p)-i >= 8 &&
			binary.LittleEndian.Uint64(p[i:]) == patternWord(seed, at/8) {
			i += 8
			continue
		}
		if p[i] != patternByte(seed, off+uint64(i)) {
			return int64(off) + int64(i) + 1
		}
		i++
	}
	return 0
}

func (b *buffer) fill(off, n, seed uint64) error {
	if b.gpu == nil {
		writePattern(b.bytes[off:off+n], off, seed)
		return nil
	}
	g := b.gpu
	writePattern(g.pinned[off:off+n], off, seed)
	return g.queue.CopySync(g.at+cuda.Ptr(off), g.pin+cuda.Ptr(off), n)
}

func (b *buffer) check(off, n, seed uint64) (int64, error) {
	if b.gpu == nil {
		return differs(b.bytes[off:off+n], off, seed), nil
	}
	g := b.gpu
	if g.flush != nil {
		if err := g.flush(); err != nil {
			return 0, err
		}
	}
	clear(g.pinned[off : off+n])
	if err := g.queue.CopySync(g.pin+cuda.Ptr(off), g.at+cuda.Ptr(off), n); err != nil {
		return 0, err
	}
	return differs(g.pinned[off:off+n], off, seed), nil
}

func (b *buffer) close() (err error) {
	if b.bytes != nil {
		err = unix.Munmap(b.bytes)
	}
	if b.gpu != nil && b.gpu.at != 0 {
		err = errors.Join(err, b.gpu.packer.Free(b.gpu.at))
	}
	return err
}

// errNoGPU: this host has no GPU that this process can use.
var errNoGPU = errors.New("no GPU")

// registerGPU allocates memory of the GPU next to the rail and registers it as the transport does:
// by dma-buf, else through peermem. There is one such buffer until the rail is opened again: its
// pinned memory is freed only then.
func (l *local) registerGPU(b *buffer, a *answer) (err error) {
	switch {
	case l.env.Card == nil:
		return errNoGPU
	case l.card != nil:
		return fmt.Errorf("%w: a second buffer of GPU memory", errRequest)
	}
	card, err := l.env.Card(l.rail)
	if err != nil {
		return fmt.Errorf("%w: %w", errNoGPU, err)
	}
	l.card = card
	packer, err := card.NewPacker()
	if err != nil {
		return err
	}
	l.packer = packer
	x, ok := l.card.(device.Exporter)
	if !ok {
		return errors.New("the GPU's driver exports no memory")
	}
	g := &gpuMemory{packer: l.packer}
	b.gpu = g
	if g.queue, err = l.packer.NewQueue(); err != nil {
		return err
	}
	if g.pinned, g.pin, err = l.packer.AllocHost(int(b.size)); err != nil {
		return err
	}
	if g.at, err = l.packer.Alloc(b.size); err != nil {
		return err
	}
	if g.flush, err = device.NICWrites(x); err != nil {
		return err
	}
	fd, off, err := device.ExportPages(x, g.at, b.size)
	if err == nil {
		b.m, err = l.domain.RegisterDMABuf(fd, off, b.size, true)
		_ = unix.Close(fd) // the registration keeps the memory
		a.How = "dma-buf"
	}
	if err == nil {
		return nil
	}
	var perr error
	a.How = "peermem"
	if b.m, perr = l.domain.RegisterPeer(uint64(g.at), b.size, true); perr != nil {
		return fmt.Errorf("%w: neither by dma-buf (%w) nor by peermem (%w)", errGPURefused, err, perr)
	}
	return nil
}

// errGPURefused: the NIC does not register memory of the GPU.
var errGPURefused = errors.New("the NIC refuses memory of the GPU")
