package sidecar

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds of the link to peers.
const (
	helloTimeout    = 5 * time.Second
	maxFrame        = 1 << 20 // bytes of one control frame
	maxUnacked      = 1 << 16 // frames kept for a peer that does not answer
	maxLinkPeers    = 1024
	ackEvery        = 64 // frames
	redialFirst     = 20 * time.Millisecond
	redialLongest   = 2 * time.Second
	maxControlAddrs = 16
)

var protocol = &peerv1.VersionRange{Min: 1 << 16, Max: 1 << 16}

// link is the control layer of nodes that are bound to loopback: a handshake over gRPC, and one control lane per peer, whose
// frames are numbered, kept until they are acknowledged, and repeated after a reconnection. Whoever called first reconnects.
//
// Goroutines: the gRPC server's, one that accepts lanes, a reader and a writer per lane, one per connect under way.
type link struct {
	peerv1.UnimplementedPeerServer
	n        *Node
	share    [32]byte
	endpoint string
	ctl      net.Listener
	srv      *grpc.Server
	ctx      context.Context
	stop     context.CancelFunc
	wg       sync.WaitGroup

	mu       sync.Mutex // protects all below
	sessions map[transfer.Boot]*linkSession
	calling  map[string]bool // endpoints
}

// linkSession is one boot of a peer.
type linkSession struct {
	l    *link
	info peerInfo
	ctl  []string

	order   sync.Mutex // held while a frame is handled, so that a lane that replaces another one keeps the order; above mu
	mu      sync.Mutex // protects all below
	conn    net.Conn
	byLower bool // the conn was dialed by the lower boot of the two
	seq     uint64
	unacked []*peerv1.ControlFrame
	seen    uint64 // the last frame handled
	told    uint64 // the last one acknowledged
	wbuf    []byte // bytes for the writer
	writing bool
	wake    chan struct{}
	dead    bool
}

func newLink(n *Node) (*link, error) {
	if n.cfg.Secured() {
		return nil, errors.New("sidecar: peer: certificates and cluster keys need a control layer that this build does not have")
	}
	ln, err := (&net.ListenConfig{}).Listen(n.d.ctx, "tcp", n.cfg.Peer.Listen)
	if err != nil {
		return nil, fmt.Errorf("sidecar: peer.listen %s: %w", n.cfg.Peer.Listen, err)
	}
	h, _, err := net.SplitHostPort(ln.Addr().String())
	if err != nil {
		_ = ln.Close()
		return nil, fmt.Errorf("sidecar: peer.listen: %w", err)
	}
	ctl, err := (&net.ListenConfig{}).Listen(n.d.ctx, "tcp", net.JoinHostPort(h, "0"))
	if err != nil {
		_ = ln.Close()
		return nil, fmt.Errorf("sidecar: control lanes: %w", err)
	}
	l := &link{n: n, endpoint: ln.Addr().String(), ctl: ctl, sessions: map[transfer.Boot]*linkSession{}, calling: map[string]bool{},
		srv: grpc.NewServer(grpc.MaxRecvMsgSize(maxFrame), grpc.ConnectionTimeout(helloTimeout))}
	if a := n.cfg.Peer.Advertise; a != "" {
		l.endpoint = advertised(a, l.endpoint)
	}
	if _, err := rand.Read(l.share[:]); err != nil {
		return nil, fmt.Errorf("sidecar: key share: %w", err)
	}
	l.ctx, l.stop = context.WithCancel(n.d.ctx)
	peerv1.RegisterPeerServer(l.srv, l)
	l.wg.Go(func() {
		if serr := l.srv.Serve(ln); serr != nil && l.ctx.Err() == nil {
			n.log.Error("peer service ended", "err", serr)
		}
	})
	l.wg.Go(l.accept)
	return l, nil
}

// advertised replaces port 0 of what is configured by the bound port.
func advertised(want, bound string) string {
	h, p, err := net.SplitHostPort(want)
	if err != nil || p != "0" {
		return want
	}
	_, port, _ := net.SplitHostPort(bound)
	return net.JoinHostPort(h, port)
}

