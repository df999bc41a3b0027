package connector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/internal/process"
	"github.com/kvspray/kvspray/connector/internal/watch"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/sys/sock"
	"github.com/kvspray/kvspray/parseblock"
)

// Server is the engine side of one sidecar.
//
// Goroutines, all joined by Close: the accept loop, the socket's, two per session (reader, writer),
// two per registered worker (ring, exit watch), and one watcher on its own thread. While idle, all
// others block in the netpoller or on a condition.
type Server struct {
	opt      Options
	log      *slog.Logger
	refused  admit.Log // connections
	watch    *watch.Watcher
	wg       sync.WaitGroup
	draining atomic.Bool
	token    atomic.Uint64
	uses     atomic.Uint64 // numbers requests about the store, in their order
	epochs   atomic.Uint32
	open     atomic.Int64  // leases of all workers
	drained  chan struct{} // one token whenever open reaches 0
	lock     *os.File      // of the socket; only prepare, and Close after it, use it

	mu       sync.Mutex     // protects all below; taken after a worker's locks, never before
	at       *sock.Listener // nil: not bound
	sessions map[*session]struct{}
	byBoot   map[[16]byte]*session // the newest worker session of each engine boot
	workers  map[[16]byte]*worker  // by engine boot; until fenced
	regions  map[[16]byte]*worker  // by region id; until fenced
	closed   bool
}

// refusalTimeout bounds reporting the reason to a refused connection.
const refusalTimeout = 50 * time.Millisecond

// New checks the options. It touches neither disk nor network.
func New(opt Options) (*Server, error) {
	switch {
	case opt.Socket == "":
		return nil, errors.New("connector: Options.Socket is empty: name the unix socket")
	case len(opt.Socket) >= len(unix.RawSockaddrUnix{}.Path):
		return nil, fmt.Errorf("connector: socket path of %d bytes, at most %d: use a shorter path: %s",
			len(opt.Socket),
			len(unix.RawSockaddrUnix{}.Path)-1, opt.Socket)
	case opt.Events == nil || opt.Copy == nil:
		return nil, errors.New("connector: Options.Events or Options.Copy is nil")
	case opt.Endpoint == nil:
		return nil, errors.New("connector: Options.Endpoint is nil")
	}
	opt.Limits = opt.Limits.withDefaults()
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.HostBoot == "" {
		opt.HostBoot = kernelBootID()
	}
	if opt.Layouts == nil {
		opt.Layouts = parseblock.Default()
	}
	if opt.SocketMode == 0 {
		opt.SocketMode = 0o600
	}
	if opt.Store != nil {
		opt.Features = append(slices.Clone(opt.Features), msg.FeatureStore)
	}
	if opt.Segments != nil {
		opt.Features = append(slices.Clone(opt.Features), msg.FeatureSegments)
	}
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&opt.Deadline, DefaultDeadline)
	def(&opt.MatchTimeout, DefaultMatchTimeout)
	def(&opt.Grace, DefaultGrace)
	// several answers before the shim gives up
	def(&opt.FenceWait, min(DefaultFenceWait, opt.Grace/4))
	log := opt.Log.With("part", "connector")
	return &Server{opt: opt, log: log, refused: admit.Log{Logger: log}, watch: watch.New(),
		drained:  make(chan struct{}, 1),
		sessions: map[*session]struct{}{}, byBoot: map[[16]byte]*session{},
		workers: map[[16]byte]*worker{},
		regions: map[[16]byte]*worker{}}, nil
}

// Serve accepts sessions until ctx ends or Close. It returns after every goroutine of the server
// has ended.
func (s *Server) Serve(ctx context.Context) error {
	if err := s.Listen(); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	log := admit.Log{Logger: s.log}
	failed := func(err error) { log.Note(slog.LevelWarn, "accept failed", "err", err) }
	for uc := range admit.Accepted(ctx.Done(), s.at.AcceptUnix, failed) {
		s.accept(uc)
	}
	err := s.Close()
	return errors.Join(err, ctx.Err())
}

