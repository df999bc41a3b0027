// Package gpu moves bytes on hops that the wire's transports do not know: between host memory and a GPU, over its own PCIe link
// or every GPU's, and between two GPUs by pack, copy engine and unpack.
//
// GPUs imports the memory that engines lend and is what regions of it are reached by (mem.Device). Scratch buffers on GPUs and
// pinned host memory are bounded and made once; a Multipath owns one goroutine per PCIe link, the rest none. Copy engines cross
// links, kernels only rearrange bytes inside one GPU. The device is behind Queue and Event, so that the logic runs in tests
// without one.
package gpu
