package config

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kvspray/kvspray/internal/testutil"
)

var ignoreOrigin = cmpopts.IgnoreUnexported(Config{})

func TestDefaultIsValidAndOnLoopback(t *testing.T) {
	c := Default()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	addrs := []string{c.Peer.Listen, c.Peer.Gossip.Listen, c.HTTP.Listen}
	for _, r := range c.RailsOrDefault() {
		addrs = append(addrs, r.Listen)
	}
	for _, a := range addrs {
		if !IsLoopback(a) {
			t.Errorf("%s is not loopback", a)
		}
	}
}

func TestParse(t *testing.T) {
	c, err := Parse("f.yaml", []byte(`
node: p0
engine: {socket: /run/a.sock, allowed_uids: [1000, 1001]}
peer:
  listen: 10.0.0.1:7000
  cluster_key_file: /etc/k
  gossip: {listen: "10.0.0.1:0", join: ["10.0.0.2:7652"]}
transports:
  order: [tcp]
  tcp:
    rails:
      - {name: eth0, listen: "10.0.0.1:0", speed: 10gbit}
      - {name: eth1, listen: "10.0.1.1:0", advertise: "192.0.2.1:99"}
    integrity: off
    slice: 1MiB
  gpu: {open: [0, GPU-01234567-89ab-cdef-0123-456789abcdef], relays: [all], memory: 256MiB}
transfer: {deadline: 1m, match_timeout: 500ms}
http: {listen: off}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.Node = "p0"
	want.Engine.Socket, want.Engine.AllowedUIDs = "/run/a.sock", []int{1000, 1001}
	want.Peer.Listen, want.Peer.ClusterKeyFile = "10.0.0.1:7000", "/etc/k"
	want.Peer.Gossip = Gossip{Listen: "10.0.0.1:0", Join: []string{"10.0.0.2:7652"}}
	want.Transports.Order = []string{"tcp"}
	want.Transports.TCP.Rails = []Rail{{Name: "eth0", Listen: "10.0.0.1:0", Speed: 10e9},
		{Name: "eth1", Listen: "10.0.1.1:0", Advertise: "192.0.2.1:99"}}
	want.Transports.TCP.Integrity, want.Transports.TCP.Slice = "off", 1<<20
	want.Transports.GPU.Open = []string{"0", "GPU-01234567-89ab-cdef-0123-456789abcdef"}
	want.Transports.GPU.Relays = []string{"all"}
	want.Transports.GPU.Memory = 256 << 20
	want.Transfer.Deadline, want.Transfer.MatchTimeout = Duration(time.Minute),
		Duration(500*time.Millisecond)
	want.HTTP.Listen = "off"
	if d := cmp.Diff(want, c, ignoreOrigin); d != "" {
		t.Error(d)
	}
}

// Every mistake names line, key, value and what to do.
func TestMistakes(t *testing.T) {
	for name, c := range map[string]struct {
		yaml string
		want []string
	}{
		"unknown key": {"peer:\n  lisen: x", []string{"f.yaml:2", "peer.lisen", "unknown key",
			`did you mean "listen"`}},
		"unknown value": {"peer:\n  lisen: x:1",
			[]string{`f.yaml:2: peer.lisen: "x:1": unknown key; did you mean`}},
		"unknown section": {"pear:\n  listen: x", []string{`f.yaml:1: pear: "{...}": unknown key`}},
		"unknown list": {"peer:\n  listens: [a, b]",
			[]string{`f.yaml:2: peer.listens: "[...]": unknown key`}},
		"unknown long": {"zebra: " + strings.Repeat("a", 500), []string{`f.yaml:1: zebra: "` +
			strings.Repeat("a", 120) + `...": unknown key`}},
		"unknown secret": {"peer:\n  cluster_key: hunter22", []string{`f.yaml:2: peer.`,
			"unknown key", "(8 bytes, not repeated here)"}},
		"unknown near": {"peer:\n  cluster_key_fil: /k", []string{`f.yaml:2: peer.cluster_key_fil`,
			"unknown key", "known here"}},
		"twice": {"node: a\nnode: b",
			[]string{`f.yaml:2: node: "b": written twice, first in line 1; keep one`}},
		"collector of another protocol": {"trace:\n  otlp: grpc://a:4317", []string{":2", "trace.otlp",
			`"grpc://a:4317"`, "not a URL", "http://127.0.0.1:4318"}},
		"collector without host": {"trace: {otlp: \"http://\"}", []string{"trace.otlp", "not a URL"}},
		"collector with a password": {"trace: {otlp: \"http://u:secret@a:1\"}", []string{"trace.otlp",
			"password", "OTEL_EXPORTER_OTLP_HEADERS"}},
		"collector with a query": {"trace: {otlp: \"http://a:1/?x=1\"}", []string{"trace.otlp",
			"query"}},
		"unknown far": {"zebra: 1", []string{"f.yaml:1", "zebra", "known here: node, engine"}},
		"unit missing": {"transfer:\n  deadline: 30", []string{"f.yaml:2", "transfer.deadline",
			`"30"`, "30s"}},
		"wrong unit": {"\ntransports:\n  tcp:\n    slice: 30s", []string{"f.yaml:4",
			"transports.tcp.slice", `"30s"`, "256KiB"}},
		"rate as size": {"transports:\n  tcp:\n    rails:\n    - name: a\n      listen: " +
			"127.0.0.1:0\n      speed: 10GiB", []string{":6", "transports.tcp.rails[0].speed", "10gbit"}},
		"impossible": {"transfer:\n  deadline: -3s", []string{":2", "transfer.deadline", `"-3s"`,
			"outside"}},
		"odd slice": {"transports: {tcp: {slice: 100KiB}}",
			[]string{":1", "transports.tcp.slice", "multiple of 64KiB"}},
		"disks without memory": {"store: {disk: [{path: /a, size: 1GiB}]}", []string{":1", "store.disk",
			"set store.memory"}},
		"little memory": {"store: {memory: 1KiB}", []string{"store.memory", "use 1MiB to"}},
		"relative disk": {"store:\n  memory: 1GiB\n  disk:\n  - {path: a, size: 1GiB}",
			[]string{":4", "store.disk[0].path", "not an absolute path"}},
		"small disk": {"store:\n  memory: 1GiB\n  disk:\n  - {path: /a, size: 1MiB}",
			[]string{":4", "store.disk[0].size", "use 64MiB to"}},
		"disk twice": {"store:\n  memory: 1GiB\n  disk:\n  - {path: /a, size: 1GiB}\n" +
			"  - {path: /./a, size: 1GiB}", []string{":5", "store.disk[1].path", "store.disk[0]"}},
		"back to nowhere": {"store: {memory: 1GiB, write_back: true}", []string{"store.write_back",
			"no disk"}},
		"object without bucket": {"store: {memory: 1GiB, object: {size: 1GiB}}",
			[]string{"store.object.bucket", "name a bucket"}},
		"object without prefix": {"store: {memory: 1GiB, object: {bucket: b, size: 1GiB}}",
			[]string{"store.object.prefix", "missing"}},
		"large object store": {"store: {memory: 1GiB, object: {bucket: b, prefix: p, size: 9TiB}}",
			[]string{"store.object.size", "use 128MiB to 8TiB"}},
		"object elsewhere": {"store: {memory: 1GiB, object: {bucket: b, prefix: p, size: 1GiB, " +
			"endpoint: \"ftp://a\"}}", []string{"store.object.endpoint", "not a URL"}},
		"odd segment": {"store: {memory: 1GiB, segment: 3MiB}", []string{"store.segment",
			"power of two"}},
		"large quota": {"store: {memory: 1GiB, memory_quota: 2GiB}", []string{"store.memory_quota",
			"more than store.memory (1GiB)"}},
		"no portion": {"store: {memory: 1GiB, memory_quota: 101%}",
			[]string{"store.memory_quota", "50%"}},
		"no part": {"store: {memory: 1GiB, memory_quota: 0%}", []string{"store.memory_quota", "50%"}},
		"bare quota": {"store: {memory: 1GiB, memory_quota: 12}",
			[]string{"store.memory_quota", "32GiB or 50%"}},
		"quota of no disk": {"store: {memory: 1GiB, disk_quota: 10%}", []string{"store.disk_quota",
			"there is no disk"}},
		"quota of no bucket": {"store: {memory: 1GiB, object_quota: 1GiB}",
			[]string{"store.object_quota", "there is no object store"}},
		"short namespace": {"store: {memory: 1GiB, namespaces: [{id: ab, memory_quota: 1%}]}",
			[]string{"store.namespaces[0].id", "64 hexadecimal"}},
		"namespace twice": {"store: {memory: 1GiB, namespaces: [{id: " + strings.Repeat("ab", 32) +
			"}, {id: " + strings.Repeat("AB", 32) + "}]}", []string{"store.namespaces[1].id",
			"also the id of store.namespaces[0]"}},
		"large part": {"store: {memory: 1GiB, namespaces: [{id: " + strings.Repeat("ab", 32) +
			", memory_quota: 2GiB}]}", []string{"store.namespaces[0].memory_quota",
			"more than store.memory"}},
		"directory elsewhere": {"store: {memory: 1GiB, directory: etcd}", []string{"store.directory",
			`"etcd"`}},
		"redis without address": {"peer: {gossip: {join: [a:1]}}\n" +
			"store: {memory: 1GiB, directory: redis}",
			[]string{"store.redis.addresses", "missing"}},
		"redis without port": {"peer: {gossip: {join: [a:1]}}\nstore: {memory: 1GiB, directory: redis, " +
			"redis: {addresses: [a]}}", []string{"store.redis.addresses[0]", "not host:port"}},
		"redis not used": {"store: {memory: 1GiB, redis: {addresses: [\"a:1\"]}}",
			[]string{"store.redis", "set store.directory to redis"}},
		"redis without members": {"store: {memory: 1GiB, directory: redis, " +
			"redis: {addresses: [\"a:1\"]}}", []string{"store.directory", "peer.gossip.join"}},
		"redis without store": {"store: {redis: {addresses: [\"a:1\"]}}", []string{"store.redis",
			"set store.memory"}},
		"list wanted": {"transports:\n  order: tcp", []string{":2", "transports.order",
			"not a list"}},
		"section wanted": {"peer: 3", []string{":1", "peer", "not a section"}},
		"scalar wanted":  {"node: [a]", []string{`:1: node: "[...]": not a single value`}},
		"open listen": {"peer:\n  listen: 10.0.0.1:1", []string{":2", "peer.listen",
			"10.0.0.1:1", "keygen"}},
		"open wildcard": {"http: {listen: \":80\"}", []string{":1", "http.listen",
			"cluster_key_file"}},
		"gossip needs key": {
			"peer:\n  tls: {cert: a, key: b, ca: c}\n  gossip:\n    listen: 10.0.0.1:1",
			[]string{":4", "peer.gossip.listen", "no key"}},
		"tls in part": {"peer:\n  tls: {cert: a}", []string{":2", "peer.tls.key", "together"}},
		"wildcard advertise": {"peer:\n  cluster_key_file: k\n  listen: 0.0.0.0:1",
			[]string{":2", "peer.advertise", "missing"}},
		"name as host": {"peer: {listen: \"example.org:1\"}", []string{"peer.listen",
			"not an IP address"}},
		"no port":  {"peer: {listen: 127.0.0.1}", []string{"peer.listen", "not an address"}},
		"big port": {"peer: {listen: \"127.0.0.1:70000\"}", []string{"peer.listen", "port"}},
		"enum": {"log: {level: loud}", []string{"log.level", `"loud"`,
			"debug, info, warn, error"}},
		"transport": {"transports: {order: [tcp, ib]}", []string{"transports.order[1]", `"ib"`,
			"shm, gdr, tcp"}},
		"gdr and no key": {"transports: {order: [gdr]}", []string{"transports.order", `"gdr"`,
			"cluster_key_file"}},
		"gdr rail": {"transports: {gdr: {rails: [mlx5_0/0]}}",
			[]string{"transports.gdr.rails[0]", "mlx5_1/2@3"}},
		"gdr rail twice": {"transports: {gdr: {rails: [a, a]}}",
			[]string{"transports.gdr.rails[1]", "twice"}},
		"gdr mtu": {"transports: {gdr: {mtu: 1500}}", []string{"transports.gdr.mtu", "1024"}},
		"gdr timer": {"transports: {gdr: {dead_after: 1us}}",
			[]string{"transports.gdr.dead_after"}},
		"transport twice": {"transports: {order: [tcp, tcp]}",
			[]string{"transports.order[1]", "twice"}},
		"rail twice": {"transports: {tcp: {rails: [{name: a, listen: \"127.0.0.1:0\"}, {name: " +
			"a, listen: \"127.0.0.1:0\"}]}}", []string{"rails[1].name", "have this name"}},
		"bad pattern": {"transports:\n  tcp:\n    rails:\n    - match: \"[a\"",
			[]string{":4", "rails[0].match", "not a pattern"}},
		"match and listen": {"transports: {tcp: {rails: [{match: a, listen: \"127.0.0.1:0\"}]}}",
			[]string{"rails[0].match", "beside it"}},
		"exclude alone": {
			"transports: {tcp: {rails: [{name: a, listen: \"127.0.0.1:0\", exclude: true}]}}",
			[]string{"rails[0].exclude", "match"}},
		"exclude maybe": {"transports: {tcp: {rails: [{match: a, exclude: yes}]}}",
			[]string{"rails[0].exclude", "true or false"}},
		"gpu": {"transports:\n  gpu: {open: [card0]}",
			[]string{":2", "transports.gpu.open[0]", `"card0"`, "nvidia-smi -L"}},
		"relay": {"transports:\n  gpu: {relays: [card0]}",
			[]string{":2", "transports.gpu.relays[0]", `"card0"`, "nvidia-smi -L"}},
		"gpu twice": {"transports: {gpu: {open: [all, all]}}",
			[]string{"transports.gpu.open[1]", "twice"}},
		"gpu off": {"transports: {gpu: {enabled: off, open: [all]}}",
			[]string{"transports.gpu.open", "transports.gpu.enabled is off"}},
		"gpus": {"transports: {gpu: {open: [0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}}",
			[]string{"transports.gpu.open", "16 at most, or all"}},
		"gpu memory": {"transports: {gpu: {memory: 1MiB}}", []string{"transports.gpu.memory",
			`"1MiB"`, "outside 64MiB to 64GiB"}},
		"distance": {"transports: {tcp: {rails: [{match: a, distance: 4}]}}",
			[]string{"rails[0].distance", "outside 0 to 3"}},
		"absurd speed": {"transports: {tcp: {rails: [{match: a, speed: 99999gbit}]}}",
			[]string{"rails[0].speed", "faster than any rail"}},
		"rails": {"transports: {tcp: {rails: everything}}", []string{"transports.tcp.rails",
			"not a list"}},
		"match timeout": {"transfer: {match_timeout: 40s}", []string{"transfer.match_timeout",
			"longer than transfer.deadline"}},
		"socket long": {"engine: {socket: /" + strings.Repeat("x", 120) + "}",
			[]string{"engine.socket", "107"}},
		"syntax": {"a: [", []string{"f.yaml", "syntax"}},
		"syntax of a value": {"peer:\n  listen: {a: b: c}\n", []string{"f.yaml:1", "syntax",
			`near "peer:" and "listen: {a: b: c}"`}},
		"two documents": {"node: a\n---\nnode: b", []string{"second YAML document"}},
		"alias":         {"engine: &a {}\npeer: *a", []string{":2", "alias"}},
		"merge":         {"<<: {node: a}", []string{"unknown key"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse("f.yaml", []byte(c.yaml))
			if err == nil {
				t.Fatal("accepted")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q misses %q", err, w)
				}
			}
		})
	}
}

