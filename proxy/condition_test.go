package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	kvtest "github.com/kvspray/kvspray/internal/testutil"
)

func testHealth() health {
	return health{slowAfter: 2 * time.Second, silentAfter: 6 * time.Second, firstRest: time.Second}
}

// step is something that happens to an engine at a time.
type step struct {
	at    time.Duration
	what  string // "asks", "answers", "request", "byte"
	sign  sign
	after time.Duration
}

func asks(at time.Duration) step              { return step{at: at, what: "asks"} }
func answers(at time.Duration, s sign) step   { return step{at: at, what: "answers", sign: s} }
func requested(at time.Duration, s sign) step { return step{at: at, what: "request", sign: s} }
func busyFor(at, after time.Duration) step    { return step{at, "request", signBusy, after} }
func passes(at time.Duration) step            { return step{at: at, what: "passes"} }
func gotByte(at time.Duration) step           { return step{at: at, what: "byte"} }
func unaccepted(since time.Duration) step     { return step{at: since, what: "unaccepted"} }

func TestHealthCondition(t *testing.T) {
	const s = time.Second
	for _, c := range []struct {
		name  string
		steps []step
		at    time.Duration
		want  condition
	}{
		{"nothing is known", nil, 0, fit},
		{"a good check", []step{asks(0), answers(s/10, signAlive)}, s, fit},
		{"the first check is refused", []step{asks(0), answers(0, signRefused)}, 0, down},
		{"the first check gets a 503", []step{asks(0), answers(0, signFailed)}, 0, down},
		{"one bad check", []step{asks(0), answers(0, signAlive), asks(s), answers(s, signFailed)}, s,
			fit},
		{"two bad checks", []step{asks(0), answers(0, signAlive), asks(s), answers(s, signFailed),
			asks(2 * s), answers(2*s, signLost)}, 2 * s, down},
		{"a good check ends it", []step{asks(0), answers(0, signRefused), asks(s),
			answers(s, signAlive)}, s, fit},
		{"a check by a resolver that fails", []step{asks(0), answers(0, signAlive), asks(s),
			answers(s, signNone), asks(2 * s), answers(2*s, signNone)}, 99 * s, fit},
		{"no answer yet", []step{asks(0)}, 2*s - 1, fit},
		{"no answer for long", []step{asks(0)}, 2 * s, slow},
		{"an answer that came late", []step{asks(0), answers(3*s, signAlive)}, 3 * s, slow},
		{"the next one comes at once", []step{asks(0), answers(3*s, signAlive), asks(4 * s),
			answers(4*s, signAlive)}, 4 * s, fit},
		{"no sign of life", []step{asks(0), answers(0, signAlive), asks(s)}, 7 * s, silent},
		{"a check that timed out goes on", []step{asks(0), answers(6*s, signLate), asks(6 * s)}, 6 * s,
			silent},
		{"bytes of a request are a sign", []step{asks(0), gotByte(5 * s)}, 7 * s, slow},
		{"until they end", []step{asks(0), gotByte(5 * s)}, 11 * s, silent},
		{"bytes before the silence are none", []step{gotByte(0), asks(s)}, 7 * s, silent},
		{"the router was stopped meanwhile", []step{passes(0), asks(0), passes(s), passes(40 * s),
			passes(41 * s)}, 41 * s, slow},
		{"and the engine is silent afterwards", []step{passes(0), asks(0), passes(s), passes(40 * s),
			passes(41 * s)}, 45 * s, silent},
		{"silent for long", []step{asks(0)}, 30 * s, down},
		{"it wakes up", []step{asks(0), answers(40*s, signAlive), asks(41 * s),
			answers(41*s, signAlive)}, 41 * s, fit},
		{"a request was refused", []step{requested(0, signRefused)}, 99 * s, down},
		{"until a check is good", []step{requested(0, signRefused), asks(s), answers(s, signAlive)}, s,
			fit},
		{"a request failed", []step{requested(0, signFailed)}, s - 1, failing},
		{"for a second", []step{requested(0, signFailed)}, s, fit},
		{"a reset", []step{requested(0, signLost)}, 0, failing},
		{"no first byte in time", []step{requested(0, signLate)}, 0, failing},
		{"good checks do not hide it", []step{requested(0, signFailed), asks(0),
			answers(0, signAlive)}, 0, failing},
		{"a connection is not accepted", []step{unaccepted(0)}, s, silent},
		{"after good checks", []step{asks(0), answers(0, signAlive), unaccepted(1)}, s, silent},
		{"a byte came before", []step{gotByte(0), unaccepted(1)}, s, silent},
		{"a byte came meanwhile", []step{gotByte(1), unaccepted(0)}, s, fit},
		{"a byte came afterwards", []step{unaccepted(0), gotByte(1)}, s, fit},
		{"a check was answered meanwhile", []step{asks(0), answers(1, signAlive), unaccepted(0)}, s, fit},
		{"a check is answered afterwards", []step{unaccepted(0), asks(1), answers(2, signAlive)}, s, fit},
		{"the rest doubles", []step{requested(0, signFailed), requested(s, signFailed)}, 3*s - 1,
			failing},
		{"and ends", []step{requested(0, signFailed), requested(s, signFailed)}, 3 * s, fit},
		{"requests that fail together count once", []step{requested(0, signFailed),
			requested(1, signFailed), requested(2, signLost)}, s, fit},
		{"a result ends the rest", []step{requested(0, signFailed), requested(1, signAlive)}, 1, fit},
		{"a client's own mistake is none", []step{requested(0, signAlive)}, 0, fit},
		{"the router's fault is none", []step{requested(0, signNone)}, 0, fit},
		{"busy", []step{busyFor(0, 7*s)}, 7*s - 1, busy},
		{"for its time", []step{busyFor(0, 7*s)}, 7 * s, fit},
		{"it answers again", []step{busyFor(0, 7*s), requested(s, signAlive)}, s, fit},
		{"a new process has no failures", []step{requested(0, signFailed), requested(1, signRefused),
			asks(2), answers(2, signAlive)}, 2, fit},
	} {
		h, begin, lastByte := testHealth(), time.Unix(1000, 0), time.Time{}
		for _, x := range c.steps {
			now, err := begin.Add(x.at), errors.New(x.sign.String())
			switch x.what {
			case "asks":
				h.asks(now)
			case "answers":
				h.answers(now, x.sign, err)
			case "request":
				h.request(now, x.sign, x.after, err)
			case "passes":
				h.passes(now, s)
			case "byte":
				lastByte = now
			case "unaccepted":
				h.unaccepted(now, lastByte)
			}
		}
		now := begin.Add(c.at)
		if got := h.condition(now, lastByte); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		if why := h.why(now, lastByte); (why == "") != (c.want == fit) {
			t.Errorf("%s: %s because of %q", c.name, c.want, why)
		}
	}
}

