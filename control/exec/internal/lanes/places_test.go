package lanes

import (
	"strings"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// recorder is what a driver would get.
type recorder struct {
	logged []string
	moved  map[uint64]int // slices by lane
	hints  []uint64
}

func (r *recorder) Move(lane uint64, batch []transport.Slice) { r.moved[lane] += len(batch) }

func (r *recorder) WakeHint(lane uint64) { r.hints = append(r.hints, lane) }

func (r *recorder) Ask(uint64) {}

func (r *recorder) Measure() {}

func (r *recorder) Send(transfer.Boot, *peerv1.ControlFrame) {}

func (r *recorder) LogViolation(_ transfer.Boot, text string) { r.logged = append(r.logged, text) }

// parts are a core with what this package adds to it.
func parts(cfg core.Config) (*core.Core, *recorder, *Peers, *Dispatcher, *Rails) {
	c := &core.Core{Cfg: cfg.WithDefaults(), Spray: spray.New(spray.Config{})}
	out := &recorder{moved: map[uint64]int{}}
	ps := NewPeers(c, out)
	dp := NewDispatcher(c, ps, out, func(owner any) *transport.Origin {
		return owner.(*transport.Origin)
	})
	return c, out, ps, dp, NewRails(c, ps, dp)
}

// Distances in a grant: unknown rails and invalid tiers are ignored and logged once by name; the
// larger distance of the two ends counts; places are bounded, and free ones are used again.
func TestPlaces(t *testing.T) {
	near := map[string]int{"r0": 1, "r1": 3}
	c, out, ps, _, rails := parts(core.Config{Transports: []string{"tcp"},
		Distance: func(_ *engines.Worker, _, rail string) int { return near[rail] }})
	p := ps.Get(transfer.Boot{1})
	known := []Rail{{Transport: "tcp", Name: "r0"}, {Transport: "tcp", Name: "r1"}}
	rails.Set(0, known)
	rails.SetPeer(0, p.Boot, known)
	w := &engines.Worker{Name: "w"}
	if got := rails.DistancesOf(w, &Distances{}); len(got) != 2 || got[0].Distance != 1 ||
		got[1].Distance != 3 {
		t.Errorf("distances in a grant: %v", got)
	}
	tier := func(rail string, n uint32) *peerv1.RailDistance {
		return &peerv1.RailDistance{Transport: "tcp", Rail: rail, Distance: n}
	}
	at := rails.Place(p, w, []*peerv1.RailDistance{tier("r0", 2), tier("bogus", 1), tier("r1", 7)})
	if len(out.logged) != 1 || !strings.Contains(out.logged[0], `"bogus"`) {
		t.Errorf("logged: %+v", out.logged)
	}
	for rail, want := range map[string]int{"r0": 2, "r1": 3} {
		if got := p.places.tier(c.Cfg.Distance, spray.Path{Transport: "tcp", Local: rail, Remote: rail},
			at); got != want {
			t.Errorf("%s: tier %d, want %d", rail, got, want)
		}
	}
	if again := rails.Place(p, w, []*peerv1.RailDistance{tier("r0", 2)}); again != at {
		t.Errorf("places %d and %d of the same memory", at, again)
	}
	seen := map[spray.Place]bool{}
	for i := range 100 {
		w := &engines.Worker{Boot: transfer.Boot{byte(i), 1}}
		at := rails.Place(p, w, nil)
		p.places.moves(at, 1)
		seen[at] = true
	}
	if !seen[0] || len(seen) != spray.MaxPlaces {
		t.Errorf("%d places of 100 workers", len(seen))
	}
	// Rails that come and go make other places of the same memory, any number of times.
	for at := range seen {
		p.places.moves(at, -1)
	}
	for i := range uint32(500) {
		if rails.Place(p, w, []*peerv1.RailDistance{tier("r0", i%3+1), tier("r1", i/3%3+1)}) == 0 {
			t.Fatal("places without flows are not used again")
		}
	}
	if len(p.places.byName) != spray.MaxPlaces-1 || len(p.places.list) != spray.MaxPlaces-1 {
		t.Errorf("%d names of %d places", len(p.places.byName), len(p.places.list))
	}
}
