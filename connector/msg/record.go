package msg

import (
	"encoding/binary"
	"fmt"
)

// Priorities of an INTENT or EXPECT.
const (
	PrioDecodeWaits = 0
	PrioStream      = 1
	PrioBackground  = 2
)

// PendingStep is a step whose flags are not set yet, and the tokens that the lease holds after it.
type PendingStep struct {
	Step uint64
	End  uint32
}

// Intent is the body of an INTENT record.
type Intent struct {
	Xfer       [16]byte
	Hash       [32]byte
	Tokens     uint32
	Fanout     uint32
	Blocks     [][]uint32
	Ready      uint32
	Steps      []PendingStep
	Prio       uint32
	DeadlineMS uint64
	Held       bool
	Req        string
	Attempt    uint32
}

// Expect is the body of an EXPECT record.
type Expect struct {
	Xfer       [16]byte
	Hash       [32]byte
	Peer       string
	Tokens     uint32
	Skip       []uint32
	Blocks     [][]uint32
	Prio       uint32
	DeadlineMS uint64
	PartnerMS  uint64
	Req        string
	After      uint64 // stream mark; 0: at once
}

// CopyBlock is a piece of a COPY.
type CopyBlock struct{ SrcOff, DstOff, Len uint64 }

// copyBlockBytes is an encoded CopyBlock: three u64, little-endian.
const copyBlockBytes = 24

// Copy is the body of a COPY record.
type Copy struct {
	Src, Dst   uint32 // indices into REGISTER's regions
	Blocks     []CopyBlock
	DeadlineMS uint64
	Req        string
	After      uint64 // stream mark; 0: at once
}

// StepReq is one lease of a STEP.
type StepReq struct {
	Lease   uint64
	End     uint32
	Blocks  [][]uint32 // nil: unchanged
	Attempt uint32
}

// Step is the body of a STEP record.
type Step struct {
	Step uint64
	Reqs []StepReq
}

// Cancel is the body of a CANCEL record.
type Cancel struct{ Reason string }

// Empty is the body of PREEMPT and HOLD records.
type Empty struct{}

// Received is the body of a RECEIVED record.
type Received struct {
	Bytes     uint64
	US        uint64
	Transport string
	Reason    string
	Recompute [][2]uint32
}

// Sent is the body of a SENT record.
type Sent struct {
	Grants uint32
	Bytes  uint64
	Reason string
}

// DecodeIntent decodes an INTENT body.
func DecodeIntent(b []byte) (*Intent, error) {
	r := &reader{what: "INTENT", b: b}
	m := &Intent{Fanout: 1, Prio: PrioStream}
	n := need{names: []string{"xfer", "hash", "tokens", "blocks"}}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "xfer":
			r.fixed(m.Xfer[:])
			n.got |= 1
		case "hash":
			r.fixed(m.Hash[:])
			n.got |= 2
		case "tokens":
			m.Tokens, n.got = r.u32(), n.got|4
		case "fanout":
			m.Fanout = r.u32()
			if r.err == nil && (m.Fanout < 1 || m.Fanout > MaxFanout) {
				r.fail("%d, want 1 to %d", m.Fanout, MaxFanout)
			}
		case "blocks":
			m.Blocks, n.got = r.blocks(), n.got|8
		case "ready":
			m.Ready = r.u32()
		case "steps":
			c := r.arrayLen(MaxPendingSteps)
			m.Steps = nil
			for range c {
				if k := r.arrayLen(2); r.err == nil && k != 2 {
					r.fail("%d elements, want [step, token_end]", k)
				}
				s := PendingStep{r.u64(), r.u32()}
				if r.err != nil {
					break
				}
				if k := len(m.Steps); s.Step == 0 || k > 0 && (s.Step <= m.Steps[k-1].Step ||
					s.End < m.Steps[k-1].End) {
					r.fail("step %d to token %d is not after the one before", s.Step, s.End)
				}
				m.Steps = append(m.Steps, s)
			}
		case "prio":
			m.Prio = r.u32()
		case "deadline_ms":
			m.DeadlineMS = r.u64()
		case "held":
			m.Held = r.bool()
		case "req":
			m.Req = r.str(MaxReqBytes)
		case "attempt":
			m.Attempt = r.u32()
		default:
			r.skip()
		}
	}
	n.check(r)
	if r.err == nil && m.Ready > m.Tokens {
		r.field = []byte("ready")
		r.fail("%d of %d tokens", m.Ready, m.Tokens)
	}
	if r.err == nil && m.Tokens == 0 {
		r.field = []byte("tokens")
		r.fail("0, want at least 1")
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	return m, nil
}

