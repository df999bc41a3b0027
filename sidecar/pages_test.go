package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
)

// TestStoreOpens: the configuration reaches the tiers, and they are shown.
func TestStoreOpens(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pages")
	r := start(t, func(c *config.Config) {
		c.Store = config.Store{Memory: 8 << 20, Disk: []config.StoreDisk{{Path: file, Size: 64 << 20}}}
	})
	code, text := get(t, r, "/v1/store")
	var st nodeapi.Store
	if err := json.Unmarshal([]byte(text), &st); code != http.StatusOK || err != nil {
		t.Fatalf("%d, %v: %s", code, err, text)
	}
	if len(st.Tiers) != 2 || st.Tiers[0].Capacity != 8<<20 || st.Tiers[1].Name != "disk" ||
		st.Tiers[1].Capacity < 32<<20 {
		t.Errorf("%+v", st)
	}
	_, text = get(t, r, "/metrics")
	for _, line := range []string{`kvspray_store_tier_capacity_bytes{tier="memory"} 8.388608e+06`,
		`kvspray_store_hits_total{tier="disk"} 0`} {
		if !strings.Contains(text, line) {
			t.Errorf("no metric %s", line)
		}
	}
}

func TestNoStore(t *testing.T) {
	r := start(t, nil)
	if code, text := get(t, r, "/v1/store"); code != http.StatusNotFound ||
		!strings.Contains(text, "set store.memory") {
		t.Errorf("%d %s", code, text)
	}
	if _, text := get(t, r, "/metrics"); strings.Contains(text, "kvspray_store") {
		t.Error("metrics of a store that is off")
	}
}

// TestStoreRefusesADisk: what is no store is not touched, and the start names it.
func TestStoreRefusesADisk(t *testing.T) {
	file := filepath.Join(t.TempDir(), "notes")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	n, err := New(Options{Config: testConfig(t, func(c *config.Config) {
		c.Store = config.Store{Memory: 8 << 20, Disk: []config.StoreDisk{{Path: file, Size: 64 << 20}}}
	})})
	if err != nil {
		t.Fatal(err)
	}
	err = n.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), file) ||
		!strings.Contains(err.Error(), "no kvspray store") {
		t.Errorf("%v", err)
	}
	if b, _ := os.ReadFile(file); string(b) != "precious" {
		t.Error("the file was touched")
	}
}

// pageEngine is an engine whose host memory is a pool of pages of 4 KiB, keys and values in turns.
type pageEngine struct {
	*copyEngine
	space uint64
}

const testPage = 4096

func newPageEngine(t *testing.T, r *running) *pageEngine {
	t.Helper()
	e := &pageEngine{copyEngine: newCopyEngine(t, r, nil)}
	var err error
	if e.space, err = e.OpenSpace(t.Context(), openPool()); err != nil {
		t.Fatal(err)
	}
	return e
}

// openPool describes region 1 of a copyEngine.
func openPool() msg.Open {
	return msg.Open{Namespace: msg.Namespace{Weights: "w", DType: "bfloat16", Layout: "l",
		PageTokens: 16, PageBytes: testPage, Algorithm: "sglang-sha256"},
		Pieces: []msg.PagePiece{{Region: 1, Base: 0, Stride: testPage, Len: testPage / 2},
			{Region: 1, Base: testPage / 2, Stride: testPage, Len: testPage / 2}},
		Blocks: hostBytes / testPage}
}

func (e *pageEngine) block(i int) []byte { return e.host[i*testPage : (i+1)*testPage] }

// hashes16 names pages by hashes of 16 bytes.
func hashes16(pages ...byte) (out []byte) {
	for _, p := range pages {
		out = append(out, append(make([]byte, 15), p)...)
	}
	return out
}

