package device

import (
	"errors"

	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// Small pieces of host memory on the way to a GPU. [measured, H200, driver 580] The driver moves
// pieces of 16 KiB as if by kernels, alone and in batches. They are time-sliced against an engine,
// which lost 15 to 39% at 3.5 GB/s. The copy engine takes larger pieces, copies of two rows and all
// copies to the host: 8.6 GB/s at a cost of 0.6%. Therefore two pieces at any addresses become the
// two rows of one copy.
const (
	pairBelow = 32 << 10
	pairLook  = 64 // unpaired pieces that are compared with the next one
)

// InvalidValue is CUDA_ERROR_INVALID_VALUE.
const InvalidValue = 1

// RowCopier makes pieces rows of copies. It keeps its lists between two calls.
type RowCopier struct {
	rows  []cuda.Rows
	alone []int
}

// CopyIn enqueues copies from host memory to the GPU, in no order among each other, and does not
// change the slices. A driver that refuses rows in different allocations gets all pieces as single
// copies, some of them a second time with the same bytes.
func (r *RowCopier) CopyIn(q Queue, dst, src []cuda.Ptr, n []uint64) error {
	large := true
	for i := range n {
		large = large && n[i] >= pairBelow
	}
	if large {
		return q.CopyBatch(dst, src, n)
	}
	r.rows, r.alone = pairs(r.rows[:0], r.alone[:0], dst, src, n)
	for _, i := range r.alone {
		r.rows = append(r.rows, cuda.Rows{Dst: uint64(dst[i]), Src: uint64(src[i]), DstPitch: n[i],
			SrcPitch: n[i], Width: n[i], Height: 1})
	}
	err := q.CopyRows(r.rows)
	if e := (*cuda.Error)(nil); errors.As(err, &e) && e.Code == InvalidValue {
		return q.CopyBatch(dst, src, n)
	}
	return err
}

// pairs appends rows of two pieces each: of one length, and one behind the other on both sides
// within the largest pitch. alone are the other pieces.
func pairs(rows []cuda.Rows, alone []int, dst, src []cuda.Ptr, n []uint64) ([]cuda.Rows, []int) {
	for i := range n {
		k := len(alone) - 1
		for first := max(len(alone)-pairLook, 0); k >= first; k-- {
			if j := alone[k]; n[j] == n[i] && n[i] < pairBelow && apartBy(dst[j], dst[i], n[i]) &&
				apartBy(src[j], src[i], n[i]) {
				rows = append(rows, cuda.Rows{Dst: uint64(dst[j]), Src: uint64(src[j]),
					DstPitch: uint64(dst[i] - dst[j]), SrcPitch: uint64(src[i] - src[j]),
					Width: n[i], Height: 2})
				break
			}
		}
		if k < max(len(alone)-pairLook, 0) {
			alone = append(alone, i)
		} else {
			alone[k] = alone[len(alone)-1]
			alone = alone[:len(alone)-1]
		}
	}
	return rows, alone
}

// apartBy reports whether b can be the next row after a.
func apartBy(a, b cuda.Ptr, width uint64) bool {
	return b > a && uint64(b-a) >= width && uint64(b-a) <= cuda.MaxPitch
}
