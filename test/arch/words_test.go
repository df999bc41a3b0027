package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// wordRule rejects a word of a text.
type wordRule struct {
	stem  string // in lower case; no match without it
	match *regexp.Regexp
	why   string
}

// codeWords are rules for code, beside those of the documents.
var codeWords = []wordRule{
	{"so m", regexp.MustCompile(`(?i)\bso (?:many|much)\b`), "name the number"},
	{"partner", regexp.MustCompile(`(?i)\bpartners?\b`), "use peer, or the other side"},
	{"who", regexp.MustCompile(`(?i)(?:^|[.;:,] )who(?:ever)? [a-z]+`), "begin with the subject"},
	{"st ", regexp.MustCompile(`(?i)\b(?:the|its|as) (?:most|least) (?:[a-z]+s\b|that\b|an?\b)`),
		"use maximum or minimum"},
}

// nameWords are rules for the words of identifiers, beside those of texts.
var nameWords = wordRule{"st", regexp.MustCompile(`\b(?:most|least)\b`), "use max or min"}

// documentWords returns the rules that vale has for the words of documents.
func documentWords(t *testing.T) (out []wordRule) {
	t.Helper()
	for _, name := range []string{"Fillers", "Nobody", "Programs", "WhoSubject", "Words"} {
		var rule struct {
			Tokens  []string
			Swap    map[string]string
			Nonword bool
		}
		if err := yaml.Unmarshal([]byte(read(t, "tools/vale/styles/kvspray/"+name+".yml")),
			&rule); err != nil {
			t.Fatal(err)
		}
		for _, p := range rule.Tokens {
			if !rule.Nonword {
				p = `(?i)\b` + p + `\b`
			}
			// RE2 has no lookahead. A question is rare in code.
			p, _, _ = strings.Cut(p, `(?!`)
			out = append(out, wordRule{stemOf(p), regexp.MustCompile(p), "see tools/vale"})
		}
		for p, better := range rule.Swap {
			out = append(out, wordRule{stemOf(p), regexp.MustCompile("(?i)" + p), "use " + better})
		}
	}
	if len(out) < 30 {
		t.Fatalf("%d rules in tools/vale: the reader no longer fits", len(out))
	}
	return out
}

var (
	notInStem = regexp.MustCompile(`\(\?i\)|\\b|\(\?:\^\|[^)]*\)`)
	stem      = regexp.MustCompile(`^[A-Za-z ]+`)
)

// stemOf returns the letters with which all matches of a pattern begin.
func stemOf(pattern string) string {
	p := notInStem.ReplaceAllString(pattern, "")
	s := stem.FindString(p)
	if strings.HasPrefix(p[len(s):], "?") {
		s = s[:len(s)-1]
	}
	return strings.ToLower(s)
}

// messages are the functions whose literals are errors, logs and messages of tests.
var messages = []string{"New", "Errorf", "Error", "Fatal", "Fatalf", "Log", "Logf", "Skip", "Debug",
	"Info", "Warn", "DebugContext", "InfoContext", "WarnContext", "ErrorContext", "Printf", "Println"}

// prose is a text of a file at a line.
type prose struct {
	line int
	text string
}

// goProse returns the comments, messages and declared names of a Go file.
func goProse(t *testing.T, p string) (texts, names []prose) {
	t.Helper()
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, p, nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	if ast.IsGenerated(f) {
		return nil, nil
	}
	at := func(n ast.Node) int { return set.Position(n.Pos()).Line }
	for _, g := range f.Comments {
		texts = append(texts, prose{at(g), strings.Join(strings.Fields(g.Text()), " ")})
	}
	seen := map[string]bool{}
	name := func(x ast.Expr) {
		if id, ok := x.(*ast.Ident); ok && !seen[id.Name] {
			seen[id.Name] = true
			names = append(names, prose{at(id), id.Name})
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch x := n.(type) {
		case *ast.FuncDecl:
			name(x.Name)
		case *ast.TypeSpec:
			name(x.Name)
		case *ast.ValueSpec:
			for _, id := range x.Names {
				name(id)
			}
		case *ast.Field:
			for _, id := range x.Names {
				name(id)
			}
		case *ast.AssignStmt:
			if x.Tok == token.DEFINE {
				for _, e := range x.Lhs {
					name(e)
				}
			}
		case *ast.CallExpr:
			if sel, ok := x.Fun.(*ast.SelectorExpr); ok && slices.Contains(messages, sel.Sel.Name) {
				for _, a := range x.Args {
					if s := literal(a); s != "" {
						texts = append(texts, prose{at(a), s})
					}
				}
			}
		}
		return true
	})
	return texts, names
}

