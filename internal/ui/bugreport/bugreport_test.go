package bugreport

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const state = `{"node":"gpu-17.corp","peers":{"aa":"10.20.30.40:7650"},
 "leases":{"destinations":[{"lease":"cc:1.0","req":"chat-of-alice"}]},
 "reach":[{"node":"gpu-18.corp","endpoint":"[fd00::12]:7650"}]}`

const pem = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIA\n-----END PRIVATE KEY-----\n"

const logText = `time=1 msg="transfer" req=chat-of-alice peer=10.20.30.40:7650 node=gpu-18.corp
KEY=b2Zmc2V0b2Zmc2V0b2Zmc2V0b2Zmc2V0b2Zmc2V0b2Zmc2V0 token=abc123
Authorization: Bearer xyz
digest 3f79bb7b435b05321651daefd374cdc681dc06faa65e374e38337b88ca046dea at 127.0.0.1:7651 12:34:56
` + pem

func report(t *testing.T, c *config.Config, log string) map[string]string {
	t.Helper()
	var b bytes.Buffer
	err := Write(t.Context(), Options{Config: c, Python: "/does/not/exist", Log: log,
		Now: time.Unix(1e9, 0)}, &b)
	if err != nil {
		t.Fatal(err)
	}
	zip, err := gzip.NewReader(&b)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		content, rerr := io.ReadAll(r)
		if err != nil || rerr != nil {
			t.Fatal(err, rerr)
		}
		dir, name, _ := strings.Cut(h.Name, "/")
		if dir != "kvspray-bugreport-20010909-014640" {
			t.Errorf("%s is not in the report's directory", h.Name)
		}
		files[name] = string(content)
	}
}

func TestReport(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Path == "/v1/store" {
			http.NotFound(w, q)
			return
		}
		_, _ = w.Write([]byte(state))
	}))
	defer s.Close()
	log := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(log, []byte(strings.Repeat("x\n", maxLog)+logText), 0o600); err != nil {
		t.Fatal(err)
	}
	c := config.Default()
	c.HTTP.Listen = strings.TrimPrefix(s.URL, "http://")
	c.Store.Object.Bucket = "corp-cache"
	files := report(t, c, log)
	for name, content := range files {
		for _, bad := range []string{"alice", "10.20.30.40", "fd00::12", "corp", "b2Zmc2V0", "abc123",
			"xyz", "MC4CAQ"} {
			if strings.Contains(content, bad) {
				t.Errorf("%s has %q:\n%.300s", name, bad, content)
			}
		}
	}
	for name, parts := range map[string][]string{
		"version.txt":        {"kvspray ", "processors"},
		"config.yaml":        {"bucket: bucket-1", "listen:"},
		"doctor.txt":         {"ok"},
		"sidecar/state.json": {`"req":"request-1"`},
		"sidecar/store.json": {"404"},
		"end-of-log.txt": {"req=request-1 peer=address-", "token=[secret]",
			"3f79bb7b435b05321651daefd374cdc681dc06faa65e374e38337b88ca046dea", "127.0.0.1:7651 12:34:56",
			"[key or certificate]"},
		"host/proc/meminfo": {"MemTotal"},
	} {
		for _, part := range parts {
			if !strings.Contains(files[name], part) {
				t.Errorf("%s has no %q:\n%.600s", name, part, tail(files[name]))
			}
		}
	}
	// A node and an address have one name in every file.
	inState := regexp.MustCompile(`"aa":"(address-\d+):7650"(?s:.*)"node":"(node-\d+)"`).
		FindStringSubmatch(files["sidecar/state.json"])
	inLog := regexp.MustCompile(`peer=(address-\d+):7650 node=(node-\d+)`).
		FindStringSubmatch(files["end-of-log.txt"])
	if inState == nil || inLog == nil || inState[1] != inLog[1] || inState[2] != inLog[2] {
		t.Errorf("%v in the state, %v in the log", inState, inLog)
	}
	if n := len(files["end-of-log.txt"]); n > maxLog {
		t.Errorf("%d bytes of the log", n)
	}
}

func tail(s string) string { return s[max(0, len(s)-600):] }

// Without a sidecar the report has the rest.
func TestNothingRuns(t *testing.T) {
	c := config.Default()
	c.HTTP.Listen = "127.0.0.1:1"
	files := report(t, c, filepath.Join(t.TempDir(), "none"))
	if !strings.Contains(files["sidecar/state.json"], "no sidecar answers") ||
		!strings.Contains(files["end-of-log.txt"], "no such file") {
		t.Errorf("%q, %q", files["sidecar/state.json"], files["end-of-log.txt"])
	}
	c.HTTP.Listen = config.Off
	if got := report(t, c, "")["sidecar/metrics.txt"]; !strings.Contains(got, "http.listen is off") {
		t.Errorf("%q", got)
	}
}

func FuzzRedact(f *testing.F) {
	f.Add([]byte(logText))
	f.Add([]byte(state))
	f.Add([]byte("::::1.2.3.4 req=\"\" gpu-17gpu-17"))
	f.Fuzz(func(t *testing.T, text []byte) {
		r := NewRedactor(config.Default())
		r.name("node", "gpu-17")
		once := r.Redact(bytes.Clone(text))
		if bytes.Contains(once, []byte("-----BEGIN PRIVATE KEY-----\nMC4C")) &&
			bytes.Contains(once, []byte("-----END PRIVATE KEY-----")) {
			t.Errorf("a key is left in %q", once)
		}
	})
}
