package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/origin"
)

const (
	rolePrefill = "prefill"
	roleDecode  = "decode"
)

// backend is one engine in one role.
type backend struct {
	role    string
	number  int // of the engine, in the policy
	url     origin.URL
	address string     // host:port of url
	sidecar origin.URL // for asking for its state; zero: none
	twin    *backend   // the same engine in the other role; nil: none
	found   bool       // by discovery

	releases chan release // that wait to be sent; nil: of a decode engine
	reporter *reporter    // of its KV events; nil: none
	mute     mute         // while it answers no questions for tokens

	storeTurn int // of its health check, that ask for its store

	lastByte atomic.Int64 // of any of its answers, in ns since the epoch

	mu       sync.Mutex // guards all below
	health   health
	identity identity
	waits    bool // until discovery lets it have requests
	load     int  // requests in flight
	leases   int  // open at its sidecar, as that has published; -1: unknown
	holds    int  // requests for which it may have to release a cache
	models   models
	guards   map[*guard]struct{} // of its requests in flight
}

// alive notes bytes of an answer.
func (b *backend) alive(now time.Time) { b.lastByte.Store(now.UnixNano()) }

// quiet reports whether the engine is silent, and whether that has lasted until it is down.
func (b *backend) quiet() (quiet, dead bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := b.health.silence(time.Now(), b.last())
	return d >= b.health.silentAfter, b.health.dead(d)
}

// last is when the engine sent the last byte of an answer.
func (b *backend) last() time.Time { return time.Unix(0, b.lastByte.Load()) }

func (b *backend) conditionLocked(now time.Time) condition {
	return b.health.condition(now, b.last())
}

func (b *backend) condition() condition {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.conditionLocked(time.Now())
}

// candidate is what the choice for a request for a model depends on. It includes the load of the
// engine's other role.
func (b *backend) candidate(now time.Time, model string) candidate {
	b.mu.Lock()
	c := candidate{b.models.serve(model), b.conditionLocked(now), b.identity.leaving, b.load, b.leases}
	if c.condition < failing && b.load > 0 && b.health.trial() {
		c.condition = failing
	}
	if b.waits {
		c.condition = down
	}
	b.mu.Unlock()
	if t := b.twin; t != nil {
		t.mu.Lock()
		c.load += t.load
		t.mu.Unlock()
	}
	return c
}

func (b *backend) takes() bool { return b.candidate(time.Now(), "").takes() }

func (b *backend) endpoint() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.identity.endpoint
}

// begins notes the first bytes of a good answer.
func (b *backend) begins() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.health.begins()
}

// outcome notes what a request has shown about the engine.
func (b *backend) outcome(err error, s sign, after time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.health.request(time.Now(), s, after, err)
}

// failed notes an error of a request.
func (b *backend) failed(err error) {
	var after time.Duration
	if status := (*statusError)(nil); errors.As(err, &status) {
		after = status.after
	}
	b.outcome(err, signOfError(err), after)
}

// reports notes the endpoint of its sidecar that an engine has named. The next check compares it: a
// comparison looks up names, for which no request waits.
func (b *backend) reports(endpoint string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.identity.engineEndpoint = endpoint
}

func (b *backend) done() {
	b.mu.Lock()
	b.load--
	b.mu.Unlock()
}

// pool holds the back ends of one role.
type pool struct {
	mu   sync.Mutex // guards all below
	all  []*backend // replaced as a whole
	next int        // start of the search, so that equal back ends alternate
}

func (p *pool) set(all []*backend) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = all
}

func (p *pool) list() []*backend {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all
}

// take returns the best back end for a model that is not in skip, and raises its load; nil if there
// is none. The caller releases it with done.
func (p *pool) take(skip map[*backend]bool, model string, accepts func(candidate) bool) *backend {
	p.mu.Lock()
	defer p.mu.Unlock()
	var best *backend
	var offer candidate
	now := time.Now()
	for i := range p.all {
		b := p.all[(p.next+i)%len(p.all)]
		if skip[b] {
			continue
		}
		if c := b.candidate(now, model); accepts(c) && (best == nil || c.better(offer)) {
			best, offer = b, c
		}
	}
	if best == nil {
		return nil
	}
	p.next++
	best.mu.Lock()
	best.load++
	best.mu.Unlock()
	return best
}