func TestAllMistakesAtOnce(t *testing.T) {
	_, err := Parse("f.yaml", []byte("a: 1\nb: 2\nlog: {level: 1}\n"))
	if n := strings.Count(err.Error(), "f.yaml:"); n != 2 {
		t.Errorf("%d mistakes listed, want both unknown keys (values are checked afterwards): %v", n, err)
	}
	_, err = Parse("f.yaml", []byte(strings.Repeat("a: 1\n", 3000)))
	if n := strings.Count(err.Error(), "\n"); n > maxErrors+1 {
		t.Errorf("%d lines of mistakes", n)
	}
}

func TestSet(t *testing.T) {
	c, err := Load("", "transports.tcp.integrity=off", "transports.order=tcp,shm", "transfer.grace=2s",
		"transports.tcp.rails=a@127.0.0.1:0,b@127.0.0.2:0", "peer.gossip.join=",
		"engine.allowed_uids=1,2")
	if err != nil {
		t.Fatal(err)
	}
	if c.Transports.TCP.Integrity != Off || c.Transports.Order[0] != "tcp" ||
		c.Transfer.Grace != Duration(2*time.Second) ||
		len(c.Transports.TCP.Rails) != 2 || c.Transports.TCP.Rails[1].Listen != "127.0.0.2:0" ||
		len(c.Engine.AllowedUIDs) != 2 {
		t.Errorf("%+v", c)
	}
	for _, s := range []string{"x", "x=1", "peer=1", "peer.listen.x=1", "transfer.grace=2",
		"transports.tcp.rails=a", "log.level=x"} {
		if _, err := Load("", s); err == nil {
			t.Errorf("%q accepted", s)
		} else if strings.Contains(err.Error(), ".yaml") {
			t.Errorf("%q: %v names a file", s, err)
		}
	}
}

