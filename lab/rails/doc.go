// Package rails holds the tests that move KV blocks between two sidecar processes over rails that
// the kernel shapes and breaks (lab/railsbench). It compares them with plain streams of the same
// run on real sockets.
//
// KVSPRAY_RAILS selects how much runs, because figures count only where nothing else computes:
//
//	(unset)  slow rails, each fault once, content and failures only: for go test ./...
//	minute   the figures, a minute of each kind of fault (make test-rails)
//	long     the goals in full: 20 faults of each kind, 10 runs of each mix, ten minutes without a false exclusion (make test-rails-long)
//
// KVSPRAY_ATTACK_RUNS is how often the late write is attempted. A user other than root runs them
// all in a user namespace of his own. Where the kernel allows neither that nor network namespaces,
// everything skips.
package rails
