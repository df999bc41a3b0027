package sidecar

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/transfer"
)

// Two sidecars on one host report of each other which rails reach which, with the open lanes, and
// the reason where there are none.
func TestReach(t *testing.T) {
	begun := func() *running {
		return start(t, func(c *config.Config) { c.Transports.Order = []string{"shm", "tcp"} })
	}
	p, d := begun(), begun()
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	x := begin(t, p, pe, de, 1, tokens)
	de.ok(x.dst)
	pe.ok(x.src)
	var dials int
	for _, ends := range [][2]*running{{p, d}, {d, p}} {
		here, there := ends[0], ends[1]
		var v nodeapi.Reach
		until(t, func() bool {
			v = here.web.Reach()
			if len(v.Peers) != 1 || len(v.Peers[0].Pairs) == 0 {
				return false
			}
			for _, x := range v.Peers[0].Pairs {
				if x.Lanes == 0 {
					return false
				}
			}
			return true
		})
		seen := map[string]bool{}
		for _, x := range v.Peers[0].Pairs {
			seen[x.Transport] = true
			if x.Why != "" {
				t.Errorf("%+v", x)
			}
		}
		if !seen["tcp"] || !seen["shm"] || v.Boot != here.boot.String() ||
			v.Peers[0].Boot != there.boot.String() {
			t.Errorf("%+v", v)
		}
		// D has dialed P, as a request named it; P has of D what D claims.
		dialed, claimed := "", there.Endpoint()
		if here == d {
			dialed, claimed = claimed, ""
		}
		if s, boot := here.web.State(), there.boot.String(); s.Peers[boot] != dialed ||
			s.Claimed[boot] != claimed {
			t.Errorf("its state has node %s at %q, and claimed to be at %q", there.cfg.Node, s.Peers[boot],
				s.Claimed[boot])
		}
		if x := v.Peers[0]; x.Endpoint != dialed || x.Claimed != there.Endpoint() ||
			x.Node != there.cfg.Node {
			t.Errorf("of node %s at %s it reports %+v", there.cfg.Node, there.Endpoint(), x)
		}
		if v.Peers[0].Dials {
			dials++
		}
	}
	p.conv.Connect(d.Endpoint()) // now a request names D at P
	until(t, func() bool { return p.web.Reach().Peers[0].Endpoint == d.Endpoint() })
	if dials != 1 {
		t.Errorf("%d of two open the lanes", dials)
	}
}

// The errors of lanes that do not open are bounded, and go with their peer.
func TestLaneErrorsAreBounded(t *testing.T) {
	var all laneErrors
	why := errors.New("no")
	for i := range maxLaneErrors + 10 {
		all.set(pairName{transfer.Boot{byte(i & 1)}, "gdr", fmt.Sprint(i), "x"}, why)
	}
	all.set(pairName{transfer.Boot{0}, "gdr", "0", "x"}, errors.New("changed"))
	if len(all.m) != maxLaneErrors || !strings.Contains(all.of(pairName{transfer.Boot{0}, "gdr", "0",
		"x"}), "changed") {
		t.Errorf("%d remembered", len(all.m))
	}
	all.forget(transfer.Boot{1})
	if len(all.m) != maxLaneErrors/2 {
		t.Errorf("%d remembered of the other peer", len(all.m))
	}
	all.set(pairName{transfer.Boot{0}, "gdr", "0", "x"}, nil)
	if len(all.m) != maxLaneErrors/2-1 {
		t.Error("not forgotten")
	}
}
