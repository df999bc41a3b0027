package sidecar

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/client"
)

// goClient is a client with memory.
type goClient struct {
	*client.Client
	mem *client.Memory
}

func newGoClient(t *testing.T, r *running, id string) *goClient {
	t.Helper()
	c, err := client.Dial(t.Context(), r.cfg.Engine.Socket, "test", id)
	ok(t, err)
	t.Cleanup(c.Close)
	m, err := c.NewMemory(t.Context(), lentBytes)
	ok(t, err)
	return &goClient{c, m}
}

// at is an entry with the same place on both sides.
func (c *goClient) at(off, n uint64) client.Entry {
	return client.Entry{Memory: c.mem, Local: off, Remote: off, Bytes: n}
}

// ended waits for a batch.
func ended(t *testing.T, b *client.Batch, err error) client.Result {
	t.Helper()
	ok(t, err)
	ctx, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	res, err := b.Wait(ctx)
	ok(t, err)
	return res
}

// The example of docs/segments.md.
func TestClientExample(t *testing.T) {
	na, nb := start(t, nil), start(t, nil)
	ctx := t.Context()
	dial := func(r *running, id string) (*client.Client, *client.Memory) {
		c, err := client.Dial(ctx, r.cfg.Engine.Socket, "mine", id)
		ok(t, err)
		t.Cleanup(c.Close)
		m, err := c.NewMemory(ctx, 1<<20)
		ok(t, err)
		return c, m
	}
	owner, cache := dial(nb, "e0")
	user, local := dial(na, "e1")

	ok(t, cache.Register(ctx, "cache", 0, 1<<20,
		client.Grant{To: client.Everyone, Read: true, Write: true}))

	copy(local.Bytes(), "page 8")
	batch, err := user.Write(owner.Endpoint(), "cache", client.Options{Note: []byte("page 8")},
		client.Entry{Memory: local, Local: 0, Remote: 8 * 4096, Bytes: 4096})
	ok(t, err)
	result, err := batch.Wait(ctx)
	ok(t, err)
	if result.Status != client.OK || result.Bytes != 4096 || !result.Arrived(0) {
		t.Errorf("%+v", result)
	}

	notes, err := owner.Notes(ctx, time.Minute)
	ok(t, err)
	if len(notes) != 1 || string(notes[0].Note) != "page 8" || notes[0].From != user.Node() ||
		string(cache.Bytes()[8*4096:][:6]) != "page 8" {
		t.Errorf("%+v", notes)
	}
	ok(t, owner.Revoke(ctx, "cache", ""))
}

// Batches of a client move their ranges between several regions, and memory that was freed is
// neither read nor written.
func TestClientMoves(t *testing.T) {
	na, nb := start(t, nil), start(t, nil)
	a, b := newGoClient(t, na, "a"), newGoClient(t, nb, "b")
	ok(t, b.mem.Register(t.Context(), "pool", 4096, lentBytes-4096,
		client.Grant{To: na.cfg.Node, Read: true, Write: true, For: time.Hour}))
	f, err := a.Find(t.Context(), nb.Endpoint(), "pool")
	if err != nil || f.Bytes != lentBytes-4096 || !f.Read || !f.Write || f.For == 0 {
		t.Fatalf("%+v, %v", f, err)
	}
	more, err := a.NewMemory(t.Context(), 4096)
	ok(t, err)
	for i := range a.mem.Bytes() {
		a.mem.Bytes()[i] = byte(i * 7)
	}
	copy(more.Bytes(), bytes.Repeat([]byte("more"), 1024))
	batch, err := a.Write(nb.Endpoint(), "pool", client.Options{Priority: client.Background},
		client.Entry{Memory: a.mem, Bytes: 100, Pieces: 50, LocalStride: 100, RemoteStride: 300},
		client.Entry{Memory: more, Local: 4, Remote: 1 << 20, Bytes: 4092})
	if r := ended(t, batch, err); r.Status != client.OK || r.Bytes != 5000+4092 {
		t.Fatalf("%+v", r)
	}
	pool := b.mem.Bytes()[4096:]
	for i := range 50 {
		if !bytes.Equal(pool[i*300:][:100], a.mem.Bytes()[i*100:][:100]) {
			t.Fatalf("piece %d: other bytes", i)
		}
	}
	if !bytes.Equal(pool[1<<20:][:4092], more.Bytes()[4:]) || pool[100] != 0 {
		t.Error("other bytes")
	}
	batch, err = a.Read(nb.Endpoint(), "pool", client.Options{},
		client.Entry{Memory: more, Remote: 300, Bytes: 100})
	if r := ended(t, batch, err); r.Status != client.OK || !bytes.Equal(more.Bytes()[:100],
		pool[300:][:100]) {
		t.Errorf("%+v", r)
	}
	ok(t, more.Free(t.Context()))
	batch, err = a.Read(nb.Endpoint(), "pool", client.Options{}, client.Entry{Memory: more, Bytes: 1})
	if r := ended(t, batch, err); r.Status != client.Refused ||
		!strings.Contains(r.Reason, "regions[0]") {
		t.Errorf("%+v", r)
	}
}

