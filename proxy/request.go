package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// kind of an endpoint.
type kind uint8

const (
	kindCompletion kind = iota
	kindChat
	kindResponses // decode engines compute its prompt, too
	kindMessages  // the same
	kindPassed    // no prompt is computed
)

// path is the endpoint of a kind that generates.
func (k kind) path() string {
	return [...]string{"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
		""}[k]
}

const paramsKey = "kv_transfer_params"

// connectorKeys are what an engine's connectors of caches read; the second moves encoders' outputs.
var connectorKeys = []string{paramsKey, "ec_transfer_params"}

// request is a client's body, with every field unchanged.
type request struct {
	kind    kind
	raw     []byte                     // nil: the fields are not as the client sent them
	fields  map[string]json.RawMessage // parts of raw; nil: of kindPassed
	model   string                     // empty: none is named
	prompts int                        // entries of the prompt list; 1 without a list
	n       int                        // answers per prompt
	alone   string                     // why D must serve it alone; empty: it can be split
	hints   hints
	load    *int // tokens that the engine which computes may take from the store; nil: all
}

var errNotObject = errors.New(
	`the body is not a JSON object such as {"model": "NAME", "prompt": "Hello"}`)

// parseRequest reads the fields that the proxy needs and refuses only what is not a JSON object:
// engines check the rest.
func parseRequest(k kind, body []byte) (*request, error) {
	r := &request{kind: k, raw: body, prompts: 1, n: 1}
	if k == kindPassed {
		if fields, _, ok := splitObject(body); ok {
			_ = json.Unmarshal(fields["model"], &r.model) // another form: the engine refuses it
		}
		return r, nil
	}
	fields, twice, ok := splitObject(body)
	if !ok {
		return nil, errNotObject
	}
	r.fields = fields
	if withoutParams(fields) || twice {
		r.raw = nil
	}
	_ = json.Unmarshal(r.fields["model"], &r.model) // another form: the engine refuses it
	if raw, ok := r.fields["n"]; ok && !isNull(raw) {
		if err := json.Unmarshal(raw, &r.n); err != nil || r.n < 1 {
			r.alone, r.n = "invalid n", 1
		}
	}
	if r.n > maxFanout {
		r.alone = "n too large"
	}
	if k == kindResponses || k == kindMessages {
		r.alone = k.path()
	}
	if k == kindCompletion {
		r.prompts = countPrompts(r.fields["prompt"])
		if r.prompts == 0 {
			r.alone = "no prompt"
		}
	}
	// These need the logits of prompt tokens, which are not in the KV cache, or prompts without
	// token ids for matching.
	for _, key := range []string{"prompt_logprobs", "prompt_embeds", "use_beam_search", "echo"} {
		if raw, ok := r.fields[key]; ok && !isNull(raw) && !bytes.Equal(raw, []byte("false")) {
			r.alone = key
		}
	}
	return r, nil
}

// extraKeys are objects whose entries vLLM merges into the connector's parameters.
var extraKeys = []string{"vllm_xargs", "extra_args"}

// withoutParams removes the connectors' keys from all places where an engine would read them: only
// routers set them. It reports whether there were any.
func withoutParams(fields map[string]json.RawMessage) bool {
	before := len(fields)
	for _, key := range connectorKeys {
		delete(fields, key)
	}
	some := len(fields) < before
	for _, key := range extraKeys {
		extra, _, ok := splitObject(fields[key])
		if !ok {
			continue // none, or refused by the engine
		}
		before := len(extra)
		for _, own := range connectorKeys {
			delete(extra, own)
		}
		if len(extra) < before {
			some, fields[key] = true, encode(extra)
		}
	}
	return some
}

