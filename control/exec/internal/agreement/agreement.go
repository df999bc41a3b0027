// Package agreement has the plans of transfers, and the check that receiver and source made the
// same one.
//
// Receiver and source each compute the transfer space of a part, and frames name offsets in it.
// Before the first byte the source compares everything that determines an offset: with different
// spaces, bytes would arrive intact at the wrong place.
package agreement

import (
	"bytes"
	"errors"
	"fmt"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
)

// Refusal is why a source refused a grant. It is a label of metrics.
type Refusal uint8

// The refusals.
const (
	RefusedOther       Refusal = iota
	RefusedNoSource            // no intent of its key came
	RefusedMismatch            // same transfer, another prompt
	RefusedFingerprint         // the caches differ
	RefusedGone                // the source lease is over
	RefusedLimit
	RefusedDraining
	RefusedPlan         // it cannot be planned
	RefusedPlanVersion  // the sidecars are of releases that order bytes otherwise
	RefusedPlanGeometry // of the rank
	RefusedPlanTokens   // of the prompt
	RefusedPlanChunks   // of the transfer space
	RefusedPlanBytes    // likewise
	RefusedPlanDigest   // likewise: everything else is equal
	numRefusals
)

var refusalNames = [numRefusals]string{"other", "no_source", "mismatch", "fingerprint", "gone",
	"limit", "draining", "plan", "plan_version",
	"plan_geometry", "plan_tokens", "plan_chunks", "plan_bytes", "plan_digest"}

// String is the label of metrics.
func (r Refusal) String() string { return refusalNames[r] }

// byCode maps the codes that imply a refusal.
var byCode = map[peerv1.GrantReply_Code]Refusal{
	peerv1.GrantReply_NO_SOURCE: RefusedNoSource, peerv1.GrantReply_MISMATCH: RefusedMismatch,
	peerv1.GrantReply_FINGERPRINT: RefusedFingerprint,
	peerv1.GrantReply_PLAN:        RefusedPlan, peerv1.GrantReply_GONE: RefusedGone,
	peerv1.GrantReply_LIMIT:    RefusedLimit,
	peerv1.GrantReply_DRAINING: RefusedDraining,
}

// ByCode is the refusal that a code implies.
func ByCode(code peerv1.GrantReply_Code) Refusal { return byCode[code] }

// Refusals counts refused grants by their reason.
type Refusals [numRefusals]uint64

// Counts returns the counts by label.
func (r *Refusals) Counts() map[string]uint64 {
	counts := make(map[string]uint64, numRefusals)
	for why, n := range r {
		counts[Refusal(why).String()] = n
	}
	return counts
}

// disagreement is a field of a grant that the source computes, too, with another result.
type disagreement struct {
	why              Refusal
	field            string
	receiver, source string
	remedy           string
}

func (d *disagreement) Error() string {
	return fmt.Sprintf("%s = %s at the receiver, %s at the source: %s", d.field, d.receiver,
		d.source, d.remedy)
}

// RefusalOf is the reason for which err refuses a part.
func RefusalOf(err error) Refusal {
	var d *disagreement
	if errors.As(err, &d) {
		return d.why
	}
	return RefusedPlan
}

// SameRelease is the remedy where the older side is unknown.
const SameRelease = "bytes would come to other places; run one release of kvspray on both sides, " +
	"and report this where they are of one"

// Source plans what worker w sends for a part of a grant, from a prompt of the given tokens. Both
// sides must compute the same plan.
func Source(planner Planner, w *engines.Worker, tokens uint32, m *peerv1.Grant, part *peerv1.Part) (
	Plan, error) {
	if ours := planner.Version(); m.PlanVersion != ours {
		return nil, otherVersion(m.PlanVersion, ours)
	}
	of := func(field string) string { return "parts[" + part.Rank + "]." + field }
	differs := func(why Refusal, field string, receiver, source any, remedy string) error {
		return &disagreement{why, field, fmt.Sprint(receiver), fmt.Sprint(source), remedy}
	}
	switch {
	case string(part.Geometry) != string(w.Geometry[:]):
		return nil, differs(RefusedPlanGeometry, of("geometry"), fmt.Sprintf("%.8x", part.Geometry),
			fmt.Sprintf("%.8x", w.Geometry[:]),
			"the rank's cache has another shape; the receiver asks again for those that there are")
	case m.Tokens != tokens:
		return nil, differs(RefusedPlanTokens, "tokens", m.Tokens, tokens,
			"the engines count the prompt's tokens otherwise; "+
				"run one release of the plug-in on both sides")
	}
	plan, err := planner.Send(w, m, part)
	if err != nil {
		return nil, err
	}
	sp, digest := plan.Space(), plan.Digest()
	switch {
	case sp.NumChunks() != part.Chunks:
		return nil, differs(RefusedPlanChunks, of("chunks"), part.Chunks, sp.NumChunks(), SameRelease)
	case sp.TotalBytes() != part.Bytes:
		return nil, differs(RefusedPlanBytes, of("bytes"), part.Bytes, sp.TotalBytes(), SameRelease)
	case !bytes.Equal(digest[:], part.Digest):
		return nil, differs(RefusedPlanDigest, of("digest"), fmt.Sprintf("%.8x", part.Digest),
			fmt.Sprintf("%.8x", digest[:]), SameRelease)
	}
	return plan, nil
}

// otherVersion refuses plans of another release, and names the older side.
func otherVersion(receiver, source uint32) error {
	d := &disagreement{RefusedPlanVersion, "plan_version", fmt.Sprint(receiver), fmt.Sprint(source),
		"upgrade the sidecar of the receiver (decode)"}
	if receiver > source {
		d.remedy = "upgrade the sidecar of the source (prefill)"
	}
	if receiver == 0 {
		d.receiver = "none"
	}
	return d
}
