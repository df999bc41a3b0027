package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/placement"
	"github.com/kvspray/kvspray/proxy/internal/place"
)

// DefaultPolicy chooses engines by their requests in flight.
const DefaultPolicy = string(place.ByLoad)

// placing is a router's policy with its metrics; nil: the least loaded engines.
type placing struct {
	*place.Placer
	policy  string
	choices *prometheus.CounterVec
	loads   *prometheus.CounterVec
	copies  prometheus.Counter
	ratio   prometheus.Histogram
	regret  prometheus.Counter
}

// newPlacing makes the policy of a configuration.
func newPlacing(cfg Config, reg prometheus.Registerer) (*placing, error) {
	p, err := place.New(place.Config{Policy: place.Policy(cfg.Policy), TokenBytes: cfg.TokenBytes,
		Concurrent: cfg.Mode == Concurrent, Calibration: cfg.Calibration, Replicate: cfg.Replicate})
	if err != nil {
		return nil, fmt.Errorf("proxy: policy, token_bytes: %w", err)
	}
	if p == nil {
		return nil, nil
	}
	x := &placing{Placer: p, policy: cfg.Policy,
		choices: counterVec("placements_total",
			"Requests by the policy's choice; none: the policy had none.", "choice"),
		loads: counterVec("placement_loads_total",
			"Requests whose engine should load from the store, by tier.", "tier"),
		copies: prometheus.NewCounter(prometheus.CounterOpts(opts("placement_replicas_total",
			"Hot prefixes of which another engine got a copy."))),
		ratio: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "kvspray",
			Subsystem: "proxy", Name: "placement_outcome_ratio",
			Help:    "Measured over predicted time to the first token, of streamed requests.",
			Buckets: prometheus.ExponentialBuckets(0.25, 1.25, 16)}),
		regret: prometheus.NewCounter(prometheus.CounterOpts(opts("placement_regret_seconds_total",
			"Time by which streamed requests exceeded the prediction for the best other engine."))),
	}
	reg.MustRegister(x.choices, x.loads, x.copies, x.ratio, x.regret,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts(opts("placement_index_blocks",
			"Parts of prompts in the router's index.")),
			func() float64 { return float64(p.Stats().Blocks) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts(opts("placement_stores",
			"Stores of pages whose loads the policy prices.")),
			func() float64 {
				stores, _ := p.Stores()
				return float64(stores)
			}),
		prometheus.NewCounterFunc(prometheus.CounterOpts(opts("placement_index_blocks_evicted_total",
			"Parts of prompts that left the index because it was full.")),
			func() float64 { return float64(p.Stats().Forgot) }))
	return x, nil
}

// place lets the policy choose the engines of a request. pre is nil if the decode engine computes
// alone; ok is false if the policy has no choice. The caller releases pre.
func (j *job) place(ctx context.Context) (pre *backend, ok bool) {
	d, ok := j.decide(ctx, false)
	if !ok {
		return nil, false
	}
	x := j.p.placing
	if j.prefer = j.p.decode.numbered(d.Decode); j.prefer == nil { // left out in this moment
		x.choices.WithLabelValues("none").Inc()
		j.undecide()
		return nil, false
	}
	j.chosen(d)
	if d.Replica {
		x.copies.Inc()
		j.p.log.Info("a hot prefix goes to another engine", "request", j.id, "tokens", d.Hot,
			"askers", d.Askers, "decode", j.prefer.url, "choice", d.Choice.Kind.String(),
			"predicted", d.Choice.TTFT())
	}
	if d.Prefill >= 0 {
		j.decided = j.p.prefill.numbered(d.Prefill)
		return j.p.prefill.takeThis(j.decided), true
	}
	return nil, true
}

// decide asks the policy; ahead: for the engine that computes the prompt of a later turn.
func (j *job) decide(ctx context.Context, ahead bool) (*place.Decision, bool) {
	x := j.p.placing
	if x == nil {
		return nil, false
	}
	tokens, about := j.p.tokensOf(ctx, j.req, j.in.Header.Get("Authorization"))
	r := &place.Request{Text: j.req.prompt(), Scope: j.req.scope(), Alone: j.req.alone != "",
		Tokens: tokens, About: about, MaxAnswer: j.req.maxAnswer(),
		Continues: j.req.hints.pin > 0, Ahead: ahead}
	if j.req.kind == kindChat {
		r.End, r.Answers = conversation(r.Text)
	}
	d, ok := x.Decide(r, j.p.roles(j.req.model), time.Now())
	if !ok {
		x.choices.WithLabelValues("none").Inc()
		return nil, false
	}
	j.decision = d
	return d, true
}

