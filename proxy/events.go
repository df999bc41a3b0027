package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/proxy/internal/feed"
	"github.com/kvspray/kvspray/proxy/internal/place"
	"github.com/kvspray/kvspray/proxy/internal/zmtp"
)

const (
	modelsEvery   = 30 * time.Second
	modelsAgain   = 5 * time.Second // after a question without an answer
	modelsTimeout = time.Second
	maxModels     = 4 << 20 // bytes of an engine's list of models
)

// reporter is the feed of one engine, and what is known about it.
type reporter struct {
	b      *backend
	feed   *feed.Feed
	holder *place.Holder

	// Of the engine's health check: a line was logged.
	noted    bool // its events are ignored
	unlisted bool // models are unknown
	foreign  bool // no other engine has its models

	mu     sync.Mutex      // guards all below
	models map[string]bool // names of the engine's model, without adapters; nil: unknown
	due    time.Time       // of the next question for them
}

// reporters are the feeds of a router, in the order of the policy's engines.
type reporters []*reporter // nil: an engine without events

// endpoint checks an endpoint of KV events.
func endpoint(text string) error {
	_, _, err := zmtp.ParseEndpoint(text)
	return err
}

// reports lists which engines have events; nil: none.
func reports(cfg *Config) ([]bool, error) {
	var list []bool
	for _, e := range slices.Concat(cfg.Prefill, cfg.Decode) {
		list = append(list, e.Events != "")
	}
	if !slices.Contains(list, true) {
		return nil, nil
	}
	if cfg.Policy == "" || cfg.Policy == DefaultPolicy {
		return nil, fmt.Errorf("proxy: events are for a policy, and policy is %s, which uses none; set "+
			"it for instance to auto", DefaultPolicy)
	}
	return list, nil
}

// newReporters makes the feeds; nil: there are none.
func (p *Proxy) newReporters(cfg *Config) reporters {
	if p.placing == nil {
		return nil
	}
	var list reporters
	some := false
	for i, e := range slices.Concat(cfg.Prefill, cfg.Decode) {
		holder := p.placing.Holder(len(list))
		// An engine in both lists has one holder, and one feed.
		twice := slices.ContainsFunc(list, func(r *reporter) bool {
			return r != nil && r.holder == holder
		})
		if holder == nil || twice || e.Events == "" {
			list = append(list, nil)
			continue
		}
		some = true
		b := p.backends()[i]
		list = append(list, &reporter{b: b, holder: holder, feed: feed.New(feed.Config{
			Engine: b.url.String(), Endpoint: e.Events, Replay: e.Replay, Sink: holder, Log: p.log})})
	}
	if !some {
		return nil
	}
	return list
}

// of returns the reporter of a back end; nil: none.
func (l reporters) of(b *backend) *reporter {
	for _, r := range l {
		if r != nil && r.b == b {
			return r
		}
	}
	return nil
}

// about lists the engines whose reports can answer for a request's model; nil: none. An empty model
// is the engine's own.
func (l reporters) about(model string) []bool {
	var list []bool
	for i, r := range l {
		if r == nil || !r.feed.Live() || !r.holder.Usable() {
			continue
		}
		r.mu.Lock()
		ok := r.models[model] || r.models != nil && model == ""
		r.mu.Unlock()
		if ok {
			if list == nil {
				list = make([]bool, len(l))
			}
			list[i] = true
		}
	}
	return list
}

// learnModels asks an engine now and then for the names of its model. Requests for an adapter have
// other blocks with the same tokens.
func (p *Proxy) learnModels(ctx context.Context, b *backend) {
	r := p.reporters.of(b)
	if r == nil {
		return
	}
	p.noteUnusable(r)
	r.mu.Lock()
	now := time.Now()
	due := !now.Before(r.due)
	if due {
		r.due = now.Add(modelsAgain)
	}
	r.mu.Unlock()
	if !due {
		return
	}
	asking, cancel := context.WithTimeout(ctx, modelsTimeout)
	defer cancel()
	var list struct {
		Data []struct {
			ID     string `json:"id"`
			Parent string `json:"parent"`
		} `json:"data"`
	}
	if err := p.get(asking, b.url, "/v1/models", &list, maxModels); err != nil {
		if !r.unlisted && ctx.Err() == nil {
			r.unlisted = true
			p.log.Warn("an engine does not list its models: its hits are guesses until it does", "url",
				b.url, "err", err)
		}
		return
	}
	models := map[string]bool{}
	for _, m := range list.Data {
		if m.Parent == "" {
			models[m.ID] = true
		}
	}
	r.mu.Lock()
	r.models, r.due = models, now.Add(modelsEvery)
	r.mu.Unlock()
	if !r.foreign && p.reporters.foreign(r, models) {
		r.foreign = true
		p.log.Warn("an engine serves none of the models of the other engines: its KV events count only "+
			"for its own", "url", b.url, "models", slices.Sorted(maps.Keys(models)))
	}
}

