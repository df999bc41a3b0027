package session

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/msg"
)

// maxUnread bounds the packets that the test has not read yet.
const maxUnread = 1024

// Conn is one socket session.
type Conn struct {
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

// Dial connects to a sidecar's socket. Hello follows.
func Dial(ctx context.Context, socket string) (*Conn, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unixpacket", socket)
	if err != nil {
		return nil, err
	}
	c := &Conn{uc: nc.(*net.UnixConn), done: make(chan struct{}),
		answers: map[uint64]chan msg.Message{}, changed: make(chan struct{})}
	go c.read()
	return c, nil
}

func (c *Conn) read() {
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

func (c *Conn) end(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
	for id, ch := range c.answers {
		close(ch)
		delete(c.answers, id)
	}
	c.notifyLocked()
}

func (c *Conn) notifyLocked() {
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *Conn) took(m msg.Message) {
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
func (c *Conn) expect() (uint64, chan msg.Message) {
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

// Send sends a message, with descriptors.
func (c *Conn) Send(m msg.Message, fds ...int) error {
	p, err := msg.EncodePacket(m)
	if err != nil {
		return err
	}
	return c.SendRaw(p, fds...)
}

// SendRaw sends any bytes as one packet.
func (c *Conn) SendRaw(p []byte, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.uc.WriteMsgUnix(p, oob, nil)
	return err
}

func (c *Conn) answer(ctx context.Context, ch chan msg.Message) (msg.Message, error) {
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

// Ask sends a request with a fresh id, and waits for its answer.
func Ask[T msg.Message](ctx context.Context, c *Conn, request func(id uint64) msg.Message,
	fds ...int) (T, error) {
	var none T
	id, ch := c.expect()
	r := request(id)
	if err := c.Send(r, fds...); err != nil {
		return none, err
	}
	m, err := c.answer(ctx, ch)
	if err != nil {
		return none, err
	}
	a, ok := m.(T)
	if !ok {
		return none, fmt.Errorf("%s answers %s", m.Type(), r.Type())
	}
	return a, nil
}

// Hello opens the session. It fills in the id and the process.
func (c *Conn) Hello(ctx context.Context, h msg.Hello) (*msg.Welcome, error) {
	return Ask[*msg.Welcome](ctx, c, func(id uint64) msg.Message {
		h.ID, h.PID = id, uint32(os.Getpid())
		return &h
	})
}

// NextID returns an id for a request without an answer.
func (c *Conn) NextID() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nextID++
	return c.nextID
}

// Done is closed once the session has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Unix is the socket.
func (c *Conn) Unix() *net.UnixConn { return c.uc }

// Errors returns the ERROR messages that answered no request.
func (c *Conn) Errors() []*msg.ErrorMessage {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*msg.ErrorMessage(nil), c.errs...)
}

// WaitError waits for an ERROR message of that code which answers no request.
func (c *Conn) WaitError(ctx context.Context, code string) (found *msg.ErrorMessage, err error) {
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
func (c *Conn) WaitBye(ctx context.Context) error {
	return c.until(ctx, func() bool { return c.bye != nil })
}

// until waits for cond over the session's state; cond runs under the lock.
func (c *Conn) until(ctx context.Context, cond func() bool) error {
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

// Close ends the session, and what waits for answers.
func (c *Conn) Close() {
	_ = c.uc.Close()
	<-c.done
}
