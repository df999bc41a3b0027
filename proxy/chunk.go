package proxy

import (
	"bytes"
	"encoding/json"
)

// span is the place of a value in the data of an event. The zero value is of one that is absent or
// null: an object begins before its fields.
type span struct{ at, end int }

func (s span) of(data []byte) []byte { return data[s.at:s.end] }

func (s span) set() bool { return s.end > 0 }

// chunk has the places of what the router needs in one event of a streamed completion or chat.
type chunk struct {
	data    []byte
	head    int  // the end of the fields before the choices
	choice  bool // it has one
	several bool // it has more than one

	failure, usage, prompt span // prompt has token ids

	// Of the choice.
	text, delta, ids, logprobs, finish, stop span
	shaped                                   bool // the delta has other fields than text and role
	role                                     bool // it has a role
}

// eventData is the data of an event of one line; nil: the event has another form.
func eventData(event []byte) []byte {
	data, ok := bytes.CutPrefix(bytes.TrimRight(event, "\n"), []byte("data:"))
	if !ok || bytes.IndexByte(data, '\n') >= 0 {
		return nil
	}
	return bytes.TrimLeft(data, " ")
}

// parseChunk finds the parts of a chunk. It checks only what it needs: clients check the rest.
func parseChunk(data []byte) (c chunk, ok bool) {
	c.data = data
	sound := true
	end := eachField(data, 0, func(name []byte, at, end int) bool {
		v := span{at, end}
		switch string(name) {
		case `"error"`:
			v.keep(&c.failure, data)
		case `"usage"`:
			v.keep(&c.usage, data)
		case `"prompt_token_ids"`:
			v.keep(&c.prompt, data)
		case `"choices"`:
			c.head = at - len(`:`) - len(name)
			sound = c.choices(at)
		}
		return sound
	})
	return c, sound && end == len(data)
}

// keep notes a value that is not null.
func (s span) keep(into *span, data []byte) {
	if !isNull(s.of(data)) {
		*into = s
	}
}

// choices reads the first choice of the list at a place.
func (c *chunk) choices(at int) bool {
	if c.data[at] != '[' {
		return false
	}
	if at = skipSpace(c.data, at+1); c.data[at] == ']' {
		return true
	}
	c.choice = true
	sound := true
	end := eachField(c.data, at, func(name []byte, at, end int) bool {
		v := span{at, end}
		switch string(name) {
		case `"text"`:
			v.keep(&c.text, c.data)
		case `"delta"`:
			v.keep(&c.delta, c.data)
			sound = !c.delta.set() || c.readDelta()
		case `"token_ids"`:
			v.keep(&c.ids, c.data)
		case `"prompt_token_ids"`:
			v.keep(&c.prompt, c.data)
		case `"logprobs"`:
			v.keep(&c.logprobs, c.data)
		case `"finish_reason"`:
			v.keep(&c.finish, c.data)
		case `"stop_reason"`:
			v.keep(&c.stop, c.data)
		}
		return sound
	})
	if end < 0 {
		return false
	}
	c.several = c.data[skipSpace(c.data, end)] == ','
	return sound
}

func (c *chunk) readDelta() bool {
	return eachField(c.data, c.delta.at, func(name []byte, at, end int) bool {
		v := span{at, end}
		switch string(name) {
		case `"content"`:
			v.keep(&c.text, c.data)
		case `"role"`:
			c.role = true
		default:
			c.shaped = c.shaped || !isNull(v.of(c.data))
		}
		return true
	}) == c.delta.end
}

// event appends the chunk's event with the fields before the choices of another one. It can leave
// out the token ids, as an engine that is not asked for them does.
func (c *chunk) event(out, head []byte, withIDs bool) []byte {
	out = append(append(out, "data: "...), head...)
	from := c.head
	if !withIDs {
		first, second := c.prompt, c.ids
		if second.at < first.at {
			first, second = second, first
		}
		for _, s := range [...]span{first, second} {
			if s.set() && s.at >= from {
				out = append(append(out, c.data[from:s.at]...), "null"...)
				from = s.end
			}
		}
	}
	return append(append(out, c.data[from:]...), "\n\n"...)
}

// count is how many token ids the chunk has.
func (c *chunk) count() int {
	raw := c.ids.of(c.data)
	if item := firstItem(raw); item == 0 || item == ']' {
		return 0
	}
	return bytes.Count(raw, []byte{','}) + 1
}

