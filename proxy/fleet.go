package proxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/origin"
	"github.com/kvspray/kvspray/internal/redact"
	"github.com/kvspray/kvspray/proxy/internal/feed"
)

// member is one engine in its roles.
type member struct {
	prefill, decode Engine   // zero: not in that role
	pre, dec        *backend // of the roles; nil: not in that one
}

func (m *member) roles() []*backend {
	return slices.DeleteFunc([]*backend{m.pre, m.dec}, func(b *backend) bool { return b == nil })
}

// idle reports whether no request needs the engine.
func (m *member) idle() bool {
	return !slices.ContainsFunc(m.roles(), func(b *backend) bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.load+b.holds > 0
	})
}

// SetEngines replaces the configured engines; those found by Config.Fleet stay. An engine in both
// lists is one engine. Unchanged engines keep their state. An engine that is left out gets no new
// requests and finishes those in flight. After an error the engines are those from before.
// Goroutines may call it at the same time.
func (p *Proxy) SetEngines(prefill, decode []Engine) error {
	if p.discovery != nil {
		return p.discovery.list(prefill, decode)
	}
	return p.setEngines(prefill, decode)
}

func (p *Proxy) setEngines(prefill, decode []Engine) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	all, err := p.join(prefill, decode)
	if err != nil {
		return err
	}
	var fresh []*member
	for i, m := range all {
		if at := slices.IndexFunc(p.members, func(x *member) bool {
			return x.prefill == m.prefill && x.decode == m.decode
		}); at >= 0 {
			all[i] = p.members[at]
		} else {
			fresh = append(fresh, m)
		}
	}
	if err := p.number(fresh); err != nil {
		return err
	}
	for _, m := range fresh {
		p.inherit(m)
	}
	var pre, dec []*backend
	for _, m := range all {
		if m.pre != nil {
			pre = append(pre, m.pre)
		}
		if m.dec != nil {
			dec = append(dec, m.dec)
		}
	}
	p.members = all
	p.prefill.set(pre)
	p.decode.set(dec)
	select {
	case p.changed <- struct{}{}:
	default: // Watch has not read the previous value
	}
	return nil
}

// inherit copies the state of an engine that has changed, for instance its role, to the new back
// ends: of two roles the worse condition.
func (p *Proxy) inherit(m *member) {
	for _, old := range p.members {
		x := slices.MaxFunc(old.roles(), func(a, b *backend) int {
			return cmp.Compare(a.condition(), b.condition())
		})
		for _, b := range m.roles() {
			if b.url.String() != x.url.String() || b.found != x.found {
				continue
			}
			x.mu.Lock()
			b.health, b.models, b.waits = x.health, x.models, x.waits
			if b.sidecar.String() == x.sidecar.String() {
				b.identity.inherit(&x.identity)
			} else {
				b.health.fault = "" // the other sidecar's
			}
			x.mu.Unlock()
			b.lastByte.Store(x.lastByte.Load())
		}
	}
}

// join makes members of two lists of engines.
func (p *Proxy) join(prefill, decode []Engine) ([]*member, error) {
	var all []*member
	by := map[string]*member{}
	for _, role := range []string{rolePrefill, roleDecode} {
		list := prefill
		if role == roleDecode {
			list = decode
		}
		for _, e := range list {
			b, err := p.newBackend(role, e)
			if err != nil {
				return nil, err
			}
			m := by[b.url.String()]
			if m == nil {
				m = &member{}
				by[b.url.String()], all = m, append(all, m)
			}
			was, at := &m.pre, &m.prefill
			if role == roleDecode {
				was, at = &m.dec, &m.decode
			}
			if *was != nil {
				return nil, fmt.Errorf("proxy: %s engine %s: named twice; name it once", role, b.url)
			}
			*was, *at = b, e
		}
	}
	for _, m := range all {
		if m.pre != nil && m.dec != nil {
			m.pre.twin, m.dec.twin = m.dec, m.pre
		}
	}
	return all, nil
}

// number adds new engines to the policy.
func (p *Proxy) number(fresh []*member) error {
	if p.placing == nil {
		return nil
	}
	var prefills []bool
	for _, m := range fresh {
		prefills = append(prefills, m.pre != nil)
	}
	numbers, err := p.placing.Add(prefills...)
	if err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	for i, m := range fresh {
		for _, b := range m.roles() {
			b.number = numbers[i]
		}
		for j, e := range []Engine{m.prefill, m.decode} {
			if e.Events == "" {
				continue
			}
			b, holder := []*backend{m.pre, m.dec}[j], p.placing.Holder(numbers[i])
			b.reporter = &reporter{holder: holder, feed: feed.New(feed.Config{Engine: b.url.String(),
				Endpoint: e.Events, Replay: e.Replay, Sink: holder, Log: p.log})}
			break // an engine in both lists has one feed
		}
	}
	return nil
}

