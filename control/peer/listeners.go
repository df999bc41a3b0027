package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/internal/sys/usertimeout"
)

// maxNamed is how many of a host's addresses an error names.
const maxNamed = 6

// listeners are the addresses of this process. Rails come and go while a mesh runs. Each one should
// carry a control lane, so that the last remaining rail always does.
type listeners struct {
	listen, advertise string
	secure            bool // there are credentials
	silence           time.Duration

	mu       sync.Mutex // protects all below
	closed   bool
	serve    func(ln net.Listener, calls bool) // nil until the mesh has started
	endpoint string
	served   net.Listener // of calls, and of control lanes
	wanted   []string     // further addresses, until they are bound
	control  []railListener
}

// railListener is a listener for control lanes on a rail.
type railListener struct {
	asked string // host:port
	ln    net.Listener
}

// check refuses addresses that other hosts can reach without credentials.
func (l *listeners) check() error {
	if l.secure {
		return nil
	}
	for _, a := range append([]string{l.listen}, l.wanted...) {
		if !loopback(a) {
			return fmt.Errorf("peer: peer.listen %s: %w: set peer.cluster_key_file ('kvspray keygen "+
				"cluster') or peer.tls, or listen on 127.0.0.1", a, ErrUnsafe)
		}
	}
	return nil
}

func loopback(addr string) bool { return hello.Loopback(addr) }

// bind binds the addresses.
func (l *listeners) bind(ctx context.Context) (err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.served != nil || l.closed {
		return errors.New("peer: already listening, or closed")
	}
	var lns []net.Listener
	defer func() {
		if err != nil {
			for _, ln := range lns {
				_ = ln.Close()
			}
		}
	}()
	var control []railListener
	for i, addr := range append([]string{l.listen}, l.wanted...) {
		ln, lerr := usertimeout.ListenConfig(l.silence).Listen(ctx, "tcp", addr)
		if lerr != nil {
			key := "peer.listen (--listen)"
			if i > 0 {
				key = "control lanes of a rail"
			}
			return fmt.Errorf("peer: %s: %w", key, withRemedy(addr, lerr))
		}
		lns = append(lns, ln)
		if i > 0 {
			control = append(control, railListener{addr, ln})
		} else if l.endpoint, err = advertised(l.advertise, ln.Addr()); err != nil {
			return err
		}
	}
	l.served, l.control = lns[0], control
	return nil
}

// bound is the address of calls; nil before bind.
func (l *listeners) bound() net.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.served == nil {
		return nil
	}
	return l.served.Addr()
}

// start serves all listeners, and those that replace will bind.
func (l *listeners) start(serve func(ln net.Listener, calls bool)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.serve = serve
	serve(l.served, true)
	for _, c := range l.control {
		serve(c.ln, false)
	}
}

func (l *listeners) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.served == nil {
		return
	}
	_ = l.served.Close()
	for _, c := range l.control {
		_ = c.ln.Close()
	}
}

// advertised is the address that peers dial.
func advertised(want string, bound net.Addr) (string, error) {
	if want == "" {
		return bound.String(), nil
	}
	host, port, err := net.SplitHostPort(want)
	if err != nil {
		return "", fmt.Errorf("peer: peer.advertise %q: %w: write host:port", want, err)
	}
	if port == "0" {
		if _, port, err = net.SplitHostPort(bound.String()); err != nil {
			return "", fmt.Errorf("peer: bound address: %w", err)
		}
	}
	return net.JoinHostPort(host, port), nil
}

// name is the endpoint that peers dial.
func (l *listeners) name() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.endpoint
}

// addresses are the control addresses for peers, the endpoint first.
func (l *listeners) addresses() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := []string{l.endpoint}
	for _, c := range l.control {
		out = append(out, c.ln.Addr().String())
	}
	return out
}

// localFor is the local address for a lane to one of the peer's addresses: the first rail for the
// first rail and so on, if the route leaves the choice open. nil: the route chooses.
func (l *listeners) localFor(index int) net.IP {
	l.mu.Lock()
	defer l.mu.Unlock()
	if index == 0 || len(l.control) == 0 {
		return nil
	}
	host, _, err := net.SplitHostPort(l.control[(index-1)%len(l.control)].ln.Addr().String())
	if err != nil {
		return nil
	}
	return net.ParseIP(host)
}

// replace replaces the addresses of rails.
func (l *listeners) replace(ctx context.Context, addrs []string) error {
	addrs = addrs[:min(len(addrs), MaxAddrs-1)]
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return fmt.Errorf("peer: control addresses: %w", net.ErrClosed)
	case l.served == nil:
		l.wanted = slices.Clone(addrs)
		return l.check()
	}
	var failed error
	now := make([]railListener, 0, len(addrs))
	for _, addr := range addrs {
		same := func(c railListener) bool { return c.asked == addr }
		if i := slices.IndexFunc(l.control, same); i >= 0 {
			now = append(now, l.control[i])
			continue
		}
		if !l.secure && !loopback(addr) {
			failed = fmt.Errorf("peer: control lanes on %s: %w: set peer.cluster_key_file or peer.tls",
				addr, ErrUnsafe)
			continue
		}
		ln, err := usertimeout.ListenConfig(l.silence).Listen(ctx, "tcp", addr)
		if err != nil {
			failed = fmt.Errorf("peer: control lanes of a rail: %w", withRemedy(addr, err))
			continue
		}
		now = append(now, railListener{addr, ln})
		if l.serve != nil {
			l.serve(ln, false)
		}
	}
	for _, c := range l.control {
		if !slices.Contains(now, c) {
			_ = c.ln.Close() // its acceptor notices
		}
	}
	l.control = now
	return failed
}

// withRemedy adds a remedy to an error of Listen.
func withRemedy(addr string, err error) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("listen on %s: %w: another sidecar? give this one --listen, --http and "+
			"--socket of its own", addr, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("listen on %s: %w: it is not an address of this host; name one%s, or, if "+
			"peers reach this host at an address that it does not have, set peer.advertise to that one",
			addr, err, ownAddresses())
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
