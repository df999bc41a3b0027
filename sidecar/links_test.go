package sidecar

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/nodeapi"
)

// What /v1/links shows of the rail that a transfer took is what the sidecar learned: a rate, from
// samples, within what the transfer itself took. The receiver has sent nothing and reports none.
func TestLinks(t *testing.T) {
	p, d := pairOf(t, "tcp")
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	read := func(r *running) (v nodeapi.Links) {
		t.Helper()
		code, body := get(t, r, "/v1/links")
		if err := json.Unmarshal([]byte(body), &v); code != 200 || err != nil {
			t.Fatalf("%d, %v: %s", code, err, body)
		}
		return v
	}
	if v := read(p); v.Boot != p.Boot().String() || len(v.Peers) != 0 {
		t.Errorf("before it has met a peer: %+v", v)
	}
	began := time.Now()
	x := begin(t, p, pe, de, 1, tokens)
	de.ok(x.dst)
	pe.ok(x.src)
	until(t, func() bool { // a flight ends behind its lease
		v := read(p)
		return len(v.Peers) == 1 && len(v.Peers[0].Links) == 1 && v.Peers[0].Links[0].InFlight == 0 &&
			v.Peers[0].Links[0].Samples > 0
	})
	v := read(p)
	took := time.Since(began)
	if len(v.Peers) != 1 || v.Peers[0].Boot != d.Boot().String() || len(v.Peers[0].Links) != 1 {
		t.Fatalf("%+v", v)
	}
	for prio, bytes := range v.Peers[0].Waiting {
		if bytes != 0 {
			t.Errorf("%d bytes wait as %s, and nothing is open", bytes, prio)
		}
	}
	l := v.Peers[0].Links[0]
	moved := float64(tokens) * float64(testShape.TokenBytes) * float64(testShape.Layers)
	if l.Transport != "tcp" || l.Local != "lo" || l.Remote != "lo" || l.State != "healthy" ||
		l.Lanes == 0 || l.Samples == 0 ||
		l.Rate < moved/took.Seconds()/2 || l.Age < 0 || l.Age > time.Since(began).Seconds() ||
		l.InFlight != 0 || l.Window == 0 ||
		l.Delay <= 0 || l.Delay > took.Seconds() || l.Factor <= 0 {
		t.Errorf("%+v, of %.0f bytes in %s", l, moved, took)
	}
	if v := read(d); len(v.Peers) != 1 || len(v.Peers[0].Links) != 1 ||
		v.Peers[0].Links[0].Samples != 0 {
		t.Errorf("the receiver has learned from what it did not send: %+v", v)
	}
}
