// Package slack makes the pauses of this process as short as requested. Linking the package does it
// at the start of the process; it has no function to call.
//
// Linux lengthens every pause of a thread by up to its timer slack, by default 50 us (prctl(2),
// PR_SET_TIMERSLACK). Go's scheduler pauses for 3 us before it steals a goroutine that another
// thread has just made runnable and will probably run itself. With the slack that hand-over takes
// 60 us, and a slice has several hand-overs from a layer's flag to the network. A thread inherits
// the slack of its creator, so it must be set before there are threads: in a constructor, which
// runs before Go's runtime. A binary without cgo has no constructor: a thread that needs short
// pauses sets its own slack, and hand-overs take longer.
package slack

// Nanoseconds is the timer slack of this process.
const Nanoseconds = 1000
