// Package hello has the content of Hello, with which two sidecars identify themselves: the limits
// of what a peer may announce, the choice of a protocol version, the reasons of a refusal, and the
// key that both derive from it.
//
// Invariant: texts that pass the checks here are bounded, and safe to print on a terminal. The
// package has no goroutines and no state; a Secret is constant.
package hello

import (
	"errors"
	"fmt"
	"net"
	"strings"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// Limits of a Hello.
const (
	MaxRails     = 64
	MaxAddresses = 8 // control addresses of one process
	MaxFeatures  = 64
	MaxText      = 256 // bytes of a name, endpoint or feature
)

// ErrUnsafe is wrapped if an address off loopback is used without credentials.
var ErrUnsafe = errors.New("address off loopback without cluster key or certificates")

// Description is a peer's description of itself, from its Hello or from the reply.
type Description struct {
	Version wire.Version // chosen
	Boot    transfer.Boot
	// Dialed is where this process reached the peer. It is empty if the peer called: then Endpoint is
	// only a claim of the peer, and used for dialing back alone.
	Dialed, Endpoint string
	Node, HostBoot   string
	Release          string // for display
	Features         []string
	Rails            []*peerv1.Rail
	Addresses        []string // of its control lanes
	Share            []byte   // its half of the key
}

// Check refuses a description that exceeds a limit. CheckRails checks the rails.
func (d *Description) Check() error {
	if len(d.Share) != ShareBytes || len(d.Features) > MaxFeatures {
		return fmt.Errorf("peer: hello of %s: key share of %d bytes (%d), %d features (at most %d): %w",
			d.Boot, len(d.Share), ShareBytes, len(d.Features), MaxFeatures, wire.ErrMalformed)
	}
	for _, s := range append([]string{d.Node, d.HostBoot, d.Release}, d.Features...) {
		if len(s) > MaxText {
			return fmt.Errorf("peer: hello of %s: text of %d bytes, at most %d: %w", d.Boot, len(s),
				MaxText, wire.ErrMalformed)
		}
	}
	if err := errors.Join(CheckAddress(d.Endpoint), CheckAddresses(d.Addresses)); err != nil {
		return fmt.Errorf("peer: hello of %s: %w", d.Boot, err)
	}
	return nil
}

// CheckAddresses refuses invalid control addresses.
func CheckAddresses(addrs []string) error {
	if len(addrs) < 1 || len(addrs) > MaxAddresses {
		return fmt.Errorf("%d control addresses (1 to %d): %w", len(addrs), MaxAddresses,
			wire.ErrMalformed)
	}
	for _, a := range addrs {
		if err := CheckAddress(a); err != nil {
			return err
		}
	}
	return nil
}

// CheckAddress refuses an address that is no host:port, is too long or is not printable.
func CheckAddress(a string) error {
	if len(a) > MaxText {
		return fmt.Errorf("address of %d bytes, at most %d: %w", len(a), MaxText, wire.ErrMalformed)
	}
	if _, _, err := net.SplitHostPort(a); err != nil {
		return fmt.Errorf("address %q: %w: %w", a, err, wire.ErrMalformed)
	}
	if i := strings.IndexFunc(a, func(r rune) bool { return r <= ' ' || r > '~' }); i >= 0 {
		return fmt.Errorf("address %q: %q in it: %w", a, a[i], wire.ErrMalformed)
	}
	return nil
}

// Loopback reports whether other hosts cannot reach an address.
func Loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
