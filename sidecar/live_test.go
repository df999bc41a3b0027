package sidecar

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
)

// TestLive: the page's events show a transfer that has ended, and a bounded number of browsers gets
// them.
func TestLive(t *testing.T) {
	p, d := pairOf(t, "tcp")
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	x := begin(t, p, pe, de, 1, tokens)
	de.ok(x.dst)
	pe.ok(x.src)
	open := func() *http.Response {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
			"http://"+p.HTTPAddr()+"/v1/live", nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	const limit = 16
	var all []*http.Response
	for range limit {
		all = append(all, open())
	}
	refused := open()
	if text, _ := io.ReadAll(refused.Body); refused.StatusCode != http.StatusServiceUnavailable ||
		refused.Header.Get("Retry-After") == "" {
		t.Errorf("one browser too many: %s %s", refused.Status, text)
	}
	lines := bufio.NewScanner(all[0].Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() { // one event each second
		var live struct {
			Recent []struct{ Side, Outcome string }
		}
		text, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if err := json.Unmarshal([]byte(text), &live); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		if len(live.Recent) == 1 && live.Recent[0].Side == "source" && live.Recent[0].Outcome == "ok" {
			break
		}
	}
	if lines.Err() != nil {
		t.Error(lines.Err())
	}
	for _, res := range all {
		_ = res.Body.Close()
	}
	until(t, func() bool { // their places are free again
		res := open()
		defer func() { _ = res.Body.Close() }()
		return res.StatusCode == http.StatusOK
	})
}
