// Package arch holds the rules of the repository that a compiler does not check: the floors and the
// imports of packages, which packages are pure, where unsafe and C may be used, cycles between
// files of C and Python, declarations without a user, the words of code and documents, and how
// large each part of the tree may be. It has tests only.
package arch
