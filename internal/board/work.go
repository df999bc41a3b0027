package board

import (
	"encoding/binary"
	"fmt"
)

// Work is a view of a work memory: work that the sidecar requests from the engine's GPU context. A
// slot belongs to the goroutine that acquired it in this process; slots are independent of each
// other.
type Work struct {
	mem  []byte
	rows bool // the shim supports runs of rows
}

// InitWork writes a header into zeroed memory and returns the view. The shim's side.
func InitWork(b []byte) (*Work, error) {
	if len(b) < WorkBytes {
		return nil, fmt.Errorf("board: work: %d bytes, want %d", len(b), WorkBytes)
	}
	le := binary.LittleEndian
	le.PutUint32(b[OffWorkHeaderMagic:], WorkMagic)
	le.PutUint16(b[OffWorkHeaderMajor:], BoardMajor)
	le.PutUint16(b[OffWorkHeaderMinor:], WorkMinor)
	le.PutUint32(b[OffWorkHeaderSlots:], WorkSlots)
	le.PutUint32(b[OffWorkHeaderRuns:], WorkRuns)
	le.PutUint64(b[OffWorkHeaderTotalBytes:], WorkBytes)
	return ParseWork(b)
}

// ParseWork copies the header once, validates the copy and returns the view.
func ParseWork(b []byte) (*Work, error) {
	if len(b) < WorkBytes {
		return nil, fmt.Errorf("board: work: %d bytes, want %d", len(b), WorkBytes)
	}
	if err := aligned(b); err != nil {
		return nil, err
	}
	var h [SizeWorkHeader]byte
	copy(h[:], b)
	le := binary.LittleEndian
	if err := version("work", WorkMagic, le.Uint32(h[OffWorkHeaderMagic:]),
		le.Uint16(h[OffWorkHeaderMajor:])); err != nil {
		return nil, err
	}
	slots, runs, total := le.Uint32(h[OffWorkHeaderSlots:]), le.Uint32(h[OffWorkHeaderRuns:]),
		le.Uint64(h[OffWorkHeaderTotalBytes:])
	if slots != WorkSlots || runs != WorkRuns || total != WorkBytes {
		return nil, fmt.Errorf("board: work: %d slots of %d runs in %d bytes, want %d of %d in %d", slots,
			runs, total, WorkSlots, WorkRuns, WorkBytes)
	}
	return &Work{b, le.Uint16(h[OffWorkHeaderMinor:]) >= 1}, nil
}

// WorkRun is Rows rows of Count pieces of Len bytes, the first piece at Off of a region. Strides
// may run backwards.
type WorkRun struct {
	Region        int
	Off           uint64
	Stride, Outer uint64 // distance of pieces in a row, and of rows
	Len, Count    uint32
	Rows          uint32 // more than 1 only if the shim supports it
}

// Rows reports whether the shim supports runs of more than one row.
func (w *Work) Rows() bool { return w.rows }

func workSlot(slot int) uint64 { return WorkSlotTable + uint64(slot)*SizeWorkSlot }

func (w *Work) list(slot int) []byte {
	return w.mem[WorkLists+slot*WorkRuns*SizeWorkRun:][: WorkRuns*SizeWorkRun : WorkRuns*SizeWorkRun]
}

// SetRun writes a run at index i of a slot's list (two entries if it has rows), and returns the
// next index. The slot must not be posted.
func (w *Work) SetRun(slot, i int, r WorkRun) int {
	where, count := uint64(r.Region)<<WorkWhereBits|r.Off, r.Count
	if r.Rows > 1 {
		w.entry(slot, i+1).set(0, r.Outer, 0, r.Rows)
		w.entry(slot, i).set(where, r.Stride, r.Len, count|WorkRows)
		return i + 2
	}
	w.entry(slot, i).set(where, r.Stride, r.Len, count)
	return i + 1
}

// entry is a struct kvs_work_run.
type entry []byte

func (w *Work) entry(slot, i int) entry { return w.list(slot)[i*SizeWorkRun:][:SizeWorkRun] }

func (e entry) set(where, stride uint64, length, count uint32) {
	le := binary.LittleEndian
	le.PutUint64(e[OffWorkRunWhere:], where)
	le.PutUint64(e[OffWorkRunStride:], stride)
	le.PutUint32(e[OffWorkRunLen:], length)
	le.PutUint32(e[OffWorkRunCount:], count)
}

// SetHandle writes the handle of OPEN in the place of a list.
func (w *Work) SetHandle(slot int, handle [WorkHandleBytes]byte) { copy(w.list(slot), handle[:]) }

// WorkRequest is the rest of a slot.
type WorkRequest struct {
	Op           uint32
	Runs         uint32
	Dense, Bytes uint64
	Blocks       uint32
}

