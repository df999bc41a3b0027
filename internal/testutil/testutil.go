// Package testutil owns the one way in which a test may skip.
package testutil

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// MustRunEnv lists features, separated by commas, whose tests must not skip, for machines that are
// supposed to have them.
const MustRunEnv = "KVSPRAY_MUST_RUN"

// Skip ends the test because this machine lacks feature ("rdma", "vllm", "shm" ...), for the stated
// reason. If KVSPRAY_MUST_RUN names the feature, or "all", the test fails instead.
func Skip(tb testing.TB, feature, reason string) {
	tb.Helper()
	if mustRun(os.Getenv(MustRunEnv), feature) {
		tb.Fatalf("%s must run here (%s names it), but: %s", feature, MustRunEnv, reason)
	}
	tb.Skipf("%s: %s", feature, reason)
}

// MeasureEnv makes tests run that measure; any value does.
const MeasureEnv = "KVSPRAY_MEASURE"

// Measures begins a test with a bound that a busy machine can miss: of time, of processor time, or
// of the memory of a whole process. Its name begins with TestMeasure. It runs in make test-measure
// only, where nothing runs beside it, without the race detector.
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
