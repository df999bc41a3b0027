package policy

import (
	"github.com/kvspray/kvspray/gpu/device"
)

// ExecutorState is what is known of one executor on one way.
type MethodState struct {
	Method string  `json:"executor"`
	Calls  uint64  `json:"calls"`
	Bytes  uint64  `json:"bytes"`
	Rate   float64 `json:"bytes_per_second"` // of all calls under way together, as it is learned beside engines; 0: not learned
}

// WayState is how scattered blocks go from a GPU to a buffer of the host ("gpu0", "host"), back, or to a GPU, where any executor would do. Between a
// GPU and pinned memory that is scattered itself ("pages") copy stands for the way by buffers, which is in the others, too, and no rate is learned.
type RouteState struct {
	From    string        `json:"from"`
	To      string        `json:"to"`
	Methods []MethodState `json:"executors"` // those that were used
}

// state appends the way from a to b, if anything went there.
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

// state appends what went between the pages of the host and a GPU of that name.
func (k *IdleProbe) State(out []RouteState, gpu string) []RouteState {
	k.mu.Lock()
	defer k.mu.Unlock()
	for dir, w := range [2]RouteState{device.HostToDevice: {From: "pages", To: gpu}, device.DeviceToHost: {From: gpu, To: "pages"}} {
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
