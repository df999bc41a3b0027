package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"syscall"
	"time"
)

// sign is what the outcome of a request, or of a health check, shows about an engine.
type sign uint8

const (
	signNone    sign = iota // nothing: the router's own fault, the client is gone, or one answer only
	signAlive               // it answers: a result, or a client's own mistake
	signBusy                // it has no place for the request: 429, or 503 with a time
	signFailed              // it answers with an error of its own
	signLost                // the connection ended before a whole answer
	signLate                // no answer in time
	signRefused             // no process listens, or no way leads there
)

func (s sign) String() string {
	return [...]string{"none", "alive", "busy", "failed", "lost", "late", "refused"}[s]
}

const (
	defaultBusy  = time.Second      // of an engine that names no time
	maxBusy      = 30 * time.Second // whatever it names
	maxErrorType = 64               // bytes of an error's type
)

// Faults of the router's own process or host, which hold for each engine.
var ownFaults = []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS,
	syscall.EADDRNOTAVAIL, context.Canceled}

var (
	errEmpty  = errors.New("status 200 with an empty body")
	errLate   = errors.New("no first byte in time")
	errSilent = errors.New("it shows no sign of life")
	// errUnaccepted ends a request that has not reached its engine.
	errUnaccepted = fmt.Errorf("no connection within %s", acceptTime)
)

// signOfError classifies an error of a request that got no answer.
func signOfError(err error) sign {
	for _, own := range ownFaults {
		if errors.Is(err, own) {
			return signNone
		}
	}
	dns, op, late := (*net.DNSError)(nil), (*net.OpError)(nil), interface{ Timeout() bool }(nil)
	status := (*statusError)(nil)
	switch {
	case errors.As(err, &status):
		return status.sign
	case errors.As(err, &dns) && !dns.IsNotFound:
		return signNone // the resolver failed: this does not show that the name does not exist
	case errors.As(err, &dns):
		return signRefused
	case errors.Is(err, errEmpty):
		return signFailed
	case errors.Is(err, errEngineFault):
		return signNone // of one answer: an engine that is about to end fails its health checks
	case errors.Is(err, errLate), errors.Is(err, errSilent), errors.Is(err, errUnaccepted),
		errors.As(err, &late) && late.Timeout():
		return signLate // also of a connection: a burst of them fills the engine's backlog
	case errors.As(err, &op) && op.Op == "dial":
		return signRefused
	}
	return signLost
}

// signOfStatus classifies an answer. after is how long a busy engine wants no request.
func signOfStatus(status int, h http.Header) (s sign, after time.Duration) {
	given := h.Get("Retry-After")
	switch {
	case status == http.StatusTooManyRequests, status == http.StatusServiceUnavailable && given != "":
		after = defaultBusy
		if n, err := strconv.ParseUint(given, 10, 31); err == nil {
			after = time.Duration(n) * time.Second
		}
		return signBusy, min(max(after, defaultBusy), maxBusy)
	case status == http.StatusNotImplemented: // of the client's request
		return signAlive, 0
	case status >= http.StatusInternalServerError, status == http.StatusRequestTimeout:
		return signFailed, 0
	}
	return signAlive, 0
}

// statusError is an answer of an engine that is no result. All clients can get its text, so it has
// no message of the engine, which may contain parts of a prompt.
type statusError struct {
	status int
	sign   sign
	after  time.Duration
	kind   string // of the error in the API's form; empty: none
}

func (e *statusError) Error() string {
	text := fmt.Sprintf("%d %s", e.status, http.StatusText(e.status))
	if e.kind != "" {
		text += ": " + e.kind
	}
	return text
}

func newStatusError(resp *http.Response, body []byte) *statusError {
	s, after := signOfStatus(resp.StatusCode, resp.Header)
	if s == signAlive && resp.StatusCode < http.StatusBadRequest {
		s = signFailed // a redirection, for instance
	}
	return &statusError{resp.StatusCode, s, after, typeOfError(body)}
}

// typeOfError is a name such as BadRequestError. Anything else is none.
func typeOfError(body []byte) string {
	var a struct {
		Error struct {
			Type string `json:"type"`
		} `json:"error"`
	}
	_ = json.Unmarshal(body, &a) // another form has none
	for _, c := range a.Error.Type {
		if c != '_' && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') {
			return ""
		}
	}
	if len(a.Error.Type) > maxErrorType {
		return ""
	}
	return a.Error.Type
}

// refused reports whether an engine rejected the client's request as wrong.
func refused(err error) bool {
	e := (*statusError)(nil)
	return errors.As(err, &e) && e.sign == signAlive
}

// notReached reports whether no connection was made, so that the engine cannot have received the
// request.
func notReached(err error) bool {
	op := (*net.OpError)(nil)
	return errors.As(err, &op) && op.Op == "dial" || errors.Is(err, errUnaccepted)
}

// ended replaces io.EOF, which Go's client returns for a connection that closes before an answer,
// by io.ErrUnexpectedEOF.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
