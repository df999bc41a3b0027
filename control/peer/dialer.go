package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/control/peer/lane"
	"github.com/kvspray/kvspray/control/peer/opening"
	"github.com/kvspray/kvspray/internal/sys/usertimeout"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// dialer reaches peers: it sends Hello, opens lanes, and opens them again.
type dialer struct {
	*core
	listeners *listeners
	sessions  *sessions
	opening   *opening.Config

	mu         sync.Mutex      // protects connecting
	connecting map[string]bool // by endpoint; true: asked for again meanwhile
}

// start connects to endpoint in the background, unless an attempt is in progress.
func (d *dialer) start(endpoint string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, busy := d.connecting[endpoint]; busy {
		d.connecting[endpoint] = true
		return
	}
	if len(d.connecting) >= maxConnects {
		d.tasks.run(func() {
			d.opt.Handler.ConnectFailed(endpoint,
				fmt.Errorf("peer: connect to %s: %d connection attempts are in progress", endpoint,
					maxConnects))
		})
		return
	}
	d.connecting[endpoint] = false
	d.tasks.run(func() { d.connect(endpoint) })
}

// connect sends Hello, opens lanes, and answers a Connect once.
func (d *dialer) connect(endpoint string) {
	s, err := d.hello(d.tasks.ctx, endpoint, false)
	if err == nil && s == nil { // this process itself
		d.connected(endpoint)
		d.opt.Handler.PeerUp(d.self(endpoint))
		return
	}
	before := 0
	if err == nil {
		s.mu.Lock()
		s.dialed = true
		before = s.ups
		open := s.up && s.channel.State().Lanes > 0
		s.mu.Unlock()
		if !open {
			err = d.dialLanes(d.tasks.ctx, s)
		}
	}
	again := d.connected(endpoint) // from here on another call gets an answer of its own
	if d.tasks.ctx.Err() != nil {
		return
	}
	if err != nil {
		d.opt.Handler.ConnectFailed(endpoint, err)
		return
	}
	// The session may have been up before, or have come up meanwhile under another name of the peer,
	// or be over again.
	s.life.Lock()
	defer s.life.Unlock()
	s.mu.Lock()
	info, up := s.info, s.up && !s.channel.State().Closed
	reported := s.ups != before && s.reportedAs == endpoint && !again
	s.mu.Unlock()
	info.Endpoint = endpoint
	switch {
	case reported:
	case up:
		d.opt.Handler.PeerUp(info)
	default:
		d.opt.Handler.ConnectFailed(endpoint, fmt.Errorf("peer: connect to %s: its lanes were "+
			"lost: %w", endpoint, net.ErrClosed))
	}
}

// connected ends a connection attempt. It reports whether Connect was called again meanwhile: the
// answer may have been sent before that call.
func (d *dialer) connected(endpoint string) (again bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	again = d.connecting[endpoint]
	delete(d.connecting, endpoint)
	return again
}

// dialLanes opens the missing lanes, all at once, because the path to one address may be dead. It
// fails only if no lane is open afterwards.
func (d *dialer) dialLanes(ctx context.Context, s *session) error {
	s.mu.Lock()
	missing := s.missingLocked()
	s.mu.Unlock()
	errs := make([]error, len(missing))
	var wg sync.WaitGroup
	for i, to := range missing {
		wg.Go(func() {
			if errs[i] = d.dialLane(ctx, s, to); errs[i] != nil {
				d.opt.Log.Debug("control lane not opened", "peer", s.boot.String(), "address", to.addr,
					"err", errs[i])
			}
		})
	}
	wg.Wait()
	if s.channel.State().Lanes > 0 {
		return nil
	}
	return errors.Join(errs...)
}

