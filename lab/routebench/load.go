package routebench

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

const answerTimeout = time.Minute

// load is what clients do in one phase.
type load struct {
	clients, each int // each makes as many requests, one after the other
	tokens        int
	spread        time.Duration // over which the clients begin
	prompt        int           // bytes
}

// outcome is what the clients of a phase have measured.
type outcome struct {
	first  []time.Duration // until the first token, sorted
	failed int
	err    error // one of the failures
}

func (o *outcome) at(share float64) time.Duration {
	if len(o.first) == 0 {
		return 0
	}
	return o.first[min(int(share*float64(len(o.first))), len(o.first)-1)]
}

// run makes the requests. turn gives each client one of the addresses.
func (l load) run(addresses []string) *outcome {
	body := fmt.Sprintf(`{"model":"%s","max_tokens":%d,"stream":true,"temperature":0,"prompt":"%s"}`,
		modelName, l.tokens, strings.Repeat("word ", l.prompt/5))
	var mu sync.Mutex
	all := &outcome{}
	var wg sync.WaitGroup
	began := time.Now()
	for i := range l.clients {
		wg.Go(func() {
			time.Sleep(time.Until(began.Add(l.spread * time.Duration(i) / time.Duration(l.clients))))
			first, err := l.client(addresses[i%len(addresses)], body)
			mu.Lock()
			defer mu.Unlock()
			all.first = append(all.first, first...)
			if all.failed += l.each - len(first); err != nil {
				all.err = err
			}
		})
	}
	wg.Wait()
	slices.Sort(all.first)
	return all
}

// client makes the requests of one client on one connection.
func (l load) client(address, body string) (first []time.Duration, err error) {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }() // all was read
	request := fmt.Appendf(nil, "POST /v1/completions HTTP/1.1\r\nHost: %s\r\n"+
		"User-Agent: kvspray-bench\r\nAccept: */*\r\nContent-Type: application/json\r\n"+
		"Content-Length: %d\r\n\r\n%s", address, len(body), body)
	buf := make([]byte, 4<<10)
	for range l.each {
		began := time.Now()
		if err := c.SetDeadline(began.Add(answerTimeout)); err != nil {
			return first, err
		}
		if _, err := c.Write(request); err != nil {
			return first, err
		}
		took, err := l.answer(c, buf, began)
		if err != nil {
			return first, err
		}
		first = append(first, took)
	}
	return first, nil
}

var errAnswer = errors.New("an answer is no whole stream")

// answer reads one stream to its end.
func (l load) answer(c net.Conn, buf []byte, began time.Time) (first time.Duration, err error) {
	tokens, tail := 0, ""
	for {
		n, err := c.Read(buf)
		if err != nil {
			return 0, err
		}
		if marks := bytes.Count(buf[:n], []byte{mark}); marks > 0 {
			if tokens == 0 {
				first = time.Since(began)
			}
			tokens += marks
		}
		if tail += string(buf[max(0, n-5):n]); strings.HasSuffix(tail, "0\r\n\r\n") {
			if tokens != l.tokens {
				return 0, fmt.Errorf("%w: %d of %d tokens: %q", errAnswer, tokens, l.tokens, buf[:n])
			}
			return first, nil
		}
		tail = tail[max(0, len(tail)-5):]
		if tokens == 0 && n > 12 && !bytes.HasPrefix(buf[:n], []byte("HTTP/1.1 200")) {
			return 0, fmt.Errorf("%w: %q", errAnswer, buf[:n])
		}
	}
}