// What a client cannot send, and what the sidecar refuses, are errors with a field.
func TestClientRefusals(t *testing.T) {
	n := start(t, nil)
	c, other := newGoClient(t, n, "c"), newGoClient(t, n, "other")
	var refusal *client.Refusal
	if err := c.mem.Register(t.Context(), "x", 1, lentBytes); !errors.As(err, &refusal) ||
		refusal.Field != "region" || refusal.Remedy == "" {
		t.Errorf("%v", err)
	}
	_, err := c.Find(t.Context(), "", "none")
	if !errors.As(err, &refusal) || refusal.Field != "name" {
		t.Errorf("%v", err)
	}
	if err := c.Revoke(t.Context(), "none", ""); !errors.As(err, &refusal) || refusal.Field != "name" {
		t.Errorf("%v", err)
	}
	for want, entries := range map[string][]client.Entry{
		"0 entries":         nil,
		"100001 entries":    make([]client.Entry, 100_001),
		"entries[1].Memory": {c.at(0, 1), other.at(0, 1)},
		"entries[0].Memory": {{Bytes: 1}},
	} {
		if _, err := c.Read("", "x", client.Options{}, entries...); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	long := strings.Repeat("x", 1025)
	for field, err := range map[string]error{
		"name":    c.mem.Register(t.Context(), long, 0, 1),
		"grants":  c.mem.Register(t.Context(), "x", 0, 1, make([]client.Grant, 65)...),
		"path":    c.RegisterFile(t.Context(), "x", long, 0, 0),
		"bytes":   c.mem.Register(t.Context(), "x", 0, 0),
		"note":    batchError(c.Read("", "x", client.Options{Note: []byte(long)}, c.at(0, 1))),
		"durable": batchError(c.Read("", "x", client.Options{Durable: true}, c.at(0, 1))),
	} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%v, want %q", err, field)
		}
	}
	ok(t, c.mem.Register(t.Context(), "x", 0, 4096, client.Grant{To: client.Everyone, Read: true}))
	for want, e := range map[string]client.Entry{"entries[0].remote": c.at(4096, 1),
		"entries[0].local": c.at(lentBytes, 1), "entries[0].bytes": c.at(0, 0)} {
		b, err := other.Read("", "x", client.Options{}, client.Entry{Memory: other.mem, Local: e.Local,
			Remote: e.Remote, Bytes: e.Bytes})
		if r := ended(t, b, err); r.Status != client.Refused || !strings.Contains(r.Reason, want) ||
			r.Arrived(0) {
			t.Errorf("%+v, want %q", r, want)
		}
	}
	other.Close()
	if _, err := other.Read("", "x", client.Options{}, other.at(0, 1)); !errors.Is(err,
		client.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if _, err := other.NewMemory(t.Context(), 1); err == nil {
		t.Error("memory after Close")
	}
}

func batchError(_ *client.Batch, err error) error { return err }

