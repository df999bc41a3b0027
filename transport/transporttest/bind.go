package transporttest

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Bind is a grant at `to` and the origin at `from` that feeds it.
type Bind struct {
	from, to *End
	Grant    *transport.Grant
	Origin   *transport.Origin
	Dest     *Dest
	Source   *Source
}

// NewBind binds a slot in both directions of the lookup, like the control layer. The caller owns
// src and dst.
func NewBind(tb testing.TB, from, to *End, src, dst *Memory, slot transfer.Slot,
	gen transfer.Gen) *Bind {
	tb.Helper()
	b := &Bind{from: from, to: to}
	b.bindOrigin(src, to.Boot, slot, gen, b.bindGrant(tb, dst, from.Boot, slot, gen))
	if from.far != nil {
		from.far.newOrigin(tb, b)
	}
	return b
}

// bindGrant makes the receiver's half and returns the token.
func (b *Bind) bindGrant(tb testing.TB, dst *Memory, peer transfer.Boot, slot transfer.Slot,
	gen transfer.Gen) []byte {
	tb.Helper()
	b.Dest = &Dest{Memory: dst, tb: tb, landed: make([]atomic.Uint32, dst.Chunks())}
	b.Grant = &transport.Grant{Peer: peer, Slot: slot, Gen: gen, Memory: b.Dest, Landed: b.Dest.Landed}
	b.Grant.Receipt.Reset(dst.Chunks())
	b.Dest.grant = b.Grant
	if b.to.far != nil {
		return b.to.far.newGrant(tb, b)
	}
	token, err := b.to.Backend.Grant(b.Grant)
	if err != nil {
		tb.Fatalf("grant: %v", err)
	}
	if b.to.Backend.Caps().NeedsTokens != (token != nil) {
		tb.Fatalf("grant returned a token of %d bytes, Caps.NeedsTokens is %v", len(token),
			b.to.Backend.Caps().NeedsTokens)
	}
	b.to.mu.Lock()
	b.to.grants[slot] = b.Grant
	b.to.mu.Unlock()
	return token
}

// bindOrigin makes the sender's half.
func (b *Bind) bindOrigin(src *Memory, peer transfer.Boot, slot transfer.Slot, gen transfer.Gen,
	token []byte) {
	b.Source = &Source{Memory: src}
	b.Origin = &transport.Origin{Peer: peer, Slot: slot, Gen: gen, Memory: b.Source,
		Valid: b.Source.Valid, Token: token}
	b.from.mu.Lock()
	defer b.from.mu.Unlock()
	b.from.origins[slot] = b.Origin
}

// enter and leave hold the grant's guard, like a writer.
func (b *Bind) enter() bool {
	if b.Dest.far != nil {
		return b.Dest.far.do(FarCall{Op: opEnter}).OK
	}
	return b.Grant.Enter()
}

func (b *Bind) leave() {
	if b.Dest.far != nil {
		b.Dest.far.do(FarCall{Op: opLeave})
		return
	}
	b.Grant.Leave()
}

// fence revokes the grant and fences it, closeOrigin the same for the origin.
func (b *Bind) fence(ctx context.Context) error {
	if b.Dest.far != nil {
		return b.Dest.far.within(ctx, opFence)
	}
	b.Grant.Revoke()
	return b.to.Backend.Fence(ctx, b.Grant)
}

func (b *Bind) closeOrigin(ctx context.Context) error {
	if b.from.far != nil {
		return b.from.far.bindOf(b.from.tb, b.Origin).within(ctx, opCloseOrigin)
	}
	b.Origin.Revoke()
	return b.from.Backend.CloseOrigin(ctx, b.Origin)
}

// Fence revokes the grant and fences it.
func (b *Bind) Fence(tb testing.TB) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := b.fence(ctx); err != nil {
		tb.Fatalf("fence: %v", err)
	}
}

// CloseOrigin revokes the origin and closes it.
func (b *Bind) CloseOrigin(tb testing.TB) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := b.closeOrigin(ctx); err != nil {
		tb.Fatalf("close origin: %v", err)
	}
}
