// Package msg is the wire form of the engine protocol (docs/protocol.md, sections 1 and 2): the packets of the socket and the
// bodies of the board's records.
//
// It owns encoding and decoding only. Encoding is canonical: every documented key, in the documented order, in the smallest
// msgpack form. Decoding takes any valid msgpack, skips unknown keys, treats a missing optional key as absent, and
// allocates nothing that the bytes at hand do not cover. No I/O, no clock, no goroutine.
package msg
