// Package leaktest fails a package's tests when goroutines outlive them. Adopt it with
//
//	func TestMain(m *testing.M) { leaktest.Main(m) }
package leaktest

import (
	"testing"

	"go.uber.org/goleak"
)

// Main runs the tests and then checks for remaining goroutines.
func Main(m *testing.M) { goleak.VerifyTestMain(m, ignored()...) }

// Check checks for leaks at the end of one test; for tests that do not run in parallel.
func Check(tb testing.TB) {
	tb.Helper()
	before := goleak.IgnoreCurrent()
	tb.Cleanup(func() { goleak.VerifyNone(tb, append(ignored(), before)...) })
}

// ignored names goroutines of libraries that live as long as the process and hold nothing of this
// program.
func ignored() []goleak.Option {
	return []goleak.Option{
		// go-metrics, used by memberlist, starts one signal reader when its default sink is made.
		goleak.IgnoreTopFunction("github.com/hashicorp/go-metrics.(*InmemSignal).run"),
	}
}
