// SPDX-License-Identifier: Apache-2.0

// Package skew holds the tests that move KV blocks between sidecars of two releases, as a rolling
// upgrade does. Each release is a process: the last one, built from git into .build/skew, this
// tree's, and two that are made up from it.
//
// Two releases either move every byte to its place, or refuse each other with one line that names
// the sidecar to upgrade. Without git, or the commit of the last release, the tests with it skip
// (KVSPRAY_MUST_RUN=git).
package skew
