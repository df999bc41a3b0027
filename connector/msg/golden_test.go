package msg

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"

	"github.com/kvspray/kvspray/layout"
)

var update = flag.Bool("update", false, "write testdata/golden")

const goldenDir = "../../testdata/golden"

type vector struct {
	Name  string          `json:"name"`
	Kind  string          `json:"kind"`
	Type  string          `json:"type"`
	Hex   string          `json:"hex"`
	Value json.RawMessage `json:"value"`
}

const goldenTraceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func seq(n int, from byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = from + byte(i)
	}
	return b
}

func b16(from byte) (v [16]byte) { copy(v[:], seq(16, from)); return }
func b32(from byte) (v [32]byte) { copy(v[:], seq(32, from)); return }

var recordTypes = map[string]uint16{"STEP": 1, "INTENT": 2, "EXPECT": 3, "CANCEL": 4, "PREEMPT": 5,
	"HOLD": 6, "COPY": 7, "GET": 8, "PUT": 9, "LOAD": 10, "YIELD": 11, "BATCH": 12,
	"RECEIVED": 32, "SENT": 33}

func goldenLayout(t testing.TB) []byte {
	l := &layout.Layout{Model: "tiny-llama", DType: "bfloat16",
		Identity: map[string]string{"model": "9f86d081", "rope": "10000"},
		Groups: []layout.Group{{TokensPerBlock: 16, Strategy: "packed_hnd",
			Params:    map[string]int64{"heads": 2, "head_bytes": 128},
			NumBlocks: 128, Layers: []layout.Layer{
				{Name: "model.layers.0.self_attn", Index: 0, Region: 0, Base: 0, BlockStride: 8192,
					PageBytes: 8192},
				{Name: "model.layers.1.self_attn", Index: 1, Region: 0, Base: 1 << 20, BlockStride: 8192,
					PageBytes: 8192}}}}}
	b, err := l.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// kv is an ordered map for vectors that our own types cannot make.
type kv []any

func appendAny(b []byte, v any) []byte {
	switch v := v.(type) {
	case kv:
		b = appendMap(b, len(v)/2)
		for i := 0; i < len(v); i += 2 {
			b = appendAny(appendStr(b, v[i].(string)), v[i+1])
		}
		return b
	case []any:
		b = appendArray(b, len(v))
		for _, e := range v {
			b = appendAny(b, e)
		}
		return b
	case nil:
		return append(b, 0xc0)
	case bool:
		return appendBool(b, v)
	case int:
		if v < 0 {
			return append(b, 0xd0, byte(int8(v)))
		}
		return appendUint(b, uint64(v))
	case uint64:
		return appendUint(b, v)
	case float64:
		return binary.BigEndian.AppendUint64(append(b, 0xcb), math.Float64bits(v))
	case string:
		return appendStr(b, v)
	case []byte:
		return appendBin(b, v)
	case json.RawMessage: // already msgpack
		return append(b, v...)
	}
	panic(fmt.Sprintf("%T", v))
}

var unknown = kv{"from_the_future", kv{"deep", []any{1, -2, 1.5, nil, true, kv{"x", seq(3, 1)}}},
	"also_new", "text"}

func goldenVectors(t testing.TB) (socket, records []vector) {
	lay := goldenLayout(t)
	boot, session := b16(0x10), b16(0x80)
	sock := func(name string, m Message) {
		p, err := EncodePacket(m)
		if err != nil {
			t.Fatal(err)
		}
		socket = append(socket, vector{Name: name, Kind: "socket", Type: m.Type().String(),
			Hex: hex.EncodeToString(p)})
	}
	rawSock := func(name string, typ Type, v kv) {
		p := appendAny(binary.LittleEndian.AppendUint32(nil, uint32(typ)), v)
		socket = append(socket, vector{Name: name, Kind: "socket", Type: typ.String(),
			Hex: hex.EncodeToString(p)})
	}
	rec := func(name, typ string, b []byte) {
		records = append(records, vector{Name: name, Kind: "record", Type: typ,
			Hex: hex.EncodeToString(b)})
	}

	sock("hello-worker", &Hello{ID: 1, Min: VersionMin, Max: VersionMax, Role: RoleWorker, Boot: boot,
		Engine: Engine{Name: "vllm", Version: "0.32.0", ID: "prefill-0"},
		Ranks: Ranks{DP: Rank{0, 1}, PP: Rank{0, 1},
			TP: Rank{1, 2}, PCP: Rank{0, 1}, DCP: Rank{0, 1}},
		PID: 4242, Features: []string{"layer-flags"}, Release: "1.2.3"})
	sock("hello-scheduler", &Hello{ID: 1, Min: VersionMin, Max: VersionMax,
		Role: RoleScheduler, Boot: boot,
		Engine: Engine{Name: "vllm", Version: "0.32.0", ID: "decode-0"},
		Ranks: Ranks{DP: Rank{0, 1}, PP: Rank{0, 1},
			TP: Rank{0, 1}, PCP: Rank{0, 1}, DCP: Rank{0, 1}}, PID: 70000})
	rawSock("hello-older", TypeHello, kv{"id", 1, "min", uint64(VersionMin), "max", uint64(VersionMin),
		"role", "worker", "boot", boot[:]})
	rawSock("hello-newer", TypeHello, append(kv{"id", 1, "min", uint64(MakeVersion(1, 0)), "max",
		uint64(MakeVersion(1, 7)), "role", "worker", "boot", boot[:],
		"engine", kv{"name", "vllm", "version", "9.9", "id", "e", "flavour", "mint"}, "ranks",
		kv{"dp", []any{0, 1}, "xp", []any{3, 4}}, "pid", 1,
		"features", []any{"teleport"}}, unknown...))

	sock("welcome", &Welcome{ID: 1, Version: VersionMax, Boot: b16(0x40), Node: "node-a",
		Endpoint: "127.0.0.1:7411",
		HostBoot: "5f0c2b1e-0000-4000-8000-123456789abc", Features: []string{}, Fenced: true,
		Limits:     Limits{4096, 64, 1024, 1 << 20},
		DeadlineMS: 30000, MatchTimeoutMS: 10000, GraceMS: 5000, Release: "1.2.3"})
	rawSock("welcome-older", TypeWelcome, kv{"id", 1, "version", uint64(VersionMin), "boot",
		seq(16, 0x40)})
	rawSock("welcome-newer", TypeWelcome, append(kv{"id", 1, "version", uint64(VersionMin), "boot",
		seq(16, 0x40), "node", "n", "endpoint", "h:1", "host_boot", "x",
		"features", []any{"teleport"}, "fenced", false, "limits", kv{"leases", 9, "regions", 9,
			"record_bytes", 65536, "wishes", 3},
		"deadline_ms", 1, "match_timeout_ms", 2, "grace_ms", 3}, unknown...))

	sock("register", &Register{ID: 2, Session: session, Layout: lay, FDs: FDs{0, 1, 2, 3},
		Regions: []Region{
			{Region: b16(0xa0), Kind: KindMemfd, Bytes: 1 << 21, FD: 4},
			{Region: b16(0xb0), Kind: KindMemfd, Bytes: 1 << 30, FD: 5},
			{Region: b16(0xc0), Kind: KindProcess, Bytes: 1 << 33, Addr: 0x7f0012340000, FD: 6}}})
	rawSock("register-older", TypeRegister, kv{"id", 2, "session", session[:], "regions",
		[]any{kv{"region", seq(16, 0xa0), "kind", "memfd",
			"bytes", 1 << 21, "fd", 4}}, "layout", kv{"dtype", "bfloat16", "groups",
			[]any{kv{"tokens_per_block", 16, "strategy", "packed_nhd", "num_blocks", 128,
				"layers", []any{kv{"name", "l0", "index", 0, "region", 0, "base", 0, "block_stride", 8192,
					"page_bytes", 8192}}}}},
		"fds", kv{"flags", 0, "rings", 1, "sq_eventfd", 2, "cq_eventfd", 3}})
	rawSock("register-newer", TypeRegister, append(kv{"id", 2, "session", session[:], "regions",
		[]any{kv{"region", seq(16, 0xa0), "kind", "memfd",
			"bytes", 1 << 21, "fd", 4, "numa", 1}}, "layout", json.RawMessage(lay), "fds",
		kv{"flags", 0, "rings", 1, "sq_eventfd", 2, "cq_eventfd", 3, "siren", 7}}, unknown...))
	sock("registered", &Registered{ID: 2, Fingerprint: b32(1), Geometry: b32(33)})
	rawSock("registered-older", TypeRegistered, kv{"id", 2, "fingerprint", seq(32, 1)})
	rawSock("registered-newer", TypeRegistered, append(kv{"id", 2, "fingerprint", seq(32, 1),
		"geometry", seq(32, 33)}, unknown...))
	sock("register-device", &Register{ID: 2, Session: session, Layout: lay, FDs: FDs{0, 1, 2, 3},
		Regions: []Region{
			{Region: b16(0xd0), Kind: KindDevice, Bytes: 1 << 36, Handle: bytes.Repeat([]byte{0x5a},
				104), FD: NoFD},
			{Region: b16(0xe0), Kind: KindDevice, Bytes: 1 << 20, Handle: []byte{1, 2, 3}, FD: 4}}})
	sock("error", &ErrorMessage{ID: 2, Code: CodeRegion, Message: "memfd is not sealed",
		Field:  "regions[0].fd",
		Remedy: "add F_SEAL_SHRINK|F_SEAL_GROW before passing it on"})
	sock("error-fatal", &ErrorMessage{Code: CodeVersion, Message: "the shim speaks 2.0 to 2.0, the " +
		"sidecar 1.0 to 1.0", Field: "max",
		Remedy: "upgrade the older of the two", Fatal: true})
	rawSock("error-older", TypeError, kv{"id", 0, "code", "protocol", "message", "no"})
	rawSock("error-newer", TypeError, append(kv{"id", 0, "code", "from-the-future", "message", "?",
		"field", "", "remedy", "", "fatal", false}, unknown...))
	sock("await", &Await{ID: 3, Xfer: b16(0x20), Hash: b32(0x60), Peer: "10.0.0.1:7411", Tokens: 2048,
		TTLMS: 10000})
	rawSock("await-older", TypeAwait, kv{"id", 3, "xfer", seq(16, 0x20), "hash", seq(32, 0x60), "peer",
		"10.0.0.1:7411"})
	rawSock("await-newer", TypeAwait, append(kv{"id", 3, "xfer", seq(16, 0x20), "hash", seq(32, 0x60),
		"peer", "10.0.0.1:7411", "tokens", 1, "ttl_ms", 2}, unknown...))
	sock("admitted", &Admitted{ID: 3, State: "admitted", Tokens: 2048})
	sock("admitted-refused", &Admitted{ID: 1 << 40, State: "refused", Message: "same transfer, " +
		"another prompt"})
	rawSock("admitted-older", TypeAdmitted, kv{"id", 3, "state", "gone"})
	rawSock("admitted-newer", TypeAdmitted, append(kv{"id", 3, "state", "gone", "tokens", 0, "message",
		""}, unknown...))
	sock("decline", &Decline{ID: 4, Xfer: b16(0x20), Hash: b32(0x60), Peer: "10.0.0.1:7411",
		Reason: "FINISHED_ABORTED"})
	sock("decline-ranks", &Decline{ID: 5, Xfer: b16(0x20), Hash: b32(0x60), Peer: "10.0.0.1:7411",
		Reason: "no room", Req: "cmpl-1", Ranks: []uint32{0, 3}})
	rawSock("decline-older", TypeDecline, kv{"id", 4, "xfer", seq(16, 0x20), "hash", seq(32, 0x60),
		"peer", "10.0.0.1:7411"})
	rawSock("decline-newer", TypeDecline, append(kv{"id", 4, "xfer", seq(16, 0x20), "hash",
		seq(32, 0x60), "peer", "10.0.0.1:7411", "reason", "w"},
		unknown...))
	sock("bye", &Bye{Reason: "engine shuts down"})
	rawSock("bye-older", TypeBye, kv{})
	rawSock("bye-newer", TypeBye, append(kv{"reason", "r"}, unknown...))
	sock("held", &Held{Lease: 17})
	rawSock("held-older", TypeHeld, kv{"lease", 17})
	rawSock("held-newer", TypeHeld, append(kv{"lease", 17}, unknown...))

	key := kv{"xfer", seq(16, 0x20), "hash", seq(32, 0x60)}
	with := func(more ...any) []byte { return appendAny(nil, append(append(kv{}, key...), more...)) }
	blocks := seq(8, 1) // two ids
	rec("intent", "INTENT", (&Intent{Xfer: b16(0x20), Hash: b32(0x60), Tokens: 2048, Fanout: 1,
		Blocks: [][]uint32{{7, 300, 70000}}, Ready: 0,
		Priority: PrioStream, DeadlineMS: 30000, Req: "cmpl-1"}).Append(nil))
	rec("intent-restart", "INTENT", (&Intent{Xfer: b16(0x20), Hash: b32(0x60), Tokens: 2048,
		Fanout: 16, Blocks: [][]uint32{{1, 2}, {}}, Ready: 512,
		Steps: []PendingStep{{41, 1024}, {43, 2048}}, Priority: PrioDecodeWaits, DeadlineMS: 1234,
		Held: true,
		Req:  "cmpl-2", Attempt: 3}).Append(nil))
	rec("intent-older", "INTENT", with("tokens", 16, "blocks", []any{blocks}))
	rec("intent-newer", "INTENT", with(append(kv{"tokens", 16, "fanout", 1, "blocks", []any{blocks},
		"ready", 16, "steps", []any{}, "priority", 9,
		"deadline_ms", 1, "held", false, "req", "", "attempt", 0}, unknown...)...))
	rec("expect", "EXPECT", (&Expect{Xfer: b16(0x20), Hash: b32(0x60), Peer: "10.0.0.1:7411",
		Tokens: 2048, Skip: []uint32{512, 0},
		Blocks: [][]uint32{{5, 6, 7}, {1 << 31}}, Priority: PrioDecodeWaits, DeadlineMS: 30000,
		MatchTimeoutMS: 10000, Req: "cmpl-1"}).Append(nil))
	rec("expect-after", "EXPECT", (&Expect{Xfer: b16(0x20), Hash: b32(0x60), Peer: "h:1", Tokens: 16,
		Skip:   []uint32{0},
		Blocks: [][]uint32{{1, 2}}, StreamMark: 1 << 40}).Append(nil))
	// The optional traceparent, in a body that has every other key, too.
	rec("intent-traced", "INTENT", (&Intent{Xfer: b16(0x20), Hash: b32(0x60), Tokens: 16, Fanout: 1,
		Blocks: [][]uint32{{1, 2}}, Priority: PrioStream, DeadlineMS: 1, Req: "r",
		Traceparent: goldenTraceparent}).Append(nil))
	rec("expect-traced", "EXPECT", (&Expect{Xfer: b16(0x20), Hash: b32(0x60), Peer: "h:1", Tokens: 16,
		Skip: []uint32{0}, Blocks: [][]uint32{{1, 2}}, DeadlineMS: 1, MatchTimeoutMS: 1, Req: "r",
		Traceparent: goldenTraceparent}).Append(nil))
	rec("copy-after", "COPY", (&Copy{Dst: 1, Blocks: []CopyBlock{{1, 2, 3}}, DeadlineMS: 1,
		StreamMark: 7}).Append(nil))
	rec("expect-older", "EXPECT", with("peer", "h:1", "tokens", 16, "blocks", []any{blocks}))
	rec("expect-newer", "EXPECT", with(append(kv{"peer", "h:1", "tokens", 16, "skip", []any{0},
		"blocks", []any{blocks}, "priority", 0, "deadline_ms", 1,
		"match_timeout_ms", 1, "req", ""}, unknown...)...))
	rec("step", "STEP", (&Step{Step: 70000, Reqs: []StepReq{{Lease: 1 << 33, End: 1024,
		Blocks: [][]uint32{{7, 300, 70000}}, Attempt: 0},
		{Lease: 2, End: 5, Blocks: [][]uint32{}, Attempt: 1}}}).Append(nil))
	rec("step-empty", "STEP", (&Step{Step: 1}).Append(nil))
	rec("step-older", "STEP", appendAny(nil, kv{"step", 1, "reqs", []any{kv{"lease", 1, "end", 2}}}))
	rec("step-newer", "STEP",
		appendAny(nil, append(kv{"step", 1, "reqs", []any{append(kv{"lease", 1, "end", 2, "blocks",
			[]any{blocks}, "attempt", 0}, unknown...)}}, unknown...)))
	rec("cancel", "CANCEL", (&Cancel{Reason: "aborted"}).Append(nil))
	rec("cancel-older", "CANCEL", appendAny(nil, kv{}))
	rec("cancel-newer", "CANCEL", appendAny(nil, append(kv{"reason", ""}, unknown...)))
	rec("preempt", "PREEMPT", (&Empty{}).Append(nil))
	rec("preempt-newer", "PREEMPT", appendAny(nil, unknown))
	rec("hold", "HOLD", (&Empty{}).Append(nil))
	rec("yield", "YIELD", (&Empty{}).Append(nil))
	rec("hold-newer", "HOLD", appendAny(nil, unknown))
	rec("copy", "COPY", (&Copy{Src: 0, Dst: 27, Blocks: []CopyBlock{{0, 1 << 33, 1 << 20},
		{1 << 40, 4096, 3}}, DeadlineMS: 30000, Req: "wake-up"}).Append(nil))
	rec("copy-older", "COPY", appendAny(nil, kv{"src", 1, "dst", 0, "blocks", seq(24, 0)}))
	rec("copy-newer", "COPY", appendAny(nil, append(kv{"src", 1, "dst", 0, "blocks", seq(48, 0),
		"deadline_ms", 5, "req", ""}, unknown...)))
	rec("load", "LOAD", (&Load{Parts: []LoadPart{{4096, 1 << 22, 1 << 33, 65536, 65535, 1, 2},
		{0, 1, 2, 3, 4, 5, 6}}, Pages: []LoadPage{{7, 1 << 31}, {0, 1}}, Flag: 3, Value: 1 << 40,
		DeadlineMS: 10000, Req: "load-1", StreamMark: 9}).Append(nil))
	rec("load-older", "LOAD", appendAny(nil, kv{"parts", seq(48, 0), "pages", seq(8, 0), "flag", 0,
		"value", 0}))
	rec("load-newer", "LOAD", appendAny(nil, append(kv{"parts", seq(96, 0), "pages", seq(16, 0),
		"flag", 1, "value", 5, "deadline_ms", 5, "req", ""}, unknown...)))
	rec("received", "RECEIVED", (&Received{Bytes: 1 << 33, TookUS: 1500,
		Transport: "tcp"}).Append(nil))
	rec("received-failed", "RECEIVED", (&Received{Bytes: 65536, TookUS: 30000000, Transport: "shm",
		Reason:    "source lost",
		Recompute: [][2]uint32{{0, 16}, {512, 2048}}}).Append(nil))
	rec("received-older", "RECEIVED", appendAny(nil, kv{"bytes", 1}))
	rec("received-newer", "RECEIVED", appendAny(nil, append(kv{"bytes", 1, "took_us", 2,
		"transport", "x",
		"reason", "", "recompute", []any{}}, unknown...)))
	rec("sent", "SENT", (&Sent{Grants: 2, Bytes: 1 << 21}).Append(nil))
	rec("sent-older", "SENT", appendAny(nil, kv{}))
	rec("sent-newer", "SENT", appendAny(nil, append(kv{"grants", 0, "bytes", 0, "reason", "expired"},
		unknown...)))
	for _, v := range storeVectors(t) {
		if v.Kind == "socket" {
			socket = append(socket, v)
		} else {
			records = append(records, v)
		}
	}
	return socket, records
}

// toJSON renders one msgpack value with a decoder that is not ours, keeping the order of keys.
func toJSON(t testing.TB, d *msgpack.Decoder) []byte {
	t.Helper()
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	enc := func(v any) []byte {
		b, err := json.Marshal(v)
		must(err)
		return b
	}
	c, err := d.PeekCode()
	must(err)
	var b bytes.Buffer
	switch {
	case msgpcode.IsFixedMap(c) || c == msgpcode.Map16 || c == msgpcode.Map32:
		n, err := d.DecodeMapLen()
		must(err)
		b.WriteByte('{')
		for i := range n {
			if i > 0 {
				b.WriteByte(',')
			}
			k, err := d.DecodeString()
			must(err)
			b.Write(enc(k))
			b.WriteByte(':')
			b.Write(toJSON(t, d))
		}
		b.WriteByte('}')
	case msgpcode.IsFixedArray(c) || c == msgpcode.Array16 || c == msgpcode.Array32:
		n, err := d.DecodeArrayLen()
		must(err)
		b.WriteByte('[')
		for i := range n {
			if i > 0 {
				b.WriteByte(',')
			}
			b.Write(toJSON(t, d))
		}
		b.WriteByte(']')
	case msgpcode.IsBin(c):
		v, err := d.DecodeBytes()
		must(err)
		b.Write(enc(map[string]string{"$bin": hex.EncodeToString(v)}))
	default:
		v, err := d.DecodeInterfaceLoose()
		must(err)
		b.Write(enc(v))
	}
	return b.Bytes()
}

func bodyOf(t testing.TB, v vector) []byte {
	t.Helper()
	b, err := hex.DecodeString(v.Hex)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestGolden(t *testing.T) {
	socket, records := goldenVectors(t)
	for file, vs := range map[string][]vector{"socket.json": socket, "records.json": records} {
		var out bytes.Buffer
		out.WriteString("[\n")
		for i := range vs {
			b := bodyOf(t, vs[i])
			if vs[i].Kind == "socket" {
				b = b[4:]
			}
			r := bytes.NewReader(b)
			vs[i].Value = toJSON(t, msgpack.NewDecoder(r))
			if r.Len() != 0 {
				t.Errorf("%s: %d bytes follow the map", vs[i].Name, r.Len())
			}
			line, err := json.Marshal(vs[i])
			if err != nil {
				t.Fatal(err)
			}
			out.Write(line)
			if i < len(vs)-1 {
				out.WriteByte(',')
			}
			out.WriteByte('\n')
		}
		out.WriteString("]\n")
		path := filepath.Join(goldenDir, file)
		if *update {
			if err := os.WriteFile(path, out.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		have, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(have, out.Bytes()) {
			t.Errorf("%s differs from what the encoder makes: run go test ./connector/msg -run TestGolden "+
				"-update and look at the difference", path)
		}
	}
}

// TestGoldenDecode speaks the committed vectors: each decodes, and canonical ones encode to the
// same bytes again.
func TestGoldenDecode(t *testing.T) {
	seen := map[string]bool{}
	others := otherVersions(t)
	for _, file := range []string{"socket.json", "records.json"} {
		raw, err := os.ReadFile(filepath.Join(goldenDir, file))
		if err != nil {
			t.Fatal(err)
		}
		var vs []vector
		if err := json.Unmarshal(raw, &vs); err != nil {
			t.Fatal(err)
		}
		for _, v := range vs {
			t.Run(v.Name, func(t *testing.T) {
				b := bodyOf(t, v)
				var again []byte
				var value any
				if v.Kind == "socket" {
					m, err := DecodePacket(b)
					if err != nil {
						t.Fatal(err)
					}
					if got := m.Type().String(); got != v.Type {
						t.Fatalf("type %s, want %s", got, v.Type)
					}
					if again, err = EncodePacket(m); err != nil {
						t.Fatal(err)
					}
					value = m
				} else {
					m, err := DecodeRecord(recordTypes[v.Type], b)
					if err != nil {
						t.Fatal(err)
					}
					again = m.(interface{ Append([]byte) []byte }).Append(nil)
					value = m
				}
				seen[v.Kind+v.Type] = true
				seen[v.Name] = true
				if strings.HasSuffix(v.Name, "-older") || strings.HasSuffix(v.Name, "-newer") {
					want, ok := others[v.Name]
					if !ok {
						t.Fatalf("%s is missing in otherVersions: add it", v.Name)
					}
					if diff := cmp.Diff(want, value, cmpopts.EquateEmpty()); diff != "" {
						t.Errorf("decoded (-want +got):\n%s", diff)
					}
					return
				}
				if !bytes.Equal(again, b) {
					t.Fatalf("encodes to\n%x, want\n%x", again, b)
				}
			})
		}
	}
	for i, name := range typeNames {
		typ := Type(i)
		if name == "" {
			continue
		}
		if !seen["socket"+typ.String()] {
			t.Errorf("no vector for %s", typ)
		}
		for _, version := range []string{"-older", "-newer"} {
			if name := strings.ToLower(typ.String()) + version; !seen[name] {
				t.Errorf("no vector %s", name)
			}
		}
	}
	for typ := range recordTypes {
		if !seen["record"+typ] {
			t.Errorf("no vector for %s", typ)
		}
	}
}

// otherVersions is what the vectors of an older and a newer version mean to us: the default for
// what is missing, and nothing of what is new.
func otherVersions(t testing.TB) map[string]any {
	boot, session := b16(0x10), b16(0x80)
	region := []Region{{Region: b16(0xa0), Kind: KindMemfd, Bytes: 1 << 21, FD: 4}}
	blocks := [][]uint32{{0x04030201, 0x08070605}}
	xfer, hash := b16(0x20), b32(0x60)
	older := appendAny(nil, kv{"dtype", "bfloat16", "groups", []any{kv{"tokens_per_block", 16,
		"strategy", "packed_nhd", "num_blocks", 128,
		"layers", []any{kv{"name", "l0", "index", 0, "region", 0, "base", 0, "block_stride", 8192,
			"page_bytes", 8192}}}}})
	if l, err := layout.Unmarshal(older); err != nil || l.DType != "bfloat16" ||
		len(l.Identity) != 0 || l.Groups[0].Layers[0].PageBytes != 8192 {
		t.Errorf("the older layout: %+v, %v", l, err)
	}
	one := Rank{0, 1}
	out := map[string]any{
		"hello-older": &Hello{ID: 1, Min: VersionMin, Max: VersionMin, Role: RoleWorker, Boot: boot},
		"hello-newer": &Hello{ID: 1, Min: MakeVersion(1, 0), Max: MakeVersion(1, 7),
			Role: RoleWorker, Boot: boot,
			Engine: Engine{Name: "vllm", Version: "9.9", ID: "e"}, Ranks: Ranks{DP: one}, PID: 1,
			Features: []string{"teleport"}},
		"welcome-older": &Welcome{ID: 1, Version: VersionMin, Boot: b16(0x40)},
		"welcome-newer": &Welcome{ID: 1, Version: VersionMin, Boot: b16(0x40), Node: "n", Endpoint: "h:1",
			HostBoot: "x", Features: []string{"teleport"},
			Limits: Limits{9, 0, 9, 65536}, DeadlineMS: 1, MatchTimeoutMS: 2, GraceMS: 3},
		"copy-older": &Copy{Src: 1, Blocks: []CopyBlock{{0x0706050403020100, 0x0f0e0d0c0b0a0908,
			0x1716151413121110}}},
		"copy-newer": &Copy{Src: 1, DeadlineMS: 5, Blocks: []CopyBlock{{0x0706050403020100,
			0x0f0e0d0c0b0a0908, 0x1716151413121110},
			{0x1f1e1d1c1b1a1918, 0x2726252423222120, 0x2f2e2d2c2b2a2928}}},
		"load-older": &Load{Parts: []LoadPart{{0x0706050403020100, 0x0f0e0d0c0b0a0908,
			0x1716151413121110, 0x1f1e1d1c1b1a1918, 0x2726252423222120, 0x2b2a2928, 0x2f2e2d2c}},
			Pages: []LoadPage{{0x03020100, 0x07060504}}},
		"load-newer": &Load{Parts: []LoadPart{{0x0706050403020100, 0x0f0e0d0c0b0a0908,
			0x1716151413121110, 0x1f1e1d1c1b1a1918, 0x2726252423222120, 0x2b2a2928, 0x2f2e2d2c},
			{0x3736353433323130, 0x3f3e3d3c3b3a3938, 0x4746454443424140, 0x4f4e4d4c4b4a4948,
				0x5756555453525150, 0x5b5a5958, 0x5f5e5d5c}},
			Pages: []LoadPage{{0x03020100, 0x07060504}, {0x0b0a0908, 0x0f0e0d0c}}, Flag: 1, Value: 5,
			DeadlineMS: 5},
		"register-older": &Register{ID: 2, Session: session, Regions: region, Layout: older,
			FDs: FDs{0, 1, 2, 3}},
		"register-newer": &Register{ID: 2, Session: session, Regions: region, Layout: goldenLayout(t),
			FDs: FDs{0, 1, 2, 3}},
		"registered-older": &Registered{ID: 2, Fingerprint: b32(1)},
		"registered-newer": &Registered{ID: 2, Fingerprint: b32(1), Geometry: b32(33)},
		"error-older":      &ErrorMessage{Code: CodeProtocol, Message: "no"},
		"error-newer":      &ErrorMessage{Code: "from-the-future", Message: "?"},
		"await-older":      &Await{ID: 3, Xfer: xfer, Hash: hash, Peer: "10.0.0.1:7411"},
		"await-newer": &Await{ID: 3, Xfer: xfer, Hash: hash, Peer: "10.0.0.1:7411",
			Tokens: 1, TTLMS: 2},
		"admitted-older": &Admitted{ID: 3, State: "gone"},
		"admitted-newer": &Admitted{ID: 3, State: "gone"},
		"decline-older":  &Decline{ID: 4, Xfer: xfer, Hash: hash, Peer: "10.0.0.1:7411"},
		"decline-newer":  &Decline{ID: 4, Xfer: xfer, Hash: hash, Peer: "10.0.0.1:7411", Reason: "w"},
		"bye-older":      &Bye{},
		"held-older":     &Held{Lease: 17},
		"held-newer":     &Held{Lease: 17},
		"bye-newer":      &Bye{Reason: "r"},

		"intent-older": &Intent{Xfer: xfer, Hash: hash, Tokens: 16, Fanout: 1, Blocks: blocks,
			Priority: PrioStream},
		"intent-newer": &Intent{Xfer: xfer, Hash: hash, Tokens: 16, Fanout: 1, Blocks: blocks, Ready: 16,
			Priority: 9, DeadlineMS: 1},
		"expect-after": &Expect{Xfer: xfer, Hash: hash, Peer: "h:1", Tokens: 16, Skip: []uint32{0},
			Blocks:     [][]uint32{{1, 2}},
			StreamMark: 1 << 40},
		"intent-traced": &Intent{Xfer: xfer, Hash: hash, Tokens: 16, Fanout: 1,
			Blocks:   [][]uint32{{1, 2}},
			Priority: PrioStream, DeadlineMS: 1, Req: "r", Traceparent: goldenTraceparent},
		"expect-traced": &Expect{Xfer: xfer, Hash: hash, Peer: "h:1", Tokens: 16, Skip: []uint32{0},
			Blocks: [][]uint32{{1, 2}}, DeadlineMS: 1, MatchTimeoutMS: 1, Req: "r",
			Traceparent: goldenTraceparent},
		"copy-after":   &Copy{Dst: 1, Blocks: []CopyBlock{{1, 2, 3}}, DeadlineMS: 1, StreamMark: 7},
		"expect-older": &Expect{Xfer: xfer, Hash: hash, Peer: "h:1", Tokens: 16, Blocks: blocks},
		"expect-newer": &Expect{Xfer: xfer, Hash: hash, Peer: "h:1", Tokens: 16, Skip: []uint32{0},
			Blocks: blocks, DeadlineMS: 1, MatchTimeoutMS: 1},
		"step-older":     &Step{Step: 1, Reqs: []StepReq{{Lease: 1, End: 2}}},
		"step-newer":     &Step{Step: 1, Reqs: []StepReq{{Lease: 1, End: 2, Blocks: blocks}}},
		"cancel-older":   &Cancel{},
		"cancel-newer":   &Cancel{},
		"preempt-newer":  &Empty{},
		"hold-newer":     &Empty{},
		"received-older": &Received{Bytes: 1},
		"received-newer": &Received{Bytes: 1, TookUS: 2, Transport: "x"},
		"sent-older":     &Sent{},
		"sent-newer":     &Sent{Reason: "expired"},
	}
	for _, m := range storeMessages() {
		out[m.name+"-older"], out[m.name+"-newer"] = m.bare, m.bare
	}
	return out
}

func TestNegotiate(t *testing.T) {
	for _, c := range []struct {
		min, max, want Version
		ok             bool
	}{
		{MakeVersion(1, 0), MakeVersion(1, 0), MakeVersion(1, 0), true},
		{MakeVersion(1, 0), MakeVersion(1, 7), MakeVersion(1, 0), true},
		{MakeVersion(1, 0), MakeVersion(2, 3), MakeVersion(1, 0), true},
		{MakeVersion(0, 9), MakeVersion(1, 0), MakeVersion(1, 0), true},
		{MakeVersion(2, 0), MakeVersion(2, 3), 0, false},
		{MakeVersion(0, 1), MakeVersion(0, 9), 0, false},
		{MakeVersion(1, 1), MakeVersion(1, 0), 0, false},
	} {
		got, err := Negotiate(c.min, c.max, "", "")
		if (err == nil) != c.ok || got != c.want {
			t.Errorf("Negotiate(%s, %s) = %s, %v", c.min, c.max, got, err)
		}
		if err != nil && !strings.Contains(err.Error(), c.min.String()) {
			t.Errorf("error does not name the shim's version: %v", err)
		}
	}
}
