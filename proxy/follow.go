package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"
)

// Bounds of one answer that the router follows.
const (
	maxEvent  = 16 << 20 // bytes: the first event has the prompt's token ids
	keptEvent = 64 << 10 // bytes of a buffer for parts of events that is kept
	maxStops  = 64       // stop strings
	// An engine that fails after fewer tokens has failed soon: the request may be the cause.
	soonTokens    = 32
	maxSoonFailed = 2
)

// Reasons why an answer is not continued: values of the label.
const (
	unfollowedSeveral    = "several_answers" // n, or a list of prompts
	unfollowedPenalty    = "penalty"
	unfollowedStructured = "structured_output"
	unfollowedTools      = "tools"
	unfollowedImages     = "images"
	unfollowedPrompt     = "prompt_output" // echo, prompt logprobs, beam search
	unfollowedField      = "field"         // another one whose meaning depends on the whole answer
	unfollowedParser     = "parser"        // the engine has taken the text apart
	unfollowedNoIDs      = "no_token_ids"  // the engine does not return them
	unfollowedLong       = "too_long"
	unfollowedMemory     = "memory"
	unfollowedFailures   = "engines_failed" // each soon after it got the request
	unfollowedNoEngine   = "no_engine"
	unfollowedRefused    = "refused"    // by the next engine
	unfollowedSeam       = "seam"       // the text before it cannot be determined
	unfollowedLength     = "max_tokens" // the model's length is unknown
)

var unfollowedReasons = []string{unfollowedSeveral, unfollowedPenalty, unfollowedStructured,
	unfollowedTools, unfollowedImages, unfollowedPrompt, unfollowedField, unfollowedParser,
	unfollowedNoIDs, unfollowedLong, unfollowedMemory, unfollowedFailures, unfollowedNoEngine,
	unfollowedRefused, unfollowedSeam, unfollowedLength}

// unfollowedFields are fields with which an answer cannot be continued: the next engine would take
// the former one's tokens for a part of the prompt.
var unfollowedFields = []struct{ name, reason string }{
	{"presence_penalty", unfollowedPenalty}, {"frequency_penalty", unfollowedPenalty},
	{"structured_outputs", unfollowedStructured}, {"response_format", unfollowedStructured},
	{"tools", unfollowedTools}, {"functions", unfollowedTools},
	{"echo", unfollowedPrompt}, {"prompt_logprobs", unfollowedPrompt},
	{"prompt_embeds", unfollowedPrompt}, {"use_beam_search", unfollowedPrompt},
	{"bad_words", unfollowedField}, {"repetition_detection", unfollowedField},
	{"thinking_token_budget", unfollowedField}, {"return_weight_versions", unfollowedField},
	{"suffix", unfollowedField}, {"watermarking", unfollowedField},
	{"vllm_xargs", unfollowedField}, {"extra_args", unfollowedField},
}

// sampling are the fields of a chat that have the same meaning in a completion.
var sampling = []string{"model", "temperature", "top_p", "top_k", "min_p", "seed",
	"repetition_penalty", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
	"min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids",
	"logit_bias", "user", "priority", "session_id", "cache_salt", "stream", "stream_options",
	"stream_interval", "return_token_ids"}

// prompting are the fields of a chat that a completion has in another form, or does not need,
// because its prompt is there.
var prompting = []string{"messages", "max_tokens", "max_completion_tokens", "logprobs",
	"top_logprobs", "n", "add_generation_prompt", "continue_final_message", "add_special_tokens",
	"chat_template", "chat_template_kwargs", "documents", "truncate_prompt_tokens",
	"truncation_side", "reasoning_effort", "include_reasoning", "response_format", "tool_choice",
	"parallel_tool_calls", "return_tokens_as_token_ids", "logprob_token_ids", "return_prompt_text",
	"request_id", "metadata", "store", "agent_hint", "agent_hints"}

// unfollowed is why an answer to a request cannot be continued; empty: it can be.
func (r *request) unfollowed() string {
	if r.n != 1 || r.prompts != 1 {
		return unfollowedSeveral
	}
	for _, f := range unfollowedFields {
		if given(r.fields[f.name]) && !(f.name == "response_format" && r.plainText()) {
			return f.reason
		}
	}
	if r.kind == kindChat {
		if why := r.unfollowedChat(); why != "" {
			return why
		}
	}
	if s, ok := r.stops(); !ok || len(s.list) > maxStops {
		return unfollowedField
	}
	return ""
}

