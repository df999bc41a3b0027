// SPDX-License-Identifier: Apache-2.0

package arch

// rule lists what one package may import. A package without a rule fails the test: a new package
// needs one here.
type rule struct {
	dir  string
	why  string   // why just these
	own  []string // packages of this module; a trailing /... stands for all below
	ext  []string // modules of others, by the path's beginning
	pure bool     // no clock, no I/O, no goroutine, no lock: time is an argument
	c    bool     // may import "C"
}

// What several rules share.
const (
	extGRPC  = "google.golang.org/grpc"
	extProto = "google.golang.org/protobuf"
	extSys   = "golang.org/x/sys"
	extSync  = "golang.org/x/sync"
	extProm  = "github.com/prometheus/client_golang"
	extMsg   = "github.com/vmihailenco/msgpack/v5"
	extYAML  = "go.yaml.in/yaml/v3"
	extCobra = "github.com/spf13/cobra"
	extFlag  = "github.com/spf13/pflag"
	extBack  = "github.com/cenkalti/backoff/v5"
	extGoss  = "github.com/hashicorp/memberlist"
	extLink  = "github.com/vishvananda/netlink"
	extNetns = "github.com/vishvananda/netns"
	extNFT   = "github.com/google/nftables"
	extPlot  = "gonum.org/v1/plot"
	extLeak  = "go.uber.org/goleak"
	extCmp   = "github.com/google/go-cmp"
	extCharm = "charm.land"
	extMinio = "github.com/minio/minio-go/v7"
	extNVML  = "github.com/NVIDIA/go-nvml"
	extRapid = "pgregory.net/rapid"
	extRedis = "github.com/redis/go-redis/v9"
	extOTel  = "go.opentelemetry.io/otel"
	extOTLP  = "go.opentelemetry.io/proto/otlp"
)