// Append encodes m.
func (m *Intent) Append(b []byte) []byte {
	b = appendMap(b, 12)
	b = appendBin(appendStr(b, "xfer"), m.Xfer[:])
	b = appendBin(appendStr(b, "hash"), m.Hash[:])
	b = appendUint(appendStr(b, "tokens"), uint64(m.Tokens))
	b = appendUint(appendStr(b, "fanout"), uint64(m.Fanout))
	b = appendBlocks(appendStr(b, "blocks"), m.Blocks)
	b = appendUint(appendStr(b, "ready"), uint64(m.Ready))
	b = appendArray(appendStr(b, "steps"), len(m.Steps))
	for _, s := range m.Steps {
		b = appendUint(appendUint(appendArray(b, 2), s.Step), uint64(s.End))
	}
	b = appendUint(appendStr(b, "prio"), uint64(m.Prio))
	b = appendUint(appendStr(b, "deadline_ms"), m.DeadlineMS)
	b = appendBool(appendStr(b, "held"), m.Held)
	b = appendStr(appendStr(b, "req"), m.Req)
	return appendUint(appendStr(b, "attempt"), uint64(m.Attempt))
}

// DecodeExpect decodes an EXPECT body.
func DecodeExpect(b []byte) (*Expect, error) {
	r := &reader{what: "EXPECT", b: b}
	m := &Expect{Prio: PrioDecodeWaits}
	n := need{names: []string{"xfer", "hash", "peer", "tokens", "blocks"}}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "xfer":
			r.fixed(m.Xfer[:])
			n.got |= 1
		case "hash":
			r.fixed(m.Hash[:])
			n.got |= 2
		case "peer":
			m.Peer, n.got = r.str(MaxNameBytes), n.got|4
		case "tokens":
			m.Tokens, n.got = r.u32(), n.got|8
		case "skip":
			c := r.arrayLen(MaxGroups)
			m.Skip = nil
			for range c {
				m.Skip = append(m.Skip, r.u32())
			}
		case "blocks":
			m.Blocks, n.got = r.blocks(), n.got|16
		case "prio":
			m.Prio = r.u32()
		case "deadline_ms":
			m.DeadlineMS = r.u64()
		case "partner_ms":
			m.PartnerMS = r.u64()
		case "req":
			m.Req = r.str(MaxReqBytes)
		case "after":
			m.After = r.u64()
		default:
			r.skip()
		}
	}
	n.check(r)
	if r.err == nil && m.Skip != nil && len(m.Skip) != len(m.Blocks) {
		r.field = []byte("skip")
		r.fail("%d groups, but blocks has %d", len(m.Skip), len(m.Blocks))
	}
	for i, s := range m.Skip {
		if r.err == nil && s > m.Tokens {
			r.field = []byte("skip")
			r.fail("group %d: %d of %d tokens", i, s, m.Tokens)
		}
	}
	if r.err == nil && m.Tokens == 0 {
		r.field = []byte("tokens")
		r.fail("0, want at least 1")
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	return m, nil
}

// Append encodes m.
func (m *Expect) Append(b []byte) []byte {
	b = appendMap(b, 10+afterKeys(m.After))
	b = appendBin(appendStr(b, "xfer"), m.Xfer[:])
	b = appendBin(appendStr(b, "hash"), m.Hash[:])
	b = appendStr(appendStr(b, "peer"), m.Peer)
	b = appendUint(appendStr(b, "tokens"), uint64(m.Tokens))
	b = appendArray(appendStr(b, "skip"), len(m.Skip))
	for _, s := range m.Skip {
		b = appendUint(b, uint64(s))
	}
	b = appendBlocks(appendStr(b, "blocks"), m.Blocks)
	b = appendUint(appendStr(b, "prio"), uint64(m.Prio))
	b = appendUint(appendStr(b, "deadline_ms"), m.DeadlineMS)
	b = appendUint(appendStr(b, "partner_ms"), m.PartnerMS)
	b = appendStr(appendStr(b, "req"), m.Req)
	return appendAfter(b, m.After)
}

// afterKeys is how many keys appendAfter adds.
func afterKeys(mark uint64) int {
	if mark == 0 {
		return 0
	}
	return 1
}

