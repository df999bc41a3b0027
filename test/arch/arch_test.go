package arch

import (
	"go/ast"
	"go/build/constraint"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/kvspray/kvspray"

// file is one Go file of the module.
type file struct {
	path      string // from the root, with slashes
	dir       string
	test      bool
	generated bool
	ignored   bool // never built: go:build ignore
	ast       *ast.File
	imports   []string
}

var fset = token.NewFileSet()

// skipped directories hold nothing of the module: hidden ones, build outputs, and modules of their
// own.
func skipped(root, p string, d fs.DirEntry) bool {
	if !d.IsDir() || p == root {
		return false
	}
	name := d.Name()
	if strings.HasPrefix(name, ".") || name == "testdata" || name == "bin" || name == "build" ||
		name == "__pycache__" || strings.HasSuffix(name, ".egg-info") {
		return true
	}
	_, err := os.Stat(filepath.Join(p, "go.mod"))
	return err == nil
}

func root(t *testing.T) string {
	t.Helper()
	r, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// parsed is every Go file of the module, read once for all tests.
var parsed = sync.OnceValues(func() (out []file, err error) {
	r, err := filepath.Abs("../..")
	if err != nil {
		return nil, err
	}
	err = filepath.WalkDir(r, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if skipped(r, p, d) {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(p, ".go") {
			return nil
		}
		tree, err := parser.ParseFile(fset, p, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(r, p)
		if err != nil {
			return err
		}
		f := file{path: filepath.ToSlash(rel), test: strings.HasSuffix(p, "_test.go"),
			generated: ast.IsGenerated(tree), ast: tree}
		f.dir = path.Dir(f.path)
		for _, g := range tree.Comments {
			for _, c := range g.List {
				if x, err := constraint.Parse(c.Text); err == nil && c.Pos() < tree.Package &&
					x.String() == "ignore" {
					f.ignored = true
				}
			}
		}
		for _, i := range tree.Imports {
			name, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				return err
			}
			f.imports = append(f.imports, name)
		}
		out = append(out, f)
		return nil
	})
	return out, err
})

func goFiles(t *testing.T) []file {
	t.Helper()
	out, err := parsed()
	if err != nil {
		t.Fatal(err)
	}
	if len(out) < 50 {
		t.Fatalf("only %d Go files found: the walk is broken", len(out))
	}
	return out
}

func hasPathPrefix(name, prefix string) bool {
	return name == prefix || strings.HasPrefix(name, prefix+"/")
}

func TestDocComments(t *testing.T) {
	docs := map[string]string{}
	names := map[string]string{}
	for _, f := range goFiles(t) {
		if f.test || f.ignored || f.generated {
			continue
		}
		names[f.dir] = f.ast.Name.Name
		if f.ast.Doc != nil {
			docs[f.dir] += f.ast.Doc.Text()
		}
	}
	for dir, name := range names {
		want := "Package " + name + " "
		if name == "main" {
			want = "Command "
		}
		if d := docs[dir]; !strings.HasPrefix(d, want) || len(d) < 60 {
			t.Errorf("%s: no package comment that begins with %q and has what the package owns", dir, want)
		}
	}
}

func TestUnsafe(t *testing.T) {
	name := regexp.MustCompile(`_unsafe(_test)?\.go$`)
	for _, f := range goFiles(t) {
		if slices.Contains(f.imports, "unsafe") && !f.generated && !name.MatchString(f.path) {
			t.Errorf("%s imports unsafe; such code lives in *_unsafe.go", f.path)
		}
	}
}

// A cgo file has a sibling for builds without cgo.
func TestCgoStubs(t *testing.T) {
	withC := map[string]bool{}
	stub := map[string]bool{}
	for _, f := range goFiles(t) {
		if f.test || f.ignored {
			continue
		}
		if slices.Contains(f.imports, "C") {
			withC[f.dir] = true
		}
		for _, g := range f.ast.Comments {
			for _, c := range g.List {
				if x, err := constraint.Parse(c.Text); err == nil && c.Pos() < f.ast.Package &&
					x.Eval(func(tag string) bool { return tag != "cgo" }) &&
					!x.Eval(func(string) bool { return true }) {
					stub[f.dir] = true
				}
			}
		}
	}
	for dir := range withC {
		if !stub[dir] {
			t.Errorf("%s uses cgo and has no file with //go:build !cgo", dir)
		}
	}
}

func TestNoInit(t *testing.T) {
	for _, f := range goFiles(t) {
		if f.generated {
			continue
		}
		for _, d := range f.ast.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
				t.Errorf("%s: no work in init; let main pass what is needed", fset.Position(fn.Pos()))
			}
		}
	}
}

