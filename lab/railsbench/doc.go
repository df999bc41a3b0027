// Package railsbench is `kvspray-bench rails`: two production sidecars, each a process of its own
// in a network namespace of its own, and rails between them that are shaped and broken by the
// kernel (netrig). Engines are played by this process: the unix sockets of the sidecars are files,
// so both ends of every transfer are here, and each byte that arrived is compared with the one that
// was sent.
//
// What the sidecars reach is put beside what plain streams reach over the same rails in the same
// run: one Go stream over each rail alone, then over all of them at once.
//
// Field is the machinery, for this command, for lab/rails and for the drivers of other engines
// (lab/peers).
//
// Goroutines: per pair of engines two that take completions and one, on a thread of low priority,
// that compares content; per run one that samples counters and one that does the faults. Everything
// is joined by Close.
package railsbench
