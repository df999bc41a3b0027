package engines

import "fmt"

// Place identifies a worker by engine and rank. The zero Place is the only rank of an unnamed
// engine.
type Place struct {
	Engine string // its kind, id and data parallel rank: the ranks of one Engine share requests
	PP, TP int
	PPSize int // 0 counts as 1
	TPSize int
}

// Rank names the worker within its engine.
func (p Place) Rank() string { return rankName(p.PP, p.TP) }

func rankName(pp, tp int) string { return fmt.Sprintf("pp%d/tp%d", pp, tp) }

// World is the number of ranks of the engine.
func (p Place) World() int { return max(p.PPSize, 1) * max(p.TPSize, 1) }

// Ranks names all ranks, stage by stage.
func (p Place) Ranks() []string {
	out := make([]string, 0, p.World())
	for pp := range max(p.PPSize, 1) {
		for tp := range max(p.TPSize, 1) {
			out = append(out, rankName(pp, tp))
		}
	}
	return out
}
