package arch

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// arrow is a dependency of one file on another.
type arrow struct{ from, to string }

// arrows are dependencies with what each is made of: names of functions, of modules.
type arrows map[arrow][]string

func (a arrows) add(from, to, what string) {
	x := arrow{from, to}
	if from != to && !slices.Contains(a[x], what) {
		a[x] = append(a[x], what)
	}
}

// cycle returns the files of one cycle, the first one also last; nil: there is none.
func (a arrows) cycle() []string {
	next := map[string][]string{}
	for x := range a {
		next[x.from] = append(next[x.from], x.to)
	}
	const open, done = 1, 2
	state := map[string]int{}
	var path []string
	var visit func(string) []string
	visit = func(n string) []string {
		state[n] = open
		path = append(path, n)
		for _, to := range slices.Sorted(slices.Values(next[n])) {
			switch state[to] {
			case open:
				return append(slices.Clone(path[slices.Index(path, to):]), to)
			case done:
			default:
				if c := visit(to); c != nil {
					return c
				}
			}
		}
		state[n] = done
		path = path[:len(path)-1]
		return nil
	}
	for _, n := range slices.Sorted(maps.Keys(next)) {
		if state[n] == 0 {
			if c := visit(n); c != nil {
				return c
			}
		}
	}
	return nil
}

// checkNoCycle fails for a cycle that remains without the exceptions, and for exceptions that no
// longer exist.
func (a arrows) checkNoCycle(t *testing.T, exceptions []arrow) {
	t.Helper()
	a = maps.Clone(a)
	for _, x := range exceptions {
		if a[x] == nil {
			t.Errorf("%s no longer depends on %s: remove the exception", x.from, x.to)
		}
		delete(a, x)
	}
	if c := a.cycle(); c != nil {
		for i := range len(c) - 1 {
			t.Errorf("cycle: %s depends on %s: %s", c[i], c[i+1], strings.Join(a[arrow{c[i], c[i+1]}], ", "))
		}
	}
}

func TestCycle(t *testing.T) {
	a := arrows{}
	a.add("a", "b", "f")
	a.add("b", "c", "g")
	a.add("a", "c", "g")
	a.add("a", "a", "h")
	if c := a.cycle(); c != nil {
		t.Errorf("%q: there is no cycle", c)
	}
	a.add("c", "b", "i")
	if c := a.cycle(); !slices.Equal(c, []string{"b", "c", "b"}) {
		t.Errorf("%q: want b, c, b", c)
	}
}

// Patterns of C sources.
var (
	cNoise   = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'`)
	cInclude = regexp.MustCompile(`(?m)^[ \t]*#[ \t]*include[ \t]+"([^"]+)"`)
	cMacro   = regexp.MustCompile(`(?m)^[ \t]*#(?:\\\n|[^\n])*`)
	cToken   = regexp.MustCompile(`[A-Za-z_]\w*|[{}();]`)
)

// cFile is what a C file defines and calls.
type cFile struct {
	defines []string // functions that other files may call
	calls   []string
}

// parseC reads a C source, in which functions begin at the left of no brace.
func parseC(text string) (f cFile) {
	text = cMacro.ReplaceAllString(cNoise.ReplaceAllString(text, " "), "")
	depth, parens, name, static := 0, 0, "", false
	tokens := cToken.FindAllString(text, -1)
	for i, k := range tokens {
		call := i+1 < len(tokens) && tokens[i+1] == "("
		switch {
		case k == "(":
			parens++
		case k == ")":
			parens--
		case k == "{":
			if depth == 0 && name != "" && !static {
				f.defines = append(f.defines, name)
			}
			depth++
		case k == "}":
			if depth--; depth == 0 {
				name, static = "", false
			}
		case k == ";":
			if depth == 0 {
				name, static = "", false
			}
		case depth > 0 && call:
			f.calls = append(f.calls, k)
		case depth == 0 && k == "static":
			static = true
		case depth == 0 && parens == 0 && call && name == "" && k != "__attribute__":
			name = k
		}
	}
	return f
}

func TestParseC(t *testing.T) {
	f := parseC(`#include "x.h"
#define TWICE(x) \
	twice(x)
static int hidden(void) { return 1; } // not_this()
int declared(int a);
struct s { int (*fn)(void); };
/* nor(); this() */
int kvs_one(const char *a, int (*fn)(int))
{
	if (hidden() && strcmp(a, "no(") == 0)
		return other(a);
	return 0;
}
void *kvs_two(void) { return kvs_one; }
`)
	if want := []string{"kvs_one", "kvs_two"}; !slices.Equal(f.defines, want) {
		t.Errorf("it defines %q, want %q", f.defines, want)
	}
	if want := []string{"int", "if", "hidden", "strcmp", "other"}; !slices.Equal(f.calls, want) {
		t.Errorf("it calls %q, want %q", f.calls, want)
	}
}

