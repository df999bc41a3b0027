package msg

import (
	"encoding/binary"
	"fmt"
)

// Type is the type of a packet.
type Type uint32

func (t Type) String() string {
	if int(t) < len(typeNames) && typeNames[t] != "" {
		return typeNames[t]
	}
	return fmt.Sprintf("type %d", uint32(t))
}

// Message is one packet.
type Message interface {
	Type() Type
	append(b []byte) []byte
	read(r *reader)
}

// EncodePacket encodes a message with its type in front.
func EncodePacket(m Message) ([]byte, error) {
	b := m.append(binary.LittleEndian.AppendUint32(make([]byte, 0, 256), uint32(m.Type())))
	if len(b) > MaxPacketBytes {
		return nil, &Error{Message: m.Type().String(),
			Problem: fmt.Sprintf("%d bytes encoded, at most %d", len(b), MaxPacketBytes)}
	}
	return b, nil
}

// DecodePacket decodes one packet. An unknown type is an *UnknownType, so that a caller can answer
// and go on.
func DecodePacket(p []byte) (Message, error) {
	if len(p) < 4 {
		return nil, &Error{Message: "packet", Problem: fmt.Sprintf("%d bytes, shorter than its type",
			len(p))}
	}
	if len(p) > MaxPacketBytes {
		return nil, &Error{Message: "packet", Problem: fmt.Sprintf("%d bytes, at most %d", len(p),
			MaxPacketBytes)}
	}
	t := Type(binary.LittleEndian.Uint32(p))
	m := newPacket(t)
	if m == nil {
		return nil, &UnknownType{t}
	}
	r := &reader{what: t.String(), b: p[4:]}
	m.read(r)
	if err := r.end(); err != nil {
		return nil, err
	}
	return m, nil
}

// UnknownType is a packet of a type that this version does not support.
type UnknownType struct{ Type Type }

func (e *UnknownType) Error() string {
	return fmt.Sprintf("packet: unknown type %d, known are 1 to %d", uint32(e.Type), len(typeNames)-1)
}
