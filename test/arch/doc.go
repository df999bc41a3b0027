// SPDX-License-Identifier: Apache-2.0

// Package arch holds the rules of the repository that a compiler does not know: who may import whom, which packages are
// pure, where unsafe and C may stand, and that everything says what it is. The tests are the content.
package arch