// foreign reports whether other engines are known, and none of them has one of these models.
func (l reporters) foreign(r *reporter, models map[string]bool) bool {
	known := false
	for _, x := range l {
		if x == nil || x == r {
			continue
		}
		x.mu.Lock()
		others := x.models
		x.mu.Unlock()
		known = known || others != nil
		for m := range others {
			if models[m] {
				return false
			}
		}
	}
	return known
}

// forgetModels makes the next check ask again: another process may serve another model.
func (l reporters) forgetModels(b *backend) {
	if r := l.of(b); r != nil {
		r.mu.Lock()
		r.models, r.due = nil, time.Time{}
		r.mu.Unlock()
	}
}

// noteUnusable logs once that an engine's events do not help.
func (p *Proxy) noteUnusable(r *reporter) {
	if r.noted {
		return
	}
	s := r.holder.Stats()
	reason := ""
	switch {
	case s.Partial:
		reason = "its model has caches of several kinds, such as sliding windows: its hits stay guesses"
	case s.Left[place.LeftSize] > 0:
		reason = "blocks of several sizes: only those of one size count"
	case s.Left[place.LeftFull] > 0:
		reason = "the index is full: some blocks do not count"
	default:
		return
	}
	r.noted = true
	p.log.Warn("KV events ignored", "url", r.b.url, "reason", reason)
}

// collector makes metrics of feeds.
type collector struct{ p *Proxy }

var (
	engineLabels = []string{"role", "url"}
	reasonLabels = append(engineLabels[:2:2], "reason")

	descEvents  = eventDesc("kv_events_total", "KV events that an engine published.", engineLabels)
	descBatches = eventDesc("kv_event_batches_total", "Batches of KV events.", engineLabels)
	descGaps    = eventDesc("kv_event_gaps_total", "Gaps in an engine's KV events.", engineLabels)
	descReplays = eventDesc("kv_event_replays_total", "Replays of KV events, by outcome.",
		append(engineLabels[:2:2], "outcome"))
	descVoids = eventDesc("kv_event_voids_total",
		"Times that all blocks of an engine were forgotten, by reason.", reasonLabels)
	descUp = eventDesc("kv_events_up", "1 while an engine's KV events are up to date.",
		engineLabels)
	descBlocks = eventDesc("kv_blocks", "Blocks that an engine reported and has.", engineLabels)
	descLeft   = eventDesc("kv_blocks_left_out_total",
		"Reported blocks that are not in the index, by reason.", reasonLabels)
	descBytes = eventDesc("kv_index_bytes", "Memory of the index of reported blocks, about.", nil)
)

func eventDesc(name, help string, labels []string) *prometheus.Desc {
	return prometheus.NewDesc("kvspray_proxy_"+name, help, labels, nil)
}

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descEvents, descBatches, descGaps, descReplays, descVoids,
		descUp, descBlocks, descLeft, descBytes} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	const counter, gauge = prometheus.CounterValue, prometheus.GaugeValue
	for _, r := range c.p.reporters {
		if r == nil {
			continue
		}
		s, h, role, url := r.feed.Stats(), r.holder.Stats(), r.b.role, r.b.url.String()
		send(descEvents, counter, float64(s.Events), role, url)
		send(descBatches, counter, float64(s.Batches), role, url)
		send(descGaps, counter, float64(s.Gaps), role, url)
		send(descReplays, counter, float64(s.Replays), role, url, "ok")
		send(descReplays, counter, float64(s.ReplaysFailed), role, url, "failed")
		for _, reason := range feed.Reasons() {
			send(descVoids, counter, float64(s.Voids[reason]), role, url, reason)
		}
		send(descUp, gauge, map[bool]float64{true: 1}[s.Live], role, url)
		send(descBlocks, gauge, float64(h.Blocks), role, url)
		for _, reason := range place.LeftReasons() {
			send(descLeft, counter, float64(h.Left[reason]), role, url, reason)
		}
	}
	send(descBytes, gauge, float64(c.p.placing.Stats().Bytes))
}

// modelOf is the model that a request names; empty: none.
func (r *request) modelOf() string {
	var s string
	_ = json.Unmarshal(r.fields["model"], &s) // another form: the engine refuses it
	return s
}