var rules = []rule{
	{dir: "cmd/kvspray", why: "a thin main: everything is in a package that tests can reach",
		own: []string{"internal/ui/cli"}},
	{dir: "cmd/kvspray-bench", why: "a thin main, as cmd/kvspray", own: []string{"bench/cli"}},
	{dir: "internal/ui/cli", why: "converts flags to configurations of the composed parts, of " +
		"nothing below them",
		own: []string{"control/peer/keys", "internal/config", "internal/lines", "internal/redact",
			"internal/ui/ask", "internal/ui/bugreport", "internal/ui/command", "internal/ui/doctor",
			"internal/ui/drain", "internal/ui/explain", "internal/ui/loadctl",
			"internal/ui/ping", "internal/ui/place", "internal/ui/status", "internal/ui/storectl",
			"internal/ui/top", "internal/ui/usage", "internal/version", "placement", "proxy",
			"sidecar"},
		ext: []string{extCobra, extProm}},
	{dir: "internal/ui/command", why: "runs the command line of any program; has no command of its " +
		"own but version",
		own: []string{"internal/config", "internal/ui/usage", "internal/version"},
		ext: []string{extCobra, extFlag}},
	{dir: "proxy",
		why: "sends HTTP to engines and follows their events; uses kvspray by its parameters, not by " +
			"its packages; of placement it has answers of sidecars and calibrations",
		own: []string{"internal/origin", "internal/page", "internal/spans", "placement",
			"proxy/internal/feed",
			"proxy/internal/place", "proxy/internal/zmtp"}, ext: []string{extProm}},
	{dir: "internal/origin", why: "URLs that no text shows with a password; standard library only"},
	{dir: "proxy/internal/place", why: "decisions for requests, and what they need to be good; no " +
		"HTTP", own: []string{"placement", "placement/index", "proxy/internal/kvevents"}},
	{dir: "proxy/internal/feed", why: "one engine's events in order and without a gap, or none; " +
		"what they mean is its sink's", own: []string{"proxy/internal/kvevents", "proxy/internal/zmtp"}},
	{dir: "proxy/internal/feed/feedtest", why: "a publisher of events for tests, which fails",
		own: []string{"proxy/internal/zmtp"}, ext: []string{extMsg}},
	{dir: "proxy/internal/kvevents", why: "vLLM's events: bytes to structs", pure: true,
		ext: []string{extMsg}},
	{dir: "proxy/internal/zmtp", why: "connections of ZeroMQ; independent of the messages"},
	{dir: "sidecar", why: "the one place that imports all parts of a node and joins them",
		own: []string{"api/peer/v1", "cluster", "cluster/gossip", "connector", "control/driver",
			"control/engines", "control/exec", "control/lease",
			"control/peer", "control/peer/hello", "control/peer/keys", "control/route", "control/spray",
			"internal/admit", "internal/config", "internal/httpgate", "internal/metrics",
			"internal/redact", "internal/spans", "internal/sys/limits", "internal/sys/mem",
			"internal/sys/topo", "internal/version", "layout", "parseblock",
			"sidecar/internal/exchange", "sidecar/internal/local", "sidecar/internal/pages",
			"sidecar/internal/plans", "sidecar/internal/removals", "sidecar/internal/trace",
			"sidecar/internal/web", "store",
			"store/directory", "store/directory/embedded", "store/directory/redis", "store/disk",
			"store/memory", "store/object", "store/object/s3",
			"store/page", "transfer",
			"transport", "transport/gdr", "transport/shm", "gpu", "gpu/multipath", "gpu/policy",
			"transport/tcp"},
		ext: []string{extProm, extSys, extSync, extBack}},
	{dir: "sidecar/internal/plans", why: "the executor's plans and the driver's memory, over " +
		"parseblock; no peer, no engine, no transport's wire",
		own: []string{"api/peer/v1", "control/driver", "control/engines", "control/exec",
			"internal/sys/mem",
			"layout", "parseblock", "transfer"}},
	{dir: "sidecar/internal/web", why: "HTTP: shows the parts of a node, and changes none; passes " +
		"what operators ask of the store",
		own: []string{"connector", "control/driver", "control/engines", "control/exec", "control/route",
			"control/spray", "gpu", "gpu/policy", "internal/admit", "internal/httpgate", "internal/page",
			"sidecar/internal/trace", "transfer", "transport"},
		ext: []string{extProm}},
	{dir: "sidecar/internal/local", why: "leases that this sidecar serves alone: no plan, no peer",
		own: []string{"control/engines"}},
	{dir: "sidecar/internal/pages", why: "the store as engines use it: leases and questions, no " +
		"message and no tier",
		own: []string{"connector", "control/engines", "internal/admit", "internal/metrics",
			"internal/sys/mem", "sidecar/internal/local", "sidecar/internal/removals",
			"sidecar/internal/trace",
			"sidecar/internal/web", "store", "store/page"}},
	{dir: "sidecar/internal/removals", why: "removals of namespaces on all nodes: the store is " +
		"behind an interface, and peers behind one function",
		own: []string{"api/peer/v1", "internal/admit", "store/page", "store/removal", "transfer"}},
	{dir: "sidecar/internal/exchange", why: "pages between the stores of nodes: the executor and " +
		"the directory are behind interfaces, and peers behind one function",
		own: []string{"api/peer/v1", "control/engines", "internal/admit", "internal/metrics",
			"internal/sys/mem", "layout",
			"parseblock", "store", "store/directory", "store/page", "transfer"}},
	{dir: "sidecar/internal/trace", why: "files with a line for each transfer, and its spans; they " +
		"take values of the executor and of plans",
		own: []string{"control/engines", "control/exec", "internal/lines", "internal/metrics",
			"internal/spans", "internal/sys/mem", "parseblock", "transfer"}},
	{dir: "internal/config", why: "values only, so that every part can be given its own piece",
		own: []string{"internal/redact"},
		ext: []string{extSys, extYAML}},
	{dir: "internal/ui/doctor", why: "tries what the host offers by itself, so that it works where " +
		"the parts do not",
		own: []string{"control/peer/keys", "internal/config", "internal/sys/cuda", "internal/sys/limits",
			"internal/sys/mem",
			"internal/sys/topo", "internal/sys/verbs", "internal/ui/ask", "store/directory",
			"store/directory/redis", "store/page", "transfer"}, ext: []string{extSys, extNVML}},
	{dir: "internal/ui/ask", why: "asks the HTTP port of a sidecar as any client does; the forms " +
		"of the answers belong to its users", own: []string{"internal/redact"}},
	{dir: "internal/ui/status", why: "one screen of what top and doctor read",
		own: []string{"internal/ui/ask", "internal/ui/doctor", "internal/ui/top"}},
	{dir: "internal/ui/drain", why: "asks a sidecar and its engine as any client does",
		own: []string{"internal/redact", "internal/ui/ask"}},
	{dir: "internal/ui/ping", why: "calls a peer as a sidecar does, with the same keys",
		own: []string{"api/peer/v1", "control/peer/keys", "control/peer/rpc", "internal/config",
			"internal/ui/ask"}, ext: []string{extSys}},
	{dir: "internal/ui/bugreport", why: "collects what other commands and the HTTP port print",
		own: []string{"internal/config", "internal/redact", "internal/ui/ask", "internal/ui/doctor",
			"internal/version"},
		ext: []string{extSys}},
	{dir: "internal/ui/explain", why: "describes and plans with the code that plans transfers; " +
		"no engine and no wire",
		own: []string{"layout", "parseblock"}},
	{dir: "internal/ui/place", why: "tables of predictions; no engine and no wire",
		own: []string{"placement"}},
	{dir: "internal/heap", why: "items in order, as plain values; independent of its users",
		pure: true},
	{dir: "internal/ui/usage", why: "a kind of error, for every package that checks arguments, " +
		"flags or files"},
	{dir: "internal/metrics", why: "names and labels; the reasons and outcomes are transfer's",
		own: []string{"transfer"}, ext: []string{extProm}},
	{dir: "internal/sys/topo", why: "what the kernel and the GPU driver report of this host",
		ext: []string{extLink, extSys, extNVML}},
	{dir: "internal/lines", why: "a writer, for logs and traces"},
	{dir: "internal/spans", why: "spans to OpenTelemetry's library: the only package that imports it",
		own: []string{"internal/redact"}, ext: []string{extOTel}},
	{dir: "internal/spans/spanstest", why: "a collector of spans for tests, by the protocol's types",
		ext: []string{extOTLP, extProto}},
	{dir: "internal/page", why: "files that a browser loads; what a page shows is its server's"},
	{dir: "internal/version", why: "what the linker and the module file report"},
	{dir: "internal/testutil", why: "for tests of every package", own: []string{"internal/sys/slack"},
		ext: []string{extSys}},
	{dir: "internal/leaktest", why: "for tests of every package", ext: []string{extLeak}},

	{dir: "transfer", why: "ids, chunk space, bitmap, outcomes: shared by connector, control and " +
		"transports, so it imports none of them", pure: true},
	{dir: "layout", why: "regions, planes, runs and their form on the wire; the transfer space is " +
		"transfer's", pure: true,
		own: []string{"transfer"}, ext: []string{extMsg}},
	{dir: "parseblock", why: "strategies from layouts to runs", pure: true,
		own: []string{"layout", "transfer"}},

	{dir: "connector", why: "engine side; never a transport: what an engine sends cannot " +
		"depend on the wire",
		own: []string{"connector/internal/blocks", "connector/internal/eventfd",
			"connector/internal/memory", "connector/internal/process", "connector/internal/watch",
			"connector/msg", "control/engines", "internal/admit", "internal/board",
			"internal/metrics", "internal/sys/mem", "internal/wire", "layout", "parseblock",
			"store/page", "transfer"},
		ext: []string{extMsg, extSys}},
	{dir: "connector/internal/blocks", why: "blocks that open leases read or write, as plain state",
		pure: true,
		own:  []string{"connector/msg", "layout"}},
	{dir: "connector/internal/eventfd", why: "eventfds that engines pass", ext: []string{extSys}},
	{dir: "connector/internal/memory", why: "memory that engines pass: descriptors to regions",
		own: []string{"connector/internal/eventfd", "connector/msg", "internal/board",
			"internal/sys/mem"}, ext: []string{extSys}},
	{dir: "connector/internal/process", why: "processes behind sockets, and the proof of their exit",
		ext: []string{extSys}},
	{dir: "connector/internal/watch", why: "the pace at which flags are checked; imports no message " +
		"and no board",
		own: []string{"internal/sys/slack"}, ext: []string{extSys}},
	{dir: "connector/msg", why: "messages of the engine protocol: bytes to structs and back",
		pure: true,
		own:  []string{"transfer"}, ext: []string{extMsg}},
	{dir: "connector/connectortest", why: "an engine's side in Go, for tests of the sidecar",
		own: []string{"connector", "connector/msg", "internal/board",
			"internal/sys/mem", "layout",
			"parseblock", "transfer"}, ext: []string{extMsg, extSys}},
	{dir: "internal/board", why: "the shared pages and their rings; of the header, not of the " +
		"messages in it",
		ext: []string{extSys}},
	{dir: "api/engine", why: "the schema of the engine protocol; no code", pure: true},
	{dir: "api/engine/gen", why: "generator of what the schema gives"},
	{dir: "internal/board/gen", why: "generator of the Go mirror of board.h"},
	{dir: "internal/metrics/gen", why: "generator of dashboard and alert rules, from the metrics of " +
		"sidecar and router", own: []string{"internal/metrics", "proxy"},
		ext: []string{extProm, extYAML}},

	{dir: "control/engines",
		why: "what connector and executor exchange, as plain values; it imports " +
			"neither",
		own: []string{"internal/sys/mem", "layout", "parseblock", "transfer"}},
	{dir: "control/lease", why: "leases and slots as plain state", pure: true,
		own: []string{"transfer"}},
	{dir: "control/spray", why: "which lane pulls which slice, as plain state; of transfers it " +
		"takes spaces and " +
		"sets of chunks", pure: true,
		own: []string{"control/spray/internal/chunks", "internal/heap", "transfer"}},
	{dir: "control/spray/internal/chunks", why: "the chunks of one transfer, as plain state; it " +
		"imports no lane", pure: true,
		own: []string{"transfer"}},
	{dir: "control/exec", why: "the life of transfers: events and now in, actions out; of transport " +
		"and the peer's messages it takes the types only", pure: true,
		own: []string{"api/peer/v1", "control/engines", "control/exec/internal/agreement",
			"control/exec/internal/core", "control/exec/internal/dest", "control/exec/internal/endpoint",
			"control/exec/internal/frame", "control/exec/internal/lanes", "control/exec/internal/layouts",
			"control/exec/internal/source", "control/exec/internal/timer", "control/exec/internal/workers",
			"control/spray", "transfer", "transport"}},
	{dir: "control/exec/internal/timer", why: "timers by time; it reads no clock", pure: true,
		own: []string{"control/lease", "internal/heap"}},
	{dir: "control/exec/internal/index",
		why: "small tables and orders, for every part of the executor", pure: true,
		own: []string{"transfer"}},
	{dir: "control/exec/internal/agreement", why: "plans, and whether both sides made the same one; " +
		"the planner is given", pure: true,
		own: []string{"api/peer/v1", "control/engines", "transfer"}},
	{dir: "control/exec/internal/frame", why: "fields of peers' messages: to values and back",
		pure: true,
		own: []string{"api/peer/v1", "control/exec/internal/agreement", "control/lease", "layout",
			"transfer"}},
	{dir: "control/exec/internal/core", why: "what the parts of the executor share", pure: true,
		own: []string{"control/engines", "control/exec/internal/agreement", "control/exec/internal/frame",
			"control/exec/internal/timer", "control/lease", "control/spray", "transfer"}},
	{dir: "control/exec/internal/credit", why: "what peers may have in flight: bytes that came and " +
		"now in, credits out; it imports no lane and no lease", pure: true,
		own: []string{"control/lease", "control/spray", "transfer"}},
	{dir: "control/exec/internal/lanes", why: "lanes, rails and credits of peers, and what is given " +
		"to them; it imports no side of a transfer", pure: true,
		own: []string{"api/peer/v1", "control/engines", "control/exec/internal/core",
			"control/exec/internal/credit", "control/exec/internal/frame", "control/exec/internal/index",
			"control/exec/internal/timer", "control/spray", "transfer", "transport"}},
	{dir: "control/exec/internal/workers", why: "engine workers, and which ids of leases are open",
		pure: true,
		own: []string{"control/engines", "control/exec/internal/lanes", "control/exec/internal/timer",
			"transfer"}},
	{dir: "control/exec/internal/layouts", why: "which layouts peers were asked for", pure: true,
		own: []string{"control/exec/internal/core", "control/exec/internal/timer", "transfer"}},
	{dir: "control/exec/internal/endpoint", why: "addresses, and when to connect; it imports no lease",
		pure: true,
		own: []string{"api/peer/v1", "control/exec/internal/index", "control/exec/internal/lanes",
			"control/exec/internal/timer"}},
	{dir: "control/exec/internal/dest", why: "the destination side; it imports nothing of the " +
		"source side", pure: true,
		own: []string{"api/peer/v1", "control/engines", "control/exec/internal/agreement",
			"control/exec/internal/core", "control/exec/internal/endpoint", "control/exec/internal/frame",
			"control/exec/internal/index", "control/exec/internal/lanes", "control/exec/internal/layouts",
			"control/exec/internal/timer", "control/exec/internal/workers", "control/lease", "transfer",
			"transport"}},
	{dir: "control/exec/internal/source", why: "the source side; it imports nothing of the " +
		"destination side", pure: true,
		own: []string{"api/peer/v1", "control/engines", "control/exec/internal/agreement",
			"control/exec/internal/core", "control/exec/internal/frame", "control/exec/internal/index",
			"control/exec/internal/lanes", "control/exec/internal/layouts", "control/exec/internal/timer",
			"control/exec/internal/workers", "control/lease", "control/spray", "transfer", "transport"}},
	{dir: "control/driver", why: "performs the executor's actions, for the sidecar and the " +
		"simulator alike: no clock, socket or engine of its own",
		own: []string{"api/peer/v1", "control/engines", "control/exec", "control/lease",
			"internal/sys/mem",
			"transfer", "transport"}},
	{dir: "control/route",
		why: "which rails are worth a lane, as plain values; it imports no backend " +
			"and no lease", pure: true},
	{dir: "placement", why: "the predicted cost of a request on each engine, as plain values; of " +
		"sidecars it reads an answer's form only", pure: true},
	{dir: "placement/index", why: "which holders have which blocks, as plain state", pure: true},
	{dir: "control/peer", why: "the sessions with other sidecars; no transport: data lanes are " +
		"opened by the sidecar",
		own: []string{"api/peer/v1", "cluster", "control/peer/delivery", "control/peer/frame",
			"control/peer/hello", "control/peer/keys", "control/peer/lane", "control/peer/opening",
			"control/peer/rpc", "internal/admit", "internal/sys/usertimeout", "internal/wire",
			"transfer"},
		ext: []string{extGRPC, extProto, extBack}},
	{dir: "cluster", why: "members as plain values, and what finds them; no protocol",
		own: []string{"internal/admit", "transfer"}},
	{dir: "cluster/gossip", why: "the one package that imports memberlist; no session",
		own: []string{"api/peer/v1", "cluster", "internal/admit", "internal/config", "transfer"},
		ext: []string{extProto, extBack, extGoss}},
	{dir: "control/peer/delivery", why: "frames over lanes to one process; it imports no connection " +
		"and no handshake",
		own: []string{"api/peer/v1", "control/peer/frame", "transfer"}, ext: []string{extProto}},
	{dir: "control/peer/frame", why: "control frames: messages to bytes and back",
		own: []string{"api/peer/v1"}, ext: []string{extProto}},
	{dir: "control/peer/hello", why: "the content of Hello, as plain values; no call",
		own: []string{"api/peer/v1", "internal/wire", "transfer"}},
	{dir: "control/peer/lane", why: "one connection with control frames; it imports no session",
		own: []string{"api/peer/v1", "control/peer/frame", "control/peer/opening"},
		ext: []string{extSys}},
	{dir: "control/peer/opening", why: "connections until both ends are proved; it imports no gRPC " +
		"and no session",
		own: []string{"control/peer/hello", "control/peer/keys", "internal/admit", "internal/wire",
			"transfer"}},
	{dir: "control/peer/rpc", why: "the gRPC connections of calls; it imports no session",
		own: []string{"api/peer/v1", "control/peer/frame", "control/peer/hello", "control/peer/keys",
			"internal/admit", "internal/sys/usertimeout", "internal/wire"}, ext: []string{extGRPC}},
	{dir: "control/peer/keys", why: "keys and certificates, usable by keygen without a node"},
	{dir: "api/peer/v1", why: "generated", ext: []string{extGRPC, extProto}},

	{dir: "transport", why: "the contract: what executor and backends agree on",
		own: []string{"internal/sys/mem", "transfer"}},
	{dir: "transport/transporttest", why: "the one suite that every backend passes",
		own: []string{"internal/leaktest", "internal/sys/mem", "internal/testutil", "transfer",
			"transport"}, ext: []string{extSys, extCmp, extRapid}},
	{dir: "transport/faulttest", why: "a decorator of backends: the contract, and nothing below it",
		own: []string{"transfer", "transport"}},
	{dir: "transport/simfabric", why: "a backend in virtual time: no clock, no goroutine, no " +
		"layout, no control",
		own: []string{"internal/sys/mem", "transfer", "transport"}},
	{dir: "transport/tcp", why: "a backend: no layout, no control",
		own: []string{"internal/admit", "internal/sys/mem", "internal/wire", "transfer", "transport"},
		ext: []string{extSys, extLink, extSync}},
	{dir: "transport/shm", why: "a backend: no layout, no control",
		own: []string{"internal/admit", "internal/sys/cuda", "internal/sys/mem", "internal/wire",
			"transfer", "transport"},
		ext: []string{extSys, extSync}},
	{dir: "transport/gdr", why: "a backend: no layout, no control",
		own: []string{"internal/admit", "internal/sys/mem", "internal/sys/usertimeout",
			"internal/sys/verbs", "internal/wire", "transfer", "transport"}, ext: []string{extSys}},
	{dir: "gpu", why: "memory that engines lend on GPUs, and all copies from and to it; no " +
		"transport imports it",
		own: []string{"gpu/device", "gpu/multipath", "gpu/peercopy", "gpu/policy", "internal/board",
			"internal/sys/cuda", "internal/sys/mem"}, ext: []string{extSys}},
	{dir: "gpu/device", why: "GPUs as the copy code uses them, and their only implementation by CUDA",
		own: []string{"internal/sys/cuda", "internal/sys/cuda/kernels", "internal/sys/mem",
			"internal/sys/slack"}, ext: []string{extSys}},
	{dir: "gpu/policy", why: "the choice of a copy method by measurement; it copies nothing",
		own: []string{"gpu/device"}},
	{dir: "gpu/multipath", why: "one copy over several PCIe links; of GPUs it takes the device only",
		own: []string{"gpu/device", "internal/sys/cuda"}},
	{dir: "gpu/peercopy", why: "copies from one GPU to another; of GPUs it takes the device only",
		own: []string{"gpu/device", "internal/sys/cuda", "internal/sys/mem"}},
	{dir: "gpu/gputest", why: "GPUs without a GPU, for tests", own: []string{"gpu/device",
		"internal/sys/cuda"}, ext: []string{extSys}},
	{dir: "internal/sys/mem", why: "regions and bounded copies; independent of their users",
		own: []string{"internal/invariants", "internal/sys/limits"}, ext: []string{extSys}},
	{dir: "internal/sys/limits", why: "what the kernel lets this process take, and what lifts a " +
		"limit; independent of what takes it", ext: []string{extSys}},
	{dir: "internal/admit", why: "connections whose peer has not proved the key; independent of " +
		"the bytes on them", own: []string{"internal/heap"}, ext: []string{extSys}},
	{dir: "internal/httpgate", why: "HTTP behind a gate; independent of what is served",
		own: []string{"internal/admit"}, ext: []string{extSys}},
	{dir: "internal/redact", why: "what texts hide of secrets, for every package that writes some"},
	{dir: "internal/sys/slack", why: "a word to the kernel at the start of the process",
		ext: []string{extSys}, c: true},
	{dir: "internal/invariants", why: "a switch of the build, for every package"},
	{dir: "internal/wire", why: "lane frames and the proof at their start",
		own: []string{"internal/sys/mem", "transfer"}, ext: []string{extSys}},
	{dir: "internal/sys/usertimeout",
		why: "sockets that notice a lost host; independent of the bytes " +
			"on them", ext: []string{extSys}},
	{dir: "internal/ui/top",
		why: "shows what a sidecar reports: the forms of its answers, and a terminal",
		own: []string{"connector", "control/exec", "control/spray", "internal/ui/ask"},
		ext: []string{extCharm}},
	{dir: "internal/ui/loadctl", why: "asks an engine over HTTP; the plug-in in it moves the bytes",
		own: []string{"internal/ui/ask"}},
	{dir: "internal/ui/storectl",
		why: "asks a sidecar over HTTP; reads the disks of a store that has none",
		own: []string{"internal/ui/ask", "store/disk"}},
	{dir: "internal/sys/verbs", why: "the verbs surface", ext: []string{extSys}, c: true},
	{dir: "internal/sys/verbs/fake", why: "verbs without a NIC, for the contract suite",
		own: []string{"internal/sys/verbs", "internal/sys/mem"}, ext: []string{extSys}},
	{dir: "internal/sys/cuda", why: "the driver API, opened at run time",
		ext: []string{extSys}, c: true},
	{dir: "internal/sys/cuda/kernels", why: "compiled kernels as data"},

	{dir: "store", why: "pages in tiers, for owners of memory to put from and get into; of " +
		"transport it takes the guard; no engine, no wire and no layout",
		own: []string{"internal/sys/mem", "store/catalog", "store/disk", "store/evict", "store/memory",
			"store/object", "store/offheap", "store/page", "store/removal", "transport"}},
	{dir: "store/directory", why: "hints as plain values, and the interface of what keeps them",
		own: []string{"store/page", "transfer"}},
	{dir: "store/directory/embedded", why: "hints kept by members; these and the way to them are " +
		"functions of the owner",
		own: []string{"api/peer/v1", "store/directory", "store/offheap", "store/page", "transfer"}},
	{dir: "store/directory/redis", why: "the one package that imports the Redis client",
		own: []string{"internal/config", "internal/redact", "store/directory", "store/page", "transfer"},
		ext: []string{extRedis}},
	{dir: "store/page", why: "names of pages as plain values: keys, namespaces, bitmaps", pure: true},
	{dir: "store/removal", why: "which namespaces were removed, as plain values", pure: true,
		own: []string{"store/page"}},
	{dir: "store/offheap", why: "arrays outside the heap; independent of their users",
		ext: []string{extSys}},
	{dir: "store/index", why: "key to entry, in memory that the collector does not walk",
		own: []string{"store/offheap", "store/page"}},
	{dir: "store/evict", why: "which page goes, as plain state: the memory for it is lent",
		pure: true},
	{dir: "store/trace",
		why: "conversations as lists of pages; independent of what they measure", pure: true},
	{dir: "store/catalog",
		why: "index, policy and pins of one tier: what memory and disk have in common",
		own: []string{"store/evict", "store/index", "store/offheap", "store/page"}},
	{dir: "store/memory", why: "a tier: no other tier, and no engine",
		own: []string{"internal/sys/mem", "store/catalog", "store/evict", "store/index", "store/page"}},
	{dir: "store/disk", why: "a tier: no other tier, and no engine; of internal/sys/mem it " +
		"takes the checksum",
		own: []string{"internal/sys/mem", "store/catalog", "store/evict", "store/index", "store/offheap",
			"store/page"}, ext: []string{extSys}},
	{dir: "store/object", why: "a tier: no other tier, and no engine; the object store is " +
		"behind its Bucket; of internal/sys/mem it takes the checksum and the copy",
		own: []string{"internal/sys/mem", "store/catalog", "store/evict", "store/index", "store/offheap",
			"store/page"}, ext: []string{extBack, extSync}},
	{dir: "store/object/s3", why: "the one package that imports the S3 client",
		own: []string{"internal/redact", "store/object"}, ext: []string{extMinio}},
	{dir: "store/object/objecttest", why: "an object store for tests that fails",
		own: []string{"store/object"}},
	{dir: "store/disk/disktest",
		why: "a disk for tests that loses power; of the store it has the methods of a file"},
	{dir: "bench/copybench", why: "measures backends from outside, against plain loops",
		own: []string{"bench/machine", "bench/progress", "bench/timeline", "internal/sys/mem",
			"internal/ui/usage", "internal/wire", "transfer", "transport", "transport/shm", "transport/tcp"},
		ext: []string{extCobra, extSys, extSync}, c: true},
	{dir: "bench/gpubench", why: "measures GPU copies",
		own: []string{"bench/machine", "bench/progress", "bench/timeline", "internal/sys/cuda",
			"internal/sys/cuda/kernels", "internal/sys/mem", "internal/ui/usage", "transfer", "transport",
			"gpu", "gpu/device", "gpu/multipath", "gpu/peercopy", "gpu/policy"}, ext: []string{extSys,
			extCobra, extPlot}},
	{dir: "bench/chart", why: "draws results; independent of how they were measured",
		own: []string{"bench/timeline"}, ext: []string{extPlot}},
	{dir: "bench/machine", why: "describes the machine of a result", own: []string{"internal/version"},
		ext: []string{extSys}},
	{dir: "bench/progress", why: "a progress line for any long command",
		ext: []string{extSys}},
	{dir: "bench/cli", why: "the commands of kvspray-bench, each from its package",
		own: []string{"bench/copybench", "bench/gpubench", "bench/peers", "bench/placebench",
			"bench/railsbench", "bench/simbench", "internal/ui/command"},
		ext: []string{extCobra}},
	{dir: "bench/peers", why: "compares other engines with two sidecars on the same rails",
		own: []string{"bench/chart", "bench/machine", "bench/railsbench", "bench/railsbench/netrig",
			"bench/timeline", "internal/ui/usage"},
		ext: []string{extCobra}},
	{dir: "bench/placebench", why: "simulated clusters around the production predicate and index",
		own: []string{"internal/ui/usage", "placement", "placement/index", "store/trace"},
		ext: []string{extCobra}},
	{dir: "bench/railsbench", why: "plays both engines to two sidecar processes: speaks to them as " +
		"engines and operators do, and imports nothing inside them",
		own: []string{"bench/chart", "bench/machine", "bench/progress", "bench/railsbench/netrig",
			"bench/timeline", "connector/connectortest", "connector/msg", "control/peer/keys",
			"internal/board", "internal/sys/mem",
			"internal/ui/usage"},
		ext: []string{extCobra, extSys}},
	{dir: "bench/railsbench/netrig",
		why: "rails made of the kernel: namespaces, veths, shapers and filters",
		own: []string{"bench/timeline"}, ext: []string{extLink, extNetns, extNFT, extSys}},
	{dir: "bench/timeline", why: "flags, faults and results as values: what benchmarks of sockets " +
		"and of the simulation have in common",
		own: []string{"internal/ui/usage"}, ext: []string{extCobra}},
	{dir: "bench/simbench", why: "drives simulated clusters by the flags of the benchmark of real " +
		"rails; test/sim is the driver of executors there",
		own: []string{"bench/chart", "bench/progress", "bench/timeline", "control/engines",
			"internal/sys/mem", "internal/ui/usage", "internal/version", "test/sim", "transfer", "transport",
			"transport/simfabric"},
		ext: []string{extCobra}},
	{dir: "test/arch", why: "reads source text only"},
	{dir: "test/rails", why: "tests only: sidecar processes over rails of the kernel, from outside"},
	{dir: "test/sim", why: "drives production executors over the simulated fabric: the one place " +
		"that imports both",
		own: []string{"api/peer/v1", "control/driver", "control/engines", "control/exec", "control/lease",
			"control/spray", "internal/sys/mem", "layout", "transfer", "transport", "transport/simfabric"},
		ext: []string{extProto}},
	{dir: "test/sim/mutants", why: "changes copies of sources and runs test/sim",
		own: []string{"test/sim"}},
	{dir: "test/soak", why: "rails of the kernel and curves for a driver that is no Go program",
		own: []string{"bench/chart", "bench/railsbench/netrig", "bench/timeline"}},
	{dir: "test/wireflip", why: "damages bytes between two sidecars, by frames or at random",
		own: []string{"internal/wire", "transfer"}},
}

// impure are packages of the standard library that bring a clock, I/O, goroutines or locks.
var impure = []string{"context", "database/", "io/ioutil", "log", "net", "os", "runtime", "sync",
	"syscall", "testing", "unsafe", "C"}

// values are packages below them that hold nothing but values.
var values = map[string]bool{"sync/atomic": true, "net/netip": true}

// clocks are functions of package time that read it or wait.
var clocks = map[string]bool{"Now": true, "Since": true, "Until": true, "Sleep": true,
	"After": true, "AfterFunc": true, "NewTimer": true,
	"NewTicker": true, "Tick": true}
