package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	kvtest "github.com/kvspray/kvspray/internal/testutil"
)

// pipeListener accepts one connection.
type pipeListener struct{ conns chan net.Conn }

func (l *pipeListener) Accept() (net.Conn, error) {
	if c, ok := <-l.conns; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (l *pipeListener) Close() error   { return nil }
func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{} }

// A body whose parts stop, or come for too long, is refused in time. Its bytes are given back.
func TestSlowBodiesAreRefused(t *testing.T) {
	for _, c := range []struct {
		name  string
		every time.Duration // between two parts
		parts int
		after time.Duration // of the last part
	}{
		{"no part", 0, 0, bodyIdle},
		{"parts that stop", bodyIdle - time.Second, 3, bodyIdle},
		{"parts for too long", bodyIdle - time.Second, 6, bodyTimeout - 6*(bodyIdle-time.Second)},
	} {
		t.Run(c.name, func(t *testing.T) {
			kvtest.Bubble(t, func(t *testing.T) {
				px, err := New(Config{Decode: decoders("http://decode:8000")})
				if err != nil {
					t.Fatal(err)
				}
				l := &pipeListener{conns: make(chan net.Conn, 1)}
				server, client := net.Pipe()
				l.conns <- server
				srv := &http.Server{Handler: px.Handler()}
				served := make(chan error, 1)
				go func() { served <- srv.Serve(l) }()
				fmt.Fprint(client, "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"+
					"Content-Length: 100\r\n\r\n")
				for range c.parts {
					time.Sleep(c.every)
					fmt.Fprint(client, "{")
				}
				from := time.Now()
				resp, err := http.ReadResponse(bufio.NewReader(client), nil)
				if err != nil {
					t.Fatal(err)
				}
				if d := time.Since(from); d != c.after {
					t.Errorf("refused after %s, want %s", d, c.after)
				}
				text, err := io.ReadAll(resp.Body)
				if err != nil {
					t.Error(err)
				}
				refusal(t, c.name, resp.StatusCode, resp.Header, string(text), 408, codeBodyTimeout, "")
				_ = client.Close()
				close(l.conns)
				_ = srv.Close()
				<-served
				synctest.Wait()
				if n := px.bodies.free.Load(); n != defaultBodies {
					t.Errorf("%d bytes are not given back", defaultBodies-n)
				}
			})
		})
	}
}