// proxied are the packages whose requests leave the cluster, each with the name by which its
// transport obeys HTTP_PROXY.
var proxied = map[string]string{"internal/spans": "ProxyFromEnvironment",
	"store/object/s3": "DefaultTransport"}

// Sidecars, routers and engines are asked without a proxy of the environment: it would be another
// host to a sidecar, or would ask one of its own. Collectors and object stores can be behind one.
func TestProxies(t *testing.T) {
	obeys := map[string]bool{}
	for _, f := range goFiles(t) {
		if f.test || f.ignored {
			continue
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			if c, ok := n.(*ast.CompositeLit); ok && isHTTP(c.Type, "Client") && !hasKey(c, "Transport") {
				t.Errorf("%s: a client without a Transport has the default one, which obeys HTTP_PROXY; "+
					"use internal/ui/ask, or a transport of its own", fset.Position(c.Pos()))
			}
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if name := proxied[f.dir]; name != "" && sel.Sel.Name == name {
				obeys[f.dir] = true
				return true
			}
			for _, name := range []string{"DefaultClient", "DefaultTransport", "Get", "Head", "Post",
				"PostForm", "ProxyFromEnvironment"} {
				if isHTTP(sel, name) {
					t.Errorf("%s: http.%s obeys HTTP_PROXY; use internal/ui/ask, or a transport without a "+
						"proxy", fset.Position(sel.Pos()), name)
				}
			}
			return true
		})
	}
	for dir, name := range proxied {
		if !obeys[dir] {
			t.Errorf("%s no longer obeys HTTP_PROXY (%s)", dir, name)
		}
	}
}

// The names of tests that measure set them apart: make test leaves them out by name.
func TestNamesOfMeasurements(t *testing.T) {
	for _, f := range goFiles(t) {
		for _, d := range f.ast.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Recv != nil || !f.test || len(fn.Body.List) == 0 {
				continue
			}
			named := strings.HasPrefix(fn.Name.Name, "TestMeasure")
			if measures := isMeasures(fn.Body.List[0]); named != measures {
				t.Errorf("%s: %s begins with testutil.Measures: %v, want %v",
					fset.Position(fn.Pos()), fn.Name.Name, measures, named)
			}
		}
	}
}

func isMeasures(s ast.Stmt) bool {
	e, ok := s.(*ast.ExprStmt)
	if !ok {
		return false
	}
	call, ok := e.X.(*ast.CallExpr)
	if !ok {
		return false
	}
	switch f := call.Fun.(type) {
	case *ast.SelectorExpr:
		return f.Sel.Name == "Measures"
	case *ast.Ident:
		return f.Name == "Measures"
	}
	return false
}

// isHTTP reports whether x is http.name.
func isHTTP(x ast.Expr, name string) bool {
	sel, ok := x.(*ast.SelectorExpr)
	if !ok || sel.Sel.Name != name {
		return false
	}
	id, ok := sel.X.(*ast.Ident)
	return ok && id.Name == "http" && id.Obj == nil
}

