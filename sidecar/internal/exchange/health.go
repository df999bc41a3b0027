package exchange

import (
	"context"
	"errors"
	"strings"
	"sync"

	"github.com/kvspray/kvspray/store/directory"
)

// downAfter is how many calls of a kind fail, one after the other, until the directory counts as
// failing, unless it refuses: one that is late, as for a moment of load, is no problem.
const downAfter = 3

// health is whether the directory works, by the results of its calls of one kind: a read-only
// replica takes nothing, but answers lookups. Without a directory, pages of other nodes are misses,
// and only a report shows the cause.
type health struct {
	call string

	mu      sync.Mutex // guards what follows
	failed  int        // calls in succession
	problem string     // of the last one; empty: it works
}

// note takes the result of a call, and reports whether the directory works again.
func (h *health) note(err error) (again bool) {
	if errors.Is(err, context.Canceled) {
		return false // by the caller
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		again = h.problem != ""
		h.failed, h.problem = 0, ""
	} else if h.failed++; h.failed >= downAfter || errors.Is(err, directory.ErrDown) {
		h.problem = err.Error()
	}
	return again
}

func (h *health) text() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.problem == "" {
		return ""
	}
	return h.call + ": " + h.problem
}

// Problem is why the directory does not work; empty: it does.
func (x *Exchange) Problem() string {
	var all []string
	for _, h := range []*health{&x.lookups, &x.announces} {
		if s := h.text(); s != "" {
			all = append(all, s)
		}
	}
	return strings.Join(all, "; ")
}
