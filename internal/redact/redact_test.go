package redact

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/kvspray/kvspray/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestURL(t *testing.T) {
	for in, want := range map[string]string{
		"":                                 "",
		"host:80":                          "host:80",
		"127.0.0.1:8000":                   "127.0.0.1:8000",
		"http://host:80/path?q=hunter2":    "http://host:80/path?...",
		"http://host:80#hunter2":           "http://host:80#...",
		"http://h/?token=a@hunter2":        "http://...",
		"http://h#a@hunter2":               "http://...",
		"http://a:1/x@hunter2":             "http://...",
		"http:user:hunter2@host":           "...",
		"//user:hunter2@host:80":           "//...@host:80",
		"http://user:hunter2@host/%zz":     "http://...@host/%zz",
		"http://user:hunter2@host:80/p":    "http://...@host:80/p",
		"http://user:hunter2@host?hunter2": "http://...@host?...",
		"https://token@host":               "https://...@host",
		"https://u:p@ss@host":              "https://...@host",
		"https://u:p/a?s#s@host":           "https://...",
		"user:hunter2@host:80":             "...",
		"user@hunter2:8000":                "...",
		"u:hunter2":                        "...",
		"u:hunter2:80":                     "...",
		"http://u:hunter2":                 "http://...",
		"http://u@host:hunter2":            "http://...",
		"u:hunter2@host://x":               "...",
		"ftp://u:hunter2@a":                "ftp://...@a",
		"http://u:hunter2@":                "http://...@",
		"http://u:hunter2 x@[a":            "http://...@[a",
		"http://user:hunter2@ho st":        "http://...@ho st",
		"://user:hunter2@host":             "://...@host",
		"http://[::1]:80/":                 "http://[::1]:80/",
		"https://[::1]:8000/v1/with/path":  "https://[::1]:8000/v1/with/path",
		"redis://:hunter2@10.0.0.1:6379":   "redis://...@10.0.0.1:6379",
	} {
		if got := URL(in); got != want || strings.Contains(got, "hunter2") {
			t.Errorf("URL(%q): %q, want %q", in, got, want)
		}
	}
	for in, want := range map[string]string{
		`dial "http://u:p@a", http://t@b/c: refused`: `dial "http://...@a", http://...@b/c: refused`,
		`{"a":"http://x","b":"rail@10.0.0.1:1"}`:     `{"a":"http://x","b":"rail@10.0.0.1:1"}`,
		`get http://h/p?rank=1&password=hunter2: no`: `get http://h/p?rank=1&password=...: no`,
		`"http://h?Api_Token=hunter2&n=1"`:           `"http://h?Api_Token=...&n=1"`,
		`s3://b/k?X-Amz-Signature=hunter2#x`:         `s3://b/k?X-Amz-Signature=...#x`,
		`http://h/?p%61ss=hunter2`:                   `http://h/?p%61ss=...`,
	} {
		if got := URLs(in); got != want {
			t.Errorf("URLs(%q): %q, want %q", in, got, want)
		}
		if got := string(Text([]byte(in))); strings.Contains(got, "hunter2") {
			t.Errorf("Text(%q): %q", in, got)
		}
	}
}

// However a secret is printed or encoded, alone or within another value, its bytes stay.
func TestSecretPrintsAsItsLength(t *testing.T) {
	const bytesOf = "hunter2"
	s := NewSecret(bytesOf)
	within := struct {
		Password Secret
		hidden   Secret
	}{s, s}
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d"} {
		fmt.Fprintf(&out, verb+verb+verb+"\n", s, &s, within)
	}
	fmt.Fprintln(&out, s, within, fmt.Errorf("refused: %v", s))
	slog.New(slog.NewTextHandler(&out, nil)).Info("m", "s", s, "w", within)
	slog.New(slog.NewJSONHandler(&out, nil)).Info("m", "s", s, "w", within)
	j, err := json.Marshal(map[Secret]any{s: within})
	if err != nil {
		t.Fatal(err)
	}
	y, err := yaml.Marshal(map[string]any{"s": s, "w": within})
	if err != nil {
		t.Fatal(err)
	}
	text := out.String() + string(j) + string(y)
	for _, bad := range []string{bytesOf, fmt.Sprintf("%x", bytesOf), fmt.Sprintf("%X", bytesOf),
		fmt.Sprint([]byte(bytesOf))} {
		if strings.Contains(text, bad) {
			t.Errorf("%q is in %s", bad, text)
		}
	}
	if !strings.Contains(text, "(7 bytes)") || s.Reveal() != bytesOf || NewSecret("").Reveal() != "" ||
		(Secret{}).Reveal() != "" {
		t.Errorf("%s", text)
	}
}
