package object_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
)

// A page is put again before the start has found the object that has it. That object stays until
// the new one is uploaded, and counts where that fails.
func TestPutWhileLoading(t *testing.T) {
	for _, fails := range []bool{false, true} {
		s := objecttest.New()
		n := start(t, s)
		n.add(n.o, 0, 4)
		n.flush()
		old := objects(s)[0]
		n.add(n.owner("b"), 10, 11)
		n.close()
		dead := objects(s)[1]
		hold := make(chan struct{})
		s.Fail(func(op, _ string) objecttest.Fault {
			if op == "get" {
				return objecttest.Fault{Hold: hold}
			}
			return objecttest.Fault{}
		})
		tier, err := object.Open(config(s.Open()))
		if err != nil {
			t.Fatal(err)
		}
		n = &node{t: t, tier: tier}
		n.o = n.owner("a")
		if n.add(n.o, 0, 3) != 3 {
			t.Fatal("pages were not taken")
		}
		k, data := key(3), content(3) // on its way while the object is found
		read, spilled := make(chan struct{}), make(chan struct{})
		n.o.Spill(&k, nil, mem.CRC32C(0, data), func(to []byte) error {
			defer close(spilled)
			<-read
			if copy(to, data); fails {
				return errors.New("the disk is gone")
			}
			return nil
		})
		close(hold)
		if err := tier.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
		close(read)
		<-spilled
		n.owner("b")
		if err := n.tier.Remove(t.Context(), ns("b")); err != nil {
			t.Fatal(err)
		}
		eventually(t, "dead objects are deleted", func() bool { return s.Data(dead) == nil })
		if s.Data(old) == nil {
			t.Fatal("the object was deleted before its pages were uploaded")
		}
		if fails {
			s.Fail(func(op, _ string) objecttest.Fault {
				if op == "put" {
					return objecttest.Fault{Err: errors.New("503")}
				}
				return objecttest.Fault{}
			})
		}
		n.flush()
		if fails {
			all(t, n.read(n.o, 0, 4), nil)
		} else {
			eventually(t, "the older object is deleted", func() bool { return s.Data(old) == nil })
		}
		_ = tier.Close() // its uploads may fail
		s.Fail(nil)
		n = start(t, s)
		all(t, n.read(n.o, 0, 4), nil)
		n.close()
	}
}

// A listing takes as long as it takes: each of its requests has a timeout, and a retry, of its own.
func TestLongListing(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	n.add(n.o, 0, 4)
	n.close()
	const others = 3 * object.ListPage
	for i := range others {
		s.Set(fmt.Sprintf("node1/pages/%016x", 1+i), []byte("text"))
	}
	var lists atomic.Int64
	s.Fail(func(op, _ string) objecttest.Fault {
		if op != "list" {
			return objecttest.Fault{}
		}
		if lists.Add(1)%3 == 0 {
			return objecttest.Fault{Err: errors.New("503")}
		}
		hold := make(chan struct{})
		time.AfterFunc(400*time.Millisecond, func() { close(hold) })
		return objecttest.Fault{Hold: hold}
	})
	n = start(t, s) // with a second for each request
	defer n.close()
	all(t, n.read(n.o, 0, 4), nil)
	if st := n.tier.Stats(); st.Foreign != others || st.Objects != 1 {
		t.Errorf("%+v", st)
	}
	if lists.Load() < 6 {
		t.Errorf("%d requests", lists.Load())
	}
}

// A request that is refused ends no start: it goes on when a person has mended the cause.
func TestStartIsRefused(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	n.add(n.o, 0, 4)
	n.close()
	s.Fail(refuse("get"))
	tier, err := object.Open(config(s.Open()))
	if err != nil {
		t.Fatal(err)
	}
	n = &node{t: t, tier: tier}
	defer n.close()
	eventually(t, "the problem is shown", func() bool {
		return strings.Contains(tier.Stats().Problem, "renew them")
	})
	s.Fail(nil)
	if err := tier.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.o = n.owner("a")
	all(t, n.read(n.o, 0, 4), nil)
	if st := tier.Stats(); st.Problem != "" {
		t.Errorf("%+v", st)
	}
}

// refuse has some requests end as with credentials that have expired.
func refuse(ops string) func(op, name string) objecttest.Fault {
	return func(op, _ string) objecttest.Fault {
		if !strings.Contains(ops, op) {
			return objecttest.Fault{}
		}
		return objecttest.Fault{Err: &object.ConfigError{Field: "credentials", Value: "AK",
			Problem: "are not valid", Remedy: "renew them"}}
	}
}

// lacking is an object store that ignores what a service with the API of S3 may lack.
type lacking struct {
	*objecttest.Process
	order  func(prefix string) bool // whether a list with it begins anew each time
	absent bool                     // If-None-Match
	tag    bool                     // If-Match
}

func (d *lacking) List(ctx context.Context, prefix, after string,
	each func(string, int64) error) error {
	if d.order != nil && d.order(prefix) {
		after = ""
	}
	return d.Process.List(ctx, prefix, after, each)
}

func (d *lacking) Put(ctx context.Context, name string, data []byte,
	when object.Condition) (string, error) {
	if d.absent {
		when.Absent = false
	}
	if d.tag {
		when.Tag = ""
	}
	return d.Process.Put(ctx, name, data, when)
}

// A start refuses an object store that lacks what the store relies on, and leaves nothing behind.
func TestStartProbesTheObjectStore(t *testing.T) {
	for want, lacks := range map[string]lacking{
		"start-after":      {order: func(string) bool { return true }},
		"If-None-Match: *": {absent: true},
		"If-Match did not": {tag: true},
	} {
		s := objecttest.New()
		lacks.Process = s.Open()
		_, err := object.Open(config(&lacks))
		var c *object.ConfigError
		if !errors.As(err, &c) || c.Field != "endpoint" || !strings.Contains(err.Error(), want) {
			t.Errorf("want a refusal because of %q: %v", want, err)
		}
		if names := s.Names(); len(names) > 0 {
			t.Errorf("%s: objects %q are left", want, names)
		}
	}
}

// A list that does not go forward later on ends the tier's work, not the memory.
func TestListGoesForward(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	n.close()
	for i := range object.ListPage {
		s.Set(fmt.Sprintf("node1/pages/%016x", i+1), make([]byte, 200))
	}
	tier, err := object.Open(config(&lacking{Process: s.Open(),
		order: func(prefix string) bool { return prefix == "node1/pages/" }}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tier.Close() }()
	if err := tier.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "start-after") {
		t.Errorf("ready: %v", err)
	}
}
