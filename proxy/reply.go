package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	copyBytes = 4 << 10  // at once
	maxHeld   = 32 << 10 // bytes of a small answer, which the client gets once it is whole
	maxCopied = 16 << 20 // bytes of an answer that is read whole before the client gets it
)

// reply is an engine's answer from its first bytes on.
type reply struct {
	b    *backend
	resp *http.Response
	buf  []byte // its start
	err  error  // of the last read; io.EOF: buf is all of it

	guard *guard // of the request; nil: it has ended

	events bool      // server-sent events
	end    streamEnd // of events
}

// buffers are of answers that end.
var buffers = sync.Pool{New: func() any { return new([copyBytes]byte) }}

// begin reads the part of an answer that must be there before the client gets any: the first bytes
// of a stream, otherwise all of a small answer, so that one that breaks can be replaced. asked: the
// client wants a stream. whole: all of another answer, because its end cannot be shown to the
// client otherwise.
func begin(b *backend, k kind, resp *http.Response, asked, whole bool) (*reply, error) {
	a := &reply{b: b, resp: resp}
	media, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	ok := resp.StatusCode == http.StatusOK
	a.events = ok && media == "text/event-stream"
	if a.events && resp.Header.Get("Content-Encoding") == "" {
		a.end.marks = k.endMarks()
	}
	a.buf = buffers.Get().(*[copyBytes]byte)[:0]
	// Only its content shows the end of an answer that the end of its connection ends.
	unmarked := resp.ContentLength < 0 && len(resp.TransferEncoding) == 0 && resp.ProtoMajor == 1 &&
		resp.Request.Method != http.MethodHead
	stream := a.events || ok && asked && !unmarked
	limit := maxHeld
	if !stream && (whole || unmarked) {
		limit = maxCopied
	}
	for a.err == nil && len(a.buf) < limit && !(stream && len(a.buf) > 0) {
		if len(a.buf) == cap(a.buf) {
			a.buf = append(make([]byte, 0, 2*cap(a.buf)), a.buf...)
		}
		var n int
		n, a.err = a.read(a.buf[len(a.buf):cap(a.buf)])
		a.buf = a.buf[:len(a.buf)+n]
	}
	atEnd := errors.Is(a.err, io.EOF)
	switch {
	case a.err != nil && !atEnd && (len(a.buf) == 0 || !stream):
		return nil, ended(a.err)
	case ok && atEnd && len(a.buf) == 0 && resp.Request.Method != http.MethodHead:
		return nil, errEmpty
	case unmarked && !stream && ok && !(atEnd && json.Valid(a.buf)):
		return nil, fmt.Errorf("its end looks like a broken connection: %w", io.ErrUnexpectedEOF)
	case whole && !stream && !atEnd:
		return nil, fmt.Errorf("an answer for an HTTP/1.0 client is larger than %d bytes", maxCopied)
	}
	return a, nil
}

func (a *reply) read(buf []byte) (int, error) {
	n, err := a.resp.Body.Read(buf)
	if n > 0 {
		a.b.alive(time.Now())
		a.end.add(buf[:n])
	}
	return n, err
}

func (a *reply) close() {
	_ = a.resp.Body.Close() // its end or its error was read
	a.guard.stop()
	if cap(a.buf) == copyBytes {
		buffers.Put((*[copyBytes]byte)(a.buf[:copyBytes]))
		a.buf = nil
	}
}

// header is that of the answer to the client.
func (a *reply) header(dst http.Header) {
	copyHeader(dst, a.resp.Header)
	switch {
	case a.events:
		dst.Del("Content-Length") // all its bytes may be there, and the end of the stream may not
	case errors.Is(a.err, io.EOF) && a.resp.Request.Method != http.MethodHead:
		dst.Set("Content-Length", fmt.Sprint(len(a.buf)))
	}
}

// sink writes parts of an answer to a client.
type sink struct {
	w     http.ResponseWriter
	flush *http.ResponseController
	timed time.Time // when the deadline was set
}

func newSink(w http.ResponseWriter) *sink {
	return &sink{w: w, flush: http.NewResponseController(w)}
}

func (s *sink) send(data []byte) error {
	if len(data) == 0 {
		return nil
	}
	if now := time.Now(); now.Sub(s.timed) > writeTimeout/4 {
		_ = s.flush.SetWriteDeadline(now.Add(writeTimeout)) // a test's recorder has none
		s.timed = now
	}
	if _, err := s.w.Write(data); err != nil {
		return err
	}
	_ = s.flush.Flush() // an error shows at the next write
	return nil
}

// copyTo copies the answer as it arrives, through a function. gone: the client has disconnected.
func (a *reply) copyTo(w http.ResponseWriter, through func([]byte) ([]byte, error)) (gone bool,
	err error) {
	out := newSink(w)
	data, rerr := a.buf, a.err
	buf := a.buf[:cap(a.buf)]
	for {
		part, err := through(data)
		if err := out.send(part); err != nil {
			return true, err
		}
		if err != nil {
			return false, err
		}
		if rerr != nil {
			break
		}
		var n int
		n, rerr = a.read(buf)
		data = buf[:n]
	}
	switch {
	case !errors.Is(rerr, io.EOF):
		return false, rerr
	case !a.end.reached():
		return false, errUnended
	}
	return false, nil
}

var errUnended = errors.New("the stream ended without its last event")

// streamEnd looks for the line with which an engine ends a stream. Its zero value wants none.
type streamEnd struct {
	marks []string
	line  []byte // the start of the current line, as long as the longest mark
	found bool
}

const maxMark = 32 // bytes

// endMarks are the lines of which one ends a stream.
func (k kind) endMarks() []string {
	switch k {
	case kindCompletion, kindChat:
		return []string{"data: [DONE]", "data:[DONE]"}
	case kindResponses:
		return []string{"event: response.completed", "event: response.incomplete",
			"event: response.failed", "event: error", "data: [DONE]"}
	case kindMessages:
		return []string{"event: message_stop", "event: error", "data: [DONE]"}
	}
	return nil
}

func (e *streamEnd) add(data []byte) {
	if len(e.marks) == 0 {
		return
	}
	for len(data) > 0 {
		i := bytes.IndexByte(data, '\n')
		part := data
		if i >= 0 {
			part = data[:i]
		}
		if room := maxMark - len(e.line); room > 0 {
			e.line = append(e.line, part[:min(len(part), room)]...)
		}
		if i < 0 {
			return
		}
		e.endLine()
		data = data[i+1:]
	}
}

func (e *streamEnd) endLine() {
	line := bytes.TrimRight(e.line, "\r ")
	for _, m := range e.marks {
		if string(line) == m {
			e.found = true
		}
	}
	e.line = e.line[:0]
}

// reached reports whether a stream that ends now is whole.
func (e *streamEnd) reached() bool {
	e.endLine()
	return e.found || len(e.marks) == 0
}

// abort ends the connection of a client whose answer has begun and will not be whole. The end of a
// connection is the normal end of an answer in HTTP/1.0: a reset is none.
func abort(w http.ResponseWriter, r *http.Request) {
	if !r.ProtoAtLeast(1, 1) {
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			if l, ok := conn.(*limitedConn); ok {
				conn = l.Conn
				defer func() { _ = l.Close() }() // releases its place
			}
			if tcp, ok := conn.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0) // Close then resets the connection
			}
			_ = conn.Close() // nothing is left to send
			return
		}
	}
	panic(http.ErrAbortHandler)
}
