package sidecar

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/httpgate"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/sock"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
	"github.com/kvspray/kvspray/transport"
)

// closers are closed in the opposite order.
type closers []func() error

func (c *closers) add(f func() error) { *c = append(*c, f) }

// Run serves until ctx ends, which drains, or until a fatal failure. It joins every goroutine.
func (n *Node) Run(ctx context.Context) (err error) {
	announce := sync.OnceFunc(func() { close(n.started) })
	defer announce()
	var open closers
	// Fences and lanes outlive ctx: draining needs them.
	defer func() {
		n.serving.Store(false)
		n.proc.Stop()
		for i := len(open) - 1; i >= 0; i-- {
			if cerr := open[i](); cerr != nil && !errors.Is(cerr, net.ErrClosed) {
				n.log.Warn("stop", "err", cerr)
			}
		}
		n.proc.Wait()
	}()

	n.log.Info("memory copy routines", "by_size", strings.Join(mem.CopyChoices(), "; "))
	if err := n.openTraces(&open); err != nil {
		return err
	}
	if err := n.pages.open(ctx); err != nil {
		return err
	}
	open.add(n.pages.close)
	if err := n.conv.open(); err != nil { // the first lane may ask for a key
		return err
	}
	if err := n.openBackends(&open); err != nil {
		return err
	}
	if err := n.segments.Attach(); err != nil {
		return err
	}
	open.add(func() error { n.leaveSegments(); return nil })
	n.rails.look()
	// Every address is bound before a peer learns of this node: a second sidecar, whose socket or
	// port is in use, ends here without notice to peers.
	mesh := n.conv.mesh
	if err = mesh.SetControl(ctx, n.conv.controlAddresses()); err == nil {
		err = mesh.Listen(ctx)
	}
	if err != nil {
		return fmt.Errorf("sidecar: %w", err)
	}
	open.add(mesh.Close)
	if err := n.listenEngines(); err != nil {
		return err
	}
	open.add(n.engine.Close)
	listener, err := n.listenHTTP(ctx)
	if err != nil {
		return err
	}
	if listener != nil {
		open.add(listener.Close)
	}
	admin, err := n.listenAdmin()
	if err != nil {
		return err
	}
	open.add(admin.Close)
	if err := mesh.Start(ctx); err != nil {
		return fmt.Errorf("sidecar: %w", err)
	}
	n.setEndpoint(mesh.Endpoint())
	n.conv.selfUp()
	failed := make(chan error, 3)
	n.serve(listener, admin, failed, &open)

	n.serving.Store(true)
	announce()
	n.log.Info("sidecar ready", "endpoint", n.Endpoint(), "socket", n.cfg.Engine.Socket, "http",
		n.HTTPAddr(), "transports", namesOf(n.live.Registry),
		"version", n.version)
	select {
	case <-ctx.Done():
	case <-n.drain:
	case err = <-failed:
		return err
	}
	n.shut()
	return nil
}

func (n *Node) openTraces(open *closers) error {
	if t := n.observer.tracing; t != nil {
		if err := t.open(n); err != nil {
			return fmt.Errorf("sidecar: trace.otlp: %w", err)
		}
		open.add(t.close)
	}
	for _, f := range []struct {
		key, path string
		lines     *trace.Lines
	}{{"trace.block_hashes", n.cfg.Trace.BlockHashes, n.observer.hashes.Lines},
		{"trace.transfers", n.cfg.Trace.Transfers, n.observer.transfers}} {
		if err := f.lines.Open(f.key, f.path, n.log); err != nil {
			return err
		}
		open.add(f.lines.Close)
	}
	return nil
}

func (n *Node) openBackends(open *closers) error {
	if n.gpus != nil {
		open.add(n.gpus.Close) // closed after everything that moves their memory
	}
	// the end of their context has ended them
	open.add(func() error { n.local.Wait(); return nil })
	if n.gpus != nil {
		if err := n.gpus.start(n.cfg.Transports.GPU); err != nil {
			return err
		}
	}
	live := n.backends[:0:0]
	for _, b := range n.backends {
		rails, err := b.Open(n.proc.Context(), n.driver)
		if errors.Is(err, transport.ErrNotSupported) {
			n.log.Warn("transport not available", "transport", b.Name(), "err", err)
			continue
		}
		if err != nil {
			return fmt.Errorf("sidecar: open transport %s: %w", b.Name(), n.withDirectory(b, err))
		}
		open.add(b.Close)
		live = append(live, b)
		n.rails.put(b.Name(), rails)
	}
	if len(live) == 0 {
		return fmt.Errorf("sidecar: none of the transports %v works here: see 'kvspray doctor'",
			n.cfg.Transports.Order)
	}
	n.live.Registry = live
	n.driver.Use(live)
	return nil
}

// withDirectory adds the setting of the directory that shm could not use.
func (n *Node) withDirectory(b transport.Backend, err error) error {
	if b.Name() != config.TransSHM {
		return err
	}
	key, value := "transports.shm.dir", n.cfg.Transports.SHM.Dir
	if value == "" {
		key, value = "--socket (engine.socket)", n.cfg.Engine.Socket
	}
	return fmt.Errorf("%w: it is the directory of %s %s: name a directory that this user may write to",
		err, key, value)
}

