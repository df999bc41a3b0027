// Package session is the engine's end of a session with the sidecar: packets on the socket, and
// rings. Packages client and connectortest use it.
//
// A Conn owns its socket, Rings their memory and eventfds, until Close. Any goroutine may call the
// methods of a Conn; submissions to Rings, and Poll and Wait, are for one goroutine at a time each.
//
// Goroutines: one reader per Conn, joined by Close.
package session
