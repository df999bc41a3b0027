//go:build !cgo

package doctor

func gpuDevices() []Result {
	return []Result{named("gpu devices",
		skip("", "this build has no cgo and cannot query the driver"))}
}