func appendAfter(b []byte, mark uint64) []byte {
	if mark == 0 {
		return b
	}
	return appendUint(appendStr(b, "after"), mark)
}

// DecodeCopy decodes a COPY body. The caller checks that its blocks lie inside the regions and do
// not overlap.
func DecodeCopy(b []byte) (*Copy, error) {
	r := &reader{what: "COPY", b: b}
	m := &Copy{}
	n := need{names: []string{"src", "dst", "blocks"}}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "src":
			m.Src, n.got = r.u32(), n.got|1
		case "dst":
			m.Dst, n.got = r.u32(), n.got|2
		case "blocks":
			m.Blocks, n.got = r.copyBlocks(), n.got|4
		case "deadline_ms":
			m.DeadlineMS = r.u64()
		case "req":
			m.Req = r.str(MaxReqBytes)
		case "after":
			m.After = r.u64()
		default:
			r.skip()
		}
	}
	n.check(r)
	if err := r.end(); err != nil {
		return nil, err
	}
	return m, nil
}

func (r *reader) copyBlocks() []CopyBlock {
	b := r.bin(MaxCopyBlocks * copyBlockBytes)
	if r.err == nil && (len(b) == 0 || len(b)%copyBlockBytes != 0) {
		r.fail("bin of %d bytes, want 1 to %d blocks of %d", len(b), MaxCopyBlocks, copyBlockBytes)
	}
	if r.err != nil {
		return nil
	}
	out := make([]CopyBlock, len(b)/copyBlockBytes)
	for i := range out {
		p := b[i*copyBlockBytes:]
		out[i] = CopyBlock{binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:]),
			binary.LittleEndian.Uint64(p[16:])}
	}
	return out
}

// Append encodes m.
func (m *Copy) Append(b []byte) []byte {
	b = appendMap(b, 5+afterKeys(m.After))
	b = appendUint(appendStr(b, "src"), uint64(m.Src))
	b = appendUint(appendStr(b, "dst"), uint64(m.Dst))
	b = appendBinHead(appendStr(b, "blocks"), len(m.Blocks)*copyBlockBytes)
	for _, k := range m.Blocks {
		for _, v := range [...]uint64{k.SrcOff, k.DstOff, k.Len} {
			b = binary.LittleEndian.AppendUint64(b, v)
		}
	}
	b = appendUint(appendStr(b, "deadline_ms"), m.DeadlineMS)
	b = appendStr(appendStr(b, "req"), m.Req)
	return appendAfter(b, m.After)
}

// DecodeStep decodes a STEP body.
func DecodeStep(b []byte) (*Step, error) {
	r := &reader{what: "STEP", b: b}
	m := &Step{}
	n := need{names: []string{"step", "reqs"}}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "step":
			m.Step, n.got = r.u64(), n.got|1
		case "reqs":
			n.got |= 2
			c := r.arrayLen(MaxStepReqs)
			m.Reqs = nil
			for range c {
				var q StepReq
				k := need{names: []string{"lease", "end"}}
				for j := r.mapLen(); j > 0 && r.err == nil; j-- {
					switch string(r.key()) {
					case "lease":
						q.Lease, k.got = r.u64(), k.got|1
					case "end":
						q.End, k.got = r.u32(), k.got|2
					case "blocks":
						q.Blocks = r.blocks()
					case "attempt":
						q.Attempt = r.u32()
					default:
						r.skip()
					}
				}
				k.check(r)
				if r.err != nil {
					break
				}
				m.Reqs = append(m.Reqs, q)
			}
		default:
			r.skip()
		}
	}
	n.check(r)
	if r.err == nil && m.Step == 0 {
		r.field = []byte("step")
		r.fail("0, steps count from 1")
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	return m, nil
}

// Append encodes m.
func (m *Step) Append(b []byte) []byte {
	b = appendMap(b, 2)
	b = appendUint(appendStr(b, "step"), m.Step)
	b = appendArray(appendStr(b, "reqs"), len(m.Reqs))
	for _, q := range m.Reqs {
		b = appendMap(b, 4)
		b = appendUint(appendStr(b, "lease"), q.Lease)
		b = appendUint(appendStr(b, "end"), uint64(q.End))
		b = appendBlocks(appendStr(b, "blocks"), q.Blocks)
		b = appendUint(appendStr(b, "attempt"), uint64(q.Attempt))
	}
	return b
}