func (l *link) Endpoint() string { return l.endpoint }

// Close ends every lane and joins every goroutine.
func (l *link) Close() error {
	l.stop()
	l.srv.Stop()
	err := l.ctl.Close()
	l.mu.Lock()
	for _, s := range l.sessions {
		s.end()
	}
	l.mu.Unlock()
	l.wg.Wait()
	return err
}

func (l *link) hello() *peerv1.HelloRequest {
	return &peerv1.HelloRequest{Versions: protocol, Boot: l.n.boot[:], Node: l.n.cfg.Node, Endpoint: l.endpoint, HostBoot: l.n.host,
		Rails: l.n.railList(), ControlAddresses: []string{l.ctl.Addr().String()}, KeyShare: l.share[:]}
}

// Hello introduces a caller.
func (l *link) Hello(_ context.Context, q *peerv1.HelloRequest) (*peerv1.HelloReply, error) {
	if v := q.GetVersions(); v.GetMin() > protocol.Max || v.GetMax() < protocol.Min {
		return nil, status.Errorf(codes.FailedPrecondition, "hello: the caller speaks %#x to %#x, we %#x to %#x: upgrade the older of the two",
			v.GetMin(), v.GetMax(), protocol.Min, protocol.Max)
	}
	if _, err := l.meet(q.Boot, q.KeyShare, q.Endpoint, q.HostBoot, q.Rails, q.ControlAddresses); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	h := l.hello()
	return &peerv1.HelloReply{Version: min(protocol.Max, q.Versions.Max), Boot: h.Boot, Node: h.Node, Endpoint: h.Endpoint, HostBoot: h.HostBoot,
		Rails: h.Rails, ControlAddresses: h.ControlAddresses, KeyShare: h.KeyShare}, nil
}

// Probe answers at once.
func (l *link) Probe(context.Context, *peerv1.ProbeRequest) (*peerv1.ProbeReply, error) {
	return &peerv1.ProbeReply{Boot: l.n.boot[:], Node: l.n.cfg.Node, Version: l.n.version}, nil
}

// Describe returns a registered layout by its geometry.
func (l *link) Describe(_ context.Context, q *peerv1.DescribeRequest) (*peerv1.DescribeReply, error) {
	for _, w := range l.n.engine.Workers() {
		if bytes.Equal(w.Geometry[:], q.GetGeometry()) {
			b, err := w.Layout.Marshal()
			if err != nil {
				return nil, status.Error(codes.Internal, err.Error())
			}
			return &peerv1.DescribeReply{Layout: b}, nil
		}
	}
	return nil, status.Error(codes.NotFound, "describe: no engine here has that geometry")
}

// meet keeps what a handshake said. A new boot at a known endpoint supersedes the old one.
func (l *link) meet(boot, share []byte, endpoint, host string, rails []*peerv1.Rail, ctl []string) (*linkSession, error) {
	var b transfer.Boot
	if len(boot) != len(b) || len(share) != len(l.share) || len(ctl) > maxControlAddrs || len(rails) > maxRailPairs {
		return nil, fmt.Errorf("hello: boot of %d bytes, key share of %d, %d rails, %d control addresses: want 16, 32, at most %d and %d",
			len(boot), len(share), len(rails), len(ctl), maxRailPairs, maxControlAddrs)
	}
	copy(b[:], boot)
	l.mu.Lock()
	s := l.sessions[b]
	var old *linkSession
	if s == nil {
		for _, o := range l.sessions {
			if o.info.Endpoint == endpoint && endpoint != "" {
				old = o
				delete(l.sessions, o.info.Boot)
			}
		}
		if len(l.sessions) >= maxLinkPeers {
			l.mu.Unlock()
			return nil, fmt.Errorf("hello: %d peers are known already", maxLinkPeers)
		}
		s = &linkSession{l: l, wake: make(chan struct{}, 1)}
		s.info = peerInfo{Boot: b, Key: l.key(b, share), Endpoint: endpoint, HostBoot: host, Rails: rails}
		l.sessions[b] = s
	}
	s.ctl = ctl
	l.mu.Unlock()
	if old != nil {
		old.end()
		l.n.peerDown(old.info.Boot, true)
	}
	return s, nil
}

