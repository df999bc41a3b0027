// Package connectortest is a client of the engine protocol in Go: what the C shim does, for tests
// and benchmarks of the sidecar. It makes real memfds, rings and sockets; nothing about it is
// simulated.
//
// It owns its memory, its socket and its board until Close. It keeps no durable list of leases: a
// test that restarts a sidecar presents again what it wants to.
//
// Goroutines: one reader per connection, joined by Disconnect and Close. A Worker's submissions are
// serialized by a mutex; Poll and Wait are for one goroutine at a time.
package connectortest