// The first entry that an interface fits decides; with no means to authenticate peers there is
// loopback alone.
func TestRailPatterns(t *testing.T) {
	keyed := "peer: {cluster_key_file: /etc/k}\n"
	for _, x := range []struct {
		yaml   string
		static string
		rails  string // of eth0, eth1, ib0
	}{
		{"", "lo", ""},
		{"transports: {tcp: {rails: auto}}", "lo", ""},
		{keyed, "lo", ""},
		{keyed + "transports: {tcp: {rails: auto}}", "", "eth0 eth1 ib0"},
		{keyed + "transports: {tcp: {rails: [{match: eth1, exclude: true}, {match: \"eth*\"}]}}",
			"", "eth0"},
		{keyed + "transports: {tcp: {rails: [{match: \"ib[0-9]\", speed: 200gbit, distance: 1}, " +
			"{name: a, listen: \"127.0.0.1:0\"}]}}", "a", "ib0"},
	} {
		c, err := Parse("f.yaml", []byte(x.yaml))
		if err != nil {
			t.Errorf("%s: %v", x.yaml, err)
			continue
		}
		var static, rails []string
		for _, r := range c.RailsOrDefault() {
			static = append(static, r.Name)
		}
		for _, n := range []string{"eth0", "eth1", "ib0"} {
			if _, ok := c.RailFor(n); ok {
				rails = append(rails, n)
			}
		}
		if got := strings.Join(static, " "); got != x.static {
			t.Errorf("%s: rails with an address: %q, want %q", x.yaml, got, x.static)
		}
		if got := strings.Join(rails, " "); got != x.rails {
			t.Errorf("%s: rails by pattern: %q, want %q", x.yaml, got, x.rails)
		}
	}
	c, err := Load("", "transports.tcp.rails=auto")
	if err != nil || len(c.Transports.TCP.Rails) != 1 || c.Transports.TCP.Rails[0].Match != "*" {
		t.Errorf("%+v, %v", c, err)
	}
}