// chosen takes a decision that is carried out.
func (j *job) chosen(d *place.Decision) {
	x := j.p.placing
	x.choices.WithLabelValues(d.Choice.Kind.String()).Inc()
	if d.Load >= 0 {
		j.req.load = &d.Load
	}
	if d.Tier != "" {
		x.loads.WithLabelValues(d.Tier).Inc()
	}
}

// undecide ends a decision that is not carried out.
func (j *job) undecide() {
	j.p.placing.Ended(j.decision, time.Now())
	j.decision, j.prefer = nil, nil
}

// ahead serves a request that hints at a later turn: the engine that will compute that turn's
// prompt gets this one into its cache, and the answer has one token. false: the client has got
// nothing.
func (j *job) ahead(ctx context.Context) bool {
	if !j.req.hints.prefetch || j.req.alone != "" {
		return false
	}
	d, ok := j.decide(ctx, true)
	if !ok {
		return false
	}
	pool := &j.p.prefill
	if j.prefer = pool.numbered(d.Decode); j.prefer == nil {
		pool = &j.p.decode
		j.prefer = pool.numbered(d.Decode)
	}
	if j.prefer == nil || pool.takeThis(j.prefer) == nil {
		j.undecide()
		return false
	}
	j.chosen(d)
	b := j.prefer
	defer b.done()
	a, err := j.askAnswer(ctx, b, map[*backend]bool{b: true}, j.req.forAhead())
	if ctx.Err() != nil {
		if err == nil {
			a.close()
		}
		return true
	}
	if err != nil {
		j.req.load = nil
		j.undecide()
		return false
	}
	j.pass(a)
	a.close()
	return true
}

// roles are what each engine can do for a request for a model, by its number.
func (p *Proxy) roles(model string) []placement.Role {
	now := time.Now()
	all := p.backends()
	list := make([]placement.Role, numbers(all))
	best := map[string]serves{} // by role
	for _, b := range all {
		if c := b.candidate(now, model); c.takes() {
			best[b.role] = max(best[b.role], c.serves)
		}
	}
	for _, b := range all {
		takes := func(b *backend) bool {
			c := b.candidate(now, model)
			return c.takes() && c.serves == best[b.role]
		}
		switch { // of the two checks of one engine one may have failed
		case !takes(b) || b.twin != nil && !takes(b.twin):
		case b.role == roleDecode, b.twin != nil:
			list[b.number] = placement.Both
		default:
			list[b.number] = placement.Prefill
		}
	}
	return list
}

// placed ends the policy's part of a request, and logs prediction and outcome.
func (j *job) placed() {
	d := j.decision
	if d == nil {
		return
	}
	j.p.placing.Ended(d, time.Now())
	source := ""
	if j.decided != nil {
		source = j.decided.url.String()
	}
	c := &d.Choice
	args := []any{"request", j.id, "policy", j.p.placing.policy, "choice", c.Kind.String(),
		"decode", j.prefer.url, "prefill", source, "tokens", d.Tokens,
		"reused", c.Reused, "loaded", c.Loaded, "tier", d.Tier, "next", c.Next,
		"wait", c.Wait, "compute", c.Prefill, "transfer", c.Transfer,
		"hidden", c.Hidden, "reported", d.Reported, "cached", d.Cached, "replica", d.Replica,
		"predicted", c.TTFT(), "other", d.Other}
	if j.firstAfter > 0 && j.req.streamed() {
		took := j.firstAfter.Seconds()
		regret := 0.0
		if d.Other > 0 {
			regret = max(0, took-d.Other)
		}
		j.p.placing.ratio.Observe(took / c.TTFT())
		j.p.placing.regret.Add(regret)
		args = append(args, "actual", took, "regret", regret)
	}
	j.p.log.Info("placed", args...)
}