// newBackend reads the addresses of an engine.
func (p *Proxy) newBackend(role string, e Engine) (*backend, error) {
	b := &backend{role: role, found: e.found, waits: e.found, leases: -1,
		health:   health{slowAfter: p.times.Slow, silentAfter: p.times.Silent, firstRest: p.times.Check},
		identity: identity{role: role}}
	var err error
	if b.url, err = origin.Parse(e.URL); err != nil {
		return nil, fmt.Errorf("proxy: %s engine: url %q: %w", role, redact.URL(e.URL), err)
	}
	b.address = hostPortOf(b.url.String())
	for _, x := range []struct {
		key, value, form string
		check            func(string) error
	}{
		{"sidecar", e.Sidecar, "its http.listen as http://host:port", func(s string) (err error) {
			b.sidecar, err = origin.Parse(s)
			b.identity.sidecar = b.sidecar.String()
			return err
		}},
		{"peer", e.Peer, "host:port, the sidecar's peer.listen", hostPort},
		{"events", e.Events, "for instance tcp://engine:5557", endpoint},
		{"replay", e.Replay, "for instance tcp://engine:5558", endpoint},
	} {
		if x.value == "" {
			continue
		}
		if err := x.check(x.value); err != nil {
			return nil, fmt.Errorf("proxy: %s engine %s: %s %q: %w; write %s", role, b.url, x.key,
				redact.URL(x.value), err, x.form)
		}
	}
	switch {
	case e.Replay != "" && e.Events == "":
		return nil, fmt.Errorf("proxy: %s engine %s: replay %q without events; set both", role, b.url,
			redact.URL(e.Replay))
	case e.Events != "" && p.placing == nil:
		return nil, fmt.Errorf("proxy: events are for a policy, and policy is %s, which uses none; set "+
			"it for instance to auto", DefaultPolicy)
	case role == roleDecode:
		return b, nil
	case p.mode == Concurrent && e.Peer == "" && e.Sidecar == "":
		return nil, fmt.Errorf("proxy: prefill engine %s: concurrent dispatch needs the endpoint of "+
			"its sidecar; set peer to host:port or sidecar to a URL, or mode to %s", b.url, PrefillFirst)
	}
	b.releases = make(chan release, releaseQueue)
	b.identity.configured, b.identity.endpoint = e.Peer != "", e.Peer
	return b, nil
}

// hostPort checks an address for dialing.
func hostPort(addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil { // it has the address, perhaps with a password
		return errors.New("no host:port")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return errors.New("the port is not a number of 1 to 65535")
	}
	if host == "" {
		return errors.New("the host is missing")
	}
	return nil
}

// Watch checks the health of all back ends, follows their KV events, and sends releases, until ctx
// ends.
func (p *Proxy) Watch(ctx context.Context) {
	p.spans.Start()
	defer func() { _ = p.spans.Close() }() // it returns no error
	defer p.client.CloseIdleConnections()
	var wg sync.WaitGroup
	defer wg.Wait()
	if p.discovery != nil {
		wg.Go(func() { p.discovery.run(ctx) })
	}
	running := map[*member]context.CancelFunc{}
	tick := time.NewTicker(p.times.Check)
	defer tick.Stop()
	for {
		p.mu.Lock()
		members := p.members
		p.mu.Unlock()
		for _, m := range members {
			if running[m] == nil {
				watching, stop := context.WithCancel(ctx)
				running[m] = stop
				wg.Go(func() {
					if p.run(watching, m); ctx.Err() == nil {
						p.forget(m)
					}
				})
			}
		}
		for m, stop := range running {
			// The end of a request needs the checks and the releases of its engines.
			if !slices.Contains(members, m) && m.idle() {
				stop()
				delete(running, m)
			}
		}
		select {
		case <-ctx.Done():
			for _, stop := range running {
				stop()
			}
			return
		case <-p.changed:
		case now := <-tick.C:
			for m := range running {
				for _, b := range m.roles() {
					b.mu.Lock()
					b.health.passes(now, p.times.Check) // the router's own time
					b.mu.Unlock()
					b.checkGuards()
				}
			}
		}
	}
}

// run watches one engine until ctx ends.
func (p *Proxy) run(ctx context.Context, m *member) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, b := range m.roles() {
		asked := make(chan struct{})
		shown := asked
		if b.sidecar.IsZero() || b.found {
			close(asked) // discovery has this mark already
			shown = make(chan struct{})
		}
		if !b.sidecar.IsZero() {
			wg.Go(func() { p.watchSidecar(ctx, b, shown) })
		}
		wg.Go(func() { p.watch(ctx, b, asked) })
		if b.releases != nil {
			wg.Go(func() { p.sendReleases(ctx, b) })
		}
		if b.reporter != nil {
			wg.Go(func() { b.reporter.feed.Run(ctx) })
		}
	}
}

// forget drops what the router has of an engine that was left out.
func (p *Proxy) forget(m *member) {
	for _, b := range m.roles() {
		if !slices.ContainsFunc(p.backends(), func(x *backend) bool {
			return x.role == b.role && x.url.String() == b.url.String()
		}) {
			p.met.up.DeleteLabelValues(b.role, b.url.String())
		}
	}
	if p.placing != nil {
		p.placing.Remove(m.roles()[0].number)
	}
}
