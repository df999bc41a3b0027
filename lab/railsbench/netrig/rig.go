package netrig

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/lab/timeline"
)

// Side is one of the namespaces in which hosts are.
type Side int

// The sides. Bulk goes from Sender to Receiver, and where there are several receivers, to Receiver,
// Receiver+1 ...
const (
	Sender Side = iota
	Receiver
)

// MaxReceivers is how many receivers a rig may have.
const MaxReceivers = 64

// What a shaper holds. The burst is what a rail may send at line speed after a pause: large enough
// for the timers of a virtual machine, small enough that a slow rail is slow.
const (
	burstTime = 2 * time.Millisecond
	minBurst  = 16 << 10
	maxBurst  = 512 << 10
	queueTime = 20 * time.Millisecond // bytes wait in the shaper at most so long
)

// ErrNotPermitted means that this process may not make network namespaces.
var ErrNotPermitted = errors.New("network namespaces are not permitted here: run as root (or " +
	"with CAP_SYS_ADMIN and CAP_NET_ADMIN, " +
	"in a container --privileged), or inside 'unshare --user --map-root-user --net --mount'")

// Rig is the hosts and the rails between them.
type Rig struct {
	ns    []netns.NsHandle // by Side; behind the hosts that of the switches, where there are some
	nl    []*netlink.Handle
	hosts int
	rates []timeline.Rate
	// Commands are started by one thread. The kernel kills them when the thread that started them
	// ends (PR_SET_PDEATHSIG), and Go's runtime ends any thread whose goroutine leaves it locked.
	starts chan func()

	mu     sync.Mutex // protects all below
	cond   []timeline.Condition
	loss   []float64
	refuse bool    // every rail
	flaps  []*flap // by rail; nil: it does not
}

// New builds rails of these rates, all healthy, between two hosts.
func New(rates []timeline.Rate) (*Rig, error) { return NewFan(rates, 1) }

// NewFan builds a sender and its receivers. Each host has a device of each rail. With several
// receivers those of one rail are ports of one switch, and each port is shaped in both directions.
// Faults are made on rigs of one receiver only.
func NewFan(rates []timeline.Rate, receivers int) (_ *Rig, err error) {
	if len(rates) == 0 || len(rates) > timeline.MaxRails {
		return nil, fmt.Errorf("netrig: %d rails: must be 1 to %d", len(rates), timeline.MaxRails)
	}
	if receivers < 1 || receivers > MaxReceivers {
		return nil, fmt.Errorf("netrig: %d receivers: must be 1 to %d", receivers, MaxReceivers)
	}
	r := &Rig{hosts: 1 + receivers, rates: rates, loss: make([]float64, len(rates)),
		flaps:  make([]*flap, len(rates)),
		starts: make(chan func())}
	go r.starter()
	spaces := r.hosts
	if receivers > 1 {
		spaces++
	}
	r.nl = make([]*netlink.Handle, spaces)
	for range spaces {
		r.ns = append(r.ns, netns.None())
	}
	for range rates {
		r.cond = append(r.cond, timeline.Healthy)
	}
	defer func() {
		if err != nil {
			r.Close()
		}
	}()
	for s := range r.ns {
		if r.ns[s], err = newNamespace(); err != nil {
			if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
				err = fmt.Errorf("%w (%w)", ErrNotPermitted, err)
			}
			return nil, fmt.Errorf("netrig: new network namespace: %w", err)
		}
		if r.nl[s], err = netlink.NewHandleAt(r.ns[s], unix.NETLINK_ROUTE); err != nil {
			return nil, fmt.Errorf("netrig: netlink in the new namespace: %w", err)
		}
		lo, err := r.nl[s].LinkByName("lo")
		if err == nil {
			err = r.nl[s].LinkSetUp(lo)
		}
		if err != nil {
			return nil, fmt.Errorf("netrig: lo: %w", err)
		}
	}
	for i := range rates {
		build := r.build
		if receivers > 1 {
			build = r.buildSwitch
		}
		if err := build(i); err != nil {
			return nil, fmt.Errorf("netrig: rail %d: %w", i, err)
		}
	}
	return r, nil
}

