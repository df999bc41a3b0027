package proxy

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Codes of the router's own refusals; the status gives the kind. They are as stable as the API's
// codes; clients may compare them.
const (
	codeUnknownURL    = "unknown_url"
	codeMethod        = "method_not_supported"
	codeInvalidBody   = "invalid_body"
	codeBodyTooLarge  = "body_too_large"
	codeBodyTimeout   = "body_timeout"
	codeTooMany       = "too_many_requests_in_flight"
	codeNoEngine      = "no_decode_engine"
	codeEngineFailed  = "decode_engine_failed"
	codeInvalidTarget = "invalid_url"
	codeUnknownModel  = "model_not_found"
)

// refuse answers in the form of the OpenAI API, whose clients read all four fields. An engine's
// refusal is passed on unchanged.
func (p *Proxy) refuse(w http.ResponseWriter, status int, code, message string) {
	type failure struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"` // engines check the other fields
		Code    string  `json:"code"`
	}
	kind := "invalid_request_error"
	if status >= http.StatusInternalServerError {
		kind = "server_error"
	}
	f := failure{Message: message, Type: kind, Code: code}
	if code == codeUnknownModel {
		f.Param = new("model")
	}
	body := marshal(map[string]failure{"error": f})
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may be gone
	// A test's recorder cannot flush. What the handler does afterwards delays no client.
	_ = http.NewResponseController(w).Flush()
}

// orRefuse serves the routes, and refuses other paths in the API's form; mux itself would use plain
// text.
func (p *Proxy) orRefuse(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 {
			// net/http waits for what a handler leaves of a body. readBody sets another deadline.
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyIdle))
		}
		h, route := mux.Handler(r)
		if route != "" {
			mux.ServeHTTP(w, r)
			return
		}
		// Only mux's own answer shows which methods a path has.
		answer := unwritten{http.Header{}}
		h.ServeHTTP(answer, r)
		if allow := answer.header.Get("Allow"); allow != "" {
			w.Header().Set("Allow", allow)
			p.refuse(w, http.StatusMethodNotAllowed, codeMethod,
				fmt.Sprintf("%s is not allowed at %s: use %s", r.Method, r.URL.Path, allow))
			return
		}
		p.refuse(w, http.StatusNotFound, codeUnknownURL, fmt.Sprintf("no such URL: %s %s: this router "+
			"serves %s", r.Method, r.URL.Path,
			strings.Join(served, ", ")))
	})
}

// unwritten keeps the header of an answer and discards the rest.
type unwritten struct{ header http.Header }

func (u unwritten) Header() http.Header         { return u.header }
func (u unwritten) Write(b []byte) (int, error) { return len(b), nil }
func (u unwritten) WriteHeader(int)             {}
