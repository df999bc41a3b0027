// Package simbench is `kvspray-bench sim`: what `kvspray-bench rails` does with sockets, in virtual
// time over a simulated network, with the same flags, between as many nodes as one likes. The
// production executors and schedulers decide everything; test/sim is their driver, and looks at its
// promises after every event, so a run that ends is also a run in which none was broken.
//
// Half of the nodes send, each to one of the other half. A rail is a shaped cable with a drop-tail
// queue, as netrig makes them of the kernel's; a fault of rail N meets rail N of every pair, as
// when their switch fails. Rates are what tc would be set to: a plain stream carries a little less.
// The same flags give the same run.
//
// A result of `kvspray-bench rails` can be run again (Predict): the simulation then has the rates
// that plain streams had there, and Compare reports how far apart the two are.
//
// No goroutines, no clock.
package simbench