// Lists of open batches share their memory: no batch gets the entries of another.
func TestClientLists(t *testing.T) {
	_, _, na, nb, send := silent(t)
	user, owner := newGoClient(t, na, "user"), newGoClient(t, nb, "owner")
	ok(t, owner.mem.Register(t.Context(), "pool", 0, lentBytes,
		client.Grant{To: client.Everyone, Write: true}))
	for i := range user.mem.Bytes() {
		user.mem.Bytes()[i] = byte(i % 251)
	}
	const count = 100
	var open []*client.Batch
	for i := range uint64(4) {
		entries := make([]client.Entry, count)
		for k := range entries {
			entries[k] = user.at(i<<20+uint64(k)*8, 8)
		}
		x, err := user.Write(nb.Endpoint(), "pool", client.Options{}, entries...)
		ok(t, err)
		open = append(open, x)
	}
	until(t, func() bool { return nb.segments.Open() == 4 })
	ok(t, open[1].Cancel("not needed"))
	if r := ended(t, open[1], nil); r.Status != client.Canceled {
		t.Errorf("%+v", r)
	}
	late, err := user.Write(nb.Endpoint(), "pool", client.Options{}, user.at(count*8, 8))
	ok(t, err)
	if _, err := late.Wait(canceled()); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	expires, err := user.Write(nb.Endpoint(), "pool", client.Options{Deadline: time.Millisecond,
		Wait: true}, user.at(0, 1))
	if r := ended(t, expires, err); r.Status != client.Expired {
		t.Errorf("%+v", r)
	}
	send()
	for _, x := range []*client.Batch{open[0], open[2], open[3], late} {
		if r := ended(t, x, nil); r.Status != client.OK {
			t.Errorf("%+v", r)
		}
	}
	for _, i := range []uint64{0, 2, 3} {
		at := i << 20
		if !bytes.Equal(owner.mem.Bytes()[at:at+count*8], user.mem.Bytes()[at:at+count*8]) {
			t.Errorf("batch %d: other bytes", i)
		}
	}
}

func canceled() context.Context {
	ctx, stop := context.WithCancel(context.Background())
	stop()
	return ctx
}

// kill -9 of the client's sidecar: a batch ends as LOST or complete, and not before the process has
// ended. Later calls fail.
func TestClientSidecarKilled(t *testing.T) {
	for name, open := range map[string]bool{"at once": false, "open": true} {
		t.Run(name, func(t *testing.T) {
			p := newProcess(t, "tcp")
			_, _, _, nb, _ := silent(t)
			user, owner := newGoClient(t, p.asRunning(), "user"), newGoClient(t, nb, "owner")
			ok(t, owner.mem.Register(t.Context(), "pool", 0, lentBytes,
				client.Grant{To: client.Everyone, Read: true, Write: true}))
			b, err := user.Write(nb.Endpoint(), "pool", client.Options{}, user.at(0, lentBytes))
			ok(t, err)
			if open {
				until(t, func() bool { return nb.segments.Open() > 0 || done(b) })
			}
			p.kill()
			if r := ended(t, b, nil); r.Status != client.Lost && r.Status != client.OK {
				t.Errorf("%+v", r)
			}
			if _, err := user.Read("", "pool", client.Options{}, user.at(0, 1)); !errors.Is(err,
				client.ErrClosed) {
				t.Errorf("%v", err)
			}
			if _, err := user.Find(t.Context(), "", "pool"); err == nil {
				t.Error("found by a session that has ended")
			}
			until(t, func() bool { return nb.segments.Open() == 0 })
			ok(t, owner.Revoke(t.Context(), "pool", ""))
		})
	}
}

func done(b *client.Batch) bool {
	select {
	case <-b.Done():
		return true
	default:
		return false
	}
}

// Close ends the client's own batches. A segment that was revoked before is fenced, and its name is
// free, although batches of other nodes used it.
func TestClientCloses(t *testing.T) {
	_, _, na, nb, send := silent(t)
	user, owner := newGoClient(t, na, "user"), newGoClient(t, nb, "owner")
	grant := client.Grant{To: client.Everyone, Write: true}
	ok(t, owner.mem.Register(t.Context(), "pool", 0, lentBytes, grant))
	b, err := user.Write(nb.Endpoint(), "pool", client.Options{}, user.at(0, lentBytes))
	ok(t, err)
	until(t, func() bool { return nb.segments.Open() == 1 })
	mine, err := owner.Write("", "none", client.Options{}, owner.at(0, 1))
	ok(t, err)
	ok(t, owner.Revoke(t.Context(), "pool", ""))
	owner.Close()
	owner.Close()
	if _, err := mine.Wait(t.Context()); err != nil && !errors.Is(err, client.ErrClosed) {
		t.Errorf("%v", err)
	}
	send()
	if r := ended(t, b, nil); r.Status == client.OK {
		t.Errorf("%+v", r)
	}
	ok(t, newGoClient(t, nb, "next").mem.Register(t.Context(), "pool", 0, 1, grant))
}
