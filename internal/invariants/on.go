//go:build invariants

// Package invariants reports whether the expensive checks of this build are on: `go test -tags
// invariants`. Code guarded by Enabled costs nothing if they are off.
package invariants

// Enabled is true under the build tag `invariants`.
const Enabled = true
