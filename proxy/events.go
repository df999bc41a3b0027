package proxy

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/proxy/internal/feed"
	"github.com/kvspray/kvspray/proxy/internal/place"
	"github.com/kvspray/kvspray/proxy/internal/zmtp"
)

// reporter is the feed of one engine, and what is known about it.
type reporter struct {
	feed   *feed.Feed
	holder *place.Holder
	noted  bool // of the engine's health check: a line that its events are ignored was logged
}

// endpoint checks an endpoint of KV events.
func endpoint(text string) error {
	_, _, err := zmtp.ParseEndpoint(text)
	return err
}

// about lists the engines whose reports can answer for a request's model; nil: none. An empty model
// is the engine's own.
func (p *Proxy) about(model string) []bool {
	var list []bool
	all := p.backends()
	for _, b := range all {
		if b.reporter == nil || !b.reporter.feed.Live() || !b.reporter.holder.Usable() {
			continue
		}
		b.mu.Lock()
		ok := b.models.base(model)
		b.mu.Unlock()
		if ok && list == nil {
			list = make([]bool, numbers(all))
		}
		if ok {
			list[b.number] = true
		}
	}
	return list
}

// noteUnusable logs once that an engine's events do not help.
func (p *Proxy) noteUnusable(b *backend) {
	r := b.reporter
	if r == nil || r.noted {
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
	p.log.Warn("KV events ignored", "url", b.url, "reason", reason)
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
	for _, b := range c.p.backends() {
		r := b.reporter
		if r == nil {
			continue
		}
		s, h, role, url := r.feed.Stats(), r.holder.Stats(), b.role, b.url.String()
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
