// Package slack makes the pauses of this process as short as they are asked to be. Who links it in has that done at its start; there is
// nothing to call.
//
// Linux lengthens every pause of a thread by up to its timer slack, by default 50 us (prctl(2), PR_SET_TIMERSLACK). Go's scheduler pauses for 3 us
// before it takes a goroutine that another thread has just made runnable and seems about to run itself: with the slack that hand-over
// takes 60 us, and a slice on its way from a layer's flag to the wire has several. A thread has the slack of the one that made it, and so it
// has to be said before there are any: in a constructor, which runs before Go's runtime does. A binary without cgo
// has no such place: there a thread that needs short pauses asks for itself, and hand-overs take longer.
package slack

// Nanoseconds is the slack that pauses of this process have.
const Nanoseconds = 1000
