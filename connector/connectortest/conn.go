package connectortest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/msg"
)

// maxUnread bounds the packets that the test has not read yet.
const maxUnread = 1024

// conn is one socket session.
type conn struct {
	uc   *net.UnixConn
	done chan struct{} // closed when the reader has ended

	mu      sync.Mutex
	nextID  uint64
	answers map[uint64]chan msg.Message // guarded by mu
	errs    []*msg.ErrorMessage         // id 0, guarded by mu
	bye     *msg.Bye                    // guarded by mu
	err     error                       // why the reader ended, guarded by mu
	changed chan struct{}               // replaced at every change, guarded by mu
}

// ServerError is an ERROR message as a Go error.
type ServerError struct{ msg.ErrorMessage }

func (e *ServerError) Error() string {
	return fmt.Sprintf("sidecar: %s: %s (field %s; %s)", e.Code, e.Message, e.Field, e.Remedy)
}

func dial(ctx context.Context, socket string) (*conn, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unixpacket", socket)
	if err != nil {
		return nil, err
	}
	c := &conn{uc: nc.(*net.UnixConn), done: make(chan struct{}),
		answers: map[uint64]chan msg.Message{}, changed: make(chan struct{})}
	go c.read()
	return c, nil
}

func (c *conn) read() {
	defer close(c.done)
	buf := make([]byte, msg.MaxPacketBytes)
	for {
		n, err := c.uc.Read(buf)
		if err != nil {
			c.end(err)
			return
		}
		m, err := msg.DecodePacket(buf[:n])
		if err != nil {
			c.end(err)
			return
		}
		c.took(m)
	}
}

func (c *conn) end(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
	for id, ch := range c.answers {
		close(ch)
		delete(c.answers, id)
	}
	c.notifyLocked()
}

func (c *conn) notifyLocked() {
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *conn) took(m msg.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var id uint64
	switch m := m.(type) {
	case *msg.Welcome:
		id = m.ID
	case *msg.Registered:
		id = m.ID
	case *msg.Admitted:
		id = m.ID
	case *msg.Opened:
		id = m.ID
	case *msg.Found:
		id = m.ID
	case *msg.Done:
		id = m.ID
	case *msg.Located:
		id = m.ID
	case *msg.Noted:
		id = m.ID
	case *msg.ErrorMessage:
		id = m.ID
		if id == 0 && len(c.errs) < maxUnread {
			c.errs = append(c.errs, m)
		}
	case *msg.Bye:
		c.bye = m
	}
	if ch := c.answers[id]; ch != nil {
		delete(c.answers, id)
		ch <- m
	}
	c.notifyLocked()
}

// expect reserves a request id and the channel its answer comes on.
func (c *conn) expect() (uint64, chan msg.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nextID++
	ch := make(chan msg.Message, 1)
	if c.err != nil {
		close(ch)
	} else {
		c.answers[c.nextID] = ch
	}
	return c.nextID, ch
}

func (c *conn) send(m msg.Message, fds ...int) error {
	p, err := msg.EncodePacket(m)
	if err != nil {
		return err
	}
	return c.sendRaw(p, fds...)
}

// sendRaw sends any bytes as one packet.
func (c *conn) sendRaw(p []byte, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.uc.WriteMsgUnix(p, oob, nil)
	return err
}