// key is the same whoever called: the lower boot's share comes first.
func (l *link) key(peer transfer.Boot, share []byte) (k [32]byte) {
	a, b := l.n.boot[:], peer[:]
	sa, sb := l.share[:], share
	if bytes.Compare(a, b) > 0 {
		a, b, sa, sb = b, a, sb, sa
	}
	m := hmac.New(sha256.New, append(append([]byte("kvspray-lane-key-1"), sa...), sb...))
	m.Write(a)
	m.Write(b)
	m.Sum(k[:0])
	return k
}

// Connect reaches an endpoint in the background.
func (l *link) Connect(endpoint string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.calling[endpoint] || l.ctx.Err() != nil {
		return
	}
	l.calling[endpoint] = true
	l.wg.Go(func() {
		err := l.call(endpoint)
		l.mu.Lock()
		delete(l.calling, endpoint)
		l.mu.Unlock()
		if err != nil && l.ctx.Err() == nil {
			l.n.connectFailed(endpoint, err)
		}
	})
}

// call shakes hands and opens the control lane.
func (l *link) call(endpoint string) error {
	ctx, cancel := context.WithTimeout(l.ctx, helloTimeout)
	defer cancel()
	cc, err := grpc.NewClient("passthrough:///"+endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	if err != nil {
		return fmt.Errorf("peer %s: %w", endpoint, err)
	}
	r, err := peerv1.NewPeerClient(cc).Hello(ctx, l.hello())
	_ = cc.Close() // rare calls open their own connection
	if err != nil {
		return fmt.Errorf("peer %s: hello: %w", endpoint, err)
	}
	if bytes.Equal(r.Boot, l.n.boot[:]) {
		in := peerInfo{Boot: l.n.boot, Key: l.n.self.Key, Endpoint: endpoint, HostBoot: l.n.host, Rails: l.n.railList()}
		l.n.peerUp(in)
		return nil
	}
	// The endpoint that we dialed is the one that engines name, whatever the peer calls itself.
	s, err := l.meet(r.Boot, r.KeyShare, endpoint, r.HostBoot, r.Rails, r.ControlAddresses)
	if err != nil {
		return fmt.Errorf("peer %s: %w", endpoint, err)
	}
	s.mu.Lock()
	up := s.conn != nil
	s.mu.Unlock()
	if up {
		in := s.info
		in.Endpoint = endpoint
		l.n.peerUp(in)
		return nil
	}
	return s.dial(ctx, endpoint, r.ControlAddresses)
}

// dial opens the control lane.
func (s *linkSession) dial(ctx context.Context, endpoint string, addrs []string) error {
	err := fmt.Errorf("peer %s: it names no control address", endpoint)
	for _, a := range addrs {
		var d net.Dialer
		var c net.Conn
		if c, err = d.DialContext(ctx, "tcp", a); err != nil {
			continue
		}
		deadline, _ := ctx.Deadline()
		_ = c.SetDeadline(deadline) // a connection that cannot have one fails at the next call
		var o *wire.Opened
		o, err = wire.Dial(c, wire.DialParams{Purpose: wire.PurposeControl, Self: s.l.n.boot, Peer: s.info.Boot, Key: s.info.Key, Attach: s.attach()})
		if err != nil {
			_ = c.Close()
			continue
		}
		_ = c.SetDeadline(time.Time{})
		s.adopt(c, o.Attach, true, endpoint)
		return nil
	}
	return err
}

// attach tells the other end what was handled, so that it repeats the rest and nothing else.
func (s *linkSession) attach() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return binary.LittleEndian.AppendUint64(nil, s.seen)
}

func (l *link) accept() {
	for {
		c, err := l.ctl.Accept()
		if err != nil {
			if l.ctx.Err() != nil {
				return
			}
			select {
			case <-time.After(redialFirst):
				continue
			case <-l.ctx.Done():
				return
			}
		}
		l.wg.Go(func() { l.accepted(c) })
	}
}

