package arch

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// use is how code outside of a package uses one of its declarations.
type use struct{ write, read bool }

// place is a declaration: the base name of its file, and the line.
func place(set *token.FileSet, pos token.Pos) string {
	p := set.Position(pos)
	return fmt.Sprintf("%s:%d", filepath.Base(p.Filename), p.Line)
}

// uses type-checks the product's packages that import one of this module, and returns how they use
// its declarations, by package, place and name.
func uses(t *testing.T, targets ...string) map[string]*use {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps",
		"-json=ImportPath,Dir,Export,GoFiles,CgoFiles,Imports", "./...")
	cmd.Dir = root(t)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	type listed struct {
		ImportPath, Dir, Export    string
		GoFiles, CgoFiles, Imports []string
	}
	export := map[string]string{}
	var users []listed
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		export[p.ImportPath] = p.Export
		own, ok := strings.CutPrefix(p.ImportPath, module+"/")
		if l, _ := floorOf(own); ok && l != labFloor && len(p.CgoFiles) == 0 &&
			slices.ContainsFunc(targets, func(x string) bool {
				return own == x || slices.Contains(p.Imports, module+"/"+x)
			}) {
			users = append(users, p)
		}
	}
	set := token.NewFileSet()
	gc := importer.ForCompiler(set, "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(export[path])
	})
	all := map[string]*use{}
	for _, p := range users {
		files := make([]*ast.File, len(p.GoFiles))
		for i, name := range p.GoFiles {
			if files[i], err = parser.ParseFile(set, filepath.Join(p.Dir, name), nil, 0); err != nil {
				t.Fatal(err)
			}
		}
		info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
		conf := types.Config{Importer: gc}
		if _, err := conf.Check(p.ImportPath, set, files, info); err != nil {
			t.Fatal(err)
		}
		written := map[*ast.Ident]bool{}
		for _, f := range files {
			ast.Inspect(f, func(n ast.Node) bool { markWrites(n, written); return true })
		}
		for id, o := range info.Uses {
			if o.Pkg() == nil || slices.Contains(checks, filepath.Base(set.Position(id.Pos()).Filename)) {
				continue
			}
			own, ok := strings.CutPrefix(o.Pkg().Path(), module+"/")
			if !ok || !slices.Contains(targets, own) {
				continue
			}
			key := own + " " + place(set, o.Pos()) + " " + o.Name()
			if all[key] == nil {
				all[key] = &use{}
			}
			all[key].write = all[key].write || written[id]
			all[key].read = all[key].read || !written[id]
		}
	}
	return all
}

// checks are files of internal/config that look at every key.
var checks = []string{"validate.go", "load.go"}

// markWrites collects the fields that a node sets.
func markWrites(n ast.Node, written map[*ast.Ident]bool) {
	mark := func(e ast.Expr) {
		switch x := e.(type) {
		case *ast.SelectorExpr:
			written[x.Sel] = true
			if outer, ok := x.X.(*ast.SelectorExpr); ok {
				written[outer.Sel] = true
			}
		case *ast.Ident:
			written[x] = true
		}
	}
	switch x := n.(type) {
	case *ast.CompositeLit:
		for _, e := range x.Elts {
			if kv, ok := e.(*ast.KeyValueExpr); ok {
				mark(kv.Key)
			}
		}
	case *ast.AssignStmt:
		for _, e := range x.Lhs {
			mark(e)
		}
	case *ast.IncDecStmt:
		mark(x.X)
	}
}

// tagged yields the fields of a package's structs that have a tag of this name.
func tagged(t *testing.T, dir, tag string, field func(name, value, at string)) {
	t.Helper()
	n := 0
	for _, f := range goFiles(t) {
		if f.dir != dir || f.test {
			continue
		}
		ast.Inspect(f.ast, func(x ast.Node) bool {
			s, ok := x.(*ast.StructType)
			if !ok {
				return true
			}
			for _, d := range s.Fields.List {
				if d.Tag == nil {
					continue
				}
				value := reflect.StructTag(strings.Trim(d.Tag.Value, "`")).Get(tag)
				value, _, _ = strings.Cut(value, ",")
				for _, id := range d.Names {
					if value != "" && value != "-" {
						n++
						field(id.Name, value, dir+" "+place(fset, id.Pos())+" "+id.Name)
					}
				}
			}
			return true
		})
	}
	if n < 30 {
		t.Fatalf("%s: %d fields with the tag %s: the reader no longer fits", dir, n, tag)
	}
}

