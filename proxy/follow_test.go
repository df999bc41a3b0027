package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

// script is the answer that all engines of a test compute: one character of text for each token,
// except that some tokens are parts of a character.
type script struct {
	prompt []uint32
	tokens []piece
	finish string
}

// piece is a token and the text that it completes.
type piece struct {
	id   uint32
	text string
}

func scriptOf(text string) *script {
	s := &script{prompt: []uint32{1, 2, 3}, finish: "length"}
	for _, c := range text {
		id := uint32(1000 + c)
		if c < utf8.RuneSelf {
			s.tokens = append(s.tokens, piece{id, string(c)})
			continue
		}
		s.tokens = append(s.tokens, piece{id, ""}, piece{id + 100000, string(c)})
	}
	return s
}

func (s *script) text(from, to int) (text string) {
	for _, p := range s.tokens[from:to] {
		text += p.text
	}
	return text
}

// plan is the death of the engine that answers next.
type plan struct {
	mu   sync.Mutex
	left int // events until then; negative: none
	how  string
}

// next reports how an engine dies in place of its next event; empty: it does not.
func (p *plan) next() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left--
	if p.left == -1 {
		return p.how
	}
	return ""
}

func (p *plan) set(after int, how string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left, p.how = after, how
}

// scripted is an engine that computes a script as vLLM does: it continues a prompt of token ids,
// and holds text back for stop strings.
type scripted struct {
	*engine
	s     *script
	plan  *plan
	batch int // tokens of an event
}

func newScripted(t *testing.T, s *script, p *plan, batch int) *scripted {
	e := &scripted{s: s, plan: p, batch: batch}
	e.engine = newEngine(t, e.reply)
	return e
}

func ids(v any) (list []uint32) {
	items, _ := v.([]any)
	for _, item := range items {
		list = append(list, uint32(item.(float64)))
	}
	return list
}

func number(v any, otherwise int) int {
	if n, ok := v.(float64); ok {
		return int(n)
	}
	return otherwise
}

func (e *scripted) reply(w http.ResponseWriter, _ *http.Request, s seen) {
	if s.path == "/detokenize" {
		fmt.Fprintf(w, `{"prompt":%s}`, marshal(e.detokenize(ids(s.body["tokens"]))))
		return
	}
	if s.body["return_token_ids"] != true {
		e.t.Errorf("%s: %v asks for no token ids", s.path, s.body)
	}
	defer func() {
		if x := recover(); x != nil && x != any(errEnds) {
			panic(x)
		}
	}()
	x := &stream{e: e, w: w, chat: s.path == kindChat.path()}
	if given := ids(s.body["prompt"]); len(given) > 0 {
		x.at = len(given) - len(e.s.prompt)
	}
	x.run(s.body)
}

// detokenize has the text of the end of the prompt, <p>, and of the answer's tokens, in which a
// part of a character is U+FFFD.
func (e *scripted) detokenize(tokens []uint32) (text string) {
	for i := 0; i < len(tokens); i++ {
		switch id := tokens[i]; {
		case id <= 3:
			text += fmt.Sprintf("<%d>", id)
		case id < 1000+utf8.RuneSelf:
			text += string(rune(id - 1000))
		case i+1 < len(tokens) && tokens[i+1] == id+100000:
			text += string(rune(id - 1000))
			i++
		default:
			text += string(utf8.RuneError)
		}
	}
	return text
}

// stream is one answer of a scripted engine.
type stream struct {
	e      *scripted
	w      http.ResponseWriter
	chat   bool
	at     int    // tokens of the script before the next one
	all    string // text of this request
	given  int    // bytes of it
	offset int
}

// event sends an event, or dies.
func (x *stream) event(format string, args ...any) {
	text := "data: " + fmt.Sprintf(format, args...) + "\n\n"
	how := x.e.plan.next()
	switch how {
	case "fault":
		text = `data: {"error":{"message":"the engine core has died","code":500}}` + "\n\n" +
			"data: [DONE]\n\n"
	case "half":
		text = text[:len(text)/2]
	case "line":
		text = text[:len(text)-1]
	case "reset", "end":
		text = ""
	}
	x.w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(x.w, text) // the router may be gone
	_ = http.NewResponseController(x.w).Flush()
	switch how {
	case "":
	case "end", "fault":
		panic(errEnds)
	default:
		panic(http.ErrAbortHandler)
	}
}

// errEnds ends an answer without an error of its connection.
var errEnds = errors.New("the answer ends")

