package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Bounds of one continuation.
const (
	resumeWait   = 10 * time.Second // for an engine that takes the rest
	seamTimeout  = 5 * time.Second  // of one question for text
	seamTokens   = 64               // whose text shows whether a character is whole
	maxCut       = 16               // last tokens that can be parts of a character
	maxSeamBytes = 64 << 20         // of the text of an answer, as JSON
	seamBytes    = 16 << 10         // of that of seamTokens
	charBytes    = 6                // of one byte of text as JSON, at most
	idBytes      = 7                // of a token id in a list: vocabularies are below 1,000,000
)

// resume lets other engines continue an answer that has broken, until it ends.
func (j *job) resume(ctx context.Context, failed *backend) {
	f := j.follow
	if f == nil {
		return
	}
	j.req.load = nil // it was for the engine that failed
	for j.broken && ctx.Err() == nil {
		f.failed()
		if f.finished && f.why == "" {
			f.close()
			j.broken = false
			_ = newSink(j.w).send(f.out) // the client may be gone
			return
		}
		a, why := (*reply)(nil), f.why
		if why == "" {
			a, why = j.askRest(ctx, failed)
		}
		if why != "" {
			if ctx.Err() == nil {
				j.p.met.unfollowed.WithLabelValues(why).Inc()
				j.p.log.Warn("the answer is not continued", "request", j.id, "reason", why)
				if out := f.reported(); out != nil {
					j.broken = false
					_ = newSink(j.w).send(out) // the client may be gone
				}
			}
			return
		}
		j.p.met.continued.Inc()
		j.p.met.pauses.Observe(time.Since(f.last).Seconds())
		j.p.met.recomputed.Add(float64(f.promptSize + f.answerSize))
		j.p.log.Info("another engine continues the answer", "request", j.id, "url", a.b.url,
			"prompt", f.promptSize, "answer", f.answerSize)
		j.broken = false
		j.copy(a)
		failed = a.b
		a.close()
		failed.done()
	}
}

// askRest finds an engine that continues the answer, and returns the begin of its part. why: the
// answer is not continued.
func (j *job) askRest(ctx context.Context, failed *backend) (a *reply, why string) {
	f := j.follow
	end := time.Now().Add(resumeWait)
	skip := map[*backend]bool{failed: true}
	cut := false
	for range decodeTries {
		b := j.p.decode.take(skip, j.req.model, candidate.possible)
		for b == nil {
			if time.Now().After(end) || !pause(ctx, ownFaultPause) {
				return nil, unfollowedNoEngine
			}
			clear(skip) // one that has failed may be back
			b = j.p.decode.take(skip, j.req.model, candidate.possible)
		}
		skip[b] = true
		if f.tokens && !cut {
			cut, why = j.cut(ctx, b)
		}
		if why == "" && (cut || !f.tokens) {
			a, why = j.askRestOf(ctx, b, skip)
		}
		if a != nil {
			return a, ""
		}
		b.done()
		if why != "" || ctx.Err() != nil {
			return nil, why
		}
	}
	return nil, unfollowedNoEngine
}

// cut asks an engine for the text before the seam. ok: it is known.
func (j *job) cut(ctx context.Context, b *backend) (ok bool, why string) {
	f := j.follow
	limit, held := f.cutBytes()
	if !f.budget.take(held) {
		return false, unfollowedMemory
	}
	defer f.budget.give(held)
	why, err := f.cut(func(ids []uint32) (string, error) { return j.textOf(ctx, b, ids, limit) })
	if refused(err) || errors.Is(err, errSeamText) {
		return false, unfollowedSeam // or the engine has no such URL
	}
	if err != nil && ctx.Err() == nil {
		j.p.log.Warn("an engine does not return the text of tokens", "request", j.id, "url", b.url,
			"err", err)
	}
	return err == nil, why
}

// askRestOf asks one engine. nil without a reason: it has failed.
func (j *job) askRestOf(ctx context.Context, b *backend, skip map[*backend]bool) (a *reply,
	why string) {
	f := j.follow
	j.asks = j.req.kind
	body := j.req.forDecode(nil)
	if f.tokens {
		if body, why = j.req.forRest(f, b.modelLength(j.req.model)); why != "" {
			return nil, why
		}
		j.asks = kindCompletion
	}
	a, err := j.askAnswer(ctx, b, maps.Clone(skip), body)
	switch {
	case err == nil && a.end.marks != nil:
		f.next, f.again = f.tokens, !f.tokens && f.head != nil
		return a, ""
	case err == nil:
		a.close()
		return nil, unfollowedRefused
	case ctx.Err() == nil && signOfError(err) != signBusy && !notReached(err):
		f.failed() // it may have got the request
	}
	return nil, f.why
}

var errSeamText = errors.New("the text of tokens is longer than that of the answer can be")

// textOf asks an engine for the text of tokens, of at most some bytes as JSON.
func (j *job) textOf(ctx context.Context, b *backend, ids []uint32, limit int64) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, seamTimeout)
	defer cancel()
	// net/http repeats the request if the engine has closed the idle connection.
	h := http.Header{"Content-Type": {"application/json"}, "Idempotency-Key": nil}
	if v := j.in.Header.Get("Authorization"); v != "" {
		h.Set("Authorization", v)
	}
	fields := map[string]json.RawMessage{"tokens": listIDs(ids)}
	if model := j.req.fields["model"]; model != nil {
		fields["model"] = model
	}
	body, err := j.p.ask(ctx, b.url, "/detokenize", h, encode(fields), limit)
	if err != nil {
		return "", err
	}
	if int64(len(body)) == limit {
		return "", errSeamText
	}
	var text struct {
		Prompt *string `json:"prompt"`
	}
	if err := json.Unmarshal(body, &text); err != nil {
		return "", fmt.Errorf("POST %s/detokenize: %w", b.url, err)
	}
	if text.Prompt == nil {
		return "", fmt.Errorf("POST %s/detokenize: no prompt in the answer", b.url)
	}
	return *text.Prompt, nil
}

