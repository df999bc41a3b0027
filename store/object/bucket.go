package object

import (
	"context"
	"errors"
	"fmt"
	"io"
)

// Bucket is what the tier needs of an object store. Every method obeys its context, tries once, and
// can be called from any goroutine. ErrNotFound, ErrShort, ErrChanged and a *ConfigError are final.
// After any other error a retry may succeed.
type Bucket interface {
	// Get reads n bytes of an object from off on. It returns ErrShort where the object has less. A
	// body that ends earlier returns io.ErrUnexpectedEOF.
	Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error)
	// Load reads a whole small object, and the tag of its content.
	Load(ctx context.Context, name string) (data []byte, tag string, err error)
	// Put writes a whole object in one step: readers see all of it, or nothing.
	Put(ctx context.Context, name string, data []byte, when Condition) (tag string, err error)
	// List calls each with every object whose name begins with prefix and comes after another one,
	// in the order of names, until it returns an error. A request has up to ListPage of them.
	List(ctx context.Context, prefix, after string, each func(name string, size int64) error) error
	// Delete deletes an object. An object that does not exist is no error.
	Delete(ctx context.Context, name string) error
	// Close ends idle connections.
	Close()
}

// ListPage is how many objects one request lists, as in S3.
const ListPage = 1000

// Condition is what must hold for a Put to change anything; otherwise it returns ErrChanged. The
// zero Condition always holds.
type Condition struct {
	Absent bool   // there is no such object
	Tag    string // the object's content has this tag
}

// Errors that callers distinguish.
var (
	ErrNotFound = errors.New("store.object: no such object")
	ErrShort    = errors.New("store.object: the object is shorter than it was")
	ErrChanged  = errors.New("store.object: the object is another one now")
	ErrMissing  = errors.New("store.object: the page is not here")
	ErrDamaged  = errors.New("store.object: the page is damaged")
	ErrAway     = errors.New("store.object: the object store does not answer; it is asked again soon")
	ErrRemoved  = errors.New("store.object: the namespace was removed meanwhile")
	ErrNoRoom   = errors.New("store.object: all buffers wait for uploads")
	ErrClosed   = errors.New("store.object: closed")
)

// ConfigError is a mistake in the configuration, or in what the object store allows.
type ConfigError struct{ Field, Value, Problem, Remedy string }

func (e *ConfigError) Error() string {
	return fmt.Sprintf("store.object field %s = %q: %s; %s", e.Field, e.Value, e.Problem, e.Remedy)
}
