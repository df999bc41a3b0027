package proxy

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/internal/config"
)

const firstBody = 4 << 10 // bytes that a body gets at once; then four times as many

// held is how many times a request holds its body at most: while its fields are read, both, and
// then the fields with the bodies for P and for D. A body without fields goes on as it is, but has
// two places while it grows.
func (k kind) held() int64 {
	if k == kindPassed {
		return 2
	}
	return config.MaxBodyCopies
}

// budget bounds the bytes of all bodies, as often as they are held.
type budget struct {
	free atomic.Int64
}

func (b *budget) take(n int64) bool {
	for {
		free := b.free.Load()
		if free < n {
			return false
		}
		if b.free.CompareAndSwap(free, free-n) {
			return true
		}
	}
}

func (b *budget) give(n int64) { b.free.Add(n) }

// enter takes a place among the requests in flight, or refuses; leave releases it. A request enters
// once its body is there: clients that send none take no place.
func (p *Proxy) enter(w http.ResponseWriter) bool {
	select {
	case p.slots <- struct{}{}:
		p.met.inFlight.Inc()
		return true
	default:
		p.refuseTooMany(w, "too many requests in flight; try again")
		return false
	}
}

func (p *Proxy) leave() {
	p.met.inFlight.Dec()
	<-p.slots
}

// full takes all places, once the requests in flight have ended. Later ones are refused.
func (p *Proxy) full() {
	for range cap(p.slots) {
		p.slots <- struct{}{}
	}
}

func (p *Proxy) refuseTooMany(w http.ResponseWriter, message string) {
	w.Header().Set("Retry-After", "1")
	p.refuse(w, http.StatusServiceUnavailable, codeTooMany, message)
}

// readBody reads a client's body. It has taken cap(body) bytes of the budget for each time that the
// body is held, also if it refuses.
func (p *Proxy) readBody(w http.ResponseWriter, r *http.Request, k kind) (body []byte, ok bool) {
	if r.ContentLength == 0 {
		return nil, true
	}
	in := http.MaxBytesReader(w, r.Body, p.limit)
	control := http.NewResponseController(w)
	bound := p.limit
	if r.ContentLength > 0 {
		bound = min(bound, r.ContentLength)
	}
	end := time.Now().Add(bodyTimeout)
	for {
		if len(body) == cap(body) {
			size := min(max(firstBody, 4*cap(body)), int(bound)+1) // and its end
			size = max(size, cap(body)+1)
			if !p.bodies.take(k.held() * int64(size-cap(body))) {
				p.refuseTooMany(w, "too many bytes of request bodies in flight; try again")
				return body, false
			}
			body = append(make([]byte, 0, size), body...)[:len(body):size]
		}
		// A test's recorder has no deadline to set; a real connection always has.
		_ = control.SetReadDeadline(earlier(end, time.Now().Add(bodyIdle)))
		n, err := in.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch {
		case errors.Is(err, io.EOF):
			_ = control.SetReadDeadline(time.Time{})
			return body, true
		case err != nil:
			p.refuseBody(w, err)
			return body, false
		}
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func (p *Proxy) refuseBody(w http.ResponseWriter, err error) {
	tooLarge := (*http.MaxBytesError)(nil)
	switch {
	case errors.As(err, &tooLarge):
		p.refuse(w, http.StatusRequestEntityTooLarge, codeBodyTooLarge,
			fmt.Sprintf("the body is larger than %d bytes, the router's max_body", p.limit))
	case errors.Is(err, os.ErrDeadlineExceeded):
		p.refuse(w, http.StatusRequestTimeout, codeBodyTimeout, fmt.Sprintf("the body did not come "+
			"within %s, or nothing of it for %s", bodyTimeout, bodyIdle))
	default:
		p.refuse(w, http.StatusBadRequest, codeInvalidBody, "the body could not be read")
	}
}