// What print writes, Load reads back.
func TestPrintRoundTrip(t *testing.T) {
	c := Default()
	c.Node = "123"
	c.Engine.AllowedUIDs = []int{7}
	c.Peer.Gossip.Join = []string{"a:1", "127.0.0.1:5"}
	c.Transports.TCP.Rails = []Rail{{Name: "a", Listen: "127.0.0.1:0", Speed: 25e8},
		{Name: "b", Listen: "[::1]:0", Advertise: "h:1"},
		{Match: "*", Exclude: true}, {Match: "ib*", Tier: 2}}
	c.Trace.BlockHashes = "/tmp/with space: and colon"
	var b bytes.Buffer
	if err := c.WriteYAML(&b); err != nil {
		t.Fatal(err)
	}
	got, err := Parse("printed", b.Bytes())
	if err != nil {
		t.Fatalf("%v\n%s", err, b.String())
	}
	if d := cmp.Diff(c, got, ignoreOrigin, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("%s\n%s", d, b.String())
	}
}

// Every field has a key and a meaning, a scalar has a unit or is a name, and all of it stands in
// docs/config.md.
func TestEveryFieldIsDocumented(t *testing.T) {
	var walk func(reflect.Type, string)
	walk = func(ty reflect.Type, prefix string) {
		for i := range ty.NumField() {
			f := ty.Field(i)
			if !f.IsExported() {
				continue
			}
			if f.Tag.Get("yaml") == "" || len(f.Tag.Get("doc")) < 10 {
				t.Errorf("%s%s has no key or no meaning", prefix, f.Name)
			}
			ft := f.Type
			if ft.Kind() == reflect.Slice {
				ft = ft.Elem()
			}
			if ft.Kind() == reflect.Struct {
				walk(ft, prefix+f.Name+".")
			} else if f.Tag.Get("unit") == "" && f.Name != "Node" && f.Name != "Name" {
				t.Errorf("%s%s has no unit", prefix, f.Name)
			}
		}
	}
	walk(reflect.TypeFor[Config](), "")
	walk(reflect.TypeFor[Router](), "")

	var want bytes.Buffer
	if err := WriteMarkdown(&want); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want.Bytes()) {
		t.Error("docs/config.md differs from the code; run 'make generate'")
	}
	for _, f := range append(Fields(), RouterFields()...) {
		if !bytes.Contains(got, []byte("`"+f.Key+"`")) {
			t.Errorf("docs/config.md misses %s", f.Key)
		}
	}
}

