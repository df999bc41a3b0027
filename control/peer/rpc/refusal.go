package rpc

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kvspray/kvspray/control/peer/hello"
)

// Refusal is what a sidecar refuses with a Hello. The trailer of the answer has it, because the
// status is ambiguous: every gRPC server answers Unimplemented to calls that it does not serve.
type Refusal string

// The refusals.
const (
	RefusesRelease    Refusal = "release"
	RefusesPreconnect Refusal = "preconnect"

	refusalTrailer = "kvspray-refuses"
)

// Refuse returns the error with which a server refuses a Hello.
func Refuse(ctx context.Context, what Refusal, err error) error {
	// Tests call without a server. An answer without the trailer is only less clear.
	_ = grpc.SetTrailer(ctx, metadata.Pairs(refusalTrailer, string(what)))
	code := codes.Unimplemented
	if what == RefusesPreconnect {
		code = codes.ResourceExhausted
	}
	return status.Error(code, err.Error())
}

// Refused returns the error of a Hello that failed, with the refusal in the trailer.
func Refused(err error, trailer metadata.MD) error {
	s, ok := status.FromError(err)
	refuses := func(r Refusal) bool {
		return slices.Contains(trailer.Get(refusalTrailer), string(r))
	}
	switch {
	case !ok:
	case refuses(RefusesRelease):
		return fmt.Errorf("%s: %w", s.Message(), hello.ErrRelease)
	case refuses(RefusesPreconnect):
		return fmt.Errorf("%s: %w", s.Message(), hello.ErrPreconnect)
	case s.Code() == codes.Unimplemented:
		return fmt.Errorf("%w: a gRPC server of another kind answers: %w", hello.ErrOther, err)
	}
	return err
}
