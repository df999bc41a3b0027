// Package route ranks the paths for bytes from local memory to a peer's memory: transport x local
// rail x remote rail, and the same with a stop in host memory on either side. It is pure. Package
// spray decides which path carries which slice; this package decides which paths are worth a lane,
// in which order, and why others are not.
//
// Invariants: the same input gives the same list. At most MaxCandidates are kept, the best ones. An
// unusable candidate has a reason.
package route

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Bounds.
const (
	MaxRails      = 64  // of one side and transport that are examined
	MaxPairs      = 64  // rail pairs of one transport that get lanes
	MaxCandidates = 256 // of one peer
)

// Transport describes a backend as both sides have it.
type Transport struct {
	Name     string
	Rank     int  // 0 is preferred
	SameHost bool // works between processes of one host only
	Device   bool // accesses GPU memory itself; others stage it
}

// Rail is one end.
type Rail struct {
	Transport string
	Name      string
	Address   string       // host:port for transports with such addresses; opaque otherwise
	Prefix    netip.Prefix // of a local rail: its link's network; invalid: unknown
	Gbps      float64      // 0: unknown
	Down      bool
	Fault     string // why it is down although its link is up; empty: its link is down
	Tier      int    // for the memory in question; 0: unknown
}

// Kind is how bytes get from memory to the transport and back.
type Kind string

// The kinds.
const (
	Direct Kind = "direct"
	// through pinned host memory at this end, because the transport cannot access this end's
	// memory; the other end decides for itself.
	Staged Kind = "staged"
)

// Candidate is one path.
type Candidate struct {
	Kind      Kind    `json:"kind"`
	Transport string  `json:"transport"`
	Local     string  `json:"local"`
	Remote    string  `json:"remote"`
	Tier      int     `json:"tier"`
	Gbps      float64 `json:"gbps"` // of the slower end; 0: unknown
	OnLink    bool    `json:"on_link"`
	Why       string  `json:"unusable,omitempty"` // empty: usable

	rank int
}

// Usable reports whether lanes may be opened or bytes sent on it.
func (c *Candidate) Usable() bool { return c.Why == "" }

// Input is the basis of a ranking.
type Input struct {
	Transports []Transport
	Local      []Rail
	Remote     []Rail
	SameHost   bool // both processes run on one kernel
	Device     bool // the memory at this end is a GPU's
}

// Rank lists the candidates, the best first.
func Rank(in Input) []Candidate {
	var out []Candidate
	for _, t := range in.Transports {
		kind, why := Direct, ""
		if in.Device && !t.Device {
			kind = Staged
		}
		if t.SameHost && !in.SameHost {
			why = t.Name + " works within one host, and the peer is on another one"
		}
		local, remote := of(in.Local, t.Name), of(in.Remote, t.Name)
		for _, p := range Pairs(local, remote) {
			a, b := &local[p.Local], &remote[p.Remote]
			c := Candidate{Kind: kind, Transport: t.Name, Local: a.Name, Remote: b.Name, Tier: max(a.Tier,
				b.Tier, 1), Gbps: slower(a.Gbps, b.Gbps), OnLink: p.OnLink,
				Why: why, rank: t.Rank}
			switch {
			case c.Why != "":
			case a.Down:
				c.Why = fmt.Sprintf("the link of %s is down", a.Name)
				if a.Fault != "" {
					c.Why = a.Name + " is out of use: " + a.Fault
				}
			case b.Down:
				c.Why = fmt.Sprintf("the link of the peer's %s is down", b.Name)
			}
			out = append(out, c)
		}
	}
	slices.SortStableFunc(out, compare)
	return out[:min(len(out), MaxCandidates)]
}

// compare orders candidates: usable, preferred transport, without a stop, near memory, on one link,
// fast.
func compare(a, b Candidate) int {
	return cmp.Or(first(b.Usable(), a.Usable()), cmp.Compare(a.rank, b.rank), first(b.Kind == Direct,
		a.Kind == Direct), cmp.Compare(a.Tier, b.Tier),
		first(b.OnLink, a.OnLink), cmp.Compare(b.Gbps, a.Gbps), strings.Compare(a.Local, b.Local),
		strings.Compare(a.Remote, b.Remote))
}

func first(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

func of(all []Rail, transport string) (out []Rail) {
	for _, r := range all {
		if r.Transport == transport && len(out) < MaxRails {
			out = append(out, r)
		}
	}
	return out
}

func slower(a, b float64) float64 {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// Pair is two rails by index.
type Pair struct {
	Local, Remote int
	OnLink        bool
}

// Pairs decides which rails of one transport are joined by lanes. Rails on one link belong
// together: no path is shorter, and without routing no other works. The remaining rails are paired
// in order, as many pairs as the longer list has, so that each rail is in a pair. Rails that are
// down keep their pairs, so that pulling a cable changes no other pair.
func Pairs(local, remote []Rail) (out []Pair) {
	if len(local) == 0 || len(remote) == 0 {
		return nil
	}
	usedHere, usedThere := make([]bool, len(local)), make([]bool, len(remote))
	for i, a := range local {
		for k, b := range remote {
			if !usedThere[k] && onLink(a, b) {
				out = append(out, Pair{i, k, true})
				usedHere[i], usedThere[k] = true, true
				break
			}
		}
	}
	here, there := unused(usedHere), unused(usedThere)
	for i := range max(len(here), len(there)) {
		p := Pair{}
		switch {
		case i < len(here) && i < len(there):
			p = Pair{Local: here[i], Remote: there[i]}
		case i < len(here):
			p = Pair{Local: here[i], Remote: here[i] % len(remote)}
		default:
			p = Pair{Local: there[i] % len(local), Remote: there[i]}
		}
		p.OnLink = onLink(local[p.Local], remote[p.Remote])
		out = append(out, p)
	}
	return out[:min(len(out), MaxPairs)]
}

func unused(used []bool) (out []int) {
	for i, u := range used {
		if !u {
			out = append(out, i)
		}
	}
	return out
}

func onLink(local, remote Rail) bool {
	if !local.Prefix.IsValid() {
		return false
	}
	a, err := netip.ParseAddrPort(remote.Address)
	return err == nil && local.Prefix.Contains(a.Addr().Unmap().WithZone(""))
}
