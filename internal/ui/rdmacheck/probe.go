package rdmacheck

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/internal/ui/doctor"
)

// Sizes of the tests.
const (
	bufferBytes  = 64 << 20 // of host memory at each end; as much must be lockable
	gpuBytes     = 4 << 20
	tinyBytes    = 64        // a message of one small packet
	bulkBytes    = 64 << 10  // a message of packets of every MTU
	streamBytes  = 256 << 10 // as the transport's writes
	probeWait    = maxWait
	arrivalWait  = 2 * time.Second // for what has not arrived when its sender gave up
	flushWait    = 2 * time.Second // the transport destroys a queue pair that is not flushed by then
	killedWait   = 20 * time.Second
	killedLook   = 5 * time.Millisecond
	inOrder      = 128 // messages in each direction
	baselineRuns = 512 // messages of ib_write_bw on each queue pair
	slow         = 0.7 // of the port's rate
)

// side is one end with the buffer of its rail.
type side struct {
	caller
	rail string
	what string // for messages: "r0a", or "the peer's r0b"
	id   int
	addr uint64
	key  uint32
	gid  int
	mtu  verbs.MTU
}

// link is queue pairs between two sides.
type link struct{ near, far []int }

// prober tests one pair of rails.
type prober struct {
	near, far *side
	opt       *Options
	out       *Pair
	seed      uint64 // of the last pattern
}

func (p *prober) add(state doctor.State, what, remedy, format string, args ...any) {
	p.out.Lines = append(p.out.Lines, doctor.Result{Name: what, State: state, Remedy: remedy,
		Detail: fmt.Sprintf(format, args...)})
}

func (p *prober) good(what, format string, args ...any) {
	p.add(doctor.OK, what, "", format, args...)
}

// fail adds a line for a failed test. Later tests are left out if it returns an error.
func (p *prober) fail(what, remedy, format string, args ...any) {
	p.add(doctor.Fail, what, remedy, format, args...)
}

const takeOut = "do not use gdr on this device: take it out of transports.order, and send this " +
	"report"

const testAgain = "run the test again; if it stays, send this report"

