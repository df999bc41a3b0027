package msg

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// EncodePacket encodes a message with its type in front.
func EncodePacket(m Message) ([]byte, error) {
	b := m.append(binary.LittleEndian.AppendUint32(make([]byte, 0, 256), uint32(m.Type())))
	if len(b) > MaxPacketBytes {
		return nil, &Error{Message: m.Type().String(),
			Problem: fmt.Sprintf("%d bytes encoded, at most %d", len(b), MaxPacketBytes)}
	}
	return b, nil
}

// DecodePacket decodes one packet. An unknown type is an *UnknownType, so that a caller can answer
// and go on.
func DecodePacket(p []byte) (Message, error) {
	if len(p) < 4 {
		return nil, &Error{Message: "packet", Problem: fmt.Sprintf("%d bytes, shorter than its type",
			len(p))}
	}
	if len(p) > MaxPacketBytes {
		return nil, &Error{Message: "packet", Problem: fmt.Sprintf("%d bytes, at most %d", len(p),
			MaxPacketBytes)}
	}
	t := Type(binary.LittleEndian.Uint32(p))
	r := &reader{what: t.String(), b: p[4:]}
	var m Message
	switch t {
	case TypeHello:
		m = readHello(r)
	case TypeWelcome:
		m = readWelcome(r)
	case TypeRegister:
		m = readRegister(r)
	case TypeRegistered:
		m = readRegistered(r)
	case TypeError:
		m = readError(r)
	case TypeAwait:
		m = readAwait(r)
	case TypeAdmitted:
		m = readAdmitted(r)
	case TypeBye:
		m = readBye(r)
	case TypeStats:
		m = readStats(r)
	case TypeDecline:
		m = readDecline(r)
	default:
		return nil, &UnknownType{t}
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	return m, nil
}

// UnknownType is a packet of a type that this version does not support.
type UnknownType struct{ Type Type }

func (e *UnknownType) Error() string {
	return fmt.Sprintf("packet: unknown type %d, known are 1 to %d", uint32(e.Type),
		uint32(TypeDecline))
}

func readHello(r *reader) *Hello {
	m := &Hello{}
	n := need{names: []string{"id", "min", "max", "role", "boot"}}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "id":
			m.ID, n.got = r.u64(), n.got|1
		case "min":
			m.Min, n.got = Version(r.u32()), n.got|2
		case "max":
			m.Max, n.got = Version(r.u32()), n.got|4
		case "role":
			m.Role, n.got = r.str(MaxNameBytes), n.got|8
		case "boot":
			r.fixed(m.Boot[:])
			n.got |= 16
		case "engine":
			for j := r.mapLen(); j > 0 && r.err == nil; j-- {
				switch string(r.key()) {
				case "name":
					m.Engine.Name = r.str(MaxNameBytes)
				case "version":
					m.Engine.Version = r.str(MaxNameBytes)
				case "id":
					m.Engine.ID = r.str(MaxNameBytes)
				default:
					r.skip()
				}
			}
		case "ranks":
			for j := r.mapLen(); j > 0 && r.err == nil; j-- {
				switch string(r.key()) {
				case "dp":
					m.Ranks.DP = r.rank()
				case "pp":
					m.Ranks.PP = r.rank()
				case "tp":
					m.Ranks.TP = r.rank()
				case "pcp":
					m.Ranks.PCP = r.rank()
				case "dcp":
					m.Ranks.DCP = r.rank()
				default:
					r.skip()
				}
			}
		case "pid":
			m.PID = r.u32()
		case "features":
			m.Features = r.strs(MaxFeatures)
		default:
			r.skip()
		}
	}
	n.check(r)
	if r.err == nil && m.Role != RoleWorker && m.Role != RoleScheduler {
		r.field = []byte("role")
		r.fail("%q, want %q or %q", m.Role, RoleWorker, RoleScheduler)
	}
	return m
}

func (r *reader) rank() Rank {
	if n := r.arrayLen(2); r.err == nil && n != 2 {
		r.fail("%d elements, want [rank, size]", n)
	}
	v := Rank{r.u32(), r.u32()}
	if r.err == nil && v.Rank >= v.Size {
		r.fail("rank %d of %d", v.Rank, v.Size)
	}
	return v
}