// newNamespace makes a namespace and leaves the caller's thread where it was.
func newNamespace() (netns.NsHandle, error) {
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return netns.None(), err
	}
	defer func() { _ = home.Close() }()
	ns, err := netns.New()
	if err != nil {
		runtime.UnlockOSThread()
		return netns.None(), err
	}
	if err := netns.Set(home); err != nil {
		// the thread stays locked and ends with its goroutine: no other goroutine must run in there
		return ns, err
	}
	runtime.UnlockOSThread()
	return ns, nil
}

// Name is what the device of a rail is called, at both ends.
func Name(rail int) string { return "rail" + strconv.Itoa(rail) }

// Addr is the address of a rail at one side.
func Addr(s Side, rail int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 77, byte(rail), byte(1 + s)})
}

func (r *Rig) build(i int) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = Name(i)
	attrs.Namespace = netlink.NsFd(r.ns[Sender])
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerNamespace = Name(i), netlink.NsFd(r.ns[Receiver])
	if err := r.nl[Sender].LinkAdd(veth); err != nil {
		return fmt.Errorf("veth: %w", err)
	}
	if err := r.address(i); err != nil {
		return err
	}
	return r.shape(i, 1)
}

// port is what the device of a switch is called that leads to a host.
func port(rail int, s Side) string { return fmt.Sprintf("p%d-%d", rail, s) }

// buildSwitch makes one rail of a switch and a cable to each host.
func (r *Rig) buildSwitch(i int) error {
	mid := r.nl[r.hosts]
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "switch" + strconv.Itoa(i)
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := mid.LinkAdd(bridge); err != nil {
		return fmt.Errorf("bridge: %w", err)
	}
	if err := mid.LinkSetUp(bridge); err != nil {
		return fmt.Errorf("bridge up: %w", err)
	}
	for s := range Side(r.hosts) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Namespace = port(i, s), netlink.NsFd(r.ns[r.hosts])
		veth := netlink.NewVeth(attrs)
		veth.PeerName, veth.PeerNamespace = Name(i), netlink.NsFd(r.ns[s])
		if err := mid.LinkAdd(veth); err != nil {
			return fmt.Errorf("veth: %w", err)
		}
		link, err := mid.LinkByName(port(i, s))
		if err != nil {
			return err
		}
		if err := mid.LinkSetMaster(link, bridge); err != nil {
			return fmt.Errorf("port of a bridge: %w", err)
		}
		if err := mid.LinkSetUp(link); err != nil {
			return fmt.Errorf("up: %w", err)
		}
		if err := r.tbf(mid, link, i, 1); err != nil {
			return err
		}
	}
	if err := r.address(i); err != nil {
		return err
	}
	return r.shape(i, 1)
}

// address gives the hosts their addresses on a rail.
func (r *Rig) address(i int) error {
	for s := range Side(r.hosts) {
		link, err := r.nl[s].LinkByName(Name(i))
		if err != nil {
			return err
		}
		ip := Addr(s, i).AsSlice()
		if err := r.nl[s].AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: net.CIDRMask(24,
			32)}}); err != nil {
			return fmt.Errorf("address: %w", err)
		}
		if err := r.nl[s].LinkSetUp(link); err != nil {
			return fmt.Errorf("up: %w", err)
		}
	}
	return nil
}

// shape gives the hosts' ends of a rail a share of its rate.
func (r *Rig) shape(i int, share float64) error {
	for s := range r.hosts {
		link, err := r.nl[s].LinkByName(Name(i))
		if err != nil {
			return err
		}
		if err := r.tbf(r.nl[s], link, i, share); err != nil {
			return err
		}
	}
	return nil
}

