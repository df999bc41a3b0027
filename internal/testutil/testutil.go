// SPDX-License-Identifier: Apache-2.0

// Package testutil owns the one way in which a test may skip.
package testutil

import (
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
)

// MustRunEnv lists features, separated by commas, whose tests must not skip, for machines that are
// supposed to have them.
const MustRunEnv = "KVSPRAY_MUST_RUN"

// SkipsEnv names a file for one line per skipped test: package, test, feature and reason, separated
// by tabs.
const SkipsEnv = "KVSPRAY_SKIPS"

// Skip ends the test because this machine lacks feature ("rdma", "vllm", "shm" ...), for the stated
// reason. If KVSPRAY_MUST_RUN names the feature, or "all", the test fails instead.
func Skip(tb testing.TB, feature, reason string) {
	tb.Helper()
	if mustRun(os.Getenv(MustRunEnv), feature) {
		tb.Fatalf("%s must run here (%s names it), but: %s", feature, MustRunEnv, reason)
	}
	if path := os.Getenv(SkipsEnv); path != "" {
		if err := record(path, tb.Name(), feature, reason); err != nil {
			tb.Fatalf("%s=%s: %v", SkipsEnv, path, err)
		}
	}
	tb.Skipf("%s: %s", feature, reason)
}

// record adds a skip to the file in one write, so that lines of several processes do not mix.
func record(path, test, feature, reason string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o666)
	if err != nil {
		return fmt.Errorf("record a skip: %w", err)
	}
	pkg := ""
	if b, ok := debug.ReadBuildInfo(); ok {
		pkg = strings.TrimSuffix(strings.TrimPrefix(b.Path, b.Main.Path+"/"), ".test")
	}
	line := strings.Join([]string{pkg, test, feature, strings.Join(strings.Fields(reason), " ")},
		"\t") + "\n"
	_, err = f.WriteString(line)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("record a skip: %w", err)
	}
	return nil
}

func mustRun(list, feature string) bool {
	names := strings.Split(list, ",")
	return slices.Contains(names, feature) || slices.Contains(names, "all")
}
