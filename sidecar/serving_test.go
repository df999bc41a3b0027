package sidecar

import (
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
)

// What a sidecar publishes of its engines: the configuration before what they announce, one entry
// for each URL, and a problem for each engine that routers do not find.
func TestServedEngines(t *testing.T) {
	worker := func(engine, rank, api, role string, size int) *engines.Worker {
		w := &engines.Worker{Name: engine + "/" + rank, Layout: &layout.Layout{},
			Place:  engines.Place{Engine: engine, TPSize: size},
			Engine: engines.About{Version: "1", API: api, Role: role}}
		w.Fingerprint[0] = 1
		if rank == "tp1" {
			w.Place.TP = 1
		}
		return w
	}
	long := strings.Repeat("x", cluster.MaxNameBytes+1)
	internal := worker("store", "tp0", "http://127.0.0.1:1", "both", 1)
	internal.Internal = true
	for name, c := range map[string]struct {
		api, role string
		workers   []*engines.Worker
		want      string // "URL role engine ranks/world", of each
		problem   string
	}{
		"none": {},
		"announced": {workers: []*engines.Worker{internal,
			worker("vllm/a", "tp1", "http://127.0.0.1:1", "both", 2),
			worker("vllm/a", "tp0", "http://127.0.0.1:1", "both", 2),
			worker("vllm/b", "tp0", "http://127.0.0.1:2", "prefill", 1)},
			want: "http://127.0.0.1:1 both vllm/a 2/2; http://127.0.0.1:2 prefill vllm/b 1/1"},
		"configured": {api: "http://10.1.1.1:8000", role: "decode", workers: []*engines.Worker{
			worker("vllm/a/dp0", "tp0", "", "both", 1), worker("vllm/a/dp1", "tp0", "", "both", 1)},
			want: "http://10.1.1.1:8000 decode vllm/a/dp0 2/2"},
		"old engine": {api: "http://10.1.1.1:8000", role: "decode", workers: []*engines.Worker{
			worker("vllm/a", "tp0", "", "", 1)}, want: "http://10.1.1.1:8000 decode vllm/a 1/1"},
		"no URL": {workers: []*engines.Worker{worker("vllm/a", "tp0", "", "both", 1)}},
		"no role": {api: "http://10.1.1.1:8000", workers: []*engines.Worker{
			worker("vllm/a", "tp0", "", "", 1)}, problem: "its role is unknown: set engine.role"},
		"another host": {workers: []*engines.Worker{
			worker("vllm/a", "tp0", "http://169.254.169.254:80", "both", 1)},
			problem: "no address of this host"},
		"a name": {workers: []*engines.Worker{
			worker("vllm/a", "tp0", "http://metadata.internal", "both", 1)},
			problem: "no address of this host"},
		"a password": {workers: []*engines.Worker{
			worker("vllm/a", "tp0", "http://u:hunter2@127.0.0.1:1", "both", 1)},
			problem: "no URL of a server"},
		"contradiction": {role: "prefill", workers: []*engines.Worker{
			worker("vllm/a", "tp0", "http://127.0.0.1:1", "decode", 1)},
			problem: "its role is to be prefill, and its own (kv_role) is decode"},
		"unknown role": {workers: []*engines.Worker{
			worker("vllm/a", "tp0", "http://127.0.0.1:1", "chef", 1)}, problem: `its role "chef"`},
		"long name": {workers: []*engines.Worker{
			worker(long, "tp0", "http://127.0.0.1:1", "both", 1),
			worker("vllm/"+long[:cluster.MaxNameBytes-5], "tp0", "http://127.0.0.1:2", "both", 1)},
			want:    "http://127.0.0.1:2 both vllm/" + long[:cluster.MaxNameBytes-5] + " 1/1",
			problem: "...: its name has 129 bytes, and routers take at most 128: shorten the engine's id"},
		"one URL, two roles": {workers: []*engines.Worker{
			worker("vllm/a", "tp0", "http://127.0.0.1:1", "decode", 1),
			worker("vllm/b", "tp0", "http://127.0.0.1:1", "prefill", 1)},
			want:    "http://127.0.0.1:1 decode vllm/a 1/1",
			problem: "vllm/b: its role is prefill, and engine vllm/a has the same URL"},
	} {
		s := &served{cfg: &config.Engine{API: c.api, Role: c.role}, leaving: func() bool { return true },
			health: fit,
			own:    func(a netip.Addr) bool { return a.IsLoopback() }, http: "http://127.0.0.1:7651"}
		got := s.of(c.workers)
		if !got.Leaving || got.HTTP != s.http {
			t.Errorf("%s: %+v", name, got)
		}
		if text := textOf(got.APIs); text != c.want {
			t.Errorf("%s: %q, want %q", name, text, c.want)
		}
		problems := strings.Join(*s.problems.Load(), "; ")
		if !strings.Contains(problems, c.problem) || (problems == "") != (c.problem == "") ||
			strings.Contains(problems, "hunter2") {
			t.Errorf("%s: problems %q, want %q", name, problems, c.problem)
		}
	}
}

