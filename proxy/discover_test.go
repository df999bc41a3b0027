package proxy

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// fleetOf is a Fleet that a test changes.
type fleetOf struct {
	mu      sync.Mutex
	list    []Found
	changed chan struct{}
}

func (f *fleetOf) Found() []Found {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.list)
}

func (f *fleetOf) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.changed == nil {
		f.changed = make(chan struct{})
	}
	return f.changed
}

func (f *fleetOf) set(list ...Found) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = list
	if f.changed != nil {
		close(f.changed)
	}
	f.changed = make(chan struct{})
}

// at is a found engine on the host of its member.
func at(url, role string, change ...func(*Found)) Found {
	host := strings.Split(strings.TrimPrefix(url, "http://"), ":")[0]
	f := Found{Engine: Engine{URL: url, Peer: host + ":7650"}, Role: role, Member: "m",
		Hosts: []string{host}}
	for _, c := range change {
		c(&f)
	}
	return f
}

// What a router takes of what members publish, in whatever order that comes.
func TestChosen(t *testing.T) {
	with := func(id string, started int64) func(*Found) {
		return func(f *Found) { f.ID, f.Member, f.Started = id, id, time.Unix(started, 0) }
	}
	lost := func(f *Found) { f.Lost = true }
	by := func(host string) func(*Found) { return func(f *Found) { f.Hosts = []string{host} } }
	const url = "http://10.0.0.1:8000"
	for name, c := range map[string]struct {
		found []Found
		allow []string
		want  string
		wrong string
	}{
		"none": {},
		"own host": {found: []Found{at(url, "both"), at("http://10.0.0.2:8000/", "prefill")},
			want: url + " both, http://10.0.0.2:8000 prefill"},
		"mapped address": {found: []Found{at(url, "both", by("::ffff:10.0.0.1"))},
			want: url + " both"},
		"another host": {found: []Found{at("http://169.254.169.254:80", "both", by("10.0.0.1"))},
			wrong: "it is on another host than that member"},
		"a name": {found: []Found{at("http://localhost:80", "both")}, wrong: "on another host"},
		"allowed": {found: []Found{at(url, "both", by("10.9.0.1"))},
			allow: []string{"10.0.0.0/24"}, want: url + " both"},
		"address": {found: []Found{at(url, "both", by("10.9.0.1"))},
			allow: []string{"10.0.0.1"}, want: url + " both"},
		"not that": {found: []Found{at(url, "both", by("10.9.0.1"))},
			allow: []string{"10.0.2.0/24", "*.x"}, wrong: "another host"},
		"below": {found: []Found{at("http://A.engines.svc:80", "both")},
			allow: []string{"*.engines.svc"},
			want:  "http://A.engines.svc:80 both"},
		"not below": {found: []Found{at("http://engines.svc.evil:80", "both")},
			allow: []string{"*.engines.svc"}, wrong: "another host"},
		"password": {found: []Found{at("http://u:hunter2@10.0.0.1:80", "both")},
			wrong: "not one of a server"},
		"no URL": {found: []Found{at("gopher", "both")}, wrong: "not one of a server"},
		"role":   {found: []Found{at(url, "chef")}, wrong: `role "chef"`},
		"two nodes": {found: []Found{at(url, "both", with("a", 1)),
			at(url, "both", with("b", 1))}, want: url + " both"},
		"restarted": {found: []Found{at(url, "prefill", with("a", 2)),
			at(url, "both", with("b", 1), lost)},
			want: url + " prefill"},
		"two roles": {found: []Found{at(url, "prefill", with("a", 1)),
			at(url, "decode", with("b", 1))},
			want:  url + " prefill",
			wrong: "of b: a publishes the same URL with the role prefill, and this one decode"},
		"two spellings": {found: []Found{at("http://10.0.0.1:8000", "both"),
			at("http://10.0.0.1:8001", "both"),
			at("HTTP://10.0.0.1:8001", "both", by("10.0.0.1"))},
			want: url + " both, http://10.0.0.1:8001 both"},
		"the newer one": {found: []Found{at(url, "prefill", with("a", 1)),
			at(url, "decode", with("b", 2))},
			want: url + " decode", wrong: "of a: b publishes"},
		"the owner": {found: []Found{at(url, "decode", with("a", 9), by("10.7.0.1")),
			at(url, "prefill", with("b", 1))}, allow: []string{"0.0.0.0/0"}, want: url + " prefill",
			wrong: "of a: b publishes"},
	} {
		allow, err := parseHosts(c.allow)
		if err != nil {
			t.Fatal(err)
		}
		for range 4 {
			rand.Shuffle(len(c.found), func(i, j int) {
				c.found[i], c.found[j] = c.found[j], c.found[i]
			})
			list, problems := chosen(c.found, allow)
			var got []string
			for _, f := range list {
				got = append(got, f.URL+" "+f.Role)
			}
			why := strings.Join(problems, "; ")
			if strings.Join(got, ", ") != c.want || !strings.Contains(why, c.wrong) ||
				(why == "") != (c.wrong == "") || strings.Contains(why, "hunter2") {
				t.Errorf("%s: %q and %q", name, got, why)
			}
		}
	}
	var many []Found
	for i := range 10000 {
		many = append(many, at(fmt.Sprintf("http://10.0.0.1:%d", i+1), "both"))
	}
	if list, problems := chosen(many, nil); len(list) != maxFound ||
		!strings.Contains(problems[0], "at most 256") {
		t.Errorf("%d engines, %s", len(list), problems[0])
	}
	for _, wrong := range []string{"", "http://a", "10.0.0.0/99", "a b"} {
		if _, err := New(Config{Fleet: &fleetOf{}, Allow: []string{wrong}}); err == nil ||
			!strings.Contains(err.Error(), "allow") {
			t.Errorf("%q: %v", wrong, err)
		}
	}
}

