// Package routebench is `kvspray-bench route`: kvspray's router beside vllm-router and
// sglang-router, each in front of the same engines, which stream tokens at a set rate and compute
// nothing, and with the same clients. Time and CPU of the engines asked directly are those of the
// same run.
//
// Goroutines: one for each connection of engines and clients, and one that samples memory; a phase
// joins its clients, and the engines' connections end with their listeners.
package routebench