func (s *Server) accept(uc *net.UnixConn) {
	p, err := process.Of(uc)
	if err == nil && !s.allowed(p.UID) {
		p.Close()
		err = fmt.Errorf("uid %d may not connect: run the engine as uid %d, or name the uid in the "+
			"sidecar's engine.allowed_uids", p.UID, os.Getuid())
	}
	if err != nil {
		s.hookMalformed("peer")
		s.refused.Note(slog.LevelWarn, "connection refused", "err", err)
		s.refuseConn(uc, &msg.ErrorMessage{Code: msg.CodePermission, Message: err.Error(), Fatal: true})
		return
	}
	c := &session{s: s, uc: uc, peer: p, outbox: make(chan []byte, maxOutbox),
		closed: make(chan struct{}), wrote: make(chan struct{}), log: s.log}
	c.refused.Logger = c.log
	s.mu.Lock()
	full := len(s.sessions) >= s.opt.Limits.Sessions
	ok := !s.closed && !full
	if ok {
		s.sessions[c] = struct{}{}
		s.wg.Add(2)
	}
	s.mu.Unlock()
	if !ok {
		p.Close()
		s.refused.Note(slog.LevelWarn, "connection refused", "sessions", s.opt.Limits.Sessions)
		s.refuseConn(uc, &msg.ErrorMessage{Code: msg.CodeLimit,
			Message: fmt.Sprintf("%d sessions are open", s.opt.Limits.Sessions),
			Remedy:  "close some, or raise the sidecar's limit", Fatal: true})
		return
	}
	go c.read()
	go c.write()
}

// refuseConn sends the reason, if it fits the socket's buffer, and closes.
func (s *Server) refuseConn(uc *net.UnixConn, e *msg.ErrorMessage) {
	if p, err := msg.EncodePacket(e); err == nil {
		_ = uc.SetWriteDeadline(time.Now().Add(refusalTimeout))
		_, _ = uc.Write(p)
	}
	_ = uc.Close()
}

func (s *Server) allowed(uid uint32) bool {
	if uid == uint32(os.Getuid()) {
		return true
	}
	for _, u := range s.opt.AllowUIDs {
		if u == uid {
			return true
		}
	}
	return false
}

// takeOver makes c the session of an engine boot. It first fences an older registered session.
func (s *Server) takeOver(c *session, boot [16]byte) error {
	s.mu.Lock()
	w := s.workers[boot]
	old := s.byBoot[boot]
	if w != nil && w.proc.PID != c.peer.PID && !w.proc.Exited() {
		s.mu.Unlock()
		return &msg.Refusal{Code: msg.CodePermission, Field: "boot", Err: fmt.Errorf("boot %x belongs "+
			"to the live process %d, this is %d", boot, w.proc.PID, c.peer.PID),
			Remedy: "make a fresh boot id in every process"}
	}
	s.byBoot[boot] = c
	s.mu.Unlock()
	if old != nil && old != c {
		old.sendError(&msg.ErrorMessage{Code: msg.CodeSuperseded, Message: "a newer session of the " +
			"same engine worker took over", Fatal: true})
	}
	if w == nil {
		return nil
	}
	s.retire(w, ErrSuperseded)
	t := time.NewTimer(s.opt.FenceWait)
	defer t.Stop()
	select {
	case <-w.done:
		return nil
	case <-t.C:
		s.mu.Lock()
		if s.byBoot[boot] == c {
			delete(s.byBoot, boot) // its end could not find it without a hello
		}
		s.mu.Unlock()
		// The answer proves that this process makes progress. By it the shim distinguishes a stuck
		// fence from a hanging process: it does not kill a sidecar that others use for a stuck
		// fence.
		s.opt.Events(nil)
		s.log.Warn("the older session is not fenced yet", "worker", w.pub.Name, "after", s.opt.FenceWait)
		return &msg.Refusal{Code: msg.CodeFencing, Field: "boot", Err: fmt.Errorf("leases of the older "+
			"session are not fenced after %s", s.opt.FenceWait),
			Remedy: "send HELLO again; if this lasts, restart the sidecar"}
	}
}

// retire reports to the control layer once that a worker is gone; its memory is released when
// everything is fenced.
func (s *Server) retire(w *worker, why error) {
	w.deliver.Lock()
	defer w.deliver.Unlock()
	if w.gone {
		return
	}
	w.gone = true
	w.mu.Lock()
	c := w.session
	w.session = nil
	open := len(w.leases)
	w.mu.Unlock()
	w.shut()
	if c != nil && errors.Is(why, ErrBoard) {
		c.sendError(&msg.ErrorMessage{Code: msg.CodeBoard, Message: why.Error(),
			Remedy: "open a new session with fresh rings", Fatal: true})
	}
	w.log.Info("worker gone", "why", why, "leases", open)
	var once sync.Once
	s.opt.Events([]engines.Event{{Kind: engines.WorkerGone, Worker: w.pub,
		Exited: !errors.Is(why, ErrSuperseded), Err: fmt.Errorf("engine worker gone: %w", why),
		Fenced: func() {
			once.Do(func() {
				s.forget(w)
				w.release()
			})
		}}})
}