func (l *link) session(boot transfer.Boot) *linkSession {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sessions[boot]
}

func (l *link) accepted(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(helloTimeout)) // see dial
	var theirs []byte
	o, err := wire.Accept(c, wire.AcceptParams{Purpose: wire.PurposeControl,
		Lookup: func(p transfer.Boot) (k [32]byte, self transfer.Boot, ok bool) {
			s := l.session(p)
			if s == nil {
				return k, self, false
			}
			return s.info.Key, l.n.boot, true
		},
		Attach: func(h *wire.Hello) ([]byte, error) {
			s := l.session(h.From)
			if s == nil {
				return nil, errors.New("unknown peer")
			}
			theirs = h.Attach
			return s.attach(), nil
		}})
	if err != nil {
		_ = c.Close()
		l.n.log.Debug("control lane refused", "from", c.RemoteAddr().String(), "err", err)
		return
	}
	_ = c.SetDeadline(time.Time{})
	if s := l.session(o.Peer); s != nil {
		s.adopt(c, theirs, false, s.info.Endpoint)
		return
	}
	_ = c.Close()
}

// adopt makes c the session's lane and repeats what the peer has not handled. Where both ends dialed at once the lane of the
// lower boot stays.
func (s *linkSession) adopt(c net.Conn, attach []byte, dialed bool, endpoint string) {
	l := s.l
	lower := (bytes.Compare(l.n.boot[:], s.info.Boot[:]) < 0) == dialed
	s.mu.Lock()
	if s.dead || l.ctx.Err() != nil || s.conn != nil && s.byLower && !lower {
		s.mu.Unlock()
		_ = c.Close()
		return
	}
	if s.conn != nil {
		_ = s.conn.Close()
	}
	s.conn, s.byLower, s.wbuf, s.writing = c, lower, nil, false
	if len(attach) == 8 {
		s.acked(binary.LittleEndian.Uint64(attach))
	}
	for _, f := range s.unacked {
		s.appendFrame(f)
	}
	backlog := len(s.wbuf) > 0
	wake := make(chan struct{}, 1)
	s.wake = wake
	if backlog {
		s.writing = true
		wake <- struct{}{}
	}
	s.mu.Unlock()
	down := make(chan struct{})
	l.wg.Go(func() { s.write(c, wake, down) })
	l.wg.Go(func() {
		err := s.read(c)
		close(down)
		s.lost(c, err, dialed, endpoint)
	})
	in := s.info
	in.Endpoint = endpoint
	l.n.peerUp(in)
}

func (s *linkSession) lost(c net.Conn, err error, dialed bool, endpoint string) {
	_ = c.Close()
	s.mu.Lock()
	mine := s.conn == c
	if mine {
		s.conn = nil
	}
	dead := s.dead
	s.mu.Unlock()
	l := s.l
	if !mine || dead || l.ctx.Err() != nil {
		return
	}
	l.n.log.Info("control lane lost", "peer", s.info.Boot.String(), "endpoint", endpoint, "err", err)
	l.n.peerDown(s.info.Boot, false)
	if dialed {
		s.redial(endpoint)
	}
}

// redial brings the lane back, or finds out that another boot has taken the peer's place.
func (s *linkSession) redial(endpoint string) {
	l := s.l
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = redialFirst, redialLongest
	wait.Reset()
	for {
		s.mu.Lock()
		done := s.dead || s.conn != nil
		s.mu.Unlock()
		if done || l.ctx.Err() != nil {
			return
		}
		if err := l.call(endpoint); err == nil {
			return
		}
		select {
		case <-time.After(wait.NextBackOff()):
		case <-l.ctx.Done():
			return
		}
	}
}

func (s *linkSession) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dead = true
	if s.conn != nil {
		_ = s.conn.Close()
	}
}

// acked forgets what the peer has handled. Called with mu held.
func (s *linkSession) acked(seq uint64) {
	i := 0
	for i < len(s.unacked) && s.unacked[i].Seq <= seq {
		s.unacked[i] = nil
		i++
	}
	s.unacked = s.unacked[i:]
}

