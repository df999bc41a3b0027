package web

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/kvspray/kvspray/internal/nodeapi"
)

// StoreCalls are what an operator asks of a running store.
type StoreCalls interface {
	Drain(ctx context.Context) error
	Keys(namespace [32]byte, tier string, first uint32, limit int) (*nodeapi.StoreKeys, error)
	Verify(ctx context.Context, namespace, key [32]byte) (*nodeapi.StoreVerified, error)
	RemoveNamespace(ctx context.Context, namespace [32]byte, unknown bool) (*nodeapi.StoreRemoved,
		error)
}

// Bounds of these calls.
const (
	drainTimeout  = 20 * time.Second // of one request; the caller repeats it
	verifyTimeout = 20 * time.Second
	removeTimeout = 20 * time.Second
	maxListed     = 1000 // keys
)

const noStore = "this node has no store: set store.memory\n"

// ofStore serves a request that needs a store.
func (w *Server) ofStore(serve func(http.ResponseWriter, *http.Request,
	StoreCalls)) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		calls := w.o.StoreCalls()
		if calls == nil {
			reply(rw, http.StatusNotFound, noStore)
			return
		}
		serve(rw, r, calls)
	}
}

// durable reports whether this node has a tier that survives its sidecar.
func durable(tiers []nodeapi.StoreTier) bool {
	return slices.ContainsFunc(tiers, func(t nodeapi.StoreTier) bool {
		return t.Name == "disk" || t.Name == "object"
	})
}

func (w *Server) drain(rw http.ResponseWriter, r *http.Request, c StoreCalls) {
	ctx, cancel := context.WithTimeout(r.Context(), drainTimeout)
	defer cancel()
	err := c.Drain(ctx)
	switch {
	case err == nil:
		replyJSON(rw, nodeapi.StoreDrained{Drained: true, Durable: durable(w.o.Store().Tiers)})
	case errors.Is(err, context.DeadlineExceeded):
		replyJSON(rw, nodeapi.StoreDrained{Problem: err.Error()})
	default:
		reply(rw, http.StatusInternalServerError, err.Error()+"\n")
	}
}

func (w *Server) keys(rw http.ResponseWriter, r *http.Request, c StoreCalls) {
	q := r.URL.Query()
	id, ok := hash32(q.Get("namespace"))
	first, err := strconv.ParseUint(q.Get("first"), 10, 32)
	limit, err2 := strconv.Atoi(q.Get("limit"))
	if !ok || err != nil || err2 != nil || limit < 1 || limit > maxListed {
		reply(rw, http.StatusBadRequest, "want namespace (64 hexadecimal digits), first (a number, 0 at "+
			"the beginning) and limit (1 to "+strconv.Itoa(maxListed)+")\n")
		return
	}
	out, err := c.Keys(id, q.Get("tier"), uint32(first), limit)
	answer(rw, out, err)
}

func (w *Server) verify(rw http.ResponseWriter, r *http.Request, c StoreCalls) {
	id, ok := hash32(r.URL.Query().Get("namespace"))
	key, ok2 := hash32(r.URL.Query().Get("key"))
	if !ok || !ok2 {
		reply(rw, http.StatusBadRequest, "want namespace and key, of 64 hexadecimal digits each\n")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), verifyTimeout)
	defer cancel()
	out, err := c.Verify(ctx, id, key)
	answer(rw, out, err)
}

func (w *Server) remove(rw http.ResponseWriter, r *http.Request, c StoreCalls) {
	q := r.URL.Query()
	id, ok := hash32(q.Get("namespace"))
	unknown, err := strconv.ParseBool(cmp.Or(q.Get("unknown"), "false"))
	if !ok || err != nil {
		reply(rw, http.StatusBadRequest, "want namespace (64 hexadecimal digits, as 'kvspray store ls' "+
			"prints them) and perhaps unknown (true or false)\n")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), removeTimeout)
	defer cancel()
	out, err := c.RemoveNamespace(ctx, id, unknown)
	answer(rw, out, err)
}

func answer(rw http.ResponseWriter, v any, err error) {
	if err != nil {
		reply(rw, http.StatusConflict, err.Error()+"\n")
		return
	}
	replyJSON(rw, v)
}

func hash32(s string) (out [32]byte, ok bool) {
	b, err := hex.DecodeString(s)
	return [32]byte(append(b, make([]byte, 32)...)), err == nil && len(b) == 32
}