func (r *request) unfollowedChat() string {
	if !textOnly(r.fields["messages"]) {
		return unfollowedImages
	}
	// These have another form in a chat's answer than what can be derived from a completion's.
	if given(r.fields["logprobs"]) && (given(r.fields["return_tokens_as_token_ids"]) ||
		given(r.fields["logprob_token_ids"])) {
		return unfollowedField
	}
	for name, raw := range r.fields {
		if given(raw) && !slices.Contains(sampling, name) && !slices.Contains(prompting, name) {
			return unfollowedField // an engine may sample by it
		}
	}
	return ""
}

// plainText reports whether the response format is that of an answer without one.
func (r *request) plainText() bool {
	var format struct {
		Type string `json:"type"`
	}
	return json.Unmarshal(r.fields["response_format"], &format) == nil && format.Type == "text"
}

// given reports whether a field has another value than one that stands for its absence.
func given(raw json.RawMessage) bool {
	switch string(raw) {
	case "", "null", "false", `""`, "[]", "{}":
		return false
	}
	zero, err := strconv.ParseFloat(string(raw), 64)
	return err != nil || zero != 0
}

// stops reads the stop strings.
func (r *request) stops() (s stops, ok bool) {
	s.include = given(r.fields["include_stop_str_in_output"])
	raw := r.fields["stop"]
	if !given(raw) {
		return s, true
	}
	var one string
	if json.Unmarshal(raw, &one) == nil {
		s.list = []string{one}
		return s, true
	}
	return s, json.Unmarshal(raw, &s.list) == nil
}

// whole is a field that is a number of tokens.
func (r *request) whole(name string) (n int, ok bool) {
	raw := r.fields[name]
	return n, len(raw) > 0 && !isNull(raw) && json.Unmarshal(raw, &n) == nil
}

// askIDs makes engines return token ids, and sample so that another engine can go on: with a seed,
// engines whose noise depends on seed and position alone sample the same tokens.
func (r *request) askIDs() {
	r.raw = nil
	r.fields["return_token_ids"] = json.RawMessage("true")
	greedy := len(r.fields["temperature"]) > 0 && !given(r.fields["temperature"]) &&
		!isNull(r.fields["temperature"])
	if seed := r.fields["seed"]; !greedy && (len(seed) == 0 || isNull(seed)) {
		r.fields["seed"] = json.RawMessage(strconv.FormatInt(rand.Int64N(math.MaxInt64), 10))
	}
}

// followed is an answer whose token ids the router keeps, so that another engine can continue it.
type followed struct {
	kind      kind
	why       string // it cannot be continued; empty: it can be
	givesIDs  bool   // to the client
	givesUse  bool   // the usage, at the end
	logs      bool   // logprobs
	top       int    // candidates of a chat's logprobs
	stops     stops
	budget    *budget
	taken     int64 // of it, bytes that the answer holds
	asked     int64 // of it, bytes of the request for the rest
	unchanged bool  // events pass as they are

	prompt, answer []uint32
	promptSize     int // tokens, also of an answer that is not kept any more
	answerSize     int
	head           []byte // of each event, up to the choices
	text           []byte // that the client has; only with stop strings
	logprobs       []byte // of the last event with some, of a completion
	offset         int    // of the text offsets of the current engine
	tokens         bool   // the client has an event with tokens
	finished       bool   // it has the reason of the end
	used           bool   // the usage

	// Of the current engine.
	next       bool // it continues
	again      bool // it computes the answer from the start: the client has an event, but no token
	since      int  // tokens of the answer before it
	guard      *guard
	seam       *seam
	soonFailed int       // engines in a row that soon failed
	last       time.Time // bytes came
	fault      []byte    // the event with its error, for the client if nothing continues

	held       []byte // events with the start of a character
	heldTokens int

	buf     []byte // the start of an event
	scanned int    // bytes of it without an end
	out     []byte
}

