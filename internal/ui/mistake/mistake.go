// SPDX-License-Identifier: Apache-2.0

// Package mistake distinguishes usage errors, which are detected before anything runs, from
// failures at run time. The binary has an exit code for each, so that a script can decide whether
// to retry. A usage error keeps its text and the error that it wraps. No goroutines.
package mistake

import (
	"errors"
	"fmt"
)

type mistake struct{ error }

func (m mistake) Unwrap() error { return m.error }

// Of marks an error as a usage error; nil stays nil.
func Of(err error) error {
	if err == nil {
		return nil
	}
	return mistake{err}
}

// Errorf is Of of fmt.Errorf.
func Errorf(format string, args ...any) error { return mistake{fmt.Errorf(format, args...)} }

// Is reports whether the chain of err contains a usage error.
func Is(err error) bool { return errors.As(err, new(mistake)) }
