package arch

import (
	"go/ast"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// edge forbids imports: packages at or below from never import packages at or below to. The floors
// forbid imports of higher floors already.
type edge struct {
	from, to string // packages, separated by spaces
	except   string // packages at or below from or to that the rule leaves out
	why      string
}

var edges = []edge{
	{"cmd/kvspray lab/cmd", "internal proxy sidecar lab", "internal/ui/cli lab/cli lab/cmd",
		"a thin main: tests reach everything that is in a package"},
	{"internal/ui", "proxy sidecar", "internal/ui/cli", "commands ask a running one over HTTP"},
	{"internal/ui", "gpu transport control", "control/exec control/spray control/peer gpu/device",
		"commands try what a host offers without the parts of a sidecar"},
	{"internal/nodeapi", "api cluster connector control gpu layout parseblock store transport",
		"internal/nodeapi/debug", "answers of a sidecar are plain values for all readers"},
	{"proxy", "api cluster connector control gpu layout parseblock store transport sidecar", "",
		"the router sends HTTP; it uses kvspray by its answers and parameters"},
	{"proxy", "internal/nodeapi/debug", "", "the router links no executor"},
	{"proxy/internal/zmtp", "proxy/internal/kvevents placement", "",
		"connections are independent of the messages on them"},
	{"proxy/internal/feed", "placement proxy/internal/place", "",
		"a feed has the events in order; their meaning belongs to its sink"},
	{"placement", "api cluster connector control gpu layout parseblock store transport", "",
		"a prediction needs an answer of a sidecar and a calibration, and no sidecar"},
	{"connector", "transport", "", "what an engine sends cannot depend on the wire"},
	{"connector", "control", "control/engines",
		"connector and executor exchange the values of control/engines"},
	{"control/engines", "connector control transport", "", "plain values of both its users"},
	{"control/exec control/lease control/route control/spray", "connector parseblock gpu store", "",
		"decisions take plans and memory from interfaces"},
	{"control/spray control/lease control/route", "transport api layout", "",
		"which lane takes which slice needs no lane and no message"},
	{"control/lease", "control/spray control/exec", "", "a lease has no lane"},
	{"control/exec/internal/dest", "control/exec/internal/source", "",
		"the sides of a transfer meet in messages only"},
	{"control/exec/internal/source", "control/exec/internal/dest", "", "as above"},
	{"control/exec/internal/lanes control/exec/internal/credit",
		"control/exec/internal/dest control/exec/internal/source", "",
		"lanes serve both sides of transfers"},
	{"control/driver", "connector parseblock control/peer", "",
		"sidecar and simulator drive executors by the same code"},
	{"control/peer", "transport control/exec control/lease control/spray", "",
		"sessions carry messages; the sidecar opens data lanes"},
	{"control/peer/keys", "control/peer api", "control/peer/keys", "keygen uses keys without a node"},
	{"transport", "layout parseblock", "", "backends move runs; they have no tokens"},
	{"transport", "control", "", "a backend never chooses a route"},
	{"transport/tcp", "internal/sys/cuda internal/sys/verbs", "", "tcp works without GPU and RDMA"},
	{"transport/tcp", "transport/shm transport/gdr", "", "a backend imports no other one"},
	{"transport/shm", "transport/tcp transport/gdr", "", "as above"},
	{"transport/gdr", "transport/tcp transport/shm", "", "as above"},
	{"gpu", "transport store layout parseblock", "", "copies take memory, and nothing that owns it"},
	{"store", "gpu layout parseblock internal/wire api", "store/directory/embedded",
		"pages are bytes with a key"},
	{"store/memory", "store/disk store/object", "", "a tier imports no other one"},
	{"store/disk", "store/memory store/object", "", "as above"},
	{"store/object", "store/memory store/disk", "", "as above"},
	{"layout parseblock transfer", "internal", "", "pure"},
	{"cluster", "control connector transport", "", "members are found without a session"},
	{"lab/railsbench", "sidecar control connector transport store internal/nodeapi",
		"connector/connectortest connector/msg control/peer/keys",
		"plays engines and operators to sidecar processes, from outside"},
	{"lab/rails", "sidecar proxy control connector transport store", "",
		"sidecar processes, from outside"},
}

type confinement struct{ module, in, why string }

// confined modules of others are imported at or below these packages only; none: nowhere.
var confined = []confinement{
	{"charm.land", "", "status --watch needs a few escape codes, and no full-screen library"},
	{"github.com/stretchr/testify", "", "tests compare with go-cmp"},
	{"github.com/pkg/errors", "", "errors wrap with %w"},
	{"gopkg.in/yaml.v3", "", "go.yaml.in/yaml/v3 is its successor"},
	{"github.com/hashicorp/memberlist", "cluster/gossip", "one way to find members among others"},
	{"github.com/minio/minio-go", "store/object/s3", "object stores are behind store/object.Bucket"},
	{"github.com/redis/go-redis", "store/directory/redis", "hints are behind store/directory"},
	{"go.opentelemetry.io/otel", "internal/spans", "others have spans of a type of ours"},
	{"go.opentelemetry.io/proto", "internal/spans/spanstest", "the collector of tests"},
	{"google.golang.org/grpc", "api control/peer", "rare calls, and nothing on data lanes"},
	{"google.golang.org/protobuf", "api cluster/gossip control/peer internal/spans/spanstest test/sim",
		"messages of sidecars are decoded at their edge"},
	{"github.com/vmihailenco/msgpack", "layout connector proxy/internal/kvevents proxy/internal/feed",
		"messages of engines are decoded at their edge"},
	{"github.com/prometheus/client_golang", "internal/metrics internal/ui/cli proxy sidecar",
		"parts report counts; composition makes metrics of them"},
	{"github.com/spf13", "internal/ui lab", "flags end at the command"},
	{"go.yaml.in/yaml/v3", "internal/config internal/metrics/gen", "one configuration file"},
	{"github.com/NVIDIA/go-nvml", "internal/sys/health internal/sys/topo internal/ui/doctor",
		"a host without a GPU has no such library"},
	{"github.com/vishvananda", "internal/sys/topo transport/tcp lab", "interfaces of the kernel"},
	{"github.com/google/nftables", "lab", "rails that fail, for benchmarks"},
	{"gonum.org/v1", "lab", "plots"},
	{"github.com/cenkalti/backoff", "cluster/gossip control/peer sidecar store/object",
		"waits between tries grow in one way"},
	{"golang.org/x/sync", "store/object", "joins the parts of an object"},
	{"golang.org/x/sys", "connector control/peer gpu internal proxy sidecar store transport",
		"system calls that package syscall lacks"},
	{"github.com/alicebob/miniredis", "test/skew/redis", "tests: a Redis server"},
	{"go.uber.org/goleak", "internal/leaktest", "tests"},
	{"pgregory.net/rapid", "transport/transporttest", "tests"},
	{"github.com/google/go-cmp", "transport/transporttest", "tests"},
}

// pure packages, with all below them, have no clock, I/O, goroutine or lock: time is an argument.
var pure = []string{"connector/internal/blocks", "connector/msg", "control/exec", "control/lease",
	"control/route", "control/spray", "internal/heap", "internal/nodeapi", "layout", "parseblock",
	"placement", "proxy/internal/kvevents", "store/evict", "store/page", "store/removal",
	"store/trace", "transfer"}

// withC are the packages that may import "C".
var withC = []string{"lab/copybench", "internal/sys/cuda", "internal/sys/slack",
	"internal/sys/verbs"}

// impure are packages that bring a clock, I/O, goroutines or locks.
var impure = []string{"context", "database", "golang.org/x", "io/ioutil", "log", "net", "os",
	"runtime", "sync", "syscall", "testing", "unsafe", "C"}

// values are packages below them that hold nothing but values.
var values = []string{"sync/atomic", "net/netip"}

// clocks are functions of package time that read it or wait.
var clocks = []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "NewTimer",
	"NewTicker", "Tick"}

