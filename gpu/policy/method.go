package policy

import (
	"fmt"
)

// Executor is a way to rearrange scattered blocks between a GPU and a dense buffer.
type CopyMethod uint8

// The executors. Which one is better depends on what the engine does: a kernel of another process is time-sliced against the
// engine's, so that pack waits for milliseconds beside a busy engine without MPS, while copy engines do not wait but take
// longer for each block. A kernel in the engine's own context is not sliced, and takes a way through the engine's process.
const (
	Auto     CopyMethod = iota // learned
	Pack                       // a kernel packs in HBM, one copy crosses the link
	Copy                       // the copy engine alone, a descriptor for each block or two
	InEngine                   // pack, with the kernel in the engine's own context
	numMethods
)

var methodNames = [numMethods]string{"auto", "pack", "copy", "engine"}

func (e CopyMethod) String() string { return methodNames[e] }

// ParseExecutor reads a configured name.
func ParseCopyMethod(s string) (CopyMethod, error) {
	for i, n := range methodNames {
		if s == n {
			return CopyMethod(i), nil
		}
	}
	return 0, fmt.Errorf("gpu: executor %q is unknown: use auto, pack, copy or engine", s)
}
