// SPDX-License-Identifier: Apache-2.0

// Package mistake tells what was typed wrongly, which is known before anything runs, from what ran and failed. The binary has an exit
// code for each, so that a script knows whether another try can help. A mistake keeps its text and what it wraps. No goroutines.
package mistake

import (
	"errors"
	"fmt"
)

type mistake struct{ error }

func (m mistake) Unwrap() error { return m.error }

// Of marks an error as a mistake; nil stays nil.
func Of(err error) error {
	if err == nil {
		return nil
	}
	return mistake{err}
}

// Errorf is Of of fmt.Errorf.
func Errorf(format string, args ...any) error { return mistake{fmt.Errorf(format, args...)} }

// Is reports whether one is in the chain of err.
func Is(err error) bool { return errors.As(err, new(mistake)) }
