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
	Directory  *StoreDirectory  `json:"directory,omitempty"` // absent: no other node is asked
	Peers      []StorePeer      `json:"peers,omitempty"`
}

// StoreDirectory is where this node looks for pages that others hold.
type StoreDirectory struct {
	Kind     string `json:"kind"`
	Members  int    `json:"members,omitempty"` // that keep hints, of an embedded one
	Hints    int    `json:"hints,omitempty"`   // that this node keeps for all
	Capacity int    `json:"capacity,omitempty"`
	Bytes    int    `json:"bytes,omitempty"` // of memory
}

// StorePeer is another node with a store.
type StorePeer struct {
	Node   string `json:"node"`
	Boot   string `json:"boot"`
	Asked  uint64 `json:"asked_bytes"`  // that it was asked for and that have not come
	Load   uint64 `json:"load_bytes"`   // that it has to send to all, as it reported last
	Served uint64 `json:"served_bytes"` // that it is getting from here
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