func fit() nodeapi.Health { return nodeapi.Health{} }

// Routers that find engines by gossip get none whose device has failed, and leave a node without a
// working one, also where they cannot reach its HTTP listener.
func TestServedEnginesOfFailedDevices(t *testing.T) {
	var health nodeapi.Health
	s := &served{cfg: &config.Engine{}, leaving: func() bool { return false },
		health: func() nodeapi.Health { return health }, own: func(netip.Addr) bool { return true }}
	var workers []*engines.Worker
	for i, id := range []string{"a", "b"} {
		workers = append(workers, &engines.Worker{Name: id, Place: engines.Place{Engine: "vllm/" + id},
			Engine: engines.About{API: fmt.Sprintf("http://127.0.0.1:%d", i+1), Role: "both"}})
	}
	for _, c := range []struct {
		health nodeapi.Health
		urls   string
		failed string
	}{
		{nodeapi.Health{}, "http://127.0.0.1:1 http://127.0.0.1:2", ""},
		{nodeapi.Health{State: nodeapi.HealthFailed, Failed: []string{"vllm/a"}}, "http://127.0.0.1:2",
			"http://127.0.0.1:1"},
		{nodeapi.Health{State: nodeapi.HealthFailed, Failed: []string{"vllm/a", "vllm/b"},
			Leaving: true}, "", "http://127.0.0.1:1 http://127.0.0.1:2"},
	} {
		health = c.health
		got := s.of(workers)
		var urls []string
		for _, a := range got.APIs {
			urls = append(urls, a.URL)
		}
		if strings.Join(urls, " ") != c.urls || got.Leaving != health.Leaving ||
			len(*s.problems.Load()) != len(health.Failed) {
			t.Errorf("%+v: %+v, problems %q", health, got, *s.problems.Load())
		}
		if urls := strings.Join(s.failed(workers, health.Failed), " "); urls != c.failed {
			t.Errorf("%+v: failed URLs %s, want %s", health, urls, c.failed)
		}
		if urls := strings.Join(s.affected(workers, health.Failed), " "); urls != c.failed {
			t.Errorf("%+v: affected URLs %s, want %s", health, urls, c.failed)
		}
	}
	// Routers must not take the engines of the other URLs for those without a fault.
	workers[1].Engine.API = ""
	if urls := s.affected(workers, []string{"vllm/a", "vllm/b"}); urls != nil {
		t.Errorf("affected URLs %q, and one engine has none", urls)
	}
	for i := range cluster.MaxAPIs + 1 {
		workers = append(workers, &engines.Worker{Name: "c", Place: engines.Place{Engine: "vllm/c"},
			Engine: engines.About{API: fmt.Sprintf("http://127.0.0.1:%d", i+1), Role: "both"}})
	}
	if urls := s.affected(workers, []string{"vllm/c"}); urls != nil {
		t.Errorf("%d affected URLs", len(urls))
	}
}

