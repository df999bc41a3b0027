// Package netrig builds rails out of the kernel: two network namespaces joined by veth pairs, each
// shaped by tbf in both directions, and does to them what happens to real ones (timeline.Fault).
// With several receivers each has a namespace of its own, and the veth pairs of one rail end in a
// bridge.
//
// The namespaces have no name. They live as long as this process holds their descriptors or
// something runs in them, so nothing has to be removed when a run is interrupted or killed: veths,
// shapers and filters go with them, and processes that Start began die with the thread that began
// them, at the latest with this process.
//
// rail i is the device "rail<i>" at both ends, with 10.77.i.1 at Sender, 10.77.i.2 at Receiver, and
// 10.77.i.3 ... at further receivers.
//
// What a fault is made of: down and flap take the sender's device down; drop swallows at the
// ingress of both ends, ackdrop at that of the sender, so that the sender's stack believes that
// everything left; rate changes the shapers; blackhole puts the peer's address on a route that
// leads nowhere.
//
// Goroutines: one per rail that flaps; Close joins them. Do and Start run on a thread that is
// locked for the call.
package netrig
