// Package board is the Go side of the shared memory between an engine worker and its sidecar.
// pybind/include/kvspray/board.h defines the layout; zz_generated_board.go is generated from it.
//
// The package owns the encoding of headers, flags and rings in a byte slice, and nothing else. The
// callers map the slice, sleep on eventfds and interpret bodies of records.
//
// Invariants: every word has one writer. Each entry is copied once and the copy is validated. An
// offset that the other side wrote is used only after a check against the slice. The slice must
// stay mapped while a Flags, Producer or Consumer made from it is in use. The package also works on
// heap memory, which the race detector can observe.
//
// Goroutines: none. A Producer and a Consumer are each for one goroutine at a time; Flags is for
// any.
package board

//go:generate go run ./gen -header ../../pybind/include/kvspray/board.h -out zz_generated_board.go
