// SPDX-License-Identifier: Apache-2.0

package skew

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kvspray/kvspray/internal/testutil"
)

// before is the commit that stands for the last release as long as no release has a tag.
const before = "803290d"

// release is a build of the sidecar.
type release struct {
	name   string
	binary string
}

var root = func() string {
	dir, err := filepath.Abs("../..")
	if err != nil {
		panic(err)
	}
	return dir
}()

var out = filepath.Join(root, ".build", "skew")

func run(t testing.TB, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir = dir
	b, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, b)
	}
	return strings.TrimSpace(string(b))
}

func gobuild(t testing.TB, dir, name string, args ...string) release {
	t.Helper()
	r := release{name, filepath.Join(out, name)}
	set := "-X github.com/kvspray/kvspray/internal/version.version=" + name
	run(t, dir, "go", append([]string{"build", "-trimpath", "-ldflags", set, "-o", r.binary},
		append(args, "./cmd/kvspray")...)...)
	return r
}

var (
	now    = once(func(t testing.TB) release { return gobuild(t, root, "now") })
	last   = once(buildLast)
	future = once(func(t testing.TB) release {
		return gobuild(t, root, "future", "-overlay",
			overlay(t, laterFields))
	})
	// ordered is of the same protocol, and orders the bytes of a transfer otherwise.
	ordered = once(func(t testing.TB) release {
		return gobuild(t, root, "ordered", "-overlay",
			overlay(t, laterPlans))
	})
)

// once builds a release for the first test that asks for it.
func once(build func(testing.TB) release) func(testing.TB) release {
	var mu sync.Mutex
	var r *release
	return func(t testing.TB) release {
		mu.Lock()
		defer mu.Unlock()
		if r == nil {
			b := build(t)
			r = &b
		}
		return *r
	}
}

// buildLast builds the last release: the latest tag, or before. A binary that is there is of that
// commit and is used.
func buildLast(t testing.TB) release {
	git := func(args ...string) (string, bool) {
		b, err := exec.CommandContext(t.Context(), "git", append([]string{"-C", root},
			args...)...).Output()
		return strings.TrimSpace(string(b)), err == nil
	}
	of := before
	// The commit that is checked out may have the tag of a release that is about to be made.
	if tag, ok := git("describe", "--tags", "--match", "v*", "--abbrev=0", "HEAD^"); ok {
		of = tag
	}
	commit, ok := git("rev-parse", "--verify", of+"^{commit}")
	if !ok {
		testutil.Skip(t, "git", "commit "+of+" is not here: fetch the history of the repository")
	}
	r := release{"last", filepath.Join(out, "last-"+commit[:12])}
	if _, err := os.Stat(r.binary); err == nil {
		return r
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		t.Fatal(err)
	}
	src, err := os.MkdirTemp(out, "src-")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(src) }() // .build is nobody's loss
	run(t, root, "bash", "-c", `git archive "$0" | tar -x -C "$1"`, commit, src)
	b := gobuild(t, src, filepath.Base(src)+".bin")
	if err := os.Rename(b.binary, r.binary); err != nil {
		t.Fatal(err)
	}
	return r
}

// change replaces the only place of a text in a file of this tree.
type change struct{ file, old, becomes string }

// overlay makes the file for go build -overlay that has the changes, and the files of testdata that
// are named like "api/peer/v1/later.go" with "_" for "/" and ".txt" behind.
func overlay(t testing.TB, changes []change) string {
	t.Helper()
	dir := t.TempDir()
	files := map[string]string{}
	text := map[string]string{}
	for _, c := range changes {
		s, ok := text[c.file]
		if !ok {
			b, err := os.ReadFile(filepath.Join(root, c.file))
			if err != nil && c.old != "" {
				t.Fatal(err)
			}
			s = string(b)
		}
		if n := strings.Count(s, c.old); c.old != "" && n != 1 {
			t.Fatalf("%s has %d times %q, which the made-up release changes: mend this test",
				c.file, n, c.old)
		}
		if c.old == "" {
			s = c.becomes
		} else {
			s = strings.Replace(s, c.old, c.becomes, 1)
		}
		text[c.file] = s
	}
	for file, s := range text {
		at := filepath.Join(dir, strings.ReplaceAll(file, "/", "_"))
		if err := os.WriteFile(at, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
		files[filepath.Join(root, file)] = at
	}
	b, err := json.Marshal(map[string]any{"Replace": files})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
