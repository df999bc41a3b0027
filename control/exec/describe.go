package exec

import (
	"errors"

	"github.com/kvspray/kvspray/transfer"
)

// layouts are those that peers were asked for.
type layouts struct {
	*core
	asked map[described]*description
}

// described names a layout of a peer.
type described struct {
	boot     transfer.Boot
	geometry [32]byte
}

// ErrNoAnswer is wrapped by the error of Described if the peer did not answer: the layout may
// still exist.
var ErrNoAnswer = errors.New("no answer")

// description lists what waits for a layout.
type description struct {
	dests  map[*dest]struct{}
	claims map[*partBinding]struct{}
	end    Instant // of asking a peer that does not answer
	retry  *timer
}

// describe asks for the layouts that a plan needs; d or c continues when they arrive. It returns
// false if too many layouts are asked for already.
func (ls *layouts) describe(now Instant, p *peer, u *UnknownLayout, d *dest,
	c *partBinding) (asked bool) {
	for _, g := range u.Geometries {
		name := described{p.boot, g}
		w := ls.asked[name]
		if w == nil {
			if len(ls.asked) >= maxDescribing {
				continue
			}
			w = &description{dests: map[*dest]struct{}{}, claims: map[*partBinding]struct{}{}, end: now +
				ls.cfg.MatchTimeout}
			w.retry = newTimer(func(Instant) { ls.ask(name) })
			ls.asked[name] = w
			ls.ask(name)
		}
		if d != nil {
			w.dests[d] = struct{}{}
		}
		if c != nil {
			w.claims[c] = struct{}{}
			c.ask()
		}
		asked = true
	}
	return asked
}

func (ls *layouts) ask(name described) {
	a := ls.emit(Describe)
	a.Peer, a.Geometry = name.boot, name.geometry
}