// visible is the text of the chunk.
func (c *chunk) visible() (text string, ok bool) {
	if !c.text.set() {
		return "", true
	}
	return text, json.Unmarshal(c.text.of(c.data), &text) == nil
}

// hasText reports whether the chunk has any text.
func (c *chunk) hasText() bool { return c.text.end-c.text.at > len(`""`) }

// fault reports whether the engine reports an error of its own, none of the request.
func (c *chunk) fault() bool {
	switch string(c.finish.of(c.data)) {
	case `"abort"`, `"error"`: // the client has not ended the request
		return true
	}
	if !c.failure.set() {
		return false
	}
	var e struct {
		Code int `json:"code"`
	}
	// vLLM's errors have the HTTP status as code.
	return json.Unmarshal(c.failure.of(c.data), &e) == nil && e.Code >= 500
}

// endOfText is where the next token's text begins, by a completion's logprobs, in code points.
func endOfText(logprobs []byte) (int, bool) {
	var l struct {
		Offsets []int    `json:"text_offset"`
		Tokens  []string `json:"tokens"`
	}
	if json.Unmarshal(logprobs, &l) != nil || len(l.Offsets) != len(l.Tokens) {
		return 0, false
	}
	if len(l.Tokens) == 0 {
		return 0, false
	}
	last := len(l.Tokens) - 1
	return l.Offsets[last] + len([]rune(l.Tokens[last])), true
}

// shifted appends a completion's logprobs with text offsets that begin later.
func shifted(out, logprobs []byte, by int) ([]byte, bool) {
	var place span
	if eachField(logprobs, 0, func(name []byte, at, end int) bool {
		if string(name) == `"text_offset"` {
			place = span{at, end}
		}
		return true
	}) != len(logprobs) {
		return out, false
	}
	if !place.set() {
		return append(out, logprobs...), true
	}
	var offsets []int
	if json.Unmarshal(place.of(logprobs), &offsets) != nil {
		return out, false
	}
	for i := range offsets {
		offsets[i] += by
	}
	out = append(append(out, logprobs[:place.at]...), marshal(offsets)...)
	return append(out, logprobs[place.end:]...), true
}

// candidateLogprob is one candidate of a token in a chat's logprobs.
type candidateLogprob struct {
	Token   string          `json:"token"`
	Logprob json.RawMessage `json:"logprob"`
	Bytes   []int           `json:"bytes"`
}

func newCandidate(token string, logprob json.RawMessage) candidateLogprob {
	c := candidateLogprob{token, logprob, make([]int, len(token))}
	for i := range len(token) {
		c.Bytes[i] = int(token[i])
	}
	return c
}

// tokenLogprob is one token in a chat's logprobs.
type tokenLogprob struct {
	candidateLogprob
	Top []candidateLogprob `json:"top_logprobs"`
}

// chatLogprobs are a completion's logprobs in the form of a chat's, with some candidates of each
// token; negative: with all.
func chatLogprobs(logprobs []byte, candidates int) (json.RawMessage, bool) {
	var l struct {
		Tokens   []string          `json:"tokens"`
		Logprobs []json.RawMessage `json:"token_logprobs"`
		Top      []json.RawMessage `json:"top_logprobs"`
	}
	if json.Unmarshal(logprobs, &l) != nil || len(l.Tokens) != len(l.Logprobs) ||
		len(l.Tokens) != len(l.Top) {
		return nil, false
	}
	content := make([]tokenLogprob, len(l.Tokens))
	for i, token := range l.Tokens {
		content[i] = tokenLogprob{newCandidate(token, l.Logprobs[i]), []candidateLogprob{}}
		sound := true
		if !isNull(l.Top[i]) {
			sound = eachField(l.Top[i], 0, func(name []byte, at, end int) bool {
				var other string
				if json.Unmarshal(name, &other) != nil {
					return false
				}
				if top := &content[i].Top; candidates < 0 || len(*top) < candidates {
					*top = append(*top, newCandidate(other, json.RawMessage(l.Top[i][at:end])))
				}
				return true
			}) >= 0
		}
		if !sound {
			return nil, false
		}
	}
	return marshal(map[string][]tokenLogprob{"content": content}), true
}
