package parseblock

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// version is an engine with the releases in which bytes were looked for.
var version = regexp.MustCompile(`(vLLM|SGLang)[^.,;]* \(?0\.\d+`)

// TestEveryStrategyIsDrawn: the name of each strategy has a doc comment of its own, which draws the bytes of a page and names the versions of the
// engines that have them.
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
	for _, name := range Default().Names() {
		constant, doc, _ := strings.Cut(docs[name], "\n")
		lines := strings.Split(doc, "\n")
		switch {
		case !strings.HasPrefix(doc, constant+" ") && !strings.HasPrefix(doc, constant+"\n"):
			t.Errorf("%s: its comment does not begin with its name: %.60q", name, doc)
		case !slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, "\t") && strings.Contains(l, "|") }):
			t.Errorf("%s: its page is not drawn", name)
		case !version.MatchString(strings.ReplaceAll(doc, "\n", " ")):
			t.Errorf("%s: the versions of the engines are missing", name)
		}
	}
}