func (m *Hello) append(b []byte) []byte {
	b = appendMap(b, 9)
	b = appendUint(appendStr(b, "id"), m.ID)
	b = appendUint(appendStr(b, "min"), uint64(m.Min))
	b = appendUint(appendStr(b, "max"), uint64(m.Max))
	b = appendStr(appendStr(b, "role"), m.Role)
	b = appendBin(appendStr(b, "boot"), m.Boot[:])
	b = appendMap(appendStr(b, "engine"), 3)
	b = appendStr(appendStr(b, "name"), m.Engine.Name)
	b = appendStr(appendStr(b, "version"), m.Engine.Version)
	b = appendStr(appendStr(b, "id"), m.Engine.ID)
	b = appendMap(appendStr(b, "ranks"), 5)
	for _, k := range []struct {
		name string
		rank Rank
	}{{"dp", m.Ranks.DP}, {"pp", m.Ranks.PP}, {"tp", m.Ranks.TP}, {"pcp", m.Ranks.PCP},
		{"dcp", m.Ranks.DCP}} {
		b = appendArray(appendStr(b, k.name), 2)
		b = appendUint(b, uint64(k.rank.Rank))
		b = appendUint(b, uint64(max(k.rank.Size, 1)))
	}
	b = appendUint(appendStr(b, "pid"), uint64(m.PID))
	return appendStrs(appendStr(b, "features"), m.Features)
}

func readWelcome(r *reader) *Welcome {
	m := &Welcome{}
	n := need{names: []string{"id", "version", "boot"}}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "id":
			m.ID, n.got = r.u64(), n.got|1
		case "version":
			m.Version, n.got = Version(r.u32()), n.got|2
		case "boot":
			r.fixed(m.Boot[:])
			n.got |= 4
		case "node":
			m.Node = r.str(MaxNameBytes)
		case "endpoint":
			m.Endpoint = r.str(MaxNameBytes)
		case "host":
			m.Host = r.str(MaxNameBytes)
		case "features":
			m.Features = r.strs(MaxFeatures)
		case "fenced":
			m.Fenced = r.bool()
		case "limits":
			for j := r.mapLen(); j > 0 && r.err == nil; j-- {
				switch string(r.key()) {
				case "leases":
					m.Limits.Leases = r.u64()
				case "regions":
					m.Limits.Regions = r.u64()
				case "record_bytes":
					m.Limits.RecordBytes = r.u64()
				default:
					r.skip()
				}
			}
		case "deadline_ms":
			m.DeadlineMS = r.u64()
		case "partner_ms":
			m.PartnerMS = r.u64()
		case "grace_ms":
			m.GraceMS = r.u64()
		default:
			r.skip()
		}
	}
	n.check(r)
	return m
}

func (m *Welcome) append(b []byte) []byte {
	b = appendMap(b, 12)
	b = appendUint(appendStr(b, "id"), m.ID)
	b = appendUint(appendStr(b, "version"), uint64(m.Version))
	b = appendBin(appendStr(b, "boot"), m.Boot[:])
	b = appendStr(appendStr(b, "node"), m.Node)
	b = appendStr(appendStr(b, "endpoint"), m.Endpoint)
	b = appendStr(appendStr(b, "host"), m.Host)
	b = appendStrs(appendStr(b, "features"), m.Features)
	b = appendBool(appendStr(b, "fenced"), m.Fenced)
	b = appendMap(appendStr(b, "limits"), 3)
	b = appendUint(appendStr(b, "leases"), m.Limits.Leases)
	b = appendUint(appendStr(b, "regions"), m.Limits.Regions)
	b = appendUint(appendStr(b, "record_bytes"), m.Limits.RecordBytes)
	b = appendUint(appendStr(b, "deadline_ms"), m.DeadlineMS)
	b = appendUint(appendStr(b, "partner_ms"), m.PartnerMS)
	return appendUint(appendStr(b, "grace_ms"), m.GraceMS)
}

func readRegister(r *reader) *Register {
	m := &Register{}
	n := need{names: []string{"id", "session", "regions", "layout", "fds"}}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "id":
			m.ID, n.got = r.u64(), n.got|1
		case "session":
			r.fixed(m.Session[:])
			n.got |= 2
		case "regions":
			n.got |= 4
			c := r.arrayLen(MaxRegions)
			if r.err == nil {
				m.Regions = make([]Region, 0, min(c, MaxRegions))
			}
			for range c {
				m.Regions = append(m.Regions, r.region())
				if r.err != nil {
					break
				}
			}
		case "layout":
			n.got |= 8
			m.Layout = r.rawMap()
		case "fds":
			n.got |= 16
			f, w := need{names: []string{"flags", "rings", "doorbell", "bell"}},
				need{names: []string{"work", "work_bell"}}
			var work WorkFDs
			for j := r.mapLen(); j > 0 && r.err == nil; j-- {
				switch string(r.key()) {
				case "flags":
					m.FDs.Flags, f.got = r.u32(), f.got|1
				case "rings":
					m.FDs.Rings, f.got = r.u32(), f.got|2
				case "doorbell":
					m.FDs.Doorbell, f.got = r.u32(), f.got|4
				case "bell":
					m.FDs.Bell, f.got = r.u32(), f.got|8
				case "work":
					work.Board, w.got = r.u32(), w.got|1
				case "work_bell":
					work.Bell, w.got = r.u32(), w.got|2
				default:
					r.skip()
				}
			}
			f.check(r)
			if w.got != 0 {
				m.Work = &work
				w.check(r)
			}
		default:
			r.skip()
		}
	}
	n.check(r)
	return m
}

