// SPDX-License-Identifier: Apache-2.0

package skew

// laterPlans is a release that orders the bytes of a transfer otherwise, and says so.
var laterPlans = []change{{"parseblock/digest.go", "const PlanVersion = 1\n",
	"const PlanVersion = 2\n"}}

// laterFields is a release that differs in whatever may differ between two that work together: it
// speaks later versions of control and data lanes too, has a feature and a control frame that
// nobody understands, fields that nobody knows in every message, and leaves out what is optional.
var laterFields = []change{
	{"control/peer/hello/release.go", "Max: wire.V(1, 1)}", "Max: wire.V(7, 3)}"},
	{"control/peer/hello/release.go", "var Features = []string{",
		`var Features = []string{"from-the-future", `},
	{"internal/wire/wire.go", "var Lanes = Versions{Min: V(1, 0), Max: V(1, 0)}",
		"var Lanes = Versions{Min: V(1, 0), Max: V(1, 9)}"},
	{"control/peer/frame/frame.go", "MarshalAppend(append(dst, 0, 0, 0, 0), f)",
		"MarshalAppend(append(dst, 0, 0, 0, 0), peerv1.Later(f))"},
	{"sidecar/conversation.go", "		c.Send(in.Boot, c.railsFrame())\n",
		"		c.Send(in.Boot, c.railsFrame())\n		c.Send(in.Boot, peerv1.LaterFrame())\n"},
	{"api/peer/v1/peer_grpc.pb.go", "Invoke(ctx, Peer_Hello_FullMethodName, in,",
		"Invoke(ctx, Peer_Hello_FullMethodName, Later(in),"},
	{"api/peer/v1/peer_grpc.pb.go", "Invoke(ctx, Peer_Describe_FullMethodName, in,",
		"Invoke(ctx, Peer_Describe_FullMethodName, Later(in),"},
	{"api/peer/v1/peer_grpc.pb.go", "return srv.(PeerServer).Hello(ctx, in)",
		"r, err := srv.(PeerServer).Hello(ctx, in)\n		return Later(r), err"},
	{"api/peer/v1/peer_grpc.pb.go", "return srv.(PeerServer).Describe(ctx, in)",
		"r, err := srv.(PeerServer).Describe(ctx, in)\n		return Later(r), err"},
	{"api/peer/v1/later.go", "", laterGo},
}

const laterGo = `package peerv1

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Later is m as a later release would say it.
func Later[M proto.Message](m M) M {
	if !m.ProtoReflect().IsValid() {
		return m
	}
	m = proto.Clone(m).(M)
	switch x := any(m).(type) {
	case *HelloRequest:
		x.Node, x.HostBoot, x.Release = "", "", ""
	case *HelloReply:
		x.Node, x.HostBoot, x.Release = "", "", ""
	case *ControlFrame:
		if g := x.GetGrant(); g != nil {
			g.Tiers, g.Priority = nil, 99
		}
		if r := x.GetGrantReply(); r != nil && r.Code == GrantReply_BOUND {
			r.Message = "as it is said in later releases"
		}
	}
	later(m.ProtoReflect())
	return m
}

func later(m protoreflect.Message) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Kind() != protoreflect.MessageKind:
		case f.IsMap():
		case f.IsList():
			for i := range v.List().Len() {
				later(v.List().Get(i).Message())
			}
		default:
			later(v.Message())
		}
		return true
	})
	var b []byte
	b = protowire.AppendTag(b, 1000, protowire.VarintType)
	b = protowire.AppendVarint(b, 1<<63)
	b = protowire.AppendTag(b, 1001, protowire.BytesType)
	b = protowire.AppendBytes(b, []byte("of a later release"))
	b = protowire.AppendTag(b, 1002, protowire.Fixed32Type)
	b = protowire.AppendFixed32(b, 7)
	m.SetUnknown(append(m.GetUnknown(), b...))
}

// LaterFrame is a frame of a kind that does not exist yet.
func LaterFrame() *ControlFrame {
	f := &ControlFrame{}
	b := protowire.AppendTag(nil, 99, protowire.BytesType)
	f.ProtoReflect().SetUnknown(protowire.AppendBytes(b, []byte{8, 1}))
	return f
}
`