func TestUnits(t *testing.T) {
	for text, want := range map[string]uint64{"0B": 0, "64KiB": 64 << 10, "1.5MiB": 3 << 19,
		"4096b": 4096, "2 GiB": 2 << 30} {
		if got, err := parseUnits(text, sizeUnits); err != nil || got != want {
			t.Errorf("%q = %d, %v", text, got, err)
		}
	}
	for text, want := range map[string]uint64{"10gbit": 10e9, "2.5Gbit": 25e8, "1bit": 1} {
		if got, err := parseUnits(text, rateUnits); err != nil || got != want {
			t.Errorf("%q = %d, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "1", "KiB", "-1B", "0.5B", "1e30GiB", "NaNB", "infB",
		"1KB", "1kib/s"} {
		if got, err := parseUnits(text, sizeUnits); err == nil {
			t.Errorf("%q accepted as %d", text, got)
		}
	}
	if s := Size(100000).String(); s != "100000B" {
		t.Error(s)
	}
	if s := Rate(0).String(); s != "0bit" {
		t.Error(s)
	}
}

func TestCheckFiles(t *testing.T) {
	dir := t.TempDir()
	key := filepath.Join(dir, "key")
	c := Default()
	c.Peer.ClusterKeyFile = key
	wantErr := func(what string) {
		t.Helper()
		err := c.CheckFiles()
		var e *Error
		if !errors.As(err, &e) || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want one with %q", err, what)
		}
	}
	wantErr("no such file")
	if err := os.WriteFile(key, []byte("short"), 0o600); err != nil {
		t.Fatal(err)
	}
	wantErr("not a key file")
	if err := os.WriteFile(key, bytes.Repeat([]byte("k"), 44), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.CheckFiles(); err != nil {
		t.Error(err)
	}
	if err := os.Chmod(key, 0o644); err != nil {
		t.Fatal(err)
	}
	wantErr("chmod 600")
	c.Peer.ClusterKeyFile = ""
	c.Peer.TLS = TLS{Cert: key, Key: key, CA: filepath.Join(dir, "none")}
	wantErr("peer.tls.ca")
}

// The check reports files that this user may not read or write: the start would end there.
func TestCheckFilesOfAnother(t *testing.T) {
	dir := t.TempDir()
	closed := t.TempDir()
	// so that others come to dir
	for d, mode := range map[string]os.FileMode{filepath.Dir(dir): 0o755, dir: 0o555, closed: 0} {
		if err := os.Chmod(d, mode); err != nil {
			t.Fatal(err)
		}
	}
	testutil.AsNobody(t, func() {
		for set, want := range map[string]string{
			"trace.transfers=" + filepath.Join(dir, "x.json"):     "cannot be written: permission denied",
			"trace.block_hashes=" + filepath.Join(dir, "x"):       "let this user write there",
			"trace.transfers=" + dir:                              "a directory",
			"trace.transfers=/dev/null":                           "",
			"peer.cluster_key_file=" + filepath.Join(dir, "k"):    "no such file",
			"peer.cluster_key_file=" + filepath.Join(closed, "k"): "let this user read it",
		} {
			c, err := Load("", set)
			if err != nil {
				t.Errorf("%s: %v", set, err)
				continue
			}
			if err := c.CheckFiles(); (err == nil) != (want == "") || err != nil &&
				!strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", set, err, want)
			}
		}
	})
}

// A unit alone is no remedy.
func TestNumberRefused(t *testing.T) {
	for set, want := range map[string]string{
		"engine.max_sessions=64k":           `"64k": not a whole number; write digits alone (sessions)`,
		"transports.gdr.traffic_class=high": "write digits alone (0 to 255)",
	} {
		if _, err := Load("", set); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", set, err, want)
		}
	}
}

