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
	// least pause after a look, so that a burst of notifications is one.
	settle = 2 * time.Millisecond
	// least pause as a multiple of the look's time: a host that makes containers has notifications
	// all the time.
	share   = 4
	longest = 40 * time.Millisecond  // pause after a look
	again   = 100 * time.Millisecond // after a failed look
	// between looks without notifications: a change of speed causes none.
	unasked = 30 * time.Second
	// upHold passes before a link that came up is reported, if it is still up then. The other end
	// comes up a moment later, and an earlier ARP request is lost: the kernel repeats it after a
	// second, whatever connects meanwhile.
	upHold = 20 * time.Millisecond
)

// held reports whether events wait for upHold: a link came up, and none was lost.
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

// subscription is one life of the two notification sockets. The library ends it if the kernel had
// to drop notifications.
type subscription struct {
	done chan struct{}
	wg   sync.WaitGroup // the two forwarders
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

// subscribe subscribes to changes of links and addresses; again after a lost subscription, which
// counts as a notification.
func (k *kernel) subscribe() error {
	if k.sub != nil && !k.sub.lost.Load() {
		return nil
	}
	k.unsubscribe()
	u := &subscription{done: make(chan struct{})}
	links, addrs := make(chan netlink.LinkUpdate), make(chan netlink.AddrUpdate)
	lost := func(error) { u.lost.Store(true) }
	if err := netlink.LinkSubscribeWithOptions(links, u.done,
		netlink.LinkSubscribeOptions{ErrorCallback: lost}); err != nil {
		return fmt.Errorf("topo: subscribe to links: %w", err)
	}
	u.wg.Go(func() { forward(links, k) })
	k.sub = u
	if err := netlink.AddrSubscribeWithOptions(addrs, u.done,
		netlink.AddrSubscribeOptions{ErrorCallback: lost}); err != nil {
		k.unsubscribe()
		return fmt.Errorf("topo: subscribe to addresses: %w", err)
	}
	u.wg.Go(func() { forward(addrs, k) })
	return nil
}

// forward turns updates into notifications until the subscription ends.
func forward[T any](in <-chan T, k *kernel) {
	for range in {
		k.poke()
	}
	k.poke()
}

// links lists interfaces and their addresses. The two lists are of different moments: an address of
// an interface in neither is omitted, and a notification of it follows.
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
		// A tentative address cannot be bound yet; a notification follows when it can.
		if ok && a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0 {
			byIndex[a.LinkIndex] = append(byIndex[a.LinkIndex], netip.PrefixFrom(ip.Unmap(), ones))
		}
	}
	var out []Link
	for _, l := range list {
		a := l.Attrs()
		if a.RawFlags&unix.IFF_LOWER_UP != 0 && a.OperState != netlink.OperUp &&
			a.OperState != netlink.OperUnknown {
			// The kernel may delay its reaction to a carrier for a second, until which nothing can
			// be sent. A request for one link, unlike one for all, makes it catch up
			// (linkwatch_sync_dev in rtnl_getlink).
			if now, err := k.h.LinkByIndex(a.Index); err == nil {
				a = now.Attrs()
			}
		}
		x := Link{Name: a.Name, Index: a.Index, Kind: Kind(l.Type()), MTU: a.MTU,
			Admin: a.Flags&net.FlagUp != 0, Master: a.MasterIndex, Addrs: byIndex[a.Index]}
		// The loopback interface and others without a carrier have operstate unknown while they
		// work.
		x.Link = x.Admin && a.RawFlags&unix.IFF_LOWER_UP != 0 && (a.OperState == netlink.OperUp ||
			a.OperState == netlink.OperUnknown)
		if a.Flags&net.FlagLoopback != 0 {
			x.Kind = Loopback
		}
		if a.NetNsID < 0 { // otherwise the parent is in another namespace
			x.Parent = a.ParentIndex
		}
		out = append(out, x)
	}
	return out, nil
}

// Watch reports the first look, with an event Appeared for each interface, and then every change
// until ctx ends. The network namespace is that of the calling thread at the time of the call.
func Watch(ctx context.Context, opt Options, notify func(*Host, []Event)) error {
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
	devices.gpus(&opt) // GPUs do not come and go
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
				notify(now, events)
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

// pause reports whether ctx outlives d.
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
