package why

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
)

type (
	view  = exec.DestView
	offer = exec.SourceView
	pair  = spray.PairView
)

// Choice is what a transport carried between a sidecar and a peer, and why it was used or not. The
// reason is the present one: rails may have changed since the request.
type Choice struct {
	Peer      string `json:"peer"` // its boot
	Transport string `json:"transport"`
	Bytes     uint64 `json:"bytes"`
	Why       string `json:"why"`
}

// moves describes how a transport moves bytes.
var moves = map[string]string{
	config.TransSHM: "the receiver's sidecar copies from shared memory (pull)",
	config.TransGDR: "the sender's NIC writes to the receiver's memory (push)",
	config.TransTCP: "the sender's sidecar writes to connections (push)",
}

// judge notes which parts are missing, and why transports carried bytes or did not. The sender's
// sidecar chooses the transports; a receiver's view counts only if the sender's part is missing.
func (r *Report) judge() {
	r.absent()
	seen := map[string]bool{}
	for i := range r.Sidecars {
		seen[r.Sidecars[i].Boot] = true
	}
	for i := range r.Sidecars {
		s := &r.Sidecars[i]
		s.Choices = []Choice{}
		carried := s.carried()
		for _, peer := range s.others() {
			from := slices.ContainsFunc(s.Records, func(e nodeapi.Record) bool {
				return e.Side == "source" && slices.ContainsFunc(e.Sends, func(x nodeapi.Send) bool {
					return x.Peer == peer
				})
			})
			if !seen[peer] {
				r.unknown("the part of %s: it was not asked; add --http HOST:PORT of its http.listen, "+
					"or --router", s.name(peer))
			}
			if from || !seen[peer] {
				s.choose(peer, carried[peer])
			}
		}
	}
}

// others are the boots of the peers that took part, in order.
func (s *Sidecar) others() (boots []string) {
	add := func(boot string) {
		if strings.Trim(boot, "0") != "" && !slices.Contains(boots, boot) {
			boots = append(boots, boot)
		}
	}
	for _, e := range s.Records {
		if e.Side == "destination" {
			add(e.Peer)
		}
		for _, x := range e.Sends {
			add(x.Peer)
		}
	}
	for _, d := range s.Dests {
		add(d.Peer)
	}
	return boots
}

// carried are the bytes of each transport, by peer.
func (s *Sidecar) carried() map[string]map[string]uint64 {
	all := map[string]map[string]uint64{}
	add := func(peer, transport string, bytes uint64) {
		if all[peer] == nil {
			all[peer] = map[string]uint64{}
		}
		all[peer][transport] += bytes
	}
	for _, e := range s.Records {
		if e.Side == "destination" {
			for _, m := range e.Moved {
				add(e.Peer, m.Transport, m.Bytes)
			}
		}
		for _, x := range e.Sends {
			for _, rail := range x.Rails {
				add(x.Peer, rail.Transport, rail.Bytes)
			}
		}
	}
	return all
}

// choose explains the transports towards one peer, in the order of preference.
func (s *Sidecar) choose(peer string, carried map[string]uint64) {
	names := slices.Clone(s.Order)
	for _, name := range []string{config.TransSHM, config.TransGDR, config.TransTCP} {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	preferred := "" // the first one that carried something
	for _, name := range names {
		c := Choice{Peer: peer, Transport: name, Bytes: carried[name]}
		if c.Bytes > 0 {
			preferred = cmp.Or(preferred, name)
			c.Why = moves[name]
		} else {
			c.Why = s.unused(peer, name, preferred)
		}
		s.Choices = append(s.Choices, c)
	}
}

// unused is why a transport carried nothing to a peer. preferred is a transport before it in the
// order that carried bytes; empty: none.
func (s *Sidecar) unused(peer, name, preferred string) string {
	if !slices.Contains(s.Order, name) {
		return fmt.Sprintf("transports.order of %s (%s) does not have it", s.Node,
			strings.Join(s.Order, ", "))
	}
	if peer == s.Boot {
		return "both engines use this sidecar"
	}
	k := slices.IndexFunc(s.Peers, func(p nodeapi.PeerReach) bool { return p.Boot == peer })
	if k < 0 {
		return "unknown: the peer is not connected any more"
	}
	reasons, lanes, rows := []string{}, 0, 0
	for _, p := range s.Peers[k].Pairs {
		if p.Transport != name {
			continue
		}
		rows++
		lanes += p.Lanes
		switch {
		case p.Why != "":
			reasons = append(reasons, fmt.Sprintf("%s to %s: %s", p.Local, p.Remote, p.Why))
		case p.Idle:
			reasons = append(reasons, "no lane is open now, because no request needs one")
		}
	}
	for _, x := range s.Excluded {
		if x.Peer == peer && x.Path.Transport == name {
			reasons = append(reasons, fmt.Sprintf("%s to %s is %s: %s", x.Path.Local, x.Path.Remote,
				x.State, x.Reason))
		}
	}
	slices.Sort(reasons)
	reasons = slices.Compact(reasons)
	switch {
	case rows == 0:
		return "the peer or this host has no rail of it: 'kvspray doctor' on both hosts shows why"
	case len(reasons) > 0:
		return strings.Join(reasons, "; ")
	case preferred != "":
		return fmt.Sprintf("not needed: %s comes before it in transports.order", preferred)
	case lanes > 0:
		return "it has lanes now; nothing was sent, or they opened later"
	}
	return "unknown"
}

// name is the shortest name of a sidecar that people recognize.
func (s *Sidecar) name(boot string) string {
	if boot == s.Boot {
		return s.Node
	}
	for _, p := range s.Peers {
		if p.Boot == boot {
			return cmp.Or(p.Node, p.Endpoint, p.Claimed, short(boot))
		}
	}
	return "the sidecar with boot " + short(boot)
}

// short is the beginning of an id, for people.
func short(id string) string { return id[:min(len(id), 8)] }
