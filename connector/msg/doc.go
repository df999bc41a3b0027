// Package msg is the wire form of the engine protocol (docs/protocol.md, sections 1 and 2): the
// packets of the socket and the bodies of the board's records.
//
// api/engine/messages.schema declares the messages. Types, encoders and decoders are generated from
// it; codec.go has what they call, and check.go the rules between fields.
//
// The package only encodes and decodes. Encoding is canonical: every documented key, in the
// documented order, in the smallest msgpack form. Decoding accepts any valid msgpack, skips unknown
// keys, treats a missing optional key as absent, and allocates nothing beyond the received bytes.
// No I/O, no clock, no goroutine.
package msg
