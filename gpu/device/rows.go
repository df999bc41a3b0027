package device

import (
	"errors"

	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// Small pieces of host memory that go to a GPU. [measured, H200, driver 580] the driver moves those of 16 KiB, one by one as in a batch, as if by kernels:
// in slices of the time of an engine that computes, which lost 15 to 39% to 3.5 GB/s of them. What is larger, what has two rows, and everything
// on the way back goes by the copy engine: 8.6 GB/s for 0.6%. So two pieces are made the rows of one copy wherever they lie.
const (
	pairBelow = 32 << 10
	pairLook  = 64 // pieces without a partner that are looked through for the next one
)

// invalidValue is CUDA_ERROR_INVALID_VALUE.
const InvalidValue = 1

// rowCopier holds the lists of copyIn between two calls.
type RowCopier struct {
	rows  []cuda.Rows
	alone []int
}

// copyIn enqueues copies from host memory to the GPU, in no order among each other. Of the slices, which are as long, it only reads. Should a driver not
// take rows that lie in different allocations, it gets all of them as single copies: some twice, of the same bytes.
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
		r.rows = append(r.rows, cuda.Rows{Dst: uint64(dst[i]), Src: uint64(src[i]), DstPitch: n[i], SrcPitch: n[i], Width: n[i], Height: 1})
	}
	err := q.CopyRows(r.rows)
	if e := (*cuda.Error)(nil); errors.As(err, &e) && e.Code == InvalidValue {
		return q.CopyBatch(dst, src, n)
	}
	return err
}

// pairs adds what can be paired to rows: two pieces of one length, of which one lies behind the other on both sides and not too far. alone are the others.
func pairs(rows []cuda.Rows, alone []int, dst, src []cuda.Ptr, n []uint64) ([]cuda.Rows, []int) {
	for i := range n {
		k := len(alone) - 1
		for least := max(len(alone)-pairLook, 0); k >= least; k-- {
			if j := alone[k]; n[j] == n[i] && n[i] < pairBelow && apartBy(dst[j], dst[i], n[i]) && apartBy(src[j], src[i], n[i]) {
				rows = append(rows, cuda.Rows{Dst: uint64(dst[j]), Src: uint64(src[j]), DstPitch: uint64(dst[i] - dst[j]), SrcPitch: uint64(src[i] - src[j]),
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

// apartBy reports whether b is the next row after a.
func apartBy(a, b cuda.Ptr, width uint64) bool {
	return b > a && uint64(b-a) >= width && uint64(b-a) <= cuda.MaxPitch
}