func (s *Server) forget(w *worker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.workers[w.pub.Boot] == w {
		delete(s.workers, w.pub.Boot)
	}
	for id, owner := range s.regions {
		if owner == w {
			delete(s.regions, id)
		}
	}
}

// Complete ends a lease towards the shim. It never blocks. If the completion ring is full,
// completions wait in order, bounded by the worker's leases. Completing a lease that is not open is
// an error (ErrGone, ErrUnknownLease) without effect.
func (s *Server) Complete(w *engines.Worker, c engines.Completion) error {
	if w != nil {
		if state, ok := w.Session.(*worker); ok && state.s == s {
			return state.complete(c)
		}
	}
	return fmt.Errorf("complete %s: %w", c.Lease, ErrGone)
}

// Workers returns the registered workers, including those being fenced.
func (s *Server) Workers() []*engines.Worker {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*engines.Worker, 0, len(s.workers))
	for _, w := range s.workers {
		out = append(out, w.pub)
	}
	return out
}

// Leases counts the open leases of all workers.
func (s *Server) Leases() int { return int(s.open.Load()) }

// Drain sends BYE to every session and refuses new leases (KVS_REFUSED) and sessions. It returns
// once no lease is open, or with ctx's error.
func (s *Server) Drain(ctx context.Context) error {
	s.draining.Store(true)
	for _, c := range s.allSessions() {
		c.send(&msg.Bye{Reason: "the sidecar drains"})
	}
	for s.open.Load() > 0 {
		select {
		case <-s.drained:
		case <-ctx.Done():
			return fmt.Errorf("connector: drain: %d leases are open: %w", s.open.Load(), ctx.Err())
		}
	}
	return nil
}

func (s *Server) allSessions() []*session {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*session, 0, len(s.sessions))
	for c := range s.sessions {
		out = append(out, c)
	}
	return out
}

// Close ends every session and returns after every goroutine has ended. It does not complete open
// leases: it calls WorkerGone for each worker, whose memory is released when the control layer has
// fenced it. Idempotent.
func (s *Server) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	at := s.at
	workers := make([]*worker, 0, len(s.workers))
	for _, w := range s.workers {
		workers = append(workers, w)
	}
	s.mu.Unlock()
	if first {
		if at != nil {
			_ = at.Close()
			_ = s.lock.Close()
		}
		for _, c := range s.allSessions() {
			_ = c.uc.Close()
		}
		for _, w := range workers {
			s.retire(w, net.ErrClosed)
		}
		if at != nil {
			s.watch.Close()
		}
	}
	s.wg.Wait()
	return nil
}

// nextEpoch never returns 0, the value of a closed lease, even after the counter wraps.
func (s *Server) nextEpoch() uint32 {
	for {
		if e := s.epochs.Add(1); e != 0 {
			return e
		}
	}
}

// duration converts a requested time in milliseconds; a missing one takes the default, a too long
// one is shortened.
func (s *Server) duration(ms uint64, def time.Duration) time.Duration {
	if ms == 0 {
		return def
	}
	return time.Duration(min(ms, uint64(maxDeadline/time.Millisecond))) * time.Millisecond
}

func (s *Server) hookSession(role string, d int) {
	if f := s.opt.Hooks.Session; f != nil {
		f(role, d)
	}
}

func (s *Server) hookLeases(source bool, d int) {
	if s.open.Add(int64(d)) == 0 {
		select {
		case s.drained <- struct{}{}:
		default:
		}
	}
	if f := s.opt.Hooks.Leases; f != nil {
		f(source, d)
	}
}

func (s *Server) hookRecord(kind string) {
	if f := s.opt.Hooks.Record; f != nil {
		f(kind)
	}
}

func (s *Server) hookMalformed(kind string) {
	if f := s.opt.Hooks.Malformed; f != nil {
		f(kind)
	}
}

func (s *Server) hookIgnored(kind string) {
	if f := s.opt.Hooks.Ignored; f != nil {
		f(kind)
	}
}

// workerName is a worker's name in logs: engine, id, and the ranks that distinguish it.
func workerName(h *msg.Hello) string {
	name := h.Engine.Name + "/" + h.Engine.ID + "/tp" + strconv.Itoa(int(h.Ranks.TP.Rank))
	for _, r := range []struct {
		name string
		rank msg.Rank
	}{{"pp", h.Ranks.PP}, {"dp", h.Ranks.DP}, {"pcp", h.Ranks.PCP}, {"dcp", h.Ranks.DCP}} {
		if r.rank.Size > 1 {
			name += r.name + strconv.Itoa(int(r.rank.Rank))
		}
	}
	return name
}

func kernelBootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
