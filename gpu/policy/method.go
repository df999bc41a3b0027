package policy

import (
	"fmt"
)

// CopyMethod is a method to move scattered blocks between a GPU and a dense buffer.
type CopyMethod uint8

// The copy methods. The best one depends on the engine's load. A kernel of another process is
// time-sliced against the engine's: beside a busy engine without MPS, pack waits for milliseconds.
// Copy engines do not wait but take longer per block.
const (
	Auto CopyMethod = iota // learned
	Pack                   // a kernel packs on the GPU, one copy crosses the link
	Copy                   // the copy engine alone, one copy per block or two
	numMethods
)

var methodNames = [numMethods]string{"auto", "pack", "copy"}

func (e CopyMethod) String() string { return methodNames[e] }

// ParseCopyMethod parses a configured name.
func ParseCopyMethod(s string) (CopyMethod, error) {
	for i, n := range methodNames {
		if s == n {
			return CopyMethod(i), nil
		}
	}
	return 0, fmt.Errorf("gpu: copy method %q is unknown: use auto, pack or copy", s)
}
