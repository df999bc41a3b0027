package connectortest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvspray/kvspray/connector/internal/session"
	"github.com/kvspray/kvspray/connector/msg"
)

// ServerError is an ERROR message as a Go error.
type ServerError = session.ServerError

// Session is the socket half that workers and schedulers share.
type Session struct {
	mu      sync.Mutex
	c       *session.Conn // guarded by mu; nil while disconnected
	welcome *msg.Welcome  // guarded by mu
}

var errDisconnected = errors.New("connectortest: not connected")

func (s *Session) conn() (*session.Conn, error) {
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
		c.Close()
	}
}

// Bye sends BYE.
func (s *Session) Bye(reason string) error {
	c, err := s.conn()
	if err != nil {
		return err
	}
	return c.Send(&msg.Bye{Reason: reason})
}

// SendRaw sends any bytes as one packet, with descriptors.
func (s *Session) SendRaw(p []byte, fds ...int) error {
	c, err := s.conn()
	if err != nil {
		return err
	}
	return c.SendRaw(p, fds...)
}

// Errors returns the ERROR messages that answered no request.
func (s *Session) Errors() []*msg.ErrorMessage {
	c, err := s.conn()
	if err != nil {
		return nil
	}
	return c.Errors()
}

// WaitError waits for an ERROR message of that code which answers no request.
func (s *Session) WaitError(ctx context.Context, code string) (*msg.ErrorMessage, error) {
	c, err := s.conn()
	if err != nil {
		return nil, err
	}
	return c.WaitError(ctx, code)
}

// WaitBye waits for the sidecar's BYE.
func (s *Session) WaitBye(ctx context.Context) error {
	c, err := s.conn()
	if err != nil {
		return err
	}
	return c.WaitBye(ctx)
}

// WaitEnd waits until the sidecar has closed the socket.
func (s *Session) WaitEnd(ctx context.Context) error {
	c, err := s.conn()
	if err != nil {
		return err
	}
	select {
	case <-c.Done():
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
	c, err := session.Dial(ctx, cfg.Socket)
	if err != nil {
		return nil, err
	}
	if cfg.Boot == ([16]byte{}) {
		cfg.Boot = randomID()
	}
	w, err := c.Hello(ctx, msg.Hello{Min: msg.VersionMin, Max: msg.VersionMax, Role: msg.RoleScheduler,
		Boot: cfg.Boot, Engine: cfg.Engine, Ranks: cfg.Ranks})
	if err != nil {
		c.Close()
		return nil, err
	}
	s := &Scheduler{}
	s.c, s.welcome = c, w
	return s, nil
}

// Await asks for admission and waits for the answer.
func (s *Scheduler) Await(ctx context.Context, xfer [16]byte, hash [32]byte, peer string,
	tokens uint32, ttl time.Duration) (*msg.Admitted, error) {
	return ask[*msg.Admitted](ctx, &s.Session, func(id uint64) msg.Message {
		return &msg.Await{ID: id, Xfer: xfer, Hash: hash, Peer: peer, Tokens: tokens,
			TTLMS: uint64(ttl.Milliseconds())}
	})
}

// Decline reports that ranks of this engine will not ask for the prompt's KV. It sets m.ID.
func (s *Scheduler) Decline(m msg.Decline) error {
	c, err := s.conn()
	if err != nil {
		return err
	}
	m.ID = c.NextID() // not answered
	return c.Send(&m)
}

// Close ends the session.
func (s *Scheduler) Close() error {
	s.Disconnect()
	return nil
}