// within reports whether a package is at or below one of others.
func within(name string, others []string) bool {
	return slices.ContainsFunc(others, func(p string) bool { return hasPathPrefix(name, p) })
}

// product yields the files that are built into programs, with their imports.
func product(t *testing.T, check func(f file, imported string)) {
	t.Helper()
	for _, f := range goFiles(t) {
		if f.test || f.ignored {
			continue
		}
		for _, name := range f.imports {
			check(f, name)
		}
	}
}

func TestForbiddenEdges(t *testing.T) {
	product(t, func(f file, name string) {
		own, ok := strings.CutPrefix(name, module+"/")
		for _, e := range edges {
			if ok && within(f.dir, strings.Fields(e.from)) && within(own, strings.Fields(e.to)) &&
				!within(own, strings.Fields(e.except)) && !within(f.dir, strings.Fields(e.except)) {
				t.Errorf("%s imports %s: %s", f.path, own, e.why)
			}
		}
	})
}

func TestConfinedModules(t *testing.T) {
	product(t, func(f file, name string) {
		for _, m := range confined {
			if hasPathPrefix(name, m.module) && !within(f.dir, strings.Fields(m.in)) {
				t.Errorf("%s imports %s, which only %q may: %s", f.path, name, m.in, m.why)
			}
		}
	})
}

// TestRequiredModules checks that each direct requirement of the modules has its reason above, and
// that each reason is of a requirement.
func TestRequiredModules(t *testing.T) {
	used := map[string]bool{}
	for _, mod := range []string{"go.mod", "lab/go.mod"} {
		for line := range strings.Lines(read(t, mod)) {
			f := strings.Fields(strings.TrimPrefix(line, "require "))
			if len(f) != 2 || !strings.HasPrefix(f[1], "v") || f[0] == module {
				continue // no requirement, an indirect one, or our own
			}
			i := slices.IndexFunc(confined, func(m confinement) bool {
				return hasPathPrefix(f[0], m.module) || hasPathPrefix(m.module, f[0])
			})
			if i < 0 {
				t.Errorf("%s requires %s: add it to confined in test/arch/rules_test.go, with the reason",
					mod, f[0])
				continue
			}
			for _, m := range confined {
				if hasPathPrefix(f[0], m.module) || hasPathPrefix(m.module, f[0]) {
					used[m.module] = true
				}
			}
		}
	}
	for _, m := range confined {
		if m.in != "" && !used[m.module] {
			t.Errorf("test/arch/rules_test.go: no go.mod requires %s", m.module)
		}
	}
}

