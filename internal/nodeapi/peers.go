package nodeapi

// Reach is /v1/reach: the lanes between local rails and each peer's rails, by transport, with
// reasons for missing ones.
type Reach struct {
	Node  string      `json:"node"`
	Boot  string      `json:"boot"`
	Peers []PeerReach `json:"peers"` // by endpoint
}

// PeerReach has the rail pairs to one peer.
type PeerReach struct {
	Boot string `json:"boot"`
	Node string `json:"node"` // its own name
	// address at which this node reached it; empty if it connected to this node
	Endpoint string `json:"endpoint"`
	Claimed  string `json:"claimed"` // endpoint that it announced
	// this node opens the lanes and has the reasons; of two nodes it is the one with the lower boot
	Dials bool        `json:"dials"`
	Pairs []PairReach `json:"pairs"` // in the order of preference
}

// PairReach is one rail pair.
type PairReach struct {
	Transport string `json:"transport"`
	Kind      string `json:"kind"`
	Local     string `json:"local"`
	Remote    string `json:"remote"`
	Lanes     int    `json:"lanes"`
	Why       string `json:"why,omitempty"`  // reason without a lane
	Idle      bool   `json:"idle,omitempty"` // no lane, because no request needs one
}

// Links is /v1/links: the sidecar's learned speeds, as a sender, of each rail pair to each peer.
// Programs estimate a transfer by it before they request one. docs/protocol.md, section 8 has the
// units.
type Links struct {
	Node  string      `json:"node"`
	Boot  string      `json:"boot"`
	Peers []PeerLinks `json:"peers"` // by endpoint
}

// PeerLinks has the rail pairs to one peer.
type PeerLinks struct {
	Boot string `json:"boot"`
	Node string `json:"node"` // its own name
	// address at which this node reached it; empty if it connected to this node
	Endpoint string            `json:"endpoint"`
	Claimed  string            `json:"claimed"` // endpoint that it announced
	Waiting  map[string]uint64 `json:"waiting_bytes"`
	Links    []Link            `json:"links"` // by transport and rails
}

// Link is one rail pair.
type Link struct {
	Transport string  `json:"transport"`
	Local     string  `json:"local"`
	Remote    string  `json:"remote"`
	State     string  `json:"state"`
	Lanes     int     `json:"lanes"`
	Rate      float64 `json:"bytes_per_second"`
	Samples   int     `json:"samples"`
	Age       float64 `json:"sample_age_seconds"`
	InFlight  uint64  `json:"in_flight_bytes"`
	Window    uint64  `json:"window_bytes"`
	Delay     float64 `json:"min_delay_seconds"`
	Fixed     float64 `json:"fixed_seconds"`
	Factor    float64 `json:"factor"`
	Error     float64 `json:"prediction_error"`
}