func TestLoadFile(t *testing.T) {
	if _, err := Load(filepath.Join(t.TempDir(), "none.yaml")); err == nil ||
		!strings.Contains(err.Error(), "--config") {
		t.Error(err)
	}
	big := filepath.Join(t.TempDir(), "big.yaml")
	if err := os.WriteFile(big, bytes.Repeat([]byte("#"), maxFileBytes+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(big); err == nil || !strings.Contains(err.Error(), "larger") {
		t.Error(err)
	}
	if c, err := Parse("empty", nil); err != nil || c.Peer.Listen == "" {
		t.Error(err)
	}
}

// Whatever bytes come: no panic, and what is accepted is valid, prints, and reads back the same.
func FuzzParse(f *testing.F) {
	var b bytes.Buffer
	if err := Default().WriteYAML(&b); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add([]byte("transports: {tcp: {rails: [{name: a, listen: \"127.0.0.1:0\", speed: 10gbit}], " +
		"slice: 1MiB}}"))
	f.Add([]byte("transfer:\n  deadline: 1h\n"))
	f.Add([]byte("<<: *a"))
	f.Add([]byte("? [a]\n: b"))
	f.Add([]byte("node: !!binary aGk="))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("fuzz", data)
		if err != nil {
			return
		}
		var out bytes.Buffer
		if err := c.WriteYAML(&out); err != nil {
			t.Fatal(err)
		}
		again, err := Parse("printed", out.Bytes())
		if err != nil {
			t.Fatalf("%v\n%s", err, out.String())
		}
		if d := cmp.Diff(c, again, ignoreOrigin, cmpopts.EquateEmpty()); d != "" {
			t.Fatal(d)
		}
	})
}

