package proxy

import (
	"bytes"
	"container/list"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Bounds of questions for a prompt's tokens.
const (
	tokenizeTimeout = time.Second     // a request waits that long at most
	tokenizePause   = 2 * time.Second // an engine gets no question after one that it did not answer
	tokenizeLog     = time.Minute     // an engine has one line in that time
	tokenizeAtOnce  = 32              // questions
	maxTokenize     = 4 << 20         // bytes of a prompt
	maxTokens       = 1 << 20         // of a prompt
	maxTokensAnswer = 32 << 20        // bytes
	keptTokens      = 4 << 20         // of answers that are kept
	keptAnswers     = 1 << 14
)

// Values of the label result.
const (
	tokensGiven  = "given"  // the prompt is a list of tokens
	tokensKept   = "kept"   // the answer to an equal question
	tokensAsked  = "asked"  // an engine answered
	tokensFailed = "failed" // no engine answered in time
	tokensNone   = "none"   // the prompt cannot be asked for
)

// tokenizer turns prompts into tokens by asking engines, and keeps answers.
type tokenizer struct {
	results *prometheus.CounterVec
	slots   chan struct{}
	turn    atomic.Uint32

	mu     sync.Mutex // guards all below
	kept   map[[sha256.Size]byte]*list.Element
	order  list.List // of *answer, the last used first
	tokens int
}

// mute is an engine that did not answer, with times in nanoseconds.
type mute struct {
	until  atomic.Int64 // it gets no question
	logged atomic.Int64 // its last line in the log
}

func (m *mute) paused(now time.Time) bool { return now.UnixNano() < m.until.Load() }

// fail begins a pause, and reports whether a line is due.
func (m *mute) fail(now time.Time) bool {
	m.until.Store(now.Add(tokenizePause).UnixNano())
	last := m.logged.Load()
	return (last == 0 || now.UnixNano()-last >= int64(tokenizeLog)) &&
		m.logged.CompareAndSwap(last, now.UnixNano())
}

// answer is the tokens of a question.
type answer struct {
	key    [sha256.Size]byte
	tokens []uint32
}

func newTokenizer(reg prometheus.Registerer) *tokenizer {
	t := &tokenizer{slots: make(chan struct{}, tokenizeAtOnce),
		kept: map[[sha256.Size]byte]*list.Element{},
		results: counterVec("tokenizations_total", "Prompts, by the source of their tokens.",
			"result")}
	reg.MustRegister(t.results)
	return t
}

func (t *tokenizer) get(key [sha256.Size]byte) ([]uint32, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e, ok := t.kept[key]
	if !ok {
		return nil, false
	}
	t.order.MoveToFront(e)
	return e.Value.(*answer).tokens, true
}

func (t *tokenizer) put(key [sha256.Size]byte, tokens []uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.kept[key]; ok || len(tokens) > keptTokens/4 {
		return
	}
	t.kept[key] = t.order.PushFront(&answer{key, tokens})
	t.tokens += len(tokens)
	for t.tokens > keptTokens || len(t.kept) > keptAnswers {
		a := t.order.Remove(t.order.Back()).(*answer)
		delete(t.kept, a.key)
		t.tokens -= len(a.tokens)
	}
}

// forget drops all answers: another process may have other tokens for a text.
func (t *tokenizer) forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.kept)
	t.order.Init()
	t.tokens = 0
}

// tokensOf returns the tokens of a request's prompt, and the engines whose reports can answer for
// it. authorization is the client's header. nil: the policy takes the prompt's text.
func (p *Proxy) tokensOf(ctx context.Context, r *request, authorization string) (tokens []uint32,
	about []bool) {
	if about = p.about(r.model); about == nil {
		return nil, nil
	}
	tokens, result := p.tokenize(ctx, r, authorization)
	p.tokens.results.WithLabelValues(result).Inc()
	return tokens, about
}

func (p *Proxy) tokenize(ctx context.Context, r *request, authorization string) (tokens []uint32,
	result string) {
	tokens, question := r.question()
	if tokens != nil {
		return tokens, tokensGiven
	}
	if question == nil {
		return nil, tokensNone
	}
	t := p.tokens
	key := sha256.Sum256(question)
	if tokens, ok := t.get(key); ok {
		return tokens, tokensKept
	}
	b := p.tokenizing(r.model)
	if b == nil {
		return nil, tokensFailed
	}
	select {
	case t.slots <- struct{}{}:
		defer func() { <-t.slots }()
	default:
		return nil, tokensFailed
	}
	tokens, err := p.askTokens(ctx, b, question, authorization)
	switch {
	case err == nil:
		t.put(key, tokens)
		return tokens, tokensAsked
	case errors.Is(err, errTokens): // of this question only: others may be answered
	case ctx.Err() == nil && b.mute.fail(time.Now()):
		p.log.Warn("an engine does not answer POST /tokenize in time: hits of such prompts are guesses",
			"url", b.url, "err", err)
	}
	return nil, tokensFailed
}

// tokenizing is an engine for a model that is up and not paused, by turns; nil: there is none.
func (p *Proxy) tokenizing(model string) *backend {
	all, now := p.decode.list(), time.Now()
	first := int(p.tokens.turn.Add(1) % uint32(max(len(all), 1)))
	for i := range all {
		b := all[(first+i)%len(all)]
		if c := b.candidate(now, model); c.takes() && c.serves == servesIt && !b.mute.paused(now) {
			return b
		}
	}
	return nil
}

var errTokens = errors.New("the engine refuses the question for tokens")

// ofQuestion reports whether a status is about the question. The other ones are about the engine:
// it has no such URL, or no time.
func ofQuestion(status int) bool {
	return status >= http.StatusBadRequest && status < http.StatusInternalServerError &&
		status != http.StatusNotFound && status != http.StatusMethodNotAllowed &&
		status != http.StatusTooManyRequests
}

