package gdr

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/sys/verbs"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

const (
	maxKeys  = 4096             // registrations of a rail
	idleKeys = 30 * time.Second // a registration unused for this long is released
	maxPart  = 16 << 30         // bytes of one registration: larger regions are registered in parts
	partUnit = 2 << 20          // parts begin at huge pages

	refusedAgain = 30 * time.Second // between two log lines about failed registrations
)

// keys are the registrations of one device.
type keys struct {
	d       verbs.Device
	domains *domains
	part    uint64
	log     *slog.Logger

	mu sync.Mutex
	// guarded by mu
	m      map[keyName]*key
	stayed []*key // retired, and not released by the device
	closed bool
	logged time.Time // time of the last log line about a failure
}

// keyName identifies a key: a region that a peer may write has a key of its own, beside the key for
// local reads.
type keyName struct {
	region *mem.Region
	peer   transfer.Boot
	remote bool
}

// key is a region's registration in one peer's domain. The first user makes it.
type key struct {
	k      *keys
	name   keyName
	ready  chan struct{}
	err    error // set before ready is closed, like domain, parts and held
	domain *domain
	parts  []verbs.Memory
	held   bool         // the region
	gpu    bool         // GPU memory: this process cannot load from it
	flush  func() error // makes NIC writes visible to the GPU; nil: not needed

	// guarded by k.mu
	users int
	last  time.Time

	ending   sync.Mutex // held while parts are released
	released bool       // guarded by ending
}

func newKeys(s *domains, log *slog.Logger) *keys {
	d := s.d
	k := &keys{d: d, domains: s, log: log, part: min(d.Limits().MaxRegistration, maxPart),
		m: map[keyName]*key{}}
	if k.part > partUnit {
		k.part -= k.part % partUnit
	}
	return k
}

// errLater: the registration does not exist yet.
var errLater = errors.New("gdr: not registered yet")

// get returns a registration; put releases it. The first call takes long; without wait it returns
// errLater.
func (k *keys) get(name keyName, wait bool) (*key, error) {
	k.mu.Lock()
	e := k.m[name]
	if !wait && (e == nil || !e.made()) {
		k.mu.Unlock()
		return nil, errLater
	}
	switch {
	case k.closed:
		k.mu.Unlock()
		return nil, fmt.Errorf("gdr: register with %s: %w", k.d.Name(), net.ErrClosed)
	case e != nil:
		e.users++
		k.mu.Unlock()
		<-e.ready
		if e.err != nil {
			e.put()
			return nil, e.err
		}
		return e, nil
	case len(k.m)+len(k.stayed) >= maxKeys:
		k.mu.Unlock()
		return nil, fmt.Errorf("gdr: %d registrations on %s: the rail has too many regions and peers: %w",
			maxKeys, k.d.Name(), verbs.ErrFull)
	}
	e = &key{k: k, name: name, ready: make(chan struct{}), users: 1}
	k.m[name] = e
	k.mu.Unlock()
	e.register()
	close(e.ready)
	if e.err != nil {
		k.logFailure(e.err)
		// An unsupported registration is remembered until it was idle for long; other failures may
		// pass.
		if !errors.Is(e.err, transport.ErrNotSupported) || e.release(false) != nil {
			_ = e.invalidate() // of the parts that exist; a failure is tried again
		}
		e.put()
		return nil, e.err
	}
	return e, nil
}

// logFailure logs a failed registration, which the next slice tries again.
func (k *keys) logFailure(err error) {
	now := time.Now()
	k.mu.Lock()
	due := !k.closed && (k.logged.IsZero() || now.Sub(k.logged) > refusedAgain)
	if due {
		k.logged = now
	}
	k.mu.Unlock()
	instead := "transfers use other rails and transports"
	if errors.Is(err, errUnreachable) {
		instead = "its bytes go through host memory"
	}
	if due {
		k.log.Warn("memory cannot be registered; "+instead, "transport", Name, "rail", k.d.Name(), "err",
			err)
	}
}

// EndKeys invalidates the keys under which peers may write on a rail, like a device that loses its
// registrations, and returns their number. Slices in flight fail and are retried under new keys.
// For fault tests.
func (b *Backend) EndKeys(rail string) (n int, err error) {
	for _, r := range b.rails {
		dev, _ := r.current()
		if r.cfg.Name != rail || dev == nil {
			continue
		}
		dev.keys.mu.Lock()
		var ends []*key
		for name, e := range dev.keys.m {
			if name.remote && e.made() {
				ends = append(ends, e)
			}
		}
		dev.keys.mu.Unlock()
		for _, e := range ends {
			n++
			err = errors.Join(err, e.invalidate())
		}
	}
	return n, err
}

// begin starts a registration that will be needed, unless it exists or is being made.
func (k *keys) begin(wg *sync.WaitGroup, name keyName) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.m[name] != nil || k.closed {
		return
	}
	wg.Go(func() {
		if e, err := k.get(name, true); err == nil { // an error comes again with the first slice
			e.put()
		}
	})
}

func (e *key) made() bool {
	select {
	case <-e.ready:
		return true
	default:
		return false
	}
}

