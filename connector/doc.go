// Package connector is the sidecar's engine side: the unix socket, sessions, the registration of
// regions and layouts, the boards and the goroutines that watch them, step tracking, and
// completions to the shim.
//
// It turns messages of engines into events for the control layer and accepts completions from it.
// It never touches a transport.
//
// Invariants: a block id in an event is inside its cache group. A lease ends once, by a
// Completion or with its worker. A lease's epoch is never used again in this process. A worker's
// memory stays mapped until Fenced of its WorkerGone was called. An end of file on a worker's
// socket ends nothing. A faulty engine harms only its own session.
//
// Goroutines: see Server. While a step is open the watcher sleeps on its thread without giving its
// P away, so Listen raises GOMAXPROCS by one, once per process.
package connector
