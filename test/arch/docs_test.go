package arch

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// Bounds of documents. A table row cannot be wrapped in Markdown and may be longer.
const (
	docColumns = 100
)

// generated documents take their width from their source.
var generatedDocs = []string{"docs/config.md"}

var (
	docLink    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	docHeading = regexp.MustCompile(`^#{1,6} (.*)$`)
	docPath    = regexp.MustCompile(
		"`([a-z_]+(?:/[A-Za-z0-9_.-]+)+\\.(?:go|[ch]|cu|py|proto|ya?ml|json|sh|md))`")
	docTarget  = regexp.MustCompile("`make ([a-z][a-z0-9-]*)")
	notInSlug  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	inlineLink = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
)

// documents returns the Markdown files that people read as documentation, from the root.
func documents(t *testing.T) []string {
	t.Helper()
	r := root(t)
	var out []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "pybind/*.md",
		"integration/*/*.md"} {
		found, err := filepath.Glob(filepath.Join(r, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range found {
			rel, err := filepath.Rel(r, p)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, filepath.ToSlash(rel))
		}
	}
	if len(out) < 20 {
		t.Fatalf("%d documents found: the patterns no longer fit the tree", len(out))
	}
	return out
}

func read(t *testing.T, doc string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root(t), doc))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// slug is the anchor that a heading gets where Markdown is shown.
func slug(heading string) string {
	h := inlineLink.ReplaceAllString(heading, "$1")
	h = notInSlug.ReplaceAllString(strings.ToLower(h), "")
	return strings.ReplaceAll(strings.TrimSpace(h), " ", "-")
}

func anchors(text string) map[string]bool {
	out := map[string]bool{}
	for line := range strings.Lines(text) {
		if m := docHeading.FindStringSubmatch(strings.TrimRight(line, "\n")); m != nil {
			out[slug(m[1])] = true
		}
	}
	return out
}

// TestDocumentsAreNarrow checks the width of lines.
func TestDocumentsAreNarrow(t *testing.T) {
	for _, doc := range documents(t) {
		if slices.Contains(generatedDocs, doc) {
			continue
		}
		n := 0
		for line := range strings.Lines(read(t, doc)) {
			n++
			w := utf8.RuneCountInString(strings.TrimRight(line, "\n"))
			if w > docColumns && !strings.HasPrefix(line, "|") {
				t.Errorf("%s:%d: %d columns: wrap it at %d", doc, n, w, docColumns)
			}
		}
	}
}

// TestDocumentsLink checks that every relative link leads to a file and, if it names one, to a
// heading.
func TestDocumentsLink(t *testing.T) {
	r := root(t)
	links := 0
	for _, doc := range documents(t) {
		text := read(t, doc)
		for _, m := range docLink.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			links++
			path, anchor, _ := strings.Cut(m[1], "#")
			target := doc
			if path != "" {
				target = filepath.ToSlash(filepath.Join(filepath.Dir(doc), path))
			}
			if _, err := os.Stat(filepath.Join(r, target)); err != nil {
				t.Errorf("%s links to %s, which does not exist", doc, m[1])
				continue
			}
			if anchor != "" && !anchors(read(t, target))[anchor] {
				t.Errorf("%s links to %s, but %s has no such heading", doc, m[1], target)
			}
		}
	}
	if links < 50 {
		t.Fatalf("%d links found: the pattern no longer fits", links)
	}
}

// TestDocumentsAreInTheSite checks that the site's contents have each page of docs. make site fails
// if a page is missing there.
func TestDocumentsAreInTheSite(t *testing.T) {
	contents := read(t, "tools/site/mkdocs.yml")
	for _, doc := range documents(t) {
		page, ok := strings.CutPrefix(doc, "docs/")
		if ok && !strings.Contains(contents, "- "+page+"\n") {
			t.Errorf("%s is not in the nav of tools/site/mkdocs.yml: add a line for it", doc)
		}
	}
}

// TestDocumentsNameFiles checks the paths of source files in code spans, so that the tables of
// docs/architecture.md stay true.
func TestDocumentsNameFiles(t *testing.T) {
	r := root(t)
	names := 0
	for _, doc := range documents(t) {
		for _, m := range docPath.FindAllStringSubmatch(read(t, doc), -1) {
			names++
			if _, err := os.Stat(filepath.Join(r, m[1])); err != nil {
				t.Errorf("%s names %s, which does not exist: write the path from the root", doc, m[1])
			}
		}
	}
	if names < 30 {
		t.Fatalf("%d paths found: the pattern no longer fits", names)
	}
}

// TestDocumentedTargets checks that the Makefile has every target that a document names.
func TestDocumentedTargets(t *testing.T) {
	mk := read(t, "Makefile")
	for _, doc := range documents(t) {
		for _, m := range docTarget.FindAllStringSubmatch(read(t, doc), -1) {
			if !regexp.MustCompile(`(?m)^(?:[a-z0-9-]+ )*` + m[1] + `(?: [a-z0-9-]+)*:`).MatchString(mk) {
				t.Errorf("%s names make %s, which the Makefile does not have", doc, m[1])
			}
		}
	}
}