// Of engines that give one name to two models the majority counts; a tie has one winner.
func TestUnlike(t *testing.T) {
	for name, c := range map[string]struct {
		models string // of each engine: fingerprint and names, such as "a:x,y"
		want   string
	}{
		"alike":       {"a:x a:x b:y", "map[]"},
		"unknown":     {"a:x :x a:", "map[]"},
		"one differs": {"a:x b:x a:x", "map[1:x]"},
		"the first":   {"b:x a:x a:x", "map[0:x]"},
		"tie":         {"b:x a:x", "map[0:x]"},
		"second name": {"a:x,y b:y a:x,y", "map[1:y]"},
	} {
		var list []Found
		var names [][]string
		for _, text := range strings.Fields(c.models) {
			model, rest, _ := strings.Cut(text, ":")
			list = append(list, Found{Model: model})
			names = append(names, strings.FieldsFunc(rest, func(r rune) bool { return r == ',' }))
		}
		if got := fmt.Sprint(unlike(list, names)); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// startFleet runs a router without engines of its own.
func startFleet(t *testing.T, f *fleetOf) (*Proxy, string) {
	t.Helper()
	return start(t, Config{Fleet: f, Times: quick()})
}

// answered waits until each answer is of one of these engines.
func answered(t *testing.T, url string, names ...string) {
	t.Helper()
	until(t, "answers of "+fmt.Sprint(names), func() bool {
		got := map[string]bool{}
		for range 2 * len(names) {
			code, body, _ := post(t, url, "/v1/completions", completion("", "hi"))
			i := slices.IndexFunc(names, func(n string) bool { return strings.Contains(body, n) })
			if code != http.StatusOK || i < 0 {
				return false
			}
			got[names[i]] = true
		}
		return len(got) == len(names)
	})
}

// gets reports whether the router has an engine in a role.
func gets(px *Proxy, role, url string) bool {
	return slices.ContainsFunc(px.backends(), func(b *backend) bool {
		return b.role == role && b.url.String() == url
	})
}

// Engines come and go with what members publish.
func TestFoundEngines(t *testing.T) {
	a, b := serving(t, "from a", "x"), serving(t, "from b", "x")
	f := &fleetOf{}
	px, url := startFleet(t, f)
	if code, body, _ := post(t, url, "/v1/completions", completion("", "hi")); code != 503 {
		t.Errorf("without engines: %d %s", code, body)
	}
	f.set(at(a.URL, "decode"))
	answered(t, url, "from a")
	f.set(at(a.URL, "decode"), at(b.URL, "decode"))
	answered(t, url, "from a", "from b")
	f.set(at(a.URL, "decode", func(x *Found) { x.Leaving = true }), at(b.URL, "decode"))
	until(t, "an engine that leaves is left out", func() bool { return !gets(px, roleDecode, a.URL) })
	answered(t, url, "from b")
	f.set(at(a.URL, "decode"), at(b.URL, "decode"))
	answered(t, url, "from a", "from b")
	f.set(at(a.URL, "decode"))
	until(t, "an engine that is gone is left out", func() bool { return !gets(px, roleDecode, b.URL) })
	answered(t, url, "from a")
}

// An engine that answers health checks and nothing else gets no request. It does once it lists its
// models.
func TestFoundEngineWithoutModels(t *testing.T) {
	a, b := serving(t, "from a", "x"), serving(t, "from b", "x")
	b.lists = false
	f := &fleetOf{}
	px, url := startFleet(t, f)
	f.set(at(a.URL, "decode"), at(b.URL, "decode"))
	until(t, "both are healthy", func() bool {
		all := px.decode.list()
		return len(all) == 2 && all[0].condition() == fit && all[1].condition() == fit
	})
	answered(t, url, "from a")
	if text := get(t, url+"/health"); !strings.Contains(text, "it has not listed its models") {
		t.Errorf("/health gives no reason: %s", text)
	}
	b.mu.Lock()
	n := len(b.seen)
	b.mu.Unlock()
	if n > 0 {
		t.Errorf("%d requests to an engine without models", n)
	}
}

// An engine that has another model under the same name gets no request, until it is the only one.
func TestFoundEnginesWithUnlikeModels(t *testing.T) {
	a, b, c := serving(t, "from a", "x"), serving(t, "from b", "x"), serving(t, "from c", "x")
	model := func(m string) func(*Found) { return func(f *Found) { f.Model = m } }
	f := &fleetOf{}
	px, url := startFleet(t, f)
	f.set(at(a.URL, "decode", model("1")), at(b.URL, "decode", model("1")))
	answered(t, url, "from a", "from b")
	f.set(at(a.URL, "decode", model("1")), at(b.URL, "decode", model("1")),
		at(c.URL, "decode", model("2")))
	until(t, "its models are known, and it is left out", func() bool {
		c.mu.Lock()
		asked := len(c.seen) > 0
		c.mu.Unlock()
		return asked && !gets(px, roleDecode, c.URL)
	})
	answered(t, url, "from a", "from b")
	for _, s := range c.requests() {
		if s.path != "/v1/models" {
			t.Errorf("it got a request for %s", s.path)
		}
	}
	f.set(at(c.URL, "decode", model("2")))
	answered(t, url, "from c")
}

// Of two engines without requests of this router, the one with fewer open leases gets the next:
// they are of requests by other routers.
func TestFoundEnginesLoad(t *testing.T) {
	a, b := serving(t, "from a", "x"), serving(t, "from b", "x")
	f := &fleetOf{}
	_, url := startFleet(t, f)
	leases := func(n int) func(*Found) { return func(f *Found) { f.Leases = n } }
	for _, c := range []struct {
		a, b int
		want []string
	}{{3, 2, []string{"from b"}}, {1, 2, []string{"from a"}}, {2, 2, []string{"from a", "from b"}},
		{-1, 2, []string{"from a", "from b"}}} {
		f.set(at(a.URL, "decode", leases(c.a)), at(b.URL, "decode", leases(c.b)))
		until(t, fmt.Sprint(c), func() bool {
			return strings.Count(get(t, url+"/health"), fmt.Sprintf(`"leases":%d`, c.a)) > 0
		})
		answered(t, url, c.want...)
	}
	// The last number of a sidecar that has ended is out of date.
	f.set(at(a.URL, "decode", leases(1), func(f *Found) { f.Lost = true }),
		at(b.URL, "decode", leases(2)))
	answered(t, url, "from a", "from b")
}

// A role changes under load: no request fails, and one that was in flight ends.
func TestFoundEngineChangesItsRole(t *testing.T) {
	a, b := serving(t, "from a", "x"), serving(t, "from b", "x")
	f := &fleetOf{}
	px, url := startFleet(t, f)
	f.set(at(a.URL, "both"), at(b.URL, "both"))
	answered(t, url, "from a", "from b")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if code, body, _ := post(t, url, "/v1/completions", completion("", "hi")); code != 200 {
					t.Errorf("%d %s", code, body)
				}
			}
		})
	}
	for i := range 10 {
		role := []string{"prefill", "decode"}[i%2]
		f.set(at(a.URL, role), at(b.URL, "both"))
		until(t, role, func() bool {
			return gets(px, role, a.URL) && !gets(px, map[string]string{"prefill": roleDecode,
				"decode": rolePrefill}[role], a.URL)
		})
	}
	close(stop)
	wg.Wait()
}

