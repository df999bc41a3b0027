//go:build cgo

package health

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// library is what this package needs of nvml.Interface.
type library interface {
	Init() nvml.Return
	Shutdown() nvml.Return
	DeviceGetCount() (int, nvml.Return)
	DeviceGetHandleByIndex(int) (nvml.Device, nvml.Return)
	EventSetCreate() (nvml.EventSet, nvml.Return)
}

// shared is go-nvml's library, which counts its users. Package topo is also one.
type shared struct{}

func (shared) Init() nvml.Return                  { return nvml.Init() }
func (shared) Shutdown() nvml.Return              { return nvml.Shutdown() }
func (shared) DeviceGetCount() (int, nvml.Return) { return nvml.DeviceGetCount() }
func (shared) DeviceGetHandleByIndex(i int) (nvml.Device, nvml.Return) {
	return nvml.DeviceGetHandleByIndex(i)
}
func (shared) EventSetCreate() (nvml.EventSet, nvml.Return) { return nvml.EventSetCreate() }

// slowdownSymbol is absent from drivers before R535. Calling it there would end the process.
const slowdownSymbol = "nvmlDeviceGetCurrentClocksEventReasons"

func hasSlowdown(lib library) bool {
	_, driver := lib.(shared)
	return !driver || nvml.Extensions().LookupSymbol(slowdownSymbol) == nil
}

// events are the types of events that this package handles.
const events = nvml.EventTypeXidCriticalError | nvml.EventTypeDoubleBitEccError |
	nvml.EventTypeGpuUnavailableError | nvml.EventTypeGpuRecoveryAction

// Driver reads GPUs through the driver's management library (NVML), which needs no context on a
// GPU. Its methods are called by one goroutine.
type Driver struct {
	lib      library
	set      nvml.EventSet
	slowdown bool
	gpus     []device
}

type device struct {
	nvml.Device
	pci, name string
	supported uint64 // types of events
}

// Open loads the library. The error is fs.ErrNotExist if this host has none.
func Open() (*Driver, error) { return open(shared{}) }

