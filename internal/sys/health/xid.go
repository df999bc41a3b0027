package health

import (
	"fmt"
	"slices"
)

// Level is how far a fault of a device restricts its use.
type Level uint8

// The levels, each with the restrictions of those before it.
const (
	Fit      Level = iota
	Degraded       // it works, and needs care: routers prefer other engines
	Failed         // leases of its engine fail, and the engine gets no requests
)

func (l Level) String() string { return [...]string{"fit", "degraded", "failed"}[l] }

// Remedy ends a fault of a GPU. Each one includes those before it.
type Remedy uint8

// The remedies.
const (
	NoRemedy      Remedy = iota
	RestartEngine        // the processes that use the GPU
	ResetGPU
	RestartHost
)

func (r Remedy) String() string {
	return [...]string{"none", "restart the engine",
		"stop the engine and the sidecar, and reset the GPU (nvidia-smi --gpu-reset)",
		"restart the host"}[r]
}

// xid is what an Xid error means for the GPU.
type xid struct {
	text   string
	level  Level
	remedy Remedy
}

// xids are the Xid errors of data center GPUs since Ampere that restrict a GPU. Their remedies are
// the immediate actions of NVIDIA's catalog,
// https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html: RESTART_APP, RESET_GPU,
// RESTART_BM and RESTART_VM. 48 and 54 have a workflow there; it ends with a reset, or with a look
// at the connector. Errors of neither list, among them those with a workflow instead of an action
// (74, 144 to 150) or without any (162 to 172), have no effect: only the recovery action that the
// driver reports has.
var xids = map[uint64]xid{
	54: {"auxiliary power is not connected", Degraded, NoRemedy},

	94: {"contained memory error", Failed, RestartEngine},

	46:  {"GPU timeout", Failed, ResetGPU},
	48:  {"uncorrectable memory error", Failed, ResetGPU},
	62:  {"internal microcontroller stopped", Failed, ResetGPU},
	64:  {"row of memory cannot be remapped", Degraded, ResetGPU},
	95:  {"uncontained memory error", Failed, ResetGPU},
	109: {"timeout of a context switch", Failed, ResetGPU},
	110: {"security fault", Failed, ResetGPU},
	119: {"the GPU's system processor does not answer", Failed, ResetGPU},
	120: {"error of the GPU's system processor", Failed, ResetGPU},
	136: {"training of an NVLink failed", Degraded, ResetGPU},
	140: {"unrecovered memory error", Failed, ResetGPU},
	143: {"initialization failed", Failed, ResetGPU},
	155: {"NVLink error", Degraded, ResetGPU},
	156: {"a resource will be retired", Degraded, ResetGPU},
	158: {"fatal timeout", Failed, ResetGPU},

	79:  {"GPU has fallen off the bus", Failed, RestartHost},
	151: {"key rotation error", Failed, RestartHost},
}

// harmless are the codes, each range with its last, whose immediate action there is IGNORE, or
// RESTART_APP for an error of one channel, whose process ends by itself. 45 and 154 accompany other
// errors.
var harmless = [][2]uint64{{8, 8}, {11, 11}, {13, 14}, {25, 25}, {31, 32}, {37, 41}, {43, 45},
	{60, 60}, {63, 63}, {66, 72}, {75, 77}, {80, 80}, {82, 86}, {88, 89}, {92, 93}, {96, 108},
	{121, 121}, {126, 135}, {137, 137}, {139, 139}, {141, 141}, {152, 154}, {157, 157}, {160, 161}}

// Class is the kind of an Xid error for metrics.
func Class(code uint64) string {
	x, ok := xids[code]
	switch {
	case slices.ContainsFunc(harmless, func(r [2]uint64) bool { return r[0] <= code && code <= r[1] }):
		return "application"
	case !ok:
		return "unlisted"
	case x.remedy == RestartHost:
		return "host"
	case x.remedy == ResetGPU:
		return "reset"
	}
	return "engine"
}

// Classes are the results of Class.
func Classes() []string { return []string{"application", "engine", "reset", "host", "unlisted"} }

func xidText(code uint64) string {
	if x, ok := xids[code]; ok {
		return fmt.Sprintf("Xid %d (%s)", code, x.text)
	}
	return fmt.Sprintf("Xid %d", code)
}