func (e *key) register() {
	r := e.name.region
	if !r.Acquire() {
		e.err = fmt.Errorf("gdr: region %s: %w", r.ID(), mem.ErrFreed)
		return
	}
	e.held = true
	if e.domain, e.err = e.k.domains.enter(e.name.peer); e.err != nil {
		return
	}
	remote := e.name.remote
	var err error
	if p, ok := r.Bytes(); ok {
		err = e.inParts(func(at, n uint64) (verbs.Memory,
			error) {
			return e.domain.Register(p[at:at+n:at+n], remote)
		})
	} else if g, ok := r.Device().(GPU); ok {
		if err = e.registerGPU(g, remote); err != nil {
			err = fmt.Errorf("%w: %w", errUnreachable, err)
		}
	} else {
		err = fmt.Errorf("%w: %s memory: %w", errUnreachable, r.Kind(), transport.ErrNotSupported)
	}
	if err != nil {
		e.err = fmt.Errorf("gdr: region %s: %w", r.ID(), err)
	}
}

// inParts registers the region piece by piece.
func (e *key) inParts(one func(at, n uint64) (verbs.Memory, error)) error {
	for at, size := uint64(0), e.name.region.Size(); at < size; {
		n := min(size-at, e.k.part)
		m, err := one(at, n)
		if err != nil {
			return err
		}
		e.parts = append(e.parts, m)
		at += n
	}
	return nil
}

// release invalidates the keys. lost: the device is gone with everything it had pinned, whatever it
// returns.
func (e *key) release(lost bool) (err error) {
	e.ending.Lock()
	defer e.ending.Unlock()
	if e.released {
		return nil
	}
	for _, m := range e.parts {
		err = errors.Join(err, m.Close())
	}
	if err == nil || lost {
		e.released = true
		if e.domain != nil {
			e.k.domains.leave(e.domain)
		}
		if e.held {
			e.name.region.Release()
		}
	}
	return err
}

// runs appends memory under the key: pieces of n bytes, the first at off. A user of an invalidated
// key continues with it: the device refuses it.
func (e *key) runs(dst []run, off, n uint64, s *mem.Strides, remote bool) []run {
	if s.Count == 1 {
		return e.spans(dst, off, n, remote)
	}
	if at, m := off%e.k.part, e.parts[off/e.k.part]; n <= maxSpan && s.Inside(at, n, m.Len()) {
		return append(dst, run{spanOf(m, at, n, remote), *s})
	}
	var o mem.Offsets
	o.Start(off, s)
	for more := true; more; more = o.Next(s) {
		dst = e.spans(dst, o.Off, n, remote)
	}
	return dst
}

// spans appends [off, off+n), which may lie in several parts. Each element of dst that is one span
// may grow.
func (e *key) spans(dst []run, off, n uint64, remote bool) []run {
	for n > 0 {
		m := e.parts[off/e.k.part]
		at := off % e.k.part
		s := spanOf(m, at, min(n, m.Len()-at, maxSpan), remote)
		off, n = off+uint64(s.len), n-uint64(s.len)
		if k := len(dst) - 1; k >= 0 && dst[k].Count == 1 && dst[k].key == s.key &&
			dst[k].addr+uint64(dst[k].len) == s.addr && uint64(dst[k].len)+uint64(s.len) <= maxSpan {
			dst[k].len += s.len
			continue
		}
		dst = append(dst, run{})
		r := &dst[len(dst)-1]
		r.span, r.Count, r.Rows = s, 1, 1
	}
	return dst
}

func spanOf(m verbs.Memory, at, n uint64, remote bool) span {
	s := span{addr: m.Addr() + at, len: uint32(n), key: m.LocalKey()}
	if remote {
		s.key = m.RemoteKey()
	}
	return s
}

// put releases a use.
func (e *key) put() {
	e.k.mu.Lock()
	defer e.k.mu.Unlock()
	e.users--
	e.last = time.Now()
}

// current: new users get this key.
func (e *key) current() bool {
	e.k.mu.Lock()
	defer e.k.mu.Unlock()
	return e.k.m[e.name] == e
}

// retireLocked prevents new users: they get a new generation.
func (e *key) retireLocked() {
	if e.k.m[e.name] == e {
		delete(e.k.m, e.name)
	}
}

// invalidate ends a registration that may still be in use: the users' writes fail. If the device
// does not obey, sweep tries again.
func (e *key) invalidate() error {
	k := e.k
	k.mu.Lock()
	e.retireLocked()
	k.mu.Unlock()
	err := e.release(false)
	k.mu.Lock()
	defer k.mu.Unlock()
	at := slices.Index(k.stayed, e)
	switch {
	case err != nil && at < 0:
		k.stayed = append(k.stayed, e)
	case err == nil && at >= 0:
		k.stayed = slices.Delete(k.stayed, at, at+1)
	}
	return err
}

// sweep releases idle registrations. A registration without users is not held, and a retired one
// cannot be found.
func (k *keys) sweep(now time.Time) (err error) {
	k.mu.Lock()
	idle := slices.Clone(k.stayed)
	for _, e := range k.m {
		if e.users == 0 && now.Sub(e.last) > idleKeys {
			idle = append(idle, e)
		}
	}
	for _, e := range idle {
		e.retireLocked()
	}
	k.mu.Unlock()
	for _, e := range idle {
		err = errors.Join(err, e.invalidate())
	}
	return err
}

// close releases everything. Nothing is in use any more.
func (k *keys) close(lost bool) (err error) {
	k.mu.Lock()
	k.closed = true
	all := append(slices.Collect(maps.Values(k.m)), k.stayed...)
	clear(k.m)
	k.stayed = nil
	k.mu.Unlock()
	for _, e := range all {
		<-e.ready
		err = errors.Join(err, e.release(lost))
	}
	return err
}
