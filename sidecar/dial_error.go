package sidecar

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/peer"
)

// unexpectedEndpoint is something at a peer's address that is no peer: as good as an address where
// nothing listens, until a peer is there.
type unexpectedEndpoint struct {
	what string
	err  error
}

func (s unexpectedEndpoint) Error() string        { return s.what + ": " + s.err.Error() }
func (s unexpectedEndpoint) Unwrap() error        { return s.err }
func (s unexpectedEndpoint) Is(target error) bool { return target == exec.ErrNotListening }

// classifyDialError classifies the error of an attempt, for the requests that wait.
func classifyDialError(err error) error {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w: %w", exec.ErrNotListening, err)
	case errors.Is(err, peer.ErrUnsafe), errors.Is(err, peer.ErrRelease):
		return fmt.Errorf("%w: %w", exec.ErrNotPossible, err)
	case errors.Is(err, peer.ErrOther):
		return unexpectedEndpoint{
			"a gRPC server that is no sidecar answers there: name the sidecar's listen " +
				"address (7650)", err}
	case strings.Contains(err.Error(), "HTTP/1.1 header"): // of an error of gRPC's that has no type
		return unexpectedEndpoint{"an HTTP server answers there: name the sidecar's listen address " +
			"(7650), not its http.listen (7651)", err}
	// Of errors of crypto/tls and crypto/x509, which gRPC makes texts of.
	case strings.Contains(err.Error(), "tls: expired certificate"):
		return unexpectedEndpoint{"our certificate has expired, or the peer's clock is ahead: put " +
			"another into the place of peer.tls.cert, which is read without a restart", err}
	case strings.Contains(err.Error(), "certificate has expired or is not yet valid"):
		return unexpectedEndpoint{"the peer's certificate has expired or is not valid yet, or our " +
			"clock is wrong: put another into the place of its peer.tls.cert", err}
	// likewise; a stopped process sends nothing, and may continue
	case strings.Contains(err.Error(), "tls: "), strings.Contains(err.Error(), "server preface: EOF"):
		return unexpectedEndpoint{"the two sidecars do not share a cluster key or a certificate " +
			"authority, or only one of them has any: compare peer.cluster_key_file and peer.tls of both",
			err}
	}
	return err
}