// follow begins to follow the answer to a request.
func (r *request) follow(b *budget) *followed {
	f := &followed{kind: r.kind, why: r.unfollowed(), budget: b}
	if f.why != "" {
		f.unchanged = true
		return f
	}
	f.givesIDs = given(r.fields["return_token_ids"])
	f.logs = given(r.fields["logprobs"]) || r.kind == kindCompletion &&
		string(r.fields["logprobs"]) == "0"
	f.stops, _ = r.stops()
	f.top, _ = r.whole("top_logprobs")
	var options struct {
		Usage bool `json:"include_usage"`
	}
	f.givesUse = json.Unmarshal(r.fields["stream_options"], &options) == nil && options.Usage
	r.askIDs()
	return f
}

var (
	errEngineFault = errors.New("the engine reports an error of its own in the stream")
	errStopped     = errors.New("a stop string has ended the answer")
)

// take adds bytes of the engine's answer, and returns what the client gets: whole events only, so
// that another engine can go on after any error.
func (f *followed) take(data []byte) ([]byte, error) {
	if f.unchanged {
		return data, nil
	}
	if len(data) > 0 { // not at the end of a silence
		f.last = time.Now()
	}
	if f.out = f.out[:0]; cap(f.out) > keptEvent {
		f.out = nil
	}
	if len(f.buf) > 0 {
		f.buf = append(f.buf, data...)
		data = f.buf
	}
	if f.head == nil && bytes.Contains(data[f.scanned:], []byte("\r\n")) {
		f.abandon(unfollowedNoIDs)
		f.unchanged, f.buf = true, nil
		return data, nil // events that end otherwise
	}
	for {
		i := bytes.Index(data[f.scanned:], []byte("\n\n"))
		if i < 0 {
			break
		}
		event := data[:f.scanned+i+2]
		data, f.scanned = data[len(event):], 0
		if err := f.event(event); err != nil {
			f.buf = nil // nothing of this engine follows
			return f.out, err
		}
	}
	f.scanned = max(0, len(data)-1)
	if len(data) == 0 && cap(f.buf) > keptEvent {
		f.buf = nil
	} else {
		f.buf = append(f.buf[:0], data...)
	}
	if len(data) > maxEvent {
		f.abandon(unfollowedLong)
		if f.next {
			f.buf = nil
			return f.out, errEngineFault // its events have another form
		}
		f.unchanged = true
		f.out, f.buf = slices.Concat(f.out, f.held, data), nil
	}
	f.account()
	return f.out, nil
}

// from begins with the answer of another engine.
func (f *followed) from(g *guard) {
	f.guard, f.fault = g, nil
	g.movable.Store(f.why == "")
}

// rest is what the client gets of the last event of a whole answer, which has no empty line.
func (f *followed) rest() []byte {
	if f.unchanged || len(f.buf) == 0 {
		return nil
	}
	out, _ := f.take([]byte("\n\n")) // the answer is whole
	return out
}

// account takes from the budget what the answer holds.
func (f *followed) account() {
	held := 4*int64(cap(f.prompt)+cap(f.answer)) + int64(cap(f.text)+cap(f.held)+cap(f.buf)+cap(f.out))
	if held > f.taken && !f.budget.take(held-f.taken) {
		f.abandon(unfollowedMemory)
		return
	}
	if held < f.taken {
		f.budget.give(f.taken - held)
	}
	f.taken = held
}

// end returns to the budget what the answer held.
func (f *followed) end() {
	f.budget.give(f.taken + f.asked)
	f.taken, f.asked = 0, 0
}

// ask takes from the budget what a request for the rest holds, in place of the former one's bytes.
func (f *followed) ask(bytes int64) bool {
	f.budget.give(f.asked)
	if f.asked = 0; !f.budget.take(bytes) {
		return false
	}
	f.asked = bytes
	return true
}

// abandon notes that the answer cannot be continued any more.
func (f *followed) abandon(why string) {
	if f.why == "" {
		f.why = why
	}
	f.prompt, f.answer, f.text = nil, nil, nil
	if f.guard != nil {
		f.guard.movable.Store(false)
	}
}