// An engine whose role changes is in the worse condition of its old roles: a prefill that has not
// been asked since its process died shows nothing.
func TestFoundEngineInheritsTheWorseCondition(t *testing.T) {
	a := serving(t, "from a", "x")
	f := &fleetOf{}
	px, url := start(t, Config{Fleet: f, Times: Times{Check: time.Hour}})
	f.set(at(a.URL, "both"))
	answered(t, url, "from a")
	px.decode.list()[0].outcome(syscall.ECONNREFUSED, signRefused, 0)
	if c := px.prefill.list()[0].condition(); c != fit {
		t.Fatal(c)
	}
	m := &member{decode: Engine{URL: a.URL, found: true}}
	b, err := px.newBackend(roleDecode, m.decode)
	if err != nil {
		t.Fatal(err)
	}
	m.dec = b
	px.inherit(m)
	if c := b.condition(); c != down || b.waits {
		t.Errorf("%s, waits %v", c, b.waits)
	}
}

// A member that others have lost keeps its engine as one that decodes, while that answers.
func TestFoundEngineOfLostMember(t *testing.T) {
	a := serving(t, "from a", "x")
	f := &fleetOf{}
	px, url := startFleet(t, f)
	f.set(at(a.URL, "both"))
	answered(t, url, "from a")
	lost := at(a.URL, "both", func(x *Found) { x.Lost = true })
	f.set(lost)
	until(t, "it prefills no more", func() bool { return !gets(px, rolePrefill, a.URL) })
	answered(t, url, "from a")
	a.Close()
	until(t, "it is left out", func() bool { return !gets(px, roleDecode, a.URL) })
}

