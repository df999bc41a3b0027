// Package arch holds the rules of the repository that a compiler does not check: the floors and the
// imports of packages, which packages are pure, where unsafe and C may be used, cycles between
// files of C and Python, and the form of documents. It has tests only.
package arch
