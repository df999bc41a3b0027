// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
)

// maxNamed is how many of a host's addresses an error names.
const maxNamed = 6

// withRemedy adds a remedy to an error of Listen.
func withRemedy(addr string, err error) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("listen on %s: %w: another sidecar? give this one --listen, --http and "+
			"--socket of its own", addr, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("listen on %s: %w: it is not an address of this host; name one%s, or where "+
			"peers reach this host at an address that it does "+
			"not have, say that one with peer.advertise", addr, err, ownAddresses())
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("listen on %s: %w: choose a port from 1024 on, or 0 for a free one", addr, err)
	}
	return fmt.Errorf("listen on %s: %w", addr, err)
}

// ownAddresses lists this host's addresses in brackets, if they can be read.
func ownAddresses() string {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return ""
	}
	var out []string
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLinkLocalUnicast() && len(out) < maxNamed {
			out = append(out, n.IP.String())
		}
	}
	if len(out) == 0 {
		return ""
	}
	return " (" + strings.Join(out, ", ") + ")"
}
