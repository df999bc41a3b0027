package agreement

import (
	"strings"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/transfer"
)

// plan is a transfer space with a digest.
type plan struct {
	Plan
	space  *transfer.Space
	digest [32]byte
}

func (p plan) Space() *transfer.Space { return p.space }
func (p plan) Digest() [32]byte       { return p.digest }

// planner makes one plan for everything.
type planner struct {
	Planner
	plan plan
}

func (p planner) Version() uint32 { return 7 }

func (p planner) Send(*engines.Worker, *peerv1.Grant, *peerv1.Part) (Plan, error) {
	return p.plan, nil
}

// A source serves a part only if everything that both sides compute is equal, and names the first
// field that is not.
func TestSource(t *testing.T) {
	space, err := transfer.NewSpace([]uint64{3 * transfer.ChunkBytes})
	if err != nil {
		t.Fatal(err)
	}
	p := planner{plan: plan{space: space, digest: [32]byte{5}}}
	w := &engines.Worker{Geometry: [32]byte{6}}
	for _, x := range []struct {
		field  string
		why    Refusal
		change func(*peerv1.Grant, *peerv1.Part)
	}{
		{"", 0, func(*peerv1.Grant, *peerv1.Part) {}},
		{"plan_version", RefusedPlanVersion, func(g *peerv1.Grant, _ *peerv1.Part) { g.PlanVersion = 6 }},
		{"parts[r].geometry", RefusedPlanGeometry,
			func(_ *peerv1.Grant, q *peerv1.Part) { q.Geometry[0]++ }},
		{"tokens", RefusedPlanTokens, func(g *peerv1.Grant, _ *peerv1.Part) { g.Tokens++ }},
		{"parts[r].chunks", RefusedPlanChunks, func(_ *peerv1.Grant, q *peerv1.Part) { q.Chunks++ }},
		{"parts[r].bytes", RefusedPlanBytes, func(_ *peerv1.Grant, q *peerv1.Part) { q.Bytes-- }},
		{"parts[r].digest", RefusedPlanDigest, func(_ *peerv1.Grant, q *peerv1.Part) { q.Digest[31]++ }},
	} {
		g := &peerv1.Grant{PlanVersion: 7, Tokens: 64}
		q := &peerv1.Part{Rank: "r", Geometry: append([]byte{6}, make([]byte, 31)...),
			Chunks: space.NumChunks(), Bytes: space.TotalBytes(),
			Digest: append([]byte{5}, make([]byte, 31)...)}
		x.change(g, q)
		_, err := Source(p, w, 64, g, q)
		if x.field == "" {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		if err == nil || !strings.HasPrefix(err.Error(), x.field+" = ") || RefusalOf(err) != x.why {
			t.Errorf("%s: %v", x.field, err)
		}
	}
}

// Every refusal has a label of its own.
func TestLabels(t *testing.T) {
	var r Refusals
	r[RefusedLimit]++
	if counts := r.Counts(); len(counts) != int(numRefusals) || counts["limit"] != 1 {
		t.Errorf("%v", counts)
	}
}