// open returns a driver with the GPUs that it could open, and an error for the others.
func open(lib library) (*Driver, error) {
	if r := lib.Init(); r != nvml.SUCCESS {
		err := fmt.Errorf("health: libnvidia-ml.so.1: %s", nvml.ErrorString(r))
		if r == nvml.ERROR_LIBRARY_NOT_FOUND || r == nvml.ERROR_DRIVER_NOT_LOADED {
			err = fmt.Errorf("%w: %w", err, fs.ErrNotExist)
		}
		return nil, err
	}
	d := &Driver{lib: lib, slowdown: hasSlowdown(lib)}
	err := d.find()
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

func (d *Driver) find() error {
	n, r := d.lib.DeviceGetCount()
	if r != nvml.SUCCESS {
		return fmt.Errorf("health: count of GPUs: %s", nvml.ErrorString(r))
	}
	if d.set, r = d.lib.EventSetCreate(); r != nvml.SUCCESS {
		return fmt.Errorf("health: set of events: %s", nvml.ErrorString(r))
	}
	for i := range n {
		h, r := d.lib.DeviceGetHandleByIndex(i)
		if r != nvml.SUCCESS {
			continue // a GPU that does not answer already; kvspray doctor shows it
		}
		pci, r := h.GetPciInfo()
		if r != nvml.SUCCESS {
			continue
		}
		x := device{Device: h, pci: fmt.Sprintf("%04x:%02x:%02x.0", pci.Domain, pci.Bus, pci.Device)}
		if name, r := h.GetName(); r == nvml.SUCCESS {
			x.name = strings.TrimSpace(name)
		}
		if x.supported, r = h.GetSupportedEventTypes(); r == nvml.SUCCESS && x.supported&events != 0 {
			if r = h.RegisterEvents(x.supported&events, d.set); r != nvml.SUCCESS {
				x.supported = 0 // readings show the consequences
			}
		}
		d.gpus = append(d.gpus, x)
	}
	return nil
}

// Close releases the library.
func (d *Driver) Close() error {
	if d.set != nil {
		_ = d.set.Free() // the library's end frees it, too
	}
	if r := d.lib.Shutdown(); r != nvml.SUCCESS {
		return fmt.Errorf("health: end of libnvidia-ml.so.1: %s", nvml.ErrorString(r))
	}
	return nil
}

// Wait waits for an event, at most for the given time; false: there was none. It fails if events
// cannot be read at present; readings show why.
func (d *Driver) Wait(longest time.Duration) (Event, bool, error) {
	e, r := d.set.Wait(uint32(longest.Milliseconds()))
	switch {
	case r == nvml.ERROR_TIMEOUT:
		return Event{}, false, nil
	case r != nvml.SUCCESS:
		return Event{}, false, fmt.Errorf("health: wait for events: %s", nvml.ErrorString(r))
	}
	out := Event{}
	for i := range d.gpus {
		if d.gpus[i].Device == e.Device {
			out.PCI = d.gpus[i].pci
		}
	}
	switch e.EventType {
	case nvml.EventTypeXidCriticalError:
		out.Xid = e.EventData
	case nvml.EventTypeDoubleBitEccError:
		out.Memo = true
	}
	return out, true, nil
}

// Look reads every GPU.
func (d *Driver) Look() []Reading {
	out := make([]Reading, len(d.gpus))
	for i := range d.gpus {
		out[i] = d.read(&d.gpus[i])
	}
	return out
}

// slowdowns are NVML's bits for those of Slowdown. NVML_CLOCKS_EVENT_REASON names them; go-nvml
// lacks those of the hardware.
var slowdowns = [...]struct {
	bit  uint64
	mean Slowdown
}{{0x08, HardwareSlowdown}, {0x40, HardwareThermal}, {0x80, PowerBrake},
	{nvml.ClocksEventReasonSwThermalSlowdown, SoftwareThermal}}

func (d *Driver) read(x *device) Reading {
	out := Reading{PCI: x.pci}
	lost := func(r nvml.Return) bool {
		out.Lost = out.Lost || r == nvml.ERROR_GPU_IS_LOST
		if r == nvml.ERROR_RESET_REQUIRED {
			out.Action = ActionReset
		}
		return out.Lost
	}
	var r nvml.Return
	if out.Uncorrected, r = x.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED,
		nvml.VOLATILE_ECC); lost(r) {
		return out
	}
	if r != nvml.SUCCESS {
		out.Uncorrected = 0
	}
	if _, _, _, failed, r := x.GetRemappedRows(); !lost(r) && r == nvml.SUCCESS {
		out.RowsFailed = failed
	}
	if d.slowdown {
		bits, r := x.GetCurrentClocksEventReasons()
		for _, s := range slowdowns {
			if !lost(r) && r == nvml.SUCCESS && bits&s.bit != 0 {
				out.Slowdown |= s.mean
			}
		}
	}
	v := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	if r := x.GetFieldValues(v); !lost(r) && r == nvml.SUCCESS && out.Action == ActionUnknown &&
		nvml.Return(v[0].NvmlReturn) == nvml.SUCCESS {
		out.Action = actionOf(binary.NativeEndian.Uint32(v[0].Value[:]))
	}
	return out
}

// Describe has a line for each GPU about what its driver reports, for people.
func (d *Driver) Describe() []string {
	out := make([]string, len(d.gpus))
	for i := range d.gpus {
		x, r := &d.gpus[i], d.read(&d.gpus[i])
		var kinds []string
		for _, k := range [...]struct {
			bit  uint64
			name string
		}{{nvml.EventTypeXidCriticalError, "Xid"}, {nvml.EventTypeDoubleBitEccError, "ECC"},
			{nvml.EventTypeGpuUnavailableError, "unavailable"},
			{nvml.EventTypeGpuRecoveryAction, "recovery action"}} {
			if x.supported&k.bit != 0 {
				kinds = append(kinds, k.name)
			}
		}
		out[i] = fmt.Sprintf("%s %s: events %s; %d uncorrected memory errors; throttled: %s; recovery "+
			"action: %s", x.pci, x.name, cmp.Or(strings.Join(kinds, ", "), "none"), r.Uncorrected,
			cmp.Or(r.Slowdown.String(), "no"), r.Action)
	}
	return out
}

func actionOf(v uint32) Action {
	switch nvml.DeviceGpuRecoveryAction(v) {
	case nvml.GPU_RECOVERY_ACTION_NONE:
		return ActionNone
	case nvml.GPU_RECOVERY_ACTION_GPU_RESET:
		return ActionReset
	case nvml.GPU_RECOVERY_ACTION_NODE_REBOOT:
		return ActionReboot
	case nvml.GPU_RECOVERY_ACTION_DRAIN_P2P:
		return ActionDrainP2P
	case nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET:
		return ActionDrainReset
	}
	return ActionUnknown
}
