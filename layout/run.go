package layout

// TokenRange is tokens [Start, End) of a sequence.
type TokenRange struct {
	Start, End uint32
}

// Run is Outer rows of Count pieces of Len bytes. Pieces of a row have the distance SrcStride on
// one side and DstStride on the other, rows SrcOuter and DstOuter. Offsets are from the start of
// the layer's region. A Run replaces Outer*Count list entries by 64 bytes.
type Run struct {
	SrcOff, DstOff       uint64
	SrcStride, DstStride uint64 // modulo 2^64: a run may step backwards; unused if Count is 1
	SrcOuter, DstOuter   uint64 // modulo 2^64; unused if Outer is 1
	Count, Outer         uint32 // 1 or more
	Len                  uint64
}

// Pieces is the number of pieces of the run.
func (r *Run) Pieces() uint64 { return uint64(r.Outer) * uint64(r.Count) }

// Bytes is the number of bytes that the run moves.
func (r *Run) Bytes() uint64 { return r.Pieces() * r.Len }

// IpcBlock is one contiguous piece of a run.
type IpcBlock struct {
	SrcOff, DstOff, Len uint64
}

// At returns piece i of the run.
func (r *Run) At(i uint64) IpcBlock {
	o, c := i/uint64(r.Count), i%uint64(r.Count)
	return IpcBlock{SrcOff: r.SrcOff + o*r.SrcOuter + c*r.SrcStride, DstOff: r.DstOff + o*r.DstOuter +
		c*r.DstStride, Len: r.Len}
}

// Explode yields the pieces of runs one by one, so that the whole list never exists.
func Explode(runs []Run) func(yield func(IpcBlock) bool) {
	return func(yield func(IpcBlock) bool) {
		for i := range runs {
			r := &runs[i]
			row := IpcBlock{r.SrcOff, r.DstOff, r.Len}
			for range r.Outer {
				b := row
				for range r.Count {
					if !yield(b) {
						return
					}
					b.SrcOff += r.SrcStride
					b.DstOff += r.DstStride
				}
				row.SrcOff += r.SrcOuter
				row.DstOff += r.DstOuter
			}
		}
	}
}
