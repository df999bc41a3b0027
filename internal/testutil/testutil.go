// Package testutil has the two functions that skip a test, Skip and Measures, and helpers of tests.
package testutil

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// MustRunEnv is an environment variable. It lists, separated by commas, the features that this
// machine must have: their tests fail instead of skipping.
const MustRunEnv = "KVSPRAY_MUST_RUN"

// Skip skips the test because this machine lacks a feature ("rdma", "vllm", "shm" ...). If
// KVSPRAY_MUST_RUN names the feature, or "all", the test fails instead.
func Skip(tb testing.TB, feature, reason string) {
	tb.Helper()
	if mustRun(os.Getenv(MustRunEnv), feature) {
		tb.Fatalf("%s must run here (%s names it), but: %s", feature, MustRunEnv, reason)
	}
	tb.Skipf("%s: %s", feature, reason)
}

// MeasureEnv is an environment variable. If it has a value, tests that call Measures run.
const MeasureEnv = "KVSPRAY_MEASURE"

// Measures must be the first call of a test that can fail because the machine is busy: a test with
// a bound of time, of CPU time, or of the memory of a whole process. The name of the test must
// begin with TestMeasure. The test runs only in make test-measure, without the race detector and
// without other tests at the same time.
func Measures(tb testing.TB) {
	tb.Helper()
	if Race || os.Getenv(MeasureEnv) == "" {
		tb.Skipf("a measurement: %s is not set, or the race detector is on", MeasureEnv)
	}
}

func mustRun(list, feature string) bool {
	names := strings.Split(list, ",")
	return slices.Contains(names, feature) || slices.Contains(names, "all")
}