// The check reports errors that would end the start halfway.
func TestFailsBeforeTheStart(t *testing.T) {
	for _, sets := range [][]string{
		{"peer.listen=127.0.0.1:7651"},
		{"http.listen=127.0.0.1:7652"},
		{"transports.tcp.rails=a@127.0.0.1:7650"},
		{"transports.tcp.rails=a@127.0.0.1:5000,b@127.0.0.1:5000"},
	} {
		if _, err := Load("", sets...); err == nil || !strings.Contains(err.Error(),
			"also the address of") {
			t.Errorf("%v: %v", sets, err)
		}
	}
	c, err := Load("", "transports.tcp.rails=a@127.0.0.1:0,b@127.0.0.1:0", "http.listen=off",
		"peer.gossip.listen=off", "trace.transfers=/nowhere/at/all/t.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.CheckFiles(); err == nil || !strings.Contains(err.Error(), "trace.transfers") {
		t.Error(err)
	}
}

// A guess is made for a slip, not for another word.
func TestNearest(t *testing.T) {
	known := []string{"log", "listen", "peer", "http", "drain"}
	for key, want := range map[string]string{"foo": "", "lag": "", "lisen": "listen",
		"lsiten": "listen", "pear": "peer", "htpp": "http", "rain": "drain",
		"wood": "", "drums": "", "": ""} {
		if got := Nearest(key, known); got != want {
			t.Errorf("Nearest(%q) = %q, want %q", key, got, want)
		}
	}
}

