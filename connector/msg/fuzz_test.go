package msg

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/testutil"
)

// hostile are inputs that announce more than they hold, nest without end, or lie about types.
func hostile() [][]byte {
	deep := bytes.Repeat([]byte{0x81, 0xa1, 'x'}, 100_000)
	arrays := bytes.Repeat([]byte{0x91}, 100_000)
	return [][]byte{
		{}, {0xc1}, {0x80}, {0x81}, {0x90},
		{0xdf, 0xff, 0xff, 0xff, 0xff},
		{0xde, 0xff, 0xff, 0xa1, 'x'},
		append([]byte{0x81, 0xa1, 'x'}, 0xdd, 0x7f, 0xff, 0xff, 0xff),
		append([]byte{0x81, 0xa6}, append([]byte("blocks"), 0x91, 0xc6, 0xff, 0xff, 0xff, 0xff)...),
		append([]byte{0x81, 0xa6}, append([]byte("blocks"), 0xdd, 0xff, 0xff, 0xff, 0xff)...),
		append([]byte{0x81, 0xa4}, append([]byte("reqs"), 0xdd, 0xff, 0xff, 0xff, 0xff)...),
		append([]byte{0x81, 0xa7}, append([]byte("regions"), 0xdd, 0xff, 0xff, 0xff, 0xff)...),
		append([]byte{0x81, 0xa9}, append([]byte("recompute"), 0xdc, 0xff, 0xff)...),
		append([]byte{0x81, 0xa9}, append([]byte("transfers"), 0xdf, 0xff, 0xff, 0xff, 0xff)...),
		append([]byte{0x81, 0xa8}, append([]byte("features"), 0xdc, 0xff, 0xff)...),
		append([]byte{0x81, 0xa6}, append([]byte("layout"), deep...)...),
		deep, arrays, append([]byte{0x81, 0xa1, 'x'}, arrays...),
	}
}

func seeds(f *testing.F, kind string) {
	socket, records := goldenVectors(f)
	for _, v := range append(socket, records...) {
		if v.Kind != kind {
			continue
		}
		b, err := hex.DecodeString(v.Hex)
		if err != nil {
			f.Fatal(err)
		}
		if kind == "socket" {
			f.Add(b)
		} else {
			f.Add(recordTypes[v.Type], b)
		}
	}
	packets, bodies := dear(8 << 10)
	if kind == "socket" {
		for _, b := range packets {
			f.Add(b)
		}
	} else {
		for name, b := range bodies {
			f.Add(typeOf(name), b)
		}
	}
	for _, h := range hostile() {
		if len(h) > 4096 {
			continue // TestHostile has them; they only slow mutation down
		}
		if kind == "socket" {
			for t := TypeHello; t <= lastType; t++ {
				f.Add(append(binary.LittleEndian.AppendUint32(nil, uint32(t)), h...))
			}
		} else {
			for _, t := range recordTypes {
				f.Add(t, h)
			}
		}
	}
}

// maxDecoded bounds what the decoder may allocate in all for n bytes. It makes a list when it reads
// the list's head, if a byte for each element is left. The largest list for its bytes is
// REGISTER.regions, once: the decoder stops at an element of another type. Complete elements may
// repeat; TestMaxDecoded logs how much each becomes.
func maxDecoded(n int) uint64 {
	return uint64(min(n, MaxRegions))*uint64(reflect.TypeFor[Region]().Size()) + 32*uint64(n)
}