// DecodeCancel decodes a CANCEL body.
func DecodeCancel(b []byte) (*Cancel, error) {
	r := &reader{what: "CANCEL", b: b}
	m := &Cancel{}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "reason":
			m.Reason = r.str(MaxTextBytes)
		default:
			r.skip()
		}
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	return m, nil
}

// Append encodes m.
func (m *Cancel) Append(b []byte) []byte {
	return appendStr(appendStr(appendMap(b, 1), "reason"), clip(m.Reason, MaxTextBytes))
}

// DecodeEmpty checks a body without keys of its own; what is the record's name in errors.
func DecodeEmpty(what string, b []byte) (*Empty, error) {
	r := &reader{what: what, b: b}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		r.key()
		r.skip()
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	return &Empty{}, nil
}

// Append encodes m.
func (m *Empty) Append(b []byte) []byte { return appendMap(b, 0) }

// DecodeReceived decodes a RECEIVED body.
func DecodeReceived(b []byte) (*Received, error) {
	r := &reader{what: "RECEIVED", b: b}
	m := &Received{}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "bytes":
			m.Bytes = r.u64()
		case "us":
			m.US = r.u64()
		case "transport":
			m.Transport = r.str(MaxNameBytes)
		case "reason":
			m.Reason = r.str(MaxTextBytes)
		case "recompute":
			c := r.arrayLen(MaxRecompute)
			m.Recompute = nil
			for range c {
				if k := r.arrayLen(2); r.err == nil && k != 2 {
					r.fail("%d elements, want [start, end]", k)
				}
				v := [2]uint32{r.u32(), r.u32()}
				if r.err != nil {
					break
				}
				if v[0] >= v[1] {
					r.fail("range [%d, %d)", v[0], v[1])
				}
				m.Recompute = append(m.Recompute, v)
			}
		default:
			r.skip()
		}
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	return m, nil
}

// Append encodes m. If there are more than MaxRecompute ranges it encodes none, which means
// everything.
func (m *Received) Append(b []byte) []byte {
	b = appendMap(b, 5)
	b = appendUint(appendStr(b, "bytes"), m.Bytes)
	b = appendUint(appendStr(b, "us"), m.US)
	b = appendStr(appendStr(b, "transport"), clip(m.Transport, MaxNameBytes))
	b = appendStr(appendStr(b, "reason"), clip(m.Reason, MaxTextBytes))
	ranges := m.Recompute
	if len(ranges) > MaxRecompute {
		ranges = nil
	}
	b = appendArray(appendStr(b, "recompute"), len(ranges))
	for _, v := range ranges {
		b = appendUint(appendUint(appendArray(b, 2), uint64(v[0])), uint64(v[1]))
	}
	return b
}

// DecodeSent decodes a SENT body.
func DecodeSent(b []byte) (*Sent, error) {
	r := &reader{what: "SENT", b: b}
	m := &Sent{}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "grants":
			m.Grants = r.u32()
		case "bytes":
			m.Bytes = r.u64()
		case "reason":
			m.Reason = r.str(MaxTextBytes)
		default:
			r.skip()
		}
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	return m, nil
}

// Append encodes m.
func (m *Sent) Append(b []byte) []byte {
	b = appendMap(b, 3)
	b = appendUint(appendStr(b, "grants"), uint64(m.Grants))
	b = appendUint(appendStr(b, "bytes"), m.Bytes)
	return appendStr(appendStr(b, "reason"), clip(m.Reason, MaxTextBytes))
}

// DecodeRecord decodes a body by its record type, as the board numbers them.
func DecodeRecord(typ uint16, b []byte) (any, error) {
	if len(b) > MaxRecordBytes {
		return nil, &Error{Message: "record", Problem: fmt.Sprintf("%d bytes, at most %d", len(b),
			MaxRecordBytes)}
	}
	switch typ {
	case 1:
		return DecodeStep(b)
	case 2:
		return DecodeIntent(b)
	case 3:
		return DecodeExpect(b)
	case 4:
		return DecodeCancel(b)
	case 5:
		return DecodeEmpty("PREEMPT", b)
	case 6:
		return DecodeEmpty("HOLD", b)
	case 7:
		return DecodeCopy(b)
	case 32:
		return DecodeReceived(b)
	case 33:
		return DecodeSent(b)
	}
	return nil, &Error{Message: "record", Field: "type", Problem: fmt.Sprintf("unknown type %d", typ)}
}