// sourcesOf returns the files of a directory by name.
func sourcesOf(t *testing.T, pattern string, want int) map[string]string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(root(t), pattern))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, p := range paths {
		b, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		out[filepath.Base(p)] = string(b)
	}
	if len(out) < want {
		t.Fatalf("%s: %d files: the pattern no longer fits the tree", pattern, len(out))
	}
	return out
}

// TestNoCycleInC checks the shim: neither includes nor calls between its files form a cycle.
func TestNoCycleInC(t *testing.T) {
	includes, calls := arrows{}, arrows{}
	files := sourcesOf(t, "pybind/src/*.[ch]", 15)
	home := map[string]string{}
	parsed := map[string]cFile{}
	for name, text := range files {
		for _, m := range cInclude.FindAllStringSubmatch(text, -1) {
			if _, ok := files[m[1]]; ok {
				includes.add(name, m[1], "#include")
			}
		}
		if filepath.Ext(name) != ".c" {
			continue
		}
		f := parseC(text)
		parsed[name] = f
		for _, d := range f.defines {
			if other := home[d]; other != "" {
				t.Errorf("%s and %s define %s", other, name, d)
			}
			home[d] = name
		}
	}
	for name, f := range parsed {
		for _, c := range f.calls {
			if to := home[c]; to != "" {
				calls.add(name, to, c)
			}
		}
	}
	if len(includes) < 10 || len(calls) < 10 {
		t.Fatalf("%d includes and %d calls between files: the parser no longer fits",
			len(includes), len(calls))
	}
	includes.checkNoCycle(t, nil)
	calls.checkNoCycle(t, nil)
}

// Imports of Python modules, in functions as well.
var (
	pyFrom   = regexp.MustCompile(`(?m)^[ \t]*from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)`)
	pyImport = regexp.MustCompile(`(?m)^[ \t]*import[ \t]+([^\n#]*)`)
	pyName   = regexp.MustCompile(`^\w+`)
)

// pyImports returns the modules of a package that a source of it imports. The package itself is
// __init__.
func pyImports(pkg, text string, has func(string) bool) (out []string) {
	module := func(m string) {
		m, _, _ = strings.Cut(m, ".")
		if m == "" {
			m = "__init__"
		}
		if has(m) {
			out = append(out, m)
		}
	}
	for _, m := range pyFrom.FindAllStringSubmatch(text, -1) {
		rest, own := strings.CutPrefix(m[1], pkg)
		if own && (rest == "" || rest[0] == '.') || m[1][0] == '.' && !strings.HasPrefix(m[1], "..") {
			if !own {
				rest = m[1]
			}
			if rest = strings.TrimPrefix(rest, "."); rest != "" {
				module(rest)
				continue
			}
			for _, n := range strings.Split(strings.Trim(m[2], "() \n"), ",") {
				if n = pyName.FindString(strings.TrimSpace(n)); has(n) {
					module(n)
				} else if n != "" {
					module("")
				}
			}
		}
	}
	for _, m := range pyImport.FindAllStringSubmatch(text, -1) {
		for _, n := range strings.Split(m[1], ",") {
			n, _, _ = strings.Cut(strings.TrimSpace(n), " ")
			if rest, own := strings.CutPrefix(n, pkg); own && (rest == "" || rest[0] == '.') {
				module(strings.TrimPrefix(rest, "."))
			}
		}
	}
	return out
}

func TestPyImports(t *testing.T) {
	got := pyImports("pkg", `
import os, pkg.a
import pkgother
from . import b, thing as c
from .d import (
    x,
)
from pkg.e.f import y
def f():
    from pkg import (
        g,
    )
from ..up import z
from pkgother.a import q
`, func(m string) bool { return m != "thing" && m != "up" })
	slices.Sort(got)
	got = slices.Compact(got)
	if want := []string{"__init__", "a", "b", "d", "e", "g"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// pyCycles are the imports that close a cycle today, each to be removed.
var pyCycles = map[string][]arrow{}

// pyPackages are the directories of the Python packages.
var pyPackages = []string{"pybind/python/kvspray", "integration/vllm/src/kvspray_vllm",
	"integration/sglang/src/kvspray_sglang"}

// TestNoCycleInPython checks the Python packages.
func TestNoCycleInPython(t *testing.T) {
	for _, dir := range pyPackages {
		t.Run(dir, func(t *testing.T) {
			files := sourcesOf(t, dir+"/*.py", 5)
			a := arrows{}
			for name, text := range files {
				from := strings.TrimSuffix(name, ".py")
				has := func(m string) bool { _, ok := files[m+".py"]; return ok }
				for _, to := range pyImports(filepath.Base(dir), text, has) {
					a.add(from, to, "import")
				}
			}
			if len(a) < 5 {
				t.Fatalf("%d imports: the parser no longer fits", len(a))
			}
			a.checkNoCycle(t, pyCycles[dir])
		})
	}
}
