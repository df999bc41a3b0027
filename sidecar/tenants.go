package sidecar

import (
	"bytes"
	"slices"
	"sync"

	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/page"
)

// shares are the quotas of a namespace.
func (p *pageStore) shares(id page.ID) store.Shares {
	memory, disk, object := p.cfg.Quotas(id.String())
	return store.Shares{store.Memory: {Quota: memory}, store.Disk: {Quota: disk},
		store.Object: {Quota: object}}
}

// Labels of namespaces in metrics.
const (
	labelDigits = 12 // of the id: two among a thousand agree once in a hundred million
	otherLabel  = "other"
)

// tenants gives namespaces their labels. One keeps its label until it has gone, so that the series
// of metrics do not change with what is asked for; those that find none share one.
type tenants struct {
	mu     sync.Mutex // guards what follows
	labels map[page.ID]string
}

// sample is what all namespaces have, by their labels.
func (t *tenants) sample(all []store.Usage, shares func(page.ID) store.Shares) (
	out map[string]metrics.StoreNamespace) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.labels == nil {
		t.labels = map[page.ID]string{}
	}
	here := map[page.ID]bool{}
	for _, u := range all {
		here[u.ID] = true
	}
	for id := range t.labels {
		if !here[id] {
			delete(t.labels, id)
		}
	}
	slices.SortFunc(all, func(a, b store.Usage) int { return bytes.Compare(a.ID[:], b.ID[:]) })
	out = map[string]metrics.StoreNamespace{}
	for _, u := range all {
		label := t.labels[u.ID]
		if label == "" && len(t.labels) < metrics.MaxNamespaces {
			label = u.ID.String()[:labelDigits]
			t.labels[u.ID] = label
		}
		own := label != ""
		if !own {
			label = otherLabel
		}
		n, ok := out[label]
		if !ok {
			n = metrics.StoreNamespace{Bytes: map[string]float64{}, Quota: map[string]float64{},
				Results: map[string]float64{}}
			out[label] = n
		}
		for tier := store.Memory; tier <= store.Object; tier++ {
			n.Bytes[tier.String()] += float64(u.Bytes[tier])
		}
		if !own { // counts of several would fall when one of them gets a label
			continue
		}
		for result, v := range map[string]uint64{"hit": u.Hits, "miss": u.Misses, "stored": u.Stored,
			"refused": u.Refused} {
			n.Results[result] += float64(v)
		}
		s := shares(u.ID)
		for tier := store.Memory; tier <= store.Object; tier++ {
			if quota := s[tier].Quota; quota > 0 {
				n.Quota[tier.String()] = float64(quota)
			}
		}
	}
	return out
}
