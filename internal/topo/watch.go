package topo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Times of a watcher.
const (
	settle  = 2 * time.Millisecond   // after a look at least, so that a burst of news is one
	share   = 4                      // times what the look took, at least: a host that makes containers has news all the time
	longest = 40 * time.Millisecond  // pause after a look
	again   = 100 * time.Millisecond // after a look that failed
	unasked = 30 * time.Second       // between looks where there is no news: a speed changes without any
	// upHold passes before a link that came up is told, if it still is up then. The other end's comes up a moment later, and an ARP request
	// that goes out before is lost: the kernel says it again after a second, whatever connects meanwhile.
	upHold = 20 * time.Millisecond
)

// held reports whether events wait for upHold: a link came up, and none is lost.
func held(events []Event) (up bool) {
	for _, e := range events {
		if e.Change == Down || e.Change == Vanished {
			return false
		}
		up = up || e.Change == Up
	}
	return up
}

// kernel is rtnetlink of one network namespace: that of the thread that opened it.
type kernel struct {
	h    *netlink.Handle
	news chan struct{} // something happened; capacity 1
	sub  *subscription // nil: none
}

// subscription is one life of the two sockets that news comes from. The library ends it where the kernel had to drop news.
type subscription struct {
	done chan struct{}
	wg   sync.WaitGroup // the two that forward
	lost atomic.Bool
}

func openKernel() (*kernel, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("topo: rtnetlink: %w", err)
	}
	return &kernel{h: h, news: make(chan struct{}, 1)}, nil
}

func (k *kernel) close() {
	k.unsubscribe()
	k.h.Close()
}

func (k *kernel) unsubscribe() {
	if k.sub != nil {
		close(k.sub.done)
		k.sub.wg.Wait()
		k.sub = nil
	}
}

func (k *kernel) poke() {
	select {
	case k.news <- struct{}{}:
	default:
	}
}

// subscribe makes news of every change of a link or an address; again where an earlier subscription was lost, which is news too.
func (k *kernel) subscribe() error {
	if k.sub != nil && !k.sub.lost.Load() {
		return nil
	}
	k.unsubscribe()
	u := &subscription{done: make(chan struct{})}
	links, addrs := make(chan netlink.LinkUpdate), make(chan netlink.AddrUpdate)
	lost := func(error) { u.lost.Store(true) }
	if err := netlink.LinkSubscribeWithOptions(links, u.done, netlink.LinkSubscribeOptions{ErrorCallback: lost}); err != nil {
		return fmt.Errorf("topo: subscribe to links: %w", err)
	}
	u.wg.Go(func() { forward(links, k) })
	k.sub = u
	if err := netlink.AddrSubscribeWithOptions(addrs, u.done, netlink.AddrSubscribeOptions{ErrorCallback: lost}); err != nil {
		k.unsubscribe()
		return fmt.Errorf("topo: subscribe to addresses: %w", err)
	}
	u.wg.Go(func() { forward(addrs, k) })
	return nil
}

// forward turns updates into news until the subscription ends.
func forward[T any](in <-chan T, k *kernel) {
	for range in {
		k.poke()
	}
	k.poke()
}

// links lists interfaces and their addresses. The two lists are of different moments: an address of an interface that is in neither is
// left out, and news of it follows.
func (k *kernel) links() ([]Link, error) {
	list, err := k.h.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("topo: list links: %w", err)
	}
	addrs, err := k.h.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("topo: list addresses: %w", err)
	}
	byIndex := map[int][]netip.Prefix{}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		ones, _ := a.Mask.Size()
		// A tentative address cannot be bound yet; it is news when it can.
		if ok && a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0 {
			byIndex[a.LinkIndex] = append(byIndex[a.LinkIndex], netip.PrefixFrom(ip.Unmap(), ones))
		}
	}
	var out []Link
	for _, l := range list {
		a := l.Attrs()
		if a.RawFlags&unix.IFF_LOWER_UP != 0 && a.OperState != netlink.OperUp && a.OperState != netlink.OperUnknown {
			// A carrier that the kernel has not acted on yet, which it may put off for a second: until then nothing can be sent. To ask for
			// one link, unlike for all, makes it catch up (linkwatch_sync_dev in rtnl_getlink).
			if now, err := k.h.LinkByIndex(a.Index); err == nil {
				a = now.Attrs()
			}
		}
		x := Link{Name: a.Name, Index: a.Index, Kind: Kind(l.Type()), MTU: a.MTU, Admin: a.Flags&net.FlagUp != 0, Master: a.MasterIndex, Addrs: byIndex[a.Index]}
		// The loopback interface and others without a carrier of their own have operstate unknown while they work.
		x.Link = x.Admin && a.RawFlags&unix.IFF_LOWER_UP != 0 && (a.OperState == netlink.OperUp || a.OperState == netlink.OperUnknown)
		if a.Flags&net.FlagLoopback != 0 {
			x.Kind = Loopback
		}
		if a.NetNsID < 0 { // else the parent is in another namespace
			x.Parent = a.ParentIndex
		}
		out = append(out, x)
	}
	return out, nil
}

// Watch looks, tells what it found, and then tells every change until ctx ends. The first call of tell has an event Appeared for each
// interface. The network namespace is that of the calling thread at the time of the call.
func Watch(ctx context.Context, opt Options, tell func(*Host, []Event)) error {
	k, err := openKernel()
	if err != nil {
		return err
	}
	defer k.close()
	if opt.Links == nil {
		opt.Links = k.links
	}
	if err := k.subscribe(); err != nil {
		return err
	}
	last := &Host{}
	devices := &Host{Nodes: (&reader{root: opt.Root}).nodes()}
	devices.gpus(&opt) // they do not come and go
	for ripe := false; ; {
		began := time.Now()
		l, err := opt.Links()
		if err == nil {
			err = k.subscribe()
		}
		if err != nil {
			k.poke()
		} else {
			now := &Host{GPUs: devices.GPUs, Nodes: devices.Nodes, Trouble: devices.Trouble}
			now.fill(opt.Root, l)
			events := Diff(last, now)
			if !ripe && held(events) {
				ripe = true
				if !pause(ctx, upHold) {
					return nil
				}
				continue
			}
			if len(events) > 0 {
				tell(now, events)
			}
			last, ripe = now, false
		}
		wait := min(max(share*time.Since(began), settle), longest)
		if err != nil {
			wait = again
		}
		if !pause(ctx, wait) {
			return nil
		}
		t := time.NewTimer(unasked)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil
		case <-k.news:
		case <-t.C:
		}
		t.Stop()
	}
}

// pause reports whether ctx outlives it.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
