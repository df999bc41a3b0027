package msg

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"
)

// lastType is the highest type of a packet.
const lastType = Type(len(typeNames) - 1)

// storeMessage is a message about stored pages or about regions: one with every key, and one with
// the required keys only.
type storeMessage struct {
	name       string
	full, bare any
}

func storeMessages() []storeMessage {
	hashes := append(seq(16, 0x60), seq(16, 0x80)...)
	pieces := []PagePiece{{0, 0, 8192, 4096}, {1, 1 << 33, 1 << 20, 1}}
	regions := []Region{{Region: b16(0xa0), Kind: KindMemfd, Bytes: 1 << 21, FD: 0},
		{Region: b16(0xb0), Kind: KindMemfd, Bytes: 1 << 21, FD: 0, Offset: 1 << 33}}
	namespace := Namespace{Weights: "w", DType: "bfloat16", Layout: "f", PageTokens: 64,
		PageBytes: 4097, Algorithm: "sha256_cbor"}
	full := namespace
	full.Seed, full.Adapter, full.Secret = "0", "lora", []byte("sixteen bytes...")
	get := Get{Space: 3, Hashes: hashes, HashBytes: 16, Blocks: []uint32{7, 70000}}
	fullGet := get
	fullGet.DeadlineMS, fullGet.Req, fullGet.StreamMark = 3000, "cmpl-1", 1<<40
	put := Put{Space: 3, Hashes: hashes, HashBytes: 16, Blocks: []uint32{7, 70000}}
	fullPut := put
	fullPut.DeadlineMS, fullPut.Req, fullPut.StreamMark = 3000, "cmpl-1", 7
	fullPut.Parent = seq(16, 0x40)
	results := []byte{PageHit | PageFlagMemory, PageMiss, PageStored | PageFlagDurable}
	return []storeMessage{
		{"open", &Open{ID: 5, Namespace: full, Pieces: pieces, Blocks: 80000},
			&Open{ID: 5, Namespace: namespace}},
		{"opened", &Opened{ID: 5, Space: 3}, &Opened{ID: 5, Space: 3}},
		{"exists", &Exists{ID: 6, Spaces: []SpaceRef{{3}, {1 << 60}}, Hashes: hashes, HashBytes: 16,
			PinMS: 200},
			&Exists{ID: 6, Spaces: []SpaceRef{{3}}, Hashes: hashes[:16], HashBytes: 16}},
		{"found", &Found{ID: 6, Pages: 11, Found: []byte{0xff, 7}}, &Found{ID: 6, Pages: 1,
			Found: []byte{0}}},
		{"unpin", &Unpin{Pin: 7}, &Unpin{Pin: 7}},
		{"close", &Close{Open: 5}, &Close{Open: 5}},
		{"remove", &Remove{ID: 8, Space: 3}, &Remove{ID: 8, Space: 3}},
		{"add_regions", &AddRegions{ID: 9, First: 70000, Regions: regions},
			&AddRegions{ID: 9}},
		{"drop_regions", &DropRegions{ID: 10, Regions: []uint32{1, 70000}},
			&DropRegions{ID: 10, Regions: []uint32{1}}},
		{"done", &Done{ID: 10, Members: 3, Confirmed: 2, Missing: "n: away"}, &Done{ID: 10}},
		{"get", &fullGet, &get},
		{"put", &fullPut, &put},
		{"segment", &Segment{ID: 11, Name: "pool", Region: 3, Offset: 4096, Bytes: 1 << 33,
			Grants: []SegmentGrant{{To: "*", Read: true}, {To: "n", Read: true, Write: true, Offset: 1,
				Bytes: 70000, EndMS: 1 << 40}}}, &Segment{ID: 11, Name: "p", Bytes: 1}},
		{"segment-file", &Segment{ID: 11, Name: "pool", Path: "dir/kv.bin", Offset: 4096, Bytes: 8192,
			Grants: []SegmentGrant{{To: "*", Read: true}}}, &Segment{ID: 11, Name: "p", Path: "f"}},
		{"revoke", &Revoke{ID: 12, Name: "pool", To: "n"}, &Revoke{ID: 12, Name: "pool"}},
		{"locate", &Locate{ID: 13, Peer: "h:1", Name: "pool", DeadlineMS: 3000},
			&Locate{ID: 13, Name: "pool"}},
		{"located", &Located{ID: 13, Bytes: 1 << 33, Read: true, Write: true, EndMS: 500},
			&Located{ID: 13, Bytes: 1}},
		{"notes", &Notes{ID: 14, WaitMS: 1000}, &Notes{ID: 14}},
		{"noted", &Noted{ID: 14, Notes: []Note{{Segment: "pool", From: "n", Write: true, Bytes: 1 << 33,
			Note: []byte{0, 1}}}}, &Noted{ID: 14}},
		{"batch", &Batch{Peer: "h:1", Segment: "pool", Write: true, List: 9, Offset: 48, Entries: 100000,
			Regions: []uint32{0, 70000}, Priority: 1, DeadlineMS: 3000, Wait: true, Note: []byte{7},
			Durable: true,
			Req:     "r", StreamMark: 1 << 40},
			&Batch{Segment: "pool", List: 9, Entries: 1, Regions: []uint32{0}}},
		{"received-entries", &Received{Bytes: 1, Reason: "late", Entries: []byte{0xf0, 1}},
			&Received{Entries: []byte{0}}},
		{"received-pages", &Received{Bytes: 1 << 33, TookUS: 1500, Reason: "page 2: EIO", Pages: results},
			&Received{Pages: results}},
	}
}

