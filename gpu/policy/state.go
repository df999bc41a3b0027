package policy

import (
	"github.com/kvspray/kvspray/gpu/device"
)

// MethodState is what is known of one method on one route.
type MethodState struct {
	Method string  `json:"executor"`
	Calls  uint64  `json:"calls"`
	Bytes  uint64  `json:"bytes"`
	Rate   float64 `json:"bytes_per_second"` // of all concurrent calls together; 0: not learned
}

// RouteState counts scattered blocks between a GPU and a buffer of the host ("gpu0", "host"), or
// between GPUs, where every method was possible. Between a GPU and scattered pinned memory
// ("pages"), copy is the way through buffers, which counts as "host", too; no rate is learned
// there.
type RouteState struct {
	From    string        `json:"from"`
	To      string        `json:"to"`
	Methods []MethodState `json:"executors"` // those that were used
}

// State appends the route, if anything was moved.
func (c *Policy) State(out []RouteState, from, to string) []RouteState {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := RouteState{From: from, To: to}
	for e := Pack; e < numMethods; e++ {
		if c.calls[e] > 0 {
			x := MethodState{Method: e.String(), Calls: c.calls[e], Bytes: c.bytes[e]}
			if c.cost[e] > 0 {
				x.Rate = 1e9 / c.cost[e]
			}
			w.Methods = append(w.Methods, x)
		}
	}
	if w.Methods == nil {
		return out
	}
	return append(out, w)
}

// State appends the routes between host pages and the named GPU.
func (k *IdleProbe) State(out []RouteState, gpu string) []RouteState {
	k.mu.Lock()
	defer k.mu.Unlock()
	for dir, w := range [2]RouteState{device.HostToDevice: {From: "pages", To: gpu},
		device.DeviceToHost: {From: gpu, To: "pages"}} {
		for _, e := range []CopyMethod{Pack, Copy} {
			if n := k.calls[dir][e]; n > 0 {
				w.Methods = append(w.Methods, MethodState{Method: e.String(), Calls: n, Bytes: k.bytes[dir][e]})
			}
		}
		if w.Methods != nil {
			out = append(out, w)
		}
	}
	return out
}
