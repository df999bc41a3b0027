// SPDX-License-Identifier: Apache-2.0

package web

// Store is the state of the node's store, in /v1/store. Counts are since the sidecar's start.
type Store struct {
	Tiers      []StoreTier      `json:"tiers"` // nearest first
	Namespaces []StoreNamespace `json:"namespaces"`
	Misses     uint64           `json:"misses"`  // pages that a get did not find
	Stored     uint64           `json:"stored"`  // pages that were put
	Existed    uint64           `json:"existed"` // pages that were put and already there
	Refused    uint64           `json:"refused"` // puts without room
	Damaged    uint64           `json:"damaged"` // pages that differed from what was put
	Pinned     uint64           `json:"pinned_bytes"`
}

// StoreTier is one tier.
type StoreTier struct {
	Name     string `json:"name"`
	Pages    uint64 `json:"pages"`
	Bytes    uint64 `json:"bytes"`
	Capacity uint64 `json:"capacity_bytes"`
	Hits     uint64 `json:"hits"` // pages
	Evicted  uint64 `json:"evicted"`
	Problem  string `json:"problem,omitempty"` // the fault that an operator must mend
}

// StoreNamespace is a namespace that engines of this node have open.
type StoreNamespace struct {
	ID         string `json:"id"`
	Weights    string `json:"weights"`
	DType      string `json:"dtype"`
	Layout     string `json:"layout"`
	Adapter    string `json:"adapter,omitempty"`
	PageTokens int    `json:"page_tokens"`
	PageBytes  int    `json:"page_bytes"`
	Pools      int    `json:"pools"`
	Private    bool   `json:"private"` // it has a tenant's secret
}