// run makes all tests, until one fails without which nothing else works.
func (p *prober) run(ctx context.Context) {
	for _, step := range []struct {
		what string
		run  func(context.Context) error
		must bool // without it nothing else works
	}{
		{"device", p.open, true},
		{"host memory", p.register, true},
		{"path", p.path, true},
		{"one queue pair", func(ctx context.Context) error { return p.immediates(ctx, 1) }, false},
		{"two queue pairs", func(ctx context.Context) error { return p.immediates(ctx, 2) }, false},
		{"eight queue pairs", func(ctx context.Context) error { return p.immediates(ctx, 8) }, false},
		{"killed queue pair", p.killed, false},
		{"revoke", p.revoke, false},
		{"end of keys", p.endKeys, false},
		{"rate", p.rate, false},
		{"GPU memory", p.gpu, false},
		{"losses", p.losses, false},
	} {
		if p.opt.only != nil && !step.must && !slices.Contains(p.opt.only, step.what) {
			continue
		}
		err := step.run(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil && !errors.Is(err, errReported) {
			p.fail(step.what, remedyOf(err), "%v", err)
		}
		if err != nil && (step.must || errors.Is(err, errPeerGone)) {
			return
		}
		if err != nil { // what it left is closed with the devices
			if err := errors.Join(p.open(ctx), p.registerAgain(ctx)); err != nil {
				p.fail("device", remedyOf(err), "after %s: %v", step.what, err)
				return
			}
		}
	}
}

// errReported: the line is written.
var errReported = errors.New("reported")

// remedyOf is the remedy for an error that no test expects.
func remedyOf(err error) string {
	text := err.Error()
	switch {
	case errors.Is(err, errPeerGone):
		return "see the output of 'kvspray doctor --rdma --serve' on the peer, and run both again"
	case strings.Contains(text, "locked memory"):
		return "ulimit -l unlimited, LimitMEMLOCK=infinity, or the capability IPC_LOCK of the pod"
	case strings.Contains(text, "GID"):
		return "give the rail's network interface an IP address, or pin a GID: " +
			"transports.gdr.rails: [DEVICE@INDEX]"
	case strings.Contains(text, "/dev/infiniband"):
		return "give the process, or its pod, /dev/infiniband/uverbs*"
	case strings.Contains(text, "room for"):
		return "stop other users of the device, or raise its limits in the firmware"
	}
	return testAgain
}

// on names the end of an error.
func (s *side) on(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", s.what, err)
}

func (p *prober) sides() []*side { return []*side{p.near, p.far} }

func (p *prober) open(ctx context.Context) error { return p.reopen(ctx, 0) }

func (p *prober) reopen(ctx context.Context, mtu verbs.MTU) error {
	for _, s := range p.sides() {
		a, err := s.call(ctx, &request{Op: opOpen, Rail: s.rail, MTU: mtu})
		if err != nil {
			return s.on(err)
		}
		s.gid = a.GID
	}
	return nil
}

func (p *prober) register(ctx context.Context) error {
	var took time.Duration
	demand := "pinned"
	for _, s := range p.sides() {
		a, err := s.call(ctx, &request{Op: opRegister, Bytes: bufferBytes})
		if err != nil {
			return s.on(err)
		}
		s.id, s.addr, s.key, took = a.ID, a.Addr, a.Key, max(took, a.Took)
		if a, err = s.call(ctx, &request{Op: opOnDemand}); err != nil {
			return s.on(err)
		} else if a.Yes {
			demand = "pinned; the device could also page on demand (ODP)"
		}
	}
	p.out.Figures.RegisterMs = ms(took)
	p.good("host memory", "%d MiB registered in %.1f ms, %s", bufferBytes>>20, ms(took), demand)
	return nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// join makes and connects queue pairs.
func (p *prober) join(ctx context.Context, n int) (*link, error) {
	l := &link{}
	for range n {
		var ends [2]*answer
		for i, s := range p.sides() {
			a, err := s.call(ctx, &request{Op: opQueue})
			if err == nil && a.Address == nil {
				err = errRequest
			}
			if err != nil {
				return nil, s.on(err)
			}
			ends[i], s.mtu = a, a.Address.MTU
		}
		l.near, l.far = append(l.near, ends[0].ID), append(l.far, ends[1].ID)
		for i, s := range p.sides() {
			if _, err := s.call(ctx, &request{Op: opConnect, Queues: []int{ends[i].ID},
				Address: ends[1-i].Address}); err != nil {
				return nil, s.on(err)
			}
		}
	}
	return l, nil
}

// part destroys queue pairs.
func (p *prober) part(ctx context.Context, l *link) error {
	_, err := p.near.call(ctx, &request{Op: opDestroy, Queues: l.near})
	_, ferr := p.far.call(ctx, &request{Op: opDestroy, Queues: l.far})
	return errors.Join(p.near.on(err), p.far.on(ferr))
}

// way is one direction of a link.
type way struct {
	from, to             *side
	fromQueues, toQueues []int
}

func (p *prober) way(l *link, back bool) way {
	if back {
		return way{p.far, p.near, l.far, l.near}
	}
	return way{p.near, p.far, l.near, l.far}
}

// sent is the result of messages in one direction.
type sent struct{ from, to *answer }

// arrived reports whether all have arrived, whatever their sender has got.
func (s *sent) arrived(count int) bool {
	return !slices.ContainsFunc(s.to.Queues, func(x state) bool { return x.Done < count })
}

func (s *sent) acknowledged(count int) bool {
	return !slices.ContainsFunc(s.from.Queues, func(x state) bool { return x.Done < count })
}

// flushed reports whether the receiving queue pairs were in the error state.
func (s *sent) flushed() bool {
	return slices.ContainsFunc(s.to.Queues, func(x state) bool { return x.Status != "" })
}

// status is the sender's.
func (s *sent) status() string {
	for _, x := range s.from.Queues {
		if x.Status != "" {
			return x.Status
		}
	}
	return "ok"
}

// send sends messages over queue pairs, and takes them in at the other end at the same time.
func (p *prober) send(ctx context.Context, w way, bytes uint64, count int) (*sent, error) {
	from, to := w.from, w.to
	p.seed++
	seed := p.seed
	n := bytes * uint64(count*len(w.fromQueues))
	if _, err := from.call(ctx, &request{Op: opFill, Buffer: from.id, Bytes: n,
		Seed: seed}); err != nil {
		return nil, from.on(err)
	}
	if _, err := to.call(ctx, &request{Op: opFill, Buffer: to.id, Bytes: n}); err != nil {
		return nil, to.on(err)
	}
	s := &sent{to: &answer{}}
	var errs [2]error
	var both sync.WaitGroup
	wrote := make(chan struct{})
	both.Go(func() {
		q := &request{Op: opExpect, Queues: w.toQueues, Buffer: to.id, Bytes: bytes, Count: count,
			Seed: seed, Wait: arrivalWait}
		for last := false; !last && errs[1] == nil; q.Again = true {
			select {
			case <-wrote:
				last = true
			default:
			}
			var a *answer
			if a, errs[1] = to.call(ctx, q); errs[1] == nil {
				s.to.Queues = a.Queues
				s.to.Wrong, s.to.Misplaced = s.to.Wrong+a.Wrong, s.to.Misplaced+a.Misplaced
				s.to.Early += a.Early
				last = last || s.arrived(count) || s.flushed()
			}
		}
	})
	s.from, errs[0] = from.call(ctx, &request{Op: opWrite, Queues: w.fromQueues, Buffer: from.id,
		Bytes: bytes, Count: count, To: to.addr, Key: to.key, Immediate: true, Wait: probeWait})
	close(wrote)
	both.Wait()
	return s, errors.Join(from.on(errs[0]), to.on(errs[1]))
}

// trial is send of one message over a new queue pair.
func (p *prober) trial(ctx context.Context, back bool, bytes uint64) (*sent, error) {
	l, err := p.join(ctx, 1)
	if err != nil {
		return nil, err
	}
	s, err := p.send(ctx, p.way(l, back), bytes, 1)
	return s, errors.Join(err, p.part(ctx, l))
}

// path tests both directions with small and with large packets.
func (p *prober) path(ctx context.Context) error {
	there, err := p.trial(ctx, false, tinyBytes)
	if err != nil {
		return err
	}
	if there.flushed() && !there.arrived(1) {
		p.deadQueue(p.far.what, there.status())
		return errReported
	}
	back, err := p.trial(ctx, true, tinyBytes)
	if err != nil {
		return err
	}
	if p.pathLost(there, back) {
		return errReported
	}
	for _, dir := range []bool{false, true} {
		s, err := p.trial(ctx, dir, bulkBytes)
		if err != nil {
			return err
		}
		if !s.acknowledged(1) {
			return p.findMTU(ctx, s)
		}
	}
	mtu := min(p.near.mtu, p.far.mtu)
	p.out.Figures.MTU = mtu.Bytes()
	switch {
	case p.near.mtu != p.far.mtu:
		p.add(doctor.Warn, "path", "set the same MTU on both interfaces and on every switch between "+
			"them: 4200 or more, for packets of 4096", "both directions, with packets of %d bytes: %s "+
			"has an RDMA MTU of %d, %s one of %d", mtu.Bytes(), p.near.what, p.near.mtu.Bytes(),
			p.far.what, p.far.mtu.Bytes())
	case mtu < verbs.MTU4096:
		p.add(doctor.Warn, "path", "set an MTU of 4200 or more on the interfaces and on every switch "+
			"between them, for packets of 4096", "both directions, with packets of %d bytes", mtu.Bytes())
	default:
		p.good("path", "both directions, with packets of %d bytes", mtu.Bytes())
	}
	return nil
}

const oneWayRemedy = "look on the way in that direction: firewall or ACL for UDP port 4791, the " +
	"route and source address of each rail (rp_filter, policy routing), VLAN, PFC that stops the " +
	"priority"

// pathLost reports which direction carries nothing; false: both do.
func (p *prober) pathLost(there, back *sent) bool {
	if there.acknowledged(1) && back.acknowledged(1) {
		if there.to.Wrong+back.to.Wrong > 0 {
			p.fail("path", takeOut, "an immediate arrived before the bytes of the write ahead of it")
			return true
		}
		return false
	}
	near, far := p.near.what, p.far.what
	switch lost := "no packet from %s reaches %s (%s); packets of the other direction arrive"; {
	case back.flushed() && !back.arrived(1):
		p.deadQueue(near, back.status())
	case !there.arrived(1) && back.arrived(1):
		p.fail("path", oneWayRemedy, lost, near, far, there.status())
	case there.arrived(1) && !back.arrived(1):
		p.fail("path", oneWayRemedy, lost, far, near, back.status())
	case there.arrived(1) && back.arrived(1):
		p.fail("path", "look for a link or a switch that loses packets (ethtool -S, 'losses' in "+
			"this report), and check PFC and ECN", "messages arrive, and acknowledgements are lost "+
			"(%s, %s)", there.status(), back.status())
	default:
		p.fail("path", "check that the two rails are in one network: addresses, VLAN, routes, switch "+
			"ports, firewalls for UDP port 4791", "no packet reaches the other end in either direction "+
			"(%s, %s)", there.status(), back.status())
	}
	return true
}

func (p *prober) deadQueue(end, status string) {
	p.fail("path", "read the kernel's log and the firmware's for errors of the device; reset it, or "+
		"update its firmware", "the queue pair of %s is in the error state, and nothing has stopped "+
		"it (the sender got: %s)", end, status)
}

// findMTU looks for the largest packets that the path carries, where those of the ends' MTU do not
// arrive.
func (p *prober) findMTU(ctx context.Context, first *sent) error {
	was := min(p.near.mtu, p.far.mtu)
	for mtu := was - 1; mtu >= 1; mtu-- {
		if err := p.reopen(ctx, mtu); err != nil {
			return err
		}
		if err := p.registerAgain(ctx); err != nil {
			return err
		}
		carried := true
		for _, dir := range []bool{false, true} {
			s, err := p.trial(ctx, dir, bulkBytes)
			if err != nil {
				return err
			}
			carried = carried && s.acknowledged(1)
		}
		if !carried {
			continue
		}
		p.out.Figures.MTU = mtu.Bytes()
		p.fail("path", fmt.Sprintf("raise the MTU of every switch on the way to 4200 or more, or set "+
			"transports.gdr.mtu: %d", mtu.Bytes()), "packets of %d bytes are lost on the way (%s), "+
			"those of %d arrive: a switch or an interface on the way has a smaller MTU than both ends",
			was.Bytes(), first.status(), mtu.Bytes())
		return errReported
	}
	p.fail("path", "look for a link or a switch that loses packets (ethtool -S, 'losses' in this "+
		"report), and check PFC and ECN", "one packet arrives, and a message of %d packets does not "+
		"(%s)", bulkBytes/was.Bytes(), first.status())
	return errReported
}

// registerAgain makes the buffers of devices that were opened again.
func (p *prober) registerAgain(ctx context.Context) error {
	for _, s := range p.sides() {
		a, err := s.call(ctx, &request{Op: opRegister, Bytes: bufferBytes})
		if err != nil {
			return s.on(err)
		}
		s.id, s.addr, s.key = a.ID, a.Addr, a.Key
	}
	return nil
}

// immediates sends messages in both directions over some queue pairs at once.
func (p *prober) immediates(ctx context.Context, n int) (err error) {
	what := map[int]string{1: "one queue pair", 2: "two queue pairs", 8: "eight queue pairs"}[n]
	l, err := p.join(ctx, n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.part(ctx, l)) }()
	count := inOrder / n
	wrong, misplaced, early := 0, 0, 0
	for _, back := range []bool{false, true} {
		s, err := p.send(ctx, p.way(l, back), bulkBytes, count)
		if err != nil {
			return err
		}
		if !s.acknowledged(count) || !s.arrived(count) {
			p.fail(what, "look for a path that loses packets (ethtool -S, 'losses' in this report), and "+
				"check PFC and ECN", "a queue pair ended during %d messages: %s", n*count, s.status())
			return errReported
		}
		wrong, misplaced, early = wrong+s.to.Wrong, misplaced+s.to.Misplaced, early+s.to.Early
	}
	if wrong+misplaced > 0 {
		p.fail(what, takeOut, "of %d immediates %d "+
			"came before their bytes, %d out of order", 2*n*count, wrong, misplaced)
		return errReported
	}
	if n > 1 {
		p.good(what, "%d writes with immediate each way, all bytes there at each immediate", n*count)
		return nil
	}
	p.out.Figures.Early = early
	seen := "bytes of a write were always seen in order"
	if early > 0 {
		seen = fmt.Sprintf("the end of %d writes was seen before their start (kvspray expects that)",
			early)
	}
	p.good(what, "%d writes with immediate each way, all bytes there at each immediate; %s", count,
		seen)
	return nil
}

// begin starts a stream over new queue pairs and waits until the far end sees it.
func (p *prober) begin(ctx context.Context, n int) (*link, uint64, error) {
	l, err := p.join(ctx, n)
	if err != nil {
		return nil, 0, err
	}
	p.seed++
	seed := p.seed
	if _, err := p.near.call(ctx, &request{Op: opFill, Buffer: p.near.id,
		Bytes: uint64(n) * streamBytes, Seed: seed}); err != nil {
		return nil, 0, p.near.on(err)
	}
	if _, err := p.near.call(ctx, &request{Op: opStream, Queues: l.near, Buffer: p.near.id, Count: 1,
		Bytes: streamBytes, To: p.far.addr, Key: p.far.key}); err != nil {
		return nil, 0, p.near.on(err)
	}
	for k := range n {
		if err := p.live(ctx, k, seed); err != nil {
			_, herr := p.near.call(ctx, &request{Op: opHalt, Wait: maxWait})
			return nil, 0, errors.Join(err, p.near.on(herr), p.part(ctx, l))
		}
	}
	return l, seed, nil
}

// live waits until the stream's queue pair overwrites a canary: later, a canary that stays proves
// something.
func (p *prober) live(ctx context.Context, k int, seed uint64) error {
	a, err := p.far.call(ctx, &request{Op: opLive, Buffer: p.far.id, Off: uint64(k) * streamBytes,
		Bytes: streamBytes, Seed: seed, Wait: probeWait})
	if err == nil && !a.Yes {
		err = fmt.Errorf("queue pair %d wrote nothing within %s", k, probeWait)
	}
	return p.far.on(err)
}

// end halts the stream and returns the states of its queue pairs.
func (p *prober) end(ctx context.Context, l *link) ([]state, error) {
	a, err := p.near.call(ctx, &request{Op: opHalt, Wait: maxWait})
	err = errors.Join(p.near.on(err), p.part(ctx, l))
	if err != nil {
		return nil, err
	}
	if len(a.Queues) != len(l.near) {
		return nil, p.near.on(errRequest)
	}
	return a.Queues, nil
}

// killed ends one of two queue pairs under traffic: its sender must notice, the other one must go
// on, and a new one must work.
func (p *prober) killed(ctx context.Context) error {
	const what = "killed queue pair"
	l, seed, err := p.begin(ctx, 2)
	if err != nil {
		return err
	}
	began := time.Now()
	if _, err := p.far.call(ctx, &request{Op: opDestroy, Queues: l.far[1:]}); err != nil {
		return p.far.on(err)
	}
	l.far = l.far[:1]
	status := ""
	tick := time.NewTicker(killedLook)
	defer tick.Stop()
	for ; status == "" && time.Since(began) < killedWait; <-tick.C {
		a, err := p.near.call(ctx, &request{Op: opProgress})
		if err == nil && len(a.Queues) != 2 {
			err = errRequest
		}
		if err != nil {
			return p.near.on(err)
		}
		status = a.Queues[1].Status
	}
	took := time.Since(began)
	live := p.live(ctx, 0, seed)
	all, err := p.end(ctx, l)
	if err != nil {
		return err
	}
	switch {
	case status == "":
		p.fail(what, "update the device's firmware; without this error kvspray gives up a path only "+
			"after 3 s", "its sender got no error within %s", killedWait)
		return errReported
	case live != nil || all[0].Status != "":
		p.fail(what, "look for queue pairs that depend on each other: bonds, firmware", "the other "+
			"queue pair ended with it: %s (%v)", all[0].Status, live)
		return errReported
	}
	s, err := p.trial(ctx, false, bulkBytes)
	if err != nil {
		return err
	}
	if !s.acknowledged(1) {
		p.fail(what, testAgain, "a new queue pair does not work after it: %s", s.status())
		return errReported
	}
	p.out.Figures.NoticedMs = ms(took)
	p.good(what, "its sender got %q after %.0f ms, the other one went on, a new one works", status,
		ms(took))
	return nil
}

// revoke stops queue pairs under traffic, as a fence does, and looks for late writes.
func (p *prober) revoke(ctx context.Context) error {
	const n = 2
	var slowest time.Duration
	for round := range p.opt.Rounds {
		l, _, err := p.begin(ctx, n)
		if err != nil {
			return err
		}
		a, err := p.far.call(ctx, &request{Op: opRevoke, Queues: l.far, Buffer: p.far.id,
			Bytes: n * streamBytes, Wait: flushWait})
		if errors.Is(err, errNoFlush) {
			_, eerr := p.end(ctx, l)
			p.fail("revoke", "update the device's firmware and driver: kvspray must destroy each queue "+
				"pair that it stops", "%v", err)
			return errors.Join(errReported, eerr)
		}
		if err != nil {
			return p.far.on(err)
		}
		slowest = max(slowest, a.Took)
		if err := p.intact(ctx, l, "revoke", round); err != nil {
			return err
		}
	}
	p.out.Figures.FlushMs = ms(slowest)
	p.good("revoke", "%d rounds under traffic, stopped within %.1f ms, no late write", p.opt.Rounds,
		ms(slowest))
	return nil
}

// endKeys ends the key of the memory under traffic, as the last resort of a fence does.
func (p *prober) endKeys(ctx context.Context) error {
	const n, what = 2, "end of keys"
	var slowest time.Duration
	for round := range p.opt.Rounds {
		l, _, err := p.begin(ctx, n)
		if err != nil {
			return err
		}
		a, err := p.far.call(ctx, &request{Op: opDeregister, Buffer: p.far.id})
		if err == nil {
			slowest = max(slowest, a.Took)
			_, err = p.far.call(ctx, &request{Op: opFill, Buffer: p.far.id, Bytes: n * streamBytes})
		}
		if err != nil {
			return p.far.on(err)
		}
		if err := p.intact(ctx, l, what, round); err != nil {
			return err
		}
		// The devices are opened again, which frees the buffers.
		if err := p.reopen(ctx, 0); err != nil {
			return err
		}
		if err := p.registerAgain(ctx); err != nil {
			return err
		}
	}
	p.good(what, "%d rounds under traffic, ended within %.1f ms, no late write", p.opt.Rounds,
		ms(slowest))
	return nil
}

// intact waits until the sender has given up, and looks at the canaries that the far end has
// written.
func (p *prober) intact(ctx context.Context, l *link, what string, round int) error {
	all, err := p.end(ctx, l)
	if err != nil {
		return err
	}
	a, err := p.far.call(ctx, &request{Op: opCheck, Buffer: p.far.id,
		Bytes: uint64(len(all)) * streamBytes})
	if err != nil {
		return p.far.on(err)
	}
	if a.Differ > 0 {
		p.out.Figures.LateWrites++
		p.fail(what, takeOut, "round %d: a write came after the %s, at byte %d: "+
			"a reused block would be corrupted", round+1, what, a.Differ-1)
		return errReported
	}
	return nil
}

// rate measures streams of 1, 2 and 8 queue pairs, beside ib_write_bw.
func (p *prober) rate(ctx context.Context) error {
	var texts []string
	best, missing := 0.0, error(nil)
	for _, n := range []int{1, 2, 8} {
		l, _, err := p.begin(ctx, n)
		if err != nil {
			return err
		}
		r := Rate{Queues: n}
		if r.MiBps, err = p.measure(ctx); err != nil {
			return err
		}
		if _, err := p.end(ctx, l); err != nil {
			return err
		}
		best = max(best, r.MiBps)
		text := fmt.Sprintf("%.0f MiB/s with %d", r.MiBps, n)
		if missing == nil {
			if r.Baseline, err = p.baseline(ctx, n); errors.Is(err, errNoBaseline) {
				missing = errNoBaseline
			} else if err != nil {
				missing = err
			} else {
				text += fmt.Sprintf(" (%s %.0f)", baselineTool, r.Baseline)
			}
		}
		p.out.Figures.Rates = append(p.out.Figures.Rates, r)
		texts = append(texts, text)
	}
	text := strings.Join(texts, ", ") + " queue pairs"
	if missing != nil {
		text += "; " + missing.Error()
	}
	if wire := p.out.Gbps * 1e9 / 8 / (1 << 20); wire > 0 && best < slow*wire {
		p.add(doctor.Warn, "rate", "compare with "+baselineTool+"; look at the lines of MTU, PCIe "+
			"(width, relaxed ordering), NUMA node and retransmissions", "%s: at best %.0f%% of the "+
			"port's %g Gbit/s", text, 100*best/wire, p.out.Gbps)
		return nil
	}
	p.good("rate", "%s", text)
	return nil
}

// measure is the rate of the stream, in MiB/s.
func (p *prober) measure(ctx context.Context) (float64, error) {
	before, err := p.progress(ctx)
	if err != nil {
		return 0, err
	}
	tick := time.NewTicker(p.opt.Span)
	defer tick.Stop()
	for began := time.Now(); ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
		after, err := p.progress(ctx)
		took := time.Since(began)
		switch {
		case err != nil:
			return 0, err
		case after > before: // a device that is slow, or has no processor, takes several spans
			return float64(after-before) * streamBytes / (1 << 20) / took.Seconds(), nil
		case took > maxWait:
			return 0, p.near.on(fmt.Errorf("no message of a stream completed within %s", maxWait))
		}
	}
}

