package proxy

// candidate is what the choice of an engine for a request depends on.
type candidate struct {
	condition condition
	leaving   bool // by its sidecar, the engine ends soon
	load      int  // requests in flight, in both roles
}

// takes reports whether an engine is a good choice for a new request.
func (c candidate) takes() bool { return c.condition <= slow && !c.leaving }

// possible reports whether it is one if no engine is a good one.
func (c candidate) possible() bool { return c.condition < down && !c.leaving }

// better reports whether a is a better choice than b. An engine that fails at once has the fewest
// requests in flight: its condition counts first.
func (c candidate) better(b candidate) bool {
	if c.condition != b.condition {
		return c.condition < b.condition
	}
	return c.load < b.load
}