// tbf shapes what leaves over a device.
func (r *Rig) tbf(nl *netlink.Handle, link netlink.Link, i int, share float64) error {
	rate := max(uint64(float64(r.rates[i])*share/8), 1)
	burst := uint32(min(max(float64(rate)*burstTime.Seconds(), minBurst), maxBurst))
	q := &netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: link.Attrs().Index,
		Parent: netlink.HANDLE_ROOT, Handle: netlink.MakeHandle(1, 0)},
		Rate: rate, Limit: uint32(min(float64(rate)*queueTime.Seconds(), math.MaxUint32/2)) + burst,
		Buffer: netlink.Xmittime(rate, burst)}
	if err := nl.QdiscReplace(q); err != nil {
		return fmt.Errorf("tbf: %w", err)
	}
	return nil
}

// Rails is how many there are.
func (r *Rig) Rails() int { return len(r.rates) }

// Receivers is how many there are.
func (r *Rig) Receivers() int { return r.hosts - 1 }

// Buffer is what the shaper of a healthy rail holds.
func (r *Rig) Buffer(rail int) int {
	return int(r.rates[rail].Over(queueTime))
}

// Do runs f on a thread inside one namespace: sockets that f makes belong there for good. f must
// not leave its goroutine.
func (r *Rig) Do(s Side, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := r.within(s, f)
		if !errors.Is(err, errAstray) {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// errAstray is the error of a thread that could not leave a namespace. Such a thread stays locked,
// and so ends with its goroutine.
var errAstray = errors.New("netrig: leave namespace")

// within runs f on the caller's locked thread inside one namespace, and leaves the namespace.
func (r *Rig) within(s Side, f func() error) error {
	home, err := netns.Get()
	if err != nil {
		return fmt.Errorf("netrig: enter namespace: %w", err)
	}
	defer func() { _ = home.Close() }()
	if err := netns.Set(r.ns[s]); err != nil {
		return fmt.Errorf("netrig: enter namespace: %w", err)
	}
	err = f()
	if back := netns.Set(home); back != nil {
		return errors.Join(err, fmt.Errorf("%w: %w", errAstray, back))
	}
	return err
}

// Start starts a command inside one namespace. The command is killed when this process dies or the
// rig is closed.
func (r *Rig) Start(s Side, cmd *exec.Cmd) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	done := make(chan error, 1)
	r.starts <- func() { done <- r.within(s, cmd.Start) }
	return <-done
}

// starter runs what Start asks for, on one thread, until the rig is closed.
func (r *Rig) starter() {
	runtime.LockOSThread() // for good: what it started ends with the thread
	for start := range r.starts {
		start()
	}
}

// Listen listens inside one namespace.
func (r *Rig) Listen(ctx context.Context, s Side, addr string) (l net.Listener, err error) {
	err = r.Do(s, func() error {
		l, err = (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
		return err
	})
	return l, err
}

// Dial connects from inside one namespace; from is the local address, or the zero one.
func (r *Rig) Dial(ctx context.Context, s Side, from netip.Addr, to string) (c net.Conn,
	err error) {
	var d net.Dialer
	if from.IsValid() {
		d.LocalAddr = &net.TCPAddr{IP: from.AsSlice()}
	}
	err = r.Do(s, func() error {
		c, err = d.DialContext(ctx, "tcp", to)
		return err
	})
	return c, err
}

// Close ends what flaps and lets go of the namespaces.
func (r *Rig) Close() {
	r.mu.Lock()
	flaps := r.flaps
	r.flaps = make([]*flap, len(flaps))
	r.mu.Unlock()
	for _, f := range flaps {
		f.end()
	}
	close(r.starts)
	for s := range r.ns {
		if r.nl[s] != nil {
			r.nl[s].Close()
		}
		if r.ns[s].IsOpen() {
			_ = r.ns[s].Close()
		}
	}
}

// Permitted reports whether New can work here; the error reports why not, and the remedy.
func Permitted() error {
	r, err := New([]timeline.Rate{timeline.MinRate})
	if err != nil {
		return err
	}
	r.Close()
	return nil
}