// askTokens asks an engine.
func (p *Proxy) askTokens(ctx context.Context, b *backend, question []byte, authorization string) (
	[]uint32, error) {
	ctx, cancel := context.WithTimeout(ctx, tokenizeTimeout)
	defer cancel()
	h := http.Header{"Content-Type": {"application/json"}}
	if authorization != "" {
		h.Set("Authorization", authorization) // the client's own, as for its request
	}
	body, err := p.ask(ctx, b.url, "/tokenize", h, question, maxTokensAnswer)
	status := (*statusError)(nil)
	if errors.As(err, &status) && ofQuestion(status.status) || len(body) == maxTokensAnswer {
		return nil, errTokens
	}
	if err != nil {
		return nil, err
	}
	var a struct {
		Tokens []uint32 `json:"tokens"`
	}
	if err := json.Unmarshal(body, &a); err != nil {
		return nil, fmt.Errorf("POST %s/tokenize: %w", b.url, err)
	}
	if len(a.Tokens) == 0 || len(a.Tokens) > maxTokens {
		return nil, errTokens
	}
	return a.Tokens, nil
}

// Fields of a request that its tokens depend on, and that /tokenize takes.
var (
	completionFields = []string{"model", "prompt", "add_special_tokens"}
	chatFields       = []string{"model", "messages", "add_generation_prompt",
		"continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs",
		"tools"}
)

// Fields with which a prompt has other tokens, or its blocks other hashes, in a way that /tokenize
// does not have.
var opaqueFields = []string{"cache_salt", "truncate_prompt_tokens", "prompt_embeds", "documents",
	"reasoning_effort", "mm_processor_kwargs", "media_io_kwargs", "suffix"}

// question is the body of POST /tokenize, or the tokens themselves; neither: the router cannot find
// the tokens.
func (r *request) question() (tokens []uint32, question []byte) {
	if r.alone != "" || r.prompts != 1 {
		return nil, nil
	}
	for _, key := range opaqueFields {
		if raw, ok := r.fields[key]; ok && !isNull(raw) {
			return nil, nil
		}
	}
	names := completionFields
	f := map[string]json.RawMessage{}
	if r.kind == kindChat {
		names = chatFields
		if !textOnly(r.fields["messages"]) ||
			bytes.Equal(r.fields["tool_choice"], []byte(`"none"`)) && r.fields["tools"] != nil {
			return nil, nil
		}
	} else if tokens, text := onePrompt(r.fields["prompt"], true); tokens != nil {
		return tokens, nil
	} else if f["prompt"] = text; text == nil {
		return nil, nil
	}
	for _, name := range names {
		if raw, ok := r.fields[name]; ok && !isNull(raw) && f[name] == nil {
			f[name] = raw
		}
	}
	question, err := json.Marshal(f) // without spaces: an equal one is known
	if err != nil || len(question) > maxTokenize {
		return nil, nil
	}
	return nil, question
}

// onePrompt is the tokens, or the text, of a completion's only prompt. nested: it may be the only
// item of a list.
func onePrompt(raw json.RawMessage, nested bool) (tokens []uint32, text json.RawMessage) {
	if len(raw) == 0 {
		return nil, nil
	}
	if raw[0] == '"' {
		return nil, raw
	}
	if c := firstItem(raw); c != '[' && c != '"' {
		return tokenIDs(raw), nil
	}
	var list []json.RawMessage
	if !nested || json.Unmarshal(raw, &list) != nil || len(list) != 1 {
		return nil, nil
	}
	return onePrompt(list[0], false)
}

// firstItem is the first byte of the first item of a list; ']': there is none; 0: no list.
func firstItem(raw []byte) byte {
	if len(raw) < 2 || raw[0] != '[' {
		return 0
	}
	return raw[skipSpace(raw, 1)]
}

// tokenIDs reads a list of token ids; nil: it is none, or too long.
func tokenIDs(raw []byte) []uint32 {
	maxItems := bytes.Count(raw, []byte{','}) + 1
	if maxItems > maxTokens {
		return nil
	}
	tokens, _ := appendIDs(make([]uint32, 0, maxItems), raw)
	return tokens
}

// appendIDs adds the ids of a list that is not empty; nil, false: it is no list of ids. A list ends
// with a bracket.
func appendIDs(tokens []uint32, raw []byte) ([]uint32, bool) {
	if firstItem(raw) == 0 {
		return nil, false
	}
	for at := 1; ; at++ {
		at = skipSpace(raw, at)
		id, from := uint64(0), at
		for ; raw[at] >= '0' && raw[at] <= '9'; at++ {
			if id = 10*id + uint64(raw[at]-'0'); id > math.MaxUint32 {
				return nil, false
			}
		}
		if at == from {
			return nil, false
		}
		tokens = append(tokens, uint32(id))
		switch at = skipSpace(raw, at); raw[at] {
		case ',':
		case ']':
			return tokens, true
		default:
			return nil, false
		}
	}
}

// textOnly reports whether messages have no images or other parts than text.
func textOnly(raw json.RawMessage) bool {
	var list []struct {
		Content json.RawMessage `json:"content"`
	}
	if json.Unmarshal(raw, &list) != nil {
		return false
	}
	for _, m := range list {
		if len(m.Content) == 0 || m.Content[0] != '[' {
			continue
		}
		var parts []struct {
			Type string `json:"type"`
		}
		if json.Unmarshal(m.Content, &parts) != nil {
			return false
		}
		for _, part := range parts {
			if part.Type != "text" {
				return false
			}
		}
	}
	return true
}
