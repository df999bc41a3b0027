package peer

import (
	"errors"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transfer"
)

// dialed are the addresses to which n keeps lanes to a peer, each once: a connect and the slow
// tick may both have opened one.
func dialed(n *node, boot transfer.Boot) (out []string) {
	for _, l := range n.sessions.get(boot).channel.Lanes() {
		out = append(out, l.Address())
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// A rail that appears gets a control lane as soon as the peer has announced its address. The
// address of a rail that vanishes is closed. Frames that are sent meanwhile arrive once and in
// order.
func TestControlFollowsRails(t *testing.T) {
	a, b := start(t, nil), start(t, nil)
	join(t, a, b)
	announce := func(hosts ...string) []string {
		t.Helper()
		if err := b.SetControl(t.Context(), hosts); err != nil {
			t.Fatal(err)
		}
		addrs := b.Addresses()
		if err := a.PeerAddresses(b.opt.Boot, addrs); err != nil {
			t.Fatal(err)
		}
		slices.Sort(addrs)
		return addrs
	}
	first := b.Addresses()
	both := announce("127.0.0.2:0", "127.0.0.3:0")
	if len(both) != 3 {
		t.Fatalf("addresses %v", both)
	}
	poll(t, "a lane to each", func() bool { return slices.Equal(dialed(a, b.opt.Boot), both) })
	again := announce("127.0.0.3:0")
	if len(again) != 2 || !slices.Contains(both, again[1]) {
		t.Errorf("the address that stayed moved: %v, then %v", both, again)
	}
	gone := slices.DeleteFunc(slices.Clone(both),
		func(x string) bool { return slices.Contains(again, x) })
	if c, err := net.Dial("tcp", gone[0]); err == nil {
		_ = c.Close()
		t.Errorf("%s is still open", gone[0])
	}
	announce()
	for i := range uint64(100) {
		if err := a.Send(b.opt.Boot, await(i+1)); err != nil {
			t.Fatal(err)
		}
	}
	b.inOrder(a.opt.Boot, 100)
	if got := b.Addresses(); !slices.Equal(got, first) {
		t.Errorf("addresses %v, want %v", got, first)
	}
	if err := b.SetControl(t.Context(), []string{"192.0.2.1:0"}); !errors.Is(err, ErrUnsafe) {
		t.Errorf("off loopback without a key: %v", err)
	}
	for what, bad := range map[string][]string{"none": nil, "no port": {"127.0.0.1"},
		"not printable": {"\x1b[2J:1"}, "too many": make([]string, MaxAddrs+1),
		"too long": {strings.Repeat("a", hello.MaxText) + ":1"}} {
		if err := a.PeerAddresses(b.opt.Boot, bad); !errors.Is(err, wire.ErrMalformed) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := a.PeerAddresses(transfer.Boot{3}, first); !errors.Is(err, ErrUnknown) {
		t.Errorf("of an unknown peer: %v", err)
	}
}

// The path to the endpoint is lost for good, with every lane. Control lanes move to another rail of
// the same process.
func TestControlMovesToAnotherRail(t *testing.T) {
	a := start(t, nil)
	b := start(t, func(o *Options) { o.Control = []string{"127.0.0.2:0"} })
	join(t, a, b)
	poll(t, "two lanes", func() bool { return len(dialed(a, b.opt.Boot)) == 2 })
	_ = b.listeners.served.Close()
	cutAll(a.sessionOf(b), errLinkDown)
	for i := range uint64(100) {
		if err := a.Send(b.opt.Boot, await(i+1)); err != nil {
			t.Fatal(err)
		}
	}
	b.inOrder(a.opt.Boot, 100)
	other := b.Addresses()[1]
	poll(t, "a lane that a has dialed to the other rail", func() bool {
		return slices.Contains(dialed(a, b.opt.Boot), other)
	})
}