// TestPagesOfAnEngine: what one engine has put another one finds and gets, over the protocol.
func TestPagesOfAnEngine(t *testing.T) {
	r := start(t, func(c *config.Config) { c.Store.Memory = 8 << 20 })
	first := newPageEngine(t, r)
	put, err := first.Put(msg.Put{Space: first.space, Hashes: hashes16(1, 2, 3), HashBytes: 16,
		Blocks: []uint32{5, 6, 9}})
	if err != nil {
		t.Fatal(err)
	}
	if c := first.ok(put); !bytes.Equal(c.Received.Pages, []byte{msg.PageStored, msg.PageStored,
		msg.PageStored}) || c.Received.Bytes != 3*testPage {
		t.Errorf("%+v", c.Received)
	}
	want := append(bytes.Clone(first.block(5)), first.block(6)...)
	again, err := first.Put(msg.Put{Space: first.space, Hashes: hashes16(1, 4), HashBytes: 16,
		Blocks: []uint32{0, 1}, Parent: hashes16(3)})
	if err != nil {
		t.Fatal(err)
	}
	if c := first.ok(again); !bytes.Equal(c.Received.Pages, []byte{msg.PageExisted, msg.PageStored}) {
		t.Errorf("%v", c.Received.Pages)
	}

	// The pages outlive the engine. A scheduler asks for them, and another engine gets them.
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second := newPageEngine(t, r)
	s, err := connectortest.DialScheduler(t.Context(),
		connectortest.SchedulerConfig{Socket: r.cfg.Engine.Socket})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	open := openPool()
	open.Pieces, open.Blocks = nil, 0
	space, err := s.OpenSpace(t.Context(), open)
	if err != nil {
		t.Fatal(err)
	}
	found, err := s.Exists(t.Context(), msg.Exists{Spaces: []msg.SpaceRef{{Space: space}},
		Hashes: hashes16(1, 2, 7, 3), HashBytes: 16, PinMS: 60_000})
	if err != nil || found.Pages != 4 || !bytes.Equal(found.Found, []byte{0b1011}) {
		t.Fatalf("%+v, %v", found, err)
	}
	if _, pinned := r.pages.service.Namespaces(); pinned != 2*testPage {
		t.Errorf("%d bytes are pinned", pinned)
	}
	lease, err := second.Get(msg.Get{Space: second.space, Hashes: hashes16(2, 1, 7), HashBytes: 16,
		Blocks: []uint32{31, 30, 32}, Req: "r"})
	if err != nil {
		t.Fatal(err)
	}
	if c := second.ok(lease); !bytes.Equal(c.Received.Pages, []byte{msg.PageHit | msg.PageFlagMemory,
		msg.PageHit | msg.PageFlagMemory, msg.PageMiss}) {
		t.Errorf("%v", c.Received.Pages)
	}
	if !bytes.Equal(append(bytes.Clone(second.block(30)), second.block(31)...), want) {
		t.Error("WRONG PAGES")
	}
	if err := s.Close(); err != nil { // its pins end with it
		t.Fatal(err)
	}
	until(t, func() bool { _, pinned := r.pages.service.Namespaces(); return pinned == 0 })
	if err := second.Remove(t.Context(), second.space); err != nil {
		t.Fatal(err)
	}
	lease, err = second.Get(msg.Get{Space: second.space, Hashes: hashes16(1), HashBytes: 16,
		Blocks: []uint32{0}})
	if err != nil {
		t.Fatal(err)
	}
	if c := second.ok(lease); !bytes.Equal(c.Received.Pages, []byte{msg.PageMiss}) {
		t.Errorf("removed: %v", c.Received.Pages)
	}
	_, text := get(t, r, "/metrics")
	if !strings.Contains(text, `kvspray_engine_records_total{type="get"} 2`) {
		t.Error("gets are not counted")
	}
}

