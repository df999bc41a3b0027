package sidecar

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/nodeapi/debug"
)

// requestsOf reads /v1/requests.
func requestsOf(t *testing.T, r *running, id string) (v debug.Requests) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
		"http://"+r.HTTPAddr()+"/v1/requests?id="+id, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		t.Fatal(res.Status)
	}
	if err := json.NewDecoder(res.Body).Decode(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// Both sidecars have a record of a request without any tracing: engine, transports with their
// bytes, waits; the sender has the bytes of each rail pair. The two engines have different ids for
// the request; the id of the transfer joins the records.
func TestRequests(t *testing.T) {
	p, d := traced(t, "", "")
	moveTraced(t, p, d, "", "")
	var all [2]nodeapi.Record
	for i, x := range []struct {
		at        *running
		id, side  string
		moreThan0 func(nodeapi.Record) int64
	}{
		{p, "req-p", "source", func(e nodeapi.Record) int64 { return e.WireUS }},
		{d, "req-d", "destination", func(e nodeapi.Record) int64 { return e.QueueUS }},
	} {
		var v debug.Requests
		until(t, func() bool { v = requestsOf(t, x.at, x.id); return len(v.Records) > 0 })
		e := v.Records[0]
		all[i] = e
		if len(v.Records) != 1 || e.Side != x.side || e.Req != x.id || e.Outcome != "ok" ||
			e.Engine == "" || e.Bytes == 0 || x.moreThan0(e) == 0 || len(e.Moved) != 1 ||
			e.Moved[0] != (nodeapi.Moved{Transport: "tcp", Bytes: e.Bytes}) {
			t.Errorf("%s: %+v", x.id, v.Records)
		}
		if len(v.Peers) != 1 || len(v.Order) != 1 || v.Order[0] != "tcp" || !v.Since.IsZero() {
			t.Errorf("%s: %+v", x.id, v)
		}
		for _, id := range []string{e.Xfer, e.Xfer[:8], "req"} {
			if got := requestsOf(t, x.at, id); len(got.Records) != 1 {
				t.Errorf("%s finds %d records", id, len(got.Records))
			}
		}
		if got := requestsOf(t, x.at, "eq-d"); len(got.Records)+len(got.Peers) != 0 {
			t.Errorf("an end of the id finds %+v", got)
		}
	}
	if all[0].Xfer != all[1].Xfer {
		t.Errorf("transfers %s and %s", all[0].Xfer, all[1].Xfer)
	}
	sends := all[0].Sends
	if len(sends) != 1 || !sends[0].Committed || sends[0].Peer != d.boot.String() {
		t.Fatalf("%+v", sends)
	}
	sum, slices := uint64(0), uint32(0)
	for _, rail := range sends[0].Rails {
		if rail.Transport != "tcp" || !strings.HasPrefix(rail.Local, "r") || rail.Remote == "" {
			t.Errorf("%+v", rail)
		}
		sum += rail.Bytes
		slices += rail.Slices
	}
	// A retransmitted slice may count twice.
	if sum < all[0].Bytes || slices == 0 {
		t.Errorf("rails carried %d bytes of %d in %d slices", sum, all[0].Bytes, slices)
	}
}

// An open transfer is found, too. An id that is missing or too long is refused.
func TestOpenRequests(t *testing.T) {
	p, d := pairOf(t, "tcp")
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	x := begin(t, p, pe, de, 1, 0)
	bound(t, d)
	var req string
	until(t, func() bool {
		v := debug.Requests{}
		if all := d.web.State().Leases.Dests; len(all) == 1 {
			req = all[0].Key[:8]
			v = requestsOf(t, d, req)
		}
		return len(v.Dests) == 1 && v.Dests[0].Engine != "" && v.Dests[0].Peer == p.boot.String() &&
			len(v.Peers) == 1
	})
	if v := requestsOf(t, p, req); len(v.Sources) != 1 || v.Sources[0].Engine == "" || v.Unseen != 0 {
		t.Errorf("%+v", v)
	}
	_ = de.Cancel(x.dst, "the test is over", false)
	for _, id := range []string{"", strings.Repeat("x", nodeapi.MaxRequestID+1)} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
			"http://"+p.HTTPAddr()+"/v1/requests?id="+id, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != http.StatusBadRequest {
			t.Errorf("id of %d bytes: %s", len(id), res.Status)
		}
	}
}