func (n *Node) listenEngines() (err error) {
	var devices connector.Devices
	if n.gpus != nil {
		devices = n.gpus
	}
	n.engine, err = connector.New(connector.Options{
		Devices: devices, Segments: n.segments,
		Store: n.pages.serves(), Generation: n.cfg.Store.Generation,
		Socket: n.cfg.Engine.Socket, Boot: n.boot, Node: n.cfg.Node, HostBoot: n.host,
		Release:  n.version,
		Endpoint: n.Endpoint, Events: n.events.Handle, Copy: n.copies.start, Log: n.log,
		Limits: connector.Limits{Sessions: n.cfg.Engine.MaxSessions, Leases: n.cfg.Engine.MaxLeases,
			Regions: n.cfg.Engine.MaxRegions},
		Hooks: hooks(n.metrics, n.life), AllowUIDs: uids(n.cfg.Engine.AllowedUIDs),
		SocketMode:   socketMode(n.cfg.Engine.AllowedUIDs),
		Deadline:     time.Duration(n.cfg.Transfer.Deadline),
		MatchTimeout: time.Duration(n.cfg.Transfer.MatchTimeout),
		Grace:        n.grace,
	})
	if err != nil {
		return err
	}
	n.life.unreachable = n.engine.Unreachable
	return n.engine.Listen()
}

// serve starts what runs until the end; failed receives a fatal failure.
func (n *Node) serve(listener, admin net.Listener, failed chan<- error, open *closers) {
	ctx, stop := context.WithCancel(context.Background())
	n.proc.Run(func(context.Context) {
		if err := n.engine.Serve(ctx); err != nil && ctx.Err() == nil {
			failed <- fmt.Errorf("sidecar: engine socket: %w", err)
		}
	})
	open.add(func() error { stop(); return nil })
	answer := func(what string, ln net.Listener, srv *httpgate.Server) {
		n.proc.Run(func(context.Context) {
			if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
				failed <- fmt.Errorf("sidecar: %s: %w", what, err)
			}
		})
		open.add(srv.Close)
	}
	if listener != nil {
		answer("http", listener, n.web.Port())
	}
	answer("admin socket", admin, n.web.Admin())
	n.served.http = n.servedHTTP()
	n.proc.Run(n.publishWorkers)
	n.proc.Run(n.rails.watch)
	n.proc.Run(func(ctx context.Context) { n.rails.watchLinks(ctx, n.busy) })
	n.proc.Run(n.devices.watch)
	if n.pages.exchange != nil {
		n.proc.Run(n.pages.exchange.Run)
	}
	if n.pages.service != nil {
		n.proc.Run(func(ctx context.Context) { logProblems(ctx, n.log, n.pages.problems) })
	}
	if n.pages.removals != nil {
		n.proc.Run(n.pages.removals.Run)
	}
	n.proc.Run(n.rails.watchGDR)
	n.proc.Run(n.dial.watchIdle)
	n.proc.Run(func(ctx context.Context) { n.conv.watchCertificates(ctx, certLooks) })
}

// busy reports whether a lease is open.
func (n *Node) busy() (open bool) {
	n.driver.View(func(ex *exec.Exec, _ exec.Instant) {
		dests, sources := ex.Open()
		open = dests+sources > 0
	})
	return open
}

// listenHTTP binds the address of health and metrics; nil: switched off.
func (n *Node) listenHTTP(ctx context.Context) (net.Listener, error) {
	addr := n.cfg.HTTP.Listen
	if addr == config.Off || addr == "" {
		return nil, nil //nolint:nilnil // it is switched off
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("sidecar: http.listen %s: %w: is another sidecar running? Choose "+
			"another port with --http, 127.0.0.1:0 for any, or off", addr, err)
	case err != nil:
		return nil, fmt.Errorf("sidecar: http.listen %s: %w: name host:port of this host with --http, "+
			"127.0.0.1:0 for any port, or off", addr, err)
	}
	n.life.setHTTP(ln.Addr().String())
	return ln, nil
}

// listenAdmin makes the admin socket. The lock of the engines' socket, which this process has,
// covers it too: an existing one is a dead sidecar's.
func (n *Node) listenAdmin() (net.Listener, error) {
	path := config.AdminSocket(n.cfg.Engine.Socket)
	ln, err := sock.Listen(sock.Options{Network: "unix", Path: path, Name: "the admin socket",
		Setting: "--socket (engine.socket)",
		Mode:    os.FileMode(socketMode(n.cfg.Engine.AdminUIDs)), Log: n.log})
	if err != nil {
		return nil, fmt.Errorf("sidecar: admin socket %s: %w", path, err)
	}
	return ln, nil
}

// hosts are the names of this node in requests to its HTTP port.
func hosts(c *config.Config) []string {
	names := slices.Clone(c.HTTP.Hosts)
	if name, err := os.Hostname(); err == nil {
		short, _, _ := strings.Cut(name, ".")
		names = append(names, name, short)
	}
	if name, _, err := net.SplitHostPort(c.Peer.Advertise); err == nil && name != "" {
		names = append(names, name)
	}
	return names
}

func uids(in []int) (out []uint32) {
	for _, u := range in {
		out = append(out, uint32(u))
	}
	return out
}

// socketMode lets other users reach the socket if some are allowed; credentials are checked in any
// case.
func socketMode(allowed []int) uint32 {
	if len(allowed) > 0 {
		return 0o666
	}
	return 0o600
}
