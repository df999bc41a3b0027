package evict

import "math/bits"

// ways is how many ghosts share a set: half a cache line.
const ways = 8

// Of a ghost's 32 bits.
const (
	clockBits = 12
	clockMask = 1<<clockBits - 1
	// quanta is how many times the clock ticks while as many ghosts are added as there is room for.
	// The clock goes round four times slower than that, and by then a set has been overwritten.
	quanta = (clockMask + 1) / 4
)

// ghosts remembers pages that were given up: 20 bits of the key's hash and when that was, in 4
// bytes. A ghost that is mistaken for another page, one time in 100,000, costs that page a place in
// the wrong queue.
type ghosts struct {
	sets  []uint32 // ways for each set
	added uint64
}

func newGhosts(memory []uint32) ghosts { return ghosts{sets: memory[:len(memory)/ways*ways]} }

// perQuantum is how many additions one tick of the clock takes.
func (g *ghosts) perQuantum() uint64 { return max(1, uint64(len(g.sets)/quanta)) }

func (g *ghosts) clock() uint32 { return uint32(g.added/g.perQuantum()) & clockMask }

func (g *ghosts) set(hash uint64) ([]uint32, uint32) {
	i, low := bits.Mul64(hash, uint64(len(g.sets)/ways))
	// the table's buckets take the high bits; 0 is no ghost
	print := max(1, uint32(low>>(32+clockBits)))
	return g.sets[i*ways : i*ways+ways], print << clockBits
}

func (g *ghosts) age(ghost uint32) uint32 { return (g.clock() - ghost) & clockMask }

// add remembers a page, in place of the oldest of its set.
func (g *ghosts) add(hash uint64) {
	if len(g.sets) == 0 {
		return
	}
	set, print := g.set(hash)
	oldest := 0
	for i, e := range set {
		if e == 0 || e&^clockMask == print {
			oldest = i
			break
		}
		if g.age(e) > g.age(set[oldest]) {
			oldest = i
		}
	}
	set[oldest] = print | g.clock()
	g.added++
}

// take forgets a page and reports whether it was among the `last` ones that were added.
func (g *ghosts) take(hash uint64, last int) bool {
	if len(g.sets) == 0 {
		return false
	}
	set, print := g.set(hash)
	for i, e := range set {
		if e != 0 && e&^clockMask == print {
			set[i] = 0
			return uint64(g.age(e))*g.perQuantum() <= uint64(last)
		}
	}
	return false
}
