//go:build !cgo

package cuda

import "fmt"

// Driver is the opened CUDA driver.
type Driver struct {
	Version int
	Devices []Device
}

// Open fails: this build cannot open the driver.
func Open() (*Driver, error) {
	return nil, fmt.Errorf("%w: this binary was built with CGO_ENABLED=0; build it with cgo and a C "+
		"compiler to use GPUs", ErrNotSupported)
}

// Name is not known without the driver.
func (d Device) Name() (string, error) { return "", ErrNotSupported }
