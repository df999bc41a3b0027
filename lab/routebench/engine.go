package routebench

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	mark      = '~' // in the text of each token, and nowhere else
	modelName = "model"
	models    = `{"object":"list","data":[{"id":"` + modelName + `","object":"model"}]}`
	prefilled = `{"id":"cmpl-0","object":"text_completion","model":"` + modelName + `","choices":[` +
		`{"index":0,"text":"x","finish_reason":"length"}],"kv_transfer_params":{` +
		`"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1,2,3],` +
		`"remote_engine_id":"p","remote_host":"127.0.0.1","remote_port":1}}`
	event = `data: {"id":"cmpl-0f6e4a4f7c5b4d1e9a3b2c1d0e9f8a7b","object":"text_completion",` +
		`"created":1767225600,"model":"` + modelName + `","choices":[{"index":0,"text":" ~",` +
		`"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}],"usage":null}` +
		"\n\n"
)

// engines serve HTTP as an inference engine does, with as little CPU as Go permits.
type engines struct {
	every time.Duration // between two tokens of a stream
	urls  []string
	wg    sync.WaitGroup
	lists []net.Listener
	first []byte // of each stream
	token []byte
}

func chunk(text string) []byte { return fmt.Appendf(nil, "%x\r\n%s\r\n", len(text), text) }

func startEngines(n int, every time.Duration) (*engines, error) {
	e := &engines{every: every, token: chunk(event)}
	e.first = append([]byte("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"+
		"Transfer-Encoding: chunked\r\n\r\n"), e.token...)
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			e.stop()
			return nil, err
		}
		e.lists = append(e.lists, l)
		e.urls = append(e.urls, "http://"+l.Addr().String())
		e.wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go e.serve(c)
			}
		})
	}
	return e, nil
}

func (e *engines) stop() {
	for _, l := range e.lists {
		_ = l.Close() // the run has ended
	}
	e.wg.Wait()
}

// serve answers the requests of a connection until its end.
func (e *engines) serve(c net.Conn) {
	defer func() { _ = c.Close() }()
	in := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		body := make([]byte, max(req.ContentLength, 0))
		for at := 0; at < len(body); {
			n, err := req.Body.Read(body[at:])
			if at += n; err != nil && at < len(body) {
				return
			}
		}
		text := ""
		switch {
		case strings.HasSuffix(req.URL.Path, "/models"):
			text = models
		case req.Method != http.MethodPost:
			text = `{"model_path":"` + modelName + `"}`
		case bytes.Contains(body, []byte(`"do_remote_decode":true`)):
			text = prefilled
		}
		if text != "" {
			if _, err := fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"+
				"Content-Length: %d\r\n\r\n%s", len(text), text); err != nil {
				return
			}
			continue
		}
		if err := e.stream(c, maxTokens(body)); err != nil {
			return
		}
	}
}

// maxTokens reads the field of a body.
func maxTokens(body []byte) int {
	_, rest, ok := bytes.Cut(body, []byte(`"max_tokens":`))
	if !ok {
		return 1
	}
	rest = bytes.TrimLeft(rest, " ")
	end := bytes.IndexAny(rest, ",} ")
	n, err := strconv.Atoi(string(rest[:max(end, 0)]))
	if err != nil {
		return 1
	}
	return n
}

func (e *engines) stream(c net.Conn, tokens int) error {
	next := time.Now()
	last := append(bytes.Clone(e.token), chunk("data: [DONE]\n\n")...)
	last = append(last, "0\r\n\r\n"...)
	if tokens == 1 {
		_, err := c.Write(append(bytes.Clone(e.first), last[len(e.token):]...))
		return err
	}
	if _, err := c.Write(e.first); err != nil {
		return err
	}
	for i := 2; i <= tokens; i++ {
		next = next.Add(e.every)
		time.Sleep(time.Until(next))
		text := e.token
		if i == tokens {
			text = last
		}
		if _, err := c.Write(text); err != nil {
			return err
		}
	}
	return nil
}