// literal returns the text of a string literal, or of a sum of some.
func literal(x ast.Expr) string {
	switch x := x.(type) {
	case *ast.BasicLit:
		if s, err := strconv.Unquote(x.Value); err == nil && x.Kind == token.STRING {
			return s
		}
	case *ast.BinaryExpr:
		return literal(x.X) + literal(x.Y)
	}
	return ""
}

// Comments and names of Python and C.
var (
	pyProse = regexp.MustCompile(`(?s)"""(.*?)"""|(?m:^|[ \t])#+([^\n]*)`)
	cProse  = regexp.MustCompile(`(?s)/\*(.*?)\*/|//([^\n]*)`)
	otherID = regexp.MustCompile(`[A-Za-z_]*(?i:most|least)[A-Za-z_]*`)
	atMost  = regexp.MustCompile(`\bat (?:most|least)\b|\bas nobody\b`) // the user of this name
	camel   = regexp.MustCompile(`[A-Z]?[a-z]+|[A-Z]+`)
)

// otherProse returns the comments of a Python or C file, and its names that nameWords may reject.
func otherProse(text string, comment *regexp.Regexp) (texts, names []prose) {
	at := func(i int) int { return 1 + strings.Count(text[:i], "\n") }
	for _, m := range comment.FindAllStringSubmatchIndex(text, -1) {
		texts = append(texts, prose{at(m[0]), strings.Join(strings.Fields(text[m[0]:m[1]]), " ")})
	}
	code := comment.ReplaceAllStringFunc(text, func(s string) string {
		return strings.Repeat("\n", strings.Count(s, "\n"))
	})
	code = cNoise.ReplaceAllString(code, "")
	seen := map[string]bool{}
	for _, id := range otherID.FindAllString(code, -1) {
		if !seen[id] {
			seen[id] = true
			names = append(names, prose{at(strings.Index(text, id)), id})
		}
	}
	return texts, names
}

// rejectedWords returns the words of comments, errors, logs, messages of tests and names that
// tools/vale rejects in documents, by room.
func rejectedWords(t *testing.T) map[string][]string {
	t.Helper()
	rules := slices.Concat(documentWords(t), codeWords)
	found := map[string][]string{}
	for _, s := range roomSources(t) {
		var texts, names []prose
		switch filepath.Ext(s.rel) {
		case ".go":
			texts, names = goProse(t, s.path)
		case ".py":
			texts, names = otherProse(s.text, pyProse)
		case ".c", ".cc", ".h", ".cu":
			texts, names = otherProse(s.text, cProse)
		}
		hit := func(x prose, word, why string) {
			found[s.room] = append(found[s.room],
				s.rel+":"+strconv.Itoa(x.line)+": "+strconv.Quote(word)+": "+why)
		}
		for _, x := range texts {
			lower := strings.ToLower(x.text)
			for _, w := range rules {
				if !strings.Contains(lower, w.stem) {
					continue
				}
				for _, m := range w.match.FindAllString(x.text, -1) {
					hit(x, m, w.why)
				}
			}
		}
		for _, x := range names {
			words := strings.ToLower(strings.Join(camel.FindAllString(x.text, -1), " "))
			words = atMost.ReplaceAllString(words, "")
			for _, w := range append(rules, nameWords) {
				if strings.Contains(words, w.stem) && w.match.MatchString(words) {
					hit(x, x.text, w.why)
				}
			}
		}
	}
	return found
}
