package arch

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the numbers of the tree to budget.txt")

// budgetFile has one line for each room. make budget writes its numbers. After a rise the line ends
// with noReason, in whose place the author writes the reason.
const (
	budgetFile = "test/arch/budget.txt"
	noReason   = "reason?"
)

// Lines may differ from the budget by slackLines, or by one part in slackPart if that is more.
const (
	slackLines = 30
	slackPart  = 50
)

// cost is what a room costs: lines without comments, blank lines and generated files; modules of
// others that its product imports; words that tools/vale rejects.
type cost struct {
	product, tests, modules, words int
}

// roomOf is the part of the tree that a file belongs to.
func roomOf(rel string) string {
	a, rest, _ := strings.Cut(rel, "/")
	b, _, ok := strings.Cut(rest, "/")
	if ok && (a == "control" || a == "internal" && (b == "ui" || b == "sys")) {
		return a + "/" + b
	}
	return a
}

// source is a file that people write.
type source struct{ path, rel, room, text string }

func roomSources(t *testing.T) (out []source) {
	t.Helper()
	r := root(t)
	for _, p := range sources(t) {
		rel, err := filepath.Rel(r, p)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		rel = filepath.ToSlash(rel)
		out = append(out, source{p, rel, roomOf(rel), string(b)})
	}
	return out
}

// isTest reports whether a file is for tests only.
func (s *source) isTest() bool {
	dir, name := path.Split(s.rel)
	level, ok := floorOf(path.Clean(dir))
	return strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "test_") ||
		s.room == "test" || strings.Contains(dir, "/tests/") ||
		ok && level == labFloor && s.room != "lab"
}

var generatedNote = regexp.MustCompile(`(?m)^(?://|#|/\*) ?Code generated .* DO NOT EDIT`)

// lines counts the lines that have code.
func (s *source) lines() int {
	var comment *regexp.Regexp
	switch filepath.Ext(s.rel) {
	case ".go":
		return goLines(s.text)
	case ".py", ".sh":
		comment = pyProse
	default:
		comment = cProse
	}
	n := 0
	for line := range strings.Lines(comment.ReplaceAllString(s.text, "")) {
		if strings.TrimSpace(line) != "" {
			n++
		}
	}
	return n
}

func goLines(text string) int {
	var sc scanner.Scanner
	set := token.NewFileSet()
	f := set.AddFile("", -1, len(text))
	sc.Init(f, []byte(text), nil, 0)
	n, last := 0, 0
	for {
		pos, tok, lit := sc.Scan()
		if tok == token.EOF {
			return n
		}
		if tok == token.SEMICOLON && lit != ";" {
			continue // automatic
		}
		first := f.Line(pos)
		end := first + strings.Count(lit, "\n")
		n += max(0, end-max(first, last+1)+1)
		last = max(last, end)
	}
}

func TestGoLines(t *testing.T) {
	text := "package a // b\n\n/* c\n*/\nvar x = `1\n\n2` + \"3\"\n\nfunc f() {\n\tx()\n}\n"
	if got := goLines(text); got != 7 {
		t.Errorf("%d lines, want 7", got)
	}
}

// costs measures the rooms.
func costs(t *testing.T, rejected map[string][]string) map[string]*cost {
	t.Helper()
	out := map[string]*cost{}
	modules := map[string]map[string]bool{}
	for _, s := range roomSources(t) {
		if out[s.room] == nil {
			out[s.room], modules[s.room] = &cost{}, map[string]bool{}
		}
		switch {
		case generatedNote.MatchString(s.text):
		case s.isTest():
			out[s.room].tests += s.lines()
		default:
			out[s.room].product += s.lines()
			for _, m := range externals(t, &s) {
				modules[s.room][m] = true
			}
		}
	}
	for room, hits := range rejected {
		out[room].words = len(hits)
	}
	for room, c := range out {
		c.modules = len(modules[room])
	}
	return out
}

// externals are the modules of others that a Go file imports, by the first three parts of names.
func externals(t *testing.T, s *source) (out []string) {
	t.Helper()
	if filepath.Ext(s.rel) != ".go" {
		return nil
	}
	f, err := parser.ParseFile(token.NewFileSet(), s.path, s.text, parser.ImportsOnly)
	if err != nil {
		t.Fatal(err)
	}
	if ast.IsGenerated(f) {
		return nil
	}
	for _, i := range f.Imports {
		parts := strings.SplitN(strings.Trim(i.Path.Value, `"`), "/", 4)
		if m := strings.Join(parts[:min(len(parts), 3)], "/"); m != module &&
			strings.Contains(parts[0], ".") {
			out = append(out, m)
		}
	}
	return out
}

// budget reads the file: by room the cost, and the reason of the last rise.
func budget(t *testing.T) (out map[string]*cost, why map[string]string) {
	t.Helper()
	out, why = map[string]*cost{}, map[string]string{}
	for line := range strings.Lines(read(t, budgetFile)) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] == "#" {
			continue
		}
		var c cost
		if _, err := fmt.Sscan(strings.Join(f[1:], " "), &c.product, &c.tests, &c.modules,
			&c.words); err != nil {
			t.Fatalf("%s: %q: %v", budgetFile, line, err)
		}
		out[f[0]], why[f[0]] = &c, strings.Join(f[5:], " ")
	}
	return out, why
}

// TestBudget compares the rooms with the budget.
func TestBudget(t *testing.T) {
	rejected := rejectedWords(t)
	have := costs(t, rejected)
	want, why := budget(t)
	for _, room := range slices.Sorted(maps.Keys(have)) {
		h, w := have[room], want[room]
		if w == nil && *update {
			want[room], why[room] = h, noReason
			continue
		}
		if w == nil {
			t.Errorf("%s: no room %s: add it (make budget)", budgetFile, room)
			continue
		}
		check := func(what string, have int, want *int, slack int) {
			switch {
			case *update && have > *want+slack:
				why[room], *want = noReason, have
			case *update:
				*want = min(*want, have)
			case have > *want+slack:
				t.Errorf("%s: %d %s, %s allows %d: use fewer, or raise the number with a reason (make budget)",
					room, have, what, budgetFile, *want)
			case have < *want-slack:
				t.Errorf("%s: %d %s, %s has %d: lower it (make budget)", room, have, what, budgetFile, *want)
			}
		}
		if h.words > w.words {
			t.Log(strings.Join(rejected[room], "\n"))
		}
		check("lines of the product", h.product, &w.product, max(slackLines, w.product/slackPart))
		check("lines of tests", h.tests, &w.tests, max(slackLines, w.tests/slackPart))
		check("modules of others", h.modules, &w.modules, 0)
		check("rejected words", h.words, &w.words, 0)
		if why[room] == noReason && !*update {
			t.Errorf("%s: %s: write the reason of the rise", budgetFile, room)
		}
	}
	for room := range want {
		if have[room] == nil {
			t.Errorf("%s: no room %s in the tree: remove its line", budgetFile, room)
		}
	}
	if *update {
		writeBudget(t, want, why)
	}
}

func writeBudget(t *testing.T, want map[string]*cost, why map[string]string) {
	t.Helper()
	var b strings.Builder
	for line := range strings.Lines(read(t, budgetFile)) {
		if strings.HasPrefix(line, "#") {
			b.WriteString(line)
		}
	}
	for _, room := range slices.Sorted(maps.Keys(want)) {
		w := want[room]
		line := fmt.Sprintf("%-16s %7d %7d %7d %7d  %s", room, w.product, w.tests, w.modules, w.words,
			why[room])
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	if err := os.WriteFile(filepath.Join(root(t), budgetFile), []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}
