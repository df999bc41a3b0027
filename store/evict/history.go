package evict

import "math/bits"

// ways is how many entries share a set: half a cache line.
const ways = 8

// Of an entry's 32 bits.
const (
	clockBits = 12
	clockMask = 1<<clockBits - 1
	// quanta is how many times the clock ticks while as many entries are added as there is room for.
	// The clock goes round four times slower than that, and by then a set has been overwritten.
	quanta = (clockMask + 1) / 4
)

// history remembers pages that were given up: an entry has 20 bits of the key's hash, and when that
// was, in 4 bytes. An entry is mistaken for another page's one time in 100,000: that page then
// stands in the wrong queue.
type history struct {
	sets  []uint32 // ways for each set
	added uint64
}

func newHistory(memory []uint32) history { return history{sets: memory[:len(memory)/ways*ways]} }

// perQuantum is how many additions one tick of the clock takes.
func (h *history) perQuantum() uint64 { return max(1, uint64(len(h.sets)/quanta)) }

func (h *history) clock() uint32 { return uint32(h.added/h.perQuantum()) & clockMask }

func (h *history) set(hash uint64) ([]uint32, uint32) {
	i, low := bits.Mul64(hash, uint64(len(h.sets)/ways))
	// the table's buckets take the high bits; 0 is no entry
	print := max(1, uint32(low>>(32+clockBits)))
	return h.sets[i*ways : i*ways+ways], print << clockBits
}

func (h *history) age(entry uint32) uint32 { return (h.clock() - entry) & clockMask }

// add remembers a page, in place of the oldest of its set.
func (h *history) add(hash uint64) {
	if len(h.sets) == 0 {
		return
	}
	set, print := h.set(hash)
	oldest := 0
	for i, e := range set {
		if e == 0 || e&^clockMask == print {
			oldest = i
			break
		}
		if h.age(e) > h.age(set[oldest]) {
			oldest = i
		}
	}
	set[oldest] = print | h.clock()
	h.added++
}

// take forgets a page and reports whether it was among the `last` ones that were added.
func (h *history) take(hash uint64, last int) bool {
	if len(h.sets) == 0 {
		return false
	}
	set, print := h.set(hash)
	for i, e := range set {
		if e != 0 && e&^clockMask == print {
			set[i] = 0
			return uint64(h.age(e))*h.perQuantum() <= uint64(last)
		}
	}
	return false
}