// A found engine's KV events decide, as those of a listed one do. Events from a host that the
// member may not name are ignored, and the engine is used.
func TestFoundEnginesEvents(t *testing.T) {
	a, b := newReporting(t), newReporting(t)
	reg := prometheus.NewRegistry()
	f := &fleetOf{}
	px, url := start(t, Config{Fleet: f, Mode: PrefillFirst, Times: quick(), Policy: "cache",
		Registry: reg})
	found := func(e *reporting, events string) Found {
		return at(e.URL, "decode", func(x *Found) {
			x.Events, x.Replay, x.Hosts = events, e.Replay(), append(x.Hosts, "127.0.0.1")
		})
	}
	f.set(found(a, a.Endpoint()), found(b, b.Endpoint()))
	until(t, "the feeds", func() bool { return values(t, reg)["kv_events_up"] == 2 })
	text := strings.Repeat("a document of some length. ", 400)
	b.Publish(storedText(text))
	until(t, "the blocks, and what both engines serve", func() bool {
		return values(t, reg)["kv_blocks"] == float64(len(text)/block) && aboutAll(px, "base")
	})
	for range 3 {
		post(t, url, "/v1/completions", completion("base", text))
	}
	if x, y := a.completions(), b.completions(); x != 0 || y != 3 {
		t.Errorf("%d and %d requests", x, y)
	}
	for _, foreign := range []string{"tcp://169.254.169.254:80", "ipc:///tmp/x", "tcp://*:1"} {
		f.set(found(a, foreign))
		until(t, "the feed of "+foreign+" is left out", func() bool {
			return values(t, reg)["kv_events_up"] == 0 && gets(px, roleDecode, a.URL) &&
				px.decode.list()[0].reporter == nil
		})
		if code, answer, _ := post(t, url, "/v1/completions", completion("base", text)); code != 200 {
			t.Errorf("%s: %d %s", foreign, code, answer)
		}
	}
	px, url = startFleet(t, f)
	f.set(found(a, a.Endpoint()))
	until(t, "a router without a policy uses the engine", func() bool {
		code, _, _ := post(t, url, "/v1/completions", completion("base", text))
		return code == 200 && px.decode.list()[0].reporter == nil
	})
}

// Engines of the file stay, whatever members publish.
func TestFoundBesideListedEngines(t *testing.T) {
	a, b := serving(t, "from a", "x"), serving(t, "from b", "x")
	f := &fleetOf{}
	px, url := start(t, Config{Fleet: f, Decode: decoders(a.URL + "/"), Mode: PrefillFirst,
		Times: quick()})
	f.set(at(a.URL, "prefill"), at(b.URL, "decode"))
	answered(t, url, "from a", "from b")
	if gets(px, rolePrefill, a.URL) {
		t.Error("a member has changed the role of an engine of the file")
	}
	if err := px.SetEngines(nil, nil); err != nil {
		t.Fatal(err)
	}
	until(t, "what a member publishes counts without the file", func() bool {
		return gets(px, rolePrefill, a.URL) && !gets(px, roleDecode, a.URL)
	})
	if err := px.SetEngines(nil, decoders("gopher")); err == nil {
		t.Error("a list with a wrong URL was taken")
	}
}
