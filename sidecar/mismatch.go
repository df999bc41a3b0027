package sidecar

import (
	"fmt"
	"strings"
	"sync"

	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
)

// Bounds of the sentence about the differences of two engines, which travels in a control frame,
// and to an engine in a completion.
const (
	maxDifferenceBytes = 3 << 10
	maxFieldBytes      = 512 // of one field
)

// sentence joins fields within its bound, and appends the number of omitted ones.
func sentence(fields []string) string {
	var b strings.Builder
	for i, f := range fields {
		if len(f) > maxFieldBytes {
			f = strings.ToValidUTF8(f[:maxFieldBytes], "") + "..."
		}
		if i > 0 {
			if b.Len()+len(f) > maxDifferenceBytes {
				fmt.Fprintf(&b, "; and %d more", len(fields)-i)
				break
			}
			b.WriteString("; ")
		}
		b.WriteString(f)
	}
	return b.String()
}

// maxDescriptions bounds the descriptions of peers' caches. A full table is emptied.
const maxDescriptions = 256

// descriptions holds the descriptions of peers' caches that differ from local ones.
type descriptions struct {
	plans *plans.Planner

	mu            sync.Mutex
	byFingerprint map[[32]byte]parseblock.Description // protected by mu
}

func newDescriptions(p *plans.Planner) *descriptions {
	return &descriptions{plans: p, byFingerprint: map[[32]byte]parseblock.Description{}}
}

// of returns the description of a fingerprint, if it is known.
func (d *descriptions) of(fingerprint [32]byte) (parseblock.Description, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	x, ok := d.byFingerprint[fingerprint]
	return x, ok
}

// learn accepts a peer's description of a fingerprint, which must be its hash.
func (d *descriptions) learn(geometry, fingerprint [32]byte,
	encoded []byte) (parseblock.Description, error) {
	l, err := d.plans.Verify(geometry, encoded)
	if err != nil {
		return nil, err //nolint:wrapcheck // names the field
	}
	x, err := d.plans.Registry().Describe(l)
	if err != nil {
		return nil, err //nolint:wrapcheck // names the field
	}
	if got := x.Hash(); got != fingerprint {
		return nil, fmt.Errorf("the layout has fingerprint %.8x: %.8x was asked for", got, fingerprint)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.byFingerprint) >= maxDescriptions {
		clear(d.byFingerprint)
	}
	d.byFingerprint[fingerprint] = x
	return x, nil
}
