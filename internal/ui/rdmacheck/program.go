package rdmacheck

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/ui/bugreport"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

// DefaultPort of the end that serves.
const DefaultPort = "7659"

// Program is a run of the test from a command line.
type Program struct {
	Config *config.Config
	Options
	ServeAt string // host and port: serve tests of others until ctx ends
	Report  string // file for the report as JSON; empty: none
	JSON    bool   // JSON on Stdout instead of the page
	Stdout  io.Writer
	Stderr  io.Writer
}

// ErrFailed: a test failed, which the report names.
var ErrFailed = errors.New("rdmacheck: not all tests passed")

// Run runs the test or serves. What it writes has no addresses and no names.
func (p *Program) Run(ctx context.Context) error {
	if p.ServeAt != "" && (p.Peer != "" || p.Report != "" || p.JSON) {
		return usage.Errorf("--serve excludes a peer, --report and --json: the end that names this " +
			"one as its peer writes the report")
	}
	if p.Rounds < 1 || p.Rounds > 10000 {
		return usage.Errorf("--rounds %d: want 1 to 10000", p.Rounds)
	}
	if p.Span <= 0 || p.Span > maxWait/2 {
		return usage.Errorf("--span %s: want more than 0 and at most %s", p.Span, maxWait/2)
	}
	if err := p.secure(); err != nil {
		return err
	}
	env, err := Here(ctx, p.Config)
	if err != nil {
		return err
	}
	if p.ServeAt != "" {
		return p.serve(ctx, env)
	}
	if p.Report != "" { // before minutes of tests
		f, err := os.OpenFile(p.Report, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return fmt.Errorf("--report: %w; name a file that does not exist yet", err)
		}
		err = p.test(ctx, env, f)
		if err != nil && !errors.Is(err, ErrFailed) {
			return errors.Join(err, f.Close(), os.Remove(p.Report))
		}
		return errors.Join(err, f.Close())
	}
	return p.test(ctx, env, nil)
}

// secure loads the key, without which the other end must be on this host: a request of a stranger
// could use the rails and locked memory.
func (p *Program) secure() (err error) {
	if p.ServeAt == "" && p.Peer == "" {
		return nil
	}
	c := &p.Config.Peer
	p.Key, err = keys.Load(c.ClusterKeyFile, c.TLS.Cert, c.TLS.Key, c.TLS.CA, "kvspray-doctor",
		time.Now())
	if err != nil {
		return usage.Errorf("the key of both ends: %w", err)
	}
	for _, at := range []*string{&p.ServeAt, &p.Peer} {
		if *at == "" {
			continue
		}
		if *at = withPort(*at); p.Key == nil && !config.IsLoopback(*at) {
			return usage.Errorf("%s is not loopback, and peer.cluster_key_file and peer.tls are not set: "+
				"make a key with 'kvspray keygen cluster', copy it to both hosts, and name it at both ends",
				*at)
		}
	}
	return nil
}

func (p *Program) test(ctx context.Context, env Env, file io.Writer) error {
	r, err := Run(ctx, env, p.Options)
	if err != nil {
		return err
	}
	private := bugreport.NewRedactor(p.Config)
	var js, page bytes.Buffer
	if err := errors.Join(r.WriteJSON(&js), r.WriteText(&page)); err != nil {
		return err
	}
	out := &page
	if p.JSON {
		out = &js
	}
	_, err = p.Stdout.Write(private.Redact(out.Bytes()))
	if file != nil && err == nil {
		_, err = file.Write(private.Redact(js.Bytes()))
	}
	if err == nil && !r.Works() {
		err = ErrFailed
	}
	return err
}

func (p *Program) serve(ctx context.Context, env Env) error {
	if len(env.Rails) == 0 {
		return errors.New("--serve: this host has no RDMA port to test: 'kvspray doctor --rdma' " +
			"without --serve names the reason and the remedy")
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", p.ServeAt)
	if err != nil {
		return fmt.Errorf("--serve: %w", err)
	}
	who := "Hosts with the key"
	if p.Key == nil {
		who = "All processes of this host"
	}
	if _, err := fmt.Fprintf(p.Stderr, "serving tests of %d rails; at the other end: kvspray doctor "+
		"--rdma %s\n%s can run them, until this command is ended.\n", len(env.Rails), ln.Addr(),
		who); err != nil {
		return errors.Join(err, ln.Close())
	}
	return Serve(ctx, ln, env, p.Key)
}

// withPort adds the default port to a host without one.
func withPort(address string) string {
	if _, _, err := net.SplitHostPort(address); err == nil {
		return address
	}
	return net.JoinHostPort(strings.Trim(address, "[]"), DefaultPort)
}
