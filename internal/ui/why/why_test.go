package why

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/nodeapi/debug"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const (
	bootP = "aaaaaaaa000000000000000000000000"
	bootD = "bbbbbbbb000000000000000000000000"
	xfer  = "0123456789abcdef0123456789abcdef"
	mib   = 1 << 20
)

var at = time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local)

// source is a prefill's sidecar whose peer is on another host.
func source() debug.Requests {
	return debug.Requests{Node: "p-0", Boot: bootP, Order: []string{"shm", "tcp"},
		Records: []nodeapi.Record{{At: at, Side: "source", Outcome: "ok", Req: "cmpl-7-0-aa", Xfer: xfer,
			Engine: "vllm/p/tp0", Bytes: 12 * mib, Early: 8 * mib, QueueUS: 900, WireUS: 31000,
			FlagUS: 4200, TookUS: 35000, Moved: []nodeapi.Moved{{Transport: "tcp", Bytes: 12 * mib}},
			Sends: []nodeapi.Send{{Peer: bootD, Committed: true, FirstUS: 12000, WireUS: 18000,
				CommitUS: 400, Rails: []nodeapi.RailSend{
					{Transport: "tcp", Local: "eth0", Remote: "eth1", Bytes: 4 * mib, Slices: 9},
					{Transport: "tcp", Local: "eth1", Remote: "eth0", Bytes: 8 * mib, Slices: 20,
						Failed: 1}}}}}},
		Peers: []nodeapi.PeerReach{{Boot: bootD, Node: "d-0", Pairs: []nodeapi.PairReach{
			{Transport: "tcp", Local: "eth0", Remote: "eth1", Lanes: 2},
			{Transport: "shm", Local: "shm", Remote: "shm", Why: "shm works within one host, and the " +
				"peer is on another one"}}}}}
}

func destination() debug.Requests {
	return debug.Requests{Node: "d-0", Boot: bootD, Order: []string{"shm", "tcp"},
		Records: []nodeapi.Record{{At: at, Side: "destination", Outcome: "ok", Req: "cmpl-7-0-bb",
			Xfer: xfer, Engine: "vllm/d/tp0", Peer: bootP, Bytes: 12 * mib, QueueUS: 800, WireUS: 30000,
			CommitUS: 300, TookUS: 31100, Moved: []nodeapi.Moved{{Transport: "tcp", Bytes: 12 * mib}}},
			{At: at.Add(-time.Second), Side: "get", Outcome: "ok", Req: "cmpl-7-0-bb",
				Engine: "vllm/d/tp0", Bytes: mib, TookUS: 2000,
				Pages: &nodeapi.PageCount{All: 4, Memory: 2, Disk: 1, Missing: 1}}},
		Peers: []nodeapi.PeerReach{{Boot: bootP, Node: "p-0"}}}
}

// serve answers /v1/requests like a sidecar that has v.
func serve(t *testing.T, v debug.Requests) string {
	t.Helper()
	return answer(t, func(id string) any {
		v := v
		all := v.Records
		v.Records = nil
		for _, e := range all {
			if nodeapi.SameRequest(e.Req, id) || e.Xfer == id {
				v.Records = append(v.Records, e)
			}
		}
		return v
	})
}

func answer(t *testing.T, find func(id string) any) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/requests" {
			http.NotFound(w, r)
			return
		}
		if err := json.NewEncoder(w).Encode(find(r.URL.Query().Get("id"))); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// The router names the sidecars; the decode engine's id finds the prefill's part by the transfer.