// dear are inputs whose bytes become the most memory: of each list, as many as there may be, again
// and again.
func dear(size int) (packets, records map[string][]byte) {
	again := func(key string, value []byte) []byte {
		one := append(appendStr(nil, key), value...)
		n := max(1, size/len(one))
		return append(appendMap(nil, n), bytes.Repeat(one, n)...)
	}
	list := func(n int, element ...byte) []byte {
		return append(appendArray(nil, n), bytes.Repeat(element, n)...)
	}
	packet := func(t Type, body []byte) []byte {
		return append(binary.LittleEndian.AppendUint32(nil, uint32(t)), body...)
	}
	req := append([]byte{0x82, 0xa5}, "lease\x01\xa3end\x01"...)
	tables := append(append([]byte{0x83, 0xa5}, "lease\x01\xa3end\x01\xa6blocks"...),
		list(15, 0xc4, 0)...)
	device := append([]byte{0x83, 0xa6},
		"region\xc4\x1023456789abcdef01\xa4kind\xa6device\xa5bytes\x01"...)
	return map[string][]byte{
			"regions announced": packet(TypeRegister, append(append([]byte{0x81, 0xa7},
				"regions\xdc\x04\x00"...), make([]byte, MaxRegions)...)),
			"no such regions": packet(TypeRegister, append([]byte{0x81, 0xa7}, "regions\xdc\x04\x00"...)),
			"regions":         packet(TypeRegister, again("regions", list(MaxRegions, device...))),
			"no regions":      packet(TypeRegister, again("regions", list(0))),
			"one feature":     packet(TypeHello, again("features", list(1, 0xa0))),
			"features":        packet(TypeHello, again("features", list(MaxFeatures, 0xa0))),
		}, map[string][]byte{
			"STEP 0":   again("reqs", list(1, req...)),
			"STEP":     again("reqs", list(257, req...)),
			"STEP 2":   again("reqs", list(513, req...)),
			"STEP 3":   again("reqs", list(65, tables...)),
			"INTENT 0": again("blocks", list(1, 0xc4, 0)),
			"INTENT":   again("blocks", list(MaxGroups, 0xc4, 0)),
			"INTENT 2": again("blocks", list(MaxGroups, 0xc4, 4, 1, 1, 1, 1)),
			"INTENT 3": again("steps", list(1, 0x92, 1, 1)),
			"EXPECT":   again("skip", list(MaxGroups, 0)),
			"COPY":     again("blocks", append([]byte{0xc4, 24}, make([]byte, 24)...)),
			"RECEIVED": again("recompute", list(129, 0x92, 1, 2)),
		}
}

// typeOf is the record type in the name of an input.
func typeOf(name string) uint16 {
	what, _, _ := strings.Cut(name, " ")
	return recordTypes[what]
}

// TestMaxDecoded: the bound of the fuzz tests holds for what it was made for.
func TestMaxDecoded(t *testing.T) {
	measure := func(what string, b []byte, f func()) {
		testutil.AllocatesAtMost(t, maxDecoded(len(b)), what, f)
		n := testutil.Allocates(f)
		t.Logf("%s: %d bytes became %d, %.1f for each; at most %d", what, len(b), n,
			float64(n)/float64(len(b)), maxDecoded(len(b)))
	}
	packets, records := dear(60 << 10)
	for name, b := range packets {
		measure(name, b, func() { _, _ = DecodePacket(b) })
	}
	for name, b := range records {
		measure(name, b, func() { _, _ = DecodeRecord(typeOf(name), b) })
	}
}

// FuzzPacket: no packet makes the decoder fail otherwise than by an error of ours, nor allocate
// more than its bytes allow, and what decodes encodes to a fixed point.
func FuzzPacket(f *testing.F) {
	seeds(f, "socket")
	f.Fuzz(func(t *testing.T, b []byte) {
		var m Message
		var err error
		testutil.AllocatesAtMost(t, maxDecoded(len(b)), fmt.Sprintf("a packet of %d bytes", len(b)),
			func() { m, err = DecodePacket(b) })
		if err != nil {
			var e *Error
			var u *UnknownType
			if !errors.As(err, &e) && !errors.As(err, &u) {
				t.Fatalf("error of type %T: %v", err, err)
			}
			return
		}
		once, err := EncodePacket(m)
		if err != nil {
			return // grew past a packet
		}
		again, err := DecodePacket(once)
		if err != nil {
			t.Fatalf("own encoding refused: %v\n%x", err, once)
		}
		twice, err := EncodePacket(again)
		if err != nil || !bytes.Equal(once, twice) {
			t.Fatalf("not a fixed point: %v\n%x\n%x", err, once, twice)
		}
	})
}

// FuzzRecord is the same for the bodies of records.
func FuzzRecord(f *testing.F) {
	seeds(f, "record")
	f.Fuzz(func(t *testing.T, typ uint16, b []byte) {
		var m any
		var err error
		testutil.AllocatesAtMost(t, maxDecoded(len(b)), fmt.Sprintf("a record of %d bytes", len(b)),
			func() { m, err = DecodeRecord(typ, b) })
		if err != nil {
			var e *Error
			if !errors.As(err, &e) {
				t.Fatalf("error of type %T: %v", err, err)
			}
			return
		}
		once := m.(interface{ Append([]byte) []byte }).Append(nil)
		again, err := DecodeRecord(typ, once)
		if err != nil {
			t.Fatalf("own encoding refused: %v\n%x", err, once)
		}
		if twice := again.(interface{ Append([]byte) []byte }).Append(nil); !bytes.Equal(once, twice) {
			t.Fatalf("not a fixed point:\n%x\n%x", once, twice)
		}
	})
}

