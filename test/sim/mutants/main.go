// Command mutants takes lines out of the production code, one at a time, and looks whether the simulated clusters notice: `make
// test-mutants`. The sources stay as they are; the compiler is shown changed copies of them (go build -overlay).
//
// It fails when a mutant survives, when another promise than the one that it breaks is said to be broken, when a promise has no mutant
// that it noticed, and when the text that a mutant changes is no longer there. No goroutines.
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
	tests   = "^(TestSchedules|TestFlapping|TestAllRailsDead|TestRestarts|TestRestartsLoseNothing)$"
	runs    = "1500"           // random schedules, until one fails
	limit   = 10 * time.Minute // of one mutant
	binary  = "sim.test"
	testPkg = "./test/sim"
)

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
	noticed, tried := map[string]int{}, 0
	var bad []string
	for _, m := range mutants {
		if !match.MatchString(m.name) {
			continue
		}
		tried++
		began := time.Now()
		promise, detail, err := m.try(dir)
		if err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
		verdict := "noticed: " + promise
		switch {
		case promise == "":
			verdict = "SURVIVED"
			bad = append(bad, m.name)
		case !slices.Contains(m.breaks, promise):
			verdict = fmt.Sprintf("noticed by %q, want one of %q", promise, m.breaks)
			bad = append(bad, m.name)
		default:
			noticed[promise]++
		}
		fmt.Printf("%-34s %5.1f s  %s\n", m.name, time.Since(began).Seconds(), verdict)
		if promise == "" || !slices.Contains(m.breaks, promise) {
			fmt.Println(detail)
		}
	}
	if only == "" {
		for _, p := range sim.Promises {
			if noticed[p] == 0 {
				bad = append(bad, fmt.Sprintf("no mutant shows that %q is watched", p))
			}
		}
	}
	if len(bad) > 0 {
		return fmt.Errorf("%d not as they should be: %s", len(bad), strings.Join(bad, "; "))
	}
	fmt.Printf("%d mutants, all noticed\n", tried)
	return nil
}

// try builds the tests with the mutant in place of the line, and says which promise they found broken; "": none.
func (m *mutant) try(dir string) (promise, detail string, err error) {
	path, err := filepath.Abs(m.file)
	if err != nil {
		return "", "", err
	}
	src, err := os.ReadFile(path)
	if err != nil {
		return "", "", err
	}
	if n := strings.Count(string(src), m.old); n != 1 {
		return "", "", fmt.Errorf("%s has its text %d times, want once: the code has changed, change test/sim/mutants too: %q", m.file, n, m.old)
	}
	changed := filepath.Join(dir, "mutant.go")
	if err := os.WriteFile(changed, []byte(strings.Replace(string(src), m.old, m.becomes, 1)), 0o600); err != nil {
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
	if out, err := exec.Command("go", "test", "-overlay", overlay, "-vet=off", "-c", "-o", bin, testPkg).CombinedOutput(); err != nil {
		return "", "", fmt.Errorf("does not compile: %w\n%s", err, out)
	}
	cmd := exec.Command(bin, "-test.run", tests, "-test.failfast", "-test.timeout", limit.String())
	cmd.Env = append(os.Environ(), "KVSPRAY_SIM_RUNS="+runs)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return "", "", nil
	case !errors.As(err, &exit):
		return "", "", err
	}
	// The first promise that is named is the one: what follows may be its consequence.
	first := len(out)
	for _, p := range sim.Promises {
		if i := strings.Index(string(out), p); i >= 0 && i < first {
			first, promise = i, p
		}
	}
	if promise == "" {
		promise = "a crash, a hang, or something else"
	}
	return promise, string(out[max(0, len(out)-2000):]), nil
}
