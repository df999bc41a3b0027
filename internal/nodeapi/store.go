package nodeapi

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
	Drained    bool             `json:"drained"`             // it takes no pages
	Directory  *StoreDirectory  `json:"directory,omitempty"` // absent: no other node is asked
	Peers      []StorePeer      `json:"peers,omitempty"`
	Removals   StoreRemovals    `json:"removals"`
}

// StoreRemovals are the removals of namespaces that this node remembers.
type StoreRemovals struct {
	Known   int `json:"known"`
	Pending int `json:"pending"` // known, and not applied yet
}

// StoreDirectory is where this node looks for pages that others hold.
type StoreDirectory struct {
	Kind     string `json:"kind"`
	Members  int    `json:"members,omitempty"` // that keep hints, of an embedded one
	Hints    int    `json:"hints,omitempty"`   // that this node keeps for all
	Capacity int    `json:"capacity,omitempty"`
	Bytes    int    `json:"bytes,omitempty"`   // of memory
	Problem  string `json:"problem,omitempty"` // why it does not answer, or takes nothing
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
	// how long the pages that were given up lately had not been used
	EvictionAge float64 `json:"eviction_age_seconds"`
	// gets whose slowest page came from this tier, and the bytes and the time of all of them
	Gets       uint64  `json:"gets"`
	GetBytes   uint64  `json:"get_bytes"`
	GetSeconds float64 `json:"get_seconds"`
	// of segments and objects that may still have bytes of removed pages: they are overwritten,
	// deleted
	Removed uint64 `json:"removed_bytes,omitempty"`
	Problem string `json:"problem,omitempty"` // a fault that needs an operator
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

// StoreKeys are keys of a namespace in a tier.
type StoreKeys struct {
	Keys []string `json:"keys"`
	Next uint32   `json:"next"` // where to go on; 0: that was all
}

// StoreVerified is a page that was read and compared with its checksum.
type StoreVerified struct {
	Outcome string  `json:"outcome"` // hit, miss, damaged, failed
	Tier    string  `json:"tier,omitempty"`
	Bytes   uint64  `json:"bytes,omitempty"`
	CRC32C  string  `json:"crc32c,omitempty"`
	Took    float64 `json:"took_seconds"`
	Problem string  `json:"problem,omitempty"`
}

// StoreDrained is the answer to a drain.
type StoreDrained struct {
	Drained bool   `json:"drained"`
	Durable bool   `json:"durable"`           // this node has a disk or an object store
	Problem string `json:"problem,omitempty"` // why not yet
}

// StoreRemoved is the answer to the removal of a namespace.
type StoreRemoved struct {
	Namespace string        `json:"namespace"`
	Confirmed int           `json:"confirmed"` // members that serve none of its pages any more
	Members   []StoreMember `json:"members"`   // this node first
}

// StoreMember is a node with a store.
type StoreMember struct {
	Node      string `json:"node"`
	Boot      string `json:"boot"`
	Confirmed bool   `json:"confirmed"`
	Problem   string `json:"problem,omitempty"` // why not
}