// event handles one event of the engine.
func (f *followed) event(event []byte) error {
	data, from := eventData(event), len(f.out)
	if data == nil || string(data) == "[DONE]" {
		f.out = append(f.out, event...)
		f.deliver(from)
		return nil
	}
	c, ok := parseChunk(data)
	var err error
	switch {
	case (!ok || c.several) && f.next, c.fault() && f.why == "":
		if c.failure.set() && len(event) <= keptEvent {
			f.fault = slices.Clone(event)
		}
		return errEngineFault
	case !ok || c.several:
		f.abandon(unfollowedNoIDs)
		f.out = append(f.out, event...)
	case c.failure.set():
		f.finished = true // by the request's own fault
		f.out = append(f.out, event...)
	default:
		answer, size, text := f.answer, f.answerSize, f.text
		f.note(&c)
		if !f.next {
			f.pass(event, &c)
		} else if err = f.rewrite(&c); errors.Is(err, errEngineFault) {
			if f.why == "" { // the client lacks these tokens
				f.answer, f.answerSize, f.text = answer, size, text
			}
			return err
		}
	}
	if f.partOfCharacter(&c) {
		f.held, f.out = append(f.held, f.out[from:]...), f.out[:from]
		f.heldTokens += c.count()
		return nil
	}
	if c.logprobs.set() && f.kind == kindCompletion && f.why == "" {
		f.logprobs = append(f.logprobs[:0], c.logprobs.of(c.data)...)
	}
	f.deliver(from)
	return err
}

// partOfCharacter reports whether the client must not get an event yet: it has ids or logprobs of
// tokens whose text comes with a later one, and if the engine fails, these are computed again.
func (f *followed) partOfCharacter(c *chunk) bool {
	n := c.count()
	return (f.givesIDs || f.logs) && len(f.stops.list) == 0 && f.why == "" && !f.finished && n > 0 &&
		!c.hasText() && f.heldTokens+n <= maxCut
}

// deliver gives the client what was held, ahead of the events from a place on.
func (f *followed) deliver(from int) {
	if len(f.held) > 0 {
		f.out = slices.Insert(f.out, from, f.held...)
		f.held, f.heldTokens = f.held[:0], 0
	}
}

// note keeps what another engine would need.
func (f *followed) note(c *chunk) {
	f.answerSize += c.count()
	if f.why != "" {
		return
	}
	if c.prompt.set() && c.prompt.at < c.head {
		f.abandon(unfollowedNoIDs) // each event would have them
		return
	}
	if c.prompt.set() && f.prompt == nil {
		if f.prompt = tokenIDs(c.prompt.of(c.data)); f.prompt == nil {
			f.abandon(unfollowedNoIDs)
			return
		}
		f.promptSize = len(f.prompt)
	}
	if !c.choice {
		return
	}
	if f.head == nil {
		f.head = slices.Clone(c.data[:c.head])
	}
	switch {
	case c.count() > 0:
		f.noteIDs(c.ids.of(c.data))
	case c.hasText() && !c.finish.set(): // at the end, engines send what they have held back
		f.abandon(unfollowedNoIDs)
	}
	if c.shaped || c.delta.set() && !c.role && !c.text.set() {
		f.abandon(unfollowedParser)
	}
}

func (f *followed) noteIDs(raw []byte) {
	answer, ok := appendIDs(f.answer, raw)
	switch {
	case !ok || f.prompt == nil:
		f.abandon(unfollowedNoIDs)
	case len(f.prompt)+len(answer) > maxTokens:
		f.abandon(unfollowedLong)
	default:
		f.answer, f.tokens = answer, true
	}
}

// pass gives the client an event of an engine that computes the whole answer.
func (f *followed) pass(event []byte, c *chunk) {
	f.finished = f.finished || c.finish.set()
	f.used = f.used || !c.choice && c.usage.set()
	if len(f.stops.list) > 0 && f.why == "" {
		text, ok := c.visible()
		if !ok {
			f.abandon(unfollowedSeam)
		}
		f.text = append(f.text, text...)
	}
	head := c.data[:c.head]
	if f.again {
		head = f.head
	}
	switch {
	case f.again && c.role:
		// The client has it.
	case !f.givesIDs && c.shapeless():
		// Only for its token ids, which the client has not asked for.
	case c.head == 0:
		f.out = append(f.out, event...)
	default:
		f.out = c.event(f.out, head, f.givesIDs)
	}
}

// shapeless reports whether the engine would not have sent the event without token ids.
func (c *chunk) shapeless() bool {
	return c.delta.end-c.delta.at == len("{}") && !c.finish.set() && !c.logprobs.set()
}

