package config

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/kvspray/kvspray/internal/redact"
)

// Router is the whole configuration of the router, 'kvspray proxy'.
type Router struct {
	Engines []RouterEngine `yaml:"engines" doc:"The engines, each once. Flag: --engine url=URL,role=ROLE,..., repeatable; these engines come after those of the file."`

	Join            []string `yaml:"join" unit:"host:port list" doc:"peer.gossip.listen of some sidecars. The router finds the engines of all sidecars of their cluster, and follows what these publish: engine.api, engine.role, kvspray drain. It asks each again until it answers." default:"none: the engines are those of the list"`
	ClusterKeyFile  string   `yaml:"cluster_key_file" unit:"path" doc:"The cluster's key, for join: peer.cluster_key_file of the sidecars. Mode 0600." default:"none: join reaches loopback only"`
	GossipListen    string   `yaml:"gossip_listen" unit:"host:port" doc:"UDP and TCP address of the router in the membership, for join. Sidecars must reach it." default:"a free port of the address that leads to the first one of join"`
	GossipAdvertise string   `yaml:"gossip_advertise" unit:"host:port" doc:"Address announced to sidecars, if it differs from the bound one." default:"the bound address"`
	Allow           []string `yaml:"allow" unit:"networks, addresses or names" doc:"Hosts at which sidecars may publish engines besides their own address, for instance 10.0.0.0/8 or *.engines.svc. The router sends clients' requests there." default:"none"`

	Listen string `yaml:"listen" unit:"host:port" doc:"Address to serve on. Port 0 takes a free one."`
	Mode   string `yaml:"mode" unit:"concurrent or prefill-first" doc:"concurrent: prefill and decode get a request at once, so that the transfer overlaps the prefill; each prefill engine needs peer or sidecar. prefill-first: decode gets it with the answer of prefill, as with routers for NIXL."`

	Policy         string `yaml:"policy" unit:"least-loaded, auto, cache, fetch or local" doc:"How the engines of a request are chosen. least-loaded: the fewest requests in flight. auto: the lowest predicted time to the first token; the decode engine may compute alone. cache: the longest cached prefix. fetch, local: as auto, but always or never with a prefill engine. docs/placement.md has the prediction."`
	Calibration    string `yaml:"calibration" unit:"path" doc:"File of 'kvspray place calibrate' with lines prefill and link, for a policy's first predictions." default:"none"`
	ReplicateAfter int    `yaml:"replicate_after" unit:"requests" doc:"Requests in flight at each engine that has a prefix, after which a policy gives another engine a copy. 0: never."`
	TokenBytes     Size   `yaml:"token_bytes" unit:"bytes" doc:"KV cache of one token, all layers and ranks, for a policy."`

	MaxPin Duration `yaml:"max_pin" unit:"duration" doc:"Longest time for which a client's hint (pin and ttl in agent_hint, docs/conversations.md) keeps a request's pages in the store. At most 1h. 0: such hints are ignored."`

	Continue bool `yaml:"continue" unit:"true or false" doc:"Another engine continues a streamed answer whose engine fails (docs/continuation.md). Engines then return the token ids of streamed answers that can be continued. Requests without a seed get one, unless their temperature is 0."`

	MaxBody   Size `yaml:"max_body" unit:"bytes" doc:"Largest body of a request."`
	MaxBodies Size `yaml:"max_body_total" unit:"bytes" doc:"Bodies of all requests in flight, with their copies; others get 503. More than three times max_body."`

	SlowAfter        Duration `yaml:"slow_after" unit:"duration" doc:"Time without an answer to a health check after which an engine is slow: it gets requests only if no engine is better."`
	SilentAfter      Duration `yaml:"silent_after" unit:"duration" doc:"Time without an answer to a health check and without a byte of any request after which an engine is silent: a better engine takes over its requests that have no byte yet. After five times as long it is down."`
	PrefillTimeout   Duration `yaml:"prefill_timeout" unit:"duration" doc:"Longest wait for the answer of a prefill engine."`
	FirstByteTimeout Duration `yaml:"first_byte_timeout" unit:"duration" doc:"Longest wait for the first byte of a decode engine, or for its whole answer if that is no stream."`
	DrainTimeout     Duration `yaml:"drain_timeout" unit:"duration" doc:"Longest wait for requests in flight at the end of the router, which then cuts them."`

	OTLP       string  `yaml:"otlp" unit:"URL" doc:"OpenTelemetry collector that gets spans of requests, by OTLP over HTTP, for instance http://127.0.0.1:4318." default:"none: off"`
	TraceShare float64 `yaml:"trace_share" unit:"more than 0, at most 1" doc:"Share of the requests without a traceparent header that are traced, for otlp."`
	Log        Log     `yaml:"log" doc:"Logging, to standard error."`

	origin origin
}

