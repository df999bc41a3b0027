package connector

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/internal/memory"
	"github.com/kvspray/kvspray/connector/internal/process"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
)

// session is one socket. Its reader goroutine handles requests in order; its writer sends queued
// packets.
type session struct {
	s    *Server
	uc   *net.UnixConn
	peer *process.Peer
	log  *slog.Logger

	refused admit.Log // messages

	outbox chan []byte   // nil packet: close the socket after the queued packets
	closed chan struct{} // closed when the reader has ended
	wrote  chan struct{} // closed when the writer has ended

	// Owned by the reader.
	hello   *msg.Hello
	version msg.Version
	worker  *worker
	bad     int
	number  uint64 // of a scheduler's session; 0: of a worker's
	spaces  spaces
	intake  *memory.Intake // of regions that came before REGISTER; nil: none

	mu     sync.Mutex
	awaits int  // unanswered; guarded by mu
	ended  bool // no packet is queued any more; guarded by mu
}

// send queues a message. A shim that does not read loses its session, so that the queue stays
// bounded.
func (c *session) send(m msg.Message) {
	p, err := msg.EncodePacket(m)
	if err != nil {
		c.log.Error("encode a packet", "type", m.Type().String(), "err", err)
		return
	}
	c.queue(p)
}

func (c *session) queue(p []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	select {
	case c.outbox <- p:
	default:
		c.ended = true
		c.log.Warn("the shim does not read its socket; session closed, its leases stay",
			"queued", maxOutbox)
		_ = c.uc.Close()
	}
}

// finish closes the socket after the queued packets.
func (c *session) finish() {
	c.queue(nil)
}

func (c *session) sendError(e *msg.ErrorMessage) {
	c.send(e)
	if e.Fatal {
		c.finish()
	}
}

// errorMessage turns an error into an ERROR, with field and remedy if the error has them.
func errorMessage(id uint64, code string, err error, fatal bool) *msg.ErrorMessage {
	e := &msg.ErrorMessage{ID: id, Code: code, Message: err.Error(), Fatal: fatal}
	var me *msg.Error
	var le *layout.Error
	var refused *msg.Refusal
	switch {
	case errors.As(err, &refused):
		e.Code, e.Field, e.Remedy = refused.Code, refused.Field, refused.Remedy
		if errors.As(err, &le) {
			e.Field, e.Remedy = refused.Field+"."+le.Field, le.Remedy
		}
	case errors.As(err, &me):
		e.Field, e.Remedy = me.Field, me.Remedy
	}
	e.Message = strings.TrimSuffix(e.Message, "; "+e.Remedy) // the shim adds it
	return e
}

func (c *session) write() {
	defer c.s.wg.Done()
	defer close(c.wrote)
	for {
		select {
		case p := <-c.outbox:
			if p == nil {
				_ = c.uc.Close()
				return
			}
			_ = c.uc.SetWriteDeadline(time.Now().Add(writeTimeout))
			if _, err := c.uc.Write(p); err != nil {
				_ = c.uc.Close()
				return
			}
		case <-c.closed:
			return
		}
	}
}

// read handles packets until the socket ends.
func (c *session) read() {
	defer c.s.wg.Done()
	err := c.serve()
	if errors.Is(err, errFatal) {
		<-c.wrote // the reason is sent first; writes have a deadline
	}
	_ = c.uc.Close()
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	close(c.closed)
	c.unpinAll()
	c.s.sessionEnded(c, err)
}

var errFatal = errors.New("session refused")

func (c *session) serve() error {
	buf := make([]byte, msg.MaxPacketBytes+1)
	oob := make([]byte, unix.CmsgSpace(4*msg.MaxDescriptors))
	_ = c.uc.SetReadDeadline(time.Now().Add(helloTimeout))
	for {
		n, oobn, flags, _, err := c.uc.ReadMsgUnix(buf, oob)
		if err != nil {
			return err
		}
		fds, err := descriptors(oob[:oobn])
		if err == nil && flags&unix.MSG_CTRUNC != 0 {
			err = &msg.Error{Message: "packet", Problem: fmt.Sprintf("more than %d descriptors",
				msg.MaxDescriptors)}
		}
		if err == nil && (flags&unix.MSG_TRUNC != 0 || n > msg.MaxPacketBytes) {
			err = &msg.Error{Message: "packet", Problem: fmt.Sprintf("longer than %d bytes",
				msg.MaxPacketBytes)}
		}
		if err == nil {
			err = c.handle(buf[:n], fds)
		} else {
			err = c.refuse(err)
		}
		fds.close()
		if err != nil {
			return err
		}
	}
}

// refuse answers an unreadable packet, and ends a session that sends only such packets.
func (c *session) refuse(err error) error {
	c.s.hookMalformed("packet")
	c.bad++
	if c.bad == 1 {
		c.log.Warn("malformed packet", "err", err)
	}
	fatal := c.bad >= maxBadPackets
	c.sendError(errorMessage(0, msg.CodeProtocol, err, fatal))
	if fatal {
		return errFatal
	}
	return nil
}