func (c *conn) answer(ctx context.Context, ch chan msg.Message) (msg.Message, error) {
	select {
	case m, ok := <-ch:
		if !ok {
			c.mu.Lock()
			defer c.mu.Unlock()
			return nil, fmt.Errorf("session ended before the answer: %w", c.err)
		}
		if e, is := m.(*msg.ErrorMessage); is {
			return nil, &ServerError{*e}
		}
		return m, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *conn) hello(ctx context.Context, h msg.Hello) (*msg.Welcome, error) {
	id, ch := c.expect()
	h.ID = id
	if err := c.send(&h); err != nil {
		return nil, err
	}
	m, err := c.answer(ctx, ch)
	if err != nil {
		return nil, err
	}
	w, ok := m.(*msg.Welcome)
	if !ok {
		return nil, fmt.Errorf("%s answers HELLO", m.Type())
	}
	return w, nil
}

// until waits for cond over the session's state; cond runs under the lock.
func (c *conn) until(ctx context.Context, cond func() bool) error {
	for {
		c.mu.Lock()
		ok, ch, err := cond(), c.changed, c.err
		c.mu.Unlock()
		switch {
		case ok:
			return nil
		case err != nil:
			return fmt.Errorf("session ended: %w", err)
		}
		select {
		case <-ch:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (c *conn) close() {
	_ = c.uc.Close()
	<-c.done
}

// Session is the socket half that workers and schedulers share.
type Session struct {
	mu      sync.Mutex
	c       *conn        // guarded by mu; nil while disconnected
	welcome *msg.Welcome // guarded by mu
}

var errDisconnected = errors.New("connectortest: not connected")

func (s *Session) conn() (*conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.c == nil {
		return nil, errDisconnected
	}
	return s.c, nil
}

// Welcome is the sidecar's answer to the latest HELLO.
func (s *Session) Welcome() *msg.Welcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.welcome
}

// Disconnect closes the socket without a word, as a crash of the socket's owner would, and keeps
// everything else.
func (s *Session) Disconnect() {
	s.mu.Lock()
	c := s.c
	s.c = nil
	s.mu.Unlock()
	if c != nil {
		c.close()
	}
}

// Bye sends BYE.
func (s *Session) Bye(reason string) error {
	c, err := s.conn()
	if err != nil {
		return err
	}
	return c.send(&msg.Bye{Reason: reason})
}

// SendRaw sends any bytes as one packet, with descriptors.
func (s *Session) SendRaw(p []byte, fds ...int) error {
	c, err := s.conn()
	if err != nil {
		return err
	}
	return c.sendRaw(p, fds...)
}

// Errors returns the ERROR messages that answered no request.
func (s *Session) Errors() []*msg.ErrorMessage {
	c, err := s.conn()
	if err != nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*msg.ErrorMessage(nil), c.errs...)
}

// WaitError waits for an ERROR message of that code which answers no request.
func (s *Session) WaitError(ctx context.Context, code string) (*msg.ErrorMessage, error) {
	c, err := s.conn()
	if err != nil {
		return nil, err
	}
	var found *msg.ErrorMessage
	err = c.until(ctx, func() bool {
		for _, e := range c.errs {
			if e.Code == code {
				found = e
			}
		}
		return found != nil
	})
	return found, err
}

// WaitBye waits for the sidecar's BYE.
func (s *Session) WaitBye(ctx context.Context) error {
	c, err := s.conn()
	if err != nil {
		return err
	}
	return c.until(ctx, func() bool { return c.bye != nil })
}

// WaitEnd waits until the sidecar has closed the socket.
func (s *Session) WaitEnd(ctx context.Context) error {
	c, err := s.conn()
	if err != nil {
		return err
	}
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Scheduler is a scheduler session.
type Scheduler struct {
	Session
}

// SchedulerConfig identifies a scheduler.
type SchedulerConfig struct {
	Socket string
	Engine msg.Engine
	Boot   [16]byte // random when zero
	Ranks  msg.Ranks
}

// DialScheduler opens a scheduler session.
func DialScheduler(ctx context.Context, cfg SchedulerConfig) (*Scheduler, error) {
	c, err := dial(ctx, cfg.Socket)
	if err != nil {
		return nil, err
	}
	if cfg.Boot == ([16]byte{}) {
		cfg.Boot = randomID()
	}
	w, err := c.hello(ctx, msg.Hello{Min: msg.VersionMin, Max: msg.VersionMax, Role: msg.RoleScheduler,
		Boot:   cfg.Boot,
		Engine: cfg.Engine, Ranks: cfg.Ranks, PID: uint32(os.Getpid())})
	if err != nil {
		c.close()
		return nil, err
	}
	s := &Scheduler{}
	s.c, s.welcome = c, w
	return s, nil
}

// Await asks for admission and waits for the answer.
func (s *Scheduler) Await(ctx context.Context, xfer [16]byte, hash [32]byte, peer string,
	tokens uint32, ttl time.Duration) (*msg.Admitted, error) {
	c, err := s.conn()
	if err != nil {
		return nil, err
	}
	id, ch := c.expect()
	if err := c.send(&msg.Await{ID: id, Xfer: xfer, Hash: hash, Peer: peer, Tokens: tokens,
		TTLMS: uint64(ttl.Milliseconds())}); err != nil {
		return nil, err
	}
	m, err := c.answer(ctx, ch)
	if err != nil {
		return nil, err
	}
	a, ok := m.(*msg.Admitted)
	if !ok {
		return nil, fmt.Errorf("%s answers AWAIT", m.Type())
	}
	return a, nil
}

// Decline reports that ranks of this engine will not ask for the prompt's KV. It sets m.ID.
func (s *Scheduler) Decline(m msg.Decline) error {
	c, err := s.conn()
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.nextID++
	m.ID = c.nextID // not answered
	c.mu.Unlock()
	return c.send(&m)
}

// Close ends the session.
func (s *Scheduler) Close() error {
	s.Disconnect()
	return nil
}
