package web

import (
	"net"
	"net/http"
	"slices"

	"github.com/kvspray/kvspray/internal/httpgate"
)

// Admin makes the server of the admin socket: requests that change the node, take its time, or name
// its pages. The kernel reports the user of a caller. On a port, a proxy of this host could forward
// such requests of others.
func (w *Server) Admin() *httpgate.Server {
	return httpgate.New(httpgate.Options{Handler: w.permitted(w.admin()), ReplyTimeout: replyTimeout,
		Failed: w.failed, Trusted: w.mayChange})
}

// mayChange reports whether the user at the other end may change the node.
func (w *Server) mayChange(c net.Conn) bool {
	uid, err := httpgate.UID(c)
	return err == nil && (uid == 0 || uid == w.self || slices.Contains(w.o.AdminUIDs, uid))
}

func (w *Server) permitted(serve http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if !httpgate.Trusted(r) {
			reply(rw, http.StatusForbidden, "this user may not change the sidecar: run kvspray as root or "+
				"as the sidecar's user, or name the user in engine.admin_uids\n")
			return
		}
		serve.ServeHTTP(rw, r)
	})
}

func (w *Server) admin() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/leave", w.leave(true))
	mux.HandleFunc("DELETE /v1/leave", w.leave(false))
	mux.HandleFunc("POST /v1/role", w.role)
	mux.HandleFunc("POST /v1/store/drain", w.ofStore(w.drain))
	mux.HandleFunc("POST /v1/store/remove", w.ofStore(w.remove))
	mux.HandleFunc("GET /v1/store/keys", w.ofStore(w.keys))
	mux.HandleFunc("GET /v1/store/verify", w.ofStore(w.verify))
	return mux
}

// role sets the role of an engine for routers, and answers with the node's description.
func (w *Server) role(rw http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if err := w.o.SetRole(q.Get("engine"), q.Get("role")); err != nil {
		reply(rw, http.StatusConflict, err.Error()+"\n")
		return
	}
	replyJSON(rw, w.describe())
}

// leave sets whether routers choose other engines, and answers with the node's description.
func (w *Server) leave(on bool) http.HandlerFunc {
	return func(rw http.ResponseWriter, _ *http.Request) {
		w.o.Life.Leave(on)
		replyJSON(rw, w.describe())
	}
}