// otherReaders returns everything but the product's Go that may read a name: pages, scripts,
// documents, benchmarks.
func otherReaders(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	r := root(t)
	err := filepath.WalkDir(r, func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && p != r && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		rel, _ := filepath.Rel(r, p)
		if d.Type().IsRegular() && (slices.Contains([]string{".js", ".html", ".py", ".md", ".yaml",
			".tpl"}, filepath.Ext(p)) || strings.HasPrefix(rel, "lab/") && filepath.Ext(p) == ".go") {
			text, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			b.Write(text)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestReaders looks for keys of the configuration that no code reads, for fields of answers that no
// code sets or nothing reads, and for metrics that no code sets.
func TestReaders(t *testing.T) {
	all := uses(t, "internal/config", "internal/nodeapi", "internal/metrics")
	words := map[string]bool{}
	for _, w := range regexp.MustCompile(`\w+`).FindAllString(otherReaders(t), -1) {
		words[w] = true
	}
	tagged(t, "internal/config", "yaml", func(name, key, at string) {
		if u := all[at]; u == nil || !u.read {
			t.Errorf("%s: no code reads the key %s (%s)", at, key, name)
		}
	})
	tagged(t, "internal/nodeapi", "json", func(_, key, at string) {
		u := all[at]
		if u == nil || !u.write {
			t.Errorf("%s: no code sets %s", at, key)
		}
		if (u == nil || !u.read) && !words[key] {
			t.Errorf("%s: nothing reads %s", at, key)
		}
	})
	for _, f := range goFiles(t) {
		if f.dir != "internal/metrics" || f.test {
			continue
		}
		for _, d := range f.ast.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || !fn.Name.IsExported() || fn.Name.Name == "Describe" || fn.Name.Name == "Collect" {
				continue
			}
			if at := f.dir + " " + place(fset, fn.Name.Pos()) + " " + fn.Name.Name; all[at] == nil {
				t.Errorf("%s: no code calls it", at)
			}
		}
	}
}

// plugins is the source of the plug-ins and of the packages that they use.
func plugins(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, dir := range pyPackages {
		for _, text := range sourcesOf(t, dir+"/*.py", 5) {
			b.WriteString(text)
		}
	}
	return b.String()
}

// unproduced are strategies and parameters that only kvspray layout explain and tests have: no
// plug-in registers K and V of SGLang apart, or a state with padding in it.
var unproduced = []string{"sglang_k", "sglang_v", "state_offset", "window", "prefix_cache"}

// TestProducersOfStrategies checks that a plug-in has the name of each strategy, and of each
// parameter.
func TestProducersOfStrategies(t *testing.T) {
	text := plugins(t)
	suffix := regexp.MustCompile(`_(?:hnd|nhd)$`) // which plug-ins append
	n := 0
	for file, pattern := range map[string]string{
		"strategies.go": `(?m)^\t[A-Z]\w+ += "(\w+)"$`, "params.go": `(?m)^\tparam\w+: +\{"(\w+)",`} {
		names := regexp.MustCompile(pattern)
		for _, m := range names.FindAllStringSubmatch(read(t, "parseblock/"+file), -1) {
			n++
			has := strings.Contains(text, `"`+m[1]+`"`) ||
				strings.Contains(text, `"`+suffix.ReplaceAllString(m[1], "")+`"`)
			if has == slices.Contains(unproduced, m[1]) {
				t.Errorf("parseblock/%s: a plug-in has %s: %v", file, m[1], has)
			}
		}
	}
	if n < 40 {
		t.Fatalf("%d strategies and parameters: the patterns no longer fit", n)
	}
}

// TestCallersOfShim checks that Python, or the preload, calls each function of the shim. Those of
// rings are for the shim itself, and for tests that play a sidecar.
func TestCallersOfShim(t *testing.T) {
	text := strings.ReplaceAll(plugins(t), read(t, "pybind/python/kvspray/_lib.py"), "")
	for _, c := range sourcesOf(t, "pybind/preload/*.c", 3) {
		text += c
	}
	header := cNoise.ReplaceAllString(read(t, "pybind/include/kvspray/kvspray.h"), "")
	n := 0
	for _, m := range regexp.MustCompile(`\b(kvs_\w+)\(`).FindAllStringSubmatch(header, -1) {
		n++
		if !strings.HasPrefix(m[1], "kvs_ring_") &&
			!regexp.MustCompile(`\b`+m[1]+`\b`).MatchString(text) {
			t.Errorf("pybind/include/kvspray/kvspray.h: nothing calls %s", m[1])
		}
	}
	if n < 40 {
		t.Fatalf("%d functions: the pattern no longer fits", n)
	}
}
