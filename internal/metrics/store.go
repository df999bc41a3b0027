package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// StoreSample is the current state of the node's store, and its counts since the start.
type StoreSample struct {
	Results map[string]float64 // pages, by the end of their get or put
	Tiers   map[string]StoreTier
	// by a label, of which the caller has at most MaxNamespaces
	Namespaces map[string]StoreNamespace
	Damaged    float64 // pages of a tier that were damaged, and are dropped
	Failed     float64 // segments of a disk that could not be written
}

// StoreTier is a tier's part.
type StoreTier struct{ Pages, Bytes, Capacity, Hits, Evicted float64 }

// MaxNamespaces bounds the namespaces with a label of their own.
const MaxNamespaces = 64

// StoreNamespace is what one namespace has.
type StoreNamespace struct {
	Bytes, Quota map[string]float64 // by tier
	Results      map[string]float64 // pages
}

// Store holds the metrics of a node's store. A node without a store has none.
type Store struct {
	requests *prometheus.HistogramVec
	read     func() StoreSample
}

// NewStore registers the metrics of a store, whose state read returns.
func NewStore(reg prometheus.Registerer, read func() StoreSample) (*Store, error) {
	s := &Store{read: read, requests: prometheus.NewHistogramVec(opts("store",
		"request_duration_seconds", "Time from an engine's request for pages to its end."),
		[]string{"op", "outcome"})}
	if err := reg.Register(s.requests); err != nil {
		return nil, err
	}
	return s, reg.Register(storeCollector{s})
}

// Request counts a request of an engine: a get or a put of some pages.
func (s *Store) Request(op string, o Outcome, took time.Duration) {
	s.requests.WithLabelValues(op, string(outcomeLabel(o))).Observe(took.Seconds())
}

type storeCollector struct{ s *Store }

var (
	storeResults = prometheus.NewDesc("kvspray_store_pages_total",
		"Pages that engines got or put, by result.", []string{"result"}, nil)
	storeHits = prometheus.NewDesc("kvspray_store_hits_total",
		"Pages that a get found, by the tier that had them.", []string{"tier"}, nil)
	storePages = prometheus.NewDesc("kvspray_store_tier_pages", "Pages in a tier.",
		[]string{"tier"}, nil)
	storeBytes = prometheus.NewDesc("kvspray_store_tier_bytes", "Bytes of pages in a tier.",
		[]string{"tier"}, nil)
	storeCapacity = prometheus.NewDesc("kvspray_store_tier_capacity_bytes",
		"Bytes that a tier can hold.", []string{"tier"}, nil)
	storeEvicted = prometheus.NewDesc("kvspray_store_pages_evicted_total",
		"Pages that a tier gave up for others.", []string{"tier"}, nil)
	spaceBytes = prometheus.NewDesc("kvspray_store_namespace_bytes",
		"Bytes of a namespace's pages in a tier. The label is the beginning of its id; other: those "+
			"beyond the first 64.", []string{"namespace", "tier"}, nil)
	spaceQuota = prometheus.NewDesc("kvspray_store_namespace_quota_bytes",
		"Most bytes of a namespace's pages in a tier, where it has a quota.",
		[]string{"namespace", "tier"}, nil)
	spaceResults = prometheus.NewDesc("kvspray_store_namespace_pages_total",
		"Pages of a namespace that engines got or put, by result.",
		[]string{"namespace", "result"}, nil)
	storeDamaged = prometheus.NewDesc("kvspray_store_pages_damaged_total",
		"Pages that differed from what was put. They were dropped and not delivered.", nil, nil)
	storeFailed = prometheus.NewDesc("kvspray_store_segments_failed_total",
		"Segments of disks that could not be written or synced.", nil, nil)
)

// Describe implements prometheus.Collector.
func (c storeCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{storeResults, storeHits, storePages, storeBytes,
		storeCapacity, storeEvicted, spaceBytes, spaceQuota, spaceResults, storeDamaged, storeFailed} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c storeCollector) Collect(out chan<- prometheus.Metric) {
	put := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, t, v, labels...)
	}
	s := c.s.read()
	for result, v := range s.Results {
		put(storeResults, prometheus.CounterValue, v, result)
	}
	for tier, t := range s.Tiers {
		put(storePages, prometheus.GaugeValue, t.Pages, tier)
		put(storeBytes, prometheus.GaugeValue, t.Bytes, tier)
		put(storeCapacity, prometheus.GaugeValue, t.Capacity, tier)
		put(storeHits, prometheus.CounterValue, t.Hits, tier)
		put(storeEvicted, prometheus.CounterValue, t.Evicted, tier)
	}
	for name, n := range s.Namespaces {
		for tier, v := range n.Bytes {
			put(spaceBytes, prometheus.GaugeValue, v, name, tier)
		}
		for tier, v := range n.Quota {
			put(spaceQuota, prometheus.GaugeValue, v, name, tier)
		}
		for result, v := range n.Results {
			put(spaceResults, prometheus.CounterValue, v, name, result)
		}
	}
	put(storeDamaged, prometheus.CounterValue, s.Damaged)
	put(storeFailed, prometheus.CounterValue, s.Failed)
}
