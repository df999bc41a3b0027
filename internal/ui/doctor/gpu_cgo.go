//go:build cgo

package doctor

import (
	"fmt"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/kvspray/kvspray/internal/sys/cuda"
	"github.com/kvspray/kvspray/internal/sys/health"
)

// gpuDevices asks the driver's management library, which needs no context on the GPU and does not
// disturb a busy engine.
func gpuDevices() []Result {
	if r := nvml.Init(); r != nvml.SUCCESS {
		return []Result{named("gpu devices", skip("", "libnvidia-ml.so.1: %s", nvml.ErrorString(r)))}
	}
	defer func() { _ = nvml.Shutdown() }() // nothing was changed
	n, r := nvml.DeviceGetCount()
	if r != nvml.SUCCESS {
		return []Result{named("gpu devices", skip("", "count: %s", nvml.ErrorString(r)))}
	}
	driver, r := nvml.SystemGetDriverVersion()
	if r != nvml.SUCCESS {
		driver = "unknown"
	}
	var out []Result
	for i := range n {
		name := fmt.Sprintf("gpu %d", i)
		d, r := nvml.DeviceGetHandleByIndex(i)
		if r != nvml.SUCCESS {
			out = append(out, named(name, warn("check for an Xid error in the kernel's log; a GPU that "+
				"fell off the bus needs a restart of the host", "%s", nvml.ErrorString(r))))
			continue
		}
		out = append(out, named(name, gpuHealth(d, driver)))
	}
	return append(append(append(out, gpuFaults()...), gpuMemory()...), named("gpu peers", gpuPeers()))
}

// gpuFaults reports which errors of each GPU its driver reports to the sidecar, and a fault that it
// has now.
func gpuFaults() (out []Result) {
	d, err := health.Open()
	if err != nil {
		return []Result{named("gpu faults", skip("", "%v", err))}
	}
	text := d.Describe()
	for i, r := range d.Look() {
		var g health.GPU
		g.Look(time.Now(), r)
		res := good("%s", text[i])
		if f := g.Fault(); f.Kind != "" {
			res = warn(f.Remedy.String()+"; docs/health.md", "%s: %s", f.Text, text[i])
		}
		out = append(out, named("gpu faults", res))
	}
	if err := d.Close(); err != nil {
		out = append(out, named("gpu faults", skip("", "%v", err)))
	}
	return out
}

// gpuMemory reports how other processes and network adapters can access each GPU's memory.
func gpuMemory() (out []Result) {
	d, err := cuda.Open()
	if err != nil {
		return []Result{named("gpu memory", skip("", "%v", err))}
	}
	for _, dev := range d.Devices {
		out = append(out, named(fmt.Sprintf("gpu %d memory", dev), sharing(dev.Attribute)))
	}
	return out
}

// sharing describes the attributes of one GPU. Attributes that only RDMA needs are reported and do
// not fail the check.
func sharing(attribute func(cuda.Attribute) (int, error)) Result {
	var v [6]int
	for i, a := range []cuda.Attribute{cuda.IPCEvents, cuda.PosixFDHandles, cuda.DMABufSupported,
		cuda.GPUDirectRDMASupported,
		cuda.GPUDirectRDMAWriteOrdering, cuda.GPUDirectRDMAFlushOptions} {
		var err error
		if v[i], err = attribute(a); err != nil {
			return skip("", "attribute %d: %v", a, err)
		}
	}
	can := func(yes int) string {
		if yes != 0 {
			return "yes"
		}
		return "no"
	}
	ordering := map[int]string{0: "none", 100: "the GPU itself", 200: "all devices"}[v[4]]
	if ordering == "" {
		ordering = fmt.Sprintf("value %d", v[4])
	}
	what := fmt.Sprintf("CUDA IPC %s, by descriptor %s; dma-buf %s, GPUDirect RDMA %s (writes are "+
		"ordered for: %s; flush options %#x)", can(v[0]), can(v[1]),
		can(v[2]), can(v[3]), ordering, v[5])
	if v[0] == 0 && v[1] == 0 {
		return warn("use a driver and a virtualisation that share GPU memory between processes; until "+
			"then engines must keep their cache in host memory", "%s", what)
	}
	return good("%s", what)
}

func gpuHealth(d nvml.Device, driver string) Result {
	product, r := d.GetName()
	if r != nvml.SUCCESS {
		return skip("", "name: %s", nvml.ErrorString(r))
	}
	what := product + ", driver " + driver
	if m, r := d.GetMemoryInfo(); r == nvml.SUCCESS {
		what += fmt.Sprintf(", %s, %s free", bytesText(m.Total), bytesText(m.Free))
	}
	if _, _, pending, failed, r := d.GetRemappedRows(); r == nvml.SUCCESS && (failed || pending) {
		return warn("drain the host and reset the GPU; if that does not help, have it replaced",
			"%s: rows of its memory wait for remapping (pending %v, failed %v)", what, pending, failed)
	}
	errs, r := d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	switch {
	case r == nvml.ERROR_NOT_SUPPORTED:
		return good("%s, no ECC", what)
	case r != nvml.SUCCESS:
		return good("%s, memory errors could not be read (%s)", what, nvml.ErrorString(r))
	case errs > 0:
		return warn("restart the processes on the GPU, and check for Xid errors in the kernel's log",
			"%s: %d memory errors that ECC could not correct since the driver was loaded", what, errs)
	}
	return good("%s, no uncorrected memory errors", what)
}

// gpuPeers asks CUDA which GPUs can access each other's memory.
func gpuPeers() Result {
	d, err := cuda.Open()
	if err != nil {
		return skip("", "%v", err)
	}
	if len(d.Devices) < 2 {
		return good("CUDA %d.%d, one GPU, no peers", d.Version/1000, d.Version%1000/10)
	}
	var cannot []string
	for _, a := range d.Devices {
		for _, b := range d.Devices {
			if a == b {
				continue
			}
			ok, err := a.CanAccess(b)
			if err != nil {
				return skip("", "GPU %d to %d: %v", a, b, err)
			}
			if !ok {
				cannot = append(cannot, fmt.Sprintf("%d to %d", a, b))
			}
		}
	}
	if len(cannot) > 0 {
		return warn("copies between these go through host memory; check the topology (nvidia-smi topo "+
			"-p2p r) and the IOMMU settings", "no peer access from GPU %s", strings.Join(cannot, ", "))
	}
	return good("CUDA %d.%d, all %d GPUs reach each other's memory", d.Version/1000, d.Version%1000/10,
		len(d.Devices))
}
