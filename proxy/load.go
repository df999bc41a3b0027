package proxy

// candidate is what the choice of an engine for a request depends on.
type candidate struct {
	serves    serves // the model
	condition condition
	leaving   bool // by its sidecar, the engine ends soon
	load      int  // requests in flight, in both roles
	leases    int  // open at its sidecar, also by other routers' requests; -1: unknown
}

// takes reports whether an engine is a good choice for a new request.
func (c candidate) takes() bool {
	return c.serves != servesNot && c.condition <= slow && !c.leaving
}

// possible reports whether it is one if no engine is a good one.
func (c candidate) possible() bool {
	return c.serves != servesNot && c.condition < down && !c.leaving
}

// named reports whether it may serve the model, in whatever condition.
func (c candidate) named() bool { return c.serves != servesNot }

// better reports whether a is a better choice than b. An engine that fails at once has the fewest
// requests in flight: its condition counts first.
func (c candidate) better(b candidate) bool {
	if c.serves != b.serves {
		return c.serves > b.serves
	}
	if c.condition != b.condition {
		return c.condition < b.condition
	}
	if c.load != b.load || c.leases < 0 || b.leases < 0 {
		return c.load < b.load
	}
	return c.leases < b.leases
}
