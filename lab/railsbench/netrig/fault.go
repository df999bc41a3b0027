package netrig

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/lab/timeline"
)

// lossUnit is the resolution of Loss.
const lossUnit = 10000

// Apply makes a fault, now.
func (r *Rig) Apply(f timeline.Fault) error {
	for i := range r.rates {
		if !f.Meets(i) {
			continue
		}
		if err := r.turn(i, f); err != nil {
			return fmt.Errorf("netrig: fault %s: %w", f, err)
		}
	}
	return nil
}

// turn moves a rail to its new condition, by what differs.
func (r *Rig) turn(i int, f timeline.Fault) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.cond[i]
	now := was.After(f)
	r.cond[i] = now
	var errs []error
	if was.Flap != now.Flap {
		r.flaps[i].end()
		r.flaps[i] = nil
		if now.Flap > 0 {
			r.flaps[i] = r.flap(i, now.Flap)
		}
	}
	if was.Down != now.Down || was.Flap > 0 && now.Flap == 0 {
		errs = append(errs, r.carrier(i, !now.Down))
	}
	if was.Drop != now.Drop || was.AckDrop != now.AckDrop {
		errs = append(errs, r.filterLocked(i))
	}
	if was.Share != now.Share {
		errs = append(errs, r.shape(i, now.Share))
	}
	if was.Blackholed != now.Blackholed {
		errs = append(errs, r.blackhole(i, now.Blackholed))
	}
	return errors.Join(errs...)
}

func (r *Rig) carrier(i int, up bool) error {
	link, err := r.nl[Sender].LinkByName(Name(i))
	if err != nil {
		return err
	}
	if up {
		return r.nl[Sender].LinkSetUp(link)
	}
	return r.nl[Sender].LinkSetDown(link)
}

func (r *Rig) blackhole(i int, on bool) error {
	ip := net.IP(Addr(Receiver, i).AsSlice())
	route := &netlink.Route{Dst: &net.IPNet{IP: ip, Mask: net.CIDRMask(32, 32)},
		Type: unix.RTN_BLACKHOLE}
	if on {
		return r.nl[Sender].RouteReplace(route)
	}
	return r.nl[Sender].RouteDel(route)
}

// Loss makes both ends of a rail lose this share of what arrives. What the kernel carries in one
// buffer is lost in one piece.
func (r *Rig) Loss(rail int, share float64) error {
	if share < 0 || share > 1 {
		return fmt.Errorf("netrig: loss of %g: must be 0 to 1", share)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.loss[rail] = share
	return r.filterLocked(rail)
}

// Refuse makes both ends of every rail, all at once, answer each TCP segment with a reset, as a
// host does whose listeners and connections are gone: what is connected ends at its next segment,
// and what would connect is refused. Faults, healing among them, do not touch that.
func (r *Rig) Refuse(on bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuse = on
	all := make([]int, len(r.rates))
	for i := range all {
		all[i] = i
	}
	return r.filterLocked(all...)
}

// resets answers TCP with a reset, except resets: they have to come through.
func resets() []expr.Any {
	const flags, rst = 13, 0x04 // offset of the flags in a TCP header, and one of them
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: flags, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{rst}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{0}},
		&expr.Reject{Type: unix.NFT_REJECT_TCP_RST},
	}
}

// filterLocked replaces the filters of these rails' two ends, those of one end at once, by what
// their conditions require.
func (r *Rig) filterLocked(rails ...int) error {
	for s := range r.hosts {
		c, err := nftables.New(nftables.WithNetNSFd(int(r.ns[s])))
		if err != nil {
			return fmt.Errorf("nftables: %w", err)
		}
		for _, i := range rails {
			r.filterEndLocked(c, Side(s), i)
		}
		if err := c.Flush(); err != nil {
			return fmt.Errorf("nftables: %w", err)
		}
	}
	return nil
}

// filterEndLocked is what a flush of c does to one end of a rail.
func (r *Rig) filterEndLocked(c *nftables.Conn, s Side, i int) {
	table := &nftables.Table{Family: nftables.TableFamilyNetdev, Name: Name(i)}
	c.AddTable(table)
	c.DelTable(table) // with all that is in it; the line above makes sure that there is one
	silent := r.cond[i].Drop || r.cond[i].AckDrop && s == Sender
	if !silent && !r.refuse && r.loss[i] == 0 {
		return
	}
	table = c.AddTable(table)
	chain := c.AddChain(&nftables.Chain{Name: "in", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum:  nftables.ChainHookIngress,
		Priority: nftables.ChainPriorityFilter, Device: Name(i)})
	rule := func(e ...expr.Any) { c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: e}) }
	swallow := []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}
	if silent {
		rule(swallow...)
		return
	}
	if r.refuse {
		rule(resets()...)
	}
	if r.loss[i] > 0 {
		rule(append([]expr.Any{&expr.Numgen{Register: 1, Modulus: lossUnit, Type: unix.NFT_NG_RANDOM},
			// The generator gives host order; less-than compares bytes.
			&expr.Byteorder{SourceRegister: 1, DestRegister: 1, Op: expr.ByteorderHton, Len: 4, Size: 4},
			&expr.Cmp{Op: expr.CmpOpLt, Register: 1, Data: binaryutil.BigEndian.PutUint32(uint32(r.loss[i] *
				lossUnit))}}, swallow...)...)
	}
}

// flap is a rail that goes down and up.
type flap struct {
	stop chan struct{}
	done chan struct{}
}

// flap takes the carrier away for half of each period.
func (r *Rig) flap(i int, period time.Duration) *flap {
	f := &flap{stop: make(chan struct{}), done: make(chan struct{})}
	_ = r.carrier(i, false) // the goroutine does it again
	go func() {
		defer close(f.done)
		t := time.NewTicker(period / 2)
		defer t.Stop()
		for up := true; ; up = !up {
			select {
			case <-f.stop:
				return
			case <-t.C:
				_ = r.carrier(i, up) // the namespace is going away, or the next turn does it
			}
		}
	}()
	return f
}

func (f *flap) end() {
	if f != nil {
		close(f.stop)
		<-f.done
	}
}
