package origin

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
)

const planted = "hunter2"

func TestNoTextHasThePassword(t *testing.T) {
	u, err := Parse("http://router:" + planted + "@engine:8000/base/")
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "url", u, "in", struct{ U URL }{u})
	js, err := json.Marshal(map[string]any{"url": u})
	if err != nil {
		t.Fatal(err)
	}
	in := struct {
		U URL
		u URL
		p *URL
	}{u, u, &u}
	for _, text := range []string{u.String(), fmt.Sprintf("%v %+v %#v %s %q", u, u, u, u, u),
		fmt.Sprintf("%v %+v %#v", in, in, in), log.String(), string(js)} {
		if strings.Contains(text, planted) || strings.Contains(text, "router") {
			t.Errorf("%s contains the user", text)
		}
	}
	if u.String() != "http://engine:8000/base" {
		t.Errorf("shown as %s", u)
	}
}

func TestRequestHasThePassword(t *testing.T) {
	u, err := Parse("https://router:" + planted + "@engine:8000")
	if err != nil {
		t.Fatal(err)
	}
	r, err := u.Request(t.Context(), http.MethodGet, "/health", nil)
	if err != nil {
		t.Fatal(err)
	}
	if user, password, ok := r.BasicAuth(); !ok || user != "router" || password != planted ||
		r.URL.String() != "https://engine:8000/health" {
		t.Errorf("%s with %s:%s", r.URL, user, password)
	}
	u.SetHeader(r, http.Header{"Authorization": {"Bearer client"}})
	if got := r.Header.Get("Authorization"); got != "Bearer client" {
		t.Errorf("the client's authorization became %s", got)
	}
}

func TestParse(t *testing.T) {
	for raw, want := range map[string]bool{
		"http://a:1":                      true,
		"http://u:hunter2@a:1/":           true,
		"ftp://u:hunter2@a":               false,
		"http://u:hunter2@":               false,
		"http://a?key=hunter2":            false,
		"http://a#hunter2":                false,
		"u:hunter2@a:1":                   false,
		"user@hunter2:8000":               false,
		"http://u:hunter2 x@[a":           false,
		"127.0.0.1:8000":                  false,
		"":                                false,
		"http://u:hunter2@a:1/%zz":        false,
		"http:u:hunter2@a":                false,
		"//u:hunter2@a:1":                 false,
		"http://a:1/x@hunter2":            true,
		"https://[::1]:8000/v1/with/path": true,
	} {
		_, err := Parse(raw)
		if (err == nil) != want || err != nil && strings.Contains(err.Error(), planted) {
			t.Errorf("%q: %v", raw, err)
		}
	}
}
