// Package timeline is what `kvspray-bench rails` and `kvspray-bench sim` have in common: the flags
// that list which rails there are, what moves over them and what goes wrong when; the result of a
// run, as JSON; and what is read out of a run, so that sockets and simulation are judged by one
// rule.
//
// Rates are written as tc(8) writes them (2gbit, 500mbit), sizes with binary units (16KiB), a fault
// as T:railN:kind:
//
//	2s:rail0:down        no carrier             5s:rail0:up      carrier again; ends down and flap
//	1s:rail1:drop        silence both ways      1s:rail1:ackdrop only what comes back is swallowed
//	1s:rail2:rate=1/20   a share of its rate    1s:all:flap=300ms  down for half of each period, up for the other
//	1s:rail3:blackhole   the peer's address on this rail leads nowhere; the link itself is fine
//	4s:rail1:heal        undoes everything
//
// Values only: no clock, no I/O beyond reading and saving a Result, no goroutines.
package timeline
