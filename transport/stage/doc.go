// Package stage moves bytes on hops that the wire's transports do not know: between host memory and a GPU over every GPU's
// PCIe link, and between two GPUs by pack, copy engine and unpack.
//
// It owns scratch buffers on GPUs (bounded, made once) and one goroutine per PCIe link. Copy engines cross links, kernels only
// rearrange bytes inside one GPU. The device is behind Queue and Event, so that the logic runs in tests without one.
package stage
