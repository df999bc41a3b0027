// Package doctor checks what works on this host, one line per check: ok, warn or fail with the
// reason and the remedy, or skip. It tries features rather than guess from versions, changes
// nothing, and bounds each check in time.
//
// No goroutines outlive Run.
package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/sys/topo"
)

// State is the result of one check.
type State string

// The states.
const (
	OK   State = "ok"
	Warn State = "warn" // something does not work, or works worse; the sidecar runs without it
	Fail State = "fail" // the sidecar does not run, or the user named what is not there
	Skip State = "skip" // this host has or needs nothing of the kind, or it could not be determined
)

// Result is one line.
type Result struct {
	Name     string `json:"name"`
	State    State  `json:"state"`
	Detail   string `json:"detail"`           // the finding, or the reason
	Remedy   string `json:"remedy,omitempty"` // always of warn and fail
	Required bool   `json:"required"`         // nothing works without it
}

// checkTimeout bounds each check.
const checkTimeout = 10 * time.Second

// Host selects the machine to check. The zero value with a Config is this machine; tests use
// another root.
type Host struct {
	Root string // of /proc, /sys and /dev; empty: the real ones
	// interpreter in which to look for engines; empty: $VIRTUAL_ENV's, else python3 on the path
	Python string
	Config *config.Config
	// Links are the interfaces; nil: the kernel's.
	Links func() ([]topo.Link, error)
}

func (h *Host) path(p string) string { return h.Root + p }

type check struct {
	name     string
	required bool
	run      func(context.Context, *Host) []Result
}

// one adapts a check with a single result.
func one(f func(context.Context, *Host) Result) func(context.Context, *Host) []Result {
	return func(ctx context.Context, h *Host) []Result { return []Result{f(ctx, h)} }
}

var checks = []check{
	{"kernel", true, one(kernel)},
	{"cores", false, one(cores)},
	{"memory copies", false, one(memoryCopies)},
	{"transport shm", true, one(transportSHM)},
	{"transport tcp", true, one(transportTCP)},
	{"transport gdr", false, one(transportGDR)},
	{"gdr rail", false, gdrRails},
	{"rail", false, rails},
	{"memlock", false, one(memlock)},
	{"shared memory", false, one(sharedMemory)},
	{"descriptors", false, one(descriptors)},
	{"memory limit", false, one(memoryLimit)},
	{"store memory", false, one(storeMemory)},
	{"store directory", false, one(storeDirectory)},
	{"ptrace scope", false, one(ptraceScope)},
	{"process memory", false, one(processMemory)},
	{"peer pidfd", false, one(peerPidfd)},
	{"engine can end a stopped sidecar", false, one(killRight)},
	{"engine socket", true, one(engineSocket)},
	{"keys", true, one(keys)},
	{"gpu", false, gpus},
	{"rdma devices", false, one(rdma)},
	{"engine packages", false, engines},
	{"running sidecar", false, one(running)},
	{"preload", false, preloads},
}

// Run makes all checks in order.
func Run(ctx context.Context, h *Host) []Result {
	var out []Result
	for _, c := range checks {
		cctx, cancel := context.WithTimeout(ctx, checkTimeout)
		for _, r := range c.run(cctx, h) {
			if r.Name == "" {
				r.Name = c.name
			}
			r.Required = c.required
			out = append(out, r)
		}
		cancel()
	}
	return out
}

// Healthy reports whether no check failed.
func Healthy(results []Result) bool {
	for _, r := range results {
		if r.State == Fail {
			return false
		}
	}
	return true
}

// Summary counts the results by state.
func Summary(results []Result) string {
	n := map[State]int{}
	for _, r := range results {
		n[r.State]++
	}
	verdict := "kvspray runs on this host"
	if n[Fail] > 0 {
		verdict = "kvspray does not run like this: see the lines with fail"
	}
	return fmt.Sprintf("%d ok, %d warn, %d fail, %d skip: %s", n[OK], n[Warn], n[Fail],
		n[Skip], verdict)
}

// WriteText writes one line for each result, with the remedy below it, and the summary.
func WriteText(w io.Writer, results []Result) error {
	width := 0
	for _, r := range results {
		width = max(width, len(r.Name))
	}
	var b strings.Builder
	for _, r := range results {
		fmt.Fprintf(&b, "%-4s  %-*s  %s\n", r.State, width, r.Name, r.Detail)
		if r.Remedy != "" {
			fmt.Fprintf(&b, "%-4s  %-*s  -> %s\n", "", width, "", r.Remedy)
		}
	}
	fmt.Fprintf(&b, "\n%s\n", Summary(results))
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteJSON writes the results as one JSON array.
func WriteJSON(w io.Writer, results []Result) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(results)
}

func named(name string, r Result) Result {
	r.Name = name
	return r
}

func good(format string, args ...any) Result {
	return Result{State: OK, Detail: fmt.Sprintf(format, args...)}
}

func warn(remedy, format string, args ...any) Result {
	return Result{State: Warn, Detail: fmt.Sprintf(format, args...), Remedy: remedy}
}

func fail(remedy, format string, args ...any) Result {
	return Result{State: Fail, Detail: fmt.Sprintf(format, args...), Remedy: remedy}
}

// skip has a remedy only where there is something to do.
func skip(remedy, format string, args ...any) Result {
	return Result{State: Skip, Detail: fmt.Sprintf(format, args...), Remedy: remedy}
}
