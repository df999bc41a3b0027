// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"container/list"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Bounds of questions for a prompt's tokens.
const (
	tokenizeTimeout = time.Second     // a request waits that long at most
	tokenizePause   = 2 * time.Second // without questions after one without an answer
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
	paused  atomic.Int64 // until this time, in nanoseconds
	turn    atomic.Uint32

	mu     sync.Mutex // guards all below
	kept   map[[sha256.Size]byte]*list.Element
	order  list.List // of *answer, the last used first
	tokens int
}

// answer is the tokens of a question.
type answer struct {
	key    [sha256.Size]byte
	tokens []uint32
}

func newTokenizer(reg prometheus.Registerer) *tokenizer {
	t := &tokenizer{slots: make(chan struct{}, tokenizeAtOnce),
		kept: map[[sha256.Size]byte]*list.Element{},
		results: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "kvspray",
			Subsystem: "proxy", Name: "tokenize_total",
			Help: "Prompts by how the router learned their tokens."}, []string{"result"})}
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

// tokensOf returns the tokens of a request's prompt, and the engines whose reports can answer for
// it. authorization is the client's header. nil: the policy takes the prompt's text.
func (p *Proxy) tokensOf(ctx context.Context, r *request, authorization string) (tokens []uint32,
	about []bool) {
	if p.reporters == nil {
		return nil, nil
	}
	if about = p.reporters.about(r.modelOf()); about == nil {
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
	if time.Now().UnixNano() < t.paused.Load() {
		return nil, tokensFailed
	}
	select {
	case t.slots <- struct{}{}:
		defer func() { <-t.slots }()
	default:
		return nil, tokensFailed
	}
	tokens, err := p.askTokens(ctx, question, authorization)
	if err != nil {
		if errors.Is(err, errTokens) {
			return nil, tokensFailed // a question of its own kind: others may be answered
		}
		if ctx.Err() == nil && t.paused.Swap(time.Now().Add(tokenizePause).UnixNano()) == 0 {
			p.log.Warn("no engine answers POST /tokenize in time: hits of such prompts are guesses",
				"err", err)
		}
		return nil, tokensFailed
	}
	t.put(key, tokens)
	return tokens, tokensAsked
}

var errTokens = errors.New("the engine refuses the question for tokens")

// askTokens asks one engine that is up, by turns.
func (p *Proxy) askTokens(ctx context.Context, question []byte, authorization string) ([]uint32,
	error) {
	ctx, cancel := context.WithTimeout(ctx, tokenizeTimeout)
	defer cancel()
	all := p.decode.all
	first := int(p.tokens.turn.Add(1)) % len(all)
	b := all[first]
	for i := range all {
		if b = all[(first+i)%len(all)]; b.isUp() {
			break
		}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url+"/tokenize",
		bytes.NewReader(question))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if authorization != "" {
		req.Header.Set("Authorization", authorization) // the client's own, as for its request
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }() // read to its end or aborted
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxTokensAnswer))
	if err != nil {
		return nil, err
	}
	if c := resp.StatusCode; c == http.StatusBadRequest || c == http.StatusUnauthorized ||
		c == http.StatusForbidden {
		return nil, errTokens
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("POST %s/tokenize: %s: %s", b.url, resp.Status, firstBytes(body))
	}
	var a struct {
		Tokens []uint32 `json:"tokens"`
	}
	if err := json.Unmarshal(body, &a); err != nil {
		return nil, fmt.Errorf("POST %s/tokenize: %w", b.url, err)
	}
	if len(a.Tokens) == 0 || len(a.Tokens) > maxTokens {
		return nil, fmt.Errorf("POST %s/tokenize: %d tokens; want 1 to %d", b.url, len(a.Tokens),
			maxTokens)
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
// does not know.
var opaqueFields = []string{"cache_salt", "truncate_prompt_tokens", "prompt_embeds", "documents",
	"reasoning_effort", "mm_processor_kwargs", "media_io_kwargs", "suffix"}

// question is the body of POST /tokenize, or the tokens themselves; neither: the router cannot know
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
	question, err := json.Marshal(f)
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
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil || len(list) == 0 || len(list) > maxTokens {
		return nil, nil
	}
	if c := list[0][0]; c == '[' || c == '"' {
		if len(list) != 1 || !nested {
			return nil, nil
		}
		return onePrompt(list[0], false)
	}
	var ids []int64
	if json.Unmarshal(raw, &ids) != nil || slices.ContainsFunc(ids, func(n int64) bool {
		return n < 0 || n > math.MaxUint32
	}) {
		return nil, nil
	}
	tokens = make([]uint32, len(ids))
	for i, n := range ids {
		tokens[i] = uint32(n)
	}
	return tokens, nil
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
