package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// StorePeers holds the metrics of pages that nodes get from each other's stores.
type StorePeers struct {
	lookups   *prometheus.HistogramVec
	fetches   *prometheus.HistogramVec
	bytes     *prometheus.CounterVec
	pages     *prometheus.CounterVec
	damaged   prometheus.Counter
	announced *prometheus.CounterVec
}

// NewStorePeers registers them.
func NewStorePeers(reg prometheus.Registerer) (*StorePeers, error) {
	counter := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "kvspray",
			Subsystem: "store_peer", Name: name, Help: help}, []string{label})
	}
	p := &StorePeers{
		lookups: prometheus.NewHistogramVec(opts("store_peer", "lookup_duration_seconds",
			"Time of a lookup in the directory."), []string{"outcome"}),
		fetches: prometheus.NewHistogramVec(opts("store_peer", "fetch_duration_seconds",
			"Time from a request to a holder to its end."), []string{"outcome"}),
		bytes: counter("bytes_total", "Bytes of pages that came from other nodes, or went there.",
			"direction"),
		pages: counter("pages_total", "Pages that came from other nodes, or went there.",
			"direction"),
		damaged: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "kvspray",
			Subsystem: "store_peer", Name: "pages_damaged_total",
			Help: "Pages of other nodes that differed from their checksums. They were dropped."}),
		announced: counter("announcements_total", "Calls that announced held pages to the directory.",
			"outcome"),
	}
	for _, c := range []prometheus.Collector{p.lookups, p.fetches, p.bytes, p.pages, p.damaged,
		p.announced} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func okOr(ok bool) string {
	if ok {
		return "ok"
	}
	return "failed"
}

// Lookup counts a lookup.
func (p *StorePeers) Lookup(ok bool, took time.Duration) {
	p.lookups.WithLabelValues(okOr(ok)).Observe(took.Seconds())
}

// Fetched counts a request to a holder.
func (p *StorePeers) Fetched(outcome string, pages, bytes int, took time.Duration) {
	p.fetches.WithLabelValues(outcome).Observe(took.Seconds())
	p.pages.WithLabelValues("in").Add(float64(pages))
	p.bytes.WithLabelValues("in").Add(float64(bytes))
}

// Damaged counts pages of peers that differed from their checksums.
func (p *StorePeers) Damaged(pages int) { p.damaged.Add(float64(pages)) }

// Served counts pages that a peer got.
func (p *StorePeers) Served(pages int, bytes uint64) {
	p.pages.WithLabelValues("out").Add(float64(pages))
	p.bytes.WithLabelValues("out").Add(float64(bytes))
}

// Announced counts a call to the directory.
func (p *StorePeers) Announced(ok bool) { p.announced.WithLabelValues(okOr(ok)).Inc() }
