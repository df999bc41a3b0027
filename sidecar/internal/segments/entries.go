package segments

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
)

// wireEntry is the size of an entry in a SegmentBatch: offset, bytes, stride, pieces.
const wireEntry = 28

// refused is a refusal of a batch: nothing was read or written.
func refused(field, problem, remedy string) error {
	return &msg.Error{Message: "BATCH", Field: field, Problem: problem, Remedy: remedy}
}

// entryError is refused for entry i.
func entryError(i int, field, problem, remedy string) error {
	return refused(fmt.Sprintf("entries[%d].%s", i, field), problem, remedy)
}

// last returns the end of the last of count pieces; false: it exceeds 64 bits.
func last(off, n, stride uint64, count uint32) (end uint64, ok bool) {
	high, low := bits.Mul64(stride, uint64(count-1))
	at, carry := bits.Add64(off, low, 0)
	end, more := bits.Add64(at, n, 0)
	return end, high == 0 && carry == 0 && more == 0
}

// readEntries reads the list of a batch: the local runs, and the entries for the peer.
func readEntries(b *connector.Batch) (runs []plans.Run, wire []byte, err error) {
	shared, ok := b.List.Bytes()
	if !ok || len(shared) != b.Entries*connector.EntryBytes {
		return nil, nil, refused("list", "is not in mapped memory", "let the library make it")
	}
	list := append([]byte(nil), shared...) // the engine may still write it
	runs = make([]plans.Run, b.Entries)
	wire = make([]byte, 0, b.Entries*wireEntry)
	pieces := uint64(0)
	le := binary.LittleEndian
	for i := range runs {
		e := list[i*connector.EntryBytes:]
		local, remote, n := le.Uint64(e), le.Uint64(e[8:]), le.Uint64(e[16:])
		stride, remoteStride := le.Uint64(e[24:]), le.Uint64(e[32:])
		count, index := le.Uint32(e[40:]), le.Uint32(e[44:])
		if err := checkSize(i, n, count, &pieces); err != nil {
			return nil, nil, err
		}
		if int64(index) >= int64(len(b.Regions)) {
			return nil, nil, entryError(i, "region", fmt.Sprintf("%d, and the batch names %d regions", index,
				len(b.Regions)), "use an index into the batch's regions")
		}
		region := b.Regions[index]
		if end, ok := last(local, n, stride, count); !ok || end > region.Size() {
			return nil, nil, entryError(i, "local", fmt.Sprintf("%d pieces of %d bytes from %d on, %d "+
				"apart, are outside of a region of %d bytes", count, n, local, stride, region.Size()),
				"name a range inside the region")
		}
		runs[i] = plans.Run{Region: region, Off: local, Len: n, Stride: stride, Count: count}
		wire = le.AppendUint64(wire, remote)
		wire = le.AppendUint64(wire, n)
		wire = le.AppendUint64(wire, remoteStride)
		wire = le.AppendUint32(wire, count)
	}
	return runs, wire, nil
}

func checkSize(i int, n uint64, count uint32, pieces *uint64) error {
	if n == 0 || count == 0 {
		return entryError(i, "bytes", fmt.Sprintf("%d pieces of %d bytes", count, n),
			"send a piece of a byte at least; count is 1 without strides")
	}
	if *pieces += uint64(count); *pieces > msg.MaxBatchPieces {
		return entryError(i, "count", fmt.Sprintf("%d pieces up to here", *pieces),
			fmt.Sprintf("send at most %d in a batch; split it", msg.MaxBatchPieces))
	}
	return nil
}

// readWire reads the entries of a SegmentBatch, which lie at base of a region. [first, end) is the
// range of the segment that the peer may use.
func readWire(wire []byte, region *mem.Region, base, first, end uint64) (runs []plans.Run,
	err error) {
	runs = make([]plans.Run, len(wire)/wireEntry)
	pieces := uint64(0)
	le := binary.LittleEndian
	for i := range runs {
		e := wire[i*wireEntry:]
		off, n, stride, count := le.Uint64(e), le.Uint64(e[8:]), le.Uint64(e[16:]), le.Uint32(e[24:])
		if err := checkSize(i, n, count, &pieces); err != nil {
			return nil, err
		}
		if to, ok := last(off, n, stride, count); !ok || off < first || to > end {
			return nil, entryError(i, "remote", fmt.Sprintf("%d pieces of %d bytes from %d on, %d apart, "+
				"are outside of bytes [%d, %d) of the segment, which are granted", count, n, off, stride, first,
				end), "name a range inside")
		}
		runs[i] = plans.Run{Region: region, Off: base + off, Len: n, Stride: stride, Count: count}
	}
	return runs, nil
}
