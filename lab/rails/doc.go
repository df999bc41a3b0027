// Package rails holds the tests that move KV blocks between two sidecar processes over rails that
// the kernel shapes and breaks (bench/railsbench). What a sidecar claims about rails is judged here
// on real sockets, beside plain streams of the same run.
//
// How much is run is said by KVSPRAY_RAILS, because figures are worth something only where nobody
// else computes:
//
//	(unset)  slow rails, each fault once, content and failures only: for go test ./...
//	minute   the figures, a minute of each kind of fault (make test)
//	long     the goals in full: 20 faults of each kind, 10 runs of each mix, ten minutes without a false exclusion (make test-rails-long)
//
// KVSPRAY_ATTACK_RUNS is how often the late write is attempted. A user other than root runs them
// all in a user namespace of his own. Where the kernel allows neither that nor network namespaces,
// everything skips.
package rails