// Post posts a slot. seq is greater than any earlier one in this slot. wake: the shim sleeps and
// must be woken.
func (w *Work) Post(slot int, seq uint64, q WorkRequest) (wake bool) {
	b := w.mem[workSlot(slot):][:SizeWorkSlot]
	le := binary.LittleEndian
	le.PutUint32(b[OffWorkSlotOp:], q.Op)
	le.PutUint32(b[OffWorkSlotRuns:], q.Runs)
	le.PutUint64(b[OffWorkSlotDense:], q.Dense)
	le.PutUint64(b[OffWorkSlotBytes:], q.Bytes)
	le.PutUint32(b[OffWorkSlotBlocks:], q.Blocks)
	word64(w.mem, workSlot(slot)+OffWorkSlotState).Store(seq<<WorkStateBits | WorkPosted)
	sleeping := word32(w.mem, OffWorkHeaderSleeping)
	return sleeping.Load() != 0 && sleeping.Swap(0) == 1
}

// Revoke takes back a slot that the shim has not taken. False: the shim has taken it, and its end
// must be awaited.
func (w *Work) Revoke(slot int, seq uint64) bool {
	return word64(w.mem, workSlot(slot)+OffWorkSlotState).CompareAndSwap(seq<<WorkStateBits|WorkPosted,
		seq<<WorkStateBits|WorkFree)
}

// Ended reports how a slot ended, if it has: refusal is 0 if it was done, else a value of enum
// kvs_work_refusal.
func (w *Work) Ended(slot int, seq uint64) (refusal uint32, ended bool) {
	if word64(w.mem, WorkDone+uint64(slot)*SizeFlag).Load() == seq {
		return 0, true
	}
	if word64(w.mem, workSlot(slot)+OffWorkSlotState).Load() != seq<<WorkStateBits|WorkRefused {
		return 0, false
	}
	if refusal = word32(w.mem, workSlot(slot)+OffWorkSlotRefusal).Load(); refusal == 0 {
		refusal = WorkBad
	}
	return refusal, true
}

// Take is the shim's side: it takes a posted slot.
func (w *Work) Take(slot int) (seq uint64, q WorkRequest, ok bool) {
	state := word64(w.mem, workSlot(slot)+OffWorkSlotState)
	s := state.Load()
	seq = s >> WorkStateBits
	if s&(1<<WorkStateBits-1) != WorkPosted || !state.CompareAndSwap(s, seq<<WorkStateBits|WorkTaken) {
		return 0, q, false
	}
	b := w.mem[workSlot(slot):][:SizeWorkSlot]
	le := binary.LittleEndian
	return seq, WorkRequest{Op: le.Uint32(b[OffWorkSlotOp:]), Runs: le.Uint32(b[OffWorkSlotRuns:]),
		Dense: le.Uint64(b[OffWorkSlotDense:]),
		Bytes: le.Uint64(b[OffWorkSlotBytes:]), Blocks: le.Uint32(b[OffWorkSlotBlocks:])}, true
}

// Run reads the run at index i of a slot's list, and returns the next index.
func (w *Work) Run(slot, i int) (WorkRun, int) {
	b, le := w.entry(slot, i), binary.LittleEndian
	where := le.Uint64(b[OffWorkRunWhere:])
	r := WorkRun{Region: int(where >> WorkWhereBits), Off: where & (1<<WorkWhereBits - 1),
		Len:    le.Uint32(b[OffWorkRunLen:]),
		Stride: le.Uint64(b[OffWorkRunStride:]), Count: le.Uint32(b[OffWorkRunCount:]), Rows: 1}
	if r.Count&WorkRows == 0 {
		return r, i + 1
	}
	b = w.entry(slot, i+1)
	r.Count, r.Outer, r.Rows = r.Count-WorkRows, le.Uint64(b[OffWorkRunStride:]),
		le.Uint32(b[OffWorkRunCount:])
	return r, i + 2
}

// Handle reads the handle of SetHandle.
func (w *Work) Handle(slot int) (h [WorkHandleBytes]byte) {
	copy(h[:], w.list(slot))
	return h
}

// Finish is the shim's side: a taken slot is done, or refused.
func (w *Work) Finish(slot int, seq uint64, refusal uint32) {
	if refusal == 0 {
		word64(w.mem, WorkDone+uint64(slot)*SizeFlag).Store(seq)
		return
	}
	word32(w.mem, workSlot(slot)+OffWorkSlotRefusal).Store(refusal)
	word64(w.mem, workSlot(slot)+OffWorkSlotState).Store(seq<<WorkStateBits | WorkRefused)
}

// Sleep is the shim's side: it announces a wait for its doorbell. The shim must check once more for
// slots posted before.
func (w *Work) Sleep() { word32(w.mem, OffWorkHeaderSleeping).Store(1) }