// takeThis raises the load of one back end if it takes requests; otherwise it returns nil.
func (p *pool) takeThis(b *backend) *backend {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !slices.Contains(p.all, b) || !b.takes() {
		return nil
	}
	b.mu.Lock()
	b.load++
	b.mu.Unlock()
	return b
}

// numbered returns the back end of an engine of the policy; nil: it was left out.
func (p *pool) numbered(n int) *backend {
	all := p.list()
	if i := slices.IndexFunc(all, func(b *backend) bool { return b.number == n }); i >= 0 {
		return all[i]
	}
	return nil
}

// none gives the reason why no back end takes requests.
func (p *pool) none(role string) string {
	takes, leaving, unfit, now := 0, 0, 0, time.Now()
	for _, b := range p.list() {
		switch c := b.candidate(now, ""); {
		case c.takes():
			takes++
		case c.condition == down:
		case c.leaving:
			leaving++
		case c.condition < silent:
			unfit++
		}
	}
	switch {
	case takes > 0: // since the choice
		return fmt.Sprintf("no %s engine took requests (%d do now)", role, takes)
	case leaving > 0:
		return fmt.Sprintf("no %s engine takes requests (%d leave)", role, leaving)
	case unfit > 0:
		return fmt.Sprintf("no %s engine is fit (%d are busy or fail)", role, unfit)
	}
	return fmt.Sprintf("no %s engine is up", role)
}

// any reports whether a back end for a model that is not in skip is accepted.
func (p *pool) any(skip map[*backend]bool, model string, accepts func(candidate) bool) bool {
	now := time.Now()
	return slices.ContainsFunc(p.list(), func(b *backend) bool {
		return !skip[b] && accepts(b.candidate(now, model))
	})
}

// numbers is how many numbers of the policy's engines are in use, with gaps.
func numbers(all []*backend) (n int) {
	for _, b := range all {
		n = max(n, b.number+1)
	}
	return n
}

// backends are those of both roles.
func (p *Proxy) backends() []*backend { return slices.Concat(p.prefill.list(), p.decode.list()) }

// watch checks one back end until ctx ends. The first outcome counts only after the first answer of
// its sidecar, or its timeout, so that a router that starts sends nothing to an engine that leaves.
func (p *Proxy) watch(ctx context.Context, b *backend, asked <-chan struct{}) {
	before, first := fit, true
	p.every(ctx, func() {
		err := p.check(ctx, b, asked)
		if ctx.Err() != nil {
			return
		}
		now := b.condition()
		p.met.up.WithLabelValues(b.role, b.url.String()).Set(map[bool]float64{true: 1}[now < silent])
		if now != before || first {
			if now < silent {
				p.log.Info("back end is up", "role", b.role, "url", b.url, "peer", b.endpoint(),
					"condition", now.String())
			} else {
				p.log.Warn("back end is down", "role", b.role, "url", b.url, "condition", now.String(),
					"err", err)
			}
		}
		if now == down && (before != down || first) {
			p.lost(b) // also if a failed request took it out before
		}
		before, first = now, false
		if err == nil && b.found {
			p.learnModels(ctx, b) // first: it waits for them
		}
		if err == nil {
			p.compare(ctx, b)
			p.learn(ctx, b)
			p.learnStore(ctx, b)
			p.noteUnusable(b)
			p.learnModels(ctx, b) // last: a slow answer holds up nothing but the next check
		}
	})
}