func (x *stream) run(body map[string]any) {
	s := x.e.s
	var stop []string
	raw, _ := json.Marshal(body["stop"])
	if json.Unmarshal(raw, &stop) != nil {
		var one string
		_ = json.Unmarshal(raw, &one)
		stop = []string{one}
	}
	include := body["include_stop_str_in_output"] == true
	held := 0
	if !include {
		for _, one := range stop {
			held = max(held, utf8.RuneCountInString(one)-1)
		}
	}
	limit := number(body["max_tokens"], 16)
	if x.chat {
		limit = number(body["max_completion_tokens"], number(body["max_tokens"], len(s.tokens)))
	}
	prompt := append([]uint32(nil), s.prompt...)
	for _, p := range s.tokens[:x.at] {
		prompt = append(prompt, p.id)
	}
	name := "A"
	promptJSON := string(marshal(prompt))
	if x.chat {
		x.event(`{"id":"%s","object":"chat.completion.chunk","created":1,"model":"m","choices":[`+
			`{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],`+
			`"prompt_token_ids":%s}`, name, promptJSON)
	}
	answered, first := 0, true
	end, reason, why := false, "null", "null"
	for !end {
		var list []uint32
		logs := ""
		for range x.e.batch {
			if x.at == len(s.tokens) || answered == limit {
				break
			}
			p := s.tokens[x.at]
			x.at++
			answered++
			list = append(list, p.id)
			logs += x.logprobs(p, len(list) > 1)
			x.all += p.text
			if at, one := matched(x.all, stop); one != "" {
				x.all = x.all[:at]
				if include {
					x.all += one
				}
				end, reason, why = true, `"stop"`, string(marshal(one))
				break
			}
		}
		if !end && (x.at == len(s.tokens) || answered == limit) {
			end, reason = true, `"length"`
		}
		send := x.all[min(x.given, len(x.all)):]
		if !end {
			for range held {
				_, n := utf8.DecodeLastRuneInString(send)
				send = send[:len(send)-n]
			}
		}
		x.given += len(send)
		lp := "null"
		if body["logprobs"] != nil && body["logprobs"] != false {
			lp = x.wrap(logs, list)
		}
		idList := string(marshal(list))
		if len(list) == 0 {
			idList = "[]"
		}
		if x.chat {
			tail := ""
			if end {
				tail = `,"stop_reason":` + why
			}
			x.event(`{"id":"%s","object":"chat.completion.chunk","created":1,"model":"m","choices":[`+
				`{"index":0,"delta":{"content":%s},"logprobs":%s,"finish_reason":%s%s,"token_ids":%s}]}`,
				name, marshal(send), lp, reason, tail, idList)
			continue
		}
		given := "null"
		if first {
			given, first = promptJSON, false
		}
		x.event(`{"id":"%s","object":"text_completion","created":1,"model":"m","choices":[`+
			`{"index":0,"text":%s,"logprobs":%s,"finish_reason":%s,"stop_reason":%s,"token_ids":%s,`+
			`"prompt_token_ids":%s}]}`,
			name, marshal(send), lp, reason, why, idList, given)
	}
	options, _ := body["stream_options"].(map[string]any)
	if options["include_usage"] == true {
		x.event(`{"id":"%s","object":"x","created":1,"model":"m","choices":[],"usage":{`+
			`"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}`,
			name, len(prompt), len(prompt)+answered, answered)
	}
	x.event("[DONE]")
}

// matched is the stop string that ends first in a text.
func matched(text string, stop []string) (at int, found string) {
	for _, one := range stop {
		if i := strings.Index(text, one); one != "" && i >= 0 && (found == "" ||
			i+len(one) < at+len(found)) {
			at, found = i, one
		}
	}
	return at, found
}

func (x *stream) logprobs(p piece, more bool) string {
	comma := ""
	if more {
		comma = ","
	}
	if x.chat {
		return fmt.Sprintf(`%s{"token":%s,"logprob":-0.5,"bytes":%s,`+
			`"top_logprobs":[{"token":%[2]s,"logprob":-0.5,"bytes":%[3]s}]}`,
			comma, marshal(p.text), byteList(p.text))
	}
	return ""
}

func byteList(text string) string {
	list := make([]int, len(text))
	for i := range len(text) {
		list[i] = int(text[i])
	}
	return string(marshal(list))
}

// wrap is the logprobs of some tokens.
func (x *stream) wrap(chat string, list []uint32) string {
	if x.chat {
		return `{"content":[` + chat + `]}`
	}
	offsets, values, tokens, top := []int{}, []float64{}, []string{}, []string{}
	from := x.at - len(list)
	for _, p := range x.e.s.tokens[from:x.at] {
		offsets = append(offsets, x.offset)
		x.offset += utf8.RuneCountInString(p.text)
		values, tokens = append(values, -0.5), append(tokens, p.text)
		top = append(top, fmt.Sprintf(`{%s:-0.5,"other":-2.25}`, marshal(p.text)))
	}
	return fmt.Sprintf(`{"text_offset":%s,"token_logprobs":%s,"tokens":%s,"top_logprobs":[%s]}`,
		marshal(offsets), marshal(values), marshal(tokens), strings.Join(top, ","))
}

// received is what a client got of a stream.
type received struct {
	text, finish, stop string
	ids                []uint32
	logprobs           []string
	usage              string
	events             int
}

// listen reads a stream as clients do, and fails the test if it is not whole.
func listen(t *testing.T, body io.Reader) (h received) {
	t.Helper()
	all, err := io.ReadAll(body)
	if err != nil {
		t.Fatalf("%v after %q", err, all)
	}
	if !bytes.HasSuffix(all, []byte("\n\ndata: [DONE]\n\n")) ||
		bytes.Count(all, []byte("[DONE]")) != 1 {
		t.Fatalf("no end: %q", all)
	}
	for event := range strings.SplitSeq(strings.TrimSuffix(string(all), "data: [DONE]\n\n"), "\n\n") {
		if event == "" {
			continue
		}
		h.events++
		var c struct {
			ID      string
			Object  string
			Choices []struct {
				Text     *string
				Delta    *struct{ Role, Content *string }
				Logprobs json.RawMessage
				Finish   string          `json:"finish_reason"`
				Stop     json.RawMessage `json:"stop_reason"`
				IDs      []uint32        `json:"token_ids"`
				Prompt   []uint32        `json:"prompt_token_ids"`
			}
			Usage json.RawMessage
		}
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok || json.Unmarshal([]byte(data), &c) != nil || c.ID != "A" {
			t.Fatalf("malformed event %q", event)
		}
		if len(c.Usage) > 0 && !isNull(c.Usage) {
			h.usage = string(c.Usage)
		}
		for _, x := range c.Choices {
			switch {
			case x.Text != nil:
				h.text += *x.Text
			case x.Delta != nil && x.Delta.Content != nil:
				h.text += *x.Delta.Content
			}
			if h.finish != "" {
				t.Fatalf("an event after the end: %q", event)
			}
			h.finish, h.ids = x.Finish, append(h.ids, x.IDs...)
			if len(x.Stop) > 0 && !isNull(x.Stop) {
				h.stop = string(x.Stop)
			}
			if len(x.Logprobs) > 0 && !isNull(x.Logprobs) {
				var compact bytes.Buffer
				if json.Compact(&compact, x.Logprobs) != nil {
					t.Fatalf("logprobs %q", x.Logprobs)
				}
				h.logprobs = append(h.logprobs, compact.String())
			}
		}
	}
	return h
}