// Errors go to logs: none repeats a password or a token, wherever it was written by mistake.
func TestErrorsRepeatNoSecret(t *testing.T) {
	const bad = "hunter22"
	store := "store:\n  memory: 64MiB\n"
	bucket := func(endpoint string) string {
		return store + "  object: {bucket: b, prefix: p, size: 1GiB, endpoint: \"" + endpoint + "\"}"
	}
	redis := func(addresses string) string {
		return store + "  directory: redis\n  redis: {addresses: " + addresses + "}"
	}
	for name, text := range map[string]string{
		"unknown key":     "peer:\n  cluster_key: " + bad,
		"near a known":    store + "  redis: {password: " + bad + "}",
		"near, twice":     store + "  redis: {passwd: a, passwd: " + bad + "}",
		"collector":       "trace: {otlp: \"https://u:" + bad + "@collector\"}",
		"token":           "trace: {otlp: \"https://" + bad + "@collector\"}",
		"no URL":          "trace: {otlp: \"u:" + bad + "@collector\"}",
		"malformed":       "trace: {otlp: \"https://u:" + bad + "@coll ector\"}",
		"bucket":          bucket("http://u:" + bad + "@h"),
		"bucket's scheme": bucket("u:" + bad + "@h"),
		"redis":           redis("[\":" + bad + "@h:6379\"]"),
		"redis, unused":   store + "  redis: {addresses: [\":" + bad + "@h:6379\"]}",
		"redis, URL":      redis("[\"redis://:" + bad + "@h:6379\"]"),
		"redis, no list":  store + "  redis: {addresses: \"redis://:" + bad + "@h:6379\"}",
		"join":            "peer: {gossip: {join: [\"http://u:" + bad + "@h:1\"]}}",
		"syntax":          "peer: {\npassword: " + bad + "\n: : }",
	} {
		_, err := Parse("f.yaml", []byte(text))
		if err == nil || strings.Contains(err.Error(), bad) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, set := range []string{"store.redis.password=" + bad, "trace.otlp=http://" + bad + "@h",
		"store.redis.addresses=redis://:" + bad + "@h:1"} {
		_, err := Load("", "store.memory=64MiB", "store.directory=redis", set)
		if err == nil || strings.Contains(err.Error(), bad) {
			t.Errorf("--set %s: %v", set, err)
		}
	}
}