func hasKey(c *ast.CompositeLit, name string) bool {
	return slices.ContainsFunc(c.Elts, func(e ast.Expr) bool {
		kv, ok := e.(*ast.KeyValueExpr)
		if !ok {
			return false
		}
		key, ok := kv.Key.(*ast.Ident)
		return ok && key.Name == name
	})
}

// A test skips through one helper, and waits for conditions.
func TestHabitsOfTests(t *testing.T) {
	for _, f := range goFiles(t) {
		if f.dir == "internal/testutil" {
			continue
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			id, ok := sel.X.(*ast.Ident)
			if !ok {
				return true
			}
			switch {
			case slices.Contains([]string{"t", "b", "tb", "f"}, id.Name) && slices.Contains([]string{"Skip",
				"Skipf", "SkipNow"}, sel.Sel.Name):
				t.Errorf("%s: skip through testutil.Skip, which KVSPRAY_MUST_RUN can refuse",
					fset.Position(call.Pos()))
			case id.Name == "synctest" && sel.Sel.Name == "Test" && f.dir != "internal/testutil":
				t.Errorf("%s: synctest.Test; use testutil.Bubble, which works with -race",
					fset.Position(call.Pos()))
			case f.test && id.Name == "time" && sel.Sel.Name == "Sleep" && !inBubble(f):
				t.Errorf("%s: time.Sleep in a test; wait for a condition, or use testutil.Bubble",
					fset.Position(call.Pos()))
			}
			return true
		})
	}
}

// A shallow clone must not skip the tests of the last release, in the gate here or in CI.
func TestFeaturesThatTheGateNeeds(t *testing.T) {
	listOf := func(name, pattern string) []string {
		b, err := os.ReadFile(filepath.Join(root(t), name))
		if err != nil {
			t.Fatal(err)
		}
		m := regexp.MustCompile(pattern).FindSubmatch(b)
		if m == nil {
			return nil
		}
		return strings.Split(string(m[1]), ",")
	}
	all := listOf("Makefile", `KVSPRAY_MUST_RUN \?= (\S+)`)
	if !slices.Contains(all, "release") {
		t.Errorf("the Makefile's KVSPRAY_MUST_RUN is %v, without release", all)
	}
	here := listOf(".ci/run", `KVSPRAY_MUST_RUN:-([^}]+)}`)
	for _, feature := range all {
		if !slices.Contains(here, feature) {
			t.Errorf(".ci/run: KVSPRAY_MUST_RUN is %v, without %s of the Makefile", here, feature)
		}
	}
	if other := listOf(".github/workflows/gate.yml", `KVSPRAY_MUST_RUN: "([^"]+)"`); other != nil {
		t.Errorf("gate.yml: KVSPRAY_MUST_RUN is %v; the Makefile has the list", other)
	}
}

// inBubble reports whether a file's tests run on synctest's clock, where Sleep costs nothing.
func inBubble(f file) bool {
	found := slices.Contains(f.imports, "testing/synctest")
	ast.Inspect(f.ast, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		found = found || ok && sel.Sel.Name == "Bubble" // testutil.Bubble
		return !found
	})
	return found
}

// sources are the files that people write.
func sources(t *testing.T) []string {
	t.Helper()
	r := root(t)
	var out []string
	err := filepath.WalkDir(r, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && p != r && (strings.HasPrefix(d.Name(), ".") && d.Name() != ".ci" ||
			slices.Contains([]string{"bin", "build", "testdata", "__pycache__", "run", "dist"}, d.Name())) {
			return fs.SkipDir
		}
		if !d.IsDir() && slices.Contains([]string{".go", ".c", ".cc", ".h", ".py", ".proto", ".cu",
			".sh"}, filepath.Ext(p)) {
			out = append(out, p)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sort.Strings(out)
	return out
}

func TestLeftovers(t *testing.T) {
	leftover := regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X)\b`)
	for _, p := range sources(t) {
		b, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		if m := leftover.Find(b); m != nil {
			t.Errorf("%s: %s", p, m)
		}
	}
}
