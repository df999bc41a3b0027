// Command mutants takes lines out of the production code, one at a time, and looks whether the
// tests notice: `make test-mutants`. What would break a promise of package sim must be noticed by
// its clusters, what would fall into a trap of package spray by the trap's own test, what would
// give heads to the wrong ranks by a law or a test of package parseblock, and what would misprice a
// place by one of package placement. The sources stay as they are; the compiler is shown changed
// copies of them (go build -overlay).
//
// It fails when a mutant survives, when something else than what it breaks fails,
// when a promise or a trap has no mutant that it noticed, and when the text that a mutant changes
// is no longer there. No goroutines.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/kvspray/kvspray/test/sim"
)

// How a mutant is looked at.
const (
	clusters = "^(TestSchedules|TestFlapping|TestAllRailsDead|TestRestarts|TestRestartsLoseNothing)$"
	traps    = "^TestTrap"
	runs     = "1500"           // random schedules, until one fails
	simLimit = 10 * time.Minute // of one mutant
	testTime = 2 * time.Minute  // of one that a test of its own package must notice
	binary   = "mutant.test"
	simPkg   = "./test/sim"
	sprayPkg = "./control/spray"
	parsePkg = "./parseblock"
	placePkg = "./placement"
)

// failed finds the test that a run ended with.
var failed = regexp.MustCompile(`(?m)^--- FAIL: (\S+)`)

func main() {
	only := flag.String("run", "", "regular expression: only mutants whose names match")
	flag.Parse()
	if err := run(*only); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(only string) error {
	match, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	dir, err := os.MkdirTemp("", "kvspray-mutants-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	trapTests, err := list(sprayPkg, traps)
	if err != nil {
		return err
	}
	noticed, tried := map[string]int{}, 0
	var bad []string
	for _, m := range mutants {
		if !match.MatchString(m.name) {
			continue
		}
		tried++
		began := time.Now()
		by, detail, err := m.try(dir)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		verdict := "noticed: " + by
		switch {
		case by == "":
			verdict = "SURVIVED"
			bad = append(bad, m.name)
		case !slices.Contains(m.breaks, by):
			verdict = fmt.Sprintf("noticed by %q, want one of %q", by, m.breaks)
			bad = append(bad, m.name)
		default:
			noticed[by]++
		}
		if t := failed.FindStringSubmatch(detail); t != nil && t[1] != by {
			verdict += ", in " + t[1]
		}
		fmt.Printf("%-34s %5.1f s  %s\n", m.name, time.Since(began).Seconds(), verdict)
		if by == "" || !slices.Contains(m.breaks, by) {
			fmt.Println(detail)
		}
	}
	if only == "" {
		for _, p := range slices.Concat(sim.Promises, trapTests) {
			if noticed[p] == 0 {
				bad = append(bad, fmt.Sprintf("no mutant shows that %q is watched", p))
			}
		}
	}
	if tried == 0 {
		return fmt.Errorf("-run %q: none of %d mutants has such a name", only, len(mutants))
	}
	if len(bad) > 0 {
		return fmt.Errorf("%d not as they should be: %s", len(bad), strings.Join(bad, "; "))
	}
	fmt.Printf("%d mutants, all noticed\n", tried)
	return nil
}

// list names the tests of a package that match.
func list(pkg, pattern string) (names []string, err error) {
	out, err := exec.Command("go", "test", "-list", pattern, pkg).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("go test -list: %w\n%s", err, out)
	}
	for _, l := range strings.Fields(string(out)) {
		if strings.HasPrefix(l, "Test") {
			names = append(names, l)
		}
	}
	return names, nil
}

// try builds the tests with the mutant in place of the line, and reports what noticed it: a
// promise, or the test of a trap; "": nothing.
func (m *mutant) try(dir string) (by, detail string, err error) {
	pkg, tests, words, limit := simPkg, clusters, sim.Promises, simLimit
	var flags []string
	if m.own() {
		// Its own test must notice; that others do as well is no help.
		// Packages below internal are tested by the package above them.
		tested, _, _ := strings.Cut(filepath.Dir(m.file), "/internal/")
		pkg, tests, words, limit = "./"+tested, "^("+strings.Join(m.breaks, "|")+")$",
			m.breaks, testTime
	}
	if pkg == parsePkg || pkg == placePkg {
		flags = []string{"-rapid.shrinktime=0s", "-rapid.nofailfile"} // that it fails is enough
	}
	path, err := filepath.Abs(m.file)
	if err != nil {
		return "", "", err
	}
	src, err := os.ReadFile(path)
	if err != nil {
		return "", "", err
	}
	if n := strings.Count(string(src), m.old); n != 1 {
		return "", "", fmt.Errorf("%s has its text %d times, want once: the code has changed, change "+
			"test/sim/mutants too: %q", m.file, n, m.old)
	}
	changed := filepath.Join(dir, "mutant.go")
	if err := os.WriteFile(changed, []byte(strings.Replace(string(src), m.old, m.becomes, 1)),
		0o600); err != nil {
		return "", "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	b, err := json.Marshal(map[string]map[string]string{"Replace": {path: changed}})
	if err != nil {
		return "", "", err
	}
	if err := os.WriteFile(overlay, b, 0o600); err != nil {
		return "", "", err
	}
	bin := filepath.Join(dir, binary)
	if out, err := exec.Command("go", "test", "-overlay", overlay, "-vet=off", "-c", "-o", bin,
		pkg).CombinedOutput(); err != nil {
		return "", "", fmt.Errorf("does not compile: %w\n%s", err, out)
	}
	cmd := exec.Command(bin, append([]string{"-test.run", tests, "-test.failfast", "-test.timeout",
		limit.String()}, flags...)...)
	cmd.Env = append(os.Environ(), "KVSPRAY_SIM_RUNS="+runs)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return "", "", nil
	case !errors.As(err, &exit):
		return "", "", err
	}
	// The first that is named is the one: what follows may be its consequence.
	first := len(out)
	for _, w := range words {
		if i := strings.Index(string(out), w); i >= 0 && i < first {
			first, by = i, w
		}
	}
	if by == "" {
		by = "a crash, a hang, or something else"
	}
	return by, string(out[max(0, len(out)-2000):]), nil
}

// own reports whether tests of the package that the mutant is in must notice it.
func (m *mutant) own() bool { return strings.HasPrefix(m.breaks[0], "Test") }
