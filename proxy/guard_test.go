package proxy

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	kvtest "github.com/kvspray/kvspray/internal/testutil"
)

// silentBackend is an engine that has not answered its check from now on.
func silentBackend(t Times) *backend {
	b := &backend{health: health{slowAfter: t.Slow, silentAfter: t.Silent}}
	b.health.asks(time.Now())
	return b
}

// An answer that begins while the guard decides to replace its engine goes to the client: the guard
// ends it only once the engine is down.
func TestGuardLeavesABegunAnswer(t *testing.T) {
	for _, late := range []bool{false, true} {
		kvtest.Bubble(t, func(t *testing.T) {
			p := &Proxy{times: Times{}.orDefaults()}
			guards := make(chan *guard, 1)
			began := make(chan bool, 1)
			bound := p.times.FirstByte
			if late {
				bound = p.times.Silent + 2*p.times.Check
			}
			b := silentBackend(p.times)
			go p.every(t.Context(), b.checkGuards)
			g := newGuard(t.Context(), b, bound, func() bool {
				began <- (<-guards).begin() // its first bytes come now
				return true
			})
			defer g.stop()
			guards <- g
			time.Sleep(2 * p.times.Silent)
			if ok := <-began; !ok || g.ctx.Err() != nil {
				t.Errorf("the answer has begun: %v, and is ended: %v", ok, context.Cause(g.ctx))
			}
			time.Sleep(deadFactor * p.times.Silent)
			if c := context.Cause(g.ctx); !errors.Is(c, errSilent) {
				t.Errorf("the engine is down, and the answer is ended: %v", c)
			}
		})
	}
}

// Watch may look at a guard while its request goes on to other engines: what it looks at must not
// change meanwhile.
func TestGuardLooksWhileItsRequestGoesOn(t *testing.T) {
	e := newEngine(t, nil)
	p, err := New(Config{Decode: decoders(e.URL, "http://127.0.0.1:1")})
	if err != nil {
		t.Fatal(err)
	}
	b, next := p.decode.list()[0], p.decode.list()[1]
	var g *guard
	e.answer = func(w http.ResponseWriter, _ *http.Request, _ seen) {
		b.mu.Lock()
		defer b.mu.Unlock()
		for g = range b.guards {
			w.WriteHeader(http.StatusInternalServerError)
		}
	}
	j := &job{p: p, req: &request{kind: kindCompletion, raw: []byte("{}")},
		in:    httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", http.NoBody),
		tried: map[*backend]bool{b: true}}
	if _, err := j.askDecode(t.Context(), b, nil); err == nil || g == nil {
		t.Fatalf("%v, guard %v", err, g)
	}
	j.tried[next] = true
	if !g.other() {
		t.Error("an old guard follows the request's further tries")
	}
}

// An answer that begins after the guard has decided does not go to the client: another engine has
// the request.
func TestGuardDecidesOnce(t *testing.T) {
	kvtest.Bubble(t, func(t *testing.T) {
		p := &Proxy{times: Times{}.orDefaults()}
		g := newGuard(t.Context(), silentBackend(p.times), time.Second, func() bool { return false })
		defer g.stop()
		<-g.ctx.Done()
		if g.begin() || !errors.Is(context.Cause(g.ctx), errLate) {
			t.Errorf("the answer begins after %v", context.Cause(g.ctx))
		}
	})
}

// A request may have reached its engine over a connection that another request left, while the one
// that was dialed for it is not accepted. The request goes on, and if it ends, its grant is used.
func TestRequestOverAnotherConnection(t *testing.T) {
	reached, release := make(chan struct{}), make(chan struct{})
	e := newEngine(t, func(w http.ResponseWriter, _ *http.Request, _ seen) {
		close(reached)
		<-release
		w.WriteHeader(http.StatusNoContent)
	})
	p, err := New(Config{Decode: decoders(e.URL)})
	if err != nil {
		t.Fatal(err)
	}
	defer p.client.CloseIdleConnections()
	b := p.decode.list()[0]
	guarded := func() *guard {
		g := newGuard(t.Context(), b, time.Hour, func() bool { return true })
		t.Cleanup(g.stop)
		return g
	}
	g, done := guarded(), make(chan error)
	go func() {
		req, err := b.url.Request(g.ctx, http.MethodPost, "/v1/completions", strings.NewReader("{}"))
		if err == nil {
			var resp *http.Response
			if resp, err = p.client.Do(req); err == nil {
				err = resp.Body.Close()
			}
		}
		done <- err
	}()
	<-reached
	p.unaccepted(g.ctx, b.address, time.Now())
	if c := b.condition(); c != silent || g.ctx.Err() != nil {
		t.Errorf("the engine is %s, and its request is ended: %v", c, context.Cause(g.ctx))
	}
	close(release)
	if err := <-done; err != nil {
		t.Error(err)
	}
	g = guarded()
	p.unaccepted(g.ctx, b.address, time.Now())
	if err := g.cause(context.Canceled); !notReached(err) {
		t.Errorf("without a connection: %v", err)
	}
	g.reached.Store(true) // a connection came in this moment
	if err := g.cause(context.Canceled); notReached(err) || signOfError(err) != signLate {
		t.Errorf("with a connection: %v", err)
	}
}