func (r *reader) region() Region {
	v := Region{FD: NoFD}
	n := need{names: []string{"region", "kind", "bytes", "fd"}}
	for j := r.mapLen(); j > 0 && r.err == nil; j-- {
		switch string(r.key()) {
		case "region":
			r.fixed(v.Region[:])
			n.got |= 1
		case "kind":
			v.Kind, n.got = r.str(MaxNameBytes), n.got|2
		case "bytes":
			v.Bytes, n.got = r.u64(), n.got|4
		case "addr":
			v.Addr = r.u64()
		case "fd":
			v.FD, n.got = r.u32(), n.got|8
		case "handle":
			v.Handle = append([]byte(nil), r.bin(MaxHandleBytes)...)
		default:
			r.skip()
		}
	}
	if v.Kind == KindDevice {
		n.got |= 8
	}
	n.check(r)
	return v
}

func (m *Register) append(b []byte) []byte {
	b = appendMap(b, 5)
	b = appendUint(appendStr(b, "id"), m.ID)
	b = appendBin(appendStr(b, "session"), m.Session[:])
	b = appendArray(appendStr(b, "regions"), len(m.Regions))
	for _, v := range m.Regions {
		n := 3
		for _, present := range []bool{v.Kind == KindProcess, v.Kind == KindDevice, v.FD != NoFD} {
			if present {
				n++
			}
		}
		b = appendMap(b, n)
		b = appendBin(appendStr(b, "region"), v.Region[:])
		b = appendStr(appendStr(b, "kind"), v.Kind)
		b = appendUint(appendStr(b, "bytes"), v.Bytes)
		if v.Kind == KindProcess {
			b = appendUint(appendStr(b, "addr"), v.Addr)
		}
		if v.Kind == KindDevice {
			b = appendBin(appendStr(b, "handle"), v.Handle)
		}
		if v.FD != NoFD {
			b = appendUint(appendStr(b, "fd"), uint64(v.FD))
		}
	}
	b = append(appendStr(b, "layout"), m.Layout...)
	n := 4
	if m.Work != nil {
		n = 6
	}
	b = appendMap(appendStr(b, "fds"), n)
	b = appendUint(appendStr(b, "flags"), uint64(m.FDs.Flags))
	b = appendUint(appendStr(b, "rings"), uint64(m.FDs.Rings))
	b = appendUint(appendStr(b, "doorbell"), uint64(m.FDs.Doorbell))
	b = appendUint(appendStr(b, "bell"), uint64(m.FDs.Bell))
	if m.Work != nil {
		b = appendUint(appendStr(b, "work"), uint64(m.Work.Board))
		b = appendUint(appendStr(b, "work_bell"), uint64(m.Work.Bell))
	}
	return b
}

func readRegistered(r *reader) *Registered {
	m := &Registered{}
	n := need{names: []string{"id", "fingerprint"}}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "id":
			m.ID, n.got = r.u64(), n.got|1
		case "fingerprint":
			r.fixed(m.Fingerprint[:])
			n.got |= 2
		case "geometry":
			r.fixed(m.Geometry[:])
		default:
			r.skip()
		}
	}
	n.check(r)
	return m
}

func (m *Registered) append(b []byte) []byte {
	b = appendMap(b, 3)
	b = appendUint(appendStr(b, "id"), m.ID)
	b = appendBin(appendStr(b, "fingerprint"), m.Fingerprint[:])
	return appendBin(appendStr(b, "geometry"), m.Geometry[:])
}

func readError(r *reader) *ErrorMessage {
	m := &ErrorMessage{}
	n := need{names: []string{"code"}}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "id":
			m.ID = r.u64()
		case "code":
			m.Code, n.got = r.str(MaxNameBytes), n.got|1
		case "message":
			m.Message = r.str(MaxTextBytes)
		case "field":
			m.Field = r.str(MaxNameBytes)
		case "remedy":
			m.Remedy = r.str(MaxTextBytes)
		case "fatal":
			m.Fatal = r.bool()
		default:
			r.skip()
		}
	}
	n.check(r)
	return m
}

func (m *ErrorMessage) append(b []byte) []byte {
	b = appendMap(b, 6)
	b = appendUint(appendStr(b, "id"), m.ID)
	b = appendStr(appendStr(b, "code"), m.Code)
	b = appendStr(appendStr(b, "message"), clip(m.Message, MaxTextBytes))
	b = appendStr(appendStr(b, "field"), clip(m.Field, MaxNameBytes))
	b = appendStr(appendStr(b, "remedy"), clip(m.Remedy, MaxTextBytes))
	return appendBool(appendStr(b, "fatal"), m.Fatal)
}

