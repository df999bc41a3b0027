//go:build !cgo || !linux

package verbs

import "fmt"

// Open says that this build cannot open libibverbs.
func Open(Config) (Device, error) {
	return nil, fmt.Errorf("%w: this binary was built with CGO_ENABLED=0; build it with cgo and a C compiler to use RDMA", ErrNotSupported)
}

// Library reports whether libibverbs can be opened, and why not.
func Library() error {
	_, err := Open(Config{})
	return err
}
