package source

import (
	"maps"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/exec/internal/layouts"
)

// describe asks for the layouts that the plan of a part needs; the part waits for them. It returns
// false if too many layouts are asked for already.
func (mt *Matcher) describe(now Instant, c *partBinding, u *agreement.UnknownLayout) (asked bool) {
	for _, g := range u.Geometries {
		if name := (layouts.Name{Boot: c.in.peer.Boot, Geometry: g}); mt.layouts.Ask(now, name) {
			mt.describing.Add(name, c)
			c.ask()
			asked = true
		}
	}
	return asked
}

// NeedsLayout reports whether a grant still waits for a layout.
func (mt *Matcher) NeedsLayout(name layouts.Name) bool {
	for c := range mt.describing[name] {
		if mt.grants[c.in.id] == c.in && !c.in.over {
			return true
		}
	}
	return false
}

// Described continues what waited for a layout; with err it is not to be had.
func (mt *Matcher) Described(now Instant, name layouts.Name, err error) {
	all := bindingsInOrder(maps.Keys(mt.describing[name]))
	delete(mt.describing, name)
	for _, c := range all {
		c.answered()
		switch {
		case mt.grants[c.in.id] != c.in || c.in.over || c.src != nil || c.wait != nil:
		case err != nil:
			mt.refuse(now, c.in, peerv1.GrantReply_PLAN,
				"the layout of the receiver is not to be had: "+err.Error())
		case !mt.bindPart(now, c):
			mt.wait(now, &pending{peer: c.in.peer, key: c.in.key, in: c.in, binding: c},
				c.in.msg.MatchTimeoutMs)
		}
	}
}
