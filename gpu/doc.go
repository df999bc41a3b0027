// Package gpu imports memory that engines lend on GPUs, and moves all bytes to, from and between
// GPUs: between a GPU and host memory over its own PCIe link or every GPU's, and between two GPUs
// by pack, copy engine and unpack, and within one GPU by a kernel.
//
// GPUs (gpus.go) opens GPUs and imports regions, of which GPU is the mem.Device. A GPU owns its
// staging slots (slot.go), pinned buffers, budget and idle probe, the engines that pack for it
// (engine.go), and one policy for each direction. A pair (pair.go) owns the pipelines of one
// direction between two GPUs. The batcher (batcher.go) turns two lists of blocks into copies of a
// pair, of staging slots, or of both. A Copier (copier.go) copies between host memory and GPUs
// without staging: it owns pinned windows of host memory, the path set of each GPU, and what lanes
// wait for.
//
// Staging buffers and pinned memory are bounded and allocated once. A multipath.Multipath owns one
// goroutine per PCIe link, a Copier those that its comment lists.
//
// The packages below: device (hardware), policy (choice of the copy method), multipath (all PCIe
// links), peercopy (GPU to GPU), gputest (fakes for tests).
package gpu
