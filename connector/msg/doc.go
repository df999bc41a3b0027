// Package msg is the wire form of the engine protocol (docs/protocol.md, sections 1 and 2): the
// packets of the socket and the bodies of the board's records.
//
// The package only encodes and decodes. Encoding is canonical: every documented key, in the
// documented order, in the smallest msgpack form. Decoding accepts any valid msgpack, skips unknown
// keys, treats a missing optional key as absent, and allocates nothing beyond the received bytes.
// No I/O, no clock, no goroutine.
package msg