// appendFrame puts a frame into the writer's buffer. Called with mu held.
func (s *linkSession) appendFrame(f *peerv1.ControlFrame) {
	f.Ack, s.told = s.seen, s.seen
	at := len(s.wbuf)
	s.wbuf = append(s.wbuf, 0, 0, 0, 0)
	b, err := proto.MarshalOptions{}.MarshalAppend(s.wbuf, f)
	if err != nil {
		s.wbuf = s.wbuf[:at]
		return
	}
	s.wbuf = b
	binary.LittleEndian.PutUint32(s.wbuf[at:], uint32(len(b)-at-4))
}

// Send numbers a frame and writes it at once where the socket has room.
func (l *link) Send(to transfer.Boot, f *peerv1.ControlFrame) error {
	s := l.session(to)
	if s == nil {
		return fmt.Errorf("control frame to %s: no such peer", to)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.unacked) >= maxUnacked {
		return fmt.Errorf("control frame to %s: %d frames are not acknowledged", to, maxUnacked)
	}
	s.seq++
	f.Seq = s.seq
	s.unacked = append(s.unacked, f)
	s.push(f)
	return nil
}

// push writes a frame now, or leaves it to the writer. Called with mu held.
func (s *linkSession) push(f *peerv1.ControlFrame) {
	if s.conn == nil {
		return
	}
	s.appendFrame(f)
	if s.writing {
		return
	}
	n := 0
	if rc, err := s.conn.(*net.TCPConn).SyscallConn(); err == nil {
		// One try, so that the caller never waits for the network.
		_ = rc.Write(func(fd uintptr) bool {
			n = max(writeOnce(int(fd), s.wbuf), 0)
			return true
		})
	}
	if n == len(s.wbuf) {
		s.wbuf = s.wbuf[:0]
		return
	}
	s.wbuf = append(s.wbuf[:0], s.wbuf[n:]...)
	s.writing = true
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// write is for what did not fit.
func (s *linkSession) write(c net.Conn, wake, down chan struct{}) {
	for {
		select {
		case <-wake:
		case <-down:
			return
		}
		for {
			s.mu.Lock()
			if s.conn != c || len(s.wbuf) == 0 {
				if s.conn == c {
					s.writing = false
				}
				s.mu.Unlock()
				break
			}
			b := s.wbuf
			s.wbuf = nil
			s.mu.Unlock()
			if _, err := c.Write(b); err != nil {
				_ = c.Close() // the reader reports it
				return
			}
		}
	}
}

func (s *linkSession) read(c net.Conn) error {
	var head [4]byte
	var buf []byte
	r := newFrameReader(c)
	for {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return err
		}
		n := binary.LittleEndian.Uint32(head[:])
		if n > maxFrame {
			return fmt.Errorf("control frame of %d bytes: at most %d", n, maxFrame)
		}
		if cap(buf) < int(n) {
			buf = make([]byte, n)
		}
		if _, err := io.ReadFull(r, buf[:n]); err != nil {
			return err
		}
		f := &peerv1.ControlFrame{}
		if err := proto.Unmarshal(buf[:n], f); err != nil {
			return fmt.Errorf("control frame: %w", err)
		}
		if err := s.handle(c, f); err != nil {
			return err
		}
	}
}

func (s *linkSession) handle(c net.Conn, f *peerv1.ControlFrame) error {
	s.order.Lock()
	defer s.order.Unlock()
	s.mu.Lock()
	if s.conn != c {
		s.mu.Unlock()
		return net.ErrClosed
	}
	s.acked(f.Ack)
	fresh := f.Seq == s.seen+1
	if f.Seq > s.seen+1 {
		s.mu.Unlock()
		return fmt.Errorf("control frame %d follows %d", f.Seq, s.seen)
	}
	if fresh {
		s.seen = f.Seq
		if s.seen-s.told >= ackEvery {
			s.push(&peerv1.ControlFrame{})
		}
	}
	s.mu.Unlock()
	if fresh && f.Body != nil {
		s.l.n.frame(s.info.Boot, f)
	}
	return nil
}