// RouterEngine is one engine of the router.
type RouterEngine struct {
	URL     string `yaml:"url" unit:"URL" doc:"API server of the engine." default:"required"`
	Role    string `yaml:"role" unit:"prefill, decode or both" doc:"What the engine computes. An engine with both may fetch a cached prefix from another one, if a policy chooses." default:"required"`
	Sidecar string `yaml:"sidecar" unit:"URL" doc:"http.listen of the engine's sidecar. It shows that the engine leaves (kvspray drain), has the rates for a policy, and has or checks peer." default:"none"`
	Peer    string `yaml:"peer" unit:"host:port" doc:"peer.listen of the sidecar of an engine that prefills." default:"asked from sidecar"`
	Events  string `yaml:"events" unit:"tcp://host:port" doc:"Endpoint of the engine's KV events (endpoint of --kv-events-config). A policy then takes its hits from them." default:"none"`
	Replay  string `yaml:"replay" unit:"tcp://host:port" doc:"Where it replays KV events (replay_endpoint of --kv-events-config)." default:"none"`
}

// The roles of an engine.
const (
	RolePrefill = "prefill"
	RoleDecode  = "decode"
	RoleBoth    = "both"
)

// MaxBodyCopies is the largest number of copies of a body that one request holds.
const MaxBodyCopies = 3

// DefaultRouter is the configuration without file and flags.
func DefaultRouter() *Router {
	return &Router{Listen: "127.0.0.1:8000", Mode: "concurrent", Policy: "least-loaded",
		ReplicateAfter: 16, TokenBytes: 128 << 10, MaxBody: 32 << 20, MaxBodies: 1 << 30,
		SlowAfter: Duration(2 * time.Second), SilentAfter: Duration(6 * time.Second),
		PrefillTimeout: Duration(5 * time.Minute), FirstByteTimeout: Duration(30 * time.Minute),
		DrainTimeout: Duration(30 * time.Second), TraceShare: 1,
		Log: Log{Level: LevelInfo, Format: FormText}}
}

// LoadRouter reads a file (none if path is empty), and applies "key=value" settings over it. It
// appends engines of the form "key=value,..." to those of the file.
func LoadRouter(path string, sets, engines []string) (*Router, error) {
	r := DefaultRouter()
	if err := r.origin.load(r, path, sets); err != nil {
		return nil, err
	}
	for _, text := range engines {
		if err := r.add(text); err != nil {
			return nil, err
		}
	}
	return r, r.validate()
}

// Differs lists the keys, except for engines, that have other values in another configuration.
func (r *Router) Differs(other *Router) (keys []string) {
	a, b := reflect.ValueOf(*r), reflect.ValueOf(*other)
	for i := range a.NumField() {
		f := a.Type().Field(i)
		if key := f.Tag.Get("yaml"); f.IsExported() && key != "engines" &&
			!reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			keys = append(keys, key)
		}
	}
	return keys
}

// add appends an engine.
func (r *Router) add(text string) error {
	node := &yaml.Node{Kind: yaml.MappingNode}
	for item := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(item, "=")
		if !ok {
			return &Error{Key: "engine", Value: text, Wrong: fmt.Sprintf("%q is not of the form key=value",
				redact.URLs(item)), Remedy: "write for instance url=http://127.0.0.1:8100,role=decode"}
		}
		node.Content = append(node.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: key},
			&yaml.Node{Kind: yaml.ScalarNode, Value: value})
	}
	key := fmt.Sprintf("engines[%d]", len(r.Engines))
	r.Engines = append(r.Engines, RouterEngine{})
	w := walker{lines: map[string]int{}}
	w.value(node, reflect.ValueOf(&r.Engines[len(r.Engines)-1]).Elem(), key, tags{})
	for _, f := range fields(RouterEngine{}) {
		r.origin.mark(key + "." + f.Key)
	}
	return w.err()
}

