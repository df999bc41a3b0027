package mem

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// routine is a way to copy memory.
type routine uint8

const (
	streaming routine = iota // stores around the caches
	ordinary                 // the runtime's copy
	repeated                 // rep movsb, which C libraries use for these sizes
	routines
)

func (r routine) String() string {
	return [routines]string{"streaming stores", "ordinary copy", "rep movsb"}[r]
}

// classSizes are the sizes for which a routine is chosen, as none is the best for all. A choice
// holds for pieces of up to twice that size, the last one for all longer ones.
var classSizes = [...]int{4 << 10, 16 << 10, 64 << 10}

// chosen is the routine of each class, 8 bits each, the first lowest: streaming until ChooseCopies
// has measured.
var chosen atomic.Uint32

func routineFor(n int) routine {
	class := 0
	for class < len(classSizes)-1 && n > 2*classSizes[class] {
		class++
	}
	return routine(chosen.Load() >> (8 * class))
}

// Of the measurement. What else runs on the machine can only make a pass longer, so the shortest of
// several counts.
const (
	passBytes = 256 << 10 // copied in one pass
	passes    = 9
	// advantage is what another routine must have over streaming stores to be chosen. These leave the
	// caches to the engine and do not read what they overwrite, which pays where several threads share
	// the memory's bandwidth, and does not show in the time of one.
	advantage = 1.05
)

// CopyChoice is how Copy copies pieces of about a size, and what each routine reached with them.
type CopyChoice struct {
	Size   int // bytes
	chosen routine
	rates  [routines]float64 // GB/s; 0: this processor does not have it
}

// String is like "16 KiB: ordinary copy (GB/s: streaming stores 5.1, ordinary copy 7.0, rep movsb
// 6.8)".
func (c CopyChoice) String() string {
	var each []string
	for r, rate := range c.rates {
		if rate > 0 {
			each = append(each, fmt.Sprintf("%s %.1f", routine(r), rate))
		}
	}
	return fmt.Sprintf("%d KiB: %s (GB/s: %s)", c.Size>>10, c.chosen, strings.Join(each, ", "))
}

// ChooseCopies measures the routines on this machine, about 20 ms, and has Copy use the best one
// for each size. Only the first call of a process measures.
var ChooseCopies = sync.OnceValue(func() []CopyChoice {
	all := measureCopies()
	var best uint32
	for i, c := range all {
		best |= uint32(c.chosen) << (8 * i)
	}
	chosen.Store(best)
	return all
})

// CopyChoices is what ChooseCopies has chosen, for logs and people.
func CopyChoices() (out []string) {
	for _, c := range ChooseCopies() {
		out = append(out, c.String())
	}
	return out
}

// choose is the routine with the highest rate; streaming where none is faster by the advantage.
func choose(rates [routines]float64) routine {
	best := streaming
	for r := range routines {
		if rates[r] > rates[best] {
			best = r
		}
	}
	if rates[best] < advantage*rates[streaming] {
		return streaming
	}
	return best
}

// measureCopies copies blocks of each size whose source and destination no cache holds, as those of
// a transfer, by each routine in turns.
func measureCopies() []CopyChoice {
	src, dst := make([]byte, passBytes), make([]byte, passBytes)
	Fill(src, 1)
	Fill(dst, 2)
	all := make([]CopyChoice, len(classSizes))
	for i, size := range classSizes {
		all[i].Size = size
		var best [routines]time.Duration
		for range passes {
			for r := range routines {
				if !usable(r) {
					continue
				}
				if took := pass(r, dst, src, size); best[r] == 0 || took < best[r] {
					best[r] = took
				}
			}
		}
		for r, took := range best {
			if took > 0 {
				all[i].rates[r] = passBytes / float64(took.Nanoseconds())
			}
		}
		all[i].chosen = choose(all[i].rates)
	}
	return all
}

// pass is how long a routine takes for all blocks of src, from memory to memory.
func pass(r routine, dst, src []byte, size int) time.Duration {
	flush(src)
	flush(dst)
	blocks := len(src) / size
	began := time.Now()
	for i := range blocks {
		// orders that no prefetcher follows: blocks are a power of two
		from, to := i*7%blocks*size, i*3%blocks*size
		moveBy(r, dst[to:to+size], src[from:from+size])
	}
	return max(time.Since(began), 1)
}
