package sidecar

import (
	"fmt"
	"strings"

	"github.com/kvspray/kvspray/parseblock"
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

// describedAs returns the description of a fingerprint of a peer's cache, if it is known.
func (p *planner) describedAs(fingerprint [32]byte) (parseblock.Description, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	d, ok := p.described[fingerprint]
	return d, ok
}

// learnDescription accepts a peer's description of a fingerprint, which must be its hash.
func (p *planner) learnDescription(geometry, fingerprint [32]byte, encoded []byte) (parseblock.Description, error) {
	l, err := p.verify(geometry, encoded)
	if err != nil {
		return nil, err
	}
	d, err := p.reg.Describe(l)
	if err != nil {
		return nil, err //nolint:wrapcheck // names the field
	}
	if got := d.Hash(); got != fingerprint {
		return nil, fmt.Errorf("the layout has fingerprint %.8x: %.8x was asked for", got, fingerprint)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	makeRoom(p.described, maxLayouts)
	p.described[fingerprint] = d
	return d, nil
}