// Of more engines than a sidecar can publish, each one that is left out has a problem. The log has
// a problem once.
func TestServedEnginesBeyondTheBound(t *testing.T) {
	s := &served{cfg: &config.Engine{}, leaving: func() bool { return false }, health: fit,
		own: func(netip.Addr) bool { return true }}
	var workers []*engines.Worker
	for i := range cluster.MaxAPIs + 2 {
		workers = append(workers, &engines.Worker{Name: fmt.Sprint(i),
			Place:  engines.Place{Engine: fmt.Sprintf("vllm/%d", i)},
			Engine: engines.About{API: fmt.Sprintf("http://127.0.0.1:%d", 1000+i), Role: "both"}})
	}
	var log testutil.Log
	for range 2 {
		got := s.of(workers)
		s.log(slog.New(slog.NewTextHandler(&log, nil)))
		problems := *s.problems.Load()
		if len(got.APIs) != cluster.MaxAPIs || len(problems) != 2 ||
			!strings.Contains(problems[0], "engine vllm/64: 64 URLs are published") {
			t.Errorf("%d engines, problems %q", len(got.APIs), problems)
		}
	}
	if n := strings.Count(log.String(), "routers do not find engine"); n != 2 {
		t.Errorf("logged %d problems: %s", n, log.String())
	}
}

// The load of an engine is that of one of its ranks: each has a lease for a request. A server has
// the load of all its engines.
func TestServedLoad(t *testing.T) {
	s := &served{cfg: &config.Engine{API: "http://10.1.1.1:8000", Role: "both"}, health: fit,
		leaving: func() bool { return false }}
	var workers []*engines.Worker
	for i, n := range []int64{3, 4, 2} {
		w := &engines.Worker{Name: fmt.Sprint(i),
			Place: engines.Place{Engine: "vllm/a", TP: i, TPSize: 2}}
		if i == 2 {
			w.Place = engines.Place{Engine: "vllm/b"}
		}
		w.Leases.Store(n)
		workers = append(workers, w)
	}
	if a := s.of(workers).APIs[0]; a.Leases != 6 {
		t.Errorf("%d leases", a.Leases)
	}
}

// Where routers get an engine's KV events: at the host of its URL, or of the sidecar. A server of
// several engines has several feeds, and routers get none.
func TestServedFeeds(t *testing.T) {
	type feed struct{ engine, api, events, replay string }
	const host = "http://10.1.1.1:8000"
	for name, c := range map[string]struct {
		feeds   []feed
		want    string
		problem string
	}{
		"none":         {feeds: []feed{{"a", host, "", ""}}},
		"replay alone": {feeds: []feed{{"a", host, "", "tcp://*:2"}}},
		"its own host": {feeds: []feed{{"a", host, "tcp://*:1", "tcp://0.0.0.0:2"}},
			want: "tcp://10.1.1.1:1 tcp://10.1.1.1:2"},
		"two ranks": {feeds: []feed{{"a", host, "tcp://[::]:1", ""}, {"a", host, "tcp://*:1", ""}},
			want: "tcp://10.1.1.1:1 "},
		"the sidecar's host": {feeds: []feed{{"a", host, "tcp://127.0.0.1:1", ""}},
			want: "tcp://127.0.0.1:1 "},
		"two engines": {feeds: []feed{{"a", host, "tcp://*:1", ""}, {"b", host, "tcp://*:2", ""},
			{"c", host, "tcp://*:3", ""}}},
		"another host": {feeds: []feed{{"a", host, "tcp://169.254.169.254:1", ""}},
			problem: "routers get no KV events of engine vllm/a: its endpoint tcp://169.254.169.254:1 is"},
		"a name": {feeds: []feed{{"a", host, "tcp://*:1", "tcp://x:1"}},
			problem: "its endpoint tcp://x:1 is at no address of this host"},
		"a file": {feeds: []feed{{"a", host, "ipc:///tmp/x", ""}}, problem: "is not tcp://HOST:PORT"},
	} {
		s := &served{cfg: &config.Engine{API: host, Role: "both"}, leaving: func() bool { return false },
			health: fit, own: func(a netip.Addr) bool { return a.IsLoopback() }}
		var workers []*engines.Worker
		for _, f := range c.feeds {
			workers = append(workers, &engines.Worker{Name: f.engine,
				Place:  engines.Place{Engine: "vllm/" + f.engine},
				Engine: engines.About{Events: f.events, Replay: f.replay}})
		}
		got := s.of(workers)
		text := strings.TrimPrefix(got.APIs[0].Events+" "+got.APIs[0].Replay, " ")
		problems := strings.Join(*s.problems.Load(), "; ")
		if len(got.APIs) != 1 || text != c.want || !strings.Contains(problems, c.problem) ||
			(problems == "") != (c.problem == "") {
			t.Errorf("%s: %q, want %q; problems %q", name, text, c.want, problems)
		}
	}
}

