// Package objecttest is an object store for tests of the store: in memory, with requests that fail,
// answers that are lost or cut, flipped bits, and processes that end in the middle. Its owner is
// the test; it starts no goroutine.
package objecttest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/kvspray/kvspray/store/object"
)

// errKilled is what every request of a process that was killed returns. It is final, so that no
// test waits for retries.
var errKilled = &object.ConfigError{Field: "process", Problem: "it was killed"}

// Fault is what happens to one request.
type Fault struct {
	Err  error // the request returns it, and nothing is done
	Lost error // it is done, and its answer is this error
	Cut  int64 // of a Get: the body ends after this many bytes; 0: it is whole
	Flip int64 // of a Get: one bit in this many bytes is another one; 0: none
	Hold <-chan struct{}
	// Late has the request reach the store at the next Deliver, whatever becomes of its process, which
	// gets this error now.
	Late error
}

// Store is the content of a bucket. Several processes can have it open.
type Store struct {
	mu      sync.Mutex // guards what follows
	objects map[string]content
	tags    int
	fault   func(op, name string) Fault
	late    []func() error // requests that are on their way
	gets    int
	bytes   int64
}

type content struct {
	data []byte
	tag  string
}

// New makes an empty store.
func New() *Store { return &Store{objects: map[string]content{}} }

// Fail has f called for each request, whose op is get, load, put, list or delete; nil: none fails.
func (s *Store) Fail(f func(op, name string) Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// Deliver makes all late requests reach the store, and returns how many there were.
func (s *Store) Deliver() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.late)
	for _, run := range s.late {
		_ = run() // its caller has gone
	}
	s.late = nil
	return n
}

// Names lists the objects, in order.
func (s *Store) Names() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := range s.objects {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// Data is an object's content, or nil.
func (s *Store) Data(name string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return bytes.Clone(s.objects[name].data)
}

// Set replaces an object behind the back of all processes; nil deletes it.
func (s *Store) Set(name string, data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if data == nil {
		delete(s.objects, name)
		return
	}
	s.putLocked(name, data)
}

func (s *Store) putLocked(name string, data []byte) string {
	s.tags++
	c := content{bytes.Clone(data), fmt.Sprintf("tag%d", s.tags)}
	s.objects[name] = c
	return c.tag
}

// Gets is how many ranged reads there were, and how many bytes they asked for.
func (s *Store) Gets() (requests int, total int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gets, s.bytes
}

// Process is one that has the store open. After Kill nothing it asks for is done.
type Process struct {
	*Store
	killed bool // guarded by Store.mu
}

// Open makes a process.
func (s *Store) Open() *Process { return &Process{Store: s} }

// Kill ends the process, as kill -9 does.
func (p *Process) Kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.killed = true
}

// Close is Bucket.
func (p *Process) Close() {}

// do runs one request.
func (p *Process) do(ctx context.Context, op, name string, run func() error) (Fault, error) {
	p.mu.Lock()
	fault := p.fault
	p.mu.Unlock()
	var f Fault
	if fault != nil {
		f = fault(op, name)
	}
	if f.Hold != nil {
		select {
		case <-f.Hold:
		case <-ctx.Done():
			return f, ctx.Err()
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case f.Late != nil:
		p.late = append(p.late, run)
		return f, f.Late
	case ctx.Err() != nil:
		return f, ctx.Err()
	case p.killed:
		return f, errKilled
	case f.Err != nil:
		return f, f.Err
	}
	if err := run(); err != nil {
		return f, err
	}
	return f, f.Lost
}

// Get is Bucket.
func (p *Process) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	var data []byte
	f, err := p.do(ctx, "get", name, func() error {
		c, ok := p.objects[name]
		p.gets++
		p.bytes += n
		switch {
		case !ok:
			return object.ErrNotFound
		case off+n > int64(len(c.data)):
			return object.ErrShort
		}
		data = bytes.Clone(c.data[off : off+n])
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := f.Flip; f.Flip > 0 && i < n; i += f.Flip {
		data[i] ^= 1 << (i % 8)
	}
	if f.Cut > 0 && f.Cut < n {
		return io.NopCloser(io.MultiReader(bytes.NewReader(data[:f.Cut]), cut{})), nil
	}
	return io.NopCloser(bytes.NewReader(data)), nil
}

type cut struct{}

func (cut) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// Load is Bucket.
func (p *Process) Load(ctx context.Context, name string) (data []byte, tag string, err error) {
	_, err = p.do(ctx, "load", name, func() error {
		c, ok := p.objects[name]
		if !ok {
			return object.ErrNotFound
		}
		data, tag = bytes.Clone(c.data), c.tag
		return nil
	})
	return data, tag, err
}

// Put is Bucket.
func (p *Process) Put(ctx context.Context, name string, data []byte,
	when object.Condition) (string, error) {
	data = bytes.Clone(data) // it may be late
	var tag string
	_, err := p.do(ctx, "put", name, func() error {
		c, ok := p.objects[name]
		if when.Absent && ok || when.Tag != "" && (!ok || c.tag != when.Tag) {
			return object.ErrChanged
		}
		tag = p.putLocked(name, data)
		return nil
	})
	if err != nil {
		return "", err // a late request sets the tag afterwards
	}
	return tag, nil
}

// List is Bucket.
func (p *Process) List(ctx context.Context, prefix, after string,
	each func(string, int64) error) error {
	type row struct {
		name string
		size int64
	}
	for more := true; more; {
		var rows []row
		_, err := p.do(ctx, "list", prefix, func() error {
			for n, c := range p.objects {
				if strings.HasPrefix(n, prefix) && n > after {
					rows = append(rows, row{n, int64(len(c.data))})
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		slices.SortFunc(rows, func(a, b row) int { return strings.Compare(a.name, b.name) })
		more = len(rows) > object.ListPage
		for _, r := range rows[:min(len(rows), object.ListPage)] {
			after = r.name
			if err := each(r.name, r.size); err != nil {
				return err
			}
		}
	}
	return nil
}

// Delete is Bucket.
func (p *Process) Delete(ctx context.Context, name string) error {
	_, err := p.do(ctx, "delete", name, func() error {
		delete(p.objects, name)
		return nil
	})
	return err
}
