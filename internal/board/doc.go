// Package board is the Go side of the shared memory between an engine worker and its sidecar. The layout's truth is
// pybind/include/kvspray/board.h; zz_generated_board.go is generated from it.
//
// It owns the encoding of headers, flags and rings in a byte slice, and nothing else: who maps the slice, who sleeps on
// an eventfd and what a record's body means are the callers' affairs.
//
// Invariants: every word has one writer; each entry is copied once and the copy is validated; an offset that the other side
// wrote is used only after it was checked against the slice. The slice must stay mapped while a Flags, Producer or
// Consumer made from it is in use. It works on heap memory as well, which is where the race detector can see it.
//
// Goroutines: none. A Producer and a Consumer are each for one goroutine at a time; Flags is for any.
package board

//go:generate go run ./gen -header ../../pybind/include/kvspray/board.h -out zz_generated_board.go