func readAwait(r *reader) *Await {
	m := &Await{}
	n := need{names: []string{"id", "xfer", "hash", "peer"}}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "id":
			m.ID, n.got = r.u64(), n.got|1
		case "xfer":
			r.fixed(m.Xfer[:])
			n.got |= 2
		case "hash":
			r.fixed(m.Hash[:])
			n.got |= 4
		case "peer":
			m.Peer, n.got = r.str(MaxNameBytes), n.got|8
		case "tokens":
			m.Tokens = r.u32()
		case "ttl_ms":
			m.TTLMS = r.u64()
		default:
			r.skip()
		}
	}
	n.check(r)
	return m
}

func (m *Await) append(b []byte) []byte {
	b = appendMap(b, 6)
	b = appendUint(appendStr(b, "id"), m.ID)
	b = appendBin(appendStr(b, "xfer"), m.Xfer[:])
	b = appendBin(appendStr(b, "hash"), m.Hash[:])
	b = appendStr(appendStr(b, "peer"), m.Peer)
	b = appendUint(appendStr(b, "tokens"), uint64(m.Tokens))
	return appendUint(appendStr(b, "ttl_ms"), m.TTLMS)
}

func readAdmitted(r *reader) *Admitted {
	m := &Admitted{}
	n := need{names: []string{"id", "state"}}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "id":
			m.ID, n.got = r.u64(), n.got|1
		case "state":
			m.State, n.got = r.str(MaxNameBytes), n.got|2
		case "tokens":
			m.Tokens = r.u32()
		case "message":
			m.Message = r.str(MaxTextBytes)
		default:
			r.skip()
		}
	}
	n.check(r)
	return m
}

func (m *Admitted) append(b []byte) []byte {
	b = appendMap(b, 4)
	b = appendUint(appendStr(b, "id"), m.ID)
	b = appendStr(appendStr(b, "state"), m.State)
	b = appendUint(appendStr(b, "tokens"), uint64(m.Tokens))
	return appendStr(appendStr(b, "message"), clip(m.Message, MaxTextBytes))
}

func readDecline(r *reader) *Decline {
	m := &Decline{}
	n := need{names: []string{"id", "xfer", "hash", "peer"}}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "id":
			m.ID, n.got = r.u64(), n.got|1
		case "xfer":
			r.fixed(m.Xfer[:])
			n.got |= 2
		case "hash":
			r.fixed(m.Hash[:])
			n.got |= 4
		case "peer":
			m.Peer, n.got = r.str(MaxNameBytes), n.got|8
		case "reason":
			m.Reason = r.str(MaxTextBytes)
		default:
			r.skip()
		}
	}
	n.check(r)
	return m
}

func (m *Decline) append(b []byte) []byte {
	b = appendMap(b, 5)
	b = appendUint(appendStr(b, "id"), m.ID)
	b = appendBin(appendStr(b, "xfer"), m.Xfer[:])
	b = appendBin(appendStr(b, "hash"), m.Hash[:])
	b = appendStr(appendStr(b, "peer"), m.Peer)
	return appendStr(appendStr(b, "reason"), clip(m.Reason, MaxTextBytes))
}

func readBye(r *reader) *Bye {
	m := &Bye{}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "reason":
			m.Reason = r.str(MaxTextBytes)
		default:
			r.skip()
		}
	}
	return m
}

func (m *Bye) append(b []byte) []byte {
	return appendStr(appendStr(appendMap(b, 1), "reason"), clip(m.Reason, MaxTextBytes))
}

func readStats(r *reader) *Stats {
	m := &Stats{}
	for i := r.mapLen(); i > 0 && r.err == nil; i-- {
		switch string(r.key()) {
		case "transfers":
			m.Transfers = r.counts()
		case "bytes":
			m.Bytes = r.counts()
		default:
			r.skip()
		}
	}
	return m
}

func (r *reader) counts() map[string]uint64 {
	n := r.mapLen()
	if n > MaxOutcomes {
		r.fail("%d entries, at most %d", n, MaxOutcomes)
	}
	if r.err != nil {
		return nil
	}
	out := make(map[string]uint64, n)
	for range n {
		// as it would be encoded: keys are sorted before
		k := strings.ToValidUTF8(r.str(MaxNameBytes), "?")
		v := r.u64()
		if r.err != nil {
			return nil
		}
		out[k] = v
	}
	return out
}

func (m *Stats) append(b []byte) []byte {
	b = appendMap(b, 2)
	b = appendCounts(appendStr(b, "transfers"), m.Transfers)
	return appendCounts(appendStr(b, "bytes"), m.Bytes)
}

func sortedKeys(m map[string]uint64) []string { return slices.Sorted(maps.Keys(m)) }

// clip shortens a text to the bound that readers accept.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "")
}
