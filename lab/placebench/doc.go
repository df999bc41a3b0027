// Package placebench is `kvspray-bench place`: policies of a router beside each other, in virtual
// time, on clusters of simulated engines, with generated requests. Package trace names the source
// of the conversations' shape; all other parameters are this project's.
//
// An engine prefills one prompt at a time, in order. Its node keeps pages of 512 tokens in memory,
// the least recently used ones go first, and other nodes can fetch them without the engine. Links
// share their rate equally between transfers. Decoding sequences lengthen a decode step. A node
// that fails loses its pages; its requests go to the router again.
//
// The router believes that all engines have the nominal rate and corrects that by outcomes. The
// index has every page that a node has. The oracle is the same predicate with the true rates and
// queues. Regret is the true price of a choice less that of the oracle's.
//
// One seed gives one run. No goroutines, no clock.
package placebench
