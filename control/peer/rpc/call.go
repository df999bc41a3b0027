package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/sys/usertimeout"
)

const (
	callTimeout = 5 * time.Second
	maxReply    = 1 << 20 // bytes: a layout
)

// ErrNoAnswer is wrapped if a call had no answer. A later call may succeed.
var ErrNoAnswer = errors.New("no answer")

// Caller calls peers.
type Caller struct {
	Credentials *keys.Credentials // nil: loopback only
	HostSilence time.Duration     // as usertimeout.Dialer
}

// Call runs f with a connection to endpoint, which it closes afterwards: calls are rare.
func (c *Caller) Call(ctx context.Context, endpoint string,
	f func(context.Context, peerv1.PeerClient) error) error {
	host, _, err := net.SplitHostPort(endpoint)
	if err != nil || len(endpoint) > hello.MaxText {
		return fmt.Errorf("peer: endpoint %q: want host:port of at most %d bytes", endpoint,
			hello.MaxText)
	}
	creds := insecure.NewCredentials()
	if c.Credentials != nil {
		creds = credentials.NewTLS(c.Credentials.Client(host))
	} else if !hello.Loopback(endpoint) {
		return fmt.Errorf(
			"peer: call %s: %w: set peer.cluster_key_file ('kvspray keygen cluster') or peer.tls",
			endpoint, hello.ErrUnsafe)
	}
	// gRPC reports the dialer's error as text only. The error itself shows whether anything listens
	// there.
	var refused atomic.Bool
	dial := func(ctx context.Context, addr string) (net.Conn, error) {
		conn, err := usertimeout.Dialer(c.HostSilence).DialContext(ctx, "tcp", addr)
		refused.Store(errors.Is(err, syscall.ECONNREFUSED))
		return conn, err //nolint:wrapcheck // gRPC adds what it did
	}
	conn, err := grpc.NewClient("passthrough:///"+endpoint, grpc.WithTransportCredentials(creds),
		grpc.WithNoProxy(), grpc.WithDisableServiceConfig(),
		grpc.WithContextDialer(dial), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReply)))
	if err != nil {
		return fmt.Errorf("peer: call %s: %w", endpoint, err)
	}
	defer func() { _ = conn.Close() }() // nothing is left to lose
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err = f(ctx, peerv1.NewPeerClient(conn))
	switch {
	case err == nil:
		return nil
	case refused.Load():
		return fmt.Errorf("peer: call %s: nothing listens there: %w: %w", endpoint, ErrNoAnswer,
			syscall.ECONNREFUSED)
	}
	if code := status.Code(err); code == codes.Unavailable || code == codes.DeadlineExceeded {
		return fmt.Errorf("peer: call %s: %w: %w", endpoint, ErrNoAnswer, err)
	}
	return fmt.Errorf("peer: call %s: %w", endpoint, err)
}
