package board

import (
	"encoding/binary"
	"fmt"
)

// Work is a view of a work memory: what the sidecar has the engine's own GPU context do. Every slot belongs to whoever acquired it in this
// process; slots are independent of each other.
type Work struct{ mem []byte }

// InitWork writes a header into zeroed memory and returns the view. The shim's side.
func InitWork(mem []byte) (*Work, error) {
	if len(mem) < WorkBytes {
		return nil, fmt.Errorf("board: work: %d bytes, want %d", len(mem), WorkBytes)
	}
	le := binary.LittleEndian
	le.PutUint32(mem[OffWorkHeaderMagic:], WorkMagic)
	le.PutUint16(mem[OffWorkHeaderMajor:], BoardMajor)
	le.PutUint16(mem[OffWorkHeaderMinor:], BoardMinor)
	le.PutUint32(mem[OffWorkHeaderSlots:], WorkSlots)
	le.PutUint32(mem[OffWorkHeaderRuns:], WorkRuns)
	le.PutUint64(mem[OffWorkHeaderTotalBytes:], WorkBytes)
	return ParseWork(mem)
}

// ParseWork copies the header once, validates the copy and returns the view.
func ParseWork(mem []byte) (*Work, error) {
	if len(mem) < WorkBytes {
		return nil, fmt.Errorf("board: work: %d bytes, want %d", len(mem), WorkBytes)
	}
	if err := aligned(mem); err != nil {
		return nil, err
	}
	var h [SizeWorkHeader]byte
	copy(h[:], mem)
	le := binary.LittleEndian
	if err := version("work", WorkMagic, le.Uint32(h[OffWorkHeaderMagic:]), le.Uint16(h[OffWorkHeaderMajor:])); err != nil {
		return nil, err
	}
	slots, runs, total := le.Uint32(h[OffWorkHeaderSlots:]), le.Uint32(h[OffWorkHeaderRuns:]), le.Uint64(h[OffWorkHeaderTotalBytes:])
	if slots != WorkSlots || runs != WorkRuns || total != WorkBytes {
		return nil, fmt.Errorf("board: work: %d slots of %d runs in %d bytes, want %d of %d in %d", slots, runs, total, WorkSlots, WorkRuns, WorkBytes)
	}
	return &Work{mem}, nil
}

// WorkRun is count pieces of Len bytes, piece i at Off + i*Stride of a region, which may run backwards.
type WorkRun struct {
	Region     int
	Off        uint64
	Stride     uint64
	Len, Count uint32
}

func workSlot(slot int) uint64 { return WorkSlotTable + uint64(slot)*SizeWorkSlot }

func (w *Work) list(slot int) []byte {
	return w.mem[WorkLists+slot*WorkRuns*SizeWorkRun:][: WorkRuns*SizeWorkRun : WorkRuns*SizeWorkRun]
}

// SetRun writes run i of a slot's list. The slot is not posted.
func (w *Work) SetRun(slot, i int, r WorkRun) {
	b := w.list(slot)[i*SizeWorkRun:][:SizeWorkRun]
	le := binary.LittleEndian
	le.PutUint64(b[OffWorkRunWhere:], uint64(r.Region)<<WorkWhereBits|r.Off)
	le.PutUint64(b[OffWorkRunStride:], r.Stride)
	le.PutUint32(b[OffWorkRunLen:], r.Len)
	le.PutUint32(b[OffWorkRunCount:], r.Count)
}

// SetHandle puts what OPEN names where its list would be.
func (w *Work) SetHandle(slot int, handle [WorkHandleBytes]byte) { copy(w.list(slot), handle[:]) }

// WorkRequest is the rest of a slot.
type WorkRequest struct {
	Op           uint32
	Runs         uint32
	Dense, Bytes uint64
	Blocks       uint32
}

// Post hands a slot over. seq is greater than any before in this slot. wake: the shim sleeps, and is to be woken.
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

// Revoke takes a slot back that the shim has not taken. False: it has, and what it makes of it has to be waited for.
func (w *Work) Revoke(slot int, seq uint64) bool {
	return word64(w.mem, workSlot(slot)+OffWorkSlotState).CompareAndSwap(seq<<WorkStateBits|WorkPosted, seq<<WorkStateBits|WorkFree)
}

// Ended reports how a slot ended, if it has: refusal is 0 where it was done, else a value of enum kvs_work_refusal.
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

// Take is the shim's side: a slot that is posted becomes its own.
func (w *Work) Take(slot int) (seq uint64, q WorkRequest, ok bool) {
	state := word64(w.mem, workSlot(slot)+OffWorkSlotState)
	s := state.Load()
	seq = s >> WorkStateBits
	if s&(1<<WorkStateBits-1) != WorkPosted || !state.CompareAndSwap(s, seq<<WorkStateBits|WorkTaken) {
		return 0, q, false
	}
	b := w.mem[workSlot(slot):][:SizeWorkSlot]
	le := binary.LittleEndian
	return seq, WorkRequest{Op: le.Uint32(b[OffWorkSlotOp:]), Runs: le.Uint32(b[OffWorkSlotRuns:]), Dense: le.Uint64(b[OffWorkSlotDense:]),
		Bytes: le.Uint64(b[OffWorkSlotBytes:]), Blocks: le.Uint32(b[OffWorkSlotBlocks:])}, true
}

// Run reads run i of a slot's list.
func (w *Work) Run(slot, i int) WorkRun {
	b := w.list(slot)[i*SizeWorkRun:][:SizeWorkRun]
	le := binary.LittleEndian
	where := le.Uint64(b[OffWorkRunWhere:])
	return WorkRun{Region: int(where >> WorkWhereBits), Off: where & (1<<WorkWhereBits - 1), Stride: le.Uint64(b[OffWorkRunStride:]),
		Len: le.Uint32(b[OffWorkRunLen:]), Count: le.Uint32(b[OffWorkRunCount:])}
}

// Handle reads what SetHandle wrote.
func (w *Work) Handle(slot int) (h [WorkHandleBytes]byte) {
	copy(h[:], w.list(slot))
	return h
}

// Finish is the shim's side: a slot that it has taken is done, or refused.
func (w *Work) Finish(slot int, seq uint64, refusal uint32) {
	if refusal == 0 {
		word64(w.mem, WorkDone+uint64(slot)*SizeFlag).Store(seq)
		return
	}
	word32(w.mem, workSlot(slot)+OffWorkSlotRefusal).Store(refusal)
	word64(w.mem, workSlot(slot)+OffWorkSlotState).Store(seq<<WorkStateBits | WorkRefused)
}

// Sleep is the shim's side: it announces that it waits for its doorbell. What was posted before has to be looked for once more.
func (w *Work) Sleep() { word32(w.mem, OffWorkHeaderSleeping).Store(1) }