func TestText(t *testing.T) {
	p, d := serve(t, source()), serve(t, destination())
	router := answer(t, func(string) any {
		return nodeapi.RoutedList{Records: []nodeapi.Routed{{At: at, Req: "7", Mode: "concurrent",
			Status: 200, Prefill: "http://p:8100", Decode: "http://d:8200", PrefillSidecar: "http://" + p,
			DecodeSidecar: "http://" + d, FirstUS: 40000, TookUS: 90000}}}
	})
	r, err := Read(t.Context(), Options{ID: "cmpl-7-0-bb", Router: "http://" + router + "/"})
	if err != nil {
		t.Fatal(err)
	}
	got := strings.NewReplacer(p, "P", d, "D").Replace(r.Text())
	const want = `router, 03:04:05.000: request 7, mode concurrent
  prefill engine http://p:8100, decode engine http://d:8200
  answer 200, first byte after 40ms, all after 90ms
sidecar p-0 (P)
  03:04:05.000: engine vllm/p/tp0 offered cmpl-7-0-aa, and sent 12.0 MiB: ok after 35ms
    waited 900µs for the first receiver
    waited 31ms for the receivers
    8.0 MiB had arrived before the last layer was computed; the commit came 4.2ms after it
    to d-0: first slice 12ms after the match (first layer, queue), all confirmed 18ms later, ` +
		`committed 400µs after the last one
      tcp eth0 to eth1: 4.0 MiB in 9 slices
      tcp eth1 to eth0: 8.0 MiB in 20 slices, 1 of them failed and were retransmitted
  transports to d-0, in the order of preference, as they are now:
    shm  0 B: shm to shm: shm works within one host, and the peer is on another one
    tcp  12.0 MiB: the sender's sidecar writes to connections (push)
    gdr  0 B: transports.order of p-0 (shm, tcp) does not have it
sidecar d-0 (D)
  03:04:05.000: engine vllm/d/tp0 received 12.0 MiB of cmpl-7-0-bb from p-0: ok after 31.1ms
    waited 800µs for the grant: the source had to bind its blocks
    waited 30ms for the bytes: the layers that were not computed yet, the queue, the rails
    waited 300µs for the fence and the checks
  03:04:04.000: engine vllm/d/tp0 store get of 1.0 MiB for cmpl-7-0-bb: ok after 2ms
    4 pages: 2 from memory, 1 disk, 0 object store, 0 other nodes; 1 missing, 0 failed
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// Without the sender's part, the receiver's view of the transports counts, and the report lists
// what is unknown.
func TestPartOfThePeerIsUnknown(t *testing.T) {
	d := serve(t, destination())
	r, err := Read(t.Context(), Options{ID: "cmpl-7", Sidecars: []string{d, "127.0.0.1:1"}})
	if err != nil {
		t.Fatal(err)
	}
	text := r.Text()
	for _, want := range []string{
		"unknown: the part of p-0: it was not asked; add --http",
		"unknown: no sidecar answers at http://127.0.0.1:1",
		"transports to p-0, in the order of preference", "tcp  12.0 MiB"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

// A request without a record is an error. It has the reasons, and names what else could be asked.
func TestUnknownRequest(t *testing.T) {
	v := source()
	v.Since, v.Unseen = at, 3
	_, err := Read(t.Context(), Options{ID: "cmpl-8", Sidecars: []string{serve(t, v)}})
	if !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), `"cmpl-8"`) ||
		!strings.Contains(err.Error(), "those since "+at.Format(time.DateTime)) ||
		!strings.Contains(err.Error(), "3 open leases were not searched") ||
		!strings.Contains(err.Error(), "--router") {
		t.Error(err)
	}
	if _, err = Read(t.Context(), Options{ID: "x", Router: "http://127.0.0.1:1"}); err == nil ||
		!strings.Contains(err.Error(), "--router") {
		t.Error(err)
	}
}

// Every reason for a transport without bytes.
func TestUnused(t *testing.T) {
	s := &Sidecar{Requests: source()}
	s.Order = []string{"shm", "gdr", "tcp"}
	s.Peers[0].Pairs = []nodeapi.PairReach{{Transport: "tcp", Local: "a", Remote: "b", Lanes: 1},
		{Transport: "gdr", Local: "m", Remote: "n", Idle: true}}
	for _, x := range []struct{ peer, name, preferred, want string }{
		{bootD, "shm", "", "the peer or this host has no rail of it"},
		{bootD, "gdr", "", "no lane is open now"},
		{bootD, "tcp", "shm", "not needed: shm comes before it"},
		{bootD, "tcp", "", "it has lanes now"},
		{"cc", "tcp", "", "not connected any more"},
		{bootP, "tcp", "", "both engines use this sidecar"},
	} {
		if got := s.unused(x.peer, x.name, x.preferred); !strings.Contains(got, x.want) {
			t.Errorf("%s to %s: %q, want %q", x.name, x.peer, got, x.want)
		}
	}
	s.Excluded = []spray.PairView{{Peer: bootD, Path: spray.Path{Transport: "tcp", Local: "a",
		Remote: "b"}, State: "excluded", Reason: "silent"}}
	if got := s.unused(bootD, "tcp", "shm"); got != "a to b is excluded: silent" {
		t.Error(got)
	}
	s.Order = []string{"tcp"}
	if got := s.unused(bootD, "shm", ""); got != "transports.order of p-0 (tcp) does not have it" {
		t.Error(got)
	}
}

// Open leases show their progress. Control characters in a client's id do not reach the terminal.
func TestOpen(t *testing.T) {
	v := debug.Requests{Node: "d-0", Boot: bootD, Order: []string{"tcp"},
		Dests: []exec.DestView{{Lease: "1", Key: xfer + "/ab", Req: "a\x1b[2J", Engine: "e", Peer: bootP,
			State: "open", Trouble: "no grant yet", Arrived: []int{100, 0}}},
		Sources: []exec.SourceView{{Lease: "2", Key: xfer + "/ab", Req: "b", Engine: "f", State: "open",
			Layers: 3, LayersAll: 8}}}
	addr := answer(t, func(string) any { return v })
	r, err := Read(t.Context(), Options{ID: "a", Sidecars: []string{addr}})
	if err != nil {
		t.Fatal(err)
	}
	text := r.Text()
	for _, want := range []string{"engine e receives a?[2J", "50 % of the bytes", "no grant yet",
		"3 of 8 layers", "unknown: the part of the sidecar with boot aaaaaaaa"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}