// progress counts the messages of the stream.
func (p *prober) progress(ctx context.Context) (done int, err error) {
	a, err := p.near.call(ctx, &request{Op: opProgress})
	if err != nil {
		return 0, p.near.on(err)
	}
	for _, x := range a.Queues {
		done += x.Done
	}
	return done, nil
}

// baseline runs ib_write_bw between the two ends; MiB/s.
func (p *prober) baseline(ctx context.Context, n int) (float64, error) {
	q := request{Op: opBaseline, Lanes: n, Count: max(baselineRuns/n, 1)}
	if _, err := p.far.call(ctx, &q); err != nil {
		return 0, p.far.on(err)
	}
	q.Host, q.Wait = p.opt.host, baselineTime
	a, err := p.near.call(ctx, &q)
	_, eerr := p.far.call(ctx, &request{Op: opBaseEnd})
	if err := errors.Join(p.near.on(err), p.far.on(eerr)); err != nil {
		return 0, err
	}
	return a.MiBps, nil
}

// gpu writes into GPU memory of the far end, which the GPU reads back, and from there into host
// memory of the near end.
func (p *prober) gpu(ctx context.Context) (err error) {
	const what, count = "GPU memory", 16
	a, err := p.far.call(ctx, &request{Op: opRegister, Bytes: gpuBytes, GPU: true})
	switch {
	case errors.Is(err, errNoGPU):
		p.add(doctor.Skip, what, "", "%s: %v", p.far.what, errNoGPU)
		return nil
	case errors.Is(err, errGPURefused):
		p.add(doctor.Warn, what, "load nvidia-peermem, or use NVIDIA's open kernel modules (515 or "+
			"later) with Linux 5.12 and rdma-core 34 for dma-buf; until then blocks in GPU memory go "+
			"over tcp", "%v", p.far.on(err))
		return nil
	case err != nil:
		return p.far.on(err)
	}
	host := *p.far
	gpu := host
	gpu.id, gpu.addr, gpu.key = a.ID, a.Addr, a.Key
	p.out.Figures.GPU = a.How
	l, err := p.join(ctx, 1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.part(ctx, l)) }()
	into, err := p.send(ctx, way{p.near, &gpu, l.near, l.far}, gpuBytes/count, count)
	if err != nil {
		return err
	}
	from, err := p.send(ctx, way{&gpu, p.near, l.far, l.near}, gpuBytes/count, count)
	if err != nil {
		return err
	}
	switch {
	case !into.acknowledged(count) || !from.acknowledged(count):
		p.fail(what, "look for PCIe errors in the kernel's log; check ACS, and ATS under a hypervisor",
			"the NIC wrote (%s) and read (%s) memory of the GPU", into.status(), from.status())
		return errReported
	case into.to.Wrong+from.to.Wrong > 0:
		p.fail(what, "take gdr out of transports.order for engines on this GPU, and send this report",
			"of %d writes into the GPU, %d were not there when the GPU read; of %d from it, %d were wrong",
			count, into.to.Wrong, count, from.to.Wrong)
		return errReported
	}
	p.good(what, "registered by %s in %.1f ms; %d MiB written by the NIC and read back by the GPU, "+
		"and as many read by the NIC", a.How, ms(a.Took), gpuBytes>>20)
	return nil
}

// losses reports retransmissions and events of the devices during the test.
func (p *prober) losses(ctx context.Context) error {
	var resent uint64
	var events []string
	for _, s := range p.sides() {
		a, err := s.call(ctx, &request{Op: opCounters})
		if err != nil {
			return s.on(err)
		}
		resent += a.Resent
		for _, e := range a.Events {
			if e != verbs.QueuePairFatal.String() { // of the queue pairs that the test has ended
				events = append(events, s.what+": "+e)
			}
		}
	}
	switch {
	case len(events) > 0:
		p.add(doctor.Warn, "losses", "check cable, switch port and the kernel's log",
			"events of the devices during the test: %s", strings.Join(events, ", "))
	default:
		p.good("losses", "no event of the devices; their counters have %d retransmissions since the "+
			"driver started, some of them of the killed queue pairs", resent)
	}
	return nil
}
