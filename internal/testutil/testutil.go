// SPDX-License-Identifier: Apache-2.0

// Package testutil owns the one way in which a test may skip.
package testutil

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// MustRunEnv lists features, separated by commas, whose tests must not skip: a machine that is supposed to have them says so.
const MustRunEnv = "KVSPRAY_MUST_RUN"

// Skip ends the test because this machine lacks feature ("rdma", "vllm", "shm" ...), for the stated reason. Where
// KVSPRAY_MUST_RUN names the feature, or "all", the test fails instead.
func Skip(tb testing.TB, feature, reason string) {
	tb.Helper()
	if mustRun(os.Getenv(MustRunEnv), feature) {
		tb.Fatalf("%s must run here (%s names it), but: %s", feature, MustRunEnv, reason)
	}
	tb.Skipf("%s: %s", feature, reason)
}

func mustRun(list, feature string) bool {
	names := strings.Split(list, ",")
	return slices.Contains(names, feature) || slices.Contains(names, "all")
}
