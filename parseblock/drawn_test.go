package parseblock

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/layout"
)

// version matches an engine with the releases whose source was read.
var version = regexp.MustCompile(`(vLLM|SGLang)[^.,;]* \(?0\.\d+`)

// TestEveryStrategyIsDrawn: the name of each strategy has its own doc comment, which draws every
// plane of a page and names the versions of the engines with such pages.
func TestEveryStrategyIsDrawn(t *testing.T) {
	docs := map[string]string{}
	for _, file := range []string{"strategies.go", "kimi_k3.go"} {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, s := range g.Specs {
				v := s.(*ast.ValueSpec)
				doc := v.Doc
				if doc == nil && !g.Lparen.IsValid() {
					doc = g.Doc // of the only constant
				}
				if lit, ok := v.Values[0].(*ast.BasicLit); ok && lit.Kind == token.STRING {
					name, err := strconv.Unquote(lit.Value)
					if err != nil {
						t.Fatal(err)
					}
					docs[name] = v.Names[0].Name + "\n" + doc.Text()
				}
			}
		}
	}
	planes := rolesOf(t)
	for _, name := range Default().Names() {
		constant, doc, _ := strings.Cut(docs[name], "\n")
		switch missing := undrawn(doc, planes[name]); {
		case !strings.HasPrefix(doc, constant+" ") && !strings.HasPrefix(doc, constant+"\n"):
			t.Errorf("%s: its comment does not begin with its name: %.60q", name, doc)
		case len(planes[name]) == 0:
			t.Errorf("%s: no family has a cache of it", name)
		case len(missing) > 0:
			t.Errorf("%s: its drawing does not name its planes %q", name, missing)
		case !version.MatchString(strings.ReplaceAll(doc, "\n", " ")):
			t.Errorf("%s: the versions of the engines are missing", name)
		}
	}
	if doc := docs[DeepSeekV4]; !strings.Contains(doc, "\n\tslab ") {
		t.Error("the slab of DeepSeek-V4 is not drawn")
	}
}

// rolesOf returns the roles of the planes that each strategy describes, in any cache of the
// families.
func rolesOf(t *testing.T) map[string][]layout.Role {
	out := map[string][]layout.Role{}
	for fi := range families {
		f := &families[fi]
		for _, kind := range f.kinds {
			l := f.make(kind, badDims(f)).layout()
			for gi := range l.Groups {
				g := &l.Groups[gi]
				ps, err := Default().Planes(nil, g, &g.Layers[0])
				if err != nil {
					t.Fatal(err)
				}
				for i := range ps {
					if !slices.Contains(out[g.Strategy], ps[i].Role) {
						out[g.Strategy] = append(out[g.Strategy], ps[i].Role)
					}
				}
			}
		}
	}
	return out
}

// undrawn returns the planes that a drawing (the indented lines with bars) does not name. A plane's
// name may be part of another's, so it searches the longest names first and removes them.
func undrawn(doc string, roles []layout.Role) (missing []string) {
	drawing := ""
	for line := range strings.SplitSeq(doc, "\n") {
		if strings.HasPrefix(line, "\t") && strings.Contains(line, "|") {
			drawing += line + "\n"
		}
	}
	var names []string
	for _, r := range roles {
		if r == layout.RoleKV {
			names = append(names, "k", "v")
			continue
		}
		names = append(names, strings.ReplaceAll(r.String(), "_", " "))
	}
	slices.SortStableFunc(names, func(a, b string) int { return len(b) - len(a) })
	for _, n := range names {
		word := regexp.MustCompile(`\b` + n + `s?\d*\b`)
		if !word.MatchString(drawing) {
			missing = append(missing, n)
		}
		drawing = word.ReplaceAllString(drawing, "")
	}
	return missing
}

// TestEveryOrderIsDrawn: each order of a cross-layer allocation is drawn with its axes from the
// outside in.
func TestEveryOrderIsDrawn(t *testing.T) {
	b, err := os.ReadFile("allocation.go")
	if err != nil {
		t.Fatal(err)
	}
	first := map[rune]string{'L': "l0", 'B': "b0", 'H': "h0", 'N': "t0"}
	for _, o := range Orders {
		_, drawing, ok := strings.Cut(string(b), "//\t"+o+"  |")
		drawing, _, _ = strings.Cut(drawing, "\n")
		at := -1
		for _, axis := range o[:len(o)-1] {
			i := strings.Index(drawing, first[axis])
			if ok = ok && i > at; !ok {
				t.Errorf("%s is not drawn so: %q", o, drawing)
				break
			}
			at = i
		}
	}
}

// TestGroupsAreDrawn: the package's comment describes models with several groups of layers.
func TestGroupsAreDrawn(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), "parseblock.go", nil,
		parser.ParseComments|parser.PackageClauseOnly)
	if err != nil {
		t.Fatal(err)
	}
	for _, what := range []string{"hybrid", "window", "draft"} {
		if !regexp.MustCompile(`(?m)^\t` + what + ` .*\|`).MatchString(f.Doc.Text()) {
			t.Errorf("%s is not drawn", what)
		}
	}
}
