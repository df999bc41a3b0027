package gpu

import (
	"errors"
	"testing"

	"github.com/kvspray/kvspray/gpu/device"
	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// nicCard is a card whose memory NICs can access; nothing else of it works.
type nicCard struct {
	device.Card
	order, options int
	first          cuda.Ptr
	bytes          uint64
	flushes        int
	err            error
}

func (c *nicCard) ExportDMABuf(p cuda.Ptr, n uint64) (int, error) {
	c.first, c.bytes = p, n
	return 77, c.err
}

func (c *nicCard) Attribute(a cuda.Attribute) (int, error) {
	if a == cuda.GPUDirectRDMAWriteOrdering {
		return c.order, c.err
	}
	return c.options, c.err
}

func (c *nicCard) FlushRDMAWrites() error {
	c.flushes++
	return c.err
}

// TestExportDMABuf: the driver gets whole pages, and the caller the offset of its range.
func TestExportDMABuf(t *testing.T) {
	c := &nicCard{}
	u := &GPU{card: c}
	for _, x := range []struct{ addr, n, first, bytes, off uint64 }{
		{0x7f0000000000, 4096, 0x7f0000000000, 4096, 0},
		{0x7f0000000200, 4096, 0x7f0000000000, 8192, 0x200},
		{0x7f0000000fff, 1, 0x7f0000000000, 4096, 0xfff},
		{0x7f0000001000, 1 << 30, 0x7f0000001000, 1 << 30, 0},
	} {
		fd, off, err := u.ExportDMABuf(x.addr, x.n)
		if err != nil || fd != 77 || off != x.off || c.first != cuda.Ptr(x.first) || c.bytes != x.bytes {
			t.Errorf("%#x+%d: descriptor %d at %d of [%#x, +%d): %v", x.addr, x.n, fd, off, uint64(c.first),
				c.bytes, err)
		}
	}
	c.err = errors.New("no")
	if _, _, err := u.ExportDMABuf(4096, 1); !errors.Is(err, c.err) {
		t.Error(err)
	}
	if _, _, err := (&GPU{card: struct{ device.Card }{}}).ExportDMABuf(4096, 1); !errors.Is(err,
		cuda.ErrNotSupported) {
		t.Errorf("a card that exports nothing: %v", err)
	}
}

// TestNICWrites: a flush where only the host can order writes, none where the GPU orders them, and
// an error where neither can.
func TestNICWrites(t *testing.T) {
	for _, x := range []struct {
		order, options int
		flush, ok      bool
	}{{200, 0, false, true}, {100, 1, false, true}, {0, 1, true, true}, {0, 3, true, true},
		{0, 2, false, false}, {0, 0, false, false}} {
		c := &nicCard{order: x.order, options: x.options}
		flush, err := (&GPU{card: c}).NICWrites()
		if (err == nil) != x.ok || (flush != nil) != x.flush || err != nil && !errors.Is(err,
			cuda.ErrNotSupported) {
			t.Errorf("order %d, options %d: flush %v, %v", x.order, x.options, flush != nil, err)
			continue
		}
		if flush != nil && (flush() != nil || c.flushes != 1) {
			t.Errorf("%d flushes", c.flushes)
		}
	}
	if _, err := (&GPU{card: &nicCard{err: errors.New("no")}}).NICWrites(); err == nil {
		t.Error("a driver that does not report its ordering counts as one that orders")
	}
}
