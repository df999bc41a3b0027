package health

import "fmt"

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

// xids are the Xid errors of data center GPUs since Ampere that have a meaning here. Their remedies
// are the immediate actions of NVIDIA's catalog,
// https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html: RESTART_APP, RESET_GPU,
// RESTART_BM and RESTART_VM. Errors of level Fit have the action IGNORE, or their cause is in the
// application (CHECK_APP), whose process ends by itself. Errors that are not listed, among them
// those with a workflow instead of an action (74, 144 to 150), have no effect: only the recovery
// action that the driver reports has.
var xids = map[uint64]xid{
	8:   {"GPU stopped processing", Fit, NoRemedy},
	11:  {"invalid push buffer", Fit, NoRemedy},
	13:  {"exception of a kernel", Fit, NoRemedy},
	25:  {"invalid push buffer", Fit, NoRemedy},
	31:  {"memory fault of a kernel", Fit, NoRemedy},
	32:  {"invalid push buffer", Fit, NoRemedy},
	43:  {"reset of a channel", Fit, NoRemedy},
	44:  {"fault during a context switch", Fit, NoRemedy},
	45:  {"preemptive clean-up", Fit, NoRemedy},
	63:  {"row of memory will be remapped", Fit, NoRemedy},
	68:  {"video processor exception", Fit, NoRemedy},
	69:  {"graphics engine class error", Fit, NoRemedy},
	92:  {"many corrected memory errors", Fit, NoRemedy},
	154: {"the driver's recovery action changed", Fit, NoRemedy},

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

// Class is the kind of an Xid error for metrics.
func Class(code uint64) string {
	x, ok := xids[code]
	switch {
	case !ok:
		return "unlisted"
	case x.level == Fit:
		return "application"
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
