//go:build !invariants

// Package invariants says whether the expensive checks of this build are on: `go test -tags invariants`. It owns nothing and
// runs nothing. Code guarded by Enabled costs nothing when it is off.
package invariants

// Enabled is true under the build tag `invariants`.
const Enabled = false
