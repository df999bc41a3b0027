package pages

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/page"
)

// What an operator asks of a running store (web.StoreCalls).

var errDrained = &store.RequestError{Field: "pool", Problem: "this node's store is drained: it " +
	"takes no pages until its sidecar restarts", Remedy: "go on without storing them"}

// tierWaits are the gets whose slowest page was in one tier.
type tierWaits struct{ gets, bytes, us atomic.Uint64 }

// Waits returns how many gets had their slowest page from a tier, and their bytes and time in all.
func (s *Service) Waits(tier string) (gets, bytes uint64, took time.Duration) {
	for t := range s.waits {
		if store.Tier(t).String() == tier {
			w := &s.waits[t]
			return w.gets.Load(), w.bytes.Load(), time.Duration(w.us.Load()) * time.Microsecond
		}
	}
	return 0, 0, 0
}

// waited counts a get of an engine by the slowest tier that it had a page from.
func (s *Service) waited(slowest store.Tier, bytes uint64, took time.Duration) {
	s.waits[slowest].gets.Add(1)
	s.waits[slowest].bytes.Add(bytes)
	s.waits[slowest].us.Add(uint64(took.Microseconds()))
}

// endPut ends the count of a put that began.
func (s *Service) endPut(r *connector.Pages) {
	if !r.Put {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.puts--; s.puts == 0 {
		s.putEnded.Broadcast()
	}
}

// Drained reports whether puts are refused.
func (s *Service) Drained() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.drained
}

// Drain refuses puts from now on, until the end of the process, and returns once all pages that
// were put before are where they survive its end: on the disk, and in the object store as far as
// they go there. It can be called again after ctx has ended a call.
func (s *Service) Drain(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.putEnded.Broadcast()
	})
	defer stop()
	s.mu.Lock()
	s.drained = true
	for s.puts > 0 && ctx.Err() == nil {
		s.putEnded.Wait()
	}
	n := s.puts
	s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("store: %d puts are under way: %w", n, err)
	}
	return s.o.Store.Flush(ctx)
}

// hold keeps a namespace that engines have open, until the returned function is called.
func (s *Service) hold(id page.ID) (*namespace, func(), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ns := s.namespaces[id]
	if ns == nil {
		return nil, nil, &store.RequestError{Field: "namespace", Problem: id.String() + " is not open",
			Remedy: "name one that an engine of this node uses: 'kvspray store ls' lists them"}
	}
	ns.users++
	return ns, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.leaveLocked(ns)
	}, nil
}

// Keys lists keys of pages of a namespace.
func (s *Service) Keys(id [32]byte, tier string, first uint32, limit int) (*nodeapi.StoreKeys,
	error) {
	t, ok := map[string]store.Tier{"memory": store.Memory, "disk": store.Disk}[tier]
	if !ok {
		return nil, &store.RequestError{Field: "tier", Problem: fmt.Sprintf("%q", tier),
			Remedy: "name memory or disk"}
	}
	ns, leave, err := s.hold(id)
	if err != nil {
		return nil, err
	}
	defer leave()
	keys, next, err := ns.space.Keys(t, first, make([]page.Key, 0, limit))
	if err != nil {
		return nil, err
	}
	out := &nodeapi.StoreKeys{Keys: make([]string, len(keys)), Next: next}
	for i := range keys {
		out.Keys[i] = hex.EncodeToString(keys[i][:])
	}
	return out, nil
}

// RemoveNamespace forgets all pages of a namespace, on all nodes. unknown: this node need not have
// any, nor an engine that uses it.
func (s *Service) RemoveNamespace(ctx context.Context, id [32]byte, unknown bool) (
	*nodeapi.StoreRemoved, error) {
	if !unknown && !s.o.Store.Has(id) {
		return nil, &store.RequestError{Field: "namespace", Problem: page.ID(id).String() + " is not " +
			"open on this node, and its disks have no pages of it", Remedy: "name one that 'kvspray " +
			"store ls' lists, or pass --unknown if only other nodes have it"}
	}
	states, err := s.o.Removals.Remove(ctx, id, operatorAnswers)
	if err != nil {
		return nil, err
	}
	out := &nodeapi.StoreRemoved{Namespace: hex.EncodeToString(id[:])}
	for _, m := range states {
		if m.Confirmed {
			out.Confirmed++
		}
		out.Members = append(out.Members, nodeapi.StoreMember{Node: m.Node, Boot: m.Boot.String(),
			Confirmed: m.Confirmed, Problem: m.Problem})
	}
	return out, nil
}

// errVerifying: a page is read into memory of its own, of which there is one.
var errVerifying = errors.New("store: another page is being verified; try again")

var outcomeNames = map[store.Outcome]string{store.Hit: "hit", store.Miss: "miss",
	store.Damaged: "damaged", store.Failed: "failed", store.Canceled: "canceled"}

// Verify reads a page as a get does, which compares it with its checksum, and returns the checksum
// of what was read. A damaged copy is reported also where another tier has replaced it. The
// bytes stay here: they are a tenant's text.
func (s *Service) Verify(ctx context.Context, id, key [32]byte) (*nodeapi.StoreVerified,
	error) {
	if !s.verifying.TryLock() {
		return nil, errVerifying
	}
	defer s.verifying.Unlock()
	ns, leave, err := s.hold(id)
	if err != nil {
		return nil, err
	}
	defer leave()
	if !s.o.Removals.Ready(id) {
		return nil, errUnsure
	}
	n := uint64(ns.of.PageBytes)
	region, err := mem.NewAnonymous("verify", n)
	if err != nil {
		return nil, fmt.Errorf("store: memory for a page: %w", err)
	}
	defer region.Release()
	pool, err := store.NewPool([]store.Piece{{Region: region, Stride: n, Len: n}}, 1)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	b, err := ns.space.Get([]page.Key{key}, pool, []uint32{0})
	if err != nil {
		return nil, err
	}
	select {
	case <-b.Done():
	case <-ctx.Done():
		b.Cancel()
		<-b.Done() // before its memory goes
	}
	r := b.Results()[0]
	out := &nodeapi.StoreVerified{Outcome: outcomeNames[r.Outcome],
		Took: time.Since(began).Seconds()}
	if r.Err != nil {
		out.Problem = r.Err.Error()
	}
	switch {
	case r.Replaced:
		out.Outcome = outcomeNames[store.Damaged]
		out.Problem = "a copy in a nearer tier differed from its checksum, and is dropped; a good one " +
			"was read: " + r.Tier.String()
	case r.Outcome == store.Hit:
		bytes, _ := region.Bytes()
		out.Tier, out.Bytes = r.Tier.String(), n
		out.CRC32C = fmt.Sprintf("%08x", mem.CRC32C(0, bytes))
	}
	return out, nil
}