// A role that is set lasts for the engine's URL, and cannot exceed what the engine announces.
func TestSetRole(t *testing.T) {
	s := &served{cfg: &config.Engine{}, leaving: func() bool { return false },
		health: fit, own: func(netip.Addr) bool { return true }, roles: map[string]string{}}
	var workers []*engines.Worker
	if err := s.setRole(workers, "a", "decode"); err == nil ||
		!strings.Contains(err.Error(), "no engine with a URL: set engine.api") {
		t.Error(err)
	}
	for i, role := range []string{"both", "prefill", "both"} {
		id := string(rune('a' + i))
		workers = append(workers, &engines.Worker{Name: id, Place: engines.Place{Engine: "vllm/" + id},
			Engine: engines.About{API: "http://127.0.0.1:" + string(rune('1'+i)), Role: role}})
	}
	for _, c := range []struct{ engine, role, want, wrong string }{
		{"vllm/a", "decode", "decode prefill both", ""},
		{"a", "prefill", "prefill prefill both", ""},
		{"http://127.0.0.1:3", "decode", "prefill prefill decode", ""},
		{"b", "prefill", "prefill prefill decode", ""},
		{"b", "decode", "prefill prefill decode", "its own (kv_role) is prefill"},
		{"a", "chef", "prefill prefill decode", "not one of prefill, decode, both"},
		{"z", "both", "prefill prefill decode", `no engine "z": it has vllm/a, vllm/b, vllm/c`},
	} {
		err := s.setRole(workers, c.engine, c.role)
		if (err == nil) != (c.wrong == "") || err != nil && !strings.Contains(err.Error(), c.wrong) {
			t.Errorf("%s %s: %v", c.engine, c.role, err)
		}
		var got []string
		for _, a := range s.of(workers).APIs {
			got = append(got, a.Role)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s %s: %v", c.engine, c.role, got)
		}
	}
	for i := range cluster.MaxAPIs + 1 {
		w := &engines.Worker{Place: engines.Place{Engine: "vllm/x"},
			Engine: engines.About{API: fmt.Sprintf("http://127.0.0.1:%d", 100+i)}}
		if err := s.setRole([]*engines.Worker{w}, "x", "both"); i == cluster.MaxAPIs &&
			(err == nil || !strings.Contains(err.Error(), "that is the bound")) {
			t.Error(err)
		}
	}
}

func textOf(list []cluster.API) string {
	var out []string
	for _, a := range list {
		text := a.URL + " " + a.Role + " " + a.Engine + " " + string(rune('0'+len(a.Ranks))) + "/" +
			string(rune('0'+a.World))
		if a.Fingerprint != "01"+strings.Repeat("0", 62) || a.Version != "1" {
			text += " unlike"
		}
		out = append(out, text)
	}
	return strings.Join(out, "; ")
}