func (d *dialer) dialLane(ctx context.Context, s *session, to target) error {
	if d.opt.Credentials == nil && !loopback(to.addr) {
		return fmt.Errorf("peer: control lane to %s: %w: set peer.cluster_key_file or peer.tls",
			to.addr, ErrUnsafe)
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	c, err := d.dialFrom(ctx, d.listeners.localFor(to.index), to.addr)
	if err != nil {
		return fmt.Errorf("peer: control lane: %w", err)
	}
	var serve func()
	attach, over, err := opening.Dial(ctx, c, d.opening, opening.Target{Boot: s.boot,
		Address: to.addr}, accepting{s, d})
	if err == nil {
		serve, err = d.addLane(s, c, over, to.addr, attach)
	}
	if err != nil {
		_ = c.Close()
		return fmt.Errorf("peer: control lane to %s at %s: %w", s.boot, to.addr, err)
	}
	if !d.tasks.run(serve) {
		_ = c.Close()
	}
	return nil
}

// dialFrom dials from a local address, and from any address if that one has no route to the peer.
func (d *dialer) dialFrom(ctx context.Context, local net.IP, addr string) (net.Conn, error) {
	if local != nil {
		bound, cancel := context.WithTimeout(ctx, boundTimeout)
		defer cancel()
		from := usertimeout.Dialer(d.pings.HostSilence)
		from.LocalAddr = &net.TCPAddr{IP: local}
		if c, err := from.DialContext(bound, "tcp", addr); err == nil {
			return c, nil
		}
	}
	//nolint:wrapcheck // the caller adds what it dialed for
	return usertimeout.Dialer(d.pings.HostSilence).DialContext(ctx, "tcp", addr)
}

// accepting is a session as package opening sees it.
type accepting struct {
	*session
	d *dialer
}

// accepting finds the session of a lane that a peer dials.
func (d *dialer) accepting(boot transfer.Boot) (opening.Session, bool) {
	s := d.sessions.get(boot)
	return accepting{s, d}, s != nil
}

// Admit implements opening.Session.
func (a accepting) Admit() error {
	if err := a.channel.Admit(); err != nil {
		return fmt.Errorf("%w: %w", err, wire.ErrRefused)
	}
	return nil
}

// Serve implements opening.Session.
func (a accepting) Serve(c net.Conn, over *opening.TLS, attach []byte) error {
	serve, err := a.d.addLane(a.session, c, over, "", attach)
	if err == nil {
		serve()
	}
	return err
}

// addLane adds a proved lane to a session. The caller runs serve, which reads until the lane ends.
func (d *dialer) addLane(s *session, c net.Conn, over *opening.TLS, addr string,
	attach []byte) (serve func(), err error) {
	l, err := lane.New(c, over, addr)
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the lane
	}
	if len(attach) != len(incarnation{}) {
		return nil, fmt.Errorf("peer: lane of %s attaches %d bytes, want %d: %w", s.boot, len(attach),
			len(incarnation{}), wire.ErrMalformed)
	}
	theirs := incarnation(attach)
	s.life.Lock()
	if err := s.channel.Admit(); err != nil {
		s.life.Unlock()
		return nil, err //nolint:wrapcheck // it names the peer
	}
	s.mu.Lock()
	if !s.proved && s.renewedFor != nil && *s.renewedFor != theirs {
		// The session before this one ended for a lane that the peer had dialed in an earlier session of
		// its own. The peer's present session has frames with the incarnation that this one inherited, so
		// a session with a new one has to follow.
		s.mu.Unlock()
		s.life.Unlock()
		d.sessions.end(s, errRenewed)
		return nil, fmt.Errorf("peer: %s has another session: %w", s.boot, wire.ErrRefused)
	}
	if s.proved && s.theirs != theirs {
		// The peer lost its session and counts frames from one again. This side does the same, in a new
		// session.
		s.mu.Unlock()
		s.life.Unlock()
		d.sessions.renew(s, theirs)
		return nil, fmt.Errorf("peer: %s began a new session: %w", s.boot, wire.ErrRefused)
	}
	s.proved, s.theirs = true, theirs
	up, info := s.up, s.info
	s.up = true
	if !up {
		s.ups++
		s.reportedAs = info.Endpoint
	}
	s.mu.Unlock()
	if !up {
		d.opt.Handler.PeerUp(info)
	}
	err = s.channel.Add(l)
	s.life.Unlock()
	return func() {
		d.laneEnded(s, l, l.Read(func(f *peerv1.ControlFrame) error {
			return s.channel.Receive(l, f) //nolint:wrapcheck // it names the peer
		}))
	}, err
}

func (d *dialer) laneEnded(s *session, l *lane.Lane, err error) {
	left, closed := s.channel.Remove(l)
	if closed {
		return
	}
	if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		d.opt.Log.Debug("control lane lost", "peer", s.boot.String(), "lanes_left", left, "err", err)
	}
	s.mu.Lock()
	redial := left == 0 && s.dialed && !s.dialing
	s.dialing = s.dialing || redial
	s.mu.Unlock()
	if redial {
		d.tasks.run(func() { d.redial(s) })
	}
}

// needed reports whether the session has frames to send, leases or a request.
func (d *dialer) needed(s *session) bool {
	return s.channel.State().Unacked > 0 || d.opt.Handler.Busy(s.boot)
}

// redial opens lanes again, with growing pauses, until one is open or the session has ended.
func (d *dialer) redial(s *session) {
	defer s.endDialing()
	ctx := d.tasks.ctx
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = redialFirst, redialMax
	wait.Reset()
	for {
		if st := s.channel.State(); st.Closed || st.Lanes > 0 || ctx.Err() != nil {
			return
		}
		endpoint := s.endpoint()
		// The same process may answer at its other addresses: perhaps only the path to its endpoint was
		// lost.
		var others sync.WaitGroup
		others.Go(func() { _ = d.dialLanes(ctx, s) }) // it logs what failed
		got, err := d.hello(ctx, endpoint, !d.needed(s))
		others.Wait()
		if errors.Is(err, hello.ErrPreconnect) && !d.needed(s) {
			d.sessions.endUnused(s, fmt.Errorf("peer: no request needs it: %w", err))
			return
		}
		if err == nil && got != nil {
			err = d.dialLanes(ctx, got)
			if err == nil && got != s {
				got.setDialed()
			}
		}
		if err != nil {
			d.opt.Log.Debug("peer not reached again", "peer", s.boot.String(), "endpoint", endpoint,
				"err", err)
		}
		t := time.NewTimer(wait.NextBackOff())
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// verify dials an endpoint at once if a caller claims the endpoint of another boot without lanes:
// the boot that answers there is the proof.
func (d *dialer) verify(endpoint string, boot transfer.Boot) {
	old := d.sessions.laneless(boot, func(s *session) bool {
		// An unproved session is not worth a dial: any holder of a key can invent one.
		dial := s.endpointLocked() == endpoint && !s.dialing && !s.channel.State().Closed && s.proved
		s.dialing = s.dialing || dial
		return dial
	})
	for _, s := range old {
		d.tasks.run(func() { d.redial(s) })
	}
}
