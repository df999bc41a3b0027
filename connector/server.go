package connector

import "context"

// Server is the engine side of one sidecar.
type Server struct{ opt Options }

// New checks the options. It touches neither disk nor network.
func New(opt Options) (*Server, error) { return &Server{opt: opt}, nil }

// Listen makes the socket: the folder 0700, the socket 0600. A dead sidecar's socket is replaced, a live one's is refused.
// Serve calls it when the caller has not.
func (s *Server) Listen() error { return nil }

// Serve accepts sessions until ctx ends or Close. It returns after every goroutine of the server has ended.
func (s *Server) Serve(ctx context.Context) error { <-ctx.Done(); return nil }

// Complete ends a lease towards the shim. It never blocks; when the completion ring is full the completion waits in order,
// bounded by the worker's leases. Completing a lease that is not open is an error and has no effect.
func (s *Server) Complete(w *Worker, c Completion) error { return nil }

// Workers returns the registered workers.
func (s *Server) Workers() []*Worker { return nil }

// Leases returns how many leases all workers have open.
func (s *Server) Leases() int { return 0 }

// Drain says BYE to every session and refuses new leases (KVS_REFUSED) and sessions. It returns once no lease is open, or
// with ctx's error.
func (s *Server) Drain(ctx context.Context) error { return nil }

// Publish tells every session the cumulative stats, at most once a second each; the latest wins.
func (s *Server) Publish(st Stats) {}

// Close ends every session and returns after every goroutine has ended. Leases that are open are not completed: the
// process is about to exit, and its exit is what proves them over. Idempotent.
func (s *Server) Close() error { return nil }
