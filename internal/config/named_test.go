package config

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// snake is a word that looks like the last part of a setting.
var snake = regexp.MustCompile(`\b[a-z]+(_[a-z]+)+\b`)

// notSettings look like settings and belong to others: a mode of the kernel's connection manager,
// the name in peers' certificates, and OpenTelemetry's names of a span's attributes.
var notSettings = map[string]bool{"cma_roce_mode": true, "peer.kvspray.internal": true,
	"http.route": true, "http.response.status_code": true}

// TestRemediesNameSettings: a text of the program that names a setting names one that there is: by
// its whole key anywhere, and in the RDMA transport, where remedies are settings more often than
// not, by any word that looks like one.
func TestRemediesNameSettings(t *testing.T) {
	keys, words, sections := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, f := range Fields() {
		key := strings.ReplaceAll(f.Key, "[]", "")
		parts := strings.Split(key, ".")
		for i := range parts {
			keys[strings.Join(parts[:i+1], ".")] = true
		}
		sections[parts[0]] = true
		words[parts[len(parts)-1]] = true
	}
	var names []string
	for s := range sections {
		names = append(names, s)
	}
	dotted := regexp.MustCompile(`(^|[^./\w-])((` + strings.Join(names, "|") + `)(\.[a-z_]+)+)`)
	files, found := 0, 0
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if n := d.Name(); path != root && (strings.HasPrefix(n, ".") || n == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, path, src, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files++
		rdma := strings.Contains(path, "internal/sys/verbs/") || strings.Contains(path, "transport/gdr/")
		ast.Inspect(f, func(n ast.Node) bool {
			if _, ok := n.(*ast.ImportSpec); ok {
				return false
			}
			l, ok := n.(*ast.BasicLit)
			if !ok || l.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(l.Value)
			if err != nil || strings.HasPrefix(l.Value, "`") {
				return true
			}
			for _, m := range dotted.FindAllStringSubmatch(text, -1) {
				found++
				if name := strings.TrimSuffix(m[2], "."); !keys[name] && !notSettings[name] {
					t.Errorf("%s: %q names the setting %s, which is none", fset.Position(l.Pos()), text, m[2])
				}
			}
			for _, w := range snake.FindAllString(text, -1) {
				if rdma && !words[w] && !notSettings[w] && strings.Contains(text, " ") {
					t.Errorf("%s: %q names %s, which is no setting", fset.Position(l.Pos()), text, w)
				}
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 100 || found < 20 {
		t.Errorf("%d settings named in %d files: that is not the whole program", found, files)
	}
}