func TestRestIsBounded(t *testing.T) {
	h, now := testHealth(), time.Unix(0, 0)
	for range 100 {
		h.request(now, signFailed, 0, errors.New("x"))
		now = h.restUntil
	}
	h.request(now, signFailed, 0, errors.New("x"))
	if rest := h.restUntil.Sub(now); rest != longestRest {
		t.Errorf("after 101 failures the engine gets no requests for %s", rest)
	}
	if !h.trial() {
		t.Error("it gets all requests at once after its rest")
	}
	h.begins()
	if h.trial() {
		t.Error("still on trial after the first bytes of a good answer")
	}
}

func TestBetter(t *testing.T) {
	for _, c := range []struct {
		name string
		a, b candidate // a is better
	}{
		{"fewer requests", candidate{load: 1}, candidate{load: 2}},
		{"fewer leases", candidate{leases: 1}, candidate{leases: 2}},
		{"requests before leases", candidate{load: 1, leases: 9}, candidate{load: 2, leases: 0}},
		{"fails at once", candidate{load: 90}, candidate{condition: failing}},
		{"slow", candidate{load: 90}, candidate{condition: slow}},
		{"busy", candidate{condition: slow, load: 90}, candidate{condition: busy}},
		{"silent", candidate{condition: failing, load: 90}, candidate{condition: silent}},
		{"down", candidate{condition: silent, load: 90}, candidate{condition: down}},
	} {
		if !c.a.better(c.b) || c.b.better(c.a) {
			t.Errorf("%s: %+v, %+v", c.name, c.a, c.b)
		}
	}
	if (candidate{leases: -1}).better(candidate{leases: 5}) ||
		(candidate{leases: 5}).better(candidate{leases: -1}) {
		t.Error("unknown leases decide")
	}
	if (candidate{}).better(candidate{}) {
		t.Error("an engine is better than its like")
	}
	for c, want := range map[candidate][2]bool{ // takes, possible
		{condition: fit}:                 {true, true},
		{condition: slow}:                {true, true},
		{condition: busy}:                {false, true},
		{condition: silent}:              {false, true},
		{condition: down}:                {false, false},
		{condition: fit, leaving: true}:  {false, false},
		{condition: busy, leaving: true}: {false, false},
	} {
		if c.takes() != want[0] || c.possible() != want[1] {
			t.Errorf("%+v: takes %v, possible %v", c, c.takes(), c.possible())
		}
	}
}

