//go:build cgo

package topo

import (
	"fmt"
	"io/fs"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// managed asks the driver's management library, which needs no context on the GPU and does not
// disturb a busy engine. fs.ErrNotExist: no library here.
func managed() (out []GPU, err error) {
	if r := nvml.Init(); r != nvml.SUCCESS {
		if r == nvml.ERROR_LIBRARY_NOT_FOUND || r == nvml.ERROR_DRIVER_NOT_LOADED {
			return nil, fmt.Errorf("topo: libnvidia-ml.so.1: %s: %w", nvml.ErrorString(r), fs.ErrNotExist)
		}
		return nil, fmt.Errorf("topo: libnvidia-ml.so.1: %s", nvml.ErrorString(r))
	}
	defer func() { _ = nvml.Shutdown() }() // nothing was changed
	n, r := nvml.DeviceGetCount()
	if r != nvml.SUCCESS {
		return nil, fmt.Errorf("topo: count of GPUs: %s", nvml.ErrorString(r))
	}
	for i := range n {
		d, r := nvml.DeviceGetHandleByIndex(i)
		if r != nvml.SUCCESS {
			err = fmt.Errorf("topo: GPU %d: %s", i, nvml.ErrorString(r))
			continue
		}
		pci, r := d.GetPciInfo()
		if r != nvml.SUCCESS {
			err = fmt.Errorf("topo: GPU %d: PCI address: %s", i, nvml.ErrorString(r))
			continue
		}
		g := GPU{PCI: fmt.Sprintf("%04x:%02x:%02x.0", pci.Domain, pci.Bus, pci.Device), Index: i}
		if uuid, r := d.GetUUID(); r == nvml.SUCCESS {
			g.UUID = uuid
		}
		if name, r := d.GetName(); r == nvml.SUCCESS {
			g.Name = strings.TrimSpace(name)
		}
		out = append(out, g)
	}
	return out, err
}
