// Package kernels holds the compiled GPU kernels and hands out the image that suits a device.
package kernels

import _ "embed" // the images

//go:generate python3 generate.py

var (
	//go:embed kernels.ptx
	ptx []byte
	//go:embed kernels.sm_80.cubin
	sm80 []byte
	//go:embed kernels.sm_90.cubin
	sm90 []byte
)

// Image returns machine code for compute capability major.minor, or PTX that the driver compiles
// for a later GPU. Code for one minor runs on later minors of the same major.
func Image(major, minor int) []byte {
	switch {
	case major == 8:
		return sm80
	case major == 9:
		return sm90
	}
	return ptx
}