// splitObject finds the fields of an object. Of fields with the same name it keeps the last one, as
// engines do. It only finds where values end: if the body is not valid JSON, one of its parts is
// not either, and engines refuse that part. twice: two fields have the same name.
func splitObject(raw []byte) (fields map[string]json.RawMessage, twice, ok bool) {
	fields = map[string]json.RawMessage{}
	end := eachField(raw, skipSpace(raw, 0), func(quoted []byte, at, end int) bool {
		name := string(quoted[1 : len(quoted)-1])
		if strings.Contains(name, `\`) && json.Unmarshal(quoted, &name) != nil {
			return false
		}
		_, again := fields[name]
		twice = twice || again
		fields[name] = raw[at:end:end]
		return true
	})
	if end < 0 || skipSpace(raw, end) != len(raw) {
		return nil, false, false
	}
	return fields, twice, true
}

// eachField calls f with the name, in its quotes, and the place of the value of each field of the
// object that begins at a place. It returns the end of the object; -1: there is none, or f has
// returned false.
func eachField(raw []byte, at int, f func(name []byte, at, end int) bool) int {
	if at == len(raw) || raw[at] != '{' {
		return -1
	}
	at = skipSpace(raw, at+1)
	if at < len(raw) && raw[at] == '}' {
		return at + 1
	}
	for {
		end := skipValue(raw, at)
		if end < 0 || raw[at] != '"' {
			return -1
		}
		name := raw[at:end]
		if at = skipSpace(raw, end); at == len(raw) || raw[at] != ':' {
			return -1
		}
		at = skipSpace(raw, at+1)
		if end = skipValue(raw, at); end < 0 || !f(name, at, end) {
			return -1
		}
		if at = skipSpace(raw, end); at == len(raw) {
			return -1
		}
		switch raw[at] {
		case ',':
			at = skipSpace(raw, at+1)
		case '}':
			return at + 1
		default:
			return -1
		}
	}
}

const scalar = "0123456789+-.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

func skipSpace(raw []byte, at int) int {
	for at < len(raw) && (raw[at] == ' ' || raw[at] == '\n' || raw[at] == '\t' || raw[at] == '\r') {
		at++
	}
	return at
}

// skipValue returns the end of the value that begins at a place; -1: there is none.
func skipValue(raw []byte, at int) int {
	for depth := 0; at < len(raw); {
		switch c := raw[at]; {
		case c == '"':
			if at = skipString(raw, at); at < 0 {
				return -1
			}
		case c == '{', c == '[':
			depth++
			at++
		case c == '}', c == ']':
			if depth--; depth < 0 {
				return -1
			}
			at++
		case depth > 0:
			at++
		default: // a number, true, false or null; Python has NaN and Infinity, too
			rest := bytes.TrimLeft(raw[at:], scalar)
			if len(rest) == len(raw)-at {
				return -1
			}
			at = len(raw) - len(rest)
		}
		if depth == 0 {
			return at
		}
	}
	return -1
}

// skipString returns the end of the string that begins at a place; -1: it has none.
func skipString(raw []byte, at int) int {
	for at++; ; at++ {
		i := bytes.IndexByte(raw[at:], '"')
		if i < 0 {
			return -1
		}
		at += i
		escapes := 0
		for raw[at-1-escapes] == '\\' {
			escapes++
		}
		if escapes%2 == 0 {
			return at + 1
		}
	}
}

func isNull(raw json.RawMessage) bool { return bytes.Equal(raw, []byte("null")) }

// countPrompts distinguishes a string and a list of token ids (one prompt each) from a list of
// either.
func countPrompts(raw json.RawMessage) int {
	if len(raw) == 0 || isNull(raw) {
		return 0
	}
	if raw[0] != '[' {
		return 1
	}
	switch firstItem(raw) {
	case ']':
		return 0
	case '"', '[':
		var list []json.RawMessage
		if json.Unmarshal(raw, &list) != nil {
			return 0
		}
		return len(list)
	}
	return 1
}

// kvsprayParams is kv_transfer_params["kvspray"], docs/protocol.md section 4.
type kvsprayParams struct {
	V      int    `json:"v"`
	Xfer   string `json:"xfer,omitempty"`
	Peer   string `json:"peer,omitempty"`
	Fanout int    `json:"fanout"`

	Traceparent string `json:"traceparent,omitempty"` // of the span above the connector's
	Release     bool   `json:"release,omitempty"`     // no engine will fetch the cache

	Load *int    `json:"load,omitempty"` // tokens that may come from the store; absent: all
	Pin  bool    `json:"pin,omitempty"`  // the store keeps the pages after the request's end
	TTL  float64 `json:"ttl,omitempty"`  // for so long, seconds
}

const paramsVersion = 1

// ownParams are the kvspray key of kv_transfer_params; zero: none.
func ownParams(params json.RawMessage) kvsprayParams {
	var a struct {
		KVSpray kvsprayParams `json:"kvspray"`
	}
	if json.Unmarshal(params, &a) != nil {
		return kvsprayParams{}
	}
	return a.KVSpray
}

// transferParams is kv_transfer_params as the proxy writes it; P's own are passed on unchanged.
type transferParams struct {
	DoRemoteDecode  bool          `json:"do_remote_decode"`
	DoRemotePrefill bool          `json:"do_remote_prefill"`
	KVSpray         kvsprayParams `json:"kvspray"`
}

// notForPrefill are the fields that have no meaning for a single unread token, or that an engine
// refuses with it. integration/vllm/tests/test_prefill_bodies.py checks bodies without them by
// vLLM's own classes.
var notForPrefill = []string{"stream_options", "stream_interval", "min_tokens", "logprobs",
	"top_logprobs", "logprob_token_ids", "best_of", "return_token_ids", "return_tokens_as_token_ids",
	"return_token_offsets", "return_prompt_text", "prompt_logprobs", "thinking_token_budget",
	"include_stop_str_in_output"}

// hint adds the request's hints for the engine that answers.
func (k *kvsprayParams) hint(h hints) {
	k.Pin, k.TTL = h.pin > 0, h.pin.Seconds()
}

// forPrefill is the body for P: the same prompt, one token, no stream.
func (r *request) forPrefill(xfer, traceparent string) []byte {
	f := maps.Clone(r.fields)
	for _, key := range notForPrefill {
		delete(f, key)
	}
	f["stream"] = json.RawMessage("false")
	f["max_tokens"] = json.RawMessage("1")
	if r.kind == kindChat {
		f["max_completion_tokens"] = json.RawMessage("1")
	}
	f["n"] = json.RawMessage("1")
	f[paramsKey] = marshal(transferParams{DoRemoteDecode: true, KVSpray: kvsprayParams{
		V: paramsVersion, Xfer: xfer, Fanout: r.n, Traceparent: traceparent, Load: r.load}})
	return encode(f)
}

// encode writes an object of fields. json.Marshal would check them, and make a body of up to six
// times the size: it escapes <, > and &.
func encode(fields map[string]json.RawMessage) []byte {
	size := 2
	for name, raw := range fields {
		size += len(name) + len(raw) + 4 // quotes, colon, comma
	}
	out := append(make([]byte, 0, size), '{')
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(append(out, marshal(name)...), ':'), fields[name]...)
	}
	return append(out, '}')
}

// marshal is of strings, of correct JSON, and of structs of them: json.Marshal has no error.
func marshal(v any) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return raw
}

// forDecode is the body for D; nil params: D prefills locally.
func (r *request) forDecode(params json.RawMessage) []byte {
	if params == nil {
		params = r.ownForAlone()
	}
	if params == nil && r.raw != nil {
		return r.raw
	}
	f := r.fields
	if params != nil {
		f = maps.Clone(f)
		f[paramsKey] = params
	}
	return encode(f)
}

// forAhead is the body for an engine that gets a prompt into its cache: one token is the answer.
func (r *request) forAhead() []byte {
	f := maps.Clone(r.fields)
	delete(f, "min_tokens")
	f["max_tokens"] = json.RawMessage("1")
	if r.kind == kindChat {
		f["max_completion_tokens"] = json.RawMessage("1")
	}
	if params := r.ownForAlone(); params != nil {
		f[paramsKey] = params
	}
	return encode(f)
}

// ownForAlone are the parameters of an engine that computes the prompt itself; nil: none.
func (r *request) ownForAlone() json.RawMessage {
	if r.kind != kindCompletion && r.kind != kindChat || r.load == nil && r.hints.pin == 0 {
		return nil
	}
	own := kvsprayParams{V: paramsVersion, Fanout: 1, Load: r.load}
	own.hint(r.hints)
	return marshal(map[string]kvsprayParams{"kvspray": own})
}

// concurrentParams are D's parameters in concurrent mode.
func (r *request) concurrentParams(xfer, peer, traceparent string) json.RawMessage {
	own := kvsprayParams{V: paramsVersion, Xfer: xfer, Peer: peer, Fanout: r.n,
		Traceparent: traceparent}
	own.hint(r.hints)
	return marshal(transferParams{DoRemotePrefill: true, KVSpray: own})
}

var errNoParams = errors.New("the prefill engine's answer has no usable kv_transfer_params")

// answeredParams extracts kv_transfer_params from P's answer. Engines return those of the first
// prompt only. The kvspray key holds for all prompts of a list, because they share its transfer id;
// NIXL's own keys do not.
func (r *request) answeredParams(answer []byte) (json.RawMessage, error) {
	var a struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(answer, &a); err != nil {
		return nil, fmt.Errorf("the prefill engine's answer: %w", err)
	}
	if len(a.Params) == 0 || isNull(a.Params) {
		return nil, errNoParams
	}
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(a.Params, &keys); err != nil {
		return nil, fmt.Errorf("the prefill engine's kv_transfer_params: %w", err)
	}
	if own, ok := keys["kvspray"]; (!ok || isNull(own)) && r.prompts > 1 {
		return nil, fmt.Errorf("%w: without a kvspray key they describe the first prompt of a list only",
			errNoParams)
	}
	return a.Params, nil
}
