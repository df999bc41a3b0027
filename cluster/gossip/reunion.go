package gossip

import (
	"context"
	"math/rand/v2"
	"net"
	"slices"
	"time"

	"github.com/hashicorp/memberlist"
)

// Members on two sides of a network partition declare each other dead, and memberlist never asks a
// dead member again. Each member therefore asks some of those again that it has lost, and the
// members of peer.gossip.join that it lacks. It also exchanges states with one that it has:
// memberlist does that the more rarely the more members there are, dead ones included, and a
// member that some have missed, or wrongly declared dead, would stay unknown to them for minutes.
const (
	reunionEvery = 30 * time.Second // between two rounds; half as much again at most
	reunionAsks  = 2                // lost members that a round asks, and as many addresses of join
	lostFor      = 24 * time.Hour   // until a lost member is forgotten
	maxLost      = 256              // later ones replace the oldest
)

// lostMember is where a member was that is gone.
type lostMember struct {
	address string
	since   time.Time
}

// loseLocked keeps where n was.
func (d *self) loseLocked(n *memberlist.Node) {
	if len(d.lost) >= maxLost {
		oldest := ""
		for name, l := range d.lost {
			if oldest == "" || l.since.Before(d.lost[oldest].since) {
				oldest = name
			}
		}
		delete(d.lost, oldest)
	}
	d.lost[n.Name] = lostMember{n.Address(), time.Now()}
}

// round lists addresses to ask: of some lost members, some of join at which no member is, and one
// at which a member is.
// resolve returns the addresses of one of join.
func (d *self) round(own string, join []string, resolve func(string) []string) []string {
	d.mu.Lock()
	here := map[string]bool{own: true}
	var present []string
	for _, m := range d.members { // Go begins anywhere in a map
		if len(present) == 0 && m.Address != own {
			present = []string{m.Address}
		}
		here[m.Address] = true
	}
	var lost []string
	for name, l := range d.lost {
		if here[l.address] || time.Since(l.since) > lostFor {
			delete(d.lost, name) // another member is there now, or none
			continue
		}
		lost = append(lost, l.address)
	}
	d.mu.Unlock()
	var missing []string
	for _, name := range join {
		for _, a := range resolve(name) {
			if !here[a] && !slices.Contains(lost, a) && !slices.Contains(missing, a) {
				missing = append(missing, a)
			}
		}
	}
	return slices.Concat(some(lost), some(missing), present)
}

// some returns at most reunionAsks of all, at random.
func some(all []string) []string {
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:min(len(all), reunionAsks)]
}

// resolve returns the addresses of host:port; none: the name has none now.
func resolve(ctx context.Context, addr string) (all []string) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil
	}
	ips, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil {
		return nil
	}
	for _, ip := range ips {
		all = append(all, net.JoinHostPort(ip, port))
	}
	return all
}

// reunite asks a present member and absent ones in each round, until ctx ends.
func (g *Gossip) reunite(ctx context.Context, o Options) {
	every := o.reunion
	if every == 0 {
		every = reunionEvery
	}
	names := func(a string) []string { return resolve(ctx, a) }
	for {
		t := time.NewTimer(every + rand.N(every/2))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
		for _, a := range g.self.round(g.Address(), o.Join, names) {
			// The first exchange shows each side that the other has declared it dead, which it contradicts
			// in the second.
			for range 2 {
				if g.ask(ctx, a) != nil {
					break
				}
			}
		}
	}
}