// partOfCharacter matches a text whose end is a part of a character, also before tokens without
// text, which /detokenize writes like this.
var partOfCharacter = regexp.MustCompile(`\x{FFFD}(<[^<>]{1,64}>|\[[^\[\]]{1,64}\])*$`)

// cutBytes is the largest text that cut needs, and what it holds meanwhile: the ids three times, of
// which two are JSON, and the text as JSON and by itself.
func (f *followed) cutBytes() (text, held int64) {
	tokens := int64(2 * seamTokens)
	if len(f.stops.list) > 0 {
		tokens += int64(len(f.answer))
	}
	heldBack := utf8.UTFMax * f.stops.held()
	text = min(maxSeamBytes, seamBytes+charBytes*int64(len(f.text)+heldBack))
	return text, (4+2*idBytes)*tokens + 2*text
}

// cut drops the last tokens of an answer that are parts of a character, and finds the text that the
// failed engine has held back. An engine whose prompt ends within a character would repeat the text
// of the prompt.
func (f *followed) cut(textOf func([]uint32) (string, error)) (why string, err error) {
	f.offset += f.lastOffset()
	before := f.prompt[max(0, len(f.prompt)-seamTokens):]
	text := ""
	dropped := 0
	for {
		ids := slices.Concat(before, f.answer)
		if len(f.stops.list) == 0 {
			ids = ids[max(0, len(ids)-seamTokens):]
		}
		if text, err = textOf(ids); err != nil {
			return "", err
		}
		if !partOfCharacter.MatchString(text) {
			break
		}
		if dropped++; dropped > maxCut || len(f.answer) == 0 || f.givesIDs || f.logs {
			return unfollowedSeam, nil // the client has these tokens, or the prompt ends like this
		}
		f.answer = f.answer[:len(f.answer)-1]
		f.answerSize--
	}
	if len(f.stops.list) == 0 {
		return "", nil
	}
	prefix, err := textOf(before)
	if err != nil {
		return "", err
	}
	all, ok := strings.CutPrefix(text, prefix)
	if !ok || !strings.HasPrefix(all, string(f.text)) {
		return unfollowedSeam, nil
	}
	f.seam = newSeam(f.stops, all, len(f.text))
	return "", nil
}

// lastOffset is the length of the text of the current engine's tokens, if the client gets offsets.
func (f *followed) lastOffset() int {
	end, ok := endOfText(f.logprobs)
	if f.logprobs = nil; !ok {
		return 0
	}
	return end
}

// listIDs is a JSON list of token ids.
func listIDs(lists ...[]uint32) []byte {
	size := 2
	for _, ids := range lists {
		size += idBytes * len(ids)
	}
	out := append(make([]byte, 0, size), '[')
	for _, ids := range lists {
		for _, id := range ids {
			out = append(strconv.AppendUint(out, uint64(id), 10), ',')
		}
	}
	return append(bytes.TrimSuffix(out, []byte{','}), ']')
}

// completionTokens is the default of max_tokens in the API of completions, if it is absent.
const completionTokens = 16

// forRest is the body for an engine that continues an answer, a completion. length is the model's
// largest number of tokens; 0: unknown.
func (r *request) forRest(f *followed, length int) (body []byte, why string) {
	fields := map[string]json.RawMessage{}
	if r.kind == kindChat {
		for _, name := range sampling {
			if raw := r.fields[name]; raw != nil {
				fields[name] = raw
			}
		}
		if f.logs {
			fields["logprobs"] = marshal(f.top)
		}
	} else {
		maps.Copy(fields, r.fields)
		delete(fields, "truncate_prompt_tokens") // its tokens are those that were left
	}
	left := r.limit(length-len(f.prompt)) - len(f.answer)
	if left <= 0 {
		return nil, unfollowedLength
	}
	fields["max_tokens"] = marshal(left)
	if n, ok := r.whole("min_tokens"); ok {
		if n = max(0, n-len(f.answer)); n > 0 && f.seam != nil {
			return nil, unfollowedSeam // until then, no stop string ends the answer
		}
		fields["min_tokens"] = marshal(n)
	}
	ids := idBytes * int64(len(f.prompt)+len(f.answer))
	if !f.ask(2 * ids) { // the list, and the body with it
		return nil, unfollowedMemory
	}
	fields["prompt"] = listIDs(f.prompt, f.answer)
	if params := r.ownForAlone(); params != nil {
		fields[paramsKey] = params
	}
	body = encode(fields)
	f.asked -= ids
	f.budget.give(ids)
	return body, ""
}

// limit is the largest number of tokens of an answer. room is that of the model after the prompt.
func (r *request) limit(room int) int {
	if n, ok := r.whole("max_completion_tokens"); ok && r.kind == kindChat {
		return n
	}
	if n, ok := r.whole("max_tokens"); ok {
		return n
	}
	if r.kind == kindCompletion && r.fields["max_tokens"] == nil { // null: the model's rest
		return completionTokens
	}
	return room
}
