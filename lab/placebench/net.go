package placebench

import "github.com/kvspray/kvspray/placement"

// port is one direction of a node's link. Its transfers share it equally.
type port struct {
	rate  float64 // bytes per second
	flows []*flow
}

func (p *port) share(more int) float64 { return p.rate / float64(max(1, len(p.flows)+more)) }

// flow is one transfer.
type flow struct {
	from, to *port
	source   int
	left     float64 // bytes, at the time since
	rate     float64
	since    float64
	version  int // of the event at its end
	done     func(ok bool)
}

// start begins a transfer.
func (s *sim) start(f *flow) {
	f.since = s.now
	f.from.flows, f.to.flows = append(f.from.flows, f), append(f.to.flows, f)
	s.reshare(f.from, f.to)
}

// end removes a transfer.
func (s *sim) end(f *flow, ok bool) {
	f.version++
	for _, p := range []*port{f.from, f.to} {
		for i, x := range p.flows {
			if x == f {
				last := len(p.flows) - 1
				p.flows[i] = p.flows[last]
				p.flows = p.flows[:last]
				break
			}
		}
	}
	s.reshare(f.from, f.to)
	f.done(ok)
}

// reshare gives the transfers of two ports their new rates.
func (s *sim) reshare(ports ...*port) {
	for _, p := range ports {
		for _, f := range p.flows {
			rate := min(f.from.share(0), f.to.share(0))
			if rate == f.rate {
				continue
			}
			f.left = max(0, f.left-f.rate*(s.now-f.since))
			f.since, f.rate = s.now, rate
			f.version++
			version := f.version
			s.after(f.left/rate, func() {
				if f.version == version {
					s.end(f, true)
				}
			})
		}
	}
}

// Path implements placement.Network: what one more transfer gets now.
func (s *sim) Path(from, to int) placement.Path {
	n := len(s.nodes)
	if s.store != nil && from == n {
		if !s.nodes[to].up {
			return placement.Path{}
		}
		return placement.Path{Fixed: s.o.Delay,
			Rate: min(s.storeOut.share(1), s.nodes[to].in.share(1))}
	}
	if from == to || !s.nodes[from].up || !s.nodes[to].up {
		return placement.Path{}
	}
	return placement.Path{Fixed: s.o.Delay,
		Rate: min(s.nodes[from].out.share(1), s.nodes[to].in.share(1))}
}