// rewrite gives the client an event of an engine that continues, in the form of the first one.
func (f *followed) rewrite(c *chunk) error {
	if !c.choice {
		if c.usage.set() {
			f.usage()
		}
		return nil
	}
	text, finish, stop := c.text.of(c.data), c.finish.of(c.data), c.stop.of(c.data)
	if len(f.stops.list) > 0 {
		visible, ok := c.visible()
		if !ok {
			return errEngineFault
		}
		if f.seam != nil {
			own := ""
			_ = json.Unmarshal(stop, &own) // a token has ended it
			crossed, over := "", false
			if visible, crossed, over = f.seam.add(visible, own, c.finish.set()); over {
				f.seam = nil
			}
			if crossed != "" {
				finish, stop = []byte(`"stop"`), marshal(crossed)
			}
			text = marshal(visible)
		}
		if f.why == "" {
			f.text = append(f.text, visible...)
		}
	}
	if !f.choice(c, text, finish, stop) {
		return errEngineFault
	}
	if f.finished && !c.finish.set() {
		f.close()
		return errStopped
	}
	return nil
}

// choice appends an event with one choice.
func (f *followed) choice(c *chunk, text, finish, stop []byte) bool {
	out := append(append(f.out, "data: "...), f.head...)
	out = append(out, `"choices":[{"index":0,`...)
	if f.kind == kindChat {
		out = append(append(out, `"delta":{"content":`...), orText(text)...)
		out = append(out, '}')
	} else {
		out = append(append(out, `"text":`...), orText(text)...)
	}
	out = append(out, `,"logprobs":`...)
	out, ok := f.logprobsOf(out, c)
	if !ok {
		return false
	}
	out = append(append(out, `,"finish_reason":`...), orNull(finish)...)
	out = append(append(out, `,"stop_reason":`...), orNull(stop)...)
	out = append(out, `,"token_ids":`...)
	if ids := c.ids.of(c.data); f.givesIDs {
		out = append(out, orNull(ids)...)
	} else {
		out = append(out, "null"...)
	}
	out = append(out, "}]"...)
	if c.usage.set() {
		out = f.count(out)
	}
	f.out = append(out, "}\n\n"...)
	f.finished = len(finish) > 0
	return true
}

func (f *followed) logprobsOf(out []byte, c *chunk) ([]byte, bool) {
	raw := c.logprobs.of(c.data)
	switch {
	case len(raw) == 0:
		return append(out, "null"...), true
	case f.kind == kindCompletion:
		return shifted(out, raw, f.offset)
	}
	logprobs, ok := chatLogprobs(raw, f.top)
	return append(out, logprobs...), ok
}

func orText(raw []byte) []byte {
	if len(raw) == 0 {
		return []byte(`""`)
	}
	return raw
}

func orNull(raw []byte) []byte {
	if len(raw) == 0 {
		return []byte("null")
	}
	return raw
}

// count appends the usage of the whole answer: an engine that continues counts the former tokens as
// prompt.
func (f *followed) count(out []byte) []byte {
	out = append(out, `,"usage":`...)
	return append(out, marshal(struct {
		Prompt int `json:"prompt_tokens"`
		Total  int `json:"total_tokens"`
		Answer int `json:"completion_tokens"`
	}{f.promptSize, f.promptSize + f.answerSize, f.answerSize})...)
}

// usage appends the event with the usage.
func (f *followed) usage() {
	f.out = append(append(append(f.out, "data: "...), f.head...), `"choices":[]`...)
	f.out = append(f.count(f.out), "}\n\n"...)
	f.used = true
}

// close appends the end of an answer whose last token the client has.
func (f *followed) close() {
	if f.givesUse && !f.used {
		f.usage()
	}
	f.out = append(f.out, "data: [DONE]\n\n"...)
}

// reported is the end of an answer that nothing continues, if its engine has reported an error.
func (f *followed) reported() []byte {
	if f.fault == nil {
		return nil
	}
	return append(f.fault, "data: [DONE]\n\n"...)
}

// failed notes that the current engine has failed.
func (f *followed) failed() {
	f.buf, f.scanned, f.out = nil, 0, f.out[:0]
	if f.why == "" {
		f.answer = f.answer[:len(f.answer)-f.heldTokens]
		f.answerSize -= f.heldTokens
	}
	f.held, f.heldTokens = nil, 0
	if f.answerSize-f.since < soonTokens {
		f.soonFailed++
	} else {
		f.soonFailed = 0
	}
	f.since = f.answerSize
	if f.soonFailed >= maxSoonFailed && f.why == "" && !f.finished {
		f.abandon(unfollowedFailures)
	}
}