// leaves are parts of their own: no others than the importers depend on them.
var leaves = []struct{ part, importers, why string }{
	{"internal/ui/loadctl", "internal/ui/cli", "loads of weights are one command"},
	{"proxy", "internal/ui/cli internal/metrics/gen", "the router is one command"},
}

// pyLeaves are the same of Python modules, by their files.
var pyLeaves = []struct{ part, importers, why string }{
	{"kvspray.weightstream", "kvspray.offer kvspray_vllm.load", "weights move apart from KV"},
	{"kvspray.checkpoint", "kvspray.offer kvspray.weightstream kvspray_vllm.load", "as above"},
	{"kvspray.offer", "", "a command: python -m kvspray.offer"},
	{"kvspray.preload", "", "a command: python -m kvspray.preload"},
	{"kvspray.latency", "", "a command: python -m kvspray.latency"},
	{"kvspray_vllm.load", "", "a worker extension, which vLLM imports by name"},
	{"kvspray_sglang.bridge", "", "a command: prefill and decode on unlike engines"},
}

func TestLeaves(t *testing.T) {
	product(t, func(f file, name string) {
		own, ok := strings.CutPrefix(name, module+"/")
		for _, l := range leaves {
			if ok && hasPathPrefix(own, l.part) && !hasPathPrefix(f.dir, l.part) &&
				!within(f.dir, strings.Fields(l.importers)) {
				t.Errorf("%s imports %s: %s", f.path, own, l.why)
			}
		}
	})
	for _, dir := range pyPackages {
		for name, text := range sourcesOf(t, dir+"/*.py", 5) {
			from := filepath.Base(dir) + "." + strings.TrimSuffix(name, ".py")
			for _, l := range pyLeaves {
				pkg, mod, _ := strings.Cut(l.part, ".")
				read := text
				if pkg != filepath.Base(dir) {
					read = strings.ReplaceAll(text, "from .", "from "+filepath.Base(dir)+".")
				}
				is := func(m string) bool { return m == mod }
				if len(pyImports(pkg, read, is)) > 0 && !slices.Contains(strings.Fields(l.importers), from) {
					t.Errorf("%s imports %s: %s", from, l.part, l.why)
				}
			}
		}
	}
	for _, l := range pyLeaves {
		pkg, mod, _ := strings.Cut(l.part, ".")
		i := slices.IndexFunc(pyPackages, func(dir string) bool { return filepath.Base(dir) == pkg })
		if _, err := os.Stat(filepath.Join(root(t), pyPackages[i], mod+".py")); err != nil {
			t.Error(err)
		}
	}
}

func TestC(t *testing.T) {
	product(t, func(f file, name string) {
		if name == "C" && !slices.Contains(withC, f.dir) {
			t.Errorf(`%s imports "C", which only %q may`, f.path, withC)
		}
	})
}

// TestRulesExist checks that each rule names packages that are there.
func TestRulesExist(t *testing.T) {
	all := slices.Concat(pure, withC)
	for _, e := range edges {
		all = slices.Concat(all, strings.Fields(e.from), strings.Fields(e.to), strings.Fields(e.except))
	}
	for _, m := range confined {
		all = append(all, strings.Fields(m.in)...)
	}
	for _, dir := range all {
		if _, err := os.Stat(filepath.Join(root(t), filepath.FromSlash(dir))); err != nil {
			t.Errorf("test/arch/rules_test.go: no package %s", dir)
		}
	}
}

func TestPure(t *testing.T) {
	product(t, func(f file, name string) {
		if within(f.dir, pure) && within(name, impure) && !slices.Contains(values, name) {
			t.Errorf("%s imports %s: a pure package takes time and memory as arguments", f.path, name)
		}
	})
	for _, f := range goFiles(t) {
		if f.test || f.ignored || !within(f.dir, pure) {
			continue
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			switch x := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s: a goroutine in a pure package", fset.Position(x.Pos()))
			case *ast.SelectorExpr:
				if id, ok := x.X.(*ast.Ident); ok && id.Name == "time" && id.Obj == nil &&
					slices.Contains(clocks, x.Sel.Name) {
					t.Errorf("%s: time.%s in a pure package; take now as an argument",
						fset.Position(x.Pos()), x.Sel.Name)
				}
			case *ast.ChanType:
				t.Errorf("%s: a channel in a pure package", fset.Position(x.Pos()))
			}
			return true
		})
	}
}
