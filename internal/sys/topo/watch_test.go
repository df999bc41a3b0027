package topo

import (
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/testutil"
)

// TestWatch runs in a network namespace of its own: a link appears, comes up, gets an address,
// loses its carrier and vanishes.
func TestWatch(t *testing.T) { watched(t, 1) }

// If the other end of a link disappears, the loss of the carrier must be an event within a few
// milliseconds on a quiet machine: healing may take 20 ms in all. The bound here is wider. The
// median of several losses shows that Watch does not poll by a timer.
func TestMeasureLostCarrier(t *testing.T) {
	testutil.Measures(t)
	const soon = 200 * time.Millisecond
	if took := watched(t, 11); len(took) > 0 && took[len(took)/2] > soon {
		t.Errorf("event of a lost carrier after %v: want %v for half of them", took, soon)
	}
}

// watched returns how long the events of lost carriers took, in order.
func watched(t *testing.T, carriers int) (took []time.Duration) {
	if !testutil.InNamespace(t) {
		return nil
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	type news struct {
		at time.Time
		e  Event
	}
	events := make(chan news, 256)
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	must(t, err)
	defer h.Close()
	var wg sync.WaitGroup
	var failed error
	wg.Go(func() {
		failed = Watch(ctx, Options{Root: t.TempDir()}, func(_ *Host, all []Event) {
			for _, e := range all {
				events <- news{time.Now(), e}
			}
		})
	})
	wait := func(name string, c Change) (NIC, time.Time) {
		t.Helper()
		limit := time.After(time.Minute)
		for {
			select {
			case n := <-events:
				if n.e.NIC.Name == name && n.e.Change == c {
					return n.e.NIC, n.at
				}
			case <-limit:
				t.Fatalf("%s: no event that it %s", name, c)
			}
		}
	}
	wait("lo", Appeared)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "rail0"
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "far0"}
	must(t, h.LinkAdd(veth))
	if n, _ := wait("rail0", Appeared); n.Kind != Veth || n.Link {
		t.Errorf("%+v", n)
	}
	far, err := h.LinkByName("far0")
	must(t, err)
	must(t, h.LinkSetUp(veth))
	must(t, h.LinkSetUp(far))
	wait("rail0", Up)
	must(t, h.AddrAdd(veth, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 1, 2, 3),
		Mask: net.CIDRMask(24, 32)}}))
	// an address of IPv6 may come first
	for n, _ := wait("rail0", Changed); ; n, _ = wait("rail0", Changed) {
		if p, err := n.Route(); err == nil && p.String() == "10.1.2.3/24" {
			break
		}
	}
	for range carriers {
		began := time.Now()
		must(t, h.LinkSetDown(far))
		n, at := wait("rail0", Down)
		if n.Link || !n.Admin {
			t.Errorf("%+v", n)
		}
		took = append(took, at.Sub(began))
		began = time.Now()
		must(t, h.LinkSetUp(far))
		if _, at := wait("rail0", Up); at.Sub(began) < upHold {
			t.Errorf("event of a link %v after it came up: the other end's has %v", at.Sub(began), upHold)
		}
	}
	slices.Sort(took)
	t.Logf("events of lost carriers after %v", took)
	must(t, h.LinkDel(veth))
	wait("rail0", Vanished)
	stop()
	wg.Wait()
	if failed != nil {
		t.Error(failed)
	}
	return took
}

// A link that came up waits, a lost one does not, even beside it.
func TestHeld(t *testing.T) {
	for _, c := range []struct {
		all  []Change
		want bool
	}{{nil, false}, {[]Change{Up}, true}, {[]Change{Changed, Up, Appeared}, true}, {[]Change{Up, Down},
		false}, {[]Change{Vanished, Up}, false},
		{[]Change{Appeared, Changed}, false}} {
		var events []Event
		for _, e := range c.all {
			events = append(events, Event{Change: e})
		}
		if got := held(events); got != c.want {
			t.Errorf("%v: held %v", c.all, got)
		}
	}
}

// A subscription that the kernel ended is made again.
func TestSubscriptionIsRenewed(t *testing.T) {
	k, err := openKernel()
	must(t, err)
	defer k.close()
	must(t, k.subscribe())
	first := k.sub
	must(t, k.subscribe())
	if k.sub != first {
		t.Error("made again while it lived")
	}
	first.lost.Store(true)
	must(t, k.subscribe())
	if k.sub == first {
		t.Error("not made again after it was lost")
	}
}