// answered takes the first byte of a decode engine's answer.
func (j *job) answered(b *backend, status int) {
	j.firstAfter = time.Since(j.start)
	if j.decision != nil {
		j.p.placing.Answered(j.decision, b == j.prefer && status == http.StatusOK, j.req.streamed(),
			time.Now())
	}
}

// prompt is the text by which the policy finds common prefixes.
func (r *request) prompt() []byte {
	if r.kind == kindChat {
		return r.fields["messages"]
	}
	return r.fields["prompt"]
}

// scope distinguishes requests that share no cache.
func (r *request) scope() string {
	return fmt.Sprintf("%s %q %q", r.kind.path(), r.fields["model"], r.fields["cache_salt"])
}

func (r *request) streamed() bool { return bytes.Equal(r.fields["stream"], []byte("true")) }

// maxMessages bounds the messages of a chat that the policy takes for a conversation.
const maxMessages = 4096

// conversation finds the answers of earlier turns in the messages of a chat, and the end of the
// last message; 0: it is no conversation.
func conversation(raw []byte) (end int, a place.Answers) {
	if len(raw) == 0 || raw[0] != '[' {
		return 0, a
	}
	before, at := 0, skipSpace(raw, 1)
	for range maxMessages {
		next := -1
		if at < len(raw) {
			next = skipValue(raw, at)
		}
		if next < 0 {
			return 0, place.Answers{}
		}
		fields, _, ok := splitObject(raw[at:next])
		if ok && bytes.Equal(fields["role"], []byte(`"assistant"`)) {
			a.Count++
			a.Bytes += next - at
			a.From, a.To = before, next
		}
		before = next
		if at = skipSpace(raw, next); at == len(raw) || raw[at] != ',' {
			return before, a
		}
		at = skipSpace(raw, at+1)
	}
	return 0, place.Answers{}
}

// maxAnswer is the longest answer that the client wants, in tokens; 0: unknown.
func (r *request) maxAnswer() int {
	for _, key := range []string{"max_completion_tokens", "max_tokens"} {
		n := 0
		if raw := r.fields[key]; raw != nil && json.Unmarshal(raw, &n) == nil && n > 0 {
			return n
		}
	}
	return 0
}

const maxLinks = 4 << 20 // bytes of an answer with learned rates

// storeEvery is how many health checks come between two questions for an engine's store.
const storeEvery = 5

// learnStore asks the sidecar of an engine for its store. Without an answer the last values stay.
func (p *Proxy) learnStore(ctx context.Context, b *backend) {
	if p.placing == nil || b.sidecar.IsZero() || b.role != roleDecode && b.twin != nil {
		return
	}
	if b.storeTurn++; b.storeTurn%storeEvery != 1 {
		return
	}
	asking, cancel := context.WithTimeout(ctx, sidecarTimeout)
	defer cancel()
	var s *nodeapi.Store
	err := p.get(asking, b.sidecar, "/v1/store", &s, maxLinks)
	status := (*statusError)(nil)
	if none := errors.As(err, &status) && status.status == http.StatusNotFound; none {
		s = nil
	} else if err != nil {
		return
	}
	p.placing.Stored(b.number, b.sidecar.String(), s)
}

// learn asks the sidecar of a prefill engine for what the policy needs: the rates to decode
// engines. Without an answer the last values, or those of the calibration file, stay.
func (p *Proxy) learn(ctx context.Context, b *backend) {
	if p.placing == nil || b.sidecar.IsZero() || b.role == roleDecode {
		return
	}
	links, err := p.links(ctx, b)
	if err != nil {
		return
	}
	for _, d := range p.decode.list() {
		if peer := d.endpoint(); peer != "" && d != b.twin {
			p.placing.Learned(b.number, d.number, links.Path(peer))
		}
	}
}

func (p *Proxy) links(ctx context.Context, b *backend) (*placement.Links, error) {
	var body json.RawMessage
	if err := p.get(ctx, b.sidecar, "/v1/links", &body, maxLinks); err != nil {
		return nil, err
	}
	return placement.ParseLinks(body)
}

// lost takes a back end that went down: its process may have ended with its cache.
func (p *Proxy) lost(b *backend) {
	b.forgetModels()
	if p.placing == nil {
		return
	}
	p.tokens.forget()
	p.placing.Lost(b.number)
}