// seamCase is a request whose answer must be the same whatever engine dies where.
type seamCase struct {
	name, path, body, text string
	batch                  int
}

var seamCases = []seamCase{
	{"completion", "/v1/completions", `"prompt":"a","max_tokens":50`, "some text", 1},
	{"usage", "/v1/completions", `"prompt":"a","max_tokens":7,"stream_options":{"include_usage":true}`,
		"some text", 1},
	{"ids and logprobs", "/v1/completions",
		`"prompt":"a","max_tokens":50,"logprobs":1,"return_token_ids":true`, "some text", 1},
	{"ids of parts of characters", "/v1/completions",
		`"prompt":"a","max_tokens":50,"logprobs":1,"return_token_ids":true`, "aé€😀bé€", 1},
	{"logprobs of parts of characters", "/v1/chat/completions",
		`"messages":[{"role":"user","content":"a"}],"max_tokens":50,"logprobs":true,"top_logprobs":1`,
		"aé€😀bé€", 1},
	{"characters of several tokens", "/v1/completions", `"prompt":"a","max_tokens":50`, "aé€😀bé€", 1},
	{"events of several tokens", "/v1/completions", `"prompt":"a","max_tokens":50`, "aé€😀béxyzzé€", 3},
	{"chat", "/v1/chat/completions", `"messages":[{"role":"user","content":"a"}],"max_tokens":50,` +
		`"stream_options":{"include_usage":true}`, "some é text", 1},
	{"chat with logprobs", "/v1/chat/completions", `"messages":[{"role":"user","content":"a"}],` +
		`"max_completion_tokens":50,"logprobs":true,"top_logprobs":1`, "some text", 1},
	{"stop string", "/v1/completions", `"prompt":"a","max_tokens":50,"stop":"text"`,
		"some te text after", 1},
	{"stop string that is kept", "/v1/completions",
		`"prompt":"a","max_tokens":50,"stop":["text","never"],"include_stop_str_in_output":true`,
		"some te text after", 1},
	{"stop strings that overlap", "/v1/completions",
		`"prompt":"a","max_tokens":50,"stop":["abc","cd","aabd"]`,
		"x aab abd abcd", 1},
	{"stop string in a chat", "/v1/chat/completions",
		`"messages":[{"role":"user","content":"a"}],"max_tokens":50,"stop":["é€b"]`, "aé€é€béxyzzé€", 1},
	{"no stop string", "/v1/completions", `"prompt":"a","max_tokens":50,"stop":["never","at all"]`,
		"some neve at al text", 1},
}

