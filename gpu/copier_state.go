package gpu

import (
	"slices"

	"github.com/kvspray/kvspray/gpu/multipath"
)

// linkOf is a link of the path set to u: gpu is the number of the GPU whose link it is.
type linkOf struct {
	u   *GPU
	gpu int
}

// PathState is the state of the path set to one GPU.
type PathState struct {
	GPU       int                   `json:"gpu"`
	Threshold uint64                `json:"every_link_from_bytes"` // bytes in flight
	Links     []multipath.LinkState `json:"links"`                 // the GPU's own first
}

// State reports all path sets, and what every link has moved since this process began.
func (c *Copier) State() []PathState {
	c.mu.Lock()
	all := make(map[*GPU]*paths, len(c.paths))
	for u, p := range c.paths {
		all[u] = p
	}
	c.mu.Unlock()
	var out []PathState
	for u, p := range all {
		p.mu.RLock()
		s := PathState{GPU: u.index, Links: p.stateLocked(u)}
		if p.m != nil {
			s.Threshold = p.m.Threshold()
		}
		c.mu.Lock()
		for i := range s.Links {
			l := &s.Links[i]
			was := c.past[linkOf{u, l.GPU}]
			l.Bytes, l.Returned = l.Bytes+was.Bytes, l.Returned+was.Returned
		}
		c.mu.Unlock()
		p.mu.RUnlock()
		if len(s.Links) > 0 {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, func(a, b PathState) int { return a.GPU - b.GPU })
	return out
}

// stateLocked reports the links without the counters of earlier path sets.
func (p *paths) stateLocked(u *GPU) []multipath.LinkState {
	if p.m == nil {
		return nil
	}
	links := p.m.Links()
	for i := range links {
		links[i].GPU = u.index
		if i > 0 {
			links[i].GPU = p.relays[i-1].index
		}
	}
	return links
}