// TestRefusedPages: what cannot be right is refused by name, and the session goes on.
func TestRefusedPages(t *testing.T) {
	r := start(t, func(c *config.Config) { c.Store.Memory = 8 << 20 })
	e := newPageEngine(t, r)
	for want, change := range map[string]func(*msg.Open){
		"store namespace field weights": func(m *msg.Open) { m.Namespace.Weights = "" },
		"pieces[0]":                     func(m *msg.Open) { m.Blocks = 1 << 20 },
		"pieces[1].region":              func(m *msg.Open) { m.Pieces[1].Region = 2 },
		"page_bytes is 8192":            func(m *msg.Open) { m.Namespace.PageBytes = 8192 },
	} {
		m := openPool()
		change(&m)
		_, err := e.OpenSpace(t.Context(), m)
		var se *connectortest.ServerError
		if !errors.As(err, &se) || se.Code != msg.CodeStore && se.Code != msg.CodeProtocol {
			t.Errorf("%s: %v", want, err)
		}
	}
	if _, err := e.Exists(t.Context(), msg.Exists{Spaces: []msg.SpaceRef{{Space: 9}},
		Hashes: hashes16(1), HashBytes: 16}); err == nil || !strings.Contains(err.Error(), "spaces[0]") {
		t.Errorf("%v", err)
	}
	if err := e.Remove(t.Context(), 9); err == nil {
		t.Error("removed what is not open")
	}
	for want, m := range map[string]msg.Get{
		"9 has no blocks in this session": {Space: 9, Hashes: hashes16(1), HashBytes: 16,
			Blocks: []uint32{0}},
		"block 3 is also at index 0": {Space: e.space, Hashes: hashes16(1, 2), HashBytes: 16,
			Blocks: []uint32{3, 3}},
		"the pool has blocks": {Space: e.space, Hashes: hashes16(1), HashBytes: 16,
			Blocks: []uint32{1 << 20}},
	} {
		id, err := e.Get(m)
		if err != nil {
			t.Fatal(err)
		}
		if c := e.wait(id); c.Status != board.Refused || !strings.Contains(c.Received.Reason, want) {
			t.Errorf("%+v %+v, want %q", c, c.Received, want)
		}
	}

	none := newCopyEngine(t, start(t, nil), nil)
	if _, err := none.OpenSpace(t.Context(), openPool()); err == nil ||
		!strings.Contains(err.Error(), "not a feature of this sidecar") {
		t.Errorf("no store: %v", err)
	}
}

// TestOneWriterPerBlock: until a get has ended, no other get writes its block, and no put saves
// what is not loaded yet; nor does a get write a block that a put still reads.
func TestOneWriterPerBlock(t *testing.T) {
	r := start(t, func(c *config.Config) { c.Store.Memory = 8 << 20 })
	gpu := holdGPU(t, r)
	defer close(gpu.gate) // after a failure, copies wait
	e := &pageEngine{copyEngine: newCopyEngine(t, r, gpu)}
	pool := openPool()
	pool.Pieces = []msg.PagePiece{{Region: 0, Stride: testPage, Len: testPage}} // of the GPU
	var err error
	e.space, err = e.OpenSpace(t.Context(), pool)
	ok(t, err)
	get := func(page byte) (uint64, error) {
		return e.Get(msg.Get{Space: e.space, Hashes: hashes16(page), HashBytes: 16, Blocks: []uint32{3}})
	}
	put := func(page byte) (uint64, error) {
		return e.Put(msg.Put{Space: e.space, Hashes: hashes16(page), HashBytes: 16, Blocks: []uint32{3}})
	}
	// The second one would end at once if it were not refused: it gets a page that the store does
	// not have, or puts one that it has.
	for _, c := range []struct {
		use           string
		first, second func(page byte) (uint64, error)
		page          byte // of the second one
	}{{"read", put, get, 2}, {"written", get, get, 2}, {"written", get, put, 1}} {
		a, err := c.first(1)
		ok(t, err)
		gpu.enter(t, 1)
		b, err := c.second(c.page)
		ok(t, err)
		if done := e.wait(b); done.Status != board.Refused ||
			!strings.Contains(done.Received.Reason, "block 3 is "+c.use+" for lease") {
			t.Errorf("while the block is %s: %+v %+v", c.use, done, done.Received)
		}
		gpu.gate <- struct{}{}
		e.ok(a)
	}
	lease, err := get(1)
	ok(t, err)
	gpu.gate <- struct{}{}
	e.ok(lease)
}

// ask sends a request to the admin socket.
func ask(t testing.TB, r *running, method, path string) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://localhost"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", config.AdminSocket(r.cfg.Engine.Socket))
		}}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