// storeVectors are the golden vectors of storeMessages, and a REGISTER without a layout.
func storeVectors(t testing.TB) (out []vector) {
	add := func(name string, m any, more kv) {
		v := vector{Name: name, Kind: "socket"}
		var b []byte
		if p, ok := m.(Message); ok {
			v.Type = p.Type().String()
			var err error
			if b, err = EncodePacket(p); err != nil {
				t.Fatal(err)
			}
		} else {
			kind, _, _ := strings.Cut(name, "-")
			v.Kind, v.Type = "record", strings.ToUpper(kind)
			b = m.(interface{ Append([]byte) []byte }).Append(nil)
		}
		head := 0
		if v.Kind == "socket" {
			head = 4
		}
		b[head] += byte(len(more) / 2) // a map of fewer than 16 keys
		v.Hex = hex.EncodeToString(append(b, appendAny(nil, more)[1:]...))
		out = append(out, v)
	}
	add("store-register", &Register{ID: 2, Session: b16(0x80), FDs: FDs{0, 1, 2, 3},
		Regions: []Region{{Region: b16(0xa0), Kind: KindMemfd, Bytes: 1 << 21, FD: 4}}}, nil)
	add("staged-register", &Register{ID: 2, Session: b16(0x80), FDs: FDs{0, 1, 2, 3},
		First: 70}, nil)
	for _, m := range storeMessages() {
		add(m.name, m.full, nil)
		add(m.name+"-older", m.bare, nil)
		add(m.name+"-newer", m.bare, unknown)
	}
	return out
}

// TestMaxKeys: a request with as many pages as are allowed fits a packet and a record, and one
// more is refused.
func TestMaxKeys(t *testing.T) {
	hashes, blocks := make([]byte, MaxKeys*MaxHashBytes), make([]uint32, MaxKeys)
	put := &Put{Hashes: hashes, HashBytes: MaxHashBytes, Blocks: blocks}
	b := put.Append(nil)
	if m, err := DecodeRecord(9, b); err != nil || len(m.(*Put).Blocks) != MaxKeys {
		t.Errorf("PUT of %d bytes: %v", len(b), err)
	}
	p, err := EncodePacket(&Exists{Spaces: []SpaceRef{{1}}, Hashes: hashes, HashBytes: MaxHashBytes})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := DecodePacket(p); err != nil {
		t.Error(err)
	}
	some := hashes[:2*MaxHashBytes]
	for _, c := range []struct {
		m    interface{ Append([]byte) []byte }
		typ  uint16
		want string
	}{
		{&Get{Hashes: append(hashes, 1), HashBytes: 64, Blocks: blocks}, 8, "GET.hashes"},
		{&Get{Hashes: hashes, HashBytes: 32, Blocks: blocks}, 8, "GET.hashes: 20000"},
		{&Get{Hashes: some, HashBytes: 64, Blocks: blocks[:3]}, 8, "GET.blocks: 3, but there are 2"},
		{&Get{Hashes: some, HashBytes: 63, Blocks: blocks[:2]}, 8, "GET.hashes: 128 bytes are no"},
		{&Get{Hashes: some, HashBytes: 7, Blocks: blocks[:2]}, 8, "GET.hash_bytes"},
		{&Get{HashBytes: 64, Blocks: blocks[:2]}, 8, "GET.hashes"},
		{&Put{Hashes: some, HashBytes: 64, Blocks: blocks[:2], Parent: seq(31, 0)}, 9, "PUT.parent"},
		{&Received{Pages: make([]byte, MaxKeys+1)}, 32, "RECEIVED.pages"},
	} {
		_, err := DecodeRecord(c.typ, c.m.Append(nil))
		if err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
}

// Only mapped files have offsets: what another kind would ignore is refused.
func TestOffsetOfAProcessRegion(t *testing.T) {
	p, err := EncodePacket(&AddRegions{ID: 1, Regions: []Region{{Region: b16(1), Kind: KindProcess,
		Bytes: 4096, Addr: 4096, Offset: 4096}}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = DecodePacket(p)
	if err == nil || !strings.Contains(err.Error(), `a region of kind "process" has none`) {
		t.Error(err)
	}
}

// Every refusal names the message, the field, what is wrong and where the right form is written.
func TestErrorsNameTheField(t *testing.T) {
	good := (&Intent{Tokens: 1, Fanout: 1, Blocks: [][]uint32{{1}}}).Append(nil)
	for _, c := range []struct{ old, new, want string }{
		{"\xa6tokens\x01", "\xa6tokens\x00", "INTENT.tokens: 0, want at least 1"},
		{"\xa6tokens\x01", "\xa6tokens\xff", "INTENT.tokens: negative"},
		{"\xa6tokens\x01", "\xa6taken!\x01", "INTENT.tokens: missing"},
		{"\xa6fanout\x01", "\xa6fanout\x11", "INTENT.fanout: 17, want 1 to 16"},
		{"\xa4held\xc2", "\xa4held\x01", "INTENT.held: type byte 0x01, want a bool"},
		{"\xa5ready\x00", "\xa5ready\x02", "INTENT.ready: 2 of 1 tokens"},
		{"\xc4\x04\x01", "\xc4\x03\x01", "INTENT.blocks: bin of 3 bytes"},
	} {
		_, err := DecodeIntent(bytes.Replace(good, []byte(c.old), []byte(c.new), 1))
		if err == nil || !strings.HasPrefix(err.Error(), c.want) ||
			!strings.HasSuffix(err.Error(), "see docs/protocol.md, INTENT") {
			t.Errorf("%q becomes %q: %v, want %s", c.old, c.new, err, c.want)
		}
	}
}