// every calls a function at once and then after each Check, until ctx ends.
func (p *Proxy) every(ctx context.Context, f func()) {
	tick := time.NewTicker(p.times.Check)
	defer tick.Stop()
	for {
		f()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// check asks for an engine's health. An answer that comes late is a sign of life; without one the
// check ends after the time of a silent engine.
func (p *Proxy) check(ctx context.Context, b *backend, asked <-chan struct{}) error {
	b.mu.Lock()
	b.health.asks(time.Now())
	b.mu.Unlock()
	asking, cancel := context.WithTimeout(ctx, p.times.Silent)
	var probe sync.WaitGroup
	probe.Go(func() { p.probe(asking, b) })
	err := p.get(asking, b.url, "/health", nil, maxSmallAnswer)
	cancel()
	probe.Wait()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-asked:
	}
	s := signAlive
	if err != nil {
		if s = signOfError(err); s == signAlive {
			s = signFailed // such as 404: another server listens there
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	b.health.answers(now, s, err)
	if b.conditionLocked(now) == down && b.identity.ended() {
		b.health.fault = ""
	}
	return err
}

// probe connects to an engine that has not answered a check within the time of one. A check on an
// open connection shows the loss of a host late.
func (p *Proxy) probe(ctx context.Context, b *backend) {
	if !pause(ctx, p.times.Check) {
		return
	}
	c, err := p.dial(ctx, "tcp", b.address)
	if err == nil {
		_ = c.Close() // nothing was sent
	} else if s := signOfError(err); s == signRefused && ctx.Err() == nil {
		b.outcome(err, s, 0)
	}
}

// dial connects to an engine or a sidecar. If an engine does not accept in time, and sends nothing
// meanwhile, it is silent, and another one gets the request that needs the connection.
func (p *Proxy) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var late *time.Timer
	var once sync.Once
	var ended atomic.Bool
	d := net.Dialer{Timeout: dialTimeout, ControlContext: func(context.Context, string, string,
		syscall.RawConn) error {
		once.Do(func() { // once the name is resolved: the resolver shows nothing about the engine
			begun := time.Now()
			late = time.AfterFunc(acceptTime, func() {
				if !ended.Load() { // this router may have had no CPU
					p.unaccepted(ctx, addr, begun)
				}
			})
		})
		return nil
	}}
	c, err := d.DialContext(ctx, network, addr)
	ended.Store(true)
	once.Do(func() {})
	if late != nil && !late.Stop() && err == nil {
		p.at(addr, func(b *backend) { b.health.unreached = time.Time{} })
	}
	return c, err
}

func (p *Proxy) unaccepted(ctx context.Context, addr string, begun time.Time) {
	lost := false
	p.at(addr, func(b *backend) {
		b.health.unaccepted(begun, b.last())
		lost = lost || b.health.lost(b.last())
	})
	if g, ok := ctx.Value(guardKey{}).(*guard); ok && lost && !g.reached.Load() && g.other() {
		g.replace(errUnaccepted)
	}
}

// at calls a function, under the lock, for each role of the engine at an address.
func (p *Proxy) at(addr string, f func(*backend)) {
	for _, b := range p.backends() {
		if b.address == addr {
			b.mu.Lock()
			f(b)
			b.mu.Unlock()
		}
	}
}

// watchSidecar asks the sidecar of one back end until ctx ends, also while the engine is down.
// Neither waits for the other. It closes asked after the first time.
func (p *Proxy) watchSidecar(ctx context.Context, b *backend, asked chan<- struct{}) {
	once := sync.OnceFunc(func() { close(asked) })
	p.every(ctx, func() {
		p.askSidecar(ctx, b)
		once()
	})
}

// askSidecar asks for a node's state. A sidecar that does not answer does not take the engine out:
// requests then go prefill first, and the engine itself names the endpoint.
func (p *Proxy) askSidecar(ctx context.Context, b *backend) {
	asking, cancel := context.WithTimeout(ctx, sidecarTimeout)
	defer cancel()
	var node nodeapi.Node
	err := p.get(asking, b.sidecar, "/v1/node", &node, maxSmallAnswer)
	if ctx.Err() != nil {
		return // the router ends
	}
	among := func(urls []string, unknown bool) bool { // unknown: if a name cannot be resolved here
		return slices.ContainsFunc(urls, func(u string) bool {
			return u == b.url.String() || sameEndpoint(asking, hostPortOf(u), b.address, unknown)
		})
	}
	failed, fault := among(node.Health.FailedURLs, false), faultOf(&node.Health)
	if known := node.Health.AffectedURLs; len(known) > 0 && !among(known, true) {
		fault = "" // another engine's
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if err == nil || b.identity.stale(now) {
		b.health.fault = fault
	}
	up := b.conditionLocked(now) < silent
	var changed bool
	if err != nil {
		changed = b.identity.unanswered(now)
	} else if changed = b.identity.answered(now, node.Leaving || failed); node.Endpoint == "" {
		err = errors.New("its answer contains no endpoint")
	}
	switch {
	case !up || !changed:
	case b.identity.leaving:
		p.log.Info("back end leaves", "role", b.role, "url", b.url, "fault", b.health.fault)
	default:
		p.log.Info("back end takes requests again", "role", b.role, "url", b.url)
	}
	learned, was := b.identity.asked(node.Endpoint, err, up && b.health.checked, p.placing != nil)
	switch {
	case b.identity.sidecarErr != "" && was == "":
		p.log.Warn("the sidecar of an engine cannot be asked", "role", b.role, "url", b.url,
			"sidecar", b.sidecar, "err", err,
			"remedy", "set sidecar to the http.listen of this engine's running one")
	case err == nil && was != "":
		p.log.Info("the sidecar of an engine answers", "role", b.role, "url", b.url,
			"sidecar", b.sidecar)
	}
	if learned {
		p.log.Info("endpoint of the prefill's sidecar", "url", b.url, "peer", node.Endpoint)
	}
}

// faultOf is why requests should go to other engines than those of a sidecar; empty: they need not,
// or the sidecar is of a release without that.
func faultOf(h *nodeapi.Health) string {
	if h.State != nodeapi.HealthDegraded && h.State != nodeapi.HealthFailed {
		return ""
	}
	var all []string
	for i := range h.Faults {
		all = append(all, h.Faults[i].Device+": "+h.Faults[i].Text)
	}
	return "its devices are " + h.State + ": " + strings.Join(all, "; ")
}

// compare checks whether the endpoint that D receives is the endpoint of the prefill's side. It may
// be another name of the same.
func (p *Proxy) compare(ctx context.Context, b *backend) {
	b.mu.Lock()
	c, due := b.identity.toCompare()
	b.mu.Unlock()
	if !due {
		return
	}
	asking, cancel := context.WithTimeout(ctx, sidecarTimeout)
	defer cancel()
	same := sameEndpoint(asking, c.used, c.reported, true)
	sidecarSame := c.sidecar == "" || sameEndpoint(asking, c.sidecar, c.reported, true)
	if asking.Err() != nil {
		return // the next check tries again
	}
	b.mu.Lock()
	x := b.identity.compared(c, same, sidecarSame)
	b.mu.Unlock()
	if x != nil {
		p.log.Warn("the prefill's sidecar may be another one", "url", b.url, "key", x.key, "value",
			x.value, "peer", c.used, "sidecar", c.reported, "remedy", x.remedy)
	}
}

// sameEndpoint reports whether two host:port have the same port and a common address. unknown is
// the result if a name cannot be resolved here: others may still resolve it.
func sameEndpoint(ctx context.Context, x, y string, unknown bool) bool {
	if x == y {
		return true
	}
	xh, xp, xerr := net.SplitHostPort(x)
	yh, yp, yerr := net.SplitHostPort(y)
	if xerr != nil || yerr != nil || xp != yp {
		return false
	}
	xa, xerr := net.DefaultResolver.LookupHost(ctx, xh)
	ya, yerr := net.DefaultResolver.LookupHost(ctx, yh)
	if xerr != nil || yerr != nil {
		return unknown
	}
	return slices.ContainsFunc(xa, func(a string) bool { return slices.Contains(ya, a) })
}

const maxSmallAnswer = 64 << 10 // bytes of a health or node answer

// ask sends a request of the router's own, which is a GET without a body, and reads at most some
// bytes of its answer. A status that is not 200 is an error.
func (p *Proxy) ask(ctx context.Context, server origin.URL, path string, h http.Header, body []byte,
	limit int64) ([]byte, error) {
	method := http.MethodGet
	if body != nil {
		method = http.MethodPost
	}
	req, err := server.Request(ctx, method, path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	server.SetHeader(req, h)
	resp, err := p.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }() // read to its end or aborted
	text, err := io.ReadAll(io.LimitReader(resp.Body, limit))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s%s: %w", method, server, path, newStatusError(resp, text))
	}
	return text, err
}

// get reads a JSON answer of at most some bytes; into nil: only its status.
func (p *Proxy) get(ctx context.Context, server origin.URL, path string, into any,
	limit int64) error {
	body, err := p.ask(ctx, server, path, http.Header{}, nil, limit)
	if err != nil || into == nil {
		return err
	}
	return json.Unmarshal(body, into)
}