// TestRepeatedKeys: a list that comes twice is no way around its bound.
func TestRepeatedKeys(t *testing.T) {
	list := func(key string, n int, element []byte) []byte {
		return append(appendArray(appendStr(nil, key), n), bytes.Repeat(element, n)...)
	}
	body := func(m interface{ Append([]byte) []byte }, lists ...[]byte) []byte {
		b := m.Append(nil)
		b[0] += byte(len(lists)) // a map of fewer than 16 keys
		return append(b, bytes.Join(lists, nil)...)
	}
	in := &Intent{Tokens: 1, Fanout: 1, Blocks: [][]uint32{{1}}}
	var steps [][]byte
	for i := range 3 {
		b := appendArray(appendStr(nil, "steps"), MaxPendingSteps)
		for s := range MaxPendingSteps {
			b = appendUint(appendUint(appendArray(b, 2), uint64(1+i*MaxPendingSteps+s)), 1)
		}
		steps = append(steps, b)
	}
	got, err := DecodeIntent(body(in, steps...))
	if err != nil || len(got.Steps) != MaxPendingSteps || got.Steps[0].Step != 2*MaxPendingSteps+1 {
		t.Errorf("INTENT.steps three times: %v, %d steps", err, len(got.Steps))
	}
	req := append(appendMap(nil, 2), 0xa5, 'l', 'e', 'a', 's', 'e', 1, 0xa3, 'e', 'n', 'd', 1)
	reqs := list("reqs", MaxStepReqs, req)
	if got, err := DecodeStep(body(&Step{Step: 1}, reqs, reqs)); err != nil ||
		len(got.Reqs) != MaxStepReqs {
		t.Errorf("STEP.reqs twice: %v", err)
	}
	ranges := list("recompute", MaxRecompute, []byte{0x92, 1, 2})
	if got, err := DecodeReceived(body(&Received{}, ranges, ranges)); err != nil ||
		len(got.Recompute) != MaxRecompute {
		t.Errorf("RECEIVED.recompute twice: %v", err)
	}
	ex := &Expect{Peer: "p:1", Tokens: 9, Skip: []uint32{1}, Blocks: [][]uint32{{1}}}
	if got, err := DecodeExpect(body(ex, list("skip", 1, []byte{5}))); err != nil ||
		len(got.Skip) != 1 || got.Skip[0] != 5 {
		t.Errorf("EXPECT.skip twice: %v", err)
	}
}

// TestHostile: a lie about a length costs no memory.
func TestHostile(t *testing.T) {
	const allowed = 192 << 10
	for i, h := range hostile() {
		for typ := TypeHello; typ <= lastType; typ++ {
			p := append(binary.LittleEndian.AppendUint32(nil, uint32(typ)), h...)
			testutil.AllocatesAtMost(t, allowed, fmt.Sprintf("input %d as %s", i, typ),
				func() { _, _ = DecodePacket(p) })
		}
		for name, typ := range recordTypes {
			testutil.AllocatesAtMost(t, allowed, fmt.Sprintf("input %d as %s", i, name),
				func() { _, _ = DecodeRecord(typ, h) })
		}
	}
	if _, err := DecodePacket(make([]byte, MaxPacketBytes+1)); err == nil {
		t.Error("an oversized packet decodes")
	}
	if _, err := DecodeRecord(1, make([]byte, MaxRecordBytes+1)); err == nil {
		t.Error("an oversized record decodes")
	}
	if _, err := EncodePacket(&Register{Layout: make([]byte, MaxPacketBytes)}); err == nil {
		t.Error("an oversized packet encodes")
	}
}

func BenchmarkDecodeStep(b *testing.B) {
	table := make([]uint32, 128)
	body := (&Step{Step: 7, Reqs: []StepReq{{Lease: 1, End: 2048, Blocks: [][]uint32{table}},
		{Lease: 2, End: 16, Blocks: [][]uint32{table}}}}).Append(nil)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodeStep(body); err != nil {
			b.Fatal(err)
		}
	}
}