func (c *seamCase) ask(t *testing.T, url string) received {
	t.Helper()
	resp, err := http.Post(url+c.path, "application/json",
		strings.NewReader(`{"model":"m","stream":true,`+c.body+`}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	return listen(t, resp.Body)
}

func same(a, b received) bool {
	return a.text == b.text && a.finish == b.finish && a.stop == b.stop && a.usage == b.usage &&
		fmt.Sprint(a.ids) == fmt.Sprint(b.ids) && fmt.Sprint(a.logprobs) == fmt.Sprint(b.logprobs)
}

// unhurried are times with which no engine is silent because the machine is busy.
var unhurried = Times{Silent: patience}

// An engine dies before each event of its answer, in each way. The client gets the answer of an
// engine that lives.
func TestAnswerContinuesAtEachEvent(t *testing.T) {
	for _, c := range seamCases {
		t.Run(c.name, func(t *testing.T) {
			s, p := scriptOf(c.text), &plan{left: -1}
			a, b := newScripted(t, s, p, c.batch), newScripted(t, s, p, c.batch)
			px, url := start(t, Config{Decode: decoders(a.URL, b.URL), Continue: true, Times: unhurried})
			want := c.ask(t, url)
			if want.events < 3 {
				t.Fatalf("%+v", want)
			}
			for _, how := range []string{"reset", "half", "line", "end", "fault"} {
				for at := range want.events + 1 {
					p.set(at, how)
					if got := c.ask(t, url); !same(got, want) {
						t.Errorf("%s before event %d: %+v, want %+v", how, at, got, want)
					}
				}
			}
			if n := testutil.ToFloat64(px.met.continued); n < float64(want.events) {
				t.Errorf("%v continuations", n)
			}
		})
	}
}

// Without a failure the client gets each byte that the engine sends to a client that does not ask
// for token ids.
func TestFollowedAnswerIsUnchanged(t *testing.T) {
	for _, c := range []struct{ path, asked, sent, want string }{
		{"/v1/completions", `"prompt":"a"`,
			`data: {"id":"A","choices":[{"index":0,"text":"é","token_ids":[1,2],"prompt_token_ids":[3]}]}` +
				"\n\n: a comment\n\n" + `data: {"id":"A","choices":[],"usage":{"x":1}}` + "\n\n",
			`data: {"id":"A","choices":[{"index":0,"text":"é","token_ids":null,"prompt_token_ids":null}]}` +
				"\n\n: a comment\n\n" + `data: {"id":"A","choices":[],"usage":{"x":1}}` + "\n\n"},
		{"/v1/completions", `"prompt":"a","return_token_ids":true`,
			`data: {"id":"A","choices":[{"text":"b","token_ids":[1,2],"prompt_token_ids":[3]}]}` + "\n\n",
			`data: {"id":"A","choices":[{"text":"b","token_ids":[1,2],"prompt_token_ids":[3]}]}` + "\n\n"},
		// A parser of reasoning holds text back; without token ids vLLM sends no event then.
		{"/v1/chat/completions", `"messages":[{"role":"user","content":"a"}]`,
			`data: {"choices":[{"delta":{"role":"assistant","content":""}}],"prompt_token_ids":[3]}` +
				"\n\n" + `data: {"choices":[{"delta":{},"logprobs":null,"token_ids":[1]}]}` + "\n\n" +
				`data: {"choices":[{"delta":{"reasoning":"b"},"token_ids":[2]}]}` + "\n\n",
			`data: {"choices":[{"delta":{"role":"assistant","content":""}}],"prompt_token_ids":null}` +
				"\n\n" + `data: {"choices":[{"delta":{"reasoning":"b"},"token_ids":null}]}` + "\n\n"},
		{"/v1/completions", `"prompt":"a"`, "data: no object\n\nevent: x\ndata: y\n\n",
			"data: no object\n\nevent: x\ndata: y\n\n"},
		{"/v1/completions", `"prompt":"a"`, "data: {}\r\n\r\ndata: {}\r\n\r\n",
			"data: {}\r\n\r\ndata: {}\r\n\r\n"},
		{"/v1/completions", `"prompt":"a","n":2`, // it is not followed
			`data: {"choices":[{"text":"b","token_ids":[1]}]}` + "\n\n",
			`data: {"choices":[{"text":"b","token_ids":[1]}]}` + "\n\n"},
	} {
		e := newEngine(t, func(w http.ResponseWriter, _ *http.Request, _ seen) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, c.sent+"data: [DONE]\n\n") // the router may be gone
		})
		_, url := start(t, Config{Decode: decoders(e.URL), Continue: true})
		code, got, _ := post(t, url, c.path, `{"stream":true,`+c.asked+`}`)
		if want := c.want + "data: [DONE]\n\n"; code != http.StatusOK || got != want {
			t.Errorf("%d %s, want %s", code, got, want)
		}
	}
}

// The last event may end with the connection, without an empty line.
func TestFollowedAnswerWithoutALastLine(t *testing.T) {
	const sent = `data: {"choices":[{"text":"b","token_ids":null}]}` + "\n\ndata: [DONE]"
	e := newEngine(t, func(w http.ResponseWriter, _ *http.Request, _ seen) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, sent) // the router may be gone
	})
	_, url := start(t, Config{Decode: decoders(e.URL), Continue: true})
	code, got, _ := post(t, url, "/v1/completions", `{"stream":true,"prompt":"a"}`)
	if code != http.StatusOK || got != sent+"\n\n" {
		t.Errorf("%d %q", code, got)
	}
}

// broken asks for a stream that breaks, and returns why nothing continues it.
func broken(t *testing.T, px *Proxy, url, path, body string) (why string) {
	t.Helper()
	before := map[string]float64{}
	for _, reason := range unfollowedReasons {
		before[reason] = testutil.ToFloat64(px.met.unfollowed.WithLabelValues(reason))
	}
	resp, err := http.Post(url+path, "application/json",
		strings.NewReader(`{"stream":true,`+body+`}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if all, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("%s looks whole: %q", body, all)
	}
	for _, reason := range unfollowedReasons {
		if testutil.ToFloat64(px.met.unfollowed.WithLabelValues(reason)) > before[reason] {
			why += reason
		}
	}
	return why
}

// What cannot be continued ends as without the option, and is counted by its reason.
func TestAnswersThatAreNotContinued(t *testing.T) {
	const chat, completion = "/v1/chat/completions", "/v1/completions"
	e := newEngine(t, func(w http.ResponseWriter, _ *http.Request, s seen) {
		again := false
		if list, ok := s.body["prompt"].([]any); ok {
			_, again = list[0].(float64)
		}
		switch {
		case s.path == "/detokenize" && s.body["model"] == "seam":
			w.WriteHeader(http.StatusNotFound)
			return
		case s.path == "/detokenize":
			fmt.Fprint(w, `{"prompt":"another text"}`)
			return
		case again:
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		event := `{"id":"A","choices":[{"text":"b","token_ids":[1],"prompt_token_ids":[3]}]}`
		switch {
		case s.body["user"] == "plain":
			event = `{"choices":[{"delta":{"content":"b"},"token_ids":[1]}],"prompt_token_ids":[3]}`
		case s.body["user"] == "parser":
			event = `{"choices":[{"delta":{"reasoning":"b"},"token_ids":[1]}],"prompt_token_ids":[3]}`
		case s.body["user"] == "no ids":
			event = `{"choices":[{"text":"b"}]}`
		}
		_, _ = io.WriteString(w, "data: "+event+"\n\n") // the router may be gone
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	px, url := start(t, Config{Decode: decoders(e.URL), Continue: true})
	message := `"messages":[{"role":"user","content":"a"}]`
	for _, c := range []struct{ path, body, why string }{
		{completion, `"prompt":"a","n":2`, unfollowedSeveral},
		{completion, `"prompt":["a","b"]`, unfollowedSeveral},
		{completion, `"prompt":"a","presence_penalty":0.5`, unfollowedPenalty},
		{completion, `"prompt":"a","frequency_penalty":-1`, unfollowedPenalty},
		{chat, message + `,"response_format":{"type":"json_object"}`, unfollowedStructured},
		{completion, `"prompt":"a","structured_outputs":{"regex":"a"}`, unfollowedStructured},
		{chat, message + `,"tools":[{"type":"function"}]`, unfollowedTools},
		{chat, `"messages":[{"role":"user","content":[{"type":"image_url"}]}]`, unfollowedImages},
		{completion, `"prompt":"a","echo":true`, unfollowedPrompt},
		{completion, `"prompt":"a","bad_words":["b"]`, unfollowedField},
		{completion, `"prompt":"a","vllm_xargs":{"a":1}`, unfollowedField},
		{chat, message + `,"a_way_to_sample":0.5`, unfollowedField},
		{chat, message + `,"logprobs":true,"return_tokens_as_token_ids":true`, unfollowedField},
		{completion, `"prompt":"a","stop":7`, unfollowedField},
		{chat, message + `,"user":"parser"`, unfollowedParser},
		{completion, `"prompt":"a","user":"no ids"`, unfollowedNoIDs},
		{completion, `"prompt":"a","model":"seam"`, unfollowedSeam},
		{completion, `"prompt":"a","stop":"c"`, unfollowedSeam},
		{completion, `"prompt":"a"`, unfollowedRefused},
		{completion, `"prompt":"a","max_tokens":1`, unfollowedLength},
		{chat, message + `,"user":"plain"`, unfollowedLength},
	} {
		if why := broken(t, px, url, c.path, c.body); why != c.why {
			t.Errorf("%s: %q, want %q", c.body, why, c.why)
		}
	}
}

// These values stand for the absence of a field.
func TestFieldsWithoutEffect(t *testing.T) {
	for _, body := range []string{`"presence_penalty":0,"frequency_penalty":0.0,"tools":[]`,
		`"response_format":{"type":"text"},"stop":null,"n":1`, `"echo":false,"bad_words":null`} {
		r, err := parseRequest(kindCompletion, []byte(`{"prompt":"a",`+body+`}`))
		if err != nil {
			t.Fatal(err)
		}
		if why := r.unfollowed(); why != "" {
			t.Errorf("%s: %s", body, why)
		}
	}
}

// A request that ends each engine soon after it got it meets two of them.
func TestRequestThatEndsEnginesIsRefused(t *testing.T) {
	s := scriptOf("a text that no engine survives, whatever it has computed of it")
	plans, engines := []*plan{}, []*scripted{}
	for range 4 {
		p := &plan{left: 5, how: "reset"}
		plans = append(plans, p)
		engines = append(engines, newScripted(t, s, p, 1))
	}
	px, url := start(t, Config{Continue: true, Times: unhurried, Decode: decoders(engines[0].URL,
		engines[1].URL, engines[2].URL, engines[3].URL)})
	why := broken(t, px, url, "/v1/completions", `"prompt":"a","max_tokens":500`)
	asked := 0
	for _, e := range engines {
		for _, r := range e.requests() {
			if r.path == "/v1/completions" {
				asked++
			}
		}
	}
	if why != unfollowedFailures || asked != maxSoonFailed {
		t.Errorf("%q after %d engines, want %q after %d", why, asked, unfollowedFailures, maxSoonFailed)
	}
	// An engine that fails after many tokens does not count.
	long := scriptOf(strings.Repeat("many tokens ", 50))
	for i, e := range engines {
		e.s = long
		plans[i].set(100, "reset")
	}
	c := seamCase{path: "/v1/completions", body: `"prompt":"a","max_tokens":10000`}
	if got := c.ask(t, url); got.text != long.text(0, len(long.tokens)) {
		t.Errorf("%q", got.text)
	}
	if n := testutil.ToFloat64(px.met.continued); n < 4 {
		t.Errorf("%v continuations", n)
	}
}

// An engine that failed late, and one that then failed soon, are not two that failed soon.
func TestLateFailureBeforeASoonOne(t *testing.T) {
	var room budget
	room.give(1 << 20)
	r, err := parseRequest(kindCompletion, []byte(`{"prompt":"a","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	f := r.follow(&room)
	for _, x := range []struct {
		tokens int // of the engine that fails
		why    string
	}{{100, ""}, {5, ""}, {soonTokens, ""}, {5, ""}, {soonTokens - 1, unfollowedFailures}} {
		f.answerSize += x.tokens
		if f.failed(); f.why != x.why {
			t.Errorf("after %d tokens: %q, want %q", f.answerSize, f.why, x.why)
		}
	}
}

// The next engine's prompt ends with a whole character, also where tokens without text follow it.
func TestPromptOfTheRestEndsWithAWholeCharacter(t *testing.T) {
	text := map[uint32]string{1: "p", 2: "a", 3: "\ufffd", 4: "<eos>", 5: "[PAD]", 6: "€"}
	textOf := func(ids []uint32) (s string, err error) {
		for _, id := range ids {
			s += text[id]
		}
		return s, nil
	}
	for _, c := range []struct {
		answer []uint32
		ids    bool // the client has them
		left   int
		why    string
	}{
		{[]uint32{2, 6}, false, 2, ""},
		{[]uint32{2, 3, 3, 3}, false, 1, ""},
		{[]uint32{3, 3, 3}, false, 0, ""},
		{[]uint32{2, 3, 4, 5}, false, 1, ""},
		{[]uint32{2, 4, 4}, false, 3, ""},
		{[]uint32{2, 3, 2}, false, 3, ""}, // it is no character, and never will be
		{[]uint32{2, 3}, true, 2, unfollowedSeam},
		{slices.Repeat([]uint32{3}, maxCut+1), false, 1, unfollowedSeam},
	} {
		f := &followed{prompt: []uint32{1}, answer: c.answer, answerSize: len(c.answer), givesIDs: c.ids}
		why, err := f.cut(textOf)
		if err != nil || why != c.why || len(f.answer) != c.left || f.answerSize != c.left {
			t.Errorf("%v: %d tokens are left, %q, %v; want %d, %q", c.answer, len(f.answer), why, err,
				c.left, c.why)
		}
	}
	// Stop strings need the text that was held back. It must be that of this answer.
	f := &followed{prompt: []uint32{1}, answer: []uint32{2, 2, 6}, text: []byte("a"),
		stops: stops{list: []string{"a€x"}}}
	if why, err := f.cut(textOf); err != nil || why != "" || f.seam.text[f.seam.sent:] != "a€" {
		t.Errorf("%q, %v: %+v", why, err, f.seam)
	}
	f.text = []byte("b")
	if why, err := f.cut(textOf); err != nil || why != unfollowedSeam {
		t.Errorf("%q, %v for the text of another answer", why, err)
	}
}

// An engine freezes in mid stream. Another one goes on before the frozen one counts as down.
func TestFrozenEngineLosesItsStream(t *testing.T) {
	s := scriptOf("some text")
	var frozen *faulty
	frozen = newFaulty(t, func(w http.ResponseWriter, r *http.Request, _ seen) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, `data: {"id":"A","choices":[{"index":0,"text":"s","finish_reason":`+
			`null,"token_ids":[1115],"prompt_token_ids":[1,2,3]}]}`+"\n\n")
		_ = http.NewResponseController(w).Flush()
		frozen.freeze()
		frozen.hold(r)
	})
	other := newScripted(t, s, &plan{left: -1}, 1)
	times := quick()
	times.Silent = 500 * time.Millisecond
	px, url := start(t, Config{Decode: decoders(frozen.URL, other.URL), Times: times, Continue: true})
	c := seamCase{path: "/v1/completions", body: `"prompt":"a","max_tokens":50`}
	for range 2 { // one goes to the engine that freezes
		if got := c.ask(t, url); got.text != "some text" {
			t.Errorf("%q", got.text)
		}
	}
	if testutil.ToFloat64(px.met.continued) == 0 {
		t.Error("no continuation")
	}
}

// An answer takes what it keeps from the budget of bodies, and returns it. Without a budget it goes
// on, and cannot be continued.
func TestFollowedAnswerIsBounded(t *testing.T) {
	r, err := parseRequest(kindCompletion, []byte(`{"prompt":"a","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	var b budget
	b.give(4 << 10)
	f := r.follow(&b)
	event := []byte(`data: {"id":"A","choices":[` +
		`{"text":"b","token_ids":[1],"prompt_token_ids":[3]}]}` + "\n\n")
	for range 4 << 10 {
		out, err := f.take(event)
		if err != nil || !bytes.Contains(out, []byte(`"text":"b","token_ids":null`)) {
			t.Fatalf("%q, %v", out, err)
		}
	}
	if f.why != unfollowedMemory || f.taken > 4<<10 {
		t.Errorf("%q with %d bytes", f.why, f.taken)
	}
	if f.end(); b.free.Load() != 4<<10 {
		t.Errorf("%d bytes are left of the budget", b.free.Load())
	}
}

// stopsAtAPage continues an answer after "some te", with text in an event of more than one read.
func stopsAtAPage(w http.ResponseWriter, _ *http.Request, s seen) {
	text := map[uint32]string{1: "<p>", 2: "some ", 3: "te", 4: "xt", 5: " after"}
	if s.path == "/detokenize" {
		all := ""
		for _, id := range ids(s.body["tokens"]) {
			all += text[id]
		}
		fmt.Fprintf(w, `{"prompt":%s}`, marshal(all))
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	event := func(text, ids string) {
		fmt.Fprintf(w, `data: {"id":"A","choices":[{"text":%q,"token_ids":%s,`+
			`"prompt_token_ids":[1%s]}]}`+"\n\n", text, ids, strings.Repeat(",1", copyBytes))
	}
	if len(ids(s.body["prompt"])) == 0 {
		event("some ", "[2,3]")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	event("xt", "[4]")
	event(" after", "[5]")
	fmt.Fprint(w, "data: [DONE]\n\n")
}

// Nothing follows the end by a stop string over the seam, also if parts of an event were held.
func TestNothingFollowsAStopOverTheSeam(t *testing.T) {
	a, b := newEngine(t, stopsAtAPage), newEngine(t, stopsAtAPage)
	_, url := start(t, Config{Decode: decoders(a.URL, b.URL), Continue: true, Times: unhurried})
	c := seamCase{path: "/v1/completions", body: `"prompt":"a","max_tokens":50,"stop":"text"`}
	if got := c.ask(t, url); got.text != "some " || got.finish != "stop" || got.stop != `"text"` {
		t.Errorf("%+v", got)
	}
}

// The bodies of a continuation, and the text before the seam, are a part of the budget.
func TestContinuationTakesFromTheBudget(t *testing.T) {
	var px atomic.Pointer[Proxy]
	var drained atomic.Int64
	var drain atomic.Bool
	answer := func(w http.ResponseWriter, r *http.Request, s seen) {
		if s.path == "/detokenize" {
			bodies := &px.Load().bodies
			free := bodies.free.Load()
			if held := defaultBodies - free; held < 2*seamBytes {
				t.Errorf("only %d bytes are taken", held)
			}
			if drain.CompareAndSwap(true, false) && bodies.take(free) {
				drained.Store(free)
			}
		}
		stopsAtAPage(w, r, s)
	}
	a, b := newEngine(t, answer), newEngine(t, answer)
	p, url := start(t, Config{Decode: decoders(a.URL, b.URL), Continue: true, Times: unhurried,
		BodiesBytes: defaultBodies})
	px.Store(p)
	const body = `"prompt":"a","max_tokens":50`
	c := seamCase{path: "/v1/completions", body: body}
	if got := c.ask(t, url); got.text != "some xt after" {
		t.Errorf("%+v", got)
	}
	whole := func() bool { return p.bodies.free.Load()+drained.Load() == defaultBodies }
	until(t, "the budget is not whole again", whole)
	drain.Store(true) // what is returned after the questions is too little for the ids of the prompt
	if why := broken(t, p, url, c.path, body); why != unfollowedMemory {
		t.Errorf("%q, want %q", why, unfollowedMemory)
	}
	until(t, "the budget is not whole again", whole)
}

// Without max_tokens the API of completions has a default, but null is the model's rest.
func TestLimitOfTheRest(t *testing.T) {
	for _, c := range []struct {
		kind   kind
		fields string
		limit  int
	}{
		{kindCompletion, `"prompt":"a"`, completionTokens},
		{kindCompletion, `"prompt":"a","max_tokens":null`, 100},
		{kindCompletion, `"prompt":"a","max_tokens":7`, 7},
		{kindChat, `"messages":[]`, 100},
		{kindChat, `"messages":[],"max_tokens":null`, 100},
		{kindChat, `"messages":[],"max_tokens":7,"max_completion_tokens":8`, 8},
	} {
		r, err := parseRequest(c.kind, []byte("{"+c.fields+"}"))
		if err != nil {
			t.Fatal(err)
		}
		if n := r.limit(100); n != c.limit {
			t.Errorf("%s: %d, want %d", c.fields, n, c.limit)
		}
	}
}

// An answer that is no stream of events breaks off: no other engine's stream follows it.
func TestAnswerOfAnotherFormIsNotContinued(t *testing.T) {
	var asked atomic.Int32
	answer := func(w http.ResponseWriter, r *http.Request, s seen) {
		if asked.Add(1) > 1 {
			stopsAtAPage(w, r, s)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"choices":[`)
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	a, b := newEngine(t, answer), newEngine(t, answer)
	px, url := start(t, Config{Decode: decoders(a.URL, b.URL), Continue: true, Times: unhurried})
	why := broken(t, px, url, "/v1/completions", `"prompt":"a"`)
	if n := asked.Load(); why != "" || n != 1 {
		t.Errorf("%q, %d engines were asked", why, n)
	}
}

// followedChat is a chat whose second engine continues after one token.
func followedChat(t *testing.T) *followed {
	room := &budget{}
	room.give(1 << 20)
	f := &followed{kind: kindChat, budget: room, next: true, logs: true, tokens: true,
		prompt: []uint32{1}, promptSize: 1, answer: []uint32{2}, answerSize: 1, text: []byte("a"),
		head: []byte(`{"id":"A",`), stops: stops{list: []string{"never"}}}
	t.Cleanup(func() {
		if f.end(); room.free.Load() != 1<<20 {
			t.Errorf("%d bytes are left of the budget", room.free.Load())
		}
	})
	return f
}

// The next engine computes the tokens of an event again that the client could not get.
func TestTokensOfAnEventThatFails(t *testing.T) {
	f := followedChat(t)
	out, err := f.take([]byte(`data: {"choices":[{"text":"b","logprobs":7,"token_ids":[3,4]}]}` +
		"\n\n"))
	if !errors.Is(err, errEngineFault) || len(out) > 0 {
		t.Fatalf("%q, %v", out, err)
	}
	if !slices.Equal(f.answer, []uint32{2}) || f.answerSize != 1 || string(f.text) != "a" {
		t.Errorf("%v, %d tokens, %q", f.answer, f.answerSize, f.text)
	}
}

// A pause lasts from the last bytes, not from the end of the silence after them.
func TestEndOfASilenceIsNoByte(t *testing.T) {
	f := followedChat(t)
	long := time.Now().Add(-time.Hour)
	f.last = long
	if _, err := f.take(nil); err != nil || !f.last.Equal(long) {
		t.Errorf("%s, %v; want %s", f.last, err, long)
	}
	if _, err := f.take([]byte("data:")); err != nil || f.last.Equal(long) {
		t.Errorf("%s, %v", f.last, err)
	}
}

// Token ids before the choices cannot be left out. The answer passes, and is not continued.
func TestTokenIDsBeforeTheChoices(t *testing.T) {
	var room budget
	r, err := parseRequest(kindCompletion, []byte(`{"prompt":"a","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	f := r.follow(&room)
	out, err := f.take([]byte(`data: {"prompt_token_ids":[1],"choices":[{"text":"a",` +
		`"token_ids":[2]}]}` + "\n\n"))
	if want := `data: {"prompt_token_ids":[1],"choices":[{"text":"a","token_ids":null}]}` +
		"\n\n"; err != nil || string(out) != want || f.why != unfollowedNoIDs {
		t.Errorf("%q, %v, %q; want %q", out, err, f.why, want)
	}
}

// If nothing continues, the client gets the error that the last engine has reported. It is one of
// this answer: the engine takes others.
func TestErrorInTheStreamReachesTheClient(t *testing.T) {
	const fault = `data: {"error":{"message":"no luck","code":500}}` + "\n\ndata: [DONE]\n\n"
	answer := func(w http.ResponseWriter, _ *http.Request, _ seen) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, fault)
	}
	a, b := newEngine(t, answer), newEngine(t, answer)
	px, url := start(t, Config{Decode: decoders(a.URL, b.URL), Continue: true, Times: unhurried})
	code, got, _ := post(t, url, "/v1/completions", `{"prompt":"a","stream":true}`)
	if code != http.StatusOK || got != fault {
		t.Errorf("%d %q, want %q", code, got, fault)
	}
	if n := testutil.ToFloat64(px.met.unfollowed.WithLabelValues(unfollowedFailures)); n != 1 {
		t.Errorf("%v refused continuations", n)
	}
	for _, e := range px.decode.list() {
		e.mu.Lock()
		if e.health.failures > 0 {
			t.Errorf("%s: %d failures", e.url, e.health.failures)
		}
		e.mu.Unlock()
	}
}

// FuzzFollowed: whatever an engine sends, in whatever parts, the client gets the same.
func FuzzFollowed(f *testing.F) {
	for _, c := range seamCases {
		f.Add([]byte(c.body), 3)
	}
	f.Add([]byte(`data: {"id":"A","choices":[{"index":0,"text":"\u00e9","logprobs":null,`+
		`"finish_reason":"stop","stop_reason":7,"token_ids":[1,2],"prompt_token_ids":[3]}],`+
		`"usage":{}}`+"\n\n"+
		`data: {"choices":[],"usage":{"prompt_tokens":1}}`+"\n\ndata: [DONE]\n\n"), 5)
	f.Add([]byte(`data: {"choices":[{"delta":{"role":"assistant","content":""}}]}`+"\n\n"), 1)
	f.Add([]byte(`data: {"error":{"code":500}}`+"\n\n"), 1)
	f.Add([]byte("data\r\n"), 5)
	f.Add([]byte(`data: {"prompt_token_ids":[1],"choices":[{"text":"a","token_ids":[2]}]}`+"\n\n"), 1)
	f.Fuzz(func(t *testing.T, sent []byte, part int) {
		for _, next := range []bool{false, true} {
			var outs [2][]byte
			var errs [2]error
			for i, size := range []int{len(sent), max(1, part%64)} {
				var b budget
				b.give(1 << 20)
				a := &followed{kind: kindChat, budget: &b, next: next, stops: stops{list: []string{"ab", "é"}}}
				if next {
					a.prompt, a.head = []uint32{1}, []byte(`{"id":"A",`)
					a.seam = newSeam(a.stops, "xa", 1)
				}
				for rest := sent; len(rest) > 0 && errs[i] == nil; {
					n := min(size, len(rest))
					var out []byte
					out, errs[i] = a.take(rest[:n])
					outs[i], rest = append(outs[i], out...), rest[n:]
				}
				a.end()
				if b.free.Load() != 1<<20 {
					t.Fatalf("%d bytes are left of the budget", b.free.Load())
				}
			}
			if !bytes.Equal(outs[0], outs[1]) || !errors.Is(errs[0], errs[1]) {
				t.Fatalf("at once %q, %v; in parts %q, %v", outs[0], errs[0], outs[1], errs[1])
			}
		}
	})
}

// FuzzSeam: a stop string over the seam ends the answer where one engine would have ended it.
func FuzzSeam(f *testing.F) {
	f.Add("some te", "xt after", "text", "never", 3, false)
	f.Add("aab", "cd", "abc", "cd", 1, true)
	f.Add("é", "€b", "é€b", "b", 2, false)
	f.Fuzz(func(t *testing.T, before, after, one, two string, part int, include bool) {
		s := stops{list: []string{one, two}, include: include}
		for _, text := range []string{before, after, one, two} {
			if !utf8.ValidString(text) {
				return // JSON has none
			}
		}
		if one == "" || two == "" {
			return
		}
		if _, stop := matched(before, s.list); stop != "" {
			return // the first engine has ended the answer
		}
		checkSeam(t, before, after, s, max(1, part%8))
	})
}

// Few letters, so that most texts have stop strings, over the seam or not.
func TestSeamOfRandomTexts(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	text := func(longest int) (s string) {
		for range r.IntN(longest + 1) {
			s += []string{"a", "b", "é"}[r.IntN(3)]
		}
		return s
	}
	for range 50_000 {
		s := stops{include: r.IntN(2) == 0}
		for range 1 + r.IntN(3) {
			s.list = append(s.list, text(5)+"a")
		}
		before := text(8)
		if _, stop := matched(before, s.list); stop == "" {
			checkSeam(t, before, text(12), s, 1+r.IntN(4))
		}
	}
}

func checkSeam(t *testing.T, before, after string, s stops, part int) {
	t.Helper()
	want, wantStop := whole(before+after, &s)
	got, gotStop := overSeam(before, after, &s, part)
	if got != want || gotStop != wantStop {
		t.Fatalf("%q|%q with %q, %v: %q by %q, want %q by %q", before, after, s.list, s.include, got,
			gotStop, want, wantStop)
	}
}

// whole is the answer of one engine.
func whole(text string, s *stops) (string, string) {
	at, stop := matched(text, s.list)
	if stop == "" {
		return text, ""
	}
	if s.include {
		at += len(stop)
	}
	return text[:at], stop
}

// overSeam is the answer of two engines, of which the second one sends parts.
func overSeam(before, after string, s *stops, part int) (all, stop string) {
	sent := len(before)
	for range s.held() {
		if s.include {
			break
		}
		_, n := utf8.DecodeLastRuneInString(before[:sent])
		sent -= n
	}
	x := newSeam(*s, before, sent)
	all = before[:sent]
	rest, own := after, ""
	if _, found := matched(after, s.list); found != "" {
		rest, own = whole(after, s)
	}
	held := s.held()
	if s.include {
		held = 0
	}
	runes := []rune(rest)
	over := false
	for at := 0; ; at += part {
		last := at+part+held >= len(runes)
		end := min(at+part, len(runes))
		if last {
			end = len(runes)
		}
		text, crossed, ended := string(runes[min(at, end):end]), "", false
		if !over {
			mine := ""
			if last {
				mine = own
			}
			text, crossed, ended = x.add(text, mine, last)
			over = ended
		}
		all += text
		switch {
		case crossed != "":
			return all, crossed
		case last:
			return all, own
		}
	}
}
