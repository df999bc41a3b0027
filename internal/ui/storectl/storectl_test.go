package storectl

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/disk"
)

const answerStat = `{"tiers": [
 {"name": "memory", "pages": 3, "bytes": 3145728, "capacity_bytes": 8388608, "hits": 7,
  "evicted": 2, "eviction_age_seconds": 61, "gets": 2, "get_seconds": 0.003},
 {"name": "disk", "removed_bytes": 67108864},
 {"name": "object\u001b[2J", "problem": "no bucket"}],
 "namespaces": [{"id": "ab", "weights": "w", "dtype": "bf16", "page_tokens": 16, "page_bytes": 4096,
  "pools": 2, "private": true}], "misses": 5, "pinned_bytes": 1048576, "drained": true}`

// sidecar answers requests by method and path.
func sidecar(t *testing.T, answers map[string]string) (*Client, *strings.Builder) {
	t.Helper()
	return client(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, ok := answers[r.Method+" "+r.URL.Path]
		if !ok {
			http.Error(w, "this node has no store: set store.memory", http.StatusNotFound)
			return
		}
		_, _ = w.Write([]byte(a))
	}))
}

// client is one of a sidecar that serves the same on its port and on its admin socket.
func client(t *testing.T, h http.Handler) (*Client, *strings.Builder) {
	t.Helper()
	port, out := httptest.NewServer(h), &strings.Builder{}
	t.Cleanup(port.Close)
	return &Client{Addr: strings.TrimPrefix(port.URL, "http://"), Out: out,
		Admin: testutil.HTTPSocket(t, h).Listener.Addr().String()}, out
}

func TestPrints(t *testing.T) {
	c, out := sidecar(t, map[string]string{"GET /v1/store": answerStat,
		"GET /v1/store/keys": `{"keys": ["aa", "bb"], "next": 9}`,
		"GET /v1/store/verify": `{"outcome": "hit", "tier": "disk", "bytes": 4096, "took_seconds": 0.002,
			"crc32c": "00c0ffee"}`,
		"POST /v1/store/drain": `{"drained": true, "durable": true}`})
	keys := func(ctx context.Context) error { return c.Keys(ctx, "x", "disk", 0, 2) }
	verify := func(ctx context.Context) error { return c.Verify(ctx, "x", "y") }
	for want, call := range map[string]func(context.Context) error{
		"memory      3      3.0 MiB  8.0 MiB   7     2        1m1s          1.5ms": c.Stat,
		"removed pages: 64.0 MiB of disk are still to be overwritten or deleted\n": c.Stat,
		"no bucket": c.Stat, "drained: it takes no pages": c.Stat, "ab         w        bf16": c.List,
		"all pages that the lower": c.Drain, "bb\nmore: --first 9": keys,
		"4096 bytes from disk in 2ms": verify,
	} {
		out.Reset()
		if err := call(t.Context()); err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%v, %q is not in:\n%s", err, want, out)
		}
		if strings.Contains(out.String(), "\x1b") {
			t.Errorf("control characters of others: %q", out)
		}
	}
	c.JSON = true
	out.Reset()
	var got nodeapi.Store
	if err := c.Stat(t.Context()); err != nil || json.Unmarshal([]byte(out.String()), &got) != nil ||
		len(got.Tiers) != 3 {
		t.Errorf("%v: %s", err, out)
	}
}

func TestReportsWhatWentWrong(t *testing.T) {
	c, out := sidecar(t, map[string]string{"GET /v1/store/verify": `{"outcome": "damaged"}`,
		"GET /v1/store/keys": "<html>"})
	if err := c.Verify(t.Context(), "x", "y"); !errors.Is(err, ErrNoPage) ||
		!strings.Contains(err.Error(), "damaged") || out.Len() > 0 {
		t.Errorf("%v %s", err, out)
	}
	if err := c.Stat(t.Context()); err == nil || !strings.Contains(err.Error(), "set store.memory") {
		t.Errorf("%v", err)
	}
	if err := c.Keys(t.Context(), "x", "disk", 0, 1); err == nil ||
		!strings.Contains(err.Error(), "another version") {
		t.Errorf("%v", err)
	}
	c.Addr = "127.0.0.1:1"
	if err := c.Stat(t.Context()); err == nil || !strings.Contains(err.Error(), "http.listen") {
		t.Errorf("%v", err)
	}
}

func TestRemove(t *testing.T) {
	answer := `{"confirmed": 1, "members": [{"node": "a", "boot": "01", "confirmed": true},
		{"node": "b\u001b", "boot": "02", "problem": "it cannot be reached"}]}`
	c, out := sidecar(t, map[string]string{"POST /v1/store/remove": answer})
	if err := c.Remove(t.Context(), "x", false); !errors.Is(err, ErrUnconfirmed) ||
		!strings.HasPrefix(out.String(), "removed on 1 of 2 nodes, which serve none") ||
		!strings.HasSuffix(out.String(), "\nnot on b? (02): it cannot be reached\n") {
		t.Errorf("%v %q", err, out)
	}
	c.JSON = true
	out.Reset()
	if err := c.Remove(t.Context(), "x", true); !errors.Is(err, ErrUnconfirmed) ||
		out.String() != answer {
		t.Errorf("%v %q", err, out)
	}
	c, out = sidecar(t, map[string]string{"POST /v1/store/remove": `{"confirmed": 1,
		"members": [{"node": "a", "confirmed": true}]}`})
	if err := c.Remove(t.Context(), "x", false); err != nil ||
		!strings.HasPrefix(out.String(), "removed on 1 of 1 nodes, ") {
		t.Errorf("%v %q", err, out)
	}
}

// A drain asks again until the store is drained, or its time is over.
func TestDrainAsksAgain(t *testing.T) {
	asked := 0
	c, out := client(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked++; asked == 3 {
			_, _ = w.Write([]byte(`{"drained": true}`))
			return
		}
		_, _ = w.Write([]byte(`{"problem": "3 puts are under way"}`))
	}))
	if err := c.Drain(t.Context()); err != nil || asked != 3 || !strings.Contains(out.String(),
		"memory only") {
		t.Errorf("%v, asked %d times: %s", err, asked, out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	asked = 10
	if err := c.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

// Check fails for a store with damage, and prints where it is.
func TestCheck(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pages")
	tier, err := disk.Open(disk.Config{Devices: []disk.Device{{Path: path, Size: 16 << 20}},
		SegmentBytes: 1 << 20, MaxPages: 64})
	if err != nil {
		t.Fatal(err)
	}
	if err := tier.Close(); err != nil {
		t.Fatal(err)
	}
	out := &strings.Builder{}
	if err := Check(t.Context(), []string{path}, false, out); err != nil ||
		!strings.Contains(out.String(), "0 damaged") {
		t.Errorf("%v %s", err, out)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("x"), 3<<20); err != nil { // the header of a segment
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	out.Reset()
	if err := Check(t.Context(), []string{path}, false, out); !errors.Is(err, ErrDamaged) ||
		!strings.Contains(out.String(), "offset 3145728: segment: the header") {
		t.Errorf("%v %s", err, out)
	}
	out.Reset()
	var r disk.Report
	if err := Check(t.Context(), []string{path}, true, out); !errors.Is(err, ErrDamaged) ||
		json.Unmarshal([]byte(out.String()), &r) != nil || r.Damaged != 1 {
		t.Errorf("%v %s", err, out)
	}
}