// Operators list keys, have a page compared with its checksum, and drain the store: puts are
// refused from then on, and what was put is on the disk.
func TestOperatorsAskTheStore(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pages")
	r := start(t, func(c *config.Config) {
		c.Store = config.Store{Memory: 8 << 20, WriteBack: true,
			Disk: []config.StoreDisk{{Path: file, Size: 64 << 20}}}
	})
	e := newPageEngine(t, r)
	put := func(page byte) connectortest.Completion {
		t.Helper()
		id, err := e.Put(msg.Put{Space: e.space, Hashes: hashes16(page), HashBytes: 16,
			Blocks: []uint32{uint32(page)}})
		if err != nil {
			t.Fatal(err)
		}
		return e.wait(id)
	}
	for p := range byte(3) {
		if c := put(p); c.Status != board.OK {
			t.Fatalf("%+v", c)
		}
	}
	_, text := get(t, r, "/v1/store")
	var st nodeapi.Store
	if err := json.Unmarshal([]byte(text), &st); err != nil || len(st.Namespaces) != 1 {
		t.Fatalf("%v: %s", err, text)
	}
	of := "namespace=" + st.Namespaces[0].ID
	var keys nodeapi.StoreKeys
	code, text := ask(t, r, "GET", "/v1/store/keys?"+of+"&tier=memory&first=0&limit=2")
	if err := json.Unmarshal([]byte(text), &keys); err != nil || code != 200 || len(keys.Keys) != 2 ||
		keys.Next == 0 {
		t.Fatalf("%d %v %s", code, err, text)
	}
	verified := func(key string) (v nodeapi.StoreVerified) {
		t.Helper()
		code, text := ask(t, r, "GET", "/v1/store/verify?"+of+"&key="+key)
		if err := json.Unmarshal([]byte(text), &v); err != nil || code != 200 {
			t.Fatalf("%d %v %s", code, err, text)
		}
		return v
	}
	if v := verified(keys.Keys[0]); v.Outcome != "hit" || v.Tier != "memory" || v.Bytes != testPage ||
		len(v.CRC32C) != 8 {
		t.Errorf("%+v", v)
	}
	if v := verified(strings.Repeat("ab", 32)); v.Outcome != "miss" || v.CRC32C != "" {
		t.Errorf("%+v", v)
	}
	for path, want := range map[string]int{
		"/v1/store/verify?" + of + "&key=12":                                              400,
		"/v1/store/keys?" + of + "&tier=memory&first=0&limit=9999":                        400,
		"/v1/store/keys?" + of + "&tier=tape&first=0&limit=9":                             409,
		"/v1/store/verify?namespace=" + strings.Repeat("00", 32) + "&key=" + keys.Keys[0]: 409,
	} {
		if code, text := ask(t, r, "GET", path); code != want {
			t.Errorf("%s: %d %s, want %d", path, code, text, want)
		}
	}
	if c := put(7); c.Status != board.OK {
		t.Fatalf("before the drain: %+v", c)
	}
	code, text = ask(t, r, "POST", "/v1/store/drain")
	if code != 200 || !strings.Contains(text, `"drained": true`) ||
		!strings.Contains(text, `"durable": true`) {
		t.Fatalf("%d %s", code, text)
	}
	if c := put(8); c.Status != board.Refused || !strings.Contains(c.Received.Reason, "is drained") {
		t.Errorf("a put after the drain: %+v %+v", c, c.Received)
	}
	_, text = get(t, r, "/v1/store")
	if err := json.Unmarshal([]byte(text), &st); err != nil || !st.Drained || st.Tiers[1].Pages != 4 {
		t.Errorf("%v: %s", err, text)
	}
	id, err := e.Get(msg.Get{Space: e.space, Hashes: hashes16(7), HashBytes: 16,
		Blocks: []uint32{0}})
	if err != nil {
		t.Fatal(err)
	}
	e.ok(id)
	until(t, func() bool { // it is counted behind its end
		_, text = get(t, r, "/v1/store")
		return json.Unmarshal([]byte(text), &st) == nil && st.Tiers[0].Gets == 1
	})
}