func (c *session) handle(p []byte, fds descriptorSet) error {
	m, err := msg.DecodePacket(p)
	if err != nil {
		return c.refuse(err)
	}
	if c.hello == nil {
		h, ok := m.(*msg.Hello)
		if !ok {
			c.sendError(&msg.ErrorMessage{Code: msg.CodeState, Message: fmt.Sprintf("%s before HELLO",
				m.Type()), Remedy: "send HELLO first"})
			return nil
		}
		return c.onHello(h)
	}
	switch m := m.(type) {
	case *msg.Register:
		c.onRegister(m, fds)
	case *msg.Await:
		c.onAwait(m)
	case *msg.Decline:
		c.onDecline(m)
	case *msg.Bye:
		c.log.Info("the shim sent BYE", "reason", m.Reason)
		if c.worker != nil {
			c.worker.draining.Store(true)
		}
	case *msg.Hello:
		c.sendError(&msg.ErrorMessage{ID: m.ID, Code: msg.CodeState, Message: "HELLO was sent already",
			Remedy: "open another connection"})
	case *msg.Open:
		c.onOpen(m)
	case *msg.Close:
		c.onClose(m)
	case *msg.Exists:
		c.onExists(m)
	case *msg.Unpin:
		c.onUnpin(m)
	case *msg.Remove:
		c.onRemove(m)
	case *msg.AddRegions:
		c.onAddRegions(m, fds)
	case *msg.DropRegions:
		c.onDropRegions(m)
	case *msg.Segment:
		c.onSegment(m)
	case *msg.Revoke:
		c.onRevoke(m)
	case *msg.Locate:
		c.onLocate(m)
	case *msg.Notes:
		c.onNotes(m)
	default:
		c.sendError(&msg.ErrorMessage{Code: msg.CodeState,
			Message: fmt.Sprintf("only the sidecar sends %s", m.Type())})
	}
	return nil
}

func (c *session) onHello(h *msg.Hello) error {
	v, err := msg.Negotiate(h.Min, h.Max, h.Release, c.s.opt.Release)
	if err != nil {
		c.sendError(errorMessage(h.ID, msg.CodeVersion, err, true))
		return fmt.Errorf("%w: %w", errFatal, err)
	}
	if h.Boot == ([16]byte{}) {
		c.sendError(&msg.ErrorMessage{ID: h.ID, Code: msg.CodeProtocol, Message: "boot is all zero",
			Field: "boot", Remedy: "send 16 random bytes"})
		return nil
	}
	if c.s.draining.Load() {
		c.sendError(&msg.ErrorMessage{ID: h.ID, Code: msg.CodeDraining, Message: "the sidecar drains",
			Remedy: "connect again later", Fatal: true})
		return errFatal
	}
	if h.Role == msg.RoleScheduler {
		c.number = c.s.token.Add(1)
	}
	if h.Role == msg.RoleWorker {
		if err := c.s.takeOver(c, h.Boot); err != nil {
			c.sendError(errorMessage(h.ID, msg.CodeFencing, err, false))
			return nil
		}
	}
	_ = c.uc.SetReadDeadline(time.Time{})
	c.hello, c.version = h, v
	c.log = c.log.With("role", h.Role, "engine", h.Engine.Name, "engine_id", h.Engine.ID, "boot",
		transfer.Boot(h.Boot).String())
	c.refused.Logger = c.log
	c.s.hookSession(h.Role, 1)
	o := &c.s.opt
	c.send(&msg.Welcome{ID: h.ID, Version: v, Boot: o.Boot, Node: o.Node, Endpoint: o.Endpoint(),
		HostBoot: o.HostBoot, Features: o.Features,
		Fenced: h.Role == msg.RoleWorker, Limits: msg.Limits{Leases: uint64(o.Limits.Leases),
			Copies: uint64(o.Limits.Copies), Regions: uint64(o.Limits.Regions),
			RecordBytes: msg.MaxRecordBytes},
		DeadlineMS:     uint64(o.Deadline.Milliseconds()),
		MatchTimeoutMS: uint64(o.MatchTimeout.Milliseconds()),
		GraceMS:        uint64(o.Grace.Milliseconds()), Release: o.Release})
	c.log.Info("session", "version", v.String(), "release", h.Release,
		"pid", c.peer.PID, "uid", c.peer.UID)
	return nil
}