func TestSignOfError(t *testing.T) {
	dial := func(err error) error {
		return &url.Error{Op: "Post", URL: "http://d", Err: &net.OpError{Op: "dial", Err: err}}
	}
	read := func(err error) error {
		return &url.Error{Op: "Post", URL: "http://d", Err: &net.OpError{Op: "read", Err: err}}
	}
	call := func(e syscall.Errno) error { return os.NewSyscallError("connect", e) }
	for _, c := range []struct {
		name    string
		err     error
		want    sign
		reached bool
	}{
		{"refused", dial(call(syscall.ECONNREFUSED)), signRefused, false},
		{"no route", dial(call(syscall.EHOSTUNREACH)), signRefused, false},
		{"dial timed out", dial(os.ErrDeadlineExceeded), signLate, false},
		{"reset", read(call(syscall.ECONNRESET)), signLost, true},
		{"closed before an answer", fmt.Errorf("x: %w", io.ErrUnexpectedEOF), signLost, true},
		{"deadline", context.DeadlineExceeded, signLate, true},
		{"no first byte", errLate, signLate, true},
		{"frozen", errSilent, signLate, true},
		{"empty 200", errEmpty, signFailed, true},
		{"error in a stream", errEngineFault, signNone, true},
		{"own descriptors", dial(call(syscall.EMFILE)), signNone, false},
		{"descriptors of the host", dial(call(syscall.ENFILE)), signNone, false},
		{"own ports", dial(call(syscall.EADDRNOTAVAIL)), signNone, false},
		{"resolver is away", dial(&net.DNSError{Err: "server misbehaving", Name: "d",
			IsTemporary: true}), signNone, false},
		{"resolver timed out", dial(&net.DNSError{Err: "timeout", Name: "d", IsTimeout: true}),
			signNone, false},
		{"descriptors of the resolver", dial(&net.DNSError{Err: "too many open files", Name: "d"}),
			signNone, false},
		{"no such name", dial(&net.DNSError{Err: "no such host", Name: "d", IsNotFound: true}),
			signRefused, false},
		{"the client is gone", context.Canceled, signNone, true},
		{"answer", fmt.Errorf("x: %w", &statusError{status: 429, sign: signBusy}), signBusy, true},
	} {
		if got := signOfError(c.err); got != c.want || notReached(c.err) == c.reached {
			t.Errorf("%s: %s, not reached %v; want %s", c.name, got, notReached(c.err), c.want)
		}
	}
}

func TestSignOfStatus(t *testing.T) {
	for _, c := range []struct {
		status int
		after  string
		want   sign
		wait   time.Duration
	}{
		{200, "", signAlive, 0}, {204, "", signAlive, 0}, {307, "", signAlive, 0},
		{400, "", signAlive, 0}, {401, "", signAlive, 0}, {404, "", signAlive, 0},
		{413, "", signAlive, 0}, {422, "9", signAlive, 0}, {501, "", signAlive, 0},
		{408, "", signFailed, 0}, {500, "", signFailed, 0}, {502, "", signFailed, 0},
		{503, "", signFailed, 0}, {504, "", signFailed, 0},
		{429, "", signBusy, defaultBusy}, {429, "7", signBusy, 7 * time.Second},
		{429, "soon", signBusy, defaultBusy}, {429, "0", signBusy, defaultBusy},
		{429, "-1", signBusy, defaultBusy}, {429, "99999", signBusy, maxBusy},
		{429, "99999999999999999999", signBusy, defaultBusy}, {503, "3", signBusy, 3 * time.Second},
	} {
		h := http.Header{}
		if c.after != "" {
			h.Set("Retry-After", c.after)
		}
		if got, wait := signOfStatus(c.status, h); got != c.want || wait != c.wait {
			t.Errorf("%d, Retry-After %q: %s for %s; want %s for %s", c.status, c.after, got, wait, c.want,
				c.wait)
		}
	}
}

