//go:build !cgo || !linux

package verbs

import "fmt"

// Open returns an error: this build cannot open libibverbs.
func Open(Config) (Device, error) {
	return nil, fmt.Errorf("%w: this binary was built with CGO_ENABLED=0; build it with cgo and a C "+
		"compiler to use RDMA", ErrNotSupported)
}

// Library returns why libibverbs cannot be opened, or nil.
func Library() error {
	_, err := Open(Config{})
	return err
}