func (c *session) onAwait(m *msg.Await) {
	refuse := func(e *msg.ErrorMessage) {
		e.ID = m.ID
		c.sendError(e)
	}
	if c.hello.Role != msg.RoleScheduler {
		refuse(&msg.ErrorMessage{Code: msg.CodeState, Message: "AWAIT is for schedulers", Field: "role",
			Remedy: "send it on the scheduler's session"})
		return
	}
	if m.Peer == "" {
		refuse(&msg.ErrorMessage{Code: msg.CodeProtocol, Message: "peer is empty", Field: "peer",
			Remedy: "name the endpoint of the prefill's sidecar"})
		return
	}
	if c.s.draining.Load() {
		c.send(&msg.Admitted{ID: m.ID, State: "refused", Message: "the sidecar drains"})
		return
	}
	c.mu.Lock()
	full := c.awaits >= c.s.opt.Limits.Awaits
	if !full {
		c.awaits++
	}
	c.mu.Unlock()
	if full {
		refuse(&msg.ErrorMessage{Code: msg.CodeLimit, Message: fmt.Sprintf("%d AWAITs are unanswered",
			c.s.opt.Limits.Awaits), Field: "id",
			Remedy: "wait for answers, or send a shorter ttl_ms"})
		return
	}
	var once sync.Once
	id := m.ID
	a := &engines.Await{Token: c.s.token.Add(1), Session: c.number, Engine: placeOf(c.hello).Engine,
		Key: transfer.Key{Xfer: m.Xfer, Hash: m.Hash}, Peer: m.Peer, Tokens: m.Tokens,
		TTL: c.s.duration(m.TTLMS, c.s.opt.MatchTimeout),
		Reply: func(ad engines.Admission) {
			once.Do(func() {
				c.mu.Lock()
				c.awaits--
				c.mu.Unlock()
				c.send(&msg.Admitted{ID: id, State: ad.State, Tokens: ad.Tokens, Message: ad.Message})
			})
		}}
	c.s.opt.Events([]engines.Event{{Kind: engines.Asked, Await: a}})
}

func (c *session) onDecline(m *msg.Decline) {
	if c.hello.Role != msg.RoleScheduler {
		c.sendError(&msg.ErrorMessage{Code: msg.CodeState, Message: "DECLINE is for schedulers",
			Field: "role", Remedy: "a worker cancels its lease"})
		return
	}
	if m.Peer == "" {
		c.sendError(&msg.ErrorMessage{Code: msg.CodeProtocol, Message: "peer is empty", Field: "peer",
			Remedy: "name the endpoint of the prefill's sidecar"})
		return
	}
	at := placeOf(c.hello)
	if i := slices.IndexFunc(m.Ranks, func(r uint32) bool { return int(r) >= at.World() }); i >= 0 {
		c.sendError(&msg.ErrorMessage{Code: msg.CodeProtocol, Message: fmt.Sprintf(
			"ranks[%d] is %d, and the engine has %d ranks", i, m.Ranks[i], at.World()), Field: "ranks",
			Remedy: "send the engine's sizes in HELLO"})
		return
	}
	c.s.opt.Events([]engines.Event{{Kind: engines.Declined, Decline: &engines.Decline{
		Boot: c.hello.Boot, ID: m.ID, Engine: at.Engine, World: at.World(),
		Key: transfer.Key{Xfer: m.Xfer, Hash: m.Hash}, Peer: m.Peer, Reason: m.Reason,
		Req: m.Req, Ranks: m.Ranks}}})
}

// descriptorSet holds the descriptors of a packet. The code that takes one sets its entry to -1.
type descriptorSet []int

func (d descriptorSet) close() {
	for _, fd := range d {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

func descriptors(oob []byte) (descriptorSet, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("control message: %w", err)
	}
	var all descriptorSet
	for i := range msgs {
		if msgs[i].Header.Level != unix.SOL_SOCKET || msgs[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			all.close()
			return nil, fmt.Errorf("descriptors: %w", err)
		}
		all = append(all, fds...)
	}
	return all, nil
}

// sessionEnded is the last call of the reader.
func (s *Server) sessionEnded(c *session, err error) {
	if c.hello != nil {
		s.hookSession(c.hello.Role, -1)
	}
	s.mu.Lock()
	delete(s.sessions, c)
	if c.hello != nil && s.byBoot[c.hello.Boot] == c {
		delete(s.byBoot, c.hello.Boot)
	}
	s.mu.Unlock()
	reason := "end of file"
	if !errors.Is(err, io.EOF) {
		reason = err.Error()
	}
	if w := c.worker; w != nil {
		w.socketEnded(c, reason)
		return
	}
	if c.number > 0 {
		s.opt.Events([]engines.Event{{Kind: engines.SchedulerGone, Session: c.number}})
	}
	c.unstage()
	c.peer.Close()
	c.log.Info("session ended", "reason", reason)
}

// socketEnded keeps the leases: only a proved exit or a takeover ends them.
func (w *worker) socketEnded(c *session, reason string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.session == c {
		w.session = nil
	}
	if w.closed {
		return
	}
	w.log.Info("socket ended; leases stay until the exit is proved or a new session takes over",
		"reason", reason, "leases", len(w.leases))
	w.detached = time.AfterFunc(detachedWarn, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.closed {
			w.log.Warn("the engine worker runs without a session; its leases and memory stay", "leases",
				len(w.leases),
				"remedy", "restart the engine if it does not come back")
		}
	})
}
