package arch

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// floor is one level of the product. A package imports packages of its own and of lower floors.
type floor struct {
	name string
	dirs []string // with all below them; the longest match counts
}

// floors are those of docs/architecture.md, the lowest first.
var floors = []floor{
	{"system", []string{"internal/admit", "internal/heap", "internal/httpgate",
		"internal/invariants", "internal/lines", "internal/origin", "internal/page",
		"internal/redact", "internal/spans", "internal/sys", "internal/version"}},
	{"values", []string{"internal/config", "internal/metrics", "internal/nodeapi", "layout",
		"parseblock", "transfer"}},
	{"contract", []string{"api", "cluster", "control/engines", "internal/board", "internal/wire",
		"transport"}},
	{"bytes", []string{"gpu", "store", "transport/gdr", "transport/shm", "transport/tcp"}},
	{"decisions", []string{"control/exec", "control/lease", "control/route", "control/spray",
		"placement"}},
	{"conversation", []string{"connector", "control/driver", "control/peer",
		"internal/nodeapi/debug"}},
	{"composition", []string{"proxy", "sidecar"}},
	{"commands", []string{"cmd/kvspray", "internal/ui"}},
}

// lab is code that the product never imports: tests, what tests need, generators, the module lab.
var lab = []string{"api/engine/gen", "connector/connectortest", "internal/board/gen",
	"internal/leaktest", "internal/metrics/gen", "internal/sys/verbs/fake",
	"internal/spans/spanstest", "lab", "internal/testutil", "proxy/internal/feed/feedtest",
	"store/disk/disktest", "store/object/objecttest", "test",
	"transport/faulttest", "transport/simfabric", "transport/transporttest"}

// labFloor is the result of floorOf for the lab.
const labFloor = -1

// floorOf returns the floor of a package; false: it has none.
func floorOf(dir string) (level int, ok bool) {
	longest := -1
	match := func(prefix string, l int) {
		if hasPathPrefix(dir, prefix) && len(prefix) > longest {
			longest, level = len(prefix), l
		}
	}
	for l, f := range floors {
		for _, d := range f.dirs {
			match(d, l)
		}
	}
	for _, d := range lab {
		match(d, labFloor)
	}
	return level, longest >= 0
}

// floorName is for messages.
func floorName(level int) string {
	if level == labFloor {
		return "the lab"
	}
	return "floor " + floors[level].name
}

func TestFloors(t *testing.T) {
	for _, f := range goFiles(t) {
		if f.test || f.ignored {
			continue
		}
		from, ok := floorOf(f.dir)
		if !ok {
			t.Errorf("%s: package %s is on no floor: add it to test/arch/floors_test.go", f.path, f.dir)
			continue
		}
		for _, name := range f.imports {
			own, isOwn := strings.CutPrefix(name, module+"/")
			if !isOwn || from == labFloor {
				continue
			}
			switch to, ok := floorOf(own); {
			case !ok: // reported above
			case to == labFloor:
				t.Errorf("%s (%s) imports %s (the lab)", f.path, floorName(from), own)
			case to > from:
				t.Errorf("%s (%s) imports %s (%s), a higher floor", f.path, floorName(from), own, floorName(to))
			}
		}
	}
}

func TestFloorsExist(t *testing.T) {
	r := root(t)
	seen := map[string]bool{}
	check := func(dir string) {
		if _, err := os.Stat(filepath.Join(r, dir)); err != nil || seen[dir] {
			t.Errorf("test/arch/floors_test.go: %s does not exist, or is listed twice", dir)
		}
		seen[dir] = true
	}
	for _, f := range floors {
		for _, d := range f.dirs {
			check(d)
		}
	}
	for _, d := range lab {
		check(d)
	}
}

// notInProduct are modules and packages of others that the sidecar's program does not link.
// netns is absent: netlink, which lists interfaces, links it.
var notInProduct = []struct{ prefix, why string }{
	{"gonum.org", "plots"},
	{"codeberg.org/go-fonts", "plots"},
	{"codeberg.org/go-latex", "plots"},
	{"codeberg.org/go-pdf", "plots"},
	{"github.com/ajstarks/svgo", "plots"},
	{"github.com/google/nftables", "rails for benchmarks"},
	{"github.com/google/go-cmp", "tests"},
	{"go.uber.org/goleak", "tests"},
	{"pgregory.net/rapid", "tests"},
	{"testing", "tests"},
}

// TestProductLinks checks what cmd/kvspray links, with and without cgo.
func TestProductLinks(t *testing.T) {
	for _, cgo := range []string{"0", "1"} {
		cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "./cmd/kvspray")
		cmd.Dir = root(t)
		cmd.Env = append(os.Environ(), "CGO_ENABLED="+cgo)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		packages := strings.Fields(string(out))
		if len(packages) < 100 {
			t.Fatalf("cmd/kvspray links %d packages only: %q", len(packages), packages)
		}
		for _, p := range packages {
			if own, ok := strings.CutPrefix(p, module+"/"); ok {
				if l, ok := floorOf(own); ok && l == labFloor {
					t.Errorf("cmd/kvspray links %s, which is of the lab (CGO_ENABLED=%s)", own, cgo)
				}
			}
			for _, x := range notInProduct {
				if hasPathPrefix(p, x.prefix) {
					t.Errorf("cmd/kvspray links %s, which is for %s (CGO_ENABLED=%s)", p, x.why, cgo)
				}
			}
		}
	}
}