// nameOf is a URL without what can differ in two URLs of the same server.
func nameOf(text string) string {
	if u, err := url.Parse(text); err == nil && u.Host != "" {
		scheme, host := strings.ToLower(u.Scheme), strings.ToLower(u.Host)
		host = strings.TrimSuffix(host, map[string]string{"http": ":80", "https": ":443"}[scheme])
		text = scheme + "://" + host + u.Path
	}
	return strings.TrimRight(text, "/")
}

// join checks the keys of discovery.
func (v *checker) join(r *Router) {
	for i, a := range r.Join {
		v.dial(fmt.Sprintf("join[%d]", i), a)
	}
	for _, x := range []struct{ key, value string }{{"cluster_key_file", r.ClusterKeyFile},
		{"gossip_listen", r.GossipListen}, {"gossip_advertise", r.GossipAdvertise},
		{"allow", strings.Join(r.Allow, ",")}} {
		v.check(x.value == "" || len(r.Join) > 0, x.key, x.value, "set without join",
			"name a sidecar in join, or remove it")
	}
	if r.GossipListen != "" {
		v.dialPort("gossip_listen", r.GossipListen, true) // sidecars dial it, too
	}
	if r.GossipAdvertise != "" {
		v.dial("gossip_advertise", r.GossipAdvertise)
	}
}

func (r *Router) validate() error {
	v := checker{origin: &r.origin}
	decodes := func(e RouterEngine) bool { return e.Role == RoleDecode || e.Role == RoleBoth }
	v.check(len(r.Join) > 0 || slices.ContainsFunc(r.Engines, decodes), "engines", "",
		"no engine decodes", "add one with role decode: under engines in the file of --config, or "+
			"with --engine url=http://HOST:PORT,role=decode; or find engines with --join HOST:PORT")
	v.join(r)
	first := map[string]int{}
	for i, e := range r.Engines {
		key := fmt.Sprintf("engines[%d].", i)
		v.check(e.URL != "", key+"url", "", "missing", "name the engine's API server, http://host:port")
		v.oneOf(key+"role", e.Role, RolePrefill, RoleDecode, RoleBoth)
		v.check(e.Role != RoleDecode || e.Peer == "", key+"peer", e.Peer,
			"a peer of an engine that only decodes", "remove it, or set role to prefill or both")
		v.check(e.Events != "" || e.Replay == "", key+"replay", e.Replay, "a replay without events",
			"set events, too, or remove replay")
		name := nameOf(e.URL)
		at, twice := first[name]
		v.check(!twice || name == "", key+"url", e.URL, fmt.Sprintf("also the url of engines[%d]", at),
			"name each engine once; role both is for one that prefills and decodes")
		first[name] = i
	}
	_, _, err := net.SplitHostPort(r.Listen)
	v.check(err == nil, "listen", r.Listen, "not an address", "write host:port, for instance "+
		"127.0.0.1:8000")
	v.between("replicate_after", r.ReplicateAfter, 0, math.MaxInt32)
	v.size("token_bytes", r.TokenBytes, 1, 1<<40)
	v.check(r.MaxPin == 0 || r.MaxPin.D() >= time.Millisecond && r.MaxPin.D() <= time.Hour, "max_pin",
		r.MaxPin.D().String(), "outside 1ms to 1h, and not 0", "write a duration, for instance 5m")
	v.size("max_body", r.MaxBody, 1, 1<<40)
	v.check(r.MaxBodies/MaxBodyCopies > r.MaxBody, "max_body_total", r.MaxBodies.String(),
		fmt.Sprintf("not more than %d times max_body, %s: the router holds up to %[1]d copies of a body",
			MaxBodyCopies, r.MaxBody), "raise it, or lower max_body")
	for _, d := range []struct {
		key string
		d   Duration
	}{{"slow_after", r.SlowAfter}, {"silent_after", r.SilentAfter}, {"prefill_timeout",
		r.PrefillTimeout}, {"first_byte_timeout", r.FirstByteTimeout}, {"drain_timeout",
		r.DrainTimeout}} {
		v.duration(d.key, d.d, time.Millisecond)
	}
	v.check(r.SilentAfter >= r.SlowAfter, "silent_after", r.SilentAfter.String(),
		fmt.Sprintf("shorter than slow_after (%s)", r.SlowAfter), "make it longer, or slow_after shorter")
	v.check(r.TraceShare > 0 && r.TraceShare <= 1, "trace_share", fmt.Sprint(r.TraceShare),
		"not above 0 and at most 1", "write for instance 0.1")
	v.log(r.Log)
	return errors.Join(v.errs...)
}
