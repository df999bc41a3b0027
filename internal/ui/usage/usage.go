// Package usage marks usage errors: those in arguments, flags or configuration, which are detected
// before anything runs. Failures at run time are not marked. A program has an exit code for each,
// so that a script can decide whether to retry. A usage error keeps its text and the error that it
// wraps. No goroutines.
package usage

import (
	"errors"
	"fmt"
)

type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// Of marks an error as a usage error; nil stays nil.
func Of(err error) error {
	if err == nil {
		return nil
	}
	return usageError{err}
}

// Errorf is Of of fmt.Errorf.
func Errorf(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// Is reports whether the chain of err contains a usage error.
func Is(err error) bool { return errors.As(err, new(usageError)) }