// The text of an engine's error may have parts of a prompt: the log and /health have its status and
// its type alone, and the client gets all of it.
func TestTextOfAnEnginesErrorStaysOutOfTheLog(t *testing.T) {
	for _, c := range []struct {
		prefill, decode int
	}{{500, 500}, {400, 400}, {200, 500}, {503, 200}} {
		var log kvtest.Buffer
		fails := func(status int, answer func(http.ResponseWriter, *http.Request, seen)) func(
			http.ResponseWriter, *http.Request, seen) {
			return func(w http.ResponseWriter, r *http.Request, s seen) {
				if status == 200 {
					answer(w, r, s)
					return
				}
				w.WriteHeader(status)
				fmt.Fprint(w, `{"error":{"message":"my secret is bad","type":"InternalServerError"}}`)
			}
		}
		p, d := newEngine(t, fails(c.prefill, answerPrefill)), newEngine(t, fails(c.decode, answerDecode))
		_, url := start(t, Config{Mode: PrefillFirst, Prefill: []Engine{{URL: p.URL}},
			Decode: decoders(d.URL), Log: slog.New(slog.NewTextHandler(&log, nil))})
		code, body, _ := post(t, url, "/v1/completions", `{"prompt":"my secret"}`)
		if code != c.decode || code != 200 && !strings.Contains(body, "my secret is bad") {
			t.Errorf("%v: %d %s", c, code, body)
		}
		resp, err := http.Get(url + "/health")
		if err != nil {
			t.Fatal(err)
		}
		health, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || bytes.Contains(health, []byte("secret")) {
			t.Errorf("%v: /health: %s, %v", c, health, err)
		}
		if out := log.String(); strings.Contains(out, "secret") ||
			!strings.Contains(out, ": InternalServerError") {
			t.Errorf("%v: the log: %s", c, out)
		}
	}
}

// A prompt with which each engine fails, sent again and again, closes the service to no other one.
func TestPromptThatFailsEverywhere(t *testing.T) {
	bad := func(answer func(http.ResponseWriter, *http.Request, seen)) func(http.ResponseWriter,
		*http.Request, seen) {
		return func(w http.ResponseWriter, r *http.Request, s seen) {
			if s.body["prompt"] == "bad" {
				http.Error(w, "no", http.StatusInternalServerError)
				return
			}
			answer(w, r, s)
		}
	}
	cfg := Config{Mode: PrefillFirst}
	for range 2 {
		cfg.Prefill = append(cfg.Prefill, Engine{URL: newEngine(t, bad(answerPrefill)).URL})
		cfg.Decode = append(cfg.Decode, Engine{URL: newEngine(t, bad(answerDecode)).URL})
	}
	px, url := start(t, cfg)
	for range 20 {
		if code, body, _ := post(t, url, "/v1/completions", `{"prompt":"bad"}`); code != 500 {
			t.Fatal(code, body)
		}
		for _, prompt := range []string{"a", "b"} {
			code, body, _ := post(t, url, "/v1/completions", fmt.Sprintf(`{"prompt":%q}`, prompt))
			if code != 200 {
				t.Fatalf("another prompt: %d %s", code, body)
			}
		}
	}
	resp, err := http.Get(url + "/health")
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Errorf("/health: %s", resp.Status)
	}
	for _, b := range px.decode.all {
		if c := b.condition(); c > failing {
			t.Errorf("%s is %s", b.url, c)
		}
	}
}

// A check without a listener shows at once that no process is there; one with an error only the
// second time.
func TestRefusedCheck(t *testing.T) {
	now := time.Now()
	for s, want := range map[sign][2]condition{signRefused: {down, down}, signFailed: {fit, down}} {
		h := health{slowAfter: time.Second, silentAfter: time.Minute}
		h.asks(now)
		h.answers(now, signAlive, nil)
		for i, c := range want {
			h.asks(now)
			h.answers(now, s, errEmpty)
			if got := h.condition(now, now); got != c {
				t.Errorf("%s, check %d: %s, want %s", s, i, got, c)
			}
		}
		h.asks(now)
		h.answers(now, signAlive, nil)
		if got := h.condition(now, now); got != fit {
			t.Errorf("%s, then a good check: %s", s, got)
		}
	}
}
