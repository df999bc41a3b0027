package object_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/store/page"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// Pages of tests.
const size = 64 << 10

type fatal interface {
	Fatal(...any)
	Fatalf(string, ...any)
	Helper()
}

// node is one start of a store over a bucket in memory.
type node struct {
	t    fatal
	p    *objecttest.Process
	tier *object.Tier
	o    *object.Owner
}

func config(b object.Bucket) object.Config {
	return object.Config{Bucket: b, Prefix: "node1", Size: 64 << 20,
		ObjectBytes: object.MinObjectBytes,
		Timeouts: object.Timeouts{Open: 2 * time.Second, Read: 10 * time.Second,
			Small: time.Second, Upload: 2 * time.Second, Close: time.Second}}
}

func ns(name string) (id page.ID) {
	copy(id[:], name)
	return id
}

// impatient has reads fail soon. Others do not: how fast this machine is must not matter.
func impatient(c *object.Config) { c.Timeouts.Read = 300 * time.Millisecond }

func start(t fatal, s *objecttest.Store, change ...func(*object.Config)) *node {
	t.Helper()
	p := s.Open()
	c := config(p)
	for _, f := range change {
		f(&c)
	}
	tier, err := object.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, p: p, tier: tier}
	if err := tier.Ready(context.Background()); err != nil {
		t.Fatal(err)
	}
	n.o = n.owner("a")
	return n
}

func (n *node) owner(name string) *object.Owner {
	n.t.Helper()
	o, err := n.tier.Owner(ns(name), size, 0, 0)
	if err != nil {
		n.t.Fatal(err)
	}
	return o
}

func (n *node) close() {
	n.t.Helper()
	if err := n.tier.Close(); err != nil {
		n.t.Fatal(err)
	}
}

// kill ends the node, and nothing that it asks for from now on is done.
func (n *node) kill() {
	n.p.Kill()
	_ = n.tier.Close() // it could not upload
}

func key(i int) (k page.Key) {
	binary.LittleEndian.PutUint64(k[:], uint64(i)+1)
	return k
}

func keys(from, to int) (out []page.Key) {
	for i := from; i < to; i++ {
		out = append(out, key(i))
	}
	return out
}

func content(i int) []byte {
	b := make([]byte, size)
	_, _ = rand.NewChaCha8(key(i)).Read(b)
	return b
}

// add adds pages as one prompt and returns how many were taken or are here.
func (n *node) add(o *object.Owner, from, to int) (taken int) {
	n.t.Helper()
	for i := from; i < to; i++ {
		k, data := key(i), content(i)
		var after *page.Key
		if i > from {
			a := key(i - 1)
			after = &a
		}
		if err := o.Add(&k, after, data, mem.CRC32C(0, data), nil); err == nil {
			taken++
		}
	}
	return taken
}

func (n *node) flush() {
	n.t.Helper()
	if err := n.tier.Flush(context.Background()); err != nil {
		n.t.Fatal(err)
	}
}

// read reads pages and compares those that come.
func (n *node) read(o *object.Owner, from, to int) (errs []error) {
	n.t.Helper()
	ks := keys(from, to)
	errs = make([]error, len(ks))
	ended := make([]bool, len(ks))
	bufs := make([][]byte, len(ks))
	for i := range bufs {
		bufs[i] = make([]byte, size)
	}
	o.Read(context.Background(), ks, object.Reading{Buffers: bufs,
		Part:  func(int, int, int) {},
		Check: func(i int, crc uint32) bool { return mem.CRC32C(0, bufs[i]) == crc },
		End: func(i int, _ uint32, err error) {
			if ended[i] {
				n.t.Fatalf("page %d ended twice", i)
			}
			errs[i], ended[i] = err, true
			if err == nil && !bytes.Equal(bufs[i], content(from+i)) {
				n.t.Fatalf("WRONG PAGE %d", from+i)
			}
		}})
	for i, e := range ended {
		if !e {
			n.t.Fatalf("page %d did not end", from+i)
		}
	}
	return errs
}

func good(errs []error) (n int) {
	for _, err := range errs {
		if err == nil {
			n++
		}
	}
	return n
}

func all(t fatal, errs []error, want error) {
	t.Helper()
	for i, err := range errs {
		if !errors.Is(err, want) {
			t.Fatalf("page %d: %v, want %v", i, err, want)
		}
	}
}

// eventually waits for what the keeper does.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	testutil.Eventually(t, 20*time.Second, what, ok)
}

// objects are the names of the objects with pages.
func objects(s *objecttest.Store) (out []string) {
	for _, n := range s.Names() {
		if len(n) > 12 && n[:12] == "node1/pages/" {
			out = append(out, n)
		}
	}
	return out
}
